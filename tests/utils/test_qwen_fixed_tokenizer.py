import copy
import json
from pathlib import Path

import pytest

from atroposlib.utils.tokenizers.qwen_fixed_tokenizer import QwenFixedTokenizer

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
ARGUMENTS = '{"q":  "it\'s"}'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> QwenFixedTokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "<|im_start|>", "<|im_end|>"])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(folder)
    return QwenFixedTokenizer(str(folder))


def render(tokenizer: QwenFixedTokenizer, messages: list, **options: object) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_chat_renders_as_chatml_with_thinking_kept(tokenizer):
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "<think>t</think>A"},
        {"role": "user", "content": "V"},
    ]

    assert render(tokenizer, messages, add_generation_prompt=True) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
        "<|im_start|>assistant\n<think>t</think>A<|im_end|>\n<|im_start|>user\nV<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tool_conversation(tokenizer):
    call = {"function": {"name": "search", "arguments": ARGUMENTS}}
    messages = [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A", "tool_calls": [call, call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]

    text = render(tokenizer, messages, tools=TOOLS)

    block = f'<tool_call>\n{{"name": "search", "arguments": {ARGUMENTS}}}\n</tool_call>'
    assert f"<|im_start|>assistant\nA\n\n{block}{block}<|im_end|>\n" in text
    assert (
        "<|im_start|>user\n<tool_response>\none\n</tool_response>"
        "\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    ) in text
    listed = text.split("<tools>\n")[1].split("\n</tools>")[0]
    assert json.loads(listed) == TOOLS[0]


def test_only_a_first_system_message_is_rendered(tokenizer):
    messages = [{"role": "user", "content": "U"}, {"role": "system", "content": "late"}]

    assert "late" not in render(tokenizer, messages)


def test_ids_are_a_plain_list_and_the_rest_is_delegated(tokenizer):
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])

    assert isinstance(ids, list)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n"
    assert tokenizer.eos_token == "<|im_end|>"
    assert len(tokenizer) == 258
    assert tokenizer("a")["input_ids"] == tokenizer.encode("a")
    assert copy.copy(tokenizer).eos_token == "<|im_end|>"
