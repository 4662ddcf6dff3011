"""A transport and its process: forks, the order of its end, and a process that has no descriptors left."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from reshard.transports import PeerError, RegistrationError, TransportError, open_transport, read
from reshard.transports.common import CommonTransport
from reshard.transports.descriptors import require_descriptors
from reshard.transports.hostmem import allocate_pages
from reshard.transports.peer_process import PeerProcess, pattern
from reshard.transports.regions import Region
from reshard.transports.registry import probe
from reshard.transports.testing import rows

NBYTES = 1 << 16


@pytest.fixture(params=["memory", "nixl", "ucx"])
def backend(request: pytest.FixtureRequest) -> str:
    if reason := probe(request.param):
        pytest.skip(f"{request.param} does not work here: {reason}")
    return str(request.param)


def child(transport: CommonTransport, peer: object, prepared: object, registration: object, message: bytes) -> int:
    """What a forked child may do with a transport: nothing; returns 0 if it is so."""
    calls = (
        lambda: transport.allocate(64),
        lambda: transport.register([]),
        transport.endpoint,
        lambda: transport.connect(message, timeout_s=1.0),
        lambda: transport.post(prepared),  # type: ignore[arg-type]
    )
    for call in calls:
        try:
            call()
        except TransportError as error:
            if f"opened by process {os.getppid()}" not in str(error):
                return 2
        else:
            return 3
    for thing in (prepared, peer, registration, transport):
        thing.close()  # type: ignore[attr-defined]
    return 0


def test_a_forked_child_does_no_harm(backend):
    with PeerProcess(backend) as process:
        endpoint, remote = process.serve(NBYTES, 1)
        transport = open_transport(backend)
        try:
            assert isinstance(transport, CommonTransport)
            mine = transport.allocate(NBYTES)
            registration = transport.register([mine.region])
            message = transport.endpoint()
            peer = transport.connect(endpoint, timeout_s=60.0, name="peer")
            prepared = transport.prepare(peer, rows(mine.region.address, NBYTES), rows(remote, NBYTES))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # there are threads, and we know it
                pid = os.fork()
            if not pid:
                code = 4
                try:
                    code = child(transport, peer, prepared, registration, message)
                finally:
                    os._exit(code)
            stop, status = time.monotonic() + 60.0, (0, 0)
            while status[0] == 0 and time.monotonic() < stop:
                status = os.waitpid(pid, os.WNOHANG)
                time.sleep(0.01)
            assert status[0] == pid, "the child hangs"
            assert os.waitstatus_to_exitcode(status[1]) == 0
            # The parent reads, and is read, as before.
            read(transport, [prepared], timeout_s=60.0)
            assert np.array_equal(mine.array, pattern(NBYTES, 1))
            process.ask("read", endpoint=message.hex(), address=mine.region.address, nbytes=NBYTES, times=1)
            assert process.answer() == {"done": True}
        finally:
            transport.close()


def test_the_beacon_says_closed_before_memory_is_withdrawn(backend):
    transport = open_transport(backend)
    assert isinstance(transport, CommonTransport)
    allocation = transport.allocate(NBYTES)
    transport.register([allocation.region])
    transport.endpoint()
    beacon = transport._beacon  # type: ignore[attr-defined]
    states: list[int] = []
    deregister = transport._ledger._deregister

    def noted(region: Region, native: object) -> None:
        states.append(int(beacon._words[4]))
        deregister(region, native)

    transport._ledger._deregister = transport._deregister = noted  # type: ignore[method-assign]
    transport.close()
    assert states == [2]
    with pytest.raises(TransportError, match="is closed"):
        transport.allocate(64)


def beacon_pages() -> tuple[int, int]:
    """How many descriptors and mappings of beacons, own or watched, and of shared memory this process has."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("/memfd:reshard" in link for link in links), sum("/memfd:reshard" in line for line in maps)


def test_what_is_closed_gives_its_pages_back_at_once(backend):
    """Not when the cyclic collector comes along, which a trainer may have turned off."""

    def read_once(process: PeerProcess) -> bytes:
        message, remote = process.serve(NBYTES, 1)
        with open_transport(backend) as transport, transport.allocate(NBYTES) as mine:
            transport.register([mine.region])
            peer = transport.connect(message, timeout_s=60.0, name="peer")
            prepared = transport.prepare(peer, rows(mine.region.address, NBYTES), rows(remote, NBYTES))
            read(transport, [prepared], timeout_s=60.0)
            assert np.array_equal(mine.array, pattern(NBYTES, 1))
            assert beacon_pages()[1] > before[1]
            return transport.endpoint()

    gc.collect()
    gc.disable()
    try:
        before = beacon_pages()
        with PeerProcess(backend) as process:
            messages = [read_once(process) for _ in range(3)]
            more = [now - then for now, then in zip(beacon_pages(), before, strict=True)]
            assert max(more) <= 0, "threads of earlier tests may let go of theirs meanwhile"
            with open_transport(backend) as reader:  # what was published before names a descriptor of nobody
                for message in messages:
                    with pytest.raises(PeerError):
                        reader.connect(message, timeout_s=60.0, name="closed")
    finally:
        gc.enable()


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)


