"""The scripted model behind the inference servers of a checked environment.

Every server of the environment is a `ScriptedServer`; all of them answer from one
`ScriptedModel`, which records what was asked, gives known logprobs, fails and hangs on request.

What the scripted model answers, and how it tells rollouts apart. Pure.

gold answer of the item ──► Script: a reply per role and turn
prompt ──► continues a known text? its role, next turn : the next role in the order

A tokenizer that needs no files: one token per character, with the interface the library uses.

Messages whose content is a list of parts, as a model of text alone would read them. Pure.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from atroposlib.envs.server_handling.chat_rendering import (
    Answer,
    build_chat,
    build_completion,
    render_messages,
)
from atroposlib.envs.server_handling.server_baseline import (
    AsyncSemWithAdaptiveWeight,
    TokensAndLogprobs,
)
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.errors import InferenceError
from atroposlib.utils.tokenize_for_trainer import render_chat_ids

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = [
    "FAILURE",
    "GARBAGE",
    "CharTokenizer",
    "Reply",
    "Role",
    "RoleBook",
    "SampledReply",
    "Script",
    "ScriptedModel",
    "ScriptedServer",
    "has_images",
    "known_logprob",
    "make_script",
    "text_only",
]

Role = Literal["gold", "empty", "garbage", "truncated", "unclosed"]

GARBAGE = "zqxv }{ wkjj ]] plomf (("
"""Answers nothing, holds no digit, and breaks parsers that expect matching brackets."""

THINK_END = "</think>"


class Reply(NamedTuple):
    """One answer of the scripted model."""

    role: Role
    text: str
    is_cut: bool = False
    """Whether the token budget ended it: finish reason `length`, no end-of-turn token."""


class Script(NamedTuple):
    """The replies to the rollouts of one item."""

    order: Sequence[Role]
    """Roles of the first, second, ... rollout; repeated."""
    turns: Sequence[str]
    """The gold answer of each turn, the last one repeated; empty when there is none."""

    def reply(self, role: Role, turn: int) -> Reply:
        """Return the answer of a role at a turn, counted from 0."""
        gold = self.turns[min(turn, len(self.turns) - 1)] if self.turns else GARBAGE
        if role == "gold":
            return Reply(role, gold)
        if role == "empty":
            return Reply(role, "")
        if role == "garbage":
            return Reply(role, GARBAGE)
        if role == "unclosed":
            return Reply(role, gold.replace(THINK_END, ""), is_cut=True)
        return Reply(role, gold[: len(gold) // 2], is_cut=True)


def make_script(gold: str | Sequence[str] | None, *, roles: Sequence[Role] = ()) -> Script:
    """Return the script of one item.

    Args:
        gold: the item's gold answer, or one per turn; None when the environment does not tell.
        roles: who answers, in this order; empty for all that make sense.
    """
    turns = [gold] if isinstance(gold, str) else list(gold or [])
    if roles:
        return Script(roles, turns)
    if not turns:
        return Script(("garbage", "empty", "truncated"), turns)
    order: list[Role] = ["gold", "empty", "garbage"]
    if any(len(turn) > 1 for turn in turns):
        order.append("truncated")
    if any(THINK_END in turn for turn in turns):
        order.append("unclosed")
    return Script(order, turns)


class RoleBook:
    """Remembers who wrote what, so that a rollout of several turns keeps its role."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._known: dict[str, tuple[Role, int]] = {}
        self._num_started = 0

    def replies(self, prompt: str, num_replies: int) -> list[Reply]:
        """Return the answers to a prompt and remember them.

        Args:
            prompt: the whole text the model reads.
            num_replies: `n` of the request.
        """
        continued = [text for text in self._known if prompt != text and prompt.startswith(text)]
        if continued:
            role, turn = self._known[max(continued, key=len)]
            replies = [self.script.reply(role, turn)] * num_replies
        else:
            turn = 0
            replies = [self.script.reply(self._next_role(), turn) for _ in range(num_replies)]
        for reply in replies:
            self._known[prompt + reply.text] = (reply.role, turn + 1)
        return replies

    def _next_role(self) -> Role:
        role = self.script.order[self._num_started % len(self.script.order)]
        self._num_started += 1
        return role


