"""Questions about images, in one turn: `ImageEnv`, and conversion of images to base64 PNG.

    row -> image as PNG, question, gold -> [system, user with image] -> G completions -> +1 or -1

    PIL image, bytes, {"bytes", "path"} of a Parquet file, base64, file name ─► png_base64
    http(s) URL ─► fetch_image ─► bytes

The policy reads a system message with the answer format, the question and the image, which is sent
in the field `images` of the group. With `server_type` vllm, the tokens of a group are the engine's:
those of the whole prompt, with all tokens of the image, and the sampled ones with their logprobs.
From a server that reports none, they are those of question and completion only, tokenized from
text, without the image.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import logging
import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import aiohttp
from pydantic import Field

from atroposlib.envs.base import APIServerConfig, Item, ScoredDataGroup
from atroposlib.envs.dataset_items import hub_dataset
from atroposlib.envs.server_handling.openai_compatible import check_sequences
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig, completion_budget
from atroposlib.errors import MissingExtraError, NoDataError
from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB
from atroposlib.tasks.answers import boxed_answer, tagged_answer
from atroposlib.tasks.single_turn_parts import default_configs
from atroposlib.utils.local_records import read_split
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

__all__ = [
    "RIGHT",
    "WRONG",
    "ImageEnv",
    "ImageError",
    "answer_boxed",
    "answer_tagged",
    "engine_tokens",
    "fetch_image",
    "png_base64",
    "require_pillow",
    "score_text",
    "usable",
]

logger = logging.getLogger(__name__)

MAX_IMAGE_BYTES = 32_000_000
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


class ImageError(Exception):
    """An image cannot be downloaded or read."""


def require_pillow() -> Any:
    """Return the module `PIL.Image`.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pillow", extra="examples") from error
    return Image


def png_base64(source: Any, *, folder: Path | None = None) -> str:
    """Return an image as base64 PNG; blocks while it is read and encoded.

    Args:
        source: PIL image; encoded bytes; a mapping with `bytes` or `path`; a `data:` URL; base64;
            or the name of a file in `folder`.
        folder: folder of files; None rejects file names.

    Raises:
        ImageError: the file is missing or is not an image.
        MissingExtraError: Pillow is not installed.
    """
    image_module = require_pillow()
    try:
        image = source
        if not isinstance(source, image_module.Image):
            image = image_module.open(io.BytesIO(_encoded(source, folder)), formats=FORMATS)
        png = io.BytesIO()
        shown = image if image.mode in PNG_MODES else image.convert("RGB")
        shown.save(png, "PNG")
    except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
        raise ImageError(f"not a readable image: {error}") from error
    return base64.b64encode(png.getvalue()).decode()