def test_want_of_descriptors_is_an_error_of_ours_and_blames_no_peer():
    with PeerProcess("memory") as process, open_transport("memory") as transport:
        endpoint, _ = process.serve(NBYTES, 1)
        with no_descriptors():
            with pytest.raises(RegistrationError, match="Too many open files"):
                transport.allocate(64)
            with pytest.raises(TransportError, match="Too many open files") as caught:
                transport.connect(endpoint, timeout_s=5.0, name="peer")
            assert not isinstance(caught.value, PeerError)
            with pytest.raises(TransportError, match="Too many open files"):
                open_transport("memory")
        transport.connect(endpoint, timeout_s=60.0, name="peer")


WITH_FEW_LEFT = """
import os, sys
from reshard.transports import PeerError, TransportError, open_transport, read, registry
from reshard.transports.testing import rows
from tests.transports.test_processes import NBYTES, no_descriptors
backend = sys.argv[1]
message, remote, other = bytes.fromhex(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])
refused = 0

def with_few_left(n_left, *calls):
    global refused
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(n_left)]
    with no_descriptors():
        for fd in spare:
            os.close(fd)
        for call in calls:
            try:
                call()
            except PeerError as error:
                raise SystemExit(f'{n_left} left: the peer is blamed: {error}')
            except TransportError:
                refused += 1

with_few_left(0, lambda: open_transport(backend).close())  # before modules are imported
registry.load(backend)
for n_left in (0, 1, 2, 3):  # before any native thread runs
    with_few_left(n_left, lambda: open_transport(backend).close())
for n_left in (0, 1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24):
    transport = open_transport(backend)
    with_few_left(
        n_left,
        lambda: open_transport(backend).close(),
        lambda: transport.connect(message, timeout_s=5.0, name='early').close(),
        transport.endpoint,
    )
    transport.endpoint()
    target = transport.allocate(NBYTES)
    transport.register([target.region])
    peer = transport.connect(message, timeout_s=60.0, name='peer')
    with_few_left(n_left, lambda: transport.connect(other, timeout_s=5.0, name='other').close())
    transport.connect(other, timeout_s=60.0, name='other').close()
    prepared = transport.prepare(peer, rows(target.region.address, NBYTES), rows(remote, NBYTES))
    read(transport, [prepared], timeout_s=60.0)
    transport.close()
print('refused', refused)
"""


@pytest.mark.timeout(300)
def test_want_of_descriptors_ends_no_process_and_blames_no_peer(backend):
    """However few are left: native libraries that run out of them half way through abort the process."""
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with PeerProcess(backend) as process, PeerProcess(backend) as second:
        (message, remote), (other, _) = process.serve(NBYTES, 1), second.serve(NBYTES, 2)
        done = subprocess.run(
            [sys.executable, "-c", WITH_FEW_LEFT, backend, message.hex(), str(remote), other.hex()],
            env={**os.environ, **path},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
        assert int(done.stdout.split()[-1]) > 0
        assert process.alive
        assert second.alive


def test_too_few_descriptors_are_refused_by_number():
    with (
        no_descriptors(),
        pytest.raises(TransportError, match=r"this: 0 file descriptors are left, expected at least 3"),
    ):
        require_descriptors(3, "this")
    before = len(os.listdir("/proc/self/fd"))
    require_descriptors(3, "this")
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_is_allocated_and_registered_by_several_threads():
    """A weak set that grows while it is looked through is an error."""
    with open_transport("memory") as transport:
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        failed: list[BaseException] = []

        def allocate() -> None:
            try:
                for _ in range(300):
                    allocation = transport.allocate(64)
                    transport.register([allocation.region]).close()
            except BaseException as error:
                failed.append(error)

        try:
            threads = [threading.Thread(target=allocate) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(100)
            assert not any(thread.is_alive() for thread in threads)
        finally:
            sys.setswitchinterval(before)
        assert failed == []


def test_a_name_is_a_string(backend):
    with open_transport(backend) as transport, pytest.raises(TypeError, match="name is int"):
        transport.connect(b"", timeout_s=1.0, name=5)  # type: ignore[arg-type]


def test_destination_pages_are_there_after_registration(backend):
    """Registration touches what nobody has touched, without changing it."""
    import mmap

    n_pages = 64
    fresh = mmap.mmap(-1, n_pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    fresh.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(fresh, np.uint8)
    assert resident(array) == 0
    with open_transport(backend) as transport:
        transport.register([Region.of(array)])
        assert resident(array) == n_pages
    assert not array.any()
    assert resident(allocate_pages(4 * mmap.PAGESIZE)) == 4


def resident(array: np.ndarray) -> int:
    """Return how many pages of an array are there, from the page map (bit 63: present, 62: swapped out)."""
    page = os.sysconf("SC_PAGE_SIZE")
    first, n_pages = int(array.ctypes.data) // page, array.nbytes // page
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(first * 8)
        entries = np.frombuffer(file.read(n_pages * 8), np.uint64)
    return int((entries >> np.uint64(62) > 0).sum())
