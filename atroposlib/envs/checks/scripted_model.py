"""The scripted model of `check`, its inference servers, and a tokenizer of characters.

Every server of the environment is a `ScriptedServer`. All of them share one `ScriptedModel`, which
records requests, returns known logprobs, and fails or hangs on request.

gold answer of the item ──► Script: a reply per role and turn
prompt ──► continues a known text? its role, next turn : the next role in the order
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from atroposlib.envs.server_handling.chat_rendering import (
    FinishReason,
    TextAnswer,
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
from atroposlib.utils.aio import NUM_WAITS
from atroposlib.utils.tokenize_for_trainer import render_chat_ids

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = [
    "GARBAGE",
    "OPTIONS",
    "CharTokenizer",
    "Role",
    "RoleBook",
    "Script",
    "ScriptedModel",
    "ScriptedSample",
    "ScriptedServer",
    "known_logprob",
    "make_script",
]

Role = Literal["gold", "empty", "garbage", "truncated", "unclosed", "copied", "foreign"]

GARBAGE = "zqxv }{ wkjj ]] plomf (("
"""A wrong answer without digits; its brackets do not match, which breaks some parsers."""

THINK_END = "</think>"

PERIOD = 8
"""Rollouts after which the roles of a script repeat; the largest group of a check."""

OPTIONS = (
    "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "best_of",
    "chat_template", "chat_template_kwargs", "continue_final_message", "echo", "extra_body",
    "extra_headers", "frequency_penalty", "ignore_eos", "images", "include_stop_str_in_output",
    "input_ids", "logit_bias", "logprobs", "max_completion_tokens", "max_new_tokens", "max_tokens",
    "messages", "min_p", "min_tokens", "model", "n", "parallel_tool_calls", "presence_penalty",
    "prompt", "prompt_logprobs", "reasoning_effort", "repetition_penalty", "response_format",
    "return_token_ids", "seed", "skip_special_tokens", "split", "stop", "stop_token_ids", "stream",
    "structured_outputs", "suffix", "temperature", "timeout", "tool_choice", "tools", "top_k",
    "top_logprobs", "top_p", "truncate_prompt_tokens", "user",
)  # fmt: skip
"""Common options of a request, to which misspelled ones are compared."""


class ScriptedReply(NamedTuple):
    """One reply of the scripted model."""

    role: Role
    text: str
    is_truncated: bool = False
    """Whether the token budget ended it: finish reason `length`, no end-of-turn token."""

    @property
    def finish_reason(self) -> FinishReason:
        return "length" if self.is_truncated else "stop"


class Script(NamedTuple):
    """The replies to the rollouts of one item."""

    order: Sequence[Role]
    """Roles of the first, second, ... rollout; repeated."""
    turns: Sequence[str]
    """The gold answer of each turn, the last one repeated; empty without a gold answer."""
    prompts: Sequence[str] = ()
    """Prompts of other items, without special tokens."""

    def reply(self, role: Role, turn: int, prompt: str) -> ScriptedReply:
        """Return the reply of a role at a turn, counted from 0.

        Args:
            role: Role of the rollout.
            turn: Index of the reply in its rollout.
            prompt: First prompt of the rollout, without special tokens.
        """
        gold = self.turns[min(turn, len(self.turns) - 1)] if self.turns else GARBAGE
        if role == "gold":
            return ScriptedReply(role, gold)
        if role == "empty":
            return ScriptedReply(role, "")
        if role == "garbage":
            return ScriptedReply(role, GARBAGE)
        if role == "copied":
            return ScriptedReply(role, prompt)
        if role == "foreign":
            others = (text for text in self.prompts if text != prompt)
            return ScriptedReply(role, next(others, prompt))
        if role == "unclosed":
            return ScriptedReply(role, gold.replace(THINK_END, ""), is_truncated=True)
        return ScriptedReply(role, gold[: len(gold) // 2], is_truncated=True)


def make_script(
    gold: str | Sequence[str] | None, *, roles: Sequence[Role] = (), prompts: Sequence[str] = ()
) -> Script:
    """Return the script of one item.

    Args:
        gold: Gold answer of the item, or one per turn; None if unknown.
        roles: Order of the roles; empty for all that differ with this gold answer.
        prompts: Prompts of other items, without special tokens.
    """
    turns = [gold] if isinstance(gold, str) else list(gold or [])
    if roles:
        return Script(roles, turns, prompts)
    if not turns:
        return Script(("garbage", "empty", "truncated"), turns)
    others: list[Role] = ["empty", "garbage"]
    if any(len(turn) > 1 for turn in turns):
        others.append("truncated")
    if any(THINK_END in turn for turn in turns):
        others.append("unclosed")
    # One gold answer at the start of a group: scores in another order are those of other roles.
    return Script(["gold", *itertools.islice(itertools.cycle(others), PERIOD - 1)], turns)


class RoleBook:
    """Assigns roles to rollouts; a rollout of several turns keeps its role."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._known: dict[str, tuple[Role, int, str]] = {}
        self._num_started = 0

    def replies(
        self, prompt: str, num_replies: int, *, plain_prompt: str = ""
    ) -> list[ScriptedReply]:
        """Return `num_replies` replies to a prompt, and record them for later turns.

        `plain_prompt` is the prompt without special tokens.
        """
        continued = [text for text in self._known if prompt != text and prompt.startswith(text)]
        if continued:
            role, turn, first = self._known[max(continued, key=len)]
            replies = [self.script.reply(role, turn, first)] * num_replies
        else:
            turn, first = 0, plain_prompt
            replies = [self.script.reply(self._next_role(), 0, first) for _ in range(num_replies)]
        for reply in replies:
            self._known[prompt + reply.text] = (reply.role, turn + 1, first)
        return replies

    def _next_role(self) -> Role:
        role = self.script.order[self._num_started % len(self.script.order)]
        self._num_started += 1
        return role


