from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.errors import ConfigError
from environments.mcp_env import SAMPLE, McpEnv, expected_call, read_call, score

EXPECTED = {"tool_name": "query", "arguments": {"sql": "SELECT 1", "limit": 5}}
GOLD = json.dumps(EXPECTED)


def with_arguments(**arguments: Any) -> str:
    return json.dumps({"tool_name": "query", "arguments": arguments})


@pytest.mark.parametrize(
    ("completion", "expected_score"),
    [
        (GOLD, 1.0),
        (f"<think>{{}} maybe</think>\n {GOLD} \n", 1.0),
        (f"the template opened the thought</think>{GOLD}", 1.0),
        (with_arguments(sql="SELECT 1", limit=5, timeout=3), 1.0),  # further arguments
        (with_arguments(sql="SELECT 1"), -1.0),
        (with_arguments(sql="SELECT 1", limit=6), -1.0),
        (with_arguments(sql="SELECT 1", limit="5"), -1.0),
        (GOLD.replace("query", "delete"), -1.0),
        (f"Here it is: {GOLD}", -1.0),
        (GOLD + GOLD, -1.0),
        (f"<think>{GOLD}", -1.0),
        ('{"tool_name": "query"}', -1.0),
        ('{"tool_name": 3, "arguments": {}}', -1.0),
        ("[" * 100_000, -1.0),
        ("null", -1.0),
        ("", -1.0),
    ],
)
def test_score(completion: str, expected_score: float) -> None:
    assert score(EXPECTED, completion) == expected_score


def test_call_of_a_row_may_be_json_text() -> None:
    assert expected_call({"expected_mcp_call": GOLD}) == EXPECTED
    assert read_call(GOLD) == EXPECTED


@pytest.mark.parametrize("call", ["no json", {"tool_name": "x"}, {"arguments": {}}, 3])
def test_row_without_a_call_is_an_error(call: Any) -> None:
    with pytest.raises(ConfigError, match="expected_mcp_call is"):
        expected_call({"expected_mcp_call": call})


def test_published_settings() -> None:
    config, servers = McpEnv.config_init()

    assert config.tokenizer_name == "Qwen/Qwen2.5-1.5B-Instruct"
    assert (config.group_size, config.batch_size, config.dataset_path) == (
        32,
        1024,
        "my_mcp_dataset.json",
    )
    assert (config.temperature, config.max_tokens) == (0.8, 1024)
    assert [server.base_url for server in servers] == [
        "http://localhost:9004/v1",
        "http://localhost:9005/v1",
    ]


@pytest.mark.slow
def test_sample_passes_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    report = check_environment(McpEnv)

    assert report.passed, report.text
    assert SAMPLE.is_dir()
