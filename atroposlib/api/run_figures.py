"""The figures that are read from a run when somebody asks for its metrics: one row each.

Nothing here walks over the queue: a reading costs O(environments) at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Literal, NamedTuple, Protocol, TypeAlias

from atroposlib.api.run_state import GROUPS_SET_ASIDE, SET_ASIDE, RunState
from atroposlib.api.stalls import Stall

__all__ = ["FIGURES", "Figure", "MeteredRun"]

_MAX_ENVIRONMENT_NAMES = 100
_OTHER_NAMES = "other"
_NO_NAME = "unregistered"
_REFUSED = "groups/refused_"

Reading: TypeAlias = float | Mapping[str, float] | None


class MeteredRun(Protocol):
    """What the metrics read of a run."""

    state: RunState
    counters: Counter[str]
    """What this replica counted on its own."""

    @property
    def now(self) -> float:
        """Unix time in seconds."""

    @property
    def full_reason(self) -> str | None:
        """Why the store rejects new groups; None while it accepts them."""

    def stalls(self) -> list[Stall]:
        """Name what keeps queued groups from becoming a batch."""


class Figure(NamedTuple):
    """One metric that is read from the run."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    read: Callable[[MeteredRun], Reading]
    """A number; one per label value; None when there is nothing to tell."""
    label: str | None = None


def _counted(name: str) -> Callable[[MeteredRun], Reading]:
    return lambda run: run.state.counters[name]


def _by_reason(counters: Counter[str], prefix: str) -> Reading:
    return {
        name.removeprefix(prefix): count
        for name, count in counters.items()
        if name.startswith(prefix)
    }


def _batches_pending(run: MeteredRun) -> Reading:
    in_flight = run.state.delivery.in_flight.values()
    leased = sum(handout.lease_until is not None for handout in in_flight)
    returned = len(run.state.delivery.returned)
    return {"sending": len(in_flight) - leased, "leased": leased, "returned": returned}


def _environments(run: MeteredRun) -> Reading:
    found = {"connected": 0, "disconnected": 0, "expired": 0}
    for env in run.state.envs:
        state = "connected" if env.is_connected else "disconnected"
        found["expired" if env.is_expired else state] += 1
    return found


def _queued_by_environment(run: MeteredRun) -> Reading:
    """Sum queued sequences by environment name; names beyond the first hundred share a label."""
    names = [env.desired_name for env in run.state.envs]
    known = dict.fromkeys(islice(dict.fromkeys(names), _MAX_ENVIRONMENT_NAMES), 0.0)
    for env_id, num_sequences in run.state.queue.sequences_by_env.items():
        name = _NO_NAME if env_id is None else names[env_id]
        name = name if name in known or env_id is None else _OTHER_NAMES
        known[name] = known.get(name, 0.0) + num_sequences
    return known


def _stalled_sequences(run: MeteredRun) -> Reading:
    found: dict[str, float] = {}
    for stall in run.stalls():
        found[stall.reason] = found.get(stall.reason, 0.0) + stall.num_sequences
    return found


def _oldest_age_s(run: MeteredRun) -> Reading:
    oldest = next(iter(run.state.queue), None)
    return 0.0 if oldest is None else max(0.0, run.now - oldest.received_at)


def _gauge(
    name: str, text: str, read: Callable[[MeteredRun], Reading], label: str | None = None
) -> Figure:
    return Figure(name, "gauge", text, read, label)


def _counter(
    name: str, text: str, read: Callable[[MeteredRun], Reading], label: str | None = None
) -> Figure:
    return Figure(name, "counter", text, read, label)


