"""Documentation avoids constructions that a reader has to decode, and its links lead to files."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

INSTEAD: dict[str, str] = {
    r"\b(?:is none of|(?-i:are none))\b": "write `is not one of`, or use `no` with the noun",
    r"(?<!here )\bis no (?!longer|more|less|guarantee|such)[a-z]+\b": "write `is not a ...`",
    r"\bwhoever\b": "name the role, such as `a client that`",
    r"\b(?:nobody|somebody)\b": "name the role, or use the passive voice",
    r"\banew\b": "write `again`",
    r"\bbegun\b": "write `started`",
    r"\blanes?\b": "write `format`",
}
"""Pattern of a construction, and what to write in its place."""


KEPT = {
    "atroposlib/sandbox/limits.py": "a constant has the name of the system's user NOBODY",
    "atroposlib/tasks/math_problems.py": "prompts",
    "environments/rlaif_server.py": "prompts",
    "environments/multimodal_dpo/draw_samples.py": "names in the samples",
    "atroposlib/api/inspection.py": "the JSON key lane",
    "atroposlib/wire/__init__.py": "the JSON key lane",
    "atroposlib/wire/groups.py": "the JSON key lane",
    "atroposlib/wire/json_format.py": "the JSON key lane",
}
"""Modules that may use such words, and why."""
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
"""A Markdown link to a file."""


def tracked(*patterns: str) -> list[str]:
    """Return the tracked files that match, relative to the repository."""
    command = ["git", "ls-files", "-z", *patterns]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name]


def findings(text: str) -> list[tuple[int, str, str]]:
    """Return line, construction and remedy of each construction to avoid, code blocks excluded."""
    found, in_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            for pattern, remedy in INSTEAD.items():
                hits = re.finditer(pattern, line, re.IGNORECASE)
                found += [(number, hit.group(), remedy) for hit in hits]
    return found


def test_pages_avoid_the_constructions() -> None:
    pages = tracked("*.md")

    found = [
        f"{page}:{number} {words!r}: {remedy}"
        for page in pages
        for number, words, remedy in findings((REPOSITORY / page).read_text(encoding="utf-8"))
    ]

    assert pages
    assert not found, "\n".join(found)


def words_of(code: str) -> str:
    """Return the strings and comments of a module, each on its line."""
    lines = [""] * (code.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT) or tokenize.tok_name[
            token.type
        ].startswith("FSTRING"):
            for number, line in enumerate(token.string.splitlines(), token.start[0] - 1):
                lines[number] += f" {line}"
    return "\n".join(lines)


def test_messages_docstrings_and_comments_avoid_the_constructions() -> None:
    modules = tracked("atroposlib/*.py", "example_trainer/*.py", "environments/*.py")
    assert set(modules) >= set(KEPT)

    found = [
        f"{module}:{number} {words!r}: {remedy}"
        for module in modules
        if module not in KEPT
        for number, words, remedy in findings(
            words_of((REPOSITORY / module).read_text(encoding="utf-8"))
        )
    ]

    assert len(modules) > 200
    assert not found, "\n".join(found)


def test_links_of_pages_lead_to_files() -> None:
    links = [
        (page, link)
        for page in tracked("*.md")
        for link in LINK.findall((REPOSITORY / page).read_text(encoding="utf-8"))
    ]

    broken = [f"{page}: {link}" for page, link in links if not target(page, link).exists()]
    assert links
    assert not broken, "\n".join(broken)


def target(page: str, link: str) -> Path:
    return (REPOSITORY / page).parent / link


@pytest.mark.parametrize(
    ("text", "num_findings"),
    [
        ("A list that is no list.", 1),
        ("There is no list, and a list is no longer there.", 0),
        ("Whoever asks, nobody answers.", 2),
        ("The run is begun anew.", 2),
        ("```\nnobody\n```\nThe client waits.", 0),
    ],
)
def test_findings_of_a_text(text: str, num_findings: int) -> None:
    assert len(findings(text)) == num_findings
