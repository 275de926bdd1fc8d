"""Checkpoints appear whole or not at all, and a resumed run equals an undisturbed one."""

from __future__ import annotations

import random
import resource
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from atroposlib.errors import ConfigError
from example_trainer.checkpointing import (
    drop_checkpoints_before,
    drop_old_checkpoints,
    find_intact_checkpoint,
    load_training_state,
    move_training_state,
    replace_directory,
    save_checkpoint,
)
from example_trainer.model import create_optimizer, freeze_other_layers
from tests.trainer.tiny import SavedTokenizer, tiny_config, tiny_llama

pytestmark = pytest.mark.slow


def take_steps(model, optimizer, count):
    """Steps whose data come from the random state, so that restoring it matters."""
    for _ in range(count):
        tokens = torch.randint(0, 32, (2, 8))
        loss = model(input_ids=tokens, labels=tokens).loss * (1 + random.random())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_resumed_run_equals_the_undisturbed_one_bit_for_bit(tmp_path, kind, dtype):
    from transformers import LlamaForCausalLM

    def optimizer_for(model):
        return create_optimizer(model, tiny_config(tmp_path, optimizer=kind))

    random.seed(1)
    tiny_llama(seed=1).save_pretrained(tmp_path / "start")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "start", dtype=dtype).train()
    optimizer = optimizer_for(model)
    take_steps(model, optimizer, 3)
    path = save_checkpoint(model, SavedTokenizer(), tmp_path, 3, optimizer=optimizer)
    take_steps(model, optimizer, 3)

    random.seed(99)
    torch.manual_seed(99)
    resumed = LlamaForCausalLM.from_pretrained(path, dtype=dtype).train()
    resumed_optimizer = optimizer_for(resumed)
    steps = load_training_state(path, resumed_optimizer)
    take_steps(resumed, resumed_optimizer, 3)

    assert steps == 3
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True)
    )


def test_resumed_run_has_the_weight_decay_of_its_own_settings(tmp_path):
    model = tiny_llama()
    before = create_optimizer(model, tiny_config(tmp_path, weight_decay=0.5))
    path = save_checkpoint(model, SavedTokenizer(), tmp_path, 1, optimizer=before)
    resumed = create_optimizer(model, tiny_config(tmp_path, weight_decay=0.1))

    load_training_state(path, resumed)

    assert [group["weight_decay"] for group in resumed.param_groups] == [0.1]


def test_resumed_run_has_the_adafactor_settings_of_its_own(tmp_path):
    model = tiny_llama()
    relative = {"optimizer": "adafactor", "adafactor_relative_step": True}
    before = create_optimizer(model, tiny_config(tmp_path, **relative))
    path = save_checkpoint(model, SavedTokenizer(), tmp_path, 1, optimizer=before)
    resumed = create_optimizer(model, tiny_config(tmp_path, optimizer="adafactor", lr=0.5))

    load_training_state(path, resumed)

    group = resumed.param_groups[0]
    assert (group["relative_step"], group["lr"]) == (False, 0.5)


@pytest.mark.parametrize(("before", "after"), [([0], [1]), ([0], [0, 1]), ([0, 1], [0])])
def test_checkpoint_of_a_run_that_trains_other_weights_is_refused(tmp_path, before, after):
    models = []
    for layers in (before, after):
        models.append(tiny_llama())
        freeze_other_layers(models[-1], layers)
    optimizers = [create_optimizer(model, tiny_config(tmp_path)) for model in models]
    take_steps(models[0], optimizers[0], 1)
    path = save_checkpoint(models[0], SavedTokenizer(), tmp_path, 1, optimizer=optimizers[0])

    with pytest.raises(ConfigError, match="trains other weights of the model; choose the same"):
        load_training_state(path, optimizers[1], model=models[1])

    assert load_training_state(path, optimizers[0], model=models[0]) == 1


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

    assert find_intact_checkpoint(tmp_path) == tmp_path / "step_10"
    assert final == tmp_path / "final_model"
    assert (final / "model.safetensors").is_file()
    assert find_intact_checkpoint(tmp_path / "nowhere") is None


