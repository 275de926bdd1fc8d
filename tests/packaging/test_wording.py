"""Documentation avoids constructions that a reader has to decode, and its links lead to files."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

BEHIND = (
    r"(?<!left\s)(?<!fall\s)(?<!falls\s)(?<!lag\s)(?<!lags\s)behind"
    r"(?! (?:a|the) (?:reverse )?proxy)"
)
INSTEAD: dict[str, str] = {
    r"is none of|(?-i:are none)": "write `is not one of`, or use `no` with the noun",
    r"(?<!here\s)is no (?!longer|more|less|guarantee|such)[a-z]+": "write `is not a ...`",
    r"whoever": "name the role, such as `a client that`",
    r"whom": "recast the sentence",
    r"(?:no|some|every|any)body": "name the role, or use the passive voice",
    r"anew": "write `again`",
    r"begun": "write `started`",
    r"lanes?": "write `format`",
    r"tells?|told|telling": "write `reports`, `logs`, `names`, `says` or `is given`",
    r"as many": "write the number, or `the same number of`",
    r"so many": "write `this many`, or name the number",
    BEHIND: "write `after` for an order, or name the place",
    r"besides?": "write `next to` or `in addition to`",
}
"""Construction, as a pattern of whole words, and what to write in its place."""
AVOIDED = {
    re.compile(rf"\b(?:{words})\b".replace(" ", r"\s+"), re.IGNORECASE): remedy
    for words, remedy in INSTEAD.items()
}
QUESTION = re.compile(r"[rR]?['\"]+\s*(What|Who|Whom|How)\b")
"""The opening of a docstring that should be a noun or a verb."""
CODE = ("atroposlib/*.py", "example_trainer/*.py", "environments/*.py", "benchmarks/*.py")

PROMPT = "a prompt, which models read: its text is data"
KEPT = {
    "atroposlib/api/inspection.py": ("lane", "a JSON key of the contract"),
    "atroposlib/envs/reward_fns/repetition_penalty_reward.py": ("whom", "a list of words"),
    "atroposlib/sandbox/limits.py": ("nobody", "a user of the system"),
    "atroposlib/tasks/games.py": ("behind", PROMPT),
    "atroposlib/tasks/math_problems.py": ("behind|somebody", PROMPT),
    "atroposlib/tasks/tool_dialogues.py": ("tell", PROMPT),
    "atroposlib/workspaces/local.py": ("nobody", "a user of the system"),
    "environments/deep_research/deep_research_environment.py": ("tell", PROMPT),
    "environments/game_environments/crosswords/crosswords_env.py": ("as many", PROMPT),
    "environments/eval_environments/judgemark_eval.py": ("tell", "the name of a criterion"),
    "environments/infinimath/infinimath_env.py": ("behind", PROMPT),
    "environments/multimodal_dpo/draw_samples.py": ("lane", "names in the samples"),
    "environments/multimodal_dpo/pixmo_clocks.py": ("tells", PROMPT),
    "environments/rlaif_server.py": ("behind|whoever", PROMPT),
    "environments/tool_use_multiturn_server.py": ("tell", "a pattern of words of the model"),
}
"""Words that a module may use, and why."""
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
"""A Markdown link to a file."""


def tracked(*patterns: str) -> dict[str, str]:
    """Return the texts of the tracked files that match, by path relative to the repository."""
    command = ["git", "ls-files", "-z", *patterns]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    paths = [REPOSITORY / name for name in listed.stdout.split("\0") if name]
    return {
        str(path.relative_to(REPOSITORY)): path.read_text(encoding="utf-8")
        for path in paths
        if path.exists()
    }


def findings(text: str, *, kept: str = "(?!)") -> Iterator[tuple[int, str]]:
    """Yield line and remedy of each construction to avoid, except for the words that are kept."""
    for pattern, remedy in AVOIDED.items():
        for hit in pattern.finditer(text):
            words = " ".join(hit.group().split())
            if re.fullmatch(kept, words, re.IGNORECASE) is None:
                yield text.count("\n", 0, hit.start()) + 1, f"{words!r}: {remedy}"


def prose_of(page: str) -> str:
    """Return a Markdown page with its code blocks emptied."""
    lines, in_code = page.splitlines(), False
    for number, line in enumerate(lines):
        is_fence = line.lstrip().startswith("```")
        in_code ^= is_fence
        if in_code or is_fence:
            lines[number] = ""
    return "\n".join(lines)


def words_of(code: str) -> tuple[str, list[tuple[int, str]]]:
    """Return strings and comments of a module, each on its line, and the docstrings that ask."""
    lines = [""] * (code.count("\n") + 2)
    questions = []
    previous = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        kind, text, (number, _), _, _ = token
        if kind in (tokenize.STRING, tokenize.COMMENT) or tokenize.tok_name[kind][:7] == "FSTRING":
            for offset, line in enumerate(text.splitlines()):
                lines[number - 1 + offset] += " " + line.replace('"', " ").lstrip("#")
        if kind == tokenize.STRING and previous in (
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
        ):
            question = QUESTION.match(text)
            if question is not None:
                questions.append((number, f"docstring opens with {question[1]!r}: use a noun"))
        if kind not in (tokenize.NL, tokenize.COMMENT):
            previous = kind
    return "\n".join(lines), questions


def test_pages_avoid_the_constructions() -> None:
    pages = tracked("*.md")

    found = [
        f"{page}:{number} {remark}"
        for page, text in pages.items()
        for number, remark in findings(prose_of(text))
    ]

    assert len(pages) > 30
    assert not found, "\n".join(found)


def test_messages_docstrings_and_comments_avoid_the_constructions() -> None:
    modules = tracked(*CODE)

    found = []
    for module, code in modules.items():
        kept, _ = KEPT.get(module, ("(?!)", ""))
        text, questions = words_of(code)
        remarks = [*findings(text, kept=kept), *questions]
        found += [f"{module}:{number} {remark}" for number, remark in sorted(remarks)]

    assert len(modules) > 200
    assert not found, "\n".join(found)


@pytest.mark.parametrize("module", KEPT)
def test_kept_words_occur_in_their_module(module: str) -> None:
    words, _ = words_of((REPOSITORY / module).read_text(encoding="utf-8"))

    for word in KEPT[module][0].split("|"):
        assert re.search(rf"\b{word}\b", words, re.IGNORECASE), word


def test_links_of_pages_lead_to_files() -> None:
    links = [(page, link) for page, text in tracked("*.md").items() for link in LINK.findall(text)]

    broken = [
        f"{page}: {link}"
        for page, link in links
        if not (REPOSITORY / page).parent.joinpath(link).exists()
    ]

    assert links
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("text", "num_findings"),
    [
        ("A list that is no list.", 1),
        ("A list that is\nno list.", 1),
        ("There is no list, and a list is no longer there.", 0),
        ("Whoever asks, nobody answers.", 2),
        ("The run is begun anew.", 2),
        ("The log tells as many steps, and so many groups.", 3),
        ("The groups behind it, besides those beside it.", 3),
        (
            "A service behind a reverse proxy falls behind; files behind it are left behind.",
            1,
        ),
    ],
)
def test_findings_of_a_text(text: str, num_findings: int) -> None:
    assert len(list(findings(text))) == num_findings


def test_prose_of_a_page_leaves_code_blocks_out() -> None:
    assert prose_of("One.\n```\nnobody\n```\nTwo.") == "One.\n\n\n\nTwo."


def test_words_of_a_module_are_its_strings_and_comments_on_their_lines() -> None:
    code = 'told = f(\n    "so "\n    "many",\n)  # nobody\n'

    text, _ = words_of(code)

    assert sorted(findings(text)) == [
        (2, "'so many': write `this many`, or name the number"),
        (4, "'nobody': name the role, or use the passive voice"),
    ]


def test_docstrings_that_open_with_a_question_are_found() -> None:
    code = (
        '"""How a module works."""\n\n\nclass A:\n    """What it is."""\n\n    x: int\n'
        '    """Whose number."""\n\n    def f(self):\n        # a comment\n'
        '        """Who calls."""\n        return g("What else?")\n'
    )

    _, questions = words_of(code)

    assert [number for number, _ in questions] == [1, 5, 12]
