from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.errors import ConfigError
from atroposlib.scored_data import check_group
from environments.t1_tool_planning.t1_tool_planning_env import (
    SAMPLE,
    T1ToolPlanningEnv,
    calls_of_plan,
    csv_files,
    dialogue_of,
    score_turn,
)
from tests.environments.offline import evaluate, make_env
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

SEARCH = 'hotels = search_hotels(city=["Varnmouth"], num_people=2)\nsave_to_cache("hotels", hotels)'
RIGHT_SEARCH = ("search_hotels", {"city": "varnmouth ", "num_people": 2})
RIGHT_SAVE = ("save_to_cache", {"key": "hotels", "value": "whatever"})


def blocks(*calls: tuple[str, dict[str, Any]]) -> str:
    return "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        for name, arguments in calls
    )


def test_plan_is_parsed_into_calls_and_never_executed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    plan = f"""
from datetime import date as day
open({str(mark)!r}, "w")
def helper(): pass
helper(); day(2031, 1, 1)
flights = sort_results(filter_flights(prior_results=flights, num_layovers=0), by="price")
flights.save()
"""

    sort, inner = calls_of_plan(plan)

    assert not mark.exists()
    assert (sort.name, sort.arguments) == ("sort_results", {"arg1": None, "by": "price"})
    assert sort.references == {"arg1"}
    assert (inner.name, inner.arguments["num_layovers"]) == ("filter_flights", 0)
    assert inner.references == {"prior_results"}


@pytest.mark.parametrize("plan", ["search_hotels(", "x = " + "(" * 5000, "f()\n" * 10_000])
def test_plan_that_cannot_be_parsed_is_an_error(plan: str) -> None:
    with pytest.raises(ValueError, match="plan"):
        calls_of_plan(plan)


@pytest.mark.parametrize(
    ("plan", "answer", "expected"),
    [
        ('print("none")', "You are welcome.", (1.0, 1.0, 1.0)),
        ('print("none")', blocks(("search_hotels", {})), (0.0, 0.0, 0.0)),
        ('print("none")', "<tool_call>{oops", (0.0, 0.0, 0.0)),
        (SEARCH, "", (0.0, 0.0, 0.0)),
        (SEARCH, blocks(RIGHT_SAVE, RIGHT_SEARCH), (1.0, 1.0, 1.0)),
        # names 2·1/(2+1); parameters 2·2/(4+2); no bonus
        (SEARCH, blocks(RIGHT_SEARCH), (0.1 + 0.5 * 2 / 3 + 0.3 * 2 / 3, 2 / 3, 2 / 3)),
        # right tools; of four parameters, the city is wrong: 2·3/(4+4)
        (
            SEARCH,
            blocks(("search_hotels", {"city": "Tarnwick", "num_people": 2}), RIGHT_SAVE),
            (0.1 + 0.5 + 0.3 * 0.75 + 0.1, 1.0, 0.75),
        ),
        # a call ten times: names 2·1/(2+10), parameters 2·2/(4+20)
        (SEARCH, blocks(*[RIGHT_SEARCH] * 10), (0.1 + 0.5 / 6 + 0.3 / 6, 1 / 6, 1 / 6)),
        # a broken block is a call of no tool: names 2·2/(2+3)
        (SEARCH, blocks(RIGHT_SEARCH, RIGHT_SAVE) + "<tool_call>[", (0.8, 0.8, 1.0)),
        (SEARCH, blocks(("sing", {"song": 1})), (0.1, 0.0, 0.0)),
        ('seek_information("Where?")', blocks(("seek_information", {"query": "Which city?"})), 1.0),
    ],
)
def test_reward_of_a_turn(plan: str, answer: str, expected: Any) -> None:
    found = score_turn(calls_of_plan(plan), answer)

    assert found == pytest.approx(expected if isinstance(expected, tuple) else [expected] * 3)


@pytest.mark.parametrize(
    ("template", "plans"),
    [
        ('["assistant: Hi", "user: one", "assistant: two", "user: three"]', '["f()", "g()"]'),
        ("['user: one', 'assistant: two', 'user: three']", "['f()', 'g()']"),
        ("User: one\nassistant: two\nuser: three", "```python\nf()\n```\n```python\ng()\n```"),
        (
            '[{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, '
            '{"role": "user", "content": "three"}]',
            '["```python\\nf()\\n```", "g()"]',
        ),
    ],
)
def test_row_is_read_in_several_forms(template: str, plans: str) -> None:
    found = dialogue_of({"Filled_Template": template, "Filled_Plan": plans}, max_turns=9)

    assert (found.requests, found.replies) == (("one", "three"), ("two", ""))
    assert [[call.name for call in plan] for plan in found.plans] == [["f"], ["g"]]


