"""What commands set for a process of their own, undone where they run in that of the tests."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from atroposlib.utils.score_pool import ScoreBackend, ScorePool

VARIABLES = (
    "GRADIO_ANALYTICS_ENABLED",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS",
)
HUB_SETTINGS = ("huggingface_hub.constants", "datasets.config")
"""Modules that keep what `HF_HUB_OFFLINE` said, or that no hub was found."""
TRUE = ("1", "ON", "YES", "TRUE")


@contextmanager
def process_as_found(scripts: Path) -> Iterator[None]:
    """Undo at the end what commands, environments and settings changed in this process.

    Args:
        scripts: Folder of scripts that settings name; those in it are forgotten.
    """
    variables = {name: os.environ.get(name) for name in VARIABLES}
    hub_settings = _hub_settings()
    levels = [(each, each.level, each.propagate) for each in _loggers()]
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    num_frozen = gc.get_freeze_count()
    on_sigterm, formatwarning = signal.getsignal(signal.SIGTERM), warnings.formatwarning
    try:
        yield
    finally:
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _restore_hub_settings(hub_settings)
        for logger, level, propagates in levels:
            logger.setLevel(level)
            logger.propagate = propagates
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
        if num_frozen == 0:
            gc.unfreeze()
        signal.signal(signal.SIGTERM, on_sigterm)
        warnings.formatwarning = formatwarning
        _forget_scripts(f"{scripts}{os.sep}")


@contextmanager
def pools_closed() -> Iterator[None]:
    """Close at the end the pools for scores that tests left open.

    Their threads wake ten times a second, and their workers keep their memory.
    """
    opened: set[ScorePool] = set()
    open_workers = ScorePool._workers

    def note(pool: ScorePool) -> ScoreBackend:
        opened.add(pool)
        return open_workers(pool)

    ScorePool._workers = note  # type: ignore[method-assign]
    try:
        yield
    finally:
        ScorePool._workers = open_workers  # type: ignore[method-assign]
        with ThreadPoolExecutor() as closing:  # each takes a tenth of a second
            list(closing.map(ScorePool.close, opened))


def _hub_settings() -> dict[str, bool]:
    """Return whether the modules that were imported so far keep away from the hub."""
    known = {name: sys.modules.get(name) for name in HUB_SETTINGS}
    return {name: vars(module)["HF_HUB_OFFLINE"] for name, module in known.items() if module}


def _restore_hub_settings(found: dict[str, bool]) -> None:
    for name in _hub_settings():
        is_offline = found.get(name, os.environ.get("HF_HUB_OFFLINE", "").upper() in TRUE)
        vars(sys.modules[name])["HF_HUB_OFFLINE"] = is_offline


def _forget_scripts(folder: str) -> None:
    sys.path[:] = [each for each in sys.path if not str(each).startswith(folder)]
    for name, module in list(sys.modules.items()):
        # `vars`, since asking a lazy module for an attribute may import it.
        path = vars(module).get("__file__") if isinstance(module, ModuleType) else None
        if str(path).startswith(folder):
            del sys.modules[name]


def _loggers() -> list[logging.Logger]:
    known = list(logging.root.manager.loggerDict.values())
    return [each for each in known if isinstance(each, logging.Logger)]
