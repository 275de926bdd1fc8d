"""Key-value caches of the running sequences, and the attention over them.

transformers calls `slot_attention` in place of its own attention functions. A forward pass has one
row of `N` packed tokens without padding:

    [ one new token of each running sequence | the tokens of each new sequence ... ]

A new sequence may begin with tokens whose keys and values are in its slot already.

Shapes: `S` slots of the cache, `T` its length, `H` query heads, `J` key-value heads, `D` the size
of a head.

The attention of transformers' own continuous batching is not used: on a CPU, and on a GPU without
flash-attention, it compares every token with the caches of all sequences and masks the others, so
that 128 short sequences take about 128 times the attention they need.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from atroposlib.errors import ConfigError
from example_trainer.attention_sinks import with_sinks
from example_trainer.model import in_text_layers
from example_trainer.torch_engine.recurrent import SavedStates, SlotStates

ATTENTION_NAME = "atropos_slots"
_NEEDED_TRANSFORMERS = "4.56"
_LENGTH_STEP = 64
_SLOTS_STEP = 8


class SavedSlot(NamedTuple):
    """The caches of a sequence of C tokens."""

    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of each layer, (J, C, D)."""
    states: SavedStates
    """Of recurrent layers, after the last token."""


class NewTokens(NamedTuple):
    """The tokens of one sequence that starts in a forward pass."""

    slot: int
    first: int
    """Position of its first token in the row of packed tokens."""
    length: int
    num_cached: int
    """Tokens of the sequence before them, whose keys and values are in the slot."""
    kept_at: int = 0
    """Tokens of the sequence after which the states of recurrent layers are kept; 0: none."""

    @property
    def parts(self) -> list[slice]:
        """Its places in the row, in two parts if the states between them are kept."""
        end = self.first + self.length
        if not self.kept_at:
            return [slice(self.first, end)]
        middle = self.first + self.kept_at - self.num_cached
        return [slice(self.first, middle), slice(middle, end)]


@dataclass
class PackedTokens:
    """The tokens of one forward pass."""

    tokens: list[int] = field(default_factory=list)
    """[N]"""
    positions: list[int] = field(default_factory=list)
    """[N] position of each token in its sequence."""
    slots: list[int] = field(default_factory=list)
    """[N]"""
    num_running: int = 0
    """Running sequences, in the slots 0, 1, ..., whose tokens come first."""
    starts: list[NewTokens] = field(default_factory=list)

    def add_running(self, token: int, position: int) -> None:
        """Add the last token of the sequence in the next slot."""
        self.tokens.append(token)
        self.positions.append(position)
        self.slots.append(self.num_running)
        self.num_running += 1

    def add_start(
        self, slot: int, tokens: Sequence[int], *, num_cached: int = 0, kept_at: int = 0
    ) -> None:
        """Add the tokens of a new sequence, without the first `num_cached`."""
        length = len(tokens) - num_cached
        self.starts.append(NewTokens(slot, len(self.tokens), length, num_cached, kept_at))
        self.tokens.extend(tokens[num_cached:])
        self.positions.extend(range(num_cached, len(tokens)))
        self.slots.extend([slot] * length)


