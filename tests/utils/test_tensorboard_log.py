from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atroposlib.errors import MissingExtraError
from atroposlib.utils.run_log import MetricsLog

pytest.importorskip("tensorboard")


def read(directory: Path) -> dict[tuple[str, int], Any]:
    """Read event files as TensorBoard does: (tag, step) to number or text."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    found: dict[tuple[str, int], Any] = {}
    for path in directory.glob("events.out.tfevents.*"):
        for raw in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(raw)
            for value in event.summary.value:
                is_text = value.metadata.plugin_data.plugin_name == "text"
                shown = value.tensor.string_val[0].decode() if is_text else value.simple_value
                found[value.tag, event.step] = shown
    return found


def test_tensorboard_gets_the_same_metrics_beside_the_json_file(tmp_path: Path) -> None:
    log = MetricsLog(
        use_wandb=False, metrics_path=tmp_path / "run" / "m.jsonl", use_tensorboard=True
    )

    log.log({"a": np.float32(0.5), "n": np.int64(2), "done": True, "note": "x < y"}, step=3)
    log.log({"a": float("inf")}, step=4)
    log.finish()
    log.finish()

    assert read(tmp_path / "run" / "tensorboard") == {
        ("a", 3): 0.5,
        ("n", 3): 2.0,
        ("done", 3): 1.0,
        ("note", 3): "x < y",
        ("a", 4): float("inf"),
    }


def test_tensorboard_shows_tables_with_what_a_model_wrote_escaped(tmp_path: Path) -> None:
    log = MetricsLog(use_wandb=False, metrics_path=tmp_path / "m.jsonl", use_tensorboard=True)

    rows = [["<script>x</script>\n\n# title", 1.0], *([["y", 0.0]] * 20)]
    log.log({"train/rollouts": log.table(["text", "score"], rows), "list": [1, 2]}, step=1)
    log.finish()

    found = read(tmp_path / "tensorboard")
    assert list(found) == [("train/rollouts", 1)]
    table = found["train/rollouts", 1]
    assert "<th>text</th><th>score</th>" in table
    assert "&lt;script&gt;x&lt;/script&gt;&#10;&#10;# title" in table
    assert "5 rows more" in table


def test_tensorboard_shows_wandb_tables_without_a_run(tmp_path: Path) -> None:
    import wandb

    log = MetricsLog(use_wandb=False, metrics_path=tmp_path / "m.jsonl", use_tensorboard=True)
    log.log({"t": wandb.Table(columns=["answer"], data=[["42"]])}, step=1)
    log.finish()

    assert "<td><pre>42</pre></td>" in read(tmp_path / "tensorboard")["t", 1]


def test_tensorboard_missing_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)

    with pytest.raises(MissingExtraError, match=r"'\.\[tensorboard\]'"):
        MetricsLog(use_wandb=False, metrics_path=tmp_path / "m.jsonl", use_tensorboard=True)


def test_tensorboard_that_cannot_be_written_warns_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("a file in the way")
    log = MetricsLog(use_wandb=False, metrics_path=tmp_path / "m.jsonl", use_tensorboard=True)

    with caplog.at_level(logging.WARNING):
        log.log({"a": 1}, step=1)
        log.log({"a": 2}, step=2)
    log.finish()

    assert caplog.text.count("TensorBoard files cannot be written") == 1
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 2


def test_tensorboard_is_not_imported_unless_asked_for_and_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from atroposlib.utils.run_log import MetricsLog\n"
        "assert 'tensorboard' not in sys.modules\n"
        "log = MetricsLog(use_wandb=False, metrics_path=Path('m.jsonl'), use_tensorboard=True)\n"
        "log.log({'a': 1}, step=0)\n"
        "log.finish()\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)\n"
    )

    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
