"""The trained model prepared for the loop, and the frozen reference of the KL penalty.

Some architectures cannot be packed or scored by chunks: recurrent layers carry state across packed
sequences, heads scale or cap their logits. `probe` therefore tests the model on a few tokens.
`obstacle_to_sharing` compares logprobs and gradients of a small prefix tree with those of its
packed sequences, and `obstacle_to_fusing` those of compiled layers with those of the model's own
code, on the device and with the types of the run.

    --reference-model NAME_OR_PATH    a separate model, loaded in addition to the trained one
    a LoRA mode                       the trained model with its adapters disabled
    --reference-model groups          no model: environments send `ref_logprobs`

Groups with `ref_logprobs` keep them; the others are scored.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from atroposlib.errors import ConfigError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from example_trainer.batch import Batch, Microbatch, make_packed_microbatch, padded_length
from example_trainer.compiled import (
    compile_layers,
    obstacle_to_compiling,
    tolerate_compiler_errors,
    without_checkpointing,
    without_compiled_layers,
)
from example_trainer.config import TrainingConfig
from example_trainer.images import IMAGE_MODELS
from example_trainer.lora import without_adapters
from example_trainer.memory_plan import ModelSizes, StepSetup, advice, plan_memory
from example_trainer.model import (
    FOREIGN_ERRORS,
    attention_note,
    autocast,
    choose_optimizer,
    layer_widths,
    load_frozen_model,
)
from example_trainer.parallel import ONE_PROCESS, Parallel, transformer_blocks
from example_trainer.prefix_tree import build_prefix_tree
from example_trainer.rows import Row
from example_trainer.scoring import (
    PACKED_ATTENTION,
    PolicyScorer,
    auto_chunk_tokens,
    leave_attention_uncompiled,
    linear_logprobs,
    packing_arguments,
)

logger = logging.getLogger(__name__)

_LENGTHS = (5, 7)
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.2  # of a logprob; mixed sequences or scaled logits exceed it by far

_NOISE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_NOISE = 0.02
"""Difference relative to the largest value, if other sequences of a row change. Experts, and some
kernels, round differently with other tokens in the row; mixed sequences differ by far more."""
_NON_CAUSAL = 10
"""Multiple of the noise from which a model is refused: rounding may choose another expert."""


@dataclass(frozen=True)
class Capabilities:
    """Features of a model that training can use."""

    packs: bool
    """Whether several sequences may share a row."""
    whole_logits: bool
    """Whether logits are not just the output layer applied to the hidden states."""
    obstacle: str | None = None
    """Reason why the model cannot be packed; None if it can, or packing is off."""


def probe(
    model: Any,
    *,
    packing: Literal["auto", "on", "off"],
    autocast: contextlib.AbstractContextManager[Any] | None = None,
) -> Capabilities:
    """Test a transformers causal language model on two short sequences.

    Args:
        model: Its mode and gradients are unchanged.
        packing: `off` omits the test of packing.
        autocast: Context of its forward passes, without which bfloat16 kernels may reject float32
            weights; None: no context.

    Raises:
        ConfigError: the model is not causal, or packing is `on` and not supported by it.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), autocast or contextlib.nullcontext():
            _require_causal(model)
            obstacle = None if packing == "off" else _obstacle_to_packing(model)
            whole_logits = not _is_linear_head(model)
    finally:
        model.train(was_training)
    if obstacle is not None and packing == "on":
        raise ConfigError(f"packing=on: {obstacle}; train this model with --packing off")
    return Capabilities(packing != "off" and obstacle is None, whole_logits, obstacle)


