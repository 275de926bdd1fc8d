"""Replacing the weights of a running SGLang over its own HTTP routes."""

from __future__ import annotations

from pathlib import Path

from atroposlib.errors import ConfigError, InferenceError
from example_trainer.engine_connection import EngineConnection

__all__ = ["SglangControl"]

_PAUSE_MODES = {"keep": "retract", "abort": "abort", "none": "in_place"}


class SglangControl:
    """Speaks to one SGLang server; fulfils `engine_fleet.Control`.

    Args:
        base_url: Address without `/v1`.
        timeout_s: Seconds one request may take; a large model reloads for minutes.
    """

    def __init__(self, base_url: str, *, timeout_s: float = 600.0) -> None:
        self._engine = EngineConnection(base_url, timeout_s=timeout_s)

    def close(self) -> None:
        """Close the connection; the engine runs on."""
        self._engine.close()

    def require_in_place_updates(self) -> None:
        """Check that an SGLang answers there.

        Raises:
            ConfigError: something else does.
        """
        status = self._engine.send("GET", "/model_info").status_code
        if status != 200:
            raise ConfigError(
                f"the engine at {self._engine.shown_url} is no SGLang (GET /model_info answered "
                f"{status}); for a vLLM use --engine vllm"
            )

    def returns_processed_logprobs(self) -> bool:
        """Return False: SGLang does not tell; `logprobs_mode` decides where it differs."""
        return False

    def keeps_stale_output_layer(self) -> bool:
        """Return False: SGLang keeps no second copy of the output layer."""
        return False

    def reload_weights(self, directory: Path, *, pause_mode: str, version: int = 0) -> None:
        """Load the weights in `directory` into the running engine.

        Args:
            directory: A Hugging Face model directory the engine's host can read.
            pause_mode: What happens to running requests. `keep`: taken back to the queue, their
                caches computed again; `none`: frozen for the moment of the update, caches kept;
                `abort`: ended; `wait`: waited for.
            version: Optimiser steps behind the weights; the engine names it in its answers.

        Raises:
            InferenceError: a request failed; the engine is told to continue in any case.
        """
        mode = _PAUSE_MODES.get(pause_mode)
        if mode is None:
            self._update(directory, version, drops_caches=True)
            return
        self._engine.post("/pause_generation", json={"mode": mode})
        try:
            self._update(directory, version, drops_caches=mode != "in_place")
        finally:
            self._engine.post("/continue_generation", json={})

    def _update(self, directory: Path, version: int, *, drops_caches: bool) -> None:
        answer = self._engine.post(
            "/update_weights_from_disk",
            json={
                "model_path": str(directory.resolve()),
                "weight_version": str(version),
                "flush_cache": drops_caches,
            },
        )
        if answer.json().get("success") is False:
            raise InferenceError(
                f"the engine at {self._engine.shown_url} did not take the weights: "
                f"{str(answer.json().get('message'))[:500]}"
            )
