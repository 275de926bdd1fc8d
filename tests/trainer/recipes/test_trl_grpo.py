"""TRL's trainer on groups of a real service: what it is handed, and that it learns from it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest

from atroposlib.api.client import LeasedBatch
from atroposlib.errors import ConfigError, GroupError
from example_trainer.recipes.trl_grpo import (
    ServiceRollouts,
    main,
    rollouts_of,
    service_reward,
)
from tests.api.test_run_api import running, wait_until_up
from tests.trainer.tiny import group, save_tiny_model

PREFERRED, REJECTED = 7, 8


def trl(**changes):
    fields = {
        "accelerator": SimpleNamespace(num_processes=1),
        "num_generations": 2,
        "temperature": 1.0,
        "add_callback": lambda callback: None,
        **changes,
    }
    return SimpleNamespace(**fields)


def test_rollouts_are_split_where_training_begins_and_keep_what_the_environment_wrote_apart():
    two_turns = {
        "tokens": [[1, 2, 7, 3, 8]],
        "masks": [[-100, -100, 7, -100, 8]],
        "scores": [0.5],
        "inference_logprobs": [[1.0, 1.0, -0.25, 1.0, -0.5]],
    }

    (found,) = rollouts_of(two_turns, size=1, temperature=1.0)

    assert found == {
        "prompt_ids": [1, 2],
        "completion_ids": [7, 3, 8],
        "logprobs": [-0.25, 0.0, -0.5],
        "env_mask": [1, 0, 1],
        "score": 0.5,
    }


def test_completion_with_an_unknown_logprob_has_none():
    group = {
        "tokens": [[1, 2, 7, 8], [1, 2, 9]],
        "masks": [[-100, -100, 7, 8], [-100, -100, 9]],
        "scores": [1.0, 0.0],
        "inference_logprobs": [[1.0, 1.0, -0.25, 1.0], [1.0, 1.0, -0.5]],
    }

    first, second = rollouts_of(group, size=2, temperature=1.0)

    assert (first["logprobs"], second["logprobs"]) == (None, [-0.5])


@pytest.mark.parametrize(
    ("extra", "error", "word"),
    [
        ({"advantages": [[1.0] * 4] * 2}, GroupError, "advantages"),
        ({"images": ["x"]}, GroupError, "images"),
        ({"overrides": [{}, {"set_advantage_to_zero": True}]}, GroupError, r"overrides\[1\]"),
        ({"group_overrides": {"sft": True}}, GroupError, "sft"),
        ({"generation_params": {"temperature": 0.5}}, ConfigError, "temperature 0.5"),
        ({"masks": [[-100] * 4] * 2}, GroupError, "trained token"),
        ({"tokenized_from_text": True}, ConfigError, "--allow-tokenized-from-text"),
    ],
)
def test_what_trl_has_no_place_for_is_refused_by_name(extra, error, word):
    with pytest.raises(error, match=word):
        rollouts_of(group([[7], [8]], [1.0, 0.0], **extra), size=2, temperature=1.0)


def test_tokens_made_from_text_are_taken_where_that_is_allowed():
    taken = rollouts_of(
        group([[7], [8]], [1.0, 0.0], tokenized_from_text=True),
        size=2,
        temperature=1.0,
        allow_tokenized_from_text=True,
    )

    assert [row["completion_ids"] for row in taken] == [[7], [8]]


def test_groups_of_another_size_are_refused():
    with pytest.raises(ConfigError, match="2 trajectories, TRL's num_generations is 4"):
        rollouts_of(group([[7], [8]], [1.0, 0.0]), size=4, temperature=1.0)


def test_rollouts_of_a_batch_are_those_of_its_groups_in_order():
    groups = [group([[7], [8]], [1.0, 0.0], logprob=-1.0), group([[9], [4]], [0.0, 2.0])]
    rollouts = ServiceRollouts(iter([LeasedBatch(groups, "1-1")]))

    output = rollouts(["p"] * 4, trl())

    assert output["completion_ids"] == [[7], [8], [9], [4]]
    assert service_reward([], [], **output) == [1.0, 0.0, 0.0, 2.0]
    assert output["logprobs"] is None  # one group has none
    with pytest.raises(ConfigError, match="TRL asks for more"):
        rollouts(["p"] * 4, trl())


@pytest.mark.parametrize(
    ("num_prompts", "changes", "word"),
    [
        (6, {}, "has 2 sequences, TRL asks for 6"),
        (2, {"accelerator": SimpleNamespace(num_processes=2)}, "one process"),
        (2, {"num_generations": 4}, "group 0: 2 trajectories"),
    ],
)
def test_a_trainer_set_otherwise_is_refused(num_prompts, changes, word):
    rollouts = ServiceRollouts(iter([LeasedBatch([group([[7], [8]], [1.0, 0.0])], "1-1")]))

    with pytest.raises(ConfigError, match=word):
        rollouts(["p"] * num_prompts, trl(**changes))


def test_door_refuses_sizes_that_do_not_fit(capsys):
    with pytest.raises(SystemExit):
        main(["--model", "m", "--batch-size", "8", "--num-generations", "3"])

    assert "--batch-size must be a multiple of --num-generations" in capsys.readouterr().err


def test_the_last_batch_is_acknowledged_when_trl_has_ended_its_training():
    acknowledged, callbacks = [], []
    batch = LeasedBatch([group([[7], [8]], [1.0, 0.0])], "1-1")

    class Stream:
        held = (batch,)
        ack = staticmethod(acknowledged.append)

        def __next__(self):
            return batch

    rollouts = ServiceRollouts(Stream())
    trainer = trl(add_callback=callbacks.append)
    for _ in range(2):
        rollouts(["p"] * 2, trainer)

    assert acknowledged == []
    (callback,) = callbacks
    callback.on_train_end(None, None, None)
    assert acknowledged == [batch]


@pytest.mark.slow
@pytest.mark.long
def test_trl_learns_from_groups_that_wait_at_a_real_service(tmp_path, free_port):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = save_tiny_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = "w0"
    tokenizer.save_pretrained(model)
    num_steps = 4
    with running(free_port):
        url = wait_until_up(free_port)
        for _ in range(2 * num_steps):
            scored = group([[PREFERRED], [REJECTED]], [1.0, 0.0], logprob=-3.0)
            assert httpx.post(f"{url}/scored_data", json=scored).status_code == 200
        command = [sys.executable, "-m", "example_trainer.recipes.trl_grpo", "--cpu"]
        flags = {
            "model": model,
            "atropos-url": url,
            "output-dir": tmp_path / "out",
            "max-steps": num_steps,
            "batch-size": 4,
            "micro-batch-size": 2,
            "num-generations": 2,
            "lr": 0.01,
        }
        command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        run = subprocess.run(command, capture_output=True, text=True, timeout=240)
        left = httpx.get(f"{url}/status").json()

    assert run.returncode == 0, run.stderr[-3000:]
    assert (left["current_step"], left["queue_size"]) == (num_steps, 0)

    def margin(directory) -> float:
        network = AutoModelForCausalLM.from_pretrained(directory)
        with torch.no_grad():
            logits = network(torch.tensor([[1, 2, 3]])).logits[0, -1]
        return float(logits[PREFERRED] - logits[REJECTED])

    assert margin(tmp_path / "out") > margin(model) + 0.1
