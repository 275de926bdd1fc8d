"""Weight updates over GPU links, by vLLM's own transfer engines and without files.

`nccl` sends between GPUs, also of other hosts; `ipc` shares the memory of one GPU. vLLM brings both
sides: this page connects them, pauses the engine and names the version. Only the documented HTTP
routes of vLLM's development mode are used.

    POST /init_weight_transfer_engine    once; with NCCL, both sides meet at the trainer
    POST /pause                          by `sync_pause_mode`
    POST /start_weight_update
    POST /update_weights                 names, types and shapes; the tensors take the GPU link
    POST /finish_weight_update           with the policy version
    POST /reset_prefix_cache, /resume
"""

from __future__ import annotations

import base64
import logging
import pickle
import shlex
import socket
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from atroposlib.errors import ConfigError, InferenceError, MissingExtraError
from atroposlib.utils.starting import vllm_command
from atroposlib.utils.text import hide_secrets
from example_trainer.config import TrainingConfig
from example_trainer.engine import EngineControl, engine_addresses
from example_trainer.processes import find_free_port
from example_trainer.vllm_manager import transfer_flags

if TYPE_CHECKING:
    import torch

__all__ = ["WeightTransfer"]

logger = logging.getLogger(__name__)


class WeightTransfer:
    """Sends the weights of a model to the configured engines, one after the other.

    Errors of an engine are `InferenceError`; the next `send` connects to it again, and does not
    repeat a step for the engines that have it.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._links = [_EngineLink(url, config) for url in engine_addresses(config)]
        self._outdated: dict[int, list[_EngineLink]] = {}
        """Engines without the weights of the last step, by its number; empty if all have."""

    def require_backend(self) -> None:
        """Raise `ConfigError` if an engine was not started for this kind of transfer."""
        for link in self._links:
            link.require_backend()

    def send(self, model: Any, step: int) -> None:
        """Let every engine serve the weights of `model`, the policy after `step` steps."""
        links = self._outdated.get(step, self._links)
        for position, link in enumerate(links):
            self._outdated = {step: links[position:]}
            link.send(model, step)
        self._outdated = {}

    def close(self) -> None:
        for link in self._links:
            link.close()


class _EngineLink:
    """The trainer's side of the transfer to one engine."""

    def __init__(self, url: str, config: TrainingConfig) -> None:
        self._config = config
        self._control = EngineControl(url)
        self._source = _make_source(config)
        self._client = _TransferRoutes(self._control)
        self._sender: Any = None
        """vLLM's engine on this side; None until the first update, and after an error."""

    def require_backend(self) -> None:
        backend = self._config.sync_transport
        found = self._control.transfer_backend()
        if found != backend:
            flags = shlex.join(transfer_flags(backend))
            serializes = "VLLM_ALLOW_INSECURE_SERIALIZATION=1 " if backend == "ipc" else ""
            raise ConfigError(
                f"sync_transport={backend}, but the engine at {self._control.shown_url} has the "
                f"transfer engine {found or 'none'}; start it with VLLM_SERVER_DEV_MODE=1 "
                f"{serializes}{vllm_command()} {self._config.model_name} {flags}, or use "
                "--sync-transport disk"
            )

    def send(self, model: Any, step: int) -> None:
        self._source.weights, self._client.version = checkpoint_weights(model), step
        try:
            if self._sender is None:
                self._sender = self._connect()
            with self._control.paused(self._config.sync_pause_mode):
                self._sender.send_weights()
                self._control.drop_caches()
        except (RuntimeError, OSError, ValueError) as error:
            self._disconnect()
            if isinstance(error, InferenceError):
                raise
            raise InferenceError(
                f"the transfer of weights to the engine at {self._control.shown_url} failed: "
                f"{hide_secrets(str(error))}; with --sync-transport disk, engines load files "
                "instead"
            ) from error
        except BaseException:
            self._disconnect()
            raise
        finally:
            self._source.weights = {}

    def close(self) -> None:
        if self._sender is not None:
            try:
                self._control.post("/shutdown_weight_transfer_engine")
            except InferenceError as error:
                logger.warning("the engine did not end the transfer: %s", error)
        self._disconnect()
        self._control.close()

    def _connect(self) -> Any:
        """Return vLLM's transfer engine of this side, connected to all workers of the engine."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        select_device(self._config.device)
        begin = _begin_ipc if self._config.sync_transport == "ipc" else _begin_nccl
        return WeightTransferTrainerFactory.trainer_init(
            begin(self._control), client=self._client, source=self._source
        )

    def _disconnect(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None:
            try:
                sender.shutdown()
            except (RuntimeError, OSError) as error:  # must not hide why it ends
                logger.warning("the trainer's side of the transfer did not end: %s", error)


def select_device(device: str) -> None:
    """Make the trainer's GPU the current one, on which vLLM's side works; `cuda` already is."""
    import torch

    gpu = torch.device(device)
    if gpu.index is not None:
        torch.cuda.set_device(gpu)


def _begin_nccl(control: EngineControl) -> Any:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(
        rank=0,
        master_address=address_towards(control.base_url),
        master_port=find_free_port(),
        world_size=1 + control.num_workers(),
    )


def _begin_ipc(_: EngineControl) -> Any:
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    return IPCTrainerInitInfo(rank=0, packed=True)


def address_towards(url: str) -> str:
    """Return the address of this host from which connections to `url` come."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with socket.create_connection((parts.hostname or "127.0.0.1", port), timeout=30.0) as probe:
        return str(probe.getsockname()[0])


