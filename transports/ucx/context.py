"""One UCX context: its configuration, its memory handles, and nothing of the process around it.

1. The configuration is read as UCX always reads it (files, then ``UCX_*``), and then changed for this context
   alone: what another library wrote into the environment does not reach us, and nothing we need reaches another
   library.
2. ``RNDV_THRESH`` is always set: `ucxx` puts 8192 into the environment on import, and UCX then emulates gets in
   software.
3. Memory is mapped by allocation, with its kind given, so UCX never guesses at a pointer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

from reshard.transports.errors import RegistrationError, TransportUnavailableError
from reshard.transports.regions import MemoryKind, Region
from reshard.transports.ucx import declarations as d
from reshard.transports.ucx.library import Library

_log = logging.getLogger(__name__)

DEFAULTS: Mapping[str, str] = {"RNDV_THRESH": "inf"}
"""Set for every context of ours, whatever the environment says; the ``config`` setting overrides them."""

HINTS: Mapping[str, str] = {
    "CMA_TX_QUOTA": "64",
    "CMA_SEG_SIZE": "4m",
    "TCP_TX_SEG_SIZE": "64k",
    "TCP_RX_SEG_SIZE": "64k",
    "TCP_CONN_NB": "y",
}
"""Set where the library has them, whatever the environment says; the ``config`` setting overrides them.

``CMA_TX_QUOTA`` copies, of ``CMA_SEG_SIZE`` bytes at most, are made by one call of the progress function (by
default 1 of 512 KiB; a get that is longer than a segment ends the call), and each call costs us some microseconds.
Over TCP a fragment of a message has ``TCP_TX_SEG_SIZE`` bytes (by default 8 KiB), and costs both sides some, too.
With ``TCP_CONN_NB`` an owner that greets a reader whose host is gone keeps no other reader waiting.
"""

_FRAGMENT_BYTES = 64 << 10
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}

MEMORY_TYPES: Mapping[MemoryKind, int] = {"dram": d.MEMORY_TYPE_HOST, "vram": d.MEMORY_TYPE_CUDA}
"""UCX's number of each memory kind."""


def require_fragments(config: Mapping[str, str]) -> None:
    """Refuse sizes of TCP fragments with which a process of ours could overrun another's buffer.

    Raises
    ------
    TransportUnavailableError
        If what is sent may be over 64 KiB, or what is received must be below.
    """
    for key, expected in (("TCP_TX_SEG_SIZE", "at most"), ("TCP_RX_SEG_SIZE", "at least")):
        text = config.get(key, "64k")
        match = re.fullmatch(r"(\d+)([kmg]?)b?", text.strip().lower())
        nbytes = int(match[1]) * _UNITS[match[2]] if match else 0
        fits = nbytes <= _FRAGMENT_BYTES if expected == "at most" else nbytes >= _FRAGMENT_BYTES
        if not nbytes or not fits:
            raise TransportUnavailableError(
                f"transport 'ucx': config: {key}: expected {expected} 64k, got {text!r}: the processes of a job must "
                "fit each other",
                extra="ucx",
            )


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """A registered region: UCX's local handle and the packed key that a peer needs."""

    handle: int
    key: bytes
    memory_type: int


