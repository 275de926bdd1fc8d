from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.errors import MissingExtraError
from atroposlib.scored_data import IGNORE_INDEX, check_group
from atroposlib.tasks.blackjack import (
    PREFILL,
    Hand,
    Rules,
    Table,
    action_value,
    best_action,
    fit_prompt,
    opening,
    read_action,
    score_reply,
    shorten_thinking,
    value,
)
from atroposlib.tasks.games import load_gymnasium
from environments.game_environments.gymnasium import blackjack_env
from environments.game_environments.gymnasium.blackjack.blackjack_env_thinking import (
    BlackjackEnv,
    BlackjackEnvConfig,
)
from tests.environments.offline import make_env
from tests.fakes import CharTokenizer, ScriptedEngine

BOOK = Rules(sab=True)


@pytest.mark.parametrize(
    ("hand", "action", "rules", "expected"),
    [
        # the dealer has a natural with 1/13 (an ace under the ten): a draw, else a win
        (Hand(21, True, 10, True), "stick", BOOK, 12 / 13),
        # a ten under the ace: 4/13
        (Hand(21, True, 1, True), "stick", BOOK, 9 / 13),
        # every card busts
        (Hand(21, False, 6), "hit", BOOK, -1.0),
        # 20 and an ace: 21, with 1/13; then the dealer's 21 is a draw
        (Hand(20, False, 6), "hit", BOOK, None),
    ],
)
def test_values_worked_by_hand(
    hand: Hand, action: Any, rules: Rules, expected: float | None
) -> None:
    if expected is None:
        expected = -12 / 13 + value(Hand(21, False, 6), rules) / 13
    assert action_value(hand, action, rules) == pytest.approx(expected)


def test_natural_pays_more_where_the_rules_say_so() -> None:
    natural = Hand(21, True, 10, True)
    plain = action_value(natural, "stick", Rules(sab=False))

    # without the book's rule a drawn 21 of the dealer is a draw; every win pays half more
    assert action_value(natural, "stick", Rules(sab=False, natural=True)) == pytest.approx(
        1.5 * plain
    )
    assert plain < value(natural, BOOK)


def test_best_actions_are_those_of_the_book() -> None:
    # Sutton and Barto, second edition, figure 5.2: the totals from which a hand sticks
    sticks_from = {1: 17, 2: 13, 3: 13, 4: 12, 5: 12, 6: 12, 7: 17, 8: 17, 9: 17, 10: 17}
    with_ace = {1: 19, 2: 18, 3: 18, 4: 18, 5: 18, 6: 18, 7: 18, 8: 18, 9: 19, 10: 19}

    for dealer_card in range(1, 11):
        for total in range(12, 22):
            for usable_ace, table in ((False, sticks_from), (True, with_ace)):
                wanted = "stick" if total >= table[dealer_card] else "hit"
                assert best_action(Hand(total, usable_ace, dealer_card), BOOK) == wanted


def test_played_games_earn_what_the_values_say() -> None:
    expected = played = 0.0
    for seed in range(400):
        table = Table("Blackjack-v1", seed=seed)
        expected += value(table.hand, table.rules)
        while not table.is_over:
            table.play(best_action(table.hand, table.rules))
        played += table.reward

    assert table.rules == BOOK
    assert played / 400 == pytest.approx(expected / 400, abs=0.1)  # two deviations


