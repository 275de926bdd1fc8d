"""Images of trajectories: decode them, process them for the model, and align them with tokens.

    images [G] --decode--> RGB --the model's image processor--> patches (P, D), grid (t, h, w)
    tokens [L] --one placeholder per image, or all its tokens--> tokens [L'] --> positions (3, L')

For models of the shape of Qwen2-VL: an image becomes a run of equal tokens, `image_token_id`, one
for each `merge_size` x `merge_size` patches; the model replaces their embeddings by those of the
patches. Engines report the whole run. Chat templates write a single placeholder, which is expanded
here, in every field that has one entry per token.

Groups come from a network: only bytes inside the group are decoded, addresses and paths are
rejected, and the size of an image is checked before it is decoded.

Shape suffixes: I images, P patches, D numbers of one patch, L tokens of one trajectory.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import inspect
import io
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from atroposlib.errors import GroupError, MissingExtraError
from atroposlib.scored_data import GROUP_FIELDS, IGNORE_INDEX, select_runs

if TYPE_CHECKING:
    import torch

__all__ = [
    "IMAGE_MODELS",
    "TEXT_ONLY",
    "AlignedImages",
    "ImageReader",
    "ImageSupport",
    "ProcessedImage",
    "TokenizerWithProcessor",
    "decode_image",
    "encode_images",
    "image_support",
    "vision_encoder",
]

logger = logging.getLogger(__name__)

IMAGE_MODELS = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""Values of `model_type` in a config whose images can be trained."""

MAX_IMAGES = 64
"""Most images of one trajectory."""
MAX_IMAGE_BYTES = 32_000_000
"""Longest encoded image."""
MAX_PIXELS = 50_000_000
"""Width times height of the largest image; the processor scales larger ones down anyway."""

MAX_GROUP_NUMBERS = 2**31
"""Numbers of the patches of all distinct images of a group: 8 GiB."""

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
_DIRECT = "base64, or a data: URL with base64"
_SETTINGS = (
    "engine and trainer must use the same preprocessor settings: serve the model's own "
    "preprocessor_config.json, without --mm-processor-kwargs"
)


