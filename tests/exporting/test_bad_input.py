"""What models and disks put into groups, and tokenizers that do not fit them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import ConfigError, GroupError
from atroposlib.exporting.groups import RawGroup, export_group, full_group
from atroposlib.exporting.report import report_text
from atroposlib.exporting.run import run_export
from atroposlib.exporting.selection import SelectionRule
from atroposlib.wire import encode_group
from tests.exporting.samples import make_group, read_records, sft_request, write_groups

ANSI = "\x1b[2J\x1b]0;title\x07red\x1b[31m"


@pytest.fixture
def notices() -> list[str]:
    return []


def test_broken_lines_are_named_by_number_and_the_rest_is_used(
    groups: list[Any], tmp_path: Path, notices: list[str]
) -> None:
    good = json.dumps(groups[0])
    ragged = json.dumps({**groups[0], "masks": [[1]] * 4})
    lines = [good, good[:50], "", '{"tokens": [[1]]}', json.dumps([1]), ragged, "\x00\xff", good]
    source = tmp_path / "groups.jsonl"
    source.write_bytes("\n".join(lines).encode("latin-1"))

    request = sft_request(tmp_path / "out", source, format="tokens", keeps_duplicates=True)
    report = run_export(request, notify=notices.append)

    assert (report.num_groups, report.num_records, report.num_broken) == (2, 4, 5)
    assert [line.split(" is left out")[0] for line in notices] == [
        f"line {number}" for number in (2, 4, 5, 6, 7)
    ]
    assert "line 6: masks[0]: 1 entries, tokens[0] has" in report_text(report, unit="examples")


def test_images_that_no_format_contains_are_counted(groups: list[Any], tmp_path: Path) -> None:
    images: list[Any] = [[["data:,a"], []], ["data:,a", None], [[], []], [None, None], None]
    filled = [{**groups[0], "images": each} for each in images]
    source = write_groups(tmp_path / "groups.jsonl", filled)

    report = run_export(sft_request(tmp_path / "out", source, format="tokens"), notify=print)

    assert "with images: 2 of the groups; examples are text only" in report_text(
        report, unit="examples"
    )


@pytest.mark.parametrize("token", [-5, 2**40, 2**70])
def test_id_that_no_tokenizer_accepts_leaves_out_its_group(
    token: int, groups: list[Any], tokenizer: Any, tmp_path: Path, notices: list[str]
) -> None:
    odd = {**groups[1], "tokens": [[token, *row[1:]] for row in groups[1]["tokens"]]}
    source = write_groups(tmp_path / "groups.jsonl", [groups[0], odd, groups[2]])

    request = sft_request(tmp_path / "out", source, tokenizer=tokenizer.name_or_path)
    report = run_export(request, notify=notices.append)

    assert (report.num_groups, report.num_broken, report.num_records) == (2, 1, 4)
    assert notices[0].startswith("line 2 is left out: Expected int ")


def test_messages_about_broken_lines_hold_nothing_of_the_text(
    tmp_path: Path, notices: list[str]
) -> None:
    source = tmp_path / "groups.jsonl"
    source.write_text(f'{{"tokens": [["{ANSI}"]], "scores": [1]}}\n{{"tokens" {ANSI}\n')

    run_export(sft_request(tmp_path / "out", source, format="tokens"), notify=notices.append)

    assert len(notices) == 2
    assert "\x1b" not in "".join(notices)


def test_odd_model_output_is_written_whole_and_valid(tokenizer: Any, tmp_path: Path) -> None:
    answers = ["half \ud800 character", ANSI, "long " * 200_000, "\u202eright to left"]
    messages = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
        for text in answers
    ]
    group = make_group(tokenizer, "q", ["a", "b", "c", "d"], [4.0, 3.0, 2.0, 1.0])
    source = write_groups(tmp_path / "groups.jsonl", [{**group, "messages": messages}])
    path = tmp_path / "out.jsonl"

    request = sft_request(path, source, format="trl-messages", rule=SelectionRule(4))
    report = run_export(request, notify=print)

    written = [record["messages"][1]["content"] for record in read_records(path)]
    assert written == ["half \ufffd character", *answers[1:]]
    assert report.num_repaired == 1
    assert b"\x1b" not in path.read_bytes()


@pytest.mark.parametrize("name", ["json", "msgpack"])
def test_groups_of_both_formats_are_read_alike(name: Any, groups: list[Any]) -> None:
    raw = RawGroup("group 1", name, encode_group(groups[0], name))

    read = export_group(raw)

    assert (read.tokens, read.scores, read.masks) == (
        groups[0]["tokens"],
        groups[0]["scores"],
        groups[0]["masks"],
    )
    assert full_group(raw)["inference_logprobs"] == groups[0]["inference_logprobs"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "not JSON"),
        ("3", "Expected object"),
        ('{"scores": [1]}', "missing required field tokens"),
        ('{"tokens": [], "scores": []}', "tokens: empty"),
        ('{"tokens": [[1]], "scores": [1, 2]}', "scores: 2 entries, tokens has 1"),
        ('{"tokens": [[1]], "scores": []}', "scores: 0 entries"),
        ('{"tokens": [[1]], "scores": [NaN]}', "not a finite number"),
        ('{"tokens": [[1]], "scores": [1e308]}', "not a finite number within ±"),
        ('{"tokens": [["a"]], "scores": [1]}', "Expected int"),
        (r'{"tokens": "\ud800", "scores": [1]}', "surrogates not allowed"),
        ('{"tokens": [[1]], "scores": [1], "messages": [1, 2]}', "messages: 2 entries"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_group_is_refused_with_the_place(content: str, message: str) -> None:
    with pytest.raises(GroupError, match=message.replace("[", r"\[")):
        export_group(RawGroup("line 1", "json", content.encode()))


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer with as many tokens as the first, of other text."""
    from example_trainer.demo.settings import train_tokenizer

    chats = [
        [
            {"role": "user", "content": f"Zwölf Boxkämpfer jagen Viktor {i * 37} Mal"},
            {"role": "assistant", "content": f"quer über den großen Sylter Deich {i}"},
        ]
        for i in range(300)
    ]
    folder = tmp_path_factory.mktemp("other")
    train_tokenizer(chats, max_length=256).save_pretrained(folder)
    return str(folder)


