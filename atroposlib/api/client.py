"""Clients of the trajectory service; the only code that knows its routes from outside.

`TrajectoryApiClient` is for environments (async), `TrainerClient` for trainers (sync); `batches`
is an iterator for trainers with a loop of their own. None imports the service.

    client_async ─► client_transport ─┐
                                      ├─► client_rules (retries, errors) ─► client_bodies (lanes)
    client_sync ──► client_sync_base ─┘
"""

from __future__ import annotations

from atroposlib.api.client_async import TrajectoryApiClient
from atroposlib.api.client_batches import BatchIterator, batches
from atroposlib.api.client_batches_async import AsyncBatches
from atroposlib.api.client_rules import LeasedBatch, RetryRule
from atroposlib.api.client_sync import TrainerClient

__all__ = [
    "AsyncBatches",
    "BatchIterator",
    "LeasedBatch",
    "RetryRule",
    "TrainerClient",
    "TrajectoryApiClient",
    "batches",
]