async def fetch_image(address: str, *, timeout_s: float) -> bytes:
    """Wait for the bytes at an http(s) URL, at most `timeout_s` seconds.

    Raises:
        ImageError: the download fails, takes longer or is larger than `MAX_IMAGE_BYTES`.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    content = bytearray()
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(address) as answer:
            answer.raise_for_status()
            async for chunk in answer.content.iter_chunked(65_536):
                content += chunk
                if len(content) > MAX_IMAGE_BYTES:
                    raise ImageError(f"{address} is larger than {MAX_IMAGE_BYTES} bytes")
    except asyncio.TimeoutError as error:
        raise ImageError(f"{address} took longer than {timeout_s:g} s") from error
    except (aiohttp.ClientError, ValueError, OSError) as error:
        raise ImageError(f"{address} cannot be fetched: {error}") from error
    return bytes(content)


def _encoded(source: Any, folder: Path | None) -> bytes:
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, bytes | bytearray):
        return bytes(source)
    if not isinstance(source, str) or not source:
        raise ImageError(f"expected an image, got {type(source).__name__}")
    path = _file(source, folder)
    if path is not None:
        return path.read_bytes()
    try:
        return base64.b64decode(source.rpartition(",")[2], validate=True)
    except binascii.Error as error:
        raise ImageError(f"neither a file of the data set nor base64: {source[:60]!r}") from error


def _file(name: str, folder: Path | None) -> Path | None:
    """Return a file inside the folder; None if there is none or the name leads outside."""
    if folder is None or len(name) > 255 or name.startswith("data:"):
        return None
    path = (folder / name).resolve()
    return path if path.is_relative_to(folder.resolve()) and path.is_file() else None


RIGHT, WRONG = 1.0, -1.0


def answer_boxed(answer: str) -> str:
    r"""Return the text of the last `\boxed{}`; empty without one."""
    return boxed_answer(answer) or ""


def answer_tagged(answer: str) -> str:
    """Return the text between the first `<answer>` tags, or the whole answer without tags."""
    tagged = tagged_answer(answer)
    return answer.strip() if tagged is None else tagged


def score_text(answer: str, gold: str) -> float:
    """Return 1.0 if two texts are equal, ignoring case, else -1.0."""
    is_right = answer != "" and answer.casefold() == gold.strip().casefold()
    return RIGHT if is_right else WRONG


def usable(text: Any) -> str:
    """Return the text of a row's field, of the first entry if it is a list.

    Raises:
        ValueError: the text is empty.
    """
    first = (text[0] if len(text) else "") if isinstance(text, list | tuple) else text
    shown = str("" if first is None else first).strip()
    if not shown:
        raise ValueError("a field of the row is empty")
    return shown


def engine_tokens(chat: Any) -> ScoredDataGroup | None:
    """Return the tokens of a chat's answers, [G][L], as the engine reported them.

    vLLM adds `prompt_token_ids` and, per choice, `token_ids` to an answer on request. Its prompt
    contains all tokens of each image.

    Args:
        chat: `ChatCompletion` of the OpenAI client.

    Returns:
        `tokens`, `masks`, `inference_logprobs` and `finish_reasons`; None if the answer lacks any
        of them.

    Raises:
        InferenceError: ids and logprobs do not line up.
    """
    prompt_ids: list[int] | None = (chat.model_extra or {}).get("prompt_token_ids")
    ids: list[list[int]] = []
    logprobs: list[list[float]] = []
    for choice in chat.choices:
        own = (choice.model_extra or {}).get("token_ids")
        entries = choice.logprobs.content if choice.logprobs else None
        if not prompt_ids or not own or not entries:
            return None
        ids.append(own)
        logprobs.append([entry.logprob for entry in entries])
    if not prompt_ids:
        return None
    reasons: list[str | None] = [choice.finish_reason or "stop" for choice in chat.choices]
    check_sequences(ids, logprobs, reasons)
    num_prompt = len(prompt_ids)
    return {
        "tokens": [[*prompt_ids, *row] for row in ids],
        "masks": [[IGNORE_INDEX] * num_prompt + row for row in ids],
        "inference_logprobs": [[MASKED_LOGPROB] * num_prompt + row for row in logprobs],
        "finish_reasons": reasons,
    }


MODEL = "Qwen/Qwen2-VL-2B-Instruct"


class ImageItem(TypedDict):
    """One question."""

    image: str
    """Base64 PNG."""
    question: str
    gold: str
    """Gold answer in the form that `score_answer` compares."""


class ImageEnvConfig(SingleTurnEnvConfig):
    """Settings of the data set and of time limits."""

    dataset_path: str | None = Field(
        None,
        description="JSONL, JSON or Parquet file, or folder with a train file, with the columns of "
        "the hub's data set; images are base64 or names of files in the same folder. None loads "
        "from the hub.",
    )
    dataset_seed: int = Field(0, description="Seed of the order and of the evaluation items.")
    num_eval_items: int = Field(
        16, ge=0, description="Number of rows kept for evaluations, at most a quarter of all rows."
    )
    image_timeout_s: float = Field(
        10.0, gt=0, description="Timeout in seconds of the download of an image."
    )
    request_timeout_s: float = Field(
        60.0, gt=0, description="Timeout in seconds of the request for the completions of a group."
    )


class ImageEnv(SingleTurnEnv):
    """Base class of the image environments; write `question`, `gold` and `score_answer`.

    Attributes:
        hub_name: data set on the hub; its split `train` is read.
        columns: columns of a row.
        image_column: column with the image or its URL.
        instructions: system message, with the answer format.
        answer_form: format of a marked answer, with `{}` for its text.
        max_tokens: maximum tokens of one completion.
        iter: number of rows tried so far, including rows that were skipped.
    """

    hub_name: ClassVar[str]
    columns: ClassVar[Sequence[str]]
    image_column: ClassVar[str] = "image"
    instructions: ClassVar[str]
    answer_form: ClassVar[str] = "<answer>{}</answer>"
    max_tokens: ClassVar[int] = 512
    env_config_cls = ImageEnvConfig
    config: ImageEnvConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0
        self.rows: Any = []
        self.folder: Path | None = None
        self.train: list[int] = []
        self.held_out: list[int] = []
        self._eval_items: list[ImageItem] = []

    @classmethod
    def config_init(cls) -> tuple[ImageEnvConfig, APIServerConfig]:
        return default_configs(
            cls.env_config_cls,
            MODEL,
            port=9001,
            group_size=8,
            max_num_workers=2,
            total_steps=1000,
            batch_size=12,
            steps_per_eval=100,
            max_token_length=2048,
            wandb_name=cls.name,
        )

    @abstractmethod
    def question(self, row: Mapping[str, Any]) -> str:
        """Return the question of a row; a ValueError skips the row."""

    @abstractmethod
    def gold(self, row: Mapping[str, Any]) -> str:
        """Return the gold answer of a row; a ValueError skips the row."""

    @staticmethod
    @abstractmethod
    def score_answer(answer: str, gold: str) -> float:
        """Return 1.0 for an answer that matches the gold one, else -1.0."""

    async def setup(self) -> None:
        """Read the rows of a file, or open the data set of the hub; images are loaded later."""
        require_pillow()
        self.rows = await asyncio.to_thread(self._read)
        order = list(range(len(self.rows)))
        random.Random(self.config.dataset_seed).shuffle(order)
        num_held_out = min(self.config.num_eval_items, len(order) // 4)
        self.held_out, self.train = order[:num_held_out], order[num_held_out:]
        logger.info("%d training and %d evaluation rows", len(self.train), len(self.held_out))

    async def get_next_item(self) -> ImageItem:
        """Return the next usable row; others are skipped and counted.

        Raises:
            NoDataError: no row is usable.
        """
        for _ in range(len(self.train)):
            index = self.train[self.iter % len(self.train)]
            self.iter += 1
            item = await self._load(index)
            if item is not None:
                return item
        raise NoDataError(f"none of {len(self.train)} rows has a readable image and answer")

    def prompt(self, item: ImageItem) -> list[dict[str, Any]]:
        address = f"data:image/png;base64,{item['image']}"
        parts = [
            {"type": "text", "text": item["question"]},
            {"type": "image_url", "image_url": {"url": address}},
        ]
        return [
            {"role": "system", "content": self.instructions},
            {"role": "user", "content": parts},
        ]

    async def score(self, item: ImageItem, answer: str) -> float:
        return self.score_answer(answer, item["gold"])

    def check_gold_answer(self, item: ImageItem) -> str:
        return self.answer_form.format(item["gold"])

    async def collect_trajectories(
        self, item: ImageItem
    ) -> tuple[ScoredDataGroup | None, list[Item]]:
        budget = self._budget(self.prompt(item))
        if budget < 1:
            self.prompt_room.skip(self.config.max_token_length, missing=1 - budget)
            return None, []
        self.prompt_room.has_fit = True
        chat = await self.server.chat_completion(
            messages=self.prompt(item),
            n=self.config.group_size,
            max_tokens=budget,
            timeout=self.config.request_timeout_s,
            **self._token_options(),
            **self.sampling(),
        )
        replies = [(c.message.content or "", c.finish_reason or "stop") for c in chat.choices]
        answers = [self._shown(text, is_cut=reason == "length") for text, reason in replies]
        scores = [reward.total for reward in await self.weighed_scores(item, answers)]
        self.scores_since_log += scores
        return self._group(item, replies, scores, engine_tokens(chat)), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        if not self._eval_items:
            items = await asyncio.gather(*(self._load(index) for index in self.held_out))
            self._eval_items = [item for item in items if item is not None]
        await super().evaluate()

    def eval_items(self) -> list[ImageItem]:
        return self._eval_items

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

    def _token_options(self) -> dict[str, Any]:
        """Return the options that make vLLM report token ids and logprobs of a chat."""
        if all(isinstance(server, VLLMServer) for server in self.server.servers):
            return {"logprobs": True, "return_token_ids": True}
        return {}

    def _group(
        self,
        item: ImageItem,
        replies: Sequence[tuple[str, str]],
        scores: Sequence[float],
        rows: ScoredDataGroup | None,
    ) -> ScoredDataGroup:
        """Return the group; `rows` has the engine's tokens, None if it reported none."""
        asked = {"role": "user", "content": item["question"]}
        chats = [[asked, {"role": "assistant", "content": text}] for text, _ in replies]
        if rows is None:
            rows = self._text_tokens(chats, [reason for _, reason in replies])
        is_muted = [self.config.mute_truncated and reason == "length" for _, reason in replies]
        group: ScoredDataGroup = {
            **rows,
            "scores": list(scores),
            "images": [item["image"]] * len(replies),
            "overrides": [{"set_advantage_to_zero": True} if muted else {} for muted in is_muted],
            "generation_params": self.sampling(),
        }
        if self.config.include_messages:
            system = {"role": "system", "content": self.instructions}
            group["messages"] = [[system, *chat] for chat in chats]
        return group

    def _text_tokens(
        self, chats: Sequence[Sequence[Mapping[str, Any]]], finish_reasons: Sequence[str]
    ) -> ScoredDataGroup:
        rows = [
            tokenize_for_trainer(self.tokenizer, chat, finish_reason=reason)
            for chat, reason in zip(chats, finish_reasons, strict=True)
        ]
        return {
            "tokens": [row["tokens"] for row in rows],
            "masks": [row["masks"] for row in rows],
            "tokenized_from_text": True,
        }

    async def _load(self, index: int) -> ImageItem | None:
        """Return the item of a row; None, counted as `failures/unusable_row`, if it is unusable."""
        try:
            row = await asyncio.to_thread(self.rows.__getitem__, index)
            source = row[self.image_column]
            if isinstance(source, str) and source.startswith(("http://", "https://")):
                source = await fetch_image(source, timeout_s=self.config.image_timeout_s)
            return {
                "image": await asyncio.to_thread(png_base64, source, folder=self.folder),
                "question": self.question(row),
                "gold": self.gold(row),
            }
        except (ImageError, ValueError, OSError) as error:
            logger.warning("row %d skipped: %s", index, error)
            self.count_failure("unusable_row")
            return None

    def _read(self) -> Any:
        if self.config.dataset_path is None:
            return hub_dataset(self.hub_name, split="train")
        path = Path(self.config.dataset_path)
        self.folder = path if path.is_dir() else path.parent
        return read_split(path, ["train"], self.columns)

    def _budget(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return the maximum tokens of a completion; the image does not count."""
        text = [{"role": "user", "content": messages[-1]["content"][0]["text"]}]
        limit = self.config.max_token_length
        room = completion_budget(self.tokenizer, text, max_token_length=limit)
        return min(self.max_tokens, room)
