from __future__ import annotations

import json
from pathlib import Path

import pytest

from atroposlib.errors import ConfigError
from atroposlib.scored_data import check_group
from atroposlib.utils.math_check import check_math_answer
from environments.gsm8k_server import (
    GSM8kEnv,
    gold_answer,
    group_scores,
    load_splits,
    prompt_messages,
    score_verdict,
)
from tests.environments.offline import PROBED, make_env, read_groups, run_process
from tests.fakes import ScriptedEngine

SAMPLE = Path(__file__).parents[2] / "environments" / "data" / "gsm8k_sample"


@pytest.fixture
def problems() -> dict[str, str]:
    """Question to gold answer, both splits of the sample."""
    train, test = load_splits(str(SAMPLE))
    return {row["question"]: gold_answer(row["answer"]) for row in train + test}


def score_of(completion: str, gold: str) -> float:
    return score_verdict(check_math_answer(completion, gold))


def test_gold_answer_drops_steps_and_commas() -> None:
    assert gold_answer("6 * 200 = 1200\n#### 1,200") == "1200"


def test_sample_has_both_splits_and_readable_gold_answers(problems: dict[str, str]) -> None:
    assert len(problems) == 20
    assert {score_of(f"\\boxed{{{gold}}}", gold) for gold in problems.values()} == {1.0}


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("\\boxed{43}", 1.0),
        ("<think>48 - 5</think> It is \\boxed{43}.", 1.0),
        ("\\boxed{43.0}", 1.0),
        ("\\boxed{\\frac{86}{2}}", 1.0),
        ("", -1.0),
        ("43", -1.0),
        ("\\boxed{42}", -1.0),
        ("\\boxed{}", -1.0),
        ("\\boxed{43", -1.0),
        ("garbage ((( \\frac{", -1.0),
        # An answer inside the thinking is no answer, finished or not.
        ("<think>\\boxed{43}</think> I do not know.", -1.0),
        ("<think>it must be \\boxed{43}", -1.0),
        ("\\boxed{" + "9" * 5000 + "}", -1.0),
        ("\\boxed{\\text{forty-three}}", -1.0),
    ],
)
def test_score_of_a_completion(completion: str, score: float) -> None:
    assert score_of(completion, "43") == score


def test_score_of_two_different_boxes_is_not_higher_than_of_one() -> None:
    assert score_of("\\boxed{42} or \\boxed{43} or \\boxed{44}", "43") == -1.0


def test_unreadable_gold_answer_is_told_from_a_wrong_completion() -> None:
    assert not check_math_answer("\\boxed{1}", "").is_gold_readable


def test_load_splits_without_the_hub_names_the_setting_that_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("datasets.load_dataset", fail)

    with pytest.raises(ConfigError, match=r"no route.*--env\.dataset_path"):
        load_splits(None)


def test_group_scores_rank_by_length_only_when_all_are_right() -> None:
    # free up to 50 of 100; 75 is half way from there to the limit
    assert group_scores([1.0, 1.0], [50, 75], max_token_length=100) == [1.0, 0.5]
    assert group_scores([1.0, -1.0], [50, 75], max_token_length=100) == [1.0, -1.0]


def test_prompt_names_the_budget_of_the_settings() -> None:
    system = prompt_messages("Why?", max_token_length=777)[0]["content"]

    assert "777 tokens" in system
    assert "\\boxed{number}" in system


def test_single_file_is_split_without_overlap(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    rows = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(30)]
    path.write_text("\n".join(json.dumps(row) for row in rows))

    train, test = load_splits(str(path))

    assert len(test) == 3
    assert {r["question"] for r in train} | {r["question"] for r in test} == {
        r["question"] for r in rows
    }
    assert len(train) == 27


def test_parquet_folder_is_read(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"question": ["q"], "answer": ["#### 1"], "extra": [0]})
    pyarrow.parquet.write_table(table, tmp_path / "train-00000-of-00001.parquet")
    pyarrow.parquet.write_table(table, tmp_path / "test.parquet")

    assert load_splits(str(tmp_path)) == ([{"question": "q", "answer": "#### 1"}],) * 2


