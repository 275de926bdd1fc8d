"""HTTP clients of running vLLM and SGLang engines, and in-place weight updates."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from atroposlib.errors import ConfigError, InferenceError
from atroposlib.utils.io import socket_options
from atroposlib.utils.text import hide_secrets_of_requests, inert_block, inert_line, without_secrets
from example_trainer.config import TrainingConfig

logger = logging.getLogger(__name__)

_MAX_QUOTED_CHARS = 500
MAX_WORKERS = 4096
"""Most workers of one engine; the trainer would wait for more of them in vain."""


_STATUSES_OF_PROXIES = (502, 503, 504)


def _object_in(answer: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a response; empty if it has another content, such as a page."""
    try:
        content = answer.json()
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


class EngineUnreachableError(InferenceError):
    """The engine did not respond, or a reverse proxy responded that it cannot reach the engine."""


class EngineConnection:
    """HTTP requests to one engine, whose address is without `/v1`.

    The default timeout allows for large models, which take minutes to reload.

    Raises:
        ConfigError: The address is malformed.
    """

    def __init__(self, base_url: str, *, timeout_s: float = 600.0) -> None:
        self.base_url = base_url
        hide_secrets_of_requests()
        # `trust_env=False`: proxies of the environment are not for a local engine. The transport
        # still reads SSL_CERT_FILE, for engines whose proxy has TLS.
        try:
            self._http = httpx.Client(
                base_url=base_url,
                timeout=timeout_s,
                transport=httpx.HTTPTransport(socket_options=socket_options()),
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise ConfigError(
                f"the address of the engine is {self.shown_url!r}; expected an address such as "
                "http://localhost:9001"
            ) from error

    @property
    def shown_url(self) -> str:
        """Address for messages, without user and password."""
        return without_secrets(self.base_url)

    def close(self) -> None:
        self._http.close()

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Return the response, of any status; options are those of `httpx.Client.request`.

        Raises:
            EngineUnreachableError: The engine did not respond.
        """
        try:
            return self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise EngineUnreachableError(
                f"{method} {self.shown_url}{path} failed: {error!r}"
            ) from error

    def status_of(self, method: str, path: str, **options: Any) -> int:
        """Return the status of a response, with the arguments of `send`.

        Raises:
            EngineUnreachableError: The engine did not respond, or a reverse proxy did in its place.
        """
        status = self.send(method, path, **options).status_code
        if status in _STATUSES_OF_PROXIES:
            raise EngineUnreachableError(f"{method} {self.shown_url}{path} answered {status}")
        return status

    def post(self, path: str, **options: Any) -> httpx.Response:
        """Return the response to a POST, with the arguments of `send`.

        Raises:
            InferenceError: The engine did not respond, or with a status other than 200.
        """
        answer = self.send("POST", path, **options)
        if answer.status_code != 200:
            is_proxy = answer.status_code in _STATUSES_OF_PROXIES
            kind = EngineUnreachableError if is_proxy else InferenceError
            raise kind(
                f"POST {self.shown_url}{path} answered {answer.status_code}: "
                f"{inert_block(answer.text[:_MAX_QUOTED_CHARS])}"
            )
        return answer


class NoInPlaceUpdatesError(ConfigError):
    """The engine cannot reload its weights while it runs."""


class EngineControl(EngineConnection):
    """Updates the weights of one vLLM, or torch engine, by vLLM's development routes."""

    _takes_version: bool | None = None
    """Whether a reload may name the policy version; None until the engine has been asked."""

    def require_in_place_updates(self) -> None:
        """Raise `NoInPlaceUpdatesError` if the engine cannot reload its weights while it runs."""
        # A request without a method is rejected with 400 and has no effect; 404 means no route.
        status = self.status_of("POST", "/collective_rpc", json={})
        if status != 400:
            raise NoInPlaceUpdatesError(
                f"the engine at {self.shown_url} has no in-place weight updates (POST "
                f"/collective_rpc answered {status}); start vLLM with VLLM_SERVER_DEV_MODE=1 in "
                "its environment, or stop it and let the trainer launch its own "
                "(--weight-bridge-mode auto, or none to restart it for each update)"
            )

    def returns_processed_logprobs(self) -> bool:
        """Return whether logprobs are after temperature and top-p; False if unknown."""
        mode = self._section("model_config").get("logprobs_mode", "raw")
        return str(mode).startswith("processed")

    def keeps_stale_output_layer(self) -> bool:
        """Return whether a reload does not update an output layer tied to the embedding.

        On a CPU, vLLM packs the weights of that layer once. An untied model is not affected, which
        its config shows if this host can read it.
        """
        if self._section("device_config").get("device") != "cpu":
            return False
        served = Path(str(self._section("model_config").get("model"))) / "config.json"
        try:
            settings = json.loads(served.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return True
        # In most architectures the default is tied, so that only an explicit false counts.
        return not isinstance(settings, dict) or settings.get("tie_word_embeddings") is not False

    def _section(self, name: str) -> dict[str, Any]:
        """Return a section of the engine's settings; empty if it does not report it."""
        settings = self._server_info().get("vllm_config")
        section = settings.get(name) if isinstance(settings, dict) else None
        return section if isinstance(section, dict) else {}

    def _server_info(self) -> dict[str, Any]:
        answer = self.send("GET", "/server_info", params={"config_format": "json"})
        return _object_in(answer) if answer.status_code == 200 else {}

    def was_updated(self) -> bool:
        """Return whether a trainer has replaced the weights; False for vLLM, which reports none."""
        return str(self._torch_engine().get("weight_version") or 0) != "0"

    def _torch_engine(self) -> dict[str, Any]:
        """Return what a torch engine reports about itself; empty for vLLM."""
        engine = self._server_info().get("torch_engine")
        return engine if isinstance(engine, dict) else {}

    def _takes_weight_version(self) -> bool:
        if self._takes_version is None:
            self._takes_version = bool(self._torch_engine().get("takes_weight_version"))
        return self._takes_version

    def reload_weights(self, directory: Path, *, pause_mode: str, version: int = 0) -> None:
        """Load the weights in `directory`, which the engine's host can read, into the engine.

        `pause_mode` applies to running requests: `wait` for them, `abort` them, or `keep` them
        paused. The latter continue under the new weights with recomputed key-value caches, so that
        no token depends on both. With `none` they continue to run, and tokens before the renewal of
        their caches depend on both. The torch engine reports the policy version `version` with each
        token; stock vLLM does not take it.

        Raises:
            InferenceError: a request failed; the engine is resumed in any case.
        """
        with self.paused(pause_mode):
            arguments = {"weights_path": str(directory.resolve())}
            if self._takes_weight_version():
                arguments["weight_version"] = str(version)
            self.post("/collective_rpc", json={"method": "reload_weights", "kwargs": arguments})
            self.drop_caches()

    @contextlib.contextmanager
    def paused(self, pause_mode: str) -> Iterator[None]:
        """Pause the engine, and resume it in any case; `none` does neither."""
        if pause_mode == "none":
            yield
            return
        try:
            self.post("/pause", params={"mode": pause_mode})
        except BaseException:  # also Ctrl-C: `wait` takes as long as the running requests
            # A pause that was not answered in time takes effect later.
            with contextlib.suppress(InferenceError):
                self.post("/resume")
            raise
        try:
            yield
        finally:
            self._resume()

    def drop_caches(self) -> None:
        """Let the engine compute the key-value caches again, those of running requests too.

        Raises:
            InferenceError: it did not.
        """
        reset = self.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        if reset.content and _object_in(reset).get("success") is False:
            raise InferenceError(
                f"the engine at {self.shown_url} did not reset its prefix cache after the weight "
                "update; use --sync-pause-mode wait"
            )

    def transfer_backend(self) -> str | None:
        """Return the transfer engine with which this vLLM was started; None: without one."""
        backend = self._section("weight_transfer_config").get("backend")
        return None if backend is None else inert_line(str(backend), max_characters=100)

    def num_workers(self) -> int:
        """Return the number of the engine's workers, each with a part or a copy of the weights.

        Raises:
            InferenceError: the engine does not report it.
        """
        answer = self.send("GET", "/get_world_size")
        try:
            count = int(answer.json()["world_size"])
            if not 1 <= count <= MAX_WORKERS:
                raise ValueError(f"expected 1 to {MAX_WORKERS} workers")
            return count
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InferenceError(
                f"GET {self.shown_url}/get_world_size answered {answer.status_code}: "
                f"{inert_block(answer.text[:_MAX_QUOTED_CHARS])}"
            ) from error

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
        status = self.status_of("GET", "/model_info")
        if status != 200:
            raise ConfigError(
                f"the engine at {self.shown_url} is not SGLang (GET /model_info answered "
                f"{status}); for a vLLM use --engine vllm"
            )

    def returns_processed_logprobs(self) -> bool:
        return False  # SGLang does not report it

    def keeps_stale_output_layer(self) -> bool:
        return False

    def was_updated(self) -> bool:
        answer = self.send("GET", "/model_info")
        served = _object_in(answer) if answer.status_code == 200 else {}
        return str(served.get("weight_version") or 0) not in ("0", "default")

    def reload_weights(self, directory: Path, *, pause_mode: str, version: int = 0) -> None:
        """Load the weights in `directory` into the running engine; see `EngineControl`.

        With `pause_mode` `keep`, requests return to the queue and their caches are recomputed; with
        `none`, they are paused during the update and keep their caches.
        """
        mode = _PAUSE_MODES.get(pause_mode)
        if mode is None:
            self._update(directory, version, drops_caches=True)
            return
        try:
            self.post("/pause_generation", json={"mode": mode})
        except BaseException:  # it may take effect later
            with contextlib.suppress(InferenceError):
                self.post("/continue_generation", json={})
            raise
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
        content = _object_in(answer)
        if content.get("success") is False:
            reason = inert_block(str(content.get("message"))[:_MAX_QUOTED_CHARS])
            raise InferenceError(
                f"the engine at {self.shown_url} did not load the weights: {reason}"
            )


class EngineFleet:
    """Several engines with the interface of one, updated with the same weights in parallel."""

    def __init__(self, controls: Sequence[EngineControl | SglangControl]) -> None:
        self._controls = controls
        self._outdated: dict[int, list[EngineControl | SglangControl]] = {}
        """Engines without the weights of the last update, by its version; empty if all have."""

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

    def was_updated(self) -> bool:
        return any(control.was_updated() for control in self._controls)

    def reload_weights(self, directory: Path, *, pause_mode: str, version: int = 0) -> None:
        """Load the weights in every engine; all finish before an error is raised.

        The next call with the same version updates only the engines that failed: the others would
        be paused, and their requests aborted, for weights that they have.
        """

        def reload(control: EngineControl | SglangControl) -> None:
            control.reload_weights(directory, pause_mode=pause_mode, version=version)

        controls = self._outdated.get(version, self._controls)
        with ThreadPoolExecutor(len(controls)) as pool:
            updates = [(control, pool.submit(reload, control)) for control in controls]
        failed = [control for control, update in updates if update.exception() is not None]
        self._outdated = {version: failed} if failed else {}
        for _, update in updates:
            update.result()


def engine_addresses(config: TrainingConfig) -> list[str]:
    """Return the addresses of the engines, without `/v1`."""
    if config.engine_urls:
        return [url.rstrip("/").removesuffix("/v1") for url in config.engine_urls]
    return [f"http://{config.vllm_connect_host}:{config.vllm_port}"]


def control_of(config: TrainingConfig) -> EngineControl | SglangControl | EngineFleet:
    """Return the client that updates the configured engines."""
    kind = SglangControl if config.engine == "sglang" else EngineControl
    controls = [kind(address) for address in engine_addresses(config)]
    return controls[0] if len(controls) == 1 else EngineFleet(controls)
