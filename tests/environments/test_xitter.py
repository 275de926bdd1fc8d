"""Xitter: JSON actions, rewards of each kind, posts that nobody reacts to, saved feeds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atroposlib.envs.conversation import Turn
from environments.community.xitter_env.xitter_env import (
    TOPICS,
    Action,
    Feed,
    XitterConfig,
    XitterEnv,
    read_action,
)
from tests.environments.offline import make_env
from tests.fakes import ScriptedEngine


def feed(seed: int = 3, **settings: Any) -> Feed:
    return Feed(seed, XitterConfig(**settings))


def topics(game: Feed) -> tuple[str, str, str]:
    """An interest of the other agent, the trend, and a topic that is neither."""
    [liked] = game.interests.values()
    trend = game.trend(0)
    assert trend not in liked
    other = next(topic for topic in TOPICS if topic not in (*liked, trend))
    return liked[0], trend, other


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ('{"action": "nothing"}', Action("nothing")),
        ('```json\n{"action": "like", "post_id": 2}\n```', Action("like", 2)),
        ('{"action": "post", "content": "a\\nb"}', Action("post", content="a b")),
        ('{"action": "like", "post_id": true}', None),
        ('{"action": "like", "post_id": NaN}', None),
        ('{"action": "like", "post_id": 1e400}', None),
        ('{"action": "like", "post_id": ' + "9" * 1900 + "}", Action("like", int("9" * 1900))),
        ('{"action": "like", "post_id": "2"}', None),
        ('{"action": ["like"]}', None),
        ("[" * 1990, None),
        ('{"a":' * 380, None),
        ('{"action": "post", "content": "' + "x" * 5000 + '"}', None),
        ('I like it. {"action": "like", "post_id": 2}', None),
        ("", None),
    ],
)
def test_action(answer: str, action: Action | None) -> None:
    assert read_action(answer) == action


def test_rewards_of_posts() -> None:
    liked, trend, other = topics(feed())

    def reward(text: str) -> float:
        return feed().act(Action("post", content=text))[0]

    assert reward(f"We all talk about {other}") == pytest.approx(-0.01)
    assert reward(f"We all talk about {trend}") == pytest.approx(0.2 - 0.01)
    assert reward(f"We all talk about {liked}") == pytest.approx(0.1 - 0.01)
    assert reward(f"Do we talk about {liked}?") == pytest.approx(0.1 + 0.5 - 0.01)
    assert reward(f"Do {liked} and {trend} fit?") == pytest.approx(0.8 - 0.01)
    assert reward(f"Do {liked}, {trend}, {other} fit?") == pytest.approx(-0.01)
    assert reward(f"{liked} {trend}?") == -0.5
    assert reward(f"Do we talk about {liked}? " + "x" * 280) == -0.5


def test_repeated_post_gains_nothing() -> None:
    game = feed()
    liked, _, _ = topics(game)
    first = game.act(Action("post", content=f"Who else is fond of {liked}?"))[0]

    again = game.act(Action("post", content=f"Who else is so fond of {liked}?"))[0]

    assert (first, again) == (pytest.approx(0.59), pytest.approx(-0.01))


@pytest.mark.parametrize(
    ("actions", "rewards"),
    [
        ([Action("like", 0), Action("like", 0)], [0.04, -0.5]),
        ([Action("comment", 0, "Well said"), Action("comment", 0, "No, wrong")], [0.09, -0.5]),
        ([Action("comment", 0, "Well said"), Action("comment", 1, "well, said!")], [0.09, -0.5]),
        ([Action("comment", 0, "Yes"), Action("comment", 0)], [-0.5, -0.5]),
        ([Action("post", 0, "I was out in the rain"), Action("like", 2)], [-0.01, -0.5]),
        ([Action("like", -1), Action("like", 2), Action("like", 10**400)], [-0.5] * 3),
        ([Action("nothing"), Action("follow", 0)], [0.0, -0.5]),
    ],
)
def test_likes_comments_and_invalid_actions(actions: list[Action], rewards: list[float]) -> None:
    game = feed()

    assert [game.act(action)[0] for action in actions] == pytest.approx(rewards)
    assert game.num_invalid == rewards.count(-0.5)


async def test_saved_feed_continues() -> None:
    answers = ['{"action": "comment", "post_id": 0, "content": "Well said"}', "garbage"]
    original, restored = feed(), feed()
    for index, answer in enumerate(answers):
        await original.reply(Turn(answer, index, ()))
    restored.restore(json.loads(json.dumps(original.state())))

    turn = Turn('{"action": "like", "post_id": 0}', 2, ())

    assert await restored.reply(turn) == await original.reply(turn)
    assert restored.state() == original.state()


async def test_game_has_all_of_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine(['{"action": "nothing"}'] * 20) as engine:
        env = make_env(
            XitterEnv, engine, monkeypatch, max_turns=4, num_agents=16, max_token_length=20_000
        )
        rollout, _ = await env.collect_trajectory({"seed": 0})
        metrics = env.metrics_of([rollout], "train")
        await env.server.close()

    assert (len(rollout.rewards), rollout.outcome) == (4, "done")
    assert metrics["train/invalid_actions"] == 0.0
