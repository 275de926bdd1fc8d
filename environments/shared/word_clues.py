"""Words with a clue each, from a file of lines `word<TAB>clue`.

`WORDS_PATH` is the list written for this repository: 793 common English words of 3 to 10 letters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from atroposlib.errors import ConfigError

__all__ = ["WORDS_PATH", "read_words", "words_at"]

WORDS_PATH = Path(__file__).parents[1] / "data" / "word_clues" / "words.tsv"


def read_words(text: str, *, name: str) -> dict[str, str]:
    """Return the clue of each word, in the order of the lines.

    Args:
        text: content of the file; empty lines are left out.
        name: of the file, for messages.

    Raises:
        ConfigError: a line is no word with a clue, or a word occurs twice.
    """
    clues: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        word, _, clue = (part.strip() for part in line.partition("\t"))
        if not (word.isascii() and word.isalpha() and word.islower() and clue):
            raise ConfigError(
                f"{name}, line {number}: expected a word of the letters a to z, a tab and a clue, "
                f"got {line[:60]!r}"
            )
        if word in clues:
            raise ConfigError(f"{name}, line {number}: {word!r} is there twice")
        clues[word] = clue
    if not clues:
        raise ConfigError(f"{name} has no words")
    return clues


@lru_cache(maxsize=4)
def words_at(path: str | None) -> Mapping[str, str]:
    """Return the words of a file, read once.

    Args:
        path: of the file; None for the shipped list.

    Raises:
        ConfigError: the file cannot be read or has a faulty line.
    """
    file = WORDS_PATH if path is None else Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the word list {file} cannot be read: {error}") from error
    return MappingProxyType(read_words(text, name=str(file)))
