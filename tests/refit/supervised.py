"""Children for `test_demo_processes.py`: no torch, no network."""

from __future__ import annotations

import os
import signal
import time

from reshard.refit.demo.channel import Channel, Message, serve_commands


def obedient(channel: Channel, *, greeting: str) -> None:
    print(f"started: {greeting}")

    def echo(command: Message) -> Message:
        channel.send({"stage": "echoing"})
        return {"echo": command["text"], "pid": os.getpid()}

    def fail(command: Message) -> Message:
        raise ValueError(f"told to fail: {command['text']}")

    def die(command: Message) -> Message:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def hang(command: Message) -> Message:
        time.sleep(3600)
        return {}

    channel.send({"answer": {"greeting": greeting}})
    serve_commands(channel, {"echo": echo, "fail": fail, "die": die, "hang": hang})


def stillborn(channel: Channel) -> None:
    raise RuntimeError("no such luck")
