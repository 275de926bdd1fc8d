"""A few faults between plain clients and the service, and the coverage of the long tests."""

from __future__ import annotations

import pytest

from tests.several_hosts.faults import CLOCK_FAULTS, FAULTS, select
from tests.several_hosts.programs import check_rows
from tests.several_hosts.test_dead_parts import PARTS as DEAD_PARTS
from tests.several_hosts.test_dead_peers import PARTS as DEAD_PEERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PLAIN_ROWS = ("trainer - service: packets to trainer", "service: kill")
IMPAIRED = (("delay", "loss"), ("cut",))


def test_plain_clients_lose_nothing():
    check_rows(*PLAIN_ROWS, options=("--plain",))


@pytest.mark.long
@pytest.mark.parametrize("rows", IMPAIRED, ids=" ".join)
def test_impaired_connections_lose_nothing(rows):
    check_rows(*rows)


def test_long_tests_run_every_row():
    rows = [row for part in (*IMPAIRED, *DEAD_PEERS, *DEAD_PARTS) for row in part]

    every = (*FAULTS, *CLOCK_FAULTS)
    assert sorted(fault.name for fault in select(rows)) == sorted(f.name for f in every)
