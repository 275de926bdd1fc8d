from __future__ import annotations

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.errors import ConfigError
from environments.mcqa_thinking_env import (
    ChoiceQuestion,
    MCQAThinkingEnv,
    named_options,
    read_question,
    score_answer,
)
from tests.environments.offline import PROBED, make_env
from tests.fakes import ScriptedEngine
from tests.growth import assert_linear

OPTIONS = ("Bananas", "Apple pie", "a dog", "Cats and dogs")
QUESTION = ChoiceQuestion("Which?", "B", OPTIONS)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("The best answer is: B", "B"),
        ("The correct answer is (B).", "B"),
        ("The answer is b", "B"),
        ("**The best answer is B**", "B"),
        ("**The best answer is: B**", "B"),
        ("The best answer is: **B**", "B"),
        ("Thus, final answer: B)", "B"),
        ("It is \\boxed{B}.", "B"),
        ("\\boxed{\\text{B}}", "B"),
        ("\\boxed{\\textbf{B}} or \\boxed{\\mathrm{(B)}}", "B"),
        ("The best answer is: {B}", "B"),  # as the prompt writes it
        ('The best answer is: "B".', "B"),
        ("The best answer is: 'B'", "B"),
        ("The best answer is: [B]", "B"),
        ("The best answer is: $B$", "B"),
        ("The best answer is: \\(B\\)", "B"),
        ("The best answer is: option B", "B"),
        ("The best answer is: **Choice (B)**", "B"),
        ("The best answer is: Apple pie", "B"),
        ("The best answer is: B. Apple pie", "B"),
        ("The best answer is B because of the crust.", "B"),
        ("The answer is B. So \\boxed{B}, and the best answer is: B", "B"),  # one, named thrice
        # An option whose text begins with a letter is read as its text.
        ("The best answer is: Bananas", "A"),
        ("The answer is a dog", "C"),
        ("The answer is A", "A"),
        ("The best answer is: a cat", ""),
        ("The best answer is: A cat", ""),
        ("The best answer is: Bananarama", ""),
        ("The best answer is: B-cells", ""),
        # Several options, none, or no announcement.
        ("The best answer is: B. No, the best answer is: C", ""),
        ("\\boxed{B} \\boxed{A}", ""),
        ("The best answer is: B or C", ""),
        ('The best answer is: "B" or "C"', ""),
        ("The best answer is: option B or option C", ""),
        ("The best answer is: {B}, {C}", ""),
        ("The best answer is: {B, C}", ""),
        ("The best answer is: $b + 1$", ""),
        ("\\boxed{\\textbf{B}} \\boxed{\\mathbf{A}}", ""),
        ("The best answer is: (B), (C)", ""),
        ("The best answer is not B", ""),
        ("The best answer is: Bananas or Apple pie", ""),
        ("The best answer is: **B** or **C**", ""),
        ("The best answer is: B; C", ""),
        ("The best answer is: B | C", ""),
        ("The best answer is: B or maybe C", ""),
        ("The best answer is: B (or C)", ""),
        ("The best answer is: B, and that is it.", "B"),
        ("The best answer is: B, as A and C are wrong.", "B"),
        ("The best answer is: Apple pie, a sweet dish.", "B"),
        ("The best answer is: {Answer}", ""),
        ("The best answer is: E", ""),
        ("The best answer is: \uff22", ""),  # a full-width letter
        ("B", ""),
        ("", ""),
        ("I am sure of it, give me the point.", ""),
    ],
)
def test_option_named_by_an_answer(answer: str, named: str) -> None:
    scores = {
        letter: score_answer(f"<think>hm</think> {answer}", QUESTION._replace(letter=letter))
        for letter in "ABCD"
    }

    assert "".join(letter for letter, score in scores.items() if score == 1.0) == named
    assert set(scores.values()) <= {1.0, -1.0}


