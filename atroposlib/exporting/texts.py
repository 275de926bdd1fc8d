r"""Token ids as text: batched decoding, the forms of a message, and the check of the tokenizer.

Decoding. The text of a prompt is what its tokens decode to. The completion is the rest of the whole
text, cut by length. Both sides are decoded on their own where a boundary falls inside a character,
or where the tokenizer writes the parts differently from the whole.

Tokenizer check. A group does not name its tokenizer. Evidence against one is: ids that it lacks;
chats that do not occur in the decoded tokens; special tokens that its chat template does not
write at their places; prompts whose text it encodes to other tokens.

Two tokenizers may share all tokens of plain text and differ in special tokens only. Text decoded
with the wrong one holds every message, after the wrong special tokens:

    right one    <|im_start|>user\nHow much is it?<|im_end|>
    wrong one    <|begin_of_text|>user\nHow much is it?<|eot_id|>

So the nearest special token before each message is compared with what the template writes. A
tokenizer without a template, or text without special tokens, allows no conclusion.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

from atroposlib.envs.server_handling.chat_rendering import render_messages
from atroposlib.errors import ConfigError
from atroposlib.exporting.groups import ExportGroup
from atroposlib.exporting.selection import prompt_lengths
from atroposlib.utils.model_paths import missing_folder

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
"""Turns rows of ids into texts, special tokens included."""


class Tokenizer(Protocol):
    """The part of a tokenizer's interface that exports use."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of ids, special tokens included."""


class TextPair(NamedTuple):
    """The text of one trajectory, or of one side of a pair."""

    prompt: str
    completion: str


