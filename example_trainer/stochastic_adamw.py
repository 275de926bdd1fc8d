"""AdamW for bfloat16 weights with stochastic rounding, which preserves small updates on average.

A bfloat16 number has 8 significant bits; the distance to the next one is 0.4 to 0.8 %. Updates
with a learning rate such as 1e-6 are much smaller than half of that: rounded to nearest, most
weights never change. With stochastic rounding, the expected weight is exact.

Source: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", arXiv:1502.02551.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_CHUNK = 2**24
"""Elements updated at a time, to limit the memory of float32 copies."""
_LOW_BITS = 16
"""Bits of a float32 that bfloat16 does not have."""


def round_stochastically(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return contiguous float32 values rounded stochastically to bfloat16.

    The generator must be on the device of the values.
    """
    bits = values.view(torch.int32)
    noise = torch.randint(
        0, 1 << _LOW_BITS, bits.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    # The sum carries into the remaining bits with the right probability.
    rounded = (bits + noise) & (-1 << _LOW_BITS)
    return rounded.view(torch.float32).to(torch.bfloat16)


class AdamW(torch.optim.AdamW):  # type: ignore[misc]  # torch has no types here
    """torch's AdamW, with stochastic rounding where weights and states are bfloat16.

    The format of the state is the same, so that either can load the other's checkpoints. The random
    numbers depend on `seed` and the step only: a resumed run repeats them, and ranks with the same
    weights draw the same ones. Parameters may be sharded.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, weight_decay: float, seed: int = 0
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, foreach=False, fused=False)
        self._seed = seed

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        generators: dict[torch.device, torch.Generator] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, generators)
        return loss

    def _update(
        self,
        parameter: torch.Tensor,
        group: dict[str, Any],
        generators: dict[torch.device, torch.Generator],
    ) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = int(state["step"])
        if parameter.device not in generators:
            generator = torch.Generator(parameter.device)
            generators[parameter.device] = generator.manual_seed(self._seed * 1_000_003 + step)
        generator = generators[parameter.device]
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        local = [_local(tensor) for tensor in tensors]
        flat = [tensor.contiguous().view(-1) for tensor in local]
        weights, gradients, means, squares = flat
        beta1, beta2 = group["betas"]
        for start in range(0, weights.numel(), _CHUNK):
            part = slice(start, start + _CHUNK)
            gradient = gradients[part].float()
            mean = means[part].float().lerp_(gradient, 1 - beta1)
            square = squares[part].float().lerp_(gradient.square(), 1 - beta2)
            denominator = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
            weight = weights[part].float().mul_(1 - group["lr"] * group["weight_decay"])
            weight.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))
            for stored, exact in ((weights, weight), (means, mean), (squares, square)):
                is_half = stored.dtype == torch.bfloat16
                stored[part] = round_stochastically(exact, generator) if is_half else exact
        for tensor, copy in zip(local, flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(copy.view(tensor.shape))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
