"""Sections of benchmarks/RESULTS.md: each benchmark replaces its own and leaves the others as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Section:
    """A heading with paragraphs and tables under it."""

    title: str
    blocks: list[str] = field(default_factory=list)

    def text(self, paragraph: str) -> None:
        self.blocks.append(paragraph)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        lines = ["| " + " | ".join(header) + " |", "|" + "|".join("---" for _ in header) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        self.blocks.append("\n".join(lines))

    def markdown(self) -> str:
        return f"### {self.title}\n\n" + "\n\n".join(self.blocks)


def fmt(value: float) -> str:
    """Three significant digits, without an exponent.

    >>> fmt(0.0123456), fmt(12345.6), fmt(1.0), fmt(0.0)
    ('0.0123', '12,346', '1.00', '0')
    """
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 2
    size = abs(value)
    while size < 1:
        size *= 10
        digits += 1
    if abs(value) >= 10:
        digits = 1
    return f"{value:.{digits}f}"


def write_section(path: Path, key: str, title: str, machine: str, sections: Sequence[Section]) -> None:
    """Replace one benchmark's part of the results file, creating the file if it is not there."""
    begin, end = f"<!-- {key}: begin -->", f"<!-- {key}: end -->"
    body = "\n\n".join(section.markdown() for section in sections)
    block = f"{begin}\n## {title}\n\n{machine}\n\n{body}\n{end}"
    text = (
        path.read_text() if path.exists() else "# Results\n\nMade by the `make bench-*` targets; see README.md here.\n"
    )
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        text = f"{text.rstrip()}\n\n{begin}{end}\n"
    path.write_text(pattern.sub(lambda _: block, text))
