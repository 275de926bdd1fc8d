"""Names of the earlier trainer: where they are imported from, and what they still do."""

from __future__ import annotations

import inspect

import pytest

import example_trainer
from atroposlib.errors import ConfigError
from example_trainer import api, data, grpo, trainers
from example_trainer.config import TrainingConfig
from tests.trainer.tiny import tiny_config


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
