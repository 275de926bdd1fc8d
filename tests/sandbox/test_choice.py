"""Which sandbox is opened, and which is refused."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from atroposlib.sandbox import SandboxLimits, SandboxUnavailableError, open_sandbox
from atroposlib.sandbox.containers import Containers
from atroposlib.sandbox.limits import PARENT, ControlGroups, require_bound


@pytest.mark.parametrize(
    ("kind", "package"), [("bubblewrap", "bubblewrap"), ("container", "runc"), ("gvisor", "runsc")]
)
def test_missing_program_is_explained(
    monkeypatch: pytest.MonkeyPatch, kind: str, package: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailableError, match=f"apt-get install {package}"):
        open_sandbox(kind)


def test_unknown_kind_is_refused_and_no_other_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATROPOS_SANDBOX", "none")
    with pytest.raises(
        SandboxUnavailableError, match=r"called 'none'; known: bubblewrap, container, gvisor"
    ):
        open_sandbox()

    assert open_sandbox("bubblewrap").name == "bubblewrap"


def test_limit_of_zero_is_refused() -> None:
    limits: Callable[..., SandboxLimits] = SandboxLimits
    with pytest.raises(ValueError, match="cpu_s must be a finite number above 0"):
        limits(cpu_s=0)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is missing")
def test_sandbox_whose_memory_nothing_bounds_has_to_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("atroposlib.sandbox.bubblewrap.ControlGroups", lambda: no_groups)
    monkeypatch.setattr("atroposlib.sandbox.bubblewrap.has_filter", lambda: False)
    no_groups = ControlGroups(tmp_path)

    with pytest.raises(
        SandboxUnavailableError, match=r"^nothing bounds .* set ATROPOS_SANDBOX_UNBOUNDED_MEMORY=1"
    ):
        open_sandbox("bubblewrap")
    assert open_sandbox("bubblewrap", allow_unbounded_memory=True).name == "bubblewrap"

    monkeypatch.setenv("ATROPOS_SANDBOX_UNBOUNDED_MEMORY", "1")
    assert open_sandbox("bubblewrap").name == "bubblewrap"


@pytest.mark.parametrize("has_memory", [True, False])
@pytest.mark.parametrize("has_filter", [True, False])
def test_control_group_or_filter_bounds_memory(
    tmp_path: Path, has_memory: bool, has_filter: bool
) -> None:
    controller = tmp_path / ("memory" if has_memory else "pids")
    (controller / PARENT).mkdir(parents=True)
    (controller / PARENT / ("memory.limit_in_bytes" if has_memory else "pids.max")).touch()
    groups = ControlGroups(tmp_path)

    if has_memory or has_filter:
        require_bound(groups, has_filter=has_filter)
    else:
        with pytest.raises(SandboxUnavailableError, match="nothing bounds the memory"):
            require_bound(groups, has_filter=has_filter)


@pytest.mark.skipif(os.geteuid() != 0, reason="containers need root")
async def test_runtime_under_which_a_limit_does_not_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runtime = tmp_path / "runc"
    runtime.write_text("""#!/bin/sh
for word; do test "$before" = --pid-file && echo 1 > "$word"; before=$word; done
""")
    runtime.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    sandbox = open_sandbox("container")

    with pytest.raises(SandboxUnavailableError, match="the limit of memory does not hold here"):
        await sandbox.run(["/usr/bin/true"])


@pytest.mark.skipif(os.geteuid() != 0, reason="containers need root")
async def test_folder_of_a_program_that_is_cancelled_while_it_is_written_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runtime = tmp_path / "runc"
    runtime.touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sandbox = open_sandbox("container")
    assert isinstance(sandbox, Containers)
    started, written, is_cancelled = asyncio.Event(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def fill(bundle: Path, *_: object) -> None:
        loop.call_soon_threadsafe(started.set)
        is_cancelled.wait()
        (bundle / "later").mkdir(parents=True)
        loop.call_soon_threadsafe(written.set)

    monkeypatch.setattr(sandbox, "_is_tried", True)
    monkeypatch.setattr(sandbox, "_fill", fill)

    running = asyncio.create_task(sandbox.run(["true"]))
    await started.wait()
    running.cancel()
    await asyncio.wait({running}, timeout=0.05)  # it ends here only if it does not wait
    is_cancelled.set()
    await written.wait()
    await asyncio.wait({running})

    assert running.cancelled()
    assert os.listdir(tmp_path) == ["runc"]  # noqa: PTH208 - not blocking
