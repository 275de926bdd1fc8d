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
    note_node,
    policy_version_of,
    sampled_versions,
    spans_in,
    with_spans,
)
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.vllm_server import parse_completions
from atroposlib.errors import InferenceError
from atroposlib.scored_data import cut_runs, read_spans
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


class UpdatingEngine(Engine):
    """An engine that changes its weights in the middle of each completion."""

    async def tokens_and_logprobs_completion(
        self, *, input_ids: list[int], n: int = 1, **_: Any
    ) -> Any:
        first = int(self.version or 0)
        self.version = str(first + 1)
        tokens = (input_ids, [[111, 111, 2]] * n, [[-0.1] * 3] * n, ["stop"] * n)
        spans = [
            {"version": str(first), "num_tokens": 1},
            {"version": str(first + 1), "num_tokens": 2},
        ]
        return with_spans(tokens, [spans] * n)


def versions_by_token(runs: Any) -> list[int | None]:
    return [version for version, length in runs for _ in range(length)]


async def test_spans_of_every_turn_are_the_versions_of_its_tokens() -> None:
    managed = ManagedServer(UpdatingEngine("4"))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]

    with sampled_versions() as sampled:
        await managed.chat_completion(messages=messages)
        messages += [{"role": "assistant", "content": "oo"}, {"role": "user", "content": "b"}]
        await managed.chat_completion(messages=messages)

    (node,) = managed.get_state()["nodes"]
    by_token = versions_by_token(node.metadata["token_versions"])
    trained = [v for v, mask in zip(by_token, node.masked_tokens, strict=True) if mask != -100]
    assert trained == [4, 5, 5, 5, 6, 6]
    assert all(
        version is None
        for version, mask in zip(by_token, node.masked_tokens, strict=True)
        if mask == -100
    )
    assert (node.metadata["policy_version"], sampled.oldest) == (4, 4)
    # A group may hold the sequence, or as much of it as fits.
    assert sampled.token_versions([node.tokens, node.tokens[:-2], [9]]) == [
        node.metadata["token_versions"],
        cut_runs(node.metadata["token_versions"], len(node.tokens) - 2),
        None,
    ]


def test_sequence_that_is_fetched_after_every_turn_is_kept_once() -> None:
    metadata = {"token_versions": [[None, 2], [7, 1]]}

    with sampled_versions() as sampled:
        for _ in range(3):
            note_node([1, 2, 3], metadata)

    assert sampled._runs == [([1, 2, 3], [(None, 2), (7, 1)])]


async def test_branch_keeps_the_versions_of_the_turns_it_holds() -> None:
    engine = UpdatingEngine("1")
    managed = ManagedServer(engine)
    first: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
    reply = {"role": "assistant", "content": "oo"}
    await managed.chat_completion(messages=first)
    await managed.chat_completion(messages=[*first, reply, {"role": "user", "content": "b"}])

    with sampled_versions() as sampled:
        await managed.chat_completion(messages=[*first, reply, {"role": "user", "content": "c"}])

    kept, branch = managed.get_state()["nodes"]
    versions = [
        [v for v in versions_by_token(node.metadata["token_versions"]) if v is not None]
        for node in (kept, branch)
    ]
    assert versions == [[1, 2, 2, 2, 3, 3], [1, 2, 2, 3, 4, 4]]
    # The other branch was sampled before this collection was opened.
    assert sampled.token_versions([branch.tokens, kept.tokens]) == [
        branch.metadata["token_versions"],
        None,
    ]


def test_spans_of_a_split_request_stay_with_their_completion() -> None:
    spans = [{"version": "3", "num_tokens": 1}, {"version": "4", "num_tokens": 1}]
    named = with_spans(([1], [[2, 3]], [[-0.1, -0.1]], ["stop"]), [spans])
    silent: Any = ([1], [[4]], [[-0.2]], ["stop"])

    joined = join_answers([named, silent])

    assert spans_in(joined) == [[("3", 1), ("4", 1)], [(None, 1)]]
    assert joined.weight_versions == ["3", None]


@pytest.mark.parametrize(
    "reported",
    [
        [{"version": "3", "num_tokens": 1}],
        [{"version": "3", "num_tokens": 3}, {"version": "4", "num_tokens": -1}],
        [{"version": "3"}],
        "34",
    ],
)
def test_spans_that_do_not_cover_their_completion_are_refused(reported: Any) -> None:
    with pytest.raises(InferenceError, match="completion 0"):
        with_spans(([1], [[2, 3]], [[-0.1, -0.1]], ["stop"]), [reported])


def test_choices_of_an_engine_with_spans_are_read() -> None:
    choice = {
        "index": 0,
        "token_ids": [2, 3],
        "logprobs": {"token_logprobs": [-0.1, -0.2]},
        "finish_reason": "stop",
        "weight_versions": [
            {"version": "12", "num_tokens": 1},
            {"version": "13", "num_tokens": 1},
        ],
    }

    answer = parse_completions({"choices": [choice]}, [1], num_choices=1)

    assert answer == ([1], [[2, 3]], [[-0.1, -0.2]], ["stop"])
    assert spans_in(answer) == [[("12", 1), ("13", 1)]]
    del choice["weight_versions"]
    plain = parse_completions({"choices": [choice]}, [1], num_choices=1)
    assert not isinstance(plain, VersionedTokens)


@pytest.mark.parametrize("size", [float("inf"), float("nan"), "many", None, [1]])
def test_spans_without_a_number_of_tokens_are_named(size: Any) -> None:
    with pytest.raises(InferenceError, match="completion 0: expected weight_versions"):
        read_spans([{"version": "7", "num_tokens": size}], 1, completion_index=0)
