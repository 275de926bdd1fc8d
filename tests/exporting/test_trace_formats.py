"""Exported traces, read by the models of Harbor and of OpenEnv; and what these models write.

Each part runs in an environment with its package (tests/adapters/own_environments.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.exporting.traces import TracesReport, export_traces, import_traces
from tests.exporting.traced_groups import chat_group, shipped_group, traced_group

GROUPS = [traced_group, shipped_group, chat_group]


def exported(folder: Path, kind: Any, group: dict[str, Any]) -> list[Path]:
    report = export_traces([("line 1", group)], folder, kind)
    assert not report.left_out
    return sorted(folder.iterdir())


@pytest.mark.parametrize("make", GROUPS)
def test_harbor_reads_and_writes_exported_trajectories(make: Any, tmp_path: Path) -> None:
    models = pytest.importorskip("harbor.models.trajectories", reason="harbor is not installed")
    group = make()

    for path in exported(tmp_path / "traces", "atif", group):
        trajectory = models.Trajectory.model_validate_json(path.read_text())
        path.write_text(json.dumps(trajectory.to_json_dict()))

    assert list(import_traces([tmp_path / "traces"], report=TracesReport())) == [group]


def test_trajectory_made_with_harbor_is_imported_exactly(tmp_path: Path) -> None:
    models = pytest.importorskip("harbor.models.trajectories", reason="harbor is not installed")
    metrics = models.Metrics(
        prompt_token_ids=[1, 2], completion_token_ids=[3, 4], logprobs=[-0.5, -0.25]
    )
    tool_call = models.ToolCall(tool_call_id="a", function_name="bash", arguments={"cmd": "ls"})
    seen = models.Observation(
        results=[models.ObservationResult(source_call_id="a", content="file.txt")]
    )
    trajectory = models.Trajectory(
        agent=models.Agent(name="terminus", version="2"),
        steps=[
            models.Step(step_id=1, source="user", message="list the files"),
            models.Step(
                step_id=2,
                source="agent",
                message="",
                timestamp="2026-01-02T03:04:05Z",
                tool_calls=[tool_call],
                observation=seen,
                metrics=metrics,
            ),
        ],
        final_metrics=models.FinalMetrics(extra={"reward": 1.0}),
    )
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trajectory.to_json_dict()))

    (group,) = import_traces([path], report=TracesReport())

    assert group["tokens"] == [[1, 2, 3, 4]]
    assert group["inference_logprobs"] == [[1.0, 1.0, -0.5, -0.25]]
    assert group["tokenized_from_text"] is False
    assert group["messages"][0][-1] == {
        "role": "tool",
        "content": "file.txt",
        "tool_call_id": "a",
    }
    kinds = [event["kind"] for event in group["traces"][0]["events"]]
    assert kinds == ["turn", "tool_call", "tool_result"]


@pytest.mark.parametrize("make", GROUPS)
def test_openenv_reads_and_writes_exported_traces(make: Any, tmp_path: Path) -> None:
    training = pytest.importorskip(
        "openenv.core.harness.training", reason="openenv is not installed"
    )
    group = make()

    for path in exported(tmp_path / "traces", "openenv", group):
        trace = training.TrainingTrace.model_validate(json.loads(path.read_text()))
        path.write_text(trace.model_dump_json())

    assert list(import_traces([tmp_path / "traces"], report=TracesReport())) == [group]


def test_entries_made_with_openenv_are_imported_exactly(tmp_path: Path) -> None:
    training = pytest.importorskip(
        "openenv.core.harness.training", reason="openenv is not installed"
    )
    question = {"role": "user", "content": "list the files"}
    entries = [
        training.TrainingTurn(
            node_id="n1",
            prompt_token_ids=[1, 2],
            completion_token_ids=[3, 4],
            per_token_logps=[-0.5, -0.25],
            loss_mask=[0, 0, 1, 0],
            request={"messages": [question]},
            response={"choices": [{"message": {"role": "assistant", "content": "ls"}}]},
        )
    ]
    trace = training.TrainingTrace(turns=entries)
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace.to_trace_entries()))

    (group,) = import_traces([path], reward=0.5, report=TracesReport())

    assert group["tokens"] == [[1, 2, 3, 4]]
    assert group["masks"] == [[-100, -100, 3, -100]]
    assert group["inference_logprobs"] == [[1.0, 1.0, -0.5, 1.0]]
    assert group["scores"] == [0.5]
    assert group["messages"] == [[question, {"role": "assistant", "content": "ls"}]]
