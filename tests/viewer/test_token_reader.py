from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from atroposlib.viewer.rollouts import group_of
from atroposlib.viewer.token_reader import TokenReader
from tests.viewer.groups import byte_ids, byte_tokenizer, make_group

QUESTION = "How many parts are there in all of the boxes together?"
ANSWER = "There are twelve boxes of ten, so a hundred and twenty parts."


def reader_of(tokenizer: Any) -> TokenReader:
    reader = TokenReader("some/name", lambda _: tokenizer)
    assert reader.wait(120)
    return reader


def other_tokenizer(*special: str) -> Any:
    """A byte tokenizer with merges: special tokens shift the ids of letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(special),
        show_progress=False,
    )
    core.train_from_iterator([QUESTION, ANSWER] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_the_tokenizer_of_the_run_fits() -> None:
    group = group_of(make_group(QUESTION, [ANSWER], [1.0]))

    assert reader_of(byte_tokenizer()).mismatch(group) is None


def test_ids_beyond_the_vocabulary_are_said() -> None:
    fields = make_group(QUESTION, [ANSWER], [1.0])
    fields["tokens"][0][3] = 99_999
    reader = reader_of(byte_tokenizer())

    reason = reader.mismatch(group_of(fields))

    assert reason is not None
    assert "258 tokens" in reason
    assert "99,999" in reason
    assert "⟨99999⟩" in reader.text(fields["tokens"][0])


def test_tokens_that_do_not_spell_the_messages_are_said() -> None:
    group = group_of(make_group(QUESTION, [ANSWER], [1.0]))

    reason = reader_of(other_tokenizer()).mismatch(group)

    assert reason is not None
    assert "do not spell its messages" in reason


def test_without_messages_tokenising_again_tells() -> None:
    tokenizer = other_tokenizer("<pad>", "</s>")  # letters have the ids of the byte tokenizer
    right = {"tokens": [tokenizer.encode(QUESTION + ANSWER) * 3], "scores": [1.0]}
    wrong = {"tokens": [byte_ids(QUESTION + ANSWER)], "scores": [1.0]}
    reader = reader_of(tokenizer)

    assert reader.mismatch(group_of(right)) is None
    reason = reader.mismatch(group_of(wrong))
    assert reason is not None
    assert "same after decoding and encoding" in reason


def test_a_character_of_several_tokens_is_given_to_the_last() -> None:
    reader = reader_of(byte_tokenizer())

    pieces = reader.pieces(byte_ids("aé€</s>"))

    assert [piece.text for piece in pieces] == ["a", "·", "é", "·", "·", "€", "</s>"]
    assert [piece.is_special for piece in pieces] == [False] * 6 + [True]


def test_half_a_character_is_shown_as_such() -> None:
    reader = reader_of(byte_tokenizer())

    pieces = reader.pieces(byte_ids("€")[:2])

    assert [piece.text for piece in pieces] == ["\ufffd", "\ufffd"]


def test_without_a_tokenizer_tokens_are_ids_and_the_reason_is_said() -> None:
    def fail(name: str) -> Any:
        raise OSError(f"{name} is not a folder\nand more")

    reader = TokenReader("wrong/name", fail)

    assert not reader.wait(120)
    assert reader.text([5, 6]) == "⟨5⟩⟨6⟩"
    assert reader.problem is not None
    assert "wrong/name is not a folder" in reader.problem
    assert "--tokenizer" in reader.problem


def test_pages_do_not_wait_for_a_tokenizer_that_is_being_loaded(tmp_path: Path) -> None:
    may_end = threading.Event()

    def load(_: str) -> Any:
        may_end.wait(120)
        return byte_tokenizer()

    reader = TokenReader("slow", load)

    assert reader.text([5]) == "⟨5⟩"
    assert reader.problem is None
    may_end.set()
    assert reader.wait(120)
    assert reader.text(byte_ids("now")) == "now"
