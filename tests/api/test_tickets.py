"""Admission in the order of tickets: rules of the desk, and records applied to the state."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atroposlib.api import journal
from atroposlib.api.environments import EnvRecord, EnvRegistry
from atroposlib.api.queue import QueuedGroup, QueueFullError, RunLimits, Waiting
from atroposlib.api.records import (
    EnvDisconnected,
    EnvRegistered,
    EnvRevived,
    GroupsAdmitted,
    RunReset,
    TicketReturned,
    TrainerRegistered,
)
from atroposlib.api.run import Run
from atroposlib.api.schemas import RegisterEnv
from atroposlib.api.state import RunState
from atroposlib.api.tickets import Ticket, TicketDesk, parse_ticket, repeatable_digest
from atroposlib.errors import GroupError
from atroposlib.wire import decode_group, encode_group
from tests.api.helpers import make_group
from tests.api.run_helpers import Clock, decoded, env_request, started_run, take
from tests.envs.live_service import REGISTRATION


def env(env_id: int, name: str, weight: float = 1.0) -> EnvRecord:
    registry = EnvRegistry()
    for i in range(env_id + 1):
        request = RegisterEnv(
            max_token_length=64, desired_name=name if i == env_id else f"other{i}", weight=weight
        )
        found = registry.add(request, now=0.0)
    return found


def group(group_id: int, env_id: int = 0, size: int = 2) -> QueuedGroup:
    return QueuedGroup(group_id, env_id, size, 6)


def ids(released: list[list[QueuedGroup]] | None) -> list[int] | None:
    if released is None:
        return None
    return [one.group_id for groups in released for one in groups]


def desk(num_envs: int) -> TicketDesk:
    made = TicketDesk()
    made.require(num_envs)
    return made


@pytest.mark.parametrize("text", ["", "3", "3-", "-3", "3-1-2", "a-1", "3-²", "1-" + "9" * 17])
def test_parse_ticket_of_another_form_is_rejected(text: str) -> None:
    with pytest.raises(GroupError, match="such as 3-17"):
        parse_ticket(text)


def test_parse_ticket_reads_what_a_ticket_writes() -> None:
    assert parse_ticket(str(Ticket(3, 17))) == Ticket(3, 17)


def test_groups_are_held_until_earlier_tickets_are_settled() -> None:
    one, math = desk(1), env(0, "math")

    assert ids(one.settle(2, math, [group(12)])) == []
    assert ids(one.settle(0, math, [group(10)])) == [10]
    assert one.blocking == Ticket(0, 1)
    assert ids(one.settle(1, math, [])) == [12]  # returned: its rollout has no group
    assert one.blocking is None


def test_environments_take_turns_by_weight_and_name() -> None:
    two, math, code = desk(2), env(0, "math", weight=2.0), env(1, "code")
    for number in range(4):
        assert ids(two.settle(number, math, [group(10 + number)])) == []

    released = [two.settle(number, code, [group(20 + number, 1)]) for number in range(3)]

    # code 0 at pace 0, then math 0 at 0 and math 1 at 0.5; code 1 and math 2 at 1, ...
    assert [ids(one) for one in released] == [[20, 10, 11], [21, 12, 13], [22]]


def test_what_is_held_is_counted_without_a_look_at_every_ticket() -> None:
    """Tens of thousands of returned tickets would slow down every status request."""
    two, math, code = desk(2), env(0, "math"), env(1, "code")
    seen = []
    two.settle(0, math, [group(10)])
    two.settle(2, math, [group(12), group(13)])
    two.settle(3, math, [])
    seen.append((two.waiting, Waiting.of(two)))
    two.settle(0, code, [group(20, 1)])
    seen.append((two.waiting, Waiting.of(two)))
    again = desk(2)
    again.restore(2, two.is_open, two.streams)
    seen.append((again.waiting, Waiting.of(again)))
    two.disconnect(0)
    seen.append((two.waiting, Waiting.of(two)))

    assert [counted for counted, _ in seen] == [summed for _, summed in seen]
    assert [counted.num_sequences for counted, _ in seen] == [6, 4, 4, 0]


def test_a_settled_ticket_is_late() -> None:
    one, math = desk(1), env(0, "math")
    one.settle(0, math, [])

    assert one.settle(0, math, [group(10)]) is None


def test_a_disconnected_environment_misses_its_turns_and_comes_back() -> None:
    two, math, code = desk(2), env(0, "math"), env(1, "code")
    two.settle(0, code, [group(20, 1)])
    two.settle(0, math, [group(10)])
    two.settle(1, math, [group(11)])
    two.settle(3, code, [group(23, 1)])
    two.settle(2, math, [group(12)])

    released, num_expired = two.disconnect(1)

    assert (ids(released), num_expired) == ([23, 11, 12], 2)  # tickets 1 and 2 of code
    assert ids(two.settle(3, math, [group(13)])) == [13]
    two.reconnect(1)
    assert two.settle(1, code, [group(21, 1)]) is None
    assert ids(two.settle(4, math, [group(14)])) == []
    assert ids(two.settle(4, code, [group(24, 1)])) == [24, 14]


def test_check_rejects_a_ticket_far_ahead() -> None:
    one = desk(1)

    one.check(Ticket(0, 65_536))
    with pytest.raises(GroupError, match="number rollouts from 0"):
        one.check(Ticket(0, 65_537))


def ordered_state(limits: RunLimits | None = None) -> RunState:
    state = RunState(limits)
    state.apply(TrainerRegistered({**REGISTRATION, "batch_size": 4}, f"{1:x}", 1.0))
    for env_id, name in enumerate(("a", "b")):
        request = RegisterEnv(max_token_length=64, desired_name=name, weight=1.0)
        state.apply(EnvRegistered(env_id, request.model_dump(), 1.0, ordered_envs=2))
    return state


def admitted(one: QueuedGroup, ticket: int | None) -> GroupsAdmitted:
    return GroupsAdmitted(0, [one], 1.0, ticket=ticket)


def test_state_queues_in_ticket_order_and_counts_what_waits() -> None:
    state = ordered_state()

    state.apply(admitted(group(1, 1), 1))
    state.apply(admitted(group(2, 1), 0))
    assert (len(state.queue), state.waiting.num_sequences) == (0, 4)
    state.apply(admitted(group(3, 0), 0))
    state.apply(TicketReturned(0, 0, 1, False, 1.0))

    assert [one.group_id for one in state.queue] == [3, 2, 1]
    assert state.counters["tickets/returned"] == 1


def test_state_with_held_groups_survives_a_snapshot() -> None:
    state, again = ordered_state(), RunState()
    state.apply(admitted(group(1, 1), 1))
    state.apply(admitted(group(2, 0), 0))

    journal.restore(again, journal.snapshot(state))
    for one in (state, again):
        one.apply(admitted(group(3, 1), 0))

    assert [g.group_id for g in again.queue] == [g.group_id for g in state.queue] == [2, 3]
    assert journal.snapshot(again) == journal.snapshot(state)


def test_state_new_trainer_does_not_know_the_versions_of_held_groups() -> None:
    state = ordered_state()
    state.apply(admitted(msgspec.structs.replace(group(1, 0), version=50), 1))

    state.apply(TrainerRegistered({**REGISTRATION, "num_steps": 7, "replace": True}, "2", 2.0))

    assert [one.known_version for one in state.tickets] == [None]


def test_state_late_groups_are_queued_at_once() -> None:
    state = ordered_state()
    state.apply(TicketReturned(0, 1, 0, True, 1.0))
    state.apply(TicketReturned(0, 0, 0, False, 1.0))

    state.apply(admitted(group(7, 1), 0))

    assert [one.group_id for one in state.queue] == [7]
    assert state.counters["tickets/late"] == 1
    assert state.counters["tickets/expired"] == 1


def test_state_group_that_arrives_after_its_environment_disconnected_is_not_held() -> None:
    state = ordered_state()
    state.apply(admitted(group(1, 0), 0))
    state.apply(admitted(group(2, 1), 0))
    state.apply(EnvDisconnected(1, False, 1.0))

    state.apply(admitted(group(3, 1), 1))

    assert [one.group_id for one in state.queue] == [1, 2, 3]
    assert state.tickets.blocking is None


def test_state_environment_that_disconnected_before_its_first_ticket_blocks_nobody() -> None:
    state = ordered_state()
    state.apply(EnvDisconnected(1, False, 1.0))
    state.apply(admitted(group(1, 0), 0))

    state.apply(admitted(group(2, 1), 0))
    state.apply(admitted(group(3, 0), 1))
    state.apply(admitted(group(4, 0), 2))

    assert [one.group_id for one in state.queue] == [2, 1, 3, 4]


def test_state_disconnecting_releases_and_a_reset_discards_held_groups() -> None:
    state = ordered_state()
    state.apply(admitted(group(1, 0), 0))
    state.apply(admitted(group(2, 1), 1))
    state.apply(EnvDisconnected(1, True, 1.0))
    assert [one.group_id for one in state.queue] == [1, 2]
    state.apply(EnvRevived(1, 2.0))
    state.apply(admitted(group(5, 0), 3))

    state.apply(RunReset(1.0))

    assert 5 in state.payloads.discardable
    assert not state.tickets.is_used


def test_plan_in_order_ignores_groups_that_arrived_later() -> None:
    """With the whole queue, the pack of 4 would be planned around the later, larger group."""
    state = ordered_state()
    for number, size in enumerate((2, 2, 4)):
        for env_id in (0, 1):
            state.apply(admitted(group(10 * number + env_id, env_id, size), number))

    planned = state.plan_batch()

    assert planned is not None
    assert [one.group_id for one in planned] == [0, 1]


async def ordered_run(num_envs: int = 2, **changes: Any) -> Run:
    run = await started_run(ordered_envs=num_envs, **changes)
    for name in ("a", "b")[:num_envs]:
        env = await run.register_env(env_request(desired_name=name))
        assert env is not None
        assert run.awaits_tickets_of(env)
    return run


async def post(run: Run, env_id: int, number: int, *, size: int = 2) -> None:
    await run.admit([decoded(size, env_id=env_id)], ticket=Ticket(env_id, number))


async def test_batch_is_formed_in_ticket_order_and_an_empty_request_returns_a_ticket() -> None:
    run = await ordered_run()
    await post(run, 1, 0)  # group 0
    await post(run, 0, 1)  # group 1
    assert await take(run) is None

    await run.admit([], ticket=Ticket(0, 0))

    assert await take(run) == [0, 1]
    assert run.state.counters["tickets/returned"] == 1


async def test_groups_are_held_for_a_ticket_for_a_limited_time() -> None:
    clock = Clock()
    run = await ordered_run(num_envs=1, clock=clock, ordered_wait_s=60.0, env_expiry_s=0.0)
    await post(run, 0, 1)
    await post(run, 0, 2)

    for _ in range(2):
        await run.tick()
        clock.now += 30
    assert await take(run) is None
    await run.tick()

    assert await take(run) == [0, 1]
    assert run.state.counters["tickets/expired"] == 1


async def test_full_queue_takes_the_group_that_others_wait_for() -> None:
    run = await ordered_run(num_envs=1, max_queue_sequences=4)
    await post(run, 0, 1)
    await post(run, 0, 2)
    with pytest.raises(QueueFullError):
        await post(run, 0, 3)

    await post(run, 0, 0)

    assert await take(run) is not None


async def test_full_queue_refuses_groups_in_turn() -> None:
    run = await ordered_run(num_envs=1, max_queue_sequences=4)
    await post(run, 0, 0)
    await post(run, 0, 1)

    with pytest.raises(QueueFullError):
        await post(run, 0, 2)


async def test_full_queue_refuses_a_ticket_that_is_sent_again_and_again() -> None:
    run = await ordered_run(max_queue_sequences=4)
    await post(run, 0, 0)  # held for the other environment; its repetitions are late

    await post(run, 0, 0)
    await post(run, 0, 0)

    with pytest.raises(QueueFullError):
        await post(run, 0, 0)

    assert run.state.waiting.num_sequences == 2 + 4
    assert await take(run) is not None
    await post(run, 1, 0)


async def test_groups_held_of_one_environment_do_not_stop_another() -> None:
    """The other one has the ticket for which they wait."""
    run = await ordered_run(max_staleness_steps=1, max_queue_sequences=8)
    for number in range(4):
        await post(run, 1, number)

    waiting, ahead = await run.view_for(0), await run.view_for(1)

    assert waiting is not None
    assert ahead is not None
    assert (waiting.queue_size, ahead.queue_size) == (0, 4)
    assert (ahead.groups_to_start, (waiting.groups_to_start or 0) > 0) == (0, True)


async def test_tickets_of_another_environment_or_an_unordered_run_are_ignored() -> None:
    ordered, plain = await ordered_run(num_envs=1), await started_run()

    await ordered.admit([decoded(4, env_id=0)], ticket=Ticket(5, 9))
    await plain.admit([decoded(4)], ticket=Ticket(0, 9))

    assert await take(ordered) == [0]
    assert await take(plain) == [0]


def test_repeatable_digest_leaves_out_what_depends_on_time() -> None:
    first, second = (
        decode_group(encode_group(make_group(2, env_id=i, policy_version=i, traceparent=header)))
        for i, header in enumerate((f"00-{'a' * 32}-{'b' * 16}-01", f"00-{'c' * 32}-{'d' * 16}-01"))
    )
    other = decode_group(encode_group(make_group(4)))

    assert repeatable_digest(first) == repeatable_digest(second)
    assert repeatable_digest(first) != repeatable_digest(other)
