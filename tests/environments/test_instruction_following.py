from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.tasks.instructions import (
    VERIFIERS,
    Instruction,
    UnsolvedQueue,
    item_id,
    read_instruction,
    require_language_detector,
)
from environments.instruction_following_algorithm_environment import (
    SAMPLE,
    InstructionFollowingEnv,
    score_completion,
)
from tests.environments.offline import PROBED, make_env, read_groups
from tests.fakes import ScriptedEngine
from tests.growth import assert_linear

HAS_DETECTOR = importlib.util.find_spec("langdetect") is not None
UNUSED = {"N": None, "quantifier": None, "end_phrase": None, "keyword_list": None}
"""Rows of the published data set list every argument."""

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("verify_keywords", {"keyword_list": ["oak", "ash"]}, "An oak and an Ash.", "Oaks and ash."),
    ("verify_keyword_frequency", {"word": "sea", "N": 2}, "Sea, the sea.", "The seaside, the sea."),
    ("validate_forbidden_words", {"forbidden_words": ["red"]}, "It was bored.", "A Red door."),
    ("verify_letter_frequency", {"letter": "e", "N": 3}, "Eleven", "Seven"),
    ("verify_paragraph_count", {"N": 2}, "one\n* * *\ntwo", "one\n\ntwo"),
    ("verify_paragraph_count", {"N": 2}, "one * * * two", "one\n* * *\n"),
    # don't and well-known are one word each
    ("validate_word_constraint", {"N": 4, "quantifier": "at most"}, "I don't know it", "a b c d e"),
    ("validate_word_constraint", {"N": 3, "quantifier": "at least"}, "a b-c d", "a b-c"),
    # around 20: from 18 to 22
    ("validate_word_constraint", {"N": 20, "quantifier": "around"}, "w " * 22, "w " * 23),
    ("validate_word_constraint", {"N": 20, "quantifier": "around"}, "w " * 18, "w " * 17),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "at least"}, "Yes. No!", "Pi is 3.14."),
    ("verify_sentence_constraint", {"N": 3, "quantifier": "around"}, "A. B?", "A."),
    ("validate_paragraphs", {"N": 2, "first_word": "then", "i": 2}, "A\n\nThen b", "A\n\nThenar"),
    ("validate_paragraphs", {"N": 2, "first_word": "a", "i": 1}, "A b\n \n\nc", "A b\nc"),
    ("verify_postscript", {"postscript_marker": "P.S."}, "Bye\nP.S. one more", "Bye P.S. no line"),
    ("verify_postscript", {"postscript_marker": "P.P.S"}, "Bye\nP.P.S one", "Bye\nP.P.S"),
    ("validate_placeholders", {"N": 2}, "[name] of [town]", "[name] of []"),
    ("verify_bullet_points", {"N": 2}, "* a\n- b", "* a\n* * *\n**b**"),
    ("verify_bullet_points", {"N": 3}, "* **a**: x\n- *b*\n+ -5", "* **a**\n- - -\n- *"),
    ("validate_title", {}, "<<A title>>\ntext", "<< >>\n<title>"),
    ("validate_choice", {"options": ["yes", "no"]}, "Yes.", "I know: yes or no"),
    ("validate_choice", {"options": ["it is", "it is not"]}, "it is not", "nothing"),
    ("validate_choice", {"options": "('red', 'blue')"}, "blue", "green"),
    ("validate_highlighted_sections", {"N": 2}, "*one* and **two**", "* one\n* two *three*"),
    (
        "validate_sections",
        {"N": 2, "section_splitter": "SECTION"},
        "SECTION 1\na\nSection 2",
        "1 2",
    ),
    ("validate_json_format", {}, '```json\n{"a": [1, null]}\n```', '{"a": NaN}'),
    ("validate_json_format", {}, "[]", "[" * 5000),
    ("validate_repeat_prompt", {"original_prompt": "Why?"}, "Why? Because.", "Because. Why?"),
    ("validate_repeat_prompt", {"original_prompt": "Why?"}, " Why?\nIt is.", "Why?"),
    ("validate_two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("validate_two_responses", {}, "a ****** b", "a ****** b ****** c"),
    ("validate_uppercase", {}, "STOP, 2 CARS", "STOP, 2 cars"),
    ("validate_lowercase", {}, "stop, 2 cars", "2"),
    (
        "validate_frequency_capital_words",
        {"N": 2, "quantifier": "at least"},
        "A BIG dog",
        "Big Dog",
    ),
    ("validate_frequency_capital_words", {"N": 1, "quantifier": "at most"}, "one BIG", "TWO BIG"),
    ("validate_end", {"end_phrase": "The end."}, "So. The end. ", "The end. So"),
    ("validate_quotation", {}, '"quoted"', '"open'),
    ("validate_no_commas", {}, "one and two", "one, two"),
]