def test_tokenizer_that_lacks_tokens_is_refused_before_anything_is_written(
    groups: list[Any], tokenizer: Any, tmp_path: Path
) -> None:
    tokens = [[*groups[0]["tokens"][0], 100_000]]
    source = write_groups(tmp_path / "groups.jsonl", [{"tokens": tokens, "scores": [1.0]}])
    request = sft_request(tmp_path / "out", source, tokenizer=tokenizer.name_or_path)

    with pytest.raises(ConfigError, match="have token 100000, the tokenizer has"):
        run_export(request, notify=print)

    assert not (tmp_path / "out").exists()


def test_tokenizer_that_contradicts_the_messages_is_refused_unless_asked_for(
    groups_file: Path, other_tokenizer: str, tmp_path: Path
) -> None:
    request = sft_request(tmp_path / "out", groups_file, tokenizer=other_tokenizer)

    with pytest.raises(ConfigError, match=r"in none of 80 trajectories .* --any-tokenizer"):
        run_export(request, notify=print)

    anyway = sft_request(
        tmp_path / "out", groups_file, tokenizer=other_tokenizer, checks_tokenizer=False
    )
    assert run_export(anyway, notify=print).num_records == 40


def test_tokenizer_that_writes_prompts_otherwise_is_warned_about(
    groups: list[Any], other_tokenizer: str, tokenizer: Any, tmp_path: Path, notices: list[str]
) -> None:
    bare = [{k: v for k, v in group.items() if k != "messages"} for group in groups]
    source = write_groups(tmp_path / "groups.jsonl", bare)

    run_export(
        sft_request(tmp_path / "a", source, tokenizer=other_tokenizer), notify=notices.append
    )
    assert "may not be the tokenizer of these groups" in notices[0]

    notices.clear()
    run_export(
        sft_request(tmp_path / "b", source, tokenizer=tokenizer.name_or_path), notify=notices.append
    )
    assert notices == []


def test_missing_tokenizer_and_missing_file_are_named(groups_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-folder cannot be loaded"):
        run_export(
            sft_request(tmp_path / "a", groups_file, tokenizer="./no-such-folder"), notify=print
        )
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        run_export(sft_request(tmp_path / "b", tmp_path / "none.jsonl"), notify=print)
    assert {path.name for path in tmp_path.iterdir()} == {"groups.jsonl"}
