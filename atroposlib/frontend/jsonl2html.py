r"""A static HTML page of groups: `python -m atroposlib.frontend.jsonl2html INPUT [OUTPUT]`.

JSON Lines (one group with `messages` and `scores` per line) ─► Markdown as safe HTML ─► one file

The file is self-contained: it can be opened, sent or archived. Rendering is pure.

Model output is untrusted. Raw HTML, links and images in it are shown as text. The content security
policy of the page allows only its own script and loads nothing.

Every character of a message stays visible. Markdown would hide characters that a reward may depend
on: the backslash of `\{`, the `#` of a board, a row of `_ _ _`, the stars of `2*3*4`. Rules that
drop such characters are disabled, CSS restores the marks of headings and emphasis, and spaces are
kept.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from atroposlib.utils.command_parser import CommandParser, prepare_command
from atroposlib.utils.json_text import decode_line
from atroposlib.utils.text import inert_block, inert_line, inert_markup, short_score

if TYPE_CHECKING:
    from collections.abc import Callable

    from markdown_it.rules_inline import StateInline

__all__ = [
    "as_data_address",
    "create_html_for_group",
    "generate_html",
    "get_score_class",
    "image_address",
    "main",
]

logger = logging.getLogger(__name__)

MAX_MARKDOWN_CHARACTERS = 200_000
"""Longer texts are shown without Markdown, whose cost grows faster than the text."""

CACHED_TEXTS = 256
"""Prompts repeat within a group; rendering them once halves the time of a page."""

ACTIVE_RULES = ["link", "image", "autolink", "reference", "html_inline", "html_block", "entity"]
SWALLOWING_RULES = ["escape", "hr", "lheading"]
WORDED_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+[^\W_].*(?<![#\s])\s*")
"""A heading with words, not a row of a board such as `# # _`."""


@lru_cache(maxsize=CACHED_TEXTS)
def render_markdown(text: str) -> str:
    """Return Markdown as safe HTML; raw HTML is shown as text, control characters as symbols."""
    if len(text) > MAX_MARKDOWN_CHARACTERS:
        return _preformatted(text)
    try:
        rendered: str = _converter().render(inert_block(text))
        return rendered
    except (RecursionError, ValueError, IndexError) as error:
        logger.debug("shown without Markdown: %s", error)
        return _preformatted(text)


@cache
def _converter() -> Any:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import heading
    from markdown_it.rules_inline import emphasis

    # Raw HTML is escaped. Links stay text: the address is visible and cannot be followed.
    converter = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable("table")
    converter.disable([*ACTIVE_RULES, *SWALLOWING_RULES])
    converter.block.ruler.at(
        "heading", _only_worded(heading), {"alt": ["paragraph", "reference", "blockquote"]}
    )
    converter.inline.ruler.at("emphasis", _only_stars(emphasis.tokenize))
    converter.inline.ruler.at("newline", _break_line)
    # The language of a fence would become an attribute, which the page does not use.
    converter.add_render_rule("fence", lambda _, tokens, i, *__: _code_block(tokens[i].content))
    # The style keeps line breaks, so another one in the markup would be an empty line.
    converter.add_render_rule("softbreak", lambda *_: "<br>")
    return converter


def _only_worded(heading: Callable[..., bool]) -> Callable[..., bool]:
    def rule(state: Any, start: int, end: int, silent: bool) -> bool:
        line = state.src[state.bMarks[start] : state.eMarks[start]]
        return bool(WORDED_HEADING.fullmatch(line)) and heading(state, start, end, silent)

    return rule


def _only_stars(tokenize: Callable[..., bool]) -> Callable[..., bool]:
    """Disable emphasis with underscores, as in `__init__` and `_ _`."""

    def rule(state: StateInline, silent: bool) -> bool:
        return state.src[state.pos] != "_" and tokenize(state, silent)

    return rule


def _break_line(state: StateInline, silent: bool) -> bool:
    """End a line like Markdown's own rule, but keep the spaces on both sides."""
    if state.src[state.pos] != "\n":
        return False
    if not silent:
        state.push("softbreak", "br", 0)
    state.pos += 1
    return True


