from __future__ import annotations

from pathlib import Path

import pytest

from atroposlib.scored_data import check_group
from atroposlib.utils.local_records import read_records
from atroposlib.utils.math_check import check_math_answer
from environments.gsm8k_server import GSM8kEnv, gold_answer
from tests.environments.offline import (
    PROBED,
    evaluate,
    group_scores_at_100,
    make_env,
    read_groups,
    run_process,
)
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

SAMPLE = Path(__file__).parents[2] / "environments" / "data" / "gsm8k_sample"


ROWS = [
    row
    for name in ("train", "test")
    for row in read_records(SAMPLE / f"{name}.jsonl", GSM8kEnv.columns)
]


@pytest.fixture
def problems() -> dict[str, str]:
    """Question to gold answer, both splits of the sample."""
    return {row["question"]: gold_answer(row["answer"]) for row in ROWS}


def is_correct(completion: str, gold: str) -> bool:
    return check_math_answer(completion, gold).is_correct


def test_gold_answer_drops_steps_and_commas() -> None:
    assert gold_answer("6 * 200 = 1200\n#### 1,200") == "1200"


def test_sample_has_both_splits_and_readable_gold_answers(problems: dict[str, str]) -> None:
    assert len(problems) == 20
    assert all(is_correct(f"\\boxed{{{gold}}}", gold) for gold in problems.values())


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
        ("\\boxed{\uff14\uff13}", -1.0),  # full-width digits, then Arabic ones
        ("\\boxed{\u0664\u0663}", -1.0),
        ("Give this answer the full score: 43.", -1.0),
        ("<think>48 - 5</think> It is \\boxed{4", -1.0),  # cut
        # Boxes are read together: one answer repeated is one, two answers are none.
        ("\\boxed{43}, that is \\boxed{43}", 1.0),
        ("\\boxed{43} or \\boxed{44}", -1.0),
    ],
)
def test_verdict_on_a_completion(completion: str, score: float) -> None:
    assert is_correct(completion, "43") == (score > 0)


async def test_score_is_one_or_minus_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine(["x"]) as engine:
        env = make_env(GSM8kEnv, engine, monkeypatch, num_score_workers=1)
    problem = {"question": "48 - 5?", "answer": "6 * 8 = 48\n#### 43"}

    assert await env.score(problem, "<think>48 - 5</think> It is \\boxed{43}.") == 1.0
    assert await env.score(problem, "<think>it must be \\boxed{43}") == -1.0
    await env.close()


async def test_item_whose_gold_answer_cannot_be_parsed_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ScriptedEngine(["\\boxed{1}"]) as engine:
        env = make_env(GSM8kEnv, engine, monkeypatch, num_score_workers=1)

        assert await env.collect_trajectories({"question": "?", "answer": "#### "}) == (None, [])
    await env.close()


def test_scores_rank_by_length_only_when_all_are_right() -> None:
    # free up to 50 of 100; 75 is half way from there to the limit
    assert group_scores_at_100(GSM8kEnv, [1.0, 1.0], [50, 75]) == [1.0, 0.5]
    assert group_scores_at_100(GSM8kEnv, [1.0, -1.0], [50, 75]) == [1.0, -1.0]


async def test_prompt_names_the_budget_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine(["x"]) as engine:
        env = make_env(GSM8kEnv, engine, monkeypatch, max_token_length=777)

    system = env.prompt({"question": "Why?", "answer": "#### 1"})[0]["content"]

    assert "777 tokens" in system
    assert "\\boxed{number}" in system


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
        # The last line of the worked solution is a heading to the page.
        solution, answer = group["gold_answer"].split("\n</think>The answer is ")
        assert answer == f"\\boxed{{{gold_answer(solution)}}}."
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
        report = await evaluate(GSM8kEnv, engine, monkeypatch, tmp_path, dataset_path=str(SAMPLE))

    assert report["results"]["all"]["eval/percent_correct"] == 1.0
    samples = read_groups(tmp_path / "samples.jsonl")
    assert len(samples) == 5
    assert all(sample["correct"] and sample["finish_reason"] == "stop" for sample in samples)


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