def decode_image(payload: Any, path: str) -> Any:
    """Return a payload of a group as an RGB image of Pillow, as the engine shows it to the model.

    Transparent areas become white, and the rotation that a camera recorded is applied; vLLM does
    the same. Of an animation, the first frame is used.

    Args:
        payload: base64, a `data:` URL with base64, or the part of a chat message that has one.
        path: Place in the group, for errors.

    Raises:
        GroupError: the payload is not an image, or too large.
        MissingExtraError: Pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingExtraError("pillow", extra="examples") from error
    content = io.BytesIO(_content_of(payload, path))
    try:
        with warnings.catch_warnings():  # of sizes, which are checked below
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(content, formats=_FORMATS)
        num_pixels = image.width * image.height
        shown = _as_engines_show(image) if num_pixels <= MAX_PIXELS else None
    except Exception as error:  # decoders raise errors of any kind for malformed bytes
        reason = str(error) or type(error).__name__
        if isinstance(error, UnidentifiedImageError):  # whose text is an address in memory
            reason = f"expected the content of a file in one of the formats {', '.join(_FORMATS)}"
        raise GroupError(f"{path}: not a readable image: {reason}") from error
    if shown is None:
        raise GroupError(
            f"{path}: {image.width} x {image.height} pixels; expected at most {MAX_PIXELS}"
        )
    return shown


def _as_engines_show(image: Any) -> Any:
    from PIL import Image, ImageOps

    with contextlib.suppress(Exception):  # an unreadable record of the rotation is ignored
        image = ImageOps.exif_transpose(image)
    has_alpha = image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info
    if image.mode == "RGB" or not has_alpha:
        return image.convert("RGB")
    front = image.convert("RGBA")
    shown = Image.new("RGB", front.size, "white")
    shown.paste(front, mask=front.getchannel("A"))
    return shown


def _content_of(payload: Any, path: str) -> bytes:
    text = _text_of(payload)
    if text is None:
        raise GroupError(f"{path}: expected {_DIRECT}, got {type(payload).__name__}")
    header, comma, body = text.partition(",")
    if comma and not (header.startswith("data:") and header.endswith(";base64")):
        raise GroupError(f"{path}: {text[:40]!r} is not a data: URL with base64")
    encoded = body if comma else text
    if "://" in encoded[:64]:
        raise GroupError(
            f"{path}: {text[:40]!r} is an address, which is not fetched; send {_DIRECT}"
        )
    if len(encoded) > 4 * MAX_IMAGE_BYTES // 3 + 4:
        raise GroupError(f"{path}: larger than {MAX_IMAGE_BYTES} bytes")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise GroupError(f"{path}: {text[:40]!r}: expected {_DIRECT}") from error


def _text_of(payload: Any) -> str | None:
    """Return the text of a payload, also of a part such as `{"image_url": {"url": ...}}`."""
    if isinstance(payload, Mapping):
        payload = payload.get("image_url") or payload.get("image") or payload.get("url")
        if isinstance(payload, Mapping):
            payload = payload.get("url")
    return payload if isinstance(payload, str) else None


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """One image as the model reads it; trajectories with the same image share the object."""

    pixels_PD: torch.Tensor
    """(P, D) float32 patches."""
    grid: tuple[int, int, int]
    """Patches in time, height and width; their product is P."""


class ImageRun(NamedTuple):
    """Place of one image in the tokens of a trajectory."""

    start: int
    end: int
    """Index after its last token."""


@dataclass(frozen=True, eq=False)
class AlignedImages:
    """Images of one trajectory of L tokens, with the positions of its tokens."""

    images: tuple[ProcessedImage, ...]
    """[I], at least one, in the order of the tokens."""
    runs: tuple[ImageRun, ...]
    """[I] tokens of each image."""
    positions_3L: torch.Tensor
    """(3, L) int64 positions in time, height and width, from the model's `get_rope_index`."""

    def without_last_token(self) -> AlignedImages:
        return replace(self, positions_3L=self.positions_3L[:, :-1])

    def fitting_length(self, limit: int) -> int:
        """Return the number of tokens, at most `limit`, that contain whole images only.

        The last token is the label of the one before it and not read by the model, so that an
        image may not end there.
        """
        length = min(self.positions_3L.shape[1], limit)
        cut = [run.start for run in self.runs if run.start < length <= run.end]
        return cut[0] if cut else length

    def first_tokens(self, length: int) -> AlignedImages | None:
        """Return the images in the first `length` tokens, of `fitting_length`; None without any."""
        num_images = sum(run.end <= length for run in self.runs)
        if num_images == 0:
            return None
        return AlignedImages(
            self.images[:num_images], self.runs[:num_images], self.positions_3L[:, :length]
        )


