from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.dataset_items import DatasetItems, LocalItemsConfig
from atroposlib.envs.policies import ChatPolicy
from atroposlib.envs.single_turn_env import (
    MAX_PROMPTS_WITHOUT_ROOM,
    SingleTurnEnv,
    SingleTurnEnvConfig,
    ask,
    complete,
)
from atroposlib.errors import ConfigError
from atroposlib.scored_data import check_group
from tests.fakes import ScriptedEngine

PROBED = "ok"
"""First reply of a list: it answers the client's look for a route that gives token ids."""


class EchoConfig(LocalItemsConfig, SingleTurnEnvConfig):
    """Settings of the environment below."""


class EchoEnv(DatasetItems, SingleTurnEnv):
    """Say the word."""

    name = "echo"
    env_config_cls = EchoConfig
    columns = ("word",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.answers: list[str] = []

    def prompt(self, item: Mapping[str, str]) -> Sequence[Mapping[str, Any]]:
        return [{"role": "user", "content": f"Say {item['word']}."}]

    async def score(self, item: Mapping[str, str], answer: str) -> float:
        self.answers.append(answer)
        await asyncio.sleep(0)
        if answer == "raise":
            raise KeyError(answer)
        return float(answer == item["word"])


@pytest.fixture
def make_echo(make_env: Callable[..., Any], tmp_path: Path) -> Callable[..., EchoEnv]:
    """Build the environment at an engine, with three rows."""
    make_env()  # puts the character tokenizer in place
    rows = [{"word": word, "other": 1} for word in ("one", "two", "three")]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def make(engine: ScriptedEngine, **settings: Any) -> EchoEnv:
        chosen = {"use_wandb": False, "tokenizer_name": "characters", "group_size": 3, **settings}
        server = APIServerConfig(
            model_name="m", base_url=engine.base_url, server_type="vllm", health_check=False
        )
        return EchoEnv(EchoConfig(**chosen), server)

    return make


async def test_group_holds_completions_with_their_scores(make_echo: Callable[..., Any]) -> None:
    replies = [PROBED, "one", "<think>hm</think> one", "<think>one"]
    async with ScriptedEngine(replies) as engine:
        env = make_echo(engine, include_messages=True)
        group, backlog = await env.collect_trajectories({"word": "one"})

    check_group(group)
    assert (group["scores"], backlog) == ([1.0, 1.0, 0.0], [])
    assert env.answers == ["one", "one", ""]
    assert group["finish_reasons"] == ["stop"] * 3
    assert group["messages"][1][-1]["content"] == "<think>hm</think> one"


async def test_a_single_rollout_by_hand_names_the_hook_of_whole_groups(
    make_echo: Callable[..., Any],
) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        env = make_echo(engine)
        with pytest.raises(NotImplementedError, match=r"call collect_trajectories\(item\)"):
            await env.collect_trajectory({"word": "one"})


async def test_completion_that_was_cut_is_scored_as_an_empty_one(
    make_echo: Callable[..., Any],
) -> None:
    # 27 prompt tokens, two kept free: of 32 three are left, so that "one" loses its end of turn
    async with ScriptedEngine([PROBED, "one", "on", "one"]) as engine:
        env = make_echo(engine, max_token_length=32, mute_truncated=True)
        group, _ = await env.collect_trajectories({"word": "one"})

    assert env.answers == ["", "on", ""]
    muted = {"set_advantage_to_zero": True}
    assert group["overrides"] == [muted, {}, muted]


async def test_prompt_without_room_gives_no_group(make_echo: Callable[..., Any]) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        env = make_echo(engine, max_token_length=10)

        assert await env.collect_trajectories({"word": "one"}) == (None, [])


async def test_run_in_which_no_prompt_has_room_ends_and_names_the_limit(
    make_echo: Callable[..., Any],
) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        env = make_echo(engine, max_token_length=1000)
        env.max_token_len = 10  # the trainer's
        for _ in range(MAX_PROMPTS_WITHOUT_ROOM - 1):
            assert await env.collect_trajectories({"word": "one"}) == (None, [])
        limit = r"no room in the trainer's maximum length \(10\); raise it"
        with pytest.raises(ConfigError, match=limit):
            await env.collect_trajectories({"word": "one"})


async def test_completion_stays_below_the_limit_of_the_trainer(
    make_echo: Callable[..., Any],
) -> None:
    async with ScriptedEngine([PROBED, "one", "on", "one", "one"]) as engine:
        env = make_echo(engine, max_token_length=1000)
        env.max_token_len = 32
        group, _ = await env.collect_trajectories({"word": "one"})
        env.max_token_len = 10
        for _ in range(MAX_PROMPTS_WITHOUT_ROOM):  # not an error: another prompt had room
            assert await env.collect_trajectories({"word": "one"}) == (None, [])
        await env.evaluate_item({"word": "one"})

    # 27 prompt tokens, two kept free; evaluations have the limit of the environment
    limits = [request.body["max_tokens"] for request in engine.requests]
    assert (limits[-2], limits[-1]) == (32 - 29, 1000 - 29)
    assert max(map(len, group["tokens"])) < 32


async def test_score_that_raises_fails_the_group_after_the_others(
    make_echo: Callable[..., Any],
) -> None:
    async with ScriptedEngine([PROBED, "raise", "one", "two"]) as engine:
        env = make_echo(engine)
        with pytest.raises(KeyError):
            await env.collect_trajectories({"word": "one"})

    assert env.answers == ["raise", "one", "two"]


async def test_evaluate_asks_each_test_row_once(
    make_echo: Callable[..., Any], tmp_path: Path
) -> None:
    async with ScriptedEngine(["three"]) as engine:
        env = make_echo(engine, data_dir_to_save_evals="evals")
        await env.setup()
        env.test = [{"word": "three"}, {"word": "one"}]
        await env.evaluate()
        await env.close()

    report = json.loads((tmp_path / "evals" / "metrics.json").read_text())
    metrics = report["results"]["all"]
    # Wilson's interval of 1 of 2.
    assert metrics.keys() == {
        f"eval/mean_score{end}" for end in ("", "_stderr", "_ci_low", "_ci_high")
    }
    assert metrics["eval/mean_score"] == 0.5
    assert metrics["eval/mean_score_ci_low"] == pytest.approx(0.0945, abs=1e-4)
    assert metrics["eval/mean_score_ci_high"] == pytest.approx(0.9055, abs=1e-4)


async def test_prompt_without_room_for_an_answer_is_wrong_and_not_sent(
    make_echo: Callable[..., Any], tmp_path: Path
) -> None:
    async with ScriptedEngine(["three"]) as engine:
        env = make_echo(engine, data_dir_to_save_evals="evals", max_token_length=100)
        await env.setup()
        env.test = [{"word": "three"}, {"word": "three" * 50}]
        await env.evaluate()
        await env.close()
        num_asked = len(engine.requests)

    samples = [json.loads(line) for line in (tmp_path / "evals" / "samples.jsonl").open()]
    assert num_asked == 1
    assert [sample["finish_reason"] for sample in samples] == ["stop", "length"]
    assert [sample["score"] for sample in samples] == [1.0, 0.0]


async def test_local_items_go_round_and_keep_their_place(make_echo: Callable[..., Any]) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        env, again = make_echo(engine), make_echo(engine)
    for one in (env, again):
        await one.setup()
        one.checkpoint_dir, one.wandb_prepend = "checkpoints", "echo_0"
    rows = [await env.get_next_item() for _ in range(5)]

    env.save_checkpoint(4)
    again.curr_step = 4
    again.load_checkpoint()

    assert len(env.test) == 1
    assert env.test[0] not in rows
    assert rows[0] == rows[2] == rows[4] != rows[1]
    assert rows[0].keys() == {"word"}
    assert await again.get_next_item() == rows[1]


async def test_local_items_without_a_file_say_what_they_need(
    make_echo: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "one"}')
    async with ScriptedEngine([PROBED]) as engine:
        env = make_echo(engine)

        with pytest.raises(ConfigError, match="word"):
            await env.setup()


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("score", "high", r"EchoEnv\.score returned 'high'; expected a number"),
        ("score", "1.0", r"EchoEnv\.score returned '1\.0'; expected a number"),
        ("score", None, r"EchoEnv\.score returned None; expected a number"),
        (
            "prompt",
            "Say one.",
            r"EchoEnv\.prompt returned 'Say one\.'; expected a list of messages",
        ),
        ("prompt", [], r"EchoEnv\.prompt returned \[\]; expected a list of messages"),
        ("prompt", ["Say"], "expected a list of messages"),
    ],
)
async def test_wrong_value_of_the_author_is_named(
    make_echo: Callable[..., EchoEnv], method: str, value: Any, message: str
) -> None:
    async with ScriptedEngine([PROBED, "one"]) as engine:
        env = make_echo(engine)
        await env.setup()
        setattr(env, method, lambda *_: value)

        with pytest.raises(TypeError, match=message):
            await env.collect_trajectories({"word": "one"})
        await env.server.close()


