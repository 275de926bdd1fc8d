"""Servers of other libraries as processes, and environments of ours that use them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atroposlib.adapters.env import AdapterEnv, AdapterEnvConfig, environment_class
from atroposlib.envs import base
from atroposlib.envs.base import APIServerConfig
from example_trainer.processes import find_free_port
from tests.fakes import CharTokenizer, ScriptedEngine
from tests.first_hour.blocks import blocks_of

__all__ = [
    "ROOT",
    "Server",
    "at_engine",
    "roll_out",
    "run_command",
    "run_page",
    "spawn_process",
    "spawn_rollouts",
    "stand_in_tokenizers",
    "text_of",
]

START_S = 240.0
WAIT_S = 60.0
ROOT = Path(__file__).parents[2]


class Server:
    """A server process that can be killed and started again on its port.

    Args:
        module: module to run, such as `tests.adapters.serve_openenv`.
        port: a free port, its only argument.
        python: interpreter; None means the one that runs this.
    """

    def __init__(self, module: str, port: int, *, python: Path | None = None) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [str(python or sys.executable), "-m", module, str(port)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while self.sessions() is None:
            assert self._process.poll() is None, f"{self._command} ended"
            assert time.monotonic() < deadline, f"{self._command} does not answer"
            time.sleep(0.05)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Stop the process without closing its connections."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return json.load(response)

    def post(self, path: str) -> None:
        request = urllib.request.Request(self.url + path, method="POST")
        with urllib.request.urlopen(request, timeout=60):
            pass

    def sessions(self) -> int | None:
        """Return the server's number of sessions; None if it does not answer."""
        try:
            return int(self.get("/test/sessions"))
        except (OSError, urllib.error.URLError):
            return None

    async def wait_for_sessions(self, count: int, *, or_more: bool = False) -> None:
        deadline = time.monotonic() + WAIT_S
        while (found := await asyncio.to_thread(self.sessions)) != count:
            if or_more and found is not None and found > count:
                return
            assert time.monotonic() < deadline, f"{found} sessions, not {count}"
            await asyncio.sleep(0.05)

    @contextmanager
    def running(self) -> Iterator[Server]:
        self.start()
        try:
            yield self
        finally:
            self.kill()


class CharTokenizers:
    """Stands in for `AutoTokenizer`."""

    @staticmethod
    def from_pretrained(name: str) -> CharTokenizer:
        return CharTokenizer()


def stand_in_tokenizers(monkeypatch: Any) -> None:
    monkeypatch.setitem(vars(base), "AutoTokenizer", CharTokenizers)


def at_engine(
    spec: str, engine: ScriptedEngine, args: dict[str, Any] | None = None, **settings: Any
) -> AdapterEnv:
    """Build the environment of an adapter at an engine."""
    env_cls = environment_class(spec)
    chosen: dict[str, Any] = {
        **env_cls.default_settings,
        "use_wandb": False,
        "tokenizer_name": "characters",
        "group_size": 2,
        "max_token_length": 6000,
        "adapter_args": args or {},
        **settings,
    }
    server = APIServerConfig(
        model_name="m", base_url=engine.base_url, server_type="vllm", health_check=False
    )
    return env_cls(AdapterEnvConfig(**chosen), server)


async def roll_out(env: AdapterEnv, item: Any) -> Any:
    """Return the group of an item."""
    rollouts, _ = await env.collect_trajectories(item)
    return await env.postprocess_histories(rollouts)


def text_of(ids: Sequence[int]) -> str:
    return CharTokenizer().decode(ids)


def run_command(spec: str, command: str, *flags: str, folder: Path) -> Any:
    """Run `atropos-env SPEC COMMAND` and return the finished process, with its output as text."""
    words = [sys.executable, "-m", "atroposlib.cli.env", spec, command, *flags]
    return subprocess.run(
        words, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=300
    )


HOLD = """
import asyncio, json, sys
from atroposlib.adapters.registry import make_adapter

async def main():
    adapter = make_adapter(sys.argv[1], json.loads(sys.argv[2]), seed=1)
    await adapter.open()
    episodes = [adapter.start(await adapter.item(i)) for i in range(3)]
    await asyncio.gather(*(episode.begin() for episode in episodes))
    await asyncio.Event().wait()

asyncio.run(main())
"""


def spawn_rollouts(spec: str, args: dict[str, Any], folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that begins three episodes and waits."""
    words = [sys.executable, "-c", HOLD, spec, json.dumps(args)]
    return subprocess.Popen(words, cwd=folder, env=_environment())


def spawn_process(
    spec: str, args: dict[str, Any], engine: ScriptedEngine, model: Path, folder: Path
) -> subprocess.Popen[bytes]:
    """Start `atropos-env SPEC process` with more groups than a test waits for."""
    flags = {
        "openai.base_url": engine.base_url,
        "openai.model_name": model,
        "openai.server_type": "vllm",
        "env.tokenizer_name": model,
        "env.use_wandb": "false",
        "env.total_steps": 1000,
        "env.data_path_to_save_groups": folder / "groups.jsonl",
    }
    words = [sys.executable, "-m", "atroposlib.cli.env", spec, "process"]
    words += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    words += ["--args", *(f"{name}={json.dumps(value)}" for name, value in args.items())]
    return subprocess.Popen(words, cwd=folder, env=_environment())


SKIPPED = ("pip install", "python3.12 -m venv")
"""Starts of lines that install what the tests run in."""
SHIM = """#!/bin/sh
exec {python} -m {module} "$@"
"""


async def run_page(page: str, folder: Path, engine: ScriptedEngine, tokenizer: Path) -> str:
    """Run the blocks of a page of an adapter as one shell script, and return its output.

    Python blocks become the file that their first line names, JSON blocks `tasks.jsonl`. The
    server gets a free port, and the model is the scripted engine.
    """
    script = ["set -e", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    port = find_free_port()
    for block in blocks_of(page, (ROOT / page).read_text(encoding="utf-8")):
        if block.language == "python":
            (folder / block.first_line.removeprefix("# ")).write_text(block.text)
        elif block.language == "json":
            (folder / "tasks.jsonl").write_text(block.text)
        elif block.language == "bash":
            lines = block.text.splitlines(keepends=True)
            script.append("".join(line for line in lines if not line.startswith(SKIPPED)))
    (folder / "environments").symlink_to(ROOT / "environments")
    text = "\n".join(script).replace("8100", str(port)).replace("nemo/bin/", "")
    for model in ("Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-1.5B-Instruct"):
        text = text.replace(model, str(tokenizer))
    text = text.replace("http://localhost:9001/v1", engine.base_url)
    text = text.replace(" &\n", f" &\nuntil curl -s -o wait 127.0.0.1:{port}; do sleep 0.1; done\n")
    for name, module in (("atropos-env", "atroposlib.cli.env"), ("uvicorn", "uvicorn")):
        shim = folder / "bin" / name
        shim.parent.mkdir(exist_ok=True)
        shim.write_text(SHIM.format(python=sys.executable, module=module))
        shim.chmod(0o755)
    environment = _environment()
    folders = [str(folder / "bin"), str(Path(sys.executable).parent), environment["PATH"]]
    environment["PATH"] = os.pathsep.join(folders)  # commands of the page call `python`
    environment["PYTHONPATH"] += f"{os.pathsep}{folder}"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", text, cwd=folder, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await asyncio.wait_for(process.communicate(), 1000)
    shown = output.decode(errors="replace")
    assert process.returncode == 0, shown[-8000:]
    return shown


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
