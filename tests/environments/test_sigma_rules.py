"""Sigma rules: similarity of detections, hostile YAML, the rating of a judge."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from atroposlib.tasks.judge_model import NoVerdictError
from environments.community.cybersecurity_sigma import llm_judge_sigmarule_env as judged
from environments.community.cybersecurity_sigma.cybersecurity_sigma_env import (
    SigmaRuleEnv,
    leaves,
    read_rule,
    score_rule,
)
from tests.environments.offline import make_env, ready_env
from tests.fakes import ScriptedEngine

GOLD = """title: Whoami
detection:
  selection:
    Image|endswith: '\\whoami.exe'
    CommandLine|contains: [/all, /priv]
  condition: selection"""
ITEM = {"prompt": "Detect whoami.", "rule": GOLD}


def test_leaves_of_a_detection() -> None:
    assert leaves({"a": {"X": ["p", {"y": 1}]}, "condition": "A  or\n b"}) == {
        (("a", "X"), "p"),
        (("a", "X", "[]", "y"), "1"),
        (("condition",), "a or b"),
    }


@pytest.mark.parametrize(
    ("rule", "score"),
    [
        (GOLD, 1.0),
        (f"```yaml\n{GOLD}\n```", 1.0),
        (GOLD.replace("[/all, /priv]", "[/PRIV, /all]").replace("Whoami", "x"), 1.0),
        (GOLD.replace("[/all, /priv]", "/all"), 3 / 4),
        (GOLD.replace("/priv", "/groups"), 3 / 5),  # 3 common, 1 each of their own
        (GOLD.replace("condition: selection", "condition: not selection"), 3 / 5),
        (GOLD.replace("  selection:", "  other:"), 0.0),  # the condition alone is common
        ("detection: {condition: selection}", 0.0),
        ("detection: {selection: {Image|endswith: '\\whoami.exe'}}", 0.0),  # no condition
        ("title: x", 0.0),
        ("detection: [", 0.0),
        ("", 0.0),
    ],
)
def test_similarity(rule: str, score: float) -> None:
    assert score_rule(f"The rule:\n\\boxed{{\n{rule}\n}}", GOLD) == pytest.approx(score)


def test_answer_without_one_box_earns_nothing() -> None:
    assert score_rule(GOLD, GOLD) == 0.0
    assert score_rule(f"\\boxed{{{GOLD}}} \\boxed{{{GOLD}}}", GOLD) == 0.0
    assert score_rule(f"\\boxed{{{GOLD}", GOLD) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "detection: &a {condition: x, b: *a}",
        "[" * 5_000,
        "- " * 4_000,
        "detection: !!python/object/apply:os.system ['true']",
        "? {a: b}\n: 1",
        "a: 2024-99-99",
        f"a: {'9' * 9_000}",
        "a: =",
        "detection: {condition: ''}",
    ],
)
def test_hostile_text_is_not_a_rule(text: str) -> None:
    assert read_rule(text) is None


def test_number_too_long_to_print_is_compared_as_text() -> None:
    base_60 = "1:" + ":".join(["59"] * 3_000)

    assert score_rule(f"\\boxed{{detection: {{a: {base_60}, condition: a}}}}", GOLD) == 0.0


async def test_one_rule_for_all_shipped_requests_earns_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = await ready_env(SigmaRuleEnv, monkeypatch, **SigmaRuleEnv.check_settings)
    rows = [*env.train, *env.test]

    def mean(answer: str) -> float:
        return statistics.fmean(score_rule(answer, row["rule"]) for row in rows)

    assert len(rows) == 20
    assert all(score_rule(env.check_gold_answer(row), row["rule"]) == 1.0 for row in rows)
    assert max(mean(env.check_gold_answer(row)) for row in rows) < 0.07


async def test_columns_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SigmaRuleEnv.check_settings, "rule_column": "prompt", "prompt_column": "rule"}

    with pytest.raises(ConfigError, match="no text of the column prompt is a Sigma rule"):
        await ready_env(SigmaRuleEnv, monkeypatch, **settings)


@pytest.mark.parametrize(
    ("verdict", "rating"),
    [
        ("Close. \\boxed{0.75}", 0.75),
        ("<think>\\boxed{0}</think> \\boxed{1.0}", 1.0),
        ("\\boxed{0} \\boxed{ .5 }", 0.5),
        ("\\boxed{1.5}", None),
        ("\\boxed{-1}", None),
        ("\\boxed{nan}", None),
        ("\\boxed{0.5/1}", None),
        ("0.75", None),
        ("", None),
    ],
)
def test_rating(verdict: str, rating: float | None) -> None:
    assert judged.read_rating(verdict) == rating


async def test_judge_rates_readable_rules_only(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []

    def judge(prompt: str) -> str:
        requests.append(prompt)
        return "\\boxed{0.6}" if "endswith" in prompt.rpartition("<rule ")[2] else "Well."

    async with ScriptedEngine(judge) as engine:
        env: Any = make_env(judged.SigmaRuleEnv, engine, monkeypatch)
        scores = [await env.score(ITEM, text) for text in (f"\\boxed{{{GOLD}}}", GOLD, "")]
        with pytest.raises(NoVerdictError, match=r"Well\."):
            await env.score(ITEM, "\\boxed{detection: {condition: x}}")
        await env.server.close()
        await env.close()

    assert scores == [0.6, 0.0, 0.0]
    assert len(requests) == 2
    assert "Detect whoami." in requests[0]
