"""A trainer killed with SIGKILL and resumed ends with the weights of an undisturbed one."""

from __future__ import annotations

import pytest

from tests.trainer.kill_supervisor import Supervisor, save_model_with_dropout


def compare(tmp_path, *, kills, steps, span_s, seed):
    """Run twice, once disturbed; every batch is trained once and acknowledged."""
    save_model_with_dropout(tmp_path / "model")
    whole = Supervisor(tmp_path / "whole", tmp_path / "model", steps=steps).run()
    broken = Supervisor(tmp_path / "broken", tmp_path / "model", steps=steps).run(
        kills=kills, span_s=span_s, seed=seed
    )

    print(f"killed {broken.kills} times, lines of metrics then: {broken.steps_at_kill}")
    assert broken.kills == kills
    assert broken.final_model == whole.final_model
    assert broken.logged_steps == whole.logged_steps == list(range(1, steps + 1))
    assert (broken.service_step, broken.queue_groups) == (steps, 0)
    assert (whole.service_step, whole.queue_groups) == (steps, 0)


@pytest.mark.slow
@pytest.mark.long
def test_trainer_killed_twice_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    compare(tmp_path, kills=2, steps=40, span_s=0.3, seed=2)


@pytest.mark.long
def test_trainer_killed_twenty_times_ends_with_the_weights_of_an_undisturbed_one(tmp_path):
    compare(tmp_path, kills=20, steps=400, span_s=0.8, seed=1)