def _code_block(text: str) -> str:
    return f"<pre><code>{html.escape(text, quote=False)}</code></pre>\n"


def _preformatted(text: str) -> str:
    return f"<pre>{html.escape(inert_block(text), quote=False)}</pre>"


IMAGE_STARTS = {"iVBORw0KGgo": "png", "/9j/": "jpeg", "R0lGOD": "gif", "UklGR": "webp"}
"""Image type by the first characters of its base64 text."""
PROMPT_ROLES = frozenset({"system", "developer", "user", "environment"})
MAX_QUESTION_CHARACTERS = 120
INLINE_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+")


def get_score_class(score: Any) -> str:
    """Return the CSS class of a score; empty for values that are not numbers."""
    if isinstance(score, bool) or not isinstance(score, int | float):
        return ""
    if score > 0:
        return "reward-positive"
    return "reward-negative" if score < 0 else "reward-zero"


def create_html_for_group(group_data: Mapping[str, Any], index: int) -> str:
    """Return one group as a collapsible block, or an empty string for a group without items.

    Args:
        group_data: `messages` [G], each a text or a chat, and `scores` [G]. Unequal lengths are
            truncated to the shorter one with a warning. A common prompt is collapsed after the
            first chat. Optional fields: base64 `images` and the `gold_answer`, a text or one per
            turn, are shown above the messages; `reward_parts` [G], numbers by name, after the
            score; `step` or `policy_version` in the heading, with the start of the question.
        index: Number of the group on the page.
    """
    messages = group_data.get("messages") or []
    scores = group_data.get("scores") or []
    if len(messages) != len(scores):
        logger.warning(
            "group %d has %d messages and %d scores; showing the first %d",
            index,
            len(messages),
            len(scores),
            min(len(messages), len(scores)),
        )
    pairs = list(zip(messages, scores))  # noqa: B905 - truncated, as the warning says
    if not pairs:
        return ""
    num_shared = _num_shared([chat for chat, _ in pairs])
    parts = group_data.get("reward_parts")
    parts = parts if isinstance(parts, list) else []
    items = "\n".join(
        _item(
            _render_chat(chat, num_folded=num_shared if i else 0),
            score,
            index,
            i,
            parts=parts[i] if i < len(parts) else None,
        )
        for i, (chat, score) in enumerate(pairs)
    )
    numbers = [score for _, score in pairs if get_score_class(score) and score == score]  # no NaN
    best = max(numbers, default="")
    mean = _mean(numbers)
    return (
        f'<details class="group" id="group-{index}" data-index="{index}" data-best="{best}" '
        f'data-mean="{mean}" data-differs="{int(len(set(numbers)) > 1)}">\n'
        f"<summary>Group {index}{_about(group_data, pairs[0][0])}</summary>\n"
        f"{_from_text(group_data)}"
        f"{_group_images(group_data.get('images'))}{_gold(group_data.get('gold_answer'))}"
        f"{items}\n</details>"
    )


def _mean(numbers: Sequence[int | float]) -> float | str:
    """Return the mean; empty without numbers, and for integers too large for one."""
    try:
        return sum(numbers) / len(numbers) if numbers else ""
    except OverflowError:
        return ""


def render_page(input_name: str, groups: Sequence[str], *, num_from_text: int = 0) -> str:
    """Return a page that loads nothing.

    Args:
        input_name: Name of the input, shown in the title and in the heading.
        groups: Results of `create_html_for_group`, in the order of the page.
        num_from_text: Number of groups that are `tokenized_from_text`.
    """
    script = _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    empty = (
        '<p class="empty">No data: no line has messages and scores. An environment writes messages '
        "to its groups with --env.include_messages true.</p>"
    )
    return Template(_resource("template.html")).substitute(
        title=inert_markup(f"Rendered Messages - {input_name}"),
        style=_resource("page.css"),
        note=(
            f'<p class="hint">{num_from_text} of {len(groups)} groups are tokenized from text: the '
            "server reported no token ids.</p>"
            if num_from_text
            else ""
        ),
        groups="\n".join(groups) or empty,
        script=script,
        script_hash=digest,
    )


