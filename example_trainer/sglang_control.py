"""Replacing the weights of a running SGLang over its own HTTP routes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from atroposlib.errors import ConfigError, InferenceError

__all__ = ["SglangControl"]

_PAUSE_MODES = {"keep": "retract", "abort": "abort", "none": "in_place"}


class SglangControl:
    """Speaks to one SGLang server; has the methods of `EngineControl`.

    Args:
        base_url: Address without `/v1`.
        timeout_s: Seconds one request may take; a large model reloads for minutes.
    """

    def __init__(self, base_url: str, *, timeout_s: float = 600.0) -> None:
        self._base_url = base_url
        # The engine is a neighbour: proxy settings of the environment do not concern it.
        self._http = httpx.Client(base_url=base_url, timeout=timeout_s, trust_env=False)

    def close(self) -> None:
        """Close the connection; the engine runs on."""
        self._http.close()

    def require_in_place_updates(self) -> None:
        """Check that an SGLang answers there.

        Raises:
            ConfigError: something else does.
        """
        status = self._send("GET", "/model_info").status_code
        if status != 200:
            raise ConfigError(
                f"the engine at {self._base_url} is no SGLang (GET /model_info answered {status}); "
                "for a vLLM use --engine vllm"
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
        self._require("/pause_generation", {"mode": mode})
        try:
            self._update(directory, version, drops_caches=mode != "in_place")
        finally:
            self._require("/continue_generation", {})

    def _update(self, directory: Path, version: int, *, drops_caches: bool) -> None:
        answer = self._require(
            "/update_weights_from_disk",
            {
                "model_path": str(directory.resolve()),
                "weight_version": str(version),
                "flush_cache": drops_caches,
            },
        )
        if answer.json().get("success") is False:
            raise InferenceError(
                f"the engine at {self._base_url} did not take the weights: "
                f"{str(answer.json().get('message'))[:500]}"
            )

    def _require(self, path: str, body: dict[str, Any]) -> httpx.Response:
        answer = self._send("POST", path, json=body)
        if answer.status_code != 200:
            raise InferenceError(
                f"POST {self._base_url}{path} answered {answer.status_code}: {answer.text[:500]}"
            )
        return answer

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise InferenceError(f"{method} {self._base_url}{path} failed: {error!r}") from error
