"""Accessibility: rewrite a piece of HTML so that its accessibility issues disappear.

    page, issues -> [user] -> G completions -> fenced HTML: the page with new attributes and labels
        -> each rule that is named in the issues: still violated? -> score

The HTML of the model is parsed, never rendered. Without a file at the default path, the pages in
`sample/` are used:

    python environments/community/accessibility_env/accessibility_env.py process \
        --env.total_steps 4
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.dataset_items import DatasetItems, LocalItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError
from atroposlib.tasks.answers import last_code_block
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.utils.local_records import read_splits, require_data

__all__ = [
    "RULES",
    "AccessibilityConfig",
    "AccessibilityEnv",
    "PageError",
    "is_same_page",
    "read_page",
    "score_rewrite",
]

logger = logging.getLogger("environments.accessibility")

CARD = EnvironmentCard(
    task="repair the accessibility of a piece of HTML",
    turns="1",
    reward="1 all issues fixed, up to 0.8 some, -0.5 none; -1 per issue for another page",
    data="20 pages shipped, or `--env.dataset_path`",
    command="process --env.total_steps 4",
)

DEFAULT_PATH = "data/accessibility_dataset.jsonl"
SAMPLE = Path(__file__).with_name("sample")
ALL_FIXED, PART_FIXED, NONE_FIXED, NOT_A_REWRITE = 1.0, 0.8, -0.5, -1.0
MAX_HTML_CHARACTERS = 20_000
MAX_DEPTH = 100
MAX_TEXT_CHARACTERS = 250
"""Characters of an alternative text or a label."""
VOID = frozenset(
    [
        *("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source"),
        *("track", "wbr"),
    ]
)
OPTIONAL_END = frozenset(
    ["li", "p", "option", "td", "th", "tr", "tbody", "thead", "tfoot", "dd", "dt"]
)
"""Elements whose closing tag may be missing."""
ADDED_ATTRIBUTES = frozenset(["alt", "aria-label", "aria-labelledby", "for", "id", "title"])
CHANGED_ATTRIBUTES = ADDED_ATTRIBUTES - {"id"}
UNLABELED_TYPES = frozenset(["hidden", "submit", "button", "reset", "image"])
PLACEHOLDERS = frozenset(
    [
        *("alt", "alternative", "graphic", "icon", "image", "img", "input", "label", "logo"),
        *("photo", "picture", "text", "todo"),
    ]
)
"""Texts that describe nothing."""
QUESTION = (
    "This piece of HTML has accessibility issues:\n\n<page>\n{html}\n</page>\n\nFix these, and "
    "nothing else:\n{issues}\n\nKeep all elements, attributes and texts in order. You may add the "
    "attributes alt, aria-label, aria-labelledby, for, id and title, and label elements. Write "
    "the whole piece of HTML again in one block that is fenced with three backquotes."
)


class PageError(ValueError):
    """A text is not HTML in which every element is closed."""


@dataclass
class Element:
    """One element of a page."""

    tag: str
    attributes: dict[str, str]
    labels: tuple[Element, ...] = ()
    """Label elements around it."""
    words: list[str] = field(default_factory=list)
    """Words in it and in its descendants."""

    @property
    def text(self) -> str:
        return " ".join(self.words)


@dataclass
class HtmlPage:
    """A parsed piece of HTML."""

    elements: list[Element] = field(default_factory=list)
    tokens: list[tuple[str, str]] = field(default_factory=list)
    """Kind and name of each tag and word; the index of an element stands for its opening tag."""


class _HtmlReader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.page = HtmlPage()
        self._open: list[Element] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if len(self._open) >= MAX_DEPTH or len(dict(attrs)) < len(attrs):
            raise PageError("elements are nested too deeply, or an attribute occurs twice")
        labels = tuple(element for element in self._open if element.tag == "label")
        element = Element(tag, {name: value or "" for name, value in attrs}, labels)
        self.page.tokens.append(("open", str(len(self.page.elements))))
        self.page.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open[-1].tag != tag and self._open[-1].tag in OPTIONAL_END:
            self.page.tokens.append(("close", self._open.pop().tag))
        if not self._open or self._open[-1].tag != tag:
            raise PageError(f"</{tag[:40]}> closes nothing")
        self.page.tokens.append(("close", self._open.pop().tag))

    def handle_data(self, data: str) -> None:
        words = data.split()
        self.page.tokens += [("word", word) for word in words]
        for element in self._open:
            element.words += words

    def finish(self) -> HtmlPage:
        self.close()
        if self.rawdata or any(element.tag not in OPTIONAL_END for element in self._open):
            raise PageError("an element is not closed")
        return self.page


def read_page(html: str) -> HtmlPage:
    """Parse a piece of HTML; comments are left out.

    Raises:
        PageError: it is too long, empty, or has tags that do not match.
    """
    if len(html) > MAX_HTML_CHARACTERS:
        raise PageError(f"it has more than {MAX_HTML_CHARACTERS} characters")
    reader = _HtmlReader()
    reader.feed(html)
    page = reader.finish()
    if not page.elements:
        raise PageError("it has no element")
    return page


def is_same_page(original: HtmlPage, rewrite: HtmlPage) -> bool:
    """Whether a rewrite has all of the original in order, and in addition only labels.

    Attributes in `CHANGED_ATTRIBUTES` may differ, but not be removed; those in `ADDED_ATTRIBUTES`
    may be new.
    """
    position = 0
    are_added: list[bool] = []
    for kind, name in rewrite.tokens:
        expected = original.tokens[position] if position < len(original.tokens) else None
        if kind == "open":
            element = rewrite.elements[int(name)]
            is_kept = (
                expected is not None
                and expected[0] == "open"
                and _is_kept(original.elements[int(expected[1])], element)
            )
            if not is_kept and element.tag != "label":
                return False
            if element.tag not in VOID:
                are_added.append(not is_kept)
        elif kind == "close":
            is_kept = not are_added.pop()
            if is_kept and expected != (kind, name):
                return False
        else:
            is_kept = expected == (kind, name)
            if not is_kept and not any(are_added):
                return False
        position += is_kept
    return position == len(original.tokens)


def _is_kept(original: Element, rewrite: Element) -> bool:
    before, after = original.attributes, rewrite.attributes
    return (
        original.tag == rewrite.tag
        and before.keys() <= after.keys()
        and after.keys() - before.keys() <= ADDED_ATTRIBUTES
        and all(after[name] == before[name] for name in before if name not in CHANGED_ATTRIBUTES)
    )


def has_missing_alt_text(page: HtmlPage) -> bool:
    """Whether an image that is not marked as decoration has no text that describes it."""
    for element in page.elements:
        attributes = element.attributes
        is_image = element.tag == "img" or (element.tag, _type(element)) == ("input", "image")
        if not is_image or attributes.get("role") in ("presentation", "none"):
            continue
        file = PurePosixPath(attributes.get("src", "").partition("?")[0])
        text = attributes.get("alt", "").strip()
        if not _says_something(text) or text.lower() in (file.name.lower(), file.stem.lower()):
            return True
    return False


def has_missing_label(page: HtmlPage) -> bool:
    """Whether a form control has neither a label nor an attribute that names it."""
    by_id = {e.attributes["id"]: e for e in page.elements if e.attributes.get("id")}
    labeled = {
        e.attributes["for"]
        for e in page.elements
        if e.tag == "label" and e.attributes.get("for") and _says_something(e.text)
    }
    for element in page.elements:
        if element.tag not in ("input", "select", "textarea") or _type(element) in UNLABELED_TYPES:
            continue
        attributes = element.attributes
        references = attributes.get("aria-labelledby", "").split()
        is_named = (
            _says_something(attributes.get("aria-label", ""))
            or _says_something(attributes.get("title", ""))
            or any(name in by_id and _says_something(by_id[name].text) for name in references)
            or any(_says_something(label.text) for label in element.labels)
            or attributes.get("id", "") in labeled
        )
        if not is_named:
            return True
    return False


def _type(element: Element) -> str:
    return element.attributes.get("type", "").lower()


def _says_something(text: str) -> bool:
    num_letters = sum(map(str.isalpha, text[:MAX_TEXT_CHARACTERS]))
    is_short = len(text) <= MAX_TEXT_CHARACTERS
    return is_short and num_letters >= 2 and text.strip(" .:*").lower() not in PLACEHOLDERS


RULES = {"missing_alt_text": has_missing_alt_text, "missing_label": has_missing_label}
"""Name of an issue to the function that finds it."""
DESCRIPTIONS = {
    "missing_alt_text": "missing_alt_text: an image has no text alternative that describes it",
    "missing_label": "missing_label: a form control has no label",
}


def score_rewrite(answer: str, html: str, issues: Sequence[str]) -> float:
    """Return 1.0 if all issues are fixed, 0.8 times the part that is, and -0.5 for none.

    An answer without one readable page, or with another page, scores -1.0 per issue; any answer
    scores 0.0 if there are no issues.

    Args:
        answer: the completion without its thinking.
        html: the original page.
        issues: names of `RULES` that the original violates.
    """
    targeted = set(issues)
    if not targeted:
        return 0.0
    try:
        rewrite = read_page(last_code_block(answer) or "")
    except (PageError, AssertionError, RecursionError):  # the parser asserts some of its input
        return NOT_A_REWRITE * len(targeted)
    if not is_same_page(read_page(html), rewrite):
        return NOT_A_REWRITE * len(targeted)
    num_fixed = sum(not RULES[name](rewrite) for name in targeted)
    if num_fixed == len(targeted):
        return ALL_FIXED
    return PART_FIXED * num_fixed / len(targeted) if num_fixed else NONE_FIXED


class AccessibilityConfig(LocalItemsConfig, SingleTurnEnvConfig):
    """Source of the pages, and sampling."""

    dataset_path: str = Field(
        DEFAULT_PATH,
        description="File of pages, or folder with a train and a test file; the default takes the "
        "pages that are shipped if there is no such file.",
    )

    @property
    def pages_path(self) -> Path:
        """The file or folder that is read."""
        path = Path(self.dataset_path)
        return SAMPLE if self.dataset_path == DEFAULT_PATH and not path.exists() else path


class AccessibilityEnv(DatasetItems, SingleTurnEnv):
    """Pages with issues; an item is a row."""

    name = "accessibility_env"
    env_config_cls = AccessibilityConfig
    config: AccessibilityConfig
    columns = ("html", "issues_to_fix")
    optional_columns = ("fixed_html",)
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 4096,
        "score_timeout_s": 5.0,
        "wandb_name": "accessibility_env",
    }
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    @classmethod
    def check_inputs(cls, config: BaseEnvConfig) -> None:
        if isinstance(config, AccessibilityConfig):
            require_data(config.pages_path, cls.columns)

    def _read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        seed, optional = self.config.dataset_seed, self.optional_columns
        path = self.config.pages_path
        splits = read_splits(path, self.columns, shuffle_seed=seed, optional=optional)
        train, test = (list(filter(_has_its_issues, rows)) for rows in splits)
        num_left_out = sum(map(len, splits)) - len(train) - len(test)
        if num_left_out:
            logger.warning("%d pages cannot be read or lack the issues they name", num_left_out)
        if not train:
            raise ConfigError(f"{path} has no training page with the issues that it names")
        return train, test

    def prompt(self, item: Mapping[str, Any]) -> list[dict[str, str]]:
        issues = "\n".join(f"- {DESCRIPTIONS[name]}" for name in item["issues_to_fix"])
        question = QUESTION.format(html=item["html"], issues=issues or "- none")
        return [{"role": "user", "content": question}]

    async def score(self, item: Mapping[str, Any], answer: str) -> float:
        """Score in a worker; a page over the time limit is not a rewrite."""
        issues = item["issues_to_fix"]
        lowest = NOT_A_REWRITE * len(set(issues))
        return await self.score_pool.run(
            score_rewrite, answer, item["html"], issues, default=lowest
        )

    def is_correct(self, record: Mapping[str, Any]) -> bool:
        return bool(record["score"] == ALL_FIXED)

    def check_gold_answer(self, item: Mapping[str, Any]) -> str | None:
        return f"```html\n{item['fixed_html']}\n```" if item["fixed_html"] else None


def _has_its_issues(row: Mapping[str, Any]) -> bool:
    names = row["issues_to_fix"]
    unknown = [name for name in names if name not in RULES] if isinstance(names, list) else [names]
    if unknown:
        raise ConfigError(
            f"expected issues_to_fix to be a list of {', '.join(RULES)}, got {unknown[0]!r:.80}"
        )
    try:
        page = read_page(row["html"])
    except PageError:
        return False
    return all(RULES[name](page) for name in names)


if __name__ == "__main__":
    AccessibilityEnv.cli()
