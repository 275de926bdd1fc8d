"""Exercises told as little stories, by a chat model elsewhere; only with a key for it."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any

__all__ = ["WordProblems"]

logger = logging.getLogger(__name__)

INSTRUCTION = (
    "Turn the exercise into a short everyday story that ends in a question. Keep every number and "
    "every symbol that matters, so that the answer stays exactly the same, and do not give the "
    "answer. Reply with the story alone.\n\nExercise: {question}"
)
MAX_TOKENS, TEMPERATURE, TIMEOUT_S = 512, 0.7, 60.0


class WordProblems:
    """Rewrites exercises.

    Args:
        api_key: of the service; without one exercises stay as they are.
        base_url: of the service; None is OpenAI's own.
        model_name: who writes.
    """

    def __init__(self, *, api_key: str | None, base_url: str | None, model_name: str) -> None:
        self._api_key = api_key
        self._base_url = base_url
        self._model_name = model_name

    async def rewrite(self, question: str) -> str:
        """Wait for the story of an exercise; the exercise itself after a failure."""
        if not self._api_key:
            return question
        import openai

        try:
            reply = await self._client.chat.completions.create(
                model=self._model_name,
                messages=[{"role": "user", "content": INSTRUCTION.format(question=question)}],
                max_tokens=MAX_TOKENS,
                temperature=TEMPERATURE,
            )
        except openai.OpenAIError as error:
            logger.warning("an exercise stays as it is: %s", error)
            return question
        [choice] = reply.choices[:1] or [None]
        told = choice and choice.finish_reason != "length" and choice.message.content
        return (told or question).strip()

    async def close(self) -> None:
        """Close the connections."""
        if "_client" in vars(self):
            await self._client.close()

    @cached_property
    def _client(self) -> Any:
        import openai

        return openai.AsyncOpenAI(api_key=self._api_key, base_url=self._base_url, timeout=TIMEOUT_S)
