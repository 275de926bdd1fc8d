"""Posted groups carry the oldest policy version of what their rollout sampled."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_baseline import VersionedTokens
from tests.envs.live_service import LiveService, until
from tests.envs.test_base_delivery import RecordingSession
from tests.envs.test_base_registration import MakeEnv
from tests.fakes import CharTokenizer


class VersionedEngine:
    """An engine whose weights get a new name with every answer, counting up."""

    def __init__(self, first: int | None) -> None:
        self.tokenizer = CharTokenizer()
        self.config = SimpleNamespace(model_name="m")
        self.version = first

    async def tokens_and_logprobs_completion(self, *, input_ids: list[int], **_: Any) -> Any:
        tokens = (input_ids, [[111, 2]], [[-0.1, -0.2]], ["stop"])
        if self.version is None:
            return tokens
        self.version += 1
        return VersionedTokens(tokens, [str(self.version)])


@pytest.mark.parametrize(("first", "expected"), [(40, 41), (None, 8)])
async def test_group_carries_the_oldest_version_its_engine_sampled_with(
    first: int | None, expected: int, make_env: MakeEnv
) -> None:
    env = make_env()
    env.service_session = RecordingSession()
    env.status_dict = {"current_step": 0, "queue_size": 0, "policy_version": 7}
    engine = VersionedEngine(first)

    async def sample(item: int) -> None:
        # The service's newer report counts for what is asked for after it, but never the engine's.
        session = ManagedServer(engine, policy_version=lambda: 8)
        await asyncio.gather(*(session.completion(prompt=f"p{i}") for i in range(3)))

    env.before_rollout = sample
    env.rollout_scheduler.start(1)
    await until(lambda: env.service_session.sent)

    assert env.service_session.sent[0]["policy_version"] == expected


@pytest.mark.parametrize(("reason", "expected"), [("length", "length"), ("stop", "stop")])
async def test_group_of_an_environment_s_own_making_carries_the_engine_s_finish_reasons(
    reason: str, expected: str, make_env: MakeEnv
) -> None:
    env = make_env()
    env.service_session = RecordingSession()

    class Engine(VersionedEngine):
        async def tokens_and_logprobs_completion(self, *, input_ids: list[int], **_: Any) -> Any:
            rows = [[111, i] for i in range(4)]
            return input_ids, rows, [[-0.1, -0.2]] * 4, [reason, "stop", "stop", "stop"]

    async def collect(item: int) -> Any:
        session = ManagedServer(Engine(None))
        await session.completion(prompt="p", n=4)
        nodes = session.get_state()["nodes"]
        group = {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "scores": [1.0, 0.0, 1.0, 0.0],
        }
        return group, []

    env.collect_trajectories = collect  # type: ignore[method-assign]
    env.config.group_size = 4
    env.rollout_scheduler.start(1)
    await until(lambda: env.service_session.sent)

    assert env.service_session.sent[0]["finish_reasons"] == [expected, "stop", "stop", "stop"]


async def test_group_carries_the_version_of_each_token(make_env: MakeEnv) -> None:
    env = make_env()
    env.service_session = RecordingSession()
    engine = VersionedEngine(40)

    async def collect(item: int) -> Any:
        nodes = []
        for _ in range(2):
            session = ManagedServer(engine)
            await session.completion(prompt="p")
            nodes += session.get_state()["nodes"]
        group = {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "scores": [1.0, 0.0],
        }
        return group, []

    env.collect_trajectories = collect  # type: ignore[method-assign]
    env.config.group_size = 2
    env.rollout_scheduler.start(1)
    await until(lambda: env.service_session.sent)

    (sent,) = env.service_session.sent
    assert sent["policy_version"] == 41
    assert sent["tokens"][0] == sent["tokens"][1]
    assert sent["token_versions"] == [[(None, 2), (41, 2)], [(None, 2), (42, 2)]]


async def test_status_tells_the_servers_what_the_policy_is_called(
    make_env: MakeEnv, service: LiveService
) -> None:
    env = make_env(rollout_server_url=service.url)
    env.status_dict = None
    answers = iter([{"env_weight": 1.0, "policy_version": 5}, {"env_weight": 1.0}])

    class Session:
        num_groups_sent = 0

        async def ask(self, question: Any, **_: Any) -> Any:
            return next(answers)

    env.service_session = Session()

    await env.get_status()
    assert env.server.policy_version == 5
    await env.get_status()
    assert env.server.policy_version is None
