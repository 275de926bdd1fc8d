"""Evaluations: their items and samples, and the file from which an interrupted one continues."""

from __future__ import annotations

import asyncio
import enum
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.conversation import Conversation, Reply, Turn
from atroposlib.envs.evaluation import item_ids_of, stable_form, take_evenly
from atroposlib.envs.multi_turn_env import MultiTurnEnv, MultiTurnEnvConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from tests.envs.conversations import OPENING
from tests.envs.live_service import until
from tests.fakes import ScriptedEngine

ITEMS = ["one", "two", "three", "four"]
EVALS = Path("evals")
PROGRESS = EVALS / "progress.jsonl"


class InterruptedTestError(Exception):
    """Stands for whatever ends an evaluation early."""


class WordEnv(SingleTurnEnv):
    """Say the word; `broken` is a word whose answer cannot be scored."""

    name = "words"
    items: Sequence[Any] = ITEMS
    broken: str | None = None

    async def get_next_item(self) -> Any:
        return self.items[0]

    def eval_items(self) -> Sequence[Any]:
        return self.items

    def prompt(self, item: Any) -> Sequence[Mapping[str, Any]]:
        return [{"role": "user", "content": f"Say {item}."}]

    async def score(self, item: Any, answer: str) -> float:
        if item == self.broken:
            raise InterruptedTestError
        return float(answer == str(item))


class SavingConversation(Conversation):
    """Collects the words of the policy until `stop`; its state is needed for a metric."""

    def __init__(self, item: str) -> None:
        self.item = item
        self.words: list[str] = []

    def opening(self) -> Sequence[Any]:
        return OPENING

    async def reply(self, turn: Turn) -> Reply:
        if turn.text == self.item:
            raise InterruptedTestError
        self.words.append(turn.text)
        is_last = len(self.words) == 2
        return Reply("" if is_last else f"heard {turn.text}", reward=1.0, is_done=is_last)


class SavingEnv(MultiTurnEnv):
    name = "saving"
    items: Sequence[str] = ("first", "second")

    async def get_next_item(self) -> str:
        return self.items[0]

    def eval_items(self) -> Sequence[str]:
        return self.items

    def start_conversation(self, item: str) -> Conversation:
        return SavingConversation(item)

    def metrics_of(self, rollouts: Any, area: str) -> dict[str, float]:
        counts = [len(rollout.conversation.words) for rollout in rollouts]
        return {**super().metrics_of(rollouts, area), f"{area}/words": float(sum(counts))}


Make = Callable[..., Any]


@pytest.fixture
def make(make_env: Make) -> Make:
    """Build one of the environments above at an engine."""
    make_env()  # puts the character tokenizer in place

    def build(env_cls: Any, engine: ScriptedEngine, *, model: str = "m", **settings: Any) -> Any:
        config_cls = MultiTurnEnvConfig if env_cls is SavingEnv else SingleTurnEnvConfig
        chosen = {"use_wandb": False, "data_dir_to_save_evals": str(EVALS), **settings}
        server = APIServerConfig(
            model_name=model, base_url=engine.base_url, server_type="vllm", health_check=False
        )
        return env_cls(config_cls(tokenizer_name="characters", **chosen), server)

    return build


async def interrupt(make: Make, engine: ScriptedEngine, **settings: Any) -> None:
    """Evaluate all items but the last, whose answer cannot be scored."""
    env = make(WordEnv, engine, **settings)
    env.broken = ITEMS[-1]
    with pytest.raises(InterruptedTestError):
        await env.evaluate()
    await env.server.close()


def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((EVALS / "metrics.json").read_text())
    return found


def samples() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EVALS / "samples.jsonl").read_text().splitlines()]


async def test_finished_samples_are_not_asked_again(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedEngine(["one"]) as engine:
        await interrupt(make, engine)
        before = len(engine.requests)
        with caplog.at_level(logging.INFO):
            env = make(WordEnv, engine)
            await env.evaluate()
        asked = [r.body["messages"][0]["content"] for r in engine.requests[before:]]
        await env.server.close()

    assert asked == ["Say four."]
    assert "resuming: 3 finished samples" in caplog.text
    assert "3 finished samples are kept in evals/progress.jsonl" in caplog.text
    assert "1 of 4 samples of the evaluation failed: InterruptedTestError (1)" in caplog.text
    assert report()["results"]["all"]["eval/mean_score"] == 0.25
    assert [sample["score"] for sample in samples()] == [1.0, 0.0, 0.0, 0.0]
    assert not PROGRESS.exists()


async def test_evaluation_after_a_finished_one_starts_from_zero(make: Make) -> None:
    async with ScriptedEngine(["one"]) as engine:
        for _ in range(2):
            env = make(WordEnv, engine)
            await env.evaluate()
            await env.server.close()

        assert len(engine.requests) == 2 * len(ITEMS)
    assert (EVALS / "metrics-1.json").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"eval_temperature": 0.5}, "another setting eval_temperature"),
        ({"model": "aliased"}, "another model"),
        (
            {"max_token_length": 3000, "model": "aliased"},
            "another model, setting max_token_length",
        ),
    ],
)
async def test_other_model_or_settings_start_from_zero_and_keep_the_file(
    make: Make, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str
) -> None:
    async with ScriptedEngine(["one"], aliases=("m", "aliased")) as engine:
        await interrupt(make, engine)
        before = len(engine.requests)
        env = make(WordEnv, engine, **changes)
        await env.evaluate()
        await env.server.close()

        assert len(engine.requests) - before == len(ITEMS)
    assert reason in caplog.text
    assert "Its 3 samples are kept in progress-1.jsonl" in caplog.text
    kept = (EVALS / "progress-1.jsonl").read_text().splitlines()
    assert len(kept) == 1 + 3


