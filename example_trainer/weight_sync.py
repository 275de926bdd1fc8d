"""How new weights reach the inference engine: one protocol, one object per strategy."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from atroposlib.errors import ConfigError, InferenceError
from example_trainer.config import BUILT_MODES, TrainingConfig
from example_trainer.engine_fleet import control_of
from example_trainer.engine_weights import (
    export_for_engine,
    require_shared_memory_for,
    ties_output_to_input,
    transport_directory,
)
from example_trainer.lora_sync import LoraRestartSync, LoraSwapSync
from example_trainer.owned_engine import OwnedEngine
from example_trainer.vllm_manager import VllmServer, check_vllm_health, is_port_in_use

__all__ = [
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
    needs_checkpoint: bool
    """Whether `publish` takes the weights from a saved checkpoint."""

    def check_before_load(self) -> None:
        """Fail early on what is wrong before the model is loaded."""

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        """Make sure an engine serves the model, loaded from `source` after so many steps."""

    def before_step(self, *, sync_follows: bool) -> None:
        """Make room for the optimiser step, when weights are published right after it."""

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        """Let the engine serve the weights the model has after `step`; returns once it does."""

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
        "in_place": InPlaceSync,
        "lora_only": LoraSwapSync,
        "lora_restart": LoraRestartSync,
        "none": RestartSync,
        "off": NoSync,
    }
    return strategies[config.weight_bridge_mode](config)


class NoSync:
    """No engine: groups come from elsewhere, the weights go into checkpoints only."""

    publishes_final = False
    needs_checkpoint = False

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
    """Owns an engine and restarts it on every new checkpoint."""

    needs_checkpoint = True
    mode_for_running_engine = "in_place"

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        """Launch the engine on the source and wait until it is healthy."""
        self._server.start(source)

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        """Restart the engine on the checkpoint."""
        self._server.stop()
        self._server.start(str(checkpoint))


class InPlaceSync:
    """Lets a running engine reload its weights from files; no restart, caches dropped.

    Uses the engine that already answers at `vllm_port`, and leaves it running at the end;
    launches and owns one when the port is free. The weights pass through a directory that the
    engine's host must be able to read: under `save_path`, or in memory both share.
    """

    publishes_final = True
    needs_checkpoint = False

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._server = VllmServer(config, updatable=True)
        self._control = control_of(config)
        self._directory = transport_directory(config)
        self._is_external = False

    def check_before_load(self) -> None:
        """Find out whose engine will be used, and whether it can do this."""
        if self._config.engine_urls:
            self._control.require_in_place_updates()
            self._is_external = True
            return
        port, host = self._config.vllm_port, self._config.vllm_connect_host
        if not is_port_in_use(port, host):
            if self._config.engine == "sglang":
                raise InferenceError(f"no SGLang at {host}:{port}; start it before the trainer")
            return
        if not check_vllm_health(port, host):
            raise InferenceError(
                f"port {port} is taken, but nothing there answers GET /health with 200; stop that "
                "process, wait for the engine to be ready, or choose another --vllm-port"
            )
        self._control.require_in_place_updates()
        self._is_external = True

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
