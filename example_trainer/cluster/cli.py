"""`atropos-up`: run one file on this machine, Slurm, Kubernetes or Ray."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from atroposlib.errors import AtroposError, ConfigError
from atroposlib.utils.command_parser import (
    CommandParser,
    end_command,
    exit_code_of,
    integer_between,
    prepare_command,
    reader_may_leave,
)
from atroposlib.utils.text import near_name
from example_trainer.cluster.local import (
    LocalRun,
    check_programs,
    check_trainer_flags,
    hider,
    progress_lines,
)
from example_trainer.cluster.placement import ENDED, EXIT_CODES, RunPlacement, RunStatus
from example_trainer.cluster.run_file import RunFile, read_run_file
from example_trainer.launch.options import RunPaths
from example_trainer.launch.report import count_steps
from example_trainer.launch.stack import ending_signals

_PROGRAM = "atropos-up"
_COMMANDS = ("status", "logs", "down")
_PLACEMENTS = ("local", "slurm", "kubernetes", "ray")
_WATCH_S = 5.0
_HELP = f"""\
Run a file with service, engines, environments and trainer until the trainer is done. A part
that fails is started again; the same command continues a run that was stopped.

  {_PROGRAM} RUN.yaml [--on local|slurm|kubernetes|ray] [--dry-run] [--detach]
  {_PROGRAM} status|logs|down RUN.yaml [PART] [--on PLACEMENT]

Exit codes: 0 finished, or done; 1 the run failed; 2 invalid settings; 130 and 143 after Ctrl-C
and SIGTERM. Of status: 0 finished, 1 failed, 3 running, 4 never submitted, 5 stopped, 6 its
supervisor was killed."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run, or look at a run; see `--help` for the exit codes."""
    prepare_command()
    parser = _parser()
    words = list(sys.argv[1:] if argv is None else argv)
    command = words.pop(0) if words and words[0] in _COMMANDS else "up"
    args = parser.parse_args(words)
    try:
        if args.part is not None and command != "logs":
            # A misspelled command is read as the file.
            hint = near_name(str(args.file), _COMMANDS)
            where = f" after {args.file}" if hint else ""
            parser.error(f"unexpected argument {args.part}{where}{hint}")
        run = read_run_file(args.file)
        on = args.on or _remembered(run)
        code = _COMMAND[command](run, on, args)
    except KeyboardInterrupt:
        end_command(_PROGRAM, "interrupted; every local part has ended", code=128 + signal.SIGINT)
    except AtroposError as error:
        end_command(_PROGRAM, error, code=exit_code_of(error))
    except OSError as error:  # such as a full disk
        end_command(_PROGRAM, error, code=1)
    sys.exit(code)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=_PROGRAM,
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("file", type=Path, metavar="RUN.yaml", help="the run file")
    add("part", nargs="?", metavar="PART", help="part whose log is shown (default: the trainer)")
    add(
        "--on",
        type=_placement,
        metavar="|".join(_PLACEMENTS),
        help="where it runs (default: where it was submitted, else local)",
    )
    add("--dry-run", action="store_true", help="print exactly what would run, and start nothing")
    add("--detach", action="store_true", help="return once it is submitted or runs")
    add(
        "--lines",
        type=integer_between(1, 100_000),
        default=50,
        help="number of lines that logs shows (default 50)",
    )
    return parser


def _placement(text: str) -> str:
    if text not in _PLACEMENTS:
        hint = near_name(text, _PLACEMENTS)
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(_PLACEMENTS)}, got {text!r}{hint}"
        )
    return text


def _place(run: RunFile, on: str, file: Path) -> RunPlacement:
    """Return the placement by its name; its packages are imported only here."""
    if on == "slurm":
        from example_trainer.cluster.slurm import SlurmRun

        return SlurmRun(run, file)
    if on == "kubernetes":
        from example_trainer.cluster.kubernetes import KubernetesRun

        return KubernetesRun(run, file)
    if on == "ray":
        from example_trainer.cluster.ray_cluster import RayRun

        return RayRun(run, file)
    return LocalRun(run, file)


