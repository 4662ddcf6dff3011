"""A process that serves one region with UCX and obeys: run as ``python ucx_peer.py '{"nbytes": N, "settings": {...}}'``.

It prints one JSON line (endpoint as hex, address of the region) and then one line for each command on its standard input.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time

import numpy as np

from reshard.transports import open_transport


def main() -> None:
    request = json.loads(sys.argv[1])
    transport = open_transport(request.get("backend", "ucx"), **request.get("settings", {}))
    nbytes = request["nbytes"]
    allocation = transport.allocate(nbytes)
    allocation.array.view(np.uint32)[:] = np.arange(nbytes // 4, dtype=np.uint32) ^ np.uint32(request.get("seed", 0))
    registration = transport.register([allocation.region])
    address = allocation.region.address
    print(json.dumps({"endpoint": transport.endpoint().hex(), "address": address, "pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        command = line.strip()
        if command == "cpu":
            print(json.dumps(time.process_time()), flush=True)
        elif command == "unmap":
            ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
            print(json.dumps("unmapped"), flush=True)
        elif command == "withdraw":
            registration.close()
            print(json.dumps("withdrawn"), flush=True)
        elif command == "close":
            transport.close()
            print(json.dumps("closed"), flush=True)
        elif command.startswith("fill "):
            allocation.array[:] = int(command.split()[1])
            print(json.dumps("filled"), flush=True)
        else:
            raise SystemExit(f"unknown command {command!r}")
    transport.close()


if __name__ == "__main__":
    main()