def call(action: str) -> str:
    return (
        f'<tool_call>{{"name": "take_action", "arguments": {{"action": "{action}"}}}}</tool_call>'
    )


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        (f"<think>\nhm</think>\n{call('hit')}", "hit"),
        (f"<think>\n{call('hit')}</think>{call('stick')}", "stick"),
        (call("stick"), "stick"),
        (f"<think>\n{call('hit')}", None),
        (f"<think>\n{call('hit')}</think>", None),
        (f"<think>\n</think>{call('hit')}{call('stick')}", None),
        (f"</think>{call('double')}", None),
        (f"</think>{call('h' + chr(0x131) + 't')}", None),
        ("</think>hit", None),
        ('</think><tool_call>{"name": "take_action", "arguments": "hit"}</tool_call>', None),
        ('</think><tool_call>{"name": "t", "arguments": {"action": "hit"}}</tool_call>', None),
        ('</think><tool_call>{"name": "take_action"}</tool_call>', None),
        (
            '</think><tool_call>{"name": "take_action", "arguments": {"action": []}}</tool_call>',
            None,
        ),
        ("</think><tool_call>hit</tool_call>", None),
        ("</think><tool_call>{", None),
        ("", None),
    ],
)
def test_action_is_the_one_call_behind_the_thinking(reply: str, action: str | None) -> None:
    assert read_action(reply) == action


def score(reply: str, hand: Hand = Hand(13, False, 6), **settings: Any) -> float:  # noqa: B008
    chosen: dict[str, Any] = {
        "rules": BOOK,
        "thinking_active": True,
        "is_cut": False,
        "length_share": 1.0,
        "tiebreak_factor": 0.01,
        **settings,
    }
    return score_reply(hand, reply, **chosen).score


def test_form_of_a_reply_is_worth_what_the_table_says() -> None:
    stick, hit = call("stick"), call("hit")
    loss = action_value(Hand(13, False, 6), "hit", BOOK) - value(Hand(13, False, 6), BOOK)

    assert loss < 0
    assert score(f"<think>\nwhy\nnot</think>{stick}") == pytest.approx(0.4)
    assert score(f"<think>\nwhy</think>{stick}", length_share=0.0) == pytest.approx(0.41)
    assert score(f"<think>\nwhy</think>{hit}") == pytest.approx(0.4 + loss)
    assert score(f"<think>\n</think>{stick}") == pytest.approx(0.2)
    assert score(f"<think></think>{stick}") == pytest.approx(0.0)
    assert score(stick) == pytest.approx(0.0)
    assert score(stick, thinking_active=False) == pytest.approx(0.2)
    assert score("<think>\nwhy</think>stick") == pytest.approx(0.0)  # stick is played
    assert score(f"<think>\nwhy</think>{stick}", is_cut=True) == pytest.approx(0.0)
    assert score("qxz") == pytest.approx(-0.4)


def test_best_reply_scores_highest_and_garbage_lowest_in_every_hand() -> None:
    for dealer_card in range(1, 11):
        for total in range(4, 22):
            hand = Hand(total, False, dealer_card)
            best = best_action(hand, BOOK)
            other = "hit" if best == "stick" else "stick"
            thought = "<think>\nwhy</think>"

            scores = [score(thought + call(best), hand), score(thought + call(other), hand)]

            assert scores[0] > scores[1]
            assert scores[0] > score("qxz ]] {{", hand) <= score(call("stick"), hand)


@pytest.mark.parametrize(
    ("reply", "kept"),
    [
        ("<think>\nfirst\n\nlast words</think>x", "<think>\n... last words\n</think>x"),
        ("<think>\nshort</think>x", "<think>\nshort\n</think>x"),
        ("<think>\nrather long ones</think>x", "<think>\n... her long ones\n</think>x"),
        ("<think>\nfirst\n\nrather long ones</think>x", "<think>\n... her long ones\n</think>x"),
        ("no thinking", "no thinking"),
        ("<think>\nnever closed", "<think>\nnever closed"),
    ],
)
def test_thinking_is_cut_to_its_last_paragraph_and_characters(reply: str, kept: str) -> None:
    assert shorten_thinking(reply, max_chars=13) == kept


def test_no_characters_leave_no_thinking() -> None:
    assert shorten_thinking("<think>a\n\nb</think>x", max_chars=0) == "<think>\n... \n</think>x"


