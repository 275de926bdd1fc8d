"""What counts as a turn the session gave out, and what as the client's own."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.envs.server_handling.chat_rendering import leading_systems_joined
from atroposlib.envs.server_handling.proxy.history import (
    GivenTurn,
    GivenTurns,
    SentTurn,
)
from tests.server_handling.proxy.dialects.scripted_session import tool_call

USER = {"role": "user", "content": "Go."}
THOUGHT = {"role": "assistant", "content": "<think>hm</think> Yes."}
CALLS = [tool_call("one", "add", '{"a":  1}'), tool_call("two", "add", '{"b": [2.0]}')]
CALLING = {"role": "assistant", "content": "Look.", "tool_calls": CALLS}


@pytest.fixture
def turns() -> GivenTurns:
    given = GivenTurns()
    given.remember(GivenTurn(THOUGHT, "Yes."), ids=["msg_1", "rs_1"], conversation=[USER])
    given.remember(GivenTurn(CALLING, "Look."), ids=["msg_2"], conversation=[USER])
    return given


def result_of(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": f"of {call_id}"}


def test_turn_comes_back_by_any_of_its_ids_or_by_its_place(turns: GivenTurns) -> None:
    for sent in (
        SentTurn("Yes.", ids=("msg_1",)),
        SentTurn("Yes.", ids=("unknown", "rs_1"), thinking="hm"),
        SentTurn("Yes."),
    ):
        assert turns.restore([USER, sent]) == [USER, THOUGHT]


def test_text_at_another_place_is_the_clients_own(turns: GivenTurns) -> None:
    other = {"role": "user", "content": "Stop."}

    assert turns.restore([other, SentTurn("Yes.")])[1] == {"role": "assistant", "content": "Yes."}


def test_changed_text_under_a_known_id_is_the_clients_own(turns: GivenTurns) -> None:
    sent = SentTurn("No.", ids=("msg_1", "rs_1"), thinking="hm")

    restored = turns.restore([USER, sent])

    expected = "<think>\nhm\n</think>\n\nNo."
    assert restored == [USER, {"role": "assistant", "content": expected}]


def test_changed_argument_under_a_known_id_is_the_clients_own(turns: GivenTurns) -> None:
    changed = [CALLS[0], tool_call("two", "add", '{"b": [3]}')]

    restored = turns.restore([USER, SentTurn("Look.", calls=tuple(changed))])

    assert restored[1] == {**CALLING, "tool_calls": changed}


def test_arguments_written_anew_are_the_ones_sampled(turns: GivenTurns) -> None:
    anew = (tool_call("one", "add", '{"a": 1}'), tool_call("two", "add", '{"b":[2]}'))

    assert turns.restore([USER, SentTurn("", calls=anew)]) == [USER, CALLING]


def test_calls_listed_with_their_results_are_one_turn_again(turns: GivenTurns) -> None:
    first = SentTurn("Look.", ids=("msg_2",), calls=(CALLS[0],))
    second = SentTurn("", calls=(CALLS[1],))

    restored = turns.restore([USER, first, result_of("one"), second, result_of("two"), USER])

    assert restored == [USER, CALLING, result_of("one"), result_of("two"), USER]


def test_call_taken_out_for_good_is_not_put_back(turns: GivenTurns) -> None:
    only = SentTurn("Look.", calls=(CALLS[0],))

    restored = turns.restore([USER, only, result_of("one"), USER])

    kept = {**CALLING, "tool_calls": [CALLS[0]]}
    assert restored == [USER, kept, result_of("one"), USER]


def test_calls_taken_out_of_a_turn_leave_its_text(turns: GivenTurns) -> None:
    restored = turns.restore([USER, SentTurn("Look.", ids=("msg_2",))])

    assert restored[1] == {"role": "assistant", "content": "Look."}


def test_turns_longest_unused_are_forgotten() -> None:
    turns = GivenTurns(max_remembered=2)
    for name in ("a", "b"):
        turns.remember(GivenTurn(THOUGHT, "Yes."), ids=[name], conversation=[{"role": name}])
    turns.restore([SentTurn("Yes.", ids=("a",))])

    turns.remember(GivenTurn(THOUGHT, "Yes."), ids=["c"], conversation=[{"role": "c"}])

    known = [turns.restore([SentTurn("Yes.", ids=(name,))])[0] is THOUGHT for name in "abc"]
    assert known == [True, False, True]


def test_system_messages_in_front_become_one() -> None:
    systems = [{"role": "system", "content": text} for text in ("A", "B")]

    joined = leading_systems_joined([*systems, USER, systems[0]])

    assert joined == [{"role": "system", "content": "A\n\nB"}, USER, systems[0]]
    assert leading_systems_joined([systems[0], USER]) == [systems[0], USER]
