"""Under which weights tokens were sampled: in nodes, in split requests, and in posted groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_baseline import (
    VersionedTokens,
    join_answers,
    policy_version_of,
    sampled_versions,
)
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from tests.fakes import CharTokenizer
from tests.scripted_dialects import ScriptedSGLang


class Engine:
    """An engine in this process that calls its weights `version`; None says nothing."""

    def __init__(self, version: str | None) -> None:
        self.tokenizer = CharTokenizer()
        self.config = SimpleNamespace(model_name="m")
        self.version = version

    async def tokens_and_logprobs_completion(
        self, *, input_ids: list[int], n: int = 1, **_: Any
    ) -> Any:
        tokens = (input_ids, [[111, 2]] * n, [[-0.1, -0.2]] * n, ["stop"] * n)
        return tokens if self.version is None else VersionedTokens(tokens, [self.version] * n)


async def two_turns(engine: Engine, managed: ManagedServer, between: Any) -> dict[str, Any]:
    """Sample two turns, calling `between` between them; return the node's metadata."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    await managed.chat_completion(messages=messages)
    between()
    messages += [{"role": "assistant", "content": "o"}, {"role": "user", "content": "b"}]
    await managed.chat_completion(messages=messages)
    (node,) = managed.get_state()["nodes"]
    metadata: dict[str, Any] = node.metadata
    return metadata


@pytest.mark.parametrize(
    ("name", "reported", "expected"),
    [("12", 3, 12), ("default", 3, 3), (None, 3, 3), ("step-4", None, None), ("²", 1, 1)],
)
def test_name_that_is_a_whole_number_is_the_policy_version(
    name: str | None, reported: int | None, expected: int | None
) -> None:
    assert policy_version_of(name, reported) == expected


async def test_engine_that_changes_weights_between_turns_leaves_both_names() -> None:
    engine = Engine("4")
    managed = ManagedServer(engine, policy_version=lambda: 9)

    metadata = await two_turns(engine, managed, lambda: setattr(engine, "version", "5"))

    assert metadata == {
        "finish_reason": "stop",
        "weight_versions": ["4", "5"],
        "token_versions": [(None, 21), (4, 2), (None, 21), (5, 2)],
        "policy_version": 4,
    }


async def test_without_names_the_services_report_at_the_request_counts() -> None:
    engine, reported = Engine(None), [7]
    managed = ManagedServer(engine, policy_version=lambda: reported[-1])

    metadata = await two_turns(engine, managed, lambda: reported.append(8))

    assert metadata == {"finish_reason": "stop", "policy_version": 7}


async def test_engine_that_stops_naming_its_weights_leaves_a_gap() -> None:
    engine = Engine("6")
    managed = ManagedServer(engine)

    metadata = await two_turns(engine, managed, lambda: setattr(engine, "version", None))

    assert metadata["weight_versions"] == ["6", None]
    assert metadata["policy_version"] == 6


async def test_branch_from_an_earlier_turn_knows_only_the_turns_it_holds() -> None:
    engine = Engine("1")
    managed = ManagedServer(engine)
    await two_turns(engine, managed, lambda: setattr(engine, "version", "2"))
    engine.version = "3"
    again: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "o"},
        {"role": "user", "content": "another way"},
    ]

    await managed.chat_completion(messages=again)

    first, second = managed.get_state()["nodes"]
    assert first.metadata["weight_versions"] == ["1", "2"]
    assert second.metadata["weight_versions"] == ["1", "3"]


def test_parts_of_a_split_request_keep_their_names() -> None:
    named = VersionedTokens(([1], [[2]], [[-0.1]], ["stop"]), ["3"])
    silent: Any = ([1], [[4], [5]], [[-0.2], [-0.3]], ["stop", "length"])

    joined = join_answers([named, silent])

    assert joined == ([1], [[2], [4], [5]], [[-0.1], [-0.2], [-0.3]], ["stop", "stop", "length"])
    assert joined.weight_versions == ["3", None, None]
    assert join_answers([silent]) is silent


async def test_oldest_version_of_everything_sampled_inside_is_collected() -> None:
    async def sample(version: str) -> None:
        await ManagedServer(Engine(version)).completion(prompt="a")

    with sampled_versions() as outer:
        await sample("9")
        with sampled_versions() as inner:
            await asyncio.gather(sample("5"), sample("6"))
        assert inner.oldest == 5
        await sample("default")
    await sample("1")

    assert outer.oldest == 5


@pytest.fixture
async def manager() -> AsyncIterator[tuple[ServerManager, ScriptedSGLang]]:
    async with ScriptedSGLang(["ok"]) as engine:
        manager = ServerManager(
            [
                APIServerConfig(
                    base_url=engine.base_url, model_name="scripted", server_type="sglang"
                )
            ],
            max_n_completions=2,
        )
        for server in manager.servers:
            assert isinstance(server, SGLangServer)
            server.tokenizer = CharTokenizer()
        yield manager, engine
        await manager.close()


async def test_manager_copies_the_engines_names_through_split_and_session(
    manager: tuple[ServerManager, ScriptedSGLang],
) -> None:
    servers, engine = manager
    engine.weight_version = "11"
    servers.policy_version = 30

    with sampled_versions() as sampled:
        answer = await servers.tokens_and_logprobs_completion(prompt="a", n=5, max_tokens=9)
        async with servers.managed_server() as session:
            await session.completion(prompt="a", max_tokens=9)
            nodes = session.get_state()["nodes"]

    assert isinstance(answer, VersionedTokens)
    assert answer.weight_versions == ["11"] * 5
    assert nodes[0].metadata["policy_version"] == 11
    assert sampled.oldest == 11


async def test_session_takes_the_managers_report_where_the_engine_names_nothing(
    manager: tuple[ServerManager, ScriptedSGLang],
) -> None:
    servers, engine = manager
    engine.weight_version = "default"
    servers.policy_version = 30

    async with servers.managed_server() as session:
        await session.completion(prompt="a", max_tokens=9)
        servers.policy_version = 31
        await session.completion(prompt="aok", max_tokens=9)
        (node,) = session.get_state()["nodes"]

    assert node.metadata["policy_version"] == 30
    assert node.metadata["weight_versions"] == ["default", "default"]
