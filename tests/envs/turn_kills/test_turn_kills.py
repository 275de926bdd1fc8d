"""Walks whose environment, engine, tool server and service are killed with SIGKILL."""

from __future__ import annotations

from pathlib import Path

import pytest

from example_trainer.processes import find_free_ports
from tests.envs.turn_kills.actors import Ports
from tests.envs.turn_kills.loop import run_with_kills


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_kills", "min_groups"),
    [
        pytest.param(4, 3, id="each-once"),
        pytest.param(50, 20, id="fifty", marks=pytest.mark.long),
    ],
)
async def test_killed_walks_continue_from_their_last_turn(
    num_kills: int, min_groups: int, tmp_path: Path
) -> None:
    ports = Ports(*find_free_ports(len(Ports._fields)))
    account = await run_with_kills(
        tmp_path, ports, num_kills=num_kills, min_groups=min_groups, seed=num_kills
    )

    # No group is lost or delivered twice, every score is that of the undisturbed walk, and at most
    # one turn of a live rollout is sampled again for a kill.
    assert account.faults() == []
    assert len(account.groups) >= min_groups
