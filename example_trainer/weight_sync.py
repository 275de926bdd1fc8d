"""How new weights reach the inference engine: one protocol, one object per strategy."""

from __future__ import annotations

import ipaddress
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from atroposlib.errors import ConfigError, EngineSetupError, InferenceError
from example_trainer.checkpointing import replace_directory
from example_trainer.config import BUILT_MODES, TrainingConfig
from example_trainer.engine_control import NoInPlaceUpdatesError
from example_trainer.engine_fleet import control_of
from example_trainer.engine_weights import (
    export_for_engine,
    require_shared_memory_for,
    ties_output_to_input,
    transport_directory,
)
from example_trainer.lora_sync import LoraRestartSync, LoraSwapSync
from example_trainer.owned_engine import OwnedEngine
from example_trainer.vllm_manager import (
    VllmServer,
    check_vllm_health,
    is_port_in_use,
    wait_for_orphaned_engine,
)

__all__ = [
    "AutoSync",
    "InPlaceSync",
    "NoSync",
    "RestartSync",
    "WeightSync",
    "is_sync_due",
    "make_weight_sync",
    "require_built_mode",
]

logger = logging.getLogger(__name__)


class WeightSync(Protocol):
    """Keeps an engine serving, under weights that follow the trainer's.

    Order of calls: `check_before_load`, `start`, then per step `before_step`, `publish` where due,
    `check_alive`; `close` at the end, also after a failure at any point.
    """

    publishes_final: bool
    """Whether the engine outlives the run and so wants the final weights too."""

    @property
    def mode(self) -> str:
        """Name of the strategy, as `weight_bridge_mode` has it."""

    def check_before_load(self) -> None:
        """Fail early on what is wrong before the model is loaded."""

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        """Make sure an engine serves the model, loaded from `source` after so many steps."""

    def before_step(self, *, sync_follows: bool) -> None:
        """Make room for the optimiser step, when weights are published right after it."""

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        """Let the engine serve the weights the model has after `step`; returns once it does.

        Args:
            model: With these weights.
            checkpoint: Directory that has them too, None where none was saved after this step.
            step: Optimizer steps done.
        """

    def check_alive(self) -> None:
        """Raise when an engine of ours has died."""

    def returns_processed_logprobs(self) -> bool:
        """Say whether the engine's logprobs are known to be after temperature scaling."""

    def close(self) -> None:
        """End what was started, close what was opened; harmless when repeated."""


def is_sync_due(step: int, config: TrainingConfig, *, publishes_final: bool) -> bool:
    """Say whether weights are published after the optimiser step number `step` (from 1).

    Every `vllm_restart_interval` steps, 0 meaning never; after the last step only where somebody
    goes on using the engine.
    """
    interval = config.vllm_restart_interval
    if interval == 0:
        return False
    if step >= config.training_steps:
        return publishes_final
    return step % interval == 0


def require_built_mode(config: TrainingConfig) -> None:
    """Refuse the settings of the contract that this version has no code for.

    Raises:
        ConfigError: names the setting and what exists.
    """
    if config.weight_bridge_mode not in BUILT_MODES:
        raise ConfigError(
            f"weight_bridge_mode={config.weight_bridge_mode} is not built yet; use one of: "
            + ", ".join(BUILT_MODES)
        )
    if config.single_copy:
        raise ConfigError("single_copy needs weight_bridge_mode=shared_vllm, not built yet")


def make_weight_sync(config: TrainingConfig) -> WeightSync:
    """Return the strategy `config.weight_bridge_mode` names.

    Raises:
        ConfigError: that mode is not built yet.
    """
    require_built_mode(config)
    strategies: dict[str, Callable[[TrainingConfig], WeightSync]] = {
        "auto": AutoSync,
        "in_place": InPlaceSync,
        "lora_only": LoraSwapSync,
        "lora_restart": LoraRestartSync,
        "none": RestartSync,
        "off": NoSync,
    }
    return strategies[config.weight_bridge_mode](config)


