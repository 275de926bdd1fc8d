"""Our environments for verifiers and prime-rl: a package that asks a server of ours.

    vf-eval, prime-rl ─► package: taskset, env ─► POST /v1/episodes               ─► opening
                                                  POST /v1/episodes/{id}/turns ─► reward, messages

prime-rl loads environments as installed packages, in processes of its own. The package needs only
verifiers, so the environment keeps its dependencies, data and sandboxes here. An episode ends with
the request that started it, whose response is kept open: a client that is killed leaves none.

Verifiers runs tools as MCP servers of their own, which cannot reach a conversation. Calls of our
tools therefore remain part of the texts, as in our own training.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from atroposlib.errors import ConfigError
from atroposlib.serving.sessions import (
    TRAIN,
    EpisodeHost,
    PlayedTurn,
    RefusedRequestError,
    ServedEpisode,
    explain_invalid_requests,
)

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

__all__ = ["create_episode_app", "write_package"]

KEEP_ALIVE_S = 15.0
"""Seconds between the empty lines that keep a response open."""
VERSIONS = ">=0.4,<0.5"
"""Versions of verifiers that the package supports."""


class EpisodeRequest(BaseModel):
    """The item of an episode: an index, or the item of a seed."""

    model_config = ConfigDict(extra="forbid")

    split: str = Field(TRAIN, max_length=100)
    index: int | None = None
    seed: int | None = None


class WrittenTurn(BaseModel):
    """One turn of the policy."""

    model_config = ConfigDict(extra="forbid")

    text: str
    is_truncated: bool = False
    """Whether a limit of the client ended the turn; the episode then ends."""


class EpisodeResponse(Response):
    """One line with the opening; the response ends with the episode, and the episode with it."""

    def __init__(self, episode: ServedEpisode, *, max_turns: int) -> None:
        super().__init__(media_type="application/x-ndjson")
        del self.headers["content-length"]
        self._episode = episode
        self._opening = {
            "id": episode.id,
            "index": episode.index,
            "max_turns": max_turns,
            "messages": [dict(message) for message in episode.messages],
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        over = asyncio.create_task(self._episode.ended.wait())
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            line = json.dumps(self._opening, default=str) + "\n"
            while True:
                part = {"type": "http.response.body", "body": line.encode(), "more_body": True}
                await send(part)
                done, _ = await asyncio.wait(
                    {over, gone}, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    break
                line = "\n"
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            over.cancel()
            gone.cancel()
            await asyncio.shield(self._episode.close())


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def create_episode_app(host: EpisodeHost) -> FastAPI:
    """Return the application that the package asks."""
    app = FastAPI(title="Episodes of an environment", docs_url=None, redoc_url=None)
    explain_invalid_requests(app)

    @app.get("/health")
    async def health() -> dict[Literal["status"], str]:
        return {"status": "ok"}

    @app.get("/v1/environment")
    async def environment() -> dict[str, Any]:
        return {
            "name": host.name,
            "description": host.description,
            "max_turns": host.max_turns,
            "splits": {split: host.num_tasks(split) for split in host.splits()},
        }

    @app.post("/v1/episodes")
    async def start(request: EpisodeRequest) -> Response:
        episode = await host.start(request.split, request.index, request.seed)
        return EpisodeResponse(episode, max_turns=host.max_turns)

    @app.post("/v1/episodes/{episode_id}/turns")
    async def write(episode_id: str, turn: WrittenTurn) -> dict[str, Any]:
        episode = host.find(episode_id)
        return _as_json(await episode.write(turn.text, is_truncated=turn.is_truncated))

    @app.delete("/v1/episodes/{episode_id}")
    async def close(episode_id: str) -> dict[str, Any]:
        await host.find(episode_id).close()
        return {"closed": episode_id}

    @app.exception_handler(RefusedRequestError)
    async def refuse(request: Request, error: RefusedRequestError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, error.status)

    return app


def _as_json(played: PlayedTurn) -> dict[str, Any]:
    return {
        "messages": [dict(message) for message in played.messages],
        "history": None if played.history is None else [dict(m) for m in played.history],
        "reward": played.reward,
        "reward_parts": played.reward_parts,
        "is_done": played.is_done,
        "outcome": played.outcome,
    }


PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "@NAME@"
version = "0.1.0"
description = "The environment @ENVIRONMENT@ of Atropos, for verifiers"
requires-python = ">=3.11"
dependencies = ["httpx>=0.27", "verifiers@VERSIONS@"]

[tool.hatch.build.targets.wheel]
only-include = ["@NAME@.py"]
"""

