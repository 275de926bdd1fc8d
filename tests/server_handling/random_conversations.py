"""Random conversations of an agent through a tracked session, checked against the engine's record.

    Plan (steps, drawn by a seed or by hypothesis) ─► Agent ─► ManagedServer ─► TokenEngine
                                                        └── what must be true of every node ──┘

The engine knows every prompt it read and every token it sampled, the agent knows which reply each
request goes on from. From both follows what each node must hold, token by token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from atroposlib.envs.server_handling.chat_rendering import text_of_content
from atroposlib.envs.server_handling.managed_server import ManagedServer, SequenceNode
from atroposlib.envs.server_handling.tool_formats import FunctionCall, registry
from atroposlib.errors import PromptError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from tests.server_handling.conversation_plans import Plan, Reply, Step, WayBack

__all__ = ["Agent", "Family", "TokenEngine"]

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}},
]


@dataclass(frozen=True)
class Family:
    """A tokenizer and how its models write calls."""

    name: str
    tokenizer: Any
    tool_parser: str
    ends: tuple[int, ...]
    """Ids that may end a turn."""


@dataclass(frozen=True)
class Sequence_:
    """A completion as engine and agent know it: what was read and sampled on the way to it."""

    tokens: list[int]
    masks: list[int]
    logprobs: list[float]
    said: tuple[str, str] = ("", "")
    """The conversation with the reply, and without the reply's thinking."""


@dataclass
class TokenEngine:
    """An engine in this process that samples the given replies, never twice with one logprob."""

    family: Family
    replies: tuple[Reply, ...] = ()
    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[list[list[int]]] = field(default_factory=list)
    logprobs: list[list[list[float]]] = field(default_factory=list)
    num_sampled: int = 0

    def __post_init__(self) -> None:
        self.config = SimpleNamespace(model_name="scripted")
        self.tokenizer = self.family.tokenizer

    async def tokens_and_logprobs_completion(self, *, input_ids: list[int], **_: Any) -> Any:
        outputs = [self._sample(reply) for reply in self.replies]
        logprobs = [[self._next_logprob() for _ in ids] for ids in outputs]
        reasons = ["stop" if reply.cut is None else "length" for reply in self.replies]
        self.prompts.append(list(input_ids))
        self.outputs.append(outputs)
        self.logprobs.append(logprobs)
        return list(input_ids), outputs, logprobs, reasons

    def _next_logprob(self) -> float:
        self.num_sampled += 1
        return -self.num_sampled / 1024

    def _sample(self, reply: Reply) -> list[int]:
        text = reply.text
        tool_format = registry.find(self.family.tool_parser)
        assert tool_format is not None
        if reply.calls:
            text += tool_format.render([FunctionCall(name=n, arguments=a) for n, a in reply.calls])
        if reply.is_broken:
            text = text[:-3]
        ids = self._tokenised(text, random.Random(reply.seed))
        if reply.cut is not None:
            return ids[: reply.cut]
        return [*ids, self.family.ends[reply.end % len(self.family.ends)]]

    def _tokenised(self, text: str, chance: random.Random) -> list[int]:
        """Return one of many tokenisations: models do not sample the shortest one."""
        ids: list[int] = []
        while text:
            length = chance.choice([1, 2, 5, 40, len(text)])
            ids += self.tokenizer.encode(text[:length], add_special_tokens=False)
            text = text[length:]
        return ids


