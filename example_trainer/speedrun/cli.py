"""`atropos-speedrun`: seconds to 80 % held-out accuracy on the demo's task, on two CPU cores.

run ENTRY.yaml    run an entry with three seeds and write its result as JSON
verify RESULT     check a result against the rules and its entry
table             print the record table, or write it to docs/speedrun.md
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from atroposlib.errors import AtroposError, ConfigError
from atroposlib.utils.command_parser import (
    CommandParser,
    exit_code_of,
    prepare_command,
    reader_may_leave,
)
from atroposlib.utils.writable import write_file
from example_trainer.demo.settings import REPOSITORY, DemoPaths, require_clone
from example_trainer.launch.options import shown_path
from example_trainer.launch.preflight import choose_engine, require_packages, whole_number
from example_trainer.launch.report import RunProgress
from example_trainer.launch.stack import ending_signals
from example_trainer.speedrun import rules
from example_trainer.speedrun.rules import Result, SeedResult, SpeedrunEntry, StartingModel

_SPEEDRUN = Path("benchmarks") / "speedrun"
_CLONE = Path.cwd() if _SPEEDRUN.is_dir() else REPOSITORY
"""The installed package may be a copy without entries, results and page."""
_ENTRIES = _CLONE / _SPEEDRUN
_RESULTS = _ENTRIES / "results"
_PAGE = _CLONE / "docs" / "speedrun.md"
_FILES = Path("demo_runs") / "speedrun"
_ENVIRONMENT_PACKAGES = {"examples": ("reasoning_gym",)}
_NAME = "atropos-speedrun"


def main(argv: Sequence[str] | None = None) -> None:
    """Run a subcommand.

    Exits with 0 on success, 1 if a run failed or a result does not count, 2 on invalid settings,
    130 after Ctrl-C and 143 after SIGTERM. Every process that it started has ended then.
    """
    prepare_command()
    with ending_signals():
        try:
            args = _parser().parse_args(argv)
            if not _ENTRIES.is_dir():
                raise ConfigError(
                    f"{_SPEEDRUN} is missing; run {_NAME} in a clone of the repository"
                )
            sys.exit(args.command(args))
        except KeyboardInterrupt:
            print("\ninterrupted; every process has ended", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
        except AtroposError as error:
            print(f"\n{_NAME}: {error}", file=sys.stderr)
            sys.exit(exit_code_of(error))
        except OSError as error:  # such as a full disk
            print(f"\n{_NAME}: {error}", file=sys.stderr)
            sys.exit(1)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=_NAME,
        description="Measure the seconds to 80 % held-out accuracy on the demo's task, on two CPU "
        "cores. docs/speedrun.md has the rules.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run an entry and write its result")
    run.set_defaults(command=_run)
    run.add_argument(
        "entry",
        nargs="?",
        type=Path,
        default=_ENTRIES / "demo-settings.yaml",
        metavar="ENTRY.yaml",
        help="entry to run (default: the demo's settings)",
    )
    run.add_argument(
        "--seed",
        type=whole_number(0),
        action="append",
        metavar="N",
        help="run this seed only; may be repeated (default: 0, 1 and 2, which a result needs)",
    )
    run.add_argument(
        "--output",
        type=Path,
        metavar="RESULT.json",
        help="file to write (default: benchmarks/speedrun/results/<name>.json for three seeds, "
        "else result.json in the folder of the runs)",
    )
    run.add_argument(
        "--files",
        type=Path,
        default=_FILES,
        metavar="FOLDER",
        help=f"folder of the starting model and of the runs (default {_FILES})",
    )
    verify = commands.add_parser("verify", help="check a result against the rules and its entry")
    verify.set_defaults(command=_verify)
    verify.add_argument("result", type=Path, metavar="RESULT.json")
    verify.add_argument(
        "--entry", type=Path, metavar="ENTRY.yaml", help="its entry (default: by its name)"
    )
    verify.add_argument(
        "--runs",
        type=Path,
        metavar="FOLDER",
        help="folder of its runs: read what the trainers consumed and measure the final models "
        "again",
    )
    table = commands.add_parser("table", help="print the record table")
    table.set_defaults(command=_table)
    table.add_argument(
        "--write", action="store_true", help=f"replace the table in {_PAGE.relative_to(_CLONE)}"
    )
    return parser


def _run(args: argparse.Namespace) -> int:
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    entry = rules.read_entry(args.entry)
    engine, _ = choose_engine(entry.settings.engine)
    require_packages(extras=_ENVIRONMENT_PACKAGES, launches_vllm=engine == "vllm")
    require_clone()
    # Heavy, and not needed by the other subcommands.
    from example_trainer.speedrun import running

    seeds = list(dict.fromkeys(args.seed or rules.SEEDS))
    folder = args.files.resolve()
    runs = folder / f"{entry.name}-{datetime.now():%Y%m%d-%H%M%S}"
    output = args.output or (
        _RESULTS / f"{entry.name}.json" if sorted(seeds) == sorted(rules.SEEDS)
        else runs / "result.json"
    )  # fmt: skip
    with running.two_cores() as cores:
        load = os.getloadavg()[0]
        start, finished = _timed_runs(entry, seeds, folder, runs)
        result = running.result_of(entry, start, finished, cores=cores, load_before=load)
    keep(result, output)
    print(f"\n{result.seconds:.1f} s, {result.cpu_seconds:.1f} CPU s (median of {len(seeds)})")
    print(f"result  {shown_path(output.resolve())}")
    print(f"runs    {shown_path(runs)}")
    return _say(rules.violations(result, entry))


def keep(result: Result, output: Path) -> None:
    """Write a result; it is printed if it cannot be written, so that the runs are not lost."""
    text = result.model_dump_json(indent=2) + "\n"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_file(output, text.encode())
    except OSError as error:
        print(text)
        raise AtroposError(
            f"{output} cannot be written ({error.strerror}); the result is printed above"
        ) from error


def _timed_runs(
    entry: SpeedrunEntry, seeds: Sequence[int], folder: Path, runs: Path
) -> tuple[StartingModel, list[SeedResult]]:
    from example_trainer.speedrun import running

    problems = running.require_held_out()
    with RunProgress() as progress:
        model, start = running.starting_model(folder / "start", problems, progress)
        progress.begin("compile", "Compiling the modules", expected="seconds; a minute once")
        variables = running.compile_modules(folder / "bytecode")
        progress.end()
    finished = []
    for seed in seeds:
        print(f"\nseed {seed} of {entry.name}")
        paths = DemoPaths(runs / f"seed_{seed}")
        plan = running.plan_of(entry, seed=seed, start=model, paths=paths, variables=variables)
        finished.append(running.timed_run(entry, plan, paths, problems))
        last = finished[-1]
        print(f"   {last.seconds:.1f} s, {last.cpu_seconds:.1f} CPU s, {last.accuracy:.1%} right")
    return start, finished


def _say(found: Sequence[str]) -> int:
    if not found:
        with reader_may_leave():
            print("the result counts")
        return 0
    for reason in found:
        print(f"does not count: {reason}", file=sys.stderr)
    return 1


def _verify(args: argparse.Namespace) -> int:
    result = rules.read_result(args.result)
    entry = rules.read_entry(args.entry or _ENTRIES / f"{result.name}.yaml")
    found = rules.violations(result, entry)
    if args.runs is not None:
        require_clone()
        from example_trainer.speedrun import running

        found += running.disagreements(result, args.runs.resolve())
    with reader_may_leave():
        print(f"{result.name}: {result.seconds:.1f} s, {result.cpu_seconds:.1f} CPU s")
    return _say(found)


def _table(args: argparse.Namespace) -> int:
    results = recorded(_RESULTS, _ENTRIES)
    text = rules.tables(results)
    if args.write:
        page = _PAGE.read_text(encoding="utf-8")
        write_file(_PAGE, rules.with_table(page, text).encode())
    else:
        with reader_may_leave():
            print(text)
    return 0


def recorded(results: Path, entries: Path) -> list[tuple[Result, SpeedrunEntry]]:
    """Return the results in a folder with their entries.

    Raises:
        ConfigError: One of them does not count.
    """
    found = []
    for path in sorted(results.glob("*.json")):
        result = rules.read_result(path)
        entry = rules.read_entry(entries / f"{result.name}.yaml")
        reasons = rules.violations(result, entry)
        if reasons:
            raise ConfigError(f"{path} does not count: {reasons[0]}")
        found.append((result, entry))
    if not found:
        raise ConfigError(f"{results} has no results; `{_NAME} run` writes them")
    return found


if __name__ == "__main__":
    main()