@dataclass(frozen=True)
class ImageReader:
    """Converts the field `images` of groups for one model.

    Args:
        image_token_id: Token that stands for `merge_size` x `merge_size` patches of an image.
        merge_size: Patches, per direction, whose embeddings the model merges.
        process: Returns (P, D) pixels and (1, 3) grid of an RGB image.
        rope_index: `get_rope_index` of the model.
        max_numbers: Most numbers of the patches of all distinct images of a group or a prompt.
    """

    image_token_id: int
    merge_size: int
    process: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
    rope_index: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    max_numbers: int = MAX_GROUP_NUMBERS

    def read(
        self, group: Mapping[str, Any], *, requires_tokens: bool = True
    ) -> tuple[Mapping[str, Any], list[AlignedImages | None]]:
        """Return the group with one token per merged patch, and the images [G] of trajectories.

        Args:
            group: A checked group.
            requires_tokens: Whether images without tokens are an error; else they are left out.

        Raises:
            GroupError: images are malformed, or tokens do not match them.
        """
        tokens = group["tokens"]
        payloads = _payloads_of(group.get("images"), num_trajectories=len(tokens))
        runs = [self._runs(ids) for ids in tokens]
        if not any(runs) and not (requires_tokens and any(payloads)):
            return group, [None] * len(tokens)
        processed: dict[str, ProcessedImage] = {}
        images: list[tuple[ProcessedImage, ...]] = []
        sources: list[list[int]] = []
        for i, own in enumerate(payloads):
            if not runs[i] and not requires_tokens:
                own = ()
            _check_runs(i, runs[i], own, group["masks"][i], self.image_token_id)
            read = tuple(
                self._processed(payload, _image_path(i, n), processed)
                for n, payload in enumerate(own)
            )
            images.append(read)
            sources.append(self._sources(i, len(tokens[i]), runs[i], read))
        expanded = _select(group, sources)
        return expanded, [
            self._aligned(ids, read) for ids, read in zip(expanded["tokens"], images, strict=True)
        ]

    def read_prompt(
        self,
        tokens: Sequence[int],
        payloads: Mapping[str, Any],
        *,
        known: MutableMapping[str, ProcessedImage] | None = None,
    ) -> tuple[list[int], AlignedImages]:
        """Return a prompt with one token per merged patch, and its images.

        Args:
            tokens: One token for each image, between others.
            payloads: Place of each image in the request, for errors, to its payload; at least one.
            known: Images of other prompts by their payloads, which are not processed again; gets
                those of this one.

        Raises:
            GroupError: images are malformed, or tokens do not match them.
        """
        lengths = [run.end - run.start for run in self._runs(tokens)]
        if lengths != [1] * len(payloads):
            if sum(lengths) < len(payloads):
                reason = "the chat template leaves out images of some messages, or all"
            else:
                reason = "does a text contain such a token?"
            raise GroupError(
                f"the prompt has {sum(lengths)} image tokens (id {self.image_token_id}), expected "
                f"one for each of the {len(payloads)} images, separated by other tokens; {reason}"
            )
        if len(payloads) > MAX_IMAGES:
            raise GroupError(f"{len(payloads)} images; expected at most {MAX_IMAGES}")
        processed: dict[str, ProcessedImage] = {}
        images = tuple(
            self._processed(payload, path, processed, known) for path, payload in payloads.items()
        )
        expanded = [tokens[t] for t in self._sources(0, len(tokens), self._runs(tokens), images)]
        aligned = self._aligned(expanded, images)
        assert aligned is not None
        return expanded, aligned

    def _runs(self, tokens: Sequence[int]) -> list[ImageRun]:
        """Return the runs of image tokens."""
        if self.image_token_id not in tokens:  # faster than the loop below
            return []
        runs, t = [], 0
        for is_image, members in itertools.groupby(tokens, lambda id_: id_ == self.image_token_id):
            length = sum(1 for _ in members)
            if is_image:
                runs.append(ImageRun(t, t + length))
            t += length
        return runs

    def _processed(
        self,
        payload: Any,
        path: str,
        processed: dict[str, ProcessedImage],
        known: MutableMapping[str, ProcessedImage] | None = None,
    ) -> ProcessedImage:
        """Process an image, once for all places of a group or a prompt that have it."""
        key = _text_of(payload) or ""
        if key not in processed:
            image = None if known is None else known.get(key)
            if image is None:
                image = self._process(payload, path)
            numbers = sum(other.pixels_PD.numel() for other in processed.values())
            if numbers + image.pixels_PD.numel() > self.max_numbers:
                raise GroupError(
                    f"{path}: all images together have more than {self.max_numbers} numbers after "
                    "the image processor; send fewer or smaller ones"
                )
            processed[key] = image
            if known is not None:
                known[key] = image
        return processed[key]

    def _process(self, payload: Any, path: str) -> ProcessedImage:
        image = decode_image(payload, path)
        try:
            pixels_PD, grids = self.process(image)
        except ValueError as error:  # such as an extreme aspect ratio
            raise GroupError(f"{path}: the model's image processor rejects it: {error}") from error
        time, height, width = grids[0].tolist()
        return ProcessedImage(pixels_PD, (time, height, width))

    def num_tokens(self, image: ProcessedImage) -> int:
        return math.prod(image.grid) // self.merge_size**2

    def _sources(
        self, i: int, length: int, runs: Sequence[ImageRun], images: Sequence[ProcessedImage]
    ) -> list[int]:
        """Return, for each token after the expansion, the index of the token it repeats."""
        sources: list[int] = []
        t = 0
        for run, image in zip(runs, images, strict=True):
            expected, found = self.num_tokens(image), run.end - run.start
            if found not in (1, expected):
                raise GroupError(
                    f"tokens[{i}][{run.start}:{run.end}]: {found} image tokens (id "
                    f"{self.image_token_id}) for an image whose {image.grid} patches are "
                    f"{expected} tokens; expected {expected}, or 1 to be expanded; {_SETTINGS}"
                )
            sources += range(t, run.start)
            sources += [run.start] * expected if found == 1 else range(run.start, run.end)
            t = run.end
        return [*sources, *range(t, length)]

    def _aligned(
        self, tokens: Sequence[int], images: tuple[ProcessedImage, ...]
    ) -> AlignedImages | None:
        if not images:
            return None
        import torch

        tokens_1L = torch.tensor([list(tokens)])
        positions_31L, _ = self.rope_index(
            input_ids=tokens_1L,
            mm_token_type_ids=(tokens_1L == self.image_token_id).int(),
            image_grid_thw=torch.tensor([image.grid for image in images]),
        )
        return AlignedImages(images, tuple(self._runs(tokens)), positions_31L[:, 0])


