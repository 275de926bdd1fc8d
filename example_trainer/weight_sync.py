"""Weight updates of the inference engine: one protocol, one class per strategy.

`RestartSync` and `LoraRestartSync` restart an engine that the trainer owns. `InPlaceSync` and
`LoraSwapSync` update a running engine. `AutoSync` chooses.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from atroposlib.errors import ConfigError, EngineSetupError, InferenceError
from atroposlib.utils.listening import is_loopback
from atroposlib.utils.starting import vllm_command
from example_trainer.checkpointing import replace_directory
from example_trainer.config import BUILT_MODES, TRANSFER_BACKENDS, TrainingConfig
from example_trainer.engine import (
    EngineConnection,
    EngineControl,
    EngineUnreachableError,
    NoInPlaceUpdatesError,
    control_of,
    engine_addresses,
)
from example_trainer.lora import engine_rank
from example_trainer.vllm_manager import (
    VllmServer,
    check_vllm_health,
    is_port_in_use,
    launches_with_processed_logprobs,
    require_engine_package,
    wait_for_orphaned_engine,
)
from example_trainer.weight_transfer import WeightTransfer

logger = logging.getLogger(__name__)


class OwnedEngine:
    """Common part of the strategies that restart an engine.

    They work with any vLLM and free the GPU for the optimizer step before a restart. Each update
    takes the startup time of the engine.
    """

    mode: str
    publishes_final = False
    mode_for_running_engine: str
    """Weight bridge mode to recommend if an engine is already running."""

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._server = VllmServer(config, updatable=False)

    def check_before_load(self) -> None:
        wait_for_orphaned_engine(self._config)
        port, mode = self._config.vllm_port, self.mode
        if is_port_in_use(port, self._config.vllm_connect_host):
            raise EngineSetupError(
                f"port {port} is taken, but weight_bridge_mode={mode} launches its own engine "
                "there; stop that process, choose another --vllm-port, or use "
                f"--weight-bridge-mode {self.mode_for_running_engine} to update a vLLM that is "
                "already running"
            )
        require_engine_package(self._config)

    def before_step(self, *, sync_follows: bool) -> None:
        """Stop the engine, which frees its GPU memory, if it is restarted after the step."""
        if sync_follows:
            self._server.stop()

    def check_alive(self) -> None:
        self._server.check_alive()

    def returns_processed_logprobs(self) -> bool:
        return launches_with_processed_logprobs(self._config)

    def close(self) -> None:
        self._server.stop()


_VLLM_ROUTE = "/v1/load_lora_adapter"
_COMPANION_ROUTE = "/lora/load"
_ADAPTER_DIRECTORY = re.compile(r"adapter_step_(\d+)")


class AdapterFolders:
    """Directories `adapter_step_<step>` under `save_path` with the published adapters.

    Every step has its own path, since vLLM keeps the caches of an adapter by path. The newest
    `keep_checkpoints` are kept, including those that a resumed run wrote before. A new run does not
    remove those of earlier runs.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self._root = Path(config.save_path)
        self._keep = config.keep_checkpoints
        self._written = self._found() if config.resume else []
        """Oldest first."""

    def write(self, model: Any, step: int) -> Path:
        """Write the adapters of the model after `step` and return the directory."""
        path = self._root / f"adapter_step_{step}"
        self._written = [each for each in self._written if each != path] + [path]
        return replace_directory(path, model.save_pretrained)

    def drop_old(self) -> None:
        """Delete all but the newest, which the engine has to serve by now."""
        if self._keep is None:
            return
        for path in self._written[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)
        self._written = self._written[-self._keep :]

    def _found(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        steps = {
            int(match[1]): path
            for path in self._root.iterdir()
            if (match := _ADAPTER_DIRECTORY.fullmatch(path.name))
        }
        return [steps[step] for step in sorted(steps)]


class LoraSwapSync:
    """Swaps the adapter of a running external vLLM, under one name and without a pause.

    A stock vLLM and the companion server (`vllm_api_server`) have different routes. Rollouts
    request the model `lora_name`. Running requests continue with the new adapter and the caches of
    the old one; new requests use the new adapter only.
    """

    mode = "lora_only"
    publishes_final = True

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._engine = EngineConnection(f"http://{config.vllm_connect_host}:{config.vllm_port}")
        self._route = _VLLM_ROUTE
        self._folders = AdapterFolders(config)

    def check_before_load(self) -> None:
        if not check_vllm_health(self._config.vllm_port, self._config.vllm_connect_host):
            raise EngineSetupError(
                f"no engine answers GET {self._engine.shown_url}/health with 200; "
                "weight_bridge_mode=lora_only needs a running vLLM: start one, or use "
                "--weight-bridge-mode lora_restart, which launches its own"
            )
        # A request without a name is rejected and has no effect; 404 and 405 mean no route.
        statuses = {}
        for route in (_VLLM_ROUTE, _COMPANION_ROUTE):
            statuses[route] = self._engine.send("POST", route, json={}).status_code
            if statuses[route] in (400, 422):
                self._route = route
                break
        else:
            raise ConfigError(
                f"the engine at {self._engine.shown_url} cannot load adapters while it runs (POST "
                f"{_VLLM_ROUTE} answered {statuses[_VLLM_ROUTE]}); start vLLM with --enable-lora "
                f"--max-lora-rank {engine_rank(self._config.lora_r)} and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True "
                "in its environment, or use --weight-bridge-mode lora_restart"
            )

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        self.publish(model, step=step, checkpoint=None)

    def before_step(self, *, sync_follows: bool) -> None:
        pass

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        directory = self._folders.write(model, step)
        name, path = self._config.lora_name, str(directory.resolve())
        if self._route == _COMPANION_ROUTE:
            body: dict[str, Any] = {"adapter_name": name, "adapter_path": path}
        else:
            body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        answer = self._engine.send("POST", self._route, json=body)
        if answer.status_code != 200:
            raise InferenceError(
                f"POST {self._engine.shown_url}{self._route} answered {answer.status_code}: "
                f"{answer.text[:500]}; the model is served as {self._config.lora_name!r} and the "
                "engine must be able to read the directory"
            )
        self._folders.drop_old()

    def check_alive(self) -> None:
        """Do nothing: the next swap fails if the external engine has died."""

    def returns_processed_logprobs(self) -> bool:
        with contextlib.closing(EngineControl(self._engine.base_url)) as control:
            return control.returns_processed_logprobs()

    def close(self) -> None:
        self._engine.close()


class LoraRestartSync(OwnedEngine):
    """Restarts an owned engine on new adapters; rollouts request the model `lora_name`."""

    mode = "lora_restart"
    mode_for_running_engine = "lora_only"

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__(config)
        self._folders = AdapterFolders(config)

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        self._launch(self._folders.write(model, step))

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        directory = self._folders.write(model, step)
        self._server.stop()
        self._launch(directory)

    def _launch(self, directory: Path) -> None:
        rank = engine_rank(self._config.lora_r)
        more = ["--enable-lora", "--max-lora-rank", str(rank)]
        more += ["--lora-modules", f"{self._config.lora_name}={directory.resolve()}"]
        self._server.start(self._config.model_name, more=more)
        self._folders.drop_old()


SHARED_MEMORY = Path("/dev/shm")
"""Linux's file system in shared memory."""


DISK_TRANSPORT = "sync_weights"
"""Folder under `save_path` with the newest weights that were published to engines."""


STEP_FILE = "trainer_step"
"""File in the folder of published weights with the step after which they were published."""


def transport_directory(config: TrainingConfig) -> Path:
    """Return the directory for the weights of in-place updates; it need not exist.

    Raises:
        ConfigError: `sync_transport` is `shared_memory`, which this system does not have.
    """
    if config.sync_transport != "shared_memory":
        return Path(config.save_path) / DISK_TRANSPORT
    if not SHARED_MEMORY.is_dir():
        raise ConfigError(
            f"sync_transport=shared_memory needs {SHARED_MEMORY}, which this system lacks; use disk"
        )
    return SHARED_MEMORY / f"atropos_weights_{os.getpid()}_{config.vllm_port}"


def require_shared_memory_for(model: Any, directory: Path) -> None:
    """Raise `ConfigError` if shared memory has no space for two copies of the weights.

    One is in place while the other is written: a copy in `directory` is the first of them.
    Containers often have little.
    """
    need_bytes = 2 * sum(value.nbytes for value in model.state_dict().values())
    held_bytes = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free + held_bytes
    if free_bytes < need_bytes:
        raise ConfigError(
            f"{SHARED_MEMORY} has {free_bytes / 2**30:.1f} GiB for them, two copies of the weights "
            f"take {need_bytes / 2**30:.1f}; give it more (docker: --shm-size) or use "
            "--sync-transport disk"
        )


def ties_output_to_input(model: Any) -> bool:
    """Return whether the output layer of a transformers model is its input embedding."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def export_for_engine(
    model: Any, directory: Path, *, tokenizer: Any = None, step: int | None = None
) -> Path:
    """Write an untied copy of a model, replacing `directory` atomically.

    A tokenizer, and the step after which the weights are published, are written if given.

    An output layer tied to the input embedding is written as a separate tensor, and the config
    declares it untied: on a CPU, vLLM has a packed copy of the output layer, which a reload
    replaces only if the checkpoint contains the layer. An engine with the tied model ignores the
    additional tensor.
    """
    is_tied = ties_output_to_input(model)

    def write(target: Path) -> None:
        state = model.state_dict()
        if is_tied:
            name = next(n for n, m in model.named_modules() if m is model.get_output_embeddings())
            state[f"{name}.weight"] = state[f"{name}.weight"].clone()
        model.save_pretrained(target, state_dict=state, safe_serialization=True)
        if is_tied:
            declare_untied(target / "config.json")
        if tokenizer is not None:
            tokenizer.save_pretrained(target)
        if step is not None:
            (target / STEP_FILE).write_text(f"{step}\n", encoding="utf-8")

    return replace_directory(directory, write)


def declare_untied(path: Path) -> None:
    """State in a model's config that its output layer is a tensor of its own."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    for section in (settings, settings.get("text_config", {})):
        if "tie_word_embeddings" in section or section is settings:
            section["tie_word_embeddings"] = False
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")


class WeightSync(Protocol):
    """Updates the weights of an engine.

    Order of calls: `check_before_load`, `start`, then per step `before_step`, `publish` if due,
    `check_alive`; `close` at the end, also after a failure at any point.
    """

    @property
    def publishes_final(self) -> bool:
        """Whether the engine outlives the run and needs the final weights."""

    @property
    def mode(self) -> str:
        """Value of `weight_bridge_mode`."""

    def check_before_load(self) -> None:
        """Raise an error for a wrong setup, before the model is loaded."""

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        """Let an engine serve the model, which was loaded from `source` after `step` steps."""

    def before_step(self, *, sync_follows: bool) -> None:
        """Free memory for the optimizer step if weights are published after it."""

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        """Let the engine serve the weights after `step`, and return once it does.

        `checkpoint` contains the same weights; None if none was saved after this step.
        """

    def check_alive(self) -> None:
        """Raise an error if an owned engine has died."""

    def returns_processed_logprobs(self) -> bool:
        """Return whether the engine's logprobs are known to be after temperature scaling."""

    def close(self) -> None:
        """End owned processes and close connections; idempotent."""


def require_built_mode(config: TrainingConfig) -> None:
    """Raise `ConfigError` for settings of the contract that are not implemented."""
    if config.weight_bridge_mode not in BUILT_MODES:
        raise ConfigError(
            f"weight_bridge_mode={config.weight_bridge_mode} is not built yet; use one of: "
            + ", ".join(BUILT_MODES)
        )
    if config.single_copy:
        raise ConfigError("single_copy needs weight_bridge_mode=shared_vllm, not built yet")


def make_weight_sync(config: TrainingConfig) -> WeightSync | None:
    """Return the strategy of `config.weight_bridge_mode`, None for `off`.

    Raises:
        ConfigError: the mode is not built yet.
    """
    require_built_mode(config)
    if config.weight_bridge_mode == "off":
        return None
    strategies: dict[str, Callable[[TrainingConfig], WeightSync]] = {
        "auto": AutoSync,
        "in_place": InPlaceSync,
        "lora_only": LoraSwapSync,
        "lora_restart": LoraRestartSync,
        "none": RestartSync,
    }
    return strategies[config.weight_bridge_mode](config)


class RestartSync(OwnedEngine):
    """Restarts an owned engine on the new weights.

    Without a checkpoint of the same step, the weights are written to `engine_weights` under
    `save_path`, which is replaced each time.
    """

    mode = "none"
    mode_for_running_engine = "in_place"

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__(config)
        self._directory = Path(config.save_path) / "engine_weights"
        self._tokenizer: Any = None

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        self._tokenizer = tokenizer
        self._server.start(source, version=step)

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        self._server.stop()
        path = checkpoint or self.write_weights(model, self._tokenizer)
        self._server.start(str(path), version=step)

    def write_weights(self, model: Any, tokenizer: Any) -> Path:
        """Write the weights for the engine and return the directory."""
        self._tokenizer = tokenizer

        def write(directory: Path) -> None:
            model.save_pretrained(directory, safe_serialization=True)
            tokenizer.save_pretrained(directory)

        return replace_directory(self._directory, write)

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)


