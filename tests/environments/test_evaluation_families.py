"""The shipped evaluations: data, prompts, grades, metrics, and what ends them loudly."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import EvalHandlingEnum
from atroposlib.envs.check import check_environment
from atroposlib.errors import ConfigError, InferenceError, MissingExtraError
from atroposlib.tasks import evaluations
from atroposlib.tasks.choice_evaluations import (
    AGIEVAL_ENGLISH,
    CHOICE_SOURCES,
    MMLU_SUBJECTS,
    ChoiceColumns,
    choice_text,
    shuffled_choices,
)
from atroposlib.tasks.evaluations import (
    BOXED_SOURCES,
    EvalQuestion,
)
from environments.eval_environments.agieval_eval import AGIEvalEnv
from environments.eval_environments.aime_eval import AIMEEvalEnv
from environments.eval_environments.aimo_eval import AIMOEvalEnv
from environments.eval_environments.arc_agi_eval import ARCAGIEvalEnv
from environments.eval_environments.arc_eval import ARCEvalEnv
from environments.eval_environments.bbh_eval import BBHEvalEnv
from environments.eval_environments.boolq_eval import BoolQEvalEnv
from environments.eval_environments.drop_eval import DROPEvalEnv
from environments.eval_environments.gpqa_eval import GPQAEvalEnv
from environments.eval_environments.gsm8k_eval import GSM8KEvalEnv
from environments.eval_environments.hellaswag_eval import HellaSwagEvalEnv
from environments.eval_environments.hle_eval import HLEEvalEnv
from environments.eval_environments.ifeval_eval import IFEvalEnv
from environments.eval_environments.math500_eval import MATH500EvalEnv
from environments.eval_environments.math_eval import MATHEvalEnv
from environments.eval_environments.mmlu_eval import MMLUEvalEnv
from environments.eval_environments.mmlu_pro_eval import MMLUProEvalEnv
from environments.eval_environments.musr_eval import MuSREvalEnv
from environments.eval_environments.obqa_eval import OBQAEvalEnv
from environments.eval_environments.olympiadbench_eval import OlympiadBenchEvalEnv
from environments.eval_environments.phybench_eval import PHYBenchEvalEnv
from environments.eval_environments.piqa_eval import PIQAEvalEnv
from environments.eval_environments.pubmedqa_eval import PubMedQAEvalEnv
from environments.eval_environments.simpleqa_eval import SimpleQAEvalEnv, read_verdict_word
from environments.eval_environments.siqa_eval import SIQAEvalEnv
from environments.eval_environments.winogrande_eval import WinoGrandeEvalEnv
from tests.environments.offline import make_env
from tests.fakes import ScriptedEngine
from tests.scripted_engine import Fault

pytestmark = pytest.mark.slow

ENVIRONMENTS: dict[Any, tuple[str, str, str | None, str]] = {
    # class: data set of the hub, split, configuration, main metric
    MMLUEvalEnv: ("lighteval/mmlu", "test", None, "eval/overall_accuracy"),
    MMLUProEvalEnv: ("TIGER-Lab/MMLU-Pro", "test", None, "accuracy"),
    GPQAEvalEnv: ("Idavidrein/gpqa", "train", "gpqa_diamond", "eval/overall_accuracy"),
    ARCEvalEnv: ("allenai/ai2_arc", "test", "ARC-Challenge", "accuracy"),
    HellaSwagEvalEnv: ("Rowan/hellaswag", "validation", None, "accuracy"),
    BBHEvalEnv: ("lighteval/bbh", "train", None, "accuracy"),
    AIMEEvalEnv: ("HuggingFaceH4/aime_2024", "train", None, "accuracy"),
    MATH500EvalEnv: ("HuggingFaceH4/MATH-500", "test", None, "accuracy"),
    GSM8KEvalEnv: ("openai/gsm8k", "test", "main", "accuracy"),
    DROPEvalEnv: ("lighteval/drop_harness", "validation", None, "eval/accuracy"),
    SimpleQAEvalEnv: ("lighteval/SimpleQA", "test", None, "eval/exact_match_accuracy"),
    IFEvalEnv: ("google/IFEval", "train", None, "eval/prompt_level_strict_acc"),
    AGIEvalEnv: ("dmayhem93/agieval-{}", "test", None, "eval/overall_accuracy"),
    BoolQEvalEnv: ("lighteval/boolq_helm", "validation", None, "accuracy"),
    MuSREvalEnv: ("TAUR-Lab/MuSR", "murder_mysteries", None, "eval/accuracy"),
    OBQAEvalEnv: ("allenai/openbookqa", "test", "main", "eval/accuracy"),
    PIQAEvalEnv: ("ybisk/piqa", "validation", None, "accuracy"),
    SIQAEvalEnv: ("allenai/social_i_qa", "validation", None, "accuracy"),
    WinoGrandeEvalEnv: ("allenai/winogrande", "validation", "winogrande_xl", "accuracy"),
    MATHEvalEnv: ("DigitalLearningGmbH/MATH-lighteval", "test", None, "accuracy"),
    AIMOEvalEnv: ("lighteval/aimo_progress_prize_1", "train", None, "accuracy"),
    OlympiadBenchEvalEnv: ("Hothan/OlympiadBench", "train", "OE_TO_maths_en_COMP", "accuracy"),
    PubMedQAEvalEnv: ("pubmed_qa", "train", "pqa_labeled", "accuracy"),
    HLEEvalEnv: ("cais/hle", "test", None, "accuracy"),
    ARCAGIEvalEnv: ("arc-agi-community/arc-agi-2", "test", None, "accuracy"),
    PHYBenchEvalEnv: ("Eureka-Lab/PHYBench", "train", None, "accuracy"),
}
ALL = pytest.mark.parametrize("env_cls", ENVIRONMENTS, ids=lambda cls: cls.__name__)
FAST = {"max_retries": 1, "retry_delay": 0.0}


async def ready(
    env_cls: Any, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Any:
    """An environment with its sample, or other data, read."""
    env = make_env(env_cls, engine, monkeypatch, **{**env_cls.check_settings, **FAST, **settings})
    await env.setup()
    return env


async def evaluated(
    env_cls: Any,
    replies: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    **settings: Any,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return metrics and samples of an evaluation on scripted replies."""
    async with ScriptedEngine(replies) as engine:
        saved = {"data_dir_to_save_evals": str(folder)}
        env = await ready(env_cls, engine, monkeypatch, **saved, **settings)
        await env.evaluate()
        await env.close()
        await env._close_score_pool()
        await env.server.close()
    report = json.loads((folder / "metrics.json").read_text())
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert report["results"][f"atropos|{env_cls.name}|0"] == report["results"]["all"]
    return report["results"]["all"], samples


