"""Small checkpoints, followers of a store, and a process that is killed at a chosen moment."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from example_trainer.weights.following import Follower
from example_trainer.weights.local import LocalWeights, file_digest
from example_trainer.weights.store import WeightStore

Tensors = dict[str, torch.Tensor]


def some_tensors(seed: int = 0) -> Tensors:
    """Tensors of several types, an empty one and a scalar among them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(64, 48, generator=generator).bfloat16(),
        "norm": torch.randn(48, generator=generator),
        "half": torch.randn(5, 7, generator=generator).half(),
        "double": torch.randn(11, generator=generator).double(),
        "count": torch.arange(5),
        "empty": torch.zeros(0, 3),
        "scale": torch.tensor(1.5),
    }


def changed(tensors: Tensors, version: int) -> Tensors:
    """Change about one element of a hundred, and always one."""
    generator = torch.Generator().manual_seed(version)
    result = {}
    for name, value in tensors.items():
        if not value.is_floating_point():
            result[name] = value
            continue
        hits = torch.rand(value.shape, generator=generator) < 0.01
        result[name] = torch.where(hits, value * 1.01, value).to(value.dtype)
    result["count"] = result["count"] + 1
    return result


def write_checkpoint(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[LocalWeights]:
    local = LocalWeights(folder)
    local.open()
    try:
        yield local
    finally:
        local.close()


def follow_once(store: WeightStore, folder: Path) -> Tensors:
    """Fetch the newest version into a folder and return its tensors."""
    with opened(folder) as local:
        Follower(store, local).follow_once()
        return load_file(local.current / "model.safetensors")


def same_bits(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].numpy(force=True).tobytes() == right[name].numpy(force=True).tobytes()
        if left[name].dtype != torch.bfloat16
        else torch.equal(left[name].view(torch.int16), right[name].view(torch.int16))
        for name in left
    )


def digest_of_current(folder: Path) -> str:
    return file_digest(folder / "current" / "model.safetensors")


_FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.symlink", "os.link"}


def killed_at(moment: int, work: Callable[[], object]) -> bool:
    """Run `work` in a forked process that kills itself before file operation number `moment`.

    Return whether it was killed, False if it ended before.
    """
    process = os.fork()
    if process == 0:
        left = moment

        def count(event: str, _: object) -> None:
            nonlocal left
            if event in _FILE_EVENTS:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            sys.addaudithook(count)
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False