def scores_differ(group_data: Mapping[str, Any]) -> bool:
    """Whether a group has at least two different scores."""
    scores = group_data.get("scores")
    numbers = {s for s in scores if get_score_class(s)} if isinstance(scores, list) else set()
    return len(numbers) > 1


def _about(group_data: Mapping[str, Any], chat: Any) -> str:
    steps = (group_data.get(key) for key in ("step", "policy_version"))
    step = next((s for s in steps if isinstance(s, int) and not isinstance(s, bool)), None)
    facts = [] if step is None else [f"step {step}"]
    question = _question(chat)
    facts += [question] if question else []
    return f'<span class="about">{inert_markup(": ".join(facts))}</span>' if facts else ""


def _question(chat: Any) -> str:
    for message in chat if isinstance(chat, list) else []:
        if isinstance(message, dict) and str(message.get("role")).lower() == "user":
            text, _ = _split_content(message.get("content"))
            return inert_line(text, max_characters=MAX_QUESTION_CHARACTERS)
    return ""


def _item(content: str, score: Any, group: int, i: int, *, parts: Any) -> str:
    classes = f"item {get_score_class(score)}".strip()
    number = short_score(score) if get_score_class(score) else ""
    return (
        f'<div class="{classes}" id="group-{group}-item-{i}" tabindex="0" data-score="{number}">\n'
        f"<h3>Content {i}</h3>\n"
        f'<div class="content-block">{content}</div>\n'
        f'<p class="reward">Reward: {inert_markup(str(short_score(score)))}</p>\n'
        f"{_parts(parts)}</div>"
    )


def _parts(parts: Any) -> str:
    if not isinstance(parts, dict) or not parts:
        return ""
    texts = ", ".join(f"{name} {short_score(value)}" for name, value in parts.items())
    return f'<p class="reward-parts">Parts: {inert_markup(texts)}</p>\n'


def _num_shared(chats: Sequence[Any]) -> int:
    """Return the number of first messages, all of the prompt, that are the same in all chats."""
    first, *others = chats
    if not isinstance(first, list) or not all(isinstance(chat, list) for chat in others):
        return 0
    num_shared = 0
    for message in first:
        role = message.get("role") if isinstance(message, dict) else None
        is_prompt = isinstance(role, str) and role.lower() in PROMPT_ROLES
        if not is_prompt or any(chat[num_shared : num_shared + 1] != [message] for chat in others):
            break
        num_shared += 1
    return num_shared


def _render_chat(chat: Any, *, num_folded: int) -> str:
    if not isinstance(chat, list):
        return render_markdown(str(chat))
    folded = "\n".join(map(_render_message, chat[:num_folded]))
    rest = "\n".join(map(_render_message, chat[num_folded:]))
    if not folded:
        return rest
    return f'<details class="folded"><summary>prompt as above</summary>\n{folded}</details>\n{rest}'


def _render_message(message: Any) -> str:
    if not isinstance(message, dict):
        return render_markdown(str(message))
    text, images = _split_content(message.get("content"))
    calls = message.get("tool_calls")
    if calls:
        text += f"\n\n```json\n{json.dumps(calls, indent=1, ensure_ascii=False, default=str)}\n```"
    role = str(message.get("role") or "unknown").capitalize()
    kind = "message prompt" if role.lower() in PROMPT_ROLES else "message"
    # The role has a line of its own: a fence or a table begins a line.
    return (
        f'<div class="{kind}"><p class="role"><strong>{inert_markup(role)}</strong>:</p>\n'
        f"{render_markdown(text)}{''.join(_image(url) for url in images)}</div>"
    )


