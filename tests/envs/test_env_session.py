"""How an environment's finished groups outlast outages and runs; the service is scripted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from atroposlib.envs import service_session as env_session
from atroposlib.envs.service_session import EnvSession
from atroposlib.errors import TrajectoryApiError
from tests.envs.live_service import until

AWAY = TrajectoryApiError("no answer")
SICK = TrajectoryApiError("boom", status=500)
UNKNOWN = TrajectoryApiError("register again", status=404)


class ScriptedClient:
    """Answers posts and status questions from lists; an empty list means all is well."""

    def __init__(self) -> None:
        self.post_errors: list[TrajectoryApiError] = []
        self.status_errors: list[TrajectoryApiError] = []
        self.posts: list[tuple[Any, str]] = []
        self.asked_ids: list[int] = []
        self.run_id: str | None = None
        self.num_outages = 0

    def _fail(self, errors: list[TrajectoryApiError]) -> None:
        if errors:
            error = errors.pop(0)
            self.num_outages += error.status is None
            raise error

    async def post_group(self, group: Any, *, key: str) -> None:
        self.posts.append((group, key))
        self._fail(self.post_errors)

    async def post_groups(self, groups: Any, *, key: str) -> None:
        await self.post_group(groups, key=key)

    async def status_env(self, env_id: int) -> dict[str, Any]:
        self.asked_ids.append(env_id)
        self._fail(self.status_errors)
        return {} if self.run_id is None else {"run_id": self.run_id}


def joined_session(client: ScriptedClient, env_id: int = 4) -> EnvSession:
    session = EnvSession(client, retry_s=0.001)  # type: ignore[arg-type]
    session.enter(env_id)
    return session


async def test_send_repeats_under_one_key_and_a_new_group_gets_a_new_one() -> None:
    client = ScriptedClient()
    client.post_errors = [AWAY, AWAY]
    session = joined_session(client)

    await session.send({"scores": [1.0]})
    await session.send([{"scores": [2.0]}, {"scores": [3.0]}])

    keys = [key for _, key in client.posts]
    assert keys[0] == keys[1] == keys[2] != keys[3]
    assert client.posts[3][0] == [
        {"scores": [2.0], "env_id": 4},
        {"scores": [3.0], "env_id": 4},
    ]
    assert session.num_groups_sent == 3


async def test_send_without_any_registration_is_not_held_back() -> None:
    client = ScriptedClient()
    session = EnvSession(client, retry_s=0.001)  # type: ignore[arg-type]

    await asyncio.wait_for(session.send({"scores": [1.0]}), timeout=60)

    assert [group for group, _ in client.posts] == [{"scores": [1.0], "env_id": None}]


async def test_send_asks_for_its_registration_after_an_outage_only() -> None:
    client = ScriptedClient()
    client.post_errors = [AWAY]
    session = joined_session(client)

    await session.send({})
    await session.send({})

    assert client.asked_ids == [4]


async def test_send_asks_for_its_registration_after_an_outage_that_others_met() -> None:
    client = ScriptedClient()
    session = joined_session(client)
    client.num_outages += 1  # of a status question, say
    client.status_errors = [UNKNOWN]

    sending = asyncio.create_task(session.send({}))
    await until(lambda: not session.is_registered)
    session.enter(0)
    await sending

    assert [group["env_id"] for group, _ in client.posts] == [0]


async def test_send_waits_for_a_new_registration_when_the_service_came_back_empty() -> None:
    client = ScriptedClient()
    client.post_errors = [AWAY]
    client.status_errors = [AWAY, UNKNOWN]
    session = joined_session(client)

    sending = asyncio.create_task(session.send({}))
    await until(lambda: not session.is_registered)
    assert not sending.done()
    session.enter(0)
    await sending

    assert [group["env_id"] for group, _ in client.posts] == [4, 0]


async def test_status_of_an_id_that_is_somebodys_in_a_new_run_is_unknown() -> None:
    client = ScriptedClient()
    session = joined_session(client)
    client.run_id = "second"
    assert await session.status(4) == {"run_id": "second"}  # the service did not say at first

    session.enter(4, run_id="first")
    with pytest.raises(TrajectoryApiError, match="of another run") as caught:
        await session.status(4)
    session.enter(4, run_id="second")

    assert caught.value.status == 404
    assert await session.status(4) == {"run_id": "second"}


async def test_send_that_hears_late_of_the_old_id_keeps_the_new_registration() -> None:
    client = ScriptedClient()
    session = joined_session(client)
    client.num_outages += 1

    async def answer_late(env_id: int) -> dict[str, Any]:
        session.enter(0)
        raise UNKNOWN

    client.status_env = answer_late  # type: ignore[method-assign]
    await asyncio.wait_for(session.send({}), 60)

    assert [group["env_id"] for group, _ in client.posts] == [0]


async def test_send_gives_up_on_a_group_that_breaks_the_service() -> None:
    client = ScriptedClient()
    client.post_errors = [SICK] * 3
    session = joined_session(client)

    with pytest.raises(TrajectoryApiError, match="boom"):
        await session.send({})

    assert len(client.posts) == 3
    assert session.num_groups_sent == 0


async def test_wait_for_a_service_that_is_down_is_told_twice_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    session = EnvSession(ScriptedClient(), retry_s=0.0, clock=lambda: now)  # type: ignore[arg-type]

    async def answer_after_100_s() -> bool | None:
        nonlocal now
        now += 1.0
        if now <= 100.0:
            raise AWAY
        return True

    await session.ask(answer_after_100_s, waiting_for="it")

    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    what = "the trajectory service is not available (no answer); waiting for it"
    assert told == [what, *(f"{what}, for {seconds} s so far" for seconds in (30, 60, 90))]


async def test_wait_for_a_trainer_is_told_once_and_the_next_outage_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    answers: list[Any] = [AWAY, *[None] * 100, True, AWAY, True]
    session = EnvSession(ScriptedClient(), retry_s=0.0, clock=lambda: now)  # type: ignore[arg-type]

    async def answer() -> bool | None:
        nonlocal now
        now += 1.0
        given = answers.pop(0)
        if isinstance(given, TrajectoryApiError):
            raise given
        return given  # type: ignore[no-any-return]

    await session.ask(answer, waiting_for="the trainer")
    await session.ask(answer, waiting_for="the trainer")

    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    away = "the trajectory service is not available (no answer); waiting for it"
    assert told == [away, "waiting for the trainer", away]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of seconds of each pause; pauses end at once."""
    noted: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        noted.append(seconds)
        await sleep(0)

    monkeypatch.setattr(env_session.asyncio, "sleep", note)
    return noted


async def test_service_cannot_ask_for_a_pause_without_end(pauses: list[float]) -> None:
    client = ScriptedClient()
    client.post_errors = [
        TrajectoryApiError("full", status=503, retry_after_s=seconds)
        for seconds in (1e9, float("inf"))
    ]
    session = joined_session(client)

    await session.send({})

    assert len(pauses) == 2
    assert max(pauses) <= 1.25 * env_session.LONGEST_RETRY_AFTER_S


async def test_send_backs_off_up_to_a_limit(pauses: list[float]) -> None:
    client = ScriptedClient()
    client.post_errors = [AWAY] * 6 + [TrajectoryApiError("full", status=503, retry_after_s=30.0)]
    session = EnvSession(client, retry_s=1.0)  # type: ignore[arg-type]
    session.enter(4)

    await session.send({})

    # 1, 2, 4, 8, 10, 10 and what the service asks for, each up to a quarter longer.
    for pause, least in zip(pauses, [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 30.0], strict=True):
        assert least <= pause <= 1.25 * least
