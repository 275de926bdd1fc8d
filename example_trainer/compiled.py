"""Layers and logprobs as fused kernels, by `torch.compile`.

The norms, rotations, casts and activations of a layer are bound by the speed of memory: each reads
and writes a whole tensor. Compiled, a layer has a few kernels instead of dozens, and intermediate
results that are cheap to compute are not stored for the backward pass. Attention keeps the kernels
of `scoring.packed_attention`. The lengths of its sequences are an `Opaque` argument, which the
compiler passes on without reading it, so that other lengths compile nothing again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from example_trainer.config import TrainingConfig
from example_trainer.images import IMAGE_MODELS
from example_trainer.parallel import transformer_blocks

__all__ = [
    "Opaque",
    "compile_layers",
    "fused",
    "obstacle_to_compiling",
    "tolerate_compiler_errors",
    "without_checkpointing",
    "without_compiled_layers",
]

T = TypeVar("T")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Opaque(Generic[T]):
    """A value that compiled code passes on and does not depend on."""

    def __init__(self, value: T) -> None:
        self.value = value


def obstacle_to_compiling(model: Any, config: TrainingConfig) -> str | None:
    """Return the reason why `torch_compile=auto` compiles nothing, or None."""
    if not config.device.startswith("cuda"):
        return "not on CUDA"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if config.uses_lora:
        return "adapters are trained"
    if model.config.model_type in IMAGE_MODELS:
        return "it reads images"
    return None


def compile_layers(model: Any) -> None:
    """Let the transformer blocks of a model run compiled, from the next forward on."""
    import torch._dynamo

    # Blocks share one cache: kinds of attention, with and without gradients, each are an entry.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for block in transformer_blocks(model):
        block.compile(dynamic=True)


def without_compiled_layers(model: Any) -> None:
    """Undo `compile_layers`."""
    for block in transformer_blocks(model):
        block._compiled_call_impl = None  # torch has no public way


def tolerate_compiler_errors() -> None:
    """Let code run uncompiled, with a warning, if the compiler fails later in this process."""
    import torch._dynamo

    torch._dynamo.config.suppress_errors = True


@contextlib.contextmanager
def without_checkpointing(model: Any) -> Iterator[None]:
    """Store the activations of forwards in this context, also those that would be recomputed."""
    modules = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for module in modules:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in modules:
            module.gradient_checkpointing = True


@functools.cache
def fused(function: _Function) -> _Function:
    """Return a function of tensors compiled for any of their lengths."""
    compiled: _Function = torch.compile(function, dynamic=True)
    return compiled
