from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from atroposlib.envs.server_handling.config import ReasoningConfig
from atroposlib.envs.server_handling.managed_server import DummyManagedServer, ManagedServer
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_baseline import (
    APIServerConfig,
    AsyncSemWithAdaptiveWeight,
    ServerBaseline,
)
from atroposlib.envs.server_handling.server_harness import ServerHarness, create_chat_completion
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.trl_vllm_server import TrlVllmServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import ConfigError
from tests.fakes import CharTokenizer, ScriptedEngine

MESSAGES = [{"role": "user", "content": "hi"}]
MakeManager = Callable[..., ServerManager]


@pytest.fixture
async def make_manager() -> AsyncIterator[MakeManager]:
    """Build managers in front of scripted engines, with short waits, and close them."""
    made: list[ServerManager] = []

    def make(*engines: ScriptedEngine, **arguments: Any) -> ServerManager:
        settings: dict[str, Any] = {"model_name": "scripted", "server_type": "vllm"}
        settings.update(arguments.pop("settings", {}))
        configs = [APIServerConfig(base_url=engine.base_url, **settings) for engine in engines]
        manager = ServerManager(configs, **arguments)
        manager.slot_poll_s = 0.005
        for server in manager.servers:
            server.health_poll_s = 0.01
            server.max_backoff_s = 0.01
            server.tokenizer = CharTokenizer()
        made.append(manager)
        return manager

    yield make
    for manager in made:
        await manager.close()


class SlotsOnly:
    """A server of four slots per split that only says it was used."""

    def __init__(self, name: str, train: int, eval_: int, *, is_healthy: bool = True) -> None:
        self.name = name
        self.server_healthy = is_healthy
        self.sem, self.eval_sem = AsyncSemWithAdaptiveWeight(4), AsyncSemWithAdaptiveWeight(4)
        self.sem._value, self.eval_sem._value = train, eval_

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        return {"server": self.name, "kwargs": kwargs}


@pytest.mark.parametrize(("split", "expected"), [("train", "s2"), ("eval", "s1")])
async def test_routing_needs_nothing_but_the_servers(split: str, expected: str) -> None:
    manager = ServerManager.__new__(ServerManager)
    manager.servers = [
        SlotsOnly("s1", 1, 4),
        SlotsOnly("s2", 3, 1),
        SlotsOnly("s3", 4, 4, is_healthy=False),
    ]

    answer = await ServerManager.get_logprobs(manager, prompt="x", split=split)

    assert answer == {"server": expected, "kwargs": {"prompt": "x", "split": split}}


def test_each_config_gets_the_class_of_its_own_engine() -> None:
    manager = ServerManager(
        [
            APIServerConfig(base_url="http://a/v1", server_type="openai"),
            APIServerConfig(base_url="http://b/v1", server_type="vllm"),
            APIServerConfig(base_url="http://c/v1", server_type="sglang"),
            APIServerConfig(base_url="http://d", server_type="trl"),
        ]
    )

    assert [type(server) for server in manager.servers] == [
        OpenAIServer,
        VLLMServer,
        SGLangServer,
        TrlVllmServer,
    ]


def test_concrete_class_wins_over_the_engine() -> None:
    config = APIServerConfig(base_url="http://a/v1", server_type="vllm")

    assert type(ServerManager([config], OpenAIServer).servers[0]) is OpenAIServer


def test_bare_config_is_one_server_and_baseline_is_discovered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)

    bare = ServerManager(APIServerConfig(base_url="http://a/v1", server_type="vllm"))
    found = ServerManager(ServerBaseline(server_type="vllm"))

    assert [server.config.base_url for server in bare.servers] == ["http://a/v1"]
    assert len(found.servers) == 4
    assert all(isinstance(server, VLLMServer) for server in found.servers)


def test_engine_without_a_class_is_refused_by_name() -> None:
    config = APIServerConfig.model_construct(base_url="http://a/v1", server_type="other")

    with pytest.raises(ConfigError, match=r"'other' is not supported .* vllm, sglang, trl"):
        ServerManager([config])


def test_empty_list_is_refused_unless_testing() -> None:
    with pytest.raises(ConfigError, match="no inference server is configured"):
        ServerManager([])
    assert isinstance(ServerManager([], testing=True).servers[0], ServerHarness)


def test_boolean_in_second_place_means_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    configs = [APIServerConfig(base_url="http://a/v1")]

    assert len(ServerManager(configs, True).servers) == 1
    assert isinstance(ServerManager(configs, False, False).servers[0], OpenAIServer)


def test_third_argument_after_a_boolean_means_testing() -> None:
    configs = [APIServerConfig(base_url="http://a/v1")]

    assert isinstance(ServerManager(configs, False, True).servers[0], ServerHarness)


def test_reasoning_and_proxy_settings_reach_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_PROXY_URL", "http://proxy")
    reasoning = ReasoningConfig(effort="low")

    manager = ServerManager(
        [APIServerConfig(base_url="http://a/v1")], reasoning_config=reasoning, tool_parser="hermes"
    )

    assert manager.servers[0].reasoning_config is reasoning
    assert (manager.proxy_url, manager.use_proxy) == ("http://proxy", True)
    assert manager.tool_parser == "hermes"
    assert manager._get_server_base_url() == "http://a/v1"
    assert manager._get_server_base_url(1) is None