IMAGE_PARTS = ("image_url", "image", "input_image")


def has_images(messages: Sequence[Any]) -> bool:
    """Whether a message contains an image."""
    return any(part.get("type") in IMAGE_PARTS for message in messages for part in _parts(message))


def text_only(message: Any) -> Any:
    """Return a message whose content is the text of its parts, without images."""
    parts = _parts(message)
    if not parts:
        return message
    texts = [str(part["text"]) for part in parts if part.get("type") == "text"]
    return {**message, "content": "\n".join(texts)}


def _parts(message: Any) -> list[Mapping[str, Any]]:
    content = message.get("content") if isinstance(message, Mapping) else None
    entries = content if isinstance(content, list) else []
    return [part for part in entries if isinstance(part, Mapping)]


NUM_SLOTS = 4096


def known_logprob(token_id: int, position: int) -> float:
    """Return the logprob of a token at a position of its reply.

    Adjacent positions differ and every value is exact in binary, so that a shift can be detected.
    """
    return -(1 + (37 * position + token_id) % 2047) / 512


@dataclass(frozen=True)
class ScriptedSample:
    """One request and its reply, as an engine reports them."""

    role: Role | None
    """None for a reply from `check_judge_reply` of the environment."""
    prompt: str
    prompt_ids: list[int]
    """[P]."""
    ids: list[int]
    """[C], with the end-of-turn token unless the reply was truncated."""
    logprobs: list[float] | None
    """[C]; None if the request was for text only."""
    has_images: bool = False
    """Whether the prompt had images, which `prompt_ids` does not represent."""


