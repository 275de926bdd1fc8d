from __future__ import annotations

import json
from pathlib import Path

import pytest

from atroposlib.errors import ConfigError
from atroposlib.utils.local_records import read_records, read_split, read_splits

COLUMNS = ("question", "answer")


def test_single_file_is_split_without_overlap(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    rows = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(30)]
    path.write_text("\n".join(json.dumps(row) for row in rows))

    train, test = read_splits(path, COLUMNS, shuffle_seed=42)

    assert (len(train), len(test)) == (27, 3)
    assert {r["question"] for r in train + test} == {r["question"] for r in rows}
    assert (train, test) == read_splits(path, COLUMNS, shuffle_seed=42)


def test_parquet_folder_is_read_without_further_columns(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"question": ["q"], "answer": ["#### 1"], "extra": [0]})
    pyarrow.parquet.write_table(table, tmp_path / "train-00000-of-00001.parquet")
    pyarrow.parquet.write_table(table, tmp_path / "test.parquet")

    splits = read_splits(tmp_path, COLUMNS, shuffle_seed=42)

    assert splits == ([{"question": "q", "answer": "#### 1"}],) * 2


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_escaped_lone_surrogates_are_replaced(tmp_path: Path, name: str) -> None:
    row = {"question": "a \ud800 b \ud83d\ude00", "answer": ["\udfff", 1]}
    (tmp_path / name).write_text(json.dumps(row))

    (read,) = read_records(tmp_path / name, COLUMNS)

    assert read == {"question": "a \ufffd b \U0001f600", "answer": ["\ufffd", 1]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", '{"q": "a"}\r\n{"q": "b"}\r\n'),
        ("rows.json", '[{"q": "a"},\r\n{"q": "b"}]'),
        ("rows.yaml", "- q: a\r\n- q: b\r\n"),
        ("rows.csv", "q\r\na\r\nb\r\n"),
    ],
)
def test_file_of_a_windows_program_is_read(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())

    assert read_records(path, ["q"]) == [{"q": "a"}, {"q": "b"}]


def test_line_ends_where_json_lines_end_it(tmp_path: Path) -> None:
    rows = [{"question": "a\u2028b\u0085c", "answer": "1"}, {"question": "d", "answer": "2"}]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8", newline="")

    assert read_records(tmp_path / "rows.jsonl", COLUMNS) == rows


NESTED = f'["\\\\ud800", {"[" * 900}{"]" * 900}]'


@pytest.mark.parametrize("content", ["", "not json", '{"question": "q"}', "[1]", NESTED])
def test_unusable_file_is_refused_with_the_expected_columns(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)

    with pytest.raises(ConfigError, match="columns question, answer"):
        read_splits(path, COLUMNS, shuffle_seed=42)


def test_folder_without_a_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.jsonl"):
        read_splits(tmp_path, COLUMNS, shuffle_seed=42)


def test_missing_sample_of_a_shipped_environment_names_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environments/data/sums_sample.*--env.dataset_path"):
        read_splits(tmp_path / "data" / "sums_sample", ["question"], shuffle_seed=0)


def test_csv_file_is_read_with_quoted_line_breaks(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffquestion,answer,other\r\n"a, b\nc",1,x\r\n"d ""e""",2,y\r\n')

    rows = read_records(path, COLUMNS)

    assert rows == [{"question": "a, b\nc", "answer": "1"}, {"question": 'd "e"', "answer": "2"}]


def test_csv_file_holds_whole_documents(tmp_path: Path) -> None:
    path, document = tmp_path / "rows.csv", "word " * 100_000
    path.write_text(f"question,answer\n{document},1\n")

    assert read_records(path, COLUMNS) == [{"question": document, "answer": "1"}]


def test_csv_file_with_a_short_row_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("question,answer\na,1\nb\n")

    with pytest.raises(ConfigError, match="row 2 has no answer"):
        read_records(path, COLUMNS)


def test_csv_row_with_more_values_than_columns_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("question,answer\na,1\nHello, world,2\n")

    with pytest.raises(ConfigError, match="line 3 has 3 values for 2 columns; expected quotes"):
        read_records(path, COLUMNS)


def test_csv_file_with_commas_at_line_ends_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("question,answer\na,1,\nb,2,,\n")

    assert read_records(path, COLUMNS) == [
        {"question": "a", "answer": "1"},
        {"question": "b", "answer": "2"},
    ]


def test_json_file_of_json_lines_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text('{"question": "a", "answer": 1}\r\n\n{"question": "b\u2028", "answer": 2}\n')

    rows = read_records(path, COLUMNS)

    assert rows == [{"question": "a", "answer": 1}, {"question": "b\u2028", "answer": 2}]


@pytest.mark.parametrize("name", ["rows.yml", "rows.YAML"])
def test_yaml_file_of_another_suffix_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("- {question: a, answer: 1}\n")

    assert read_records(tmp_path / name, COLUMNS) == [{"question": "a", "answer": 1}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.tsv", b"q\ta\n", "a .tsv file is read as JSON Lines; other formats have the suffix"),
        ("rows.jsonl.gz", b"\x1f\x8b\x08", "a .gz file is read as JSON Lines"),
        ("rows", b"q", "a file without a suffix is read as JSON Lines"),
        ("rows.jsonl", b"q", r"line 1: Expecting value at column 1\); expected rows"),
        ("rows.json", b'{"question": 1}\n{"answer"', "line 2: "),
        ("rows.json", b"[" * 100_000, "nested too deeply"),
        ("rows.jsonl", b"{}\n" + b"[" * 100_000, "line 2: .*nested too deeply"),
    ],
)
def test_unreadable_file_is_refused_with_the_reason(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ConfigError, match=message):
        read_records(tmp_path / name, COLUMNS)


def _write(path: Path, *numbers: int) -> None:
    path.write_text("".join(json.dumps({"a": number}) + "\n" for number in numbers))


def test_all_files_of_a_split_are_read(tmp_path: Path) -> None:
    _write(tmp_path / "train-00000-of-00002.jsonl", 1, 2)
    _write(tmp_path / "train-00001-of-00002.jsonl", 3)
    _write(tmp_path / "test-00000-of-00001.jsonl", 4)

    train, test = read_splits(tmp_path, ["a"], shuffle_seed=0)

    assert sorted(row["a"] for row in train) == [1, 2, 3]
    assert test == [{"a": 4}]


def test_files_of_another_split_or_total_are_left_out(tmp_path: Path) -> None:
    _write(tmp_path / "train-00000-of-00002-0a1b.jsonl", 1)
    _write(tmp_path / "train-00001-of-00002-2c3d.jsonl", 2)
    _write(tmp_path / "train-00000-of-00003.jsonl", 8)
    _write(tmp_path / "train-small-00000-of-00001.jsonl", 9)

    assert read_split(tmp_path, ["train"], ["a"]) == [{"a": 1}, {"a": 2}]


def test_missing_file_of_a_split_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path / "train-00000-of-00002.jsonl", 1)

    assert read_split(tmp_path, ["train"], ["a"]) == [{"a": 1}]
    assert "1 of 2 files of the split train" in caplog.text


def test_exact_name_comes_before_longer_ones(tmp_path: Path) -> None:
    _write(tmp_path / "train.jsonl", 1)
    _write(tmp_path / "train-old.jsonl", 2)

    assert read_split(tmp_path, ["train"], ["a"]) == [{"a": 1}]
    assert read_split(tmp_path / "train-old.jsonl", ["train"], ["a"]) == [{"a": 2}]
