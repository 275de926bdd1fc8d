"""How much of the device a step uses: FLOPs of the model over the peak of the device (MFU)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["ComputeUse", "ModelShape", "peak_flops_of"]

_PEAKS = (
    ("B200", 2250e12),
    ("H200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("RTX 4090", 165.2e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L4", 121e12),
)
"""Dense bfloat16 FLOPs per second from the makers' data sheets, by a part of the device's name; the
first that fits counts."""


def peak_flops_of(device_name: str) -> float | None:
    """Return the bfloat16 peak of a device in FLOPs per second, None where it is not known."""
    return next((peak for part, peak in _PEAKS if part in device_name), None)


class ModelShape(NamedTuple):
    """What the number of FLOPs depends on."""

    num_body_parameters: int
    """All but the embeddings and the output layer."""
    num_head_parameters: int
    """Of the output layer, also when it is tied to the embedding."""
    num_layers: int
    attention_width: int
    """Heads times their dimension."""

    @classmethod
    def of(cls, model: Any) -> ModelShape | None:
        """Read the shape of a causal language model; None for a mixture of experts."""
        config = model.config
        layers, heads = (
            getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads")
        )
        is_sparse = any(
            getattr(config, name, None)
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
        )
        head = model.get_output_embeddings()
        if is_sparse or head is None or not layers or not heads:
            return None
        ends = {id(p) for p in (head.weight, model.get_input_embeddings().weight)}
        body = sum(p.numel() for p in model.parameters() if id(p) not in ends)
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(body, head.weight.numel(), layers, heads * width)

    def step_flops(self, lengths: Iterable[int], *, num_trained_tokens: float) -> float:
        """Return the FLOPs of forward and backward; what is computed twice counts once.

        Two per parameter and token forward, twice that backward (Kaplan et al. 2020,
        arXiv:2001.08361); causal attention forward `2 L^2` times its width per layer. The output
        layer is counted for trained tokens only, since it sees no others.

        Args:
            lengths: Tokens of each sequence.
            num_trained_tokens: Of all sequences.
        """
        counts = list(lengths)
        body = 6.0 * self.num_body_parameters * sum(counts)
        head = 6.0 * self.num_head_parameters * num_trained_tokens
        attention = 6.0 * self.num_layers * self.attention_width * sum(n * n for n in counts)
        return body + head + attention


class ComputeUse:
    """Turns what a step trained into `train/mfu`.

    Args:
        model: Before it is sharded or wrapped.
        device: Torch device; on anything but a known GPU there is no peak to compare with.
        num_devices: That share a step.
    """

    def __init__(self, model: Any, device: str, *, num_devices: int = 1) -> None:
        peak = peak_flops_of(_name_of(device))
        self._peak = None if peak is None else peak * num_devices
        self._shape = None if peak is None else ModelShape.of(model)

    def metrics(
        self, lengths: Iterable[int], *, num_trained_tokens: float, seconds: float
    ) -> dict[str, float]:
        """Return `train/mfu`, a share of 1; nothing where it is not known."""
        if self._peak is None or self._shape is None or seconds <= 0:
            return {}
        flops = self._shape.step_flops(lengths, num_trained_tokens=num_trained_tokens)
        return {"train/mfu": flops / seconds / self._peak}


def _name_of(device: str) -> str:
    if not device.startswith("cuda"):
        return ""
    import torch

    return str(torch.cuda.get_device_name(device))
