"""A service under test: in process, or on a port of this machine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from fastapi.testclient import TestClient
from httpx import Response
from starlette.types import ASGIApp

from atroposlib.api.auth import Role
from atroposlib.api.responses import ObservedHttpProtocol
from atroposlib.api.server import create_app
from atroposlib.api.settings import ApiSettings
from atroposlib.api.store.open import fresh_run_name

TOKENS = {role: f"token-for-tests-of-{role.value}" for role in Role}

REGISTRATION: dict[str, Any] = {
    "wandb_group": "test",
    "wandb_project": "test",
    "batch_size": 32,
    "max_token_len": 512,
    "checkpoint_dir": "/tmp/test",
    "save_checkpoint_interval": 100,
    "starting_step": 0,
    "num_steps": 1000,
}

GROUP_KEYS = {
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "messages",
    "generation_params",
    "inference_logprobs",
    "overrides",
    "group_overrides",
    "images",
    "env_id",
    "distill_token_ids",
    "distill_logprobs",
}


def make_group(size: int, *, length: int = 1, score: float = 0.0, **extra: Any) -> dict[str, Any]:
    """Return a group of `size` equal trajectories of `length` tokens."""
    row = list(range(length))
    return {"tokens": [row] * size, "masks": [row] * size, "scores": [score] * size, **extra}


class StoreOfServices(ExitStack):
    """The store that services under test are given, each with a run of its own.

    A run outside memory needs one event loop for all requests; those of its service are served in
    one from the start to the end of the test.
    """

    def __init__(self, url: str, data_dir: Path) -> None:
        super().__init__()
        self._choice = {"store": url, "data_dir": data_dir}

    def settle(self, settings: ApiSettings) -> ApiSettings:
        """Return the same settings with a run in this store."""
        return settings.model_copy(update={**self._choice, "run_name": fresh_run_name()})


class Service(TestClient):
    """A service of its own, in process, with the calls that tests make most."""

    home: ClassVar[StoreOfServices | None] = None
    """Where runs live; None: in memory."""

    def __init__(self, settings: ApiSettings | None = None) -> None:
        settings = settings or ApiSettings()
        if self.home is not None:
            settings = self.home.settle(settings)
        super().__init__(create_app(settings), raise_server_exceptions=False)
        if self.home is not None:
            self.home.enter_context(self)

    def register(self, **changes: Any) -> Response:
        return self.post("/register", json={**REGISTRATION, **changes})

    def start(self, **changes: Any) -> None:
        """Register a trainer that has asked for its first batch."""
        assert self.register(**changes).status_code == 200
        assert self.get("/batch").json() == {"batch": None}

    def register_env(self, **changes: Any) -> dict[str, Any]:
        request = {"max_token_length": 1000, "desired_name": "env", "weight": 1.0, **changes}
        return self.post("/register-env", json=request).json()

    def push(self, *sizes: int, env_id: int | None = None) -> list[dict[str, Any]]:
        """Post one group per size, scored by position; return the answers."""
        groups = [make_group(n, score=i, env_id=env_id) for i, n in enumerate(sizes)]
        return [self.post("/scored_data", json=group).json() for group in groups]

    def take(self) -> list[float] | None:
        """Fetch a batch; return the score of each of its groups, None when there is no batch."""
        batch = self.get("/batch").json()["batch"]
        return None if batch is None else [group["scores"][0] for group in batch]

    def status(self) -> dict[str, Any]:
        """Ask for the status; the name of the run, which differs from test to test, is left out."""
        answer = self.get("/status").json()
        answer.pop("run", None)
        return answer

    def status_env(self, env_id: Any) -> Response:
        return self.request("GET", "/status-env", json={"env_id": env_id})


@contextmanager
def serve(app: ASGIApp, port: int) -> Iterator[str]:
    """Serve an application from a thread; yields its address.

    The port is another one if a parallel test has taken `port` meanwhile.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError:
        listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, http=ObservedHttpProtocol))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < deadline, "the service did not start"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()
