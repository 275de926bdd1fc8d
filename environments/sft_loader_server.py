"""SFT loader: rows of a data set as demonstrations for a trainer that also gets rollouts.

    row -> tokens and masks -> group of one, marked sft -> service, at each trainer step

It samples nothing and needs no inference server. Next to other environments it adds up to
`max_sft_per_step` demonstrations to each step; alone it fills the batches.

| dataset_format | column | trained tokens |
|---|---|---|
| `completion` | a text | all |
| `prefix_completion` | a text, and another one before it in `prefix_column_name` | the text |
| `oai_format` | messages with `role` and `content` | those of the assistant |
| `sharegpt_format` | messages with `from` and `value` | those of the assistant |

    python environments/sft_loader_server.py process --env.dataset_path \
        environments/data/sft_loader_sample --env.total_steps 4
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from pydantic import Field, model_validator

from atroposlib.envs.base import APIServerConfig, Item, ScoredDataGroup
from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig, hub_rows
from atroposlib.errors import ConfigError
from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import deep_hermes_settings
from atroposlib.utils.local_records import read_split
from atroposlib.utils.tokenize_for_trainer import UNMASKED_ROLES, render_chat_ids

__all__ = [
    "DatasetFormat",
    "SFTConfig",
    "SFTEnv",
    "chat_labels",
    "num_to_send",
    "read_chat",
    "text_labels",
]

logger = logging.getLogger("environments.sft_loader")

CARD = EnvironmentCard(
    task="demonstrations from a data set, for likelihood training next to rollouts",
    turns="1 or more, recorded",
    reward="1; trained by likelihood (`overrides.sft`)",
    data="any data set of the hub in four formats, or `--env.dataset_path`",
    needs="core install; no inference server",
    command="process --env.dataset_path environments/data/sft_loader_sample --env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("data") / "sft_loader_sample"
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Value of `from` in ShareGPT rows to the role of a chat."""


class DatasetFormat(str, Enum):
    """Format of the rows."""

    COMPLETION = "completion"
    PREFIX_COMPLETION = "prefix_completion"
    OAI_FORMAT = "oai_format"
    SHAREGPT_FORMAT = "sharegpt_format"


class SFTConfig(HubItemsConfig):
    """Settings of the data set, of the masks and of the rate."""

    group_size: int = Field(1, ge=1, description="Has no effect: a group has one demonstration.")
    dataset_name: str = Field(
        "gsm8k", description="Data set of the hub, unless dataset_path is given."
    )
    dataset_format: DatasetFormat = Field(
        DatasetFormat.COMPLETION, description="Format of the rows."
    )
    dataset_column_name: str = Field("text", description="Column of the text or of the messages.")
    prefix_column_name: str | None = Field(
        None, description="Column of the text before it, for prefix_completion."
    )
    mask_everything_but_assistant_answer: bool = Field(
        True, description="Whether only messages of the assistant are trained, in chats."
    )
    mask_everything_but_last_step: bool = Field(
        False, description="Whether only the last message of the assistant is trained, in chats."
    )
    max_sft_per_step: int = Field(
        -1, ge=-1, description="Maximum number of demonstrations per trainer step; -1: no limit."
    )
    add_every_n_steps: int = Field(
        1, ge=1, description="Demonstrations are sent at trainer steps that are multiples of this."
    )

    @model_validator(mode="after")
    def _prefix_is_named(self) -> SFTConfig:
        if self.dataset_format == DatasetFormat.PREFIX_COMPLETION and not self.prefix_column_name:
            raise ValueError("dataset_format prefix_completion needs prefix_column_name")
        return self


Labels = tuple[list[int], list[int]]
"""[L] tokens and [L] masks."""


def text_labels(tokenizer: Any, text: str, *, prefix: str | None = None) -> Labels:
    """Return tokens and masks of a text, with the end-of-text token, after a masked prefix."""
    before = [] if prefix is None else list(tokenizer.encode(prefix))
    ids = list(tokenizer.encode(text, add_special_tokens=prefix is None))
    if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids.append(tokenizer.eos_token_id)
    return before + ids, [IGNORE_INDEX] * len(before) + ids


