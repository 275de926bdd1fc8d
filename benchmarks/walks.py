"""Count the product files whose functions are called during one event, from end to end.

A reader who follows an event must open these files. Each event is repeated with the real components
in this process. A file counts if one of its functions is called in every repetition, which excludes
timers and reports that coincide with an event. Imports are not counted.

    POST /scored_data          the service: an HTTP request until its response, in a run on disk
    GET /batch                 the service: a batch that is ready, acknowledged when it was sent
    item -> posted             an environment: `get_next_item` until the service has the group
    managed chat -> engine     `chat_completion` of a managed session until it returns
    proxy chat -> engine       an agent's request to the agent proxy until its response
    batch -> optimizer step    the trainer: requesting a batch until the step is acknowledged

The engine is a mock in another process; in the last four events, so is the service.

Usage: python benchmarks/walks.py [--only "GET /batch" ...] [--files] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.table import Table

from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from inference_parts.mock_engine import mock_engine
from inference_parts.paths import load_tokenizer
from service_parts.connection import Connection, request_bytes
from service_parts.server_process import run_api
from service_parts.workload import Shape, post_requests, register_trainer

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("atroposlib", "example_trainer", "environments")
NUM_REPEATS = 5
SHAPE = Shape(4, 64)
BATCH_SIZE = 8


class Walks:
    """The product files whose functions are called, by event."""

    def __init__(self) -> None:
        self._current: set[str] | None = None
        self._events: list[set[str]] = []

    def install(self) -> None:
        """Trace this thread and all threads started later."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    @contextmanager
    def event(self) -> Iterator[None]:
        """Trace one event."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Start an event."""
        self._current = set()

    def end(self) -> None:
        """End an event that was started."""
        if self._current is not None:
            self._events.append(self._current)
        self._current = None

    def files(self) -> list[str]:
        """Return the files common to all events, relative to the repository, and clear the events.

        Raises:
            RuntimeError: There was no event.
        """
        if not self._events:
            raise RuntimeError("the event did not happen")
        common = set.intersection(*self._events)
        self._events = []
        return sorted(common)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        current = self._current
        if current is None or event != "call" or frame.f_code.co_name == "<module>":
            return
        path = _product_file(frame.f_code.co_filename)
        if path is not None:
            current.add(path)


_known: dict[str, str | None] = {}


def _product_file(filename: str) -> str | None:
    if filename not in _known:
        try:
            path = Path(filename).resolve().relative_to(REPOSITORY)
            _known[filename] = str(path) if path.parts[0] in PACKAGES else None
        except ValueError:
            _known[filename] = None
    return _known[filename]


def walk_post(walks: Walks, folder: Path) -> None:
    """POST /scored_data."""
    with _own_service(folder) as connection:
        for request in _requests():
            with walks.event():
                connection.expect(request)


