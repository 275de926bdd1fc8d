"""Conversion of a chat to the token ids and masks of one trajectory.

    chat      [system, user, assistant]
    tokens    [L] ids of the chat template
    masks     [L] -100 up to the trained message, from there the ids themselves

Prefer the ids returned by the engine (`managed_server`): rendering the text again can give other
ids than those that the model sampled.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.type_definitions import Message
from atroposlib.utils.tokenizers.content_parts import in_readable_form

__all__ = [
    "UNMASKED_ROLES",
    "render_chat_ids",
    "tokenize_for_trainer",
    "tokenize_for_trainer_dpo",
    "tokenize_for_trainer_multistep",
]

logger = logging.getLogger(__name__)

UNMASKED_ROLES = ["assistant", "agent"]
"""Roles of messages written by the policy."""

Chat = Sequence[Message] | Sequence[Mapping[str, Any]]


class ChatTokenizer(Protocol):
    """The part of a tokenizer's interface that is used here."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def apply_chat_template(self) -> Any:
        """Function that renders a chat; the accepted options differ among tokenizers."""


def tokenize_for_trainer(
    tokenizer: ChatTokenizer,
    chat: Chat,
    include_messages: bool | str = False,
    train_on_all_assistant_turns: bool = False,
    finish_reason: str = "",
) -> dict[str, Any]:
    """Render a chat as token ids and masks.

    Args:
        tokenizer: tokenizer with a chat template.
        chat: messages; the last one is trained.
        include_messages: whether the chat is added under `messages`. A string is also used as the
            finish reason, since many environments pass it in this position.
        train_on_all_assistant_turns: whether every message of `UNMASKED_ROLES` is trained,
            instead of the last message, of any role.
        finish_reason: for `length`, a truncated completion, the end-of-text token added by the
            template is removed, because the policy did not sample it.

    Returns:
        `tokens` [L], `masks` [L], and `messages` if requested.
    """
    spans = _assistant_turns(chat) if train_on_all_assistant_turns else [len(chat) - 1]
    return _tokenize(tokenizer, chat, spans, include_messages, finish_reason)


def tokenize_for_trainer_multistep(
    tokenizer: ChatTokenizer,
    chat: Chat,
    include_messages: bool | str = False,
    finish_reason: str = "",
) -> dict[str, Any]:
    """Render a chat of several turns, of which only the last assistant message is trained.

    Messages after it, such as a final observation, are masked. Arguments and result are as for
    `tokenize_for_trainer`.
    """
    return _tokenize(tokenizer, chat, _assistant_turns(chat)[-1:], include_messages, finish_reason)


def tokenize_for_trainer_dpo(
    tokenizer: ChatTokenizer, chosen: Chat, rejected: Chat, *, include_messages: bool = False
) -> dict[str, Any]:
    """Render a preference pair; the last message of each chat is trained.

    Returns:
        `chosen_tokens`, `chosen_masks`, `rejected_tokens`, `rejected_masks`, and
        `chosen_messages`, `rejected_messages` if requested.
    """
    pair: dict[str, Any] = {}
    for side, chat in (("chosen", chosen), ("rejected", rejected)):
        row = tokenize_for_trainer(tokenizer, chat, include_messages)
        pair.update({f"{side}_{key}": value for key, value in row.items()})
    return pair


def _assistant_turns(chat: Chat) -> list[int]:
    return [i for i, message in enumerate(chat) if message["role"] in UNMASKED_ROLES]


def _tokenize(
    tokenizer: ChatTokenizer,
    chat: Chat,
    trained: Sequence[int],
    include_messages: bool | str,
    finish_reason: str,
) -> dict[str, Any]:
    if isinstance(include_messages, str):
        finish_reason = finish_reason or include_messages
    tokens = render_chat_ids(tokenizer, chat)
    masks = [IGNORE_INDEX] * len(tokens)
    for i in trained:
        start, end = _trained_span(tokenizer, tokens, chat, i)
        masks[start:end] = tokens[start:end]
    if finish_reason == "length" and tokens and tokens[-1] == tokenizer.eos_token_id:
        tokens.pop()
        masks.pop()
    if len(tokens) != len(masks):
        raise AssertionError(f"masks: {len(masks)} entries, tokens has {len(tokens)}")
    row: dict[str, Any] = {"tokens": tokens, "masks": masks}
    if include_messages:
        row["messages"] = chat
    return row


def _trained_span(
    tokenizer: ChatTokenizer, tokens: Sequence[int], chat: Chat, i: int
) -> tuple[int, int]:
    """Return where message i starts and ends among the [L] ids of the chat.

    These are the lengths of `chat[:i]` with a generation prompt and of `chat[:i + 1]`. A template
    may open replies with a `<think>` that it leaves out of chats; then the message starts where the
    ids begin to differ, if its text is there.
    """
    prefix = render_chat_ids(tokenizer, chat[:i], add_generation_prompt=True)
    # The last message extends to the end, closing tokens of the template included.
    whole = tokens if i == len(chat) - 1 else render_chat_ids(tokenizer, chat[: i + 1])
    start, num_equal = len(prefix), _num_equal(prefix, tokens)
    if num_equal < start and _decoded(tokenizer, tokens[num_equal:]).startswith(
        _written_forms(chat[i])
    ):
        start = num_equal
    for num_messages, rendered in ((i, prefix[:start]), (i + 1, whole)):
        if tokens[: len(rendered)] != rendered:
            logger.warning(
                "the chat template renders the first %d messages differently when message %d "
                "follows them; the mask may be off by some tokens",
                num_messages,
                num_messages,
            )
    return start, len(whole)


def _written_forms(message: Message | Mapping[str, Any]) -> tuple[str, ...]:
    """Return the text of a message and what follows its thinking; none without text."""
    content = message.get("content")
    if not isinstance(content, str):
        return ()
    forms = (content.strip(), content.rpartition("</think>")[2].strip())
    return tuple(filter(None, dict.fromkeys(forms)))


def _num_equal(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of ids at the start that are equal."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ids), len(others)))


def _decoded(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    # Tokenizers of users may only render chats.
    decode = getattr(tokenizer, "decode", None)
    return "" if decode is None else str(decode(list(ids))).lstrip()


def render_chat_ids(
    tokenizer: ChatTokenizer, chat: Chat, *, add_generation_prompt: bool = False
) -> list[int]:
    """Return the ids of a chat as a list, for transformers 4 and 5 and for other tokenizers."""
    options: dict[str, Any] = {"tokenize": True, "add_generation_prompt": add_generation_prompt}
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters.values()
    if any(p.name == "return_dict" or p.kind is p.VAR_KEYWORD for p in parameters):
        options["return_dict"] = False
    ids = tokenizer.apply_chat_template(in_readable_form(tokenizer, chat), **options)
    if isinstance(ids, Mapping):
        ids = ids["input_ids"]
    return [int(token_id) for token_id in ids]
