"""Destinations of a run's metrics: a local file, and optionally TensorBoard and W&B.

`log` -> one line of JSON in `metrics_path`
      -> a TensorBoard event file in `tensorboard/` in the same folder
      -> `wandb.log` if a run is open (online, offline or disabled by `WANDB_MODE`)

Event files are written without TensorFlow or torch, one event per `log` with all its values:
numbers become scalars, text and tables become text. The writer's own thread does the disk I/O.
"""

from __future__ import annotations

import html
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TextIO

from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.utils.json_text import to_plain
from atroposlib.utils.text import mask_secrets

__all__ = ["MetricsLog"]

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 5
MAX_TABLE_ROWS = 16
MAX_CELL_CHARACTERS = 4000


def require_tensorboard() -> None:
    """Check that the package is installed.

    Raises:
        MissingExtraError: the tensorboard package is not installed.
    """
    try:
        import tensorboard.summary.writer.event_file_writer  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("tensorboard", extra="tensorboard") from error


class TensorboardLog:
    """The event file of one run.

    Args:
        directory: folder of the new file; several runs of one training may share it.
        steps_done: steps completed so far; TensorBoard hides later steps of older files in the
            folder. None hides nothing.

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
            started = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=steps_done + 1, session_log=started))

    def log(self, metrics: Mapping[str, Any], *, step: int, time_s: float) -> None:
        """Add one event, which is on disk within five seconds or when the log is closed.

        Args:
            metrics: numbers, text, or `{"columns": [...], "rows": [[...]]}` by name; other values
                are left out.
            step: trainer step.
            time_s: seconds since the epoch.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [_as_value(name, value) for name, value in metrics.items()]
        summary = Summary(value=[value for value in values if value is not None])
        self._writer.add_event(Event(wall_time=time_s, step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


def _as_value(name: str, value: Any) -> Any:
    """Return a value as a protocol buffer; None for other types."""
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
    """Return a table with escaped cells, since a model may have written them."""
    head = "".join(f"<th>{_cell(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td><pre>{_cell(cell)}</pre></td>" for cell in row) + "</tr>"
        for row in rows[:MAX_TABLE_ROWS]
    )
    left_out = len(rows) - MAX_TABLE_ROWS
    note = f"<p>{left_out} rows more</p>" if left_out > 0 else ""
    return f"<table><tr>{head}</tr>{body}</table>{note}"


def _cell(value: Any) -> str:
    # A blank line would end the HTML block in TensorBoard's Markdown.
    return html.escape(str(value)[:MAX_CELL_CHARACTERS]).replace("\n", "&#10;")


def _require_account(wandb: Any) -> None:
    """Raise instead of letting W&B ask for an account, which would stop a run in a terminal."""
    if sys.stdin is None or not sys.stdin.isatty() or wandb.setup().settings.mode != "online":
        return
    try:
        is_known = wandb.login(prompt=False)
    except TypeError:  # versions without `prompt`
        is_known = wandb.api.api_key is not None
    if not is_known:
        raise ConfigError("no account: run `wandb login` or set WANDB_API_KEY")


class MetricsLog:
    """The metrics of one run.

    Failures of W&B and TensorBoard do not end a run: they are logged as warnings, and the local
    file continues.

    Args:
        use_wandb: whether `start` opens a W&B run.
        metrics_path: JSON Lines file, appended to; None logs the numbers instead.
        use_tensorboard: whether event files are written, in the folder of `metrics_path`.
        now: clock, seconds since the epoch.

    Raises:
        MissingExtraError: `use_tensorboard` without the package.

    Attributes:
        wandb_run: the open W&B run, or None.
        metrics_path: the local file; may be set until the first `log`.
        latest: metrics of the last `log`.
    """

    def __init__(
        self,
        *,
        use_wandb: bool,
        metrics_path: Path | None,
        use_tensorboard: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        if use_tensorboard:
            require_tensorboard()
        self.wandb_run: Any = None  # wandb is untyped
        self._first_wandb_step = 0
        self._steps_done: int | None = None
        self._use_wandb = use_wandb
        self._use_tensorboard = use_tensorboard
        self._tensorboard: TensorboardLog | None = None
        self.metrics_path = metrics_path
        self.latest: Mapping[str, Any] = {}
        self._now = now
        self._file: TextIO | None = None

    def start(
        self,
        *,
        project: str | None,
        group: str | None,
        name: str | None,
        config: Mapping[str, Any],
        run_id: str | None = None,
        steps_done: int | None = None,
    ) -> None:
        """Open the W&B run, if `use_wandb`.

        Args:
            project: W&B project; None for the account's default.
            group: group of the runs of one training.
            name: display name; None lets W&B generate one.
            config: settings to store; secrets in them are masked.
            run_id: id of a W&B run to continue if it exists; its steps are not sent again. None
                begins a new run.
            steps_done: steps completed so far, see `TensorboardLog`.
        """
        self._steps_done = steps_done
        if not self._use_wandb or self.wandb_run is not None:
            return
        try:
            import wandb

            _require_account(wandb)
            self.wandb_run = wandb.init(
                project=project,
                group=group,
                name=name,
                config=mask_secrets(config),
                id=run_id,
                resume="allow" if run_id is not None else None,
            )
            self._first_wandb_step = self.wandb_run.starting_step
        except Exception as error:  # noqa: BLE001 - metrics must not end a run
            remedy = "set WANDB_MODE=offline to record without a connection"
            logger.warning("wandb is not available (%s); %s", error, remedy)

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Record the metrics of a trainer step: numbers, text or results of `table` by name."""
        self.latest = metrics
        self._log_locally(metrics, step)
        if self._use_tensorboard:
            self._log_to_tensorboard(metrics, step)
        if self.wandb_run is None or step < self._first_wandb_step:
            return
        try:
            self.wandb_run.log(dict(metrics), step=step)
        except Exception as error:  # noqa: BLE001 - metrics must not end a run
            logger.warning("wandb refused the metrics of step %d: %s", step, error)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
        """Return a table for `log`: a `wandb.Table` if a W&B run is open, else a plain record."""
        if self.wandb_run is None:
            return {"columns": list(columns), "rows": [list(row) for row in rows]}

        import wandb

        return wandb.Table(columns=list(columns), data=[list(row) for row in rows])

    def finish(self) -> None:
        """Close the run and the files; calling it twice is harmless."""
        run, self.wandb_run = self.wandb_run, None
        if run is not None:
            try:
                run.finish()
            except Exception as error:  # noqa: BLE001 - metrics must not end a run
                logger.warning("wandb could not finish the run: %s", error)
        tensorboard, self._tensorboard = self._tensorboard, None
        if tensorboard is not None:
            try:
                tensorboard.close()
            except Exception as error:  # noqa: BLE001 - metrics must not end a run
                logger.warning("the TensorBoard file could not be closed: %s", error)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _log_locally(self, metrics: Mapping[str, Any], step: int) -> None:
        if self.metrics_path is None:
            numbers = {k: v for k, v in metrics.items() if not isinstance(v, Mapping)}
            logger.info("step %d: %s", step, json.dumps(numbers, default=str))
            return
        if self._file is None:
            self.metrics_path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.metrics_path.open("a", encoding="utf-8")
            if _is_torn(self.metrics_path):
                self._file.write("\n")
        record = {"step": step, "time": self._now(), **metrics}
        try:
            line = json.dumps(record, default=self._to_record)
        except (TypeError, ValueError) as error:  # an invalid key inside a value, or a cycle
            raise ValueError(f"metrics of step {step} have no JSON form: {error}") from error
        self._file.write(line + "\n")
        self._file.flush()

    def _log_to_tensorboard(self, metrics: Mapping[str, Any], step: int) -> None:
        shown = (int, float, str, Mapping, list, tuple)
        records = {k: v if isinstance(v, shown) else self._to_record(v) for k, v in metrics.items()}
        try:
            if self._tensorboard is None:
                folder = Path("logs") if self.metrics_path is None else self.metrics_path.parent
                self._tensorboard = TensorboardLog(
                    folder / "tensorboard", steps_done=self._steps_done
                )
            self._tensorboard.log(records, step=step, time_s=self._now())
        except Exception as error:  # noqa: BLE001 - metrics must not end a run
            self._use_tensorboard = False
            logger.warning("TensorBoard files cannot be written (%s); disabled", error)

    def _to_record(self, value: Any) -> Any:
        # Environments create such tables with and without a run; never without the package.
        wandb = sys.modules.get("wandb")
        if wandb is not None and isinstance(value, wandb.Table):
            return {"columns": list(value.columns), "rows": [list(row) for row in value.data]}
        try:
            return to_plain(value)
        except TypeError:
            return str(value)


def _is_torn(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