def test_oldest_turns_leave_a_prompt_that_is_too_long() -> None:
    hand = Hand(12, False, 2)
    chat = opening(hand, thinking_active=True)
    short = fit_prompt(chat, CharTokenizer(), limit=10_000, thinking_active=True)
    assert short is not None
    assert short.text.endswith(PREFILL)
    limit = 2 * short.num_tokens
    for number in range(9):
        chat.append({"role": "agent", "content": f"reply {number} " + "x" * 100})
        chat.append({"role": "environment", "content": f"hand {number}"})

    prompt = fit_prompt(chat, CharTokenizer(), limit=limit, thinking_active=True)

    assert prompt is not None
    assert prompt.budget * 4 >= limit
    assert prompt.chat[0] == chat[0]
    assert len(prompt.chat) > 1
    assert prompt.chat[1:] == chat[len(chat) - len(prompt.chat) + 1 :]
    assert fit_prompt(chat, CharTokenizer(), limit=50, thinking_active=True) is None


def test_table_refuses_actions_after_the_end() -> None:
    table = Table("Blackjack-v1", seed=0)
    table.play("stick")

    with pytest.raises(ValueError, match="over"):
        table.play("stick")


async def test_every_decision_is_a_group_and_only_replies_are_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = random.Random(0)
    replies = [f"wait {n}</think>{call('hit')}" for n in range(3)] + ["qxz"]

    def reply(prompt: str) -> str:
        return source.choice(replies) if prompt.endswith(PREFILL) else "ok"

    async with ScriptedEngine(reply) as engine:
        env = make_env(BlackjackEnv, engine, monkeypatch, include_messages=True, group_size=8)
        seed = next(s for s in range(99) if Table("Blackjack-v1", seed=s).hand.total < 8)
        groups, _ = await env.collect_trajectories((seed, 0))

    assert len(groups) >= 2  # 7 at the most cannot bust at once
    for number, group in enumerate(groups):
        check_group(group)
        rows = zip(group["tokens"], group["masks"], group["messages"], strict=True)
        for tokens, masks, chat in rows:
            trained = [i for i, mask in enumerate(masks) if mask != IGNORE_INDEX]
            text = CharTokenizer().decode([tokens[i] for i in trained], skip_special_tokens=True)
            assert trained == list(range(trained[0], len(tokens)))
            assert chat[-1] == {"role": "agent", "content": PREFILL + text}
            assert [m["role"] for m in chat[1:]] == ["environment", "agent"] * (number + 1)


async def test_figures_have_the_names_of_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[str, Any] = {}
    async with ScriptedEngine([f"so</think>{call('stick')}"]) as engine:
        env = make_env(BlackjackEnv, engine, monkeypatch, eval_episodes=4, group_size=2)
        monkeypatch.setattr(env.run_log, "log", lambda metrics, step: logged.update(metrics))
        await env.setup()
        groups, _ = await env.collect_trajectories((0, 0))
        await env.evaluate()
        await env.close()

    assert len(groups) == 1
    names = ("avg_total_reward", "avg_num_turns", "action_accuracy", "win_rate", "loss_rate")
    assert {f"eval/{name}" for name in (*names, "draw_rate", "num_completed_episodes")} <= set(
        logged
    )
    assert logged["eval/avg_num_turns"] == 1.0
    assert logged["blackjack_train/num_episodes"] == 1
    assert logged["blackjack_train/avg_episode_steps"] == 1.0
    assert {"blackjack_train/avg_episode_reward", "blackjack_train/episode_win_rate"} <= set(logged)


def test_path_of_may_gives_the_same_classes() -> None:
    assert blackjack_env.BlackjackEnv is BlackjackEnv
    assert blackjack_env.BlackjackEnvConfig is BlackjackEnvConfig


def test_missing_gymnasium_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)

    with pytest.raises(MissingExtraError, match=r"'\.\[examples\]'"):
        load_gymnasium.__wrapped__()


def test_environment_passes_the_check() -> None:
    report = check_environment(BlackjackEnv)

    assert report.passed, report.text
