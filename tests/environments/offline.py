"""Running an environment against the scripted engine, without a hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig, BaseEnv
from tests.fakes import CharTokenizer, ScriptedEngine

__all__ = [
    "PROBED",
    "evaluate",
    "evaluate_with_judge",
    "group_scores_at_100",
    "make_env",
    "read_groups",
    "ready_env",
    "run_process",
]

PROBED = "ok"
"""First reply of a list: it answers the client's look for a route that gives token ids."""


def make_env(
    env_cls: type[BaseEnv],
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    *,
    server_type: str = "vllm",
    **settings: Any,
) -> Any:
    """An environment with a character tokenizer and one server, the engine."""
    from transformers import AutoTokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: CharTokenizer())
    config, server_config = env_cls.config_init()
    chosen = {"use_wandb": False, "num_score_workers": 0, "max_token_length": 4000, **settings}
    config = config.model_copy(update=chosen)
    first = server_config[0] if isinstance(server_config, list) else server_config
    server: APIServerConfig = first.model_copy(
        update={
            "base_url": engine.base_url,
            "model_name": "scripted",
            "server_type": server_type,
            "health_check": False,
        }
    )
    return env_cls(config=config, server_configs=server)


async def ready_env(
    env_cls: type[BaseEnv], monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Any:
    """An environment after its `setup`, for tests that request no completions."""
    async with ScriptedEngine() as engine:
        env = make_env(env_cls, engine, monkeypatch, **settings)
        await env.setup()
        return env


async def run_process(env: Any, *, num_groups: int, group_size: int) -> None:
    """What the `process` command does with an environment."""
    env.process_mode = True
    env.n_groups_to_process = num_groups
    env.group_size_to_process = group_size
    await env.process_manager()


async def evaluate(
    env_cls: type[BaseEnv],
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    **settings: Any,
) -> dict[str, Any]:
    """Run an environment's evaluation and return its report.

    Every request was made at the one temperature that the report names.
    """
    env = make_env(env_cls, engine, monkeypatch, data_dir_to_save_evals=str(folder), **settings)
    await env.setup()

    await env.evaluate()
    await env.close()

    report: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    reported = report["config_general"]["generation_parameters"]["temperature"]
    assert {request.body["temperature"] for request in engine.requests} == {reported}
    return report


async def evaluate_with_judge(
    env_cls: Any,
    replies: Sequence[str] | Callable[[str], str],
    verdicts: Sequence[str] | Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    **settings: Any,
) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """Evaluate on the sample, with a judge on another server.

    Returns the metrics, the samples and the requests to the judge.
    """
    async with ScriptedEngine(replies) as engine, ScriptedEngine(verdicts, model="judge") as judge:
        own = {"judge_base_url": judge.base_url, "judge_model_name": "judge", "max_retries": 1}
        saved = {"data_dir_to_save_evals": str(folder)}
        chosen = {**env_cls.check_settings, **own, **saved, **settings}
        env = make_env(env_cls, engine, monkeypatch, **chosen)
        await env.setup()
        await env.evaluate()
        await env.close()
        await env.server.close()
        bodies = [request.body for request in judge.requests]
    metrics = json.loads((folder / "metrics.json").read_text())["results"]["all"]
    asked = [body["messages"][-1]["content"] for body in bodies if "messages" in body]
    return metrics, read_groups(folder / "samples.jsonl"), asked


def group_scores_at_100(env_cls: Any, scores: list[float], lengths: list[int]) -> list[float]:
    """The scores that go out of trajectories of these lengths, where 100 tokens are the limit."""
    env = SimpleNamespace(config=SimpleNamespace(max_token_length=100))
    trajectories = [SimpleNamespace(tokens=[0] * length) for length in lengths]
    return list(env_cls.group_scores(env, scores, trajectories))


def read_groups(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
