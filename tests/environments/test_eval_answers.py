"""The helpers of evaluations that find and compare answers, as tables of cases."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from atroposlib.tasks import eval_answers as answers
from environments.eval_environments import eval_helpers as helpers

LETTERS = "ABCD"
CITIES = ["London", "Paris", "New York", "New York City"]
FUNCTIONS = """
extract_letter_from_answer_tag extract_number_from_answer_tag extract_freeform_from_answer_tag
validate_thinking_format extract_thinking_content get_default_thinking_prompt
get_thinking_prompt_or_hermes extract_reasoning_from_response extract_reasoning_from_completion
get_reasoning_token_usage format_reasoning_debug_info build_mcqa_fallback_patterns
extract_mcqa_answer_with_fallback get_math_executor extract_boxed_answers
extract_first_boxed_answer math_normalize_string compare_math_strings score_math_answer
score_math_answer_async format_math_answer_instruction create_system_content save_eval_results
load_eval_results calculate_accuracy group_results_by_key format_percentage print_eval_summary
"""


@pytest.fixture(scope="module", autouse=True)
def executors_closed() -> Iterator[None]:
    """Their worker processes would stay until the process of the tests ends."""
    yield
    for executor in helpers._EXECUTORS.values():
        executor.shutdown(cancel_futures=True)


def test_all_public_helpers_exist() -> None:
    assert set(FUNCTIONS.split()) <= set(helpers.__all__)
    assert all(callable(getattr(helpers, name)) for name in helpers.__all__ if name.islower())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        (
            "extract_letter_from_answer_tag",
            {"response": ..., "valid_letters": ..., "debug": False, "choices": None},
        ),
        ("extract_number_from_answer_tag", {"response": ..., "num_choices": ..., "debug": False}),
        (
            "extract_mcqa_answer_with_fallback",
            {"response": ..., "num_choices": 4, "fallback_patterns": None, "debug": False},
        ),
        ("get_default_thinking_prompt", {"custom_prompt": None}),
        ("get_thinking_prompt_or_hermes", {"custom_prompt": None}),
        (
            "create_system_content",
            {"thinking_mode": ..., "custom_thinking_prompt": None, "custom_system_prompt": None},
        ),
        (
            "score_math_answer",
            {"gold": ..., "response": ..., "after_think": True, "wrap_gold_boxed": True}
            | {"executor": None, "debug": False},
        ),
        ("format_math_answer_instruction", {"include_hope": True}),
        (
            "save_eval_results",
            {"save_dir": ..., "metrics": ..., "results": ..., "metrics_filename": "metrics.json"}
            | {"results_filename": "results.jsonl", "print_confirmation": True},
        ),
        ("calculate_accuracy", {"results": ..., "score_key": "is_correct", "filter_fn": None}),
        ("get_math_executor", {"max_workers": 64}),
        ("compare_math_strings", {"pred": ..., "gold": ...}),
    ],
)
def test_helpers_have_their_published_parameters(name: str, parameters: dict[str, Any]) -> None:
    found = inspect.signature(getattr(helpers, name)).parameters

    assert {
        each.name: ... if each.default is each.empty else each.default for each in found.values()
    } == parameters


def test_async_scorer_has_the_parameters_of_the_other() -> None:
    first, second = (
        inspect.signature(function).parameters
        for function in (helpers.score_math_answer, helpers.score_math_answer_async)
    )

    assert first == second


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think> b ", (True, "b")),
        ("<THINK>a</Think>b", (True, "b")),
        ("x <|start_of_scratchpad|>a<|end_of_scratchpad|> b", (True, "b")),
        ("plain", (False, "plain")),
        ("<think>a", (False, "<think>a")),
        ("a</think>b", (False, "a</think>b")),
        ("</think>a<think>", (False, "</think>a<think>")),
        ("<think>a</think><think>b</think>", (False, "<think>a</think><think>b</think>")),
        ("", (False, "")),
    ],
)
def test_thinking_format(text: str, expected: tuple[bool, str]) -> None:
    assert helpers.validate_thinking_format(text, True) == expected
    assert helpers.validate_thinking_format(text, False) == (True, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think> a </think>b", "a"),
        ("<|start_of_scratchpad|>a<|end_of_scratchpad|>b", "a"),
        ("plain", None),
        ("<think>a</think><think>b</think>", None),
    ],
)
def test_thinking_content(text: str, expected: str | None) -> None:
    assert helpers.extract_thinking_content(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain ", "plain"),
        ("<think>a</think> b", "b"),
        ("a</think> b", "b"),  # the template wrote the opening tag
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think>never closed", ""),
        ("<|start_of_scratchpad|>a<|end_of_scratchpad|>b", "b"),
    ],
)
def test_answer_part(text: str, expected: str) -> None:
    assert answers.answer_part(text) == expected


@pytest.mark.parametrize(
    ("response", "letter", "method"),
    [
        ("<answer>B</answer>", "B", "answer_tag"),
        ("<ANSWER> b. </Answer>", "B", "answer_tag"),
        ("<answer>(C)</answer>", "C", "answer_tag"),
        ("<answer>The final answer is: **D**</answer>", "D", "answer_tag"),
        ("<answer>the answer is a</answer>", "A", "answer_tag"),
        ("<answer>I choose C.</answer>", "C", "answer_tag"),
        ("<answer>Option is D</answer>", "D", "answer_tag"),
        ("<answer>so\nC</answer>", "C", "answer_tag"),
        ("<answer>It must be D, since D fits</answer>", "D", "answer_tag"),
        ("<answer>A</answer> or <answer>B</answer>", "A", "answer_tag"),
        ("<answer>Paris</answer>", "B", "answer_tag_choice_match"),
        ("<answer> the answer is paris!</answer>", "B", "answer_tag_choice_match"),
        ("<answer>It is Paris, of course</answer>", "B", "answer_tag_choice_match"),
        ("<answer>New York City</answer>", "D", "answer_tag_choice_match"),
        ("<answer>the City of New York City</answer>", "D", "answer_tag_choice_match"),
        ("<answer>New York</answer>", "C", "answer_tag_choice_match"),
        ("<answer>London or Paris</answer>", None, "answer_tag_ambiguous"),
        ("<answer>A or B</answer>", None, "answer_tag_ambiguous"),
        ("<answer>a city</answer>", None, "answer_tag_no_letter"),
        ("<answer>A city</answer>", None, "answer_tag_no_letter"),
        ("<answer>E</answer>", None, "answer_tag_no_letter"),
        ("<answer>Parisian</answer>", None, "answer_tag_no_letter"),
        ("<answer> </answer>", None, "empty_answer_tag"),
        ("The answer is B.", None, "no_answer_tag"),
        ("<answer>B", None, "no_answer_tag"),
        ("", None, "no_answer_tag"),
    ],
)
def test_letter_in_the_tag(response: str, letter: str | None, method: str) -> None:
    found = helpers.extract_letter_from_answer_tag(response, LETTERS, choices=CITIES)

    assert found == (letter, method)


@pytest.mark.parametrize("letters", ["abcd", list("ABCD"), ("A", "B", "C", "D")])
def test_letters_may_be_any_collection(letters: Any) -> None:
    assert helpers.extract_letter_from_answer_tag("<answer>d</answer>", letters)[0] == "D"


def test_short_option_is_not_searched_within_an_answer() -> None:
    found = helpers.extract_letter_from_answer_tag(
        "<answer>it is 12 m</answer>", "AB", False, ["m", "12"]
    )

    assert found == (None, "answer_tag_no_letter")


@pytest.mark.parametrize(
    ("response", "number", "method"),
    [
        ("<answer>2</answer>", 2, "answer_tag"),
        ("<answer>The answer is 3.</answer>", 3, "answer_tag"),
        ("<answer>Option 4</answer>", 4, "answer_tag"),
        ("<answer>it is 1 because 1 fits</answer>", 1, "answer_tag"),
        ("<answer>1 or 2</answer>", None, "answer_tag_ambiguous"),
        ("<answer>5</answer>", None, "answer_tag_no_number"),
        ("<answer>0</answer>", None, "answer_tag_no_number"),
        ("<answer>2.5</answer>", None, "answer_tag_no_number"),
        ("<answer>-2</answer>", None, "answer_tag_no_number"),
        ("<answer>two</answer>", None, "answer_tag_no_number"),
        ("<answer></answer>", None, "empty_answer_tag"),
        ("2", None, "no_answer_tag"),
    ],
)
def test_number_in_the_tag(response: str, number: int | None, method: str) -> None:
    assert helpers.extract_number_from_answer_tag(response, 4) == (number, method)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<answer> 4 May\n1999 </answer>", ("4 May\n1999", "answer_tag")),
        ("<answer>\n</answer>", (None, "empty_answer_tag")),
        ("4 May", (None, "no_answer_tag")),
    ],
)
def test_text_in_the_tag(response: str, expected: tuple[str | None, str]) -> None:
    assert helpers.extract_freeform_from_answer_tag(response) == expected


@pytest.mark.parametrize(
    ("response", "letter", "method"),
    [
        ("<answer>C</answer>", "C", "answer_tag"),
        ("The final answer is B. I hope it is correct.", "B", "fallback_final_answer_hope"),
        ("final answer: (B)", "B", "fallback_final_answer_is"),
        ("The answer is A. No, the answer is **C**.", "C", "fallback_the_answer_is"),
        ("the correct answer is D", "D", "fallback_the_answer_is"),
        ("Answer: B\nAnswer: C", "C", "fallback_answer_colon"),
        ("**Answer:** D", "D", "fallback_answer_colon"),
        ("My answer B", "B", "fallback_answer_space"),
        ("B. Paris", "B", "fallback_start"),
        ("D", "D", "fallback_start"),
        ("Well,\nC) it is", "C", "fallback_line_start"),
        ("it can only be B", "B", "fallback_standalone"),
        ("<answer>unsure</answer> The answer is C", "C", "fallback_the_answer_is"),
        # Nothing is guessed.
        ("<answer>A or B</answer> The answer is C", None, "answer_tag_ambiguous"),
        ("A. London\nB. Paris\nC. Rome", None, "no_match"),
        ("B is worse than C", None, "no_match"),
        ("a good question", None, "no_match"),
        ("A good question", None, "no_match"),
        ("The answer is a dog", None, "no_match"),
        ("The answer is E", None, "no_match"),
        ("I'd say nothing", None, "no_match"),
        ("CAB", None, "no_match"),
        ("", None, "no_match"),
    ],
)
def test_letter_with_fallback(response: str, letter: str | None, method: str) -> None:
    assert helpers.extract_mcqa_answer_with_fallback(response) == (letter, method)


def test_fallback_patterns_have_their_order_and_can_be_replaced() -> None:
    patterns = helpers.build_mcqa_fallback_patterns(9)

    assert [name for name, _ in patterns] == [
        "final_answer_hope",
        "final_answer_is",
        "the_answer_is",
        "answer_colon",
        "answer_space",
        "start",
        "line_start",
        "standalone",
    ]
    assert helpers.extract_mcqa_answer_with_fallback("The answer is I", 9)[0] == "I"
    assert helpers.extract_mcqa_answer_with_fallback("I think so", 9) == (None, "no_match")
    only_colon = [each for each in patterns if each[0] == "answer_colon"]
    assert helpers.extract_mcqa_answer_with_fallback("It is B", 4, only_colon)[0] is None


def test_debug_logs_what_was_found(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        helpers.extract_mcqa_answer_with_fallback("<answer>B</answer>", debug=True)
        helpers.extract_number_from_answer_tag("<answer>2</answer>", 3, debug=True)

    assert "'B', found by answer_tag" in caplog.text
    assert "2, found by answer_tag" in caplog.text


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        (r"\boxed{4}", ["4"]),
        (r"\boxed{ \frac{1}{2} } and \boxed {x}", [r"\frac{1}{2}", "x"]),
        (r"\boxed{\boxed{3}}", [r"\boxed{3}"]),
        (r"\boxed{\{1, 2\}}", [r"\{1, 2\}"]),
        (r"\boxed{open \boxed{5}", ["5"]),
        (r"a } \boxed{6} {", ["6"]),
        (r"\boxed{never", []),
        ("boxed{1} 4", []),
    ],
)
def test_boxes(text: str, boxes: list[str]) -> None:
    assert helpers.extract_boxed_answers(text) == boxes
    assert helpers.extract_first_boxed_answer(text) == (boxes[0] if boxes else None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{\text{ East }}", "east"),
        (r"\mathrm{km} \quad 5", "km 5"),
        (r"$2 \times 3\,$.", "2 * 3"),
        (r"6 \div 2", "6 / 2"),
        ("1,234.5", "1234.5"),
        ("(1,234)", "(1,234)"),
    ],
)
def test_normalized_mathematics(text: str, expected: str) -> None:
    assert helpers.math_normalize_string(text) == expected


@pytest.mark.parametrize(
    ("pred", "gold", "is_equal"),
    [
        ("4", "4.0", True),
        ("0.3333333", "0.33333333", True),
        ("3.2", "3.9", False),
        ("3.2", "3", False),
        ("x + 1", "x+1", True),
        (r"\text{Yes}", "yes.", True),
        ("1000", "1,000", True),
        ("", "", False),
        ("", "4", False),
        ("25168", "2516_8", False),
        ("2516_8", "2516_8", True),
        (".5", "0.5", True),
        ("$-.5$.", "-0.5", True),
        (".5", "5", False),
    ],
)
def test_mathematics_as_text(pred: str, gold: str, is_equal: bool) -> None:
    assert helpers.compare_math_strings(pred, gold) is is_equal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gold", "response", "expected"),
    [
        (r"\frac{1}{2}", r"<think>\boxed{1}</think>\boxed{0.5}", (True, "math_verify", False)),
        ("12", r"It is \boxed{13}.", (False, "math_verify", False)),
        ("12", "It is 12.", (None, "no_boxed", False)),
        ("12", r"\boxed{12} \boxed{12}", (None, "multiple_boxed", True)),
        ("12", r"<think>\boxed{12}", (None, "no_boxed", False)),
        ("12", "", (None, "no_boxed", False)),
    ],
)
async def test_scored_mathematics(gold: str, response: str, expected: Any) -> None:
    executor = helpers.get_math_executor(1)

    assert helpers.score_math_answer(gold, response, executor=executor) == expected
    assert await helpers.score_math_answer_async(gold, response, executor=executor) == expected


@pytest.mark.slow
def test_thinking_is_searched_on_request() -> None:
    executor = helpers.get_math_executor(1)

    score = helpers.score_math_answer(
        "4", r"<think>\boxed{4}", after_think=False, executor=executor
    )

    assert score.correct is True


def test_executor_that_was_shut_down_is_replaced_and_compares_texts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with helpers.get_math_executor(3) as closed:
        assert helpers.get_math_executor(3) is closed

    score = helpers.score_math_answer("7", r"\boxed{7}", executor=closed)

    assert helpers.get_math_executor(3) is not closed
    assert score == (True, "string_compare", False)
    assert "math-verify gave no result" in caplog.text


def test_check_that_takes_too_long_compares_texts(caplog: pytest.LogCaptureFixture) -> None:
    from concurrent import futures

    class LateExecutor(futures.Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
            late: futures.Future[Any] = futures.Future()
            late.set_exception(futures.TimeoutError())
            return late

    right = helpers.score_math_answer("7", r"\boxed{7}", executor=LateExecutor())
    wrong = helpers.score_math_answer("7.5", r"\boxed{7}", executor=LateExecutor())

    assert right == (True, "string_compare", False)
    assert wrong == (False, "string_compare", False)
    assert "math-verify gave no result" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((True, "think", "system"), "think\n\nsystem"),
        ((True, None, "system"), "system"),
        ((True, "think", None), "think"),
        ((False, "think", "system"), "system"),
        ((True, None, None), None),
        ((False, "think"), None),
    ],
)
def test_system_content(arguments: Any, expected: str | None) -> None:
    assert helpers.create_system_content(*arguments) == expected


def test_thinking_prompts() -> None:
    assert helpers.get_default_thinking_prompt() is None
    assert helpers.get_default_thinking_prompt("mine") == "mine"
    assert helpers.get_thinking_prompt_or_hermes() == helpers.HERMES_REASONING_PROMPT
    assert helpers.get_thinking_prompt_or_hermes("mine") == "mine"


def test_math_instruction_asks_for_one_box() -> None:
    assert "I hope it is correct." in helpers.format_math_answer_instruction()
    plain = helpers.format_math_answer_instruction(include_hope=False)
    assert "hope" not in plain
    assert r"\boxed{ANSWER}" in plain


def test_token_usage_and_debug_line() -> None:
    completion = {
        "usage": {"completion_tokens_details": {"reasoning_tokens": 12}},
        "choices": [{"message": {"content": "four", "reasoning": "2 + 2"}}],
    }

    assert helpers.get_reasoning_token_usage(completion) == 12
    assert helpers.get_reasoning_token_usage({"usage": {"reasoning_tokens": 3}}) == 3
    assert helpers.get_reasoning_token_usage({"choices": []}) is None
    assert helpers.format_reasoning_debug_info(completion) == (
        "reasoning: reasoning, 5 characters; content: 4 characters, 12 reasoning tokens"
    )


RESULTS: list[dict[str, Any]] = [
    {"is_correct": True, "kind": "a", "score": 0.5},
    {"is_correct": False, "kind": "b", "score": 1.0},
    {"is_correct": None, "score": 0.0},
]


def test_results_are_saved_and_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    helpers.save_eval_results(tmp_path / "made", {"accuracy": 0.5}, RESULTS)

    assert helpers.load_eval_results(tmp_path / "made") == ({"accuracy": 0.5}, RESULTS)
    assert "3 results are in" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no readable results"):
        helpers.load_eval_results(tmp_path / "elsewhere")


def test_results_are_averaged_and_grouped() -> None:
    assert helpers.calculate_accuracy(RESULTS) == pytest.approx(1 / 3)
    assert helpers.calculate_accuracy(RESULTS, "score") == 0.5
    assert helpers.calculate_accuracy(RESULTS, filter_fn=lambda r: r.get("kind") == "a") == 1.0
    assert helpers.calculate_accuracy([]) == 0.0
    grouped = helpers.group_results_by_key(RESULTS, "kind")
    assert {key: len(rows) for key, rows in grouped.items()} == {"a": 1, "b": 1, "unknown": 1}


def test_summary_prints_shares_as_percentages(capsys: pytest.CaptureFixture[str]) -> None:
    helpers.print_eval_summary("sums", {"accuracy": 0.625, "total_evaluated": 8})

    assert capsys.readouterr().out.splitlines() == [
        "sums",
        "  accuracy: 62.50%",
        "  total_evaluated: 8",
    ]
    assert helpers.format_percentage(0.5, decimals=0) == "50%"


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 50_000,
        "{" * 50_000 + "}" * 50_000,
        "<answer>" * 50_000,
        "The answer is " * 20_000,
        "A " * 50_000,
        "\n".join("A. x" for _ in range(20_000)),
        "\\text{" * 20_000 + "}" * 20_000,
        "<think>" * 30_000,
    ],
    ids=lambda text: text[:8],
)
@pytest.mark.timeout(60)
def test_hostile_texts_take_linear_time(text: str) -> None:
    # Quadratic rules take minutes, and the time limit of the test ends them.
    helpers.extract_boxed_answers(text)
    helpers.extract_mcqa_answer_with_fallback(text)
    helpers.extract_letter_from_answer_tag(f"<answer>{text}</answer>", LETTERS, choices=CITIES)
    helpers.extract_number_from_answer_tag(f"<answer>{text}</answer>", 4)
    helpers.compare_math_strings(text, text)

    assert len(answers.answer_part(text)) <= len(text)
