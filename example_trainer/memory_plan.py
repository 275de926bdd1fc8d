"""Predict the memory of an optimizer step on one rank from the sizes of the model.

| part | bytes on a rank |
|---|---|
| weights | parameters x their size, divided by the ranks if sharded |
| gradients | trained parameters x their size, likewise |
| optimizer | trained parameters x bytes of state (`STATE_BYTES`), likewise |
| gathered | sharded only: the parameters outside the blocks, and two unsharded blocks |
| activations | tokens of the largest pass x bytes stored per token for the backward pass |
| casts | autocast only: parameters x 2, the bfloat16 copies of the forward pass |
| logits | float32 copies of one chunk x vocabulary, and the output layer's gradient |

Activations are estimated, since they depend on the kernels. A Llama-like layer stores about ten
tensors of the hidden size and four of the intermediate size, four more where the heads together are
wider than the hidden size, and two of each query and key with norms on them. Autocast adds float32
residuals, norms and casts. Compiled layers store about 0.7 of it, as measured on one GPU. With
gradient checkpointing, each layer stores its input, and one layer all of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

GIB = 2**30
STATE_BYTES = {"adamw": 2.0, "adamw_8bit": 2.0, "adafactor": 0.0}
"""Bytes of optimizer state per trained parameter; of `adamw` in units of the parameter's size."""
_HIDDEN_COPIES = 10
_INTERMEDIATE_COPIES = 4
_ATTENTION_COPIES = 4
_NORMED_COPIES = {False: 2, True: 3}
"""Tensors of normalized queries and keys, by whether the forward pass autocasts."""
_AUTOCAST_COPIES = 7
"""Further tensors of the hidden size with autocast, in its type."""
_COMPILED_SHARE = 0.7
_LOGIT_COPIES = 3


class ModelSizes(NamedTuple):
    """Sizes of a model that determine its memory."""

    num_parameters: int
    num_trained: int
    num_outside_blocks: int
    """Parameters of embeddings, output layer and norms outside the transformer blocks."""
    num_layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    weight_bytes: int
    """Mean bytes of one parameter."""
    trained_bytes: int | None = None
    """Bytes of one trained parameter; None: `weight_bytes`."""
    query_width: int | None = None
    """Heads x their size; None: the hidden size."""
    normed_width: int = 0
    """Width of the queries and keys, if the attention normalizes them."""


class StepSetup(NamedTuple):
    """Settings of a step that determine its memory."""

    pass_tokens: int
    """Tokens of the largest forward pass, with padding."""
    chunk_tokens: int
    """Tokens whose logits are computed at a time."""
    activation_bytes: int
    """Bytes of one activation."""
    optimizer: str
    """`adamw`, `adamw_8bit` or `adafactor`, after fallbacks."""
    gradient_checkpointing: bool
    shards: int = 1
    """Number of ranks that share the weights."""
    is_compiled: bool = False
    """Whether layers are compiled."""


