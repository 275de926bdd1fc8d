"""The HTML of every page of the viewer, from the overview to a single token; pure.

    overview          progress of the run, distribution of its scores
    list of groups    one page of rows
    rollout           the conversation, with tool calls and thinking folded
    comparison        the common part of two rollouts of a group, and where they differ
    group             its rollouts side by side
    tokens            one rollout token by token
    images            the images of a group next to the answers about them

Text from a run is untrusted. `shown` and `block` escape it and make control characters visible; CSS
isolates its writing direction. Images come from the data only: a remote URL is shown as text and
never loaded.

A token is one `<b>`, whose class encodes whether it is trained and its probability. Its `data-t` is
the text of the tooltip.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from atroposlib.frontend.jsonl2html import as_data_address, image_address
from atroposlib.scored_data import is_traceparent
from atroposlib.utils.text import inert_markup
from atroposlib.utils.tracing import is_recorded
from atroposlib.viewer.index import GroupSummary
from atroposlib.viewer.rollouts import (
    Group,
    ShownRollout,
    extract_text_from_chat,
    image_address_in,
    mean_of,
    text_of_content,
)
from atroposlib.viewer.sources import Problems, ServiceFigures
from atroposlib.viewer.token_reader import RolloutText, TokenPiece, TokenReader

__all__ = [
    "COLORS",
    "Color",
    "block",
    "compare_page",
    "conversation_page",
    "difference",
    "empty",
    "images_of_group",
    "images_page",
    "listing_page",
    "notice",
    "number",
    "overview_page",
    "score_chip",
    "shown",
    "side_by_side_page",
    "sparkline",
    "tokens_page",
]

MAX_BLOCK_CHARACTERS = 20_000
"""Maximum length of a text before its rest is folded."""


def shown(text: object) -> str:
    """Escape untrusted text for content or for an attribute."""
    return inert_markup(str(text))


def block(text: str, *, max_characters: int = MAX_BLOCK_CHARACTERS) -> str:
    """Show text with its line breaks; the part over the limit is folded."""
    if len(text) <= max_characters:
        return f'<div class="v-text">{shown(text)}</div>'
    rest = text[max_characters:]
    return f'<div class="v-text">{shown(text[:max_characters])}</div>' + folded(
        f"{len(rest):,} more characters", f'<div class="v-text">{shown(rest)}</div>'
    )


def folded(title: str, content: str, *, is_open: bool = False, kind: str = "") -> str:
    """Fold markup under a title, which is escaped."""
    return (
        f'<details class="v-fold {kind}"{" open" if is_open else ""}>'
        f"<summary>{shown(title)}</summary>{content}</details>"
    )


def notice(text: str, kind: str = "note") -> str:
    """Show a message above a page; kinds are `note` and `bad`."""
    return f'<p class="v-notice v-{kind}" role="status">{shown(text)}</p>'


def empty(text: str) -> str:
    """Show a message in place of missing content."""
    return f'<p class="v-empty">{shown(text)}</p>'


def number(value: float | None) -> str:
    """Format a number compactly."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.1f}"


def score_class(score: float | None) -> str:
    """Return the CSS class of a score: positive, zero, negative or missing."""
    if score is None:
        return "v-none"
    return "v-pos" if score > 0 else "v-neg" if score < 0 else "v-zero"


def score_chip(score: float | None) -> str:
    """Show a score in its color."""
    return f'<b class="v-score {score_class(score)}">{number(score)}</b>'


def chip(text: str, title: str = "") -> str:
    """Show a small fact."""
    hint = f' title="{shown(title)}"' if title else ""
    return f'<span class="v-chip"{hint}>{shown(text)}</span>'


def part_chips(parts: Mapping[str, float]) -> str:
    """Show the named parts of a reward, each as a small fact."""
    hint = "part of the reward, unweighted"
    return "".join(chip(f"{name} {number(value)}", hint) for name, value in parts.items())


def figure(name: str, value: str, more: str = "") -> str:
    """Show a value in large type with its name; `more` is markup."""
    return (
        f'<div class="v-figure"><span>{shown(name)}</span><strong>{shown(value)}</strong>'
        f"{more}</div>"
    )


