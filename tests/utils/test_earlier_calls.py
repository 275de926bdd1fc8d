"""The tokenizer of an environment answers as in version 4 of transformers, under every version."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from atroposlib.utils.tokenizers.earlier_calls import keep_earlier_calls, read_template_file
from tests.templates.make_tokenizers import FOLDER, load_tokenizer

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "cats"}]
TEXT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\ncats<|im_end|>\n"


@pytest.fixture
def tokenizer() -> Any:
    return keep_earlier_calls(load_tokenizer("chatml"))


def test_template_beside_the_tokenizer_is_read_under_every_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import transformers

    path = FOLDER / "chatml" / "chat_template.jinja"
    unread = load_tokenizer("chatml")
    unread.chat_template = None  # as the first releases load it

    monkeypatch.setattr(transformers, "__version__", "4.46.3")
    assert read_template_file(unread).chat_template == path.read_text("utf-8")
    tokenizer = load_tokenizer("chatml")
    tokenizer.chat_template = "its own"
    assert read_template_file(tokenizer).chat_template == "its own"
    for source in path.parent.glob("tokenizer*.json"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    without = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert not read_template_file(without).chat_template


def test_chat_is_rendered_as_a_list_of_ids(tokenizer: Any) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)

    assert tokenizer.apply_chat_template(CHAT) == ids
    assert tokenizer.apply_chat_template(conversation=CHAT) == ids
    assert tokenizer.apply_chat_template([CHAT, CHAT]) == [ids, ids]
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == TEXT
    assert tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"] == ids
    opened = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True)
    assert len(opened) == len(tokenizer.encode(TEXT.partition("cats")[0]))
    assert tokenize_for_trainer(tokenizer, CHAT)["tokens"] == ids


def test_tensor_of_a_chat_is_one_tensor(tokenizer: Any) -> None:
    pytest.importorskip("torch")

    tensor = tokenizer.apply_chat_template(CHAT, return_tensors="pt")

    assert tuple(tensor.shape) == (1, len(tokenizer.apply_chat_template(CHAT)))


def test_rows_and_single_ids_are_decoded_one_by_one(tokenizer: Any) -> None:
    ids = tokenizer.encode("a cat<|im_end|>")

    assert tokenizer.batch_decode([ids, ids[:1]]) == ["a cat<|im_end|>", "a"]
    assert tokenizer.batch_decode([ids], skip_special_tokens=True) == ["a cat"]
    assert tokenizer.batch_decode(ids) == [tokenizer.decode([token_id]) for token_id in ids]
    assert tokenizer.batch_decode([]) == []


def test_calls_that_were_removed_are_there(tokenizer: Any) -> None:
    assert tokenizer.encode_plus("a cat")["input_ids"] == tokenizer.encode("a cat")
    assert tokenizer.batch_encode_plus(["a", "cat"])["input_ids"] == [
        tokenizer.encode("a"),
        tokenizer.encode("cat"),
    ]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_copies_answer_by_themselves(duplicate: Any, tokenizer: Any) -> None:
    copied = duplicate(tokenizer)
    copied.chat_template = "{{ messages[0]['content'] }}"

    assert copied.apply_chat_template(CHAT) == copied.encode("hi")
    assert len(tokenizer.apply_chat_template(CHAT)) > len(tokenizer.encode("hi"))


def test_saved_tokenizer_is_an_ordinary_one(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)

    assert AutoTokenizer.from_pretrained(tmp_path).encode(TEXT) == tokenizer.encode(TEXT)


def test_chat_without_a_template_is_one_clear_line(tokenizer: Any) -> None:
    tokenizer.chat_template = None

    with pytest.raises(ConfigError, match=r"chatml has no chat template.*--env\.tokenizer_name"):
        tokenizer.apply_chat_template(CHAT)
    given = tokenizer.apply_chat_template(CHAT, chat_template="{{ messages[0]['content'] }}")
    assert given == tokenizer.encode("hi")


def test_chat_with_a_damaged_template_is_one_clear_line(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages\n[0]"

    with pytest.raises(ConfigError, match=r"template .*chatml has a syntax error in line 2: "):
        tokenizer.apply_chat_template(CHAT)


def test_other_tokenizers_stay_as_they_are() -> None:
    class Lines:
        def apply_chat_template(self, messages: Any, tokenize: bool = True) -> str:
            return "\n".join(message["content"] for message in messages)

    tokenizer = Lines()

    assert keep_earlier_calls(tokenizer) is tokenizer
    assert vars(tokenizer) == {}
