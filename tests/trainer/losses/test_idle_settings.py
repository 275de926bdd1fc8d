"""Settings with nothing to act on are refused: a run would not do what its flags say."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from example_trainer.config import TrainingConfig
from example_trainer.loss import make_loss


def settings(**changes):
    return TrainingConfig(model_name="m", device="cpu", **changes)


@pytest.mark.parametrize("algorithm", ["dppo", "ipo", "importance_sampling"])
@pytest.mark.parametrize("clip", [{"clip_eps": 0.1}, {"clip_eps_high": 0.28}])
def test_clip_of_an_algorithm_without_one_is_refused(algorithm, clip):
    with pytest.raises(ValidationError, match=f"{algorithm} has no clip"):
        settings(algorithm=algorithm, **clip)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dual_clip": 2.0}, "needs algorithm=dual_clip, this is dapo"),
        ({"loss_horizon": 512}, "needs loss_reduction=dr_grpo, this is token_mean"),
        (
            {"algorithm": "dr_grpo", "loss_reduction": "sum", "loss_horizon": 512},
            "needs loss_reduction=dr_grpo, this is sum",
        ),
    ],
)
def test_bound_of_another_algorithm_or_reduction_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        settings(**changes)


def test_horizon_acts_where_the_reduction_is_chosen_by_hand():
    loss = make_loss(settings(algorithm="grpo", loss_reduction="dr_grpo", loss_horizon=512))

    assert (loss.reduction, loss.horizon) == ("dr_grpo", 512)
