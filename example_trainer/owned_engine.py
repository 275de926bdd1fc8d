"""An engine that is launched for a run, restarted on new weights and stopped at the end."""

from __future__ import annotations

from atroposlib.errors import EngineSetupError
from example_trainer.config import TrainingConfig
from example_trainer.vllm_manager import (
    VllmServer,
    is_port_in_use,
    launches_with_processed_logprobs,
    wait_for_orphaned_engine,
)

__all__ = ["OwnedEngine"]


class OwnedEngine:
    """What the strategies that restart an engine share; each says itself what it is started on.

    Works with any vLLM and leaves the GPU to the optimiser step before a restart; costs the
    engine's start-up time per update.

    Attributes:
        mode_for_running_engine: Weight bridge mode to recommend where an engine runs already.
    """

    mode: str
    publishes_final = False
    mode_for_running_engine: str

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._server = VllmServer(config, updatable=False)

    def check_before_load(self) -> None:
        """Fail when the port is taken."""
        wait_for_orphaned_engine(self._config)
        port, mode = self._config.vllm_port, self.mode
        if is_port_in_use(port, self._config.vllm_connect_host):
            raise EngineSetupError(
                f"port {port} is taken, but weight_bridge_mode={mode} launches its own engine "
                "there; stop that process, choose another --vllm-port, or use "
                f"--weight-bridge-mode {self.mode_for_running_engine} to update a vLLM that is "
                "already running"
            )

    def before_step(self, *, sync_follows: bool) -> None:
        """Stop the engine when it is restarted after the step anyway: frees its GPU memory."""
        if sync_follows:
            self._server.stop()

    def check_alive(self) -> None:
        """Raise when the engine has died."""
        self._server.check_alive()

    def returns_processed_logprobs(self) -> bool:
        """Say what the engine was told at its launch."""
        return launches_with_processed_logprobs(self._config)

    def close(self) -> None:
        """Stop the engine."""
        self._server.stop()
