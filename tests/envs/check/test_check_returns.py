"""`check` on hooks that return what cannot be used: one finding, at the hook."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import Any

import pytest

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.check import check_environment
from atroposlib.envs.checks import harness, runner, watchers
from tests.envs.check.defects import CleanEnv
from tests.envs.check.other_environments import Judged
from tests.envs.check.test_check_mistakes import Sums, failures

pytestmark = pytest.mark.slow


class GoldNumber(CleanEnv):
    def check_gold_answer(self, item: Any) -> Any:
        return 42

    def score(self, item: Any, choice: Any) -> float:
        return float("capital" in choice.message.content)


class GoldMessages(GoldNumber):
    def check_gold_answer(self, item: Any) -> Any:
        return [{"role": "assistant", "content": "Paris"}]


@pytest.mark.parametrize("env_cls", [GoldNumber, GoldMessages])
def test_check_gold_answer_that_is_no_text_is_named_at_its_method(env_cls: type[CleanEnv]) -> None:
    found = failures(env_cls)

    assert set(found) == {"rollout"}
    assert f"{env_cls.__name__}.check_gold_answer returned" in found["rollout"].detail
    assert "expected the text of a reply" in found["rollout"].detail
    assert "test_check_returns.py:" in (found["rollout"].where or "")


class JudgeNumber(Judged):
    def check_judge_reply(self, messages: Any) -> Any:
        return None if super().check_judge_reply(messages) is None else 7


def test_check_judge_reply_that_is_no_text_is_named() -> None:
    failure = failures(JudgeNumber)["rollout"]

    assert (
        failure.detail
        == "TypeError: JudgeNumber.check_judge_reply returned 7; expected a text or None"
    )


class JudgeWithoutScript(Judged):
    check_judge_reply = CleanEnv.check_judge_reply


def test_check_judge_without_a_script_is_advised_to_have_one() -> None:
    failure = failures(JudgeWithoutScript)["spread"]

    assert "define check_judge_reply(self, messages)" in failure.remedy


@pytest.mark.parametrize("token", [-5, 2_000_000])
def test_check_token_outside_the_vocabulary_is_one_failure(token: int) -> None:
    class Foreign(CleanEnv):
        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            row, backlog = await super().collect_trajectory(item)
            return {**row, "tokens": [*row["tokens"][:-1], token]}, backlog

    found = failures(Foreign)

    assert set(found) == {"shape"}
    assert f"holds the id {token}" in found["shape"].detail
    assert found["shape"].remedy.startswith("encode text with self.tokenizer")


@pytest.mark.parametrize("num_items", [1, 2])
def test_check_of_few_items_says_why_the_rest_was_not_tried(num_items: int) -> None:
    class Few(CleanEnv):
        async def get_next_item(self) -> Any:
            self.num_taken = getattr(self, "num_taken", 0) + 1
            return await super().get_next_item() if self.num_taken <= num_items else None

    report = check_environment(Few)

    skipped = {o.name: o.detail for o in report.outcomes if o.status == "skipped"}
    assert report.passed, report.text
    assert set(skipped) == {"siblings", "swallowed", "cancel"}
    assert all("no item was left" in detail for detail in skipped.values())


class ChangesItem(Sums):
    async def get_next_item(self) -> Any:
        return {"terms": [await super().get_next_item()]}

    def eval_items(self) -> Any:
        return [{"terms": [3]}]

    def prompt(self, item: Any) -> Any:
        item["terms"].append(1)
        return [{"role": "user", "content": f"{item['terms']}?"}]

    async def score(self, item: Any, answer: str) -> float:
        return float(answer == "right")

    def check_gold_answer(self, item: Any) -> str:
        return "right"


def test_check_of_a_single_turn_environment_has_places_in_its_own_methods() -> None:
    found = failures(ChangesItem)

    assert "test_check_returns.py:" in (found["items"].where or "")


class NoContent(Sums):
    def prompt(self, item: Any) -> Any:
        return [{"role": "user", "text": f"{item} + 1?"}]


def test_check_message_without_content_is_named() -> None:
    failure = failures(NoContent)["rollout"]

    assert "NoContent.prompt returned a message without content" in failure.detail
    assert "test_check_returns.py:" in (failure.where or "")


class NeverSetUp(CleanEnv):
    async def setup(self) -> None:
        await asyncio.Event().wait()


def test_check_setup_that_never_ends_fails_at_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "SETUP_LIMIT_S", 0.05)

    found = failures(NeverSetUp)

    assert set(found) == {"setup"}
    line = NeverSetUp.setup.__code__.co_firstlineno + 1
    assert (found["setup"].where or "").endswith(f"test_check_returns.py:{line}")
    assert found["setup"].remedy.startswith("find what it waits for")


def test_check_of_requests_with_tools_says_that_no_call_is_read() -> None:
    class Calling(CleanEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            return

        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            tool = {"type": "function", "function": {"name": "say", "parameters": {}}}
            await self.server.chat_completion(messages=self.messages(item), tools=[tool])
            return await super().collect_trajectory(item)

    notes = check_environment(Calling).notes

    assert any("its message.tool_calls is None" in note for note in notes)


class Pairs(CleanEnv):
    """Its groups have two trajectories by their nature."""

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Any]:
        config, servers = super().config_init()
        return config.model_copy(update={"group_size": 2}), servers

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        rows = [(await self.collect_trajectory(item))[0] for _ in range(2)]
        return {name: [row[name] for row in rows] for name in rows[0]}, []


class Even(CleanEnv):
    def __init__(self, config: BaseEnvConfig, *args: Any, **kwargs: Any) -> None:
        if config.group_size % 2:
            raise ValueError("group_size must be even")
        super().__init__(config, *args, **kwargs)


@pytest.mark.parametrize(
    ("env_cls", "size", "reason"),
    [(Pairs, 2, "wrong_size: 2 trajectories, expected 5"), (Even, 4, "must be even")],
)
def test_check_of_groups_of_one_size_uses_that_size_and_says_so(
    env_cls: type[CleanEnv], size: int, reason: str
) -> None:
    report = check_environment(env_cls)

    assert report.passed, report.text
    [note] = [note for note in report.notes if "group_size" in note]
    assert note.startswith(f"the check uses group_size {size}, as set")
    assert reason in note


def test_check_of_a_small_group_keeps_what_a_bad_answer_breaks() -> None:
    class Raises(Pairs):
        collect_trajectories = CleanEnv.collect_trajectories

        def score(self, item: Any, choice: Any) -> float:
            return 1 / (0 if "zqxv" in choice.message.content else 1)

    assert "ZeroDivisionError" in failures(Raises)["rollout"].detail


class OwnName(CleanEnv):
    """Its evaluation logs a metric whose name does not say so."""

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        await self.server.chat_completion(messages=self.messages({"country": "Fiji"}))
        self.accuracy = 0.5

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {"test/accuracy": self.accuracy, **(wandb_metrics or {})}
        await super().wandb_log(metrics)


def test_check_evaluation_may_log_metrics_of_any_name() -> None:
    report = check_environment(OwnName)

    assert report.passed, report.text
    assert "logged test/accuracy" in report.text


class TrainMetricsOnly(OwnName):
    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        await BaseEnv.wandb_log(self, {"train/percent_correct": 0.5})


class NoMetrics(OwnName):
    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.accuracy = 0.5
        await self.server.chat_completion(messages=self.messages({"country": "Fiji"}))
        await self.evaluate_log({}, verbose=False)


@pytest.mark.parametrize(
    ("env_cls", "detail"),
    [(TrainMetricsOnly, "no result was written"), (NoMetrics, "metrics.json has no metric")],
)
def test_check_evaluation_without_a_result_of_its_own_fails(
    env_cls: type[CleanEnv], detail: str
) -> None:
    assert detail in failures(env_cls)["evaluation"].detail


class Placeholder(CleanEnv):
    """A failed rollout becomes a trajectory that no model wrote."""

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        try:
            return await super().collect_trajectory(item)
        except Exception:  # noqa: BLE001 - the defect
            row = {"tokens": [5, 6], "masks": [-100, 6], "inference_logprobs": [1.0, -0.1]}
            return {**row, "scores": 0.0}, []


def test_check_failed_rollout_that_becomes_a_trajectory_is_found() -> None:
    found = failures(Placeholder)

    assert set(found) == {"swallowed"}
    assert "a trajectory without a reply takes its place" in found["swallowed"].detail


class Retries(CleanEnv):
    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        try:
            return await super().collect_trajectory(item)
        except Exception:  # noqa: BLE001 - it is tried again
            return await super().collect_trajectory(item)


def test_check_failed_rollout_that_is_tried_again_passes() -> None:
    report = check_environment(Retries)

    assert report.passed, report.text
    assert "retries a failed request itself" in report.text


class ScoresOfOthers(CleanEnv):
    async def postprocess_histories(self, trajectories: Any) -> Any:
        return {**trajectories, "scores": trajectories["scores"][::-1]}


@pytest.mark.parametrize("group_size", [5, 6, 7, 8])
def test_check_scores_in_another_order_than_the_trajectories_are_found(group_size: int) -> None:
    report = check_environment(ScoresOfOthers, group_size=group_size)

    assert "wrong" in {failure.name for failure in report.failures}


class OneTrajectory(CleanEnv):
    async def postprocess_histories(self, trajectories: Any) -> Any:
        names = ("tokens", "masks", "inference_logprobs")
        first = {name: [trajectories[name][0]] * len(trajectories[name]) for name in names}
        return {**trajectories, **first}


def test_check_group_of_one_trajectory_with_the_scores_of_others_is_found() -> None:
    found = failures(OneTrajectory)

    assert set(found) == {"spread"}
    assert "the model gave 4 different replies" in found["spread"].detail
    assert found["spread"].remedy.startswith("add the tokens, masks and logprobs of each reply")


class CancelledSetup(CleanEnv):
    async def setup(self) -> None:
        raise asyncio.CancelledError


class CancelledClose(CleanEnv):
    async def close(self) -> None:
        raise asyncio.CancelledError


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a task does not know who cancels it")
@pytest.mark.parametrize(
    ("env_cls", "rule"), [(CancelledSetup, "setup"), (CancelledClose, "leftovers")]
)
def test_check_cancellation_that_a_hook_lets_pass_is_a_failure(
    env_cls: type[CleanEnv], rule: str
) -> None:
    found = failures(env_cls)

    assert set(found) == {rule}
    assert "let a CancelledError pass" in found[rule].detail
    assert "test_check_returns.py:" in (found[rule].where or "")


async def never() -> None:
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


class EndlessSetup(CleanEnv):
    async def setup(self) -> None:
        await never()


class EndlessClose(CleanEnv):
    async def close(self) -> None:
        await never()


@pytest.mark.parametrize(
    ("env_cls", "rule"), [(EndlessSetup, "setup"), (EndlessClose, "leftovers")]
)
def test_check_hook_that_swallows_its_cancellation_is_left_behind(
    env_cls: type[CleanEnv], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "SETUP_LIMIT_S", 0.05)
    monkeypatch.setattr(harness, "STEP_LIMIT_S", 0.05)
    monkeypatch.setattr(runner, "CANCEL_LIMIT_S", 0.05)
    monkeypatch.setattr(watchers, "GRACE_S", 0.05)

    found = failures(env_cls)

    assert set(found) == {rule}
    assert found[rule].detail == "StepTimeoutError: did not end within 0.05 s"
    assert "test_check_returns.py:" in (found[rule].where or "")