class NoSync:
    """No engine: groups come from elsewhere, the weights go into checkpoints only."""

    mode = "off"
    publishes_final = False

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config

    def check_before_load(self) -> None:
        """Nothing to check."""

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        """Nothing to start."""

    def before_step(self, *, sync_follows: bool) -> None:
        """Nothing holds memory that could be freed."""

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        """Nobody to publish to."""

    def check_alive(self) -> None:
        """Nothing can die."""

    def returns_processed_logprobs(self) -> bool:
        """Say what the settings say."""
        return self._config.logprobs_mode == "processed"

    def close(self) -> None:
        """Nothing to stop."""


class RestartSync(OwnedEngine):
    """Owns an engine and restarts it on the new weights.

    Those are in a checkpoint where one was saved after the same step. Where none was, they are
    written to `engine_weights` under `save_path`, each time in place of those before.
    """

    mode = "none"
    mode_for_running_engine = "in_place"

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__(config)
        self._directory = Path(config.save_path) / "engine_weights"
        self._tokenizer: Any = None

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        """Launch the engine on the source and wait until it is healthy."""
        self._tokenizer = tokenizer
        self._server.start(source)

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        """Restart the engine on the weights."""
        self._server.stop()
        self._server.start(str(checkpoint or self.write_weights(model, self._tokenizer)))

    def write_weights(self, model: Any, tokenizer: Any) -> Path:
        """Write what the engine is started on; returns the directory."""
        self._tokenizer = tokenizer

        def write(directory: Path) -> None:
            model.save_pretrained(directory, safe_serialization=True)
            tokenizer.save_pretrained(directory)

        return replace_directory(self._directory, write)

    def close(self) -> None:
        """Stop the engine; remove the weights that were written for it alone."""
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)


