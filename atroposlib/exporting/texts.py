r"""Token ids as text: batched decoding, and the check that a tokenizer matches the groups.

Decoding. The completion is the decoded trajectory after the decoded prompt. If the boundary falls
inside a character, or the prompt decodes differently on its own, both are decoded separately.

Tokenizer check. A group does not name its tokenizer. Evidence against one is: ids that it lacks;
chats that do not occur in the decoded tokens; special tokens before messages that its chat template
does not write there; prompts whose text it encodes to other tokens.

Two tokenizers may share all tokens of plain text and differ in special tokens only. Text decoded
with the wrong one contains every message, after the wrong special tokens:

    right one    <|im_start|>user\nHow much is it?<|im_end|>
    wrong one    <|begin_of_text|>user\nHow much is it?<|eot_id|>

Therefore the last special token before each message is compared with that of the rendered chat.
Without a chat template, or without special tokens in the text, there is no evidence.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from atroposlib.envs.server_handling.chat_rendering import render_messages
from atroposlib.errors import ConfigError
from atroposlib.exporting.groups import ExportGroup
from atroposlib.exporting.selection import prompt_lengths
from atroposlib.utils.model_paths import or_missing_folder, use_cache_without_hub

__all__ = [
    "Decoder",
    "TextPair",
    "check_tokenizer",
    "decoder_of",
    "find_text",
    "load_tokenizer",
    "message_texts",
    "split_texts",
]

Decoder = Callable[[Sequence[Sequence[int]]], list[str]]
"""Decodes rows of ids to texts, special tokens included."""


class TextPair(NamedTuple):
    """The text of one trajectory."""

    prompt: str
    completion: str


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer by name or from a folder.

    Raises:
        ConfigError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    use_cache_without_hub(name)
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        reason = or_missing_folder(reason.rstrip(" .:"), name)
        raise ConfigError(
            f"the tokenizer {name} cannot be loaded ({reason}); --tokenizer is the name or folder "
            "of the tokenizer that the groups were made with"
        ) from error


def decoder_of(tokenizer: Any) -> Decoder:
    """Return a function that decodes rows of ids, in one batch if the tokenizer supports it."""
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        backend = tokenizer.backend_tokenizer
        return lambda rows: list(backend.decode_batch(list(rows), skip_special_tokens=False))
    return lambda rows: [str(tokenizer.decode(list(ids))) for ids in rows]


def split_texts(parts: Sequence[tuple[Sequence[int], int]], decode: Decoder) -> list[TextPair]:
    """Decode trajectories, each given as its ids [L] and the number of its prompt tokens."""
    prompts = dict.fromkeys(tuple(ids[:length]) for ids, length in parts)
    texts = decode([*(ids for ids, _ in parts), *prompts])
    text_of = dict(zip(prompts, texts[len(parts) :], strict=True))
    starts = [text_of[tuple(ids[:length])] for ids, length in parts]
    apart = [i for i, prompt in enumerate(starts) if not texts[i].startswith(prompt)]
    rests = decode([parts[i][0][parts[i][1] :] for i in apart])
    completions = dict(zip(apart, rests, strict=True))
    return [
        TextPair(prompt, completions.get(i, texts[i][len(prompt) :]))
        for i, prompt in enumerate(starts)
    ]


_COMPARED_CHARS = 200
_THINKING_END = "</think>"


class Place(NamedTuple):
    """The position of a text in a longer one."""

    start: int
    end: int


def message_texts(chat: Any) -> list[list[str]]:
    """Return the forms that each message with text may have in a rendered chat.

    A template may strip content, drop the thinking before an answer, and write the content of a
    tool message as JSON. Long content is truncated. Messages without text are left out, and so are
    messages with tool calls, which some templates write without their content.

    Args:
        chat: A list of messages; other values have no texts.
    """
    messages = chat if isinstance(chat, list) else []
    contents = [
        message.get("content")
        for message in messages
        if isinstance(message, Mapping) and not message.get("tool_calls")
    ]
    return [_forms(content) for content in contents if isinstance(content, str) and content.strip()]


def find_text(text: str, forms: Sequence[str], start: int = 0) -> Place | None:
    """Return the place of the first form that occurs in a text at `start` or later."""
    for form in forms:
        found = text.find(form, start)
        if found >= 0:
            return Place(found, found + len(form))
    return None


def _forms(content: str) -> list[str]:
    plain = content.strip()
    answer = plain.rpartition(_THINKING_END)[2].strip()
    as_json = (json.dumps(plain, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
    forms = [plain, *as_json, answer]
    return list(dict.fromkeys(form[:_COMPARED_CHARS] for form in forms if form))


_QUESTION = ({"role": "user", "content": "?"},)


class _Opening(NamedTuple):
    """The text between the end of one message and the beginning of the next."""

    nearest: str
    """The special token nearest to the message."""
    others: frozenset[str]
    """The special tokens before that one."""


class TemplateReader:
    """Compares texts with chats that the template of a tokenizer renders."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}  # not in all classes
        names = {*tokenizer.all_special_tokens, *(str(token) for token in added.values())}
        longest_first = sorted(filter(None, names), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._end = tokenizer.eos_token
        self._has_template = bool(getattr(tokenizer, "chat_template", None))

    def openings_match(self, text: str, chat: Any) -> list[bool]:
        """Compare the special tokens before each message in a text with those of the template.

        Returns:
            One entry per message that has such tokens in both.
        """
        written = self._rendered(chat)
        if written is None:
            return []
        known = frozenset(self._special.findall(written))
        wanted_texts = message_texts(chat)
        pairs = zip(
            self._openings(text, wanted_texts), self._openings(written, wanted_texts), strict=True
        )
        return [
            _is_same(found, wanted, known)
            for found, wanted in pairs
            if found is not None and wanted is not None
        ]

    def opens_answer(self, prompt: str) -> bool | None:
        """Whether a prompt ends with the template's special tokens before an answer.

        None if the prompt or the template has no special tokens there.
        """
        written = self._rendered(_QUESTION)
        if written is None:
            return None
        found = self._opening(prompt, 0, len(prompt))
        wanted = self._opening(written, 0, len(written))
        if found is None or wanted is None:
            return None
        return _is_same(found, wanted, frozenset(self._special.findall(written)))

    def _rendered(self, chat: Any) -> str | None:
        if not self._has_template:
            return None
        try:
            return render_messages(self._tokenizer, chat)
        except Exception:  # noqa: BLE001 - a template is a program and may raise anything
            return None

    def _openings(self, text: str, wanted_texts: Sequence[Sequence[str]]) -> list[_Opening | None]:
        """Return the opening of each message, None for one without evidence."""
        openings: list[_Opening | None] = []
        end = 0
        for forms in wanted_texts:
            place = find_text(text, forms, end)
            openings.append(None if place is None else self._opening(text, end, place.start))
            end = end if place is None else place.end
        return openings

    def _opening(self, text: str, start: int, end: int) -> _Opening | None:
        specials = [
            match[0]
            for match in self._special.finditer(text, start, end)
            if match.start() > 0  # text without a template may start with a special token too
        ]
        if not specials or specials[-1] == self._end:  # as between the turns of such a text
            return None
        return _Opening(specials[-1], frozenset(specials[:-1]))


def _is_same(found: _Opening, wanted: _Opening, known: frozenset[str]) -> bool:
    """Whether a message has the same opening in a text as in the rendered chat.

    In a text, tokens of an image or of thinking may follow the opening. They are not among the
    `known` special tokens of the rendered chat.
    """
    is_followed = wanted.nearest in found.others and found.nearest not in known
    return found.nearest == wanted.nearest or is_followed


_MIN_SHARED = 0.9
_MIN_FOUND = 0.5
_MIN_SAMPLES = 3
_MIN_TOKENS = 4
_LONG_CHARS = 20
"""Shorter messages may occur by chance in text that the wrong tokenizer decodes."""


class TokenizerMismatch(NamedTuple):
    """Evidence that a tokenizer does not match the groups."""

    reason: str
    is_certain: bool


def check_tokenizer(tokenizer: Any, groups: Sequence[ExportGroup]) -> TokenizerMismatch | None:
    """Return evidence against a tokenizer from the first groups of an export, or None."""
    highest = max((max(ids, default=0) for group in groups for ids in group.tokens), default=0)
    if highest >= len(tokenizer):
        reason = f"the groups have token {highest}, the tokenizer has {len(tokenizer)} tokens"
        return TokenizerMismatch(reason, is_certain=True)
    template = TemplateReader(tokenizer)
    texts = [
        (tokenizer.decode(list(ids)), chat)
        for group in groups
        for ids, chat in zip_longest(group.tokens, group.messages or ())
    ]
    mismatch = _message_mismatch(texts) or _opening_mismatch(template, texts)
    if mismatch is not None:
        return TokenizerMismatch(mismatch, is_certain=True)
    mismatch = _prompt_mismatch(tokenizer, template, groups)
    return None if mismatch is None else TokenizerMismatch(mismatch, is_certain=False)


def _message_mismatch(texts: Sequence[tuple[str, Any]]) -> str | None:
    """Return a reason if most chats do not occur in the text of their tokens."""
    matches = [match for text, chat in texts if (match := _contains(text, chat)) is not None]
    if len(matches) < _MIN_SAMPLES or sum(matches) >= _MIN_FOUND * len(matches):
        return None
    count = f"only {sum(matches)}" if any(matches) else "none"
    return f"in {count} of {len(matches)} trajectories the tokens decode to their messages"


def _contains(text: str, chat: Any) -> bool | None:
    """Whether a text contains a chat; None for a chat without text.

    Short messages count only in chats without long ones. Half of the long messages are enough, or
    the last one, since environments may drop or change earlier messages.
    """
    wanted = message_texts(chat)
    if not wanted:
        return None
    long = [forms for forms in wanted if min(map(len, forms)) >= _LONG_CHARS]
    found = [find_text(text, forms) is not None for forms in long or wanted]
    if long:
        return found[-1] or 2 * sum(found) >= len(found)
    return 2 * sum(found) > len(found)


def _opening_mismatch(template: TemplateReader, texts: Sequence[tuple[str, Any]]) -> str | None:
    """Return a reason if most messages follow other special tokens than in the rendered chat."""
    matches = [match for text, chat in texts for match in template.openings_match(text, chat)]
    if len(matches) < _MIN_SAMPLES or sum(matches) >= _MIN_FOUND * len(matches):
        return None
    return (
        f"{matches.count(False)} of {len(matches)} messages follow other special tokens than its "
        "chat template writes"
    )


def _prompt_mismatch(
    tokenizer: Any, template: TemplateReader, groups: Sequence[ExportGroup]
) -> str | None:
    """Return a reason if prompts encode to other tokens, or end with other special tokens."""
    prompts = [
        group.tokens[0][: lengths[0]]
        for group in groups
        if (lengths := prompt_lengths(group))[0] is not None
    ]
    prompts = [ids for ids in prompts if len(ids) >= _MIN_TOKENS]
    if len(prompts) < _MIN_SAMPLES:
        return None
    texts = [tokenizer.decode(list(ids)) for ids in prompts]
    shares = [_shared(tokenizer, ids, text) for ids, text in zip(prompts, texts, strict=True)]
    share = sum(shares) / len(shares)
    if share < _MIN_SHARED:
        return f"it encodes the text of prompts to other tokens ({share:.0%} are the same)"
    opened = [opens for text in texts if (opens := template.opens_answer(text)) is not None]
    if len(opened) >= _MIN_SAMPLES and sum(opened) < _MIN_FOUND * len(opened):
        return (
            f"{opened.count(False)} of {len(opened)} prompts end with other special tokens than "
            "its chat template writes before an answer"
        )
    return None


def _shared(tokenizer: Any, ids: Sequence[int], text: str) -> float:
    """Return the fraction of tokens that are the same when their text is encoded again."""
    again = tokenizer.encode(text, add_special_tokens=False)
    return sum((Counter(ids) & Counter(again)).values()) / max(len(ids), len(again))
