"""A tokenizer in a folder, groups made with it, and a service in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.exporting.samples import make_groups, write_groups


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte-level tokenizer with a chat template; `name_or_path` is its folder."""
    from example_trainer.demo.settings import train_tokenizer

    chats = [
        [
            {"role": "user", "content": f"What is {i} + {i}?"},
            {"role": "assistant", "content": f"The answer is {i + i}"},
        ]
        for i in range(40)
    ]
    made = train_tokenizer(chats, max_length=256)
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    made.name_or_path = str(folder)
    return made


@pytest.fixture(scope="session")
def groups(tokenizer: Any) -> list[dict[str, Any]]:
    return make_groups(tokenizer, 20)


@pytest.fixture
def groups_file(groups: list[dict[str, Any]], tmp_path: Path) -> Path:
    return write_groups(tmp_path / "groups.jsonl", groups)


@pytest.fixture
def run_command() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a module of `atroposlib.cli` as a user would."""

    def run(module: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", f"atroposlib.cli.{module}", *map(str, words)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={**_environment(), **environment},
        )

    return run


class Service:
    """A `run-api` process."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def post(self, groups: list[dict[str, Any]]) -> None:
        for group in groups:
            reply = httpx.post(f"{self.url}/scored_data", content=json.dumps(group))
            assert reply.status_code == 200, reply.text

    def register(self, **changes: Any) -> None:
        settings = {
            "wandb_group": "g",
            "wandb_project": "p",
            "batch_size": 4,
            "max_token_len": 256,
            "checkpoint_dir": "",
            "save_checkpoint_interval": 0,
            "starting_step": 0,
            "num_steps": 10,
        }
        assert httpx.post(f"{self.url}/register", json=settings | changes).status_code == 200

    def status(self) -> dict[str, Any]:
        return self.ask("/status")

    def ask(self, path: str) -> dict[str, Any]:
        return dict(httpx.get(self.url + path).json())


@pytest.fixture
def start_service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts `run-api` on a free port; ends what it started."""
    with ExitStack() as ending:

        def start(*flags: str) -> Service:
            process = subprocess.Popen(
                [sys.executable, "-m", "atroposlib.cli.run_api", "--port", "0", *flags],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=tmp_path,
                env=_environment(),
            )
            ending.callback(process.wait)
            ending.callback(process.kill)
            assert process.stdout is not None
            deadline = time.monotonic() + 60
            for line in process.stdout:
                assert time.monotonic() < deadline
                if line.startswith("trajectory API: "):
                    return Service(process, line.split()[2])
            raise AssertionError("the service did not start")

        yield start


def _environment() -> dict[str, str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
