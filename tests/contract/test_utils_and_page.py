"""Utilities and the HTML page: the facts of the contract that have no other test."""

from __future__ import annotations

import inspect
import json
import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atroposlib.utils as utils_package
from atroposlib.frontend.jsonl2html import create_html_for_group, generate_html
from atroposlib.utils import (
    advantages,
    best_of_n_selection,
    force_diverse_samples,
    message_history_utils,
    tool_call_parser,
)
from atroposlib.utils import cli as cli_utils
from atroposlib.utils import tokenize_for_trainer as tokenization
from atroposlib.utils.config_handler import ConfigHandler
from atroposlib.utils.display import display_metrics_table
from atroposlib.utils.tokenizers.qwen_fixed_tokenizer import QwenFixedTokenizer
from tests.fakes import CharTokenizer

SIGNATURES: dict[Any, str] = {
    cli_utils.get_prefixed_pydantic_model: "base_model prefix",
    cli_utils.extract_namespace: "model prefix",
    cli_utils.adjust_model_defaults: "model_class defaults",
    display_metrics_table: "task_name metrics start_time end_time",
    advantages.allclose_to_first: (
        "values rtol=1e-05 atol=1e-08 equal_nan=False return_vector=False"
    ),
    advantages.compute_stats: "data",
    advantages.compute_discounted_returns: "rewards gamma",
    advantages.compute_grpo_process_supervision_advantages: "rewards gamma=None std_tol=1e-08",
    best_of_n_selection.select_best_index: (
        "primary_scores secondary_scores primary_higher_is_better=True "
        "secondary_lower_is_better=True"
    ),
    force_diverse_samples.generate_with_diverse_first_tokens: (
        "self messages prefill='' n=8 max_tokens=4096 temperature=1.0"
    ),
    tool_call_parser.extract_tool_call: "text preferred_tags=None",
    tool_call_parser.parse_tool_call: "response available_tools=None preferred_tags=None",
    tokenization.tokenize_for_trainer: (
        "tokenizer chat include_messages=False train_on_all_assistant_turns=False finish_reason=''"
    ),
    tokenization.tokenize_for_trainer_multistep: (
        "tokenizer chat include_messages=False finish_reason=''"
    ),
    message_history_utils.strip_thinking: "text",
    message_history_utils.truncate_thinking: "text tokenizer max_think_tokens",
    message_history_utils.ensure_trajectory_token_limit: (
        "trajectory tokenizer max_trajectory_tokens"
    ),
    QwenFixedTokenizer.apply_chat_template: (
        "self conversation tools=None tokenize=True padding=False truncation=False max_length=None "
        "return_tensors=None return_dict=False add_generation_prompt=False kwargs"
    ),
}