def sparkline(values: Sequence[float]) -> str:
    """Draw values as a small line; empty for fewer than two."""
    if len(values) < 2:
        return ""
    low, high = min(0.0, *values), max(values)
    # Of halves: the difference of large values would overflow.
    span = (high / 2 - low / 2) or 1.0
    points = " ".join(
        f"{120 * i / (len(values) - 1):.1f},{26 - 24 * (value / 2 - low / 2) / span:.1f}"
        for i, value in enumerate(values)
    )
    return (
        '<svg class="v-spark" viewBox="0 0 120 28" preserveAspectRatio="none" aria-hidden="true">'
        f'<polyline points="{points}"/></svg>'
    )


def table(name: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with an accessible name, which scrolls on narrow screens; cells are markup."""
    top = "".join(f'<th scope="col">{shown(title)}</th>' for title in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="v-wide" role="region" tabindex="0" aria-label="{shown(name)}">'
        f'<table class="v-table"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


_BARS = 10
_KEYS = (
    '<p class="v-legend v-keys">Keys: <kbd>j</kbd> <kbd>k</kbd> next and previous group, '
    "<kbd>l</kbd> <kbd>h</kbd> next and previous rollout, <kbd>1</kbd> to <kbd>9</kbd> pages, "
    "<kbd>n</kbd> <kbd>p</kbd> further rows, <kbd>/</kbd> search.</p>"
)
_SHOWN_PROBLEMS = 100


def overview_page(
    figures: ServiceFigures,
    problems: Problems,
    scores: Mapping[str, Sequence[float]],
    *,
    rewards: Mapping[str, Sequence[tuple[int, float]]],
    num_groups: int,
    num_equal: int,
    metric_drops: Mapping[str, float],
) -> str:
    """Return the page.

    Args:
        figures: values reported by the run.
        problems: groups that could not be read.
        scores: scores of the latest groups by environment.
        rewards: (step, mean score) by environment, in ascending order of steps.
        num_groups: number of groups in the index.
        num_equal: number of groups with equal scores.
        metric_drops: groups dropped by environments, by reason.
    """
    parts = [notice(text) for text in figures.notes]
    if not num_groups and figures.why_empty:
        parts.append(empty(f"No groups yet. {figures.why_empty}"))
    tiles = [figure("groups here", number(num_groups))]
    if num_groups:
        tiles.append(figure("scores all equal", f"{num_equal / num_groups:.0%} of groups"))
    tiles += [
        figure(name, value if isinstance(value, str) else number(value), sparkline(history))
        for name, value in figures.current.items()
        for history in [figures.history.get(name, [])]
    ]
    tiles += [
        figure(name, number(_recent(rates)), sparkline(rates))
        for name, rates in figures.per_second.items()
        if rates
    ]
    parts.append(f'<div class="v-figures">{"".join(tiles)}</div>')
    parts.append(_rewards(rewards))
    parts.append("<h2>Scores by environment</h2>" + _distributions(scores))
    parts.append("<h2>Dropped or refused, by reason</h2>" + _drops(figures, metric_drops))
    if problems.count:
        parts.append(_problems(problems))
    parts.append(_KEYS)
    return "".join(parts)


def _rewards(rewards: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    drawn = [(name, points) for name, points in rewards.items() if len(points) > 1]
    if not drawn:
        return ""
    tiles = "".join(
        figure(
            f"{name or 'not named'}, step {points[0][0]:,} to {points[-1][0]:,}",
            f"{number(points[0][1])} → {number(points[-1][1])}",
            _reward_plot(points),
        )
        for name, points in drawn
    )
    return f'<h2>Reward over steps</h2><div class="v-figures v-rewards">{tiles}</div>'


def _reward_plot(points: Sequence[tuple[int, float]]) -> str:
    """Draw rewards by step with the ends of both axes; the lower end is at most 0."""
    rewards = [reward for _, reward in points]
    low, high = min(0.0, *rewards), max(rewards)
    return (
        f'<div class="v-plot"><i class="v-high">{number(high)}</i>'
        f'<i class="v-low">{number(low)}</i>{sparkline(rewards)}'
        f'<i class="v-first">step {points[0][0]:,}</i><i class="v-last">{points[-1][0]:,}</i></div>'
    )


def _recent(rates: Sequence[float]) -> float:
    latest = rates[-5:]
    return sum(latest) / len(latest)


def _distributions(scores: Mapping[str, Sequence[float]]) -> str:
    if not any(scores.values()):
        return empty("No scores yet: they appear as groups are read.")
    rows = [_distribution(name, values) for name, values in scores.items() if values]
    head = ("environment", "scores", "mean", "lowest", "highest", "distribution")
    return table("scores by environment", head, rows)


def _distribution(name: str, values: Sequence[float]) -> tuple[str, ...]:
    low, high = min(values), max(values)
    half = high / 2 - low / 2  # the difference of large scores would overflow
    counts = [0] * _BARS
    for value in values:
        place = int((value / 2 - low / 2) / half * _BARS) if half > 0 else 0
        counts[min(place, _BARS - 1)] += 1
    most = max(counts)
    bars = "".join(
        f'<i style="height:{max(1, round(28 * count / most)) if count else 0}px" '
        f'title="{number(low + half * (2 * i / _BARS))} to '
        f'{number(low + half * (2 * (i + 1) / _BARS))}: {count:,}"></i>'
        for i, count in enumerate(counts)
    )
    return (
        shown(name or "not named"),
        f"{len(values):,}",
        number(mean_of(values)),
        number(low),
        number(high),
        f'<span class="v-bars">{bars}</span>',
    )


def _drops(figures: ServiceFigures, metric_drops: Mapping[str, float]) -> str:
    rows = [
        (shown(reason), "the service", number(count)) for reason, count in figures.drops.items()
    ]
    rows += [(shown(reason), "environments", number(n)) for reason, n in metric_drops.items()]
    if not rows:
        return empty(
            "None known. Environments record dropped groups in their metrics files; name the "
            "folder with --metrics."
        )
    return table("dropped or refused groups", ("reason", "reported by", "count"), rows)


def _problems(problems: Problems) -> str:
    lines = "".join(f"<li>{shown(text)}</li>" for text in problems.messages[:_SHOWN_PROBLEMS])
    title = f"{problems.count:,} could not be read; the rest is used"
    return folded(title, f"<ul>{lines}</ul>", is_open=True, kind="v-bad")


_SHOWN_SCORES = 8
_LISTING_HEAD = "".join(
    f'<th scope="col">{name}</th>'
    for name in ("group", "environment", "step", "scores", "mean", "longest", "question")
)


def listing_page(rows: Sequence[tuple[int, GroupSummary]], *, selected: int | None) -> str:
    """Return the rows as a table; a click on a row opens its group."""
    if not rows:
        return empty("No group matches. Widen the filter, or clear it with the button.")
    body = "".join(_row(position, row, position == selected) for position, row in rows)
    return (
        f'<table class="v-table v-groups"><thead><tr>{_LISTING_HEAD}</tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )


def _row(position: int, row: GroupSummary, is_selected: bool) -> str:
    scores = "".join(score_chip(score) for score in row.scores[:_SHOWN_SCORES])
    more = len(row.scores) - _SHOWN_SCORES
    mean = mean_of(row.scores) if row.scores else None
    return (
        f'<tr data-group="{position}" tabindex="0"{" class=v-selected" if is_selected else ""}>'
        f"<td>{shown(row.label)}</td><td>{shown(row.environment or '-')}</td>"
        f'<td data-name="step">{number(row.step)}</td>'
        f'<td class="v-row-scores">{scores}{f" +{more}" if more > 0 else ""}</td>'
        f'<td data-name="mean">{number(mean)}</td><td data-name="longest">{row.longest:,}</td>'
        f'<td class="v-excerpt">{shown(row.excerpt)}</td></tr>'
    )


_DATA_URL = re.compile(r"data:image/(?:png|jpe?g|gif|webp);base64,([A-Za-z0-9+/=\s]+)")
_MAX_CAPTION_CHARACTERS = 3000
_MAX_ADDRESS_CHARACTERS = 120


def images_page(group: Group, texts: list[RolloutText]) -> str:
    """Return the page: images, the question, then every score with its answer."""
    images = images_of_group(group)
    if not images:
        return empty("This group has no images.")
    answers = "".join(
        f'<section class="v-card" data-rollout="{rollout.number}" tabindex="0">'
        f"<h2>rollout {rollout.number} {score_chip(rollout.score)}</h2>"
        f"{block(text.answer, max_characters=_MAX_CAPTION_CHARACTERS)}</section>"
        for rollout, text in zip(group.rollouts, texts, strict=True)
    )
    shown_images = "".join(image_markup(image) for image in images)
    return (
        f'<div class="v-images"><div>{shown_images}</div>'
        f"<div>{block(extract_text_from_chat(texts[0].prompt))}</div></div>"
        f'<div class="v-cards">{answers}</div>'
    )


def images_of_group(group: Group) -> list[str]:
    """Return the URLs of a group's images, as `data:` URLs if possible, without duplicates."""
    found = list(_walk(group.fields.get("images")))
    for rollout in group.rollouts:
        for message in rollout.chat:
            found += images_of_content(message.get("content"))
    if not found and group.rollouts and isinstance(group.rollouts[0].messages, str):
        address = image_address_in(group.rollouts[0].messages)
        found += [address] if address else []
    return list(dict.fromkeys(found))


def images_of_content(content: Any) -> list[str]:
    """Return the URLs of the images in the content of a message."""
    parts = content if isinstance(content, list) else []
    return [address for part in parts if isinstance(part, Mapping) for address in _of_part(part)]


def image_markup(address: str) -> str:
    """Show an image of the data; show the URL of any other image as text."""
    if _DATA_URL.fullmatch(address):
        return f'<img class="v-image" alt="image of the group" src="{shown(address)}">'
    cut = address[:_MAX_ADDRESS_CHARACTERS]
    return f'<p class="v-legend">[image elsewhere: {shown(cut) or "no address"}]</p>'


def _of_part(part: Mapping[str, Any]) -> list[str]:
    if part.get("type") not in ("image", "image_url", "input_image"):
        return []
    return [as_data_address(image_address(part))]


def _walk(value: Any) -> Iterator[str]:
    """Yield the URLs in an `images` field, which may be nested."""
    if isinstance(value, str) and value:
        yield as_data_address(value)
    elif isinstance(value, Mapping):
        yield from _walk(value.get("url", value.get("image_url", value.get("image"))))
    elif isinstance(value, list):
        for entry in value:
            yield from _walk(entry)


_THINKING = re.compile(r"<(think|thinking|reasoning)>(.*?)(?:</\1>|\Z)", re.DOTALL)
_TOOL_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_LONG_TOOL_RESULT = 400


def conversation_page(rollout: ShownRollout, reader: TokenReader) -> str:
    """Return the page: a block per message; without messages, one per run of the mask."""
    parts = ""
    if rollout.reward_parts:
        score = score_chip(rollout.score)
        parts = f'<div class="v-chips">{score}{part_chips(rollout.reward_parts)}</div>'
    if rollout.chat:
        return parts + "".join(_message(message) for message in rollout.chat)
    if not len(rollout):
        return empty("This rollout has neither messages nor tokens.")
    note = '<p class="v-legend">no messages were saved: these are its tokens as text</p>'
    boxes = (
        _box("trained" if is_trained else "masked", _body(reader.text([t for _, t in run])))
        for is_trained, run in itertools.groupby(
            enumerate(rollout.tokens), key=lambda pair: rollout.is_trained(pair[0])
        )
    )
    return "".join([parts, note, *boxes])


def _message(message: Mapping[str, Any]) -> str:
    role = str(message.get("role") or "text")
    text = text_of_content(message.get("content"))
    parts = []
    if message.get("reasoning_content"):
        parts.append(_thinking(str(message["reasoning_content"])))
    if role == "tool" and len(text) > _LONG_TOOL_RESULT:
        parts.append(folded(f"result, {len(text):,} characters", block(text)))
    else:
        parts.append(_body(text))
    parts += [image_markup(image) for image in images_of_content(message.get("content"))]
    parts += [_call(call) for call in _calls(message.get("tool_calls"))]
    return _box(role, "".join(parts), name=str(message.get("name") or ""))


def _box(role: str, content: str, *, name: str = "") -> str:
    kind = role if role in ("system", "user", "assistant", "tool", "trained", "masked") else "text"
    title = f"{role} {name}".strip()
    return f'<section class="v-message v-{kind}"><h2>{shown(title)}</h2>{content}</section>'


def _body(text: str) -> str:
    parts = []
    at = 0
    spans = [
        (found.start(), found.end(), _thinking(found[2])) for found in _THINKING.finditer(text)
    ]
    spans += [(found.start(), found.end(), _spelled_call(found[1])) for found in
              _TOOL_CALL.finditer(text)]  # fmt: skip
    for start, stop, markup in sorted(spans):
        if start < at:  # a call inside the thinking
            continue
        parts += [_plain(text[at:start]), markup]
        at = stop
    return "".join([*parts, _plain(text[at:])])


def _plain(text: str) -> str:
    return block(text.strip("\n")) if text.strip() else ""


def _thinking(text: str) -> str:
    return folded(f"thinking, {len(text):,} characters", block(text.strip("\n")), kind="v-think")


def _calls(calls: Any) -> Sequence[Any]:
    return calls if isinstance(calls, list) else [calls] if calls else []


def _call(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else {}
    if not isinstance(function, dict) or "name" not in function:
        return folded("tool call", block(json.dumps(call, default=str, indent=1)), kind="v-call")
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, default=str, ensure_ascii=False)
    title = f"calls {function['name']}({arguments})"
    body = json.dumps(call, default=str, indent=1, ensure_ascii=False)
    return folded(title[:160], block(body), kind="v-call")


def _spelled_call(text: str) -> str:
    try:
        return _call(json.loads(text))
    except (ValueError, RecursionError):
        return folded("tool call that is not JSON", block(text), kind="v-call")


_WORD = re.compile(r"\s+|\w+|[^\w\s]")
_MAX_PIECES = 2500
"""Maximum number of compared pieces: the cost grows quadratically."""
_SHORTEST_FOLDED = 200


def compare_page(left: ShownRollout, right: ShownRollout, left_text: str, right_text: str) -> str:
    """Return the page: both answers side by side, their differences in color."""
    if left.number == right.number:
        return empty("Choose two different rollouts to compare.")
    if left_text == right_text:
        same = '<p class="v-legend">both say exactly the same</p>'
        return _heads(left, right) + same + block(left_text)
    start, pairs, end = difference(left_text, right_text)
    columns = ["", ""]
    for is_same, texts in pairs:
        for side, text in enumerate(texts):
            tag = "span" if is_same else ("del", "ins")[side]
            columns[side] += f"<{tag}>{shown(text)}</{tag}>" if text else ""
    body = "".join(f'<div class="v-text v-diff">{column}</div>' for column in columns)
    return (
        f"{_heads(left, right)}{_shared(start, 'the same beginning')}"
        f'<div class="v-two">{body}</div>{_shared(end, "the same end")}'
    )


def difference(left: str, right: str) -> tuple[str, list[tuple[bool, tuple[str, str]]], str]:
    """Split two texts into a common start, pieces that are equal or differ, and a common end.

    Compares words, or lines if there are too many words; too many lines are one piece.
    """
    before, after = _WORD.findall(left), _WORD.findall(right)
    num_start = _num_common(before, after)
    num_end = _num_common(before[num_start:][::-1], after[num_start:][::-1])
    start = "".join(before[:num_start])
    end = "".join(before[len(before) - num_end :])
    before = before[num_start : len(before) - num_end]
    after = after[num_start : len(after) - num_end]
    if max(len(before), len(after)) > _MAX_PIECES:
        before = "".join(before).splitlines(keepends=True)
        after = "".join(after).splitlines(keepends=True)
    if max(len(before), len(after)) > _MAX_PIECES:
        return start, [(False, ("".join(before), "".join(after)))], end
    matcher = difflib.SequenceMatcher(None, before, after)
    pairs = [
        (tag == "equal", ("".join(before[a:b]), "".join(after[c:d])))
        for tag, a, b, c, d in matcher.get_opcodes()
    ]
    return start, pairs, end


def _num_common(left: list[str], right: list[str]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _heads(left: ShownRollout, right: ShownRollout) -> str:
    heads = "".join(
        f"<h2>rollout {r.number} {score_chip(r.score)} {len(r):,} tokens</h2>"
        for r in (left, right)
    )
    return f'<div class="v-two">{heads}</div>'


def _shared(text: str, title: str) -> str:
    if not text.strip():
        return ""
    if len(text) < _SHORTEST_FOLDED:
        return block(text)
    return folded(f"{title}, {len(text):,} characters", block(text))


_MAX_ANSWER_CHARACTERS = 3000
_OPEN_PROMPT_CHARACTERS = 1200
_GROUP_FIELDS = ("generation_params", "group_overrides")


def side_by_side_page(
    group: Group, texts: list[RolloutText], *, selected: int, trace_url: str | None = None
) -> str:
    """Return the page: the question once, then every answer with its score.

    `trace_url` is the address of a trace with `{trace_id}` in place of its id; None shows the id.
    """
    if not group.rollouts:
        return empty("This group has no rollouts.")
    parts = [_question(group, texts)]
    if group.fields.get("tokenized_from_text"):
        parts.append(chip("tokenized from text", "no token ids or logprobs of the server"))
    parts.append(_trace_chip(group, trace_url))
    for name in _GROUP_FIELDS:
        if group.fields.get(name):
            parts.append(folded(name, block(json.dumps(group.fields[name], default=str))))
    cards = "".join(
        _card(group, rollout, text.answer, rollout.number == selected)
        for rollout, text in zip(group.rollouts, texts, strict=True)
    )
    return "".join(parts) + f'<div class="v-cards">{cards}</div>'


def _trace_chip(group: Group, trace_url: str | None) -> str:
    traceparent = group.fields.get("traceparent")
    if not is_traceparent(traceparent):
        return ""
    trace_id = str(traceparent)[3:35]
    if not is_recorded(str(traceparent)):
        return chip("trace not recorded", "left out by OTEL_TRACES_SAMPLER or the limit")
    if trace_url is None:
        return chip(f"trace {trace_id}", "id of the trace in which the group was made")
    address = shown(trace_url.replace("{trace_id}", trace_id))
    return (
        f'<a class="v-chip" href="{address}" target="_blank" rel="noopener noreferrer" '
        f'title="open the trace in which the group was made">trace {trace_id}</a>'
    )


def _question(group: Group, texts: list[RolloutText]) -> str:
    """Show the last message before the answers, with the earlier messages folded."""
    shared = group.rollouts[0].chat[: group.num_shared_messages]
    if not shared:
        prompt = texts[0].prompt
        is_shared = all(text.prompt == prompt for text in texts)
        title = f"prompt, {len(prompt):,} characters"
        title += "" if is_shared else " (of rollout 0; others differ)"
        return folded(title, block(prompt), is_open=len(prompt) <= _OPEN_PROMPT_CHARACTERS)
    before = "".join(
        folded(f"{message.get('role') or 'text'}, {len(text):,} characters", block(text))
        for message in shared[:-1]
        for text in [text_of_content(message.get("content"))]
    )
    asked = text_of_content(shared[-1].get("content"))
    title = str(shared[-1].get("role") or "text")
    return before + folded(
        title, block(asked, max_characters=_OPEN_PROMPT_CHARACTERS), is_open=True
    )


def _card(group: Group, rollout: ShownRollout, answer: str, is_selected: bool) -> str:
    facts = [chip(f"{len(rollout):,} tokens"), chip(f"{rollout.num_trained:,} trained")]
    advantage = group.advantage(rollout)
    if advantage is not None:
        facts.insert(0, _advantage_chip(advantage))
    sampled = [p for i, p in enumerate(rollout.logprobs) if rollout.is_trained(i)]
    if sampled:
        facts.append(chip(f"mean logprob {statistics.fmean(sampled):.2f}"))
    if rollout.policy_versions is not None:
        oldest, newest = rollout.policy_versions
        versions = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
        facts.append(chip(versions, "policy versions that sampled its tokens"))
    if rollout.overrides:
        facts.append(chip(json.dumps(rollout.overrides, default=str)[:80], "overrides"))
    no_text = empty("an empty answer")
    text = block(answer, max_characters=_MAX_ANSWER_CHARACTERS) if answer else no_text
    return (
        f'<section class="v-card{" v-selected" if is_selected else ""}" '
        f'data-rollout="{rollout.number}" tabindex="0">'
        f"<h2>rollout {rollout.number} {score_chip(rollout.score)}</h2>"
        f'<div class="v-chips">{part_chips(rollout.reward_parts)}{"".join(facts)}</div>'
        f"{text}</section>"
    )


def _advantage_chip(advantage: float) -> str:
    return chip(f"advantage {advantage:+.2f}", "score minus mean, in standard deviations")


Color = Literal["logprob", "advantage", "trained"]
COLORS: tuple[Color, ...] = get_args(Color)

TOKENS_PER_PAGE = 3000
_PROBABILITY_STEPS = (0.9, 0.7, 0.5, 0.3, 0.1, 0.03, 0.01)
_ADVANTAGE_STEPS = (0.1, 0.5, 1.0, 2.0)


def tokens_page(
    group: Group, rollout: ShownRollout, reader: TokenReader, *, color: Color, start: int
) -> str:
    """Return the page: a range of the tokens of a rollout."""
    if not len(rollout):
        return empty("This rollout has no tokens; its messages are on the conversation page.")
    stop = min(len(rollout), start + TOKENS_PER_PAGE)
    pieces = reader.pieces(rollout.tokens[start:stop])
    whole_advantage = group.advantage(rollout)
    spans = "".join(
        _span(rollout, start + i, piece, color, whole_advantage) for i, piece in enumerate(pieces)
    )
    return (
        f'<div class="v-chips">{_facts(rollout, whole_advantage, start, stop)}</div>'
        f"{_legend(rollout, color)}"
        f'<div class="v-tokens">{spans}</div>{_turn(start, stop, len(rollout))}'
    )


def _facts(rollout: ShownRollout, advantage: float | None, start: int, stop: int) -> str:
    facts = [
        f"score {score_chip(rollout.score)}",
        chip(f"tokens {start:,} to {stop - 1:,} of {len(rollout):,}"),
        chip(f"{rollout.num_trained:,} trained"),
    ]
    if advantage is not None:
        facts.append(_advantage_chip(advantage))
    if len(rollout.masks) != len(rollout):
        facts.append(chip("no mask of this length", "the trained tokens are not known"))
    return " ".join(facts)


def _legend(rollout: ShownRollout, color: Color) -> str:
    key = '<b class="m">masked</b> <b class="s">special</b> '
    if color == "trained":
        return f'<p class="v-legend">{key}<b class="t">trained</b></p>'
    if color == "advantage":
        source = "of its own token" if rollout.advantages else "of the whole rollout"
        return (
            f'<p class="v-legend">{key}<b class="a-4">-2</b><b class="a-2">-0.5</b>'
            f'<b class="a2">+0.5</b><b class="a4">+2</b> advantage {source}</p>'
        )
    if not rollout.logprobs:
        return f'<p class="v-legend">{key}this rollout carries no log-probabilities</p>'
    steps = "".join(
        f'<b class="l{i}">{text}</b>'
        for i, text in ((0, "&gt;90%"), (2, "&gt;50%"), (4, "&gt;10%"), (7, "&lt;1%"))
    )
    return f'<p class="v-legend">{key}{steps} probability when sampled</p>'


def _span(
    rollout: ShownRollout, position: int, piece: TokenPiece, color: Color, advantage: float | None
) -> str:
    is_trained = rollout.is_trained(position)
    logprob = _at(rollout.logprobs, position) if is_trained else None
    own_advantage = _at(rollout.advantages, position)
    facts = [f"position {position}", f"id {rollout.tokens[position]}"]
    facts.append("trained" if is_trained else "masked")
    if logprob is not None:
        facts.append(f"logprob {logprob:.4f} ({math.exp(min(0.0, logprob)):.1%})")
    if own_advantage is not None:
        facts.append(f"advantage {own_advantage:+.3f}")
    if not is_trained:
        kind = "m"
    elif color == "logprob" and logprob is not None:
        kind = f"l{_step(math.exp(min(0.0, logprob)))}"
    elif color == "advantage":
        kind = _advantage_class(advantage if own_advantage is None else own_advantage)
    else:
        kind = "t"
    special = " s" if piece.is_special else ""
    return f'<b class="{kind}{special}" data-t="{" · ".join(facts)}">{_visible(piece.text)}</b>'


def _visible(text: str) -> str:
    return shown(text).replace("\n", '<i class="nl"></i>\n') or '<i class="no"></i>'


def _step(probability: float) -> int:
    return sum(probability < bound for bound in _PROBABILITY_STEPS)


def _advantage_class(advantage: float | None) -> str:
    if not advantage:
        return "a0"
    size = sum(abs(advantage) >= bound for bound in _ADVANTAGE_STEPS)
    return f"a{'-' if advantage < 0 and size else ''}{size}"


def _at(values: object, position: int) -> float | None:
    is_there = isinstance(values, list) and position < len(values)
    return float(values[position]) if is_there else None  # type: ignore[index]


def _turn(start: int, stop: int, length: int) -> str:
    parts = []
    if start > 0:
        parts.append(f'<button data-tokens="{max(0, start - TOKENS_PER_PAGE)}">earlier</button>')
    if stop < length:
        parts.append(
            f'<button data-tokens="{stop}">later ({number(length - stop)} tokens left)</button>'
        )
    return f'<p class="v-turn">{" ".join(parts)}</p>' if parts else ""