class InPlaceSync:
    """Lets a running engine reload its weights from files; no restart, caches dropped.

    Uses the engine that already answers at `vllm_port`, and leaves it running at the end;
    launches and owns one when the port is free. The weights pass through a directory that the
    engine's host must be able to read: under `save_path`, or in memory both share.
    """

    mode = "in_place"
    publishes_final = True

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._server = VllmServer(config, updatable=True)
        self._control = control_of(config)
        self._directory = transport_directory(config)
        self._is_external = False

    def check_before_load(self) -> None:
        """Find out whose engine will be used, and whether it can do this."""
        wait_for_orphaned_engine(self._config)
        if self._config.engine_urls:
            self._require_named_engines()
            self._is_external = True
            return
        port, host = self._config.vllm_port, self._config.vllm_connect_host
        if not is_port_in_use(port, host):
            if self._config.engine == "sglang":
                raise EngineSetupError(
                    f"no SGLang at {host}:{port}; start it before the trainer: python -m "
                    f"sglang.launch_server --model-path {self._config.model_name} --port {port}"
                )
            return
        if not check_vllm_health(port, host):
            raise EngineSetupError(
                f"port {port} is taken, but nothing there answers GET /health with 200; stop that "
                "process, wait for the engine to be ready, or choose another --vllm-port"
            )
        self._control.require_in_place_updates()
        self._is_external = True

    def _require_named_engines(self) -> None:
        try:
            self._control.require_in_place_updates()
        except InferenceError as error:
            raise EngineSetupError(
                f"no engine answers at an address of --engine-urls: {error}; start it with "
                f"VLLM_SERVER_DEV_MODE=1 vllm serve {self._config.model_name}, or leave "
                "--engine-urls out to have one launched"
            ) from error

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        """Launch an engine unless one is there; bring one that is there to the present weights."""
        is_tied = ties_output_to_input(model)
        if self._is_external:
            if is_tied and self._control.keeps_stale_output_layer():
                raise ConfigError(
                    "the engine runs on a CPU and serves a model whose output layer is its input "
                    "embedding; there vLLM does not replace the output layer in place. Stop it "
                    "and let the trainer launch the engine, or use --weight-bridge-mode none"
                )
            if source != self._config.model_name:
                self.publish(model, checkpoint=None, step=step)
            return
        if is_tied and not self._config.device.startswith("cuda"):
            source = str(export_for_engine(model, self._directory, tokenizer=tokenizer))
        self._server.start(source)
        self._control.require_in_place_updates()

    def before_step(self, *, sync_follows: bool) -> None:
        """Nothing to do: the engine keeps generating during the step."""

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        """Write the weights out and reload them in the running engine."""
        if self._config.sync_transport == "shared_memory":
            require_shared_memory_for(model)
        export_for_engine(model, self._directory)
        self._control.reload_weights(
            self._directory, pause_mode=self._config.sync_pause_mode, version=step
        )

    def check_alive(self) -> None:
        """Raise when an engine this trainer launched has died."""
        self._server.check_alive()

    def returns_processed_logprobs(self) -> bool:
        """Ask the engine."""
        return self._control.returns_processed_logprobs()

    def close(self) -> None:
        """Stop the engine if it is ours, an external one runs on; remove the directory."""
        self._server.stop()
        self._control.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class AutoSync:
    """Updates in place where the engine can do it, else restarts an engine; the log says which.

    An engine that runs already has to be updatable: this trainer would not restart what others
    started. An engine of its own is launched for updates in place, and restarted from then on where
    it turns out that it cannot reload weights, as an older vLLM cannot. One that listens beyond
    this host is restarted from the start: the routes for updates would let others load files.
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
        """The mode in use."""
        return self._sync.mode

    def check_before_load(self) -> None:
        """Find out whose engine will be used and choose."""
        wait_for_orphaned_engine(self._config)
        config = self._config
        port, host = config.vllm_port, config.vllm_connect_host
        is_running = bool(config.engine_urls) or is_port_in_use(port, host)
        self._owns_engine = not is_running and config.engine == "vllm"
        if self._owns_engine and not _is_loopback(config.vllm_host):
            self._restart_from_now_on()
        self._sync.check_before_load()
        if not self._owns_engine:
            reason = "the running engine reloads its weights; it is left running at the end"
        elif self.mode == "in_place":
            reason = f"a vLLM is launched on port {port} and reloads its weights while it runs"
        else:
            reason = (
                f"a vLLM is launched on port {port} and restarted on new weights: with --vllm-host "
                f"{config.vllm_host}, other hosts would reach the routes for updates in place"
            )
        logger.info("weight bridge mode: %s (chosen by auto): %s", self.mode, reason)

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        """Start as the chosen mode does; restart an engine of ours that proves not updatable."""
        self._tokenizer = tokenizer
        try:
            self._sync.start(model, tokenizer, source=source, step=step)
        except NoInPlaceUpdatesError as error:
            if not self._owns_engine:
                raise
            self._fall_back(error)
            self._sync.start(model, tokenizer, source=source, step=step)

    def before_step(self, *, sync_follows: bool) -> None:
        """Do what the chosen mode does."""
        self._sync.before_step(sync_follows=sync_follows)

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        """Publish as the chosen mode does; the first update in place may prove impossible."""
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
        """Raise when an engine this trainer launched has died."""
        self._sync.check_alive()

    def returns_processed_logprobs(self) -> bool:
        """Answer as the chosen mode does."""
        return self._sync.returns_processed_logprobs()

    def close(self) -> None:
        """Stop the engine if it is ours, an external one runs on."""
        self._sync.close()

    def _fall_back(self, error: Exception) -> RestartSync:
        logger.warning(
            "weight bridge mode: none from here on (chosen by auto): the launched vLLM cannot "
            "reload its weights and is restarted on new ones: %s",
            error,
        )
        return self._restart_from_now_on()

    def _restart_from_now_on(self) -> RestartSync:
        self._sync.close()
        restart = RestartSync(self._config)
        self._sync = restart
        self.publishes_final = restart.publishes_final
        return restart


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
