"""HTTP control of running vLLM and SGLang engines: connection, weight updates, several as one."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from atroposlib.errors import ConfigError, InferenceError
from atroposlib.utils.text import hide_secrets_of_requests, inert_block, without_secrets
from example_trainer.config import TrainingConfig

_MAX_QUOTED_CHARS = 500


class EngineConnection:
    """Requests to one engine; what goes wrong is an `InferenceError` that names the request.

    Args:
        base_url: Address without `/v1`.
        timeout_s: Seconds one request may take; a large model reloads for minutes.
    """

    def __init__(self, base_url: str, *, timeout_s: float = 600.0) -> None:
        self.base_url = base_url
        # The engine is a neighbour: proxy settings of the environment do not concern it.
        hide_secrets_of_requests()
        self._http = httpx.Client(base_url=base_url, timeout=timeout_s, trust_env=False)

    @property
    def shown_url(self) -> str:
        """The address for messages, without user and password."""
        return without_secrets(self.base_url)

    def close(self) -> None:
        self._http.close()

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Return the engine's answer, whatever its status; options as for `httpx.Client.request`.

        Raises:
            InferenceError: There is none.
        """
        try:
            return self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise InferenceError(f"{method} {self.shown_url}{path} failed: {error!r}") from error

    def post(self, path: str, **options: Any) -> httpx.Response:
        """Return the answer to a POST; arguments as for `send`.

        Raises:
            InferenceError: There is none, or its status is not 200.
        """
        answer = self.send("POST", path, **options)
        if answer.status_code != 200:
            raise InferenceError(
                f"POST {self.shown_url}{path} answered {answer.status_code}: "
                f"{inert_block(answer.text[:_MAX_QUOTED_CHARS])}"
            )
        return answer


logger = logging.getLogger(__name__)


class NoInPlaceUpdatesError(ConfigError):
    """The engine cannot reload its weights while it runs."""


class EngineControl(EngineConnection):
    """Updates the weights of one vLLM server by its development routes."""

    def require_in_place_updates(self) -> None:
        """Check that the engine can reload its weights while it runs.

        Raises:
            NoInPlaceUpdatesError: it does not offer that; names what to do.
        """
        # Without a method the route refuses with 400 and changes nothing; 404 means no route.
        status = self.send("POST", "/collective_rpc", json={}).status_code
        if status != 400:
            raise NoInPlaceUpdatesError(
                f"the engine at {self.shown_url} offers no in-place weight updates (POST "
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
        answer = self.send("GET", "/server_info", params={"config_format": "json"})
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
        self.post("/pause", params={"mode": pause_mode})
        try:
            self._reload(directory)
        finally:
            self._resume()

    def _reload(self, directory: Path) -> None:
        request = {"method": "reload_weights", "kwargs": {"weights_path": str(directory.resolve())}}
        self.post("/collective_rpc", json=request)
        reset = self.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        if reset.content and reset.json().get("success") is False:
            raise InferenceError(
                f"the engine at {self.shown_url} kept its prefix cache after the weights "
                "changed; use --sync-pause-mode wait"
            )

    def _resume(self) -> None:
        try:
            self.post("/resume")
        except InferenceError:
            logger.exception("the engine may still be paused: POST %s/resume", self.shown_url)
            raise


_PAUSE_MODES = {"keep": "retract", "abort": "abort", "none": "in_place"}


class SglangControl(EngineConnection):
    """Updates the weights of one SGLang server."""

    def require_in_place_updates(self) -> None:
        """Raise `ConfigError` unless an SGLang answers there."""
        status = self.send("GET", "/model_info").status_code
        if status != 200:
            raise ConfigError(
                f"the engine at {self.shown_url} is not SGLang (GET /model_info answered "
                f"{status}); for a vLLM use --engine vllm"
            )

    def returns_processed_logprobs(self) -> bool:
        """Return False: SGLang does not tell; `logprobs_mode` decides where it differs."""
        return False

    def keeps_stale_output_layer(self) -> bool:
        """Return False: SGLang keeps no second copy of the output layer."""
        return False

    def reload_weights(self, directory: Path, *, pause_mode: str, version: int = 0) -> None:
        """Load the weights in `directory` into the running engine; see `EngineControl`.

        `pause_mode` `keep`: requests go back to the queue, their caches are computed again; `none`:
        they are frozen for the moment of the update and keep their caches.
        """
        mode = _PAUSE_MODES.get(pause_mode)
        if mode is None:
            self._update(directory, version, drops_caches=True)
            return
        self.post("/pause_generation", json={"mode": mode})
        try:
            self._update(directory, version, drops_caches=mode != "in_place")
        finally:
            self.post("/continue_generation", json={})

    def _update(self, directory: Path, version: int, *, drops_caches: bool) -> None:
        answer = self.post(
            "/update_weights_from_disk",
            json={
                "model_path": str(directory.resolve()),
                "weight_version": str(version),
                "flush_cache": drops_caches,
            },
        )
        if answer.json().get("success") is False:
            raise InferenceError(
                f"the engine at {self.shown_url} did not take the weights: "
                f"{str(answer.json().get('message'))[:500]}"
            )


class EngineFleet:
    """Has the methods of one control; all engines take the same weights, at the same time."""

    def __init__(self, controls: Sequence[EngineControl | SglangControl]) -> None:
        self._controls = controls

    def close(self) -> None:
        for control in self._controls:
            control.close()

    def require_in_place_updates(self) -> None:
        for control in self._controls:
            control.require_in_place_updates()

    def returns_processed_logprobs(self) -> bool:
        return all(control.returns_processed_logprobs() for control in self._controls)

    def keeps_stale_output_layer(self) -> bool:
        return any(control.keeps_stale_output_layer() for control in self._controls)

    def reload_weights(self, directory: Path, *, pause_mode: str, version: int = 0) -> None:
        """Load the weights in every engine; one that fails lets the others finish."""

        def reload(control: EngineControl | SglangControl) -> None:
            control.reload_weights(directory, pause_mode=pause_mode, version=version)

        with ThreadPoolExecutor(len(self._controls)) as pool:
            for done in [pool.submit(reload, control) for control in self._controls]:
                done.result()


def engine_addresses(config: TrainingConfig) -> list[str]:
    """Return the addresses of the engines, without `/v1`."""
    if config.engine_urls:
        return [url.rstrip("/").removesuffix("/v1") for url in config.engine_urls]
    return [f"http://{config.vllm_connect_host}:{config.vllm_port}"]


def control_of(config: TrainingConfig) -> EngineControl | SglangControl | EngineFleet:
    """Return what updates the engines the config names."""
    kind = SglangControl if config.engine == "sglang" else EngineControl
    controls = [kind(address) for address in engine_addresses(config)]
    return controls[0] if len(controls) == 1 else EngineFleet(controls)
