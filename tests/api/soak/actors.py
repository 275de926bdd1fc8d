"""Environments and trainers that go on whatever happens to the service; one thread each."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import httpx

from atroposlib.wire import MEDIA_TYPES, WireFormat, decode_batch, encode_group
from tests.api.soak.ledger import Ledger

__all__ = [
    "Actor",
    "Environment",
    "Trainer",
    "held_groups",
    "numbered_group",
    "register_trainer",
]

_RETRY_S = 0.05


class Actor(threading.Thread):
    """A loop of steps until it is told to stop; an unexpected error is kept, and ends it."""

    def __init__(self, urls: Sequence[str], *, seed: int) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self._urls = urls
        self._rng = random.Random(seed)
        self._stopping = threading.Event()
        self._client = httpx.Client(timeout=10)

    def run(self) -> None:
        """Step until stopped."""
        try:
            while not self._stopping.is_set():
                self.step()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            self.error = error
        finally:
            self._client.close()

    def stop(self) -> None:
        """End after the step that is under way."""
        self._stopping.set()

    def step(self) -> None:
        """Do one thing."""
        raise NotImplementedError

    def ask(self, method: str, path: str, **request: Any) -> httpx.Response | None:
        """Send a request to any replica; None when it was not reached or is busy."""
        try:
            answer = self._client.request(method, self._rng.choice(self._urls) + path, **request)
        except httpx.TransportError:
            self._stopping.wait(_RETRY_S)
            return None
        if answer.status_code == 503:
            self._stopping.wait(_RETRY_S)
            return None
        return answer


def numbered_group(number: int, *, size: int, length: int, env_id: int | None) -> dict[str, Any]:
    """Make a group that can be recognised when it comes out."""
    row = [number % 50_000] * length
    scores = [float(number)] + [0.5] * (size - 1)
    return {"tokens": [row] * size, "masks": [row] * size, "scores": scores, "env_id": env_id}


class Environment(Actor):
    """Posts numbered groups; repeats each under its key until the service says it has it."""

    def __init__(
        self,
        urls: Sequence[str],
        ledger: Ledger,
        *,
        seed: int,
        env_id: int | None = None,
        sizes: Sequence[int] = (4,),
        pause_s: float = 0.0,
    ) -> None:
        super().__init__(urls, seed=seed)
        self._ledger = ledger
        self._env_id = env_id
        self._sizes = sizes
        self._pause_s = pause_s

    def step(self) -> None:
        """Post one group, in either format."""
        number = self._ledger.new_number()
        wire_format: WireFormat = self._rng.choice(("json", "msgpack"))
        group = numbered_group(
            number,
            size=self._rng.choice(self._sizes),
            length=self._rng.randint(1, 200),
            env_id=self._env_id,
        )
        headers = {"Content-Type": MEDIA_TYPES[wire_format], "Idempotency-Key": uuid4().hex}
        content = encode_group(group, wire_format)
        while True:
            # Also after `stop`: a group that was sent must be known to have arrived.
            answer = self.ask("POST", "/scored_data", content=content, headers=headers)
            if answer is not None:
                break
        if answer.status_code == 200:
            self._ledger.acknowledge(number)
        elif answer.status_code in (413, 422):
            self._ledger.refuse(number)
        else:
            raise AssertionError(f"POST /scored_data: {answer.status_code} {answer.text[:300]}")
        self._stopping.wait(self._pause_s)


class Trainer(Actor):
    """Takes batches in either format; with leases it acknowledges most and gives some back."""

    def __init__(
        self,
        urls: Sequence[str],
        ledger: Ledger,
        *,
        seed: int,
        lease_s: float | None = None,
        check: Callable[[list[dict[str, Any]]], None] = lambda _: None,
    ) -> None:
        super().__init__(urls, seed=seed)
        self._ledger = ledger
        self._lease_s = lease_s
        self._check = check

    def step(self) -> None:
        """Take one batch, if there is one within a moment."""
        wire_format: WireFormat = self._rng.choice(("json", "msgpack"))
        query: dict[str, float] = {"wait": 0.5}
        if self._lease_s is not None:
            query["lease"] = self._lease_s
        headers = {"Accept": MEDIA_TYPES[wire_format], "Accept-Encoding": "identity"}
        answer = self.ask("GET", "/batch", params=query, headers=headers)
        if answer is None:
            return
        assert answer.status_code == 200, f"GET /batch: {answer.status_code} {answer.text[:300]}"
        got = decode_batch(answer.content, wire_format)
        if got["batch"] is None:
            return
        self._check(got["batch"])
        numbers = [int(group["scores"][0]) for group in got["batch"]]
        if self._lease_s is None or self._is_settled(got["batch_id"]):
            self._ledger.deliver(
                numbers, str(answer.url.copy_with(path="/", query=None)).rstrip("/")
            )

    def _is_settled(self, batch_id: str) -> bool:
        """Acknowledge a leased batch, or give one in five back; whether it counts as delivered."""
        verb = "nack" if self._rng.random() < 0.2 else "ack"
        while (answer := self.ask("POST", f"/batch/{batch_id}/{verb}")) is None:
            pass
        if verb == "nack":
            return False
        assert answer.status_code in (200, 404, 409), f"ack: {answer.status_code} {answer.text}"
        return answer.status_code == 200


def register_trainer(url: str, *, batch_size: int, num_envs: int = 0, **env: Any) -> list[int]:
    """Start a run on a fresh service and register environments; return their ids."""
    registration = {
        "wandb_group": "soak",
        "wandb_project": "soak",
        "batch_size": batch_size,
        "max_token_len": 1000,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 1_000_000,
    }
    with httpx.Client(base_url=url, timeout=10) as client:
        client.post("/register", json=registration).raise_for_status()
        client.get("/batch").raise_for_status()
        ids = []
        for number in range(num_envs):
            request = {"max_token_length": 1000, "desired_name": "soak", "weight": 1.0, **env}
            request = {k: v(number) if callable(v) else v for k, v in request.items()}
            answer = client.post("/register-env", json=request)
            ids.append(int(answer.raise_for_status().json()["env_id"]))
    return ids


def held_groups(url: str, *states: str) -> int:
    """Count the groups that a service holds in some states, e.g. `queued` or `in_flight`."""
    total = 0
    for state in states:
        offset: int | None = 0
        while offset is not None:
            query = {"state": state, "limit": 1000, "offset": offset}
            page = httpx.get(url + "/groups", params=query, timeout=10).json()
            total += len(page["groups"])
            offset = page.get("next_offset")
    return total
