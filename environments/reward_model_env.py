r"""RLHF: answers scored by a reward model, or chosen by a person.

    chat -> G answers ─┬► classifier  a sequence classifier (transformers) rates each answer
                       └► human       a person chooses the best one: 1, the others 0

`--env.source human` serves a page on this machine and reads the file `--env.preferences_path`, to
which other programs may append choices (`atroposlib/tasks/preferences.py`). A group is posted once
it is judged. A group that is not judged in time fails under the name `PreferenceTimeoutError`.

    python environments/reward_model_env.py process --env.total_steps 4 \
        --env.dataset_path environments/data/rlaif_sample \
        --env.reward_model environments/data/reward_model_sample
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig, hub_dataset
from atroposlib.envs.reporting import Reward
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError, MissingExtraError, NoDataError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.preferences import (
    PreferenceCase,
    PreferenceDesk,
    choice_scores,
    serve_preferences,
)
from atroposlib.tasks.siblings import sibling_imports

if TYPE_CHECKING or __package__:
    from environments.rlaif_server import Chat, read_chat
else:
    with sibling_imports(__file__):
        from rlaif_server import Chat, read_chat

__all__ = ["RewardModel", "RewardModelEnv", "RewardModelEnvConfig"]

logger = logging.getLogger(__name__)

CARD = EnvironmentCard(
    task="answers to real conversations, rated by a reward model or chosen by a person",
    turns="1",
    reward="the classifier's score; or 1 for the chosen answer, 0 for the others",
    data="WildChat from the hub, or `--env.dataset_path`",
    needs="`pip install '.[rewardfns]'` for a classifier",
    command="process --env.dataset_path environments/data/rlaif_sample "
    "--env.reward_model environments/data/reward_model_sample --env.total_steps 4",
)

DATA = Path(__file__).resolve().with_name("data")
SAMPLE, SAMPLE_MODEL = DATA / "rlaif_sample", DATA / "reward_model_sample"

MAX_LENGTH_UNKNOWN = 10**9
"""Length above which a tokenizer's limit is a placeholder."""