IMAGE_PARTS = ("image_url", "image", "input_image")


def has_images(messages: Sequence[Any]) -> bool:
    """Whether a message holds an image."""
    return any(part.get("type") in IMAGE_PARTS for message in messages for part in _parts(message))


def text_only(message: Any) -> Any:
    """Return a message with the texts of its parts as its content; others as they are."""
    parts = _parts(message)
    if not parts:
        return message
    texts = [str(part["text"]) for part in parts if part.get("type") == "text"]
    return {**message, "content": "\n".join(texts)}


def _parts(message: Any) -> list[Mapping[str, Any]]:
    content = message.get("content") if isinstance(message, Mapping) else None
    entries = content if isinstance(content, list) else []
    return [part for part in entries if isinstance(part, Mapping)]


FAILURE = "scripted failure of one request"
"""In the message of every error the model raises on request."""

NUM_SLOTS = 4096


def known_logprob(token_id: int, position: int) -> float:
    """Return the logprob of a token at a position of its reply.

    Neighbours differ, and every value is exact in binary, so that a shift shows.
    """
    return -(1 + (37 * position + token_id) % 2047) / 512


@dataclass(frozen=True)
class SampledReply:
    """One reply as the engine would report it."""

    role: Role | None
    """Who answered; None where the environment scripted the answer itself, as for a judge."""
    prompt: str
    prompt_ids: list[int]
    """[P] what the model read."""
    ids: list[int]
    """[C] what it wrote, with the end-of-turn token unless the reply was cut."""
    logprobs: list[float] | None
    """[C]; None when the request asked for text only."""
    has_images: bool = False
    """Whether the model saw images, which no tokens of the environment stand for."""


class _Seen(NamedTuple):
    """What the model read for one request."""

    prompt: str
    prompt_ids: list[int]
    has_images: bool
    is_judge: bool


