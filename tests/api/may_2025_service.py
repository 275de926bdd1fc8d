"""A service that knows the surface of May 2025 and nothing newer: seven fields, no compression."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

FIELDS = ("tokens", "masks", "scores", "ref_logprobs", "overrides", "group_overrides", "images")


class May2025Service:
    """The run of such a service; call it with every request.

    Attributes:
        queue: groups that no batch has taken.
        refused: path and status of every request it did not understand.
        keys: `Idempotency-Key` of every group taken, which it knows nothing about.
    """

    def __init__(self) -> None:
        self.registration: dict[str, Any] | None = None
        self.queue: list[dict[str, Any]] = []
        self.num_envs = 0
        self.step = 0
        self.is_started = False
        self.refused: list[tuple[str, int]] = []
        self.keys: list[str | None] = []

    async def __call__(self, request: web.Request) -> web.Response:
        answer = await self._answer(request)
        if answer.status != 200:
            self.refused.append((request.path, answer.status))
        return answer

    async def _answer(self, request: web.Request) -> web.Response:
        handle = {
            ("POST", "/register"): self._register,
            ("POST", "/register-env"): self._register_env,
            ("POST", "/disconnect-env"): self._disconnect_env,
            ("GET", "/info"): self._info,
            ("GET", "/wandb_info"): self._wandb_info,
            ("GET", "/status"): self._status,
            ("GET", "/status-env"): self._status_env,
            ("GET", "/batch"): self._batch,
            ("POST", "/scored_data"): self._scored_data,
            ("POST", "/scored_data_list"): self._scored_data,
        }.get((request.method, request.path))
        if handle is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.read()
        if body and request.content_type != "application/json":
            return web.json_response({"detail": [{"msg": "not a dictionary"}]}, status=422)
        try:
            content = json.loads(body) if body else None
        except UnicodeDecodeError:  # a gzip upload
            return web.json_response({"detail": "There was an error parsing the body"}, status=400)
        if request.path.startswith("/scored_data"):
            self.keys.append(request.headers.get("Idempotency-Key"))
        try:
            return web.json_response(handle(content))
        except Exception:  # noqa: BLE001 - any fault of such a service is a 500
            return web.Response(status=500, text="Internal Server Error")

    def _register(self, registration: dict[str, Any]) -> dict[str, Any]:
        self.registration = self.registration or registration
        return {"uuid": 2**100}

    def _register_env(self, request: dict[str, Any]) -> dict[str, Any]:
        if not self.is_started or self.registration is None:
            return {"status": "wait for trainer to start"}
        self.num_envs += 1
        return {
            "status": "success",
            "env_id": self.num_envs - 1,
            "wandb_name": f"{request['desired_name']}_0",
            "checkpoint_dir": self.registration["checkpoint_dir"],
            "starting_step": self.step,
            "checkpoint_interval": self.registration["save_checkpoint_interval"],
            "num_steps": self.registration["num_steps"],
        }

    def _disconnect_env(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"status": "success"}

    def _info(self, _: None) -> dict[str, Any]:
        known = self.registration or {"batch_size": -1, "max_token_len": -1}
        return {name: known[name] for name in ("batch_size", "max_token_len")}

    def _wandb_info(self, _: None) -> dict[str, Any]:
        known = self.registration or {}
        return {"group": known.get("wandb_group"), "project": known.get("wandb_project")}

    def _status(self, _: None) -> dict[str, Any]:
        return {"current_step": self.step, "queue_size": len(self.queue)}

    def _status_env(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["env_id"] >= self.num_envs:
            raise IndexError
        return {**self._status(None), "env_weight": 1.0}

    def _batch(self, _: None) -> dict[str, Any]:
        if self.registration is None:
            raise AttributeError
        self.is_started = True
        size = 0
        for position, group in enumerate(self.queue):
            size += len(group["tokens"])
            if size == self.registration["batch_size"]:
                batch = self.queue[: position + 1]
                del self.queue[: position + 1]
                self.step += 1
                return {"batch": batch}
        return {"batch": None}

    def _scored_data(self, content: Any) -> dict[str, Any]:
        groups = content if isinstance(content, list) else [content]
        self.queue += [{name: group.get(name) for name in FIELDS} for group in groups]
        return {"status": "received", "groups_processed": len(groups)}
