"""Recurrent layers in a packed batch: every sequence continues from the states in its slot.

Qwen3.5, LFM2, Granite 4 and other models have layers of linear attention or convolutions. Their
code in transformers computes a batch of sequences (B, T, D), from the states of a `Cache` or from
none. `use_slot_states` lets these layers compute the packed row of a forward pass:

    row (1, N, D)     running sequences, one token each  ─► (B, 1, D)  from the states of B slots
                      a new sequence of L tokens         ─► (1, L, D)  from none, or after cached
                                                                       tokens those of its slot

The states of a slot take the same memory for any number of tokens. Layers that keep states in
another way compute other logprobs, which the comparison at the start finds.

Shape suffixes: S slots of the states, B running sequences, N packed tokens, D hidden size.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from example_trainer.model import FOREIGN_ERRORS

if TYPE_CHECKING:
    from example_trainer.torch_engine.attention import PackedBatch

__all__ = ["RECURRENT_LAYERS", "SavedStates", "SlotStates", "use_slot_states"]

RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid"})
"""Kinds of layers with states, as transformers names them; a hybrid one has an attention too."""

_PROBED_TOKENS = 6
_CACHE_ARGUMENTS = ("cache_params", "past_key_values")


class _StateKey(NamedTuple):
    layer: int
    field: str
    """Attribute of a cache layer of transformers: `conv_states` or `recurrent_states`."""
    number: int


SavedStates = dict[_StateKey, torch.Tensor]
"""States of one sequence."""


class SlotStates:
    """States of the recurrent layers, for the sequence of each slot."""

    def __init__(self) -> None:
        self._states: dict[_StateKey, torch.Tensor] = {}
        """(S, ...) each."""
        self._num_slots = 0
        self._kept: dict[int, SavedStates] = {}
        """States after the beginnings of sequences in the last forward pass, by slot."""

    def bytes_per_slot(self) -> int:
        """Return the memory of one sequence in the layers that have left states."""
        return sum(x.element_size() * x[0].numel() for x in self._states.values())

    def reserve(self, num_slots: int) -> None:
        """Make room for sequences in the first `num_slots` slots; their states are kept."""
        self._num_slots = num_slots
        for key, state in self._states.items():
            resized = state.new_zeros((num_slots, *state.shape[1:]))
            kept = min(num_slots, len(state))
            resized[:kept] = state[:kept]
            self._states[key] = resized

    def clear(self) -> None:
        """Release the memory."""
        self._states.clear()
        self._kept.clear()

    def replace_nan(self) -> None:
        """Set NaN and infinity to zero."""
        for state in self._states.values():
            state.nan_to_num_(0.0, 0.0, 0.0)

    def save(self, slot: int) -> SavedStates:
        """Return a copy of the states of a slot."""
        return {key: state[slot].clone() for key, state in self._states.items()}

    def kept(self, slot: int) -> SavedStates:
        """Return the states after the beginning of a sequence that has just started."""
        return self._kept[slot]

    def drop_kept(self) -> None:
        """Release the states after beginnings."""
        self._kept.clear()

    def load(self, slot: int, saved: SavedStates) -> None:
        """Copy saved states to a slot."""
        for key, state in saved.items():
            self._slots_for(key, state[None])[slot] = state

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the states of slots to other slots."""
        for state in self._states.values():
            state[target] = state[source]

    def run(
        self,
        layer: int,
        compute: Callable[[torch.Tensor, Any], torch.Tensor],
        hidden_1ND: torch.Tensor,
        batch: PackedBatch,
    ) -> torch.Tensor:
        """Return (1, N, D), the output of a layer for a packed batch, and update its states.

        `compute` returns the output (B, T, D) for hidden states and a cache of transformers.
        """
        outputs = []
        if batch.num_running:
            hidden_B1D = hidden_1ND[0, : batch.num_running, None]
            cache = _cache_of(layer, self._running_states(layer, batch.num_running))
            outputs.append(compute(hidden_B1D, cache)[:, 0])
            for key, state in _states_in(layer, cache):
                slots = self._states[key][: batch.num_running]
                if state.data_ptr() != slots.data_ptr():  # not updated in place
                    slots.copy_(state)
        for start in batch.starts:
            states = self._slot_states(layer, start.slot) if start.num_cached else {}
            for number, part in enumerate(start.parts):
                if number:
                    own = self._kept.setdefault(start.slot, {})
                    own.update({key: state[0].clone() for key, state in states.items()})
                cache = _cache_of(layer, states)
                outputs.append(compute(hidden_1ND[:, part], cache)[0])
                states = dict(_states_in(layer, cache))
            for key, state in states.items():
                self._slots_for(key, state)[start.slot] = state[0]
        return torch.cat(outputs)[None]

    def _running_states(self, layer: int, count: int) -> dict[_StateKey, torch.Tensor]:
        return {key: x[:count] for key, x in self._states.items() if key.layer == layer}

    def _slot_states(self, layer: int, slot: int) -> dict[_StateKey, torch.Tensor]:
        # A copy, since layers may change states in place.
        chosen = {key: x for key, x in self._states.items() if key.layer == layer}
        return {key: x[slot : slot + 1].clone() for key, x in chosen.items()}

    def _slots_for(self, key: _StateKey, state: torch.Tensor) -> torch.Tensor:
        if key not in self._states:
            self._states[key] = state.new_zeros((self._num_slots, *state.shape[1:]))
        return self._states[key]


