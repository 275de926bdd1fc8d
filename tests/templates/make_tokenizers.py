"""Write the tokenizers of this folder: `python -m tests.templates.make_tokenizers`.

Each is a byte-level BPE with some merges, so that any text has ids and most texts have several
tokenisations. The templates are written by hand and stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atroposlib.utils.tokenizers.earlier_calls import read_template_file

__all__ = ["FAMILIES", "FOLDER", "Family", "load_tokenizer", "save_tokenizer"]

FOLDER = Path(__file__).parent

NUM_MERGES = 160


@dataclass(frozen=True)
class Family:
    """What a family's tokenizer has besides letters."""

    specials: tuple[str, ...]
    """Tokens that are left out of texts; the first ends a turn."""
    marks: tuple[str, ...]
    """Tokens of their own that stay in texts."""
    tool_parser: str
    """How its models write tool calls."""
    bos_token: str | None = None
    """Put in front of every prompt."""


FAMILIES = {
    "llama3": Family(
        specials=(
            *("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eom_id|>", "<|end_of_text|>", "<|python_tag|>"),
        ),
        marks=(),
        tool_parser="llama3_json",
        bos_token="<|begin_of_text|>",
    ),
    "qwen2_5": Family(
        specials=("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
        marks=("<tool_call>", "</tool_call>"),
        tool_parser="qwen",
    ),
    "qwen3": Family(
        specials=("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
        marks=("<tool_call>", "</tool_call>", "<think>", "</think>"),
        tool_parser="qwen3",
    ),
    "mistral": Family(
        specials=(
            *("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
            *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        marks=(),
        tool_parser="mistral",
        bos_token="<s>",
    ),
    "chatml": Family(specials=("<|im_end|>", "<|im_start|>"), marks=(), tool_parser="hermes"),
}


def save_tokenizer(family: Family, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` of a family."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(
        _sentences(),
        BpeTrainer(
            vocab_size=len(alphabet) + NUM_MERGES, initial_alphabet=alphabet, show_progress=False
        ),
    )
    core.add_special_tokens([AddedToken(token, special=True) for token in family.specials])
    core.add_tokens([AddedToken(token, special=False) for token in family.marks])
    if family.bos_token is not None:
        bos_id = core.token_to_id(family.bos_token)
        core.post_processor = processors.TemplateProcessing(
            single=f"{family.bos_token} $A", special_tokens=[(family.bos_token, bos_id)]
        )
    folder.mkdir(exist_ok=True)
    folder.joinpath("tokenizer.json").write_text(core.to_str(pretty=False), encoding="utf-8")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": family.specials[0],
        "pad_token": family.specials[-1],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    if family.bos_token is not None:
        config["bos_token"] = family.bos_token
    text = json.dumps(config, indent=2) + "\n"
    folder.joinpath("tokenizer_config.json").write_text(text, encoding="utf-8")


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer of a family, as transformers loads it from its folder."""
    from transformers import AutoTokenizer

    return read_template_file(AutoTokenizer.from_pretrained(FOLDER / name))


def _sentences() -> Iterator[str]:
    """Give text that holds what conversations of the tests are made of."""
    words = ["search", "query", "cats", "weather", "Oslo", "time", "number", "answer", "think"]
    for first in words:
        for second in words:
            yield f"The {first} is {second}. What is the {second} in {first}?\n\nassistant\n"
            yield json.dumps({"name": f"{first}_{second}", "arguments": {first: second, "n": 12}})


if __name__ == "__main__":
    for name, family in FAMILIES.items():
        save_tokenizer(family, FOLDER / name)
