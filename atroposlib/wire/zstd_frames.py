"""Compression of single groups in the binary format; pure."""

from __future__ import annotations

from atroposlib.wire.json_format import WireError

_MAGIC = b"\x28\xb5\x2f\xfd"
_LEVEL = 3


def is_compressed(blob: bytes | memoryview) -> bool:
    """Whether this is a zstd frame; an uncompressed group never starts like one."""
    return bytes(blob[:4]) == _MAGIC


def compressed_blob(blob: bytes) -> bytes:
    """Return the zstd frame of a group."""
    import zstandard

    return zstandard.ZstdCompressor(level=_LEVEL).compress(blob)


def plain_blob(blob: bytes | memoryview, *, max_bytes: int) -> bytes | memoryview:
    """Return the decompressed group.

    Raises:
        WireError: it is not a complete zstd frame, does not state its size, or is too large.
    """
    if not is_compressed(blob):
        return blob
    import zstandard

    try:
        size = zstandard.frame_content_size(blob)
        if size < 0:
            raise WireError(
                "expected a zstd frame that states its content size", kind="value_error"
            )
        if size > max_bytes:
            text = f"expected a zstd frame of at most {max_bytes} bytes"
            raise WireError(text, kind="too_large")
        return zstandard.ZstdDecompressor().decompress(blob, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"not a zstd frame: {error}", kind="msgpack_invalid") from error
