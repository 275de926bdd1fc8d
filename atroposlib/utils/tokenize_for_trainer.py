"""Turning a chat into the token ids and masks of one trajectory.

    chat      [system, user, assistant]
    tokens    [L] ids of the chat template
    masks     [L] -100 up to the trained message, from there the ids themselves

Prefer the ids the engine returned (`managed_server`) where there are any: rendering text again can
give other ids than the model wrote.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.type_definitions import Message

__all__ = [
    "UNMASKED_ROLES",
    "render_chat_ids",
    "tokenize_for_trainer",
    "tokenize_for_trainer_dpo",
    "tokenize_for_trainer_multistep",
]

logger = logging.getLogger(__name__)

UNMASKED_ROLES = ["assistant", "agent"]
"""Roles whose messages the policy wrote."""

Chat = Sequence[Message] | Sequence[Mapping[str, Any]]


class ChatTokenizer(Protocol):
    """The part of a tokenizer's interface that is used here."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-text token."""

    @property
    def apply_chat_template(self) -> Any:
        """Render a chat; the accepted options differ among tokenizers."""


def tokenize_for_trainer(
    tokenizer: ChatTokenizer,
    chat: Chat,
    include_messages: bool | str = False,
    train_on_all_assistant_turns: bool = False,
    finish_reason: str = "",
) -> dict[str, Any]:
    """Render a chat as token ids and masks.

    Args:
        tokenizer: one with a chat template.
        chat: messages, the trained one last.
        include_messages: add the chat itself under `messages`. A text here is read as the finish
            reason too, since many environments pass it in this place.
        train_on_all_assistant_turns: train on every message of `UNMASKED_ROLES`; otherwise on the
            last message only, of any role.
        finish_reason: `length` means the completion was cut: the end-of-text token that the
            template added is removed, for the policy never wrote it.

    Returns:
        `tokens` [L], `masks` [L], and `messages` when asked for.
    """
    spans = _assistant_turns(chat) if train_on_all_assistant_turns else [len(chat) - 1]
    return _tokenize(tokenizer, chat, spans, include_messages, finish_reason)


def tokenize_for_trainer_multistep(
    tokenizer: ChatTokenizer,
    chat: Chat,
    include_messages: bool | str = False,
    finish_reason: str = "",
) -> dict[str, Any]:
    """Render a chat of several turns, trained on its last assistant message only.

    Messages after it, such as a closing observation, stay masked; a chat without an assistant
    message is masked throughout. Arguments and result are those of `tokenize_for_trainer`.
    """
    return _tokenize(tokenizer, chat, _assistant_turns(chat)[-1:], include_messages, finish_reason)


def tokenize_for_trainer_dpo(
    tokenizer: ChatTokenizer, chosen: Chat, rejected: Chat, *, include_messages: bool = False
) -> dict[str, Any]:
    """Render a preference pair, each side trained on its last message.

    Args:
        tokenizer: one with a chat template.
        chosen: the chat that ends with the preferred message.
        rejected: the chat that ends with the other one.
        include_messages: add both chats.

    Returns:
        `chosen_tokens`, `chosen_masks`, `rejected_tokens`, `rejected_masks`, and
        `chosen_messages`, `rejected_messages` when asked for.
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
        prefix = render_chat_ids(tokenizer, chat[:i], add_generation_prompt=True)
        if tokens[: len(prefix)] != prefix:
            logger.warning(
                "the chat template renders the first %d messages differently when message %d "
                "follows them; the mask may be off by some tokens",
                i,
                i,
            )
        # The last message reaches to the end, closing tokens of the template included.
        end = len(tokens) if i == len(chat) - 1 else len(render_chat_ids(tokenizer, chat[: i + 1]))
        masks[len(prefix) : end] = tokens[len(prefix) : end]
    if finish_reason == "length" and tokens and tokens[-1] == tokenizer.eos_token_id:
        tokens.pop()
        masks.pop()
    if len(tokens) != len(masks):
        raise AssertionError(f"masks: {len(masks)} entries, tokens has {len(tokens)}")
    row: dict[str, Any] = {"tokens": tokens, "masks": masks}
    if include_messages:
        row["messages"] = chat
    return row


def render_chat_ids(
    tokenizer: ChatTokenizer, chat: Chat, *, add_generation_prompt: bool = False
) -> list[int]:
    """Return the ids of a chat as a plain list, with transformers 4 and 5 and other tokenizers.

    Args:
        tokenizer: one with a chat template; it may know fewer options than transformers'.
        chat: messages.
        add_generation_prompt: open a reply at the end.
    """
    options: dict[str, Any] = {"tokenize": True, "add_generation_prompt": add_generation_prompt}
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters.values()
    if any(p.name == "return_dict" or p.kind is p.VAR_KEYWORD for p in parameters):
        options["return_dict"] = False
    ids = tokenizer.apply_chat_template(chat, **options)
    if isinstance(ids, Mapping):
        ids = ids["input_ids"]
    return [int(token_id) for token_id in ids]