def walk_batch(walks: Walks, folder: Path) -> None:
    """GET /batch."""
    with _own_service(folder) as connection:
        for request in _requests() * (BATCH_SIZE // SHAPE.trajectories):
            connection.expect(request)
        for _ in range(NUM_REPEATS):
            with walks.event():
                connection.expect(request_bytes("GET", "/batch"))


def walk_item(walks: Walks, folder: Path) -> None:
    """An item of an environment until its group is posted."""
    from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
    from scheduler_parts.environment_process import BenchmarkEnv

    class WalkedEnv(BenchmarkEnv):
        num_posted = 0
        all_posted = asyncio.Event()

        async def get_next_item(self) -> int:
            item = await super().get_next_item()
            if item > 1:
                walks.begin()
            return item

        async def _send_scored_data_to_api(self, scored_data: Any) -> None:
            await super()._send_scored_data_to_api(scored_data)
            walks.end()
            self.num_posted += 1
            if self.num_posted == NUM_REPEATS:
                self.all_posted.set()

    load_tokenizer(folder / "tokenizer")

    async def serve(service_url: str, engine_url: str) -> None:
        config = BaseEnvConfig(
            group_size=2,
            batch_size=BATCH_SIZE,
            max_num_workers=1,
            tokenizer_name=str(folder / "tokenizer"),
            rollout_server_url=service_url,
            use_wandb=False,
            ensure_scores_are_not_same=False,
            metrics_path=str(folder / "metrics.jsonl"),
        )
        server = APIServerConfig(
            model_name="mock", base_url=f"{engine_url}/v1", server_type="vllm", api_key="x"
        )
        env = WalkedEnv(config, [server])
        serving = asyncio.create_task(env.env_manager())
        posted = asyncio.create_task(env.all_posted.wait())
        await asyncio.wait({serving, posted}, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        await asyncio.wait({serving})

    with (
        run_api("--store", "memory") as service,
        mock_engine(prompt_tokens=8, output_tokens=8) as engine_url,
    ):
        with Connection(service.port) as connection:
            register_trainer(connection, BATCH_SIZE)
        asyncio.run(serve(service.url, engine_url))


def walk_managed_chat(walks: Walks, folder: Path) -> None:
    """A chat completion of a managed session."""

    async def chat(manager: Any, tokenizer: Any) -> None:
        for _ in range(NUM_REPEATS + 1):
            async with manager.managed_server(tokenizer=tokenizer) as session:
                with walks.event():
                    await session.chat_completion(messages=_MESSAGES, max_tokens=8)

    _with_manager(folder, chat)
    walks._events.pop(0)  # the first request detects the features of the engine


def walk_proxy_chat(walks: Walks, folder: Path) -> None:
    """An agent's chat completion at the proxy."""
    from atroposlib.envs.server_handling.proxy.app import AgentProxy

    async def chat(manager: Any, tokenizer: Any) -> None:
        import aiohttp

        body = {"model": "policy", "messages": _MESSAGES, "max_tokens": 8}
        async with (
            AgentProxy(manager, tokenizer) as proxy,
            proxy.session() as agent,
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {agent.api_key}"}) as http,
        ):
            for _ in range(NUM_REPEATS + 1):
                with walks.event():
                    async with http.post(f"{agent.base_url}/chat/completions", json=body) as reply:
                        reply.raise_for_status()
                        await reply.read()

    _with_manager(folder, chat)
    walks._events.pop(0)


def walk_step(walks: Walks, folder: Path) -> None:
    """A batch of the service until the optimizer step with it is acknowledged."""
    from example_trainer.config import TrainingConfig
    from example_trainer.trainers import train
    from example_trainer.training import Trainer
    from trainer_parts.models import MODEL_SIZES, write_model

    write_model(folder / "model", MODEL_SIZES["tiny 1.5b"])
    run_step = Trainer._run_step

    def traced_step(trainer: Trainer) -> None:
        if trainer.steps_done == 0:  # the first step also logs the plan of the run
            run_step(trainer)
            return
        with walks.event():
            run_step(trainer)

    with run_api("--store", "memory") as service:
        config = TrainingConfig(
            model_name=str(folder / "model"),
            device="cpu",
            training_steps=NUM_REPEATS + 1,
            batch_size=4,
            gradient_accumulation_steps=2,
            seq_len=128,
            checkpoint_interval=0,
            weight_bridge_mode="off",
            save_path=str(folder / "checkpoints"),
            atropos_url=service.url,
            use_wandb=False,
            quiet=True,
        )
        poster = threading.Thread(target=_post_for, args=(service.port,), daemon=True)
        poster.start()
        Trainer._run_step = traced_step  # type: ignore[method-assign, assignment]
        try:
            train(config)
        finally:
            Trainer._run_step = run_step  # type: ignore[method-assign]


EVENTS: dict[str, tuple[Callable[[Walks, Path], None], int]] = {
    "POST /scored_data": (walk_post, 18),
    "GET /batch": (walk_batch, 16),
    "item -> posted": (walk_item, 18),
    "managed chat -> engine": (walk_managed_chat, 15),
    "proxy chat -> engine": (walk_proxy_chat, 16),
    "batch -> optimizer step": (walk_step, 17),
}
"""Function that performs each event, and its maximum number of files."""

_MESSAGES = [{"role": "user", "content": "w1 w2 w3"}]


def _requests() -> tuple[bytes, ...]:
    return post_requests(SHAPE, "json")[: NUM_REPEATS + 1]


@contextmanager
def _own_service(folder: Path) -> Iterator[Connection]:
    """Run the service in a thread of this process and register a trainer."""
    from atroposlib.api.settings import ApiSettings
    from atroposlib.cli.run_api import _server

    server = _server(
        ApiSettings(store="sqlite", data_dir=folder), "127.0.0.1", 0, is_announced=False
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    while not server.started:
        thread.join(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with Connection(port) as connection:
            register_trainer(connection, BATCH_SIZE)
            yield connection
    finally:
        server.should_exit = True
        thread.join()


def _with_manager(folder: Path, main: Callable[[Any, Any], Any]) -> None:
    """Run a coroutine function with the server manager of a mock engine and a tokenizer."""
    from atroposlib.envs.server_handling.config import APIServerConfig
    from atroposlib.envs.server_handling.server_manager import ServerManager

    tokenizer = load_tokenizer(folder / "tokenizer")

    async def run(engine_url: str) -> None:
        config = APIServerConfig(base_url=f"{engine_url}/v1", server_type="vllm", model_name="mock")
        manager = ServerManager([config])
        manager.servers[0].tokenizer = tokenizer
        try:
            await main(manager, tokenizer)
        finally:
            await manager.close()

    with mock_engine(prompt_tokens=8, output_tokens=8) as engine_url:
        asyncio.run(run(engine_url))


def _post_for(port: int) -> None:
    """Post groups that a small model can train on until the service ends."""
    group = {
        "tokens": [[2, 3, 4, 5 + number] for number in range(4)],
        "masks": [[IGNORE_INDEX, IGNORE_INDEX, 4, 5 + number] for number in range(4)],
        "scores": [0.0, 1.0, 0.0, 1.0],
        "inference_logprobs": [[MASKED_LOGPROB, MASKED_LOGPROB, -1.0, -2.0]] * 4,
    }
    request = request_bytes("POST", "/scored_data", json.dumps(group).encode())
    try:
        with Connection(port) as connection:
            while True:  # rejected until the trainer has registered
                connection.call(request)
                time.sleep(0.05)
    except OSError:
        return


def _files_of(name: str, *, is_alone: bool) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        if is_alone:
            logging.disable(logging.INFO)
            walks = Walks()
            walks.install()
            EVENTS[name][0](walks, Path(folder))
            return walks.files()
        # Each event runs in a new process, so that one does not change another, for example by
        # installing a filter of logs.
        result = Path(folder) / "files.json"
        command = [sys.executable, __file__, "--only", name, "--json", str(result)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        files: list[str] = json.loads(result.read_text(encoding="utf-8"))[name]
        return files


def main() -> None:
    """Perform the events, print a row for each, and exit with 1 if one exceeds its maximum."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(EVENTS), default=list(EVENTS))
    parser.add_argument("--files", action="store_true", help="list the files of each event")
    parser.add_argument("--json", type=Path, help="also write the lists to this file")
    arguments = parser.parse_args()
    found = {name: _files_of(name, is_alone=len(arguments.only) == 1) for name in arguments.only}
    console = Console()
    table = Table("event", "files", "at most")
    for name, files in found.items():
        table.add_row(name, str(len(files)), str(EVENTS[name][1]))
    console.print(table)
    if arguments.files:
        for name, files in found.items():
            console.print(f"\n{name}", *files, sep="\n  ", highlight=False)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sys.exit(any(len(files) > EVENTS[name][1] for name, files in found.items()))


if __name__ == "__main__":
    main()
