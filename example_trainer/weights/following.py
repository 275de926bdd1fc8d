"""Follow a store: keep a folder at the newest version, and engines that load it in place.

Versions are downloaded, applied and verified while engines generate; they pause only to load the
files of the new version. Failures of the store, the folder or an engine are logged and retried.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from atroposlib.errors import ConfigError, InferenceError
from atroposlib.utils.text import inert_line
from example_trainer.weights.format import Manifest, WeightsError
from example_trainer.weights.local import LocalWeights, fetch_head
from example_trainer.weights.store import WeightStore

__all__ = ["EngineToUpdate", "FollowedEngine", "Follower"]

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 60.0
_MAX_QUOTED_CHARACTERS = 1000
"""Of the message of an engine."""


class EngineToUpdate(Protocol):
    """Part of `EngineControl` and `SglangControl` that a follower needs."""

    @property
    def shown_url(self) -> str:
        """Address without secrets."""

    def require_in_place_updates(self) -> None:
        """Raise `ConfigError` if the engine cannot reload its weights."""

    def keeps_stale_output_layer(self) -> bool:
        """Return whether a reload leaves an output layer tied to the embedding as it was."""

    def reload_weights(self, directory: Path, *, pause_mode: str, version: int = 0) -> None:
        """Load the weights of a folder."""


class Backoff:
    """Time of the next attempt: the wait doubles with each failure in a row."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wait_s = 0.0
        self._due_at = 0.0

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._due_at

    def failed(self) -> float:
        """Return the seconds until the next attempt."""
        self._wait_s = min(_LAST_RETRY_S, max(_FIRST_RETRY_S, 2 * self._wait_s))
        self._due_at = self._clock() + self._wait_s
        return self._wait_s

    def succeeded(self) -> None:
        self._wait_s = self._due_at = 0.0


class FollowedEngine:
    """An engine and the version it has loaded; unknown at the start, so that it loads one."""

    def __init__(
        self,
        control: EngineToUpdate,
        *,
        pause_mode: str = "keep",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.control = control
        self._pause_mode = pause_mode
        self._clock = clock
        self._backoff = Backoff(clock)
        self._is_checked = False
        self.loaded_serial: int | None = None

    def load(self, folder: Path, *, serial: int, version: int) -> None:
        """Load a version unless it is loaded.

        Raises:
            ConfigError: the engine can never load it.
            InferenceError: it did not load it; the message names the engine.
        """
        if self.loaded_serial == serial:
            return
        try:
            if not self._is_checked:
                self._require_updatable()
            started = self._clock()
            self.control.reload_weights(folder, pause_mode=self._pause_mode, version=version)
        except ConfigError:  # some are also an InferenceError
            raise
        except InferenceError as error:
            self._is_checked = False  # it may come back as another one
            reason = inert_line(str(error), max_characters=_MAX_QUOTED_CHARACTERS)
            raise InferenceError(
                f"engine {self.control.shown_url} did not load version {version}: {reason}"
            ) from error
        self.loaded_serial = serial
        logger.info(
            "engine %s has loaded version %d in %.2f s",
            self.control.shown_url,
            version,
            self._clock() - started,
        )

    def update(self, folder: Path, *, serial: int, version: int) -> bool:
        """Load a version unless it is loaded or a retry is not due; return whether it is loaded.

        Raises:
            ConfigError: the engine can never load it.
        """
        if self.loaded_serial != serial and not self._backoff.is_due:
            return False
        try:
            self.load(folder, serial=serial, version=version)
        except InferenceError as error:
            logger.warning("%s; trying again in %.0f s", error, self._backoff.failed())
            return False
        self._backoff.succeeded()
        return True

    def _require_updatable(self) -> None:
        self.control.require_in_place_updates()
        if self.control.keeps_stale_output_layer():
            raise ConfigError(
                f"the engine at {self.control.shown_url} runs on a CPU and serves a model whose "
                "output layer is its input embedding, which vLLM does not replace in place; "
                "publish and serve an untied copy, as the trainer writes on a CPU"
            )
        self._is_checked = True


class Follower:
    """Keeps a folder, and engines if there are any, at the newest version of a store.

    Args:
        store: The store.
        local: The folder, opened by the caller.
        engines: Engines on hosts that can read the folder.
        poll_s: Seconds between two looks at the manifest.
        clock: Monotonic seconds.
        sleep: Waits for seconds.
    """

    def __init__(
        self,
        store: WeightStore,
        local: LocalWeights,
        engines: Sequence[FollowedEngine] = (),
        *,
        poll_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._local = local
        self._engines = engines
        self._poll_s = poll_s
        self._clock = clock
        self._sleep = sleep
        self._backoff = Backoff(clock)
        self._has_said_empty = False

    def follow(self) -> None:
        """Follow until interrupted.

        Raises:
            ConfigError: the store has another run than the folder, or an engine cannot be updated.
        """
        while True:
            self.poll()
            self._sleep(self._poll_s)

    def follow_once(self) -> None:
        """Bring folder and engines to the newest version.

        Raises:
            WeightsError: there is none, or it cannot be fetched.
            InferenceError: an engine did not load it.
        """
        manifest = self._store.manifest()
        if manifest is None:
            raise WeightsError(f"{self._store.shown_url} has no versions yet")
        try:
            self._fetch(manifest)
        except FileNotFoundError as error:
            raise WeightsError(f"{self._store.shown_url}: {error} is missing; try again") from error
        self._load_engines()

    def poll(self) -> bool:
        """Fetch the newest version and update engines; return whether both are up to date."""
        is_fetched = self._backoff.is_due and self._fetch_or_log()
        return self._update_engines() and is_fetched

    def _fetch_or_log(self) -> bool:
        try:
            manifest = self._store.manifest()
            if manifest is None:
                if not self._has_said_empty:
                    logger.info("%s has no versions yet; waiting", self._store.shown_url)
                self._has_said_empty = True
                return False
            self._fetch(manifest)
        except FileNotFoundError as error:
            # The publisher has dropped a version since; its manifest is newer by now.
            return self._failed(f"{self._store.shown_url}: {error} is gone")
        except (WeightsError, OSError) as error:
            return self._failed(str(error))
        self._backoff.succeeded()
        return True

    def _failed(self, reason: str) -> bool:
        wait_s = self._backoff.failed()
        logger.warning("%s; trying again in %.0f s", reason, wait_s)
        return False

    def _fetch(self, manifest: Manifest) -> None:
        before = self._local.record()
        started = self._clock()
        folder = fetch_head(self._store, manifest, self._local)
        if before == self._local.record():
            return
        logger.info(
            "version %d is in %s, fetched and verified in %.2f s",
            manifest.head.version,
            folder,
            self._clock() - started,
        )

    def _update_engines(self) -> bool:
        try:
            record = self._local.record()
            folder = self._local.current.resolve()
        except OSError as error:  # such as a network file system that is away
            logger.warning("%s cannot be read: %s", self._local.root, error)
            return False
        if record is None:
            return not self._engines
        loaded = [
            engine.update(folder, serial=record.serial, version=record.version)
            for engine in self._engines
        ]
        return all(loaded)

    def _load_engines(self) -> None:
        """Let each engine load the current version once; raise after the last one."""
        record = self._local.record()
        if record is None:
            return
        folder = self._local.current.resolve()
        reasons = []
        for engine in self._engines:
            try:
                engine.load(folder, serial=record.serial, version=record.version)
            except InferenceError as error:
                reasons.append(str(error))
        if reasons:
            raise InferenceError("; ".join(reasons))
