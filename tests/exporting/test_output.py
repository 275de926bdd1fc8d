"""Outputs: never overwritten, resumable, valid at all times."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atroposlib.cli import sft
from atroposlib.errors import ConfigError
from atroposlib.exporting.output import Output, encode_line, kind_of, open_output
from atroposlib.exporting.report import DUPLICATE
from atroposlib.exporting.run import ExportStoppedError, run_export
from tests.exporting.samples import dpo_request, read_records, sft_request, write_groups

FIELDS = ("prompt", "completion")
KINDS = (("out.jsonl", "jsonl"), ("out.parquet", "parquet"), ("out", "dataset"))


def record(text: str) -> dict[str, str]:
    return {"prompt": "p", "completion": text}


def write(output: Output, *texts: str) -> None:
    output.write([encode_line(record(text), score=None) for text in texts], FIELDS)


def load(path: Path, kind: str) -> list[dict[str, Any]]:
    import datasets

    if kind == "dataset":
        rows = datasets.load_dataset(str(path), split="train")
    else:
        name = "json" if kind == "jsonl" else "parquet"
        rows = datasets.load_dataset(name, data_files=str(path), split="train")
    return [dict(row) for row in rows]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_output_is_written_refused_and_added_to(name: str, kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "deep" / name
    output = open_output(path, kind, "new")
    write(output, "a", "b")
    output.close()
    output.close()

    with pytest.raises(ConfigError, match="left as it is; --resume"):
        open_output(path, kind, "new")
    again = open_output(path, kind, "append")
    assert encode_line(record("a"), score=None).key in again
    write(again, "c")
    again.close()

    assert load(path, kind) == [record(text) for text in "abc"]
    assert {entry.name for entry in path.parent.iterdir()} == {name}


def test_folders_of_one_name_are_loaded_separately(tmp_path: Path) -> None:
    for texts in ("ab", "xyz"):
        folder = tmp_path / texts / "same-name"
        output = open_output(folder, "dataset", "new")
        write(output, *texts)
        output.close()

        assert load(folder, "dataset") == [record(text) for text in texts]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_killed_export_goes_on_without_its_half_line(name: str, kind: Any, tmp_path: Path) -> None:
    output = open_output(tmp_path / name, kind, "new")
    write(output, "a", "b")
    with output._file as file:  # as a process that is killed while it writes
        file.write(b'{"prompt":"p","comp')

    again = open_output(tmp_path / name, kind, "resume")

    assert (again.existing.num_records, again.existing.num_cut_bytes) == (2, 19)
    write(again, "c")
    again.close()
    assert [row["completion"] for row in load(tmp_path / name, kind)] == ["a", "b", "c"]


def test_unfinished_parquet_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    write(open_output(path, "parquet", "new"), "a")

    with pytest.raises(ConfigError, match=r"out\.parquet\.part\.jsonl exists"):
        open_output(path, "parquet", "new")


def test_file_that_is_no_export_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\nmore of them")

    with pytest.raises(ConfigError, match="has no records of an export"):
        open_output(path, "jsonl", "append")

    assert path.read_text() == "my notes\nmore of them"


@pytest.mark.parametrize("place", ["file/out.jsonl", "folder"])
def test_place_that_cannot_be_written_is_named(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()

    with pytest.raises(ConfigError, match=f"{place} cannot be written: "):
        open_output(tmp_path / place, "jsonl", "append")


@pytest.mark.parametrize("mode", ["new", "append"])
@pytest.mark.parametrize("name", [".", "pipe"])
def test_place_that_is_no_file_is_refused(
    name: str, mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")

    with pytest.raises(ConfigError, match=f"'{name}': expected the name of a file or folder"):
        open_output(Path(name), kind_of(Path(name), "auto"), mode)


def test_broken_lines_in_the_middle_stay_and_a_missing_line_break_is_added(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    lines = [json.dumps(record("a")), "oops", json.dumps(record("b"))]
    path.write_text("\n".join(lines))

    output = open_output(path, "jsonl", "append")
    write(output, "c")
    output.close()

    assert output.existing.broken_lines == [2]
    assert path.read_text().splitlines()[:3] == lines
    assert json.loads(path.read_text().splitlines()[3]) == record("c")


def test_other_format_is_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"prefix": "p", "completion": "a", "score": 1}\n')

    output = open_output(path, "jsonl", "append")

    with pytest.raises(ConfigError, match="has records with completion, prefix, but this --format"):
        write(output, "b")


def test_export_without_a_record_leaves_nothing(tmp_path: Path) -> None:
    open_output(tmp_path / "out.jsonl", "jsonl", "new").close()
    open_output(tmp_path / "out.parquet", "parquet", "new").close()

    assert list(tmp_path.iterdir()) == []


def test_values_of_several_kinds_do_not_fit_into_columns_and_stay_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    output = open_output(path, "parquet", "new")
    lines = [encode_line({"messages": [{"content": c}]}, score=None) for c in ("a", [1])]
    output.write(lines, ["messages"])

    with pytest.raises(ConfigError, match="--output jsonl accepts them"):
        output.close()

    assert len(read_records(tmp_path / "out.parquet.part.jsonl")) == 2


def test_resumed_export_has_every_record_once_and_stops_at_the_number(
    groups_file: Path, tmp_path: Path, tokenizer: Any
) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    name = {"tokenizer": tokenizer.name_or_path}
    run_export(dpo_request(whole, groups_file, **name), notify=print)
    for number, mode in ((7, "new"), (20, "resume"), (20, "resume"), (1000, "resume")):
        request = dpo_request(parts, groups_file, max_records=number, mode=mode, **name)
        report = run_export(request, notify=print)
        assert len(read_records(parts)) == min(number, 40), report

    assert parts.read_bytes() == whole.read_bytes()


def test_append_writes_that_many_more(groups_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for mode in ("new", "append"):
        request = sft_request(path, groups_file, format="tokens", max_records=3, mode=mode)
        run_export(request, notify=print)

    records = read_records(path)
    assert len(records) == 6
    assert len({tuple(record["input_ids"]) for record in records}) == 6


def test_duplicates_are_counted_or_kept(groups: list[Any], tmp_path: Path) -> None:
    source = write_groups(tmp_path / "groups.jsonl", [groups[0], groups[0]])

    once = run_export(sft_request(tmp_path / "a", source, format="tokens"), notify=print)
    twice = run_export(
        sft_request(tmp_path / "b", source, format="tokens", keeps_duplicates=True), notify=print
    )

    assert (once.num_records, once.dropped[DUPLICATE], twice.num_records) == (2, 2, 4)


def test_resumed_export_that_keeps_duplicates_goes_on_where_it_ended(
    groups: list[Any], tmp_path: Path
) -> None:
    source = write_groups(tmp_path / "groups.jsonl", [groups[i] for i in (0, 0, 1, 0, 1)])
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    settings = {"format": "tokens", "keeps_duplicates": True}
    run_export(sft_request(whole, source, **settings), notify=print)

    for number, mode in ((3, "new"), (4, "resume"), (100, "resume"), (100, "resume")):
        request = sft_request(parts, source, max_records=number, mode=mode, **settings)
        run_export(request, notify=print)

    assert len(read_records(whole)) == 10
    assert parts.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_record_with_nulls_is_not_added_twice(
    name: str, groups: list[dict[str, Any]], tmp_path: Path
) -> None:
    chats = [[{**message, "reward": None} for message in chat] for chat in groups[0]["messages"]]
    source = write_groups(tmp_path / "groups.jsonl", [{**groups[0], "messages": chats}])
    path = tmp_path / name

    reports = [
        run_export(sft_request(path, source, format="atropos-messages", mode=mode), notify=print)
        for mode in ("new", "append")
    ]

    assert [report.num_records for report in reports] == [2, 0]


def test_output_with_a_lone_surrogate_can_be_added_to(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(json.dumps(record("half \ud83d")) + "\n")

    output = open_output(path, "jsonl", "append")
    write(output, "half \ud83d", "b")
    output.close()

    assert encode_line(record("half \ud83d"), score=None).key in output
    assert read_records(path)[0] == record("half \ud83d")


@pytest.mark.parametrize("value", [{}, 2**70])
def test_value_that_no_column_stores_is_named_and_the_records_stay(
    value: Any, tmp_path: Path
) -> None:
    output = open_output(tmp_path / "out.parquet", "parquet", "new")
    output.write([encode_line({"meta": value}, score=None)], ["meta"])

    with pytest.raises(ConfigError, match="--output jsonl accepts them"):
        output.close()

    assert {entry.name for entry in tmp_path.iterdir()} == {"out.parquet.part.jsonl"}


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_disk_that_is_full_at_the_end_keeps_the_records(
    kind: Any, groups_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyarrow import parquet

    def no_space(table: Any, where: Path, **_: Any) -> None:
        where.write_bytes(b"PAR1")
        raise OSError(28, "No space left on device")

    path = tmp_path / "made" / "out.parquet"
    with monkeypatch.context() as patched:
        patched.setattr(parquet, "write_table", no_space)
        request = sft_request(path, groups_file, format="tokens", kind=kind)
        with pytest.raises(ExportStoppedError, match=r"No space.*part\.jsonl; .*--resume"):
            run_export(request, notify=print)
    assert [entry.name for entry in path.parent.iterdir()] == ["out.parquet.part.jsonl"]

    again = sft_request(path, groups_file, format="tokens", kind=kind, mode="resume")
    run_export(again, notify=print)
    assert len(load(path, kind)) == 40


def test_full_disk_ends_the_export_and_says_how_to_go_on(
    groups_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = Output.write

    def write_once(self: Output, lines: Any, fields: Any) -> None:
        if self.num_written:
            raise OSError(28, "No space left on device")
        real_write(self, lines, fields)

    monkeypatch.setattr(Output, "write", write_once)
    monkeypatch.setattr("atroposlib.exporting.run.CHUNK_GROUPS", 4)
    path = tmp_path / "out.jsonl"

    with pytest.raises(ExportStoppedError, match=r"No space left.* 8 records are in .*--resume"):
        run_export(sft_request(path, groups_file, format="tokens"), notify=print)

    monkeypatch.undo()
    run_export(sft_request(path, groups_file, format="tokens", mode="resume"), notify=print)
    assert len(read_records(path)) == 40


def export(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Run `atropos-sft-gen` in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["atropos-sft-gen", *map(str, words)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    try:
        sft.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_reader_that_has_left_is_not_a_failure(groups_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "atroposlib.cli.sft", tmp_path / "out", "--format", "tokens"]
    reader, writer = os.pipe()
    os.close(reader)

    with os.fdopen(writer, "wb") as closed:
        ended = subprocess.run(
            [*command, "--file", groups_file], stdout=closed, stderr=subprocess.PIPE, timeout=120
        )

    assert ended.returncode == 0, ended.stderr
    assert b"BrokenPipe" not in ended.stderr
    assert len(read_records(tmp_path / "out")) == 40


def test_export_that_leaves_no_records_exits_with_1_and_the_reason(
    groups: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    low = write_groups(tmp_path / "low.jsonl", [{**groups[0], "scores": [-1.0] * 4}])
    none = write_groups(tmp_path / "none.jsonl", [])
    good = write_groups(tmp_path / "good.jsonl", groups[:1])
    flags = (tmp_path / "out", "--format", "tokens", "--file")

    assert export(monkeypatch, *flags, low) == 1
    assert "nothing was written: every trajectory was dropped" in capsys.readouterr().err
    assert export(monkeypatch, *flags, none) == 1
    assert "nothing was written: there are no groups" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert export(monkeypatch, *flags, good) == 0
    # There is nothing to add, and the output is as it should be.
    assert export(monkeypatch, *flags, good, "--append-to-previous") == 0
    assert export(monkeypatch, *flags, good, "--resume", "--num-seqs-to-save", 1) == 0


@pytest.mark.parametrize(("name", "kind"), KINDS)
@pytest.mark.parametrize("mode", ["resume", "append"])
def test_second_export_to_an_output_is_refused_until_the_first_ends(
    mode: Any, name: str, kind: Any, tmp_path: Path
) -> None:
    path = tmp_path / name
    first = open_output(path, kind, "new")
    write(first, "a")
    first._file.write(b'{"prompt":"p","comp')  # the rest follows with the next write
    first._file.flush()

    with pytest.raises(ConfigError, match=f"another export writes to .*{name}"):
        open_output(path, kind, mode)
    first._file.write(encode_line(record("b"), score=None).content[19:] + b"\n")
    first.close()
    again = open_output(path, kind, mode)
    with pytest.raises(ConfigError, match="another export writes"):
        open_output(path, kind, mode)
    write(again, "c")
    again.close()

    assert [row["completion"] for row in load(path, kind)] == ["a", "b", "c"]
