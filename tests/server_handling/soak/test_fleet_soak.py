from __future__ import annotations

import pytest

from tests.server_handling.soak.fleet_soak import NAMES, run_soak


@pytest.mark.slow
@pytest.mark.long
async def test_killing_one_of_three_engines_loses_no_rollout_and_it_gets_work_again() -> None:
    outcome = await run_soak(num_rollouts=200, seconds=6.0)

    assert outcome.lost == []
    assert outcome.mixed_up == []
    assert outcome.finished >= 200  # all that were begun; more on a fast machine
    assert all(outcome.before[name] > 0 for name in NAMES)
    assert all(outcome.while_down[name] > 0 for name in NAMES[1:])
    assert outcome.after[NAMES[0]] > 0