def _cache_of(layer: int, states: dict[_StateKey, torch.Tensor]) -> Any:
    """Return a cache of transformers with the states of one layer, if there are any."""
    from transformers.cache_utils import Cache, LinearAttentionLayer

    kept = LinearAttentionLayer()
    for key, state in states.items():
        getattr(kept, key.field)[key.number] = state
        getattr(kept, f"is_{key.field}_initialized")[key.number] = True
        kept.has_previous_state[key.number] = True
        if key.field == "conv_states":
            kept.conv_kernel_size[key.number] = state.shape[-1]
        kept.device, kept.dtype = state.device, state.dtype
    return Cache(layers=[kept] * (layer + 1))


def _states_in(layer: int, cache: Any) -> Iterator[tuple[_StateKey, torch.Tensor]]:
    for field in ("conv_states", "recurrent_states"):
        for number, state in getattr(cache.layers[layer], field).items():
            if state is not None:
                yield _StateKey(layer, field, number), state


class _CurrentBatch:
    """The batch of the forward pass that is going on, as not all layers are given it."""

    batch: PackedBatch | None = None

    def note(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.batch = kwargs.get("batch")


def use_slot_states(model: Any) -> bool:
    """Let the recurrent layers of a transformers model compute packed batches.

    Forward passes without a `batch` are unchanged. Does nothing for models without such layers.

    Returns:
        Whether all of them can compute several tokens from earlier states.
    """
    try:
        from transformers.cache_utils import LinearAttentionLayer  # noqa: F401
    except ImportError:  # an older version; the comparison at the start refuses these models
        return True
    found = list(_recurrent_modules(model))
    if not found:
        return True
    by_class = {type(module): (module, name) for module, name in found}
    continues = all(_continues_from_states(model, *each) for each in by_class.values())
    current = _CurrentBatch()
    model.register_forward_pre_hook(current.note, with_kwargs=True)
    for module, cache_argument in found:
        module.forward = _packed_forward(module, cache_argument, current)
    return continues


def _continues_from_states(model: Any, module: Any, cache_argument: str) -> bool:
    """Whether a layer computes the same output for tokens in two parts as for all at once.

    Some layers compute several tokens from no states, whatever the cache has. In the type of the
    model, the difference might pass for rounding.
    """
    layer = copy.deepcopy(module).float()
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2 * _PROBED_TOKENS, model.config.get_text_config().hidden_size)
    hidden_1TD = torch.randn(shape, generator=generator).to(model.device)

    def compute(part_1TD: torch.Tensor, cache: Any) -> torch.Tensor:
        output: torch.Tensor = layer(part_1TD, **{cache_argument: cache})
        return output

    try:
        with torch.inference_mode():
            whole = compute(hidden_1TD, _cache_of(module.layer_idx, {}))
            cache = _cache_of(module.layer_idx, {})
            parts = [compute(part, cache) for part in hidden_1TD.split(_PROBED_TOKENS, dim=1)]
    except FOREIGN_ERRORS:
        return False
    tolerance = 1e-3 * float(whole.abs().max())
    return bool(torch.allclose(torch.cat(parts, dim=1), whole, rtol=0, atol=tolerance))


def _recurrent_modules(model: Any) -> Iterator[tuple[Any, str]]:
    """Yield the layers that have states, and the name of the argument for their cache."""
    for module in model.modules():
        convolves = any(isinstance(child, torch.nn.Conv1d) for child in module.children())
        if not convolves or not hasattr(module, "layer_idx"):
            continue
        known = inspect.signature(module.forward).parameters
        yield from ((module, name) for name in _CACHE_ARGUMENTS if name in known)


def _packed_forward(
    module: Any, cache_argument: str, current: _CurrentBatch
) -> Callable[..., torch.Tensor]:
    compute_batch = module.forward

    def compute(hidden_BTD: torch.Tensor, cache: Any) -> torch.Tensor:
        output: torch.Tensor = compute_batch(hidden_BTD, **{cache_argument: cache})
        return output

    def forward(hidden_states: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if current.batch is None:
            unpacked: torch.Tensor = compute_batch(hidden_states, *args, **options)
            return unpacked
        states = current.batch.cache.states
        return states.run(module.layer_idx, compute, hidden_states, current.batch)

    return forward
