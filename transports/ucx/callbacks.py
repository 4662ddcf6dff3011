"""The Python functions that UCX calls back, and what they leave behind.

There are four: an endpoint failed; a peer asks who we are; a peer has answered that; a message of `messages` has come.
They only write to a dictionary or a queue (or send 16 bytes), and they run inside a native call of ours, on the thread
that made it. What they are called for is told by a *token*, a number that is never used twice, so a late call finds
nothing.

Asking who is there comes before the first read: UCX does not check that the process behind an address is the one
that the address was made by, and over TCP a read at an address of its predecessor would kill a restarted peer.
"""

from __future__ import annotations

import functools
import itertools
import threading
from typing import TYPE_CHECKING, Protocol

from reshard.transports.errors import TransportError
from reshard.transports.ucx import declarations as d
from reshard.transports.ucx.inbox import Inbox
from reshard.transports.ucx.library import ERROR_FLOOR

if TYPE_CHECKING:
    from reshard.transports.ucx.library import Library


class MessageInfo(Protocol):
    """``ucp_am_recv_param_t``."""

    recv_attr: int
    reply_ep: int


class RequestParams(Protocol):
    """``ucp_request_param_t``."""

    op_attr_mask: int
    flags: int


_ASK, _ANSWER = 0x52, 0x53
_MAX_IDENTITY_BYTES = 64
MAX_MESSAGE_BYTES = 1 << 17
"""Data of a message that is kept; longer ones are none of ours."""


