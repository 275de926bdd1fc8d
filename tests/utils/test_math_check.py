from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from atroposlib.utils.math_check import answer_text, check_math_answer
from atroposlib.utils.score_pool import ScorePool


def has_parsers() -> bool:
    return "math_verify" in sys.modules


async def test_worker_has_loaded_the_parsers_before_its_first_call() -> None:
    pool = ScorePool(num_workers=1, timeout_s=60)

    assert await pool.run(has_parsers)

    pool.close()


def test_import_loads_no_parsers_outside_of_workers() -> None:
    lines = "import sys, atroposlib.utils.math_check; sys.exit('math_verify' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", lines], check=False).returncode == 0


@pytest.mark.parametrize(
    ("completion", "gold", "is_correct"),
    [
        ("\\boxed{42}", "42", True),
        ("\\boxed{42}", "\\boxed{42}", True),
        ("\\boxed{\\frac{1}{2}}", "0.5", True),
        ("\\boxed{x+1}", "1+x", True),
        ("\\boxed{1,000}", "1000", True),
        ("\\boxed{1}", "2", False),
        ("42", "42", False),
        ("<think>\\boxed{42}</think>no", "42", False),
        ("<think>a</think>\\boxed{42}", "42", True),
        ("\\boxed{10\\,000}", "10000", True),
        ("\\boxed{1\\ 234\\ 567.5}", "1234567.5", True),
        ("\\boxed{1 000}", "1000", True),
        ("\\boxed{x^2\\,100}", "x^{2100}", False),
        ("\\boxed{1\\,000}", "0", False),  # the parser takes it for 1 times 000
        ("\\boxed{1\\,000}", "1\\,000", True),
        ("\\boxed{1000}", "$1\\ 000$", True),
        ("\\boxed{0}", "1\\,000", False),
        ("\\boxed{(1,\\ 200)}", "(1,200)", True),
        ("\\boxed{12~\\text{cm}}", "12", True),
        ("\\boxed{5\\ }", "5", True),
        ("\\boxed{\u20ac5}", "5", True),
        ("\\boxed{\u20135}", "-5", True),
        ("\\boxed{x = \u20135}", "-5", True),
        ("\\boxed{1\u20135}", "-4", False),  # a range
        (
            "\\boxed{\\begin{pmatrix}1\\\\ 200\\end{pmatrix}}",
            "\\begin{pmatrix}1\\\\200\\end{pmatrix}",
            True,
        ),
    ],
)
def test_check_math_answer(completion: str, gold: str, is_correct: bool) -> None:
    verdict = check_math_answer(completion, gold)

    assert verdict.is_correct is is_correct
    assert verdict.is_gold_readable


@pytest.mark.parametrize("odd", ["", "\x00", "\\boxed{" * 200, "\\frac{1}{0}", "$$" * 50])
def test_check_math_answer_never_raises(odd: str) -> None:
    assert not check_math_answer(odd, "3").is_correct
    assert isinstance(check_math_answer("\\boxed{3}", odd).is_correct, bool)


def test_check_math_answer_works_off_the_main_thread() -> None:
    verdicts = []
    thread = threading.Thread(
        target=lambda: verdicts.append(check_math_answer("\\boxed{7}", "7").is_correct)
    )

    thread.start()
    thread.join()

    assert verdicts == [True]


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        ("<think>a</think>b", "b"),
        ("a</think>b</think>c", "c"),
        ("before<think>never closed", "before"),
    ],
)
def test_answer_text(completion: str, text: str) -> None:
    assert answer_text(completion) == text


def test_check_that_never_ends_is_given_up_in_the_main_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("atroposlib.utils.math_check.TIME_LIMIT_S", 1)

    assert not check_math_answer("\\boxed{9^{9^{9}}}", "3").is_correct
    assert not check_math_answer("\\boxed{3}", "9^{9^{9}}").is_correct
