"""The commands of the pages of adapters, where their packages are installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.scored_data import check_group
from tests.adapters.remote_servers import run_page
from tests.fakes import ScriptedEngine
from tests.templates.make_tokenizers import FOLDER, load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(1200)]

PAGES = {
    "dataset": None,
    "gem": "gem",
    "gymnasium": "gymnasium",
    "inspect_ai": "inspect_ai",
    "mcp": "mcp",
    "reasoning_gym": "reasoning_gym",
    "tasks": None,
    "textarena": "textarena",
    "textworld": "textworld",
    "verifiers": "sophistry_bench_sprint",
}
"""The module that the commands of a page need; pages of servers are tested with their servers."""
REPLIES = [
    *("<action>hit</action>", "7", "[4]", "<answer>8</answer>"),
    *("go east", "<action>stick</action>", "```sh\necho ready > /app/status.txt\n```"),
]


@pytest.mark.parametrize("kind", PAGES)
async def test_every_command_of_the_page_works(kind: str, tmp_path: Path) -> None:
    module = PAGES[kind]
    if module is not None and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed here; tests/adapters/own_environments.py does")
    tokenizer = load_tokenizer("qwen2_5")
    model = FOLDER / "qwen2_5"

    async with ScriptedEngine(REPLIES, tokenizer=tokenizer, model=str(model)) as engine:
        output = await run_page(f"docs/adapters/{kind}.md", tmp_path, engine, model)

    assert "nothing left running" in output
    assert "FAILED" not in output
    groups = check_groups(tmp_path)
    assert (kind == "tasks") == all(any(group.get("traces") or ()) for group in groups)
    assert "groups to" in output
    assert "eval/" in output


def check_groups(folder: Path) -> list[Any]:
    files = [file for file in folder.rglob("*.jsonl") if file.is_file()]
    rows = [json.loads(row) for file in files for row in file.open()]
    groups = [row for row in rows if "inference_logprobs" in row]
    assert groups
    for group in groups:
        check_group(group)
    return groups
