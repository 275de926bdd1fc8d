"""Records of preference pairs, one function per format; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from atroposlib.exporting.chats import ChatError, openai_chat, plain_chat, split_chats
from atroposlib.exporting.texts import TextPair

__all__ = ["DPO_FORMATS", "DpoFormat", "Preference"]


class Preference(NamedTuple):
    """One pair."""

    chosen: TextPair | None
    """Where the format asks for text; both sides have the same prompt."""
    rejected: TextPair | None
    chosen_messages: Any
    rejected_messages: Any


class DpoFormat(NamedTuple):
    """A format of the output."""

    build: Callable[[Preference], dict[str, Any]]
    about: str
    needs_text: bool = False
    needs_messages: bool = False
    has_score: bool = False

    @property
    def needs_tokenizer(self) -> bool:
        """Whether tokens are decoded."""
        return self.needs_text


def _texts(pair: Preference) -> tuple[TextPair, TextPair]:
    assert pair.chosen is not None
    assert pair.rejected is not None
    return pair.chosen, pair.rejected


def _prefix_pos_neg(pair: Preference) -> dict[str, Any]:
    chosen, rejected = _texts(pair)
    return {"prefix": chosen.prompt, "pos": chosen.completion, "neg": rejected.completion}


def _messages_as_given(pair: Preference) -> dict[str, Any]:
    return {"pos": pair.chosen_messages, "neg": pair.rejected_messages}


def _explicit(pair: Preference) -> dict[str, Any]:
    chosen, rejected = _texts(pair)
    return {
        "prompt": chosen.prompt,
        "chosen": chosen.completion,
        "rejected": rejected.completion,
    }


def _implicit(pair: Preference) -> dict[str, Any]:
    chosen, rejected = _texts(pair)
    return {"chosen": "".join(chosen), "rejected": "".join(rejected)}


def _chat_explicit(pair: Preference) -> dict[str, Any]:
    prompt, chosen, rejected = _split(pair)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _chat_implicit(pair: Preference) -> dict[str, Any]:
    prompt, chosen, rejected = _split(pair)
    return {"chosen": [*prompt, *chosen], "rejected": [*prompt, *rejected]}


def _axolotl_chat(pair: Preference) -> dict[str, Any]:
    prompt, chosen, rejected = _split(pair)
    _check_single(chosen, rejected)
    return {"messages": prompt, "chosen": chosen[0], "rejected": rejected[0]}


def _openai(pair: Preference) -> dict[str, Any]:
    prompt, chosen, rejected = split_chats(
        openai_chat(pair.chosen_messages), openai_chat(pair.rejected_messages)
    )
    _check_single(chosen, rejected)
    return {
        "input": {"messages": prompt},
        "preferred_output": chosen,
        "non_preferred_output": rejected,
    }


def _check_single(chosen: Any, rejected: Any) -> None:
    """Raise where one of the sides has more than the last message of its own."""
    if len(chosen) > 1 or len(rejected) > 1:
        raise ChatError("the chats part before their last message")


def _split(pair: Preference) -> tuple[Any, Any, Any]:
    return split_chats(plain_chat(pair.chosen_messages), plain_chat(pair.rejected_messages))


DPO_FORMATS: Mapping[str, DpoFormat] = {
    "atropos": DpoFormat(
        _prefix_pos_neg, "prefix, pos, neg, score of pos", needs_text=True, has_score=True
    ),
    "atropos-messages": DpoFormat(
        _messages_as_given,
        "pos and neg as the environment gave them, score of pos",
        needs_messages=True,
        has_score=True,
    ),
    "trl": DpoFormat(_explicit, "TRL: prompt, chosen, rejected", needs_text=True),
    "trl-implicit": DpoFormat(
        _implicit, "TRL: chosen and rejected with the prompt in both", needs_text=True
    ),
    "trl-chat": DpoFormat(
        _chat_explicit, "TRL: conversational prompt, chosen, rejected", needs_messages=True
    ),
    "trl-chat-implicit": DpoFormat(
        _chat_implicit, "TRL: conversational chosen and rejected", needs_messages=True
    ),
    "axolotl": DpoFormat(
        _explicit, "Axolotl, type user_defined.default: prompt, chosen, rejected", needs_text=True
    ),
    "axolotl-chat": DpoFormat(
        _axolotl_chat,
        "Axolotl, type chat_template.default: messages, chosen, rejected",
        needs_messages=True,
    ),
    "openai": DpoFormat(_openai, "OpenAI preference fine-tuning", needs_messages=True),
}
"""The formats of `atropos-dpo-gen`, by name."""
