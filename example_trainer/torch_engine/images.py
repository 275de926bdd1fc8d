"""Images in the prompts of a model of the shape of Qwen2-VL.

    chat ─► template: one placeholder per image ─► `PromptReader`: all tokens of the images
         ─► `encoder_outputs`: the model's embeddings of the images whose tokens a pass computes

Image tokens are equal for all images. Where prompts are compared, in a branch or for kept caches,
numbers of the image's content take their place.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch

from atroposlib.errors import GroupError
from example_trainer.images import (
    AlignedImages,
    ImageReader,
    ProcessedImage,
    encode_images,
)
from example_trainer.torch_engine.attention import NewTokens

__all__ = ["PromptImages", "PromptReader", "encoder_outputs"]

_BITS_OF_POSITION = 32


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of a prompt of P tokens."""

    aligned: AlignedImages
    identity_ids: tuple[int, ...]
    """[P] the tokens; those of images are negative numbers, equal for equal images only."""

    @classmethod
    def of_prompt(cls, tokens: Sequence[int], aligned: AlignedImages) -> PromptImages:
        identity_ids = list(tokens)
        for image, run in zip(aligned.images, aligned.runs, strict=True):
            content = _content_number(image) << _BITS_OF_POSITION
            length = run.end - run.start
            identity_ids[run.start : run.end] = [-1 - content - t for t in range(length)]
        return cls(aligned, tuple(identity_ids))

    def positions(self, first: int, end: int) -> torch.Tensor:
        """Return (3, end - first): positions of tokens of the prompt and of those after it."""
        positions_3P = self.aligned.positions_3L
        length = positions_3P.shape[1]
        later = torch.arange(max(first, length), max(end, length)) + self._shift
        return torch.cat([positions_3P[:, first:end], later.expand(3, -1)], dim=1)

    @cached_property
    def _shift(self) -> int:
        """Position minus index of tokens after the prompt: an image takes few positions."""
        positions_3P = self.aligned.positions_3L
        first_after: int = positions_3P.max().item() + 1
        return first_after - len(self.identity_ids)

    def whole_length(self, length: int) -> int:
        """Return the number of tokens, at most `length`, that have whole images only."""
        cut = [run.start for run in self.aligned.runs if run.start < length < run.end]
        return cut[0] if cut else length


def _content_number(image: ProcessedImage) -> int:
    content = hashlib.sha256(repr(image.grid).encode())
    content.update(image.pixels_PD.contiguous().numpy())
    return int.from_bytes(content.digest(), "big")


class PromptReader:
    """Reads the images of prompts in a thread of its own, one prompt at a time.

    Prompts whose requests are open at the same time share equal images.

    Args:
        reader: The reader of the model.
        max_tokens: Image tokens of a prompt, which bounds the memory.
        numbers_per_token: Numbers of the patches that a token stands for.
    """

    def __init__(self, reader: ImageReader, *, max_tokens: int, numbers_per_token: int) -> None:
        self._reader = replace(reader, max_numbers=max_tokens * numbers_per_token)
        self._in_use: WeakValueDictionary[str, ProcessedImage] = WeakValueDictionary()
        """By their payloads."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="images")

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def read(
        self, tokens: Sequence[int], payloads: Mapping[str, Any]
    ) -> tuple[list[int], PromptImages]:
        """Return a prompt with all tokens of its images, and the images.

        Once this is cancelled, no further image is processed.

        Raises:
            GroupError: an image is malformed, or the prompt has other image tokens.
            MissingExtraError: Pillow is not installed.
        """
        is_cancelled = threading.Event()

        def process(image: Any) -> tuple[torch.Tensor, torch.Tensor]:
            if is_cancelled.is_set():
                raise GroupError("the request was cancelled")
            return self._reader.process(image)

        def read() -> tuple[list[int], PromptImages]:
            reader = replace(self._reader, process=process)
            expanded, aligned = reader.read_prompt(tokens, payloads, known=self._in_use)
            return expanded, PromptImages.of_prompt(expanded, aligned)

        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, read)
        finally:
            is_cancelled.set()


class _Place(NamedTuple):
    """Tokens of an image in a row of packed tokens."""

    start: int
    end: int
    image: ProcessedImage


def encoder_outputs(
    model: Any,
    tokens: Sequence[int],
    starts: Sequence[tuple[NewTokens, PromptImages | None]],
    *,
    image_token_id: int,
) -> dict[str, Any]:
    """Return the argument `mm_encoder_outputs` of a forward pass, empty without images.

    Args:
        model: A model of `IMAGE_MODELS`.
        tokens: [N] packed tokens.
        starts: The sequences that start, with their images.
        image_token_id: Token of images; each one in the row needs an embedding.
    """
    places = [place for start in starts for place in _places_of(*start)]
    if not places:
        return {}
    distinct = list({id(place.image): place.image for place in places}.values())
    device = next(model.parameters()).device
    outputs = encode_images(
        model,
        torch.cat([image.pixels_PD for image in distinct]).to(device),
        torch.tensor([image.grid for image in distinct], device=device),
        [distinct.index(place.image) for place in places],
    )
    covered = {t for place in places for t in range(place.start, place.end)}
    strays = [t for t, token in enumerate(tokens) if token == image_token_id and t not in covered]
    if strays:
        _insert_strays(model, outputs["image"], places, strays, image_token_id)
    return {"mm_encoder_outputs": outputs}


def _places_of(new: NewTokens, images: PromptImages | None) -> list[_Place]:
    """Return the places of the images that are not cached."""
    if images is None:
        return []
    offset = new.first - new.num_cached
    return [
        _Place(offset + run.start, offset + run.end, image)
        for image, run in zip(images.aligned.images, images.aligned.runs, strict=True)
        if run.start >= new.num_cached
    ]


def _insert_strays(
    model: Any, output: Any, places: Sequence[_Place], strays: Sequence[int], image_token_id: int
) -> None:
    """Give tokens that stand for no image their own embedding, between those of images."""
    device = next(model.parameters()).device
    own_1H = model.get_input_embeddings()(torch.tensor([image_token_id], device=device))
    starts = [*(place.start for place in places), *strays]
    order = sorted(range(len(starts)), key=starts.__getitem__)
    output["pooler_output"] = _in_order((*output["pooler_output"], *[own_1H] * len(strays)), order)
    if "deepstack_features" in output:  # which are added to those of the text
        nothing_1H = torch.zeros_like(own_1H)
        output["deepstack_features"] = [
            _in_order((*features, *[nothing_1H] * len(strays)), order)
            for features in output["deepstack_features"]
        ]


def _in_order(features: Sequence[torch.Tensor], order: Sequence[int]) -> tuple[torch.Tensor, ...]:
    return tuple(features[i] for i in order)
