"""Cat behavior: the word that decides, the cat's view of a visit, the last reaction."""

from __future__ import annotations

from typing import Any

import pytest

from environments.community.cat_behavior_env.cat_server import (
    CAT,
    SILENCE,
    GSM8kEnv,
    cat_chat,
    is_purring,
)
from environments.community.cat_behavior_env.catbot_arena import GSM8kEnv as ArenaEnv
from environments.gsm8k_server import GSM8kEnv as MainEnv
from tests.environments.offline import PROBED, make_env, ready_env
from tests.fakes import ScriptedEngine

CAT_ROW = {"cat": "Miso, a tabby", "need": "fresh water", "behavior": "It sits before a bowl."}


@pytest.mark.parametrize(
    ("reaction", "is_happy"),
    [("It PURRS.", True), ("Purr", True), ("It pours.", False), ("", False)],
)
def test_purring(reaction: str, is_happy: bool) -> None:
    assert is_purring(reaction) is is_happy


def test_cat_hears_no_thinking_and_not_the_word() -> None:
    chat = [
        {"role": "system", "content": "You take care of a cat."},
        {"role": "user", "content": "The cat is here."},
        {"role": "assistant", "content": "<think>thirst?</think>I say: the cat Purrs."},
        {"role": "user", "content": "It looks away."},
        {"role": "assistant", "content": "<think>hm"},
    ]

    first, *rest = cat_chat(CAT_ROW, chat)

    assert "fresh water" in first["content"]
    assert [message["content"] for message in rest] == [
        "I say: the cat mews.",
        "It looks away.",
        SILENCE,
    ]


async def rollout_of(
    reactions: list[str], monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[Any, list[str]]:
    """A visit with some reactions, and the prompts of the caretaker."""
    written, prompts = iter(reactions), []

    def play(prompt: str) -> str:
        if CAT[:40] in prompt:
            return next(written)
        if "The cat is here" not in prompt:
            return PROBED
        prompts.append(prompt)
        return "I wait."

    async with ScriptedEngine(play) as engine:
        env = make_env(GSM8kEnv, engine, monkeypatch, **{"max_turns": len(reactions), **settings})
        rollout, _ = await env.collect_trajectory(CAT_ROW)
        await env.server.close()
    return rollout, prompts


@pytest.mark.parametrize(
    ("reactions", "rewards"),
    [
        (["It looks away.", "<think>well</think>It purrs."], [0.0, 1.0]),
        (["It purrs.", "It hisses."], [0.0, 0.0]),
        (["It sleeps.", "<think>purr?</think>"], [0.0, 0.0]),
    ],
)
async def test_last_reaction_decides(
    reactions: list[str], rewards: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, prompts = await rollout_of(reactions, monkeypatch)

    assert (rollout.rewards, rollout.outcome) == (rewards, "done")
    assert not any("fresh water" in prompt for prompt in prompts)


async def test_shipped_cats(monkeypatch: pytest.MonkeyPatch) -> None:
    env = await ready_env(GSM8kEnv, monkeypatch)

    assert (len(env.train), len(env.test)) == (18, 6)
    assert not any(is_purring(str(row)) for row in [*env.train, *env.test])


def test_arena_is_gsm8k() -> None:
    assert issubclass(ArenaEnv, MainEnv)
    assert (ArenaEnv.name, ArenaEnv.config_init()) == ("gsm8k", MainEnv.config_init())
