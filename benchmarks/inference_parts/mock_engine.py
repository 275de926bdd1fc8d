"""A mock of vLLM's completions route with minimal overhead, so that measurements show the client.

Its responses are prepared bytes in the format of a stock vLLM, with ids and logprobs.

Usage: python mock_engine.py PROMPT_TOKENS OUTPUT_TOKENS CHOICES; prints its URL
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1]))

from service_parts.server_process import run_server

__all__ = ["mock_engine"]

NUM_ANSWERS = 64
VOCABULARY = 50_000


@contextmanager
def mock_engine(*, prompt_tokens: int, output_tokens: int, choices: int = 1) -> Iterator[str]:
    """Run the engine in another process; yields its root URL."""
    command = [sys.executable, __file__, str(prompt_tokens), str(output_tokens), str(choices)]
    with run_server(command) as engine:
        yield engine.url


def _choice(rng: random.Random, index: int, prompt_ids: list[int], num_output: int) -> Any:
    ids = [rng.randrange(3, VOCABULARY) for _ in range(num_output)]
    words = [f"w{token_id - 3}" for token_id in ids]
    values = [-rng.expovariate(2.0) for _ in ids]
    return {
        "index": index,
        "text": " ".join(words),
        "logprobs": {
            "text_offset": list(range(0, 6 * num_output, 6)),
            "token_logprobs": values,
            "tokens": words,
            "top_logprobs": [{w: v} for w, v in zip(words, values, strict=True)],
        },
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": ids,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt_ids,
    }


def _completions(rng: random.Random, num_prompt: int, num_output: int, num_choices: int) -> bytes:
    prompt_ids = [rng.randrange(3, VOCABULARY) for _ in range(num_prompt)]
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output * num_choices,
        "total_tokens": num_prompt + num_output * num_choices,
        "prompt_tokens_details": None,
    }
    answer = {
        "id": f"cmpl-{rng.getrandbits(64):x}",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "mock",
        "choices": [_choice(rng, index, prompt_ids, num_output) for index in range(num_choices)],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage,
    }
    return json.dumps(answer, separators=(",", ":")).encode()


def _http(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


class Connection(asyncio.Protocol):
    """Reads requests by their content-length and responds to each with one of the answers."""

    def __init__(self, answers: list[bytes], rng: random.Random) -> None:
        self._answers, self._rng = answers, rng
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has another base class

    def data_received(self, data: bytes) -> None:
        self._received += data
        while True:
            head_end = self._received.find(b"\r\n\r\n")
            if head_end < 0:
                return
            head = self._received[:head_end].lower()
            length = 0
            if b"content-length:" in head:
                length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            whole = head_end + 4 + length
            if len(self._received) < whole:
                return
            self._received = self._received[whole:]
            self._answer(is_post=head.startswith(b"post"))

    def _answer(self, *, is_post: bool) -> None:
        assert self._transport is not None
        health = _http(b"{}")
        self._transport.write(self._rng.choice(self._answers) if is_post else health)


async def _serve(*sizes: int) -> None:
    rng = random.Random(0)
    answers = [_http(_completions(rng, *sizes)) for _ in range(NUM_ANSWERS)]
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(answers, rng), "127.0.0.1", 0, backlog=4096
    )
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve(*map(int, sys.argv[1:])))
