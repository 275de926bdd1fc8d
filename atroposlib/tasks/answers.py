r"""Answers in completions: in `\boxed{...}`, in tags, as a fenced program, or in a demanded format.

The first functions find an answer. `FORMATS` is the table of the formats that a prompt may demand:

    name -> AnswerFormat(template) -> instruction for the prompt, example, extract(text) -> fields

A template is literal text around fields such as `{answer}`:

| template | a text matches if |
|---|---|
| `<answer>{answer}</answer>` | it has each literal as often as the template, in this order |
| `\boxed{{answer}}` | it has the first literal once; the last bracket is the one that closes it |
| `^The answer is: {answer}` | one line starts with the first literal and ends with the last one |

Formats of the family `structured` are parsed: the whole text, or its only fenced block, has
exactly the keys of the format.

All searches are linear in the text. A pattern such as `<a>(.*?)</a>` would search for the closing
tag again after each of a thousand opening tags. Pure.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

__all__ = [
    "FORMATS",
    "AnswerFormat",
    "DatasetType",
    "boxed_answer",
    "formats_for",
    "is_repetition",
    "last_code_block",
    "only_json_object",
    "only_tagged",
    "tagged_answer",
    "words_of",
]

_OPENED = re.compile("<answer>", re.IGNORECASE | re.ASCII)
_CLOSED = re.compile("</answer>", re.IGNORECASE | re.ASCII)
_BOX = "\\boxed{"


def boxed_answer(text: str) -> str | None:
    r"""Return the stripped text from the last `\boxed{` to the next brace; None if not closed."""
    _, box, rest = text.rpartition(_BOX)
    inside, brace, _ = rest.partition("}")
    return inside.strip() if box and brace else None


def tagged_answer(text: str) -> str | None:
    """Return the stripped text in the first pair of tags on one line; None without a pair."""
    for line in text.split("\n"):
        opened = _OPENED.search(line)
        closed = _CLOSED.search(line, opened.end()) if opened else None
        if opened and closed:
            return line[opened.end() : closed.start()].strip()
    return None


def only_tagged(text: str, tag: str) -> str | None:
    """Return the stripped text between the tags; None unless there is exactly one pair."""
    _, opened, rest = text.partition(f"<{tag}>")
    inside, closed, after = rest.partition(f"</{tag}>")
    if not (opened and closed):
        return None
    is_second = f"</{tag}>" in after.partition(f"<{tag}>")[2]
    return None if is_second else inside.strip()


FENCE = "```"


def last_code_block(answer: str) -> str | None:
    """Return the content of the last closed fenced block; None without one."""
    block: list[str] | None = None
    found = None
    for line in answer.split("\n"):  # unlike splitlines: strings may contain other separators
        text = line.strip()
        if not text.startswith(FENCE) or (block is None and FENCE in text[len(FENCE) :]):
            if block is not None:
                block.append(line.removesuffix("\r"))
        elif block is None:
            block = []
        else:
            # A block in a list item is indented as a whole.
            found, block = textwrap.dedent("\n".join(block)), None
    return found


def only_json_object(answer: str, *, max_characters: int) -> dict[str, Any] | None:
    """Return the JSON object that is all of an answer, in a fenced block or without one.

    None for any other text, a longer one, and an object in which a key occurs twice.
    """
    text = answer.strip()
    if text.startswith(FENCE) and text.endswith(FENCE) and "\n" in text:
        text = text.partition("\n")[2].removesuffix(FENCE)
    found = _parse_json(text) if len(text) <= max_characters else None
    return found if isinstance(found, dict) else None


def words_of(text: str) -> set[str]:
    """Return the different words of a text in lower case."""
    return set(re.findall(r"\w+", text.casefold()))


SAME_TEXT = 0.6
"""Share of common words from which a text repeats another."""


def is_repetition(text: str, others: Iterable[str]) -> bool:
    """Whether a text has most words in common with one of the others."""
    words = words_of(text)
    known = map(words_of, others)
    return any(len(words & other) > SAME_TEXT * max(1, len(words | other)) for other in known)


DatasetType = Literal["generic", "math_only", "code_only"]
"""Kind of the answers of a data set."""

FIELD = re.compile(r"(?<!\\begin)(?<!\\end)\{([a-z]+)\}")
GAP = re.compile(r"\s+|(?<=>)(?=<)")
"""Places in a literal where any whitespace is accepted."""
OPENINGS = {"}": "{", "]": "[", ")": "("}
"""Closing to opening bracket."""
MAX_STRUCTURED_CHARACTERS = 10_000


@dataclass(frozen=True)
class AnswerFormat:
    """One format."""

    name: str
    family: str
    template: str
    """Literals and fields; a leading `^` anchors them to a line."""
    keys: tuple[str, ...] = ()
    """For the family `structured`: the keys, the one of the answer first."""
    syntax: str = ""
    """For the family `structured`: json, yaml or toml."""

    @property
    def is_complex(self) -> bool:
        """Whether the format has several fields."""
        return self.family == "complex"

    @property
    def fields(self) -> list[str]:
        """Names of the fields, in the order of the template."""
        return FIELD.findall(self.template)

    def render(self, **fields: str) -> str:
        """Return a text in this format; fields that are not given are placeholders."""
        body = self.template.removeprefix("^")
        if self.syntax:
            fields = {name: json.dumps(value)[1:-1] for name, value in fields.items()}
        return FIELD.sub(lambda field: fields.get(field[1], placeholder(field[1])), body)

    def instruction(self) -> str:
        """Return the part of a prompt that demands the format."""
        names = list(map(placeholder, self.fields))
        listed = ", ".join(names)
        if self.syntax:
            return (
                f"Give the answer as {self.syntax.upper()} with exactly these keys and nothing "
                f"else after the thinking; {listed} stands for your own text:\n\n{self.render()}"
            )
        return (
            "Give the answer in exactly this form, once; "
            f"{listed} stand{'s' if len(names) == 1 else ''} for your own text:\n\n{self.render()}"
        )

    def extract(self, text: str) -> dict[str, str] | None:
        """Return the fields of a text in this format; None unless it is there exactly once."""
        if self.syntax:
            fields = self._parsed(text)
        elif self.template.startswith("^"):
            fields = self._on_a_line(text)
        elif self._literals[-1] in OPENINGS:
            fields = self._in_brackets(text)
        else:
            fields = self._between_literals(text)
        if fields is None:
            return None
        is_filled = all(value and value != placeholder(name) for name, value in fields.items())
        return fields if is_filled else None

    @cached_property
    def _literals(self) -> list[str]:
        """The literals before, between and after the fields."""
        return FIELD.split(self.template.removeprefix("^"))[0::2]

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], int]]:
        """The patterns of the literals, and how often a text in this format has them."""
        example = self.render(**dict.fromkeys(self.fields, "x"))
        patterns = []
        for literal in self._literals:
            pieces = filter(None, GAP.split(literal.strip()))
            end = r"[ \t]*\n\s*" if literal.rstrip(" ").endswith("\n") else ""
            pattern = re.compile(r"\s*".join(map(re.escape, pieces)) + end)
            patterns.append((pattern, len(pattern.findall(example))))
        return patterns

    def _on_a_line(self, text: str) -> dict[str, str] | None:
        (prefix, _), *_ = self._patterns
        suffix = self._literals[-1].strip()
        lines = re.findall(rf"^[ \t]*(?:{prefix.pattern})(.+)$", text, re.MULTILINE)
        found = [line.strip() for line in lines if line.rstrip().endswith(suffix)]
        return {"answer": found[0].removesuffix(suffix).strip()} if len(found) == 1 else None

    def _in_brackets(self, text: str) -> dict[str, str] | None:
        """Return the field up to the closing bracket that belongs to the opening one."""
        (prefix, _), *_ = self._patterns
        starts = [found.end() for found in prefix.finditer(text)]
        closing = self._literals[-1]
        if len(starts) != 1:
            return None
        depth = 1
        for bracket in re.finditer(re.escape(closing) + "|" + re.escape(OPENINGS[closing]), text):
            if bracket.start() >= starts[0]:
                depth += -1 if bracket[0] == closing else 1
                if depth == 0:
                    return {"answer": text[starts[0] : bracket.start()].strip()}
        return None

    def _between_literals(self, text: str) -> dict[str, str] | None:
        if any(len(pattern.findall(text)) != count for pattern, count in self._patterns):
            return None
        fields, start = {}, -1
        for number, (pattern, _) in enumerate(self._patterns):
            found = pattern.search(text, max(start, 0))
            if found is None:
                return None
            if number:
                fields[self.fields[number - 1]] = text[start : found.start()].strip()
            start = found.end()
        return fields

    def _parsed(self, text: str) -> dict[str, str] | None:
        body = text.strip()
        if len(body) > MAX_STRUCTURED_CHARACTERS:
            return None
        if body.startswith("```") and body.endswith("```") and "\n" in body:
            body = body[3:-3].strip().removeprefix(self.syntax).strip()
        values = PARSERS[self.syntax](body)
        if not isinstance(values, dict) or set(values) != set(self.keys):
            return None
        answer, *confidence = (values[key] for key in self.keys)
        is_scalar = isinstance(answer, str | int | float | bool)
        is_sure = all(
            isinstance(c, int | float) and not isinstance(c, bool) and 0 <= c <= 1
            for c in confidence
        )
        return {"answer": str(answer).strip()} if is_scalar and is_sure else None


def placeholder(field: str) -> str:
    """Return the text that stands for a field in a prompt."""
    return f"YOUR {field.upper()}"


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError):
        return None


def _without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


YAML_LINE = re.compile(r"[A-Za-z_]\w*:[ \t]+[^\s\[{&*!|>@`%#].*")
"""A key with a plain or quoted value; collections, blocks and anchors are not accepted."""


def _parse_yaml(text: str) -> Any:
    import yaml

    lines = [line for line in text.splitlines() if line.strip()]
    if not all(map(YAML_LINE.fullmatch, lines)):
        return None
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return None
    # The parser takes the last one of several equal keys.
    return values if isinstance(values, dict) and len(values) == len(lines) else None


TOML_LINE = re.compile(r"([A-Za-z_]\w*)[ \t]*=[ \t]*(\S.*)")
TOML_LITERAL = re.compile(r"'([^'\n]*)'")


def _parse_toml(text: str) -> Any:
    """Return the flat keys of a document whose values are texts, numbers or booleans."""
    values: dict[str, Any] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        found = TOML_LINE.fullmatch(line)
        if found is None or found[1] in values:
            return None
        literal = TOML_LITERAL.fullmatch(found[2])
        value = literal[1] if literal else _parse_json(found[2])
        if not isinstance(value, str | int | float | bool):
            return None
        values[found[1]] = value
    return values


PARSERS = {"json": _parse_json, "yaml": _parse_yaml, "toml": _parse_toml}

STRUCTURED = {
    "json": ('{{"{key}": "{{answer}}"}}', '{{"{key}": "{{answer}}", "confidence": 0.9}}'),
    "yaml": ('{key}: "{{answer}}"', '{key}: "{{answer}}"\nconfidence: 0.9'),
    "toml": ('{key} = "{{answer}}"', '{key} = "{{answer}}"\nconfidence = 0.9'),
}
"""Syntax to the templates without and with a confidence."""
STRUCTURED_KEYS = ("answer", "result", "output", "final_answer")

TAGS = (
    *("answer", "final_answer", "output", "result", "response", "solution"),
    *("conclusion", "reply", "final", "value", "outcome", "verdict"),
)
NESTED_TAGS = (
    *("response answer", "output result", "solution answer", "result value"),
    *("root answer", "conclusion answer", "reply text", "document final_answer"),
)

TEMPLATES: dict[str, dict[str, str]] = {
    "latex": {
        "boxed": r"\boxed{{answer}}",
        "fbox": r"\fbox{{answer}}",
        "textbf": r"\textbf{{answer}}",
        "textit": r"\textit{{answer}}",
        "underline": r"\underline{{answer}}",
        "mathbf": r"\mathbf{{answer}}",
        "text": r"\text{{answer}}",
        "align": "\\begin{align}\n{answer}\n\\end{align}",
        "equation": "\\begin{equation}\n{answer}\n\\end{equation}",
        "display_math": "\\[\n{answer}\n\\]",
    },
    "markdown": {
        "bold": "**{answer}**",
        "bold_label": "^**Answer:** {answer}",
        "bold_final_label": "^**Final answer:** {answer}",
        "heading": "^# Answer\n{answer}",
        "second_heading": "^## Final Answer\n{answer}",
        "third_heading": "^### Result\n{answer}",
        "quotation": "^> Answer: {answer}",
        "list_item": "^- Answer: {answer}",
        "table_row": "^| Answer | {answer} |",
        "fence": "```answer\n{answer}\n```",
    },
    "brackets": {
        "square": "[ANSWER: {answer}]",
        "double_square": "[[{answer}]]",
        "round": "(ANSWER: {answer})",
        "double_round": "(({answer}))",
        "curly": "{ANSWER: {answer}}",
        "double_curly": "{{{answer}}}",
        "double_angle": "<<{answer}>>",
        "guillemets": "\u00ab{answer}\u00bb",
        "corner": "\u300c{answer}\u300d",
        "lenticular": "\u3010{answer}\u3011",
    },
    "natural": {
        "the_answer_is": "^The answer is: {answer}",
        "the_final_answer_is": "^The final answer is: {answer}",
        "the_correct_answer_is": "^The correct answer is: {answer}",
        "the_best_answer_is": "^The best answer is: {answer}",
        "my_answer_is": "^My answer is: {answer}",
        "answer_colon": "^Answer: {answer}",
        "final_answer_colon": "^Final Answer: {answer}",
        "result_colon": "^Result: {answer}",
        "in_conclusion": "^In conclusion: {answer}",
        "therefore": "^Therefore, the answer is: {answer}",
        "thus": "^Thus, the answer is: {answer}",
        "to_summarize": "^To summarize: {answer}",
        "i_conclude": "^I conclude that the answer is: {answer}",
        "q_and_a": "^A: {answer}",
    },
    "html": {
        "div": '<div class="answer">{answer}</div>',
        "span": '<span class="answer">{answer}</span>',
        "paragraph": '<p id="answer">{answer}</p>',
        "strong": "<strong>{answer}</strong>",
        "emphasis": "<em>{answer}</em>",
        "mark": "<mark>{answer}</mark>",
        "code": "<code>{answer}</code>",
        "html_heading": "<h1>{answer}</h1>",
        "section": '<section id="answer">{answer}</section>',
        "html_comment": "<!-- answer: {answer} -->",
    },
    "delimiters": {
        "equals_lines": "=== ANSWER ===\n{answer}\n=== END ===",
        "dash_lines": "--- ANSWER ---\n{answer}\n--- END ---",
        "begin_end": "BEGIN ANSWER\n{answer}\nEND ANSWER",
        "start_stop": "[START]\n{answer}\n[STOP]",
        "hashes": "###{answer}###",
        "at_signs": "@@{answer}@@",
        "percent_signs": "%%{answer}%%",
        "plus_signs": "+++{answer}+++",
        "tildes": "~~~{answer}~~~",
        "arrows": ">>>{answer}<<<",
    },
    "programming": {
        "python_variable": '^answer = "{answer}"',
        "python_print": '^print("{answer}")',
        "python_return": '^return "{answer}"',
        "python_comment": "^# Answer: {answer}",
        "javascript_const": '^const answer = "{answer}";',
        "javascript_log": '^console.log("{answer}");',
        "c_comment": "^// Answer: {answer}",
        "block_comment": "/* Answer: {answer} */",
        "c_printf": '^printf("{answer}");',
        "rust_let": '^let answer = "{answer}";',
        "shell_echo": '^echo "{answer}"',
        "sql_select": "^SELECT '{answer}' AS answer;",
    },
    "complex": {
        "reasoning_answer": "<reasoning>{reasoning}</reasoning>\n<answer>{answer}</answer>",
        "analysis_conclusion": (
            "<analysis>{analysis}</analysis>\n<conclusion>{answer}</conclusion>"
        ),
        "steps_result": "<steps>{steps}</steps>\n<result>{answer}</result>",
        "answer_check": "<answer>{answer}</answer>\n<check>{check}</check>",
        "question_answer": "<question>{question}</question>\n<answer>{answer}</answer>",
        "plan_work_answer": ("<plan>{plan}</plan>\n<work>{work}</work>\n<answer>{answer}</answer>"),
        "summary_answer_source": (
            "<summary>{summary}</summary>\n<answer>{answer}</answer>\n<source>{source}</source>"
        ),
        "headed_sections": "## Reasoning\n{reasoning}\n## Answer\n{answer}\n## End",
        "labelled_lines": "REASON: {reason}\nANSWER: {answer}\nEND",
        "bracketed_pair": "[REASON]{reason}[/REASON]\n[ANSWER]{answer}[/ANSWER]",
        "claim_evidence": (
            "<claim>{answer}</claim>\n<evidence>{evidence}</evidence>\n<doubt>{doubt}</doubt>"
        ),
        "wrapped_pair": ("<output><thought>{thought}</thought><final>{answer}</final></output>"),
    },
}
"""Family to templates by name."""


def _all_formats() -> Iterable[AnswerFormat]:
    for syntax, templates in STRUCTURED.items():
        for key in STRUCTURED_KEYS:
            for template, extra in zip(templates, ((), ("confidence",)), strict=True):
                yield AnswerFormat(
                    name="_".join((syntax, key, *extra)),
                    family="structured",
                    template=template.format(key=key),
                    keys=(key, *extra),
                    syntax=syntax,
                )
    for tag in TAGS:
        yield AnswerFormat(f"tag_{tag}", "tags", f"<{tag}>{{answer}}</{tag}>")
    for pair in NESTED_TAGS:
        outer, inner = pair.split()
        template = f"<{outer}><{inner}>{{answer}}</{inner}></{outer}>"
        yield AnswerFormat(f"nested_{outer}_{inner}", "tags", template)
    for family, named in TEMPLATES.items():
        for name, template in named.items():
            yield AnswerFormat(f"{family}_{name}", family, template)


FORMATS: Mapping[str, AnswerFormat] = {each.name: each for each in _all_formats()}
"""The 132 formats by name."""

LEFT_OUT: dict[DatasetType, Sequence[str]] = {
    "generic": ("latex",),
    "math_only": ("programming",),
    "code_only": ("latex", "natural"),
}
"""Families that do not suit the answers of a kind of data set."""


def formats_for(dataset_type: DatasetType) -> list[str]:
    """Return the names of the formats that suit a kind of data set."""
    left_out = LEFT_OUT[dataset_type]
    return [name for name, each in FORMATS.items() if each.family not in left_out]
