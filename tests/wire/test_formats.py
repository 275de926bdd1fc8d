"""Negotiation of formats."""

from __future__ import annotations

import pytest

from atroposlib.wire import MEDIA_TYPES, format_of_accept, format_of_type


@pytest.mark.parametrize(
    ("content_type", "wire_format"),
    [
        (None, "json"),
        ("", "json"),
        ("application/json", "json"),
        ("Application/JSON; charset=utf-8", "json"),
        ("application/msgpack", "msgpack"),
        ("application/x-msgpack", "msgpack"),
        ("application/vnd.msgpack;x=1", "msgpack"),
        ("text/html", None),
        ("application/octet-stream", None),
    ],
)
def test_format_of_a_body(content_type, wire_format):
    assert format_of_type(content_type) == wire_format


@pytest.mark.parametrize(
    ("accept", "wire_format", "accepts_zstd"),
    [
        (None, "json", False),
        ("", "json", False),
        ("*/*", "json", False),
        ("text/html, application/xml;q=0.9", "json", False),
        ("application/msgpack", "msgpack", False),
        ("application/msgpack;zstd=1", "msgpack", True),
        ('application/msgpack; zstd="1"; q=0.5, application/json;q=0.4', "msgpack", True),
        ("application/msgpack;q=0.4, application/json;q=0.5", "json", False),
        ("application/json, application/msgpack", "json", False),
        ("application/msgpack, application/json", "msgpack", False),
        ("application/msgpack;q=0", "json", False),
        ("application/msgpack, */*;q=0.1", "msgpack", False),
        ("application/msgpack;q=x", "json", False),
        ("application/json;zstd=1", "json", False),
        (",;,=;q", "json", False),
    ],
)
def test_format_of_an_answer(accept, wire_format, accepts_zstd):
    assert format_of_accept(accept) == (wire_format, accepts_zstd)


def test_format_of_an_answer_to_a_client_that_names_none_is_json():
    assert format_of_accept("*/*").wire_format == "json"
    assert format_of_accept(None).wire_format == "json"


def test_media_types_lead_back_to_their_formats():
    assert {
        wire_format: format_of_type(media_type) for wire_format, media_type in MEDIA_TYPES.items()
    } == {
        "json": "json",
        "msgpack": "msgpack",
    }