class ScriptedModel:
    """Answers by a script and keeps what it answered.

    Args:
        tokenizer: of the environment.
        is_stand_in: whether the tokenizer replaces the configured one. Its prompts are longer,
            so a missing `max_tokens` budget says nothing then.
        judge_reply: the environment's own answer to some conversations, or None for the others.

    Attributes:
        sampled: replies to training requests since the last `start`.
        fail_at: number of the training request that fails, counted from 0; None for none.
        hangs: whether requests wait for ever.
        latency_s: time before each answer.
        failure: the error that was raised.
        num_answered: requests answered since the beginning, evaluations included.
        most_in_flight: most requests open at once since the last `start`.
        num_cancelled: requests whose rollout was cancelled since then.
    """

    def __init__(
        self, tokenizer: Any, *, is_stand_in: bool, judge_reply: Callable[[list[Any]], str | None]
    ) -> None:
        self.tokenizer = tokenizer
        self._is_stand_in = is_stand_in
        self._judge_reply = judge_reply
        self.num_answered = 0
        self.start(make_script(None))

    def start(self, script: Script) -> None:
        """Begin with the rollouts of an item, and forget the last ones."""
        self._book = RoleBook(script)
        self.sampled: list[SampledReply] = []
        self.fail_at: int | None = None
        self.hangs = False
        self.latency_s = 0.0
        self.failure: InferenceError | None = None
        self.num_requests = 0
        self.most_in_flight = 0
        self.num_cancelled = 0
        self.num_in_flight = 0

    async def answer(
        self,
        prompt: str,
        prompt_ids: Sequence[int],
        messages: list[Any],
        kwargs: dict[str, Any],
        *,
        with_logprobs: bool = False,
    ) -> list[tuple[Reply, SampledReply]]:
        """Wait for the replies to one request.

        Raises:
            InferenceError: it was this request's turn to fail, or it leaves no room for a reply.
        """
        is_training = kwargs.get("split", "train") == "train"
        number, self.num_requests = self.num_requests, self.num_requests + int(is_training)
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        try:
            await self._delay(number, kwargs)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_in_flight -= 1
        self.num_answered += 1
        num_replies = kwargs.get("n") or 1
        judged = self._judge_reply(messages)
        if judged is not None:
            replies = [Reply("gold", judged)] * num_replies
        else:
            replies = self._book.replies(prompt, num_replies)
        seen = _Seen(prompt, list(prompt_ids), has_images(messages), is_judge=judged is not None)
        pairs = [(reply, self._sampled(reply, seen, with_logprobs)) for reply in replies]
        if is_training:
            self.sampled += [sampled for _, sampled in pairs]
        return pairs

    async def _delay(self, number: int, kwargs: dict[str, Any]) -> None:
        limit = kwargs.get("max_tokens")
        if isinstance(limit, int) and limit < 1 and limit != -1 and not self._is_stand_in:
            raise InferenceError(f"max_tokens must be at least 1, got {limit}")
        if number == self.fail_at:
            self.failure = InferenceError(f"{FAILURE} (made by the check)")
            raise self.failure
        if self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(self.latency_s)

    def _sampled(self, reply: Reply, seen: _Seen, with_logprobs: bool) -> SampledReply:
        ids = list(self.tokenizer.encode(reply.text, add_special_tokens=False))
        if not reply.is_cut and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        logprobs = [known_logprob(token_id, i) for i, token_id in enumerate(ids)]
        return SampledReply(
            role=None if seen.is_judge else reply.role,
            prompt=seen.prompt,
            prompt_ids=seen.prompt_ids,
            ids=ids,
            logprobs=logprobs if with_logprobs else None,
            has_images=seen.has_images,
        )


class ScriptedServer(ServerHarness):
    """One inference server of a checked environment.

    Args:
        model: who answers.
        config: of the server it stands for.
    """

    def __init__(self, model: ScriptedModel, config: Any) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = model.tokenizer
        self.config = config
        self.sem = AsyncSemWithAdaptiveWeight(NUM_SLOTS)
        self.eval_sem = AsyncSemWithAdaptiveWeight(NUM_SLOTS)

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return the scripted answers to `messages`."""
        messages = list(kwargs["messages"])
        shown = [text_only(message) for message in messages]
        prompt = render_messages(self.tokenizer, shown)
        ids = render_chat_ids(self.tokenizer, shown, add_generation_prompt=True)
        pairs = await self.model.answer(prompt, ids, messages, kwargs)
        return build_chat(_answers(pairs), model=self.config.model_name, id_="check", created=0)

    async def completion(self, **kwargs: Any) -> Completion:
        """Return the scripted continuations of `prompt`."""
        prompt, ids, messages = self._prompt(kwargs)
        pairs = await self.model.answer(prompt, ids, messages, kwargs)
        answers = _answers(pairs)
        return build_completion(answers, model=self.config.model_name, id_="check", created=0)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        """Return the scripted continuations of `prompt` or `input_ids` as tokens."""
        prompt, ids, messages = self._prompt(kwargs)
        pairs = await self.model.answer(prompt, ids, messages, kwargs, with_logprobs=True)
        return (
            ids,
            [list(sampled.ids) for _, sampled in pairs],
            [list(sampled.logprobs or []) for _, sampled in pairs],
            [_finish_reason(reply) for reply, _ in pairs],
        )

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return a known logprob for each token of a prompt."""
        _, ids, _ = self._prompt(kwargs)
        return {
            "prompt_tokens": ids,
            "prompt_topk_token_ids": [[token_id] for token_id in ids],
            "prompt_topk_logprobs": [[known_logprob(t, i)] for i, t in enumerate(ids)],
        }

    def _prompt(self, kwargs: dict[str, Any]) -> tuple[str, list[int], list[Any]]:
        """Return a prompt as text, as ids, and as the one message it would be."""
        prompt, ids = kwargs.get("prompt"), kwargs.get("input_ids")
        if not isinstance(prompt, str):
            ids = ids or list(prompt or [])
            prompt = str(self.tokenizer.decode(ids))
        if ids is None:
            ids = self.tokenizer.encode(prompt, add_special_tokens=True)
        return prompt, list(ids), [{"role": "user", "content": prompt}]


