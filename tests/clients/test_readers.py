"""What a run logged, read back by TensorBoard and from the records of an offline wandb run."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.utils.run_log import MetricsLog

pytestmark = pytest.mark.slow

BLOCK_BYTES = 32 * 1024
HEADER_BYTES = 7
"""Of the file, and of each fragment: checksum (4), length (2), kind (1)."""
LAST_KINDS = (1, 4)
"""A whole record, and the last fragment of one."""


def records_in(file: Path) -> Iterator[Any]:
    """Yield the records of a `.wandb` file, which is a LevelDB log of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    position, parts = HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(data):
        if BLOCK_BYTES - position % BLOCK_BYTES < HEADER_BYTES:
            position += BLOCK_BYTES - position % BLOCK_BYTES
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + HEADER_BYTES])
        parts += data[position + HEADER_BYTES : position + HEADER_BYTES + length]
        position += HEADER_BYTES + length
        if kind in LAST_KINDS:
            yield Record.FromString(parts)
            parts = b""


def history_in(file: Path) -> list[dict[str, Any]]:
    """Return the logged rows, without wandb's own fields."""
    rows = [
        {
            ".".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records_in(file)
        if record.WhichOneof("record_type") == "history"
    ]
    return [
        {name: value for name, value in row.items() if not name.startswith("_") or name == "_step"}
        for row in rows
    ]


def test_readers_find_every_number_at_its_step(offline_wandb: Path, tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logged = [{"train/reward": 0.25 * step, "train/num_rows": step} for step in range(4)]
    log = MetricsLog(use_wandb=True, metrics_path=tmp_path / "metrics.jsonl", use_tensorboard=True)

    log.start(project="atropos", group="g", name="n", config={"group_size": 4})
    for step, metrics in enumerate(logged):
        log.log(metrics, step=step)
    log.finish()

    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name in logged[0]:
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(step, metrics[name]) for step, metrics in enumerate(logged)]
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    expected = [{**metrics, "_step": step} for step, metrics in enumerate(logged)]
    # wandb's own service process writes the file, a moment after `finish` has returned.
    deadline = time.monotonic() + 60
    while len(history_in(file)) < len(expected) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert history_in(file) == expected
