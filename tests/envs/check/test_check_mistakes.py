"""`check` on common mistakes: each is reported at its place, with a fitting remedy."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import random
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.check import check_environment
from atroposlib.envs.checks import watchers
from atroposlib.envs.checks.report import Outcome
from atroposlib.envs.conversation import Conversation, Reply
from atroposlib.envs.multi_turn_env import MultiTurnEnv
from atroposlib.envs.single_turn_env import SingleTurnEnv
from atroposlib.envs.tools import ToolConversation
from tests.envs.check.defects import SERVER, CleanEnv

pytestmark = pytest.mark.slow

METHOD_REMEDY = "correct the arguments or the return value of that method"


class Text(CleanEnv):
    def score(self, item: Any, choice: Any) -> Any:
        return "right"


class NumberAsText(CleanEnv):
    def score(self, item: Any, choice: Any) -> Any:
        return str(super().score(item, choice))


class NoScore(CleanEnv):
    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        row, backlog = await super().collect_trajectory(item)
        return {**row, "scores": None}, backlog


class SometimesNone(CleanEnv):
    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        row, backlog = await super().collect_trajectory(item)
        return (row if row["scores"] else None), backlog


class Sums(SingleTurnEnv):
    default_settings: ClassVar[dict[str, Any]] = {"tokenizer_name": "no/such-tokenizer"}

    async def setup(self) -> None:
        self.items = itertools.cycle([1, 2])

    async def get_next_item(self) -> Any:
        return next(self.items)

    def eval_items(self) -> Any:
        return [3]

    def prompt(self, item: Any) -> Any:
        return [{"role": "user", "content": f"{item} + 1?"}]

    async def score(self, item: Any, answer: str) -> float:
        return float(answer == str(item + 1))

    def check_gold_answer(self, item: Any) -> str:
        return str(item + 1)


class ScoreOfNone(Sums):
    async def score(self, item: Any, answer: str) -> Any:
        return None


class PromptIsText(Sums):
    def prompt(self, item: Any) -> Any:
        return f"What is {item} + 1?"


class ScoreWithoutItem(Sums):
    async def score(self, answer: str) -> float:  # type: ignore[override]  # the mistake
        return 1.0


class ScoreRaises(Sums):
    async def score(self, item: Any, answer: str) -> float:
        return float(answer)


def price(product: str) -> float:
    return 3.5


class Shopping(ToolConversation):
    async def score(self, turn: Any) -> Any:
        return "right"


class Shop(MultiTurnEnv):
    default_settings: ClassVar[dict[str, Any]] = {"tokenizer_name": "no/such-tokenizer"}

    async def get_next_item(self) -> Any:
        return 1

    def eval_items(self) -> Any:
        return [1]

    def start_conversation(self, item: Any) -> Any:
        return Shopping([{"role": "user", "content": "What is tea?"}], [price])

    def check_gold_answer(self, item: Any) -> str:
        return "3.5"


class LuckyScore(Sums):
    async def score(self, item: Any, answer: str) -> float:
        return random.random() + (1.0 if answer == str(item + 1) else 0.0)


class SlowScore(Sums):
    async def score(self, item: Any, answer: str) -> float:
        await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        return 1.0


class PooledScore(Sums):
    """Every call takes too long and counts as 0."""

    async def score(self, item: Any, answer: str) -> float:
        return await self.score_pool.run(time.sleep, 30, timeout=0.01, default=0.0)


class Chain(Conversation):
    """Say a word that begins with the last letter."""

    def opening(self) -> Any:
        return [{"role": "user", "content": "tea"}]

    async def reply(self, turn: Any) -> Any:
        return Reply(reward=float(turn.answer == "apple"), is_done=True)


class PlainReply(Chain):
    def reply(self, turn: Any) -> Any:
        return Reply(reward=1.0, is_done=True)


class AsyncOpening(Chain):
    async def opening(self) -> Any:
        return [{"role": "user", "content": "tea"}]


class TextOpening(Chain):
    def opening(self) -> Any:
        return "tea"


class ReplyOfNone(Chain):
    async def reply(self, turn: Any) -> Any:
        return None


class ReplyOfTexts(Chain):
    async def reply(self, turn: Any) -> Any:
        return Reply(["next word"])


class PlainClose(Chain):
    def close(self) -> None:  # type: ignore[override]  # accepted: there is nothing to wait for
        return


class Chains(MultiTurnEnv):
    default_settings: ClassVar[dict[str, Any]] = {"tokenizer_name": "no/such-tokenizer"}
    conversation: ClassVar[type[Conversation]] = Chain

    async def get_next_item(self) -> Any:
        return 1

    def start_conversation(self, item: Any) -> Any:
        return self.conversation()

    def check_gold_answer(self, item: Any) -> str:
        return "apple"


class AsyncStart(Chains):
    async def start_conversation(self, item: Any) -> Any:
        return Chain()


def failures(env_cls: type[Any]) -> dict[str, Outcome]:
    return {failure.name: failure for failure in check_environment(env_cls).failures}


def line_of(function: Callable[..., Any]) -> str:
    return f"test_check_mistakes.py:{inspect.getsourcelines(function)[1]}"


@pytest.mark.parametrize("env_cls", [Text, NumberAsText])
def test_check_score_that_is_a_text_is_the_one_failure(env_cls: type[CleanEnv]) -> None:
    [failure] = check_environment(env_cls).failures

    assert failure.name == "finite"
    assert failure.detail.startswith("scores[0] is '")
    assert failure.detail.endswith("'; expected a number")
    assert (failure.where or "").endswith(line_of(env_cls.score))
    assert failure.remedy.startswith("return a number for every answer")


class Silent(CleanEnv):
    """Makes no request, and returns no trajectory."""

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        return None, []


class DropsBadAnswers(SingleTurnEnv):
    """Sends the groups of right answers only, of which the check knows none."""

    default_settings: ClassVar[dict[str, Any]] = {"tokenizer_name": "no/such-tokenizer"}

    async def get_next_item(self) -> Any:
        return 1

    def prompt(self, item: Any) -> Any:
        return [{"role": "user", "content": "tea"}]

    async def score(self, item: Any, answer: str) -> float:
        return float(answer == "with milk")

    async def postprocess_histories(self, trajectories: Any) -> Any:
        return trajectories if any(trajectories["scores"]) else None


def test_check_rollouts_without_a_request_and_a_group_fail() -> None:
    failure = failures(Silent)["rollout"]

    assert failure.detail == "rollouts yield no group and make no request to the model"
    assert (failure.where or "").endswith(line_of(Silent.collect_trajectory))
    assert "self.server" in failure.remedy


def test_check_without_a_group_or_a_failure_refers_to_no_failures() -> None:
    report = check_environment(DropsBadAnswers)

    assert report.passed, report.text
    assert "bad answers alone yielded no group" in report.text
    assert "not reached, since no item yields a group" in report.text
    assert "see the failures" not in report.text


def test_check_rollouts_that_return_none_are_named() -> None:
    failure = failures(SometimesNone)["rollout"]

    assert failure.detail.endswith("collect_trajectory returned None for some of them")
    assert (failure.where or "").endswith(line_of(SometimesNone.collect_trajectory))


def test_check_score_that_is_none_is_named_at_the_rollout() -> None:
    failure = failures(NoScore)["rollout"]

    assert failure.detail.startswith("GroupError: scores[0] is None; expected a number")
    assert (failure.where or "").endswith(line_of(NoScore.collect_trajectory))


@pytest.mark.parametrize(
    ("env_cls", "method", "detail"),
    [
        (ScoreOfNone, ScoreOfNone.score, "ScoreOfNone.score returned None; expected a number"),
        (PromptIsText, PromptIsText.prompt, "PromptIsText.prompt returned"),
        (ScoreWithoutItem, ScoreWithoutItem.score, "ScoreWithoutItem.score() takes 2 positional"),
        (Shop, Shopping.score, "Shopping.score returned 'right'; expected a number"),
    ],
)
def test_check_method_that_does_not_fit_is_the_place(
    env_cls: type[BaseEnv], method: Callable[..., Any], detail: str
) -> None:
    found = failures(env_cls)

    for name in ("rollout", "evaluation"):
        assert detail in found[name].detail
        assert (found[name].where or "").endswith(line_of(method))
        assert found[name].remedy == METHOD_REMEDY


def test_check_score_by_luck_is_found_under_another_seed() -> None:
    [failure] = check_environment(LuckyScore).failures

    assert failure.name == "determinism"
    assert failure.detail.startswith("the same answer scores 0.")
    assert "under another" in failure.detail
    assert (failure.where or "").endswith(line_of(LuckyScore.score))
    assert failure.remedy.startswith("let the score depend on the item and the answer only")


def test_check_scoring_that_timed_out_is_called_that() -> None:
    failure = failures(SlowScore)["rollout"]

    assert failure.detail.startswith("scoring timed out in SlowScore.score: TimeoutError")
    assert "test_check_mistakes.py:" in (failure.where or "")
    assert failure.remedy.startswith("score in a worker with a time limit")


def test_check_default_of_a_scoring_that_timed_out_is_not_taken_for_a_score() -> None:
    report = check_environment(PooledScore)

    spread = next(failure for failure in report.failures if failure.name == "spread")
    assert spread.detail.endswith("; scoring timed out and returned its default")
    assert spread.remedy.startswith("time the scoring function with such an answer")
    assert any("scoring timed out 5 times" in note for note in report.notes)


@pytest.mark.parametrize(
    ("conversation", "method", "detail"),
    [
        (PlainReply, "reply", "PlainReply.reply is not async: write `async def reply(self, turn)`"),
        (AsyncOpening, "opening", "AsyncOpening.opening is async: write `def opening(self)`"),
        (TextOpening, "opening", "TextOpening.opening returned 'tea'; expected a list of messages"),
        (ReplyOfNone, "reply", "ReplyOfNone.reply returned None; expected a Reply such as"),
        (ReplyOfTexts, "reply", "ReplyOfTexts.reply gave the messages ['next word']; expected"),
    ],
)
def test_check_mistake_in_a_conversation_is_named_at_its_method(
    conversation: type[Conversation], method: str, detail: str
) -> None:
    env_cls = type("Wrong", (Chains,), {"conversation": conversation})

    failure = failures(env_cls)["rollout"]

    assert detail in failure.detail
    assert (failure.where or "").endswith(line_of(getattr(conversation, method)))
    assert failure.remedy == METHOD_REMEDY


def test_check_async_start_of_a_conversation_is_named() -> None:
    failure = failures(AsyncStart)["rollout"]

    assert "start_conversation is async: write `def start_conversation" in failure.detail
    assert (failure.where or "").endswith(line_of(AsyncStart.start_conversation))


def test_check_shows_returns_of_conversations_and_takes_a_plain_close() -> None:
    report = check_environment(type("Closing", (Chains,), {"conversation": PlainClose}))

    assert report.passed, report.text
    assert "gold 1, empty 0, garbage 0, truncated 0" in report.text


def test_check_line_that_raises_is_the_place_in_rollout_and_evaluation() -> None:
    found = failures(ScoreRaises)

    for name in ("rollout", "evaluation"):
        assert "could not convert" in found[name].detail
        assert "test_check_mistakes.py:" in (found[name].where or "")
        assert found[name].remedy == "correct that line, or the values that reach it"


def test_check_tool_without_docstring_is_noted() -> None:
    class Shopper(Shopping):
        async def score(self, turn: Any) -> float:
            return float(turn.answer == "3.5")

    class GoodShop(Shop):
        def start_conversation(self, item: Any) -> Any:
            return Shopper([{"role": "user", "content": "What is tea?"}], [price])

    report = check_environment(GoodShop)

    assert report.passed, report.text
    assert any(note.startswith("tool price has no docstring") for note in report.notes)


class PlainConfig(BaseEnvConfig):
    level: int = 3


def test_check_settings_without_those_of_the_base_class_are_named() -> None:
    env_cls = type("PlainSums", (Sums,), {"env_config_cls": PlainConfig})

    failure = failures(env_cls)["config"]

    assert "PlainSums: its settings are a PlainConfig; expected a subclass of SingleTurn" in (
        failure.detail
    )


class MisspelledOption(Sums):
    def sampling(self) -> dict[str, Any]:
        return {
            "temprature": 0.7,
            "guided_choice": ["yes"],
            "extra_body": {"topk": 5, "min_p": 0.1},
        }


def test_check_misspelled_sampling_option_is_noted() -> None:
    report = check_environment(MisspelledOption)

    noted = [note for note in report.notes if "did you mean" in note]
    assert [note.rpartition("; ")[2] for note in noted] == [
        "did you mean temperature?",
        "did you mean top_k?",
    ]


class Incomplete(BaseEnv):
    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Any]:
        return BaseEnvConfig(tokenizer_name="no/such-tokenizer"), [SERVER]


def test_check_missing_methods_say_what_to_write_and_leave_one_row_for_the_rest() -> None:
    report = check_environment(Incomplete)

    [failure] = report.failures
    assert failure.detail == "Incomplete has no evaluate, no get_next_item"
    assert (failure.where or "").endswith(line_of(Incomplete))
    assert failure.remedy == (
        "write `async def evaluate(self, *args, **kwargs)` and `async def get_next_item(self)`"
    )
    assert report.text.count("not reached; see the failures") == 1
    assert "19 others" in report.text
    assert len(report.as_json()["checks"]) == 20


class Misspelled(CleanEnv):
    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Any]:
        config = BaseEnvConfig(
            tokenizer_name="no/such-tokenizer",
            group_sise=8,  # type: ignore[call-arg]  # the mistake
        )
        return config, [SERVER]


class OwnSettings(CleanEnv):
    """Settings that are not declared: one resembles nothing, one is read although it does."""

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Any]:
        config, servers = super().config_init()
        own = {"temperature": 0.7, "eval_split": "test"}
        return BaseEnvConfig.model_validate({**dict(config), **own}), servers

    async def setup(self) -> None:
        await super().setup()
        self.split = getattr(self.config, "eval_split")  # noqa: B009 - undeclared


def test_check_misspelled_setting_in_python_is_reported_with_the_near_name() -> None:
    [failure] = check_environment(Misspelled).failures

    assert failure.name == "config"
    assert failure.detail == "env.group_sise: no such setting; did you mean env.group_size?"
    assert "declare a setting of your own" in failure.remedy


def test_check_undeclared_settings_of_an_environment_pass() -> None:
    report = check_environment(OwnSettings)

    assert report.passed, report.text


class ItemNotAwaited(Sums):
    async def get_next_item(self) -> Any:
        return super().get_next_item()


class ItemsYielded(Sums):
    async def get_next_item(self) -> Any:  # type: ignore[override]  # the mistake
        yield 1


class EndedItems(Sums):
    async def setup(self) -> None:
        self.items = iter([])


@pytest.mark.parametrize(
    ("env_cls", "detail"),
    [
        (ItemNotAwaited, "get_next_item returned an object of type coroutine; expected the item"),
        (ItemsYielded, "get_next_item returned an object of type async_generator; expected"),
        (EndedItems, "EndedItems.get_next_item raised StopIteration"),
    ],
)
def test_check_item_that_is_none_is_named(env_cls: type[BaseEnv], detail: str) -> None:
    failure = failures(env_cls)["rollout"]

    assert detail in failure.detail
    assert "test_check_mistakes.py:" in (failure.where or "")
    assert failure.remedy == METHOD_REMEDY


def test_check_prompt_without_room_is_reported_with_the_warning() -> None:
    class Cramped(Sums):
        default_settings: ClassVar[dict[str, Any]] = {
            **Sums.default_settings,
            "max_token_length": 2,
        }

    failure = failures(Cramped)["rollout"]

    assert failure.detail.startswith("no item yields a group: item skipped: its prompt leaves no")


def test_check_package_that_is_not_installed_is_not_blamed_on_the_code() -> None:
    class NeedsPackage(Sums):
        async def setup(self) -> None:
            import no_such_package  # type: ignore[import-not-found]  # noqa: F401

    failure = failures(NeedsPackage)["setup"]

    assert "No module named 'no_such_package'" in failure.detail
    assert failure.remedy.startswith("install what the error names")


def test_check_replies_without_their_end_are_noted() -> None:
    class Unended(CleanEnv):
        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            row, backlog = await super().collect_trajectory(item)
            if row["tokens"][-1] == self.tokenizer.eos_token_id:
                for name in ("tokens", "masks", "inference_logprobs"):
                    row[name] = row[name][:-1]
            return row, backlog

    report = check_environment(Unended)

    assert report.passed, report.text
    assert any("does not learn to stop" in note for note in report.notes)
    assert not any("to stop" in note for note in check_environment(CleanEnv).notes)


def test_check_temperature_zero_is_noted() -> None:
    class Greedy(Sums):
        default_settings: ClassVar[dict[str, Any]] = {**Sums.default_settings, "temperature": 0.0}

    report = check_environment(Greedy)

    assert report.passed, report.text
    assert any("temperature 0" in note for note in report.notes)


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"messages": [{"content": "?"}]}, "messages[0][0]: role and content are required"),
        ({"tokens": [-1]}, "tokens[0] holds the id -1"),
        ({"tokens": ["1"]}, "tokens[0][0] is '1'; expected a number"),
    ],
)
def test_check_group_that_the_service_or_the_base_class_drops_is_found(
    changes: dict[str, Any], detail: str
) -> None:
    class Wrong(CleanEnv):
        async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
            row, backlog = await super().collect_trajectory(item)
            if "tokens" in changes:
                return {**row, "tokens": [*changes["tokens"], *row["tokens"][1:]]}, backlog
            return {**row, **changes}, backlog

    assert detail in failures(Wrong)["shape"].detail


def test_check_group_without_tokens_is_one_failure() -> None:
    class Lacking(CleanEnv):
        async def postprocess_histories(self, trajectories: Any) -> Any:
            return {name: value for name, value in trajectories.items() if name != "tokens"}

    found = failures(Lacking)

    assert set(found) == {"shape"}
    assert "tokens: missing" in found["shape"].detail


class TakesPort(CleanEnv):
    async def setup(self) -> None:
        await super().setup()
        if PORT:
            raise OSError("address already in use")
        PORT.append(1)


PORT: list[int] = []


def test_check_run_that_fails_only_the_second_time_says_why() -> None:
    PORT.clear()

    failure = failures(TakesPort)["determinism"]

    assert failure.detail == (
        "a later run in the same process failed: OSError: address already in use"
    )
    assert "test_check_mistakes.py:" in (failure.where or "")
    assert "end in close() what setup has opened" in failure.remedy


class ExitsInSetup(CleanEnv):
    async def setup(self) -> None:
        sys.exit(0)


class ExitsInRollout(CleanEnv):
    def score(self, item: Any, choice: Any) -> float:
        sys.exit("no more disk")


class ExitsInEvaluation(CleanEnv):
    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        sys.exit(1)


@pytest.mark.parametrize(
    ("env_cls", "rule", "detail"),
    [
        (ExitsInSetup, "setup", "SystemExit: 0"),
        (ExitsInRollout, "rollout", "SystemExit: no more disk"),
        (ExitsInEvaluation, "evaluation", "SystemExit: 1"),
    ],
)
def test_check_program_that_ends_itself_fails_at_that_line(
    env_cls: type[BaseEnv], rule: str, detail: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = failures(env_cls)

    assert set(found) == {rule}
    assert found[rule].detail == detail
    assert "test_check_mistakes.py:" in (found[rule].where or "")
    assert "in place of sys.exit" in found[rule].remedy
    assert "never retrieved" not in caplog.text


def test_check_evaluation_that_lets_a_cancellation_pass_is_a_failure() -> None:
    class Cancelled(CleanEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> None:
            raise asyncio.CancelledError

    failure = failures(Cancelled)["evaluation"]

    assert "cancelled by its own code" in failure.detail


def test_check_name_like_markup_is_printed_as_it_is() -> None:
    class Marked(CleanEnv):
        name = "[b]ca[/i]"

    report = check_environment(Marked)

    assert report.text.startswith("check of [b]ca[/i]")


class Stuck(Sums):
    async def score(self, item: Any, answer: str) -> float:
        while True:
            time.sleep(0.001)  # noqa: ASYNC251 - the mistake


def test_check_call_that_never_returns_is_interrupted_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchers, "BLOCKED_S", 2.0)

    failure = failures(Stuck)["rollout"]

    assert "it blocks the event loop" in failure.detail
    assert "test_check_mistakes.py:" in (failure.where or "")
