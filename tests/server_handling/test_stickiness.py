from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.server_baseline import AsyncSemWithAdaptiveWeight
from atroposlib.envs.server_handling.server_harness import create_chat_completion
from atroposlib.envs.server_handling.server_manager import (
    ConversationMemory,
    ServerManager,
    is_overloaded,
)
from tests.fakes import CharTokenizer, ScriptedEngine

FIRST_TURN = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def next_turn(messages: list[dict[str, Any]], reply: str) -> list[dict[str, Any]]:
    return [
        *messages,
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "go on"},
    ]


def test_conversation_that_goes_on_is_found_by_its_reply() -> None:
    memory = ConversationMemory()
    memory.remember(FIRST_TURN, ["one"], 0)
    memory.remember(FIRST_TURN, ["two"], 1)

    assert memory.find(next_turn(FIRST_TURN, "one")) == 0
    assert memory.find(next_turn(FIRST_TURN, "two")) == 1


async def test_reply_of_the_client_may_be_sent_back_as_it_is() -> None:
    class Chat:
        sem = eval_sem = AsyncSemWithAdaptiveWeight(4)
        server_healthy = True
        messages: Any = None

        async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
            self.messages = kwargs["messages"]
            return create_chat_completion("one")

    manager = ServerManager([], testing=True)
    servers = [Chat(), Chat()]
    manager.servers = list(servers)
    answer = await manager.chat_completion(messages=FIRST_TURN)
    turns = [*FIRST_TURN, answer.choices[0].message, {"role": "user", "content": "go on"}]

    await manager.chat_completion(messages=turns)

    assert servers[0].messages is turns


def test_longest_known_beginning_wins() -> None:
    memory = ConversationMemory()
    second_turn = next_turn(FIRST_TURN, "one")
    memory.remember(FIRST_TURN, ["one"], 0)
    memory.remember(second_turn, ["two"], 1)

    assert memory.find(next_turn(second_turn, "two")) == 1


def test_reply_that_was_rewritten_is_found_by_what_was_before_it() -> None:
    memory = ConversationMemory()
    memory.remember(FIRST_TURN, ["<think>hm</think>one"], 2)

    assert memory.find(next_turn(FIRST_TURN, "one")) == 2


@pytest.mark.parametrize(
    "messages",
    [[], FIRST_TURN, next_turn([{"role": "user", "content": "another"}], "one")],
)
def test_new_conversations_go_nowhere_in_particular(messages: list[dict[str, Any]]) -> None:
    memory = ConversationMemory()
    memory.remember(FIRST_TURN, ["one"], 0)

    assert memory.find(messages) is None


def test_content_that_is_no_text_is_recognised() -> None:
    memory = ConversationMemory()
    messages = [{"role": "user", "content": [{"type": "text", "text": "look"}]}]
    memory.remember(messages, [None], 1)

    assert memory.find(next_turn(messages, "any")) == 1


def test_oldest_conversations_are_forgotten() -> None:
    memory = ConversationMemory(max_conversations=4)
    for number in range(10):
        memory.remember([{"role": "user", "content": str(number)}], ["r"], number)

    found = [
        memory.find(next_turn([{"role": "user", "content": str(number)}], "r"))
        for number in range(10)
    ]

    assert found == [None] * 8 + [8, 9]


def server(in_flight: int, *, is_healthy: bool = True) -> Any:
    sem, eval_sem = AsyncSemWithAdaptiveWeight(512), AsyncSemWithAdaptiveWeight(512)
    sem._value -= in_flight
    return SimpleNamespace(sem=sem, eval_sem=eval_sem, server_healthy=is_healthy)


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [(0, 0, False), (16, 0, False), (17, 0, True), (116, 50, False), (117, 50, True)],
)
def test_server_is_overloaded_far_above_the_least_loaded(
    here: int, there: int, expected: bool
) -> None:
    one = server(here)

    assert is_overloaded(one, [one, server(there)]) is expected
    assert not is_overloaded(one, [one, server(there)], is_training=False)


def test_server_that_is_down_is_no_alternative() -> None:
    one = server(100)

    assert not is_overloaded(one, [one, server(0, is_healthy=False)])


