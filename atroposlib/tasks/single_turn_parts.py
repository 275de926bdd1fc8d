"""Shared parts of environments: thinking, ranking by length, saved rollouts, default settings."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, BaseEnvConfig, EvalHandlingEnum
from atroposlib.envs.reporting import GroupWriter
from atroposlib.envs.server_handling.chat_rendering import render_messages
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig, Trajectory
from atroposlib.utils.length_penalty import penalize_length

__all__ = [
    "DEEP_THINKING",
    "RolloutDump",
    "SavedRolloutsConfig",
    "ThinkingEnv",
    "answer_after_thinking",
    "deep_hermes_settings",
    "default_configs",
    "long_completion_penalty",
    "rank_by_length",
]

DEEP_THINKING = (
    "You are an AI that thinks deeply. Before you answer you may reason for as long as you need: "
    "look at the problem from several sides, try ideas, and check each step. Put all of that "
    "inside <think> </think> tags, and give your solution or answer after the closing tag."
)

THINK_TAG = re.compile(r"<(/?)think>", re.IGNORECASE)


def answer_after_thinking(completion: str) -> str | None:
    """Return the text after the thinking; None unless there is exactly one pair of tags."""
    tags = list(THINK_TAG.finditer(completion))
    if [tag[1] for tag in tags] != ["", "/"]:
        return None
    return completion[tags[1].end() :]


class ThinkingEnv(SingleTurnEnv):
    """`score` receives the whole completion; completions under ten tokens are not trained on."""

    scores_thinking = True
    min_trained_tokens = 10

    @cached_property
    def opened_tag(self) -> str:
        """Opening tag if the chat template writes it before every answer, else empty."""
        prompt = render_messages(self.tokenizer, [{"role": "user", "content": "?"}])
        return "<think>" if prompt.rstrip().endswith("<think>") else ""


def rank_by_length(
    scores: Sequence[float],
    trajectories: Sequence[Trajectory],
    *,
    max_tokens: int,
    free_fraction: float = 0.5,
    full_score: float = 1.0,
) -> list[float]:
    """Apply the linear length penalty to a group in which every score is at least `full_score`.

    Args:
        scores: [G].
        trajectories: [G]; their tokens count, prompt included.
        max_tokens: length at which a score becomes 0.
        free_fraction: fraction of `max_tokens` without a penalty.
        full_score: any lower score leaves the group unchanged.
    """
    if min(scores) < full_score:
        return list(scores)
    lengths = [len(trajectory.tokens) for trajectory in trajectories]
    return penalize_length(scores, lengths, max_tokens=max_tokens, free_fraction=free_fraction)


LONG_FRACTION, LONG_PENALTY = 0.95, 0.5


def long_completion_penalty(num_tokens: int, *, max_tokens: int) -> float:
    """Return `0.5 * num_tokens / max_tokens` above 95 % of the limit, else 0.

    Args:
        num_tokens: tokens of the completion.
        max_tokens: limit of prompt and completion.
    """
    is_long = num_tokens > LONG_FRACTION * max_tokens
    return LONG_PENALTY * num_tokens / max_tokens if is_long else 0.0


class SavedRolloutsConfig(SingleTurnEnvConfig):
    """Settings of saved rollouts and of logging."""

    dump_rollouts: bool = Field(
        False, description="Whether rollouts above the score threshold are saved."
    )
    dump_failed_rollouts: bool = Field(
        False, description="Whether groups in which all scores are 0 are saved."
    )
    rollout_save_score_threshold: float = Field(
        0.7, ge=0, le=1, description="Score above which dump_rollouts saves a rollout."
    )
    dump_dir: str = Field("data_dumps", description="Folder of saved rollouts.")
    debug_logging: bool = Field(False, description="Whether every scored group is logged.")
    suppress_base_env_logs: bool = Field(
        True, description="Whether the base environment class logs only warnings."
    )

    def set_log_levels(self, logger: logging.Logger) -> None:
        """Set the levels of the base class's logger and of an environment's own."""
        if self.suppress_base_env_logs:
            logging.getLogger("atroposlib.envs.base").setLevel(logging.WARNING)
        if self.debug_logging:
            logger.setLevel(logging.DEBUG)


class SavingRules(Protocol):
    """The settings that select saved rollouts."""

    dump_rollouts: bool
    dump_failed_rollouts: bool
    rollout_save_score_threshold: float
    dump_dir: str


class RolloutDump:
    """Writes the trajectories selected by the settings, each with its score.

    Args:
        config: settings that select trajectories.
        name: start of the names of the files, `<name>_rollouts.jsonl` and
            `<name>_failed_rollouts.jsonl`, which are created with their first group.
        batch_size: number of groups of a file that are written together.
    """

    def __init__(self, config: SavingRules, name: str, *, batch_size: int = 1) -> None:
        self._config = config
        self._name = name
        self._batch_size = batch_size
        self._waiting: dict[str, list[dict[str, Any]]] = {}
        self._writers: dict[str, GroupWriter] = {}

    def save(
        self,
        details: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        trajectories: Sequence[Trajectory],
        scores: Sequence[float],
    ) -> None:
        """Write the selected trajectories of a group.

        Args:
            details: JSON values of the item, written with them.
            messages: prompt of the group.
            trajectories: [G].
            scores: [G].
        """
        pairs = list(zip(trajectories, scores, strict=True))
        if self._config.dump_failed_rollouts and not any(scores):
            self._write("failed_rollouts", details, messages, pairs)
        elif self._config.dump_rollouts:
            threshold = self._config.rollout_save_score_threshold
            good = [(trajectory, score) for trajectory, score in pairs if score > threshold]
            self._write("rollouts", details, messages, good)

    def close(self) -> None:
        for kind in self._waiting:
            self._flush(kind)
        for writer in self._writers.values():
            writer.close()

    def _write(
        self,
        kind: str,
        details: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        pairs: Sequence[tuple[Trajectory, float]],
    ) -> None:
        if not pairs:
            return
        record = {
            **details,
            "messages": [trajectory.chat(messages) for trajectory, _ in pairs],
            "scores": [score for _, score in pairs],
        }
        self._waiting.setdefault(kind, []).append(record)
        if len(self._waiting[kind]) >= self._batch_size:
            self._flush(kind)

    def _flush(self, kind: str) -> None:
        records = self._waiting[kind]
        if records and kind not in self._writers:
            path = Path(self._config.dump_dir) / f"{self._name}_{kind}.jsonl"
            self._writers[kind] = GroupWriter(path)
        for record in records:
            self._writers[kind].write(record)
        records.clear()


Config = TypeVar("Config", bound=BaseEnvConfig)


def default_configs(
    config_cls: type[Config],
    model: str,
    *,
    port: int = 9004,
    server: Mapping[str, Any] | None = None,
    **settings: Any,
) -> tuple[Config, APIServerConfig]:
    """Return the result of a `config_init`: settings for a model, and a vLLM server on this host.

    Args:
        config_cls: the environment's config class.
        model: name of the model and of its tokenizer.
        port: port of the server.
        server: further settings of the server, which take precedence.
        settings: settings of the environment.
    """
    common = {
        "model_name": model,
        "base_url": f"http://localhost:{port}/v1",
        "api_key": "x",
        "server_type": "vllm",
    }
    config = config_cls(tokenizer_name=model, **settings)
    return config, APIServerConfig(**{**common, **(server or {})})


DEEP_HERMES = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
SERVER = {"num_max_requests_at_once": 32, "num_requests_for_eval": 256}


def deep_hermes_settings(
    config_cls: type[Config], *, server: Mapping[str, Any] = SERVER, **settings: Any
) -> tuple[Config, APIServerConfig]:
    """Return `default_configs` for DeepHermes 8B; `settings` take precedence over its defaults."""
    common = {
        "batch_size": 1024,
        "inference_weight": 1.0,
        "eval_handling": EvalHandlingEnum.LIMIT_TRAIN,
        "eval_limit_ratio": 0.1,
    }
    return default_configs(config_cls, DEEP_HERMES, server=server, **{**common, **settings})
