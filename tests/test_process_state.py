"""Files do not depend on what earlier ones in the same process did."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.commands import _show_progress_messages
from atroposlib.envs.running import favour_event_loop
from atroposlib.tasks.single_turn_parts import SavedRolloutsConfig
from atroposlib.utils.imports import import_script
from tests.process_state import VARIABLES, process_as_found


def test_what_commands_set_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    caplog.set_level(logging.DEBUG, "atroposlib.envs.base")
    script = tmp_path / "rewards" / "own_reward.py"
    script.parent.mkdir()
    script.touch()
    before = state()

    with process_as_found(tmp_path):
        favour_event_loop()
        _show_progress_messages()
        SavedRolloutsConfig().set_log_levels(logging.getLogger(__name__))
        import_script(script)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        os.environ.update(dict.fromkeys(VARIABLES, "1"))
        changed = state()

    assert [now != then for now, then in zip(changed, before, strict=True)] == [True] * len(before)
    assert state() == before


def state() -> list[Any]:
    loggers = [logging.getLogger(name) for name in ("httpx", "atroposlib.envs.base")]
    return [
        sys.getswitchinterval(),
        gc.get_threshold(),
        gc.get_freeze_count(),
        signal.getsignal(signal.SIGTERM),
        warnings.formatwarning,
        list(sys.path),
        "own_reward" in sys.modules,
        [os.environ.get(name) for name in VARIABLES],
        [(logger.level, logger.propagate) for logger in loggers],
    ]
