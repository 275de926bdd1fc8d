"""Checks of `loss_fn` and `advantage_fn`, the functions of the user's own, before a run.

    FILE.py:NAME --import--> function --two small sequences--> value, gradient --compared--> ok

A loss must give a sequence the same value and gradient wherever it is: padded in a row of its own,
packed after another sequence, or in another microbatch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atroposlib.errors import AtroposError, ConfigError
from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.utils.imports import described, import_function
from example_trainer.config import TrainingConfig
from example_trainer.loss import BatchTotals, LossInputs, TrainingLoss, make_loss
from example_trainer.rows import Group, RowRules, rows_from_group

__all__ = ["require_custom_functions"]

logger = logging.getLogger(__name__)

_LABELS = ((IGNORE_INDEX, 5, 5), (IGNORE_INDEX, IGNORE_INDEX, 5, 5, 5))
"""Of two sequences that start with a prompt."""

_LAYOUTS = {
    "padded": (((0,), (1,)),),
    "in two microbatches": (((0,),), ((1,),)),
    "packed in one row": (((0, 1),),),
}
"""Sequences in rows in microbatches."""

_GROUP: Group = {
    "tokens": [[1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4]],
    "masks": [[IGNORE_INDEX, 2, 3, 4], [IGNORE_INDEX, 2, 3], [IGNORE_INDEX, 2, 3, 4]],
    "scores": [1.0, 0.0, 0.5],
    "inference_logprobs": [[1.0, -0.5, -0.5, -0.5], [1.0, -0.5, -0.5], [1.0, -0.5, -0.5, -0.5]],
    "finish_reasons": ["stop", "stop", "length"],
}


def require_custom_functions(config: TrainingConfig) -> None:
    """Raise `ConfigError` if a function of the user's own cannot be imported or cannot train."""
    if config.loss_fn is not None:
        with _named("--loss-fn"):
            alone = replace(make_loss(config), policy_coef=1.0, entropy_coef=0.0)
            _check_loss(alone, config.loss_fn)
        logger.info("policy loss: %s", config.loss_fn)
    if config.advantage_fn is not None:
        with _named("--advantage-fn"):
            function = import_function(config.advantage_fn, config.advantage_fn_args)
            rules, group = RowRules(seq_len=8, advantage_fn=function), deepcopy(_GROUP)
            _called(config.advantage_fn, "a group of 3", partial(rows_from_group, group, rules))
            if group != _GROUP:
                raise ConfigError(
                    f"{config.advantage_fn} changes the group that it is called with; copy what it "
                    "changes"
                )
        logger.info("advantages: %s", config.advantage_fn)


@contextmanager
def _named(flag: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error


def _check_loss(loss: TrainingLoss, name: str) -> None:
    expected: tuple[Tensor, list[Tensor]] | None = None
    for layout, microbatches in _LAYOUTS.items():
        leaves = _logprobs()
        example = f"two sequences, {layout}"
        value = _called(name, example, partial(_share, loss, leaves, microbatches))
        if not value.requires_grad:
            raise ConfigError(f"{name}: the loss has no gradient; compute it from logprobs_BT")
        _called(name, f"{example}, gradient", value.backward)
        gradients = [leaf.grad if leaf.grad is not None else leaf * 0 for leaf in leaves]
        if not all(torch.isfinite(tensor).all() for tensor in (value, *gradients)):
            raise ConfigError(
                f"{name}: the loss or its gradient is not finite, at logprobs from -3 to 0"
            )
        expected = expected or (value, gradients)
        pairs = zip((expected[0], *expected[1]), (value, *gradients), strict=True)
        if not all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in pairs):
            raise ConfigError(
                f"{name}: the loss of two sequences differs between padded and {layout}. Compute "
                "the loss of a token from its own sequence only; `sequence_sums_BT` of "
                "example_trainer.loss sums over sequences, also in packed rows"
            )


def _called(name: str, example: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except AtroposError as error:
        raise ConfigError(f"{name} on {example}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{name} on {example}: {described(error, name)}") from error


def _logprobs() -> list[Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return [
        (-3 * torch.rand(len(labels), generator=numbers)).requires_grad_() for labels in _LABELS
    ]


def _share(
    loss: TrainingLoss,
    logprobs: Sequence[Tensor],
    microbatches: Sequence[Sequence[Sequence[int]]],
) -> Tensor:
    """Return the loss of the batch, the sum of the shares of its microbatches."""
    num_tokens = sum(label != IGNORE_INDEX for labels in _LABELS for label in labels)
    totals = BatchTotals(num_tokens, num_sequences=len(_LABELS))
    return torch.stack([loss(_inputs(logprobs, rows), totals).loss for rows in microbatches]).sum()


def _inputs(logprobs: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> LossInputs:
    """Return one microbatch with these sequences, by index, in its rows."""
    width = max(sum(len(_LABELS[i]) for i in row) for row in rows)

    def tensor(values: Callable[[int], Tensor], fill: float) -> Tensor:
        joined = [torch.cat([values(i) for i in row]) for row in rows]
        return torch.stack(
            [torch.nn.functional.pad(row, (0, width - len(row)), value=fill) for row in joined]
        )

    ids = {i: number for number, i in enumerate(i for row in rows for i in row)}
    return LossInputs(
        trainer_logprobs_BT=tensor(lambda i: logprobs[i], 0.0),
        labels_BT=tensor(lambda i: torch.tensor(_LABELS[i]), IGNORE_INDEX),
        advantages_BT=tensor(lambda i: torch.full((len(_LABELS[i]),), 1.5 * i - 0.5), 0.0),
        inference_logprobs_BT=tensor(lambda i: logprobs[i].detach() - 0.1 * (i + 1), 1.0),
        sequence_ids_BT=tensor(lambda i: torch.full((len(_LABELS[i]),), ids[i]), 0)
        if any(len(row) > 1 for row in rows)
        else None,
        entropy_BT=tensor(lambda i: -0.5 * logprobs[i], 0.0),
    )
