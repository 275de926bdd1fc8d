"""The frozen policy that the KL penalty compares with, scored in the trainer.

    --reference-model NAME_OR_PATH    a separate model, loaded in addition to the trained one
    a LoRA mode                       the trained model with its adapters switched off
    --reference-model groups          nothing here: environments send `ref_logprobs`

Groups that carry `ref_logprobs` keep them; only the others are scored.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from atroposlib.errors import ConfigError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from example_trainer.batch import Microbatch
from example_trainer.config import TrainingConfig
from example_trainer.model import autocast, load_frozen_model, without_adapters
from example_trainer.parallel import ONE_PROCESS, Parallel
from example_trainer.policy import Policy, prepare_policy
from example_trainer.scoring import PolicyScorer

__all__ = ["Reference", "open_reference"]


class Reference:
    """Scores micro-batches under frozen weights, at the temperatures of sampling.

    Args:
        config: Settings; forward passes are made as those of the trained model.
        scorer: Around the model that is asked.
        has_adapters: Whether that is the trained model, to be asked without its adapters.
    """

    def __init__(
        self, config: TrainingConfig, scorer: PolicyScorer, *, has_adapters: bool = False
    ) -> None:
        self._config = config
        self._scorer = scorer
        self._has_adapters = has_adapters

    @property
    def num_bytes(self) -> int:
        """Memory of the weights that only the reference needs, on this rank."""
        if self._has_adapters:
            return 0
        return sum(p.numel() * p.element_size() for p in self._scorer.parameters())

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def logprobs_BT(self, microbatch: Microbatch) -> torch.Tensor:
        """Return (B, T) logprobs of the labels, `MASKED_LOGPROB` where ignored."""
        switched_off: contextlib.AbstractContextManager[None] = (
            without_adapters(self._scorer.model) if self._has_adapters else contextlib.nullcontext()
        )
        with switched_off, autocast(self._config):
            logprobs_BT = self._scorer(microbatch).logprobs_BT
        return torch.where(microbatch.labels_BT == IGNORE_INDEX, MASKED_LOGPROB, logprobs_BT)


def open_reference(
    config: TrainingConfig, model: Any, policy: Policy, parallel: Parallel = ONE_PROCESS
) -> Reference | None:
    """Return what scores the reference; None where nothing does.

    Args:
        config: Settings.
        model: The trained model.
        policy: Made ready from it.
        parallel: The ranks that train it; a reference model is shared among them likewise.

    Raises:
        ConfigError: the reference model cannot be loaded, has fewer tokens than the trained one, or
            cannot take packed sequences where that one can.
    """
    source = config.reference_source
    if source == "base":
        return Reference(config, policy.scorer, has_adapters=True)
    if source != "model":
        return None
    name = str(config.reference_model)
    frozen = load_frozen_model(name, config)
    known, needed = (m.get_input_embeddings().weight.shape[0] for m in (frozen, model))
    if known < needed:
        raise ConfigError(
            f"reference_model {name!r} has {known} tokens and the trained model {needed}; both "
            "must use one tokenizer"
        )
    reference = prepare_policy(frozen, config, parallel)
    if policy.packs and not reference.packs:
        raise ConfigError(
            f"reference_model {name!r} takes no packed sequences ({reference.layout}); use "
            "--packing off"
        )
    return Reference(config, reference.scorer)
