from __future__ import annotations

from atroposlib.utils.text import is_milestone


def test_what_repeats_is_told_at_powers_of_ten() -> None:
    assert [n for n in range(2_000) if is_milestone(n)] == [1, 10, 100, 1000]


def test_step_over_a_power_of_ten_reaches_it() -> None:
    assert is_milestone(12, added=4)
    assert not is_milestone(16, added=4)
    assert is_milestone(3, added=3)
