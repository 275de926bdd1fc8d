"""Replacing the weights of a running vLLM over its own HTTP routes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError, InferenceError
from example_trainer.engine_connection import EngineConnection

__all__ = ["EngineControl", "NoInPlaceUpdatesError"]

logger = logging.getLogger(__name__)


class NoInPlaceUpdatesError(ConfigError):
    """The engine cannot reload its weights while it runs."""


class EngineControl:
    """Speaks to the development routes of one vLLM server; fulfils `engine_fleet.Control`.

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
        """Check that the engine can reload its weights while it runs.

        Raises:
            NoInPlaceUpdatesError: it does not offer that; names what to do.
        """
        # Without a method the route refuses with 400 and changes nothing; 404 means no route.
        status = self._engine.send("POST", "/collective_rpc", json={}).status_code
        if status != 400:
            raise NoInPlaceUpdatesError(
                f"the engine at {self._engine.shown_url} offers no in-place weight updates (POST "
                f"/collective_rpc answered {status}); start vLLM with VLLM_SERVER_DEV_MODE=1 in "
                "its environment, or stop it and let the trainer launch its own "
                "(--weight-bridge-mode auto, or none to restart it for each update)"
            )

    def returns_processed_logprobs(self) -> bool:
        """Say whether logprobs come after temperature and top-p; False when it does not tell."""
        mode = self._settings().get("model_config", {}).get("logprobs_mode", "raw")
        return str(mode).startswith("processed")

    def keeps_stale_output_layer(self) -> bool:
        """Say whether a reload would miss an output layer tied to the embedding.

        vLLM packs that layer's weights once on a CPU. A model it was given untied is exempt, so
        the config of what it serves is looked at where this host can read it.
        """
        settings = self._settings()
        if settings.get("device_config", {}).get("device") != "cpu":
            return False
        served = Path(str(settings.get("model_config", {}).get("model"))) / "config.json"
        if not served.is_file():
            return True
        # Left out of the file it means tied for most architectures, so only a plain no counts.
        told = json.loads(served.read_text(encoding="utf-8")).get("tie_word_embeddings")
        return told is not False

    def _settings(self) -> dict[str, Any]:
        """Return the engine's own settings, empty when it does not tell them."""
        answer = self._engine.send("GET", "/server_info", params={"config_format": "json"})
        try:
            return dict(answer.json()["vllm_config"]) if answer.status_code == 200 else {}
        except (KeyError, TypeError, ValueError):
            return {}

    def reload_weights(self, directory: Path, *, pause_mode: str, version: int = 0) -> None:
        """Load the weights in `directory` into the running engine.

        With `pause_mode` `keep`, requests under way are frozen and continue under the new weights;
        their key-value caches are dropped and computed again, so that no token depends on both.
        With `none` they run on, and tokens between the update and the renewal of their caches do.

        Args:
            directory: A Hugging Face model directory the engine's host can read.
            pause_mode: `keep`, `wait`, `abort` or `none`, what happens to running requests.
            version: Optimiser steps behind the weights; vLLM has no place for it.

        Raises:
            InferenceError: a request failed; the engine is told to resume in any case.
        """
        if pause_mode == "none":
            self._reload(directory)
            return
        self._engine.post("/pause", params={"mode": pause_mode})
        try:
            self._reload(directory)
        finally:
            self._resume()

    def _reload(self, directory: Path) -> None:
        request = {"method": "reload_weights", "kwargs": {"weights_path": str(directory.resolve())}}
        self._engine.post("/collective_rpc", json=request)
        reset = self._engine.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        if reset.content and reset.json().get("success") is False:
            raise InferenceError(
                f"the engine at {self._engine.shown_url} kept its prefix cache after the weights "
                "changed; use --sync-pause-mode wait"
            )

    def _resume(self) -> None:
        try:
            self._engine.post("/resume")
        except InferenceError:
            logger.exception(
                "the engine may still be paused: POST %s/resume", self._engine.shown_url
            )
            raise
