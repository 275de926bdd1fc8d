"""What a service says of itself, read from `/metrics` and `/status`; pure."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from atroposlib.viewer.sources.base import ServiceFigures

__all__ = ["FigureLog"]

_KEPT_SAMPLES = 120
_SHOWN = {
    "atropos_step": "step",
    "atropos_policy_version": "policy version",
    "atropos_queue_groups": "groups waiting",
    "atropos_queue_sequences": "sequences waiting",
    "atropos_queue_tokens": "tokens waiting",
    "atropos_queue_oldest_age_seconds": "oldest waits, s",
    "atropos_queue_oldest_staleness_steps": "oldest staleness, steps",
    "atropos_buffered_sequences": "sequences buffered",
    "atropos_groups_received_total": "groups received",
    "atropos_groups_tokenized_from_text_total": "groups tokenized from text",
    "atropos_groups_delivered_total": "groups delivered",
    "atropos_batches_delivered_total": "batches delivered",
}
_RATES = {
    "atropos_groups_received_total": "groups in, per s",
    "atropos_sequences_received_total": "sequences in, per s",
    "atropos_tokens_received_total": "tokens in, per s",
    "atropos_sequences_delivered_total": "sequences out, per s",
}
_HISTORIES = {
    "atropos_queue_sequences": "sequences waiting",
    "atropos_queue_oldest_staleness_steps": "oldest staleness, steps",
}


class FigureLog:
    """The figures of a service over the last minutes.

    Args:
        now: clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._samples: deque[tuple[float, dict[str, float]]] = deque(maxlen=_KEPT_SAMPLES)
        self._drops: dict[str, float] = {}
        self._notes: list[str] = []

    def note_metrics(self, text: str) -> None:
        """Take the answer of `/metrics`; lines it does not know are skipped."""
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[str, float] = {}
        drops: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "atropos_requests_refused_total" and sample.value:
                    drops[f"refused: {sample.labels.get('reason', '')}"] = sample.value
                elif sample.name == "atropos_environments":
                    if sample.labels.get("state") == "connected":
                        values["atropos_environments_connected"] = sample.value
                elif not sample.labels:
                    values[sample.name] = sample.value
        for name, words in (
            ("atropos_groups_loose_total", "taken, with fields that do not line up"),
            ("atropos_requests_repeated_total", "repeated requests, stored once"),
        ):
            if values.get(name):
                drops[words] = values[name]
        self._samples.append((self._now(), values))
        self._drops = drops

    def note_status(self, status: Mapping[str, Any]) -> None:
        """Take the answer of `/status`."""
        stalls = status.get("stalls") or []
        self._notes = [f"{s.get('reason')}: {s.get('detail', '')}" for s in stalls]
        if not self._samples:
            known = {"atropos_step": status.get("current_step", 0)}
            known["atropos_queue_groups"] = status.get("queue_size", 0)
            self._samples.append((self._now(), {k: float(v) for k, v in known.items()}))

    def _why_empty(self, problem: str | None, latest: Mapping[str, float]) -> str:
        if problem:
            return "The service could not be read; the line above says why."
        if self._notes:
            return "The service waits for something: the line above says what."
        if latest.get("atropos_groups_delivered_total"):
            return (
                "Groups were delivered, and none is kept for inspection (--keep-past-groups of "
                "run-api); new ones appear here."
            )
        if not latest.get("atropos_environments_connected", 1):
            return "No environment is connected: start one with `python my_env.py serve`."
        return (
            "The service has not received any group yet. Environments send them once a trainer, or "
            "a tool that stands in for one, has asked for a batch."
        )

    def figures(self, problem: str | None) -> ServiceFigures:
        """Return what is known.

        Args:
            problem: why the service could not be asked the last time, if so.
        """
        samples = list(self._samples)
        latest = samples[-1][1] if samples else {}
        return ServiceFigures(
            current={words: latest[name] for name, words in _SHOWN.items() if name in latest},
            per_second={words: _rates(samples, name) for name, words in _RATES.items()},
            history={
                words: [values.get(name, 0.0) for _, values in samples]
                for name, words in _HISTORIES.items()
            },
            drops=self._drops,
            notes=([problem] if problem else []) + self._notes,
            why_empty=self._why_empty(problem, latest),
        )


def _rates(samples: list[tuple[float, dict[str, float]]], name: str) -> list[float]:
    pairs = itertools.pairwise(samples)
    return [
        max(0.0, later.get(name, 0.0) - earlier.get(name, 0.0)) / max(1e-6, at - before)
        for (before, earlier), (at, later) in pairs
    ]