class ThinkingEcho(EchoEnv):
    """The same, begun for the policy, scored with its thinking and by length."""

    scores_thinking = True
    min_trained_tokens = 5
    prefill = "<think>"

    def group_scores(self, scores: Sequence[float], trajectories: Sequence[Any]) -> list[float]:
        return [score - len(t.tokens) / 1000 for score, t in zip(scores, trajectories, strict=True)]


async def test_prefill_is_read_and_not_trained(make_echo: Callable[..., EchoEnv]) -> None:
    async with ScriptedEngine([PROBED, "hm</think>one", "one", "two"]) as engine:
        plain = make_echo(engine)
        env = ThinkingEcho(plain.config, plain.server_configs)
        group, _ = await env.collect_trajectories({"word": "one"})

    assert env.answers == ["<think>hm</think>one", "<think>one", "<think>two"]
    masked = [m.count(-100) for m in group["masks"]]
    assert masked == [28 + len("<think>")] * 3  # 27 prompt tokens behind the start token
    assert group["overrides"] == [{}] + [{"set_advantage_to_zero": True}] * 2
    assert group["scores"] == [-len(tokens) / 1000 for tokens in group["tokens"]]


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, ""), ("one", "one"), ([{"type": "text", "text": "one"}, {"text": "two"}], "onetwo")],
)
async def test_answers_are_text_also_where_a_provider_sends_parts(content: Any, text: str) -> None:
    async def answer(**_: Any) -> Any:
        message = SimpleNamespace(content=content)
        choice = SimpleNamespace(message=message, text=content, finish_reason="stop")
        return SimpleNamespace(choices=[choice])

    server = SimpleNamespace(chat_completion=answer, completion=answer)

    assert await ask(server, None, []) == [(text, "stop")]
    assert await complete(server, "") == [(text, "stop")]
    assert (await ChatPolicy(server, None).write([], max_tokens=1)).text == text


async def test_dataset_items_without_columns_say_what_to_write(
    make_echo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EchoEnv, "columns", ())

    async with ScriptedEngine() as engine:
        with pytest.raises(ConfigError, match=r"EchoEnv names no columns.*write columns = "):
            await make_echo(engine).setup()
