"""Punchlines: reasoning about a joke, rewarded by how much it helps to predict the punchline.

    joke -> [system, user] -> G completions -> reasoning inside <think>
        -> perplexity of the gold punchline, with and without it -> its relative improvement

A second model predicts the punchline, in this process: it is not trained, and reads the reasoning
but not the policy's own punchline. With the shipped model and jokes, without the hub:

    python environments/community/punchline_vrcli/punchline_vrcli_env.py process \
        --env.dataset_path environments/community/punchline_vrcli/sample \
        --env.perplexity_model environments/community/punchline_vrcli/sample/model \
        --env.total_steps 4

Source: Gurung and Lapata 2025, "Learning to Reason for Long-Form Story Generation",
arXiv:2503.22828. Differs in the reward, which is the relative improvement itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.utils.aio import all_results

__all__ = [
    "PerplexityModel",
    "PunchlineConfig",
    "PunchlineEnv",
    "context_of",
    "improvement",
    "reasoning_of",
]

logger = logging.getLogger("environments.punchline_vrcli")

CARD = EnvironmentCard(
    task="reason about a joke before its punchline",
    turns="1",
    reward="relative improvement of the punchline's perplexity, 0 to 1; -1 without reasoning",
    data="one-million-reddit-jokes from the hub, or `--env.dataset_path`",
    needs="`pip install '.[rewardfns]'`, and a model of its own in the process",
    command="process --env.dataset_path environments/community/punchline_vrcli/sample "
    "--env.perplexity_model environments/community/punchline_vrcli/sample/model "
    "--env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("sample")
NO_REASONING = -1.0
MAX_PUNCHLINE_CHARACTERS = 400
"""Longer ones are stories, and left out."""
MAX_TEST_ROWS = 256
"""Jokes that are reserved for evaluations, at most."""
REMOVED = ("", "[removed]", "[deleted]")
MAX_MEAN_LOSS = 80.0
"""Mean loss per token in nats above which it counts as this; its exponential is a float."""
SYSTEM_PROMPT = (
    "You write punchlines. Think first about the joke, between <think> and </think>: what the "
    "listener expects, double meanings of its words, and what could surprise. Then write the "
    "punchline and nothing else."
)
Joke = Mapping[str, str]
"""One row: `title`, the setup, and `selftext`, the punchline."""


def reasoning_of(completion: str) -> str:
    """Return the text of the only closed block of thinking; empty for any other completion.

    A chat template may open the block itself, so it may begin without its tag.
    """
    before, closed, after = completion.partition("</think>")
    if not closed or "</think>" in after or "<think>" in after:
        return ""
    opened = before.strip().removeprefix("<think>")
    return "" if "<think>" in opened else opened.strip()


def context_of(title: str, reasoning: str) -> str:
    """Return the text before the punchline, as the second model reads it."""
    thoughts = f"Thoughts: {reasoning}\n" if reasoning else ""
    return f"Joke: {title}\n{thoughts}Punchline: "


def improvement(loss: float, loss_with_reasoning: float) -> float:
    """Return `max(0, (ppl - ppl_with_reasoning) / ppl)` from two mean losses per token in nats."""
    return max(0.0, -math.expm1(loss_with_reasoning - loss))


class PerplexityModel:
    """A causal language model on one device; created by `load`. Its calls block.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        max_tokens: tokens of a text; the start of a longer one is cut off.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_tokens: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    @classmethod
    def load(cls, path: str, *, gpu_device: int, max_tokens: int) -> PerplexityModel:
        """Load a model from a folder or the hub; on the CPU if there is no GPU.

        Raises:
            MissingExtraError: torch is not installed.
            ConfigError: the model cannot be loaded, or there is no such GPU.
        """
        try:
            import torch
        except ImportError as error:
            raise MissingExtraError("torch", extra="rewardfns") from error
        from transformers import AutoModelForCausalLM, AutoTokenizer

        has_gpu = torch.cuda.is_available() and gpu_device >= 0
        device = f"cuda:{gpu_device}" if has_gpu else "cpu"
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
            model = AutoModelForCausalLM.from_pretrained(path)
            model = model.to(torch.bfloat16 if has_gpu else torch.float32)
            model = model.to(torch.device(device)).eval()
        except (OSError, ValueError, RuntimeError, ImportError, AssertionError) as error:
            raise ConfigError(
                f"the model {path!r} cannot be loaded on {device}: {error}; expected a folder or a "
                "name on the hub of a causal language model, in --env.perplexity_model, and an "
                "index of a GPU, or -1 for the CPU, in --env.gpu_device"
            ) from error
        logger.info("perplexities are those of %s on %s", path, device)
        limit = getattr(model.config, "max_position_embeddings", None) or max_tokens
        return cls(model, tokenizer, max_tokens=min(max_tokens, limit))

    def mean_loss(self, context: str, text: str) -> float:
        """Return the mean negative log-probability of the tokens of a text after a context.

        All tokens of the text count, the first one included.

        Args:
            context: text before it, at least one token.
            text: at least one token.
        """
        import torch

        # Invalid text, such as half of a surrogate pair, stops tokenizers.
        before, after = (
            self._tokenizer(part.encode("utf-8", "replace").decode(), add_special_tokens=False)
            for part in (context, text)
        )
        scored = after["input_ids"][: self._max_tokens // 2]
        room = self._max_tokens - len(scored)
        ids = torch.tensor([[*before["input_ids"][-room:], *scored]], device=self._model.device)
        with torch.inference_mode():
            # Logits at position t predict token t + 1.
            logits = self._model(input_ids=ids).logits[0, -len(scored) - 1 : -1].float()
        losses = torch.nn.functional.cross_entropy(logits, ids[0, -len(scored) :])
        loss = float(losses)
        if not math.isfinite(loss):
            raise ValueError(f"the mean loss of a punchline is {loss}; expected a finite number")
        return min(loss, MAX_MEAN_LOSS)


class PunchlineConfig(HubItemsConfig, SingleTurnEnvConfig):
    """Settings of the jokes and of the model that predicts punchlines."""

    perplexity_model: str = Field(
        "Qwen/Qwen3-1.7B-Base",
        description="Folder or name on the hub of the causal language model that predicts "
        "punchlines.",
    )
    gpu_device: int = Field(
        0, ge=-1, le=1023, description="Index of its GPU; -1, or a machine without one: the CPU."
    )
    perplexity_max_tokens: int = Field(
        4096,
        ge=16,
        le=131_072,
        description="Tokens of joke, reasoning and punchline that it reads.",
    )


class PunchlineEnv(DatasetItems, SingleTurnEnv):
    """Jokes whose punchline is known; an item is a `Joke`."""

    name = "punchline_vrcli"
    hub_dataset = "SocialGrep/one-million-reddit-jokes"
    env_config_cls = PunchlineConfig
    config: PunchlineConfig
    columns = ("title", "selftext")
    scores_thinking = True
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 4096,
        "wandb_name": "punchline_vrcli",
    }
    check_settings: ClassVar[dict[str, Any]] = {
        "dataset_path": str(SAMPLE),
        "perplexity_model": str(SAMPLE / "model"),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._thread = ThreadPoolExecutor(1, "punchlines")
        self._model: PerplexityModel | None = None

    async def setup(self) -> None:
        load = partial(
            PerplexityModel.load,
            self.config.perplexity_model,
            gpu_device=self.config.gpu_device,
            max_tokens=self.config.perplexity_max_tokens,
        )
        self._model = await self._in_thread(load)
        await super().setup()

    def _read(self) -> tuple[list[Any], list[Any]]:
        train, test = (list(filter(_has_punchline, rows)) for rows in super()._read())
        if not train:
            raise ConfigError(
                f"no joke has a title and a selftext of 1 to {MAX_PUNCHLINE_CHARACTERS} characters"
            )
        return train, test[:MAX_TEST_ROWS]

    def prompt(self, item: Joke) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": item["title"]},
        ]

    async def score(self, item: Joke, answer: str) -> float:
        return (await self.score_all(item, [answer]))[0]

    async def score_all(self, item: Joke, answers: Sequence[str]) -> Sequence[float]:
        """Return [G] improvements; the perplexity without reasoning is computed once."""
        reasonings = [reasoning_of(answer) for answer in answers]
        contexts = {text: context_of(item["title"], text) for text in ["", *reasonings]}
        if len(contexts) == 1:
            return [NO_REASONING] * len(answers)
        losses = await all_results(
            self._in_thread(partial(self.model.mean_loss, context, item["selftext"]))
            for context in contexts.values()
        )
        by_reasoning = dict(zip(contexts, losses, strict=True))
        return [
            improvement(by_reasoning[""], by_reasoning[text]) if text else NO_REASONING
            for text in reasonings
        ]

    @property
    def model(self) -> PerplexityModel:
        """The model that predicts punchlines.

        Raises:
            RuntimeError: `setup` has not been awaited.
        """
        if self._model is None:
            raise RuntimeError("the model of the punchlines is not loaded; await setup() first")
        return self._model

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
        await super().close()

    async def _in_thread(self, call: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def check_gold_answer(self, item: Joke) -> str:
        punchline = item["selftext"]
        return f"<think>{punchline}</think>{punchline}"


def _has_punchline(row: Mapping[str, Any]) -> bool:
    title, punchline = (str(row[name] or "").strip() for name in ("title", "selftext"))
    return bool(title) and punchline not in REMOVED and len(punchline) <= MAX_PUNCHLINE_CHARACTERS


if __name__ == "__main__":
    PunchlineEnv.cli()
