"""`python -m reshard`: the command line."""

from __future__ import annotations

from reshard.refit.cli import main

main()
