"""Clean environments of other kinds, and defects beyond the seeded twelve."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from contextlib import suppress
from typing import Any

import aiohttp
import numpy
import openai  # noqa: F401 - `self.client` needs it, and importing it holds the loop

from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from tests.envs.check.defects import CleanEnv

__all__ = ["CLEAN", "DEFECTS", "STOPPED", "LostSiblings", "OwnClient"]

STOPPED = threading.Event()


class TextOnly(CleanEnv):
    """One request for all completions, rendered again; no logprobs, scores as an array."""

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        messages = self.messages(item)
        answer = await self.server.chat_completion(messages=messages, n=self.config.group_size)
        rows = [self.row(messages, choice) for choice in answer.choices]
        return {
            "tokens": [row["tokens"] for row in rows],
            "masks": [row["masks"] for row in rows],
            "scores": numpy.array([self.score(item, choice) for choice in answer.choices]),
        }, []

    def row(self, messages: Any, choice: Any) -> dict[str, Any]:
        chat = [*messages, {"role": "assistant", "content": choice.message.content}]
        return tokenize_for_trainer(self.tokenizer, chat, finish_reason=choice.finish_reason)


class TwoTurns(CleanEnv):
    """Asks twice on one session; the second answer counts."""

    def check_gold_answer(self, item: Any) -> Any:
        return ["Let me think.", f"The capital is {item['capital']}."]

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as session:
            messages = self.messages(item)
            for question in ("Are you sure?", ""):
                reply = await session.chat_completion(messages=messages)
                content = reply.choices[0].message.content
                messages += [{"role": "assistant", "content": content}]
                messages += [{"role": "user", "content": question}] if question else []
            node = session.get_state()["nodes"][0]
        row = self.row(node, messages)
        return {**row, "scores": float(content == self.check_gold_answer(item)[-1])}, []

    def row(self, node: Any, messages: Any) -> dict[str, Any]:
        masks, logprobs = node.masked_tokens, node.logprobs
        return {"tokens": node.tokens, "masks": masks, "inference_logprobs": logprobs}


class Judged(CleanEnv):
    """A judge on the same servers gives the score."""

    def check_judge_reply(self, messages: Any) -> str | None:
        text = messages[-1]["content"]
        if not text.startswith("Judge: "):
            return None
        return "yes" if "The capital is" in text and text.endswith(".") else "no"

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        row, backlog = await super().collect_trajectory(item)
        written = [token for token in row["masks"] if token != -100]
        answer = self.tokenizer.decode(written, skip_special_tokens=True)
        question = [{"role": "user", "content": f"Judge: {answer}"}]
        verdict = await self.server.chat_completion(messages=question)
        row["scores"] = float(verdict.choices[0].message.content == "yes")
        return row, backlog


class Thinking(CleanEnv):
    def check_gold_answer(self, item: Any) -> str:
        return f"<think>Easy.</think>{item['capital']}"

    def score(self, item: Any, choice: Any) -> float:
        _, closed, answer = choice.message.content.rpartition("</think>")
        return float(bool(closed) and item["capital"] in answer)


class ReadsThoughts(Thinking):
    def score(self, item: Any, choice: Any) -> float:
        return float(item["capital"] in choice.message.content)


class LostPrefix(TwoTurns):
    """Encodes the conversation again, with a note in front that the model never read."""

    def row(self, node: Any, messages: Any) -> dict[str, Any]:
        system = [{"role": "system", "content": "Be brief."}]
        return tokenize_for_trainer(self.tokenizer, [*system, *messages])


class LostSiblings(CleanEnv):
    async def collect_trajectories(self, item: Any) -> Any:
        rollouts = (self.collect_trajectory(item) for _ in range(self.config.group_size))
        rows = [row for row, _ in await asyncio.gather(*rollouts)]
        return {name: [row[name] for row in rows] for name in rows[0]}, []


class IgnoresCancel(CleanEnv):
    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        try:
            return await super().collect_trajectories(item)
        except asyncio.CancelledError:
            return None, []


class LeakingThread(CleanEnv):
    async def setup(self) -> None:
        await super().setup()
        threading.Thread(target=self.wait, daemon=True).start()

    def wait(self) -> None:
        STOPPED.wait()


class WrongSize(CleanEnv):
    async def postprocess_histories(self, trajectories: Any) -> Any:
        return {name: (rows or [])[1:] for name, rows in trajectories.items()}


class SilentEvaluation(CleanEnv):
    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        await self.server.chat_completion(messages=self.messages({"country": "Fiji"}))


class RaisingSetup(CleanEnv):
    async def setup(self) -> None:
        raise FileNotFoundError("no capitals here")


class BadConfig(CleanEnv):
    @classmethod
    def config_init(cls) -> Any:
        raise KeyError("capitals")


class AsyncHub(CleanEnv):
    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        async with aiohttp.ClientSession() as session:
            with suppress(RuntimeError):
                await session.get("http://huggingface.co/capitals")
        return await super().collect_trajectory(item)


class OwnClient(CleanEnv):
    """Asks by a client of its own, which the scripted model is not behind."""

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        await self.client.chat.completions.create(model="m", messages=self.messages(item))
        return await super().collect_trajectory(item)


class UsesStreams(CleanEnv):
    """Uses what the standard streams of a process have and a text in memory lacks."""

    async def setup(self) -> None:
        await super().setup()
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.reconfigure(encoding=sys.stdout.encoding.lower(), errors="replace")
        sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8")
        process = await asyncio.create_subprocess_exec("true", stdout=sys.stderr)
        await process.wait()

    def score(self, item: Any, choice: Any) -> float:
        sys.stdout.buffer.write(choice.message.content.encode())
        return super().score(item, choice)


CLEAN: list[type[CleanEnv]] = [TextOnly, TwoTurns, Judged, Thinking, UsesStreams]
DEFECTS: list[tuple[type[CleanEnv], str]] = [
    (ReadsThoughts, "truncated"),
    (LostPrefix, "context"),
    (LostSiblings, "siblings"),
    (IgnoresCancel, "cancel"),
    (LeakingThread, "leftovers"),
    (WrongSize, "shape"),
    (SilentEvaluation, "evaluation"),
    (RaisingSetup, "setup"),
    (BadConfig, "config"),
    (AsyncHub, "network"),
    (OwnClient, "rollout"),
]
"""Each defect with the one rule that it breaks."""
