"""Checkpoints appear whole or not at all, and a resumed run equals an undisturbed one."""

from __future__ import annotations

import random

import pytest
import torch

from atroposlib.errors import ConfigError
from example_trainer.checkpointing import (
    find_latest_checkpoint,
    load_training_state,
    replace_directory,
    save_checkpoint,
)
from tests.trainer.tiny import SavedTokenizer, tiny_llama


def take_steps(model, optimizer, count):
    """Steps whose data come from the random state, so that restoring it matters."""
    for _ in range(count):
        tokens = torch.randint(0, 32, (2, 8))
        loss = model(input_ids=tokens, labels=tokens).loss * (1 + random.random())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_resumed_run_equals_the_undisturbed_one_bit_for_bit(tmp_path, kind):
    from transformers import LlamaForCausalLM
    from transformers.optimization import Adafactor

    def optimizer_for(model):
        if kind == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=1e-2)
        return Adafactor(model.parameters(), lr=1e-2, scale_parameter=False, relative_step=False)

    random.seed(1)
    model = tiny_llama(seed=1)
    optimizer = optimizer_for(model)
    take_steps(model, optimizer, 3)
    path = save_checkpoint(model, SavedTokenizer(), tmp_path, 3, optimizer=optimizer)
    take_steps(model, optimizer, 3)

    random.seed(99)
    torch.manual_seed(99)
    resumed = LlamaForCausalLM.from_pretrained(path).train()
    resumed_optimizer = optimizer_for(resumed)
    steps = load_training_state(path, resumed_optimizer)
    take_steps(resumed, resumed_optimizer, 3)

    assert steps == 3
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True)
    )


def test_checkpoint_of_another_optimizer_is_refused(tmp_path):
    model = tiny_llama()
    adamw = torch.optim.AdamW(model.parameters())
    path = save_checkpoint(model, SavedTokenizer(), tmp_path, 1, optimizer=adamw)

    with pytest.raises(ConfigError, match="written by AdamW, this run uses SGD"):
        load_training_state(path, torch.optim.SGD(model.parameters()))


def test_latest_checkpoint_is_the_largest_step_that_can_be_resumed(tmp_path):
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (2, 10):
        save_checkpoint(model, SavedTokenizer(), tmp_path, step, optimizer=optimizer)
    save_checkpoint(model, SavedTokenizer(), tmp_path, 11)
    final = save_checkpoint(model, SavedTokenizer(), tmp_path, 12, is_final=True)

    assert find_latest_checkpoint(tmp_path) == tmp_path / "step_10"
    assert final == tmp_path / "final_model"
    assert (final / "model.safetensors").is_file()
    assert find_latest_checkpoint(tmp_path / "nowhere") is None


def test_replaced_directory_keeps_nothing_of_the_old_one(tmp_path):
    target = tmp_path / "deep" / "model"
    replace_directory(target, lambda d: (d / "old").write_text("1"))

    replace_directory(target, lambda d: (d / "new").write_text("2"))

    assert [file.name for file in target.iterdir()] == ["new"]
    assert [entry.name for entry in target.parent.iterdir()] == ["model"]


def test_failing_write_leaves_the_old_directory_in_place(tmp_path):
    target = tmp_path / "model"
    replace_directory(target, lambda d: (d / "old").write_text("1"))

    def fail(directory):
        (directory / "half").write_text("2")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_directory(target, fail)

    assert [file.name for file in target.iterdir()] == ["old"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
