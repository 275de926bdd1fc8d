"""Images of data sets as base64 PNG, the form in which chats carry them.

PIL image, bytes, {"bytes", "path"} of a Parquet file, base64, file name ─► png_base64
http(s) address ─► fetch_image ─► bytes
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from atroposlib.errors import MissingExtraError

__all__ = ["ImageError", "fetch_image", "is_address", "png_base64", "require_pillow"]

MAX_IMAGE_BYTES = 32_000_000
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


class ImageError(Exception):
    """An image that cannot be had or read; the message says why."""


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


def is_address(source: Any) -> bool:
    """Whether an image has to be fetched over the network."""
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def png_base64(source: Any, *, folder: Path | None = None) -> str:
    """Return an image as base64 of a PNG; blocks while it is read and encoded.

    Args:
        source: PIL image; encoded bytes; a mapping with `bytes` or `path`; a `data:` address;
            base64; or the name of a file in `folder`.
        folder: where files are looked up; None: a name is no image.

    Raises:
        ImageError: there is no such file, or what there is cannot be read as an image.
        MissingExtraError: Pillow is not installed.
    """
    image_module = require_pillow()
    try:
        is_decoded = isinstance(source, image_module.Image)
        image = source if is_decoded else _opened(image_module, _encoded(source, folder))
        png = io.BytesIO()
        shown = image if image.mode in PNG_MODES else image.convert("RGB")
        shown.save(png, "PNG")
    except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
        raise ImageError(f"not a readable image: {error}") from error
    return base64.b64encode(png.getvalue()).decode()


async def fetch_image(address: str, *, timeout_s: float) -> bytes:
    """Wait for the bytes behind an address.

    Args:
        address: `http://` or `https://`.
        timeout_s: time for all of it.

    Raises:
        ImageError: it takes longer, is refused, or is larger than `MAX_IMAGE_BYTES`.
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


def _opened(image_module: Any, content: bytes) -> Any:
    return image_module.open(io.BytesIO(content), formats=FORMATS)


def _encoded(source: Any, folder: Path | None) -> bytes:
    """Return the bytes of an image file."""
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
    """Return a file inside the folder; a name that leads out of it is none."""
    if folder is None or len(name) > 255 or name.startswith("data:"):
        return None
    path = (folder / name).resolve()
    return path if path.is_relative_to(folder.resolve()) and path.is_file() else None
