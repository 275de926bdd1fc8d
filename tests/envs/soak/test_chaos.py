from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs import base
from tests.envs.soak.chaos import chaos


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "kill_every_s"),
    [
        pytest.param(60, (0.5, 1.5), id="few", marks=pytest.mark.long),
        pytest.param(
            10_000,
            (2.0, 8.0),
            id="ten-thousand",
            marks=[pytest.mark.long, pytest.mark.timeout(3600)],
        ),
    ],
)
async def test_chaos_leaks_loses_and_repeats_nothing(
    groups: int, kill_every_s: tuple[float, float], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(vars(base), "AutoTokenizer", None)  # `chaos` puts its own there

    account = await chaos(tmp_path, groups=groups, kill_every_s=kill_every_s)

    assert account.faults() == []
    assert len(account.ledger.acknowledged) >= groups
    assert account.ledger.kills
