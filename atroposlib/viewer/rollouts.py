"""Tolerant reading of groups, which may come from older versions and other programs; pure.

Fields of the wrong type are ignored, and rollouts without a field are shown without it. Multimodal
chats that were saved as text are split into image and question.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atroposlib.scored_data import IGNORE_INDEX

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = [
    "Group",
    "ShownRollout",
    "extract_image_from_chat",
    "extract_text_from_chat",
    "finite_number",
    "group_of",
    "image_address_in",
    "mean_of",
    "text_of_content",
]


@dataclass(frozen=True)
class ShownRollout:
    """One trajectory of a group; fields that the group lacks are empty."""

    number: int
    """Position in the group, from 0."""
    score: float | None
    tokens: Sequence[int] = ()
    masks: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    """[L] `inference_logprobs`."""
    advantages: Sequence[float] = ()
    """[L] token-level advantages."""
    messages: Any = None  # a chat, a text, or None
    overrides: Any = None  # of any type
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Unweighted named parts of the score."""
    version_runs: Sequence[Any] = ()
    """`token_versions` of the trajectory."""

    def is_trained(self, position: int) -> bool:
        return position < len(self.masks) and self.masks[position] != IGNORE_INDEX

    @property
    def num_trained(self) -> int:
        return sum(mask != IGNORE_INDEX for mask in self.masks)

    @property
    def policy_versions(self) -> tuple[int, int] | None:
        """The oldest and the newest known policy version of its tokens; None without any."""
        runs = (run for run in self.version_runs if isinstance(run, list) and len(run) == 2)
        versions = [version for version, _ in runs if isinstance(version, int)]
        return (min(versions), max(versions)) if versions else None

    @property
    def first_trained(self) -> int:
        """Position of the first trained token; L without one."""
        return next((i for i, mask in enumerate(self.masks) if mask != IGNORE_INDEX), len(self))

    @property
    def chat(self) -> list[dict[str, Any]]:
        """Messages as role and content; a text is one message without a role."""
        if isinstance(self.messages, list):
            return [m if isinstance(m, dict) else {"content": m} for m in self.messages]
        return [] if self.messages is None else [{"content": self.messages}]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Group:
    """G rollouts of one item."""

    rollouts: list[ShownRollout]
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The decoded group."""

    @property
    def scores(self) -> list[float]:
        return [rollout.score for rollout in self.rollouts if rollout.score is not None]

    def advantage(self, rollout: ShownRollout) -> float | None:
        """Return the score of a rollout minus the mean of the group, in standard deviations."""
        scores = self.scores
        if rollout.score is None or not scores:
            return None
        # `math.dist`: squares of large scores would overflow.
        mean = mean_of(scores)
        deviation = math.dist(scores, [mean] * len(scores)) / math.sqrt(len(scores))
        return (rollout.score - mean) / deviation if deviation > 0 else 0.0

    @property
    def num_shared_messages(self) -> int:
        """Number of leading messages shared by all rollouts, at most all but the last."""
        chats = [rollout.chat for rollout in self.rollouts]
        shortest = min((len(chat) for chat in chats), default=0)
        if shortest == 0:
            return 0
        first = chats[0]
        for i in range(shortest - 1):
            is_answer = first[i].get("role") == "assistant"
            if is_answer or any(chat[i] != first[i] for chat in chats):
                return i
        return shortest - 1


def group_of(fields: Mapping[str, Any]) -> Group:
    """Read a decoded group."""
    columns = {
        name: _rows(fields.get(name))
        for name in (
            *("tokens", "masks", "scores", "inference_logprobs", "advantages", "messages"),
            *("overrides", "reward_parts", "token_versions"),
        )
    }
    count = max(len(columns[name]) for name in ("tokens", "scores", "messages"))
    return Group([_rollout(columns, number) for number in range(count)], fields)


def text_of_content(content: Any) -> str:
    """Return the text of a message's content; other parts are shown as names in brackets."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return str(content)
    return "\n".join(_text_of_part(part) for part in content)


def _text_of_part(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    if "text" in part:
        return str(part["text"])
    return f"[{part.get('type', 'unknown')} part]"


def _rollout(columns: Mapping[str, Sequence[Any]], number: int) -> ShownRollout:
    def entry(name: str) -> Any:
        rows = columns[name]
        return rows[number] if number < len(rows) else None

    return ShownRollout(
        number=number,
        score=finite_number(entry("scores")),
        tokens=_integers(entry("tokens")),
        masks=_integers(entry("masks")),
        logprobs=_numbers(entry("inference_logprobs")),
        advantages=_numbers(entry("advantages")),
        messages=entry("messages"),
        overrides=entry("overrides"),
        reward_parts=_parts(entry("reward_parts")),
        version_runs=_rows(entry("token_versions")),
    )


def _rows(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _integers(value: Any) -> Sequence[int]:
    return value if isinstance(value, list) and set(map(type, value)) <= {int} else ()


def _numbers(value: Any) -> Sequence[float]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int, float}:
        return ()
    try:
        return list(map(float, value))
    except OverflowError:
        return ()


def _parts(value: Any) -> Mapping[str, float]:
    named = value.items() if isinstance(value, dict) else ()
    found = ((str(name), finite_number(part)) for name, part in named)
    return {name: part for name, part in found if part is not None}


def finite_number(value: Any) -> float | None:
    """Return a value as a float; None if it is not a number, not finite, or too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of at least one finite number, also if their sum overflows."""
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else sum(value / len(values) for value in values)


_IMAGE = re.compile(r"data:image/(?:jpeg|png);base64,[A-Za-z0-9+/=]+")
_TEXT_PART = re.compile(r'"type"\s*:\s*"text"\s*,\s*"text"\s*:\s*("(?:[^"\\]|\\.)*")')
_IMAGE_MARK = "[Image]"


def image_address_in(chat_text: str) -> str | None:
    """Return the first `data:` URL of a JPEG or PNG in a text."""
    found = _IMAGE.search(chat_text)
    return found.group() if found else None


def extract_image_from_chat(chat_text: str) -> Image | None:
    """Return the first image in the text of a chat; None without a readable image.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    address = image_address_in(chat_text)
    if address is None:
        return None
    try:
        from PIL import Image as images
        from PIL import UnidentifiedImageError
    except ImportError as error:
        from atroposlib.errors import MissingExtraError

        raise MissingExtraError("pillow", extra="examples") from error
    try:
        content = base64.b64decode(address.partition(",")[2], validate=True)
        return images.open(io.BytesIO(content))
    except (binascii.Error, ValueError, UnidentifiedImageError):
        return None


def extract_text_from_chat(chat_text: str) -> str:
    """Return the question: the first text part, else the text after `[Image]`, else all text."""
    found = _TEXT_PART.search(chat_text)
    if found:
        try:
            return str(json.loads(found[1]))
        except ValueError:
            return found[1].strip('"')
    _, mark, rest = chat_text.partition(_IMAGE_MARK)
    return rest.strip() if mark else chat_text