def test_replaced_directory_keeps_nothing_of_the_old_one(tmp_path):
    target = tmp_path / "deep" / "model"
    replace_directory(target, lambda d: (d / "old").write_text("1"))

    replace_directory(target, lambda d: (d / "new").write_text("2"))

    assert [file.name for file in target.iterdir()] == ["new"]
    assert [entry.name for entry in target.parent.iterdir()] == ["model"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot exchange directories")
def test_directory_exists_at_any_time_while_it_is_replaced(tmp_path, monkeypatch):
    target = tmp_path / "model"
    replace_directory(target, lambda d: (d / "a").write_text("1"))
    seen = []

    def note(path, *_, **__):
        seen.append((path.name, (target / "a").read_text()))

    monkeypatch.setattr(Path, "rename", note)
    monkeypatch.setattr("example_trainer.checkpointing.flush_to_disk", note)
    replace_directory(target, lambda d: (d / "a").write_text("2"))

    assert seen == [("a", "1"), (".model.new", "1"), (tmp_path.name, "2")]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("is_link", [False, True])
def test_directory_is_replaced_where_it_cannot_be_exchanged(tmp_path, monkeypatch, is_link):
    target = tmp_path / "model"
    if is_link:
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to("elsewhere")
    else:
        target.mkdir()
        monkeypatch.setattr("example_trainer.checkpointing._exchange", lambda *_: False)

    replace_directory(target, lambda d: (d / "a").write_text("2"))

    assert (target / "a").read_text() == "2"
    assert not target.is_symlink()


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


def test_full_disk_names_the_directory(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        for write in (
            lambda d: save_file({"w": torch.zeros(5000)}, d / "model.safetensors"),
            lambda d: (d / "tokenizer.json").write_text("x" * 5000),
        ):
            with pytest.raises(OSError, match=f"large: '{tmp_path}/model'"):
                replace_directory(tmp_path / "model", write)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert not list(tmp_path.iterdir())


def files_beside_the_weights(checkpoint):
    return sorted(path.name for path in checkpoint.iterdir() if path.is_file())


def to_earlier_layout(checkpoint):
    """Put the trainer's state where earlier versions wrote it."""
    for path in (checkpoint / "trainer").iterdir():
        path.rename(checkpoint / path.name)
    (checkpoint / "trainer").rmdir()


def test_engines_find_only_weights_next_to_the_config(tmp_path):
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())

    path = save_checkpoint(model, SavedTokenizer(), tmp_path, 1, optimizer=optimizer)

    # vLLM and SGLang load every *.safetensors of the folder they are started on.
    assert [file.name for file in path.glob("*.safetensors")] == ["model.safetensors"]
    assert not [name for name in files_beside_the_weights(path) if "trainer" in name]
    assert sorted(file.name for file in (path / "trainer").iterdir()) == [
        "checksums.json",
        "trainer_state.json",
        "trainer_state.safetensors",
    ]


@pytest.mark.parametrize("moved", [(), ("trainer_state.safetensors",)], ids=["whole", "killed"])
def test_checkpoint_of_the_earlier_layout_resumes_and_gets_the_present_one(tmp_path, moved):
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    take_steps(model, optimizer, 2)
    path = save_checkpoint(
        model, SavedTokenizer(), tmp_path, 2, optimizer=optimizer, feed_state={"run_id": "r"}
    )
    to_earlier_layout(path)
    for name in moved:  # as a kill between the two renames leaves it
        (path / "trainer").mkdir()
        (path / name).rename(path / "trainer" / name)
    before = torch.optim.AdamW(model.parameters())
    after = torch.optim.AdamW(model.parameters())

    assert find_intact_checkpoint(tmp_path, run_id="r") == path
    steps = [load_training_state(path, before)]
    assert move_training_state(path)
    steps.append(load_training_state(path, after))

    assert steps == [2, 2]
    assert find_intact_checkpoint(tmp_path, run_id="r") == path
    assert [file.name for file in path.glob("*.safetensors")] == ["model.safetensors"]
    assert not move_training_state(path)
    for one, other in zip(
        before.state_dict()["state"].values(), after.state_dict()["state"].values(), strict=True
    ):
        assert torch.equal(one["exp_avg"], other["exp_avg"])


def test_damaged_state_names_the_file_and_the_remedy(tmp_path):
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    path = save_checkpoint(model, SavedTokenizer(), tmp_path, 2, optimizer=optimizer)
    (path / "trainer" / "trainer_state.json").write_text("{")

    with pytest.raises(ConfigError, match=r"trainer_state.json cannot be read.*delete .*step_2"):
        load_training_state(path, optimizer)


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    for name in (".step_4.new", ".step_2.old"):
        (tmp_path / name).mkdir()

    drop_old_checkpoints(tmp_path, keep=2)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("elsewhere")])