def _require_causal(model: Any) -> None:
    """Raise `ConfigError` if later tokens change the logits, as in an encoder such as BERT."""
    first, second = _sequences(model)
    try:
        logits, disturbed = (
            model(input_ids=torch.cat([first, later])[None]).logits[0, : len(first)]
            for later in (second, second.flip(0))
        )
        is_autocast = torch.is_autocast_enabled(model.device.type)
        noise = _NOISE.get(torch.bfloat16 if is_autocast else model.base_model.dtype, _HALF_NOISE)
    except FOREIGN_ERRORS as error:
        logger.debug("not tested whether the model is causal: %s", error)
        return
    difference = float((logits - disturbed).abs().max() / logits.abs().max())
    if difference > _NON_CAUSAL * noise:
        raise ConfigError(
            f"a model of type {model.config.model_type} is not causal: later tokens change its "
            f"logits by {difference:.2g} of the largest; expected a model that generates text from "
            "left to right (for BERT and similar: is_decoder in config.json)"
        )


def _obstacle_to_packing(model: Any) -> str | None:
    """Return the reason why sequences cannot share a row, or None."""
    if "chunked_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
        return "its attention has chunks, which would begin elsewhere"
    columns = _mask_columns(model)
    if columns is not None:
        return f"its attention has a mask for {columns} tokens, which rows would exceed"
    first, second = _sequences(model)
    other = first.flip(0)
    try:
        packed = _packed_logits(model, first, second)[-len(second) :]
        disturbed = _packed_logits(model, other, second)[-len(second) :]
    except FOREIGN_ERRORS as error:
        return f"its forward rejects packed rows ({type(error).__name__}: {error})"
    alone = model(input_ids=second[None]).logits[0]
    if not _is_noise(packed, disturbed, alone.dtype):
        return "its layers mix packed sequences"
    dtype, alone = alone.dtype, alone.to(packed.dtype)
    difference = (packed.log_softmax(-1) - alone.log_softmax(-1)).abs().max()
    if not float(difference) <= _tolerance(dtype):
        return f"packed logprobs differ from padded ones by {float(difference):.2g}"
    return None


def _mask_columns(model: Any) -> int | None:
    """Return the width of a causal mask that attention modules hold, as in GPT-Neo, or None."""
    for name, buffer in model.named_buffers():
        is_square = buffer.dim() >= 2 and buffer.shape[-1] == buffer.shape[-2]
        if is_square and name.endswith(("attn.bias", "attention.bias")):
            return int(buffer.shape[-1])
    return None