class ScriptedModel:
    """A model that replies by a script and records its replies.

    Args:
        tokenizer: Tokenizer of the environment.
        is_stand_in: Whether the tokenizer replaces the configured one. Its prompts are longer, so
            requests that leave no room for a reply are accepted.
        judge_reply: `check_judge_reply` of the environment.

    Attributes:
        sampled: Replies to training requests since the last `start`.
        fail_at: Index of the training request that fails, from 0; None if none fails.
        hangs: Whether requests wait forever.
        latency_s: Delay of each reply.
        failure: The error that was raised by `fail_at`.
        num_answered: Requests answered since construction, evaluations included.
        has_been_greedy: Whether a request since construction had temperature 0.
        options: Names of the options of the requests since construction.
        max_in_flight: Largest number of concurrent requests since the last `start`.
        num_cancelled: Requests cancelled since the last `start`.
    """

    def __init__(
        self, tokenizer: Any, *, is_stand_in: bool, judge_reply: Callable[[list[Any]], str | None]
    ) -> None:
        self.tokenizer = tokenizer
        self._is_stand_in = is_stand_in
        self._judge_reply = judge_reply
        self.num_answered = 0
        self.has_been_greedy = False
        self.options: set[str] = set()
        self.start(make_script(None))

    def start(self, script: Script) -> None:
        """Start the rollouts of an item; resets all attributes but `num_answered`."""
        self._book = RoleBook(script)
        self.sampled: list[ScriptedSample] = []
        self.fail_at: int | None = None
        self.hangs = False
        self.latency_s = 0.0
        self.failure: InferenceError | None = None
        self.num_requests = 0
        self.max_in_flight = 0
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
    ) -> list[tuple[ScriptedReply, ScriptedSample]]:
        """Wait for the replies to one request.

        Raises:
            InferenceError: `fail_at` selects this request, or `max_tokens` is below 1.
        """
        is_training = kwargs.get("split", "train") == "train"
        number, self.num_requests = self.num_requests, self.num_requests + int(is_training)
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        try:
            await self._delay(number, kwargs)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_in_flight -= 1
        self.num_answered += 1
        num_replies = kwargs.get("n") or 1
        self.has_been_greedy |= kwargs.get("temperature") == 0
        self.options |= {*kwargs, *(kwargs.get("extra_body") or {})}
        judged = self._judge_reply(messages)
        if judged is not None:
            if not isinstance(judged, str):
                name = self._judge_reply.__qualname__
                raise TypeError(f"{name} returned {judged!r:.60}; expected a text or None")
            replies = [ScriptedReply("gold", judged)] * num_replies
        else:
            plain = str(self.tokenizer.decode(list(prompt_ids), skip_special_tokens=True))
            replies = self._book.replies(prompt, num_replies, plain_prompt=plain)
        ids = [self._encode(reply) for reply in replies]
        known = [[known_logprob(token_id, i) for i, token_id in enumerate(row)] for row in ids]
        sampled = [
            ScriptedSample(
                role=None if judged is not None else reply.role,
                prompt=prompt,
                prompt_ids=list(prompt_ids),
                ids=row,
                logprobs=logprobs if with_logprobs else None,
                has_images=has_images(messages),
            )
            for reply, row, logprobs in zip(replies, ids, known, strict=True)
        ]
        if is_training:
            self.sampled += sampled
        return list(zip(replies, sampled, strict=True))

    async def _delay(self, number: int, kwargs: dict[str, Any]) -> None:
        limit = kwargs.get("max_tokens")
        if isinstance(limit, int) and limit < 1 and limit != -1 and not self._is_stand_in:
            raise InferenceError(f"max_tokens must be at least 1, got {limit}")
        if number == self.fail_at:
            self.failure = InferenceError("scripted failure of one request (made by the check)")
            raise self.failure
        if self.hangs:
            await asyncio.Event().wait()
        for _ in range(NUM_WAITS if self.latency_s else 1):
            await asyncio.sleep(self.latency_s / NUM_WAITS)

    def _encode(self, reply: ScriptedReply) -> list[int]:
        ids = list(self.tokenizer.encode(reply.text, add_special_tokens=False))
        if not reply.is_truncated and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        return ids