class RewardModel:
    """A sequence classifier that rates answers; created by `load`, used by one thread.

    Args:
        model: classifier with one label, or two of which the second one is the better.
        tokenizer: its tokenizer; with a chat template it reads whole chats, without one a pair of
            the last message and the answer.
        max_tokens: length at which texts are truncated; None takes that of the model.
        batch_size: texts in one forward pass; 1 is used if model and tokenizer do not have the same
            padding token, by which a decoder finds the end of a text.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, max_tokens: int | None, batch_size: int
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        positions = getattr(model.config, "max_position_embeddings", None)
        known = [n for n in (max_tokens, positions, tokenizer.model_max_length) if n]
        self._max_tokens = min(n for n in [*known, MAX_LENGTH_UNKNOWN])
        tokenizer.padding_side = "right"  # positions are counted from the left
        padding = getattr(model.config, "pad_token_id", None)
        self._batch_size = batch_size
        if padding is None or padding != tokenizer.pad_token_id:
            logger.info("answers are rated one at a time: the reward model cannot be padded")
            self._batch_size = 1

    @classmethod
    def load(
        cls, path: str, *, device: str, max_tokens: int | None, batch_size: int
    ) -> RewardModel:
        """Load a classifier from a folder or the hub.

        Raises:
            MissingExtraError: torch is not installed.
            ConfigError: the model cannot be loaded, has another number of labels, or the device is
                not available.
        """
        try:
            import torch
        except ImportError as error:
            raise MissingExtraError("torch", extra="rewardfns") from error
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
            model = AutoModelForSequenceClassification.from_pretrained(path)
            model = model.to(torch.device(device)).eval()
        except (OSError, ValueError, RuntimeError, ImportError, AssertionError) as error:
            raise ConfigError(
                f"the reward model {path!r} cannot be loaded on {device}: {error}; expected a "
                "folder or a name on the hub of a sequence classifier with its tokenizer"
            ) from error
        if model.config.num_labels not in (1, 2):
            raise ConfigError(
                f"the reward model {path!r} has {model.config.num_labels} labels; expected 1, the "
                "reward, or 2, of which the second one is the better"
            )
        return cls(model, tokenizer, max_tokens=max_tokens, batch_size=batch_size)

    def rate(self, prompt: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> list[float]:
        """Return [G] the logit of the reward, or the difference of both logits."""
        import torch

        rated: list[float] = []
        for start in range(0, len(answers), self._batch_size):
            inputs = self._encode(prompt, answers[start : start + self._batch_size])
            with torch.inference_mode():
                logits = self._model(**inputs.to(self._model.device)).logits.float()
            values = logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]
            rated += [float(value) for value in values.tolist()]
        if not all(map(math.isfinite, rated)):
            raise ValueError(f"the reward model gave {rated}; expected finite numbers")
        return rated

    def _encode(self, prompt: Sequence[Mapping[str, Any]], answers: Sequence[str]) -> Any:
        # Invalid text, such as half of a surrogate pair, stops tokenizers.
        texts = [answer.encode("utf-8", "replace").decode() for answer in answers]
        padded = {"return_tensors": "pt", "padding": len(texts) > 1, "truncation": True}
        if self._tokenizer.chat_template is None:
            asked = [str(prompt[-1]["content"])] * len(texts)
            return self._tokenizer(asked, texts, max_length=self._max_tokens, **padded)
        chats = [
            self._tokenizer.apply_chat_template(
                [*prompt, {"role": "assistant", "content": text}], tokenize=False
            )
            for text in texts
        ]
        # The end of a long chat is the answer.
        self._tokenizer.truncation_side = "left"
        return self._tokenizer(
            chats, add_special_tokens=False, max_length=self._max_tokens, **padded
        )


class RewardModelEnvConfig(HubItemsConfig, SingleTurnEnvConfig):
    """Settings of the source of rewards."""

    source: Literal["classifier", "human"] = Field(
        "classifier", description="Source of rewards: a reward model, or a person."
    )
    reward_model: str = Field(
        "OpenAssistant/reward-model-deberta-v3-large-v2",
        description="Folder or name on the hub of a sequence classifier with one label, or two of "
        "which the second one is the better.",
    )
    reward_model_device: str = Field(
        "cpu", description="Device of the reward model, such as cpu or cuda:1."
    )
    reward_model_batch_size: int = Field(
        8, ge=1, le=1024, description="Number of answers in one forward pass of the reward model."
    )
    reward_model_max_tokens: int | None = Field(
        None, ge=8, description="Length at which its texts are truncated; None: the model's limit."
    )
    preferences_path: str = Field(
        "preferences.jsonl", description="JSON Lines file of the choices of people."
    )
    preference_timeout_s: float = Field(
        3600.0, gt=0, description="Time in seconds within which a group must be judged."
    )
    preference_host: str = Field(
        "127.0.0.1", description="Address of the page on which a person chooses."
    )
    preference_port: int = Field(
        0, ge=0, le=65535, description="Port of that page; 0 selects a free one, which is logged."
    )
    max_pending_groups: int = Field(
        64, ge=1, le=10_000, description="Maximum number of groups that wait for a person."
    )


class RewardModelEnv(DatasetItems, SingleTurnEnv):
    """Conversations whose answers are rated by a model or a person; an item is a `Chat`.

    Attributes:
        desk: groups that wait for a person; None unless `source` is human.
        page_url: URL of the page for that person.
    """

    name = "reward_model"
    env_config_cls = RewardModelEnvConfig
    config: RewardModelEnvConfig
    hub_dataset = "allenai/WildChat"
    columns = ("conversation",)
    default_model = "Qwen/Qwen3-0.6B"
    default_settings: ClassVar[dict[str, Any]] = {"group_size": 8, "max_token_length": 4096}
    check_settings: ClassVar[dict[str, Any]] = {
        "dataset_path": str(SAMPLE),
        "reward_model": str(SAMPLE_MODEL),
    }
    desk: PreferenceDesk | None = None
    page_url: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stack = AsyncExitStack()
        self._thread = ThreadPoolExecutor(1, "reward-model")
        self._model: RewardModel | None = None

    async def setup(self) -> None:
        await super().setup()
        if self.config.source == "human":
            await self._open_desk()
            return
        load = partial(
            RewardModel.load,
            self.config.reward_model,
            device=self.config.reward_model_device,
            max_tokens=self.config.reward_model_max_tokens,
            batch_size=self.config.reward_model_batch_size,
        )
        self._model = await self._in_thread(load)

    async def get_next_item(self) -> Chat:  # type: ignore[override]
        for _ in range(len(self.train)):
            chat = read_chat((await super().get_next_item())["conversation"])
            if chat is not None:
                return chat
        raise NoDataError("no conversation of the data can be answered; expected user turns")

    def eval_items(self) -> Sequence[Chat]:  # type: ignore[override]
        """Return the test conversations; none for a person, who judges training groups only."""
        if self.config.source == "human":
            return []
        chats = (read_chat(row["conversation"]) for row in self.test)
        return [chat for chat in chats if chat is not None]

    def prompt(self, item: Chat) -> Sequence[Mapping[str, Any]]:
        return item.messages

    async def score_all(self, item: Chat, answers: Sequence[str]) -> Sequence[Reward]:
        if self.desk is not None:
            case = PreferenceCase(item.messages, answers)
            timeout_s = self.config.preference_timeout_s
            choice = await self.desk.ask(case, timeout_s=timeout_s)
            if choice is None:
                return choice_scores(choice, len(answers))
            # Rollouts may have the same answer, of which a person chooses one.
            return [float(answer == answers[choice]) for answer in answers]
        if self._model is None:
            raise RuntimeError("the reward model is not loaded; await setup() first")
        rated: list[float] = await self._in_thread(
            partial(self._model.rate, item.messages, answers)
        )
        return rated

    async def score(self, item: Chat, answer: str) -> Reward:
        return (await self.score_all(item, [answer]))[0]

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        if self.desk is not None:
            metrics["preferences/pending"] = len(self.desk.pending)
            metrics["preferences/judged"] = self.desk.num_judged
            metrics["preferences/timed_out"] = self.desk.num_timeouts
            metrics["preferences/bad_lines"] = self.desk.num_bad_lines
        await super().wandb_log(metrics)

    async def close(self) -> None:
        await self._stack.aclose()
        await asyncio.to_thread(self._thread.shutdown)

    def check_gold_answer(self, item: Chat) -> str | None:
        return item.reference or None

    async def _open_desk(self) -> None:
        self.desk = PreferenceDesk(
            Path(self.config.preferences_path), max_pending=self.config.max_pending_groups
        )
        self._stack.push_async_callback(self.desk.close)
        page = serve_preferences(
            self.desk, host=self.config.preference_host, port=self.config.preference_port
        )
        self.page_url = await self._stack.enter_async_context(page)
        logger.info("people choose between answers at %s", self.page_url)

    async def _in_thread(self, call: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _read_hub(self) -> tuple[Any, Any]:
        # Half a million conversations, each decoded when it is read.
        rows = hub_dataset(**self._hub_source()).shuffle(seed=self.config.dataset_seed)
        num_test = min(MAX_TEST_ROWS, len(rows) // 2)
        return rows.select(range(num_test, len(rows))), rows.select(range(num_test))


MAX_TEST_ROWS = 256
"""Rows of a hub split reserved for evaluations."""


if __name__ == "__main__":
    RewardModelEnv.cli()