class Callbacks:
    """One set for each library; never freed, since UCX may hold it for as long as the process lives.

    Parameters
    ----------
    library : Library
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._tokens = itertools.count(1)
        self._failures: dict[int, int] = {}
        self._identities: dict[int, bytes] = {}
        self._answers: dict[int, bytes] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._on_message: dict[int, object] = {}
        self._params_of: dict[int, RequestParams] = {}
        ffi = library.ffi
        self.on_failure: object = ffi.callback("ucp_err_handler_cb_t", self._failed)
        self._on_ask: object = ffi.callback("ucp_am_recv_callback_t", self._asked)
        self._on_answer: object = ffi.callback("ucp_am_recv_callback_t", self._answered)

    def new_token(self) -> int:
        """Return a number for one worker or endpoint."""
        return next(self._tokens)

    def failure(self, token: int) -> int:
        """Return the status with which an endpoint failed, or 0."""
        return self._failures.get(token, d.OK)

    def answer(self, token: int) -> bytes:
        """Return what the peer said that it is, empty if it has not answered."""
        return self._answers.get(token, b"")

    def forget(self, token: int) -> None:
        """Drop all that is kept for a token."""
        for kept in (self._failures, self._identities, self._answers, self._inboxes):
            kept.pop(token, None)

    def receive(self, worker: int, token: int, messages: tuple[int, ...]) -> Inbox:
        """Return where a worker's messages of these numbers are put, by whoever progresses it."""
        inbox = self._inboxes[token] = Inbox()
        for message in messages:
            if message not in self._on_message:
                self._on_message[message] = self._library.ffi.callback(
                    "ucp_am_recv_callback_t", functools.partial(self._received, message)
                )
            self._handle(worker, message, self._on_message[message], token)
        return inbox

    def send(self, endpoint: int, message: int, header: bytes, data: object = None, nbytes: int = 0) -> None:
        """Send a message; a failure shows as a failed endpoint.

        Parameters
        ----------
        endpoint : int
        message : int
        header : bytes
            Short; copied.
        data : cffi pointer, optional
            Must stay until there is an answer.
        nbytes : int
            Of ``data``.
        """
        params = self._params(d.AM_SEND_FLAG_COPY_HEADER | d.AM_SEND_FLAG_EAGER)
        ffi = self._library.ffi
        self._sent(
            self._library.ucp.ucp_am_send_nbx(
                endpoint,
                message,
                ffi.from_buffer(header),
                len(header),
                ffi.NULL if data is None else data,
                nbytes,
                params,
            )
        )

    def serve_identity(self, worker: int, token: int, identity: bytes) -> None:
        """Let a worker answer with ``identity`` when it is asked."""
        self._identities[token] = identity
        self._handle(worker, _ASK, self._on_ask, token)

    def ask_identity(self, worker: int, endpoint: int, token: int) -> None:
        """Ask the peer behind an endpoint; `answer` has it once the worker has progressed."""
        self._handle(worker, _ANSWER, self._on_answer, token)
        params = self._params(d.AM_SEND_FLAG_REPLY)
        null = self._library.ffi.NULL
        self._sent(self._library.ucp.ucp_am_send_nbx(endpoint, _ASK, null, 0, null, 0, params))

    def _handle(self, worker: int, message: int, callback: object, token: int) -> None:
        ffi = self._library.ffi
        params = ffi.new("ucp_am_handler_param_t *")
        params.field_mask = d.AM_HANDLER_FIELD_ID | d.AM_HANDLER_FIELD_CB | d.AM_HANDLER_FIELD_ARG
        params.id = message
        params.cb = callback
        params.arg = ffi.cast("void *", token)
        status = self._library.ucp.ucp_worker_set_am_recv_handler(worker, params)
        if status != d.OK:
            text = self._library.status_text(status)
            raise TransportError(f"transport 'ucx': ucp_worker_set_am_recv_handler: {text}")

    def _params(self, flags: int) -> object:
        """Return parameters with these flags; UCX only reads them."""
        params = self._params_of.get(flags)
        if params is None:
            params = self._library.ffi.new("ucp_request_param_t *")
            params.op_attr_mask = d.OP_FIELD_FLAGS
            params.flags = flags
            self._params_of[flags] = params
        return params

    def _sent(self, request: int) -> None:
        # A failed send shows as a failed endpoint; a request that is freed early ends by itself.
        if 0 < request < ERROR_FLOOR:
            self._library.ucp.ucp_request_free(request)

    def _token(self, argument: object) -> int:
        return int(self._library.ffi.cast("uintptr_t", argument))

    def _failed(self, argument: object, endpoint: int, status: int) -> None:
        self._failures[self._token(argument)] = status

    def _asked(
        self, argument: object, header: object, header_bytes: int, data: object, size: int, message: MessageInfo
    ) -> int:
        identity = self._identities.get(self._token(argument), b"")
        if identity and message.recv_attr & d.AM_RECV_ATTR_FIELD_REPLY_EP:
            ffi = self._library.ffi
            params = self._params(d.AM_SEND_FLAG_COPY_HEADER)
            self._sent(
                self._library.ucp.ucp_am_send_nbx(
                    message.reply_ep, _ANSWER, ffi.from_buffer(identity), len(identity), ffi.NULL, 0, params
                )
            )
        return d.OK

    def _answered(
        self, argument: object, header: object, header_bytes: int, data: object, size: int, message: MessageInfo
    ) -> int:
        self._answers[self._token(argument)] = bytes(
            self._library.ffi.buffer(header, min(header_bytes, _MAX_IDENTITY_BYTES))
        )
        return d.OK

    def _received(
        self,
        message: int,
        argument: object,
        header: object,
        header_bytes: int,
        data: object,
        size: int,
        info: MessageInfo,
    ) -> int:
        inbox = self._inboxes.get(self._token(argument))
        if inbox is not None and size <= MAX_MESSAGE_BYTES and not info.recv_attr & d.AM_RECV_ATTR_FLAG_RNDV:
            buffer = self._library.ffi.buffer
            inbox.put(message, bytes(buffer(header, header_bytes)), bytes(buffer(data, size)) if size else b"")
        return d.OK


_by_path: dict[str, Callbacks] = {}
_lock = threading.Lock()


def callbacks_of(library: Library) -> Callbacks:
    """Return a library's callbacks."""
    with _lock:
        found = _by_path.get(library.path)
        if found is None:
            found = _by_path[library.path] = Callbacks(library)
        return found