def _payloads_of(images: Any, *, num_trajectories: int) -> list[Sequence[Any]]:
    """Return the payloads [G][I]; a trajectory may have a list, one payload, or None."""
    if images is None:
        return [()] * num_trajectories
    if not isinstance(images, Sequence) or isinstance(images, str):
        raise GroupError("images: expected a list with the images of each trajectory")
    if len(images) != num_trajectories:
        raise GroupError(
            f"images: {len(images)} entries, tokens has {num_trajectories}; each trajectory needs "
            "one: a list of images, one image, or null"
        )
    payloads: list[Sequence[Any]] = []
    for i, entry in enumerate(images):
        own: Sequence[Any] = (entry,) if isinstance(entry, str | Mapping) else entry or ()
        if not isinstance(own, Sequence):
            raise GroupError(f"images[{i}]: expected {_DIRECT}, or a list, got {entry!r:.40}")
        if len(own) > MAX_IMAGES:
            raise GroupError(f"images[{i}]: {len(own)} images; expected at most {MAX_IMAGES}")
        payloads.append(own)
    return payloads


def _image_path(i: int, n: int) -> str:
    return f"images[{i}][{n}]"


def _check_runs(
    i: int,
    runs: Sequence[ImageRun],
    payloads: Sequence[Any],
    masks: Sequence[int],
    image_token_id: int,
) -> None:
    """Check that each image has its tokens, and that none of these is trained."""
    if len(runs) != len(payloads):
        counts = f"tokens[{i}] has {len(runs)} runs of image tokens (id {image_token_id}), images"
        counts += f"[{i}] has {len(payloads)} images; expected one run per image"
        if not runs:
            raise GroupError(
                f"{counts}. These are tokens of the text alone: sample with a server whose chats "
                "return token ids (vLLM), or train without the images: --unsupported-fields ignore"
            )
        raise GroupError(f"{counts}, separated by other tokens")
    for run in runs:
        for t in range(run.start, run.end):
            if masks[t] != IGNORE_INDEX:
                raise GroupError(
                    f"masks[{i}][{t}]: trains an image token; expected {IGNORE_INDEX} there"
                )


def _select(group: Mapping[str, Any], sources: Sequence[Sequence[int]]) -> Mapping[str, Any]:
    """Return a group whose trajectories consist of the tokens at `sources` [G][L']."""
    lengths = [len(ids) for ids in group["tokens"]]
    if [len(own) for own in sources] == lengths:
        return group
    selected = dict(group)
    for field in GROUP_FIELDS:
        values = group.get(field.name)
        has_runs = field.name == "token_versions"
        if values is None or not (has_runs or field.shape.startswith("GL")):
            continue
        if len(values) != len(lengths):
            raise GroupError(f"{field.name}: {len(values)} entries, tokens has {len(lengths)}")
        select = _select_runs if has_runs else _select_one
        selected[field.name] = [
            select(f"{field.name}[{i}]", row, own, lengths[i])
            for i, (row, own) in enumerate(zip(values, sources, strict=True))
        ]
    return selected


def _select_one(path: str, row: Any, sources: Sequence[int], length: int) -> Any:
    if isinstance(row, int | float):  # an advantage of the whole trajectory
        return row
    if len(row) != length:
        raise GroupError(f"{path}: {len(row)} entries, the tokens of the trajectory are {length}")
    return [row[t] for t in sources]


def _select_runs(path: str, runs: Any, sources: Sequence[int], length: int) -> Any:
    if runs is None:
        return None
    covered = sum(size for _, size in runs)
    if covered != length:
        raise GroupError(f"{path}: runs of {covered} tokens, the tokens of the trajectory {length}")
    return select_runs(runs, sources)


class ImageSupport(NamedTuple):
    """Whether and how a run reads images."""

    reader: ImageReader | None
    """None: groups with images are rejected."""
    obstacle: str = ""
    """Reason without a reader, with the remedy."""


