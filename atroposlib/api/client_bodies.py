"""What clients put on the wire and read from it, by what they have learned of the service; pure.

a service that says `Accept-Post: ... application/msgpack`    binary lane, keys honoured
any other                                                     JSON, gzip where it pays
one that refused gzip but took the same content plain         plain JSON
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from atroposlib.wire import MEDIA_TYPES, Lane, decode_batch

__all__ = [
    "BINARY_LANE_HEADERS",
    "Body",
    "Format",
    "ServiceTraits",
    "answer_lane",
    "decode_answer",
    "encode_body",
    "is_on_this_machine",
    "plain",
]

_MIN_GZIP_BYTES = 1024
_ADVERTISING_PATHS = frozenset({"/info", "/wandb_info", "/register", "/register-env"})
_FORMAT_REFUSALS = (400, 415, 422)

BINARY_LANE_HEADERS = {"Accept": f"{MEDIA_TYPES['msgpack']}; zstd=1, {MEDIA_TYPES['json']};q=0.5"}
"""Ask for groups in the binary lane; services without it answer JSON."""


class Encoder(Protocol):
    """`wire.encode_group` or `wire.encode_groups`."""

    def __call__(self, value: Any, /, lane: Lane, *, zstd: bool) -> bytes:
        """Encode a group or groups; compressed in the binary lane only."""


class Format(NamedTuple):
    """How a body is written."""

    lane: Lane
    is_gzip_wanted: bool = False


_BINARY = Format("msgpack")
_GZIP = Format("json", is_gzip_wanted=True)
_PLAIN = Format("json")


class Body(NamedTuple):
    """A request body and the headers that describe it."""

    content: bytes
    headers: Mapping[str, str]

    @property
    def is_compressed(self) -> bool:
        """Whether the content is gzip."""
        return "Content-Encoding" in self.headers

    @property
    def is_plain(self) -> bool:
        """Whether every service there ever was can read it."""
        return not self.is_compressed and self.headers["Content-Type"] == MEDIA_TYPES["json"]


class ServiceTraits:
    """What a client has learned of the service it talks to; the latest word counts.

    Attributes:
        honours_keys: whether a repeated `Idempotency-Key` stores nothing twice. The services
            that have the binary lane are those that do.
    """

    def __init__(self) -> None:
        self.honours_keys = False
        self._takes_binary = False
        self._takes_gzip = True

    def learn(self, path: str, headers: Mapping[str, str]) -> None:
        """Take note of a good answer's `Accept-Post`.

        Where a service with the binary lane always sends it, its absence says that an older
        service has taken over.
        """
        offer = headers.get("Accept-Post", "")
        if offer or path in _ADVERTISING_PATHS:
            self._takes_binary = self.honours_keys = MEDIA_TYPES["msgpack"] in offer.lower()

    def formats(self) -> list[Format]:
        """Return the formats to try, best first."""
        formats = [_BINARY] if self._takes_binary else []
        if self._takes_gzip:
            formats.append(_GZIP)
        return [*formats, _PLAIN]

    def may_be_format(self, status: int | None, body: Body) -> bool:
        """Tell whether the refusal of a body may be about its format, not its content."""
        return status in _FORMAT_REFUSALS and not body.is_plain

    def drop(self, refused: Iterable[Body]) -> None:
        """Give up formats that were refused, now that the same content was taken in another."""
        for body in refused:
            if body.is_compressed:
                self._takes_gzip = False
            else:
                self._takes_binary = self.honours_keys = False


def is_on_this_machine(url: str) -> bool:
    """Tell whether bytes to an address stay on this machine, where compressing costs only time."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def encode_body(encode: Encoder, value: Any, form: Format, *, zstd: bool = False) -> Body:
    """Encode a group or groups.

    Args:
        encode: writes `value` in a lane.
        value: what is posted.
        form: how.
        zstd: whether groups are compressed in the binary lane.

    Raises:
        GroupError: a group is malformed.
    """
    content = encode(value, form.lane, zstd=zstd)
    if form.is_gzip_wanted and len(content) >= _MIN_GZIP_BYTES:
        # Level 1: token ids shrink well already, and higher levels cost more than they save.
        packed = gzip.compress(content, compresslevel=1)
        if len(packed) < len(content):
            headers = {"Content-Type": MEDIA_TYPES["json"], "Content-Encoding": "gzip"}
            return Body(packed, headers)
    return Body(content, {"Content-Type": MEDIA_TYPES[form.lane]})


def plain(request: Mapping[str, Any]) -> Body:
    """Encode a small request."""
    return Body(msgspec.json.encode(request), {"Content-Type": MEDIA_TYPES["json"]})


def answer_lane(headers: Mapping[str, str]) -> Lane:
    """Return the lane an answer came in."""
    media_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    return "msgpack" if media_type == MEDIA_TYPES["msgpack"] else "json"


def decode_answer(content: bytes, headers: Mapping[str, str]) -> Any:
    """Decode an answer in the lane it came in.

    Raises:
        ValueError: it cannot be decoded.
    """
    if answer_lane(headers) == "msgpack":
        return decode_batch(content, "msgpack")
    return msgspec.json.decode(content)