def _packed_logits(model: Any, *sequences: torch.Tensor) -> torch.Tensor:
    lengths = [len(sequence) for sequence in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    logits: torch.Tensor = model(
        input_ids=torch.cat(sequences)[None],
        position_ids=positions[None].to(sequences[0].device),
        **packing_arguments(lengths, device=sequences[0].device),
    ).logits
    return logits[0].float() if logits.dtype in (torch.bfloat16, torch.float16) else logits[0]


def _is_linear_head(model: Any) -> bool:
    _, tokens = _sequences(model)
    try:
        hidden = model.base_model(input_ids=tokens[None]).last_hidden_state[0]
        head = model.get_output_embeddings()
        found = linear_logprobs(hidden, head.weight, head.bias, tokens[:, None]).logprobs_NK[:, 0]
    except FOREIGN_ERRORS as error:
        logger.debug("no backbone and linear head: %s", error)
        return False
    logits = model(input_ids=tokens[None]).logits[0]
    whole = logits.to(found.dtype).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return bool((found - whole).abs().max() <= _tolerance(logits.dtype))


def _sequences(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.arange(1, sum(_LENGTHS) + 1, device=model.device) % vocabulary
    first, second = tokens.split(_LENGTHS)
    return first, second


def _is_noise(found: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether values computed in a type differ by rounding only."""
    limit = _NOISE.get(dtype, _HALF_NOISE)
    return bool((found - other).abs().max() <= limit * found.abs().max())


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCE.get(dtype, _HALF_TOLERANCE)


MIN_SHARED_FRACTION = {"cpu": 0.05, "cuda": 0.15}
"""Share of a batch's tokens that `shared_prefixes=auto` must leave out to use trees.

On an H200, trees with FlexAttention without 12 % of the tokens took 1.5 % longer than packed rows.
"""

_GRADIENT_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
_HALF_GRADIENT_TOLERANCE = 0.05
"""Largest norm of the gradients' difference, relative to the gradient; models in float64 have
parts in float32. Without the attention to ancestors the difference is 0.1 to 0.5."""


def obstacle_to_sharing(scorer: PolicyScorer, *, longest: int) -> str | None:
    """Return the reason why equal prefixes cannot be computed once, or None.

    Compares the logprobs and gradients of sequences with equal prefixes, computed as a tree and one
    by one, and changes a branch, which must not affect the others.

    Args:
        scorer: Wrapper of a model that can be packed; its `shares_prefixes` and gradients are
            unchanged.
        longest: Length of the longest sequences that will be trained.
    """
    if scorer.model.training and any(
        isinstance(module, torch.nn.Dropout) and module.p > 0 for module in scorer.model.modules()
    ):
        return "it has dropout, which differs between sequences"
    attention = scorer.model.config.get_text_config()._attn_implementation
    if attention != PACKED_ATTENTION:
        return f"its attention, {attention}, has no trees"
    packed, tree, disturbed = _trial_microbatches(scorer.model, longest)

    def logprobs(microbatch: Microbatch, shares_prefixes: bool) -> torch.Tensor:
        scorer.shares_prefixes = shares_prefixes
        return scorer(microbatch).logprobs_BT[0]

    shared_before = scorer.shares_prefixes
    try:
        return _difference(scorer.model, logprobs, packed, tree, disturbed)
    except NotImplementedError as error:
        return str(error).partition("\n")[0]
    except FOREIGN_ERRORS as error:
        reason = str(error).partition("\n")[0]
        return f"its forward rejects trees ({type(error).__name__}: {reason})"
    finally:
        scorer.shares_prefixes = shared_before


def _trial_microbatches(model: Any, longest: int) -> tuple[Microbatch, Microbatch, Microbatch]:
    """Return branching sequences packed and as a tree, and a tree with another first sequence."""
    vocabulary = model.config.get_text_config().vocab_size
    numbers = [number % vocabulary for number in range(1, 32)]
    prompt, first, second = numbers[:6], numbers[6:11], numbers[11:16]
    branches = [[*prompt, *first], [*prompt, *second[:2], *first], [*prompt, *second], prompt[:3]]
    other = [[*prompt, *reversed(first)], *branches[1:]]

    def microbatch(sequences: Sequence[list[int]], *, as_tree: bool) -> Microbatch:
        rows = [
            Row(ids, ids, [1.0] * len(ids), inference_logprobs=None, temperature=1.0)
            for ids in sequences
        ]
        packed = make_packed_microbatch(rows).to(model.device)
        if not as_tree:
            return packed
        tree = build_prefix_tree([ids[:-1] for ids in sequences], min_shared=1)
        return replace(packed, tree=replace(tree, longest=longest).to(model.device))

    return (
        microbatch(branches, as_tree=False),
        microbatch(branches, as_tree=True),
        microbatch(other, as_tree=True),
    )


def _difference(
    model: Any,
    logprobs: Callable[[Microbatch, bool], torch.Tensor],
    packed: Microbatch,
    tree: Microbatch,
    disturbed: Microbatch,
) -> str | None:
    """Return how the logprobs or gradients of a tree differ from those of its sequences."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.set_grad_enabled(bool(parameters)):
        expected, found = logprobs(packed, False), logprobs(tree, True)
    num_first = packed.sequence_lengths[0] if packed.sequence_lengths else 0
    with torch.no_grad():
        others = logprobs(disturbed, True)[num_first:]
        is_autocast = torch.is_autocast_enabled(model.device.type)
        dtype = torch.bfloat16 if is_autocast else model.base_model.dtype
        if not _is_noise(found[num_first:], others, dtype):
            return "its layers mix branches of a tree"
    return _gap(
        model,
        expected,
        found,
        lambda: logprobs(packed, False),
        comparison="of a tree differ from those of its sequences",
    )


def _gap(
    model: Any,
    expected: torch.Tensor,
    found: torch.Tensor,
    recompute: Callable[[], torch.Tensor],
    *,
    comparison: str,
) -> str | None:
    """Return how logprobs or gradients differ from those expected, or None.

    Differences of gradients are relative to the gradient of the logprobs that `recompute` returns;
    `comparison` is the part of the message between the quantity and the difference.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dtype = model.base_model.dtype if not torch.is_autocast_enabled(model.device.type) else None
    gap = float((found - expected).detach().abs().max())
    if not gap <= (_HALF_TOLERANCE if dtype is None else _tolerance(dtype)):
        return f"logprobs {comparison} by {gap:.2g}"
    if not parameters:
        return None
    weights = torch.linspace(-1.0, 1.0, len(expected), device=expected.device).to(expected.dtype)
    difference = _gradient_norm((weights * (found - expected)).sum(), parameters)
    with torch.enable_grad():
        whole = _gradient_norm((weights * recompute()).sum(), parameters)
    tolerance = _HALF_GRADIENT_TOLERANCE
    if dtype is not None:
        tolerance = _GRADIENT_TOLERANCE.get(dtype, tolerance)
    if not difference <= tolerance * whole:
        return f"gradients {comparison} by {difference / whole:.2g} of their norm"
    return None


def obstacle_to_fusing(scorer: PolicyScorer, *, longest: int) -> str | None:
    """Return the reason why the layers and logprobs of a model cannot be compiled, or None.

    Compares the logprobs and gradients of packed sequences with those of the model's own code.
    Without a reason, the layers are compiled afterwards; gradients are unchanged.
    """
    packed, _, _ = _trial_microbatches(scorer.model, longest)

    def logprobs() -> torch.Tensor:
        values: torch.Tensor = scorer(packed).logprobs_BT[0]
        return values

    is_trained = any(parameter.requires_grad for parameter in scorer.model.parameters())
    # Its layers must not be computed again, compiled, in the backward pass.
    with torch.set_grad_enabled(is_trained), without_checkpointing(scorer.model):
        expected = logprobs()
    try:
        leave_attention_uncompiled()
        compile_layers(scorer.model)
        scorer.fuses = True
        with torch.set_grad_enabled(is_trained):
            found = logprobs()
        obstacle = _gap(
            scorer.model,
            expected,
            found,
            logprobs,
            comparison="of compiled layers differ from those of the model's own code",
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a compiler raises errors of any kind
        reason = str(error).strip().partition("\n")[0]
        obstacle = f"the compiler failed ({type(error).__name__}: {reason})"
    if obstacle is None:
        tolerate_compiler_errors()
    else:
        without_compiled_layers(scorer.model)
        scorer.fuses = False
    return obstacle


def _gradient_norm(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> float:
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return math.hypot(*(float(g.float().norm()) for g in gradients if g is not None))


class PreparedPolicy(NamedTuple):
    """A model prepared for the training loop."""

    scorer: PolicyScorer
    """Wrapper of the model, or of this rank's shard."""
    packs: bool
    """Whether several sequences may share a row."""
    layout: str = ""
    """Layout of sequences and the reason for it, for the log."""
    min_shared_fraction: float | None = None
    """Share of a batch's tokens from which equal prefixes are computed once; None: never."""


def prepare_policy(
    model: Any, config: TrainingConfig, parallel: Parallel = ONE_PROCESS
) -> PreparedPolicy:
    """Test, wrap and shard the model, in place, before the optimizer is created.

    Raises:
        ConfigError: `packing` or `shared_prefixes` is `on` and not supported by the model.
    """
    can = probe(model, packing=config.packing, autocast=autocast(config))
    scorer = PolicyScorer(
        model,
        distill_temperature=config.distill_temperature,
        whole_logits=can.whole_logits,
        chunk_tokens=config.logprob_chunk_tokens,
        needs_entropy=config.entropy_coef > 0 or config.loss_fn is not None,
    )
    is_compiled = _compiles(scorer, can, config)
    scorer.shares_prefixes = _shares_prefixes(scorer, can, config)
    parallel.shard(scorer)
    min_shared_fraction = None
    if scorer.shares_prefixes:
        kind = "cuda" if config.device.startswith("cuda") else "cpu"
        min_shared_fraction = MIN_SHARED_FRACTION[kind]
        if config.shared_prefixes == "on":
            min_shared_fraction = 0.0
    layout = _layout(can, config, shares_prefixes=scorer.shares_prefixes)
    layout += ", compiled layers" if is_compiled else ""
    return PreparedPolicy(scorer, can.packs, layout, min_shared_fraction)


def _compiles(scorer: PolicyScorer, can: Capabilities, config: TrainingConfig) -> bool:
    """Return whether layers have been compiled; log or raise the reason if they should be."""
    setting = config.torch_compile
    if setting == "off" or (setting == "auto" and obstacle_to_compiling(scorer.model, config)):
        return False
    obstacle, level = None, logging.INFO
    if config.is_sharded:
        obstacle = "the weights are sharded"
    elif not can.packs:
        obstacle = can.obstacle or "packing is off"
    elif can.whole_logits:
        obstacle = "its head is not a linear layer"
    else:
        logger.info("compiling the layers; this takes up to a minute (--torch-compile off)")
        with autocast(config):
            obstacle, level = obstacle_to_fusing(scorer, longest=config.seq_len), logging.WARNING
    if obstacle is None:
        return True
    if setting == "on":
        raise ConfigError(f"torch_compile=on: {obstacle}; train with --torch-compile off")
    logger.log(level, "the layers are not compiled: %s", obstacle)
    return False


def _shares_prefixes(scorer: PolicyScorer, can: Capabilities, config: TrainingConfig) -> bool:
    """Return whether equal prefixes are computed once; log or raise the reason if not."""
    if config.shared_prefixes == "off" or config.packing == "off":
        return False
    obstacle = None if can.packs else f"sequences cannot be packed: {can.obstacle}"
    if can.packs and can.whole_logits:
        obstacle = "its head is not a linear layer"
    if obstacle is None:
        with autocast(config):
            obstacle = obstacle_to_sharing(scorer, longest=config.seq_len)
    if obstacle is None:
        return True
    if config.shared_prefixes == "on":
        raise ConfigError(
            f"shared_prefixes=on: {obstacle}; train this model with --shared-prefixes off"
        )
    logger.warning("equal prefixes are computed for each sequence: %s", obstacle)
    return False


def setup_line(model: Any, config: TrainingConfig, policy: PreparedPolicy) -> str:
    """Return the settings chosen for this model and device, and the reasons for fallbacks."""
    trained = next(p for p in model.parameters() if p.requires_grad)
    optimizer = choose_optimizer(config, trains_bfloat16=str(trained.dtype) == "torch.bfloat16")
    weights = str(trained.dtype).removeprefix("torch.")
    kind = "adapters" if config.uses_lora else "trained weights"
    computed = "bfloat16" if config.autocasts else config.loaded_dtype
    return "; ".join(
        (
            f"setup on {config.device}: {weights} {kind}, {computed} forward passes "
            f"(--train-dtype {config.train_dtype})",
            *([_adapters_note(model, config)] if config.uses_lora else ()),
            f"attention {attention_note(model, config.device)}",
            policy.layout,
            f"optimizer {optimizer.describe()}",
        )
    )


def _adapters_note(model: Any, config: TrainingConfig) -> str:
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    num_frozen = sum(p.numel() for p in model.parameters()) - num_trained
    return (
        f"LoRA of rank {config.lora_r}: {num_trained:,} trained and {num_frozen:,} frozen weights"
    )


def _layout(can: Capabilities, config: TrainingConfig, *, shares_prefixes: bool) -> str:
    layout = "sequences packed"
    if shares_prefixes:
        layout += ", equal prefixes computed once"
    if config.packing == "off":
        layout = "sequences padded (--packing off)"
    elif can.obstacle is not None:
        layout = f"sequences padded ({can.obstacle})"
    if can.whole_logits:
        layout += ", whole logits (the model's head is not a linear layer)"
    return layout


def log_step_plan(
    batch: Batch,
    *,
    model: Any,
    optimizer: Any,
    config: TrainingConfig,
    packs: bool,
    fuses: bool = False,
    reference_bytes: int = 0,
) -> None:
    """Log the shapes of this rank's first batch and the memory of the largest possible step.

    `packs` and `fuses`: of the `PreparedPolicy` and its scorer; `reference_bytes`: memory of a
    reference model, not available to the step.
    """
    sizes = sizes_of(model)
    setup = step_setup(config, sizes, optimizer=optimizer, packs=packs, fuses=fuses)
    for line in shape_lines(batch, sizes, setup):
        logger.info("%s", line)
    available_bytes = _available_bytes(config.device, model, reference_bytes=reference_bytes)
    logger.info(
        "memory of a step with %d tokens in its largest pass, in GiB: %s",
        setup.pass_tokens,
        plan_memory(sizes, setup).describe(available_bytes),
    )
    for line in advice(sizes, setup, available_bytes):
        logger.warning("%s", line)


def shape_lines(batch: Batch, sizes: ModelSizes, setup: StepSetup) -> list[str]:
    """Return lines with the shapes of the inputs, hidden states and logits of a batch."""
    shapes = [
        tuple(mb.tokens_BT.shape) if mb.tree is None else (1, mb.num_cells)
        for mb in batch.microbatches
    ]
    largest = max(shapes, key=lambda shape: shape[0] * shape[1])
    trained = max(int((mb.labels_BT >= 0).sum()) for mb in batch.microbatches)
    chunk = min(setup.chunk_tokens, max(1, trained))
    num_inputs, num_computed = batch.summary.num_input_tokens, batch.summary.num_computed_tokens
    shared = f"equal prefixes computed once: {num_computed} of {num_inputs} tokens remain"
    return [
        f"first batch: {len(shapes)} forward passes, largest tokens (B, T) = {largest}; padding "
        f"{batch.summary.padding_fraction:.1%}",
        *([shared] if num_computed < num_inputs else ()),
        f"hidden states (B, T, D) = {(*largest, sizes.hidden)}, logits by chunks (N, V) = "
        f"{(chunk, sizes.vocabulary)}, trained tokens of a pass up to {trained}",
    ]


def sizes_of(model: Any) -> ModelSizes:
    """Read the sizes of a transformers causal language model."""
    settings = model.config.get_text_config()
    parameters = list(model.parameters())
    in_blocks = sum(
        parameter.numel() for block in transformer_blocks(model) for parameter in block.parameters()
    )
    total = sum(parameter.numel() for parameter in parameters)
    widths = layer_widths(settings)
    has_norms = any(name.endswith(("q_norm", "query_norm")) for name, _ in model.named_modules())
    return ModelSizes(
        num_parameters=total,
        num_trained=sum(p.numel() for p in parameters if p.requires_grad),
        num_outside_blocks=total - in_blocks,
        num_layers=len(widths),
        hidden=settings.hidden_size,
        intermediate=max(each.intermediate for each in widths),
        vocabulary=settings.vocab_size,
        weight_bytes=round(sum(p.numel() * p.element_size() for p in parameters) / max(1, total)),
        trained_bytes=max((p.element_size() for p in parameters if p.requires_grad), default=None),
        query_width=max(each.query for each in widths),
        normed_width=max(each.query + each.key for each in widths) if has_norms else 0,
    )


def step_setup(
    config: TrainingConfig, sizes: ModelSizes, *, optimizer: Any, packs: bool, fuses: bool = False
) -> StepSetup:
    """Return the settings that determine memory, for the largest batch they allow."""
    longest = padded_length(config.seq_len, multiple=1 if packs else config.pad_multiple)
    tokens = config.batch_size * longest
    if config.microbatch_tokens is not None:
        tokens = min(config.sequences_per_step * longest, max(config.microbatch_tokens, longest))
    kinds = {"AdamW8bit": "adamw_8bit", "Adafactor": "adafactor"}
    device = torch.device(config.device)
    return StepSetup(
        pass_tokens=tokens,
        chunk_tokens=config.logprob_chunk_tokens
        or auto_chunk_tokens(sizes.vocabulary, device, fuses=fuses),
        activation_bytes=2 if config.autocasts else sizes.weight_bytes,
        optimizer=kinds.get(type(optimizer).__name__, "adamw"),
        gradient_checkpointing=config.gradient_checkpointing,
        shards=config.world_size if config.is_sharded else 1,
        is_compiled=fuses,
    )


def _available_bytes(device: str, model: Any, *, reference_bytes: int) -> float:
    """Return the free memory of the device plus that of the model."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        return float(free + torch.cuda.memory_reserved(device) - reference_bytes)
    import psutil

    held = sum(p.numel() * p.element_size() for p in model.parameters())
    return float(psutil.virtual_memory().available + held)


class Reference:
    """Scores microbatches under frozen weights, at the sampling temperatures.

    `has_adapters`: whether `scorer` wraps the trained model, whose adapters are disabled for it.
    """

    def __init__(
        self, config: TrainingConfig, scorer: PolicyScorer, *, has_adapters: bool = False
    ) -> None:
        self._config = config
        self._scorer = scorer
        self._has_adapters = has_adapters

    @property
    def num_bytes(self) -> int:
        """Memory of the reference's own weights on this rank."""
        if self._has_adapters:
            return 0
        return sum(p.numel() * p.element_size() for p in self._scorer.parameters())

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def logprobs_BT(self, microbatch: Microbatch) -> torch.Tensor:
        """Return (B, T) logprobs of the labels, `MASKED_LOGPROB` where ignored."""
        disabled: contextlib.AbstractContextManager[None] = (
            without_adapters(self._scorer.model) if self._has_adapters else contextlib.nullcontext()
        )
        with disabled, autocast(self._config):
            logprobs_BT = self._scorer(microbatch).logprobs_BT
        return torch.where(microbatch.labels_BT == IGNORE_INDEX, MASKED_LOGPROB, logprobs_BT)


def open_reference(
    config: TrainingConfig, model: Any, policy: PreparedPolicy, parallel: Parallel = ONE_PROCESS
) -> Reference | None:
    """Load the reference of the KL penalty, sharded like the trained model; None without one.

    Raises:
        ConfigError: the reference model cannot be loaded, has fewer tokens than the trained one, or
            cannot be packed while that one can.
    """
    source = config.reference_source
    if source == "base":
        return Reference(config, policy.scorer, has_adapters=True)
    if source != "model":
        return None
    name = str(config.reference_model)
    frozen = load_frozen_model(name, config)
    if model.config.model_type in IMAGE_MODELS and frozen.config.model_type not in IMAGE_MODELS:
        raise ConfigError(
            f"reference_model {name!r} reads no images and the trained model does; name a model of "
            "its type, for example the one the training starts from"
        )
    known, needed = (m.get_input_embeddings().weight.shape[0] for m in (frozen, model))
    if known < needed:
        raise ConfigError(
            f"reference_model {name!r} has {known} tokens and the trained model {needed}; both "
            "must use one tokenizer"
        )
    reference = prepare_policy(frozen, config, parallel)
    if policy.packs and not reference.packs:
        raise ConfigError(
            f"reference_model {name!r} does not support packed sequences ({reference.layout}); use "
            "--packing off"
        )
    return Reference(config, reference.scorer)