@pytest.mark.parametrize("content", ["", "not json", '{"question": "q"}', "[1]"])
def test_unusable_file_is_refused_with_the_expected_columns(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)

    with pytest.raises(ConfigError, match="columns question, answer"):
        load_splits(str(path))


def test_folder_without_a_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.jsonl"):
        load_splits(str(tmp_path))


async def test_process_writes_groups_with_exact_tokens_and_aligned_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: dict[str, str]
) -> None:
    replies = Replies(problems)
    out = tmp_path / "groups.jsonl"
    async with ScriptedEngine(replies) as engine:
        env = make_env(
            GSM8kEnv,
            engine,
            monkeypatch,
            dataset_path=str(SAMPLE),
            data_path_to_save_groups=str(out),
            include_messages=True,
        )

        await run_process(env, num_groups=3, group_size=4)

    groups = read_groups(out)
    assert len(groups) == 3
    for group in groups:
        check_group(group)
        texts = [chat[-1]["content"] for chat in group["messages"]]
        assert group["scores"] == [1.0 if "Right" in text else -1.0 for text in texts]
        assert group["scores"].count(1.0) == 2
        for ids, mask, text in zip(group["tokens"], group["masks"], texts, strict=True):
            written = [t for t, m in zip(ids, mask, strict=True) if m != -100]
            assert "".join(map(chr, written[:-1])) == text
            assert written[-1] == 2
    assert (tmp_path / "groups.html").exists()


async def test_short_completions_stay_in_the_group_and_are_muted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine([PROBED, "12", "a much longer wrong reply"]) as engine:
        env = make_env(GSM8kEnv, engine, monkeypatch, dataset_path=str(SAMPLE), group_size=2)
        await env.setup()

        group, backlog = await env.collect_trajectories(await env.get_next_item())

    assert group["overrides"] == [{"set_advantage_to_zero": True}, {}]
    assert backlog == []
    await env.close()


async def test_evaluate_asks_greedily_and_reports_what_it_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problems: dict[str, str]
) -> None:
    async with ScriptedEngine(Replies(problems, always_right=True)) as engine:
        env = make_env(
            GSM8kEnv,
            engine,
            monkeypatch,
            dataset_path=str(SAMPLE),
            data_dir_to_save_evals=str(tmp_path),
        )
        await env.setup()

        await env.evaluate()
        temperatures = {request.body["temperature"] for request in engine.requests}

    report = json.loads((tmp_path / "metrics.json").read_text())
    assert report["results"]["all"] == {"eval/percent_correct": 1.0}
    assert temperatures == {report["config_general"]["generation_parameters"]["temperature"]}
    samples = read_groups(tmp_path / "samples.jsonl")
    assert len(samples) == 5
    assert all(sample["correct"] and sample["finish_reason"] == "stop" for sample in samples)
    await env.close()


async def test_checkpoint_keeps_the_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine(["x"]) as engine:
        env = make_env(GSM8kEnv, engine, monkeypatch, dataset_path=str(SAMPLE))
        again = make_env(GSM8kEnv, engine, monkeypatch, dataset_path=str(SAMPLE))
    for one in (env, again):
        one.checkpoint_dir, one.wandb_prepend = str(tmp_path), "gsm8k_0"
    await env.setup()
    await env.get_next_item()
    await env.get_next_item()

    env.save_checkpoint(4)
    again.curr_step = 4
    again.load_checkpoint()

    assert again.iter == 2


class Replies:
    """Answers each prompt by its gold answer, right and wrong in turn."""

    def __init__(self, problems: dict[str, str], *, always_right: bool = False) -> None:
        self.problems = problems
        self.always_right = always_right
        self.num_replies = 0

    def __call__(self, prompt: str) -> str:
        gold = next((g for question, g in self.problems.items() if question in prompt), None)
        if gold is None:  # the look for a route that gives token ids
            return "ok"
        self.num_replies += 1
        if self.always_right or self.num_replies % 2:
            return f"<think>steps</think>Right: \\boxed{{{gold}}}"
        return "<think>steps</think>Wrong: \\boxed{-999}"
