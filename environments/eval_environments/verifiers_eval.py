"""Evaluate a model on an environment for verifiers, against any OpenAI-compatible server.

evaluation tasks ─► verifiers' own loop ─► server ─► rewards ─► metrics.json, samples.jsonl

    python environments/eval_environments/verifiers_eval.py --vf-env-name NAME \
        --server-url http://localhost:8000/v1 --model-name MODEL --eval-dir results
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.adapters.interface import AgentEndpoint, EpisodeEnd
from atroposlib.adapters.registry import make_adapter
from atroposlib.envs.eval import EvalBase
from atroposlib.envs.reporting import weigh
from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import ConfigError, EpisodeConnectionError, MissingExtraError
from atroposlib.utils.command_parser import CommandParser

__all__ = ["VerifiersEval", "metrics_of"]

OWN_METRICS = ("num_turns", "truncated")


class VerifiersEval(EvalBase):
    """Play each item once with the model of `endpoint`.

    Attributes:
        adapter: an opened adapter of the kind `verifiers`.
        items: its evaluation items.
        endpoint: the server, and the sampling settings.
        max_concurrent: number of rollouts at the same time.
    """

    adapter: Any
    items: Sequence[dict[str, Any]]
    endpoint: AgentEndpoint
    max_concurrent: int = 64

    def setup_data(self) -> list[Any]:
        self._slots = asyncio.Semaphore(self.max_concurrent)
        return list(self.items)

    async def run_item(self, server: Any, data_item: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        async with self._slots:
            episode = self.adapter.start(data_item)
            try:
                end = await episode.run(self.endpoint)
            finally:
                await episode.close()
        metrics = metrics_of(end)
        return metrics, {"item": data_item, "messages": list(end.messages), **metrics}


def metrics_of(end: EpisodeEnd) -> dict[str, float]:
    """Return the metrics of one rollout: whether it earned anything, and each function's value."""
    reward = weigh(end.reward, {}, "the environment gave the reward")
    functions = {
        name: value
        for name, value in {**reward.parts, **end.metrics}.items()
        if name not in OWN_METRICS and not name.startswith("stop/")
    }
    metrics = {"accuracy": float(reward.total > 0), "avg_score": reward.total}
    for name, value in functions.items():
        metrics[f"{name}_avg"] = value
        metrics[f"{name}_correct_rate"] = float(value > 0)
    return metrics


def read_flags(words: Sequence[str] | None = None) -> Any:
    parser = CommandParser(description="Evaluate a model on an environment for verifiers.")
    parser.add_argument("--server-url", default="http://localhost:8000/v1", help="%(default)s")
    parser.add_argument("--model-name", required=True, help="as the server knows it")
    parser.add_argument("--api-key", default="x", help="key of the server")
    parser.add_argument("--vf-env-name", required=True, help="installed environment")
    parser.add_argument("--temperature", type=float, default=0.0, help="%(default)s")
    parser.add_argument("--max-tokens", type=int, default=2048, help="%(default)s")
    parser.add_argument("--max-eval-items", type=int, default=100, help="%(default)s")
    parser.add_argument("--max-concurrent", type=int, default=64, help="%(default)s")
    parser.add_argument("--eval-dir", default=None, help="folder of the results")
    flags = parser.parse_args(words)
    for name in ("max_tokens", "max_eval_items", "max_concurrent"):
        if getattr(flags, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1")
    return flags


async def evaluate(flags: Any, args: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run the evaluation that the flags describe; `args` are further arguments of the adapter.

    Raises:
        ConfigError: the environment cannot be loaded.
        MissingExtraError: verifiers is not installed.
    """
    adapter = make_adapter(f"verifiers:{flags.vf_env_name}", args or {}, seed=0)
    server = APIServerConfig(
        model_name=flags.model_name,
        base_url=flags.server_url,
        api_key=flags.api_key,
        health_check=False,
    )
    endpoint = AgentEndpoint(
        base_url=flags.server_url,
        api_key=flags.api_key,
        model=flags.model_name,
        max_tokens=flags.max_tokens,
        temperature=flags.temperature,
    )
    manager = ServerManager([server])
    try:
        await adapter.open()
        evaluation = VerifiersEval(
            adapter=adapter,
            items=await adapter.eval_items(flags.max_eval_items),
            endpoint=endpoint,
            max_concurrent=flags.max_concurrent,
            temperature=flags.temperature,
            max_tokens=flags.max_tokens,
            eval_dir=flags.eval_dir,
        )
        return await evaluation(manager)
    finally:
        await adapter.close()
        await manager.close()


def main() -> None:
    """Run the command line of this process."""
    try:
        asyncio.run(evaluate(read_flags()))
    except (ConfigError, MissingExtraError, EpisodeConnectionError) as error:
        sys.stderr.write(f"verifiers_eval: error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
