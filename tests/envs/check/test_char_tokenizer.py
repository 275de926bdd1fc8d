"""The tokenizer of characters of `check` answers the calls that environments make of real ones."""

from __future__ import annotations

import copy
from typing import Any

import numpy
import pytest

from atroposlib.envs.check import check_environment
from atroposlib.envs.checks.scripted_model import CharTokenizer
from tests.envs.check.defects import CleanEnv

CHAT = [{"role": "user", "content": "a"}]


def test_call_returns_entries_that_are_attributes_too() -> None:
    encoded = CharTokenizer()("ab")

    assert encoded.input_ids == encoded["input_ids"] == [1, 97, 98]
    assert encoded.to("cpu").attention_mask == [1, 1, 1]
    assert copy.deepcopy(encoded) == encoded
    with pytest.raises(AttributeError, match="no labels"):
        _ = encoded.labels


@pytest.mark.parametrize("kind", ["np", "pt"])
def test_tensors_have_one_row_per_text(kind: str) -> None:
    pytest.importorskip("numpy" if kind == "np" else "torch")
    tokenizer = CharTokenizer()

    assert tokenizer("ab", return_tensors=kind).input_ids.shape == (1, 3)
    assert tokenizer.encode("ab", return_tensors=kind).shape == (1, 3)
    assert tokenizer.apply_chat_template(CHAT, return_tensors=kind).shape == (1, 9)
    assert tokenizer(["ab", "c"], padding=True, return_tensors=kind).input_ids.shape == (2, 3)


def test_padding_and_truncation_give_the_lengths_that_are_asked_for() -> None:
    tokenizer = CharTokenizer()
    tokenizer.padding_side = "left"

    assert tokenizer(["ab", "c"], padding=True).input_ids == [[1, 97, 98], [0, 1, 99]]
    assert tokenizer("abc", truncation=True, max_length=2).input_ids == [1, 97]
    assert tokenizer.encode("abc", truncation=True, max_length=2) == [1, 97]
    assert tokenizer("c", padding="max_length", max_length=3).attention_mask == [0, 1, 1]


@pytest.mark.parametrize("ids", [97, numpy.int64(97), numpy.array([97]), [97]])
def test_decode_takes_one_id_and_arrays(ids: Any) -> None:
    assert CharTokenizer().decode(ids) == "a"


def test_names_of_special_tokens_and_pieces_are_known() -> None:
    tokenizer = CharTokenizer()

    assert tokenizer.special_tokens_map["eos_token"] in tokenizer.all_special_tokens
    assert tokenizer.unk_token_id is None
    assert tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]}) == 0
    assert tokenizer.convert_tokens_to_string(tokenizer.tokenize("ab</s>")) == "ab</s>"
    assert tokenizer.convert_ids_to_tokens(2) == "</s>"


@pytest.mark.slow
def test_check_of_code_that_needs_more_of_a_tokenizer_says_how_to_have_it() -> None:
    class Unusual(CleanEnv):
        async def setup(self) -> None:
            _ = self.tokenizer.backend_tokenizer

    [failure] = check_environment(Unusual).failures

    assert failure.name == "setup"
    assert "set --env.tokenizer_name to a folder on this machine" in failure.remedy
    assert "test_char_tokenizer.py:" in (failure.where or "")
