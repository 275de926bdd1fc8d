"""In which format a client writes, by what it has learned of the service; no network."""

from __future__ import annotations

import gzip
import random
from typing import Any

import pytest

from atroposlib.api.client_transport import (
    Body,
    BodyEncoding,
    ServiceTraits,
    encode_body,
    format_of_response,
    is_on_this_machine,
)

OFFER = {"Accept-Post": "application/json, application/msgpack"}
BINARY, GZIP, PLAIN = (
    BodyEncoding("msgpack"),
    BodyEncoding("json", is_gzip_wanted=True),
    BodyEncoding("json"),
)
BINARY_BODY = Body(b"1", {"Content-Type": "application/msgpack"})
GZIP_BODY = Body(b"1", {"Content-Type": "application/json", "Content-Encoding": "gzip"})
PLAIN_BODY = Body(b"1", {"Content-Type": "application/json"})


def encoded(content: bytes, form: BodyEncoding = GZIP) -> Body:
    def encode(value: Any, wire_format: str, *, zstd: bool) -> bytes:
        assert wire_format == form.wire_format
        assert zstd is False
        return content

    return encode_body(encode, None, form)


@pytest.mark.parametrize(("size", "is_compressed"), [(1023, False), (1024, True)])
def test_encode_body_compresses_json_from_1024_bytes(size, is_compressed):
    body = encoded(b"1" * size)

    assert body.is_compressed is is_compressed
    content = gzip.decompress(body.content) if is_compressed else body.content
    assert content == b"1" * size
    assert body.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("content", "form"),
    [(random.Random(0).randbytes(5000), GZIP), (b"1" * 5000, PLAIN), (b"1" * 5000, BINARY)],
)
def test_encode_body_leaves_alone_what_does_not_shrink_or_needs_no_gzip(content, form):
    body = encoded(content, form)

    assert body.content == content
    assert not body.is_compressed


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", True),
        ("http://127.0.0.1:8000/prefix", True),
        ("http://[::1]:8000", True),
        ("http://service:8000", False),
        ("https://localhost.example.org", False),
    ],
)
def test_is_on_this_machine_goes_by_the_host(url, expected):
    assert is_on_this_machine(url) is expected


def test_traits_of_an_unknown_service_are_the_oldest():
    traits = ServiceTraits()

    assert traits.formats() == [GZIP, PLAIN]
    assert not traits.honors_keys


@pytest.mark.parametrize("path", ["/info", "/wandb_info", "/register", "/register-env"])
def test_traits_follow_the_latest_advert(path):
    traits = ServiceTraits()

    traits.learn(path, OFFER)
    assert traits.formats() == [BINARY, GZIP, PLAIN]
    assert traits.honors_keys
    traits.learn("/status", {})
    assert traits.honors_keys

    traits.learn(path, {})  # an older service has taken over
    assert traits.formats() == [GZIP, PLAIN]
    assert not traits.honors_keys


def test_traits_drop_the_refused_formats_and_the_promise_of_keys():
    traits = ServiceTraits()
    traits.learn("/info", OFFER)

    traits.drop([BINARY_BODY])
    assert traits.formats() == [GZIP, PLAIN]
    assert not traits.honors_keys
    traits.drop([GZIP_BODY])
    assert traits.formats() == [PLAIN]


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (415, BINARY_BODY, True),
        (422, BINARY_BODY, True),
        (400, GZIP_BODY, True),
        (413, BINARY_BODY, False),
        (None, BINARY_BODY, False),
        # Every service reads plain JSON: its refusal is about the content.
        (422, PLAIN_BODY, False),
    ],
)
def test_traits_tell_refusals_of_format_from_those_of_content(status, body, expected):
    assert ServiceTraits().may_be_format(status, body) is expected


def test_format_of_a_response_is_that_of_its_media_type_whatever_its_parameters():
    assert format_of_response({"Content-Type": "application/json; charset=utf-8"}) == "json"
    assert format_of_response({"Content-Type": "Application/MsgPack;v=1"}) == "msgpack"
    assert format_of_response({}) == "json"
