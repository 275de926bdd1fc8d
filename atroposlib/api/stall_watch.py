"""Names what keeps a run from forming batches: to whoever asks, and to the log once per reason."""

from __future__ import annotations

import logging
from collections.abc import Callable

from atroposlib.api.presence import Presence
from atroposlib.api.run_state import RunState
from atroposlib.api.stalls import Patience, Stall, find_stalls

__all__ = ["StallWatch"]

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 1.0


class StallWatch:
    """Looks at a run for stalls.

    Args:
        state: the run.
        presence: when environments were last heard of.
        clock: Unix time in seconds.
    """

    def __init__(self, state: RunState, presence: Presence, *, clock: Callable[[], float]) -> None:
        self._state = state
        self._presence = presence
        self._clock = clock
        self._last_text = ""
        self._reported_at = 0.0

    def find(self, *, patience: Patience | None = None) -> list[Stall]:
        """Name what keeps queued groups from becoming a batch.

        Args:
            patience: what counts as long; None leaves out what depends on time.
        """
        state = self._state
        return find_stalls(state.queue, state.envs, batch_size=state.batch_size, patience=patience)

    def find_all(self) -> list[Stall]:
        """Name also who has been silent, and what has waited in a buffer, for long."""
        return self.find(patience=Patience(self._clock(), self._presence.last_heard))

    def report(self) -> None:
        """Log why enough data makes no batch, once per reason; looks at it now and then only."""
        state, now = self._state, self._clock()
        if abs(now - self._reported_at) < _REPORT_INTERVAL_S:
            return
        self._reported_at = now
        text = ""
        if state.queue.num_sequences >= state.batch_size:
            text = "; ".join(stall.message for stall in self.find())
            text = text or "the sizes of the queued groups do not add up"
        if text and text != self._last_text:
            logger.warning("no batch of %d sequences: %s", state.batch_size, text)
        self._last_text = text
