"""Gated sum."""

import torch
from torch import nn


class Model(nn.Module):
    """A linear layer with a gate, summed over the steps of a sequence."""

    def __init__(self, size: int):
        super().__init__()
        self.values = nn.Linear(size, size)
        self.gates = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(x.shape[0], x.shape[2])
        for step in range(x.shape[1]):
            total = total + self.values(x[:, step]) * torch.sigmoid(self.gates(x[:, step]))
        return total


def get_inputs():
    """Return random inputs of `forward`."""
    return [torch.randn(16, 512, 96)]


def get_init_inputs():
    """Return the arguments of the constructor."""
    return [96]
