"""The watcher against a service and engines that come and go."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from atroposlib.cli import inference_node_wandb_watcher as watcher

SERVICE = "http://api:8000"


class World:
    """Answers by URL; what is not there cannot be reached."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.logged: list[tuple[dict[str, float], int | None]] = []
        self.runs: list[dict[str, Any]] = []
        self.timeouts: set[float] = set()

    def get(self, url: str, *, timeout: float, trust_env: bool) -> httpx.Response:
        self.timeouts.add(timeout)
        if url not in self.answers:
            raise httpx.ConnectError("refused")
        answer = self.answers[url]
        content = answer if isinstance(answer, bytes) else None
        json = None if content is not None else answer
        return httpx.Response(200, content=content, json=json)

    def step(self, number: int) -> None:
        self.answers[f"{SERVICE}/status"] = {"current_step": number}


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    wandb = SimpleNamespace(
        init=lambda **kwargs: made.runs.append(kwargs),
        log=lambda values, step: made.logged.append((values, step)),
    )
    monkeypatch.setattr(httpx, "get", made.get)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return made


def names(node: int, *health: float) -> dict[str, float]:
    return {f"server/server_health_{node}_{i}": value for i, value in enumerate(health)}


def test_health_is_probed_before_the_first_log_and_logged_when_the_step_grew(world: World) -> None:
    watched = watcher.Watcher(f"{SERVICE}/", 4, 3)
    world.answers["http://localhost:9001/health_generate"] = {}
    world.step(0)
    assert not watched.log_once()

    world.step(2)
    assert watched.log_once()
    assert not watched.log_once()
    world.answers["http://localhost:9000/health_generate"] = {}
    world.step(5)
    assert watched.log_once()

    assert world.logged == [(names(3, 0.0, 1.0), 2), (names(3, 1.0, 1.0), 5)]
    assert world.timeouts == {10.0}


def test_outages_of_the_service_are_survived_and_said_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    watched = watcher.Watcher(SERVICE, 8, 0)
    assert not watched.log_once()
    world.answers[f"{SERVICE}/status"] = b"<html>not json"
    assert not watched.log_once()
    world.answers[f"{SERVICE}/status"] = [1]
    assert not watched.log_once()
    assert caplog.text.count("no valid response") == 1

    world.step(1)
    assert watched.log_once()

    assert world.logged == [(names(0, 0.0), 1)]


def test_run_is_named_after_the_node_once_the_trainer_registered(world: World) -> None:
    slept: list[float] = []

    class Stop(Exception):
        pass

    def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        if len(slept) == 1:
            world.answers[f"{SERVICE}/wandb_info"] = {"group": None, "project": None}
        if len(slept) == 2:
            world.answers[f"{SERVICE}/wandb_info"] = {"group": "g", "project": "p"}
            world.step(1)
        if len(slept) == 3:
            raise Stop

    with pytest.raises(Stop):
        watcher.Watcher(SERVICE, 8, 2, sleep=sleep).watch()

    assert slept == [1.0, 1.0, 60.0]
    assert world.runs == [{"project": "p", "group": "g", "name": "inf_node_2"}]
    assert world.logged == [(names(2, 0.0), 1)]


def test_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, int, int]] = []
    monkeypatch.setattr(watcher, "run", lambda *values: asked.append(values))
    monkeypatch.setattr(sys, "argv", ["w", "--api_addr", SERVICE, "--tp", "2", "--node_num", "1"])

    watcher.main()

    assert asked == [(SERVICE, 2, 1)]
    monkeypatch.setattr(sys, "argv", ["w", "--api_addr", SERVICE, "--tp", "0", "--node_num", "1"])
    with pytest.raises(SystemExit) as ended:
        watcher.main()
    assert ended.value.code == 2
    assert "expected 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["api:8000", "http://[::1", "http://api:port", "http://"])
def test_malformed_address_of_the_service_ends_with_2_and_one_line(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    words = ["watcher", "--api_addr", address, "--tp", "1", "--node_num", "0"]
    monkeypatch.setattr(sys, "argv", words)

    with pytest.raises(SystemExit) as ended:
        watcher.main()

    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert printed.count("\n") == 1
    assert "expected an address such as http://localhost:8000" in printed
