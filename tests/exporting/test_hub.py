"""Pushing to the hub: what is uploaded, and a hub that is not there."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.exporting.output import push_to_hub

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    "name",
    [
        "out.parquet",
        pytest.param("out.jsonl", marks=pytest.mark.long),
        pytest.param("out", marks=pytest.mark.long),
    ],
)
def test_what_is_uploaded_is_what_was_written(
    name: str, run_command: Run, groups_file: Path, tmp_path: Path
) -> None:
    from datasets import load_dataset

    path = tmp_path / name
    kind = "dataset" if name == "out" else "auto"
    words = ("--file", groups_file, "--format", "tokens", "--output", kind)
    assert run_command("sft", path, *words, "--num-seqs-to-save", 3).returncode == 0
    pushed: list[Any] = []

    class Loaded:
        def __init__(self, rows: Any) -> None:
            self.rows = rows

        def push_to_hub(self, repository: str, *, private: bool) -> None:
            pushed.append((len(self.rows), repository, private))

    def load(*arguments: Any, split: str) -> Loaded:
        return Loaded(load_dataset(*arguments, split=split))

    push_to_hub(path, "me/mine", is_public=False, load=load)
    push_to_hub(path, "me/mine", is_public=True, load=load)

    assert pushed == [(3, "me/mine", True), (3, "me/mine", False)]


@pytest.mark.long
def test_hub_that_is_away_leaves_the_export_and_says_how_to_push_it(
    run_command: Run, groups_file: Path, free_port: int, tmp_path: Path
) -> None:
    path = tmp_path / "out.jsonl"
    words = ("--file", groups_file, "--format", "tokens", "--push-to-hub")
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{free_port}", "HF_HUB_OFFLINE": "0"}

    done = run_command("sft", path, *words, "me/mine", **hub)
    wrong = run_command("sft", tmp_path / "other", *words, "no such name", **hub)

    assert done.returncode == 1
    assert f"hf upload --repo-type dataset me/mine {path}" in done.stderr
    assert "Traceback" not in done.stderr
    assert path.exists()
    assert wrong.returncode == 2
    assert "expected OWNER/NAME" in wrong.stderr
    assert not (tmp_path / "other").exists()