@pytest.mark.parametrize(("name", "arguments", "followed", "not_followed"), CASES)
def test_verifier(name: str, arguments: dict[str, Any], followed: str, not_followed: str) -> None:
    ground_truth = json.dumps({**UNUSED, "func_name": name, **arguments})
    instruction = read_instruction(ground_truth)

    scores = [
        score_completion(f"<think>hm</think>{text}", instruction)
        for text in (followed, not_followed, "", "  \n")
    ]

    assert scores == [1.0, 0.0, 0.0, 0.0]


def test_every_verifier_is_tested() -> None:
    assert len(VERIFIERS) == 25
    assert {name for name, *_ in CASES} == set(VERIFIERS) - {"validate_response_language"}


@pytest.mark.skipif(not HAS_DETECTOR, reason="langdetect is not installed ('.[instructions]')")
@pytest.mark.parametrize(
    ("language", "text", "is_followed"),
    [
        ("de", "Das Haus steht am Ufer eines kleinen Sees, und im Garten bluehen Rosen.", True),
        ("German", "Das Haus steht am Ufer eines kleinen Sees, und im Garten stehen Rosen.", True),
        ("French", "The house stands on the shore of a small lake, and roses grow there.", False),
        ("en", "123 456", False),
    ],
)
def test_language_of_an_answer(language: str, text: str, is_followed: bool) -> None:
    instruction = Instruction("validate_response_language", {"language": language})

    assert [instruction.is_followed(text) for _ in range(3)] == [is_followed] * 3


def test_missing_language_detector_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    require_language_detector([Instruction("validate_title")])
    with pytest.raises(MissingExtraError, match=r"langdetect.*'\.\[instructions\]'"):
        require_language_detector([Instruction("validate_response_language")])