class _TransferRoutes:
    """The routes by which vLLM's trainer side directs an engine; its `VLLMWeightSyncClient`."""

    def __init__(self, control: EngineControl) -> None:
        self._control = control
        self.version = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._control.post("/init_weight_transfer_engine", json={"init_info": init_info})

    def start_weight_update(self) -> None:
        self._control.post("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Announce tensors. Handles of GPU memory are pickled, which is the form of the route."""
        handles = update_info.get("ipc_handles")
        if handles is not None:
            pickled = base64.b64encode(pickle.dumps(handles)).decode()
            kept = {name: value for name, value in update_info.items() if name != "ipc_handles"}
            update_info = {**kept, "ipc_handles_pickled": pickled}
        self._control.post("/update_weights", json={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = {"weight_version": weight_version or str(self.version)}
        self._control.post("/finish_weight_update", json=body)


def checkpoint_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a transformers model under the names of its checkpoint, each once.

    A tied output layer is left out: the engine ties its own.
    """
    from transformers.core_model_loading import revert_weight_conversion

    weights: dict[str, torch.Tensor] = {}
    seen = set()
    for name, weight in model.state_dict().items():
        place = (weight.data_ptr(), weight.shape)
        if place not in seen:
            seen.add(place)
            weights[name] = weight.detach()
    return dict(revert_weight_conversion(model, weights))


def _make_source(config: TrainingConfig) -> Any:
    """Return a `WeightSource` of vLLM, which is imported for these transports only.

    Raises:
        MissingExtraError: vLLM is not installed where the trainer runs.
    """
    import torch

    try:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    except ImportError as error:
        raise MissingExtraError("vllm", extra="vllm") from error

    class CheckpointSource(WeightSource):  # type: ignore[misc]
        """The weights of an update, in the engine's element type and on the trainer's GPU."""

        weights: Mapping[str, torch.Tensor] = MappingProxyType({})

        def metadata(self) -> list[ParamMeta]:
            return [
                ParamMeta(name, dtype or weight.dtype, tuple(weight.shape))
                for name, weight in self.weights.items()
            ]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in self.weights.items():
                yield name, weight.to(device, dtype)

    device = torch.device(config.device)
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    return CheckpointSource()
