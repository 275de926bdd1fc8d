"""Every flag of the contract with its default, and what a wrong one is answered."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from example_trainer.cli import (
    config_from_args,
    create_full_parser,
    create_unified_parser,
    describe_errors,
    parse_args,
)
from example_trainer.config import TrainingConfig
from example_trainer.run import with_engine_gpu

CONTRACT_FLAGS = [
    # flag, value on the command line (None: switch), destination, default, parsed value
    ("--lr", "0.1", "lr", 1e-5, 0.1),
    ("--training-steps", "3", "training_steps", 10, 3),
    ("--batch-size", "3", "batch_size", 2, 3),
    ("--seq-len", "3", "seq_len", 2048, 3),
    ("--gradient-accumulation-steps", "3", "gradient_accumulation_steps", 32, 3),
    ("--warmup-steps", "3", "warmup_steps", 0, 3),
    ("--optimizer", "adafactor", "optimizer", "adamw_8bit", "adafactor"),
    ("--adafactor-scale-parameter", None, "adafactor_scale_parameter", False, True),
    ("--adafactor-relative-step", None, "adafactor_relative_step", False, True),
    ("--save-path", "x", "save_path", "trained_model_checkpoints", "x"),
    ("--checkpoint-interval", "0", "checkpoint_interval", None, 0),
    ("--clip-eps", "0.1", "clip_eps", 0.2, 0.1),
    ("--vllm-port", "80", "vllm_port", 9001, 80),
    ("--vllm-gpu", "1", "vllm_gpu", None, 1),
    ("--gpu-memory-utilization", "0.9", "gpu_memory_utilization", 0.45, 0.9),
    ("--vllm-gpu-memory-utilization", "0.9", "gpu_memory_utilization", 0.45, 0.9),
    ("--max-model-len", "9", "max_model_len", 4096, 9),
    ("--dtype", "float16", "dtype", "bfloat16", "float16"),
    ("--vllm-restart-interval", "0", "vllm_restart_interval", 3, 0),
    ("--atropos-url", "http://x", "atropos_url", "http://localhost:8000", "http://x"),
    ("--use-wandb", None, "use_wandb", False, True),
    ("--wandb-project", "p", "wandb_project", None, "p"),
    ("--wandb-group", "g", "wandb_group", None, "g"),
    ("--debug-loading", None, "debug_loading", False, True),
    ("--benchmark", None, "benchmark", False, True),
    ("--log-dir", "x", "log_dir", "./logs", "x"),
]
FULL_ONLY_FLAGS = [
    ("--weight-bridge-mode", "lora_only", "weight_bridge_mode", "auto", "lora_only"),
    ("--vllm-config-path", "x", "vllm_config_path", None, "x"),
    ("--train-layer-indices", "0-2,2,9", "train_layer_indices", None, [0, 1, 2, 9]),
    ("--lora-r", "3", "lora_r", 16, 3),
    ("--lora-alpha", "3", "lora_alpha", 32, 3),
    ("--lora-dropout", "0.5", "lora_dropout", 0.0, 0.5),
    ("--lora-layer-indices", "4", "lora_layer_indices", None, [4]),
    ("--trainer-rank", "1", "trainer_rank", 0, 1),
    ("--world-size", "2", "world_size", 1, 2),
    ("--init-method", "x", "init_method", "env://", "x"),
    ("--num-inference-nodes", "1", "num_inference_nodes", 0, 1),
]


@pytest.mark.parametrize("row", CONTRACT_FLAGS + FULL_ONLY_FLAGS, ids=lambda row: row[0])
def test_full_parser_flag_of_the_contract_has_its_default_and_takes_a_value(row):
    flag, value, dest, default, parsed = row
    given = [flag] if value is None else [flag, value]

    assert getattr(parse_args(["--model", "m", "--device", "cpu"]), dest) == default
    assert getattr(parse_args(["--model", "m", "--device", "cpu", *given]), dest) == parsed


def test_unified_parser_has_the_common_flags_only():
    known = {flag for action in create_unified_parser()._actions for flag in action.option_strings}

    assert {row[0] for row in CONTRACT_FLAGS} <= known
    assert not {row[0] for row in FULL_ONLY_FLAGS} & known


def test_lora_target_modules_take_several_names():
    args = parse_args(["--model-name", "m", "--device", "cpu", "--lora-target-modules", "a", "b"])

    assert args.lora_target_modules == ["a", "b"]


def test_device_defaults_to_what_torch_has():
    import torch

    expected = "cuda" if torch.cuda.is_available() else "cpu"

    assert parse_args(["--model", "m"]).device == expected


def test_config_from_args_reaches_every_field_that_has_a_flag():
    args = parse_args(
        [
            "--model",
            "m",
            "--device",
            "cpu",
            "--gpu-memory-utilization",
            "0.7",
            "--importance-cap",
            "none",
            "--no-gradient-checkpointing",
            "--clip-eps-high",
            "0.3",
        ]
    )

    config = config_from_args(args)

    assert config.vllm_gpu_memory_utilization == 0.7
    assert config.importance_cap is None
    assert config.gradient_checkpointing is False
    assert config.clip_eps_high == 0.3
    flags = {action.dest for action in create_full_parser()._actions}
    without = set(TrainingConfig.model_fields) - flags
    assert without == {"single_copy", "vllm_gpu_memory_utilization"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--modle", "m"], "did you mean --model?"),
        (["--model", "m", "--training-step=3"], "did you mean --training-steps?"),
        (["--model", "m", "--optimizer", "sgd"], "invalid choice: 'sgd'"),
        (["--model", "m", "--train-layer-indices", "5-2"], "is descending"),
        (["--model", "m", "--train-layer-indices", "0-99999999999"], "indices up to 9999"),
        (["--model", "m", "--train-layer-indices", "-5"], "'-5' is not a layer index"),
        (["--model", "m", "--train-layer-indices=-5"], "'-5' is not a layer index"),
        (["--model", "m", "--train-layer-indices", "a"], "'a' is not a layer index"),
        (["--model", "m", "extra"], "unrecognized arguments: extra"),
        ([], "--model"),
    ],
)
def test_wrong_flag_exits_with_2_and_one_line_that_helps(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_args(argv)

    captured = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert message in captured
    assert captured.count("\n") == 1


def test_value_out_of_bounds_is_described_by_its_flag():
    with pytest.raises(ValidationError) as error_info:
        TrainingConfig(model_name="m", device="cpu", training_steps=0)

    assert describe_errors(error_info.value).startswith("--training-steps: ")


def test_unknown_setting_suggests_the_near_name():
    with pytest.raises(ValidationError, match="did you mean training_steps"):
        TrainingConfig(model_name="m", training_step=3)


def test_contradicting_settings_are_refused_with_the_remedy():
    with pytest.raises(ValidationError, match="count that mismatch twice"):
        TrainingConfig(model_name="m", device="cpu", ratio_anchor="inference", importance_cap=2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lr", "inf"], "--lr: Input should be a finite number"),
        (["--weight-decay", "inf"], "--weight-decay: Input should be a finite number"),
        (["--seed", "4294967296"], "--seed: Input should be less than or equal to 4294967295"),
        (["--save-path", ""], "--save-path: String should have at least 1 character"),
        (["--vllm-host", ""], "--vllm-host: String should have at least 1 character"),
        (["--kl-coef", "inf"], "--kl-coef: Input should be a finite number"),
        (["--device", "tpu"], "--device: expected auto, cpu, cuda, or one GPU"),
        (["--device", "cuda:x"], "--device: expected auto, cpu, cuda, or one GPU"),
        (["--atropos-url", "localhost:8000"], "--atropos-url: expected an address that starts"),
        (["--vllm-args", "'a b"], "--vllm-args: cannot be split into arguments"),
    ],
)
def test_setting_that_cannot_be_meant_is_refused_at_the_start(argv, message):
    with pytest.raises(ValidationError) as error_info:
        config_from_args(parse_args(["--model", "m", "--device", "cpu", *argv]))

    assert message in describe_errors(error_info.value)


@pytest.mark.parametrize("flag", ["--max-grad-norm", "--clip-eps-high", "--importance-cap"])
def test_infinity_is_how_a_bound_is_switched_off(flag):
    config = config_from_args(parse_args(["--model", "m", "--device", "cpu", flag, "inf"]))

    assert float("inf") in (config.max_grad_norm, config.clip_eps_high, config.importance_cap)


@pytest.mark.parametrize(
    ("settings", "gpu"),
    [
        ({"device": "cuda:2"}, 2),
        ({"device": "cuda:2", "vllm_gpu": 0}, 0),
        ({"device": "cuda:2", "sync_transport": "nccl"}, None),
        ({"device": "cuda:2", "vllm_args": "--tensor-parallel-size 2"}, None),
        ({"device": "cuda"}, None),
        ({"device": "cpu"}, None),
    ],
)
def test_engine_of_the_unified_launcher_is_on_the_gpu_of_the_trainer(settings, gpu):
    config = TrainingConfig(model_name="m", weight_bridge_mode="in_place", **settings)

    assert with_engine_gpu(config).vllm_gpu == gpu
