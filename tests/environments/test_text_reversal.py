from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.errors import ConfigError
from environments.text_reversal_environment import (
    SAMPLE,
    TextReversalConfig,
    TextReversalEnv,
    score_reversal,
    tagged_text,
)
from tests.environments.offline import PROBED, evaluate, make_env
from tests.fakes import ScriptedEngine


def tagged(text: str) -> str:
    return f"<reversed_text>{text}</reversed_text>"


@pytest.mark.parametrize(
    ("answer", "inside"),
    [
        (tagged("cba"), "cba"),
        (f"Here: {tagged(' cba ')} Done.", " cba "),
        (tagged(""), ""),
        ("cba", None),
        ("<reversed_text>cba", None),
        ("cba</reversed_text>", None),
        ("</reversed_text><reversed_text>", None),
        (tagged("cba") * 2, None),
        (f"<reversed_text>{tagged('cba')}", None),
        (f"{tagged('cba')}</reversed_text>", None),
    ],
)
def test_tagged_text_needs_exactly_one_pair(answer: str, inside: str | None) -> None:
    assert tagged_text(answer) == inside


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("abc", "cba", 1.0),
        ("abc", "\ncba\n", 1.0),
        ("Ab, c ", " c ,bA", 1.0),
        ("Ab, c ", "c ,bA", 0.0),  # spaces at the ends count
        ("\nab", "ba\n", 1.0),
        ("abc", "cbA", 0.0),
        ("abc", "abc", 0.0),
        ("abc", "", 0.0),
        ("abc", "\n\ncba", 0.0),
    ],
)
def test_reversal_is_compared_exactly(text: str, answer: str, score: float) -> None:
    completion = f"<think>{tagged('xyz')}</think>{tagged(answer)}"

    assert score_reversal(completion, text, is_thinking=True) == score
    assert score_reversal(tagged(answer), text, is_thinking=False) == score


def test_thinking_is_required_in_thinking_mode_only() -> None:
    for completion in (tagged("cba"), f"<think>{tagged('cba')}</think>"):
        assert score_reversal(completion, "abc", is_thinking=True) == 0.0
    assert score_reversal(f"<think>a</think>{tagged('cba')}", "abc", is_thinking=False) == 1.0


def test_settings_are_the_published_ones() -> None:
    config, server = TextReversalEnv.config_init()

    assert (config.group_size, config.total_steps, config.steps_per_eval) == (8, 2000, 25)
    assert (config.thinking_mode, config.eval_max_tokens) == (True, 8192)
    assert server.base_url == "http://localhost:9004/v1"
    defaults = TextReversalConfig()
    assert (defaults.rollout_temperature, defaults.eval_temperature) == (1.0, 0.6)
    assert (defaults.train_max_tokens, defaults.eval_max_tokens) == (7168, 16384)


@pytest.mark.parametrize(("temperature", "used"), [(None, 0.9), (0.0, 0.0), (0.3, 0.3)])
async def test_group_and_its_metrics(
    temperature: float | None, used: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[str] = []
    async with ScriptedEngine(lambda _: answers.pop(0) if answers else PROBED) as engine:
        env = make_env(
            TextReversalEnv,
            engine,
            monkeypatch,
            dataset_path=str(SAMPLE),
            group_size=3,
            temperature=temperature,
            rollout_temperature=0.9,
            train_max_tokens=100,
        )
        await env.setup()
        item = {"text": "abc"}
        right = f"<think>well</think>{tagged('cba')}"
        answers += [PROBED, right, f"<think>well</think>{tagged('abc')}", "no tags here, sorry"]
        group, _ = await env.collect_trajectories(item)
        logged: dict[str, Any] = {}
        await env.wandb_log(logged)
        body = engine.requests[-1].body
        await env.close()
        await env.server.close()

    assert group["scores"] == [1.0, 0.0, 0.0]
    assert (body["temperature"], body["max_tokens"]) == (used, 100)
    assert logged["train/percent_correct"] == pytest.approx(1 / 3)
    assert logged["train/success_rate"] == pytest.approx(1 / 3)
    assert logged["train/format_error_rate"] == pytest.approx(1 / 3)
    assert (logged["train/total_attempts"], logged["train/successful_reversals"]) == (3, 1)
    assert logged["train/thinking_mode_enabled"] == 1.0


async def test_thinking_mode_sends_no_reasoning_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(TextReversalEnv, engine, monkeypatch, dataset_path=str(SAMPLE))
        await env.setup()
        await env.collect_trajectories(env.train[0])
        await env.server.close()
        keys = {key for request in engine.requests for key in request.body}
        keys |= {key for r in engine.requests for key in r.body.get("extra_body", {})}

    assert env.config.thinking_mode
    assert "<think>" in env.prompt(env.train[0])[0]["content"]
    assert not {key for key in keys if "reason" in key or "think" in key}


async def test_evaluation_reports_formats_and_lengths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def reply(prompt: str) -> str:
        if "windmill" in prompt:
            return f"<think>a</think>{tagged('llimdniw')}"
        return "I cannot do that."

    async with ScriptedEngine(reply) as engine:
        settings = {"dataset_path": str(SAMPLE), "retry_delay": 0.0}
        report = await evaluate(TextReversalEnv, engine, monkeypatch, tmp_path, **settings)

    metrics = report["results"]["all"]
    assert metrics["eval/percent_correct"] == 0.25  # one of four
    assert metrics["eval/format_compliance_rate"] == 0.25
    assert metrics["eval/thinking_utilization_rate"] == 0.25
    assert (metrics["eval/evaluated_items"], metrics["eval/total_dataset_items"]) == (4, 4)
    # 49 characters once, 17 three times: mean 25, deviation sqrt(192)
    assert metrics["eval/avg_response_length"] == pytest.approx(22 + 0.25 * 12, abs=3)


async def test_short_answer_in_an_evaluation_is_requested_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = ["", "  ok ", tagged("cba")]
    async with ScriptedEngine(lambda _: answers.pop(0)) as engine:
        settings = {"dataset_path": str(SAMPLE), "thinking_mode": False, "retry_delay": 0.0}
        env = make_env(TextReversalEnv, engine, monkeypatch, **settings)
        record = await env.evaluate_item({"text": "abc"})
        await env.server.close()

    assert (record["score"], record["model_parsed"], answers) == (1.0, "cba", [])


async def test_local_files_replace_the_data_sets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "train.csv").write_text("text\nabc\n")
    (tmp_path / "eval.jsonl").write_text('{"text": "def"}\n')
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(
            TextReversalEnv,
            engine,
            monkeypatch,
            train_dataset=str(tmp_path / "train.csv"),
            eval_dataset=str(tmp_path / "eval.jsonl"),
        )
        await env.setup()
        await env.server.close()

    assert (env.train, env.test) == ([{"text": "abc"}], [{"text": "def"}])


async def test_row_that_is_not_a_text_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": 3}) + "\n")
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(TextReversalEnv, engine, monkeypatch, dataset_path=str(path))
        with pytest.raises(ConfigError, match="row 0: expected text to be a text, got 3"):
            await env.setup()
        await env.server.close()


@pytest.mark.parametrize("thinking_mode", [True, False])
def test_environment_passes_the_check(thinking_mode: bool) -> None:
    report = check_environment(TextReversalEnv, thinking_mode=thinking_mode, retry_delay=0.0)

    assert report.passed, report.text
