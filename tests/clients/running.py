"""Runs a client in front of the proxy: its answers, and what was recorded."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.managed_server import SequenceNode
from atroposlib.envs.server_handling.proxy.app import AgentProxy
from atroposlib.envs.server_handling.server_manager import ServerManager
from tests.clients.engine import PolicyEngine
from tests.clients.installing import node_folder, node_program, python_of
from tests.clients.registry import ENVIRONMENTS, Client
from tests.templates.make_tokenizers import FAMILIES

__all__ = ["Outcome", "installed_command", "run_client"]

PROGRAMS = Path(__file__).parent / "programs"
RUN_TIMEOUT_S = 600.0
_KEPT = ("PATH", "LANG", "LC_ALL", "SSL_CERT_FILE", "TMPDIR")
"""Variables that programs inherit; keys of real providers are none of them."""


@dataclass(frozen=True)
class Outcome:
    """What a client left behind."""

    exit_code: int
    output: str
    """The end of what it printed, both streams."""
    engine: PolicyEngine
    nodes: list[SequenceNode]
    sessions: dict[str, list[SequenceNode]]
    """Sequences of the requests that named a session, by its id."""


def installed_command(client: Client, *, limit_s: float) -> list[str]:
    """Return the command of a client, whose environment is made if missing.

    `{openai_base_url}` stays in it: every run has its own.

    Raises:
        NotInstallableError: it cannot be made.
    """
    words = {"programs": str(PROGRAMS), "openai_base_url": "{openai_base_url}"}
    if ENVIRONMENTS[client.environment].is_node:
        folder = node_folder(client.environment, limit_s=limit_s)
        node = node_program(limit_s=limit_s)
        words |= {"modules": str(folder), "node": str(node)}
        words["path"] = os.pathsep.join(map(str, (folder / "node_modules/.bin", node.parent)))
        for program in PROGRAMS.glob("*.mjs"):  # modules are looked up beside the importing file
            shutil.copy(program, folder)
    else:
        words["bin"] = str(python_of(client.environment, limit_s=limit_s).parent)
    return [part.format(**words) for part in client.command]


async def run_client(client: Client, command: Sequence[str], family: str, folder: Path) -> Outcome:
    """Run a client in a folder, with a policy of a model family."""
    for name, text in client.files.items():
        folder.joinpath(name).write_text(text, "utf-8")
    engine = PolicyEngine(family, client.turns)
    async with engine:
        config = APIServerConfig(
            base_url=engine.base_url, server_type="vllm", model_name="policy", timeout=60
        )
        manager = ServerManager([config])
        manager.servers[0].tokenizer = engine.tokenizer
        try:
            async with (
                AgentProxy(manager, engine.tokenizer) as proxy,
                proxy.session(tool_parser=FAMILIES[family].tool_parser) as agent,
            ):
                variables = {**agent.environment, **client.variables}
                parts = [part.replace("{openai_base_url}", agent.base_url) for part in command]
                exit_code, output = await _run(parts, variables, folder)
                sessions = {name: agent.nodes(name) for name in agent.session_ids}
                return Outcome(exit_code, output, engine, agent.nodes(), sessions)
        finally:
            await manager.close()


async def _run(
    command: Sequence[str], variables: Mapping[str, str], folder: Path
) -> tuple[int, str]:
    inherited = {name: os.environ[name] for name in _KEPT if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**inherited, "HOME": str(folder), **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), RUN_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        output, _ = await process.communicate()
        return -1, f"took more than {RUN_TIMEOUT_S:g} s\n{output.decode(errors='replace')[-6000:]}"
    return process.returncode or 0, output.decode(errors="replace")[-6000:]
