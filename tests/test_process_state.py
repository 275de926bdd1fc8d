"""Files do not depend on what earlier ones in the same process did."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs.commands import _show_progress_messages
from atroposlib.envs.running import favour_event_loop
from atroposlib.tasks.single_turn_parts import SavedRolloutsConfig
from atroposlib.utils.imports import import_script
from atroposlib.utils.score_pool import ScorePool
from tests.process_state import HUB_SETTINGS, VARIABLES, pools_closed, process_as_found


def test_what_commands_set_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in HUB_SETTINGS:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(HF_HUB_OFFLINE=False))
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
        for name in HUB_SETTINGS:
            vars(sys.modules[name])["HF_HUB_OFFLINE"] = True
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
        [vars(sys.modules[name])["HF_HUB_OFFLINE"] for name in HUB_SETTINGS],
        [(logger.level, logger.propagate) for logger in loggers],
    ]


def test_setting_of_the_hub_is_undone_where_it_was_imported_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in HUB_SETTINGS:
        monkeypatch.delitem(sys.modules, name, raising=False)

    with process_as_found(tmp_path):
        for name in HUB_SETTINGS:
            monkeypatch.setitem(sys.modules, name, SimpleNamespace(HF_HUB_OFFLINE=True))

    assert [vars(sys.modules[name]) for name in HUB_SETTINGS] == [{"HF_HUB_OFFLINE": False}] * 2


async def test_pools_that_stay_open_are_closed() -> None:
    before = set(threading.enumerate())

    with pools_closed():
        for _ in range(2):  # of an environment that nothing refers to any longer
            assert await ScorePool(num_workers=0).run(str, 3) == "3"
        during = set(threading.enumerate())

    assert len(during - before) > 2
    assert not {thread for thread in during - before if thread.is_alive()}