FIGURES = (
    _gauge(
        "atropos_step",
        "Batches the trainer has trained on, plus its first step.",
        lambda run: run.state.step,
    ),
    _gauge(
        "atropos_policy_version",
        "Policy version the trainer told last, else its step.",
        lambda run: run.state.current_version,
    ),
    _gauge(
        "atropos_queue_groups", "Groups that wait for a batch.", lambda run: len(run.state.queue)
    ),
    _gauge(
        "atropos_queue_sequences",
        "Sequences that wait for a batch.",
        lambda run: run.state.queue.num_sequences,
    ),
    _gauge(
        "atropos_queue_tokens",
        "Tokens that wait for a batch.",
        lambda run: run.state.queue.num_tokens,
    ),
    _gauge(
        "atropos_queue_bytes",
        "Payload bytes that wait for a batch.",
        lambda run: run.state.queue.num_bytes,
    ),
    _gauge(
        "atropos_environment_queue_sequences",
        "Sequences that wait for a batch, by the name their environment asked for.",
        _queued_by_environment,
        "environment",
    ),
    _gauge("atropos_queue_oldest_age_seconds", "Time since the next group came in.", _oldest_age_s),
    _gauge(
        "atropos_queue_oldest_staleness_steps",
        "Current policy version less the oldest known one that waits.",
        lambda run: run.state.oldest_staleness,
    ),
    _gauge(
        "atropos_buffered_sequences",
        "Sequences that wait for others to add up to their environment's group size.",
        lambda run: run.state.envs.buffered_sequences,
    ),
    _gauge(
        "atropos_buffered_bytes",
        "Payload bytes of buffered sequences.",
        lambda run: run.state.envs.buffered_bytes,
    ),
    _gauge(
        "atropos_stalled_sequences",
        "Sequences that are stuck, or missing for a minimum share, by reason.",
        _stalled_sequences,
        "reason",
    ),
    _gauge(
        "atropos_batches_pending",
        "Batches formed but not acknowledged, by state.",
        _batches_pending,
        "state",
    ),
    _gauge(
        "atropos_batches_pending_sequences",
        "Sequences in batches formed but not acknowledged.",
        lambda run: run.state.delivery.num_sequences,
    ),
    _gauge("atropos_environments", "Registered environments, by state.", _environments, "state"),
    _gauge(
        "atropos_store_full",
        "1 while the store has no space for new groups, else 0.",
        lambda run: run.full_reason is not None,
    ),
    _counter("atropos_groups_received_total", "Groups stored.", _counted("groups/received")),
    _counter(
        "atropos_sequences_received_total", "Sequences stored.", _counted("sequences/received")
    ),
    _counter("atropos_tokens_received_total", "Tokens stored.", _counted("tokens/received")),
    _counter(
        "atropos_groups_loose_total",
        "Groups stored although an optional field does not line up with their tokens.",
        _counted("groups/loose"),
    ),
    _counter(
        "atropos_groups_tokenized_from_text_total",
        "Groups stored whose tokens were made from the text of a server that reports none.",
        _counted("groups/tokenized_from_text"),
    ),
    _counter(
        "atropos_requests_repeated_total",
        "Requests answered from their idempotency key, without storing them again.",
        lambda run: run.counters["requests/repeated"],
    ),
    _counter(
        "atropos_requests_refused_total",
        "Requests with groups that were refused, by reason.",
        lambda run: _by_reason(run.counters, _REFUSED),
        "reason",
    ),
    _counter(
        "atropos_batches_delivered_total", "Batches acknowledged.", _counted("batches/delivered")
    ),
    _counter(
        "atropos_batches_without_step_total",
        "Batches acknowledged that made no step: not trained on, or counted already.",
        _counted("batches/without_step"),
    ),
    _counter(
        "atropos_groups_delivered_total",
        "Groups of acknowledged batches.",
        _counted("groups/delivered"),
    ),
    _counter(
        "atropos_sequences_delivered_total",
        "Sequences of acknowledged batches.",
        _counted("sequences/delivered"),
    ),
    _counter(
        "atropos_tokens_delivered_total",
        "Tokens of acknowledged batches.",
        _counted("tokens/delivered"),
    ),
    _counter(
        "atropos_groups_removed_total",
        "Groups that an operator took out of the queue.",
        _counted("groups/removed"),
    ),
    _counter(
        "atropos_groups_set_aside_total",
        "Groups left out of the run because their payload is missing or damaged in the store.",
        lambda run: _by_reason(run.state.counters, GROUPS_SET_ASIDE),
        "flaw",
    ),
    _counter(
        "atropos_batches_returned_total",
        "Batches that came back and leave again, by reason; expired: a lease ran out.",
        lambda run: _by_reason(run.state.counters, "batches/returned_"),
        "reason",
    ),
    _counter(
        "atropos_records_set_aside_total",
        "Records of the run that could not be applied and were left out, by kind.",
        lambda run: _by_reason(run.state.counters, SET_ASIDE),
        "kind",
    ),
)
