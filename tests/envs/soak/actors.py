"""A real environment, an engine and a trainer, in the hands of chance."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from typing import Any

from aiohttp import web

from atroposlib.wire import MEDIA_TYPES, decode_batch
from environments.gsm8k_server import GSM8kEnv, gold_answer
from tests.api.soak.actors import Actor
from tests.api.soak.ledger import Ledger
from tests.fakes import Fault, ScriptedEngine

__all__ = ["LEASE_S", "ChaosEngine", "ChaosEnv", "LeasingTrainer", "Odds"]

LEASE_S = 30
"""How long the trainer may keep a batch."""

KINDS = ("status", "drop", "garbage", "fewer_choices", "no_logprobs", "hang")
WORDS = ("", "\\boxed{", "\\boxed{}", "garbage ((( \\frac{", "<think>never ends", "\\boxed{-1}")


class Odds:
    """How often what goes wrong, and how often it did."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.happened: Counter[str] = Counter()

    def strike(self, name: str, probability: float) -> bool:
        """Tell whether something goes wrong now, and count it."""
        is_hit = self.rng.random() < probability
        self.happened[name] += is_hit
        return is_hit


class ChaosEngine(ScriptedEngine):
    """Answers problems right, wrong or not at all, and fails requests in every way it knows."""

    def __init__(self, odds: Odds, answers: dict[str, str]) -> None:
        super().__init__(self._reply, delay_s=0.01)
        self._odds = odds
        self._answers_by_problem = answers

    def _reply(self, prompt: str) -> str:
        if self._odds.strike("malformed completions", 0.1):
            return self._odds.rng.choice(WORDS)
        known = (
            answer for problem, answer in self._answers_by_problem.items() if problem in prompt
        )
        answer = next(known, "0")
        return f"\\boxed{{{answer if self._odds.rng.random() < 0.5 else answer + '1'}}}"

    async def _answer(self, request: web.Request, *rest: Any) -> web.StreamResponse:
        self.requests.clear()
        if self._odds.strike("engine faults", 0.03):
            self.fail_next(Fault(self._odds.rng.choice(KINDS)))
        return await super()._answer(request, *rest)


class ChaosEnv(GSM8kEnv):
    """GSM8K whose rollouts raise and hang now and then, and which numbers its groups.

    The number travels in `generation_params`, which the service hands on as it is.
    """

    status_interval_s = 0.1
    retry_interval_s = 0.1
    empty_rollout_s = 0.0
    odds: Odds
    ledger: Ledger
    num_evaluations = 0
    num_posted = 0
    num_refused = 0

    def answers(self) -> dict[str, str]:
        """Problem to gold answer."""
        return {p["question"]: gold_answer(p["answer"]) for p in [*self.train, *self.test]}

    async def collect_trajectories(self, item: Any) -> Any:
        if self.odds.strike("raised rollouts", 0.02):
            raise RuntimeError("injected")
        if self.odds.strike("hanging rollouts", 0.002):
            await asyncio.Event().wait()
        if self.odds.strike("killed score workers", 0.002):
            await self.score_pool.run(os._exit, 1, default=None)
        group, backlog = await super().collect_trajectories(item)
        if group is not None:
            group["generation_params"]["number"] = self.ledger.new_number()
        return group, backlog

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        self.num_posted += 1
        refused = self.drop_counts["refused_by_service"] + self.drop_counts["not_encodable"]
        await super()._send_scored_data_to_api(scored_data)
        if self.drop_counts["refused_by_service"] + self.drop_counts["not_encodable"] > refused:
            self.num_refused += 1
        else:
            self.ledger.acknowledge(scored_data["generation_params"]["number"])

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.num_evaluations += 1
        if self.odds.strike("raised evaluations", 0.2):
            raise RuntimeError("injected")
        await super().evaluate()


class LeasingTrainer(Actor):
    """Takes batches under a lease; one counts when the service has taken its acknowledgement."""

    num_steps = 0

    def __init__(self, url: str, ledger: Ledger, *, seed: int) -> None:
        super().__init__([url], seed=seed)
        self._ledger = ledger

    def step(self) -> None:
        """Take one batch, if there is one within a moment."""
        headers = {"Accept": MEDIA_TYPES["msgpack"], "Accept-Encoding": "identity"}
        answer = self.ask("GET", "/batch", params={"wait": 0.5, "lease": LEASE_S}, headers=headers)
        if answer is None:
            return
        assert answer.status_code == 200, f"GET /batch: {answer.status_code} {answer.text[:300]}"
        got = decode_batch(answer.content, "msgpack")
        if got["batch"] is None:
            return
        numbers = [int(group["generation_params"]["number"]) for group in got["batch"]]
        while (done := self.ask("POST", f"/batch/{got['batch_id']}/ack")) is None:
            pass
        assert done.status_code in (200, 404, 409), f"ack: {done.status_code} {done.text}"
        if done.status_code == 200:
            self.num_steps += 1
            self._ledger.deliver(numbers)
