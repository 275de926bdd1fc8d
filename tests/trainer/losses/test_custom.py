"""Losses and advantages of the user's own, named by `loss_fn` and `advantage_fn`."""

from __future__ import annotations

import argparse

import pytest
import torch
from pydantic import ValidationError

from atroposlib.errors import ConfigError, GroupError
from atroposlib.utils.imports import import_object
from example_trainer.cli import config_from_args, create_full_parser, parse_arguments
from example_trainer.config import TrainingConfig
from example_trainer.custom import require_custom_functions
from example_trainer.launch.trainer_flags import add_trainer_flags, typed_trainer_flags
from example_trainer.loss import CustomLoss, make_loss
from example_trainer.rows import AdvantageFunctionError, RowRules, rows_from_group
from example_trainer.training import row_rules
from tests.trainer.test_training import PREFERRED, REJECTED, make_trainer, probability
from tests.trainer.tiny import group

SCRIPT = """
import numpy as np
import torch

from example_trainer.loss import PolicyInputs, PolicyTerms, sequence_sums_BT


def policy_gradient(inputs: PolicyInputs, scale: float = 1.0):
    return -scale * inputs.advantages_BT * inputs.ratio_BT


def bounded(inputs):
    ratio = inputs.ratio_BT
    return PolicyTerms(-inputs.advantages_BT * ratio.clamp(0.5, 2), ratio, ratio > 2)


def sequence_mean(inputs):
    mask = inputs.mask_BT.float()
    lengths = sequence_sums_BT(mask, inputs.sequence_ids_BT).clamp(min=1)
    return policy_gradient(inputs) / lengths


def row_mean(inputs):
    return policy_gradient(inputs) / inputs.mask_BT.sum(dim=1, keepdim=True)


def batch_mean(inputs):
    return policy_gradient(inputs) - policy_gradient(inputs).mean()


def mean(inputs):
    return policy_gradient(inputs).mean()


def constant(inputs):
    return policy_gradient(inputs).detach()


def infinite(inputs):
    return policy_gradient(inputs) / 0


def in_place(inputs):
    inputs.advantages_BT.mul_(2)
    return policy_gradient(inputs)


def in_place_mask(inputs):
    inputs.mask_BT.zero_()
    return policy_gradient(inputs)


def other_ratio(inputs):
    return PolicyTerms(policy_gradient(inputs), inputs.ratio_BT[:, 1:], inputs.mask_BT)


def complex_valued(inputs):
    return policy_gradient(inputs).to(torch.complex64)


def misspelled(inputs):
    return inputs.advantage_BT


class Loss:
    pass


def winner(group, loser=0.0):
    best = max(group.scores)
    return np.array([1.0 if score == best else loser for score in group.scores])


def by_token(group):
    tokens = [group.group["tokens"][i] for i in group.indices]
    return [[score / n] * len(ids) for score, n, ids in zip(group.scores, group.lengths, tokens)]


def first_only(group):
    return group.scores[:1]


def nothing(group):
    pass


def emptied(group):
    group.group["scores"].clear()
    return [0.0, 1.0, 2.0]
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "own_functions.py"
    path.write_text(SCRIPT)
    return path


def settings(**changes):
    return TrainingConfig(model_name="m", device="cpu", **changes)


def test_loss_of_the_user_learns_as_the_built_in_loss_of_the_same_formula(tmp_path, script):
    changes = {"training_steps": 4, "ratio_anchor": "inference", "advantage_std": "none"}
    own = make_trainer(tmp_path / "own", loss_fn=f"{script}:policy_gradient", **changes)
    built_in = make_trainer(tmp_path / "other", algorithm="importance_sampling", **changes)
    before = [probability(own.model, token) for token in (PREFERRED, REJECTED)]

    own.run()
    built_in.run()

    weights, others = own.model.state_dict(), built_in.model.state_dict()
    assert all(torch.equal(weights[name], others[name]) for name in others)
    assert probability(own.model, PREFERRED) > before[0]
    assert probability(own.model, REJECTED) < before[1]


def test_flags_name_the_functions_with_their_arguments(script):
    arguments = create_full_parser().parse_args(
        ["--model", "m", "--loss-fn", f"{script}:policy_gradient", "--loss-fn-args", '{"scale": 2}']
    )

    loss = make_loss(config_from_args(arguments))

    assert isinstance(loss.algorithm, CustomLoss)
    assert loss.reduction == "token_mean"
    assert loss.algorithm.function.keywords == {"scale": 2}


def test_file_is_found_from_the_folder_of_a_run(script, monkeypatch):
    monkeypatch.chdir(script.parent)
    parser = argparse.ArgumentParser()
    add_trainer_flags(parser)
    words = ["--trainer.advantage-fn", f"{script.name}:winner"]
    words += ["--trainer.advantage-fn-args", '{"loser": -1}']

    flags = typed_trainer_flags(parser.parse_args(words))

    assert flags == (f"--advantage-fn={script}:winner", '--advantage-fn-args={"loser": -1}')


def test_other_terms_of_the_loss_are_not_blamed_on_the_function(script):
    coefs = {"policy_coef": 1e300, "entropy_coef": 1e300}

    require_custom_functions(settings(loss_fn=f"{script}:policy_gradient", **coefs))


def test_module_on_the_path_needs_no_file(script, monkeypatch):
    monkeypatch.syspath_prepend(script.parent)

    require_custom_functions(settings(loss_fn="own_functions:policy_gradient"))


@pytest.mark.parametrize("name", ["policy_gradient", "bounded", "sequence_mean"])
@pytest.mark.parametrize("anchor", ["trainer", "inference"])
@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sum"])
def test_losses_per_sequence_pass_the_check(script, name, anchor, reduction):
    config = settings(
        loss_fn=f"{script}:{name}", ratio_anchor=anchor, loss_reduction=reduction, kl_coef=0.1
    )

    require_custom_functions(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("row_mean", "differs between padded and packed in one row"),
        ("batch_mean", "differs between padded and in two microbatches"),
        ("mean", r"expected the loss of every token, shape \(2, 5\); got shape \(\)"),
        ("constant", "has no gradient"),
        ("infinite", "is not finite"),
        ("misspelled", r"AttributeError in line \d+: 'PolicyInputs' object has no attribute"),
        ("in_place", "changes its inputs in place"),
        ("in_place_mask", "changes its inputs in place"),
        ("other_ratio", r"expected the ratio of every token, shape \(2, 5\); got shape \(2, 4\)"),
        ("complex_valued", "gradient: RuntimeError: "),
        ("Loss", "is not a function"),
        ("polic_gradient", "has no 'polic_gradient'; did you mean policy_gradient"),
    ],
)
def test_losses_that_cannot_train_are_refused_before_the_run(script, name, message):
    with pytest.raises(ConfigError, match=f"--loss-fn: .*{message}"):
        require_custom_functions(settings(loss_fn=f"{script}:{name}"))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("own_loss", "expected FILE.py:NAME or MODULE:NAME"),
        ("no_such_module:loss", "No module named 'no_such_module'"),
        ("/no/such/file.py:loss", "there is no file /no/such/file.py"),
        ("torch:relu", "no signature found for builtin .*; it is called with one value"),
    ],
)
def test_loss_that_is_not_there_is_named(target, message):
    with pytest.raises(ConfigError, match=f"--loss-fn: .*{message}"):
        require_custom_functions(settings(loss_fn=target))


@pytest.mark.parametrize(
    "text",
    [
        "def loss(inputs):\n    return (\n",
        "x = 1\nx.missing\n",
        "import json\njson.loads('{')\n",
        "import sys\nsys.exit()\n",
    ],
)
def test_script_that_cannot_be_imported_is_named_with_the_line(tmp_path, text):
    path = tmp_path / "broken_functions.py"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"broken_functions.py:loss: \w+ in line 2: "):
        require_custom_functions(settings(loss_fn=f"{path}:loss"))


def test_script_with_the_name_of_a_module_that_others_import_is_refused(tmp_path):
    path = tmp_path / "random.py"
    path.write_text(SCRIPT)

    with pytest.raises(ConfigError, match="has the name of the module random"):
        require_custom_functions(settings(loss_fn=f"{path}:policy_gradient"))


def test_functions_of_one_script_share_its_state(tmp_path):
    path = tmp_path / "shared_functions.py"
    path.write_text("seen = []\ndef loss(inputs):\n    return seen\ndef advantages(group): pass\n")

    loss, advantages = (import_object(f"{path}:{name}") for name in ("loss", "advantages"))

    assert loss.__globals__ is advantages.__globals__


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[" * 100_000, "[1]"])
def test_arguments_that_are_not_an_object_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        parse_arguments(text)


def test_arguments_that_the_function_does_not_take_are_refused(script):
    config = settings(loss_fn=f"{script}:policy_gradient", loss_fn_args={"scal": 2})

    with pytest.raises(ConfigError, match="unexpected keyword argument 'scal'"):
        require_custom_functions(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_fn_args": {"scale": 2}}, "loss_fn_args has no effect without loss_fn"),
        ({"advantage_fn_args": {"loser": 2}}, "has no effect without advantage_fn"),
        ({"loss_fn": "a:b", "algorithm": "grpo"}, "are two policy losses"),
        ({"loss_fn": "a:b", "clip_eps": 0.3}, "loss_fn has no clip"),
        ({"loss_fn": "a:b", "policy_coef": 0}, "no effect with policy_coef=0"),
        ({"advantage_fn": "a:b", "policy_coef": 0}, "no effect with policy_coef=0"),
        ({"advantage_fn": "a:b", "advantage_std": "none"}, "no effect with advantage_fn"),
    ],
)
def test_settings_without_an_effect_are_refused(changes, message):
    with pytest.raises((ConfigError, ValidationError), match=message):
        settings(**changes)


def rules(target, **arguments):
    return row_rules(settings(advantage_fn=target, advantage_fn_args=arguments, seq_len=16))


def test_advantages_of_the_user_are_those_of_the_rows(script):
    sampled = group([[7, 8], [9]], [0.25, 0.5])

    rows = rows_from_group(sampled, rules(f"{script}:winner", loser=-2.0))
    by_token = rows_from_group(sampled, rules(f"{script}:by_token"))

    assert [row.advantages for row in rows] == [[-2.0] * 5, [1.0] * 4]
    assert [row.advantages for row in by_token] == [[0.125] * 5, [0.5] * 4]


def test_advantage_function_does_not_see_demonstrations(script):
    shown = group([[7], [8], [9]], [5.0, 1.0, 2.0], overrides=[{"sft": True}, {}, {}])

    rows = rows_from_group(shown, rules(f"{script}:winner"))

    assert [row.advantages[0] for row in rows] == [0.0, 0.0, 1.0]


def test_advantages_of_the_group_have_precedence(script):
    given = group([[7], [8]], [1.0, 0.0], advantages=[3.0, 4.0])

    rows = rows_from_group(given, rules(f"{script}:winner"))

    assert [row.advantages[0] for row in rows] == [3.0, 4.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("first_only", "1 advantages for 3 trajectories"),
        ("nothing", "expected a list of advantages; got None"),
        ("emptied", "changes the group that it is called with"),
    ],
)
def test_advantage_functions_that_cannot_train_are_refused_before_the_run(script, name, message):
    with pytest.raises(ConfigError, match=f"--advantage-fn: .*{message}"):
        require_custom_functions(settings(advantage_fn=f"{script}:{name}"))


def test_advantages_that_no_group_can_have_end_the_run(tmp_path, script):
    names = {"short": "first_only", "none": "nothing"}
    for folder, name in names.items():
        trainer = make_trainer(tmp_path / folder, advantage_fn=f"{script}:{name}")
        trainer._has_trained = True

        with pytest.raises(AdvantageFunctionError, match="advantage_fn: "):
            trainer.run()


def test_advantages_that_are_not_finite_refuse_their_group_only():
    wrong = RowRules(seq_len=16, advantage_fn=lambda given: [float("inf")] * len(given.scores))

    with pytest.raises(GroupError, match=r"advantages\[0\]"):
        rows_from_group(group([[7], [8]], [1.0, 0.0]), wrong)
