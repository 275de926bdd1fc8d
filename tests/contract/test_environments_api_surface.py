"""Modules, constants, aliases and shared types of the environments' side (sections 1, 3 and 12)."""

from __future__ import annotations

import importlib
import typing
from typing import Any

import pytest
from typing_extensions import get_type_hints, is_typeddict

from atroposlib import type_definitions as types
from atroposlib.envs import constants
from atroposlib.scored_data import ScoredDataGroup, ScoredDataItem

MODULES = {
    "atroposlib.envs": [],
    "atroposlib.envs.eval": ["pass_at_k", "evaluate_log", "EvalBase", "eval_runner", "logger"],
    "atroposlib.envs.teacher_distillation_env": [
        *("TeacherDistillationConfig", "TeacherDistillationEnv", "BaseEnv", "BaseEnvConfig"),
        *("ScoredDataGroup", "ServerManager", "ServerManagerConfig", "APIServerConfig"),
        *("ServerBaseline", "resolve_openai_configs", "logger"),
    ],
    "atroposlib.envs.base": ["logger", "adjust_model_defaults", "OpenaiConfig", "APIServerConfig"],
    "atroposlib.envs.server_handling.server_manager": ["OpenaiConfig", "APIServerConfig"],
    "atroposlib.envs.server_handling.openai_server": ["OpenaiConfig", "APIServerConfig"],
}


@pytest.mark.parametrize(("module", "names"), MODULES.items())
def test_module_has_its_names(module: str, names: list[str]) -> None:
    loaded = importlib.import_module(module)

    assert [name for name in names if getattr(loaded, name, None) is None] == []


def test_constants() -> None:
    assert (constants.ENV_NAMESPACE, constants.OPENAI_NAMESPACE) == ("env", "openai")
    assert (constants.SERVER_MANAGER_NAMESPACE, constants.NAMESPACE_SEP) == ("server", ".")


def test_both_names_of_a_server_config_are_one_class_everywhere() -> None:
    classes = {
        getattr(importlib.import_module(f"atroposlib.envs.{module}"), name)
        for module in ("base", "server_handling.server_manager", "server_handling.openai_server")
        for name in ("OpenaiConfig", "APIServerConfig")
    }

    assert len(classes) == 1


GROUP_KEYS = {
    *("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "group_overrides"),
    *("overrides", "generation_params", "inference_logprobs", "images", "distill_token_ids"),
    *("distill_logprobs", "env_id"),
}
NOTES = {
    "reward_parts", "finish_reasons", "tokenized_from_text", "traces", "token_versions", "columns",
    "traceparent",
}  # fmt: skip


def test_group_and_item_are_plain_dicts_with_the_keys_of_the_contract() -> None:
    assert is_typeddict(ScoredDataGroup)
    assert set(ScoredDataGroup.__annotations__) == GROUP_KEYS | NOTES
    missing = {"inference_logprobs", "generation_params", "env_id"}  # not among an item's keys
    assert set(ScoredDataItem.__annotations__) >= GROUP_KEYS - missing
    assert type(ScoredDataGroup(tokens=[[1]], masks=[[1]], scores=[0.0])) is dict


def hints(kind: Any) -> dict[str, Any]:
    assert is_typeddict(kind)
    return get_type_hints(kind)


def test_plain_types() -> None:
    assert types.Item is Any
    assert types.UUID is str
    assert types.number == int | float
    assert str in typing.get_args(types.Content)
    assert typing.get_origin(typing.get_args(types.Content)[1]) is list
    assert types.AgentHistory == dict[str, list[types.AgentStep]]
    assert types.GameHistory == list[types.GameStep]


def test_message_names_its_roles() -> None:
    fields = hints(types.Message)

    assert set(fields) == {"role", "content", "reward"}
    assert set(typing.get_args(fields["role"])) == {"system", "user", "assistant", "tool"}
    assert fields["reward"] == float | None


@pytest.mark.parametrize(
    ("kind", "fields", "is_total"),
    [
        (types.AgentStep, "step messages reward", False),
        (types.Observation, "raw rendered", True),
        (types.GameStep, "step agent_id observation action reward done info", True),
        (
            types.EvaluationConfigGeneral,
            "total_evaluation_time_seconds model_name generation_parameters",
            True,
        ),
        (types.EvaluationResults, "all", True),
        (types.EvaluationMetrics, "config_general results", True),
        (
            types.EvaluationSample,
            "messages question gold_answer gold_parsed model_parsed score correct finish_reason "
            "response_after_think",
            False,
        ),
    ],
)
def test_record_has_its_fields(kind: Any, fields: str, is_total: bool) -> None:
    assert set(hints(kind)) == set(fields.split())
    assert kind.__total__ is is_total


def test_field_types_of_records() -> None:
    assert hints(types.AgentStep) == {"step": int, "messages": list[types.Message], "reward": float}
    assert hints(types.GameStep)["reward"] == float | dict[str, float]
    assert hints(types.GameStep)["observation"] is types.Observation
    assert hints(types.EvaluationConfigGeneral)["model_name"] == str | None
    assert hints(types.EvaluationResults) == {"all": dict[str, float]}
    assert hints(types.EvaluationSample)["score"] == int | None
    assert hints(types.EvaluationSample)["correct"] == bool | None


def test_a_message_may_be_a_field_of_a_settings_model() -> None:
    from pydantic import BaseModel

    class Prompt(BaseModel):
        first: types.Message

    content = {"role": "user", "content": [{"type": "text", "text": "q"}], "reward": None}

    assert Prompt(first=content).first == content  # type: ignore[arg-type]
