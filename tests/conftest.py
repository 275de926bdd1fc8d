"""Options, markers and fixtures shared by every test."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from example_trainer.processes import find_free_port
from tests.process_state import pools_closed, process_as_found
from tests.redis_server import RedisServer

FOLDERS_THAT_SHARE = ("end_to_end", "exporting", "on_ray", "packaging")
"""Folders whose session fixtures start an engine, a service or an installation."""
OPTIONS = (
    ("providers", "--runproviders"),
    ("gpu", "--run-gpu"),
    ("long", "--run-long"),
    ("clients", "--run-clients"),
)


WARNING_FILTERS = (
    "error",
    "ignore::DeprecationWarning",
    "ignore::PendingDeprecationWarning",
    "ignore::ResourceWarning",
    "ignore::SyntaxWarning",  # of other packages, whenever Python compiles them again
)
"""For these tests alone: suites of others in this tree, such as `atroposlib/tests`, may warn."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runproviders", action="store_true", help="run tests that need a paid API")
    parser.addoption("--run-gpu", action="store_true", help="run tests that need a GPU")
    parser.addoption("--run-long", action="store_true", help="run tests that take minutes each")
    parser.addoption("--run-clients", action="store_true", help="run third-party programs")
    parser.addoption("--fast", action="store_true", help="leave out files marked slow, unread")
    parser.addoption(
        "--long-part", metavar="K/N", type=_part, default=(0, 1),
        help="run only the long tests of part K of N, counted by file; K may exceed N",
    )  # fmt: skip
    parser.addoption(
        "--clients-part", metavar="K/N", type=_part, default=(0, 1),
        help="run only part K of N of the tests with third-party programs; K may exceed N",
    )  # fmt: skip
    parser.addoption(
        "--part-minutes", metavar="M", type=float, default=float("inf"),
        help="skip long tests and those of clients that would start after M minutes",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    for line in WARNING_FILTERS:
        config.addinivalue_line("filterwarnings", line)
    # Shells start jobs in the background with SIGINT ignored, which every child would inherit.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.version_info < (3, 12):
        sys.addaudithook = partial(_add_audit_hook, os.getpid(), sys.addaudithook)
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Threads of torch in several workers compete for cores; torch reads this when imported.
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def _add_audit_hook(pid: int, add: Callable[[Any], None], hook: Any) -> None:
    """Refuse a hook in the process of the tests, where it stays for all that follow.

    Before Python 3.12, `sys.settrace` fails in one thread while hooks run in another, and
    coverage.py calls it in each thread that starts. The thread ends, and what it had to do is lost.
    """
    if os.getpid() == pid:
        raise RuntimeError("add the audit hook in another process; see tests/conftest.py")
    add(hook)


# Examples may take any time, since machines differ.
hypothesis.settings.register_profile(
    "any_machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any_machine")


def _part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/([1-9]\d*)", text)
    if found is None:
        raise pytest.UsageError(f"expected a part K/N such as 3/8, not {text!r}")
    return int(found[1]) % int(found[2]), int(found[2])


_STARTED = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--part-minutes")
    is_long = any(item.get_closest_marker(name) is not None for name in ("long", "clients"))
    if is_long and time.monotonic() - _STARTED > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes of --part-minutes have passed")


SLOW_FILE = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # An ignored file is not imported either; importing takes as long as running its tests.
    if not config.getoption("--fast") or collection_path.suffix != ".py":
        return None
    return SLOW_FILE.search(collection_path.read_text(encoding="utf-8")) is not None or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _skip_without_option(config, items)
    _skip_other_parts(config, items)
    # Slow tests start first, so that workers finish at about the same time.
    items.sort(key=lambda item: (item.path.parent.name not in FOLDERS_THAT_SHARE, not _slow(item)))


def _slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


class ByFolderOrFile(LoadScopeScheduling):
    """Keeps tests that share an engine, an installation or a service in one worker."""

    def _split_scope(self, nodeid: str) -> str:
        path = Path(nodeid.partition("::")[0])
        return path.parent.name if path.parent.name in FOLDERS_THAT_SHARE else str(path)


@pytest.hookimpl(optionalhook=True)  # pytest also runs without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFolderOrFile:
    return ByFolderOrFile(config, log)


def _skip_other_parts(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests of other parts; a part of the long ones has whole files, which share fixtures."""
    part, count = config.getoption("--clients-part")
    clients = [item for item in items if item.get_closest_marker("clients") is not None]
    for number, item in enumerate(clients):
        if number % count != part:
            item.add_marker(pytest.mark.skip(reason=f"not in part {part} of {count}"))
    part, count = config.getoption("--long-part")
    long = [item for item in items if item.get_closest_marker("long") is not None]
    files = sorted({item.path for item in long})
    for item in long:
        if files.index(item.path) % count != part:
            item.add_marker(pytest.mark.skip(reason=f"not in part {part} of {count} (--long-part)"))


def _skip_without_option(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, option in OPTIONS:
        if config.getoption(option):
            continue
        skip = pytest.mark.skip(reason=f"needs {option}")
        for item in items:
            if item.get_closest_marker(marker) is not None:  # keywords hold names of folders too
                item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After each file, undo what commands set in this process, and close pools that are open.

    Which files share a process depends on timing, so that what one leaves fails others by chance.
    """
    with process_as_found(tmp_path_factory.getbasetemp()), pools_closed():
        yield


@pytest.fixture
def free_port() -> int:
    """A TCP port that is currently unused."""
    return find_free_port()


@pytest.fixture
def leave_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Make standard output a pipe that nothing reads, as after `| head` has its line."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as closed:
        yield lambda: monkeypatch.setattr("sys.stdout", closed)


@pytest.fixture
def offline_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make downloads fail at once instead of after the retries of the hub's client."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def offline_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of offline runs of Weights & Biases, which reads its settings once per process."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()  # forgets what an earlier test set
    yield tmp_path
    wandb.teardown()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A real Redis without persistence; each test names its own run."""
    server = RedisServer()
    server.start()
    yield server
    server.close()
