"""The trained model made ready for the loop: what it can do found out, scored, shared by ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

from example_trainer.capabilities import Capabilities, probe
from example_trainer.config import TrainingConfig
from example_trainer.model import attention_note, autocast
from example_trainer.optimizer import choose_optimizer
from example_trainer.parallel import ONE_PROCESS, Parallel
from example_trainer.scoring import PolicyScorer

__all__ = ["Policy", "prepare_policy", "setup_line"]


class Policy(NamedTuple):
    """A model as the loop uses it."""

    scorer: PolicyScorer
    """Around the model; each rank's part of it where weights are sharded."""
    packs: bool
    """Whether several sequences may share a row."""
    layout: str = ""
    """How sequences are laid out and why, for the log."""


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
    can = probe(model, packing=config.packing, autocast=autocast(config))
    scorer = PolicyScorer(
        model,
        distill_temperature=config.distill_temperature,
        whole_logits=can.whole_logits,
        chunk_tokens=config.logprob_chunk_tokens,
    )
    parallel.shard(scorer)
    return Policy(scorer, can.packs, _layout(can, config))


def setup_line(model: Any, config: TrainingConfig, policy: Policy) -> str:
    """Return what was chosen for this model and device, and why where it is a fallback."""
    trained = next(p for p in model.parameters() if p.requires_grad)
    optimizer = choose_optimizer(config, trains_bfloat16=str(trained.dtype) == "torch.bfloat16")
    weights = str(trained.dtype).removeprefix("torch.")
    computed = "bfloat16" if config.autocasts else config.loaded_dtype
    return "; ".join(
        (
            f"setup on {config.device}: {weights} trained weights, {computed} forward passes "
            f"(--train-dtype {config.train_dtype})",
            f"attention {attention_note(model, config.device)}",
            policy.layout,
            f"optimizer {optimizer.describe()}",
        )
    )


def _layout(can: Capabilities, config: TrainingConfig) -> str:
    layout = "sequences packed"
    if config.packing == "off":
        layout = "sequences padded (--packing off)"
    elif can.obstacle is not None:
        layout = f"sequences padded ({can.obstacle})"
    if can.whole_logits:
        layout += ", whole logits (the model's logits are more than its output layer)"
    return layout