class Agent:
    """Plays a plan through a session and keeps count of what is true."""

    def __init__(self, family: Family, plan: Plan, *, track_tree: bool) -> None:
        self.family = family
        self.plan = plan
        self.engine = TokenEngine(family)
        self.session = ManagedServer(
            self.engine, track_tree=track_tree, tool_parser=family.tool_parser
        )
        self.messages: list[Any] = []
        self.parent: Sequence_ | None = None
        self.earlier: list[tuple[list[Any], Sequence_ | None, WayBack]] = []
        """(messages, parent, way back of its reply) before each request."""
        self.expected: list[Sequence_] = []
        """Every completion so far."""
        self.way_back: WayBack = "as given"
        """How the last reply went back."""
        self.num_extended = 0
        """Requests whose prompt the template would have written differently."""
        if plan.system is not None:
            self.messages.append({"role": "system", "content": plan.system})

    async def play(self) -> None:
        """Make every request of the plan, checking each."""
        for step in self.plan.steps:
            self._take(step)
            try:
                await self._ask(step)
            except PromptError:
                assert self._is_refused_rightly()
                break
        self.check_nodes()

    def _is_refused_rightly(self) -> bool:
        """Whether a new sequence would lack a text beside calls, which Mistral's template drops."""
        texts = [text_of_content(_fields(m).get("content")) for m in self.messages if _calls(m)]
        return self.family.name == "mistral" and self.parent is None and any(map(str.strip, texts))

    def check_nodes(self) -> None:
        """Every node is a completion the engine made; in a tree, every completion is a node."""
        nodes = self._nodes()
        known = [(s.tokens, s.masks, s.logprobs) for s in self.expected]
        for node in nodes:
            assert (node.tokens, node.masked_tokens, node.logprobs) in known
        if self.session.track_tree:
            assert len(nodes) <= len(known)  # equal texts share a place
        else:
            ends = [s for s in self.expected if not self._is_continued(s)]
            assert all((s.tokens, s.masks, s.logprobs) in map(_lists_of, nodes) for s in ends)

    def _is_continued(self, sequence: Sequence_) -> bool:
        return any(
            other is not sequence and other.logprobs[: len(sequence.logprobs)] == sequence.logprobs
            for other in self.expected
        )

    def _take(self, step: Step) -> None:
        """Bring the conversation to where the step's request is made."""
        if step.path == "again" and self.earlier:
            self._go_back(-1)
            return
        if step.path == "back" and len(self.earlier) > 1:
            self._go_back(-2)
            return
        if step.path == "edit" and self.earlier:
            first = next(i for i, m in enumerate(self.messages) if _role(m) == "user")
            edited = {"role": "user", "content": f"edited {len(self.earlier)}"}
            self.messages = [*self.messages[:first], edited, *self.messages[first + 1 :]]
            self.parent = None
        self.messages += self._next_messages(step)

    def _go_back(self, request: int) -> None:
        messages, self.parent, self.way_back = self.earlier[request]
        self.messages = list(messages)

    def _next_messages(self, step: Step) -> list[dict[str, Any]]:
        calls = _calls(self.messages[-1]) if self.messages else []
        results = [
            {"role": "tool", "tool_call_id": call.get("id", "x"), "content": step.result}
            for call in calls
        ]
        return results or [{"role": "user", "content": step.user}]

    async def _ask(self, step: Step) -> None:
        self.earlier.append((list(self.messages), self.parent, self.way_back))
        self.engine.replies = step.replies
        tools = {"tools": TOOLS} if self.plan.has_tools else {}
        answer = await self.session.chat_completion(
            messages=self.messages, n=len(step.replies), max_tokens=999, **tools
        )
        said = [_said(self.messages, choice.message) for choice in answer.choices]
        made = self._made(said)
        self.expected += made
        self._check_prompt()
        follow = step.follow % len(made)
        self.parent = made[follow]
        message = answer.choices[follow].message
        self.messages = [*self.messages, _written_back(message, step.way_back)]
        self.way_back = step.way_back

    def _made(self, said: list[tuple[str, str]]) -> list[Sequence_]:
        """Return the sequences of the newest request, going on from the reply the agent meant.

        Of several replies that say the same the session may have taken another one.
        """
        form = int(self.way_back == "no thinking")
        twins = [s for s in self.expected if self.parent and s.said[form] == self.parent.said[form]]
        nodes = [_lists_of(node) for node in self._nodes()]
        prompt = self.engine.prompts[-1]
        for parent in [self.parent, *twins]:
            length = len(parent.tokens) if parent is not None else 0
            if parent is None or prompt[:length] == parent.tokens:
                self.parent = parent
                made = self._completions(said)
                if all(_lists_of_sequence(sequence) in nodes for sequence in made):
                    return made
        return self._completions(said)

    def _nodes(self) -> list[SequenceNode]:
        state = self.session.get_state()
        return list(state.get("nodes") or state["sequences"].values())

    def _completions(self, said: list[tuple[str, str]]) -> list[Sequence_]:
        """Return what the newest request's sequences must be."""
        prompt = self.engine.prompts[-1]
        masks = [IGNORE_INDEX] * len(prompt)
        logprobs = [MASKED_LOGPROB] * len(prompt)
        if self.parent is not None:
            length = len(self.parent.tokens)
            assert prompt[:length] == self.parent.tokens, "the prompt does not go on from the reply"
            masks[:length], logprobs[:length] = self.parent.masks, self.parent.logprobs
        return [
            Sequence_([*prompt, *ids], [*masks, *ids], [*logprobs, *values], words)
            for ids, values, words in zip(
                self.engine.outputs[-1], self.engine.logprobs[-1], said, strict=True
            )
        ]

    def _check_prompt(self) -> None:
        """Unless the node says otherwise, the prompt is the template's text in its only ids."""
        nodes = self._nodes()
        made = self.expected[-len(self.engine.replies) :]
        node = next((n for n in nodes if _lists_of(n) in map(_lists_of_sequence, made)), None)
        assert node is not None, "a completion was not recorded"
        assert node.metadata is not None
        if "extended_by_tokens" in node.metadata:
            self.num_extended += 1
            assert self.parent is not None
            assert node.metadata["extended_by_tokens"]
            return
        tools = TOOLS if self.plan.has_tools else None
        prompt = self.session._convert_messages_to_prompt(self.messages, tools)
        ids = self.family.tokenizer.encode(prompt, add_special_tokens=False)
        bos = self.family.tokenizer.bos_token_id
        expected = ids if bos is None or ids[:1] == [bos] else [bos, *ids]
        assert self.engine.prompts[-1] == expected


