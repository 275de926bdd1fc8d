"""Single tool calling: the policy reads a list of tools and a request, and writes the calls.

    [system with tools, request] -> G completions -> calls against the expected ones -> +1 or -1

Calls inside the thinking are ignored. With a vLLM server on port 9004, and without the hub:

    python environments/tool_calling_server.py process --env.total_steps 4 \
        --env.dataset_path environments/data/tool_calling_sample \
        --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, EvalHandlingEnum
from atroposlib.envs.conversation import visible_text
from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig, Trajectory
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import DEEP_THINKING, default_configs, rank_by_length
from atroposlib.tasks.tool_calls import calls_match, read_calls

__all__ = ["Request", "SingleToolCallingEnv", "SingleToolCallingEnvConfig", "request_of", "score"]

CARD = EnvironmentCard(
    task="write the tool calls that a request needs",
    turns="1",
    reward="+1 the expected calls, -1 anything else; by length when all are right",
    data="XLAM-Atropos from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/tool_calling_sample --env.total_steps 4",
)

MODEL = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
SAMPLE = Path(__file__).with_name("data") / "tool_calling_sample"
Request = dict[str, str]
"""One item: `tools` (the system text that lists them), `request` and `expected`."""


class SingleToolCallingEnvConfig(HubItemsConfig, SingleTurnEnvConfig):
    """Settings of the data set and of sampling."""

    temperature: float = Field(0.8, ge=0, description="Sampling temperature of rollouts.")


def request_of(row: Mapping[str, Any]) -> Request | None:
    """Return the first system, human and gpt text of a row; None without a valid call."""
    texts: dict[str, str] = {}
    for message in row["conversations"]:
        texts.setdefault(str(message.get("from")), str(message.get("value")))
    if not {"system", "human", "gpt"} <= texts.keys():
        return None
    expected = visible_text(texts["gpt"])
    if not read_calls(expected).calls:
        return None
    return {"tools": texts["system"], "request": texts["human"], "expected": expected}


def score(expected: str, answer: str) -> float:
    """Return 1.0 if the calls of an answer match the expected ones, else -1.0; see `calls_match`.

    Blocks that are not JSON objects are ignored.
    """
    return 1.0 if calls_match(read_calls(expected).calls, read_calls(answer).calls) else -1.0


class SingleToolCallingEnv(DatasetItems, SingleTurnEnv):
    """Requests and the calls that they need; an item is a `Request`."""

    env_config_cls = SingleToolCallingEnvConfig
    config: SingleToolCallingEnvConfig
    hub_dataset = "NousResearch/XLAM-Atropos"
    hub_subset = "default"
    num_test_rows = 100
    columns = ("conversations",)
    logs_percent_correct = True
    rollout_columns = ("expected_tool_call",)
    min_trained_tokens = 10
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    @classmethod
    def config_init(cls) -> tuple[SingleToolCallingEnvConfig, APIServerConfig]:
        return default_configs(
            SingleToolCallingEnvConfig,
            MODEL,
            server={"num_requests_for_eval": 256},
            group_size=16,
            max_num_workers_per_node=16,
            total_steps=2000,
            batch_size=1024,
            steps_per_eval=25,
            max_token_length=16384,
            min_batch_allocation=0.1,
            eval_handling=EvalHandlingEnum.LIMIT_TRAIN,
            eval_limit_ratio=0.1,
            wandb_name="toolcall_think",
        )

    async def setup(self) -> None:
        await super().setup()
        self.train, self.test = (
            [request for request in map(request_of, rows) if request is not None]
            for rows in (self.train, self.test)
        )
        if not self.train:
            raise ConfigError(
                "no training row has a system, a human and a gpt text with a call; expected "
                'conversations of {"from": ..., "value": ...}'
            )

    def prompt(self, item: Request) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": f"{DEEP_THINKING}\n\n{item['tools']}"},
            {"role": "user", "content": item["request"]},
        ]

    async def score(self, item: Request, answer: str) -> float:
        return score(item["expected"], answer)

    def group_scores(
        self, scores: Sequence[float], trajectories: Sequence[Trajectory]
    ) -> Sequence[float]:
        return rank_by_length(scores, trajectories, max_tokens=self.config.max_token_length)

    def check_gold_answer(self, item: Request) -> str:
        return f"<think>These calls do it.</think>{item['expected']}"

    def rollout_cells(self, item: Request) -> Sequence[Any]:
        return (item["expected"],)


if __name__ == "__main__":
    SingleToolCallingEnv.cli()
