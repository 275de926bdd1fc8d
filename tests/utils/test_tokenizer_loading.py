"""Tokenizers loaded without torch: the same as AutoTokenizer's, and others are left to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atroposlib.utils.tokenizers.loading import load_general_tokenizer
from tests.byte_tokenizer import save_byte_tokenizer

WITHOUT_TORCH = """
import sys
from atroposlib.envs.base import _load_tokenizer
tokenizer = _load_tokenizer(sys.argv[1])
message = [{"role": "user", "content": "1 + 1"}]
text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
tokenizer.batch_decode([tokenizer.encode(text)])
print("torch" in sys.modules)
"""


def saved(folder: Path, **changes: str) -> str:
    save_byte_tokenizer(folder)
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


@pytest.mark.slow
def test_general_tokenizer_is_that_of_auto_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    name = saved(tmp_path)

    loaded, expected = load_general_tokenizer(name), AutoTokenizer.from_pretrained(name)

    assert type(loaded) is type(expected)
    assert loaded.encode("a b") == expected.encode("a b")
    assert loaded.chat_template == expected.chat_template
    assert loaded.name_or_path == expected.name_or_path


@pytest.mark.slow
def test_environment_loads_a_general_tokenizer_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-c", WITHOUT_TORCH, saved(tmp_path)]

    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)

    assert finished.stdout.strip() == "False"


@pytest.mark.parametrize(
    "changes", [{"tokenizer_class": "Qwen2Tokenizer"}, {"auto_map": "code.Tokenizer"}]
)
def test_other_tokenizers_are_left_to_auto_tokenizer(
    changes: dict[str, str], tmp_path: Path
) -> None:
    assert load_general_tokenizer(saved(tmp_path, **changes)) is None


@pytest.mark.parametrize("name", ["some-owner/never-downloaded", "not a name", "/missing/folder"])
def test_tokenizer_that_is_not_on_this_machine_is_left_to_auto_tokenizer(name: str) -> None:
    assert load_general_tokenizer(name) is None
