"""Environments for verifiers by name: `verifiers:NAME` of `atropos-env` with settings of its own.

    vf_env_name, env_args ─► adapter verifiers:NAME ─► its loop, tools and rubric ─► groups

With the package of an environment and a vLLM server on port 9001:

    pip install '.[verifiers]' sophistry-bench-sprint 'verifiers<0.2'
    python environments/verifiers_server.py process --env.vf_env_name sophistry-bench-sprint \
        --env.total_steps 4 --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator

from atroposlib.adapters.env import AdapterEnv, AdapterEnvConfig
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.envs.multi_turn_env import Rollout, discounted_return
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import default_configs

__all__ = ["VerifiersEnv", "VfEnvConfig"]

CARD = EnvironmentCard(
    task="any installed environment for verifiers",
    turns="of the environment",
    reward="the environment's rubric",
    data="the environment's data set",
    needs="`pip install '.[verifiers]'` and the environment's package",
    command="process --env.vf_env_name sophistry-bench-sprint --env.total_steps 4",
)

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"


class VfEnvConfig(AdapterEnvConfig):
    """The environment; further arguments of the adapter are in `adapter_args`."""

    vf_env_name: str = Field("", description="Installed environment, as verifiers names it.")
    env_args: dict[str, Any] | str = Field(
        "{}", description="Arguments of the environment, as JSON or as a mapping."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_the_adapter(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not values.get("vf_env_name"):
            return values
        given = values.get("env_args") or {}
        try:
            env_args = json.loads(given) if isinstance(given, str) else dict(given)
        except ValueError as error:
            raise ValueError(f"env_args: expected a JSON object, got {given!r:.200}") from error
        if not isinstance(env_args, dict):
            raise ValueError(f"env_args: expected a JSON object, got {given!r:.200}")
        adapter_args = dict(values.get("adapter_args") or {})
        adapter_args["env_args"] = {**(adapter_args.get("env_args") or {}), **env_args}
        named = {"adapter": f"verifiers:{values['vf_env_name']}", "adapter_args": adapter_args}
        return {**values, **named}


class VerifiersEnv(AdapterEnv):
    """Plays one environment, and logs its rubric under `metrics/`."""

    name = "verifiers"
    env_config_cls = VfEnvConfig
    config: VfEnvConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._groups: list[Sequence[Rollout]] = []

    @classmethod
    def config_init(cls) -> tuple[VfEnvConfig, APIServerConfig]:
        """Return the default settings and the default server."""
        return default_configs(
            VfEnvConfig,
            MODEL,
            port=9001,
            server={"server_type": "sglang"},
            group_size=8,
            batch_size=4,
            total_steps=1000,
            steps_per_eval=100,
            max_token_length=2048,
            wandb_name="verifiers",
        )

    @classmethod
    def check_inputs(cls, config: BaseEnvConfig) -> None:
        if isinstance(config, VfEnvConfig) and not config.adapter:
            raise ConfigError(
                "no environment is named; set --env.vf_env_name to one that is installed"
            )
        super().check_inputs(config)

    async def postprocess_histories(self, trajectories: Sequence[Rollout]) -> Any:
        self._groups.append(trajectories)
        return await super().postprocess_histories(trajectories)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        groups, self._groups = self._groups, []
        metrics.update(rubric_metrics(groups, discount=self.config.reward_discount))
        await super().wandb_log(metrics)


def rubric_metrics(groups: Sequence[Sequence[Rollout]], *, discount: float) -> dict[str, float]:
    """Return means over the rollouts of the groups, by name; empty without groups."""
    rewards = [[discounted_return(r.rewards, discount=discount) for r in group] for group in groups]
    everything = [reward for group in rewards for reward in group]
    if not everything:
        return {}
    rollouts = [rollout for group in groups for rollout in group]
    turns = [rollout.metrics.get("num_turns", 1.0) for rollout in rollouts]
    identical = sum(len(set(group)) == 1 for group in rewards)
    metrics = {
        "metrics/mean_reward": statistics.fmean(everything),
        "metrics/reward_std": statistics.pstdev(everything),
        "metrics/avg_num_turns": statistics.fmean(turns),
        "metrics/max_num_turns": max(turns),
        "metrics/groups_with_identical_scores": float(identical),
        "metrics/groups_total": float(len(groups)),
        "metrics/identical_score_rate": identical / len(groups),
    }
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        measured = {**rollout.reward_parts[-1], **rollout.metrics}
        for name, value in measured.items():
            values.setdefault(name, []).append(value)
    metrics.update({f"metrics/{name}": statistics.fmean(v) for name, v in values.items()})
    return metrics


if __name__ == "__main__":
    VerifiersEnv.cli()