def _written_back(message: Any, way_back: WayBack) -> Any:
    """Return an answer as an agent puts it into its next request."""
    if way_back == "object":
        return message
    fields = message.model_dump(exclude_none=True)
    calls = fields.get("tool_calls")
    if way_back == "as given":
        return fields
    if way_back in ("other spacing", "no ids") and calls:
        fields["tool_calls"] = [_respelt(call, way_back == "no ids") for call in calls]
    if way_back == "no content" and calls:
        fields["content"] = None
    if way_back == "no thinking" and fields.get("content"):
        fields["content"] = fields["content"].rpartition("</think>")[2]
    if way_back == "parts" and fields.get("content"):
        fields["content"] = [{"type": "text", "text": fields["content"]}]
    if way_back == "trimmed" and fields.get("content"):
        fields["content"] = fields["content"].strip()
    return fields


def _said(messages: list[Any], reply: Any) -> tuple[str, str]:
    """Return the words of a conversation without ids and outer space; see `Sequence_.said`."""
    words = [_words(message) for message in [*messages, reply]]
    role, content, calls = words[-1]
    bare = [role, content.rpartition("</think>")[2].strip(), calls]
    texts = [json.dumps([*words[:-1], last], sort_keys=True) for last in (words[-1], bare)]
    return texts[0], texts[1]


def _words(message: Any) -> list[Any]:
    fields = message if isinstance(message, dict) else message.model_dump()
    content = fields.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    calls = [
        [call["function"]["name"], json.loads(call["function"]["arguments"])]
        for call in fields.get("tool_calls") or ()
    ]
    return [fields["role"], "" if calls else content.strip(), calls]


def _respelt(call: dict[str, Any], drops_id: bool) -> dict[str, Any]:
    arguments = json.loads(call["function"]["arguments"])
    backwards = dict(reversed(arguments.items()))
    text = json.dumps(backwards, separators=(",", ":"), ensure_ascii=True)
    kept = {} if drops_id else {"id": call["id"]}
    return {**kept, "type": "function", "function": {**call["function"], "arguments": text}}


def _role(message: Any) -> str:
    return str(_fields(message)["role"])


def _calls(message: Any) -> list[Any]:
    return _fields(message).get("tool_calls") or []


def _fields(message: Any) -> dict[str, Any]:
    fields: dict[str, Any] = message if isinstance(message, dict) else message.model_dump()
    return fields


def _lists_of(node: SequenceNode) -> tuple[Sequence[Any], ...]:
    return node.tokens, node.masked_tokens, node.logprobs


def _lists_of_sequence(sequence: Sequence_) -> tuple[Sequence[Any], ...]:
    return sequence.tokens, sequence.masks, sequence.logprobs
