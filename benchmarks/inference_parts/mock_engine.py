"""A mock of vLLM's completions route that costs the machine as little as it can.

It answers bytes rendered beforehand in the form a stock vLLM sends them, ids and logprobs included,
so that the client is what a measurement sees. Speaks HTTP/1.1 with kept connections.

Usage: python mock_engine.py PROMPT_TOKENS OUTPUT_TOKENS ANSWER_MIN_S ANSWER_MAX_S; prints its port
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import cast

__all__ = ["build_answers"]

NUM_ANSWERS = 64
VOCABULARY = 50_000


def build_answers(num_prompt: int, num_output: int) -> list[bytes]:
    """Return whole HTTP answers to `logprobs: 1, return_token_ids: true`."""
    rng = random.Random(0)
    return [_http(_completion(rng, num_prompt, num_output)) for _ in range(NUM_ANSWERS)]


def _completion(rng: random.Random, num_prompt: int, num_output: int) -> bytes:
    ids = [rng.randrange(3, VOCABULARY) for _ in range(num_output)]
    words = [f"w{token_id - 3}" for token_id in ids]
    values = [-rng.expovariate(2.0) for _ in ids]
    choice = {
        "index": 0,
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
        "prompt_token_ids": [rng.randrange(3, VOCABULARY) for _ in range(num_prompt)],
    }
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": None,
    }
    answer = {
        "id": f"cmpl-{rng.getrandbits(64):x}",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "mock",
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": usage,
    }
    return json.dumps(answer, separators=(",", ":")).encode()


def _http(body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


class Connection(asyncio.Protocol):
    """Reads requests by their content-length and answers each after its time."""

    def __init__(self, answers: list[bytes], rng: random.Random, delays_s: tuple[float, float]):
        self._answers, self._rng, self._delays_s = answers, rng, delays_s
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection's other end."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of another family

    def data_received(self, data: bytes) -> None:
        """Take bytes; a whole request is answered later."""
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
            self._answer_later(is_post=head.startswith(b"post"))

    def _answer_later(self, *, is_post: bool) -> None:
        assert self._transport is not None
        if not is_post:  # a health check
            self._transport.write(_http(b"{}"))
            return
        answer = self._rng.choice(self._answers)
        delay_s = self._rng.uniform(*self._delays_s)
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._transport.write, answer)
        else:
            self._transport.write(answer)


async def _serve(num_prompt: int, num_output: int, delays_s: tuple[float, float]) -> None:
    answers, rng = build_answers(num_prompt, num_output), random.Random(1)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(answers, rng, delays_s), "127.0.0.1", 0, backlog=4096
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    import uvloop

    prompt, output, shortest, longest = sys.argv[1:]
    uvloop.run(_serve(int(prompt), int(output), (float(shortest), float(longest))))
