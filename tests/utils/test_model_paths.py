from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.utils import model_paths
from atroposlib.utils.model_paths import (
    missing_folder,
    or_missing_folder,
    use_cache_without_hub,
)


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


def test_name_that_may_be_a_folder_is_said_to_be_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()

    assert or_missing_folder("offline", "there") == "offline"
    assert or_missing_folder("offline", "none") == (
        f"offline; there is no folder {tmp_path / 'none'} either"
    )
    assert or_missing_folder("offline", "./none") == f"there is no folder {tmp_path / 'none'}"


class Resolver:
    """Stands in for the name service, which knows no host during the first calls."""

    def __init__(self, failures: float) -> None:
        self.failures = failures
        self.asked: list[str] = []

    def __call__(self, host: str, *_: Any) -> list[Any]:
        self.asked.append(host)
        if len(self.asked) <= self.failures:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return []


@pytest.fixture
def without_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    """No host is found, and the environment says nothing of the hub or of proxies."""
    resolver = Resolver(failures=float("inf"))
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    monkeypatch.setattr(model_paths, "getproxies", dict)
    monkeypatch.setattr(model_paths.time, "sleep", lambda _: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "so that it is restored")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    for module in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(HF_HUB_OFFLINE=False))
    model_paths._is_found.cache_clear()
    yield resolver
    model_paths._is_found.cache_clear()  # the answers of the resolver


def is_offline() -> bool:
    modules = ("huggingface_hub.constants", "datasets.config")
    seen = {sys.modules[module].HF_HUB_OFFLINE for module in modules}
    seen.add(os.environ.get("HF_HUB_OFFLINE") == "1")
    (answer,) = seen  # the modules and the processes started later agree
    return answer


def test_without_the_hub_only_its_cache_is_used(
    without_hub: Resolver, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        use_cache_without_hub("Qwen/Qwen3-0.6B")

    assert is_offline()
    assert without_hub.asked == ["huggingface.co"] * 3
    assert caplog.messages == [
        "https://huggingface.co cannot be reached: only downloaded models and data are used"
    ]


def test_name_service_that_fails_once_does_not_hide_the_hub(without_hub: Resolver) -> None:
    without_hub.failures = 2

    use_cache_without_hub("Qwen/Qwen3-0.6B")

    assert not is_offline()


def test_another_hub_is_asked_for_by_its_name(
    without_hub: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example:8080")

    use_cache_without_hub("Qwen/Qwen3-0.6B")

    assert set(without_hub.asked) == {"hub.example"}


def test_folders_proxies_and_a_given_setting_need_no_name_service(
    without_hub: Resolver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cache_without_hub(str(tmp_path))
    monkeypatch.setattr(model_paths, "getproxies", lambda: {"https": "http://proxy:3128"})
    use_cache_without_hub("Qwen/Qwen3-0.6B")

    assert not is_offline()

    monkeypatch.setattr(model_paths, "getproxies", lambda: {"no": "localhost"})
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    use_cache_without_hub("Qwen/Qwen3-0.6B")

    assert os.environ["HF_HUB_OFFLINE"] == "0"
    assert without_hub.asked == []


def test_folder_of_a_run_names_the_model_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run/trainer/final_model").mkdir(parents=True)

    said = or_missing_folder("unrecognized model", "run")

    assert said == "it has no config.json; did you mean run/trainer/final_model?"


@pytest.mark.parametrize(
    ("file", "said"),
    [("adapter_config.json", "it has adapters without their model"), ("a.gguf", "it has GGUF")],
)
def test_folder_of_something_else_than_a_model_is_named(tmp_path, file, said):
    (tmp_path / file).touch()

    assert or_missing_folder("unrecognized model", str(tmp_path)).startswith(said)
