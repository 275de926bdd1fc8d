"""Names of the earlier trainer: where they are imported from, and what they still do."""

from __future__ import annotations

import inspect

import pytest
import torch

import example_trainer
from atroposlib.errors import ConfigError
from example_trainer import api, checkpointing, data, grpo, trainers, training
from example_trainer.config import TrainingConfig
from tests.trainer.tiny import SavedTokenizer, group, tiny_config, tiny_llama


@pytest.mark.parametrize(
    "name",
    [
        "TrainingConfig", "config_from_args", "parse_args", "train_legacy", "train_lora",
        "train_lora_restart", "train_shared_vllm",
    ],
)  # fmt: skip
def test_package_offers_the_names_of_the_contract(name):
    assert callable(getattr(example_trainer, name))
    assert name in example_trainer.__all__


def test_single_file_offers_the_functions_it_once_held():
    assert grpo.TrainingConfig is TrainingConfig
    assert grpo.train is trainers.train
    assert grpo.register_trainer is api.register_trainer
    assert grpo.get_batch is api.get_batch
    assert grpo.get_data is data.get_data
    assert grpo.pad_data_to_good_offset is data.pad_data_to_good_offset
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = grpo.nothing


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (api.check_atropos_api, ["url", "timeout"]),
        (api.register_trainer, ["config"]),
        (api.get_batch, ["url"]),
        (data.get_data, ["batch_size", "seq_len", "atropos_url", "extract_inference_logprobs"]),
        (
            data.pad_data_to_good_offset,
            ["data", "batch_size", "extract_inference_logprobs", "seq_len"],
        ),
    ],
)
def test_function_takes_what_it_always_took(function, parameters):
    assert list(inspect.signature(function).parameters) == parameters


def test_batch_is_asked_for_at_the_default_address_as_in_the_single_file():
    assert inspect.signature(api.get_batch).parameters["url"].default == "http://localhost:8000"


def collated(*, microbatch=2):
    groups = [group([[7], [8, 9], [7, 7]], [1.0, 0.0, 0.5], logprob=-3.0)]
    return data.pad_data_to_good_offset({"batch": groups}, microbatch)


def test_data_are_all_batches_that_wait_and_the_log_says_which_have_logprobs(monkeypatch, caplog):
    groups = [group([[7], [8]], [1.0, 0.0], logprob=logprob) for logprob in (-3.0, None)]
    answers = iter([*({"batch": [one]} for one in groups), {"batch": None}])
    monkeypatch.setattr(data, "get_batch", lambda url: next(answers))
    caplog.set_level("INFO")

    batches, nothing = data.get_data(2, 64)

    assert [batch.inference_logprobs is None for batch in batches] == [False, True]
    assert nothing is None
    assert "1 of 2 batches have inference logprobs" in caplog.text


def test_training_step_is_one_update_by_the_sum_of_the_microbatch_losses(tmp_path):
    config = tiny_config(tmp_path, warmup_steps=4, lr=0.4, max_grad_norm=1e9)
    model, expected = tiny_llama(), tiny_llama()
    batches = collated()
    losses = [
        training.compute_grpo_loss(expected, *tensors, 2, logprobs)[0]
        for *tensors, logprobs in zip(*batches, strict=True)
    ]
    sum(losses).backward()
    torch.optim.SGD(expected.parameters(), lr=0.2).step()

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    result = training.run_training_step(model, optimizer, *batches[:4], config, 1, batches[4])

    assert set(result) == {
        "loss", "lr", "grad_norm", "pos_logp", "neg_logp", "pos_count", "neg_count", "mean_ratio",
        "clipped_fraction",
    }  # fmt: skip
    assert result["loss"] == pytest.approx(sum(loss.item() for loss in losses))
    assert result["lr"] == pytest.approx(0.4 * 2 / 4)
    assert (result["pos_count"], result["neg_count"]) == (1, 2)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-7)
        assert ours.grad is None


def test_training_step_without_inference_logprobs_says_how_to_get_them(tmp_path):
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    with pytest.raises(ValueError, match=r"--openai\.server_type vllm"):
        training.run_training_step(model, optimizer, *collated()[:4], tiny_config(tmp_path), 0)


def test_checkpoint_functions_take_the_earlier_arguments(tmp_path):
    model = tiny_llama()

    path = checkpointing.save_checkpoint(model, SavedTokenizer(), str(tmp_path), 3, False, True)
    adapters = [
        checkpointing.save_lora_checkpoint(model, str(tmp_path), 3),
        checkpointing.save_lora_checkpoint(model, str(tmp_path), 3, True),
    ]

    assert (path / "model.safetensors").is_file()
    assert path.name == "step_3"
    assert [folder.name for folder in adapters] == ["adapter_step_3", "final_adapter"]


@pytest.mark.parametrize(
    ("function", "mode"),
    [
        (trainers.train_legacy, "none"),
        (trainers.train_lora, "lora_only"),
        (trainers.train_lora_restart, "lora_restart"),
    ],
)
def test_function_of_a_mode_trains_in_it(tmp_path, monkeypatch, function, mode):
    trained = []
    monkeypatch.setattr(trainers, "train", trained.append)

    function(tiny_config(tmp_path, weight_bridge_mode="off"))

    assert [config.weight_bridge_mode for config in trained] == [mode]


def test_mode_that_is_not_built_says_which_are(tmp_path):
    with pytest.raises(
        ConfigError, match="shared_vllm is not built yet; use one of: auto, none, in"
    ):
        trainers.train_shared_vllm(tiny_config(tmp_path))
