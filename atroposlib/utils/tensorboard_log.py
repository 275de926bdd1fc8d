"""Writing metrics as TensorBoard event files, without TensorFlow or torch.

One event per `log`, with all its values: numbers become scalars, text and tables become text.
A thread of the writer puts them on disk, so that nobody waits for it.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from atroposlib.errors import MissingExtraError

__all__ = ["TensorboardLog", "require_tensorboard"]

FLUSH_INTERVAL_S = 5
MAX_TABLE_ROWS = 16
MAX_CELL_CHARACTERS = 4000


def require_tensorboard() -> None:
    """Check that the package is there, so that a run learns it before it starts.

    Raises:
        MissingExtraError: it is not.
    """
    try:
        import tensorboard.summary.writer.event_file_writer  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("tensorboard", extra="tensorboard") from error


class TensorboardLog:
    """The event file of one run.

    Args:
        directory: where a new file is begun; several runs of one training may share it.
        steps_done: steps that stand; what older files there hold of later ones is no longer shown.
            None: all of it is.

    Raises:
        MissingExtraError: the tensorboard package is not installed.
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path, *, steps_done: int | None = None) -> None:
        require_tensorboard()
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(directory), flush_secs=FLUSH_INTERVAL_S)
        if steps_done is not None:
            begun = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=steps_done + 1, session_log=begun))

    def log(self, metrics: Mapping[str, Any], *, step: int, time_s: float) -> None:
        """Add one event; on disk within five seconds, or when the log is closed.

        Args:
            metrics: name to a number, text, or `{"columns": [...], "rows": [[...]]}`; anything
                else has no form TensorBoard shows and is left out.
            step: trainer step.
            time_s: seconds since the epoch.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [_as_value(name, value) for name, value in metrics.items()]
        summary = Summary(value=[value for value in values if value is not None])
        self._writer.add_event(Event(wall_time=time_s, step=step, summary=summary))

    def close(self) -> None:
        """Put everything on disk and close the file."""
        self._writer.close()


def _as_value(name: str, value: Any) -> Any:
    """A value as the protocol buffer of its kind, or None."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    if isinstance(value, Real):
        return Summary.Value(tag=name, simple_value=float(value))
    if isinstance(value, str):
        return _as_text(name, value)
    if isinstance(value, Mapping) and "columns" in value and "rows" in value:
        return _as_text(name, _html_table(value["columns"], value["rows"]))
    return None


def _as_text(name: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text.metadata import create_summary_metadata

    return Summary.Value(
        tag=name,
        metadata=create_summary_metadata(display_name="", description=""),
        tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode("utf-8", "replace")]),
    )


def _html_table(columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """A table whose cells, which a model may have written, are shown and not interpreted."""
    head = "".join(f"<th>{_cell(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td><pre>{_cell(cell)}</pre></td>" for cell in row) + "</tr>"
        for row in rows[:MAX_TABLE_ROWS]
    )
    left_out = len(rows) - MAX_TABLE_ROWS
    note = f"<p>{left_out} rows more</p>" if left_out > 0 else ""
    return f"<table><tr>{head}</tr>{body}</table>{note}"


def _cell(value: Any) -> str:
    # A blank line would end the HTML block for the Markdown reader that comes first.
    return html.escape(str(value)[:MAX_CELL_CHARACTERS]).replace("\n", "&#10;")
