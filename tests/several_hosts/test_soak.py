"""Five minutes of random faults; `python -m tests.several_hosts.soak` runs for an hour."""

from __future__ import annotations

import pytest

from tests.several_hosts.programs import run_program

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]


def test_soak_of_five_minutes_ends_with_an_exact_account():
    printed = run_program("tests.several_hosts.soak", "--minutes", "5")

    assert "nothing lost, nothing trained twice, no growth" in printed
