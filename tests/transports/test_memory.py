"""The `memory` transport against the contract, and what only it promises."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reshard.transports import (
    PeerError,
    Region,
    RegionTable,
    RegistrationError,
    decode_endpoint,
    encode_endpoint,
    open_transport,
    read,
)
from reshard.transports.errors import EndpointError
from reshard.transports.hostmem import allocate_pages, populate
from reshard.transports.identity import ProcessIdentity, start_time
from reshard.transports.peer_process import PeerProcess, pattern
from reshard.transports.shared import SharedPages, map_from
from reshard.transports.testing import Reader, TransportContract, raises, rows


class TestMemory(TransportContract):
    backend = "memory"

    def test_private_memory_is_read_within_the_process_and_refused_across(self) -> None:
        source = self.open()
        try:
            private = pattern(4096, 4)
            source.register([Region.of(private)])
            shared = source.allocate(64)
            source.register([shared.region])
            with Reader(self, source.endpoint(), 4096) as reader:
                read(reader.transport, [reader.whole(int(private.ctypes.data), 4096)], timeout_s=60.0)
                assert np.array_equal(reader.target.array, private)
            with self.start() as other, pytest.raises(Exception, match="private to its process"):
                other.ask("read", endpoint=source.endpoint().hex(), address=private.ctypes.data, nbytes=16, times=1)
        finally:
            source.close()

    def test_a_part_of_an_allocation_may_be_registered(self) -> None:
        source = self.open()
        try:
            whole = source.allocate(1 << 16)
            whole.array[:] = pattern(1 << 16, 6)
            part = Region(whole.region.address + 4099, 999, owner=whole.region.owner)
            source.register([part])
            with self.start() as other:
                answer = other.ask("read", endpoint=source.endpoint().hex(), address=part.address, nbytes=999, times=1)
                assert answer == {"reading": True}
                assert other.answer() == {"done": True}
            with Reader(self, source.endpoint(), 999) as reader:
                read(reader.transport, [reader.whole(part.address, 999)], timeout_s=60.0)
                assert np.array_equal(reader.target.array, whole.array[4099:5098])
        finally:
            source.close()

    def test_a_killed_process_leaves_no_shared_memory(self) -> None:
        with self.start() as process:
            process.serve(1 << 20, 1)
            mapped = shared_mappings(process.pid)
            process.signal(signal.SIGKILL)
        assert mapped, "what it serves"
        assert not [name for name in mapped if Path(name).exists()]

    def test_descriptors_and_mappings_are_given_back(self) -> None:
        def cycle() -> None:
            with self.reader(1 << 16) as reader:
                read(reader.transport, [reader.whole(self.remote, 1 << 16)], timeout_s=60.0)

        def held() -> tuple[int, int]:
            gc.collect()
            return len(os.listdir("/proc/self/fd")), len(shared_mappings(os.getpid()))

        cycle()
        before = held()
        for _ in range(20):
            cycle()
        more = [now - then for now, then in zip(held(), before, strict=True)]
        assert max(more) < 10, "one a transport would be 20; threads of other tests may hold one of their own"

    def test_a_reader_in_the_process_keeps_what_it_reads_alive(self) -> None:
        source = self.open()
        allocation = source.allocate(4096)
        registration = source.register([allocation.region])
        assert isinstance(allocation.region.owner, SharedPages)
        pages = weakref.ref(allocation.region.owner)
        with Reader(self, source.endpoint(), 4096) as reader:
            prepared = reader.whole(allocation.region.address, 4096)
            registration.close()
            allocation.close()
            gc.collect()
            assert pages() is not None
            with raises(PeerError):
                read(reader.transport, [prepared], timeout_s=60.0)
            del prepared
        del registration, reader
        source.close()
        gc.collect()
        assert pages() is None


def shared_mappings(pid: int) -> list[str]:
    """Files of shared memory that a process has mapped, once for each mapping."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    named = (line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6)
    return [name for name in named if name.startswith(("/memfd:", "/dev/shm/"))]


