"""Groups to files of ATIF and OpenEnv, and back; files of other programs; malformed files."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from atroposlib.exporting.selection import Span
from atroposlib.exporting.trace_records import ModelCall, rows_of_calls, split_spans
from atroposlib.exporting.traces import TracesReport, export_traces, import_traces
from atroposlib.scored_data import IGNORE_INDEX, check_group
from tests.exporting.traced_groups import chat_group, shipped_group, traced_group

Run = Callable[..., subprocess.CompletedProcess[str]]


def exported(folder: Path, kind: Any, *groups: dict[str, Any]) -> list[dict[str, Any]]:
    named = [(f"line {i}", group) for i, group in enumerate(groups, start=1)]
    export_traces(named, folder, kind)
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


def imported(*paths: Path, **options: Any) -> list[dict[str, Any]]:
    return list(import_traces(paths, report=TracesReport(), **options))


def written(path: Path, *documents: Any) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


@pytest.mark.parametrize("kind", ["atif", "openenv"])
@pytest.mark.parametrize("make", [traced_group, shipped_group, chat_group])
def test_group_that_is_exported_and_imported_is_equal(
    kind: str, make: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    group = make()

    exported(tmp_path / "traces", kind, group)

    assert imported(tmp_path / "traces") == [group]


def test_group_from_text_and_row_without_training_return_equal(tmp_path: Path) -> None:
    text = {**chat_group(), "tokenized_from_text": True, "inference_logprobs": None}
    masked = chat_group()
    masked["masks"][1] = [IGNORE_INDEX] * len(masked["masks"][1])

    documents = exported(tmp_path / "traces", "atif", text, masked)

    assert imported(tmp_path / "traces") == [text, masked]
    assert not any("metrics" in step for step in documents[0]["steps"])


def test_turns_that_do_not_fit_the_masks_return_equal_too(tmp_path: Path) -> None:
    group = traced_group()
    for event in group["traces"][0]["events"]:
        event.update({"num_tokens": 7} if event["kind"] == "turn" else {})
    group["inference_logprobs"][3] = [1.0] * len(group["tokens"][3])

    exported(tmp_path / "traces", "atif", group)

    assert imported(tmp_path / "traces") == [group]


def test_chat_with_tools_whose_turns_do_not_fit_the_masks_returns_equal(tmp_path: Path) -> None:
    group = traced_group()
    group["traces"][0]["events"][6]["num_tokens"] += 1
    tool_call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    group["messages"] = [
        [
            {"role": "user", "content": "Greet by name."},
            {"role": "assistant", "content": "", "tool_calls": [tool_call]},
            {"role": "tool", "tool_call_id": "c1", "content": "a file"},
        ]
    ] * 4

    exported(tmp_path / "traces", "atif", group)

    assert imported(tmp_path / "traces") == [group]


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a": NaN}', '{"a": 1e999}', "{"])
def test_arguments_that_a_model_wrote_wrongly_are_text(arguments: str, tmp_path: Path) -> None:
    group = chat_group()
    group["messages"][1][1]["tool_calls"][0]["function"]["arguments"] = arguments

    documents = exported(tmp_path / "traces", "atif", group)

    [tool_call] = documents[1]["steps"][1]["tool_calls"]
    assert tool_call["arguments"] == {"arguments": arguments}
    assert imported(tmp_path / "traces") == [group]


@pytest.mark.parametrize("kind", ["atif", "openenv"])
def test_lone_surrogate_of_a_model_returns(kind: str, tmp_path: Path) -> None:
    group = chat_group()
    group["messages"][1][1]["content"] = "it is \ud83d"

    exported(tmp_path / "traces", kind, group)

    assert imported(tmp_path / "traces") == [group]


def test_atif_has_steps_with_calls_results_and_ids(tmp_path: Path) -> None:
    group = traced_group()

    document, _ = exported(tmp_path / "traces", "atif", group)

    user, first, second, last = document["steps"]
    assert (user["source"], user["message"]) == ("user", "Greet by name.")
    assert first["message"] == "I look at the files."
    assert first["tool_calls"][0]["arguments"] == {"command": "ls -la"}
    assert first["observation"]["results"][0]["source_call_id"] == "c1"
    assert second["tool_calls"][0]["arguments"] == {"arguments": "write a test"}
    assert [len(step["metrics"]["logprobs"]) for step in (first, second, last)] == [34, 120, 12]
    prompt = last["metrics"]["prompt_token_ids"]
    assert prompt + last["metrics"]["completion_token_ids"] + [9, 9] == group["tokens"][0]
    (branch,) = document["subagent_trajectories"]
    references = second["observation"]["results"][-1]["subagent_trajectory_ref"]
    assert references == [{"trajectory_id": branch["trajectory_id"]}]
    assert [len(step["metrics"]["completion_token_ids"]) for step in branch["steps"]] == [18]
    assert first["timestamp"].startswith("2025-11-24T16:00:02.15")
    assert document["final_metrics"]["total_completion_tokens"] == 34 + 120 + 12 + 18
    assert document["extra"]["reward"] == 1.0


@pytest.mark.parametrize("kind", ["atif", "openenv"])
def test_answers_of_the_prompt_are_context(kind: str, tmp_path: Path) -> None:
    group = chat_group()
    example = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    example[1]["reasoning_content"] = "one and one"
    group["messages"][0][:0] = example

    document, other = exported(tmp_path / "traces", kind, group)

    if kind == "atif":
        assert document["steps"][1]["is_copied_context"] is True
        assert "metrics" not in document["steps"][1]
        assert document["steps"][3]["message"] == "7"
        assert document["steps"][3]["metrics"]["completion_tokens"] == 2  # and the end token
        assert "is_copied_context" not in other["steps"][1]
    else:
        assert document["turns"][0]["response"]["choices"][0]["message"]["content"] == "7"
    assert imported(tmp_path / "traces") == [group]


def test_openenv_has_one_turn_for_each_call_with_its_chat(tmp_path: Path) -> None:
    group = traced_group()

    document, _ = exported(tmp_path / "traces", "openenv", group)

    turns = document["turns"]
    assert [len(turn["completion_token_ids"]) for turn in turns] == [34, 120, 18, 12]
    assert all(sum(turn["loss_mask"]) == len(turn["completion_token_ids"]) for turn in turns)
    assert turns[3]["request"]["messages"][-1]["content"] == "the test is written"
    assert turns[2]["request"]["messages"] == []
    answer = turns[0]["response"]["choices"][0]["message"]
    assert answer["tool_calls"][0]["function"]["arguments"] == '{"command": "ls -la"}'


def test_openenv_leaves_out_what_it_cannot_hold(tmp_path: Path) -> None:
    text = {**chat_group(), "tokenized_from_text": True, "inference_logprobs": None}
    bare = {**chat_group(), "inference_logprobs": None}
    messages: list[str] = []

    groups = [("line 1", text), ("line 2", bare)]
    report = export_traces(groups, tmp_path / "traces", "openenv", notify=messages.append)

    assert report.num_rollouts == 0
    assert sum(report.left_out.values()) == 4
    assert "token ids of an engine" in messages[0]
    assert "line 2, rollout 0, is left out: inference_logprobs: missing" in messages[2]


def without_ours(value: Any) -> Any:
    """Return a document as another program would have written it."""
    if isinstance(value, dict):
        return {k: without_ours(v) for k, v in value.items() if k != "atropos"}
    return [without_ours(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", ["atif", "openenv"])
def test_foreign_trace_with_ids_is_exact(kind: str, tmp_path: Path) -> None:
    group = traced_group()
    documents = exported(tmp_path / "traces", kind, group)
    path = written(tmp_path / "foreign.jsonl", *map(without_ours, documents))

    found = imported(path)

    rows = [(r, len(tokens) - 2) for r, tokens in enumerate(group["tokens"])]  # no tail
    expected = [(group["tokens"][r][:n], group["inference_logprobs"][r][:n]) for r, n in rows]
    read = [
        (tokens, logprobs)
        for one in found
        for tokens, logprobs in zip(one["tokens"], one["inference_logprobs"], strict=True)
    ]
    assert sorted(read) == sorted(expected)
    assert [score for one in found for score in one["scores"]] == group["scores"]
    assert all(one["tokenized_from_text"] is False for one in found)
    assert sum(len(one["tokens"]) for one in found) == 4
    for one in found:
        check_group(one)


def test_foreign_atif_has_its_steps_as_trace_and_chat(tmp_path: Path) -> None:
    documents = exported(tmp_path / "traces", "atif", traced_group())
    path = written(tmp_path / "foreign.jsonl", *map(without_ours, documents))

    (group,) = imported(path)

    trace = group["traces"][0]
    assert group["traces"][1] is None
    assert (trace["agent"], trace["instruction"]) == ("mini-swe-agent", "Greet by name.")
    kinds = [event["kind"] for event in trace["events"]]
    assert kinds.count("turn") == 4
    assert kinds.count("tool_result") == 3
    roles = [message["role"] for message in group["messages"][0]]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]


def atif(*steps: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "schema_version": "ATIF-v1.4",
        "agent": {"name": "terminus", "version": "2"},
        "steps": [{"step_id": i, **step} for i, step in enumerate(steps, start=1)],
        **fields,
    }


def asks(text: str) -> dict[str, Any]:
    return {"source": "user", "message": text}


def says(text: str, **fields: Any) -> dict[str, Any]:
    return {"source": "agent", "message": text, **fields}


def test_trace_without_ids_is_tokenized_and_marked(tmp_path: Path, tokenizer: Any) -> None:
    copied = says("an old answer", is_copied_context=True)
    document = atif(asks("What is 1 + 1?"), copied, asks("And now?"), says("The answer is 2"))
    path = written(tmp_path / "t.json", document)

    (group,) = imported(path, tokenizer=tokenizer, reward=1.0)

    assert group["tokenized_from_text"] is True
    assert "inference_logprobs" not in group
    trained = [token for token in group["masks"][0] if token != IGNORE_INDEX]
    text = tokenizer.decode(trained)
    assert "The answer is 2" in text
    assert "an old answer" not in text
    assert "an old answer" in tokenizer.decode(group["tokens"][0])
    check_group(group)


def test_one_step_without_ids_makes_the_whole_rollout_text(tmp_path: Path, tokenizer: Any) -> None:
    ids = {"prompt_token_ids": [1, 2], "completion_token_ids": [3], "logprobs": [-0.1]}
    steps = (asks("1?"), says("one", metrics=ids), asks("2?"), says("two"))
    path = written(tmp_path / "t.json", atif(*steps))

    with pytest.raises(ConfigError, match=r"t\.json: not every model call has .* --tokenizer"):
        imported(path, reward=1.0)
    (group,) = imported(path, reward=1.0, tokenizer=tokenizer)

    assert group["tokenized_from_text"] is True


def test_rollouts_of_one_task_are_one_group_with_the_rewards_of_their_trials(
    tmp_path: Path,
) -> None:
    ids = {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4]}
    for name, reward in (("a", 1), ("b", 0), ("c", 1)):
        trial = tmp_path / "jobs" / name
        (trial / "agent").mkdir(parents=True)
        task = "other" if name == "c" else "sums"
        result = {"task_name": task, "verifier_result": {"rewards": {"reward": reward}}}
        written(trial / "result.json", result)
        document = atif(asks(f"{name}: solve it"), says("done", metrics=ids))
        written(trial / "agent" / "trajectory.json", document)

    groups = imported(tmp_path / "jobs")

    assert [group["scores"] for group in groups] == [[1.0, 0.0], [1.0]]
    assert groups[0]["reward_parts"] == [{"reward": 1.0}, {"reward": 0.0}]
    assert "inference_logprobs" not in groups[0]


@pytest.mark.parametrize("path", ["trajectory.json", "."])
def test_trial_of_a_relative_path_is_found(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4]}
    agent = tmp_path / "trial" / "agent"
    agent.mkdir(parents=True)
    written(tmp_path / "trial" / "result.json", {"verifier_result": {"rewards": {"reward": 0.5}}})
    written(agent / "trajectory.json", atif(asks("solve it"), says("done", metrics=ids)))
    monkeypatch.chdir(agent)

    [group] = imported(Path(path))

    assert group["scores"] == [0.5]


def test_foreign_arguments_that_only_python_reads_are_text(tmp_path: Path) -> None:
    ids = {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4]}
    call = {"tool_call_id": "a", "function_name": "f", "arguments": {"x": float("nan")}}
    step = says("done", metrics=ids, tool_calls=[call], timestamp="2026-01-02T03:04:05Z")
    document = atif(asks("solve it"), step, extra={"reward": 1})

    [group] = imported(written(tmp_path / "t.json", document))

    assert group["traces"][0]["events"][1]["arguments"] == {"x": "nan"}


def bad_metrics(**metrics: Any) -> dict[str, Any]:
    return atif(asks("1?"), says("one", metrics={"prompt_token_ids": [1], **metrics}))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"a": 1}, "expected an ATIF trajectory"),
        (7, "expected an ATIF trajectory"),
        (atif(asks("1?"), schema_version="ATIF-v2.0"), "schema_version 'ATIF-v2.0'"),
        (atif(), "steps: "),
        (atif(asks("1?")), "no step is the answer of a model"),
        (atif({"source": "robot", "message": ""}), r"step 1: source: Input should be 'system'"),
        (atif({"source": "user"}), r"step 1: message: Field required"),
        (atif(steps=[{"step_id": 4, **asks("1?")}]), "step 1: step_id 4; expected 1"),
        (bad_metrics(completion_token_ids=[2, "x"]), r"step 2: metrics.completion_token_ids\[1\]"),
        (bad_metrics(completion_token_ids=[2], logprobs=[-0.1, -0.2]), "step 2: 2 logprobs for 1"),
        (bad_metrics(completion_token_ids=[2], logprobs=[0.5]), "step 2: logprobs: expected"),
        (bad_metrics(completion_token_ids=[-5]), "step 2: completion_token_ids: expected"),
        (bad_metrics(completion_token_ids=[2]), "has no reward; --reward"),
        ({"turns": []}, "turns: "),
        ({"turns": [{"node_id": "a"}]}, "turn 1: prompt_token_ids: Field required"),
        (
            [{"prompt_token_ids": [1], "completion_token_ids": [2], "per_token_logps": [-1.0],
              "loss_mask": [0]}],
            "turn 1: loss_mask: expected one entry per token",
        ),
        (
            [{"prompt_token_ids": [1], "completion_token_ids": [2], "per_token_logps": [-1.0],
              "loss_mask": [1, 1]}],
            "turn 1: loss_mask: expected 0 for the prompt",
        ),
    ],
)  # fmt: skip
def test_malformed_document_is_refused_by_file_and_step(
    document: Any, message: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "t.json", document)

    with pytest.raises(ConfigError, match=rf"t\.json.*{message}"):
        imported(path)


@pytest.mark.parametrize("reward", ["1" + "0" * 400, "1e999", "NaN", "true"])
def test_reward_that_is_no_number_is_none(tmp_path: Path, reward: str) -> None:
    text = json.dumps({**atif(asks("a"), says("b")), "extra": {"reward": 0.25}})
    (tmp_path / "t.json").write_text(text.replace("0.25", reward))

    with pytest.raises(ConfigError, match="has no reward"):
        imported(tmp_path / "t.json")


def test_time_that_no_calendar_has_is_left_out(tmp_path: Path) -> None:
    group = traced_group()
    group["traces"][0]["started_at"] = 1e300

    documents = exported(tmp_path / "traces", "atif", group)

    assert not any("timestamp" in step for step in documents[0]["steps"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["steps"][1]["extra"]["atropos"].update(row=9), "step 2: extra.atropos.row 9"),
        (lambda d: d["steps"][1]["extra"]["atropos"].update(event=99), "atropos.event 99"),
        (lambda d: d["extra"]["atropos"].update(rows=3), "atropos.rows: expected a list"),
        (
            lambda d: d["extra"]["atropos"]["rows"][0]["fields"].update(columns=3),
            "atropos.rows.fields.columns: expected an object",
        ),
        (
            lambda d: d["extra"]["atropos"].update(score="x"),
            "atropos.score: expected a finite number",
        ),
        (
            lambda d: d["steps"][1]["metrics"]["prompt_token_ids"].append(7),
            "model call 1 of a sequence are not at the start",
        ),
        (lambda d: d["extra"]["atropos"]["rows"][0]["fields"].update(scores=None), "scores"),
    ],
)
def test_changed_export_is_refused(
    change: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    document = exported(tmp_path / "traces", "atif", traced_group())[0]
    change(document)

    with pytest.raises(ConfigError, match=message):
        imported(written(tmp_path / "t.json", document))


def test_call_joins_the_sequence_that_its_prompt_continues() -> None:
    calls = [
        ModelCall([1], [2]),
        ModelCall([5], [6]),
        ModelCall([1, 2, 3], [4]),
        ModelCall([5, 7], [8]),
    ]

    rows = rows_of_calls(calls)

    assert [row.calls for row in rows] == [[calls[0], calls[2]], [calls[1]], [calls[3]]]


@pytest.mark.parametrize(
    ("spans", "counts", "expected"),
    [
        ([(2, 5), (7, 9)], [3, 2], [(2, 5), (7, 9)]),
        ([(2, 5), (7, 9)], [None, None], [(2, 5), (7, 9)]),
        ([(2, 9)], [3, 4], [(2, 5), (5, 9)]),  # two turns without a token between them
        ([(2, 9)], [3, 5], None),
        ([(2, 9)], [7, 1], None),
        ([(2, 9)], [], None),
        ([], [], []),
    ],
)
def test_spans_of_the_mask_are_split_by_the_tokens_of_turns(
    spans: Any, counts: Any, expected: Any
) -> None:
    found = split_spans([Span(start, end, True) for start, end in spans], counts)

    assert (found and [(span.start, span.end) for span in found]) == (expected or found)
    assert (found is None) == (expected is None)


@pytest.mark.slow
def test_command_exports_and_imports_the_shipped_sample(tmp_path: Path, run_command: Run) -> None:
    group = shipped_group()
    source = written(tmp_path / "groups.jsonl", group)

    out = run_command(
        "replay", "export-traces", source, "--as", "openenv", "--output", tmp_path / "t"
    )
    back = run_command("replay", "import-traces", tmp_path / "t", "--output", tmp_path / "b.jsonl")
    again = run_command("replay", "export-traces", source, "--output", tmp_path / "t")

    assert (out.returncode, back.returncode, again.returncode) == (0, 0, 2)
    assert "2 rollouts of 1 groups" in out.stdout
    assert json.loads((tmp_path / "b.jsonl").read_text()) == group
    assert "is not empty" in again.stderr


@pytest.mark.slow
def test_malformed_file_leaves_no_output(tmp_path: Path, run_command: Run) -> None:
    (tmp_path / "bad.json").write_text("{")

    done = run_command("replay", "import-traces", tmp_path, "--output", tmp_path / "b.jsonl")

    assert done.returncode == 2
    assert "bad.json: not JSON at character 2" in done.stderr
    assert not (tmp_path / "b.jsonl").exists()


@pytest.mark.slow
def test_cast_prints_the_terminal_of_one_rollout(tmp_path: Path, run_command: Run) -> None:
    source = written(tmp_path / "groups.jsonl", traced_group(), chat_group())

    done = run_command("replay", "cast", source, "--group", 0, "--row", 1)
    beyond = run_command("replay", "cast", source, "--group", 2)
    chat = run_command("replay", "cast", source, "--group", 1)

    header, *events = map(json.loads, done.stdout.splitlines())
    assert (header["version"], header["title"]) == (2, "greet-by-name, mini-swe-agent")
    outputs = [text for _, code, text in events if code == "o"]
    assert outputs == ["\x1b[1mstarts\x1b[0m\r\n", "\r\nall done\r\n"]
    assert [at for at, _, _ in events] == sorted(at for at, _, _ in events)
    assert (beyond.returncode, chat.returncode) == (2, 2)
    assert "has no group 2" in beyond.stderr
    assert "no trace of an agent" in chat.stderr


def test_export_of_a_group_does_not_change_it(tmp_path: Path) -> None:
    group = traced_group()
    before = deepcopy(group)

    exported(tmp_path / "traces", "atif", group)

    assert group == before


@pytest.mark.long
@pytest.mark.slow
def test_imported_text_becomes_a_demonstration(
    tmp_path: Path, tokenizer: Any, run_command: Run
) -> None:
    path = written(tmp_path / "t.json", atif(asks("What is 1 + 1?"), says("The answer is 2")))
    groups, out = tmp_path / "groups.jsonl", tmp_path / "best.jsonl"
    name = tokenizer.name_or_path

    run_command(
        *("replay", "import-traces", path, "--tokenizer", name, "--reward", 1, "--output", groups)
    )
    done = run_command("sft", out, "--file", groups, "--tokenizer", name, "--all")

    assert done.returncode == 0, done.stderr
    (record,) = map(json.loads, out.read_text().splitlines())
    assert "The answer is 2" in record["completion"]
    assert "What is 1 + 1?" in record["prefix"]
    assert record["score"] == 1.0