@pytest.mark.parametrize(
    ("function", "expected"), SIGNATURES.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_signature(function: Any, expected: str) -> None:
    empty = inspect.Parameter.empty
    shown = [
        name if parameter.default is empty else f"{name}={parameter.default!r}"
        for name, parameter in inspect.signature(function).parameters.items()
    ]

    assert " ".join(shown) == expected


def test_package_exports_nothing_and_finds_the_old_handler_without_torch() -> None:
    code = (
        "import sys; from atroposlib.utils import ConfigHandler; "
        "ConfigHandler(); print('torch' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"
    assert utils_package.__all__ == []


def test_config_handler_flags_and_defaults(tmp_path: Path) -> None:
    arguments = vars(ConfigHandler(tmp_path).parser.parse_args([]))

    assert (arguments.pop("env"), arguments.pop("agent")) == ("crosswords", "nous_hermes")
    names = "config group_size total_steps batch_size seed device server_url dataset_name"
    names += " dataset_split prompt_field answer_field system_prompt max_generations reward_funcs"
    assert arguments == dict.fromkeys(names.split())
    assert ConfigHandler().config_dir.name == "configs"


def test_allclose_to_first_acceptance() -> None:
    close = advantages.allclose_to_first([1.0, 1.000000001, 1.000000002], return_vector=True)
    nans = [math.nan, math.nan]

    assert advantages.allclose_to_first([1.0, 1.0, 1.0]) is True
    assert isinstance(close, np.ndarray)
    assert close.all()
    assert advantages.allclose_to_first([1.0, 1.0, 1.1]) is False
    assert advantages.allclose_to_first(nans, equal_nan=False) is False
    assert advantages.allclose_to_first(nans, equal_nan=True) is True


def test_compute_stats_acceptance() -> None:
    flat = advantages.compute_stats([1, 2, 3, [4, 5]])
    nested = advantages.compute_stats([[1, 2], 3, [4, [5, 6]]])

    assert flat == {"mean": pytest.approx(3.0), "var": pytest.approx(2.0)}
    assert nested["mean"] == pytest.approx(3.5)
    assert nested["var"] == pytest.approx(91 / 6 - 3.5**2)


def test_returns_and_process_advantages_acceptance() -> None:
    compute = advantages.compute_grpo_process_supervision_advantages
    root = math.sqrt(2)

    returns = advantages.compute_discounted_returns(np.array([1.0, 1.0, 1.0]), 0.9)
    plain = compute([[1, 2, 3], [4, 5]], gamma=None)
    discounted = compute([[1, 2, 3], [4, 5]], gamma=0.9)

    np.testing.assert_allclose(returns, [2.71, 1.9, 1.0])
    assert plain[0].tolist() == pytest.approx([-3 / root, -1 / root, 0], abs=1e-9)
    assert plain[1].tolist() == pytest.approx([3 / root, 2 / root])
    assert discounted[0].tolist() == pytest.approx([-2.9 / root, -1 / root, 0], abs=1e-9)
    assert discounted[1].tolist() == pytest.approx([2.8 / root, 2 / root])
    with pytest.raises(ValueError, match="deviation"):
        compute([[1, 1, 1]])


def test_display_metrics_table_layout(capsys: pytest.CaptureFixture[str]) -> None:
    display_metrics_table("gsm8k", {"eval/acc_strict": 0.25, "loss": 2}, 10.0, 11.239)

    title, header, rule, first, second, closing = capsys.readouterr().out.strip().split("\n")
    cells = [cell.strip() for cell in header.strip("|").split("|")]
    assert "gsm8k" in title
    assert cells == ["Groups", "Version", "Filter", "n-shot", "Metric", "", "Value", "", "Stderr"]
    assert set(rule) == {"|", "-"}
    assert "acc strict" in first
    assert "↑" in first
    assert "0.2500" in first
    assert "↑" not in second
    assert "1.24 seconds" in closing


def test_tool_calls_are_not_logged_as_warnings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        text = '<call>{"name": "a", "arguments": {}}</call>'
        parsed = tool_call_parser.parse_tool_call(text, preferred_tags=["call"])

    assert parsed == ("a", {}, False)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_tokenize_for_trainer_says_nothing_when_it_cuts(capsys: pytest.CaptureFixture[str]) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]

    row = tokenization.tokenize_for_trainer(CharTokenizer(), chat, finish_reason="length")

    assert tokenization.UNMASKED_ROLES == ["assistant", "agent"]
    assert all(type(value) is int for value in row["tokens"] + row["masks"])
    assert capsys.readouterr().out == ""


def test_page_group_markup_and_default_role() -> None:
    group = {"messages": [[{"content": "no role"}, {"role": "tool", "content": "r"}], 7]}

    markup = create_html_for_group({**group, "scores": [0.5, "<b>"]}, 2)

    assert "<details" in markup
    assert "<summary>Group 2</summary>" in markup
    assert "<strong>Unknown</strong>:</p>\n<p>no role</p>" in markup
    assert "<strong>Tool</strong>:</p>\n<p>r</p>" in markup
    assert 'class="content-block' in markup
    assert "Content 0" in markup
    assert "Reward: 0.5" in markup
    assert "&lt;b&gt;" in markup


def test_page_renders_fenced_code_tables_and_line_breaks() -> None:
    text = "```\ncode\n```\n\n|a|b|\n|-|-|\n|1|2|\n\none\ntwo"

    markup = create_html_for_group({"messages": [text], "scores": [0]}, 0)

    assert "<pre>" in markup
    assert "<table>" in markup
    assert "<br" in markup


def test_page_styles_rewards_and_moves_by_arrow_keys(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "deep" / "out.html"
    source.write_text(json.dumps({"messages": ["x"], "scores": [1]}), encoding="utf-8")

    generate_html(str(source), str(target))

    page = target.read_text(encoding="utf-8")
    assert "<title>Rendered Messages - in.jsonl</title>" in page
    assert "<h1>Rendered Messages - in.jsonl</h1>" in page
    for part in ("reward-positive", "reward-zero", "reward-negative", "groups-container"):
        assert part in page
    for part in ("ArrowDown", "ArrowUp", "click"):
        assert part in page