class ScriptedServer(ServerHarness):
    """An inference server of a checked environment; it replies with the scripted model."""

    def __init__(self, model: ScriptedModel, config: Any) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = model.tokenizer
        self.config = config
        self.sem = AsyncSemWithAdaptiveWeight(NUM_SLOTS)
        self.eval_sem = AsyncSemWithAdaptiveWeight(NUM_SLOTS)

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        messages = list(kwargs["messages"])
        shown = [text_only(message) for message in messages]
        prompt = render_messages(self.tokenizer, shown)
        ids = render_chat_ids(self.tokenizer, shown, add_generation_prompt=True)
        pairs = await self.model.answer(prompt, ids, messages, kwargs)
        return build_chat(_answers(pairs), model=self.config.model_name, id_="check", created=0)

    async def completion(self, **kwargs: Any) -> Completion:
        prompt, ids, messages = self._prompt(kwargs)
        pairs = await self.model.answer(prompt, ids, messages, kwargs)
        return build_completion(
            _answers(pairs), model=self.config.model_name, id_="check", created=0
        )

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        prompt, ids, messages = self._prompt(kwargs)
        pairs = await self.model.answer(prompt, ids, messages, kwargs, with_logprobs=True)
        return (
            ids,
            [list(sampled.ids) for _, sampled in pairs],
            [list(sampled.logprobs or []) for _, sampled in pairs],
            [reply.finish_reason for reply, _ in pairs],
        )

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        _, ids, _ = self._prompt(kwargs)
        return {
            "prompt_tokens": ids,
            "prompt_topk_token_ids": [[token_id] for token_id in ids],
            "prompt_topk_logprobs": [[known_logprob(t, i)] for i, t in enumerate(ids)],
        }

    def _prompt(self, kwargs: dict[str, Any]) -> tuple[str, list[int], list[Any]]:
        """Return a prompt as text, as ids, and as a user message."""
        prompt, ids = kwargs.get("prompt"), kwargs.get("input_ids")
        if not isinstance(prompt, str):
            ids = ids or list(prompt or [])
            prompt = str(self.tokenizer.decode(ids))
        if ids is None:
            ids = self.tokenizer.encode(prompt, add_special_tokens=True)
        return prompt, list(ids), [{"role": "user", "content": prompt}]


def _answers(pairs: Sequence[tuple[ScriptedReply, ScriptedSample]]) -> list[TextAnswer]:
    return [TextAnswer(reply.text, reply.finish_reason) for reply, _ in pairs]


_SPECIALS = re.compile("(<pad>|<s>|</s>)")


