"""Which sandbox is opened, and which is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from atroposlib.sandbox import SandboxLimits, SandboxUnavailableError, open_sandbox


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
