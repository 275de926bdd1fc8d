"""Page of groups: `python -m atroposlib.frontend.jsonl2html INPUT [OUTPUT]`.

Reads JSON Lines, one group with `messages` and `scores` a line, and writes one HTML file that can
be opened, sent or archived by itself.
"""

# ruff: noqa: T201 - this is a door: it tells on the terminal what it wrote

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atroposlib.frontend.group_page import (
    create_html_for_group,
    get_score_class,
    render_page,
    scores_differ,
)
from atroposlib.utils.command_parser import CommandParser
from atroposlib.utils.loose_json import decode_line

__all__ = ["create_html_for_group", "generate_html", "get_score_class", "main"]


def generate_html(input_path: str | Path, output_path: str | Path | None = None) -> None:
    """Write the page of a JSON Lines file of groups.

    Lines that hold no group are skipped with a warning that gives their number. Groups whose scores
    differ come first; a group keeps its number in the file.

    Args:
        input_path: the file to read.
        output_path: the page; default is the input path with the suffix `.html`.

    Raises:
        SystemExit: with code 1 when the input is missing or the page cannot be written.
    """
    source = Path(input_path)
    if not source.is_file():
        _fail(f"no such file: {source}")
    target = Path(output_path) if output_path else source.with_suffix(".html")
    try:
        differing: list[str] = []
        equal: list[str] = []
        num_from_text = 0
        for group in _read_groups(source):
            block = create_html_for_group(group, len(differing) + len(equal))
            if block:
                (differing if scores_differ(group) else equal).append(block)
                num_from_text += bool(group.get("tokenized_from_text"))
        blocks = [*differing, *equal]
        target.parent.mkdir(parents=True, exist_ok=True)
        page = render_page(source.name, blocks, num_from_text=num_from_text)
        target.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        _fail(f"cannot make {target} from {source}: {error}")
    print(f"wrote {len(blocks)} groups to {target}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = CommandParser(prog="jsonl2html", description="Page of a file of groups.")
    parser.add_argument("input", nargs="?", help="JSON Lines file of groups")
    parser.add_argument("output", nargs="?", help="page to write (default: INPUT with .html)")
    parser.add_argument("--input_path", help="same as INPUT")
    parser.add_argument("--output_path", help="same as OUTPUT")
    given = parser.parse_args(arguments)
    input_path = given.input_path or given.input
    if input_path is None:
        parser.error("name the file to read")
    generate_html(input_path, given.output_path or given.output)


def _read_groups(source: Path) -> Iterator[dict[str, Any]]:
    with source.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                group = decode_line(line)
            except (ValueError, RecursionError) as error:
                _warn(f"line {number} skipped: not JSON ({error})")
                continue
            problem = _problem(group)
            if problem:
                _warn(f"line {number} skipped: {problem}")
            else:
                yield group


def _problem(group: Any) -> str | None:
    if not isinstance(group, dict):
        return "not a JSON object"
    for key in ("messages", "scores"):
        if key not in group:
            return f"no {key!r}"
        if not isinstance(group[key], list):
            return f"{key!r} is {json.dumps(group[key])[:40]}, expected a list"
    return None


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
