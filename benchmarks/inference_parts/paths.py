"""The same request through our server classes and with plain aiohttp, which does the same work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from scheduler_parts.word_tokenizer import write_tokenizer

__all__ = ["NUM_IN_FLIGHT", "PROMPT_WORDS", "Paths", "load_tokenizer"]

NUM_IN_FLIGHT = 1_000
PROMPT_WORDS = 200
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def load_tokenizer(folder: Path) -> Any:
    """Return a tokenizer of whole words, which is faster than a real one: the path is measured."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(write_tokenizer(folder)))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


Request = Callable[[], Awaitable[None]]


@dataclass
class Paths:
    """Requests to the mock engine.

    - plain: ids in; sampled ids and their logprobs out.
    - chat: messages in, rendered and encoded; ids, logprobs and the decoded text out.
    - text: text in; text and logprobs out. Our server uses the OpenAI client.
    """

    root_url: str
    tokenizer: Any
    num_output: int

    def __post_init__(self) -> None:
        self.prompt = " ".join(f"w{number}" for number in range(PROMPT_WORDS))
        self.prompt_ids: list[int] = self.tokenizer.encode(self.prompt)
        self.messages = [{"role": "user", "content": self.prompt}]
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        config = APIServerConfig(
            base_url=f"{self.root_url}/v1",
            server_type="vllm",
            model_name="mock",
            num_max_requests_at_once=2 * NUM_IN_FLIGHT,
        )
        self.manager = ServerManager([config])
        self.manager.servers[0].tokenizer = self.tokenizer

    async def close(self) -> None:
        await self.session.close()
        await self.manager.close()

    def pair(self, path: str) -> tuple[Request, Request]:
        """Return the direct request and our request of a path."""
        return {
            "plain": (self._direct_plain, self._ours_plain),
            "chat": (self._direct_chat, self._ours_chat),
            "text": (self._direct_text, self._ours_text),
        }[path]

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        body = {"model": "mock", "max_tokens": self.num_output, "temperature": 1.0, **body}
        async with self.session.post(f"{self.root_url}/v1/completions", json=body) as response:
            choice: dict[str, Any] = msgspec.json.decode(await response.read())["choices"][0]
            return choice

    async def _direct_tokens(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        choice = await self._post({"prompt": prompt_ids, "logprobs": 1, "return_token_ids": True})
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        assert len(ids) == len(logprobs) == self.num_output
        return ids, logprobs

    async def _direct_plain(self) -> None:
        await self._direct_tokens(self.prompt_ids)

    async def _direct_chat(self) -> None:
        prompt = self.tokenizer.apply_chat_template(
            self.messages, tokenize=False, add_generation_prompt=True
        )
        ids, _ = await self._direct_tokens(self.tokenizer.encode(prompt))
        assert self.tokenizer.decode(ids, skip_special_tokens=True)

    async def _direct_text(self) -> None:
        choice = await self._post({"prompt": self.prompt, "logprobs": 1})
        assert choice["text"]
        assert len(choice["logprobs"]["token_logprobs"]) == self.num_output

    async def _ours_plain(self) -> None:
        _, rows, logprobs, _ = await self.manager.tokens_and_logprobs_completion(
            prompt=self.prompt,
            input_ids=self.prompt_ids,
            max_tokens=self.num_output,
            temperature=1.0,
        )
        assert len(rows[0]) == len(logprobs[0]) == self.num_output

    async def _ours_chat(self) -> None:
        async with self.manager.managed_server(tokenizer=self.tokenizer) as session:
            chat = await session.chat_completion(
                messages=self.messages, max_tokens=self.num_output, temperature=1.0
            )
            assert chat.choices[0].message.content
            assert len(session.get_state()["nodes"][0].logprobs) > self.num_output

    async def _ours_text(self) -> None:
        answer = await self.manager.completion(
            prompt=self.prompt, max_tokens=self.num_output, temperature=1.0, logprobs=1
        )
        assert answer.choices[0].text