class MemoryPlan(NamedTuple):
    """Peak memory of a step on one rank, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    logits: float
    casts: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def describe(self, available_bytes: float) -> str:
        """Return one line with the parts, their total and the available memory in GiB."""
        parts = ", ".join(
            f"{name} {value / GIB:.2f}" for name, value in self._asdict().items() if value
        )
        return f"{parts}: {self.total / GIB:.2f} of {available_bytes / GIB:.2f} GiB"


def plan_memory(model: ModelSizes, setup: StepSetup) -> MemoryPlan:
    """Predict the memory of a step."""
    trained_bytes = model.trained_bytes or model.weight_bytes
    per_parameter = STATE_BYTES[setup.optimizer]
    if setup.optimizer == "adamw":
        per_parameter *= trained_bytes
    shards = setup.shards
    gathered = 0.0
    if shards > 1:
        block = (model.num_parameters - model.num_outside_blocks) / max(1, model.num_layers)
        gathered = (model.num_outside_blocks + 2 * block) * model.weight_bytes
    chunk = min(setup.chunk_tokens, setup.pass_tokens)
    # Compiled, the logits and their gradient are never stored in float32.
    logits = (1 if setup.is_compiled else _LOGIT_COPIES) * 4 * chunk * model.vocabulary
    return MemoryPlan(
        weights=model.num_parameters * model.weight_bytes / shards,
        gradients=model.num_trained * trained_bytes / shards,
        optimizer=model.num_trained * per_parameter / shards,
        gathered=gathered,
        activations=setup.pass_tokens * _activation_bytes_per_token(model, setup),
        logits=logits + 4 * model.vocabulary * model.hidden,
        casts=2.0 * model.num_parameters if setup.activation_bytes < model.weight_bytes else 0.0,
    )


def advice(model: ModelSizes, setup: StepSetup, available_bytes: float) -> list[str]:
    """Return measures that reduce the memory of a step, cheapest first; empty if it fits."""
    plan = plan_memory(model, setup)
    if plan.total <= available_bytes:
        return []
    found = [
        f"a step needs about {plan.total / GIB:.1f} GiB; {available_bytes / GIB:.1f} GiB are "
        "available"
    ]

    def consider(changed: StepSetup, text: str) -> None:
        saved = plan.total - plan_memory(model, changed).total
        if saved > 0.01 * plan.total:
            found.append(f"{text} saves {saved / GIB:.1f} GiB")

    consider(setup._replace(gradient_checkpointing=True), "--gradient-checkpointing")
    tokens = _tokens_that_fit(model, setup, available_bytes)
    if 0 < tokens < setup.pass_tokens:
        found.append(
            f"forward passes of at most {tokens} tokens fit: --microbatch-tokens {tokens} with "
            "packing, else a smaller --batch-size or --seq-len"
        )
    if setup.optimizer == "adamw":
        consider(setup._replace(optimizer="adamw_8bit"), "--optimizer adamw_8bit (on a GPU)")
    consider(setup._replace(optimizer="adafactor"), "--optimizer adafactor")
    ranks = _ranks_that_fit(model, setup, available_bytes)
    if ranks is not None:
        found.append(f"{ranks} ranks with --parallel-mode fsdp fit (torchrun)")
    if model.num_trained == model.num_parameters:
        found.append("--lora has gradients and states of adapters only")
    return found


def _activation_bytes_per_token(model: ModelSizes, setup: StepSetup) -> float:
    autocasts = setup.activation_bytes < model.weight_bytes
    layer = float(_HIDDEN_COPIES * model.hidden + _INTERMEDIATE_COPIES * model.intermediate)
    layer += _ATTENTION_COPIES * ((model.query_width or model.hidden) - model.hidden)
    layer += _NORMED_COPIES[autocasts] * model.normed_width
    layer += _AUTOCAST_COPIES * model.hidden if autocasts else 0
    layer *= _COMPILED_SHARE if setup.is_compiled else 1.0
    if setup.gradient_checkpointing:
        return (model.num_layers * model.hidden + layer) * setup.activation_bytes
    return model.num_layers * layer * setup.activation_bytes


def _tokens_that_fit(model: ModelSizes, setup: StepSetup, available_bytes: float) -> int:
    """Return the tokens of a pass whose activations fit into the remaining memory."""
    fixed = plan_memory(model, setup)._replace(activations=0.0).total
    return max(0, math.floor((available_bytes - fixed) / _activation_bytes_per_token(model, setup)))


def _ranks_that_fit(model: ModelSizes, setup: StepSetup, available_bytes: float) -> int | None:
    """Return the smallest power of two, above the present number of ranks, that fits, or None."""
    for ranks in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        changed = setup._replace(shards=ranks)
        if ranks > setup.shards and plan_memory(model, changed).total <= available_bytes:
            return ranks
    return None