async def test_large_n_is_split_and_merged_in_order(make_manager: MakeManager) -> None:
    async with ScriptedEngine(["a", "b", "c"]) as engine:
        manager = make_manager(engine, max_n_completions=2)

        chat = await manager.chat_completion(messages=MESSAGES, n=5)
        text = await manager.completion(prompt="hi", n=3)
        prompt_ids, ids, logprobs, reasons = await manager.tokens_and_logprobs_completion(
            prompt="hi", n=5
        )

        assert [choice.index for choice in chat.choices] == [0, 1, 2, 3, 4]
        assert [choice.index for choice in text.choices] == [0, 1, 2]
        assert prompt_ids == [1, 104, 105]
        assert len(ids) == len(logprobs) == len(reasons) == 5
        chats = [r for r in engine.requests if r.path == "/v1/chat/completions"]
        assert sorted(r.body["n"] for r in chats) == [1, 2, 2]


async def test_parts_of_a_seeded_request_do_not_repeat_each_other(
    make_manager: MakeManager,
) -> None:
    async with ScriptedEngine(["a"]) as engine:
        manager = make_manager(engine, max_n_completions=2)

        await manager.completion(prompt="hi", n=5, seed=7)

        sent = [r.body for r in engine.requests if r.path == "/v1/completions" and "seed" in r.body]
        assert sorted((body["seed"], body["n"]) for body in sent) == [(7, 2), (9, 2), (11, 1)]


async def test_part_that_fails_leaves_no_other_running() -> None:
    sizes, finished = [], []

    async def answer(**kwargs: Any) -> ChatCompletion:
        sizes.append(kwargs["n"])
        if len(sizes) == 1:
            raise ValueError("broken")
        await asyncio.sleep(0.01)
        finished.append(kwargs["n"])
        return create_chat_completion("a", n=kwargs["n"])

    server = ServerHarness()
    server.chat_completion = answer  # type: ignore[method-assign]
    server.sem = AsyncSemWithAdaptiveWeight(2)
    manager = ServerManager([], testing=True, max_n_completions=2)
    manager.servers = [server]

    with pytest.raises(ValueError, match="broken"):
        await manager.chat_completion(messages=MESSAGES, n=4)

    assert finished == [2]


async def test_split_decides_which_measurements_grow(make_manager: MakeManager) -> None:
    async with ScriptedEngine(["a"]) as engine:
        manager = make_manager(engine)

        await manager.chat_completion(messages=MESSAGES, split="eval")

        assert len(manager.servers[0].eval_request_timings) == 1
        assert manager.servers[0].request_timings == []


async def test_requests_spread_over_the_servers(make_manager: MakeManager) -> None:
    async with (
        ScriptedEngine(["a"], delay_s=0.02) as one,
        ScriptedEngine(["b"], delay_s=0.02) as two,
    ):
        manager = make_manager(one, two)

        await asyncio.gather(*(manager.completion(prompt="x") for _ in range(20)))

        assert len(one.requests) == len(two.requests) == 10


async def test_waiting_requests_start_when_a_slot_comes_free(make_manager: MakeManager) -> None:
    async with ScriptedEngine(["a"], delay_s=0.005) as engine:
        manager = make_manager(engine, settings={"num_max_requests_at_once": 2})

        answers = await asyncio.gather(*(manager.completion(prompt="x") for _ in range(10)))

        assert len(answers) == 10
        assert engine.max_in_flight == 2


async def test_server_that_dies_hands_its_requests_to_the_others(
    make_manager: MakeManager,
) -> None:
    async with ScriptedEngine(["alive"], delay_s=0.005) as alive:
        dying = ScriptedEngine(["dying"], delay_s=60)
        await dying.start()
        manager = make_manager(dying, alive)

        requests = [asyncio.create_task(manager.completion(prompt="x")) for _ in range(30)]
        await asyncio.sleep(0.05)
        await dying.stop()
        answers = await asyncio.wait_for(asyncio.gather(*requests), timeout=60)

        assert {answer.choices[0].text for answer in answers} == {"alive"}
        assert [server.server_healthy for server in manager.servers] == [False, True]


async def test_servers_may_be_replaced_while_a_chat_runs() -> None:
    started, may_answer = asyncio.Event(), asyncio.Event()

    class SlowChat(SlotsOnly):
        async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
            started.set()
            await may_answer.wait()
            return create_chat_completion("hello")

    manager = ServerManager([], testing=True)
    manager.servers = [SlowChat(name, 4, 4) for name in ("s1", "s2", "s3")]
    conversation = [*MESSAGES, {"role": "assistant", "content": "hello"}, *MESSAGES]
    running = [asyncio.create_task(manager.chat_completion(messages=MESSAGES)) for _ in range(3)]
    await started.wait()

    manager.servers = [SlowChat("s4", 4, 4), SlowChat("s5", 4, 4)]
    may_answer.set()

    for answer in await asyncio.gather(*running):
        assert answer.choices[0].message.content == "hello"
    await manager.chat_completion(messages=conversation)