def test_row_is_cut_after_the_limit_and_needs_one_plan_per_request() -> None:
    row = {"Filled_Template": '["user: a", "user: b"]', "Filled_Plan": '["f()", "g()"]'}

    assert len(dialogue_of(row, max_turns=1).plans) == 1
    with pytest.raises(ValueError, match="2 user turns and 1 plans"):
        dialogue_of({**row, "Filled_Plan": '["f()"]'}, max_turns=9)


async def test_unreadable_rows_are_left_out_and_none_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"ID": 1, "Filled_Template": '["user: a"]', "Filled_Plan": '["f(x=1)"]'}
    bad = {**good, "Filled_Plan": '["f("]'}
    (tmp_path / "test.jsonl").write_text(json.dumps(good))
    async with ScriptedEngine(["ok"]) as engine:
        for rows, num_left in (([good, bad], 1), ([bad], 0)):
            (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
            env = make_env(T1ToolPlanningEnv, engine, monkeypatch, dataset_path=str(tmp_path))
            if num_left:
                await env.setup()
                assert len(env.train) == num_left
            else:
                with pytest.raises(ConfigError, match="no training row"):
                    await env.setup()
            await env.close()


def test_files_of_the_hub_are_those_of_a_domain_and_a_split(tmp_path: Path) -> None:
    for name in ("hotel/train.csv", "hotel/test.csv", "flight/all.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def names(domain: str | None, split: str) -> list[str]:
        found = csv_files(tmp_path, split, domain=domain)
        return [path.relative_to(tmp_path).as_posix() for path in found]

    assert names("hotel", "train") == ["hotel/train.csv"]
    assert names("flight", "train") == ["flight/all.csv"]
    assert names(None, "other") == ["flight/all.csv", "hotel/test.csv", "hotel/train.csv"]
    with pytest.raises(ConfigError, match="domain hotels"):
        names("hotels", "train")


async def test_group_has_the_mean_of_the_turns_and_trains_them_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []

    def play(prompt: str) -> str:
        if item.requests[0] not in prompt:
            return "ok"  # the look for a route that gives token ids
        index = sum(request in prompt for request in item.requests) - 1
        if index == 0:
            started.append(prompt)
        return gold[index] if len(started) == 1 else "Nothing."

    async with ScriptedEngine(lambda prompt: play(prompt)) as engine:
        env = make_env(
            T1ToolPlanningEnv,
            engine,
            monkeypatch,
            dataset_path=str(SAMPLE),
            group_size=2,
            max_token_length=12_000,
            include_messages=True,
        )
        await env.setup()
        item = next(d for d in env.train if d.requests[0].startswith("I am looking for a hotel"))
        gold = env.check_gold_answer(item)
        env.config.group_size = 1  # one rollout after the other
        rollouts = [(await env.collect_trajectory(item))[0] for _ in range(2)]
        group = await env.postprocess_histories(rollouts)
        await env.close()
        await env.server.close()

    check_group(group)
    assert group["scores"] == pytest.approx([1.0, 1 / 3])  # the third turn needs no call
    assert "advantages" not in group
    trained = "".join(
        chr(i) for i, m in zip(group["tokens"][0], group["masks"][0], strict=True) if m != -100
    )
    assert trained.count("<tool_call>") == 5
    assert "(The user read: There are six hotels" in group["messages"][0][3]["content"]
    assert "The user read" not in trained
    assert env.metrics_of(rollouts, "train")["train/tool_call_f1"] == pytest.approx(2 / 3)


async def test_evaluation_reports_the_contracts_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine(["ok"] * 40) as engine:
        settings = {"dataset_path": str(SAMPLE), "max_token_length": 12_000}
        report = await evaluate(T1ToolPlanningEnv, engine, monkeypatch, tmp_path, **settings)

    metrics = report["results"]["all"]
    # of two turns each, one needs no call in two of four conversations
    assert metrics["eval/avg_reward"] == pytest.approx(0.25)
    assert metrics["eval/tool_call_f1"] == metrics["eval/tool_param_f1"] == pytest.approx(0.25)


def test_config_init_gives_the_published_settings() -> None:
    config, server = T1ToolPlanningEnv.config_init()

    assert T1ToolPlanningEnv.name == "t1_tool_planning"
    assert (config.tokenizer_name, server.server_type) == ("Qwen/Qwen3-1.7B", "vllm")
    assert (config.group_size, config.batch_size, config.max_turn_tokens) == (4, 16, 512)
    assert (config.dataset_seed, T1ToolPlanningEnv.test_fraction) == (42, 0.1)


def test_environment_passes_the_check() -> None:
    report = check_environment(T1ToolPlanningEnv)

    assert report.passed, report.text