def load_tokenizer(name: str) -> Any:
    """Load a tokenizer by name or from a folder.

    Raises:
        ConfigError: there is none; the message says how to name one on this machine.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        reason = missing_folder(name) or reason
        raise ConfigError(
            f"the tokenizer {name} cannot be loaded ({reason}); --tokenizer takes the name or the "
            "folder of the one the groups were made with"
        ) from error


def decoder_of(tokenizer: Any) -> Decoder:
    """Return the fastest way to decode many rows with a tokenizer, any kind of it."""
    transformers = sys.modules.get("transformers")
    if transformers is not None and isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        backend = tokenizer.backend_tokenizer

        def decode_together(rows: Sequence[Sequence[int]]) -> list[str]:
            return list(backend.decode_batch(list(rows), skip_special_tokens=False))

        return decode_together

    def decode_singly(rows: Sequence[Sequence[int]]) -> list[str]:
        return [str(tokenizer.decode(list(ids))) for ids in rows]

    return decode_singly


def split_texts(parts: Sequence[tuple[Sequence[int], int]], decode: Decoder) -> list[TextPair]:
    """Decode trajectories: ids [L] and the number of prompt tokens, where each is cut."""
    prompts: dict[tuple[int, ...], int] = {}
    places = [prompts.setdefault(tuple(ids[:length]), len(prompts)) for ids, length in parts]
    texts = decode([*(ids for ids, _ in parts), *prompts])
    wholes, prompt_texts = texts[: len(parts)], texts[len(parts) :]
    pairs = [_cut(whole, prompt_texts[place]) for whole, place in zip(wholes, places, strict=True)]
    apart = [i for i, pair in enumerate(pairs) if pair is None]
    rests = decode([parts[i][0][parts[i][1] :] for i in apart]) if apart else []
    again = dict(zip(apart, rests, strict=True))
    return [
        pair if pair is not None else TextPair(prompt_texts[places[i]], again[i])
        for i, pair in enumerate(pairs)
    ]


def _cut(whole: str, prompt: str) -> TextPair | None:
    if whole.startswith(prompt):
        return TextPair(prompt, whole[len(prompt) :])
    return None


_COMPARED_CHARS = 200
_THINKING_END = "</think>"


class Place(NamedTuple):
    """Where a text was found."""

    start: int
    end: int


def message_texts(chat: Any) -> list[list[str]]:
    """Return what each message with text may look like in a rendered chat.

    A template may trim a content, drop the thinking before an answer, and write the content of a
    tool message as JSON. Of a long content the beginning is returned. Contents that are no text,
    and messages with calls, which some templates write without their content, are left out.

    Args:
        chat: messages; anything else has no texts.
    """
    messages = chat if isinstance(chat, list) else []
    contents = [
        message.get("content")
        for message in messages
        if isinstance(message, Mapping) and not message.get("tool_calls")
    ]
    return [_forms(content) for content in contents if isinstance(content, str) and content.strip()]


def find_text(text: str, forms: Sequence[str], start: int = 0) -> Place | None:
    """Return where the first of several forms that occurs in a text stands, from `start` on."""
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
    """Compares texts with what the chat template of a tokenizer writes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}  # some kinds have none
        names = {*tokenizer.all_special_tokens, *(str(token) for token in added.values())}
        longest_first = sorted(filter(None, names), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._end = tokenizer.eos_token
        self._has_template = bool(getattr(tokenizer, "chat_template", None))

    def openings_match(self, text: str, chat: Any) -> list[bool]:
        """Tell of each message whether the template opens it with what stands before it in a text.

        Returns:
            One entry per message that can be judged; fewer than there are messages, or none.
        """
        written = self._rendered(chat)
        if written is None:
            return []
        known = frozenset(self._special.findall(written))
        wanted_texts = message_texts(chat)
        matches = []
        for found, wanted in zip(
            self._openings(text, wanted_texts), self._openings(written, wanted_texts), strict=True
        ):
            if found is not None and wanted is not None:
                matches.append(_is_same(found, wanted, known))
        return matches

    def opens_answer(self, prompt: str) -> bool | None:
        """Tell whether a prompt ends with what the template opens an answer with.

        None where the prompt holds no special tokens, or the template gives nothing to compare.
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
        except Exception:  # noqa: BLE001 - a template is a program and may refuse in any way
            return None

    def _openings(self, text: str, wanted_texts: Sequence[Sequence[str]]) -> list[_Opening | None]:
        """Return what stands before each message; None for one of which nothing can be said."""
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
            if match.start() > 0  # also a text that no template wrote begins with such a token
        ]
        if not specials or specials[-1] == self._end:  # which a bare text has between turns, too
            return None
        return _Opening(specials[-1], frozenset(specials[:-1]))


def _is_same(found: _Opening, wanted: _Opening, known: frozenset[str]) -> bool:
    """Whether a message is opened as the template does it, which writes the `known` tokens.

    Tokens of an image or of thinking may follow in a text; the template, which is given the
    message alone, does not write them.
    """
    is_followed = wanted.nearest in found.others and found.nearest not in known
    return found.nearest == wanted.nearest or is_followed


_MIN_SHARED = 0.9
_MIN_FOUND = 0.5
_MIN_SAMPLES = 3
_MIN_TOKENS = 4
_TELLING_CHARS = 20
"""So much text is not spelt by the wrong tokenizer by chance."""


class TokenizerVerdict(NamedTuple):
    """The evidence against a tokenizer."""

    is_wrong: bool
    """Whether it cannot be the right one."""
    reason: str | None
    """None without evidence against it."""


def check_tokenizer(tokenizer: Any, groups: Sequence[ExportGroup]) -> TokenizerVerdict:
    """Judge a tokenizer by the first groups of an export."""
    highest = max((max(ids, default=0) for group in groups for ids in group.tokens), default=0)
    if highest >= len(tokenizer):
        return TokenizerVerdict(
            True, f"the groups hold token {highest}, the tokenizer has {len(tokenizer)} tokens"
        )
    template = TemplateReader(tokenizer)
    texts = [
        (tokenizer.decode(list(ids)), chat)
        for group in groups
        for ids, chat in zip_longest(group.tokens, group.messages or ())
    ]
    reason = _judge_messages(texts) or _judge_openings(template, texts)
    if reason is not None:
        return TokenizerVerdict(True, reason)
    return TokenizerVerdict(False, _judge_prompts(tokenizer, template, groups))


def _judge_messages(texts: Sequence[tuple[str, Any]]) -> str | None:
    """Say what is wrong when most chats do not occur in the text of their tokens."""
    told = [says for text, chat in texts if (says := _says(text, chat)) is not None]
    if len(told) < _MIN_SAMPLES or sum(told) >= _MIN_FOUND * len(told):
        return None
    count = f"only {sum(told)}" if any(told) else "none"
    return f"in {count} of {len(told)} trajectories the tokens decode to their messages"


def _says(text: str, chat: Any) -> bool | None:
    """Whether a text holds a chat; None when the chat has no text to look for.

    Short messages may be found by chance: they count only where there are no longer ones. Of these
    half are enough, or the last one, where an environment drops or changes what was said before.
    """
    wanted = message_texts(chat)
    if not wanted:
        return None
    telling = [forms for forms in wanted if min(map(len, forms)) >= _TELLING_CHARS]
    found = [find_text(text, forms) is not None for forms in telling or wanted]
    if telling:
        return found[-1] or 2 * sum(found) >= len(found)
    return 2 * sum(found) > len(found)


def _judge_openings(template: TemplateReader, texts: Sequence[tuple[str, Any]]) -> str | None:
    """Return the objection when most messages follow other special tokens than expected."""
    matches = [match for text, chat in texts for match in template.openings_match(text, chat)]
    if len(matches) < _MIN_SAMPLES or sum(matches) >= _MIN_FOUND * len(matches):
        return None
    return (
        f"before {matches.count(False)} of {len(matches)} messages stand other special tokens "
        "than its chat template writes"
    )


def _judge_prompts(
    tokenizer: Any, template: TemplateReader, groups: Sequence[ExportGroup]
) -> str | None:
    """Say what is odd about the prompts, which nothing but their tokens tells."""
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
        return f"it writes the text of prompts with other tokens ({share:.0%} are the same)"
    opened = [opens for text in texts if (opens := template.opens_answer(text)) is not None]
    if len(opened) >= _MIN_SAMPLES and sum(opened) < _MIN_FOUND * len(opened):
        return (
            f"{opened.count(False)} of {len(opened)} prompts end with other special tokens than "
            "its chat template opens an answer with"
        )
    return None


def _shared(tokenizer: Any, ids: Sequence[int], text: str) -> float:
    """Return the share of tokens that come back when their text is encoded again."""
    again = tokenizer.encode(text, add_special_tokens=False)
    return sum((Counter(ids) & Counter(again)).values()) / max(len(ids), len(again))