class Context:
    """A UCX context for one-sided reads.

    Parameters
    ----------
    library : Library
    config : mapping of str to str
        UCX settings without the ``UCX_`` prefix, for this context only.

    Raises
    ------
    TransportUnavailableError
        If UCX refuses a setting, or has no device that it could use; or if a fragment of one process would not fit
        another's buffer, which UCX does not look at: it writes past it.
    """

    def __init__(self, library: Library, config: Mapping[str, str]) -> None:
        self.library = library
        require_fragments(config)
        self._handle = self._init({**DEFAULTS, **config}, {k: v for k, v in HINTS.items() if k not in config})
        attributes = library.ffi.new("ucp_context_attr_t *")
        attributes.field_mask = d.ATTR_FIELD_REQUEST_SIZE | d.ATTR_FIELD_MEMORY_TYPES
        self._check(library.ucp.ucp_context_query(self._handle, attributes), "ucp_context_query")
        self.request_bytes = int(attributes.request_size)
        """Bytes that UCX wants in front of a request that we allocate."""
        self._memory_types = int(attributes.memory_types)

    @property
    def handle(self) -> int:
        """UCX's ``ucp_context_h``."""
        return self._handle

    def memory_kinds(self) -> tuple[MemoryKind, ...]:
        """Return the kinds of memory that the context's transports can reach."""
        return tuple(kind for kind, number in MEMORY_TYPES.items() if self._memory_types >> number & 1)

    def map(self, region: Region) -> MappedMemory:
        """Register a region and pack its key.

        Raises
        ------
        RegistrationError
            If UCX refuses, or the region is empty.
        """
        what = f"{region.memory} region [{region.address:#x}, {region.stop:#x})"
        if region.memory not in self.memory_kinds():
            raise RegistrationError(f"{what}: UCX reaches {', '.join(self.memory_kinds())} memory here")
        if not region.nbytes:
            raise RegistrationError(f"{what}: UCX maps no empty memory")
        ffi, ucp = self.library.ffi, self.library.ucp
        memory_type = MEMORY_TYPES[region.memory]
        params = ffi.new("ucp_mem_map_params_t *")
        params.field_mask = (
            d.MEM_MAP_FIELD_ADDRESS | d.MEM_MAP_FIELD_LENGTH | d.MEM_MAP_FIELD_PROT | d.MEM_MAP_FIELD_MEMORY_TYPE
        )
        params.address = ffi.cast("void *", region.address)
        params.length = region.nbytes
        params.prot = d.MEM_PROT_LOCAL_READ | d.MEM_PROT_LOCAL_WRITE | d.MEM_PROT_REMOTE_READ
        params.memory_type = memory_type
        handle = ffi.new("uintptr_t *")
        status = ucp.ucp_mem_map(self._handle, params, handle)
        if status != d.OK:
            raise RegistrationError(f"{what}: ucp_mem_map: {self.library.status_text(status)}")
        key, size = ffi.new("void **"), ffi.new("size_t *")
        status = ucp.ucp_rkey_pack(self._handle, handle[0], key, size)
        if status != d.OK:
            ucp.ucp_mem_unmap(self._handle, handle[0])
            raise RegistrationError(f"{what}: ucp_rkey_pack: {self.library.status_text(status)}")
        packed = bytes(ffi.buffer(key[0], size[0]))
        ucp.ucp_rkey_buffer_release(key[0])
        return MappedMemory(int(handle[0]), packed, memory_type)

    def unmap(self, memory: MappedMemory) -> None:
        """Deregister; a failure is logged, since nothing can be done about it."""
        status = self.library.ucp.ucp_mem_unmap(self._handle, memory.handle)
        if status != d.OK:
            _log.warning("ucp_mem_unmap: %s", self.library.status_text(status))

    def close(self) -> None:
        """Destroy the context; its workers and memory handles must be gone.  Idempotent."""
        if self._handle:
            handle, self._handle = self._handle, 0
            self.library.ucp.ucp_cleanup(handle)

    def _init(self, config: Mapping[str, str], hints: Mapping[str, str]) -> int:
        ffi, ucp = self.library.ffi, self.library.ucp
        settings = ffi.new("uintptr_t *")
        self._check(ucp.ucp_config_read(ffi.NULL, ffi.NULL, settings), "ucp_config_read")
        try:
            for key, value in hints.items():
                status = ucp.ucp_config_modify(settings[0], key.encode(), value.encode())
                if status != d.OK:
                    _log.debug("UCX has no setting %s: %s", key, self.library.status_text(status))
            for key, value in config.items():
                status = ucp.ucp_config_modify(settings[0], key.encode(), value.encode())
                self._check(status, f"UCX setting {key}={value!r}")
            params = ffi.new("ucp_params_t *")
            params.field_mask = d.PARAM_FIELD_FEATURES | d.PARAM_FIELD_MT_WORKERS_SHARED | d.PARAM_FIELD_NAME
            params.features = d.FEATURE_TAG | d.FEATURE_RMA | d.FEATURE_AM | d.FEATURE_WAKEUP
            params.mt_workers_shared = 1
            name = ffi.new("char[]", b"reshard")
            params.name = name
            context = ffi.new("uintptr_t *")
            status = ucp.ucp_init_version(*d.API_VERSION, params, settings[0], context)
            self._check(status, f"ucp_init with {dict(config)}")
        finally:
            ucp.ucp_config_release(settings[0])
        return int(context[0])

    def _check(self, status: int, what: str) -> None:
        if status != d.OK:
            raise TransportUnavailableError(f"transport 'ucx': {what}: {self.library.status_text(status)}", extra="ucx")
