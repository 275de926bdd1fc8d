from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.errors import ConfigError
from atroposlib.tasks.answers import FORMATS, AnswerFormat, formats_for
from environments.answer_format_environment.answer_format_environment import (
    SAMPLE,
    AnswerFormatEnv,
    AnswerFormatEnvConfig,
    FormatBalance,
    FormatDataset,
    QuestionRow,
    has_format,
    read_question_row,
)
from tests.environments.offline import PROBED, make_env
from tests.fakes import ScriptedEngine
from tests.growth import assert_linear


def filled(form: AnswerFormat, answer: str) -> str:
    return form.render(**{**dict.fromkeys(form.fields, "well"), "answer": answer})


def test_there_are_132_formats_in_ten_families() -> None:
    assert len(FORMATS) == 132
    assert Counter(form.family for form in FORMATS.values()) == {
        **{"structured": 24, "tags": 20, "natural": 14, "programming": 12, "complex": 12},
        **dict.fromkeys(("latex", "markdown", "brackets", "html", "delimiters"), 10),
    }
    assert len({form.template for form in FORMATS.values()}) == 132


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("answer", ["42", "two words, and more"])
def test_format_is_found_exactly_once(form: AnswerFormat, answer: str) -> None:
    text = filled(form, answer)
    inside = f"I thought.\n{text}\nThat is all.\n"

    assert (form.extract(text) or {})["answer"] == answer
    assert form.extract(f"{text}\n{text}") is None
    assert form.extract(text.replace(answer, "")) is None
    assert form.extract(form.render()) is None  # the placeholders of the prompt
    for other in ("", answer, "zqxv }{ wkjj ]] plomf (("):
        assert form.extract(other) is None
    assert (form.extract(inside) is None) == (form.family == "structured")


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_instruction_shows_the_format(form: AnswerFormat) -> None:
    assert form.instruction().endswith(form.render())
    assert "YOUR ANSWER" in form.render()


def test_formats_are_told_apart_unless_one_contains_the_other() -> None:
    texts = {name: filled(form, "42") for name, form in FORMATS.items()}
    confused: dict[str, set[str]] = {}
    for demanded, form in FORMATS.items():
        given = {other for other in texts if other != demanded and form.extract(texts[other])}
        if given:
            confused[demanded] = given
    tags = {name: others for name, others in confused.items() if name.startswith("tag_")}

    assert confused == {
        **tags,
        "toml_answer": {"programming_python_variable"},
        "programming_python_variable": {"toml_answer", "toml_answer_confidence"},
        "markdown_bold": {"markdown_bold_label", "markdown_bold_final_label"},
    }
    for name, others in tags.items():
        opening = f"<{name.removeprefix('tag_')}>"
        assert all(opening in texts[other] for other in others)


@pytest.mark.parametrize(
    ("name", "text", "is_matched"),
    [
        ("tag_answer", "<answer>\n4\n</answer>", True),
        ("tag_answer", "<answer>4</answer></answer>", False),
        ("tag_answer", "</answer>4<answer>", False),
        ("nested_response_answer", "<response>\n <answer>4</answer>\n</response>", True),
        ("nested_response_answer", "<response>x<answer>4</answer></response>", False),
        ("natural_the_answer_is", "So.\n  The answer is: 4\nBye", True),
        ("natural_the_answer_is", "So the answer is: 4", False),
        ("natural_the_answer_is", "The answer is: \n", False),
        ("markdown_heading", "# Answer\n4", True),
        ("markdown_heading", "# Answer\n\n4", True),
        ("markdown_heading", "## Answer\n4", False),
        ("markdown_fence", "```answer\n4\n```", True),
        ("markdown_fence", "```answer\n4\n```\n```\n5\n```", False),
        ("latex_boxed", "As {a}: \\boxed{\\frac{1}{2}}.", True),
        ("latex_boxed", "\\boxed{\\frac{1}{2}", False),
        ("latex_boxed", "\\boxed{1} or \\boxed{2}", False),
        ("brackets_round", "(So) (ANSWER: f(x)) (really)", True),
        ("brackets_square", "[ANSWER: a[0]", False),
        ("programming_python_variable", 'answer = "4"', True),
        ("programming_python_variable", 'const answer = "4";', False),
        ("json_answer", '```json\n{"answer": 4}\n```', True),
        ("json_answer", '{"answer": "4", "more": 1}', False),
        ("json_answer", '{"answer": "4", "answer": "5"}', False),
        ("json_answer", '{"answer": [4]}', False),
        ("json_answer", 'Here: {"answer": "4"}', False),
        ("json_answer_confidence", '{"answer": "4", "confidence": 0.5}', True),
        ("json_answer_confidence", '{"answer": "4", "confidence": 2}', False),
        ("json_answer_confidence", '{"answer": "4", "confidence": true}', False),
        ("yaml_answer", "answer: 4", True),
        ("yaml_answer", "answer: 4\nanswer: 5", False),
        ("yaml_answer", "answer: [4]", False),
        ("yaml_answer", "answer:\n  text: 4", False),
        ("toml_answer", "answer = '4'", True),
        ("toml_answer", "answer = 4\nanswer = 5", False),
        ("toml_answer", "answer = x", False),
        ("complex_reasoning_answer", "<reasoning>r</reasoning> <answer>4</answer>", True),
        ("complex_reasoning_answer", "<answer>4</answer><reasoning>r</reasoning>", False),
        ("complex_reasoning_answer", "<reasoning></reasoning><answer>4</answer>", False),
    ],
)
def test_matching_of_single_texts(name: str, text: str, is_matched: bool) -> None:
    form = FORMATS[name]

    assert (form.extract(text) is not None) == is_matched


