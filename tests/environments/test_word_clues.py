from __future__ import annotations

from pathlib import Path

import pytest

from atroposlib.errors import ConfigError
from atroposlib.tasks.games import read_words, words_at


def test_shipped_words_are_plain_and_no_clue_tells_its_word() -> None:
    words = words_at(None)

    assert len(words) > 600
    assert {len(word) for word in words} == set(range(3, 11))
    assert not [word for word, clue in words.items() if word in clue.lower().split()]
    assert not [word for word, clue in words.items() if word in clue.lower() and len(word) > 3]


def test_words_of_a_file_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "words.tsv"
    path.write_text("pear\tfruit\n\nant\tinsect\n")

    assert list(words_at(str(path)).items()) == [("pear", "fruit"), ("ant", "insect")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pear", "line 1"),
        ("pear\tfruit\nPear\tfruit", "line 2"),
        ("pear\tfruit\npear\tfruit", "twice"),
        ("na\u00efve\tsimple", "letters a to z"),
        ("", "no words"),
    ],
)
def test_faulty_line_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_words(text, name="words.tsv")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        words_at(str(tmp_path / "none.tsv"))
