"""A local copy of what the commands of the pages load from a model hub.

The pages name real models and data sets. The walk has no network, so a hub cache stands in: each
name of `MODELS` leads to one small random model, `gsm8k` to the rows that the repository ships.
Commands therefore run exactly as printed.

    python -m tests.first_hour.hub FOLDER        # FOLDER becomes HF_HOME
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

__all__ = ["MODELS", "write_hub"]

MODELS = (
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen2-VL-2B-Instruct",
    "NousResearch/DeepHermes-3-Llama-3-3B-Preview",
    "NousResearch/DeepHermes-3-Llama-3-8B-Preview",
)
"""Every model name that a page prints or that a printed command has as its default."""

REPOSITORY = Path(__file__).parents[2]
REVISION = "0" * 40


def write_hub(folder: Path) -> None:
    """Write models and data sets to `folder`, in the layout of a hub cache."""
    for name in MODELS:
        repository = folder / "hub" / f"models--{name.replace('/', '--')}"
        if repository.exists():
            continue
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(REVISION)
        write_model(
            repository / "snapshots" / REVISION, template="qwen2_5" if "-VL-" in name else "qwen3"
        )
    write_gsm8k(folder)


def write_model(folder: Path, *, template: str = "qwen3") -> None:
    """Write a Qwen2 model of 0.1 million random parameters with a byte-level tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(str(REPOSITORY / "tests/templates" / template))
    tokenizer.model_max_length = 32768
    tokenizer.save_pretrained(str(folder))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(str(folder))


def write_gsm8k(folder: Path) -> None:
    """Write the sample of GSM8K as the `datasets` library keeps a data set it has loaded."""
    from datasets import load_dataset_builder

    sample = REPOSITORY / "environments/data/gsm8k_sample"
    files = {split: str(sample / f"{split}.jsonl") for split in ("train", "test")}
    builder = load_dataset_builder("json", data_files=files, cache_dir=str(folder / "prepared"))
    builder.download_and_prepare()
    prepared = Path(builder.cache_dir)
    kept = folder / "datasets" / "gsm8k" / "main" / "0.0.0" / REVISION
    kept.mkdir(parents=True, exist_ok=True)
    for file in prepared.iterdir():
        shutil.copy(file, kept / file.name.replace("json-", "gsm8k-"))
    about = kept / "dataset_info.json"
    about.write_text(
        json.dumps(json.loads(about.read_text()) | {"config_name": "main", "dataset_name": "gsm8k"})
    )


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    write_hub(Path(sys.argv[1]))
