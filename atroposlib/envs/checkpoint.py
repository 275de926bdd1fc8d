"""Checkpoints of an environment: one JSON object per trainer step.

    <checkpoint_dir>/env_checkpoints/<prepend>/step-<step>.json

`prepend` is the name the service gave the environment, its own name and a number. A restarted
environment gets the next number, so loading also looks at the other numbers of the same name.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atroposlib.utils.plain_json import encode_mapping

__all__ = ["load_env_checkpoint", "save_env_checkpoint"]

logger = logging.getLogger(__name__)

UNNAMED = "env"
"""Folder of an environment that has no name."""

STEP_FILE = re.compile(r"step-(\d+)\.json")
NUMBER_SUFFIX = re.compile(r"_\d+$")


def save_env_checkpoint(
    checkpoint_dir: str | Path, prepend: str | None, step: int, data: Mapping[str, Any]
) -> Path:
    """Write the state of an environment at one step.

    The file appears whole or not at all, so a process killed while writing leaves the earlier one.

    Args:
        checkpoint_dir: the trainer's checkpoint folder; created when missing.
        prepend: registered name of the environment.
        step: trainer step.
        data: attribute name to JSON value; NumPy values are converted.

    Returns:
        The file written.

    Raises:
        ValueError: a value has no JSON form; the message names its key.
    """
    path = _folder(checkpoint_dir, prepend) / f"step-{step}.json"
    text = encode_mapping(data, allow_nan=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
    return path


def load_env_checkpoint(
    checkpoint_dir: str | Path, prepend: str | None, step: int
) -> dict[str, Any] | None:
    """Read the checkpoint of this step, or the newest earlier one under the same name.

    Files of later steps are left alone: they belong to a run that went further than this one.
    A file that cannot be read is skipped with a warning.

    Args:
        checkpoint_dir: the trainer's checkpoint folder.
        prepend: registered name of the environment; other numbers of it count as the same name.
        step: trainer step the environment starts at.

    Returns:
        Attribute name to value, or None when nothing fits.
    """
    own = _folder(checkpoint_dir, prepend)
    exact = own / f"step-{step}.json"
    for path in [exact, *_earlier_checkpoints(own, step)]:
        data = _read(path)
        if data is not None:
            return data
    return None


def _folder(checkpoint_dir: str | Path, prepend: str | None) -> Path:
    return Path(checkpoint_dir) / "env_checkpoints" / (prepend or UNNAMED)


def _earlier_checkpoints(own: Path, step: int) -> list[Path]:
    """Files of all numbers of one name up to a step, the newest first."""
    base = NUMBER_SUFFIX.sub("", own.name)
    if not own.parent.is_dir():
        return []
    found = []
    for folder in own.parent.iterdir():
        if not folder.is_dir() or NUMBER_SUFFIX.sub("", folder.name) != base:
            continue
        for path in folder.iterdir():
            match = STEP_FILE.fullmatch(path.name)
            if match and int(match[1]) <= step:
                found.append((int(match[1]), path.stat().st_mtime, path))
    return [path for _, _, path in sorted(found, reverse=True)]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("checkpoint %s cannot be read (%s); trying an older one", path, error)
        return None
    if not isinstance(data, dict):
        logger.warning("checkpoint %s holds no JSON object; trying an older one", path)
        return None
    logger.info("environment checkpoint read from %s", path)
    return data
