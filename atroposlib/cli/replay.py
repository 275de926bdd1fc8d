"""`atropos-replay`: rescore groups, repeat and compare runs, exchange traces of agents."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atroposlib.cli.export_command import notify
from atroposlib.errors import ConfigError, GroupError, MissingExtraError, TrajectoryApiError
from atroposlib.exporting.groups import (
    RawGroup,
    find_run,
    full_group,
    open_jsonl,
    read_jsonl,
    read_run,
)
from atroposlib.exporting.report import ExportReport
from atroposlib.exporting.run import read_groups
from atroposlib.scored_data import MAX_SCORE
from atroposlib.utils.command_parser import (
    CommandParser,
    end_command,
    integer_between,
    number_between,
    prepare_command,
    reader_may_leave,
)
from atroposlib.utils.imports import import_script
from atroposlib.utils.json_text import to_plain
from atroposlib.utils.writable import naming_writes, require_writable_file

if TYPE_CHECKING:
    from atroposlib.exporting.posting import Posted

__all__ = ["main"]

_COMMAND = "atropos-replay"
_INTERRUPTED = 130
_MAX_DIGITS = 12


def main() -> None:
    """Run a subcommand.

    Exit codes: 2 nothing was done, 1 it ended early or scored no group, 130 it was interrupted.
    """
    prepare_command()
    parser = _parser()
    words = sys.argv[1:]
    if words[:1] != ["score"]:  # which also accepts flags of an environment
        parser.refuse_unknown(words)
    args, others = parser.parse_known_args(words)
    if others and args.act is not _score:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        with reader_may_leave():
            args.act(args, others)
    except (ConfigError, MissingExtraError, TrajectoryApiError) as error:
        end_command(_COMMAND, str(error), code=2)
    except OSError as error:  # such as a full disk
        end_command(_COMMAND, str(error), code=1)
    except KeyboardInterrupt:
        end_command(_COMMAND, "stopped", code=_INTERRUPTED)


def _score(args: argparse.Namespace, flags: Sequence[str]) -> None:
    from tqdm import tqdm

    from atroposlib.envs.commands import load_yaml, process_command
    from atroposlib.envs.settings import read_command
    from atroposlib.exporting import replay as rescoring

    if args.save is not None:
        if Path(args.save).exists():
            raise ConfigError(f"{args.save} exists and is left as it is; choose another name")
        require_writable_file(args.save, "--save")
    env_cls = _environment_class(args.env)
    given = read_command(process_command(env_cls), flags)
    settings = given.layered(load_yaml(given.config) if given.config else {})
    groups = dict(_full_groups(_source(args.groups, args.data_dir)))
    recorded = [rescoring.recorded_group(where, group) for where, group in groups.items()]
    if not recorded:
        raise ConfigError(f"{args.groups} has no readable group")
    logging.basicConfig(level=logging.ERROR)
    env, model = rescoring.build_replayed(env_cls, settings, recorded)
    with tqdm(total=args.max_items, unit=" items", file=sys.stderr, leave=False) as bar:
        rescored = rescoring.rescore(
            env, model, max_items=args.max_items, on_item=bar.update, notify=notify
        )
        results = asyncio.run(rescored)
    has_scores = any(result.new is not None for result in results)
    if has_scores and args.save is not None:  # before output, whose reader may have left
        _save(Path(args.save), groups, results)
    print(rescoring.rescoring_text(results, num_groups=len(recorded)))
    if not has_scores:
        end_command(_COMMAND, "no group was scored; the reasons are above", code=1)
    if args.save is not None:
        print(f"groups with new scores: {args.save}")


def _save(path: Path, groups: dict[str, dict[str, Any]], results: Sequence[Any]) -> None:
    rescored = []
    for result in results:
        if result.new is None:
            continue
        pairs = zip(result.new, result.old, strict=True)
        scores = [old if new is None else new for new, old in pairs]
        rescored.append({**groups[result.where], "scores": scores, "old_scores": result.old})
    _write_new(path, rescored)


def _write_new(path: Path, groups: Iterable[Mapping[str, Any]]) -> None:
    """Write groups to a new file; a failed write, as on a full disk, leaves no file."""
    with path.open("x", encoding="utf-8") as file:
        try:
            with naming_writes(path):
                for group in groups:
                    file.write(json.dumps(group, default=to_plain) + "\n")
                file.flush()
        except BaseException:
            path.unlink()
            raise


def _post(args: argparse.Namespace, _: Sequence[str]) -> None:
    from atroposlib.exporting.posting import Posted, PostingStoppedError, posting_text

    source = _source(args.groups, args.data_dir)
    stop = None if args.num_groups is None else args.skip + args.num_groups
    groups = islice(_full_groups(source), args.skip, stop)
    posted = Posted()
    stopped, code = "", 0
    try:
        asyncio.run(_post_all(args, groups, posted))
    except PostingStoppedError as error:
        stopped, code = str(error), 1
    except KeyboardInterrupt:
        stopped, code = "stopped", _INTERRUPTED
    with reader_may_leave():
        print(posting_text(posted))
    if stopped:
        skip = args.skip + posted.num_before_failure
        again = f"to continue, run the same command with --skip {skip}"
        num_repeated = posted.num_groups + posted.num_rejected - posted.num_before_failure
        if num_repeated:
            again += f", which sends {num_repeated} groups again that were answered out of order"
        end_command(_COMMAND, f"{stopped}; {again}", code=code)


async def _post_all(
    args: argparse.Namespace, groups: Iterator[tuple[str, Any]], posted: Posted
) -> None:
    from atroposlib.api.client import RetryRule, TrajectoryApiClient
    from atroposlib.exporting.posting import post_groups

    rule = RetryRule(attempts=None, deadline_s=args.patience_s)
    token = os.environ.get("ATROPOS_API_TOKEN")
    async with TrajectoryApiClient(args.api_url, token=token, post_retry=rule) as client:
        await client.info()  # negotiates the format of groups
        await post_groups(
            client,
            groups,
            groups_per_s=args.rate,
            max_in_flight=args.in_flight,
            notify=notify,
            posted=posted,
        )


def _diff(args: argparse.Namespace, _: Sequence[str]) -> None:
    from atroposlib.exporting.replay import comparison_text, record_run

    sources = [_source(name, args.data_dir) for name in (args.first, args.second)]
    first, second = (record_run(read_groups(one, ExportReport(), notify)) for one in sources)
    print(comparison_text(first, second, names=(args.first, args.second)))


def _journal(args: argparse.Namespace, _: Sequence[str]) -> None:
    from atroposlib.exporting.consumption import consumption_lines

    with reader_may_leave():
        for line in consumption_lines(find_run(args.run, Path(args.data_dir))):
            print(json.dumps(line))


def _run(args: argparse.Namespace, _: Sequence[str]) -> None:
    """Train a recorded run again, in the trainer's own process."""
    if importlib.util.find_spec("example_trainer") is None:
        raise ConfigError("the trainer is not installed here; install the extra `trainer`")
    flags = [args.run]
    if args.device is not None:
        flags += ["--device", args.device]
    if args.output is not None:
        flags += ["--output", args.output]
    if args.steps is not None:
        flags += ["--steps", str(args.steps)]
    ending = subprocess.run([sys.executable, "-m", "example_trainer.repeating", *flags])
    sys.exit(ending.returncode)