_ENGINE_POLL_S = 0.2
_HEALTH_TIMEOUT_S = 5.0


def wait_for_engine(
    config: TrainingConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait up to `engine_wait_s` seconds until every engine answers `GET /health` with 200.

    Raises:
        EngineSetupError: One of them did not in that time.
    """
    deadline = clock() + config.engine_wait_s
    for url in engine_addresses(config):
        with contextlib.closing(EngineConnection(url, timeout_s=_HEALTH_TIMEOUT_S)) as engine:
            while not _is_healthy(engine):
                if clock() >= deadline:
                    raise EngineSetupError(
                        f"no engine answered GET {engine.shown_url}/health with 200 in "
                        f"{config.engine_wait_s:g} s; see its log, or increase --engine-wait-s"
                    )
                sleep(_ENGINE_POLL_S)


def _is_healthy(engine: EngineConnection) -> bool:
    try:
        return engine.send("GET", "/health").status_code == 200
    except EngineUnreachableError:
        return False


_RELOAD_RETRY_S = 2.0


class InPlaceSync:
    """Lets a running engine reload its weights from files, without a restart.

    An engine at `vllm_port` is used and left running at the end. If the port is free, an engine is
    launched and owned. The engine's host has to be able to read the directory of the weights,
    which is under `save_path` or in shared memory.
    """

    mode = "in_place"
    publishes_final = True

    def __init__(
        self, config: TrainingConfig, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._config = config
        self._sleep = sleep
        self._server = VllmServer(config, updatable=True)
        self._control = control_of(config)
        self._transfer: WeightTransfer | None = None
        if config.sync_transport in TRANSFER_BACKENDS:
            self._transfer = WeightTransfer(config)
        self._directory = transport_directory(config)
        self._is_external = False

    def check_before_load(self) -> None:
        wait_for_orphaned_engine(self._config)
        if self._config.engine_urls:
            self._require_named_engines()
            self._require_transfer()
            self._is_external = True
            return
        port, host = self._config.vllm_port, self._config.vllm_connect_host
        if not is_port_in_use(port, host):
            if self._config.engine == "sglang":
                raise EngineSetupError(
                    f"no SGLang at {host}:{port}; start it before the trainer: python -m "
                    f"sglang.launch_server --model-path {self._config.model_name} --port {port}"
                )
            if self._config.sync_transport == "nccl" and self._config.vllm_gpu is None:
                raise ConfigError(
                    "sync_transport=nccl connects two GPUs, but the engine is launched on the GPU "
                    "of the trainer; choose another one with --vllm-gpu, or use "
                    "--sync-transport ipc"
                )
            require_engine_package(self._config)
            return
        if not check_vllm_health(port, host):
            raise EngineSetupError(
                f"port {port} is taken, but nothing there answers GET /health with 200; stop that "
                "process, wait for the engine to be ready, or choose another --vllm-port"
            )
        self._control.require_in_place_updates()
        self._require_transfer()
        self._is_external = True

    def _require_transfer(self) -> None:
        if self._transfer is not None:
            self._transfer.require_backend()

    def _require_named_engines(self) -> None:
        try:
            self._control.require_in_place_updates()
        except InferenceError as error:
            raise EngineSetupError(
                f"no engine answers at an address of --engine-urls: {error}; start it with "
                f"VLLM_SERVER_DEV_MODE=1 {vllm_command()} {self._config.model_name}, or omit "
                "--engine-urls to launch one"
            ) from error

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        """Launch an engine, or update an external one that does not have the run's weights.

        It has others if the run is resumed, or if it reports an update by an earlier run.
        """
        is_tied = ties_output_to_input(model)
        if self._is_external:
            if is_tied and self._control.keeps_stale_output_layer():
                raise ConfigError(
                    "the engine runs on a CPU and serves a model whose output layer is its input "
                    "embedding; there vLLM does not replace the output layer in place. Stop it "
                    "and let the trainer launch the engine, or use --weight-bridge-mode none"
                )
            if source != self._config.model_name or self._control.was_updated():
                self.publish(model, checkpoint=None, step=step)
            return
        keeps_stale = self._config.engine == "vllm" and not self._config.device.startswith("cuda")
        if is_tied and keeps_stale:
            source = str(export_for_engine(model, self._directory, tokenizer=tokenizer))
        self._server.start(source, version=step)
        self._control.require_in_place_updates()
        self._require_transfer()

    def before_step(self, *, sync_follows: bool) -> None:
        pass

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        if self._config.sync_transport == "shared_memory":
            require_shared_memory_for(model, self._directory)
        if self._transfer is None:
            export_for_engine(model, self._directory, step=step)
        limit_s = self._config.engine_timeout_s if self._config.engine_urls else 0.0
        started = time.monotonic()
        while True:
            try:
                self._update(model, step)
                return
            except EngineUnreachableError as error:
                waited_s = time.monotonic() - started
                if waited_s >= limit_s:
                    raise
                logger.warning("retrying the weight update, for %.0f s so far: %s", waited_s, error)
            self._sleep(_RELOAD_RETRY_S)

    def _update(self, model: Any, step: int) -> None:
        if self._transfer is not None:
            self._transfer.send(model, step)
            return
        self._control.reload_weights(
            self._directory, pause_mode=self._config.sync_pause_mode, version=step
        )

    def check_alive(self) -> None:
        self._server.check_alive()

    def returns_processed_logprobs(self) -> bool:
        return self._control.returns_processed_logprobs()

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.close()
        self._server.stop()
        self._control.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class AutoSync:
    """Updates in place if the engine supports it, else restarts an owned engine; logs the choice.

    An external engine has to support updates, since the trainer does not restart it. An owned
    engine is restarted if it cannot reload weights, as with an older vLLM, or if other hosts can
    reach it: the routes for updates would let them load files.
    """

    publishes_final = True

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._sync: InPlaceSync | RestartSync = InPlaceSync(config)
        self._owns_engine = False
        self._has_published = False
        self._tokenizer: Any = None

    @property
    def mode(self) -> str:
        return self._sync.mode

    def check_before_load(self) -> None:
        wait_for_orphaned_engine(self._config)
        config = self._config
        port, host = config.vllm_port, config.vllm_connect_host
        is_running = bool(config.engine_urls) or is_port_in_use(port, host)
        self._owns_engine = not is_running and config.engine != "sglang"
        if self._owns_engine and not is_loopback(config.vllm_host):
            self._switch_to_restarts()
        self._sync.check_before_load()
        if not self._owns_engine:
            reason = "the running engine reloads its weights; it is left running at the end"
        elif self.mode == "in_place":
            reason = f"{self._engine} is launched on port {port} and reloads its weights"
        else:
            reason = (
                f"{self._engine} is launched on port {port} and restarted on new weights: with "
                f"--vllm-host {config.vllm_host}, other hosts could reach the routes for in-place "
                "updates"
            )
        logger.info("weight bridge mode: %s (chosen by auto): %s", self.mode, reason)

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        self._tokenizer = tokenizer
        try:
            self._sync.start(model, tokenizer, source=source, step=step)
        except NoInPlaceUpdatesError as error:
            if not self._owns_engine:
                raise
            self._fall_back(error)
            self._sync.start(model, tokenizer, source=source, step=step)

    def before_step(self, *, sync_follows: bool) -> None:
        self._sync.before_step(sync_follows=sync_follows)

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        try:
            self._sync.publish(model, checkpoint=checkpoint, step=step)
        except InferenceError as error:
            if self._has_published or not self._owns_engine or self.mode != "in_place":
                raise
            self._sync.check_alive()
            restart = self._fall_back(error)
            path = checkpoint or restart.write_weights(model, self._tokenizer)
            restart.start(model, self._tokenizer, source=str(path), step=step)
        self._has_published = True

    def check_alive(self) -> None:
        self._sync.check_alive()

    def returns_processed_logprobs(self) -> bool:
        return self._sync.returns_processed_logprobs()

    def close(self) -> None:
        self._sync.close()

    @property
    def _engine(self) -> str:
        return "the torch engine" if self._config.engine == "torch" else "a vLLM"

    def _fall_back(self, error: Exception) -> RestartSync:
        logger.warning(
            "weight bridge mode: none (chosen by auto): the launched engine cannot reload its "
            "weights and is restarted on new ones: %s",
            error,
        )
        return self._switch_to_restarts()

    def _switch_to_restarts(self) -> RestartSync:
        self._sync.close()
        restart = RestartSync(self._config)
        self._sync = restart
        self.publishes_final = restart.publishes_final
        return restart