def _finish_reason(reply: Reply) -> Any:
    return "length" if reply.is_cut else "stop"


def _answers(pairs: Sequence[tuple[Reply, SampledReply]]) -> list[Answer]:
    return [Answer(reply.text, _finish_reason(reply)) for reply, _ in pairs]


_SPECIALS = re.compile("(<pad>|<s>|</s>)")


class CharTokenizer:
    r"""One token per character, its id the code point; ids 0, 1 and 2 are pad, bos and eos.

    `encode("ab")` is `[1, 97, 98]`. The chat template renders each message as
    `[role]content</s>\n` and opens the reply with `[assistant]`.

    Args:
        template_bos: Whether the template itself writes the bos, as some real ones do.
        strips_thinking: Whether the template drops `<think>` blocks of assistant messages.
    """

    pad_token, bos_token, eos_token = "<pad>", "<s>", "</s>"
    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2
    name_or_path = "char-tokenizer"
    vocab_size = 256
    model_max_length = 1_000_000
    padding_side = "right"

    def __init__(self, *, template_bos: bool = False, strips_thinking: bool = False) -> None:
        self.template_bos = template_bos
        self.strips_thinking = strips_thinking
        self.chat_template = "char"
        self._specials = {self.pad_token: 0, self.bos_token: 1, self.eos_token: 2}

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of pad, bos and eos."""
        return [0, 1, 2]

    def __len__(self) -> int:
        return sys.maxunicode + 1

    def get_vocab(self) -> dict[str, int]:
        """Return the ids below `vocab_size` by their text."""
        return {chr(i): i for i in range(3, self.vocab_size)} | self._specials

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        """Return one id per character, behind the bos unless told otherwise."""
        ids = [self.bos_token_id] if add_special_tokens else []
        for piece in _SPECIALS.split(text):
            if piece in self._specials:
                ids.append(self._specials[piece])
            else:
                ids.extend(map(ord, piece))
        return ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """Return the text of ids."""
        names = {i: s for s, i in self._specials.items()}
        pieces = []
        for token_id in (int(t) for t in token_ids):
            if token_id not in names:
                pieces.append(chr(token_id))
            elif not skip_special_tokens:
                pieces.append(names[token_id])
        return "".join(pieces)

    def batch_decode(
        self, sequences: Any, skip_special_tokens: bool = False, **_: Any
    ) -> list[str]:
        """Return the text of each row of ids."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id."""
        return [self.decode([i]) for i in ids]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a token, or the ids of several."""
        if isinstance(tokens, str):
            return self.get_vocab().get(tokens, 0)
        return [self.get_vocab().get(token, 0) for token in tokens]

    def __call__(self, text: Any, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        """Return `input_ids` and `attention_mask` of one text, or of several."""
        if isinstance(text, str):
            ids: Any = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        ids = [self.encode(one, add_special_tokens) for one in text]
        return {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = False,
        **_: Any,
    ) -> Any:
        """Render a conversation; ids unless `tokenize` is False, a mapping with `return_dict`."""
        text = self.bos_token if self.template_bos else ""
        if tools:
            text += f"[tools]{len(tools)}{self.eos_token}\n"
        for message in conversation:
            content = message.get("content") or ""
            if self.strips_thinking and "</think>" in content:
                content = content.split("</think>")[-1]
            text += f"[{message['role']}]{content}{self.eos_token}\n"
        if add_generation_prompt:
            text += "[assistant]"
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids
