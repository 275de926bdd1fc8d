"""Groups for tests of the viewer, ordinary and hostile."""

from __future__ import annotations

import atexit
import base64
import json
import shutil
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tests.byte_tokenizer import save_byte_tokenizer

ATTACKS = (
    "<script>window.attacked = 1</script>",
    "</textarea><img src=x onerror='window.attacked = 1'>",
    "\x1b[31mred\x1b]0;title\x07",
    "\ud800 half a pair",
    "\u202eright to left\u202c שלום עולם",
    "${window.attacked = 1} {{value}} @children",
    "</b></div></details><style>body{display:none}</style>",
    "' onmouseover='window.attacked = 1",
)
PIXEL = base64.b64encode(
    bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c4944415408d763f8"
        "cfc0000003010100c9fe92ef0000000049454e44ae426082"
    )
).decode()


def chat(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def make_group(
    question: str, answers: Iterable[str], scores: Iterable[float], **fields: Any
) -> dict[str, Any]:
    """A group whose tokens are those of `tests.byte_tokenizer`, one per byte."""
    answers = list(answers)
    prompts = byte_ids(f"[user]{question}</s>[assistant]")
    completions = [byte_ids(answer + "</s>") for answer in answers]
    return {
        "tokens": [prompts + ids for ids in completions],
        "masks": [[-100] * len(prompts) + ids for ids in completions],
        "scores": list(scores),
        "inference_logprobs": [
            [1.0] * len(prompts) + [-0.1 * (i % 50) for i in range(len(ids))] for ids in completions
        ],
        "messages": [chat(question, answer) for answer in answers],
        **fields,
    }


@cache
def byte_tokenizer() -> Any:
    """The tokenizer of these groups; its folder is its name."""
    folder = tempfile.mkdtemp(prefix="viewer-tokenizer-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return save_byte_tokenizer(Path(folder))


def byte_ids(text: str) -> list[int]:
    readable = text.encode("utf-8", errors="replace").decode()
    ids: list[int] = byte_tokenizer().encode(readable, add_special_tokens=False)
    return ids


def hostile_group() -> dict[str, Any]:
    """A group whose every text attacks whoever shows it."""
    attack = "\n".join(ATTACKS)
    group = make_group(attack, [attack, attack + "!", "x" * 5000], [1.0, -1.0, 0.0])
    group["messages"][2][1]["content"] = "x" * 1_000_000
    call = {"function": {"name": attack, "arguments": attack}}
    group["messages"][0][1] |= {"tool_calls": [call], "reasoning_content": attack, "name": attack}
    group["messages"][1][1]["content"] = [{"type": attack}, {"type": "text", "text": attack}]
    return {**group, "env_name": attack, "generation_params": {attack: attack}}


def write_groups(path: Path, groups: Iterable[Any]) -> Path:
    lines = [group if isinstance(group, str) else json.dumps(group) for group in groups]
    path.write_text("".join(line + "\n" for line in lines))
    return path
