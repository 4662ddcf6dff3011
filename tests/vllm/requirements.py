"""Prints what an installed package requires, one line each, but for the packages named after it.

python -m tests.vllm.requirements PACKAGE LEFT_OUT...
"""

from __future__ import annotations

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement


def main(package: str, *left_out: str) -> None:
    for line in requires(package) or []:
        wanted = Requirement(line)
        if wanted.name.lower() not in left_out and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            wanted.marker = None
            print(wanted)


if __name__ == "__main__":
    main(*sys.argv[1:])
