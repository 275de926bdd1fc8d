"""A run logs every metric that `docs/trainer_metrics.md` names, to every place, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import example_trainer
from example_trainer.model import create_optimizer
from example_trainer.run_log import open_run_log
from example_trainer.training import Trainer
from tests.trainer.test_training import RecordingSync, ScriptedFeed
from tests.trainer.tiny import SavedTokenizer, group, tiny_config, tiny_llama

PAGE = Path(example_trainer.__file__).parents[1] / "docs" / "trainer_metrics.md"
ON_GPUS = {"train/mfu", "train/gpu_memory_gb", "train/gpu_memory_reserved_gb"}
_NAME = re.compile(r"`([a-z]+/\w+)`")

TOKENS = 5  # of each trajectory: three of the prompt, two more


def groups_with_everything():
    """A policy group, and one with a demonstration and a teacher."""
    choices = [[[4, 5]] * TOKENS] * 2
    return [
        group(
            [[7, 8], [9, 9]],
            [1.0, 0.0],
            logprob=-3.0,
            ref_logprobs=[[-3.0] * TOKENS] * 2,
            policy_version=0,
            generation_params={"max_tokens": 2, "temperature": 0.5},
        ),
        group(
            [[7, 8], [9, 9]],
            [1.0, 0.0],
            logprob=-3.0,
            ref_logprobs=[[-3.0] * TOKENS] * 2,
            overrides=[{"sft": True}, {}],
            distill_token_ids=choices,
            distill_logprobs=[[[-0.5, -3.0]] * TOKENS] * 2,
        ),
    ]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """The metrics of a run of two steps that uses every part of the loss."""
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("run")
    config = tiny_config(
        folder,
        training_steps=2,
        kl_coef=0.1,
        distill_coef=0.5,
        max_token_staleness=1,
        num_iterations=2,
        entropy_coef=0.01,
        use_tensorboard=True,
    )
    model = tiny_llama()
    run_log = open_run_log(config, run_id="run")
    trainer = Trainer(
        config,
        model=model,
        tokenizer=SavedTokenizer(),
        optimizer=create_optimizer(model, config),
        feed=ScriptedFeed(groups_with_everything()),
        weight_sync=RecordingSync(),
        run_log=run_log,
    )
    trainer.run()
    run_log.finish()
    return folder / "saves"


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_named_metric_is_logged_and_every_logged_one_is_named(run_folder):
    named = set(_NAME.findall(PAGE.read_text(encoding="utf-8")))
    at_the_end = {name for name in named if name.startswith("benchmark/")}

    for line in lines_of(run_folder):
        assert line.keys() - {"step", "time"} == named - at_the_end - ON_GPUS


def test_event_files_hold_what_the_lines_hold(run_folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_folder / "tensorboard")).Reload()

    lines = lines_of(run_folder)
    assert set(events.Tags()["scalars"]) == lines[0].keys() - {"step", "time"}
    for name in events.Tags()["scalars"]:
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == {line["step"]: pytest.approx(line[name], rel=1e-6) for line in lines}


def test_advantages_are_those_of_the_tokens_the_policy_loss_trains(run_folder):
    # Scores 1 and 0 are advantages 1 and -1. In a group with a demonstration the score 0 is the
    # only one, and its advantage is 0. Two tokens each.
    first = lines_of(run_folder)[0]

    assert first["train/advantage_mean"] == pytest.approx(0.0)
    assert first["train/advantage_std"] == pytest.approx((4 / 6) ** 0.5)
    assert first["train/truncation_rate"] == 0.5
    assert first["train/staleness_unknown_fraction"] == 0.5
