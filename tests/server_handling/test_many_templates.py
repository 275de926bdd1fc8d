"""Random conversations hold the engine's tokens with each chat template that TRL ships."""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import re
from pathlib import Path
from typing import Any

import pytest

from atroposlib.utils.tokenizers.content_parts import in_readable_form, reads_parts
from tests.server_handling.conversation_plans import random_plan
from tests.server_handling.random_conversations import Agent, Family
from tests.templates.make_tokenizers import Family as TokenizerFamily
from tests.templates.make_tokenizers import save_tokenizer

pytestmark = pytest.mark.slow

WIDE_BAR, WIDE_SPACE = "\uff5c", "\u2581"
"""As in the special tokens of DeepSeek."""
SPECIAL = re.compile(
    rf"<[|{WIDE_BAR}][^<>\s{{}}]{{1,40}}[|{WIDE_BAR}]>"
    r"|<(?:start|end)_of_turn>|<bos>|</?s>|\[/?INST\]|\[gMASK\]"
    r"|<end_of_utterance>|<(?:turn|channel|tool|tool_call|tool_response)\|>"
    r"|<\|(?:turn|channel|tool|tool_call|tool_response)>"
)
STARTS = (
    *("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "<BOS_TOKEN>", "[gMASK]"),
    f"<{WIDE_BAR}begin{WIDE_SPACE}of{WIDE_SPACE}sentence{WIDE_BAR}>",
)
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
REFUSE_SYSTEM = ("gemma", "gemma_training", "llava_next", "llava_next_training")
PARSERS = (
    ("llama3_1", "llama3_json"),
    ("llama3_2", "llama3_json"),
    ("glm4moe", "glm45"),
    ("deepseekv3", "deepseek_v3"),
    ("lfm2", "lfm2"),
)
"""Start of a template's name, and how its models write calls."""
EXCHANGE = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ANSWER"}]


def template_paths() -> list[Path]:
    """Return the templates of the TRL that is installed, without importing it."""
    found = importlib.util.find_spec("trl")
    folders = (found.submodule_search_locations if found else None) or []
    return sorted(
        path for folder in folders for path in Path(folder).glob("chat_templates/*.jinja")
    )


def tool_parser_of(name: str, template: str) -> str | None:
    """Return how models with a template write calls; None if there is no parser here."""
    if "<function=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template and '"name": ' in template:
        return "hermes"
    return next((parser for start, parser in PARSERS if name.startswith(start)), None)


def family_with(path: Path, folder: Path) -> Family:
    """Return a tokenizer that has the special tokens of a template, saved in a folder."""
    from transformers import AutoTokenizer

    template = path.read_text(encoding="utf-8")
    specials = [*dict.fromkeys(["<eos>", *SPECIAL.findall(template)])]
    start = next((token for token in STARTS if token in specials), None)
    if start is None and "bos_token" in template:
        specials.append(start := "<bos>")
    parser = tool_parser_of(path.stem, template) or "hermes"
    marks = tuple(mark for mark in MARKS if mark in template)
    save_tokenizer(TokenizerFamily(tuple(specials), marks, parser), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token, tokenizer.chat_template = start, template
    written = tokenizer.apply_chat_template(in_readable_form(tokenizer, EXCHANGE), tokenize=False)
    ending = written.rpartition("ANSWER")[2]
    ends = (token for token in specials if token in ending)
    tokenizer.eos_token = min(ends, key=ending.index, default="<eos>")
    return Family(path.stem, tokenizer, parser, (tokenizer.eos_token_id,))


async def play_conversations(path: Path, folder: Path, number: int) -> None:
    family = family_with(path, folder)
    has_parser = tool_parser_of(path.stem, family.tokenizer.chat_template) is not None
    for seed in range(number):
        plan = random_plan(random.Random(f"{path.stem}-{seed}"))
        changes: dict[str, Any] = {} if has_parser else {"has_tools": False}
        if path.stem in REFUSE_SYSTEM:
            changes["system"] = None
        plan = dataclasses.replace(plan, **changes)
        await Agent(family, plan, track_tree=seed % 2 == 1).play()


@pytest.mark.skipif(not template_paths(), reason="trl is not installed")
async def test_conversations_hold_the_engines_tokens_with_every_template(tmp_path: Path) -> None:
    for path in template_paths():
        await play_conversations(path, tmp_path / path.stem, 2)


@pytest.mark.skipif(not template_paths(), reason="trl is not installed")
def test_parts_are_read_by_the_templates_that_show_their_texts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "FIRST"}, {"type": "text", "text": "SECOND"}]
    found: dict[str, bool] = {}
    for path in template_paths():
        tokenizer = family_with(path, tmp_path / path.stem).tokenizer
        found[path.stem] = reads_parts(tokenizer)
        if found[path.stem]:
            shown = tokenizer.apply_chat_template(
                [{"role": "user", "content": parts}], tokenize=False
            )
            assert "FIRST" in shown.partition("SECOND")[0], path.stem
            assert "'text'" not in shown, path.stem

    # As vLLM 0.32 finds them.
    assert found.items() >= {"qwen2_5_vl": True, "smolvlm": True, "qwen3_5_think": True}.items()
    assert found.items() >= {"qwen2_5": False, "llama3_1": False, "qwen3": False}.items()


@pytest.mark.long
@pytest.mark.parametrize("path", template_paths(), ids=lambda path: path.stem)
async def test_many_conversations_hold_the_engines_tokens(path: Path, tmp_path: Path) -> None:
    await play_conversations(path, tmp_path / path.stem, 100)