def chat_labels(
    tokenizer: Any,
    chat: Sequence[Mapping[str, Any]],
    *,
    only_assistant: bool = True,
    only_last: bool = False,
) -> Labels | None:
    """Return tokens and masks of a chat.

    Args:
        tokenizer: tokenizer with a chat template.
        chat: messages, with one of the assistant or more.
        only_assistant: Whether other messages are masked.
        only_last: Whether all but the last message of the assistant are masked.

    Returns:
        None if the chat template renders a part of the chat differently than the whole, so that
        the position of a message is unknown.
    """
    tokens = render_chat_ids(tokenizer, chat)
    if not (only_assistant or only_last):
        return tokens, list(tokens)
    turns = [i for i, message in enumerate(chat) if message["role"] in UNMASKED_ROLES]
    masks = [IGNORE_INDEX] * len(tokens)
    for i in turns[-1:] if only_last else turns:
        before = render_chat_ids(tokenizer, chat[:i], add_generation_prompt=True)
        through = tokens if i == len(chat) - 1 else render_chat_ids(tokenizer, chat[: i + 1])
        if through[: len(before)] != before or tokens[: len(through)] != through:
            return None
        masks[len(before) : len(through)] = through[len(before) :]
    return tokens, masks


def read_chat(messages: Any, dataset_format: DatasetFormat) -> list[dict[str, Any]]:
    """Return the messages of a row with `role` and `content`.

    Raises:
        ConfigError: a message lacks a key or has an unknown role, or there is no message of the
            assistant.
    """
    is_oai = dataset_format == DatasetFormat.OAI_FORMAT
    role_key, text_key = ("role", "content") if is_oai else ("from", "value")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ConfigError(
            f"expected a list of messages with {role_key} and {text_key}, got {messages!r:.100}"
        )
    chat = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get(text_key), str):
            raise ConfigError(
                f"message {i}: expected {role_key} and {text_key}, got {message!r:.100}"
            )
        role = str(message.get(role_key))
        if not is_oai and role not in ROLES:
            raise ConfigError(f"message {i}: expected from to be one of {', '.join(ROLES)}")
        chat.append({"role": role if is_oai else ROLES[role], "content": message[text_key]})
    if not any(message["role"] in UNMASKED_ROLES for message in chat):
        raise ConfigError("no message is of the assistant, so nothing would be trained")
    return chat


def num_to_send(config: SFTConfig, *, step: int, queue_sequences: int) -> int:
    """Return the number of demonstrations to send at a trainer step."""
    if step % config.add_every_n_steps:
        return 0
    num_batches = max(1, config.max_batches_offpolicy)
    room = max(0, num_batches * config.batch_size - queue_sequences)
    return room if config.max_sft_per_step < 0 else min(room, config.max_sft_per_step)


