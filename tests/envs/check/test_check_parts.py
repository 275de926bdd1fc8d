"""The smaller parts of the check: roles, items, the network, leftovers."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.checks import runner, watchers
from atroposlib.envs.checks.harness import _report_determinism, finding_on_error
from atroposlib.envs.checks.report import Findings
from atroposlib.envs.checks.runner import (
    DryRun,
    Stage,
    StepTimeoutError,
    changed_path,
    check_cancel,
    data_of,
    gold_answer,
    limited_here,
    within_limit,
)
from atroposlib.envs.checks.scripted_model import (
    GARBAGE,
    CharTokenizer,
    RoleBook,
    ScriptedModel,
    ScriptedSample,
    make_script,
)
from atroposlib.envs.checks.watchers import (
    NetworkBlockedError,
    Running,
    block_network,
    end_default_executor,
    end_leftover_tasks,
    wait_for_end,
)


def test_role_book_gives_each_rollout_its_role_and_keeps_it_over_turns() -> None:
    book = RoleBook(make_script(["one", "two"]))

    first = [book.replies("Q", 1)[0] for _ in range(4)]
    second = [book.replies(f"Q{reply.text} more", 1)[0] for reply in first]

    assert [reply.text for reply in first] == ["one", "", GARBAGE, "o"]
    assert [reply.role for reply in second] == [reply.role for reply in first]
    assert second[0].text == "two"


def test_role_book_several_completions_of_one_request_have_different_roles() -> None:
    replies = RoleBook(make_script("<think>a</think>b")).replies("Q", 6)

    roles = ["gold", "empty", "garbage", "truncated", "unclosed", "empty"]
    assert [reply.role for reply in replies] == roles
    assert [reply.is_truncated for reply in replies] == [role in roles[3:5] for role in roles]
    assert replies[4].text == "<think>ab"


@pytest.mark.parametrize("gold", ["A", "Paris", "<think>a</think>b"])
@pytest.mark.parametrize("num_rollouts", range(2, 9))
def test_roles_of_a_group_differ_if_they_are_read_backwards(gold: str, num_rollouts: int) -> None:
    replies = RoleBook(make_script(gold)).replies("Q", num_rollouts)

    is_gold = [reply.role == "gold" for reply in replies]
    assert is_gold != is_gold[::-1]


@dataclass
class Card:
    names: list[str]
    game: Any = None


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, "item['a'][1]['b'] was 2 and is 3"),
        ({"a": 1}, {"a": 1, "b": 2}, "item['b'] was added"),
        ({"a": 1}, {}, "item['a'] was removed"),
        (("x", frozenset({1, 2})), ("x", frozenset({2, 1})), None),
        (Card(["x"]), Card(["x", "y"]), "item['names'] had 1 entries and has 2"),
        (Card(["x"], game=object()), Card(["x"], game=object()), None),
        (float("nan"), float("nan"), None),
        (None, None, None),
    ],
)
def test_changed_path_names_what_changed(before: Any, after: Any, change: str | None) -> None:
    assert changed_path(data_of(before), data_of(after)) == change


def test_block_network_lets_this_machine_through_and_names_who_reaches_out(free_port: int) -> None:
    with block_network() as attempts:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", free_port))
        with pytest.raises(NetworkBlockedError, match=r"192\.0\.2\.1"):
            socket.create_connection(("192.0.2.1", 443))

    assert [attempt.is_blocked for attempt in attempts] == [False, True]
    assert [attempt.host for attempt in attempts] == [f"127.0.0.1:{free_port}", "192.0.2.1"]
    assert all("test_check_parts.py:" in (attempt.where or "") for attempt in attempts)
    assert socket.getaddrinfo.__module__ == "socket"


async def test_block_network_leaves_out_servers_of_the_process_itself() -> None:
    with block_network() as attempts:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            socket.create_connection(("127.0.0.1", port)).close()

    assert attempts == []
    assert "block_network" not in repr(socket.socket.listen)


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("127.0.0.5", True),
        ("0.0.0.0", True),
        ("::", True),
        ("::ffff:127.0.0.1", True),
        ("LOCALHOST.", True),
        ("engine.localhost", True),
        (b"127.0.0.1", True),
        ("", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("notlocalhost", False),
        ("localhost.example", False),
    ],
)
def test_block_network_knows_the_names_of_this_machine(host: Any, is_here: bool) -> None:
    with watchers.block_network() as attempts, suppress(OSError, watchers.NetworkBlockedError):
        socket.getaddrinfo(host, 1, flags=socket.AI_NUMERICHOST)

    assert bool(attempts) is not is_here


async def test_block_network_reaches_look_ups_on_the_event_loop() -> None:
    with block_network() as attempts, pytest.raises(NetworkBlockedError):
        await asyncio.open_connection("huggingface.co", 443)

    assert [attempt.host for attempt in attempts] == ["huggingface.co"]
    assert "test_check_parts.py:" in (attempts[0].where or "")


async def test_wait_for_end_names_processes_and_tasks_that_go_on() -> None:
    before = Running.now()
    command = [sys.executable, "-c", "input()"]
    process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE)
    task = asyncio.create_task(asyncio.Event().wait(), name="waits")

    left = await wait_for_end(before)
    await process.communicate(b"\n")
    await end_leftover_tasks(before)

    assert sorted(leftover.what.split()[0] for leftover in left) == ["process", "task"]
    assert task.cancelled()
    assert await wait_for_end(before) == []


async def test_wait_for_end_waits_for_a_task_whose_process_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchers, "GRACE_S", -1.0)  # it has passed before the first look
    before = Running.now()

    async def ends_soon() -> None:
        for _ in range(3):
            await asyncio.sleep(watchers.POLL_S)

    task = asyncio.create_task(ends_soon())
    left = await wait_for_end(before)

    assert left == []
    assert task.done()


async def test_call_in_a_thread_that_does_not_return_is_named_and_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchers, "THREADS_S", 0.05)
    before, is_released = Running.now(), threading.Event()
    call = asyncio.ensure_future(asyncio.to_thread(is_released.wait))
    await asyncio.sleep(0)
    call.cancel()

    await end_default_executor()
    left = await wait_for_end(before)
    is_released.set()

    assert [(each.what.rpartition("_")[0], each.where) for each in left] == [
        ("thread asyncio", None)
    ]
    assert await asyncio.to_thread(sum, [1, 2]) == 3
    await end_default_executor()
    assert await wait_for_end(before) == []


class Scorer:
    async def score(self) -> None:
        await asyncio.Event().wait()


async def test_step_that_waits_for_a_score_says_so() -> None:
    async def other() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StepTimeoutError) as scoring:
        await within_limit(asyncio.gather(Scorer().score()), limit_s=0.01)
    with pytest.raises(StepTimeoutError) as waiting:
        await within_limit(other(), limit_s=0.01)

    assert str(scoring.value) == "scoring timed out: Scorer.score did not end within 0.01 s"
    assert "test_check_parts.py:" in (scoring.value.where or "")
    assert str(waiting.value) == "did not end within 0.01 s"
    assert f"test_check_parts.py:{line_of(other) + 1}" in (waiting.value.where or "")


class RaisingEnv:
    def setup(self) -> None:
        raise KeyError("capitals")


async def test_block_that_takes_too_long_ends_in_its_own_task_and_names_the_line() -> None:
    task = asyncio.current_task()
    seen = []

    async def wait() -> None:
        seen.append(asyncio.current_task())
        await asyncio.Event().wait()

    with (
        pytest.raises(StepTimeoutError, match=r"did not end within 0.01 s") as stop,
        limited_here(0.01),
    ):
        await wait()

    assert seen == [task]
    assert f"test_check_parts.py:{line_of(wait) + 2}" in (stop.value.where or "")
    with limited_here(0.01):
        await asyncio.sleep(0)  # a block in time is not cancelled, nor is this task any more


def runs_with(score: float, *, num_timeouts: int = 0, prompt: str = "Q") -> list[DryRun]:
    sampled = ScriptedSample("gold", prompt, [81], [65], None)
    group = {"tokens": [[81, 65]], "scores": [score]}
    return [DryRun([group], [sampled], 1, make_script("A"), num_timeouts)]


@pytest.mark.parametrize(
    ("second", "other_seed", "status"),
    [
        (runs_with(1.0), runs_with(1.0), "passed"),
        (runs_with(0.0), runs_with(1.0), "failed"),
        (runs_with(1.0), runs_with(0.0), "failed"),
        (runs_with(0.0, num_timeouts=1), runs_with(1.0), "skipped"),
        (runs_with(1.0), runs_with(0.0, num_timeouts=1), "skipped"),
        (runs_with(1.0, num_timeouts=1), runs_with(1.0), "passed"),
        (runs_with(0.0, num_timeouts=1, prompt="R"), runs_with(1.0), "failed"),
    ],
)
def test_scores_that_timed_out_are_not_taken_for_chance(
    second: list[DryRun], other_seed: list[DryRun], status: str
) -> None:
    findings = Findings()

    _report_determinism(KeptLock, runs_with(1.0), second, other_seed, findings)

    assert {o.name: o.status for o in findings.outcomes()}["determinism"] == status


async def test_limits_count_a_process_that_stands_still_in_part() -> None:
    async def short() -> str:
        for _ in range(5):
            await asyncio.sleep(0)
        return "done"

    assert await within_limit(short(), limit_s=0.0) == "done"  # each look finds it passed
    with limited_here(0.0):
        assert await short() == "done"


async def test_step_that_swallows_its_cancellation_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_stopped = False

    async def goes_on() -> None:
        while not is_stopped:
            with suppress(BaseException):
                await asyncio.sleep(0)

    monkeypatch.setattr(watchers, "GRACE_S", 0.0)
    monkeypatch.setattr(runner, "CANCEL_LIMIT_S", 0.0)
    before = Running.now()

    with pytest.raises(StepTimeoutError, match="did not end within 0 s"):
        await within_limit(goes_on(), limit_s=0.0)
    [task] = asyncio.all_tasks() - before.tasks
    await end_leftover_tasks(before)

    assert asyncio.all_tasks() == before.tasks  # `asyncio.run` would wait for it
    is_stopped = True
    await task


class KeptLock:
    """Waits for a lock that a failed rollout has kept."""

    config = BaseEnvConfig(group_size=1)

    def __init__(self) -> None:
        self.lock = asyncio.Lock()

    def get_next_item(self) -> dict[str, str]:
        return {"question": "?"}

    def check_gold_answer(self, item: Any) -> None:
        return None

    async def collect_trajectories(self, item: Any) -> tuple[None, list[Any]]:
        await self.lock.acquire()
        return None, []


async def test_rollout_that_waits_forever_before_its_first_request_does_not_keep_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(within_limit.__kwdefaults__, "limit_s", 0.0)
    model = ScriptedModel(CharTokenizer(), is_stand_in=True, judge_reply=lambda _: None)
    env, findings = KeptLock(), Findings()
    await env.lock.acquire()

    with finding_on_error(findings, "cancel", KeptLock, ["collect_trajectories"]):
        await check_cancel(Stage(env, model), findings)

    failed = next(outcome for outcome in findings.outcomes() if outcome.name == "cancel")
    assert failed.detail == "StepTimeoutError: did not end within 0 s and made no request"
    assert f"test_check_parts.py:{line_of(KeptLock.collect_trajectories) + 1}" in failed.where


async def test_gold_answer_that_never_comes_does_not_keep_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Waits:
        async def check_gold_answer(self, item: Any) -> str:
            await asyncio.Event().wait()
            return ""

    monkeypatch.setitem(within_limit.__kwdefaults__, "limit_s", 0.0)

    with pytest.raises(StepTimeoutError, match="did not end within 0 s"):
        await gold_answer(Waits(), {})


def line_of(function: Any) -> int:
    return int(function.__code__.co_firstlineno)


def test_finding_on_error_keeps_the_remedy_of_settings_unless_the_author_raises() -> None:
    findings = Findings()

    with finding_on_error(findings, "setup", RaisingEnv, ["setup"]):
        RaisingEnv().setup()
    with finding_on_error(findings, "config", RaisingEnv, ["setup"]):
        asyncio.run(None)  # type: ignore[arg-type]  # raises in a module of Python
    with finding_on_error(findings, "rollout", RaisingEnv, ["setup"]):
        asyncio.run(None)  # type: ignore[arg-type]

    passed_on, raised, in_rollout = (o for o in findings.outcomes() if o.status == "failed")
    assert raised.detail == "KeyError: 'capitals'"
    assert raised.remedy.startswith("correct that line")
    assert passed_on.remedy == passed_on.rule.remedy
    assert in_rollout.remedy == raised.remedy
