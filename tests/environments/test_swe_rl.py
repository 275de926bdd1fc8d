from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.errors import NoDataError
from atroposlib.scored_data import check_group
from environments.swe_rl_env import (
    EXAMPLE_ANSWER,
    EXAMPLE_ISSUE,
    SAMPLE,
    Hunk,
    SWERLEnv,
    apply_hunks,
    apply_unified_diff,
    edit_similarity,
    gold_answer,
    read_code_context,
    read_hunks,
    read_issue,
    score_answer,
)
from tests.environments.offline import evaluate, make_env, read_groups, run_process
from tests.fakes import ScriptedEngine

BEFORE = "def f(x):\n    if x:\n        return 1\n    return 2\n"
AFTER = "def f(x):\n    if x:\n        return 3\n    return 2\n"
HUNK = "### a.py\n<<<<<<< SEARCH\n        return 1\n=======\n        return 3\n>>>>>>> REPLACE"
PATCH = """diff --git a/a.py b/a.py
--- a/a.py
+++ b/a.py
@@ -1,4 +1,4 @@ def f(x):
 def f(x):
     if x:
-        return 1
+        return 3
     return 2
"""
CONTEXT = "[start of a.py]\n" + BEFORE + "[end of a.py]\n"


def issue_of(patch: str = PATCH, context: str = CONTEXT) -> Any:
    return read_issue("It returns 1.", context, patch, item_id="one")


def thought(answer: str) -> str:
    return f"<think>A number is wrong.</think>\n{answer}"


@pytest.mark.parametrize(
    ("answer", "hunks"),
    [
        (HUNK, [Hunk("a.py", "        return 1\n", "        return 3\n")]),
        (f" {HUNK}", [Hunk("a.py", "        return 1\n", "        return 3\n")]),  # after </think>
        (f"```\n{HUNK}\n```\n", [Hunk("a.py", "        return 1\n", "        return 3\n")]),
        (
            "### `b.py`\n```python\n<<<<<<< SEARCH\n=======\nx = 1\n>>>>>>> REPLACE\n```",
            [Hunk("b.py", "", "x = 1\n")],
        ),
        (
            "### a.py\r\n<<<<<<< SEARCH\r\n  a\r\n=======\r\n\r\n>>>>>>> REPLACE\r\n",
            [Hunk("a.py", "  a\n", "\n")],
        ),
        (
            "### a.py\n<<<<<<< SEARCH\na\n=======\nb\n>>>>>>> REPLACE\n\n"
            "<<<<<<< SEARCH\nc\n=======\n>>>>>>> REPLACE",
            [Hunk("a.py", "a\n", "b\n"), Hunk("a.py", "c\n", "")],
        ),
        (f"Here is the repair:\n{HUNK}", None),
        ("<<<<<<< SEARCH\na\n=======\nb\n>>>>>>> REPLACE", None),
        ("### a.py\n<<<<<<< SEARCH\na\n=======\nb", None),
        ("### a.py\n<<<<<<< SEARCH\na", None),
        ("### a.py", None),
        (PATCH, None),
        ("", None),
    ],
)
def test_hunks_of_an_answer(answer: str, hunks: list[Hunk] | None) -> None:
    assert read_hunks(answer) == hunks


@pytest.mark.parametrize(
    ("search", "replace", "after"),
    [
        ("        return 1\n", "        return 3\n", AFTER),
        ("    return 2\n", "", "def f(x):\n    if x:\n        return 1\n"),
        (BEFORE, "x\n", "x\n"),
        ("return 1\n", "return 3\n", None),
        ("    return 1\n", "return 3\n", None),
        ("", "x\n", None),
    ],
)
def test_hunk_replaces_whole_lines_with_their_indentation(
    search: str, replace: str, after: str | None
) -> None:
    edited = apply_hunks({"a.py": BEFORE}, [Hunk("a.py", search, replace)])

    assert edited == (None if after is None else {"a.py": after})


def test_hunks_apply_in_order_and_create_files() -> None:
    hunks = [Hunk("b.py", "", "b = 1\n"), Hunk("b.py", "b = 1\n", "b = 2\n")]

    assert apply_hunks({}, hunks) == {"b.py": "b = 2\n"}
    assert apply_hunks({}, hunks[::-1]) is None


@pytest.mark.parametrize(
    ("patch", "after"),
    [
        (PATCH, {"a.py": AFTER}),
        (PATCH.replace("return 1", "return 7"), None),
        (PATCH.replace("a/a.py", "a/b.py"), None),
        ("--- a/a.py\n+++ /dev/null\n@@ -1,4 +0,0 @@\n-" + BEFORE[:-1].replace("\n", "\n-"), {}),
        (
            "--- /dev/null\n+++ b/b.py\n@@ -0,0 +1,2 @@\n+b = 1\n+c = 2\n",
            {"a.py": BEFORE, "b.py": "b = 1\nc = 2\n"},
        ),
        (
            "--- a/a.py\n+++ b/a.py\n@@ -0,0 +1 @@\n+import os\n@@ -3,1 +4,2 @@\n"
            "         return 1\n+    # else\n",
            {"a.py": "import os\n" + BEFORE.replace("1\n", "1\n    # else\n")},
        ),
        ("no diff", {"a.py": BEFORE}),
    ],
)
def test_unified_diff_is_applied_exactly(patch: str, after: dict[str, str] | None) -> None:
    assert apply_unified_diff({"a.py": BEFORE}, patch) == after