async def test_settings_of_rollouts_and_logs_do_not_start_from_zero(make: Make) -> None:
    async with ScriptedEngine(["one"]) as engine:
        await interrupt(make, engine)
        before = len(engine.requests)
        env = make(
            WordEnv,
            engine,
            use_tensorboard=True,
            straggler_policy="RETRY",
            straggler_timeout_s=5.0,
            rollout_grace_s=1.0,
        )
        await env.evaluate()
        await env.server.close()

        assert len(engine.requests) - before == 1


async def test_line_that_a_kill_cut_is_asked_again(make: Make) -> None:
    async with ScriptedEngine(["one"]) as engine:
        await interrupt(make, engine)
        content = PROGRESS.read_bytes()
        PROGRESS.write_bytes(content[:-20])
        before = len(engine.requests)
        env = make(WordEnv, engine)
        await env.evaluate()
        await env.server.close()

        assert len(engine.requests) - before == 2


async def test_unreadable_file_is_set_aside(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    EVALS.mkdir()  # noqa: ASYNC240 - before anything runs
    PROGRESS.write_text("not JSON\n")
    async with ScriptedEngine(["one"]) as engine:
        env = make(WordEnv, engine)
        await env.evaluate()
        await env.server.close()

    assert "it is not readable" in caplog.text
    assert (EVALS / "progress-1.jsonl").read_text() == "not JSON\n"


async def test_eval_resume_false_writes_no_file(make: Make) -> None:
    async with ScriptedEngine(["one"]) as engine:
        await interrupt(make, engine, eval_resume=False)

    assert not PROGRESS.exists()


async def test_evaluation_under_serve_writes_no_file(make: Make) -> None:
    async with ScriptedEngine(["one"]) as engine:
        env = make(WordEnv, engine)
        env.broken = ITEMS[-1]
        env.service_session = object()  # as after registration
        with pytest.raises(InterruptedTestError):
            await env.evaluate()
        env.service_session = None
        await env.server.close()

    assert not PROGRESS.exists()


async def test_more_samples_use_the_finished_ones(make: Make) -> None:
    async with ScriptedEngine(["one"]) as engine:
        await interrupt(make, engine, eval_temperature=1.0)
        before = len(engine.requests)
        env = make(WordEnv, engine, eval_temperature=1.0, eval_samples_per_item=3)
        await env.evaluate()
        await env.server.close()

        assert len(engine.requests) - before == 3 * len(ITEMS) - 3


async def test_several_samples_give_pass_at_k(make: Make) -> None:
    async with ScriptedEngine(lambda prompt: "one" if "one" in prompt else "no") as engine:
        env = make(WordEnv, engine, eval_samples_per_item=4, eval_temperature=1.0)
        await env.evaluate()
        await env.server.close()
        temperatures = {request.body["temperature"] for request in engine.requests}

    metrics = report()["results"]["all"]
    assert temperatures == {1.0}
    assert {k: metrics[f"eval/pass_at_{k}"] for k in (1, 2, 4)} == {1: 0.25, 2: 0.25, 4: 0.25}
    assert "eval/pass_at_4_ci_high" in metrics
    assert report()["config_general"]["generation_parameters"]["samples_per_item"] == 4
    first = samples()[:5]
    assert [sample["sample_index"] for sample in first] == [0, 1, 2, 3, 0]
    assert len({sample["item_id"] for sample in first}) == 2
    assert first[0]["metric_values"] == {"eval/mean_score": 1.0}


async def test_several_samples_at_temperature_zero_are_warned_about(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedEngine(["one"]) as engine:
        env = make(WordEnv, engine, eval_samples_per_item=2)
        await env.evaluate()
        await env.server.close()

    assert "--env.eval_temperature" in caplog.text


async def test_record_without_a_score_has_metrics_of_its_own(make: Make) -> None:
    class LengthEnv(WordEnv):
        async def evaluate_item(self, item: Any) -> dict[str, Any]:
            return {"length": len(item)}

        def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
            return {"eval/total_length": float(sum(sample["length"] for sample in samples))}

    async with ScriptedEngine([]) as engine:
        env = make(LengthEnv, engine)
        await env.evaluate()
        await env.server.close()

    assert report()["results"]["all"] == {"eval/total_length": 15.0}


async def test_limit_takes_items_evenly(make: Make) -> None:
    async with ScriptedEngine(["one"]) as engine:
        env = make(WordEnv, engine, eval_limit=2)
        await env.evaluate()
        await env.server.close()
        asked = {request.body["messages"][0]["content"] for request in engine.requests}

    assert asked == {"Say one.", "Say three."}


async def test_items_without_a_stable_form_are_asked_again(make: Make) -> None:
    class OpaqueEnv(WordEnv):
        items: Sequence[Any] = (object(), object())

    async with ScriptedEngine(["one"]) as engine:
        env = make(OpaqueEnv, engine)
        env.broken = env.items[1]
        with pytest.raises(InterruptedTestError):
            await env.evaluate()
        await env.server.close()

    assert not PROGRESS.exists()


async def test_cancelled_evaluation_keeps_what_is_finished(make: Make) -> None:
    async with ScriptedEngine(["one"]) as engine:
        env = make(WordEnv, engine)
        done = asyncio.Event()

        class WaitingEnv(WordEnv):
            async def score(self, item: Any, answer: str) -> float:
                if item == "two":
                    done.set()
                    await asyncio.Event().wait()
                return 1.0

        await env.server.close()
        env = make(WaitingEnv, engine)
        task = asyncio.ensure_future(env.evaluate())
        await done.wait()
        await until(lambda: PROGRESS.exists() and len(PROGRESS.read_text().splitlines()) == 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await env.server.close()

    assert len(PROGRESS.read_text().splitlines()) == len(ITEMS)  # the identity and three samples


async def test_conversations_are_repeated_from_their_record(make: Make) -> None:
    async with ScriptedEngine(["second"]) as engine:
        env = make(SavingEnv, engine)
        with pytest.raises(InterruptedTestError):
            await env.evaluate()
        await env.server.close()
        engine.replies = ["hello"]
        before = len(engine.requests)
        env = make(SavingEnv, engine)
        await env.evaluate()
        await env.server.close()

        # Two turns of the second item; the first is repeated without a request.
        assert len(engine.requests) - before == 2
    metrics = report()["results"]["all"]
    assert metrics["eval/words"] == 4.0
    assert metrics["eval/mean_return"] == 2.0
    assert samples()[0]["messages"][1]["content"] == "second"


async def test_conversation_that_goes_another_way_is_played_again(make: Make) -> None:
    async with ScriptedEngine(["second"]) as engine:
        env = make(SavingEnv, engine)
        with pytest.raises(InterruptedTestError):
            await env.evaluate()
        await env.server.close()
        PROGRESS.write_text(PROGRESS.read_text().replace("heard second", "heard nothing"))
        engine.replies = ["hello"]
        before = len(engine.requests)
        env = make(SavingEnv, engine)
        await env.evaluate()
        await env.server.close()

        assert len(engine.requests) - before == 4


class Color(enum.Enum):
    RED = "red"


class Pair(NamedTuple):
    left: int
    right: Any


@dataclass
class Problem:
    text: str
    values: tuple[int, ...]


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (Pair(1, Color.RED), [1, "red"]),
        (Problem("a", (1, 2)), {"text": "a", "values": [1, 2]}),
        ({1: {"b", "a"}}, {"1": ['"a"', '"b"']}),
        (np.arange(2), [0, 1]),
        (Path("a") / "b", "a/b"),
    ],
)
def test_stable_form_of_common_items(value: Any, form: Any) -> None:
    assert stable_form(value) == form


def test_ids_depend_on_content_and_number_equal_items() -> None:
    ids, num_unstable = item_ids_of([{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 2}, object()])

    assert ids[1] == f"{ids[0]}-2"
    assert ids[2] != ids[0]
    assert (ids[3], num_unstable) == ("position-3", 1)


@pytest.mark.parametrize(
    ("count", "limit", "expected"),
    [(4, None, [0, 1, 2, 3]), (4, 9, [0, 1, 2, 3]), (9, 3, [0, 3, 6]), (5, 2, [0, 2])],
)
def test_items_are_taken_evenly(count: int, limit: int | None, expected: list[int]) -> None:
    assert list(take_evenly(range(count), limit)) == expected
