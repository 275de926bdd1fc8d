"""Running an export for a person: progress bar, report, messages, exit codes."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from atroposlib.cli.export_flags import request_of, source_of
from atroposlib.errors import ConfigError, MissingExtraError, TrajectoryApiError
from atroposlib.exporting.recipes import Recipe
from atroposlib.exporting.report import ExportReport, report_text
from atroposlib.exporting.run import ExportRequest, ExportStoppedError, run_export
from atroposlib.utils.command_parser import end_command

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["ProgressBar", "run_command", "tell"]

_INTERRUPTED = 130


class ProgressBar:
    """Records written, their rate, and what was left out so far; on standard error.

    Args:
        total: records to write; None when all there are.
        unit: what a record is, in the plural.
    """

    def __init__(self, *, total: int | None, unit: str) -> None:
        self._total = total
        self._unit = unit
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self) -> None:
        """Show the bar; its clock starts here, not when the tokenizer began to load."""
        from tqdm import tqdm

        self._bar = tqdm(total=self._total, unit=f" {self._unit}", file=sys.stderr)

    def advance(self, num_records: int, report: ExportReport) -> None:
        """Move the bar, and say the three commonest reasons for leaving trajectories out."""
        if self._bar is None:
            return
        commonest = report.refused.most_common(3)
        left_out = ", ".join(f"{count} {reason}" for reason, count in commonest)
        self._bar.set_postfix_str(left_out, refresh=False)
        self._bar.update(num_records)


def run_command(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    formats: Mapping[str, Any],
    recipe: Callable[..., Recipe],
    register: Callable[[], None],
    *,
    unit: str,
) -> None:
    """Do what the flags of a command say; ends the process when that fails.

    Args:
        parser: of the command; says what is wrong with flags that contradict each other.
        args: parsed flags.
        formats: of the command.
        recipe: makes the recipe from a format, a decoder and a rule about truncation.
        register: resets the run and registers, for `--consume`.
        unit: what a record is, in the plural.
    """
    try:
        request = request_of(args, formats, recipe, source_of(args, register, command=parser.prog))
    except ConfigError as error:
        parser.error(str(error))
    _export_and_report(parser.prog, request, args, unit=unit)


def _export_and_report(
    command: str, request: ExportRequest, args: argparse.Namespace, *, unit: str
) -> None:
    """Export, print the report, push; ends the process with a message when that fails.

    Exit codes: 2 nothing was done, 1 the export ended early or the output holds no record at its
    end, 130 somebody stopped it.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if args.push_to_hub:
            from atroposlib.exporting.hub import check_repository

            check_repository(args.push_to_hub)
        report = _with_bar(request, unit)
    except ExportStoppedError as stop:
        print(report_text(stop.report, unit=unit))
        end_command(command, str(stop), code=_INTERRUPTED if stop.is_interrupt else 1)
    except (ConfigError, MissingExtraError, TrajectoryApiError) as error:
        end_command(command, str(error), code=2)
    except KeyboardInterrupt:
        end_command(command, "stopped before anything was written", code=_INTERRUPTED)
    print(report_text(report, unit=unit))
    if not report.num_records and not request.path.exists():
        end_command(command, _shortfall(request, report), code=1)
    print(_shortfall(request, report))
    if args.push_to_hub and report.num_records:
        _push(command, request.path, args)


def tell(line: str) -> None:
    """Print a line where the progress bar is, without breaking it."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


def _with_bar(request: ExportRequest, unit: str) -> ExportReport:
    with ProgressBar(total=request.max_records, unit=unit) as progress:
        return run_export(request, tell=tell, progress=progress)


def _shortfall(request: ExportRequest, report: ExportReport) -> str:
    if report.num_records:
        return f"written to {request.path}"
    if report.refused.get("no messages") == report.num_sequences and report.num_sequences:
        return (
            "nothing was written: the groups have no messages; run the environment with "
            "--env.include_messages true, or choose a --format made of text"
        )
    if not report.num_groups and request.mode == "resume" and request.path.exists():
        return f"nothing was added: {request.path} has as many records as were asked for, or more"
    if not report.num_groups:
        return "nothing was written: there are no groups"
    return "nothing was written: no trajectory passed, the reasons are above"


def _push(command: str, path: Path, args: argparse.Namespace) -> None:
    from atroposlib.exporting.hub import push_to_hub

    try:
        push_to_hub(path, args.push_to_hub, is_public=args.public)
    except ConfigError as error:
        end_command(command, str(error), code=1)
    print(f"pushed to {args.push_to_hub}")


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
