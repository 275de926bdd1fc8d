from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from atroposlib.utils import aio as long_decode
from atroposlib.utils.aio import decode_long
from tests.fakes import CharTokenizer


def byte_tokenizer() -> Any:
    """One token per byte: letters outside ASCII take several."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def fallback_tokenizer() -> Any:
    """One token per byte, as SentencePiece has for unknown letters; a run of them is read at once.

    If a run is not valid as a whole, each of its bytes is unreadable.
    """
    core = Tokenizer(models.BPE({f"<0x{i:02X}>": i for i in range(256)}, [], byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def word_tokenizer() -> Any:
    """One token per word; what is between words is made up when decoding."""
    words = {"<unk>": 0, **{f"w{i}": i + 1 for i in range(1000)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


TEXT = "a b  cé ü€ \N{GRINNING FACE}\N{FAMILY} 漢字 \n\t end "


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("skip", [False, True])
async def test_decode_long_gives_the_text_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, piece: int, skip: bool
) -> None:
    monkeypatch.setattr(long_decode, "PIECE_TOKENS", piece)
    rng = random.Random(piece)
    cases: list[tuple[Any, list[int]]] = [
        (byte_tokenizer(), byte_tokenizer().encode(TEXT * 5)),
        (fallback_tokenizer(), list((TEXT * 5).encode())),
        (fallback_tokenizer(), [rng.randrange(256) for _ in range(100)]),
        (word_tokenizer(), [rng.randrange(1001) for _ in range(200)]),
        (CharTokenizer(), CharTokenizer().encode(TEXT * 5)),
        (CharTokenizer(), []),
    ]

    for tokenizer, ids in cases:
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert await decode_long(tokenizer, ids, skip_special_tokens=skip) == whole


async def test_decode_long_of_texts_that_do_not_join_decodes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_decode, "PIECE_TOKENS", 2)

    class Counting:
        def decode(self, ids: list[int]) -> str:
            return f"{len(ids)} tokens"

    assert await decode_long(Counting(), [1, 2, 3, 4, 5]) == "5 tokens"


async def test_decode_long_lets_others_run_between_pieces() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())

    await decode_long(CharTokenizer(), [97] * (11 * long_decode.PIECE_TOKENS))

    running.cancel()
    assert turns >= 10