@ALL
def test_source_is_the_published_one(env_cls: Any) -> None:
    source, config = env_cls.source, env_cls.config_init()[0]

    assert (source.path, source.split, source.subset, source.overall) == ENVIRONMENTS[env_cls]
    stem = env_cls.__module__.rpartition(".")[2]
    assert env_cls.name == stem
    assert config.tokenizer_name == "NousResearch/Hermes-3-Llama-3.1-8B"
    assert config.eval_handling == EvalHandlingEnum.STOP_TRAIN
    assert (config.group_size, config.total_steps, config.steps_per_eval) == (1, 1, 1)
    assert config.eval_temperature == (0.0 if env_cls is MMLUEvalEnv else 0.6)
    published = {
        "thinking_mode": env_cls is not PHYBenchEvalEnv,
        "custom_thinking_prompt": None,
        "eval_max_tokens": 0,
    }
    published |= {"custom_system_prompt": None, "max_retries": 3, "retry_delay": 1.0}
    published |= {"min_response_length": 1, "full_debug": False}
    assert {name: getattr(config, name) for name in published} == published


@ALL
def test_default_server_takes_the_key_of_the_environment(
    env_cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")

    _, server = env_cls.config_init()

    assert server.base_url == "http://localhost:9000/v1"
    assert server.api_key == "from the environment"  # pragma: allowlist secret


@ALL
async def test_gold_scores_highest_wrong_and_empty_lowest(
    env_cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine([]) as engine:
        env = await ready(env_cls, engine, monkeypatch)
        scores = []
        for item in env.questions:
            gold = env.check_gold_answer(item)
            wrong = ["", "<answer></answer>", "<answer>zzz</answer>", "\\boxed{-987}", "no, idea"]
            wrong.append(f"<think>{gold.rpartition('</think>')[2]}")  # it never ends
            scores.append(
                (await env.score(item, gold), [await env.score(item, text) for text in wrong])
            )
        await env.close()
        await env._close_score_pool()

    assert len(scores) >= 5
    assert all(gold == 1.0 for gold, _ in scores)
    assert all(set(wrong) == {0.0} for _, wrong in scores)


@ALL
async def test_metrics_of_right_and_of_wrong_answers(
    env_cls: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gold: dict[str, str] = {}

    def right(prompt: str) -> str:
        return next(text for question, text in gold.items() if question in prompt)

    async with ScriptedEngine([]) as engine:
        env = await ready(env_cls, engine, monkeypatch)
        gold |= {env.question_text(item): env.check_gold_answer(item) for item in env.questions}
        await env.close()
    best, samples = await evaluated(env_cls, right, monkeypatch, tmp_path / "best")
    worst, _ = await evaluated(env_cls, lambda _: "?", monkeypatch, tmp_path / "worst")

    overall = env_cls.source.overall
    prefix = env_cls.source.prefix
    assert (best[overall], worst[overall]) == (1.0, 0.0)
    assert best[f"{overall}_ci_high"] == 1.0
    assert best[f"{overall}_ci_low"] > 0.5
    assert best[f"{prefix}total_evaluated"] == best[f"{prefix}total_correct"] == len(samples)
    assert worst[f"{prefix}total_correct"] == 0
    assert best[f"{prefix}format_compliance_rate"] == 1.0
    has_thinking = float(env_cls is not IFEvalEnv)
    assert best[f"{prefix}thinking_utilization_rate"] == has_thinking
    assert all(sample["is_correct"] and sample["gold_answer"] for sample in samples)
    assert {value for name, value in best.items() if name.endswith("_accuracy")} <= {1.0}


@ALL
def test_environment_passes_its_check(env_cls: Any) -> None:
    report = check_environment(env_cls)

    assert report.passed, report.text


GROUP_METRICS = {
    MMLUEvalEnv: {"eval/category_stem_accuracy", "eval/subject_formal_logic_accuracy"},
    MMLUProEvalEnv: {"category_physics_accuracy", "category_computer_science_accuracy"},
    GPQAEvalEnv: {"eval/subdomain_organic_chemistry_accuracy"},
    HellaSwagEvalEnv: {"activity_ice_skating_accuracy"},
    BBHEvalEnv: {"subset_boolean_expressions_accuracy"},
    AIMEEvalEnv: {"aime_2024_accuracy", "aime_2025_accuracy"},
    MATH500EvalEnv: {"subject_algebra_accuracy", "level_1_accuracy"},
    GSM8KEvalEnv: {"has_boxed_rate", "multiple_boxed_rate", "verification_methods"},
    DROPEvalEnv: {"eval/avg_f1"},
    SimpleQAEvalEnv: {"eval/fuzzy_match_accuracy"},
    IFEvalEnv: {
        "eval/prompt_level_loose_acc",
        "eval/inst_level_strict_acc",
        "eval/inst_level_loose_acc",
    },
    AGIEvalEnv: {"eval/subset_aqua-rat_accuracy", "eval/extraction_no_match_count"},
    BoolQEvalEnv: {"yes_accuracy", "no_accuracy"},
    MuSREvalEnv: {"eval/answer_extraction_rate"},
    OBQAEvalEnv: {"eval/answer_extraction_rate"},
    MATHEvalEnv: {"subject_number_theory_accuracy", "level_1_accuracy", "has_boxed_rate"},
    HLEEvalEnv: {"category_math_accuracy", "category_biology_medicine_accuracy"},
    PHYBenchEvalEnv: {"tag_mechanics_accuracy", "eed_score", "has_boxed_rate"},
}


@pytest.mark.parametrize("env_cls", GROUP_METRICS, ids=lambda cls: cls.__name__)
async def test_metrics_of_groups_have_their_published_names(
    env_cls: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    metrics, _ = await evaluated(env_cls, lambda _: "?", monkeypatch, tmp_path)

    assert GROUP_METRICS[env_cls] <= metrics.keys()


async def test_boxed_answers_are_counted_by_method(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts = iter(["\\boxed{1} \\boxed{2}", "none", "\\boxed{3}", "\\boxed{4}", "\\boxed{5}"])

    metrics, samples = await evaluated(
        GSM8KEvalEnv, lambda _: next(texts), monkeypatch, tmp_path, eval_limit=5
    )

    assert metrics["verification_methods"] == {
        "multiple_boxed": 1,
        "no_boxed": 1,
        "math_verify": 3,
    }
    assert (metrics["has_boxed_rate"], metrics["multiple_boxed_rate"]) == (0.8, 0.2)
    assert metrics["format_compliance_rate"] == 0.6
    assert len(samples) == 5


async def test_system_message_and_limits_reach_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine(["<answer>A</answer>"]) as engine:
        settings = {"custom_thinking_prompt": "Think.", "custom_system_prompt": "Be kind."}
        env = await ready(ARCEvalEnv, engine, monkeypatch, eval_max_tokens=64, **settings)
        await env.evaluate_item(env.questions[0])
        plain = await ready(ARCEvalEnv, engine, monkeypatch)
        await plain.evaluate_item(env.questions[0])
        first, second = (request.body for request in engine.requests)
        for each in (env, plain):
            await each.server.close()

    assert first["messages"][0] == {"role": "system", "content": "Think.\n\nBe kind."}
    assert first["max_tokens"] == 64
    assert [message["role"] for message in second["messages"]] == ["user"]
    assert "max_tokens" not in second
    assert second["temperature"] == 0.6


async def test_short_replies_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine(["", "", "<answer>B</answer>"]) as engine:
        env = await ready(ARCEvalEnv, engine, monkeypatch, max_retries=3)
        record = await env.evaluate_item(env.questions[0])
        few = await ready(ARCEvalEnv, engine, monkeypatch, max_retries=2)
        engine.replies = [""]
        empty = await few.evaluate_item(env.questions[0])
        for each in (env, few):
            await each.server.close()

    assert record["score"] == 1.0
    assert (empty["score"], empty["extraction_method"]) == (0.0, "no_match")


async def test_truncated_reply_is_not_searched_for_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ScriptedEngine(["The answer is B. Let me explain at length."]) as engine:
        env = await ready(ARCEvalEnv, engine, monkeypatch, eval_max_tokens=20)
        record = await env.evaluate_item(env.questions[0])
        await env.server.close()

    assert (record["score"], record["finish_reason"]) == (0.0, "length")
    assert record["messages"][-1]["content"] == "The answer is B. Let"
    assert not record["format_compliant"]


async def test_prompt_beyond_the_context_is_unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine(["?"], max_model_len=200) as engine:
        env = await ready(ARCEvalEnv, engine, monkeypatch, eval_max_tokens=190)
        record = await env.evaluate_item(env.questions[0])
        await env.server.close()

    assert (record["score"], record["finish_reason"]) == (0.0, "length")


async def test_request_that_always_fails_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine(["?"]) as engine:
        engine.fail_next(*[Fault(status=400, message="refused")] * 100)
        env = await ready(ARCEvalEnv, engine, monkeypatch, max_retries=2)
        with pytest.raises(InferenceError, match=r"after 2 tries.*refused"):
            await env.evaluate_item(env.questions[0])
        await env.server.close()


async def test_few_shot_questions_are_of_the_same_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine([]) as engine:
        env = await ready(MMLUEvalEnv, engine, monkeypatch, num_few_shot=1, subjects=["astronomy"])
        messages = env.prompt(env.questions[0])

    assert {dict(item.groups)["subject"] for item in env.questions} == {"astronomy"}
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert "Which force keeps the Moon" in messages[0]["content"]
    assert messages[1]["content"] == "<answer>B</answer>"


async def test_too_many_few_shot_questions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine([]) as engine:
        with pytest.raises(ConfigError, match=r"num_few_shot is 2, but .* only 1"):
            await ready(MMLUEvalEnv, engine, monkeypatch, num_few_shot=2)


async def test_subject_is_part_of_the_prompt_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine([]) as engine:
        env = await ready(MMLUEvalEnv, engine, monkeypatch, include_subject_in_prompt=True)

    texts = {env.question_text(item).partition("\n")[0] for item in env.questions}
    assert "Subject: elementary mathematics" in texts


async def test_original_prompt_of_math500(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine([]) as engine:
        env = await ready(MATH500EvalEnv, engine, monkeypatch, use_original_prompt=True)

    assert env.question_text(env.questions[0]).startswith("Solve this mathematics problem")


async def test_years_of_aime_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine([]) as engine:
        env = await ready(AIMEEvalEnv, engine, monkeypatch, years=["2025"])
        with pytest.raises(ConfigError, match="no question for these settings"):
            await ready(AIMEEvalEnv, engine, monkeypatch, years=["1999"])

    assert {item.groups for item in env.questions} == {(("year", "2025"),)}
    with pytest.raises(ConfigError, match=r"env\.years: no data set is known for 1999"):
        AIMEEvalEnv.check_inputs(AIMEEvalEnv.env_config_cls(years=["1999", "2024"]))


def test_unknown_subject_suggests_the_near_one() -> None:
    with pytest.raises(ConfigError, match="did you mean astronomy"):
        MMLUEvalEnv.check_inputs(MMLUEvalEnv.env_config_cls(subjects=["astronmy"]))


HUB_ROWS: dict[Any, dict[str, Any]] = {
    MMLUEvalEnv: {"question": "q", "choices": ["a", "b"], "answer": 1},
    BBHEvalEnv: {"input": "q", "choices": ["a", "b"], "target_idx": 1, "task_prefix": "p"},
    AIMEEvalEnv: {"problem": "q", "answer": 7},
    GSM8KEvalEnv: {"question": "q", "answer": "so 1 + 1 = 2\n#### 1,002"},
    IFEvalEnv: {
        "prompt": "q",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{"num_words": None}],
    },
    AGIEvalEnv: {"query": "q", "choices": ["(A)a", "(B)b"], "gold": [1]},
    MATHEvalEnv: {"problem": "q", "solution": "\\boxed{7}", "level": "Level 1", "type": "Geometry"},
    MuSREvalEnv: {"narrative": "n", "question": "q", "choices": "['a', 'b']", "answer_index": 1},
    WinoGrandeEvalEnv: {"sentence": "a _", "option1": "a", "option2": "b", "answer": "2"},
}


@pytest.mark.parametrize("env_cls", HUB_ROWS, ids=lambda cls: cls.__name__)
async def test_hub_is_asked_for_the_published_parts(
    env_cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, str | None]] = []

    def rows(path: str, *, split: str, subset: str | None = None) -> list[dict[str, Any]]:
        asked.append((path, split, subset))
        return [dict(HUB_ROWS[env_cls])]

    monkeypatch.setattr(evaluations, "hub_rows", rows)
    monkeypatch.setattr("environments.eval_environments.aime_eval.hub_rows", rows)
    monkeypatch.setattr("environments.eval_environments.agieval_eval.hub_rows", rows)
    monkeypatch.setattr(evaluations, "_all_subsets", lambda name: ["one", "two"])
    async with ScriptedEngine([]) as engine:
        env = await ready(env_cls, engine, monkeypatch, dataset_path=None)

    path, split, subset, _ = ENVIRONMENTS[env_cls]
    expected = {
        MMLUEvalEnv: [(path, split, name) for name in MMLU_SUBJECTS],
        BBHEvalEnv: [(path, split, "one"), (path, split, "two")],
        AIMEEvalEnv: [(path, split, None), ("yentinglin/aime_2025", split, None)],
        MATHEvalEnv: [(path, split, name) for name in MATHEvalEnv.source.subsets or ()],
        AGIEvalEnv: [(path.format(name), split, None) for name in AGIEVAL_ENGLISH],
    }
    assert asked == expected.get(env_cls, [(path, split, subset)])
    assert len(env.questions) == len(asked)
    assert len(asked) == {MMLUEvalEnv: 57, MATHEvalEnv: 7}.get(env_cls, len(asked))
    if env_cls is GSM8KEvalEnv:
        assert env.questions[0].gold == "1002"
    if env_cls is BBHEvalEnv:
        assert [item.groups for item in env.questions] == [
            (("subset", "one"),),
            (("subset", "two"),),
        ]
    if env_cls is MMLUEvalEnv:
        assert all(dict(item.groups).keys() == {"subject", "category"} for item in env.questions)


@pytest.mark.parametrize(
    ("solution", "gold"),
    [
        ("So $x=\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("Not \\boxed{1} but \\boxed{2}.", "2"),
        ("It is $\\boxed 7$.", "7"),
        ("It is \\fbox{8}.", "8"),
    ],
)
def test_gold_answer_of_math_is_the_last_box_of_the_solution(solution: str, gold: str) -> None:
    read = BOXED_SOURCES["math"].read

    assert read({"problem": "q", "solution": solution}).gold == gold
    with pytest.raises(ConfigError, match="gold answer is empty"):
        read({"problem": "q", "solution": "It is 7."})


async def test_answers_of_olympiadbench_may_be_several(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine([]) as engine:
        env = await ready(OlympiadBenchEvalEnv, engine, monkeypatch)
        several, _, with_unit, *_, two_texts = env.questions
        replies = ["\\boxed{2, 1, -1, -2}", "\\boxed{2, 1}", "\\boxed{1} \\boxed{2}"]
        scores = [await env.score(several, reply) for reply in replies]
        await env.close()
        await env._close_score_pool()

    assert scores == [1.0, 0.0, 0.0]
    assert (several.gold, two_texts.gold) == ("-2,-1,1,2", "4, -4")
    assert several.question.endswith("Separate them by commas within the one box.")
    assert with_unit.question.endswith("The unit of the answer is km/h; leave it out of the box.")


async def test_last_exam_has_options_and_leaves_out_images(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine([]) as engine:
        env = await ready(HLEEvalEnv, engine, monkeypatch)
        option = env.questions[1]
        replies = ["<answer>B</answer>", "<answer>B. 2</answer>", "<answer>A or B</answer>", "B"]
        scores = [await env.score(option, reply) for reply in replies]

    assert len(env.questions) == 6
    assert scores == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("<answer>No</answer>", 1.0),
        ("<answer>No, the groups slept alike.</answer>", 1.0),
        ("<answer>maybe no</answer>", 0.0),
        ("<answer>nothing</answer>", 0.0),
        ("no", 0.0),
    ],
)
async def test_decision_of_pubmedqa_is_one_word(
    reply: str, score: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine([]) as engine:
        env = await ready(PubMedQAEvalEnv, engine, monkeypatch)

        assert await env.score(env.questions[0], reply) == score


async def test_each_test_grid_is_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine([]) as engine:
        env = await ready(ARCAGIEvalEnv, engine, monkeypatch)
        third, fourth = env.questions[2:4]
        text = env.question_text(third)
        grade = await env.grade(third, "<answer>all ones</answer>")

    assert len(env.questions) == 6
    assert third.question.partition("Test")[0] == fourth.question.partition("Test")[0]
    assert (third.gold, fourth.gold) == (((0, 2, 1), (1, 2, 0)), ((2, 5), (1, 5)))
    assert "Example 2\nInput: [[2, 0, 2], [1, 0, 0]]\nOutput: [[1, 0, 1], [2, 0, 0]]" in text
    assert "[[0, 2, 1], [1, 2, 0]]" not in text
    assert (grade.score, grade.method) == (0.0, "answer_tag_no_grid")


async def test_formulas_of_phybench_are_compared_as_expressions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [
        {"content": "first", "answer": "$$m g h/2$$", "tag": "MECHANICS"},
        {"content": "second", "answer": "", "tag": "MECHANICS"},
        {"content": "third", "answer": "$$T$$", "tag": "OPTICS"},
        {"content": "fourth", "answer": "$$T$$", "tag": "MECHANICS"},
    ]
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    local = {"dataset_path": str(tmp_path)}
    async with ScriptedEngine([]) as engine:
        env = await ready(PHYBenchEvalEnv, engine, monkeypatch, **local, tags_filter=["mechanics"])
        few = await ready(PHYBenchEvalEnv, engine, monkeypatch, **local, max_samples=1)
        formula, letter = env.questions
        texts = ["E=h \\frac{gm}{2}", "m g h", "\\int x dx"]
        grades = [await env.grade(formula, f"\\boxed{{{text}}}") for text in texts]
        grades.append(await env.grade(formula, "m g h/2"))
        other = await env.grade(letter, "\\boxed{t}")
        for each in (env, few):
            await each.close()
            await each._close_score_pool()

    assert [(grade.score, grade.method, grade.values["eed_score"]) for grade in grades] == [
        (1.0, "expression_compare", 100.0),
        (0.0, "expression_compare", 40.0),
        (0.0, "string_compare", 0.0),
        (0.0, "no_boxed", 0.0),
    ]
    assert other.score == 0.0
    assert [item.question for item in few.questions] == ["first"]


async def test_parts_of_agieval_and_musr_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def rows(path: str, *, split: str, subset: str | None = None) -> list[dict[str, Any]]:
        asked.append(split if "MuSR" in path else path)
        return [HUB_ROWS[MuSREvalEnv] if "MuSR" in path else HUB_ROWS[AGIEvalEnv]]

    monkeypatch.setattr(evaluations, "hub_rows", rows)
    monkeypatch.setattr("environments.eval_environments.agieval_eval.hub_rows", rows)
    hub = {"dataset_path": None}
    async with ScriptedEngine([]) as engine:
        await ready(MuSREvalEnv, engine, monkeypatch, **hub, subset="team_allocation")
        await ready(AGIEvalEnv, engine, monkeypatch, **hub, dataset_subset="lsat-lr")
        await ready(AGIEvalEnv, engine, monkeypatch, **hub, english_only=False)

    assert asked[:2] == ["team_allocation", "dmayhem93/agieval-lsat-lr"]
    assert len(asked[2:]) == 17
    assert asked[-1] == "dmayhem93/agieval-logiqa-zh"
    with pytest.raises(ConfigError, match="did you mean lsat-lr"):
        AGIEvalEnv.check_inputs(AGIEvalEnv.env_config_cls(dataset_subset="lsatlr"))


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("<answer>1</answer>", 0.0),
        ("<answer>The answer is 2.</answer>", 1.0),
        ("<answer>1 or 2</answer>", 0.0),
        ("<answer>B</answer>", 0.0),
        ("2", 0.0),
    ],
)
async def test_options_of_musr_are_numbers(
    reply: str, score: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine([]) as engine:
        env = await ready(MuSREvalEnv, engine, monkeypatch)

        assert "1. Agda\n2. Bram\n3. Cora" in env.question_text(env.questions[0])
        assert await env.score(env.questions[0], reply) == score


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("<answer>A</answer>", 1.0),
        ("<answer>yes</answer>", 1.0),
        ("<answer>Yes, by the river.</answer>", 1.0),
        ("The answer is A.", 1.0),
        ("<answer>No, it was not.</answer>", 0.0),
        ("<answer>yes or no</answer>", 0.0),
        ("yes", 0.0),
    ],
)
async def test_answer_of_boolq_is_a_letter_or_a_word(
    reply: str, score: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine([]) as engine:
        env = await ready(BoolQEvalEnv, engine, monkeypatch)

        assert await env.score(env.questions[0], reply) == score
        assert await env.score(env.questions[1], "<answer>No, in no case</answer>") == 1.0


async def test_any_correct_option_of_agieval_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"query": "q", "choices": ["(A) first (B)", "(B)second", "third"], "gold": [0, 2]}
    question = CHOICE_SOURCES["agieval"].read(row)
    async with ScriptedEngine([]) as engine:
        env = await ready(AGIEvalEnv, engine, monkeypatch)
        scores = [await env.score(question, f"<answer>{letter}</answer>") for letter in "ABC"]

    assert (question.choices, question.gold) == (("first (B)", "second", "third"), "AC")
    assert scores == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("boolq", {"passage": "p", "question": "q", "answer": "perhaps"}, "neither yes nor no"),
        (
            "musr",
            {"narrative": "n", "question": "q", "choices": "['a', ", "answer_index": 0},
            "are not a list",
        ),
        ("siqa", {"answerA": "a", "answerB": "b", "answerC": "c", "label": "0"}, "not one of its"),
        ("winogrande", {"option1": "a", "option2": "b", "answer": "3"}, "not one of its 2"),
    ],
)
def test_row_with_an_answer_beyond_its_options_is_refused(
    name: str, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CHOICE_SOURCES[name].read(row)


@pytest.mark.parametrize(("label", "letter"), [("1", "A"), (3, "C")])
def test_labels_of_social_iqa_start_at_one(label: Any, letter: str) -> None:
    row = {"context": "c", "question": "q", "answerA": "a", "answerB": "b", "answerC": "c"}

    assert CHOICE_SOURCES["siqa"].read({**row, "label": label}).gold == letter


async def test_hub_without_a_column_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluations, "hub_rows", lambda *_, **__: [{"question": "q"}])
    async with ScriptedEngine([]) as engine:
        with pytest.raises(ConfigError, match="openai/gsm8k on the hub has no answer"):
            await ready(GSM8KEvalEnv, engine, monkeypatch, dataset_path=None)


async def test_unreadable_row_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "q", "choices": ["a", "b"], "answer": 5}) + "\n")
    async with ScriptedEngine([]) as engine:
        with pytest.raises(ConfigError, match=r"row 0 is not a question of MMLUEvalEnv.*answer 5"):
            await ready(MMLUEvalEnv, engine, monkeypatch, dataset_path=str(path))


