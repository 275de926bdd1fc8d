"""A clean environment, and one like it with each defect that `check` must find."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import socket
import time
from typing import Any, ClassVar

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

__all__ = ["DEFECTS", "CleanEnv"]

SERVER = APIServerConfig(model_name="m", base_url="http://localhost:9/v1", server_type="vllm")
TASKS: set[Any] = set()
COUNTER = itertools.count()


class CleanEnv(BaseEnv):
    """Capitals of countries: one question, a trajectory per rollout."""

    name = "capitals"
    capitals: ClassVar[dict[str, str]] = {"France": "Paris", "Peru": "Lima", "Chad": "N'Djamena"}

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Any]:
        config = BaseEnvConfig(group_size=4, tokenizer_name="no/such-tokenizer", use_wandb=False)
        return config, [SERVER]

    async def setup(self) -> None:
        self.items = itertools.cycle(
            [{"country": name, "capital": city} for name, city in self.capitals.items()]
        )

    async def get_next_item(self) -> Any:
        return dict(next(self.items))

    def check_gold_answer(self, item: Any) -> str:
        return f"The capital is {item['capital']}."

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as session:
            reply = await session.chat_completion(messages=self.messages(item), max_tokens=64)
            node = session.get_state()["nodes"][0]
        return {
            "tokens": node.tokens,
            "masks": node.masked_tokens,
            "inference_logprobs": node.logprobs,
            "scores": self.score(item, reply.choices[0]),
        }, []

    def messages(self, item: Any) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"What is the capital of {item['country']}?"}]

    def score(self, item: Any, choice: Any) -> float:
        return float(choice.message.content == self.check_gold_answer(item))

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        reply = await self.server.chat_completion(
            messages=self.messages({"country": "Fiji"}), split="eval"
        )
        score = self.score({"capital": "Suva"}, reply.choices[0])
        await self.evaluate_log({"eval/accuracy": score}, verbose=False)


class WrongMask(CleanEnv):
    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        row, backlog = await super().collect_trajectory(item)
        row["masks"] = list(row["tokens"])
        return row, backlog


class ForeignMask(CleanEnv):
    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        row, backlog = await super().collect_trajectory(item)
        row["masks"] = [int(mask != -100) for mask in row["masks"]]
        return row, backlog


class ShortAdvantages(CleanEnv):
    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        data, later = await super().collect_trajectory(item)
        return {**data, "advantages": [data["scores"]]}, later


class ShiftedLogprobs(CleanEnv):
    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        row, backlog = await super().collect_trajectory(item)
        row["inference_logprobs"] = [*row["inference_logprobs"][1:], 1.0]
        return row, backlog


class GarbageScoresBest(CleanEnv):
    def score(self, item: Any, choice: Any) -> float:
        return 2.0 if "zqxv" in choice.message.content else super().score(item, choice)


class AnswerInPrompt(CleanEnv):
    def messages(self, item: Any) -> list[dict[str, str]]:
        answer = self.capitals.get(item["country"], "Suva")
        return [{"role": "user", "content": f"Capital? (It is {answer}.)"}]

    def score(self, item: Any, choice: Any) -> float:
        return float(item["capital"] in choice.message.content)


class NonDeterminism(CleanEnv):
    """The seed of a run does not reach it."""

    def score(self, item: Any, choice: Any) -> float:
        return super().score(item, choice) + random.SystemRandom().random() / 2


class ClockInPrompt(CleanEnv):
    def messages(self, item: Any) -> list[dict[str, str]]:
        return [*super().messages(item), {"role": "user", "content": f"It is {next(COUNTER)}."}]


class MutatedItem(CleanEnv):
    def score(self, item: Any, choice: Any) -> float:
        item["num_answers"] = item.get("num_answers", 0) + 1
        return super().score(item, choice)


class NotANumber(CleanEnv):
    def score(self, item: Any, choice: Any) -> float:
        return super().score(item, choice) if choice.message.content else math.nan


class EqualScores(CleanEnv):
    def score(self, item: Any, choice: Any) -> float:
        return 1.0


class TruncatedCounts(CleanEnv):
    def score(self, item: Any, choice: Any) -> float:
        return 1.0 if choice.finish_reason == "length" else super().score(item, choice)


class LeakingTask(CleanEnv):
    async def setup(self) -> None:
        await super().setup()
        TASKS.add(asyncio.create_task(self.watch()))

    async def watch(self) -> None:
        await asyncio.Event().wait()


class HubAccess(CleanEnv):
    async def setup(self) -> None:
        await super().setup()
        try:
            socket.create_connection(("huggingface.co", 443), timeout=1)
        except RuntimeError:
            self.items = itertools.cycle([{"country": "Fiji", "capital": "Suva"}])


class BlockingCall(CleanEnv):
    def score(self, item: Any, choice: Any) -> float:
        time.sleep(0.15)
        return super().score(item, choice)


class SwallowedException(CleanEnv):
    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        try:
            return await super().collect_trajectory(item)
        except Exception:  # noqa: BLE001 - the defect
            return None, []


DEFECTS: list[tuple[type[CleanEnv], str]] = [
    (WrongMask, "masks"),
    (ForeignMask, "masks"),
    (ShortAdvantages, "shape"),
    (ShiftedLogprobs, "logprobs"),
    (GarbageScoresBest, "wrong"),
    (AnswerInPrompt, "wrong"),
    (NonDeterminism, "determinism"),
    (ClockInPrompt, "determinism"),
    (MutatedItem, "items"),
    (NotANumber, "finite"),
    (EqualScores, "spread"),
    (TruncatedCounts, "truncated"),
    (LeakingTask, "leftovers"),
    (HubAccess, "network"),
    (BlockingCall, "blocking"),
    (SwallowedException, "swallowed"),
]
"""Each defect with the one rule that it breaks."""
