"""What commands set for a process of their own, undone where they run in that of the tests."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

VARIABLES = (
    "GRADIO_ANALYTICS_ENABLED",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS",
)


@contextmanager
def process_as_found(scripts: Path) -> Iterator[None]:
    """Undo at the end what commands, environments and settings changed in this process.

    Args:
        scripts: Folder of scripts that settings name; those in it are forgotten.
    """
    variables = {name: os.environ.get(name) for name in VARIABLES}
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