class _Encoded(dict[str, Any]):
    """Result of calling a tokenizer, whose entries are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the encoding has no {name}") from None

    def to(self, *_: Any, **__: Any) -> _Encoded:
        return self


def _as_tensor(rows: Any, kind: str | None) -> Any:
    """Return rows as the tensor that the argument `return_tensors` of a tokenizer names."""
    if kind is None:
        return rows
    if kind == "np":
        import numpy

        return numpy.array(rows)
    import torch

    return torch.tensor(rows)


class CharTokenizer:
    r"""One token per character, its id the code point; ids 0, 1 and 2 are pad, bos and eos.

    `encode("ab")` is `[1, 97, 98]`. The chat template renders each message as
    `[role]content</s>\n` and opens the reply with `[assistant]`. It has the methods of a tokenizer
    of transformers that environments use.

    Args:
        template_bos: Whether the chat template starts with the bos, as some real ones do.
        strips_thinking: Whether the chat template drops `<think>` blocks of assistant messages.
    """

    pad_token, bos_token, eos_token = "<pad>", "<s>", "</s>"
    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2
    unk_token, unk_token_id = None, None
    name_or_path = "char-tokenizer"
    vocab_size = 256
    model_max_length = 1_000_000
    padding_side, truncation_side = "right", "right"
    is_fast = False

    def __init__(self, *, template_bos: bool = False, strips_thinking: bool = False) -> None:
        self.template_bos = template_bos
        self.strips_thinking = strips_thinking
        self.chat_template = "char"
        self._specials = {self.pad_token: 0, self.bos_token: 1, self.eos_token: 2}

    @property
    def all_special_ids(self) -> list[int]:
        return [0, 1, 2]

    @property
    def all_special_tokens(self) -> list[str]:
        return list(self._specials)

    @property
    def special_tokens_map(self) -> dict[str, str]:
        names = ("pad_token", "bos_token", "eos_token")
        return dict(zip(names, self._specials, strict=True))

    def __len__(self) -> int:
        return sys.maxunicode + 1

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(3, self.vocab_size)} | self._specials

    def get_added_vocab(self) -> dict[str, int]:
        return dict(self._specials)

    def add_tokens(self, *_: Any, **__: Any) -> int:
        """Add nothing: any text is a sequence of known characters."""
        return 0

    add_special_tokens = add_tokens

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        truncation: Any = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        **_: Any,
    ) -> Any:
        """Return one id per character, after the bos unless `add_special_tokens` is False."""
        ids = [self.bos_token_id] if add_special_tokens else []
        for piece in _SPECIALS.split(text):
            if piece in self._specials:
                ids.append(self._specials[piece])
            else:
                ids.extend(map(ord, piece))
        ids = ids[:max_length] if truncation else ids
        return ids if return_tensors is None else _as_tensor([ids], return_tensors)

    def tokenize(self, text: str, **_: Any) -> list[str]:
        return [self.decode([i]) for i in self.encode(text, add_special_tokens=False)]

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        names = {i: s for s, i in self._specials.items()}
        pieces = []
        for token_id in map(int, [token_ids] if isinstance(token_ids, Integral) else token_ids):
            if token_id not in names:
                pieces.append(chr(token_id))
            elif not skip_special_tokens:
                pieces.append(names[token_id])
        return "".join(pieces)

    def batch_decode(
        self, sequences: Any, skip_special_tokens: bool = False, **_: Any
    ) -> list[str]:
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(self, ids: Any, **_: Any) -> Any:
        return self.decode(ids) if isinstance(ids, int) else [self.decode([i]) for i in ids]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        return "".join(tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self.get_vocab().get(tokens, 0)
        return [self.get_vocab().get(token, 0) for token in tokens]

    def __call__(
        self,
        text: Any,
        add_special_tokens: bool = True,
        *,
        padding: Any = False,
        return_tensors: str | None = None,
        **options: Any,
    ) -> _Encoded:
        texts = [text] if isinstance(text, str) else text
        ids = [self.encode(one, add_special_tokens, **options) for one in texts]
        longest = max(map(len, ids), default=0) if padding else 0
        if padding == "max_length":
            longest = options.get("max_length") or longest
        masks = [[1] * len(row) for row in ids]
        columns = {"input_ids": (ids, self.pad_token_id), "attention_mask": (masks, 0)}
        encoded = _Encoded()
        for name, (rows, filler) in columns.items():
            rows = [self._padded(row, longest, filler) for row in rows]
            is_one = isinstance(text, str) and return_tensors is None
            encoded[name] = rows[0] if is_one else _as_tensor(rows, return_tensors)
        return encoded

    def _padded(self, row: list[int], length: int, filler: int) -> list[int]:
        padding = [filler] * (length - len(row))
        return padding + row if self.padding_side == "left" else row + padding

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = False,
        return_tensors: str | None = None,
        **_: Any,
    ) -> Any:
        """Return ids, text if `tokenize` is False, or a mapping if `return_dict`."""
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
        encoded = self(text, add_special_tokens=False, return_tensors=return_tensors)
        return encoded if return_dict else encoded["input_ids"]