def _export_traces(args: argparse.Namespace, _: Sequence[str]) -> None:
    from atroposlib.exporting.traces import export_traces

    groups = _full_groups(_source(args.groups, args.data_dir))
    report = export_traces(groups, Path(args.output), args.format, notify=notify)
    print(report.text(args.output))
    if not report.num_rollouts:
        end_command(_COMMAND, "no rollout was written; the reasons are above", code=1)


def _import_traces(args: argparse.Namespace, _: Sequence[str]) -> None:
    from atroposlib.exporting.texts import load_tokenizer
    from atroposlib.exporting.traces import TracesReport, import_traces

    output = Path(args.output)
    if output.exists():
        raise ConfigError(f"{output} exists and is left as it is; choose another name")
    require_writable_file(args.output, "--output")
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    report = TracesReport()
    paths = [Path(name) for name in args.files]
    groups = import_traces(paths, tokenizer=tokenizer, reward=args.reward, report=report)
    _write_new(output, list(groups))  # all of them first: a malformed file leaves no output
    print(report.text(args.output))


def _cast(args: argparse.Namespace, _: Sequence[str]) -> None:
    from atroposlib.agent_tasks.trace import cast_lines, rollout_of_row, terminal_pieces

    groups = islice(_full_groups(_source(args.groups, args.data_dir)), args.group, None)
    where, group = next(groups, ("", None))
    if group is None:
        raise ConfigError(f"{args.groups} has no group {args.group}; groups are numbered from 0")
    traced = rollout_of_row(group, args.row)
    if traced is None:
        raise ConfigError(
            f"{where} of {args.groups}: no trace of an agent for sequence {args.row}; expected a "
            f"number from 0 to {len(group['tokens']) - 1} of a group made by an agent"
        )
    if not terminal_pieces(traced.trace):
        raise ConfigError(
            f"{where} of {args.groups}: the agent of sequence {args.row} printed nothing"
        )
    with reader_may_leave():
        for line in cast_lines(traced.trace):
            print(line)