MakeManager = Callable[..., ServerManager]


@pytest.fixture
async def make_manager() -> AsyncIterator[MakeManager]:
    made: list[ServerManager] = []

    def make(*engines: ScriptedEngine) -> ServerManager:
        configs = [
            APIServerConfig(base_url=engine.base_url, server_type="vllm", model_name="scripted")
            for engine in engines
        ]
        manager = ServerManager(configs)
        manager.slot_poll_s = 0.005
        for server in manager.servers:
            server.health_poll_s = server.max_backoff_s = 0.01
            server.tokenizer = CharTokenizer()
        made.append(manager)
        return manager

    yield make
    for manager in made:
        await manager.close()


async def test_turns_of_each_conversation_go_to_one_server(make_manager: MakeManager) -> None:
    async with (
        ScriptedEngine(["a"], delay_s=0.005) as one,
        ScriptedEngine(["b"], delay_s=0.005) as two,
    ):
        manager = make_manager(one, two)

        async def converse(number: int) -> set[str]:
            messages = [{"role": "user", "content": f"question {number}"}]
            replies = []
            for _ in range(4):
                chat = await manager.chat_completion(messages=messages)
                replies.append(chat.choices[0].message.content)
                messages = next_turn(messages, replies[-1])
            return set(replies)

        seen = await asyncio.gather(*(converse(number) for number in range(12)))

        assert all(len(replies) == 1 for replies in seen)
        assert set.union(*seen) == {"a", "b"}


async def test_session_moves_with_all_its_tokens_when_its_server_dies(
    make_manager: MakeManager,
) -> None:
    async with ScriptedEngine(["alive"]) as alive:
        dying = ScriptedEngine(["dying"])
        await dying.start()
        manager = make_manager(dying, alive)

        async with manager.managed_server() as session:
            messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
            first = await session.chat_completion(messages=messages, max_tokens=9)
            await dying.stop()
            messages = next_turn(messages, first.choices[0].message.content)
            second = await asyncio.wait_for(
                session.chat_completion(messages=messages, max_tokens=9), timeout=60
            )
            nodes = session.get_state()["nodes"]

        contents = [chat.choices[0].message.content for chat in (first, second)]
        assert contents == ["dying", "alive"]
        assert len(nodes) == 1
        sent = [r.body["prompt"] for r in alive.requests if len(r.body["prompt"]) > 1]
        assert sent[-1] == nodes[0].tokens[: len(sent[-1])]
        sampled = [token for token in nodes[0].masked_tokens if token != -100]
        assert CharTokenizer().decode(sampled, True) == "dyingalive"


async def test_session_whose_requests_move_together_is_counted_once(
    make_manager: MakeManager,
) -> None:
    async with ScriptedEngine(["a"]) as one, ScriptedEngine(["b"]) as two:
        manager = make_manager(one, two)

        async with manager.managed_server() as session:
            for server in manager.servers:
                server.server_healthy = False
            chats = [
                asyncio.create_task(session.chat_completion(messages=FIRST_TURN, max_tokens=9))
                for _ in range(3)
            ]
            await asyncio.sleep(0.02)  # all wait for a server
            manager.servers[1].server_healthy = True
            await asyncio.wait_for(asyncio.gather(*chats), timeout=60)

        assert set(manager._num_sessions.values()) == {0}


async def test_server_that_comes_back_is_given_sessions_again(make_manager: MakeManager) -> None:
    async with ScriptedEngine(["alive"]) as alive:
        dying = ScriptedEngine(["back"])
        await dying.start()
        manager = make_manager(dying, alive)

        async def one_rollout() -> str:
            async with manager.managed_server() as session:
                chat = await session.chat_completion(messages=FIRST_TURN, max_tokens=9)
                return str(chat.choices[0].message.content)

        assert await one_rollout() == "back"
        await dying.stop()
        assert await asyncio.wait_for(one_rollout(), timeout=60) == "alive"
        assert not manager.servers[0].server_healthy
        await dying.start(dying.port)
        for _ in range(200):
            if manager.servers[0].server_healthy:
                break
            await asyncio.sleep(0.01)
        assert await one_rollout() == "back"
        await dying.stop()
