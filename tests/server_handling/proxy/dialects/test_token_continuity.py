"""Random conversations through all dialects hold the engine's own tokens, for every template."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from atroposlib.envs.server_handling.managed_server import ManagedServer, SequenceNode
from atroposlib.envs.server_handling.proxy.anthropic import ANTHROPIC
from atroposlib.envs.server_handling.proxy.exchange import Dialect, Exchange
from atroposlib.envs.server_handling.proxy.openai_dialect import OPENAI
from atroposlib.envs.server_handling.proxy.responses import RESPONSES
from atroposlib.envs.server_handling.proxy.sessions import SessionState
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from tests.server_handling.conversation_plans import TEXTS, Plan, random_plan
from tests.server_handling.proxy.dialects import test_anthropic_round_trip as anthropic_client
from tests.server_handling.proxy.dialects import test_responses_round_trip as responses_client
from tests.server_handling.proxy.dialects.conversations import Turn
from tests.server_handling.proxy.dialects.scripted_session import Reply, reply_of
from tests.server_handling.random_conversations import TokenEngine
from tests.server_handling.test_token_continuity import family_of
from tests.templates.make_tokenizers import FAMILIES

pytestmark = pytest.mark.slow

SCHEMA = {"type": "object"}
TOOL_NAMES = ("search", "get_time")


def session_of(engine: TokenEngine) -> SessionState:
    now = time.time()
    return SessionState(
        uuid="session",
        api_key="key",  # pragma: allowlist secret
        managed_server=ManagedServer(engine, tool_parser=engine.family.tool_parser),
        model_name="tiny",
        tool_parser=engine.family.tool_parser,
        base_url=None,
        max_choices=1,
        created_at=now,
        last_accessed=now,
        clock=time.time,
    )


async def post(session: SessionState, dialect: Dialect, body: Mapping[str, Any]) -> Reply:
    handler = dialect.routes[0].handler
    return await reply_of(await handler(Exchange(session, dict(body), {}, {}, {})))


class ResponsesAgent:
    """Sends the history with every turn, in one of the ways clients have."""

    dialect = RESPONSES

    def __init__(self, chance: random.Random, plan: Plan) -> None:
        flags = [chance.random() < 0.3 for _ in responses_client.Habits._fields]
        self.habit = responses_client.Habits(*flags)
        self.history: list[Any] = [{"role": "user", "content": "Go."}]
        self.options: dict[str, Any] = {"instructions": plan.system}
        if chance.random() < 0.5:
            self.options["reasoning"] = {"effort": "low"}
        if plan.has_tools:
            tools = [{"type": "function", "name": n, "parameters": SCHEMA} for n in TOOL_NAMES]
            self.options["tools"] = tools

    def body(self, *, streams: bool) -> dict[str, Any]:
        return {**self.options, "input": self.history, "stream": streams}

    def go_on(self, reply: Reply, results: Callable[[list[str]], Turn]) -> None:
        response = responses_client.response_of(reply)
        turn = results([item.call_id for item in response.output if item.type == "function_call"])
        self.history += responses_client.sent_back(response, turn, self.habit)


class AnthropicAgent:
    """Sends the history with every turn, in one of the ways clients have."""

    dialect = ANTHROPIC

    def __init__(self, chance: random.Random, plan: Plan) -> None:
        self.habit = anthropic_client.Habits(
            chance.choice([None, anthropic_client.THINKING]),
            chance.random() < 0.3,
            chance.random() < 0.3,
            chance.choice([[], ["a"], [" ", "</"]]),
        )
        self.history: list[Any] = [{"role": "user", "content": "Go."}]
        self.options: dict[str, Any] = {"max_tokens": 999, "thinking": self.habit.thinking}
        self.options["stop_sequences"] = self.habit.stops
        if plan.system is not None:
            self.options["system"] = plan.system
        if plan.has_tools:
            self.options["tools"] = [{"name": n, "input_schema": SCHEMA} for n in TOOL_NAMES]

    def body(self, *, streams: bool) -> dict[str, Any]:
        return {**self.options, "messages": self.history, "stream": streams}

    def go_on(self, reply: Reply, results: Callable[[list[str]], Turn]) -> None:
        message = anthropic_client.message_of(reply)
        turn = results([block.id for block in message.content if block.type == "tool_use"])
        self.history += anthropic_client.sent_back(message, turn, self.habit)


class ChatAgent:
    """Sends the history with every turn, as agents on the chat API do; its answers come whole."""

    dialect = OPENAI

    def __init__(self, chance: random.Random, plan: Plan) -> None:
        self.respells_arguments = chance.random() < 0.3
        self.history: list[Any] = [{"role": "user", "content": "Go."}]
        if plan.system is not None:
            self.history.insert(0, {"role": "system", "content": plan.system})
        self.options: dict[str, Any] = {"model": "tiny"}
        if plan.has_tools:
            tools = [{"name": name, "parameters": SCHEMA} for name in TOOL_NAMES]
            self.options["tools"] = [{"type": "function", "function": tool} for tool in tools]

    def body(self, *, streams: bool) -> dict[str, Any]:
        del streams  # the streamed form is tested with the official client
        return {**self.options, "messages": list(self.history)}

    def go_on(self, reply: Reply, results: Callable[[list[str]], Turn]) -> None:
        message = reply.body["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        if self.respells_arguments:
            for call in calls:
                function = call["function"]
                function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=1)
        turn = results([call["id"] for call in calls])
        self.history.append(message)
        for call, result in zip(calls, turn.results, strict=True):
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if turn.follow_up is not None:
            self.history.append({"role": "user", "content": turn.follow_up})


AGENT_TYPES = [ChatAgent, ResponsesAgent, AnthropicAgent]
AgentType = type[ChatAgent] | type[ResponsesAgent] | type[AnthropicAgent]


async def play(name: str, agent_type: AgentType, seed: int) -> None:
    """Have one random conversation and check its one sequence against the engine's record."""
    chance = random.Random(f"{name}-{agent_type.__name__}-{seed}")
    plan = random_plan(chance)
    engine = TokenEngine(family_of(name))
    session = session_of(engine)
    agent = agent_type(chance, plan)

    def results(call_ids: list[str]) -> Turn:
        calls = [{"id": call_id} for call_id in call_ids]
        follow_up = None if calls else chance.choice(TEXTS)
        return Turn(None, calls, [chance.choice(TEXTS) for _ in calls], follow_up)

    for step in plan.steps:
        engine.replies = step.replies[:1]
        reply = await post(session, agent.dialect, agent.body(streams=chance.random() < 0.5))
        agent.go_on(reply, results)
    (node,) = session.nodes
    assert_engines_own(node, engine)


