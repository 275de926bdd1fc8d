"""vLLM's NCCL weight transfer with TCP in place of NCCL, so that a machine without GPU can run it.

Only the movement of the bytes is replaced, by subclasses in vLLM's registries: routes, threads and
the loading of weights are those of vLLM. A server loads `register` as a plugin of vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
)


def _join(info: Any, rank: int) -> StatelessProcessGroup:
    return StatelessProcessGroup.create(
        info.master_address, info.master_port, rank=rank, world_size=info.world_size
    )


class TcpWorkerEngine(NCCLWeightTransferEngine):
    """The side of a worker of the engine."""

    def init_transfer_engine(self, init_info: Any) -> None:
        self._group = _join(init_info, init_info.rank_offset + self.parallel_config.rank)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        for name in update_info["names"]:
            self.model.load_weights([(name, self._group.broadcast_obj(None, src=0))])


class TcpTrainerEngine(NCCLTrainerWeightTransferEngine):
    """The trainer's side."""

    def _broadcast(self, source: Any, meta: Any) -> None:
        for _, tensor in self._checked_iter(source, meta):
            self.model_update_group.broadcast_obj(tensor, src=0)

    def shutdown(self) -> None:
        self.model_update_group = None


def join_as_trainer(init_info: Any) -> StatelessProcessGroup:
    """Open the trainer's end, as `nccl_common.trainer_init` does for NCCL."""
    return _join(init_info, 0)


def register() -> None:
    """Replace the engines named `nccl` in this process."""
    for factory, kind in (
        (WeightTransferEngineFactory, TcpWorkerEngine),
        (WeightTransferTrainerFactory, TcpTrainerEngine),
    ):
        factory._registry.pop("nccl", None)
        factory.register_engine("nccl", kind)


def write_plugin(folder: Path) -> Path:
    """Write the metadata by which a vLLM with this folder on its path finds `register`."""
    metadata = folder / "transfer_on_cpu-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transfer-on-cpu\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\ntransfer_on_cpu = {__name__}:register\n"
    )
    return folder
