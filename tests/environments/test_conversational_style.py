"""Conversational style: pairs without system prompts, pairs that are left out, the settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from environments.community.conversational_style_dpo import (
    conversational_style_dpo_env as styles,
)
from environments.community.conversational_style_dpo.gsm8k_conversational_style_dpo_env import (
    ENGAGING as TUTOR,
)
from environments.community.conversational_style_dpo.gsm8k_conversational_style_dpo_env import (
    GSM8KConversationalStyleDPOEnv,
)
from tests.environments.offline import make_env, ready_env
from tests.fakes import ScriptedEngine

ROW = {"prompt": "What do bees do in winter?", "question": "How much is 2 + 2?"}


async def group_of(
    play: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, env_cls: Any, **settings: Any
) -> tuple[Any, Any, list[dict[str, Any]]]:
    async with ScriptedEngine(play) as engine:
        env = make_env(env_cls, engine, monkeypatch, include_messages=True, **settings)
        group, _ = await env.collect_trajectories(ROW)
        await env.server.close()
        return env, group, [request.body for request in engine.requests]


@pytest.mark.parametrize(
    ("env_cls", "engaging", "content"),
    [
        (styles.ConversationalStyleDPOEnv, styles.ENGAGING, ROW["prompt"]),
        (GSM8KConversationalStyleDPOEnv, TUTOR, ROW["question"]),
    ],
)
async def test_pair_has_the_same_prompt_and_no_system_prompt(
    env_cls: Any, engaging: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(prompt: str) -> str:
        return "<think>hm</think>Gladly! And you?" if engaging in prompt else "No."

    env, group, requests = await group_of(play, monkeypatch, env_cls)

    user = {"role": "user", "content": content}
    assert group["scores"] == [1.0, -1.0]
    assert group["messages"] == [
        [user, {"role": "assistant", "content": "Gladly! And you?"}],
        [user, {"role": "assistant", "content": "No."}],
    ]
    trained = [[m for m in masks if m != -100] for masks in group["masks"]]
    assert [
        env.tokenizer.decode(ids).startswith(text)
        for ids, text in zip(trained, ["Gladly!", "No."], strict=True)
    ] == [True, True]
    assert not any(engaging in env.tokenizer.decode(tokens) for tokens in group["tokens"])
    sampled = {(body["temperature"], body["max_tokens"]) for body in requests}
    assert {(0.7, 150), (0.4, 50)} <= sampled


@pytest.mark.parametrize("blunt", ["Gladly!", "", "<think>only this"])
async def test_pair_with_an_empty_or_equal_side_is_left_out(
    blunt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(prompt: str) -> str:
        return "Gladly!" if styles.ENGAGING in prompt else blunt

    _, group, _ = await group_of(play, monkeypatch, styles.ConversationalStyleDPOEnv)

    assert group is None


async def test_group_with_a_pair_left_out_states_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    written = iter(["", "No."])

    def play(prompt: str) -> str:
        return "Gladly!" if styles.ENGAGING in prompt else next(written)

    env_cls = styles.ConversationalStyleDPOEnv
    _, group, _ = await group_of(play, monkeypatch, env_cls, group_size=5)

    assert group["scores"] == [1.0, -1.0]
    assert group["group_overrides"] == {"group_size": 2}


async def test_shipped_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    env = await ready_env(styles.ConversationalStyleDPOEnv, monkeypatch)

    assert (len(env.train), len(env.test)) == (26, 6)