TEXT_ONLY = ImageSupport(
    None, "the model is text only; use one that reads images, such as Qwen2.5-VL"
)


def image_support(model: Any, source: str, *, is_sharded: bool = False) -> ImageSupport:
    """Return the reader of images for a transformers model.

    Args:
        model: The model.
        source: Folder or name of the model, with its `preprocessor_config.json`.
        is_sharded: Whether its weights are sharded over ranks.
    """
    if model.config.model_type not in IMAGE_MODELS:
        return TEXT_ONLY
    if is_sharded:
        return ImageSupport(
            None,
            "sharded weights (parallel_mode=fsdp) need every rank to have images in every pass; "
            "use --parallel-mode data",
        )
    if "mm_encoder_outputs" not in inspect.signature(model.base_model.forward).parameters:
        return ImageSupport(None, "this transformers is too old for images; install 5.19 or newer")
    try:
        import PIL  # noqa: F401
    except ImportError:
        return ImageSupport(None, str(MissingExtraError("pillow", extra="examples")))
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(source)
    except (ImportError, OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return ImageSupport(
            None,
            f"the image processor of {source!r} cannot be loaded: {lines[0]}; the folder needs the "
            "preprocessor_config.json of the model",
        )

    vision = model.config.vision_config
    other_size = _size_unlike_model(processor, vision)
    if other_size is not None:
        return ImageSupport(None, f"the preprocessor_config.json of {source!r} has {other_size}")

    def process(image: Any) -> tuple[torch.Tensor, torch.Tensor]:
        processed = processor(images=[image], return_tensors="pt")
        return processed["pixel_values"], processed["image_grid_thw"]

    merge_size = vision.spatial_merge_size
    logger.info(
        "images: read by %s, a token per %d x %d patches",
        *(type(processor).__name__, merge_size, merge_size),
    )
    return ImageSupport(
        ImageReader(
            model.config.image_token_id, merge_size, process, model.base_model.get_rope_index
        )
    )


def _size_unlike_model(processor: Any, vision: Any) -> str | None:
    """Return the first size of a processor that the vision encoder does not have, or None."""
    expected = {
        "merge_size": vision.spatial_merge_size,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
    }
    for name, size in expected.items():
        found = getattr(processor, name, size)
        if found != size:
            return f"{name} {found}, the vision encoder of the model has {size}"
    return None


def vision_encoder(model: Any) -> torch.nn.Module:
    """Return the part of a model of `IMAGE_MODELS` that embeds images."""
    encoder: torch.nn.Module = model.base_model.visual
    return encoder


def encode_images(
    model: Any, pixels_PD: torch.Tensor, grids_I3: torch.Tensor, places: Sequence[int]
) -> dict[str, Any]:
    """Return the model's `mm_encoder_outputs` for the images at `places` of a microbatch.

    Args:
        model: A model of `IMAGE_MODELS`.
        pixels_PD: Patches of the distinct images.
        grids_I3: Their grids.
        places: Index of the image for each place in the tokens, in their order.
    """
    output = model.base_model.get_image_features(pixels_PD, grids_I3, return_dict=True)
    output["pooler_output"] = tuple(output["pooler_output"][i] for i in places)
    if "deepstack_features" in output:  # of several layers of the encoder
        output["deepstack_features"] = [
            tuple(features[i] for i in places) for features in output["deepstack_features"]
        ]
    return {"image": output}


_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


class TokenizerWithProcessor:
    """Saves a tokenizer together with the files by which engines load the image processor.

    The files are copied unchanged, so that engine and trainer read the same settings.

    Args:
        tokenizer: The tokenizer.
        source: Folder or name of the model that has the files.
    """

    def __init__(self, tokenizer: Any, source: str) -> None:
        self._tokenizer = tokenizer
        self._contents: dict[str, bytes] = {}
        for name in _PROCESSOR_FILES:
            path = _find_file(source, name)
            if path is not None:
                self._contents[name] = path.read_bytes()

    def save_pretrained(self, directory: str | Path) -> None:
        self._tokenizer.save_pretrained(directory)
        for name, content in self._contents.items():
            (Path(directory) / name).write_bytes(content)


def _find_file(source: str, name: str) -> Path | None:
    from transformers.utils import cached_file

    try:
        path = cached_file(source, name)
    except OSError:  # the model does not have it
        return None
    return None if path is None else Path(path)