def assert_engines_own(node: SequenceNode, engine: TokenEngine) -> None:
    tokens: list[int] = []
    masks: list[int] = []
    logprobs: list[float] = []
    for prompt, (ids,), (values,) in zip(
        engine.prompts, engine.outputs, engine.logprobs, strict=True
    ):
        assert prompt[: len(tokens)] == tokens, "the prompt does not go on from the reply"
        num_new = len(prompt) - len(tokens)
        tokens = [*prompt, *ids]
        masks += [IGNORE_INDEX] * num_new + ids
        logprobs += [MASKED_LOGPROB] * num_new + values
    assert (node.tokens, node.masked_tokens, node.logprobs) == (tokens, masks, logprobs)


async def mismatches_of(name: str, agent_type: AgentType, num_conversations: int) -> list[str]:
    wrong = []
    for seed in range(num_conversations):
        try:
            await play(name, agent_type, seed)
        except (AssertionError, ValueError) as error:
            wrong.append(f"{name} {seed}: {str(error)[:200]}")
    return wrong


@pytest.mark.parametrize("agent_type", AGENT_TYPES)
@pytest.mark.parametrize("name", sorted(FAMILIES))
async def test_random_conversations_hold_the_engines_tokens(
    name: str, agent_type: AgentType
) -> None:
    assert await mismatches_of(name, agent_type, 15) == []


@pytest.mark.long
@pytest.mark.parametrize("agent_type", AGENT_TYPES)
@pytest.mark.parametrize("name", sorted(FAMILIES))
async def test_a_thousand_random_conversations_hold_the_engines_tokens(
    name: str, agent_type: AgentType
) -> None:
    assert await mismatches_of(name, agent_type, 1000) == []
