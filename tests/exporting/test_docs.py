"""Every command of docs/exporting.md runs as written; its tables name all there is."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.cli import dpo, replay, sft
from atroposlib.exporting.formats import DPO_FORMATS, SFT_FORMATS
from atroposlib.exporting.selection import STRATEGIES
from tests.exporting.conftest import Service
from tests.exporting.samples import read_records
from tests.exporting.test_replay import SINGLE_TURN

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "exporting.md").read_text(encoding="utf-8")
MAINS = {"atropos-sft-gen": sft.main, "atropos-dpo-gen": dpo.main, "atropos-replay": replay.main}


def commands() -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    # The block with a service and an environment runs with those of the other pages.
    exports = [block for block in blocks if "run-api" not in block]
    return [shlex.split(line) for block in exports for line in block.splitlines()]


def test_commands_run_as_written(
    groups_file: Path,
    tokenizer: Any,
    start_service: Callable[..., Service],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "model").symlink_to(tokenizer.name_or_path)
    (tmp_path / "environments").symlink_to(REPOSITORY / "environments")
    (tmp_path / "environment.py").write_text(SINGLE_TURN)
    service = start_service("--store", "memory")
    service.register()

    for words in commands():
        argv = [word.replace("http://localhost:8000", service.url) for word in words]
        monkeypatch.setattr(sys, "argv", argv)
        MAINS[words[0]]()

    shown = capsys.readouterr().out
    assert "20 of 20 groups scored again, 20 changed" in shown
    assert "20 prompts are in both" in shown
    assert httpx.get(f"{service.url}/status").json()["queue_size"] == 20
    assert len(read_records(tmp_path / "best.jsonl")) == 40
    assert (tmp_path / "dataset" / "README.md").exists()


def test_tables_name_every_format_and_strategy() -> None:
    rows = re.findall(r"^\| `([a-z][a-z-]*)`(?: \(default\))? \|(.*?)\|(.*?)\|", PAGE, re.MULTILINE)
    sft_rows = {name for name, first, _ in rows if first.strip()}
    dpo_rows = {name for name, _, second in rows if second.strip()}

    assert (sft_rows, dpo_rows) == (set(SFT_FORMATS), set(DPO_FORMATS))
    assert all(f"`{name}`" in PAGE for name in STRATEGIES)