async def test_answer_of_another_type_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": 72}) + "\n")
    async with ScriptedEngine([]) as engine:
        with pytest.raises(ConfigError, match="row 0 is not a question of GSM8KEvalEnv"):
            await ready(GSM8KEvalEnv, engine, monkeypatch, dataset_path=str(path))


def test_missing_file_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(ConfigError, match=r"expected one of test\.jsonl"):
        MMLUEvalEnv.check_inputs(MMLUEvalEnv.env_config_cls(dataset_path=str(tmp_path / "empty")))
    with pytest.raises(ConfigError, match="no data file"):
        MMLUEvalEnv.check_inputs(
            MMLUEvalEnv.env_config_cls(dataset_path=str(tmp_path / "missing.jsonl"))
        )


@pytest.mark.parametrize(("gold", "letter"), [("1", "A"), ("4", "D"), (2, "B"), ("3 ", "C")])
def test_labels_of_options_are_numbers_from_one(gold: Any, letter: str) -> None:
    choices = {"text": ["w", "x", "y", "z"], "label": ["1", "2", "3", "4"]}
    read = CHOICE_SOURCES["arc"].read

    assert read({"question": "q", "choices": choices, "answerKey": gold}).gold == letter


@pytest.mark.parametrize(("gold", "letter"), [(0, "A"), ("1", "B"), ("c", "C"), ("D", "D")])
def test_gold_is_an_index_or_a_letter(gold: Any, letter: str) -> None:
    columns = ChoiceColumns(question=("q",), choices="c", gold="g")

    assert columns({"q": "?", "c": list("wxyz"), "g": gold}).gold == letter


