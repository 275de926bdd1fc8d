"""Columns and token versions in recorded groups: posted again, exported, scored, shown."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from atroposlib.api.client import TrainerClient
from atroposlib.exporting.groups import RawGroup, full_group, read_jsonl
from atroposlib.exporting.traces import TracesReport, export_traces, import_traces
from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.viewer.rollouts import group_of
from atroposlib.viewer.sources import decode_payload
from atroposlib.wire import decode_group, encode_group
from tests.api.helpers import REGISTRATION
from tests.api.test_carried_columns import check_delivered, traced_columns
from tests.exporting.conftest import Service
from tests.exporting.samples import write_groups

Run = Callable[..., subprocess.CompletedProcess[str]]


def plain_group() -> dict[str, Any]:
    """The group as JSON has it."""
    group: dict[str, Any] = json.loads(encode_group(traced_columns()))
    return {name: value for name, value in group.items() if value is not None}


@pytest.mark.parametrize("kind", ["atif", "openenv"])
@pytest.mark.parametrize("is_binary", [True, False])
def test_columns_survive_an_export_to_traces_and_back(
    kind: str, is_binary: bool, tmp_path: Path
) -> None:
    wire_format = "msgpack" if is_binary else "json"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    sent = {**traced_columns(), "messages": [chat] * 2}
    sent["inference_logprobs"] = [
        [1.0 if mask == IGNORE_INDEX else -0.5 for mask in masks] for masks in sent["masks"]
    ]
    content = encode_group(sent, wire_format)  # type: ignore[arg-type]
    group = full_group(RawGroup("group 0", wire_format, content))  # type: ignore[arg-type]

    exported = export_traces([("group 0", group)], tmp_path / "traces", kind)
    (found,) = import_traces([tmp_path / "traces"], report=TracesReport())

    assert exported.num_rollouts == 2
    for name in ("tokens", "masks", "scores", "columns", "token_versions"):
        assert found[name] == plain_group()[name]


def test_groups_written_as_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = write_groups(tmp_path / "groups.jsonl", [plain_group()])

    (raw,) = read_jsonl(path)
    again = encode_group(full_group(raw), "msgpack")

    found = full_group(RawGroup("x", "msgpack", decode_group(again, "msgpack").payload))
    sent = traced_columns()["columns"]
    assert found["token_versions"] == plain_group()["token_versions"]
    for name, rows in sent.items():
        for row, read in zip(rows, found["columns"][name], strict=True):
            assert np.array_equal(row, read)


@pytest.mark.parametrize("wire_format", ["json", "msgpack"])
def test_viewer_reads_versions_and_leaves_columns_out(wire_format: Any) -> None:
    fields = decode_payload(encode_group(traced_columns(), wire_format))

    shown = group_of(fields)

    assert "columns" not in fields
    assert [rollout.policy_versions for rollout in shown.rollouts] == [(7, 8), (8, 8)]


@pytest.mark.slow
def test_replay_posts_the_same_bytes_again(
    start_service: Callable[..., Service], run_command: Run, tmp_path: Path
) -> None:
    first = start_service("--store", "sqlite", "--run", "first", "--data-dir", str(tmp_path))
    registration = {**REGISTRATION, "batch_size": 2}
    payload = encode_group(traced_columns(), "msgpack")
    with TrainerClient(first.url) as trainer:
        trainer.register(**registration)
        trainer.batch()
    headers = {"Content-Type": "application/msgpack"}
    posted = httpx.post(f"{first.url}/scored_data", content=payload, headers=headers)
    assert posted.status_code == 200, posted.text
    second = start_service("--store", "memory")

    with TrainerClient(second.url) as trainer:
        trainer.register(**registration)
        trainer.batch()
        done = run_command(
            "replay", "post", "first", "--data-dir", tmp_path, "--api-url", second.url
        )
        batch = trainer.batch(lease_s=60)

    assert done.returncode == 0, done.stderr
    assert batch is not None
    check_delivered(batch.groups[0])
    stored = httpx.get(
        f"{second.url}/groups/0/payload", headers={"Accept": headers["Content-Type"]}
    )
    assert stored.content == payload


@pytest.mark.parametrize("columns", [5, [1], {"a": 5}, {"a": [[1]]}, {"a": [[1, 2], None]}])
def test_group_with_malformed_columns_is_left_out_of_an_export(
    columns: Any, tmp_path: Path
) -> None:
    notes: list[str] = []

    report = export_traces(
        [("group 0", {**plain_group(), "columns": columns})],
        tmp_path / "traces",
        "atif",
        notify=notes.append,
    )

    assert report.left_out["not a group"] == 1
    assert "columns" in notes[0]
