"""Clients of the trajectory service; the only code that knows its routes from outside.

`TrajectoryApiClient` is for environments (async), `TrainerClient` for trainers (sync). Neither
imports the service.

    client_async, client_sync ─► client_rules (retries, errors) ─► client_bodies (lanes) ─► wire
"""

from __future__ import annotations

from atroposlib.api.client_async import TrajectoryApiClient
from atroposlib.api.client_rules import LeasedBatch, RetryRule
from atroposlib.api.client_sync import TrainerClient

__all__ = ["LeasedBatch", "RetryRule", "TrainerClient", "TrajectoryApiClient"]