def test_files_in_place_of_temporary_directories_are_replaced(tmp_path, make):
    (tmp_path / "elsewhere").mkdir()
    for name in (".step_4.new", ".step_4.old"):
        make(tmp_path / name)

    replace_directory(tmp_path / "step_4", lambda directory: None)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "step_4"]


def test_checkpoint_whose_earlier_removal_was_killed_is_dropped(tmp_path):
    for path in two_checkpoints(tmp_path):
        (tmp_path / f".{path.name}.old" / "trainer").mkdir(parents=True)

    drop_checkpoints_before(2, tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == [".step_2.old", "step_2"]


def two_checkpoints(folder, *, run_id="r"):
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    take_steps(model, optimizer, 1)
    return [
        save_checkpoint(
            model,
            SavedTokenizer(),
            folder,
            step,
            optimizer=optimizer,
            feed_state={"run_id": run_id},
        )
        for step in (1, 2)
    ]


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-7] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def nest(path):
    path.write_text("[" * 100_000)


def list_checksums(path):
    path.write_text('{"xxh3_128": ["config.json"]}')


def replace_feed(path):
    path.write_text('{"feed": [1]}')


def empty(path):
    path.write_text("{}")


@pytest.mark.parametrize("has_checksums", [True, False], ids=["checksums", "older"])
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", cut),
        ("trainer/trainer_state.safetensors", cut),
        ("trainer/trainer_state.safetensors", Path.unlink),
        ("trainer/trainer_state.json", cut),
        ("model.safetensors", flip_a_byte),
        ("config.json", Path.unlink),
        ("trainer/checksums.json", cut),
        ("trainer/checksums.json", nest),
        ("trainer/checksums.json", list_checksums),
        ("trainer/trainer_state.json", nest),
        ("trainer/trainer_state.json", replace_feed),
        ("trainer/trainer_state.json", empty),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(
    tmp_path, caplog, name, damage, has_checksums
):
    older, newer = two_checkpoints(tmp_path)
    if not has_checksums:
        if damage is flip_a_byte or name in ("config.json", "trainer/checksums.json"):
            pytest.skip("only a checksum detects this")
        for path in (older, newer):
            (path / "trainer" / "checksums.json").unlink()
    assert find_intact_checkpoint(tmp_path, run_id="r") == newer

    damage(newer / name)

    assert find_intact_checkpoint(tmp_path, run_id="r") == older
    (line,) = caplog.messages
    assert str(newer / name) in line
    assert "skipping it" in line


def test_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path):
    for path in two_checkpoints(tmp_path):
        cut(path / "model.safetensors")

    with pytest.raises(ConfigError, match=r"step_2/model.safetensors is damaged.*restore one"):
        find_intact_checkpoint(tmp_path, run_id="r")


def test_damaged_checkpoint_hinders_no_later_one(tmp_path):
    older, newer = two_checkpoints(tmp_path)
    cut(older / "trainer" / "trainer_state.json")

    drop_old_checkpoints(tmp_path, keep=1, run_id="r")

    assert newer.is_dir()
    assert find_intact_checkpoint(tmp_path, run_id="r") == newer
