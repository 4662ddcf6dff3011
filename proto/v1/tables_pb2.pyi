from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Transform(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFORM_UNSPECIFIED: _ClassVar[Transform]
    TRANSFORM_RAW: _ClassVar[Transform]
    TRANSFORM_DELTA: _ClassVar[Transform]
    TRANSFORM_CONSTANT: _ClassVar[Transform]

class OffsetCoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OFFSET_CODING_UNSPECIFIED: _ClassVar[OffsetCoding]
    OFFSET_CODING_PLAIN: _ClassVar[OffsetCoding]
    OFFSET_CODING_BUMP: _ClassVar[OffsetCoding]
TRANSFORM_UNSPECIFIED: Transform
TRANSFORM_RAW: Transform
TRANSFORM_DELTA: Transform
TRANSFORM_CONSTANT: Transform
OFFSET_CODING_UNSPECIFIED: OffsetCoding
OFFSET_CODING_PLAIN: OffsetCoding
OFFSET_CODING_BUMP: OffsetCoding

class Column(_message.Message):
    __slots__ = ("transform", "width", "base")
    TRANSFORM_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    transform: Transform
    width: int
    base: int
    def __init__(self, transform: _Optional[_Union[Transform, str]] = ..., width: _Optional[int] = ..., base: _Optional[int] = ...) -> None: ...

class TensorAxes(_message.Message):
    __slots__ = ("tensor", "axes")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    AXES_FIELD_NUMBER: _ClassVar[int]
    tensor: int
    axes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tensor: _Optional[int] = ..., axes: _Optional[_Iterable[str]] = ...) -> None: ...

class TensorDict(_message.Message):
    __slots__ = ("n_tensors", "names_bytes", "columns", "dim_rows", "frame", "names_frame", "axes")
    N_TENSORS_FIELD_NUMBER: _ClassVar[int]
    NAMES_BYTES_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    DIM_ROWS_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    NAMES_FRAME_FIELD_NUMBER: _ClassVar[int]
    AXES_FIELD_NUMBER: _ClassVar[int]
    n_tensors: int
    names_bytes: int
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    dim_rows: _containers.RepeatedScalarFieldContainer[int]
    frame: bytes
    names_frame: bytes
    axes: _containers.RepeatedCompositeFieldContainer[TensorAxes]
    def __init__(self, n_tensors: _Optional[int] = ..., names_bytes: _Optional[int] = ..., columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., dim_rows: _Optional[_Iterable[int]] = ..., frame: _Optional[bytes] = ..., names_frame: _Optional[bytes] = ..., axes: _Optional[_Iterable[_Union[TensorAxes, _Mapping]]] = ...) -> None: ...

class GeometryDict(_message.Message):
    __slots__ = ("n_geometries", "columns", "dim_rows", "frame")
    N_GEOMETRIES_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    DIM_ROWS_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    n_geometries: int
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    dim_rows: _containers.RepeatedScalarFieldContainer[int]
    frame: bytes
    def __init__(self, n_geometries: _Optional[int] = ..., columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., dim_rows: _Optional[_Iterable[int]] = ..., frame: _Optional[bytes] = ...) -> None: ...

class ShardPart(_message.Message):
    __slots__ = ("tensors_digest", "geometries_digest", "n_rows", "n_regions", "columns", "offset_coding", "offset_unit", "frame", "layout", "claim")
    TENSORS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GEOMETRIES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    N_ROWS_FIELD_NUMBER: _ClassVar[int]
    N_REGIONS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_CODING_FIELD_NUMBER: _ClassVar[int]
    OFFSET_UNIT_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    tensors_digest: bytes
    geometries_digest: bytes
    n_rows: int
    n_regions: int
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    offset_coding: OffsetCoding
    offset_unit: int
    frame: bytes
    layout: str
    claim: str
    def __init__(self, tensors_digest: _Optional[bytes] = ..., geometries_digest: _Optional[bytes] = ..., n_rows: _Optional[int] = ..., n_regions: _Optional[int] = ..., columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., offset_coding: _Optional[_Union[OffsetCoding, str]] = ..., offset_unit: _Optional[int] = ..., frame: _Optional[bytes] = ..., layout: _Optional[str] = ..., claim: _Optional[str] = ...) -> None: ...

class NameSet(_message.Message):
    __slots__ = ("n_names", "names_bytes", "frame")
    N_NAMES_FIELD_NUMBER: _ClassVar[int]
    NAMES_BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    n_names: int
    names_bytes: int
    frame: bytes
    def __init__(self, n_names: _Optional[int] = ..., names_bytes: _Optional[int] = ..., frame: _Optional[bytes] = ...) -> None: ...

class CutTable(_message.Message):
    __slots__ = ("tensors", "tensors_digest", "n_axes", "n_coordinates", "columns", "frame")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    N_AXES_FIELD_NUMBER: _ClassVar[int]
    N_COORDINATES_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    tensors: TensorDict
    tensors_digest: bytes
    n_axes: int
    n_coordinates: int
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    frame: bytes
    def __init__(self, tensors: _Optional[_Union[TensorDict, _Mapping]] = ..., tensors_digest: _Optional[bytes] = ..., n_axes: _Optional[int] = ..., n_coordinates: _Optional[int] = ..., columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., frame: _Optional[bytes] = ...) -> None: ...
