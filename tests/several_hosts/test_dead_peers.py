"""Peers that are gone without an end of the connection."""

from __future__ import annotations

import pytest

from tests.several_hosts.programs import check_rows

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

PARTS = (
    ("env1 - service: packets", "env1 - engine: packets"),
    ("trainer - service: packets", "trainer - engine: packets"),
    ("host lost",),
    ("long cut",),
)


@pytest.mark.parametrize("rows", PARTS, ids=" ".join)
def test_connections_without_a_peer_lose_nothing(rows):
    check_rows(*rows)