async def test_conversation_of_a_removed_server_goes_to_another_one() -> None:
    class Chat(SlotsOnly):
        async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
            return create_chat_completion(self.name)

    manager = ServerManager([], testing=True)
    manager.servers = [Chat("s1", 1, 4), Chat("s2", 2, 4), Chat("s3", 3, 4)]
    await manager.chat_completion(messages=MESSAGES)
    conversation = [*MESSAGES, {"role": "assistant", "content": "s3"}, *MESSAGES]

    manager.servers = manager.servers[:2]
    answer = await manager.chat_completion(messages=conversation)

    assert answer.choices[0].message.content == "s2"


async def test_session_of_several_servers_without_prompt_logprobs_is_refused() -> None:
    class Tokens:
        config = SimpleNamespace(model_name="m", base_url=None)
        server_healthy = True
        sem = eval_sem = AsyncSemWithAdaptiveWeight(4)

    manager = ServerManager([], testing=True)
    manager.servers = [Tokens(), Tokens()]

    async with manager.managed_server(tokenizer=CharTokenizer()) as managed:
        with pytest.raises(NotImplementedError, match="Tokens does not implement get_logprobs"):
            await managed.get_logprobs(prompt="hi")


async def test_request_waits_while_every_server_is_down(make_manager: MakeManager) -> None:
    engines = [ScriptedEngine(["back"]), ScriptedEngine(["back"])]
    for engine in engines:
        await engine.start()
    manager = make_manager(*engines)
    for engine in engines:
        await engine.stop()

    request = asyncio.create_task(manager.completion(prompt="x"))
    await asyncio.sleep(0.1)
    assert not request.done()
    await engines[1].start(engines[1].port)
    answer = await asyncio.wait_for(request, timeout=60)
    await engines[1].stop()

    assert answer.choices[0].text == "back"


async def test_dedicated_server_can_be_used_while_holding_its_only_slot(
    make_manager: MakeManager,
) -> None:
    async with ScriptedEngine(["a"]) as engine:
        manager = make_manager(engine, settings={"num_max_requests_at_once": 1})

        async with manager.dedicated_server() as server:
            assert manager.servers[0].sem._value == 0
            answer = await asyncio.wait_for(server.completion(prompt="x"), timeout=60)

        assert answer.choices[0].text == "a"
        assert manager.servers[0].sem._value == 1


async def test_sessions_opened_together_spread_over_the_servers(
    make_manager: MakeManager,
) -> None:
    async with (
        ScriptedEngine(["a"]) as one,
        ScriptedEngine(["b"]) as two,
        AsyncExitStack() as stack,
    ):
        manager = make_manager(one, two)

        sessions = [await stack.enter_async_context(manager.managed_server()) for _ in range(4)]

        first, second = manager.servers
        assert [s.server.current for s in sessions] == [first, second, first, second]


async def test_session_records_and_is_emptied_at_its_end(make_manager: MakeManager) -> None:
    async with ScriptedEngine(["a"]) as engine:
        manager = make_manager(engine)
        manager.tool_parser = "hermes"

        async with manager.managed_server() as session:
            assert isinstance(session, ManagedServer)
            assert session._tool_parser_name == "hermes"
            await session.chat_completion(messages=MESSAGES, split="eval")
            assert len(session.get_state()["nodes"]) == 1

        assert session.get_state()["nodes"] == []
        assert len(manager.servers[0].eval_attempts_list) == 1


async def test_session_at_a_given_url(make_manager: MakeManager) -> None:
    async with ScriptedEngine(["a"]) as one, ScriptedEngine(["b"]) as two:
        manager = make_manager(one, two)

        async with manager.managed_server(base_url=two.base_url + "/") as session:
            assert session.server is manager.servers[1]
        with pytest.raises(ConfigError, match="no server at http://nowhere/v1"):
            async with manager.managed_server(base_url="http://nowhere/v1"):
                pass


@pytest.mark.usefixtures("offline_hub")
@pytest.mark.parametrize("switch", ["1", "true", "YES"])
async def test_openai_session_needs_the_switch(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = ServerManager([APIServerConfig(base_url="http://a/v1")])
    monkeypatch.delenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", raising=False)

    with pytest.raises(NotImplementedError, match="ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"):
        async with manager.managed_server():
            pass
    monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", switch)
    async with manager.managed_server() as session:
        assert isinstance(session, DummyManagedServer)


async def test_session_through_a_proxy_without_address_is_refused_clearly() -> None:
    manager = ServerManager(
        [APIServerConfig(base_url="http://a/v1", server_type="vllm")], use_proxy=True
    )

    with pytest.raises(ValueError, match="proxy"):
        async with manager.managed_server():
            pass


async def test_weight_reaches_every_server() -> None:
    seen: list[float] = []

    async def update_weight(weight: float) -> None:
        seen.append(weight)

    manager = ServerManager.__new__(ServerManager)
    manager.servers = [SimpleNamespace(update_weight=update_weight)] * 2

    await manager.update_weight(0.3)

    assert seen == [0.3, 0.3]
