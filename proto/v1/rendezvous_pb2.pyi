from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_KIND_UNSPECIFIED: _ClassVar[ErrorKind]
    ERROR_KIND_INVALID_REQUEST: _ClassVar[ErrorKind]
    ERROR_KIND_WORKER_LOST: _ClassVar[ErrorKind]
    ERROR_KIND_VERSION: _ClassVar[ErrorKind]
    ERROR_KIND_EQUALITY: _ClassVar[ErrorKind]
    ERROR_KIND_STALE: _ClassVar[ErrorKind]
    ERROR_KIND_LEASE: _ClassVar[ErrorKind]
    ERROR_KIND_TRANSACTION: _ClassVar[ErrorKind]
    ERROR_KIND_TIMEOUT: _ClassVar[ErrorKind]
    ERROR_KIND_UNAVAILABLE: _ClassVar[ErrorKind]
    ERROR_KIND_AUTHENTICATION: _ClassVar[ErrorKind]
    ERROR_KIND_ABORTED: _ClassVar[ErrorKind]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_TRAINER: _ClassVar[Role]
    ROLE_RECEIVER: _ClassVar[Role]

class ContentKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTENT_KIND_UNSPECIFIED: _ClassVar[ContentKind]
    CONTENT_KIND_TENSORS: _ClassVar[ContentKind]
    CONTENT_KIND_GEOMETRIES: _ClassVar[ContentKind]
    CONTENT_KIND_PART: _ClassVar[ContentKind]

