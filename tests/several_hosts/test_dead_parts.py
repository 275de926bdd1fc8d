"""Parts that are killed or stopped, a full disk, and clocks that jump."""

from __future__ import annotations

import pytest

from tests.several_hosts.programs import check_rows

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

PARTS = (
    ("killed",),
    ("stopped",),
    ("disk",),
    ("service: clock", "engine: clock"),
    ("env1: clock", "trainer: clock"),
)


@pytest.mark.parametrize("rows", PARTS, ids=" ".join)
def test_parts_that_end_or_stop_lose_nothing(rows):
    check_rows(*rows)