@pytest.mark.parametrize("name", FORMATS)
def test_work_on_hostile_answers_grows_with_their_length_only(name: str) -> None:
    def extract(times: int) -> None:
        texts = [part * 1_500 * times for part in ("<<", "[[", "```", "  ", ">\n")]
        texts += ["{" * 600 * times, "a: [" * 150 * times, "answer: " + "- " * 300 * times]
        for text in texts:
            assert FORMATS[name].extract(text) is None

    assert_linear(extract)


def test_thinking_must_be_one_pair_of_tags_and_its_content_does_not_count() -> None:
    form = FORMATS["tag_answer"]

    assert has_format("<think><answer>1</answer></think><answer>2</answer>", form)
    assert not has_format("<answer>2</answer>", form)
    assert not has_format("<think><answer>2</answer></think>", form)
    assert not has_format("", form)


def test_formats_suit_the_kind_of_the_data() -> None:
    families = {
        kind: {FORMATS[name].family for name in formats_for(kind)}
        for kind in ("generic", "math_only", "code_only")
    }

    assert "latex" in families["math_only"] - families["generic"] - families["code_only"]
    assert "programming" in families["code_only"] - families["math_only"]
    assert "natural" not in families["code_only"]


def test_balance_pauses_formats_until_the_others_catch_up() -> None:
    names = ["tag_answer", "latex_boxed", "html_div"]
    balance = FormatBalance(threshold=2, counts={"tag_answer": 2, "latex_boxed": 1})

    assert balance.available(names) == ["latex_boxed", "html_div"]
    balance.counts.update({"latex_boxed": 1, "html_div": 2})
    assert balance.available(names) == names
    assert FormatBalance(threshold=None, counts={"html_div": 99}).available(names) == names


def test_simple_formats_are_drawn_in_seven_of_ten() -> None:
    balance, source = FormatBalance(threshold=None), random.Random(0)
    names = list(FORMATS)
    drawn = [FORMATS[balance.draw(names, source)].is_complex for _ in range(2000)]
    few = [FORMATS[balance.draw(names[-10:], source)].is_complex for _ in range(100)]

    assert sum(drawn) / len(drawn) == pytest.approx(0.3, abs=0.03)
    assert all(few)  # ten formats are drawn evenly, and the last ten are complex


def test_settings_are_the_published_ones() -> None:
    config, _ = AnswerFormatEnv.config_init()

    assert [each.name for each in config.dataset_configs] == ["NousResearch/AcademicMCQA", "gsm8k"]
    assert [each.sample_size for each in config.dataset_configs] == [50000, 20000]
    assert (config.format_group_threshold, config.max_token_length) == (10, 12288)
    assert not config.ensure_scores_are_not_same
    defaults = AnswerFormatEnvConfig()
    assert [each.sample_size for each in defaults.dataset_configs] == [1000, 2000]
    assert (defaults.format_group_threshold, defaults.eval_set_percentage) == (50, 0.1)
    assert 20 <= defaults.seed <= 9999