@pytest.mark.parametrize("gold", [4, -1, "E", "", None, True])
def test_gold_beyond_the_options_is_refused(gold: Any) -> None:
    columns = ChoiceColumns(question=("q",), choices="c", gold="g")

    with pytest.raises(ConfigError, match="is not one of its 4 options"):
        columns({"q": "?", "c": list("wxyz"), "g": gold})


def test_options_are_shuffled_by_seed_and_question() -> None:
    question = EvalQuestion("q", "A", choices=("right", "b", "c", "d"))
    orders = {seed: shuffled_choices(question, seed) for seed in range(20)}

    assert shuffled_choices(question, 3) == orders[3]
    assert len({each.gold for each in orders.values()}) == 4
    assert all(each.choices["ABCD".index(each.gold)] == "right" for each in orders.values())
    assert choice_text(question) == "q\n\nA. right\nB. b\nC. c\nD. d"


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("CORRECT", "CORRECT"),
        ("<think>CORRECT?</think> incorrect.", "INCORRECT"),
        ("NOT ATTEMPTED", "NOT_ATTEMPTED"),
        ("CORRECT or INCORRECT", None),
        ("The answer is not correct.", "INCORRECT"),
        ("It isn't correct: INCORRECT", "INCORRECT"),
        ("not attempted", "NOT_ATTEMPTED"),
        ("", None),
    ],
)
def test_verdict_of_the_judge(reply: str, verdict: str | None) -> None:
    assert read_verdict_word(reply) == verdict


