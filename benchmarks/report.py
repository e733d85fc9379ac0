"""docs/performance.md and docs/quality.md from the raw results.

    python -m benchmarks.report [--check]

Fills the `*.md.jinja` beside this file from `results/*.json`. With `--check` nothing is written,
and the exit status is 1 unless the pages are what the results make.
"""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import jinja2

from benchmarks import tables
from benchmarks.about import RESULTS

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
PAGES = ("performance.md", "quality.md")
WIDTH = 120


def render(page: str, results: dict[str, dict[str, Any]]) -> str:
    """A page from results by file name.

    Raises:
        jinja2.UndefinedError: A result, or a number in one, is not there.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["num"] = tables.number
    return wrapped(environment.get_template(f"{page}.jinja").render(results=results, tables=tables))


def wrapped(text: str) -> str:
    """The text with its paragraphs filled to WIDTH; headings and tables stay as they are."""
    blocks = re.split(r"\n{2,}", text.strip())
    filled = [
        block
        if block.startswith(("#", "|"))
        else textwrap.fill(
            " ".join(block.split()), WIDTH, break_long_words=False, break_on_hyphens=False
        )
        for block in blocks
    ]
    return "\n\n".join(filled) + "\n"


def read(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """All raw results by file name without its ending."""
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
    }


def main() -> None:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(prog="benchmarks.report")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args()
    results = read()
    for page in PAGES:
        text, path = render(page, results), DOCS / page
        if not args.check:
            path.write_text(text, encoding="utf-8")
        elif text != path.read_text(encoding="utf-8"):
            raise SystemExit(f"{page} is not what the results make: python -m benchmarks.report")


if __name__ == "__main__":
    main()
