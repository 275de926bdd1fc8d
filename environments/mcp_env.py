"""MCP calls: the policy reads a request and writes one call as JSON; no server is asked.

    request -> [system, user] -> G completions -> {"tool_name", "arguments"} -> +1 or -1

For tools that run, see `docs/adapters/mcp.md`. With vLLM servers on ports 9004 and 9005; a file for
`--config` with the section `openai` lists others:

    python environments/mcp_env.py process --env.total_steps 4 \
        --env.dataset_path environments/data/mcp_sample
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, EvalHandlingEnum
from atroposlib.envs.conversation import visible_text
from atroposlib.envs.dataset_items import DatasetItems, LocalItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import default_configs
from atroposlib.tasks.tool_calls import covers

__all__ = ["McpEnv", "McpEnvConfig", "expected_call", "read_call", "score"]

CARD = EnvironmentCard(
    task="write the call of an MCP tool that a request needs, as JSON",
    turns="1",
    reward="+1 the expected tool and arguments, -1 anything else",
    data="`--env.dataset_path`, rows of `user_prompt_text` and `expected_mcp_call`",
    command="process --env.dataset_path environments/data/mcp_sample --env.total_steps 4",
)

MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
SAMPLE = Path(__file__).with_name("data") / "mcp_sample"
MAX_ANSWER_CHARACTERS = 100_000
SYSTEM_PROMPT = (
    "You work with tools of MCP servers. Choose the tool that the request needs. You may think "
    "within <think></think> first; then answer with one JSON object and nothing else: "
    '{"tool_name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}'
)

Call = dict[str, Any]
"""`tool_name` and `arguments`."""


class McpEnvConfig(LocalItemsConfig, SingleTurnEnvConfig):
    """Settings of the data set and of sampling."""

    dataset_path: str = Field(
        "my_mcp_dataset.json",
        description="JSON, JSONL or Parquet file, or folder with a train and a test file.",
    )
    temperature: float = Field(0.8, ge=0, description="Sampling temperature of rollouts.")
    max_tokens: int = Field(1024, ge=1, description="Maximum tokens of one completion.")


def expected_call(row: Mapping[str, Any]) -> Call:
    """Return the expected call of a row, which may be JSON text.

    Raises:
        ConfigError: it is not an object with a tool name and arguments.
    """
    call = row["expected_mcp_call"]
    read = _read_object(call) if isinstance(call, str) else call
    if not _is_call(read):
        raise ConfigError(
            f"expected_mcp_call is {call!r:.200}; expected "
            '{"tool_name": "...", "arguments": {...}}'
        )
    return {"tool_name": read["tool_name"], "arguments": read["arguments"]}


def read_call(completion: str) -> Call | None:
    """Return the call of a completion; None unless it is one JSON object after the thinking."""
    read = _read_object(visible_text(completion)[: MAX_ANSWER_CHARACTERS + 1])
    return read if _is_call(read) else None


def score(expected: Call, completion: str) -> float:
    """Return 1.0 for the expected tool with each expected argument, else -1.0.

    Further arguments are allowed.
    """
    call = read_call(completion)
    is_right = call is not None and (
        call["tool_name"] == expected["tool_name"]
        and covers(expected["arguments"], call["arguments"])
    )
    return 1.0 if is_right else -1.0


def _read_object(text: str) -> Any:
    try:
        return json.loads(text) if len(text) <= MAX_ANSWER_CHARACTERS else None
    except (ValueError, RecursionError):
        return None


def _is_call(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("tool_name"), str)
        and isinstance(value.get("arguments"), dict)
    )


class McpEnv(DatasetItems, SingleTurnEnv):
    """Requests and the call that each needs; an item is a row."""

    env_config_cls = McpEnvConfig
    config: McpEnvConfig
    columns = ("user_prompt_text", "expected_mcp_call")
    logs_percent_correct = True
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    @classmethod
    def config_init(cls) -> tuple[McpEnvConfig, list[APIServerConfig]]:
        config, server = default_configs(
            McpEnvConfig,
            MODEL,
            server={"num_requests_for_eval": 256},
            group_size=32,
            batch_size=1024,
            eval_handling=EvalHandlingEnum.LIMIT_TRAIN,
            eval_limit_ratio=0.1,
            wandb_name="mcp",
        )
        second = server.model_copy(update={"base_url": "http://localhost:9005/v1"})
        return config, [server, second]

    async def setup(self) -> None:
        await super().setup()
        for row in (*self.train, *self.test):
            expected_call(row)

    def prompt(self, item: dict[str, Any]) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": str(item["user_prompt_text"])},
        ]

    async def score(self, item: dict[str, Any], answer: str) -> float:
        return score(expected_call(item), answer)

    def check_gold_answer(self, item: dict[str, Any]) -> str:
        return f"<think>This tool does it.</think>{json.dumps(expected_call(item))}"

    def _budget(self, messages: Any) -> int:
        return min(self.config.max_tokens, super()._budget(messages))


if __name__ == "__main__":
    McpEnv.cli()
