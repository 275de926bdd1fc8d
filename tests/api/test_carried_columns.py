"""Columns and token versions keep their bytes: in stores, after a lease ends, after a kill."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atroposlib.api.client import TrainerClient, TrajectoryApiClient
from atroposlib.api.store.open import open_store
from atroposlib.wire import WireFormat, decode_group, encode_group
from tests.api.helpers import REGISTRATION
from tests.api.run_helpers import Clock, started_run
from tests.api.test_run_api import running, wait_until_up

LENGTHS = (40, 25)


def traced_columns() -> dict[str, Any]:
    """A group with a column of each shape, and tokens of two policy versions."""
    rng = np.random.default_rng(7)
    tokens = [[int(i) for i in rng.integers(1, 30_000, n)] for n in LENGTHS]
    return {
        "tokens": tokens,
        "masks": [[-100] * 5 + row[5:] for row in tokens],
        "scores": [1.0, 0.0],
        "token_versions": [[[None, 5], [7, 20], [8, 15]], [[None, 5], [8, 20]]],
        "policy_version": 7,
        "columns": {
            "routed_experts": [rng.integers(0, 128, (n, 4, 8)).astype("u1") for n in LENGTHS],
            "hidden": [rng.integers(0, 2**16, (n, 3)).astype("u2") for n in LENGTHS],
            "weights": [rng.standard_normal(n).astype("f4") for n in LENGTHS],
        },
    }


def check_delivered(found: dict[str, Any]) -> None:
    sent = traced_columns()
    assert found["token_versions"] == sent["token_versions"]
    assert found["policy_version"] == 7
    for name, rows in sent["columns"].items():
        for row, read in zip(rows, found["columns"][name], strict=True):
            assert read.dtype == row.dtype
            assert read.tobytes() == row.tobytes()


@pytest.fixture(params=["memory", "sqlite", "redis"])
def store_url(request: pytest.FixtureRequest) -> str:
    return (
        request.getfixturevalue("redis_server").url if request.param == "redis" else request.param
    )


@pytest.mark.parametrize("wire_format", ["json", "msgpack"])
async def test_payload_is_redelivered_unchanged_from_every_store(
    store_url: str, wire_format: WireFormat, tmp_path: Path
) -> None:
    clock = Clock()
    store = open_store(store_url, data_dir=tmp_path, run_name=uuid.uuid4().hex)
    run = await started_run(store, batch_size=2, clock=clock)
    body = encode_group(traced_columns(), wire_format)
    await run.admit([decode_group(body, wire_format)])

    _, first = await run.next_batch(lease_s=60)
    clock.now += 61
    await run.tick()
    batch, second = await run.next_batch(lease_s=60)

    expected = decode_group(body, wire_format).payload
    assert batch.token == "0-2"
    assert [payload.content for payload in (*first, *second)] == [expected] * 2
    await run.close()


@pytest.mark.slow
async def test_columns_outlive_a_killed_service(free_port: int, tmp_path: Path) -> None:
    flags = ("--store", "sqlite", "--data-dir", str(tmp_path), "--run", "columns")
    registration = {**REGISTRATION, "batch_size": 2}
    with running(free_port, *flags):
        url = await asyncio.to_thread(wait_until_up, free_port)
        with TrainerClient(url) as trainer:
            trainer.register(**registration)
            assert trainer.batch() is None
            async with TrajectoryApiClient(url) as environment:
                await environment.info()  # negotiates the binary format
                await environment.post_group(traced_columns())
            lost = trainer.batch(lease_s=60)
        assert lost is not None
        check_delivered(lost.groups[0])
    # `running` ends the process with SIGKILL, while the lease is held.
    with running(free_port, *flags):
        url = await asyncio.to_thread(wait_until_up, free_port)
        with TrainerClient(url) as trainer:
            assert lost.batch_id is not None
            trainer.nack(lost.batch_id)
            again = trainer.batch(lease_s=60)
    assert again is not None
    assert again.batch_id != lost.batch_id
    check_delivered(again.groups[0])