class Memory(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMORY_UNSPECIFIED: _ClassVar[Memory]
    MEMORY_DRAM: _ClassVar[Memory]
    MEMORY_VRAM: _ClassVar[Memory]

class Decision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECISION_UNSPECIFIED: _ClassVar[Decision]
    DECISION_PENDING: _ClassVar[Decision]
    DECISION_COMMIT: _ClassVar[Decision]
    DECISION_ABORT: _ClassVar[Decision]
    DECISION_SERVE: _ClassVar[Decision]
    DECISION_QUARANTINE: _ClassVar[Decision]
    DECISION_UNKNOWN: _ClassVar[Decision]
ERROR_KIND_UNSPECIFIED: ErrorKind
ERROR_KIND_INVALID_REQUEST: ErrorKind
ERROR_KIND_WORKER_LOST: ErrorKind
ERROR_KIND_VERSION: ErrorKind
ERROR_KIND_EQUALITY: ErrorKind
ERROR_KIND_STALE: ErrorKind
ERROR_KIND_LEASE: ErrorKind
ERROR_KIND_TRANSACTION: ErrorKind
ERROR_KIND_TIMEOUT: ErrorKind
ERROR_KIND_UNAVAILABLE: ErrorKind
ERROR_KIND_AUTHENTICATION: ErrorKind
ERROR_KIND_ABORTED: ErrorKind
ROLE_UNSPECIFIED: Role
ROLE_TRAINER: Role
ROLE_RECEIVER: Role
CONTENT_KIND_UNSPECIFIED: ContentKind
CONTENT_KIND_TENSORS: ContentKind
CONTENT_KIND_GEOMETRIES: ContentKind
CONTENT_KIND_PART: ContentKind
MEMORY_UNSPECIFIED: Memory
MEMORY_DRAM: Memory
MEMORY_VRAM: Memory
DECISION_UNSPECIFIED: Decision
DECISION_PENDING: Decision
DECISION_COMMIT: Decision
DECISION_ABORT: Decision
DECISION_SERVE: Decision
DECISION_QUARANTINE: Decision
DECISION_UNKNOWN: Decision

class Error(_message.Message):
    __slots__ = ("kind", "message", "field", "holders", "progress", "waited_ms")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    kind: ErrorKind
    message: str
    field: str
    holders: _containers.RepeatedScalarFieldContainer[str]
    progress: Progress
    waited_ms: int
    def __init__(self, kind: _Optional[_Union[ErrorKind, str]] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., holders: _Optional[_Iterable[str]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., waited_ms: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("worker_id", "role", "model", "host", "name", "endpoints", "ttl_ms")
    class EndpointsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    worker_id: bytes
    role: Role
    model: str
    host: str
    name: str
    endpoints: _containers.ScalarMap[str, bytes]
    ttl_ms: int
    def __init__(self, worker_id: _Optional[bytes] = ..., role: _Optional[_Union[Role, str]] = ..., model: _Optional[str] = ..., host: _Optional[str] = ..., name: _Optional[str] = ..., endpoints: _Optional[_Mapping[str, bytes]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class RetryHint(_message.Message):
    __slots__ = ("attempts", "backoff_ms", "factor", "max_backoff_ms", "deadline_ms")
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    BACKOFF_MS_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    MAX_BACKOFF_MS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    attempts: int
    backoff_ms: int
    factor: float
    max_backoff_ms: int
    deadline_ms: int
    def __init__(self, attempts: _Optional[int] = ..., backoff_ms: _Optional[int] = ..., factor: _Optional[float] = ..., max_backoff_ms: _Optional[int] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("retry_hint",)
    RETRY_HINT_FIELD_NUMBER: _ClassVar[int]
    retry_hint: RetryHint
    def __init__(self, retry_hint: _Optional[_Union[RetryHint, _Mapping]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: bytes
    def __init__(self, worker_id: _Optional[bytes] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnregisterRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: bytes
    def __init__(self, worker_id: _Optional[bytes] = ...) -> None: ...

class UnregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("kind", "digest", "total_bytes", "data")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    kind: ContentKind
    digest: bytes
    total_bytes: int
    data: bytes
    def __init__(self, kind: _Optional[_Union[ContentKind, str]] = ..., digest: _Optional[bytes] = ..., total_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class TableHeader(_message.Message):
    __slots__ = ("part_digest", "tensors_digest", "geometries_digest")
    PART_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENSORS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GEOMETRIES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    part_digest: bytes
    tensors_digest: bytes
    geometries_digest: bytes
    def __init__(self, part_digest: _Optional[bytes] = ..., tensors_digest: _Optional[bytes] = ..., geometries_digest: _Optional[bytes] = ...) -> None: ...

class PutTableRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: TableHeader
    chunk: Chunk
    def __init__(self, header: _Optional[_Union[TableHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class PutTableResponse(_message.Message):
    __slots__ = ("missing",)
    MISSING_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, missing: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetTablesRequest(_message.Message):
    __slots__ = ("parts", "have")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedScalarFieldContainer[bytes]
    have: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, parts: _Optional[_Iterable[bytes]] = ..., have: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetTablesResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class PutNamesRequest(_message.Message):
    __slots__ = ("digest", "total_bytes", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    total_bytes: int
    data: bytes
    def __init__(self, digest: _Optional[bytes] = ..., total_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutNamesResponse(_message.Message):
    __slots__ = ("missing",)
    MISSING_FIELD_NUMBER: _ClassVar[int]
    missing: bool
    def __init__(self, missing: _Optional[bool] = ...) -> None: ...

class OpenEpochRequest(_message.Message):
    __slots__ = ("model", "run_id")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    model: str
    run_id: str
    def __init__(self, model: _Optional[str] = ..., run_id: _Optional[str] = ...) -> None: ...

class OpenEpochResponse(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class OpenVersionRequest(_message.Message):
    __slots__ = ("model", "epoch", "step", "slots", "layout_epoch")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    model: str
    epoch: int
    step: int
    slots: _containers.RepeatedScalarFieldContainer[str]
    layout_epoch: int
    def __init__(self, model: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., slots: _Optional[_Iterable[str]] = ..., layout_epoch: _Optional[int] = ...) -> None: ...

class OpenVersionResponse(_message.Message):
    __slots__ = ("uid",)
    UID_FIELD_NUMBER: _ClassVar[int]
    uid: bytes
    def __init__(self, uid: _Optional[bytes] = ...) -> None: ...

class SlotStatic(_message.Message):
    __slots__ = ("slot", "worker_id", "host", "endpoints", "table_digest", "memory", "device", "region_bytes", "header_region", "digest_region", "empty")
    class EndpointsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    SLOT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    TABLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEADER_REGION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_REGION_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    slot: str
    worker_id: bytes
    host: str
    endpoints: _containers.ScalarMap[str, bytes]
    table_digest: bytes
    memory: Memory
    device: int
    region_bytes: bytes
    header_region: int
    digest_region: int
    empty: bool
    def __init__(self, slot: _Optional[str] = ..., worker_id: _Optional[bytes] = ..., host: _Optional[str] = ..., endpoints: _Optional[_Mapping[str, bytes]] = ..., table_digest: _Optional[bytes] = ..., memory: _Optional[_Union[Memory, str]] = ..., device: _Optional[int] = ..., region_bytes: _Optional[bytes] = ..., header_region: _Optional[int] = ..., digest_region: _Optional[int] = ..., empty: _Optional[bool] = ...) -> None: ...

class PublishSlotRequest(_message.Message):
    __slots__ = ("uid", "slot", "region_bases", "digest_root", "roots")
    class RootsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    UID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REGION_BASES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_ROOT_FIELD_NUMBER: _ClassVar[int]
    ROOTS_FIELD_NUMBER: _ClassVar[int]
    uid: bytes
    slot: SlotStatic
    region_bases: bytes
    digest_root: bytes
    roots: _containers.ScalarMap[str, bytes]
    def __init__(self, uid: _Optional[bytes] = ..., slot: _Optional[_Union[SlotStatic, _Mapping]] = ..., region_bases: _Optional[bytes] = ..., digest_root: _Optional[bytes] = ..., roots: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class PublishSlotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseAdmissionRequest(_message.Message):
    __slots__ = ("uid",)
    UID_FIELD_NUMBER: _ClassVar[int]
    uid: bytes
    def __init__(self, uid: _Optional[bytes] = ...) -> None: ...

class CloseAdmissionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WaitLeasesRequest(_message.Message):
    __slots__ = ("uid", "timeout_ms")
    UID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    uid: bytes
    timeout_ms: int
    def __init__(self, uid: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class WaitLeasesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RetireRequest(_message.Message):
    __slots__ = ("uid",)
    UID_FIELD_NUMBER: _ClassVar[int]
    uid: bytes
    def __init__(self, uid: _Optional[bytes] = ...) -> None: ...

class RetireResponse(_message.Message):
    __slots__ = ("gone",)
    GONE_FIELD_NUMBER: _ClassVar[int]
    gone: bool
    def __init__(self, gone: _Optional[bool] = ...) -> None: ...

class Stamp(_message.Message):
    __slots__ = ("epoch", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class AwaitVersionRequest(_message.Message):
    __slots__ = ("model", "group", "members", "member", "worker_id", "step", "epoch", "after", "lease_ttl_ms", "transaction_timeout_ms", "timeout_ms", "known")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    model: str
    group: str
    members: _containers.RepeatedScalarFieldContainer[str]
    member: str
    worker_id: bytes
    step: int
    epoch: int
    after: Stamp
    lease_ttl_ms: int
    transaction_timeout_ms: int
    timeout_ms: int
    known: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, model: _Optional[str] = ..., group: _Optional[str] = ..., members: _Optional[_Iterable[str]] = ..., member: _Optional[str] = ..., worker_id: _Optional[bytes] = ..., step: _Optional[int] = ..., epoch: _Optional[int] = ..., after: _Optional[_Union[Stamp, _Mapping]] = ..., lease_ttl_ms: _Optional[int] = ..., transaction_timeout_ms: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., known: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("n_filled", "n_slots", "missing", "lost", "empty", "message")
    N_FILLED_FIELD_NUMBER: _ClassVar[int]
    N_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    EMPTY_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    n_filled: int
    n_slots: int
    missing: _containers.RepeatedScalarFieldContainer[str]
    lost: _containers.RepeatedScalarFieldContainer[str]
    empty: _containers.RepeatedScalarFieldContainer[str]
    message: str
    def __init__(self, n_filled: _Optional[int] = ..., n_slots: _Optional[int] = ..., missing: _Optional[_Iterable[str]] = ..., lost: _Optional[_Iterable[str]] = ..., empty: _Optional[_Iterable[str]] = ..., message: _Optional[str] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("uid", "stamp", "layout_epoch", "transaction", "lease", "topology_digest", "bases_digest", "bases", "roots")
    UID_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSACTION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BASES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    ROOTS_FIELD_NUMBER: _ClassVar[int]
    uid: bytes
    stamp: Stamp
    layout_epoch: int
    transaction: bytes
    lease: bytes
    topology_digest: bytes
    bases_digest: bytes
    bases: bytes
    roots: bytes
    def __init__(self, uid: _Optional[bytes] = ..., stamp: _Optional[_Union[Stamp, _Mapping]] = ..., layout_epoch: _Optional[int] = ..., transaction: _Optional[bytes] = ..., lease: _Optional[bytes] = ..., topology_digest: _Optional[bytes] = ..., bases_digest: _Optional[bytes] = ..., bases: _Optional[bytes] = ..., roots: _Optional[bytes] = ...) -> None: ...

class AwaitVersionResponse(_message.Message):
    __slots__ = ("progress", "grant")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    progress: Progress
    grant: Grant
    def __init__(self, progress: _Optional[_Union[Progress, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ...) -> None: ...

class Topology(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedCompositeFieldContainer[SlotStatic]
    def __init__(self, slots: _Optional[_Iterable[_Union[SlotStatic, _Mapping]]] = ...) -> None: ...

class GetTopologyRequest(_message.Message):
    __slots__ = ("uid", "bases")
    UID_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    uid: bytes
    bases: bool
    def __init__(self, uid: _Optional[bytes] = ..., bases: _Optional[bool] = ...) -> None: ...

class GetTopologyResponse(_message.Message):
    __slots__ = ("total_bytes", "data")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    data: bytes
    def __init__(self, total_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class WatchVersionsRequest(_message.Message):
    __slots__ = ("model", "timeout_ms")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    model: str
    timeout_ms: int
    def __init__(self, model: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class WatchVersionsResponse(_message.Message):
    __slots__ = ("uid", "stamp", "offered")
    UID_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    uid: bytes
    stamp: Stamp
    offered: bool
    def __init__(self, uid: _Optional[bytes] = ..., stamp: _Optional[_Union[Stamp, _Mapping]] = ..., offered: _Optional[bool] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("uid", "lease", "ttl_ms")
    UID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    uid: bytes
    lease: bytes
    ttl_ms: int
    def __init__(self, uid: _Optional[bytes] = ..., lease: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("uid", "lease")
    UID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    uid: bytes
    lease: bytes
    def __init__(self, uid: _Optional[bytes] = ..., lease: _Optional[bytes] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VoteRequest(_message.Message):
    __slots__ = ("transaction", "member", "worker_id", "yes", "reason", "identity", "plan_digest", "names_digest", "allow_unconsumed", "wire_bytes", "timeout_ms")
    TRANSACTION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    YES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PLAN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAMES_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ALLOW_UNCONSUMED_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    transaction: bytes
    member: str
    worker_id: bytes
    yes: bool
    reason: str
    identity: bytes
    plan_digest: bytes
    names_digest: bytes
    allow_unconsumed: _containers.RepeatedScalarFieldContainer[str]
    wire_bytes: int
    timeout_ms: int
    def __init__(self, transaction: _Optional[bytes] = ..., member: _Optional[str] = ..., worker_id: _Optional[bytes] = ..., yes: _Optional[bool] = ..., reason: _Optional[str] = ..., identity: _Optional[bytes] = ..., plan_digest: _Optional[bytes] = ..., names_digest: _Optional[bytes] = ..., allow_unconsumed: _Optional[_Iterable[str]] = ..., wire_bytes: _Optional[int] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class Facts(_message.Message):
    __slots__ = ("decision", "outcome", "reason")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    decision: Decision
    outcome: Decision
    reason: str
    def __init__(self, decision: _Optional[_Union[Decision, str]] = ..., outcome: _Optional[_Union[Decision, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class VoteResponse(_message.Message):
    __slots__ = ("facts",)
    FACTS_FIELD_NUMBER: _ClassVar[int]
    facts: Facts
    def __init__(self, facts: _Optional[_Union[Facts, _Mapping]] = ...) -> None: ...

class InstalledRequest(_message.Message):
    __slots__ = ("transaction", "member", "worker_id", "ok", "reason", "timeout_ms")
    TRANSACTION_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    transaction: bytes
    member: str
    worker_id: bytes
    ok: bool
    reason: str
    timeout_ms: int
    def __init__(self, transaction: _Optional[bytes] = ..., member: _Optional[str] = ..., worker_id: _Optional[bytes] = ..., ok: _Optional[bool] = ..., reason: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class InstalledResponse(_message.Message):
    __slots__ = ("facts",)
    FACTS_FIELD_NUMBER: _ClassVar[int]
    facts: Facts
    def __init__(self, facts: _Optional[_Union[Facts, _Mapping]] = ...) -> None: ...

class AskDecisionRequest(_message.Message):
    __slots__ = ("transaction", "timeout_ms")
    TRANSACTION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    transaction: bytes
    timeout_ms: int
    def __init__(self, transaction: _Optional[bytes] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class AskDecisionResponse(_message.Message):
    __slots__ = ("facts",)
    FACTS_FIELD_NUMBER: _ClassVar[int]
    facts: Facts
    def __init__(self, facts: _Optional[_Union[Facts, _Mapping]] = ...) -> None: ...

class PutCutsRequest(_message.Message):
    __slots__ = ("model", "group", "member", "digest", "cuts")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    model: str
    group: str
    member: str
    digest: bytes
    cuts: bytes
    def __init__(self, model: _Optional[str] = ..., group: _Optional[str] = ..., member: _Optional[str] = ..., digest: _Optional[bytes] = ..., cuts: _Optional[bytes] = ...) -> None: ...

class PutCutsResponse(_message.Message):
    __slots__ = ("layout_epoch",)
    LAYOUT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    layout_epoch: int
    def __init__(self, layout_epoch: _Optional[int] = ...) -> None: ...

class GetCutsRequest(_message.Message):
    __slots__ = ("model", "layout_epoch", "have")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    model: str
    layout_epoch: int
    have: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, model: _Optional[str] = ..., layout_epoch: _Optional[int] = ..., have: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetCutsResponse(_message.Message):
    __slots__ = ("layout_epoch", "group", "member", "digest", "cuts")
    LAYOUT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CUTS_FIELD_NUMBER: _ClassVar[int]
    layout_epoch: int
    group: str
    member: str
    digest: bytes
    cuts: bytes
    def __init__(self, layout_epoch: _Optional[int] = ..., group: _Optional[str] = ..., member: _Optional[str] = ..., digest: _Optional[bytes] = ..., cuts: _Optional[bytes] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