async def test_judge_decides_what_is_correct(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verdicts = iter(["CORRECT", "CORRECT", "INCORRECT", "NOT_ATTEMPTED", "CORRECT"])

    def reply(prompt: str) -> str:
        if "Reply with one word" in prompt:
            return next(verdicts)
        return "no tag" if "Mongolia" in prompt else "<answer>something</answer>"

    metrics, samples = await evaluated(
        SimpleQAEvalEnv, reply, monkeypatch, tmp_path, use_llm_judge=True
    )

    assert len(samples) == 6
    assert metrics["eval/judge_accuracy"] == 3 / 6
    assert metrics["eval/not_attempted_rate"] == pytest.approx(2 / 6)
    assert metrics["eval/accuracy_if_attempted"] == pytest.approx(3 / 4)
    assert metrics["eval/exact_match_accuracy"] == 0.0


async def test_judge_has_a_server_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        ScriptedEngine(["<answer>1969</answer>"]) as engine,
        ScriptedEngine(["CORRECT"], model="judge") as judge,
    ):
        settings = {"judge_base_url": judge.base_url, "judge_model_name": "judge"}
        env = await ready(SimpleQAEvalEnv, engine, monkeypatch, use_llm_judge=True, **settings)
        record = await env.evaluate_item(env.questions[1])
        await env.close()
        await env.server.close()
        counts = [len(each.requests) for each in (engine, judge)]

    assert counts == [1, 1]
    assert record["values"]["eval/judge_accuracy"] == 1.0
    with pytest.raises(ConfigError, match="judge_base_url"):
        SimpleQAEvalEnv.check_inputs(SimpleQAEvalEnv.env_config_cls(judge_model_name="judge"))


async def test_instruction_about_a_language_needs_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)
    row = {"prompt": "q", "instruction_id_list": ["language:response_language"]}
    (tmp_path / "test.jsonl").write_text(json.dumps({**row, "kwargs": [{"language": "de"}]}))
    async with ScriptedEngine([]) as engine:
        with pytest.raises(MissingExtraError, match=r"\[instructions\]"):
            await ready(IFEvalEnv, engine, monkeypatch, dataset_path=str(tmp_path))


async def test_reasoning_in_a_field_counts_as_thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    def message(_: dict[str, Any]) -> Mapping[str, Any]:
        return {"content": "<answer>B</answer>", "reasoning_content": "because"}

    async with ScriptedEngine(messages=message) as engine:
        env = await ready(ARCEvalEnv, engine, monkeypatch)
        record = await env.evaluate_item(env.questions[0])
        await env.server.close()

    assert (record["has_thinking"], record["reasoning"]) == (True, "because")
