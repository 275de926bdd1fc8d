"""Exported sets load with `datasets` and train one step in TRL, in every format it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atroposlib.exporting.formats import DPO_FORMATS, SFT_FORMATS
from atroposlib.exporting.run import run_export
from tests.exporting.samples import dpo_request, sft_request

pytestmark = [
    pytest.mark.slow,
    # Of the trainers themselves.
    pytest.mark.filterwarnings("ignore"),
]

SFT_TRAINED = ("trl", "trl-messages", "trl-chat", "tokens")
DPO_TRAINED = ("trl", "trl-implicit", "trl-chat", "trl-chat-implicit")
OUTPUTS = ("jsonl", "parquet", "dataset")


@pytest.fixture(scope="module")
def model_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from example_trainer.demo.settings import TinyModelShape, build_model, save_tiny_model

    shape = TinyModelShape(hidden_size=64, num_layers=1, num_heads=2)
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(build_model(tokenizer, shape, seed=0), tokenizer, folder)
    return folder


def load(path: Path, output: str) -> Any:
    import datasets

    if output == "dataset":
        return datasets.load_dataset(str(path), split="train")
    kind = "json" if output == "jsonl" else output
    return datasets.load_dataset(kind, data_files=str(path), split="train")


@pytest.mark.parametrize("output", OUTPUTS)
def test_every_format_loads(output: str, groups_file: Path, tokenizer: Any, tmp_path: Path) -> None:
    for formats, make in ((SFT_FORMATS, sft_request), (DPO_FORMATS, dpo_request)):
        for name in formats:
            path = tmp_path / f"{make.__name__}-{name}"
            run_export(
                make(
                    path,
                    groups_file,
                    format=name,
                    output=output,
                    max_records=5,
                    tokenizer=tokenizer.name_or_path,
                ),
                notify=print,
            )
            assert len(load(path, output)) == 5, name


def settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "trained"),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }


@pytest.mark.parametrize("name", SFT_TRAINED)
def test_sft_trainer_takes_a_step(
    name: str, groups_file: Path, tokenizer: Any, model_folder: Path, tmp_path: Path
) -> None:
    from trl import SFTConfig, SFTTrainer

    path = tmp_path / "out.jsonl"
    request = sft_request(path, groups_file, format=name, tokenizer=tokenizer.name_or_path)
    run_export(request, notify=print)
    trainer = SFTTrainer(
        model=str(model_folder),
        args=SFTConfig(**settings(tmp_path)),
        train_dataset=load(path, "jsonl"),
    )

    result = trainer.train()

    assert result.global_step == 1
    assert 0 < result.training_loss < 20
    batch = next(iter(trainer.get_train_dataloader()))
    trained = (batch["labels"] != -100).sum().item()
    assert 0 < trained <= batch["labels"].numel()
    if name != "trl-messages":  # there TRL trains on prompts too by default
        assert trained < batch["attention_mask"].sum().item()


@pytest.mark.parametrize("name", DPO_TRAINED)
@pytest.mark.long
def test_dpo_trainer_takes_a_step(
    name: str, groups_file: Path, tokenizer: Any, model_folder: Path, tmp_path: Path
) -> None:
    from trl import DPOConfig, DPOTrainer

    path = tmp_path / "out.jsonl"
    request = dpo_request(path, groups_file, format=name, tokenizer=tokenizer.name_or_path)
    run_export(request, notify=print)
    trainer = DPOTrainer(
        model=str(model_folder),
        args=DPOConfig(**settings(tmp_path)),
        train_dataset=load(path, "jsonl"),
    )

    result = trainer.train()

    assert result.global_step == 1
    assert 0 < result.training_loss < 20