@pytest.mark.parametrize(
    ("options", "answer", "named"),
    [
        (("AABB", "AaBb", "aabb", "Aabb"), "aabb", "C"),
        (("AABB", "AaBb", "aabb", "Aabb"), "aABB", ""),
        (("Gold", "Iron", "Tin", "Lead"), "iron", "B"),
        (("Cats", "cats and dogs", "dogs", "no"), "Cats and dogs", "B"),
        (("Cats", "cats and dogs", "dogs", "no"), "cats", "A"),
        (("5", "6", "7", "8"), "6", "B"),
        (("5", "6", "7", "8"), "B", "B"),
        (("5", "6", "7", "8"), "60", ""),
        (("10", "100", "1/2", "x"), "10", "A"),
        (("10", "100", "1/2", "x"), "100", "B"),
        (("10", "100", "1/2", "x"), "10,000", ""),
        (("10", "100", "1/2", "x"), "10.5", ""),
        (("10", "100", "1/2", "x"), "10^6", ""),
        (("10", "100", "1/2", "x"), "10.", "A"),
        (("10", "100", "1/2", "x"), "10, 100", ""),
    ],
)
def test_texts_of_options_are_told_apart(options: tuple[str, ...], answer: str, named: str) -> None:
    found = named_options(f"The best answer is: {answer}", options)

    assert found == {"ABCD".index(named)} if named else len(found) != 1


@pytest.mark.parametrize(
    "completion",
    [
        "The best answer is: B",
        "<think>The best answer is: B</think>",
        "<think>The best answer is: B",
        "</think><think> The best answer is: B",
        "<think>a</think> The best answer is: B <think>b</think>",
        "<THINK>a</think></think> The best answer is: B",
    ],
)
def test_thinking_must_be_one_pair_of_tags_before_the_answer(completion: str) -> None:
    assert score_answer(completion, QUESTION) == -1.0


def test_work_on_hostile_answers_grows_with_their_length_only() -> None:
    def read(times: int) -> None:
        for text in (
            "the answer is " * 1_250 * times,
            "the" + " " * 19_000 * times,
            "\\boxed{" * 3_000 * times,
            "the answer is B, B" + ", B" * 5_600 * times,
        ):
            assert score_answer(f"<think>a</think>{text}", QUESTION) == -1.0

    assert_linear(read)


def test_rows_of_both_data_sets_give_the_same_question() -> None:
    ours = {"prompt": "Q?\nA. x\nB. y", "answer": 1, "ground_truth": "B", "options": ["x", "y"]}
    mmlu = {"question": "Q?", "subject": "s", "choices": ["x", "y"], "answer": 1}

    assert (
        read_question(ours)
        == read_question(mmlu)
        == ChoiceQuestion("Q?\nA. x\nB. y", "B", ("x", "y"))
    )
    assert read_question(ours).text == "y"


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Q?", "answer": 1},
        {"question": "Q?", "answer": 2, "choices": ["x", "y"]},
        {"question": "Q?", "answer": "yes", "choices": ["x", "y"]},
    ],
)
def test_row_without_a_readable_answer_is_refused(row: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="options"):
        read_question(row)


async def test_group_metrics_and_table(monkeypatch: pytest.MonkeyPatch) -> None:
    logged = {}
    right, wrong = ("<think>well</think> The best answer is: " + letter for letter in "CD")
    async with ScriptedEngine([PROBED, right, wrong, "short"]) as engine:
        path = MCQAThinkingEnv.check_settings["dataset_path"]
        env = make_env(MCQAThinkingEnv, engine, monkeypatch, group_size=3, dataset_path=path)
        await env.setup()
        item = next(row for row in env.train if row["answer"] == 2)
        group, _ = await env.collect_trajectories(item)
        await env.add_rollouts_for_wandb(group, item)
        monkeypatch.setattr(env.run_log, "table", lambda columns, rows: (columns, rows))
        monkeypatch.setattr(env.run_log, "log", lambda metrics, step: logged.update(metrics))
        await env.wandb_log()
        await env.server.close()

    assert group["scores"] == [1.0, -1.0, -1.0]
    assert group["overrides"] == [{}, {}, {"set_advantage_to_zero": True}]
    assert logged["train/percent_correct"] == pytest.approx(1 / 3)
    columns, [row] = logged["train/rollouts"]
    assert columns == ["text", "score", "answer", "string_answer"]
    assert row[1:] == (1.0, "C", read_question(item).text)


def test_environment_passes_the_check() -> None:
    report = check_environment(MCQAThinkingEnv)

    assert report.passed, report.text
