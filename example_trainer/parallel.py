"""Training of one model by several processes, and their sharded state.

    rank 0: service --lease--> batch --split--> one share per rank     engine, checkpoints, log
    all:    share --forward, backward--> gradients --sum over ranks--> the same optimizer step

`fsdp` shards weights, gradients and optimizer state (torch's FSDP2); `data` replicates them. The
loss is divided by counts over the whole batch. Gradients are therefore summed over ranks, not
averaged, and the result equals that of one process.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from atroposlib.errors import ConfigError
from example_trainer.config import TrainingConfig

logger = logging.getLogger(__name__)

_LONGEST_WAIT = datetime.timedelta(days=30)
"""Timeout of the other ranks for rank 0, which waits for batches and for the engine."""

Value = TypeVar("Value")


class Parallel:
    """Collective operations of one rank; with one process every method is a no-op.

    All ranks must call the methods, except properties, in the same order. `control` is the group of
    torch.distributed that transfers Python objects; None with one process.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        mode: Literal["fsdp", "data"] = "fsdp",
        device: str = "cpu",
        control: Any = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._mode = mode
        self._device = device
        self._control = control

    @property
    def is_main(self) -> bool:
        """Whether this process uses the service, the engine, the disk and the log."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    @property
    def is_sharded(self) -> bool:
        return not self.is_alone and self._mode == "fsdp"

    def scatter(self, shares: Sequence[Value] | None) -> Value:
        """Return share r of rank 0's shares on rank r; the other ranks pass None."""
        if self.is_alone:
            assert shares is not None
            return shares[0]
        own: list[Any] = [None]
        dist.scatter_object_list(
            own, None if shares is None else list(shares), src=0, group=self._control
        )
        share: Value = own[0]
        return share

    def broadcast(self, value: Value) -> Value:
        """Return rank 0's value on every rank."""
        if self.is_alone:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, by rank."""
        if self.is_alone:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def shard(self, scorer: Any) -> None:
        """Shard the model in `scorer` in place, before the optimizer is created.

        Each transformer block is gathered while it is used. The parameters outside the blocks are
        gathered for the whole pass, because the loss uses the weights of the output layer.
        """
        if not self.is_sharded:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        kind = "cuda" if self._device.startswith("cuda") else "cpu"
        mesh = init_device_mesh(kind, (self.world_size,))
        for block in transformer_blocks(scorer.model):
            fully_shard(block, mesh=mesh)
        fully_shard(scorer, mesh=mesh)

    @property
    def loss_factor(self) -> float:
        """Factor of a rank's loss before `backward`, since FSDP2 averages over ranks."""
        return float(self.world_size) if self.is_sharded else 1.0

    def sum_gradients(self, model: Any) -> None:
        """Sum the gradients over the ranks, unless FSDP2 does."""
        if self.is_alone or self.is_sharded:
            return
        parameters = [p for p in model.parameters() if p.requires_grad]
        # As in one process, weights that the batch does not use keep no gradient: with one of zero,
        # the optimizer would decay them and move them by their momentum.
        has_gradient = [p.grad is not None for p in parameters]
        is_used = torch.tensor(has_gradient, dtype=torch.int32, device=self._device)
        dist.all_reduce(is_used, op=dist.ReduceOp.MAX)
        pending = []
        for parameter, used in zip(parameters, is_used.tolist(), strict=True):
            if used:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                pending.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in pending:
            work.wait()

    def clip_gradients(self, model: Any, *, max_norm: float) -> float:
        """Clip the gradient of the whole model and return its norm before that."""
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if self.is_sharded:
            norm = norm.full_tensor()  # a DTensor, not summed over the ranks yet
        return float(norm)

    def whole_model(self, model: Any) -> Any:
        """Return an object that saves like the whole model; full weights on rank 0 only."""
        if not self.is_sharded:
            return model
        return GatheredModel(model, gather_weights(model, keep=self.is_main))

    def whole_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the optimizer state of the whole model; empty on ranks other than 0."""
        if not self.is_sharded:
            return dict(optimizer.state_dict())
        return gather_optimizer_state(optimizer, keep=self.is_main)


ONE_PROCESS = Parallel()


def transformer_blocks(model: Any) -> list[torch.nn.Module]:
    """Return the blocks of a transformers model, sharded or not, in order."""
    kinds = set(model._no_split_modules or ())
    return [m for m in model.modules() if type(m).__name__.removeprefix("FSDP") in kinds]


@contextlib.contextmanager
def open_parallel(config: TrainingConfig) -> Iterator[Parallel]:
    """Context in which this process belongs to the process group.

    Raises:
        ConfigError: the rank is not below the number of processes, or the address of rank 0 is
            unknown.
    """
    on_gpu = config.device.startswith("cuda")
    if on_gpu and ":" in config.device:
        # Random states and the peak memory are those of the current GPU.
        torch.cuda.set_device(config.device)
    if config.world_size == 1:
        yield ONE_PROCESS
        return
    if config.trainer_rank >= config.world_size:
        raise ConfigError(
            f"trainer_rank={config.trainer_rank} must be below world_size={config.world_size}"
        )
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=config.init_method,
            rank=config.trainer_rank,
            world_size=config.world_size,
        )
    except (ValueError, RuntimeError) as error:  # a missing variable of env://, another scheme
        raise ConfigError(
            f"world_size={config.world_size}: {error}; start the trainer with torchrun, which sets "
            "the variables, or leave out --world-size"
        ) from error
    yield Parallel(
        rank=config.trainer_rank,
        world_size=config.world_size,
        mode=config.parallel_mode,
        device=config.device,
        control=dist.new_group(backend="gloo", timeout=_LONGEST_WAIT),
    )
    # Not after a failure: the other ranks may never get here, and torchrun ends them.
    dist.destroy_process_group()


class GatheredModel:
    """A sharded model that saves like a whole one; `weights` are full tensors on the CPU."""

    def __init__(self, model: Any, weights: Mapping[str, torch.Tensor]) -> None:
        self._model = model
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._weights)

    def save_pretrained(self, directory: Path, **options: Any) -> None:
        self._model.save_pretrained(directory, **{"state_dict": self.state_dict(), **options})


def gather_weights(model: Any, *, keep: bool) -> dict[str, torch.Tensor]:
    """Return the full weights on the CPU; tied ones share a tensor. All ranks call this.

    A rank without `keep` takes part in the communication and returns an empty dictionary.
    """
    whole: dict[str, torch.Tensor] = {}
    by_identity: dict[int, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in by_identity:
            by_identity[id(value)] = _whole(value.detach(), keep=keep)
        if keep:
            whole[name] = by_identity[id(value)]
    return whole


def gather_optimizer_state(optimizer: Any, *, keep: bool) -> dict[str, Any]:
    """Return the `state_dict()` of an optimizer of the whole model. All ranks call this."""
    state = optimizer.state_dict()
    slots = {
        index: {
            name: _whole(value, keep=keep) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        for index, values in state["state"].items()
    }
    return {"state": slots, "param_groups": state["param_groups"]} if keep else {}


def load_optimizer_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load the optimizer state of the whole model; each rank loads its shard."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    slots: dict[int, dict[str, Any]] = {}
    for index, values in state["state"].items():
        like = parameters[index]
        slots[index] = {
            name: distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
            if isinstance(like, DTensor)
            and isinstance(value, torch.Tensor)
            and value.shape == like.shape
            else value
            for name, value in values.items()
        }
    optimizer.load_state_dict({**state, "state": slots})


def _whole(value: torch.Tensor, *, keep: bool) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.cpu() if keep else value.new_empty(0)
