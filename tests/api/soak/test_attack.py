from pathlib import Path

import pytest

from tests.api.soak.attack import attack
from tests.api.soak.ledger import Ledger
from tests.api.soak.service_process import RedisServer
from tests.api.soak.soak import soak

pytestmark = pytest.mark.slow

needs_redis = pytest.mark.skipif(
    RedisServer.binary is None, reason="no redis-server on this machine"
)
FEW = pytest.param(6, id="few", marks=pytest.mark.long)
MANY = pytest.param(100, id="many", marks=[pytest.mark.long, pytest.mark.timeout(900)])


def test_ledger_names_what_does_not_add_up():
    ledger = Ledger()
    for number in (1, 2, 3):
        ledger.acknowledge(number)
    ledger.deliver([1, 4])
    ledger.deliver([1])

    lost, invented, repeated = ledger.faults()

    assert lost.startswith("2 acknowledged groups are neither")
    assert invented.startswith("1 groups came out")
    assert repeated.startswith("1 groups came twice")


def test_ledger_excuses_a_batch_that_was_in_flight_at_a_kill():
    ledger = Ledger()
    ledger.acknowledge(1)
    ledger.deliver([1])
    ledger.mark_kill()
    ledger.deliver([1])

    assert ledger.faults() == []


@pytest.mark.slow
@pytest.mark.parametrize("kills", [FEW, MANY])
def test_killed_sqlite_service_loses_nothing(kills: int, tmp_path: Path):
    ledger = attack(tmp_path, kills=kills)

    assert ledger.faults() == []
    assert len(ledger.deliveries) > kills


@pytest.mark.slow
@needs_redis
@pytest.mark.parametrize("kills", [FEW, MANY])
@pytest.mark.parametrize("victim", ["replica", "redis"])
@pytest.mark.long
def test_killed_part_of_a_redis_run_loses_nothing(kills: int, victim: str, tmp_path: Path):
    ledger = attack(tmp_path, kills=kills, store="redis", victims=[victim])

    assert ledger.faults() == []
    assert len(ledger.deliveries) > kills


@pytest.mark.slow
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(8.0, id="short"),
        pytest.param(300.0, id="five-minutes", marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
@pytest.mark.long
def test_soaked_service_accounts_for_every_group(seconds: float, tmp_path: Path):
    ledger, resident = soak(tmp_path, seconds=seconds)

    assert ledger.faults(in_flight=0) == []
    assert len(ledger.deliveries) > seconds
    if seconds > 60:
        # The newest idempotency keys are remembered, in 32 MiB at most; nothing else may grow.
        assert resident[-1] < resident[1] + 32 * 2**20, f"memory grows: {resident}"
