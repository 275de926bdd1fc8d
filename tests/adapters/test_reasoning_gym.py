"""The adapter of reasoning-gym, against the installed package."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym")

from atroposlib.adapters.reasoning_gym import ReasoningGymAdapter
from atroposlib.adapters.registry import make_adapter
from atroposlib.envs.conversation import Turn
from atroposlib.errors import ConfigError, EpisodeTimeoutError
from atroposlib.tasks.reasoning_gym import TaskItem
from tests.adapters.playing import adapter_env, roll_out

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]


async def opened(name: str, *, seed: int = 3, **args: Any) -> ReasoningGymAdapter:
    adapter = make_adapter(f"reasoning-gym:{name}", {"score_workers": 0, **args}, seed=seed)
    await adapter.open()
    assert isinstance(adapter, ReasoningGymAdapter)
    return adapter


async def question(adapter: ReasoningGymAdapter, item: Any) -> str:
    messages = await adapter.start(item).begin()
    return str(messages[-1]["content"])


async def test_right_and_wrong_answers_are_scored_with_exact_tokens(
    make_env: Callable[..., Any],
) -> None:
    make_env()  # puts the character tokenizer in place
    replies: list[str] = ["ok"]

    async with adapter_env(
        "reasoning-gym:chain_sum", {"score_workers": 1}, lambda _: replies.pop(0)
    ) as env:
        item = await env.get_next_item()
        replies += [env.check_gold_answer(item), "<answer>no</answer>"]
        rollouts, group = await roll_out(env, item)

    assert sorted(group["scores"]) == [0.0, 1.0]
    assert sorted(rollout.metrics["correct"] for rollout in rollouts) == [0.0, 1.0]


async def test_items_are_json_and_make_the_same_question_again() -> None:
    first, again = await opened("chain_sum+leg_counting"), await opened("chain_sum+leg_counting")

    items = [await first.item(index) for index in range(8)]

    assert items == [await again.item(index) for index in range(8)]
    for item in items:
        copied = json.loads(json.dumps(item))
        assert await question(first, item) == await question(again, copied)
    assert len({await question(first, item) for item in items}) == 8


async def test_weights_decide_how_often_a_task_is_drawn() -> None:
    adapter = await opened(
        "chain_sum+leg_counting+countdown", weights={"countdown": 8, "chain_sum": 0}
    )

    drawn = Counter([(await adapter.item(index))["task"] for index in range(300)])

    assert drawn["chain_sum"] == 0
    assert 5 < drawn["countdown"] / drawn["leg_counting"] < 14


async def test_all_offers_every_task_that_can_be_built() -> None:
    adapter = await opened("all", complexity="random")

    assert len(adapter.names) > 90
    complexities = [(await adapter.item(index))["complexity"] for index in range(5)]
    assert len(set(complexities)) == 5


async def test_curriculum_follows_the_rewards_and_survives_a_restart() -> None:
    adapter = await opened("chain_sum", complexity="curriculum")
    start = (await adapter.item(0))["complexity"]
    for index in range(4):
        adapter.note_rewards(await adapter.item(index), [1.0, 1.0])
    harder = (await adapter.item(4))["complexity"]
    restarted = await opened("chain_sum", complexity="curriculum")
    restarted.restore(json.loads(json.dumps(adapter.state())))

    assert harder > start
    assert (await restarted.item(4))["complexity"] == harder
    assert adapter.metrics()["curriculum/chain_sum"] == harder


async def test_evaluation_questions_are_not_trained_on() -> None:
    adapter = await opened("coin_flip", eval_items_per_task=5)

    held_out = {await question(adapter, item) for item in await adapter.eval_items(5)}
    trained = {await question(adapter, await adapter.item(index)) for index in range(40)}

    assert held_out
    assert held_out.isdisjoint(trained)


async def test_answer_that_would_run_as_code_scores_zero(tmp_path: Path) -> None:
    adapter = await opened("n_queens")
    item = await adapter.item(0)
    target = tmp_path / "made"
    answer = f"<answer>open({str(target)!r}, 'w')</answer>"

    reply = await adapter.start(item).reply(Turn(answer, 0, ()))

    assert reply.reward == 0.0
    assert not target.exists()


async def test_generator_that_does_not_return_holds_up_its_item_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on, threads = threading.Event(), []

    def takes_minutes(config: Any, index: int, complexity: Any = None) -> TaskItem:
        threads.append(threading.current_thread())
        assert index or go_on.wait(60)
        return TaskItem("chain_sum", {}, {"question": "1?", "answer": "1"})

    adapter = await opened("chain_sum")
    monkeypatch.setattr("atroposlib.tasks.reasoning_gym.train_item", takes_minutes)
    monkeypatch.setattr(adapter, "step_timeout_s", 0.2)
    with pytest.raises(EpisodeTimeoutError, match=r"chain_sum made no question within 0\.2 s"):
        await adapter.start(await adapter.item(0)).begin()
    monkeypatch.setattr(adapter, "step_timeout_s", 60)
    opening = await adapter.start(await adapter.item(1)).begin()
    go_on.set()

    assert opening[-1]["content"] == "1?"
    assert all(thread.daemon for thread in threads)  # the process can end meanwhile


async def test_rollouts_of_an_item_have_one_question_which_is_scored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, begun, go_on = itertools.count(), threading.Event(), threading.Event()

    def another_each_time(config: Any, index: int, complexity: Any = None) -> TaskItem:
        number = next(made)
        begun.set()
        assert go_on.wait(30)
        return TaskItem("chain_sum", {}, {"question": f"{number}?", "answer": f"{number}"})

    adapter = await opened("chain_sum")
    monkeypatch.setattr("atroposlib.tasks.reasoning_gym.train_item", another_each_time)
    episodes = [adapter.start(await adapter.item(7)) for _ in range(4)]

    beginning = asyncio.gather(*(episode.begin() for episode in episodes))
    await asyncio.to_thread(begun.wait, 30)
    go_on.set()
    openings = await beginning
    adapter._made.cache_clear()  # as after many other items
    replies = [await e.reply(Turn("<answer>0</answer>", 0, ())) for e in episodes]

    assert [opening[-1]["content"] for opening in openings] == ["0?"] * 4
    assert [reply.reward for reply in replies] == [1.0] * 4


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("chain_summ", {}, "did you mean chain_sum"),
        ("chain_sum", {"weights": {"countdown": 1}}, "'countdown' is not in the mixture"),
        ("chain_sum", {"weights": {"chain_sum": 0}}, "one above 0"),
        ("chain_sum", {"complexity": 1.5}, "from 0 to 1"),
        ("chain_sum", {"task_params": {"chain_sum": {"min_terms": -3}}}, "cannot be built"),
    ],
)
async def test_wrong_settings_are_named_before_the_first_rollout(
    name: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await opened(name, **args)


@pytest.mark.long
def test_check_command_is_green(tmp_path: Path) -> None:
    spec = "reasoning-gym:chain_sum+leg_counting"

    done = subprocess.run(
        [sys.executable, "-m", "atroposlib.cli.env", spec, "check"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )

    assert done.returncode == 0, done.stdout + done.stderr
