"""Every field of a group changes the gradient, is refused by name, or is known to carry none."""

from __future__ import annotations

import pytest
import torch

from atroposlib.errors import GroupError
from atroposlib.scored_data import GROUP_FIELDS
from example_trainer.batch import build_batch
from example_trainer.training import row_rules
from tests.trainer.test_training import make_trainer
from tests.trainer.tiny import group, tiny_llama

pytestmark = pytest.mark.slow

L = 5  # tokens of each trajectory
CHANGES = {
    "tokens": [[1, 2, 9, 7, 8], [1, 2, 9, 9, 9]],
    "masks": [[-100, -100, -100, -100, 8], [-100, -100, -100, 9, 9]],
    "scores": [0.0, 1.0],
    "advantages": [[0.3] * L, [0.1] * L],
    "ref_logprobs": [[-2.0] * L] * 2,
    "generation_params": {"temperature": 0.5},
    "inference_logprobs": [[1.0, 1.0, 1.0, -0.1, -0.2], [1.0, 1.0, 1.0, -0.3, -0.4]],
    "overrides": [{"set_advantage_to_zero": True}, {}],
    "group_overrides": {"temperature": 0.5},
    "distill_token_ids": [[[3]] * L] * 2,
    "distill_logprobs": [[[-0.2]] * L] * 2,
}
WITHOUT_GRADIENT = {"messages": [[{"role": "user", "content": "x"}]] * 2, "env_id": 3}
NOTES = {field.name for field in GROUP_FIELDS if field.is_note}
REFUSED = {"images": [["data:image/png;base64,AA=="]] * 2}
SETTINGS = {
    "ref_logprobs": {"kl_coef": 0.5},
    "distill_token_ids": {"distill_coef": 0.5},
    "distill_logprobs": {"distill_coef": 0.5},
}
COMPANIONS = {
    "distill_token_ids": {"distill_logprobs": [[[-0.5]] * L] * 2},
    "distill_logprobs": {"distill_token_ids": [[[4]] * L] * 2},
}


def plain_group(**extra):
    return group([[7, 8], [9, 9]], [1.0, 0.0], prompt=(1, 2, 3), **extra)


def gradient(tmp_path, given, *, packing="on", **settings):
    model = tiny_llama(dtype=torch.float64)
    trainer = make_trainer(
        tmp_path, model=model, logprobs_mode="processed", packing=packing, **settings
    )
    batch = build_batch(
        [given], row_rules(trainer.config), microbatch_size=2, packs=packing == "on"
    )
    found = []
    trainer._optimizer.step = lambda: found.extend(p.grad.clone() for p in model.parameters())
    trainer.train_on(batch)
    return torch.cat([g.flatten() for g in found])


def test_every_field_of_the_wire_is_in_one_of_the_three_lists():
    assert {field.name for field in GROUP_FIELDS} == {
        *CHANGES,
        *WITHOUT_GRADIENT,
        *REFUSED,
        *NOTES,
    }


@pytest.mark.parametrize("packing", ["on", "off"])
@pytest.mark.parametrize("name", CHANGES)
def test_field_changes_the_gradient(tmp_path, name, packing):
    settings = {"packing": packing, **SETTINGS.get(name, {})}
    before = dict(COMPANIONS.get(name, {}))
    if name in SETTINGS:
        before[name] = [[[5]] * L] * 2 if name == "distill_token_ids" else [[-9.0] * L] * 2
    if name == "distill_logprobs":
        # One choice is certain whatever its logprob: two, in another proportion.
        before = {"distill_token_ids": [[[4, 5]] * L] * 2, name: [[[-0.5, -3.0]] * L] * 2}
        after = {**before, name: [[[-3.0, -0.5]] * L] * 2}
    else:
        after = {**before, name: CHANGES[name]}

    one = gradient(tmp_path, {**plain_group(), **before}, **settings)
    other = gradient(tmp_path, {**plain_group(), **after}, **settings)

    assert (one - other).abs().max() > 1e-6


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_field_that_says_nothing_about_training_leaves_the_gradient(tmp_path, name):
    one = gradient(tmp_path, plain_group())
    other = gradient(tmp_path, plain_group() | {name: WITHOUT_GRADIENT[name]})

    assert torch.equal(one, other)


@pytest.mark.parametrize("name", [*REFUSED, *SETTINGS])
def test_field_the_settings_have_no_use_for_is_refused_by_name(tmp_path, name):
    value = REFUSED.get(name, CHANGES.get(name))

    with pytest.raises(GroupError, match=f"group 0: {name}"):
        gradient(tmp_path, plain_group() | {name: value})


def test_unknown_field_is_named_once(tmp_path, caplog):
    given = plain_group(token_weights=[[1.0] * L] * 2, policy_version=3)
    trainer = make_trainer(tmp_path, groups=[given], training_steps=3)

    trainer.run()

    notes = [r.message for r in caplog.records if "does not read" in r.message]
    assert notes == ["groups have a field 'token_weights', which this trainer does not read"]


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logits_are_divided_by_the_temperature_whatever_the_engine_reports(tmp_path, mode):
    trainer = make_trainer(tmp_path, logprobs_mode=mode)
    batches = [
        build_batch([given], row_rules(trainer.config), microbatch_size=2)
        for given in (plain_group(), plain_group(generation_params={"temperature": 0.5}))
    ]

    first, second = (trainer._scorer(b.microbatches[0]) for b in batches)

    assert first.untempered_BT is None
    torch.testing.assert_close(second.untempered_BT, first.logprobs_BT.detach())
    assert not torch.allclose(first.logprobs_BT, second.logprobs_BT)