def test_similarity_is_one_only_for_the_same_result() -> None:
    files = {"a.py": BEFORE}
    near = {"a.py": AFTER.replace("3", "4")}
    far = {"a.py": "import os\n" + BEFORE}

    same, close, distant = (
        edit_similarity(files, edited, {"a.py": AFTER}) for edited in ({"a.py": AFTER}, near, far)
    )

    assert same == 1.0 > close > distant > 0.0
    assert edit_similarity(files, files, {"a.py": AFTER}) == 0.0
    # A difference after the compared words: the edits are not the same.
    long = {"a.py": "\n".join(str(i) for i in range(20_000))}
    assert edit_similarity({}, {"a.py": long["a.py"] + "\n1"}, long) < 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        HUNK,
        thought("return 3"),
        thought(PATCH),
        thought(HUNK).replace("return 1", "return 8"),
        thought(HUNK) + "</think>",
        thought(HUNK).replace("a.py", "../../etc/passwd"),
        f"<think>{HUNK}</think>",
        thought("### a.py\n<<<<<<< SEARCH\n" * 2000),
    ],
)
def test_malformed_answers_score_zero(completion: str) -> None:
    assert score_answer(completion, issue_of()) == 0.0


def test_right_answer_scores_one_and_a_wrong_edit_less() -> None:
    assert score_answer(thought(HUNK), issue_of()) == 1.0
    assert score_answer(thought(f"```diff\n{HUNK}\n```"), issue_of()) == 1.0
    assert 0.0 < score_answer(thought(HUNK.replace("return 3", "return 5")), issue_of()) < 1.0


def test_files_with_carriage_returns_can_be_edited() -> None:
    issue = issue_of(*(text.replace("\n", "\r\n") for text in (PATCH, CONTEXT)))

    assert issue.fixed == {"a.py": AFTER}
    assert score_answer(thought(HUNK), issue) == 1.0
    assert score_answer(gold_answer(issue), issue) == 1.0


def test_files_are_read_with_and_without_numbers() -> None:
    numbered = "".join(f"{i} {line}\n" for i, line in enumerate(["a", "", "  b"], start=1))
    text = (
        f"Code:\n[start of x/y.py]\n{numbered}[end of x/y.py]\n[start of z]\n1 a\n3 b\n[end of z]"
    )

    files = read_code_context(text.replace("2 \n", "2\n"))

    assert files == {"x/y.py": "a\n\n  b\n", "z": "1 a\n3 b\n"}
    assert read_code_context("[start of a]\ncut") == {}


@pytest.mark.parametrize("patch", ["", "no diff", PATCH.replace("return 1", "return 9")])
def test_row_whose_patch_does_not_apply_is_no_item(patch: str) -> None:
    assert issue_of(patch) is None


def test_worked_example_of_the_prompt_is_right() -> None:
    hunks = read_hunks(EXAMPLE_ANSWER.partition("</think>")[2])

    edited = apply_hunks(EXAMPLE_ISSUE.files, hunks or [])

    assert edited is not None
    assert "if not values:\n        return 0.0\n    total" in edited["stats.py"]


def test_gold_answers_of_the_sample_score_one() -> None:
    for path in sorted(SAMPLE.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            issue = read_issue(row["problem_statement"], row["text"], row["patch"], item_id="")
            assert issue is not None
            assert score_answer(gold_answer(issue), issue) == 1.0, row["instance_id"]


async def test_worked_example_ends_once_enough_patches_are_well_formed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "groups.jsonl"
    async with ScriptedEngine([thought(HUNK)]) as engine:
        env = make_env(
            SWERLEnv,
            engine,
            monkeypatch,
            dataset_path=str(SAMPLE),
            max_token_length=9000,
            ensure_scores_are_not_same=False,
            data_path_to_save_groups=str(out),
            dump_dir=str(tmp_path / "dumps"),
            dump_failed_rollouts=True,
        )
        await run_process(env, num_groups=1, group_size=2)
        prompt = env.tokenizer.decode(engine.requests[-1].body["prompt"])

    [group] = read_groups(out)
    check_group(group)
    assert group["scores"] == [0.0, 0.0]  # well-formed, but of no file of the issue
    assert group["item_ids"] == ["cache-1", "cache-1"]
    assert "BEGIN FILE stats.py" in prompt
    assert "BEGIN FILE stats.py" not in str(env.prompt(issue_of()))
    assert (tmp_path / "dumps" / "swe_rl_failed_rollouts.jsonl").exists()


async def test_evaluation_scores_every_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine([thought(HUNK)]) as engine:
        report = await evaluate(
            SWERLEnv,
            engine,
            monkeypatch,
            tmp_path,
            dataset_path=str(SAMPLE),
            max_token_length=9000,
            eval_n_samples=3,
        )

    results = report["results"]["all"]
    assert results["eval/total_eval_items"] == 6
    assert results["eval/patch_format_accuracy"] == 1.0
    assert results["eval/pass_at_1"] == 0.0


async def test_data_without_applicable_patches_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"problem_statement": "p", "text": CONTEXT, "patch": "nothing"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
    async with ScriptedEngine() as engine:
        env = make_env(SWERLEnv, engine, monkeypatch, dataset_path=str(tmp_path))
        await env.setup()
        with pytest.raises(NoDataError, match="unified diffs"):
            await env.get_next_item()

        assert env.num_skipped == 1
        await env.close()


def test_environment_passes_its_check() -> None:
    report = check_environment(SWERLEnv)

    assert report.passed, report.text
