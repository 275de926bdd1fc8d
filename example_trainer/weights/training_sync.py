"""Publish weights of a training run to a store, while the run goes on.

step --> copy to a folder --> next step
              |
              +--> background: compare, compress, upload, switch the manifest

A step waits for the copy only. If versions come faster than they are uploaded, the newest waits and
those between are left out. Failures are retried; a lasting one ends the run.
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from atroposlib.errors import ConfigError
from atroposlib.utils.writable import naming_writes
from example_trainer.checkpointing import safetensors_errors
from example_trainer.config import TrainingConfig
from example_trainer.weight_sync import WeightSync, declare_untied, ties_output_to_input
from example_trainer.weights.format import Manifest, WeightsError
from example_trainer.weights.local import LocalWeights
from example_trainer.weights.publishing import PublishRules, WeightsPublisher
from example_trainer.weights.store import WeightStore

__all__ = ["BackgroundPublisher", "PublishingSync", "stage_weights", "with_published_weights"]

logger = logging.getLogger(__name__)

_RETRY_S = (1, 2, 5, 10, 30, 60, 60, 120, 120, 120)
"""Waits between the attempts to publish a version."""
_LONGEST_WAIT_AT_END_S = 5
_FOLDER = "published_weights"


class _Staged(NamedTuple):
    folder: Path
    version: int


class BackgroundPublisher:
    """Publishes staged folders from a thread, the newest of those that wait.

    Args:
        publisher: Opened; closed by `close`.
        rewinds: Whether the first version may be below the last one of the store.
    """

    def __init__(self, publisher: WeightsPublisher, *, rewinds: bool = False) -> None:
        self._publisher = publisher
        self._rewinds = rewinds
        self._waiting: _Staged | None = None
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="weights publisher")
        self._thread.start()

    def submit(self, folder: Path, version: int) -> None:
        """Publish a folder, which is deleted afterwards.

        Raises:
            AtroposError: an earlier version could not be published.
        """
        self.check()
        with self._changed:
            if self._waiting is not None:
                logger.warning(
                    "version %d was not published: version %d came before its turn",
                    self._waiting.version,
                    version,
                )
                shutil.rmtree(self._waiting.folder, ignore_errors=True)
            self._waiting = _Staged(folder, version)
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error of the thread, if it has ended with one."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wait until the last version is published, and end the thread.

        Raises:
            AtroposError: a version could not be published.
        """
        self._is_closing.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()
        self._publisher.close()
        self.check()

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._waiting is None and not self._is_closing.is_set():
                    self._changed.wait()
                staged, self._waiting = self._waiting, None
            if staged is None:
                return
            try:
                self._publish(staged)
            except Exception as error:  # noqa: BLE001 - raised in the thread of the trainer
                logger.error("version %d was not published: %s", staged.version, error)
                self._error = error
                return
            finally:
                shutil.rmtree(staged.folder, ignore_errors=True)

    def _publish(self, staged: _Staged) -> None:
        for wait_s in (*_RETRY_S, None):
            try:
                report = self._publisher.publish(
                    staged.folder, staged.version, rewinds=self._rewinds
                )
            except (WeightsError, OSError) as error:
                if wait_s is None:
                    raise WeightsError(
                        f"version {staged.version} was not published: {error}"
                    ) from error
                logger.warning(
                    "version %d: %s; trying again in %d s", staged.version, error, wait_s
                )
                if self._is_closing.is_set():
                    time.sleep(min(wait_s, _LONGEST_WAIT_AT_END_S))
                else:
                    self._is_closing.wait(wait_s)
            else:
                break
        self._rewinds = False
        delta, entry = report.entry.delta, report.entry
        logger.info(
            "published version %d: delta of %s, %.2f s to compare and %.2f s to upload",
            entry.version,
            f"{delta.num_bytes / entry.weights_bytes:.2%} of the weights" if delta else "0 bytes",
            report.compare_s,
            report.upload_s,
        )


def stage_weights(model: Any, folder: Path, *, dtype: str, unties: bool) -> None:
    """Write a copy of a model to a new folder, as engines load it.

    Args:
        model: A transformers model.
        folder: It must not exist.
        dtype: Element type of the floating-point tensors; `as_trained` keeps theirs.
        unties: Whether to write a tied output layer as a tensor of its own; see
            `weight_sync.export_for_engine`.
    """
    import torch

    kind = None if dtype == "as_trained" else getattr(torch, dtype)
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
    state = {}
    for name, value in model.state_dict().items():
        if kind is not None and value.is_floating_point():
            # Tied tensors stay one tensor, so that the file has them once.
            key = (value.data_ptr(), value.shape)
            if key not in copies:
                # Not kept on a GPU, which may have no memory for another copy.
                copies[key] = value.to(kind).cpu()
            value = copies[key]
        state[name] = value
    is_tied = ties_output_to_input(model)
    if is_tied and unties:
        head = model.get_output_embeddings()
        name = next(n for n, module in model.named_modules() if module is head)
        state[f"{name}.weight"] = state[f"{name}.weight"].clone()
    folder.mkdir(parents=True)
    with naming_writes(folder), safetensors_errors():
        model.save_pretrained(folder, state_dict=state, safe_serialization=True)
    if is_tied and unties:
        declare_untied(folder / "config.json")
    if kind is not None:
        _declare_dtype(folder / "config.json", dtype)