def test_conversations_become_questions() -> None:
    source = FormatDataset(name="x", prompt_field="c", answer_field="c", metadata_fields=["id"])
    chat = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}]
    row = {"c": [*chat, {"from": "gpt", "value": "a"}], "id": 3}

    assert read_question_row(row, source) == QuestionRow("q", "a", "generic", {"id": 3})


@pytest.mark.parametrize("row", [{}, {"prompt": "q"}, {"prompt": "q", "answer": " "}])
def test_malformed_row_is_an_error(row: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected texts in prompt and answer"):
        read_question_row(row, FormatDataset(name="x"))


async def test_unknown_format_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        with pytest.raises(ConfigError, match="did you mean latex_boxed"):
            make_env(AnswerFormatEnv, engine, monkeypatch, supported_formats=["latex_boxd"])


async def test_local_data_sets_are_mixed_and_their_rows_stay_unchanged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "maths.jsonl").write_text('{"q": "1+1?", "a": "2", "id": 7}\n' * 30)
    (tmp_path / "words.csv").write_text("prompt,answer\n" + "Who?,me\n" * 30)
    sources = [
        FormatDataset(
            name=str(tmp_path / "maths.jsonl"),
            prompt_field="q",
            answer_field="a",
            sample_size=10,
            dataset_type="math_only",
            metadata_fields=["id"],
        ),
        FormatDataset(name=str(tmp_path / "words.csv")),
    ]
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(AnswerFormatEnv, engine, monkeypatch, dataset_configs=sources, seed=21)
        await env.setup()
        before = json.dumps(env.train)
        items = [await env.get_next_item() for _ in range(200)]
        await env.close()
        await env.server.close()

    assert len(env.train) + len(env.test) == 40
    assert json.dumps(env.train) == before
    assert len({item.format_name for item in items}) > 50
    assert {item.metadata["id"] for item in items if item.question == "1+1?"} == {7}
    latex = [item for item in items if item.format.family == "latex"]
    assert latex
    assert all(item.question == "1+1?" for item in latex)


async def test_group_with_equal_scores_is_dropped_but_counts_for_its_format(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = {"dataset_path": str(SAMPLE), "group_size": 2, "ensure_equivalent_ratios": True}
    settings |= {"supported_formats": ["tag_answer", "html_div"], "seed": 20}
    answers = [PROBED]
    async with ScriptedEngine(lambda _: answers.pop(0)) as engine:
        env = make_env(AnswerFormatEnv, engine, monkeypatch, format_group_threshold=1, **settings)
        await env.setup()
        first = await env.get_next_item()
        answers += [env.check_gold_answer(first)] * 2
        dropped, _ = await env.collect_trajectories(first)
        second = await env.get_next_item()
        answers += [env.check_gold_answer(second), "<think>well, well</think> I would not say"]
        kept, _ = await env.collect_trajectories(second)
        env.checkpoint_dir, env.wandb_prepend = str(tmp_path), "af"
        env.save_checkpoint(2)
        other = make_env(AnswerFormatEnv, engine, monkeypatch, **settings)
        other.checkpoint_dir, other.wandb_prepend, other.curr_step = str(tmp_path), "af", 2
        other.load_checkpoint()
        for each in (env, other):
            await each.close()
            await each.server.close()

    assert dropped is None
    assert kept["scores"] == [1.0, 0.0]
    assert {first.format_name, second.format_name} == {"tag_answer", "html_div"}
    assert other.balance.counts == {"tag_answer": 1, "html_div": 1}
    assert other.iter == 2


async def test_restarted_run_continues_in_the_order_of_its_own_seed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        env, again = (
            make_env(AnswerFormatEnv, engine, monkeypatch, dataset_path=str(SAMPLE), seed=seed)
            for seed in (20, 21)
        )
    for each in (env, again):
        await each.setup()
        each.checkpoint_dir, each.wandb_prepend, each.curr_step = str(tmp_path), "af", 2
    await env.get_next_item()
    env.save_checkpoint(2)

    again.load_checkpoint()

    assert again.eval_items() == env.eval_items()
    assert [await again.get_next_item() for _ in range(3)] == [
        await env.get_next_item() for _ in range(3)
    ]


def test_environment_passes_the_check() -> None:
    report = check_environment(AnswerFormatEnv)

    assert report.passed, report.text