def _split_content(content: Any) -> tuple[str, list[str]]:
    if content is None:
        return "", []
    if not isinstance(content, list):
        return str(content), []
    texts: list[str] = []
    images: list[str] = []
    for part in content:
        if not isinstance(part, dict):
            texts.append(str(part))
        elif part.get("type") == "text":
            texts.append(str(part.get("text", "")))
        elif part.get("type") in ("image_url", "input_image", "image"):
            images.append(image_address(part))
        else:
            texts.append(f"[{part.get('type', 'unknown')} part]")
    return "\n\n".join(texts), images


def image_address(part: Mapping[str, Any]) -> str:
    """Return the address of an image part of a message."""
    value = part.get("image_url", part.get("image", ""))
    return str(value.get("url", "")) if isinstance(value, dict) else str(value)


def _group_images(images: Any) -> str:
    texts = [images] if isinstance(images, str) else images
    found = [text for text in texts if isinstance(text, str)] if isinstance(texts, list) else []
    addresses = (as_data_address(text) for text in dict.fromkeys(found))
    return "".join(f"{_image(address)}\n" for address in addresses)


def _from_text(group: Mapping[str, Any]) -> str:
    if not group.get("tokenized_from_text"):
        return ""
    return '<p class="hint">tokenized from text: no token ids or logprobs of the server</p>\n'


def _gold(answer: Any) -> str:
    """Return the gold answer, collapsed by default; a list has one per turn."""
    turns = answer if isinstance(answer, list) else [answer]
    texts = "\n".join(render_markdown(turn) for turn in turns if isinstance(turn, str))
    if not texts:
        return ""
    return (
        '<details class="gold"><summary>Gold answer</summary>\n'
        f'<div class="content-block">{texts}</div></details>\n'
    )


def as_data_address(text: str) -> str:
    """Return base64 text of an image as a `data:` address; other texts unchanged."""
    kind = next((kind for start, kind in IMAGE_STARTS.items() if text.startswith(start)), None)
    return text if kind is None else f"data:image/{kind};base64,{text}"


def _image(url: str) -> str:
    if INLINE_IMAGE.fullmatch(url):
        return f'<img class="image" alt="image in the message" src="{url}">'
    # Other addresses are shown and not loaded: opening a page must not send requests.
    return f'<p class="image">[image: {inert_markup(url[:200]) or "no address"}]</p>'


@cache
def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


# ruff: noqa: T201 - an entry point: it prints the path of the page


def generate_html(input_path: str | Path, output_path: str | Path | None = None) -> None:
    """Write the page of a JSON Lines file of groups.

    Lines without a group are skipped with a warning. Groups with different scores come first; a
    group keeps its number.

    Args:
        input_path: JSON Lines file.
        output_path: The page; default is the input path with the suffix `.html`, or with another
            `.html` if the groups are in a file of that name.

    Raises:
        SystemExit: with code 1, the input does not exist, or the page cannot be written or would
            replace the input.
    """
    source = Path(input_path)
    if not source.is_file():
        _fail(f"no such file: {source}")
    target = Path(output_path) if output_path else source.with_suffix(".html")
    if not output_path and target == source:
        target = source.with_name(f"{source.name}.html")
    if target.exists() and target.samefile(source):
        _fail(f"the page would replace the groups in {source}; choose another output")
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
        _fail(f"cannot write {target} from {source}: {error}")
    print(f"wrote {len(blocks)} groups to {target}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    prepare_command()
    parser = CommandParser(prog="jsonl2html", description="Write an HTML page of a file of groups.")
    parser.add_argument("input", nargs="?", help="JSON Lines file of groups")
    parser.add_argument("output", nargs="?", help="page to write (default: INPUT with .html)")
    parser.add_argument("--input_path", help="same as INPUT")
    parser.add_argument("--output_path", help="same as OUTPUT")
    given = parser.parse_args(arguments)
    input_path = given.input_path or given.input
    if input_path is None:
        parser.error("expected the file to read: INPUT or --input_path")
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
