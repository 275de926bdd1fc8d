"""Several engines updated as one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from example_trainer.config import TrainingConfig
from example_trainer.engine_control import EngineControl
from example_trainer.sglang_control import SglangControl

__all__ = ["Control", "EngineFleet", "control_of", "engine_addresses"]


class Control(Protocol):
    """What an in-place update needs of an engine."""

    def close(self) -> None:
        """Close the connection."""

    def require_in_place_updates(self) -> None:
        """Raise where the engine cannot reload its weights."""

    def returns_processed_logprobs(self) -> bool:
        """Say whether logprobs come after temperature and top-p."""

    def keeps_stale_output_layer(self) -> bool:
        """Say whether a reload would miss a tied output layer."""

    def reload_weights(self, directory: Path, *, pause_mode: str, version: int = 0) -> None:
        """Load the weights in a directory."""


class EngineFleet:
    """Has the methods of one control; all engines take the same weights, at the same time."""

    def __init__(self, controls: Sequence[Control]) -> None:
        self._controls = controls

    def close(self) -> None:
        """Close the connections."""
        for control in self._controls:
            control.close()

    def require_in_place_updates(self) -> None:
        """Raise where one of the engines cannot reload its weights."""
        for control in self._controls:
            control.require_in_place_updates()

    def returns_processed_logprobs(self) -> bool:
        """Say whether the logprobs of all come after temperature and top-p."""
        return all(control.returns_processed_logprobs() for control in self._controls)

    def keeps_stale_output_layer(self) -> bool:
        """Say whether one of them would miss a tied output layer."""
        return any(control.keeps_stale_output_layer() for control in self._controls)

    def reload_weights(self, directory: Path, *, pause_mode: str, version: int = 0) -> None:
        """Load the weights in every engine; returns when the last one has them.

        Raises:
            InferenceError: one of them failed; the others are let finish.
        """

        def reload(control: Control) -> None:
            control.reload_weights(directory, pause_mode=pause_mode, version=version)

        with ThreadPoolExecutor(len(self._controls)) as pool:
            for done in [pool.submit(reload, control) for control in self._controls]:
                done.result()


def engine_addresses(config: TrainingConfig) -> list[str]:
    """Return the addresses of the engines, without `/v1`."""
    if config.engine_urls:
        return [url.rstrip("/").removesuffix("/v1") for url in config.engine_urls]
    return [f"http://{config.vllm_connect_host}:{config.vllm_port}"]


def control_of(config: TrainingConfig) -> Control:
    """Return what updates the engines the config names."""
    kind = SglangControl if config.engine == "sglang" else EngineControl
    controls = [kind(address) for address in engine_addresses(config)]
    return controls[0] if len(controls) == 1 else EngineFleet(controls)
