"""Which loss the settings mean, and which settings exclude each other."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from atroposlib.errors import ConfigError
from example_trainer.config import TrainingConfig
from example_trainer.loss import (
    CORRECTION_CLASSES,
    POLICY_LOSSES,
    Cispo,
    Dapo,
    DualClip,
    GeometricMask,
    Grpo,
    Gspo,
    ImportanceSampling,
    SequenceMask,
    TokenMask,
    TokenTruncation,
    TrainingLoss,
    make_loss,
)
from example_trainer.loss_choice import (
    ALGORITHMS,
    CORRECTIONS,
    AlgorithmName,
    CorrectionName,
)

README = Path(__file__).parents[3] / "example_trainer" / "README.md"


def settings(**changes):
    return TrainingConfig(model_name="m", device="cpu", **changes)


def test_registry_has_a_row_for_every_name_the_flag_takes():
    assert tuple(ALGORITHMS) == tuple(POLICY_LOSSES) == get_args(AlgorithmName)
    assert tuple(CORRECTIONS) == tuple(CORRECTION_CLASSES) == get_args(CorrectionName)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_says_where_it_is_from_what_it_computes_and_how_it_differs(name):
    docstring = POLICY_LOSSES[name].__doc__

    for heading in ("Formula:", "Denominator:", "Differs"):
        assert heading in docstring
    assert "Paper:" in docstring or "Source:" in docstring


@pytest.mark.parametrize("name", ALGORITHMS)
def test_readme_has_the_row_of_every_algorithm(name):
    row = ALGORITHMS[name]

    lines = [line for line in README.read_text().splitlines() if line.startswith(f"| `{name}`")]

    assert len(lines) == 1
    assert f"`{row.reduction}`" in lines[0]
    assert f"| {row.anchors[0]} |" in lines[0]


def test_default_is_dapo_with_truncated_importance_sampling():
    loss = make_loss(settings())

    assert loss == TrainingLoss(
        Dapo(0.2, 0.28), correction=TokenTruncation(2.0), reduction="token_mean", horizon=2048
    )


@pytest.mark.parametrize(
    ("changes", "algorithm", "reduction", "anchor"),
    [
        ({"algorithm": "grpo"}, Grpo(0.2, 0.2), "sequence_mean", "trainer"),
        ({"algorithm": "gspo", "clip_eps": 3e-4}, Gspo(3e-4, 3e-4), "sequence_mean", "trainer"),
        ({"algorithm": "cispo", "clip_eps": 1}, Cispo(1.0, 0.28), "token_mean", "trainer"),
        ({"algorithm": "dual_clip", "dual_clip": 2}, DualClip(0.2, 0.2, 2.0), "token_mean", None),
        ({"algorithm": "importance_sampling"}, ImportanceSampling(), "token_mean", "inference"),
        ({"clip_eps_high": 0.4, "loss_reduction": "sum"}, Dapo(0.2, 0.4), "sum", "trainer"),
    ],
)
def test_settings_become_an_algorithm_with_its_own_defaults(changes, algorithm, reduction, anchor):
    loss = make_loss(settings(**changes))

    assert loss.algorithm == algorithm
    assert loss.reduction == reduction
    assert loss.anchor == (anchor or "trainer")
    assert (loss.correction is None) == (loss.anchor == "inference")


@pytest.mark.parametrize(
    ("changes", "correction"),
    [
        ({"importance_correction": "none"}, None),
        ({"importance_cap": 3.0}, TokenTruncation(3.0)),
        ({"importance_floor": 0.25}, TokenMask(5.0, 0.25)),
        ({"importance_correction": "sequence_mask"}, SequenceMask(3.0, 0.0)),
        ({"importance_correction": "geometric_mask"}, GeometricMask(1.01, 0.99)),
        ({"ratio_anchor": "inference"}, None),
    ],
)
def test_settings_become_a_correction_with_its_own_bounds(changes, correction):
    assert make_loss(settings(**changes)).correction == correction


@pytest.mark.parametrize("algorithm", ["dr_grpo", "dppo", "ipo", "importance_sampling"])
def test_algorithms_that_only_centre_scores_do_not_divide_them(algorithm):
    assert settings(algorithm=algorithm).loss_choice.advantage_std == "none"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio_anchor": "inference", "importance_cap": 2.0}, "count that mismatch twice"),
        (
            {"ratio_anchor": "inference", "importance_correction": "sequence_mask"},
            "count that mismatch twice",
        ),
        ({"algorithm": "dppo", "importance_correction": "token_mask"}, "mismatch twice"),
        ({"algorithm": "dppo", "ratio_anchor": "trainer"}, "leave ratio_anchor at auto"),
        ({"importance_correction": "none", "importance_cap": 2.0}, "without a correction"),
        ({"importance_correction": "token_truncate", "importance_floor": 0.5}, "no lower bound"),
        ({"importance_floor": 2.0, "importance_cap": 2.0}, "must be below importance_cap"),
        ({"policy_coef": 0.0, "sft_coef": 0.0}, "nothing is trained"),
        ({"overlong_buffer_tokens": 4}, "needs overlong_max_tokens"),
        ({"overlong_buffer_tokens": 4, "overlong_max_tokens": 4}, "must be below"),
    ],
)
def test_contradicting_settings_are_refused_with_an_explanation(changes, message):
    with pytest.raises(ValidationError, match=message):
        settings(**changes)


def test_loss_object_refuses_the_double_count_too():
    with pytest.raises(ConfigError, match="count that mismatch twice"):
        TrainingLoss(Grpo(), anchor="inference", correction=TokenTruncation())
