"""The small model of the tutorials: what it learns from, and what is refused."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest

from atroposlib.errors import ConfigError
from example_trainer.demo.small_model import main, random_chats, read_chats, write_small_model

QUESTION = {"role": "user", "content": "Is 3 even or odd?"}
CHAT = [QUESTION, {"role": "assistant", "content": "odd"}]


def test_model_of_random_texts_can_be_loaded(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_small_model(tmp_path / "model", random_chats(0), steps=1, max_length=64, seed=0)

    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "model"))
    assert tokenizer.decode(tokenizer.encode("Grüße, 3")) == "Grüße, 3"
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings == 64


def test_random_chats_depend_on_the_seed_and_are_short() -> None:
    chats = random_chats(0)

    assert chats == random_chats(0) != random_chats(1)
    assert all(4 <= len(chat[-1]["content"]) <= 12 for chat in chats)


def test_model_learns_its_examples(tmp_path: Path) -> None:
    losses = [
        write_small_model(tmp_path / str(steps), [CHAT], steps=steps, max_length=64, seed=0)
        for steps in (1, 12)
    ]

    assert losses[1] < losses[0]


def test_chat_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="raise --max-length to"):
        write_small_model(tmp_path / "model", [CHAT], steps=1, max_length=32, seed=0)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("no json", "line 2: expected"),
        ("[]", "line 2: expected"),
        ('{"messages": []}', "with texts only"),
        ('{"messages": [{"role": "user", "content": 3}]}', "with texts only"),
        (json.dumps({"messages": [QUESTION]}), "must be that of the assistant"),
    ],
)
def test_line_without_a_chat_is_refused_by_its_number(
    line: str, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": CHAT}) + "\n" + line + "\n")

    with pytest.raises(ConfigError, match=reason):
        read_chats(file)


def test_text_with_a_line_separator_of_unicode_is_one_chat(tmp_path: Path) -> None:
    chat = [QUESTION, {"role": "assistant", "content": "odd\u2028indeed"}]
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": chat}, ensure_ascii=False) + "\n", encoding="utf-8")

    assert read_chats(file) == [chat]


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()

    with pytest.raises(ConfigError, match="is empty"):
        read_chats(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="cannot read"):
        read_chats(tmp_path / "missing.jsonl")


@pytest.mark.parametrize("ending", ["interrupted", "too long"])
def test_model_that_was_not_trained_is_not_written(
    ending: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("example_trainer.demo.small_model.supervised_steps", interrupt)
    examples = tmp_path / "chats.jsonl"
    chat = [QUESTION, {"role": "assistant", "content": string.printable * 4}]
    examples.write_text(json.dumps({"messages": chat}) + "\n")
    length = 32 if ending == "too long" else 1024
    folder = tmp_path / "model"

    with pytest.raises(SystemExit) as ended:
        main([str(folder), "--examples", str(examples), "--max-length", str(length)])

    said = capsys.readouterr().err
    expected = {"interrupted": (130, "nothing was written"), "too long": (2, "raise --max-length")}
    assert (ended.value.code, expected[ending][1] in said) == (expected[ending][0], True)
    assert not folder.exists()


def test_folder_with_files_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").write_text("mine")

    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])

    assert ended.value.code == 2
    assert "is not empty; name another folder, or remove it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_folder_that_cannot_be_written_is_refused_before_the_training(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "file" / "model")])

    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "is a file; expected a folder; choose another place" in message
    assert "training a small model" not in message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[" * 100_000, "line 1: expected"),
        (
            json.dumps({"messages": [QUESTION, {"role": "assistant", "content": "\ud800"}]}),
            "line 1",
        ),
        (json.dumps({"messages": [{**QUESTION, "content": "a" * 300_000}, CHAT[1]]}), "200,000"),
        (" " * (32 * 2**20 + 1), "bytes"),
    ],
)
def test_absurd_examples_are_refused(tmp_path: Path, content: str, reason: str) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=reason):
        read_chats(file)


def test_byte_order_mark_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    line = json.dumps({"messages": CHAT})
    file.write_bytes(f"\ufeff{line}\r\n\r\n{line}\n\n".encode())

    assert read_chats(file) == [CHAT, CHAT]


def test_line_separator_in_a_text_does_not_end_its_line(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    chat = [{**QUESTION, "content": "a\u2028b"}, CHAT[1]]
    file.write_text(json.dumps({"messages": chat}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_chats(file) == [chat]


@pytest.mark.parametrize("arguments", [["--seed", str(2**70)], []])
def test_seed_and_folder_that_cannot_be_used_are_refused(tmp_path: Path, arguments, capsys) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "file"), *arguments])
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
