"""The metrics file of a run: one line for every step that stands, whatever the run died of.

metrics.jsonl             the run that writes now; a resumed one cuts it back to its checkpoint
metrics_settings.json     its settings, and which run it is
metrics.<n>.jsonl ...     earlier runs that were given the same path
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from example_trainer.reporting.writing import read_settings, settings_path

__all__ = ["claim_metrics_file", "length_through"]


def claim_metrics_file(path: Path, *, run_id: str, steps_done: int) -> bool:
    """Make a metrics file ready for a run that goes on after `steps_done` steps.

    The run's own file loses the lines of later steps, which are trained and logged again, and a
    last line that was half written. A file of another run is kept under another name.

    Args:
        path: Of the file; it need not be there.
        run_id: Which run it is, as in its journal.
        steps_done: Steps whose lines stay.

    Returns:
        Whether the run's own file lacks the line of step `steps_done`: the run was killed between
        the checkpoint of that step and its line.
    """
    is_own = read_settings(path).get("run_id") == run_id
    if not path.is_file():
        return is_own and steps_done > 0
    if not is_own:
        _set_aside(path)
        return False
    with path.open("rb+") as file:
        file.truncate(length_through(file, steps_done))
        file.seek(0)
        return steps_done > 0 and all(_step_of(line) != steps_done for line in file)


def length_through(lines: Iterable[bytes], steps_done: int) -> int:
    """Return how many bytes of a metrics file hold whole lines of steps up to `steps_done`.

    Args:
        lines: of the file, each with its end.
        steps_done: steps that stand.
    """
    length = 0
    for line in lines:
        step = _step_of(line)
        if step is None or step > steps_done:
            break
        length += len(line)
    return length


def _step_of(line: bytes) -> int | None:
    """Return the step of a line, None for one that is no whole record."""
    if not line.endswith(b"\n"):
        return None
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _set_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    settings = settings_path(path)
    if settings.is_file():
        settings.rename(settings_path(aside))
    path.rename(aside)
