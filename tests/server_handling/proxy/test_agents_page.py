"""The environment of the page on agents works as printed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs import base
from atroposlib.envs.check import check_environment
from atroposlib.envs.server_handling.managed_server import SequenceNode
from atroposlib.envs.server_handling.managed_server_proxy import ProxyFile
from atroposlib.envs.server_handling.proxy import AgentTrajectory, group_of_agents
from atroposlib.scored_data import check_group
from tests.envs.small_environment import SERVERS
from tests.fakes import CharTokenizer, ScriptedEngine

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs/agents.md"


def blocks(language: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def shopping_env() -> Any:
    (code,) = blocks("python")
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["ShoppingEnv"]


def test_environment_of_the_page_passes_the_check(shopping_env: Any) -> None:
    report = check_environment(shopping_env)

    # On a busy machine the client itself, which is not ours, can hold the loop for 100 ms.
    failed = {outcome.name for outcome in report.outcomes if outcome.status == "failed"}
    assert failed <= {"event loop"}, report.text


async def test_environment_of_the_page_makes_a_group(
    shopping_env: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '<tool_call>{"name": "price", "arguments": {"product": "%s"}}</tool_call>'

    def reply(prompt: str) -> str:
        return "11.5" if "8.0" in prompt else call % "tea" + call % "cup"

    loader = SimpleNamespace(from_pretrained=lambda name: CharTokenizer())
    monkeypatch.setitem(vars(base), "AutoTokenizer", loader)
    config, _ = shopping_env.config_init()
    async with ScriptedEngine(reply, model="m") as engine:
        update = {"base_url": engine.base_url, "server_type": "vllm"}
        servers = [SERVERS[0].model_copy(update=update)]
        env = shopping_env(config.model_copy(update={"group_size": 2}), servers)
        env.server.servers[0].tokenizer = env.tokenizer
        await env.setup()
        trajectories, _ = await env.collect_trajectories(await env.get_next_item())
        group = await env.postprocess_histories(trajectories)
        await env.close()
        await env.server.close()

    check_group(group)
    assert group["scores"] == [1.0, 1.0]
    assert "group_overrides" not in group
    for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
        sampled = CharTokenizer().decode([t for t in masks if t >= 0])
        assert sampled == f"{call % 'tea'}{call % 'cup'}</s>11.5</s>"
        assert len(tokens) == len(masks)


def node(*tokens: int) -> SequenceNode:
    return SequenceNode(
        full_text="",
        tokens=list(tokens),
        masked_tokens=list(tokens),
        logprobs=[-0.5] * len(tokens),
    )


@pytest.mark.parametrize(
    ("nodes", "scores", "overrides"),
    [
        ([[node(1)], [node(2)]], [1.0, 0.0], None),
        ([[node(1), node(2)], [node(3)]], [1.0, 1.0, 0.0], {"group_size": 3}),
    ],
)
def test_group_has_a_row_per_sequence(
    nodes: Sequence[list[SequenceNode]], scores: list[float], overrides: Any
) -> None:
    first, second = nodes

    group = group_of_agents([AgentTrajectory(first, 1.0), AgentTrajectory(second, 0.0)])

    assert group is not None
    check_group(group)
    assert group["tokens"] == [n.tokens for n in [*first, *second]]
    assert group["scores"] == scores
    assert group.get("group_overrides") == overrides


def test_agent_that_sampled_nothing_makes_no_group() -> None:
    assert group_of_agents([AgentTrajectory([node(1)], 1.0), AgentTrajectory([], 0.0)]) is None
    assert group_of_agents([]) is None


def test_configuration_of_the_page_is_one() -> None:
    (text,) = blocks("json")

    file = ProxyFile.model_validate(json.loads(text))

    assert file.settings.require_keys
    assert file.settings.admin_key
