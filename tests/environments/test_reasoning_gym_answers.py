from __future__ import annotations

from pathlib import Path

import pytest

from atroposlib.tasks import reasoning_gym as tasks
from atroposlib.tasks.reasoning_gym import ReasoningGymEnvConfig, extract_answer, is_safe_answer

pytestmark = pytest.mark.slow


def item_of(task: str) -> tasks.TaskItem:
    config = ReasoningGymEnvConfig(task_names=[task], num_eval_samples_per_task=1)
    return tasks.train_item(config, 0)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>4</answer>", "4"),
        ("<think>2+2</think>\n<answer> 4 </answer>", "4"),
        # The prompt opened the thinking.
        ("2+2</think><answer>4</answer>", "4"),
        ("<think>is it <answer>5</answer>?</think><answer>4</answer>", "4"),
        ("<answer>4</answer> or <answer>5</answer>", None),
        ("<answer><answer>4</answer></answer>", None),
        ("<think>never closed <answer>4</answer>", None),
        ("<think>a</think> more <think> <answer>4</answer>", None),
        ("<answer></answer>", None),
        ("<answer>4", None),
        ("4", None),
        ("", None),
    ],
)
def test_extract_answer(completion: str, answer: str | None) -> None:
    assert extract_answer(completion) == answer


@pytest.mark.parametrize("task", ["basic_arithmetic", "gcd", "letter_counting", "dice"])
def test_markup_around_a_number_is_ignored(task: str) -> None:
    item = item_of(task)
    gold = str(item.entry["answer"])
    marked = ("**{}**", "{}.", "${}$", "`{}`", "\\({}\\)", "$\\boxed{{{}}}$.")
    wrong = ("**{}0**", "{}, 1", "{} or 1", "-{}", "is {}")

    assert [tasks.score_completion(_tagged(each, gold), item) for each in marked] == [1.0] * 6
    # The package gives partial credit to some answers that contain the right one.
    assert all(tasks.score_completion(_tagged(each, gold), item) < 0.5 for each in wrong)


def _tagged(form: str, gold: str) -> str:
    return f"<think>a</think><answer>{form.format(gold)}</answer>"


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("countdown", "0e0*{numbers}+{target}e0"),
        ("countdown", "0e0*{numbers}+1_{target}-1_000"),
        ("puzzle24", "0e0*{numbers}+24e0"),
        ("puzzle24", "1*2*3*4"),
        ("puzzle24", "(8*3) + 0*1*1"),
        ("coin_flip", "0"),
        ("coin_flip", "0.0"),
        ("coin_flip", "1e-999999999"),
        ("coin_flip", "\u0660"),
        ("complex_arithmetic", "nan"),
        ("complex_arithmetic", "nan + nani"),
    ],
)
def test_one_answer_does_not_fit_all(task: str, answer: str) -> None:
    config = ReasoningGymEnvConfig(task_names=[task], num_eval_samples_per_task=1)
    for iteration in range(8):
        item = tasks.train_item(config, iteration)
        metadata = item.entry["metadata"]
        numbers = "*".join(map(str, metadata.get("numbers", [])))
        text = answer.format(numbers=numbers, target=metadata.get("target"))
        if task == "puzzle24" and sorted(metadata["numbers"]) == [1, 2, 3, 4]:
            continue
        assert tasks.score_completion(f"<answer>{text}</answer>", item) <= 0.01
        assert tasks.score_completion(f"<answer>{item.entry['answer']}</answer>", item) == 1.0


@pytest.mark.parametrize("task", ["chain_sum", "basic_arithmetic", "spell_backward", "countdown"])
def test_gold_scores_highest_and_empty_or_wrong_lowest(task: str) -> None:
    item = item_of(task)
    gold = item.entry["answer"]

    assert tasks.score_completion(f"<think>…</think><answer>{gold}</answer>", item) == 1.0
    assert tasks.score_completion("", item) == 0.0
    assert tasks.score_completion(f"<think>{gold}</think>", item) == 0.0
    assert tasks.score_completion(f"<think><answer>{gold}</answer>", item) == 0.0
    assert tasks.score_completion("<answer>-77777</answer>", item) < 0.1
    assert tasks.score_completion("<answer>" + "9" * 20_000 + "</answer>", item) < 0.1
    assert tasks.score_completion("<answer>\u0663\u0664</answer>", item) < 0.1