def _up(run: RunFile, on: str, args: argparse.Namespace) -> int:
    # Before any part starts: engines may take minutes, and jobs wait in a queue.
    check_trainer_flags(run)
    if on in ("local", "slurm"):  # elsewhere, files are in images or on the nodes
        check_programs(run)
    placement = _place(run, on, args.file)
    if args.dry_run:
        with reader_may_leave():
            for name, text in placement.render().items():
                print(f"# ---- {name}\n{text.rstrip()}\n")
        return 0
    before = _remembered(run)
    _remember(run, on)
    try:
        if isinstance(placement, LocalRun) and not args.detach:
            with ending_signals():
                return _show(placement.supervise(_say).masked(hider(run)))
        said = placement.submit()
    except (AtroposError, OSError):  # what runs may be where it was submitted before
        _remember(run, before)
        raise
    with reader_may_leave():
        print(said)
    return 0 if args.detach else _follow(placement, hider(run), progress_lines(run))


def _follow(
    placement: RunPlacement, hide: Callable[[str], str], progress: Callable[[], str | None]
) -> int:
    """Print the changes of a submitted run until it has ended; an interruption leaves it alone."""
    shown: RunStatus | None = None
    while True:
        status = placement.status().masked(hide)
        if status != shown:
            _say(_describe(status))
            shown = status
        if status.state in ENDED:
            return EXIT_CODES[status.state]
        if (line := progress()) is not None:
            _say(hide(line))
        time.sleep(_WATCH_S)


def _status(run: RunFile, on: str, args: argparse.Namespace) -> int:
    code = _show(_place(run, on, args.file).status().masked(hider(run)))
    steps = count_steps(RunPaths(run.output).trainer_metrics)
    if steps:
        with reader_may_leave():
            print(f"step {steps} of {run.trainer.steps}")
    return code


def _logs(run: RunFile, on: str, args: argparse.Namespace) -> int:
    hide = hider(run)
    part = args.part or "trainer"
    lines = list(_place(run, on, args.file).logs(part, lines=args.lines))
    with reader_may_leave():
        for line in lines:
            print(hide(line))
    if not lines:
        print(f"{part} has not written a line yet", file=sys.stderr)
    return 0


def _down(run: RunFile, on: str, args: argparse.Namespace) -> int:
    said = _place(run, on, args.file).down()
    with reader_may_leave():
        print(said)
    return 0


_COMMAND: dict[str, Callable[[RunFile, str, argparse.Namespace], int]] = {
    "up": _up,
    "status": _status,
    "logs": _logs,
    "down": _down,
}


def _show(status: RunStatus) -> int:
    with reader_may_leave():
        print(_describe(status))
        for part in status.parts:
            restarts = f", {part.restarts} restarts" if part.restarts else ""
            detail = f" ({part.detail})" if part.detail else ""
            print(f"  {part.name:32s} {part.state}{restarts}{detail}")
    return EXIT_CODES[status.state]


def _describe(status: RunStatus) -> str:
    return f"{status.state}: {status.detail}" if status.detail else status.state


def _say(text: str) -> None:
    with reader_may_leave():
        print(f"{time.strftime('%H:%M:%S')} {text}")


def _placement_file(run: RunFile) -> Path:
    return run.output / "up" / "placement"


def _remember(run: RunFile, on: str) -> None:
    path = _placement_file(run)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{on}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output: {path.parent} cannot be written: {error}") from error


def _remembered(run: RunFile) -> str:
    with contextlib.suppress(OSError):
        on = _placement_file(run).read_text(encoding="utf-8", errors="replace").strip()
        if on in _PLACEMENTS:
            return on
    return "local"


if __name__ == "__main__":
    main()