@pytest.mark.parametrize(
    ("ground_truth", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no func_name"),
        ({"func_name": "validate_titel"}, "did you mean validate_title"),
        ({"func_name": "verify_bullet_points", "N": None}, "N to be an integer"),
        ({"func_name": "verify_bullet_points", "N": True}, "N to be an integer"),
        ({"func_name": "verify_bullet_points", "N": float("inf")}, "N to be an integer"),
        ({"func_name": "verify_keywords", "keyword_list": []}, "keyword_list to be a list"),
        ({"func_name": "validate_end", "end_phrase": " "}, "end_phrase to be a text"),
        (
            {"func_name": "validate_word_constraint", "N": 3, "quantifier": "under"},
            "at least, at most, around",
        ),
    ],
)
def test_malformed_instruction_is_an_error(ground_truth: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_instruction(ground_truth)


def test_arguments_as_numbers_with_a_fraction_of_zero_are_integers() -> None:
    row = {"func_name": "verify_bullet_points", "N": 3.0}

    assert read_instruction(row).arguments == {"N": 3}


@pytest.mark.parametrize(
    "completion",
    ["No commas", "<think>a", "<think>a</think><think>b</think>ok", "</think><think>ok"],
)
def test_thinking_must_be_one_pair_of_tags(completion: str) -> None:
    assert score_completion(completion, Instruction("validate_no_commas")) == 0.0


def test_work_on_hostile_answers_grows_with_their_length_only() -> None:
    def verify(times: int) -> None:
        count = 6_000 * times
        for text in (
            "." * count + "x",
            "<<" + "a" * count,
            "*" * count,
            "**" + "a" * count,
            "[" * count,
            "\n" * count,
            "\n \t" * (count // 2),
            "SECTION " + "1" * count + "x",
            "* " * count,
        ):
            for name, arguments, *_ in CASES:
                read_instruction({"func_name": name, **arguments}).is_followed(text)

    assert_linear(verify)


def test_item_ids_depend_on_the_item_only() -> None:
    # sha256sum of prompt, a zero byte and the text
    assert item_id("prompt", '{"a": 1}') == "887cfd82c5860214"
    assert item_id("prompt", {"a": 1}) == item_id("prompt", '{"a": 1}')


def test_queue_rotates_and_removes_solved_items() -> None:
    queue = UnsolvedQueue("abc", max_average=0.75)

    assert [queue.next() for _ in range(4)] == ["a", "b", "c", "a"]
    assert not queue.record("a", [1.0, 1.0, 1.0, 0.0])  # 0.75 is not above 0.75
    assert queue.record("a", [1.0, 1.0, 1.0, 1.0])
    assert [queue.next() for _ in range(3)] == ["b", "c", "b"]
    queue.record("b", [0.0])
    assert queue.metrics() == {
        "curriculum/active_items": 2,
        "curriculum/solved_items": 1,
        "curriculum/total_items": 3,
        "curriculum/percent_solved": pytest.approx(1 / 3),
        "curriculum/avg_attempts_active": 0.5,  # one attempt at b, none at c
    }


def test_queue_solves_an_item_with_a_high_mean_or_a_single_right_answer() -> None:
    strict = UnsolvedQueue("a", max_average=1.0)
    single = UnsolvedQueue("a", max_average=1.0, solve_on_single_correct=True)

    assert not strict.record("a", [1.0, 0.0])
    assert strict.record("a", [1.0] * 9 + [0.0])
    assert single.record("a", [1.0, 0.0])


def test_queue_starts_again_when_all_items_are_solved() -> None:
    queue = UnsolvedQueue("ab", max_average=0.5)
    queue.record("b", [1.0])
    queue.record("a", [1.0])

    assert queue.metrics()["curriculum/percent_solved"] == 1.0
    assert [queue.next(), queue.next()] == ["b", "a"]


def test_queue_is_restored_from_its_state() -> None:
    queue = UnsolvedQueue("abc", max_average=0.5)
    queue.record("b", [1.0])
    queue.next()
    state = json.loads(json.dumps(queue.state()))
    restored = UnsolvedQueue("xabc", max_average=0.5)
    restored.restore({**state, "solved": [*state["solved"], "gone"]})

    assert restored.active == ["c", "a", "x"]
    assert restored.metrics()["curriculum/solved_items"] == 1
    assert restored.state()["attempts"] == {"b": 1}


async def test_easy_group_is_dropped_and_its_item_leaves_the_queue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {"dataset_path": str(SAMPLE), "group_size": 2, "unsolved_path": None}
    env_cls = InstructionFollowingEnv
    dump = {"dump_rollouts": True, "dump_failed_rollouts": True, "dump_dir": str(tmp_path)}
    answer = ""
    async with ScriptedEngine(lambda _: answer) as engine:
        env = make_env(env_cls, engine, monkeypatch, **settings, **dump)
        await env.setup()
        item = await env.get_next_item()
        answer = env.check_gold_answer(item)
        easy, _ = await env.collect_trajectories(item)
        env.checkpoint_dir, env.wandb_prepend = str(tmp_path), "if"
        env.save_checkpoint(4)
        other = make_env(env_cls, engine, monkeypatch, **settings)
        await other.setup()
        other.checkpoint_dir, other.wandb_prepend, other.curr_step = str(tmp_path), "if", 4
        other.load_checkpoint()
        next_items = [await each.get_next_item() for each in (env, other)]
        answer = "I do not follow it, as there is no thinking here at all."
        hard, _ = await env.collect_trajectories(next_items[0])
        metrics: dict[str, Any] = {}
        await env.wandb_log(metrics)
        for each in (env, other):
            await each.close()
            await each.server.close()

    assert easy is None
    assert hard["scores"] == [0.0, 0.0]
    assert next_items[0] == next_items[1] != item
    assert other.queue.state() != UnsolvedQueue(other.rows, max_average=0.75).state()
    assert (metrics["curriculum/solved_items"], metrics["curriculum/active_items"]) == (1, 19)
    assert metrics["train/percent_correct"] == 0.5
    [saved] = read_groups(tmp_path / "instruction_following_rollouts.jsonl")
    [failed] = read_groups(tmp_path / "instruction_following_failed_rollouts.jsonl")
    assert (saved["scores"], failed["scores"]) == ([1.0, 1.0], [0.0, 0.0])


async def test_group_of_right_answers_is_ranked_by_length_when_it_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[str] = []
    async with ScriptedEngine(lambda _: answers.pop(0) if answers else PROBED) as engine:
        env = make_env(
            InstructionFollowingEnv,
            engine,
            monkeypatch,
            dataset_path=str(SAMPLE),
            group_size=2,
            max_group_average_for_training=1.0,
            max_token_length=1500,
        )
        await env.setup()
        item = next(row for row in env.train if "no_commas" in row["ground_truth"])
        answers += [PROBED, "<think>a</think>Short.", f"<think>{'a' * 900}</think>Short."]
        group, _ = await env.collect_trajectories(item)
        await env.close()
        await env.server.close()

    lengths = [len(tokens) for tokens in group["tokens"]]
    # free up to 0.75 * 1500 tokens, then linear down to 0 at 1500
    assert lengths[0] < 1125 < lengths[1]
    assert group["scores"] == pytest.approx([1.0, 1 - (lengths[1] - 1125) / 375])


async def test_unsolved_items_are_written_and_resumed_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "left" / "unsolved.jsonl"
    settings = {"dataset_path": str(SAMPLE), "unsolved_path": str(path)}
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(InstructionFollowingEnv, engine, monkeypatch, **settings)
        await env.setup()
        solved = await env.get_next_item()
        env.queue.record(env.queue.active[-1], [1.0])
        for _ in range(99):
            await env.get_next_item()
        resumed = make_env(
            InstructionFollowingEnv,
            engine,
            monkeypatch,
            dataset_path=str(SAMPLE),
            resume_from_unsolved_dataset=str(path),
        )
        await resumed.setup()
        await env.server.close()
        await resumed.server.close()

    assert len(resumed.train) == 19
    assert solved not in resumed.train
    assert resumed.test == env.test


async def test_malformed_row_is_named_at_setup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}], "ground_truth": '{"func_name": "x"}'}
    ] * 3
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(InstructionFollowingEnv, engine, monkeypatch, dataset_path=str(path))
        with pytest.raises(ConfigError, match=r"row 0: no verifier is called 'x'"):
            await env.setup()
        await env.server.close()


async def test_language_items_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sample = (SAMPLE / "train.jsonl").read_text().splitlines()
    about_language = {
        "messages": [{"role": "user", "content": "Hi"}],
        "ground_truth": '{"func_name": "validate_response_language", "language": "de"}',
    }
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*sample, json.dumps(about_language)]))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    settings = {"dataset_path": str(path), "suppress_base_env_logs": False}
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(InstructionFollowingEnv, engine, monkeypatch, **settings)
        with pytest.raises(MissingExtraError, match="langdetect"):
            await env.setup()
        env.config.skip_language_items = True
        await env.setup()
        await env.server.close()

    assert len(env.train) + len(env.test) == len(sample)
    assert "1 of" in caplog.text


def test_environment_passes_the_check() -> None:
    report = check_environment(InstructionFollowingEnv)

    assert report.passed, report.text
