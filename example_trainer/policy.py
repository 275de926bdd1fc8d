"""The trained model made ready for the loop: what it can do found out, scored, shared by ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

from example_trainer.capabilities import probe
from example_trainer.config import TrainingConfig
from example_trainer.parallel import ONE_PROCESS, Parallel
from example_trainer.scoring import PolicyScorer

__all__ = ["Policy", "prepare_policy"]


class Policy(NamedTuple):
    """A model as the loop uses it."""

    scorer: PolicyScorer
    """Around the model; each rank's part of it where weights are sharded."""
    packs: bool
    """Whether several sequences may share a row."""


def prepare_policy(model: Any, config: TrainingConfig, parallel: Parallel = ONE_PROCESS) -> Policy:
    """Try the model, wrap it, and leave this rank its part; the optimiser is made afterwards.

    Args:
        model: A transformers causal language model, whole, on `config.device`; changed in place
            where its weights are sharded.
        config: Settings.
        parallel: The ranks that train it.

    Raises:
        ConfigError: packing is insisted on and the model cannot.
    """
    can = probe(model, packing=config.packing)
    scorer = PolicyScorer(
        model,
        distill_temperature=config.distill_temperature,
        whole_logits=can.whole_logits,
        chunk_tokens=config.logprob_chunk_tokens,
    )
    parallel.shard(scorer)
    return Policy(scorer, can.packs)