MODULE = '''\
"""The environment @ENVIRONMENT@ of Atropos: `vf-eval @NAME@`.

Written by atropos-serve-env. The environment runs in that process; this package asks it for the
opening of each task, sends it the turns of the model and records its rewards.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf

__all__ = ["AtroposEnv", "AtroposTaskset"]


class AtroposTasksetConfig(vf.TasksetConfig):
    url: str = @URL@
    """Address of atropos-serve-env."""
    split: str = "train"
    """`train` or `test`."""
    token_var: str = "ATROPOS_ENV_TOKEN"
    """Environment variable with the token, if the server requires one."""
    timeout_s: float = 120.0
    """Time limit of one answer of the server."""


class AtroposData(vf.TaskData):
    url: str
    split: str
    item: int
    token_var: str
    timeout_s: float


class AtroposTask(vf.Task[AtroposData]):
    pass


def connect(config: Any) -> dict[str, Any]:
    """Return the arguments of an HTTP client of the server."""
    token = os.environ.get(config.token_var, "")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return {"base_url": config.url, "headers": headers, "timeout": config.timeout_s}


def check(response: httpx.Response) -> None:
    """Raise an error with the reason of the server, if it refused a request."""
    if response.status_code != 200:
        raise RuntimeError(f"{response.url} answered {response.status_code}: {response.text[:500]}")


class AtroposTaskset(vf.Taskset[AtroposTask, AtroposTasksetConfig]):
    def load(self) -> Iterator[AtroposTask]:
        config = self.config
        with httpx.Client(**connect(config)) as client:
            response = client.get("/v1/environment")
        check(response)
        splits = response.json()["splits"]
        if config.split not in splits:
            raise ValueError(f"split {config.split!r}: expected one of {', '.join(splits)}")
        fields = {"url": config.url, "token_var": config.token_var, "timeout_s": config.timeout_s}
        for item in range(splits[config.split]):
            name = f"@NAME@/{config.split}/{item}"
            data = AtroposData(name=name, prompt=None, split=config.split, item=item, **fields)
            yield AtroposTask(data, config.task)


class AtroposEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime=vf.SubprocessConfig())


class AtroposEnv(vf.Env[AtroposEnvConfig]):
    async def run(self, task, agents):
        data = task.data
        async with httpx.AsyncClient(**connect(data)) as client:
            wanted = {"split": data.split, "index": data.item}
            open_end = httpx.Timeout(data.timeout_s, read=None)
            # The server closes the episode when this response is closed.
            async with client.stream("POST", "/v1/episodes", json=wanted, timeout=open_end) as held:
                if held.status_code != 200:
                    await held.aread()
                check(held)
                lines = held.aiter_lines()  # collecting it would close the response
                opening = json.loads(await anext(lines))
                await self.play(client, opening, task, agents)

    async def play(self, client, opening, task, agents):
        messages = opening["messages"]
        system = "\\n\\n".join(m["content"] for m in messages if m["role"] == "system")
        if system:
            task = task.with_system_prompt(system)
        total, parts = 0.0, {}
        answer = {"messages": [m for m in messages if m["role"] != "system"], "is_done": False}
        async with agents.player.interaction(task) as interaction:
            while not answer["is_done"]:
                segment = await interaction.turn(answer["messages"])
                if segment.terminated and interaction.trace.errors:
                    return  # verifiers records the failure; there is nothing to score
                turn = {"text": segment.last_reply, "is_truncated": segment.terminated}
                response = await client.post(f"/v1/episodes/{opening['id']}/turns", json=turn)
                check(response)
                answer = response.json()
                if answer["history"] is not None:
                    raise RuntimeError("the environment replaces its chat; verifiers cannot")
                total += answer["reward"]
                for name, value in answer["reward_parts"].items():
                    parts[name] = parts.get(name, 0.0) + value
        interaction.trace.record_reward("atropos_return", total)
        for name, value in parts.items():
            interaction.trace.record_metric(name, value)
        interaction.trace.info["outcome"] = answer["outcome"]
'''


def write_package(folder: Path, host: EpisodeHost, url: str) -> str:
    """Write the package of a served environment and return its name.

    Args:
        folder: folder of the package; made if missing. Files of an earlier package are replaced.
        host: the environment.
        url: address of the server, which is the default of the setting `url`.

    Raises:
        ConfigError: the folder cannot be written to, or has other files.
    """
    name = "atropos_" + re.sub(r"\W+", "_", host.name).strip("_").lower()
    values: Mapping[str, str] = {
        "NAME": name,
        "ENVIRONMENT": re.sub(r"[^\w.:-]", "_", host.name),
        "URL": json.dumps(url),
        "VERSIONS": VERSIONS,
    }
    files = {"pyproject.toml": PROJECT, f"{name}.py": MODULE}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = sorted(p.name for p in folder.glob("*.py") if p.name not in files)
        if others:
            raise ConfigError(f"--package {folder}: it has {others[0]}; choose an empty folder")
        for file, template in files.items():
            text = re.sub(r"@([A-Z]+)@", lambda found: values[found[1]], template)
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--package {folder}: cannot be written: {error.strerror}") from error
    return name
