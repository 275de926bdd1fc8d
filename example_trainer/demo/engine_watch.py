"""Notices that the inference engine has lost one of the processes it runs on.

vLLM's server can outlive its workers for minutes: while it waits for an answer that will not come,
for instance in the middle of a weight update, it neither ends nor reports that it is unwell.
"""

from __future__ import annotations

from example_trainer.extras import require_extra
from example_trainer.processes import ManagedProcess, ProcessFailedError

__all__ = ["EngineWatch"]

_TITLE = "VLLM::"


class EngineWatch:
    """The named processes below an engine that is ready.

    Args:
        engine: Started and ready; what it has started by now is what it needs.
    """

    def __init__(self, engine: ManagedProcess) -> None:
        with require_extra("trainer"):
            import psutil

        self._engine = engine
        # Only what carries the engine's title: other children come and go.
        self._parts = {
            child: title
            for child in psutil.Process(engine.pid).children(recursive=True)
            if (title := " ".join(child.cmdline())).startswith(_TITLE)
        }

    def check(self) -> None:
        """Raise `ProcessFailedError` when one of them is gone."""
        import psutil

        for part, title in self._parts.items():
            try:
                is_gone = part.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                is_gone = True
            if is_gone:
                raise ProcessFailedError(self._engine, f"lost its process {title.strip()}")
