"""How do the demo's processes talk to the process that started them?

One message is one JSON object, sent as one datagram of a SOCK_SEQPACKET pair: message borders are the kernel's, a
dead peer is an end of file, and nothing is pickled.
"""

from __future__ import annotations

import json
import math
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["MAX_MESSAGE_BYTES", "Channel", "ChannelClosed", "JsonValue", "Message", "remaining_s", "serve_commands"]

JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]
Message = dict[str, JsonValue]

MAX_MESSAGE_BYTES: Final = 1 << 17
"""Longest message, in bytes. It stays under the kernel's default socket buffer (net.core.wmem_default, 208 KiB)."""


class ChannelClosed(ConnectionError):
    """The other end of the channel is gone."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One end of a message channel.

    Parameters
    ----------
    socket
        A connected SOCK_SEQPACKET socket, owned by this channel.
    peer
        Name of the other end, for error messages.
    """

    socket: socket.socket
    peer: str

    def fileno(self) -> int:
        """Return the file descriptor, so that a channel can be given to `select`."""
        return self.socket.fileno()

    def send(self, message: Mapping[str, JsonValue]) -> None:
        """Send one message.

        Raises
        ------
        ValueError
            If the message is longer than `MAX_MESSAGE_BYTES`.
        ChannelClosed
            If the peer is gone.
        """
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"message to {self.peer}: got {len(data)} bytes, expected at most {MAX_MESSAGE_BYTES}")
        try:
            self.socket.send(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed(f"{self.peer} is gone") from error

    def receive(self, *, timeout_s: float | None = None) -> Message:
        """Return the next message.

        Parameters
        ----------
        timeout_s
            Seconds to wait, finite and over 0; None waits until a message comes or the peer is gone (a child waits for
            its supervisor, and dies with it).

        Raises
        ------
        TimeoutError
            If no message came in time.
        ChannelClosed
            If the peer is gone.
        """
        if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s: got {timeout_s}, expected a finite number over 0")
        self.socket.settimeout(timeout_s)
        try:
            data = self.socket.recv(MAX_MESSAGE_BYTES)
        except TimeoutError as error:
            raise TimeoutError(f"{self.peer} sent nothing for {timeout_s:g} s") from error
        except ConnectionResetError as error:
            raise ChannelClosed(f"{self.peer} is gone") from error
        finally:
            if self.socket.fileno() >= 0:
                self.socket.settimeout(None)
        if not data:
            raise ChannelClosed(f"{self.peer} is gone")
        message = json.loads(data)
        if not isinstance(message, dict):
            raise TypeError(f"message from {self.peer}: got {type(message).__name__}, expected an object")
        return message

    def close(self) -> None:
        """Close this end; the peer sees the end of the file."""
        self.socket.close()


def remaining_s(deadline: float) -> float:
    """Return the seconds until a `time.monotonic` deadline, at least a millisecond (so that a wait is a poll)."""
    return max(deadline - time.monotonic(), 0.001)


def serve_commands(channel: Channel, handlers: Mapping[str, Callable[[Message], Message]]) -> None:
    """Answer commands until the channel closes or a command is "stop".

    A command is `{"do": name, ...}`; what its handler returns is sent as `{"answer": ...}`, an exception of it as
    `{"error": "Type: text"}`, after which the process goes on serving commands.

    Parameters
    ----------
    channel
        The channel to the supervisor.
    handlers
        One function per command name; it is given the whole command.
    """
    while True:
        command = channel.receive()
        name = str(command.get("do"))
        if name == "stop":
            channel.send({"answer": {}})
            return
        try:
            if name not in handlers:
                raise ValueError(f"command: got {name!r}, expected one of {', '.join(handlers)}")
            answer = handlers[name](command)
        except ChannelClosed:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            traceback.print_exc()
            channel.send({"error": f"{type(error).__name__}: {error}"})
        else:
            channel.send({"answer": answer})