class SlotCache:
    """Keys and values of one sequence per slot; grows as needed and is released if empty.

    A sequence moves to another slot when one before it ends, so that the slots of the running
    sequences are the first ones and no attention reads unused slots.
    """

    def __init__(self, *, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self._dtype = dtype
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Keys and values of each layer, (S, J, T, D)."""
        self.states = SlotStates()
        self.num_slots = 0
        self.length = 0

    def bytes_per_token(self) -> int:
        """Return the memory of one token in the layers whose keys and values were stored."""
        pairs = itertools.chain.from_iterable(self._layers.values())
        return sum(x.shape[1] * x.shape[3] * x.element_size() for x in pairs)

    def padded_size(self, num_slots: int, length: int) -> int:
        """Return the tokens for which `reserve` with these arguments allocates memory."""
        slots, tokens = _padded(num_slots, length)
        return slots * tokens

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for sequences of up to `length` tokens in the first `num_slots` slots.

        Their contents are kept.
        """
        if num_slots <= self.num_slots and length <= self.length:
            return
        self.num_slots, self.length = _padded(num_slots, length)
        for layer, pair in self._layers.items():
            self._layers[layer] = (self._resized(pair[0]), self._resized(pair[1]))
        self.states.reserve(self.num_slots)

    def erase(self) -> None:
        """Set all contents to zero; the memory is kept, since allocating it again takes longer."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor.zero_()

    def replace_nan(self) -> None:
        """Set NaN and infinity to zero; other sequences would read them as masked entries."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor.nan_to_num_(0.0, 0.0, 0.0)
        self.states.replace_nan()

    def clear(self) -> None:
        """Release the memory."""
        self._layers.clear()
        self.states.clear()
        self.num_slots = self.length = 0

    def copy(self, sources: Sequence[int], targets: Sequence[int], *, length: int) -> None:
        """Copy the first `length` tokens of slots to other slots."""
        if not sources:
            return
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        for pair in self._layers.values():
            for tensor in pair:
                tensor[target, :, :length] = tensor[source, :, :length]
        self.states.copy(source, target)

    def save(self, slot: int, length: int, *, is_beginning: bool = False) -> SavedSlot:
        """Return a copy of the first `length` tokens of a slot.

        The states are those after its last token, or those kept in the forward pass that started
        the sequence if it `is_beginning`.
        """
        layers = {
            layer: (keys[slot, :, :length].clone(), values[slot, :, :length].clone())
            for layer, (keys, values) in self._layers.items()
        }
        states = self.states.kept(slot) if is_beginning else self.states.save(slot)
        return SavedSlot(layers, states)

    def load(self, slot: int, saved: SavedSlot, length: int) -> None:
        """Copy the first `length` tokens of a saved slot to a slot, and the states."""
        for layer, pair in saved.layers.items():
            tensors = self._tensors_of(layer, *pair)
            for tensor, content in zip(tensors, pair, strict=True):
                tensor[slot, :, :length] = content[:, :length]
        self.states.load(slot, saved.states)

    def store(
        self, layer: int, batch: PackedBatch, key_1JND: torch.Tensor, value_1JND: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of a forward pass; return those of the layer, (S, J, T, D)."""
        keys, values = self._tensors_of(layer, key_1JND[0], value_1JND[0])
        keys[batch.slots_N, :, batch.positions_N] = key_1JND[0].transpose(0, 1)
        values[batch.slots_N, :, batch.positions_N] = value_1JND[0].transpose(0, 1)
        return keys, values

    def _tensors_of(
        self, layer: int, key_JND: torch.Tensor, value_JND: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a layer, allocated if these are its first."""
        if layer not in self._layers:
            shape = (self.num_slots, key_JND.shape[0], self.length)
            self._layers[layer] = (
                self._empty(*shape, key_JND.shape[2]), self._empty(*shape, value_JND.shape[2]),
            )  # fmt: skip
        return self._layers[layer]

    def _empty(self, *shape: int) -> torch.Tensor:
        # Zeros, as masked entries are multiplied by 0, which does not remove NaN.
        return torch.zeros(shape, device=self.device, dtype=self._dtype)

    def _resized(self, tensor: torch.Tensor) -> torch.Tensor:
        kv_heads, size = tensor.shape[1], tensor.shape[3]
        resized = self._empty(self.num_slots, kv_heads, self.length, size)
        slots, length = min(tensor.shape[0], self.num_slots), min(tensor.shape[2], self.length)
        resized[:slots, :, :length] = tensor[:slots, :, :length]
        return resized


def _padded(num_slots: int, length: int) -> tuple[int, int]:
    # Few slots are rounded to powers of two: a long sequence may take all the memory there is.
    step = min(_SLOTS_STEP, 1 << max(0, num_slots - 1).bit_length())
    return -(-num_slots // step) * step, -(-length // _LENGTH_STEP) * _LENGTH_STEP


class PackedBatch:
    """`PackedTokens` as tensors, with the cache that the attention reads and writes."""

    def __init__(self, packed: PackedTokens, cache: SlotCache) -> None:
        table = torch.tensor([packed.tokens, packed.positions, packed.slots], device=cache.device)
        self.tokens_N, self.positions_N, self.slots_N = table
        self.cache = cache
        self.num_running = packed.num_running
        self.starts = packed.starts
        self.running_length = max(packed.positions[: packed.num_running], default=-1) + 1

    def running_mask(self, sliding_window: int | None) -> torch.Tensor:
        """Return (B, 1, 1, T): the cached tokens each running sequence attends to."""
        last_B1 = self.positions_N[: self.num_running].unsqueeze(1)
        keys_1T = torch.arange(self.running_length, device=last_B1.device).unsqueeze(0)
        mask_BT = keys_1T <= last_B1
        if sliding_window is not None:
            mask_BT = mask_BT & (keys_1T > last_B1 - sliding_window)
        return mask_BT[:, None, None]


def slot_attention(
    module: Any,  # an attention layer of transformers
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    batch: PackedBatch | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from each packed token to its own sequence, with the signature of transformers.

    Args:
        module: The layer, whose `layer_idx` selects the cache.
        query: (1, H, N, D)
        key: (1, J, N, D)
        value: (1, J, N, D)
        attention_mask: Not used: the batch determines what a token attends to.
        batch: The forward pass; None from layers that do not hand it on.
        scaling: Factor of the scores; None: 1 / sqrt(D).
        sliding_window: Number of tokens before and including itself that a token attends to.
        s_aux: (H,) attention sinks; None: none.
        unused: Settings of other attention functions; those that change the result are rejected.

    Returns:
        (1, N, H, D), and None in place of the attention weights.
    """
    if batch is None:
        raise ConfigError("its layers do not hand the batch on to their attention")
    for name in ("softcap", "position_bias"):
        if unused.get(name) is not None:
            raise ConfigError(f"its attention has {name}")
    keys, values = batch.cache.store(module.layer_idx, batch, key, value)
    parts = []
    if batch.num_running:
        parts.append(_attend_running(batch, query, keys, values, scaling, sliding_window, s_aux))
    for start in batch.starts:
        part = slice(start.first, start.first + start.length)
        own_key, own_value = key[:, :, part], value[:, :, part]
        if start.num_cached:
            length = start.num_cached + start.length
            own_key, own_value = (x[None, start.slot, :, :length] for x in (keys, values))
        attended = _attend_start(
            query[:, :, part], own_key, own_value, scaling, sliding_window, s_aux
        )
        parts.append(attended.transpose(1, 2))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0], None


def _attend_start(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Return (1, H, L, D) for the last L tokens of a sequence that starts."""
    size, is_shared = query.shape[3], query.shape[1] != key.shape[1]
    if sinks_H is not None:
        scaling = size**-0.5 if scaling is None else scaling
        query, key, value = with_sinks(query, key, value, sinks_H, scale=scaling)
    count, length, mask = query.shape[2], key.shape[2], None
    if count < length or (sliding_window is not None and length > sliding_window):
        mask = _start_mask(count, length, sliding_window, query.device)
        if sinks_H is not None:
            mask[:, 0] = True
    attended = scaled_dot_product_attention(
        query, key, value,
        attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=is_shared,
    )  # fmt: skip
    return attended if sinks_H is None else attended[:, :, 1:, :size]


def _attend_running(
    batch: PackedBatch,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Return (1, B, H, D) for the single token of each running sequence."""
    num_running, length = batch.num_running, batch.running_length
    heads, kv_heads = query.shape[1], keys.shape[1]
    # The query heads of one key-value head are the rows of one product.
    query_BJGD = query[0, :, :num_running].transpose(0, 1)
    query_BJGD = query_BJGD.reshape(num_running, kv_heads, heads // kv_heads, query.shape[3])
    keys_BJTD = keys[:num_running, :, :length]
    values_BJTD = values[:num_running, :, :length]
    mask = batch.running_mask(sliding_window)
    if sinks_H is None:
        attended = scaled_dot_product_attention(
            query_BJGD, keys_BJTD, values_BJTD, attn_mask=mask, scale=scaling
        )
    else:  # with the scores at hand, since a further key would copy the whole cache
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        scores = (query_BJGD @ keys_BJTD.transpose(2, 3) * scale).float()
        scores = scores.masked_fill(~mask, -torch.inf)
        sinks = sinks_H.float().view(1, kv_heads, -1, 1).expand(num_running, -1, -1, -1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        attended = weights.to(values.dtype) @ values_BJTD
    return attended.reshape(1, num_running, heads, values.shape[3])


def _start_mask(count: int, length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return (count, length): what the last `count` tokens of a sequence attend to."""
    positions = torch.arange(length, device=device)
    distance = positions[length - count :].unsqueeze(1) - positions.unsqueeze(0)
    return (distance >= 0) & (distance < (length if window is None else window))


def use_slot_attention(model: Any) -> None:
    """Let a transformers model call `slot_attention`.

    Raises:
        ConfigError: transformers is too old, or the model has attention layers of its own.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: F401
    except ImportError as error:
        import transformers

        raise ConfigError(
            f"the torch engine needs transformers {_NEEDED_TRANSFORMERS} or newer, found "
            f"{transformers.__version__}: pip install -U transformers"
        ) from error
    AttentionInterface.register(ATTENTION_NAME, slot_attention)
    try:
        model.set_attn_implementation(in_text_layers(model, ATTENTION_NAME))
    except (AttributeError, ValueError) as error:
        raise ConfigError(
            f"the torch engine cannot serve {type(model).__name__}: {error}; use vLLM"
        ) from error