def _declare_dtype(path: Path, dtype: str) -> None:
    settings = json.loads(path.read_text(encoding="utf-8"))
    for section in (settings, settings.get("text_config", {})):
        for key in ("dtype", "torch_dtype"):
            if key in section:
                section[key] = dtype
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")


class PublishingSync:
    """A weight sync that also publishes every version to a store.

    Args:
        config: `publish_weights` is the URL.
        inner: Updates the run's own engine; None: there is none.
    """

    publishes_final = True

    def __init__(self, config: TrainingConfig, inner: WeightSync | None) -> None:
        self._config = config
        self._inner = inner
        self._root = Path(config.save_path) / _FOLDER
        self._background: BackgroundPublisher | None = None
        self._tokenizer: Path | None = None
        self._numbers = itertools.count()

    @property
    def mode(self) -> str:
        return self._inner.mode if self._inner else "off"

    def check_before_load(self) -> None:
        if self._inner is not None:
            self._inner.check_before_load()
        store = WeightStore(self._config.publish_weights or "")
        try:
            self._require_own_run(store, store.manifest())
            self._root.mkdir(parents=True, exist_ok=True)
            rules = PublishRules(keep_versions=self._config.publish_keep_versions)
            publisher = WeightsPublisher(store, self._root / "last", rules=rules)
            publisher.open()
        except WeightsError as error:
            raise ConfigError(f"--publish-weights: {error}") from error
        self._drop_staged()
        self._background = BackgroundPublisher(publisher, rewinds=self._config.resume)

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        if self._inner is not None:
            self._inner.start(model, tokenizer, source=source, step=step)
        self._tokenizer = self._root / "staged-tokenizer"
        self._tokenizer.mkdir()
        tokenizer.save_pretrained(self._tokenizer)
        self._submit(model, step)

    def before_step(self, *, sync_follows: bool) -> None:
        if self._inner is not None:
            self._inner.before_step(sync_follows=sync_follows)

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        is_last = step >= self._config.training_steps
        if self._inner is not None and (self._inner.publishes_final or not is_last):
            self._inner.publish(model, checkpoint=checkpoint, step=step)
        self._submit(model, step)

    def check_alive(self) -> None:
        if self._inner is not None:
            self._inner.check_alive()
        if self._background is not None:
            self._background.check()

    def returns_processed_logprobs(self) -> bool:
        return self._inner is not None and self._inner.returns_processed_logprobs()

    def close(self) -> None:
        background, self._background = self._background, None
        try:
            if self._inner is not None:
                self._inner.close()
        finally:
            if background is not None:
                self._close_background(background)

    def _close_background(self, background: BackgroundPublisher) -> None:
        try:
            background.close()
        finally:
            self._drop_staged()

    def _drop_staged(self) -> None:
        for leftover in self._root.glob("staged-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _require_own_run(self, store: WeightStore, manifest: Manifest | None) -> None:
        if manifest is None:
            return
        last = LocalWeights(self._root / "last").record()
        if not self._config.resume or (last and last.run != manifest.run):
            raise ConfigError(
                f"--publish-weights: {store.shown_url} has version {manifest.head.version} of "
                "another run; use a new URL, or continue that run with --resume"
            )

    def _submit(self, model: Any, step: int) -> None:
        if self._background is None:
            return
        started = time.perf_counter()
        self._background.check()
        # Numbered: a finished run that is resumed publishes its last step at its start and its end.
        folder = self._root / f"staged-{next(self._numbers)}-step-{step}"
        on_cpu = not self._config.device.startswith("cuda")
        stage_weights(model, folder, dtype=self._config.publish_dtype, unties=on_cpu)
        for file in self._tokenizer.iterdir() if self._tokenizer else ():
            shutil.copyfile(file, folder / file.name)
        self._background.submit(folder, step)
        logger.debug("copied the weights of step %d in %.2f s", step, time.perf_counter() - started)


def with_published_weights(config: TrainingConfig, sync: WeightSync | None) -> WeightSync | None:
    """Return a weight sync that also publishes, if the config asks for it."""
    return PublishingSync(config, sync) if config.publish_weights else sync