class SFTEnv(DatasetItems):
    """Rows of a data set as groups of one; an item is a row.

    Attributes:
        sent_step: last trainer step at which demonstrations were sent; None before the first.
    """

    name = "sft_loader"
    env_config_cls = SFTConfig
    config: SFTConfig
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def __init__(self, config: SFTConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.config.group_size = 1
        self.sent_step: int | None = None

    @classmethod
    def config_init(cls) -> tuple[SFTConfig, APIServerConfig]:
        return deep_hermes_settings(
            SFTConfig,
            dataset_name="AlignmentLab-AI/open-instruct-sharegpt",
            dataset_format=DatasetFormat.SHAREGPT_FORMAT,
            dataset_column_name="conversations",
            inference_weight=-1,
            max_sft_per_step=8,
            ensure_scores_are_not_same=False,
            wandb_name="sft_loader",
        )

    async def setup(self) -> None:
        """Read the rows, and check each of them.

        Raises:
            ConfigError: a row is malformed; the message has its number.
        """
        await super().setup()
        for number, row in enumerate(self.train):
            try:
                self._read_row(row)
            except ConfigError as error:
                raise ConfigError(f"row {number}: {error}") from error

    def _read(self) -> tuple[Any, Any]:
        """Return all rows for training, and none for evaluations."""
        config = self.config
        names = [config.dataset_column_name]
        if config.dataset_format == DatasetFormat.PREFIX_COMPLETION:
            names.append(str(config.prefix_column_name))
        if config.dataset_path is None:
            rows = hub_rows(
                config.dataset_name, split=config.dataset_split, subset=config.dataset_subset
            )
            missing = [name for name in names if rows and name not in rows[0]]
            if missing:
                raise ConfigError(
                    f"{config.dataset_name} has no column {', '.join(missing)}; it has "
                    f"{', '.join(rows[0])}"
                )
        else:
            rows = read_split(Path(config.dataset_path), ["train"], names)
        Random(config.dataset_seed).shuffle(rows)
        return rows, []

    def _read_row(self, row: Mapping[str, Any]) -> list[dict[str, Any]] | tuple[str, str | None]:
        """Return a chat, or a text and its prefix."""
        config = self.config
        value = row[config.dataset_column_name]
        if config.dataset_format in (DatasetFormat.OAI_FORMAT, DatasetFormat.SHAREGPT_FORMAT):
            return read_chat(value, config.dataset_format)
        prefix = None
        if config.dataset_format == DatasetFormat.PREFIX_COMPLETION:
            prefix = row[str(config.prefix_column_name)]
        if not isinstance(value, str) or not value or not isinstance(prefix, str | None):
            raise ConfigError(f"expected texts, got {value!r:.100} and {prefix!r:.100}")
        return value, prefix

    def demonstration(self, row: Mapping[str, Any]) -> ScoredDataGroup | None:
        """Return the group of a row; None, counted, if a mask cannot be determined."""
        content = self._read_row(row)
        if isinstance(content, tuple):
            labels: Labels | None = text_labels(self.tokenizer, content[0], prefix=content[1])
        else:
            labels = chat_labels(
                self.tokenizer,
                content,
                only_assistant=self.config.mask_everything_but_assistant_answer,
                only_last=self.config.mask_everything_but_last_step,
            )
        if labels is None:
            self.count_failure("unknown_mask")
            logger.warning(
                "row skipped: the chat template renders its messages differently one by one, so "
                "the trained tokens are unknown"
            )
            return None
        tokens, masks = labels
        group: ScoredDataGroup = {
            "tokens": [tokens],
            "masks": [masks],
            "scores": [1.0],
            "advantages": [[1.0] * len(tokens)],
            "overrides": [{"sft": True}],
            "group_overrides": {"sft": True, "group_size": 1},
        }
        if self.config.include_messages and not isinstance(content, tuple):
            group["messages"] = [content]
        return group

    async def collect_trajectories(
        self, item: Mapping[str, Any]
    ) -> tuple[ScoredDataGroup | None, list[Item]]:
        return await asyncio.to_thread(self.demonstration, item), []

    async def add_train_workers(self) -> None:
        """Start no rollouts: demonstrations are sent by `env_step_checks`."""

    async def env_step_checks(self) -> None:
        """Send demonstrations once per trainer step, in addition to the checks of the base class.

        This includes the first step, so that a trainer without other environments can start.
        """
        await super().env_step_checks()
        status = self._registration.queue_status()
        if status.current_step == self.sent_step:
            return
        num = num_to_send(
            self.config, step=status.current_step, queue_sequences=status.queue_groups
        )
        groups = []
        for _ in range(num):
            group, _ = await self.collect_trajectories(await self.get_next_item())
            if group is not None:
                groups.append(group)
        for group in groups:
            await self.handle_send_to_api(group, None)
        if groups:
            self.sent_step = status.current_step

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        logger.info("no evaluation: demonstrations are not sampled")

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        num_rows = max(1, len(self.train))
        metrics["train/idx"] = self.iter % num_rows
        metrics["train/epoch"] = self.iter // num_rows
        await super().wandb_log(metrics)


if __name__ == "__main__":
    SFTEnv.cli()
