"""The demo's rendezvous service, in a process of its own."""

from __future__ import annotations

from reshard.refit.demo.channel import Channel, Message, serve_commands

__all__ = ["run_rendezvous"]


def run_rendezvous(channel: Channel) -> None:
    """Serve the rendezvous on a free loopback port, tell the supervisor where, and go on until the channel closes."""
    from reshard.rendezvous.service import serve

    server = serve("127.0.0.1:0")
    try:
        address: Message = {"address": server.address}
        channel.send({"answer": address})
        serve_commands(channel, {})
    finally:
        server.close(grace_s=1.0)
