"""The inference engine of the walk: vLLM's command line and routes with scripted answers.

The pages name models that need a GPU. Whatever starts vLLM in the walk (`vllm serve`, the trainer,
`atropos-train`) finds this module instead, through `stand_ins` on `PYTHONPATH` and `PATH`. It
answers about half of the questions of the pages' environments correctly, so that groups carry a
signal. Ids and logprobs are reported as vLLM reports them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.scripted_engine import ScriptedEngine

__all__ = ["StandInEngine", "answer_for", "main"]

DATA = Path(__file__).parents[2] / "environments" / "data"


class ModelTokenizer:
    """The tokenizer of a model folder, with the calls that `ScriptedEngine` makes."""

    def __init__(self, model: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self.eos_token_id = self._tokenizer.eos_token_id
        self.size = len(self._tokenizer)

    def apply_chat_template(self, messages: Any, tools: Any, **_: Any) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            [message | {"content": _text_of(message.get("content"))} for message in messages],
            tools=tools,
            add_generation_prompt=True,
            tokenize=False,
        )
        return self.encode(text)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def _text_of(content: Any) -> Any:
    """Return the text of a message that also has images."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part["type"] == "text")
    return content


class StandInEngine(ScriptedEngine):
    """`ScriptedEngine` with the routes of vLLM that the trainer calls."""

    def _add_routes(self, app: web.Application) -> None:
        super()._add_routes(app)
        if self.returns_token_ids:
            app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/version", self._accept)
        app.router.add_get("/is_paused", self._accept)
        for path in (
            "/collective_rpc",
            "/pause",
            "/resume",
            "/reset_prefix_cache",
            "/v1/load_lora_adapter",
            "/v1/unload_lora_adapter",
        ):
            app.router.add_post(path, self._control)

    def _prompt_logprobs(self, ids: Sequence[int], top_k: int) -> list[dict[str, Any] | None]:
        """Keep the ids of a teacher's choices within the vocabulary."""
        size = self.tokenizer.size
        return [
            row and {str(int(token_id) % size): entry for token_id, entry in row.items()}
            for row in super()._prompt_logprobs(ids, top_k)
        ]

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "messages" in body:
            ids = self.tokenizer.apply_chat_template(body["messages"], tools=body.get("tools"))
        else:
            special = body.get("add_special_tokens", True)
            ids = self.tokenizer.encode(body["prompt"], add_special_tokens=special)
        return web.json_response(
            {"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len}
        )

    async def _accept(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0", "is_paused": False})

    async def _control(self, request: web.Request) -> web.Response:
        text = await request.text()
        if request.path == "/collective_rpc" and "method" not in json.loads(text or "{}"):
            return web.json_response({"detail": "Missing 'method' in request body"}, status=400)
        return web.json_response({})


def _rows(sample: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for file in sorted((DATA / sample).glob("*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]


def _gsm8k_answer(prompt: str) -> str | None:
    for row in _rows("gsm8k_sample"):
        if row["question"] in prompt:
            gold = row["answer"].rsplit("#", 1)[-1].strip().replace(",", "")
            # Exports leave out what was said before.
            return f"<think>Way {random.randrange(10**6)}.</think> \\boxed{{{gold}}}"
    return None


def _sum_answer(prompt: str) -> str | None:
    found = re.search(r"(\d+) \+ (\d+) = \?", prompt)
    return str(int(found[1]) + int(found[2])) if found else None


def _product_answer(prompt: str) -> str | None:
    found = re.search(r"(\d+) \* (\d+) = \?", prompt)
    return str(int(found[1]) * int(found[2])) if found else None


def _depot_answer(prompt: str) -> str | None:
    found = re.search(r"receives (\d+) boxes with (\d+) parts each, and (\d+) loose", prompt)
    if found is None:
        return None
    boxes, parts, loose = (int(number) for number in found.groups())
    return f"<answer>{boxes * parts + loose}</answer>"


def _chain_sum_answer(prompt: str) -> str | None:
    found = re.findall(r"(-?\d+(?: [+-] \d+)+)", prompt)
    if not found:
        return None
    total = sum(int(sign + number) for sign, number in re.findall(r"([+-]?) ?(\d+)", found[-1]))
    return f"<think>Left to right.</think><answer>{total}</answer>"


def _shopping_answer(prompt: str) -> str | None:
    return "11.5" if "tea and a cup" in prompt else None


def _guess(prompt: str) -> str | None:
    return str(random.randint(1, 100)) if "Guess my number" in prompt else None


def _clock_answer(prompt: str) -> str | None:
    row = random.choice(_rows("pixmo_clocks_sample"))
    text = f"<answer>{row['hour']}:{row['minute']:02d}</answer>"
    return text if "clock" in prompt else None


def _word_guess(prompt: str) -> str | None:
    words = ("apple", "house", "river", "a word")
    return f"<guess>{random.choice(words)}</guess>" if "Find my word" in prompt else None


RULES: tuple[Callable[[str], str | None], ...] = (
    _gsm8k_answer,
    _sum_answer,
    _product_answer,
    _depot_answer,
    _chain_sum_answer,
    _shopping_answer,
    _guess,
    _clock_answer,
    _word_guess,
)


def answer_for(prompt: str) -> str:
    """Return a right answer to a question of the pages, or a wrong one, each half of the time."""
    right = next((text for rule in RULES if (text := rule(prompt)) is not None), None)
    if right is None:
        return random.choice(["yes", "no", "\\boxed{3}", "<answer>A</answer>"])
    return right if random.random() < 0.5 else "<think>A guess.</think> I do not know."


async def _serve(model: str, served_name: str, port: int) -> None:
    engine = StandInEngine(
        answer_for,
        model=served_name,
        max_model_len=32768,
        returns_token_ids=not os.environ.get("FIRST_HOUR_HIDES_TOKEN_IDS"),
        tokenizer=ModelTokenizer(model),  # type: ignore[arg-type]
    )
    await engine.start(port)
    print(f"stand-in engine for {served_name} on port {port}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve as `vllm serve MODEL` and `python -m vllm.entrypoints.openai.api_server` do."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model")
    parser.add_argument("--served-model-name")
    parser.add_argument("--port", type=int, default=8000)
    words = sys.argv[1:]
    known, _ = parser.parse_known_args(words)
    model = known.model or words[1]  # vllm serve MODEL
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(model, known.served_model_name or model, known.port))