def _source(name: str, data_dir: str) -> Iterator[RawGroup]:
    """Return the groups of a JSONL file, or of a stored run by its name or file."""
    path = Path(name)
    if path.suffix in (".jsonl", ".json") or (path.suffix != ".sqlite3" and path.is_file()):
        return read_jsonl(open_jsonl(path))
    return read_run(find_run(name, Path(data_dir)))


def _full_groups(source: Iterator[RawGroup]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield groups with all their fields; report unreadable ones on standard error."""
    for raw in source:
        try:
            yield raw.where, full_group(raw)
        except GroupError as error:
            notify(f"{raw.where} is left out: {error}")


def _environment_class(path: str) -> type[Any]:
    """Return the environment class of `FILE.py`, `FILE.py:CLASS` or `KIND:NAME`."""
    from atroposlib.adapters.registry import KINDS
    from atroposlib.envs.base import BaseEnv

    name, _, wanted = path.partition(":")
    file = Path(name)
    if name in KINDS and not file.is_file():
        from atroposlib.adapters.env import environment_class

        return environment_class(path)
    if not file.is_file():
        raise ConfigError(f"there is no environment script {file}")
    module = import_script(file)
    found = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and BaseEnv in value.__mro__ and value.__module__ == file.stem
    }
    if wanted and wanted not in found:
        raise ConfigError(
            f"{file} has no environment {wanted}; it has {', '.join(found) or 'none'}"
        )
    if not wanted and len(found) != 1:
        names = ", ".join(found) or "no environment"
        raise ConfigError(f"{file} has {names}; name one as {file}:CLASS")
    return found[wanted] if wanted else next(iter(found.values()))


def _parser() -> CommandParser:
    parser = CommandParser(prog=_COMMAND, description=__doc__)
    commands = parser.add_subparsers(
        required=True, metavar="{score,post,diff,journal,run,export-traces,import-traces,cast}"
    )
    groups_help = "JSONL of groups, or a stored run by name or .sqlite3 file"

    score = commands.add_parser(
        "score",
        help="score groups with the current code of an environment, without a model",
        description="Score recorded groups again. Settings of the environment may follow: "
        "--config FILE.yaml, or flags such as --env.tokenizer_name.",
    )
    score.add_argument("groups", help=groups_help)
    score.add_argument(
        "--env",
        required=True,
        metavar="FILE.py[:CLASS]|KIND:NAME",
        help="script of the environment, or a task set of another library as for atropos-env",
    )
    score.add_argument(
        "--max-items",
        type=integer_between(1, 10**9),
        default=10_000,
        help="items to search for prompts (%(default)s)",
    )
    score.add_argument("--save", metavar="JSONL", help="write the groups with their new scores")
    score.set_defaults(act=_score)

    post = commands.add_parser("post", help="post groups to a service")
    post.add_argument("groups", help=groups_help)
    post.add_argument("--api-url", default="http://localhost:8000", help="(%(default)s)")
    post.add_argument("--rate", type=_rate, help="groups per second (default: no limit)")
    post.add_argument(
        "--in-flight",
        type=integer_between(1, 4096),
        default=8,
        help="concurrent requests (%(default)s)",
    )
    post.add_argument("--num-groups", type=_count, help="maximum number of groups")
    post.add_argument(
        "--skip", type=_count, default=0, help="groups to skip at the start (%(default)s)"
    )
    post.add_argument(
        "--patience-s",
        type=number_between(0, math.inf),
        default=60.0,
        help="seconds to wait for an unreachable service (%(default)s)",
    )
    post.set_defaults(act=_post)

    diff = commands.add_parser("diff", help="compare two runs")
    diff.add_argument("first", help=groups_help)
    diff.add_argument("second", help=groups_help)
    diff.set_defaults(act=_diff)
    journal = _add_run_commands(commands)
    traced = _add_trace_commands(commands, groups_help)
    for command in (score, post, diff, journal, *traced):
        command.add_argument(
            "--data-dir", default="atropos_runs", help="folder of stored runs (%(default)s)"
        )
    return parser


def _add_run_commands(commands: Any) -> CommandParser:
    """Add the commands that repeat a run; return the one that reads a stored run."""
    journal: CommandParser = commands.add_parser(
        "journal",
        help="print the groups that a trainer consumed, without what depends on time",
        description="Print one JSON object per group of a run of run-api, in the order of "
        "training. Two runs with --ordered-envs and the same completions print the same lines.",
    )
    journal.add_argument("run", help="stored run by name or .sqlite3 file")
    journal.set_defaults(act=_journal)

    run = commands.add_parser(
        "run",
        help="train a recorded run again and compare its weights",
        description="Train again on the batches that atropos-grpo --record-run has kept, and "
        "compare the weights after each step. Exit code 1: they differ.",
    )
    run.add_argument("run", metavar="FOLDER", help="--save-path of the recorded run")
    run.add_argument("--output", metavar="DIR", help="folder of the new run (FOLDER/repeated)")
    run.add_argument("--device", help="device of the new run (default: as recorded)")
    run.add_argument("--steps", type=_count, help="number of steps (default: all)")
    run.set_defaults(act=_run)
    return journal


def _add_trace_commands(commands: Any, groups_help: str) -> list[CommandParser]:
    """Add the commands for traces of agents; return those that read groups."""
    from atroposlib.exporting.traces import TRACE_FORMATS

    export = commands.add_parser(
        "export-traces", help="write the rollouts of groups as ATIF or OpenEnv files"
    )
    export.add_argument("groups", help=groups_help)
    export.add_argument(
        "--as", dest="format", choices=TRACE_FORMATS, default="atif", help="format (%(default)s)"
    )
    export.add_argument("--output", required=True, metavar="DIR", help="empty or new folder")
    export.set_defaults(act=_export_traces)

    importing = commands.add_parser(
        "import-traces", help="make groups of ATIF or OpenEnv files, and of folders of them"
    )
    importing.add_argument("files", nargs="+", metavar="FILE", help="file or folder")
    importing.add_argument("--output", required=True, metavar="JSONL", help="new file of groups")
    importing.add_argument(
        "--tokenizer", help="name or folder; makes the tokens of rollouts without token ids"
    )
    importing.add_argument("--reward", type=_reward, help="score of rollouts that have none")
    importing.set_defaults(act=_import_traces)

    cast = commands.add_parser(
        "cast", help="print an agent's terminal output as an asciinema recording"
    )
    cast.add_argument("groups", help=groups_help)
    cast.add_argument("--group", type=_count, default=0, help="number of the group (%(default)s)")
    cast.add_argument("--row", type=_count, default=0, help="sequence in the group (%(default)s)")
    cast.set_defaults(act=_cast)
    return [export, cast]


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > _MAX_DIGITS:
        raise argparse.ArgumentTypeError(f"expected a number from 0, got {text!r}")
    return int(text)


def _reward(text: str) -> float:
    try:
        reward = float(text)
    except ValueError:
        reward = float("nan")
    if not abs(reward) <= MAX_SCORE:
        raise argparse.ArgumentTypeError(f"expected a finite number, got {text!r}")
    return reward


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"expected groups per second, above 0, got {text!r}")
    return rate


if __name__ == "__main__":
    main()
