"""Whole weights and optimiser states from sharded ones, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

__all__ = ["GatheredModel", "gather_optimizer_state", "gather_weights", "load_optimizer_state"]


class GatheredModel:
    """A model whose weights are sharded, with the whole of them beside it: it saves like any.

    Args:
        model: The transformers model; asked for everything but its weights.
        weights: Whole tensors on the CPU, by name.
    """

    def __init__(self, model: Any, weights: Mapping[str, torch.Tensor]) -> None:
        self._model = model
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole weights."""
        return dict(self._weights)

    def save_pretrained(self, directory: Path, **options: Any) -> None:
        """Save the whole weights, or those in `state_dict`."""
        self._model.save_pretrained(directory, **{"state_dict": self.state_dict(), **options})


def gather_weights(model: Any, *, keep: bool) -> dict[str, torch.Tensor]:
    """Return the whole weights on the CPU; tied ones share a tensor. All ranks call this.

    Args:
        model: Whose parameters are DTensors.
        keep: False takes part and returns nothing.
    """
    whole: dict[str, torch.Tensor] = {}
    by_identity: dict[int, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in by_identity:
            by_identity[id(value)] = _whole(value.detach(), keep=keep)
        if keep:
            whole[name] = by_identity[id(value)]
    return whole


def gather_optimizer_state(optimizer: Any, *, keep: bool) -> dict[str, Any]:
    """Return what `optimizer.state_dict()` would be of the whole model. All ranks call this."""
    state = optimizer.state_dict()
    slots = {
        index: {
            name: _whole(value, keep=keep) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        for index, values in state["state"].items()
    }
    return {"state": slots, "param_groups": state["param_groups"]} if keep else {}


def load_optimizer_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load the state of a whole model, each rank its part where the parameters are sharded."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    slots: dict[int, dict[str, Any]] = {}
    for index, values in state["state"].items():
        like = parameters[index]
        slots[index] = {
            name: distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
            if isinstance(like, DTensor)
            and isinstance(value, torch.Tensor)
            and value.shape == like.shape
            else value
            for name, value in values.items()
        }
    optimizer.load_state_dict({**state, "state": slots})


def _whole(value: torch.Tensor, *, keep: bool) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.cpu() if keep else value.new_empty(0)
