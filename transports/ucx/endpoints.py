"""UCX endpoints: how every connection of ours is made and closed.

They handle errors in ``PEER`` mode with a callback: without one UCX ends the process when a peer dies.
"""

from __future__ import annotations

from reshard.transports.errors import TransportError
from reshard.transports.ucx import declarations as d
from reshard.transports.ucx.library import ERROR_FLOOR, Library


def create_endpoint(library: Library, worker: int, address: bytes, on_failure: object, token: int) -> int:
    """Create an endpoint on a worker and return UCX's handle.

    Parameters
    ----------
    library : Library
    worker : int
    address : bytes
        UCX worker address of the peer.
    on_failure : cffi callback
    token : int
        What it is told.

    Raises
    ------
    TransportError
        If UCX cannot reach the address.
    """
    ffi = library.ffi
    packed = ffi.from_buffer(address)
    params = ffi.new("ucp_ep_params_t *")
    params.field_mask = d.EP_FIELD_REMOTE_ADDRESS | d.EP_FIELD_ERR_HANDLING_MODE | d.EP_FIELD_ERR_HANDLER
    params.address = packed
    params.err_mode = d.ERR_HANDLING_MODE_PEER
    params.err_handler_cb = on_failure
    params.err_handler_arg = ffi.cast("void *", token)
    handle = ffi.new("uintptr_t *")
    status = library.ucp.ucp_ep_create(worker, params, handle)
    if status != d.OK:
        raise TransportError(f"transport 'ucx': ucp_ep_create: {library.status_text(status)}")
    return int(handle[0])


def close_endpoint(library: Library, endpoint: int) -> int:
    """Close an endpoint by force: what is queued on it ends; return UCX's request, or 0 if it is closed already."""
    params = library.ffi.new("ucp_request_param_t *")
    params.op_attr_mask = d.OP_FIELD_FLAGS
    params.flags = d.EP_CLOSE_FLAG_FORCE
    returned = int(library.ucp.ucp_ep_close_nbx(endpoint, params))
    return returned if 0 < returned < ERROR_FLOOR else 0


def endpoint_transports(library: Library, endpoint: int) -> tuple[int, tuple[tuple[str, str], ...]]:
    """Return UCX's status, and the (transport, device) pairs that an endpoint uses."""
    ffi = library.ffi
    entries = ffi.new("ucp_transport_entry_t[]", 64)
    attributes = ffi.new("ucp_ep_attr_t *")
    attributes.field_mask = d.EP_ATTR_FIELD_TRANSPORTS
    attributes.transport_entries = entries
    attributes.num_transport_entries = len(entries)
    attributes.transport_entry_size = ffi.sizeof("ucp_transport_entry_t")
    status = int(library.ucp.ucp_ep_query(endpoint, attributes))
    names = []
    for entry in entries[0 : attributes.num_transport_entries] if status == d.OK else ():
        pair = (ffi.string(entry.transport_name), ffi.string(entry.device_name))
        names.append((pair[0].decode(), pair[1].decode()))
    return status, tuple(names)
