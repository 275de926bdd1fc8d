from __future__ import annotations

from pathlib import Path

import pytest

from atroposlib.utils.model_paths import missing_folder


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B"])
def test_names_on_the_hub_are_left_alone(name: str) -> None:
    assert missing_folder(name) is None


@pytest.mark.parametrize("name", ["./none", "/no/where", "a/b/c", "none/"])
def test_path_without_a_folder_is_named_in_full(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert missing_folder(name) == f"there is no folder {Path(name).absolute()}"


def test_folder_that_is_there_is_fine(tmp_path: Path) -> None:
    assert missing_folder(str(tmp_path)) is None
