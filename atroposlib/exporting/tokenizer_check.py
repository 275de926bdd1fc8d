"""Whether a tokenizer is the one groups were made with.

Nothing in a group names its tokenizer. What speaks against one: ids that it does not have; chats
that do not occur in the decoded tokens; special tokens that its chat template does not write where
they stand; prompts whose text it writes with other tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from atroposlib.exporting.groups import ExportGroup
from atroposlib.exporting.message_texts import find_text, message_texts
from atroposlib.exporting.splitting import prompt_lengths
from atroposlib.exporting.template_check import TemplateReader

__all__ = ["TokenizerVerdict", "check_tokenizer"]

_MIN_SHARED = 0.9
_MIN_FOUND = 0.5
_MIN_SAMPLES = 3
_MIN_TOKENS = 4
_TELLING_CHARS = 20
"""So much text is not spelt by the wrong tokenizer by chance."""


class TokenizerVerdict(NamedTuple):
    """What speaks against a tokenizer."""

    is_wrong: bool
    """Whether it cannot be the right one."""
    reason: str | None
    """None when nothing speaks against it."""


def check_tokenizer(tokenizer: Any, groups: Sequence[ExportGroup]) -> TokenizerVerdict:
    """Judge a tokenizer by the first groups of an export.

    Args:
        tokenizer: of transformers.
        groups: a few.
    """
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
    """Say what is wrong when most messages stand behind other special tokens than expected."""
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