def test_scorer_that_raises_on_a_malformed_answer_counts_as_wrong() -> None:
    assert (
        tasks.score_completion("<answer>two x three</answer>", item_of("prime_factorization")) == 0
    )


def test_scorer_that_accepts_anything_is_replaced() -> None:
    item = item_of("game_of_life_halting")
    gold = str(item.entry["answer"])
    other = "False" if gold == "True" else "True"

    assert tasks.score_completion(f"<answer>{gold}</answer>", item) == 1.0
    assert tasks.score_completion(f"<answer>{other}</answer>", item) == 0.0
    assert tasks.score_completion("<answer>whatever</answer>", item) == 0.0


@pytest.mark.parametrize(
    "task", ["countdown", "puzzle24", "string_insertion", "n_queens", "spiral_matrix"]
)
@pytest.mark.parametrize(
    "code",
    [
        "__import__('pathlib').Path('{path}').touch()",
        "open('{path}', 'w')",
        'eval(\'open("{path}", "w")\')',
        "[open('{path}', 'w') for _ in (1,)]",
        "(lambda: open('{path}', 'w'))()",
        'sin(\'open("{path}", "w")\')',
        'f\'{{open("{path}", "w")}}\'',
    ],
)
def test_code_in_an_answer_is_never_run(task: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / "ran"

    score = tasks.score_completion(f"<answer>{code.format(path=path)}</answer>", item_of(task))

    assert score == 0.0
    assert not path.exists()


def test_code_padded_beyond_what_is_examined_is_never_run(tmp_path: Path) -> None:
    path = tmp_path / "ran"
    code = f"open('{path}', 'w')" + " " * 5000 + "and 1"

    assert tasks.score_completion(f"<answer>{code}</answer>", item_of("n_queens")) == 0.0
    assert not path.exists()


@pytest.mark.parametrize(
    ("answer", "task", "is_safe"),
    [
        ("(94*4 - 61) - 6", "countdown", True),
        ("x**2/2 + sin(3*x) + C", "simple_integration", True),
        ("2*x**3 - 5", "polynomial_multiplication", True),
        ("9**9**9", "countdown", False),
        ("2**100000000", "countdown", False),
        ("2**(1000*1000*1000)", "countdown", False),
        ("((2**1000)**1000)**1000", "countdown", False),
        ("2**(1/0.000001)", "countdown", False),
        ("((x**2)**3)/(x + 1)**(3/2)", "simple_integration", True),
        ("x**(n + 1)/(n + 1)", "simple_integration", True),
        ("sin.__class__", "simple_integration", False),
        ("1e999999999", "simple_integration", False),
        ("x**2/1e3", "simple_integration", True),
        ("[valid_answers]", "n_queens", False),
        ("oracle_answer", "string_insertion", False),
        ("U1000000000", "rubiks_cube", False),
        ("R U' R2", "rubiks_cube", True),
        ("A+99999999999", "rush_hour", False),
        ("A+3 B-1", "rush_hour", True),
        ("9" * 50_000, "spell_backward", False),
        ("system(1)", "countdown", False),
        ("-" * 1500 + "1", "countdown", False),
        ("[['_', 'Q'], ['Q', '_']]", "n_queens", True),
        ("_ Q\nQ _", "n_queens", True),
        ("AABCD", "string_insertion", True),
        ("globals()", "string_insertion", False),
        ("globals()", "spell_backward", True),
    ],
)
def test_is_safe_answer(answer: str, task: str, is_safe: bool) -> None:
    assert is_safe_answer(answer, task) is is_safe


@pytest.mark.parametrize(
    ("task", "params"),
    [
        ("spiral_matrix", {"min_n": 50, "max_n": 50}),
        ("binary_matrix", {"min_n": 80, "max_n": 80}),
        ("polynomial_multiplication", {"min_polynomials": 30, "max_polynomials": 30}),
    ],
)
def test_long_gold_answer_scores_one(task: str, params: dict[str, int]) -> None:
    item = tasks.TaskItem(task, params, tasks.make_dataset(task, params, seed=1)[0])
    answer = item.entry["answer"]

    assert len(answer) > tasks.MAX_EXPRESSION_CHARACTERS
    assert tasks.score_completion(f"<answer>{answer}</answer>", item) == 1.0
    assert tasks.score_completion(f"<answer>{answer[:-1]}x</answer>", item) < 0.5
    assert not is_safe_answer(answer, task, gold="1 2")