def test_files_that_could_shrink_are_not_mapped() -> None:
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 4096)
    try:
        with pytest.raises(PeerError, match="sealed against shrinking"):
            map_from(os.getpid(), fd, 4096, "p")
        with pytest.raises(PeerError, match="cannot open"):
            map_from(os.getpid(), 10_000, 4096, "p")
    finally:
        os.close(fd)
    pages = SharedPages(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(pages.fd, 0)
    with pytest.raises(PeerError, match="4096 bytes, seals"):
        map_from(os.getpid(), pages.fd, 8192, "p")
    assert map_from(os.getpid(), pages.fd, 4096, "p").tolist() == [0] * 4096


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    """A descriptor's number may be another file's by now; opening a FIFO to read waits for somebody who writes."""
    os.mkfifo(tmp_path / "fifo")
    fd = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    caught: list[BaseException] = []

    def look() -> None:
        try:
            map_from(os.getpid(), fd, 4096, "p")
        except PeerError as error:
            caught.append(error)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(30.0)
    waits = thread.is_alive()
    if waits:
        os.close(os.open(tmp_path / "fifo", os.O_WRONLY))  # let it go
    os.close(fd)
    assert not waits
    assert [str(error).partition(":")[0] for error in caught] == ["peer 'p'"]
    assert "sealed against shrinking" in str(caught[0])


def test_a_terminal_does_not_become_ours() -> None:
    """A process that leads a session, and has no terminal, is given the first one that it opens."""
    code = """
import os, pty, sys
from reshard.transports.errors import PeerError
from reshard.transports.shared import map_from
master, fd = pty.openpty()
def has_terminal():
    try:
        os.close(os.open('/dev/tty', os.O_RDWR))
    except OSError:
        return False
    return True
assert not has_terminal()
try:
    map_from(os.getpid(), fd, 4096, 'p')
except PeerError as error:
    assert 'sealed against shrinking' in str(error), error
else:
    raise SystemExit('mapped')
assert not has_terminal(), 'map_from took the terminal'
os.close(os.open(os.ttyname(fd), os.O_RDWR))
if not has_terminal():
    sys.exit(77)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], start_new_session=True, capture_output=True, text=True, timeout=110
    )
    if done.returncode == 77:
        pytest.skip("opening a terminal does not give it to a process here: nothing would be shown")
    assert done.returncode == 0, done.stderr


def test_populating_proves_that_memory_is_there() -> None:
    pages = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    array = np.frombuffer(pages, np.uint8)
    address = int(array.ctypes.data)
    array[:] = 7
    populate(address + 5, 3 * mmap.PAGESIZE)
    assert (array == 7).all()
    with pytest.raises(RegistrationError, match="not wholly mapped"):
        populate(4096, 4096)
    path = Path("/proc/self/exe")
    with path.open("rb") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ) as readable:
        view = np.frombuffer(readable, np.uint8)
        populate(int(view.ctypes.data), mmap.PAGESIZE)
        del view


@pytest.mark.parametrize("nbytes", [-1, 1 << 60])
def test_memory_that_there_is_not(nbytes: int) -> None:
    with pytest.raises(RegistrationError, match=str(nbytes)):
        allocate_pages(nbytes)
    with pytest.raises(RegistrationError, match=str(nbytes)):
        SharedPages(nbytes)
    transport = open_transport("memory")
    try:
        with pytest.raises(RegistrationError, match="expected dram"):
            transport.allocate(16, memory="vram")
        with transport.allocate(0) as nothing:
            transport.register([nothing.region]).close()
            assert nothing.array.nbytes == 0
    finally:
        transport.close()


def test_a_message_with_another_table_does_not_open_this_process() -> None:
    """Within a process plain addresses are read: what a message says must be what its owner serves."""
    with open_transport("memory") as owner, open_transport("memory") as reader:
        served = owner.allocate(4096)
        owner.register([served.region])
        message = owner.endpoint()
        endpoint = decode_endpoint(message)
        for region in (
            Region(0x10000, 4096),
            Region(served.region.address, 4097),
            Region(served.region.address + 1, 64),
        ):
            forged = encode_endpoint(replace(endpoint, regions=RegionTable.build([region])))
            with pytest.raises(EndpointError, match=rf"{region.nbytes} bytes at {region.address:#x} are not what"):
                reader.connect(forged, timeout_s=60.0, name="forged")
        owner.register([owner.allocate(4096).region])  # newer regions do no harm
        reader.connect(message, timeout_s=60.0, name="owner").close()


def test_a_process_that_nobody_has_waited_for_is_gone() -> None:
    """A reader that finds its memory gone must not say that it lives, and has only unmapped something."""
    own = ProcessIdentity.own()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = ProcessIdentity(own.boot, own.pid_space, process.pid, start_time(str(process.pid)))
        assert identity.started
        identity.check("p")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "Z"
        with pytest.raises(PeerError, match="restarted or exited"):
            identity.check("p")


def test_a_reused_pid_is_another_process() -> None:
    own = ProcessIdentity.own()
    own.check("p")
    assert ProcessIdentity.unpack(own.pack() + b"more") == own
    later = ProcessIdentity(own.boot, own.pid_space, own.pid, own.started + 1)
    with pytest.raises(PeerError, match="restarted or exited"):
        later.check("p")
    elsewhere = ProcessIdentity(b"b" * 16, own.pid_space, own.pid, own.started + 1)
    elsewhere.check("p")  # not ours to say
    assert not elsewhere.visible
    with pytest.raises(EndpointError, match="expected at least"):
        ProcessIdentity.unpack(b"short")


def test_a_peer_elsewhere_is_refused_by_name() -> None:
    from reshard.transports import Endpoint, encode_endpoint

    with PeerProcess("memory") as process:
        true = decode_endpoint(process.serve(4096)[0])
        own = ProcessIdentity.own()
        moved = ProcessIdentity(b"b" * 16, own.pid_space, process.pid, own.started).pack()
        payload = moved + true.payload[ProcessIdentity.NBYTES :]
        forged = encode_endpoint(Endpoint(true.backend, true.incarnation, 0, true.regions, payload))
        transport = open_transport("memory")
        try:
            with pytest.raises(PeerError, match="another host or in another container"):
                transport.connect(forged, timeout_s=1.0, name="far")
        finally:
            transport.close()


def test_large_lists_are_copied_by_workers_in_slices() -> None:
    with PeerProcess("memory") as process:
        n = 160 << 20
        endpoint, remote = process.serve(n, 3)
        transport = open_transport("memory", workers=2)
        try:
            target = transport.allocate(n)
            transport.register([target.region])
            peer = transport.connect(endpoint, timeout_s=60.0)
            prepared = transport.prepare(peer, rows(target.region.address, n), rows(remote, n))
            stats = read(transport, [prepared], timeout_s=60.0)
            assert stats.n_descriptors == 3
            assert np.array_equal(target.array, pattern(n, 3))
            assert stats.per_peer[peer.name].post_seconds > 0
        finally:
            transport.close()
