"""`atropos-train`: train a model on given environments by one command.

engine, service ──► evaluate ──► environments + trainer ──► evaluate ──► curve, pages, summary
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from pydantic import ValidationError

from atroposlib.adapters.registry import KINDS
from atroposlib.errors import AtroposError, ConfigError
from atroposlib.utils.command_parser import CommandParser, prepare_command, reader_may_leave
from atroposlib.utils.starting import vllm_command
from atroposlib.utils.text import without_secrets
from atroposlib.utils.writable import naming_writes
from example_trainer.cli import config_from_args, create_full_parser, describe_errors
from example_trainer.config import (
    TrainingConfig,
    loading_errors,
    require_model_folder,
    unloadable,
)
from example_trainer.launch import report
from example_trainer.launch.config_files import with_config_files
from example_trainer.launch.options import (
    EnvironmentFile,
    Machine,
    RunPaths,
    RunPlan,
    TrainOptions,
    engine_flag,
    make_plan,
    place,
    require_gpu_memory,
    shown_path,
    visible_gpus,
)
from example_trainer.launch.preflight import (
    RUN_FILE,
    ModelFacts,
    choose_engine,
    describe_environment,
    hold_folder,
    positive_number,
    prepare_folder,
    read_model,
    require_new_folder,
    require_packages,
    require_trainable,
    served_model,
    whole_number,
)
from example_trainer.launch.report import RunProgress, count_steps, curve_text, plain_number
from example_trainer.launch.stack import (
    Supervisor,
    TrainingLoop,
    build_stack,
    ending_signals,
    trainer_arguments,
)
from example_trainer.launch.trainer_flags import (
    TRAINER_PREFIX,
    add_trainer_flags,
    flags_here,
    refuse_idle_settings,
    refuse_own_settings,
    typed_trainer_flags,
)
from example_trainer.processes import find_free_ports
from example_trainer.reporting.page import HeldOut
from example_trainer.reporting.run_folder import groups_files, measured_names
from example_trainer.reporting.writing import write_report

_PROGRAM = "atropos-train"
_RUNS = Path("train_runs")
_ENVIRONMENT_PREFIX = "--env."
_KIND = "|".join(map(re.escape, KINDS))
_FILE = re.compile(rf"(?P<path>.+\.py|(?:{_KIND}):.+?)(?:=(?P<weight>[^=]*))?")
"""An environment: its file or KIND:NAME, and its weight."""

_OFTEN_NEEDED = (
    *("files", "model", "steps", "output", "resume", "lr", "groups_per_step", "context_tokens"),
    *("seed", "device", "no_evaluate", "engine", "engine_url", "engine_args"),
    "gpu_memory_utilization",
)
"""Arguments that `--help` shows; `--help all` includes the trainer's."""

_FIXED_IN_ENVIRONMENTS = {
    "tokenizer_name": f"{_PROGRAM} takes the tokenizer of --model; leave it out",
    "rollout_server_url": f"{_PROGRAM} starts the service itself; leave it out",
    "metrics_path": f"{_PROGRAM} needs the metrics for its report; leave it out",
    "data_path_to_save_groups": f"{_PROGRAM} needs the groups for its report; leave it out",
    "total_steps": "it is --steps here",
}
"""Settings of environments that the run determines, and the reasons."""

_FIXED_ENGINE_ARGS = ("--host", "--port", "--model", "--served-model-name")


def main(argv: Sequence[str] | None = None) -> None:
    """Train.

    Exits with 0 on success, 1 if a process failed, 2 for invalid settings, before any process is
    started, 130 after Ctrl-C and 143 after SIGTERM. Every process that it started has ended in each
    of these cases.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    prepare_command()
    with ending_signals():
        parser = _parser()
        own, environment_flags = _split_words(words)
        refuse_own_settings(parser, own)
        arguments = parser.parse_args(own)
        # From dependencies, which Python compiles on the first run.
        warnings.filterwarnings("ignore", category=SyntaxWarning)
        try:
            prepared = _prepare(parser, arguments, environment_flags)
        except (AtroposError, ValidationError, OSError) as error:
            text = (
                describe_errors(error).replace("--", TRAINER_PREFIX, 1)
                if isinstance(error, ValidationError)
                else f"{error}{flags_here(str(error))}"
            )
            parser.exit(2, f"{_PROGRAM}: error: {text}\n")
        except KeyboardInterrupt:
            parser.exit(130, "\nstopped before a process was started\n")
        _train(prepared)


class _Prepared(NamedTuple):
    """A run that has passed all checks."""

    paths: RunPaths
    plan: RunPlan
    model: ModelFacts
    notes: list[str]
    lock: IO[str]
    """Of its folder, held while this is kept."""


def _prepare(
    parser: CommandParser,
    arguments: argparse.Namespace,
    environment_flags: dict[str, tuple[str, ...]],
) -> _Prepared:
    is_resumed = arguments.resume is not None
    config_notes: list[str] = []
    if is_resumed:
        folder = _folder_to_resume(parser, arguments, environment_flags)
        options = read_options(folder)
        lock = hold_folder(folder)
        if arguments.steps is not None:
            options = options.with_steps(arguments.steps)
    else:
        options = _options(parser, arguments, environment_flags)
        folder = arguments.output or _RUNS / datetime.now().strftime("%Y%m%d-%H%M%S")
    paths = RunPaths(folder.resolve())
    if not is_resumed:
        require_new_folder(paths.output)  # before the checks that take longer
    require_packages(launches_vllm=options.engine == "vllm" and options.engine_url is None)
    if not is_resumed:
        require_model_folder(options.model)
    if options.engine_url is not None:
        served_model(options.engine_url, options.model)
    if not is_resumed:
        flags, config_notes = with_config_files(
            options.environment_flags,
            fixed=_FIXED_IN_ENVIRONMENTS,
            known=partial(_settings_of, options),
        )
        options = replace(options, environment_flags=flags)
    environments = [
        describe_environment(file.program(Path(options.working_folder)), options.flags_of(name))
        for file, name in zip(options.files, options.names(), strict=True)
    ]
    model = read_model(options.model)
    if is_resumed:
        _require_steps_to_do(options, paths)
    machine = _machine(options.device)
    plan, notes = make_plan(
        options,
        paths,
        model=model,
        environments=environments,
        machine=machine,
        is_resumed=is_resumed,
    )
    notes += config_notes
    if not is_resumed and options.engine_url is None:
        notes += filter(None, [choose_engine(arguments.engine).note])
    config = _trainer_config(plan)
    if options.first_steps not in (None, options.steps) and config.lr_schedule != "constant":
        notes.append(
            f"the {config.lr_schedule} schedule ends at step {options.steps} now: steps that are "
            "repeated have other learning rates than before, and another model results"
        )
    require_trainable(config)
    require_gpu_memory(model, config, machine, place(options, machine))
    if not is_resumed:
        prepare_folder(paths.output, subfolders=[paths.logs])
        lock = hold_folder(paths.output)
    write_options(options, paths)
    return _Prepared(paths, plan, model, notes, lock)


def _train(prepared: _Prepared) -> None:
    paths, plan, model, notes, _ = prepared

    def how_to_continue() -> str:
        steps = report.count_steps(paths.trainer_metrics)
        folder = shlex.quote(shown_path(paths.output))
        command = f"{_PROGRAM} --resume {folder}"
        if not steps:
            return (
                f"no step was done. With other settings, start again with another --output or "
                f"without {folder}; with the same ones:\n  {command}"
            )
        return f"{steps} of {plan.steps} steps done; continue with:\n  {command}"

    try:
        with RunProgress() as progress:
            progress.announce(
                f"{_PROGRAM}: {plan.model} on {', '.join(e.name for e in plan.environments)}",
                phases(plan, unties=needs_untying(plan, model)),
            )
            progress.note(f"output goes to {shown_path(paths.output)}, logs to its folder logs")
            for note in notes:
                progress.note(note)
            result = TrainRun(plan, paths, progress, model=model).run()
    except KeyboardInterrupt:
        print(f"\nstopped; every process has ended. {how_to_continue()}", file=sys.stderr)
        sys.exit(130)
    except (AtroposError, OSError) as error:  # such as a full disk
        text = f"{error}{flags_here(str(error))}"
        print(f"\n{_PROGRAM}: {text}\n\n{how_to_continue()}", file=sys.stderr)
        sys.exit(1)
    except SystemExit:
        print(f"\nstopped; every process has ended. {how_to_continue()}", file=sys.stderr)
        raise
    with reader_may_leave():
        _print_result(plan, paths, result)


def _print_result(plan: RunPlan, paths: RunPaths, result: TrainResult) -> None:
    if result.points:
        print(f"\n{curve_text(result.points, metric=result.metric)}")
    for name in [name for name in result.after if name in result.before]:
        before, after = result.before[name], result.after[name]
        print(f"\n{name}, measured by its evaluate")
        for key in [key for key in measured_names(after) if key in before]:
            change = plain_number(after[key] - before[key])
            print(
                f"  {key}: before {report.with_interval(before, key)}, "
                f"after {report.with_interval(after, key)}, "
                f"change {change if change.startswith('-') else f'+{change}'}"
            )
    if result.ends is not None:
        first, last = result.ends
        print(
            f"\n{result.metric.label}: first steps {plain_number(first)}, "
            f"last steps {plain_number(last)}"
        )
    print(f"in {result.seconds:.0f} s, seed {plan.seed}\n")
    if result.points:
        print(f"reward curve  {shown_path(paths.curve)}")
    print(f"report        {shown_path(paths.report)}")
    if result.has_rollouts:
        print(f"rollouts      {shown_path(paths.rollouts)}")
    print(f"model         {shown_path(paths.final_model)}")
    if paths.final_adapter.is_dir():
        print(f"adapters      {shown_path(paths.final_adapter)}")
    print(f"logs          {shown_path(paths.logs)}\n")
    model = shlex.quote(shown_path(paths.final_model))
    print("next:")
    serves = f"{vllm_command()} {model} --port 9001"
    if plan.engine == "torch":
        serves = f"python -m example_trainer.torch_engine --model {model} --port 9001"
    print(f"  {serves}          # serve the trained model")
    more = f"{_PROGRAM} --resume {shlex.quote(shown_path(paths.output))} --steps {2 * plan.steps}"
    print(f"  {more}   # train on")


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=_PROGRAM,
        usage=f"{_PROGRAM} FILE.py|KIND:NAME [ENV=WEIGHT ...] --model NAME_OR_PATH [--steps N] "
        "[--env.NAME VALUE ...] [--trainer.NAME VALUE ...]",
        description="Train a model on the given environments: start the inference engine, the "
        "trajectory service, the environments and the trainer, and write results before and "
        "after, a report and the trained model. Ctrl-C ends every process; --resume continues.\n\n"
        f"{_ENVIRONMENT_PREFIX}NAME VALUE sets any setting of every environment, "
        f"{_ENVIRONMENT_PREFIX}FILE.NAME VALUE of one of\nseveral (FILE without .py); "
        "`python FILE.py serve --help all` lists them with their defaults.\n"
        f"{_ENVIRONMENT_PREFIX}config FILE takes them from the section env of a YAML file.\n"
        f"{TRAINER_PREFIX}NAME VALUE passes a flag of atropos-grpo to the trainer.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        often=_OFTEN_NEEDED,
    )
    _add_run_flags(parser)
    _add_engine_flags(parser)
    trainer = parser.add_argument_group("flags of atropos-grpo, passed to the trainer")
    add_trainer_flags(trainer)
    return parser


def _options(
    parser: CommandParser,
    arguments: argparse.Namespace,
    environment_flags: dict[str, tuple[str, ...]],
) -> TrainOptions:
    if not arguments.files:
        parser.error("give the file of an environment; atropos-new-env writes one to start from")
    refuse_idle_settings(parser, arguments)
    if arguments.model is None:
        parser.error("--model is missing: the hub name or the folder of the model to train")
    given = {
        name: getattr(arguments, name)
        for name in (
            "steps", "seed", "lr", "groups_per_step", "context_tokens", "device", "engine_url",
            "engine_args", "gpu_memory_utilization",
        )
        if getattr(arguments, name) is not None
    }  # fmt: skip
    if arguments.engine is not None and arguments.engine_url is not None:
        parser.error("--engine is the engine to launch, --engine-url one that runs: give one")
    options = TrainOptions(
        files=tuple(arguments.files),
        model=str(Path(arguments.model).resolve())
        if Path(arguments.model).is_dir()
        else arguments.model,
        evaluates=not arguments.no_evaluate,
        starts_together=arguments.start_together,
        engine="vllm" if arguments.engine_url else choose_engine(arguments.engine).kind,
        environment_flags=environment_flags,
        trainer_flags=typed_trainer_flags(arguments),
        working_folder=str(Path.cwd()),
        **given,
    )
    _refuse_run_settings(environment_flags)
    unknown = environment_flags.keys() - {"", *options.names()}
    if unknown:
        raise ConfigError(
            f"{_ENVIRONMENT_PREFIX}{min(unknown)}.: there is no environment of that name; expected "
            f"one of {', '.join(options.names())}"
        )
    return options


def _settings_of(options: TrainOptions, name: str) -> set[str]:
    """Return the settings of the environment with a name, or that all have if it is empty."""
    found = [
        set(describe_environment(file.program(Path(options.working_folder)), ()).settings)
        for file, own_name in zip(options.files, options.names(), strict=True)
        if name in ("", own_name)
    ]
    return set.intersection(*found)


def _refuse_run_settings(environment_flags: Mapping[str, Sequence[str]]) -> None:
    for words in environment_flags.values():
        for word in words:
            setting = word.removeprefix(_ENVIRONMENT_PREFIX).partition("=")[0]
            if word.startswith(_ENVIRONMENT_PREFIX) and setting in _FIXED_IN_ENVIRONMENTS:
                raise ConfigError(
                    f"{_ENVIRONMENT_PREFIX}{setting}: {_FIXED_IN_ENVIRONMENTS[setting]}"
                )


def _trainer_config(plan: RunPlan) -> TrainingConfig:
    """Return the settings of the trainer, or raise its error for invalid ones."""
    [_, _, *words] = trainer_arguments(
        plan, RunPaths(Path()), engine_url="http://127.0.0.1:1", service_url="http://127.0.0.1:2"
    )
    parser = create_full_parser()
    parser.prog = _PROGRAM
    return config_from_args(parser.parse_args(words))


def _folder_to_resume(
    parser: CommandParser,
    arguments: argparse.Namespace,
    environment_flags: dict[str, tuple[str, ...]],
) -> Path:
    changed = [
        f"--{name.lstrip('-').replace('_', '-')}"
        for name, value in vars(arguments).items()
        if name not in ("files", "steps", "resume")
        # Flags of the trainer have no default here; 0 equals False.
        and (name.startswith(TRAINER_PREFIX) or not (value is None or value is False))
    ]
    changed += [f"{_ENVIRONMENT_PREFIX}*"] if environment_flags else []
    changed += [file.path for file in arguments.files]
    if changed:
        parser.error(
            f"{changed[0]}: --resume continues with the settings of the run; only --steps may "
            "change. For others, start a new run on its weights: --model FOLDER/trainer/final_model"
        )
    if arguments.resume:
        return Path(arguments.resume)
    runs = [path.parent for path in _RUNS.glob("*/run.json")]
    if not runs:
        raise ConfigError(f"--resume: there is no run under {_RUNS}/; give the folder of one")
    return max(runs, key=lambda path: (path / "run.json").stat().st_mtime)


def _require_steps_to_do(options: TrainOptions, paths: RunPaths) -> None:
    done = count_steps(paths.trainer_metrics)
    if done > options.steps:
        raise ConfigError(
            f"--steps {options.steps}: the run in {shown_path(paths.output)} has done {done} steps"
        )
    # A run that could not be evaluated or reported after its last step has no summary of it.
    if done >= options.steps and paths.final_model.is_dir() and _is_reported(options, paths):
        raise ConfigError(
            f"the run in {shown_path(paths.output)} has done its {done} steps; to continue, add "
            f"--steps {2 * done}"
        )


def _is_reported(options: TrainOptions, paths: RunPaths) -> bool:
    try:
        summary = json.loads(paths.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(summary, dict) and summary.get("steps") == options.steps


def _machine(device: str) -> Machine:
    import torch

    count = torch.cuda.device_count() if device != "cpu" and torch.cuda.is_available() else 0
    if device == "cuda" and count == 0:
        raise ConfigError("--device cuda: torch finds no GPU here; leave it out to use the CPU")
    return Machine(
        gpus=visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES", ""), count),
        num_cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        gpu_bytes=torch.cuda.get_device_properties(0).total_memory if count else 0,
        has_bfloat16=not count or torch.cuda.get_device_capability(0) >= (8, 0),
    )


def _split_words(words: Sequence[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Separate the flags of environments from those of this command.

    Returns:
        The other words, files first, and the flags by environment name; those for all under "".
    """
    own: list[str] = []
    files: list[str] = []  # argparse expects them next to each other
    flags: dict[str, tuple[str, ...]] = {}
    name: str | None = None  # the environment of the preceding flag
    for word in words:
        if word.startswith(_ENVIRONMENT_PREFIX):
            name, word = _environment_flag(word)
        elif word.startswith("--") or _FILE.fullmatch(word):
            name = None
        if name is None:
            (files if _FILE.fullmatch(word) else own).append(word)
        else:
            flags[name] = (*flags.get(name, ()), word)
    return [*files, *own], flags


def _environment_flag(word: str) -> tuple[str, str]:
    """Parse `--env.FILE.NAME=VALUE`, for one environment, or `--env.NAME=VALUE`, for all."""
    flag, equals, value = word.removeprefix(_ENVIRONMENT_PREFIX).partition("=")
    name, _, setting = flag.rpartition(".")
    return name, f"{_ENVIRONMENT_PREFIX}{setting}{equals}{value}"


def _environment_file(text: str) -> EnvironmentFile:
    match = _FILE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"expected an environment as FILE.py or KIND:NAME (atropos-env list), got {text!r}"
        )
    if match["weight"] is None:
        return EnvironmentFile(match["path"])
    return EnvironmentFile(match["path"], positive_number(match["weight"]))


def _fraction(text: str) -> float:
    value = positive_number(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return value


def _address(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(
            f"expected an address such as http://HOST:9001, got {text!r}"
        )
    return text.rstrip("/").removesuffix("/v1")


def _shell_words(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"cannot be split into arguments: {error}") from error
    fixed = [word for word in words if engine_flag(word) in _FIXED_ENGINE_ARGS]
    if fixed:
        raise argparse.ArgumentTypeError(
            f"{fixed[0]}: {_PROGRAM} sets this itself; to use a running engine, give its address "
            "with --engine-url"
        )
    return text


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="*",
        type=_environment_file,
        metavar="FILE.py[=WEIGHT]",
        help="environments; with several, weights are their relative shares of each batch "
        "(default 1)",
    )
    parser.add_argument("--model", help="hub name or folder of the model to train")
    parser.add_argument(
        "--steps", type=whole_number(1), help="optimizer steps of the whole run (default: 200)"
    )
    parser.add_argument(
        "--output", type=Path, help=f"folder to write to (default: {_RUNS}/<date>-<time>)"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="FOLDER",
        help=f"continue the run in this folder, or the newest under {_RUNS}/, with its settings; "
        "--steps may be increased",
    )
    parser.add_argument(
        "--lr",
        type=positive_number,
        help="learning rate (default: 1e-6, which is common if all weights are trained; "
        "2e-4 below 20 million parameters. The default of atropos-grpo is 1e-5)",
    )
    parser.add_argument(
        "--groups-per-step",
        type=whole_number(1),
        help="groups in one optimizer step (default: 16; 4 on a CPU, except for tiny models)",
    )
    parser.add_argument(
        "--context-tokens",
        type=whole_number(16),
        help="maximum tokens of prompt and completion (default: the largest env.max_token_length "
        "plus 1024, at most the context of the model)",
    )
    parser.add_argument(
        "--seed", type=whole_number(0), help="seed of engine and trainer (default: 0)"
    )
    parser.add_argument(
        "--no-evaluate",
        action="store_true",
        help="do not run the environments' evaluate before and after training",
    )
    parser.add_argument(
        "--start-together",
        action="store_true",
        help="start engine, trainer and environments at the same time, which saves the seconds or "
        "minutes that each of them takes to load; on a CPU or with separate GPUs, and with "
        "--no-evaluate if an environment has an evaluate",
    )


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        help="device of engine and trainer; auto: the GPU if there is one. One GPU is shared; with "
        "several, the trainer uses the first and the engine the last; CUDA_VISIBLE_DEVICES selects "
        "among them (default: auto)",
    )
    parser.add_argument(
        "--engine",
        choices=["vllm", "torch"],
        help="engine to launch; torch needs no vLLM (default: vllm, torch if it is not installed)",
    )
    parser.add_argument(
        "--engine-url",
        type=_address,
        metavar="URL",
        help="use the vLLM at this address, started with VLLM_SERVER_DEV_MODE=1 (default: "
        "launch one)",
    )
    parser.add_argument(
        "--engine-args",
        type=_shell_words,
        metavar="'ARGS'",
        help="additional arguments for the launched engine, as one word (default: none)",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=_fraction,
        help="share of GPU memory for the launched engine (default: 0.45; 0.9 on a separate GPU)",
    )


_GROUPS_PER_END = 16
_STEPS_PER_END = 10

Evaluations = Mapping[str, Mapping[str, float]]
"""Environment to metric to value."""


class TrainResult(NamedTuple):
    """Results of a run."""

    before: Evaluations
    after: Evaluations
    metric: report.RewardMetric
    points: list[report.RewardPoint]
    """Mean reward by trainer step."""
    has_rollouts: bool
    """Whether the page of rollouts was written."""
    seconds: float

    @property
    def ends(self) -> tuple[float, float] | None:
        """Mean reward of the first and of the last steps, None without any."""
        rewards = [point.reward for point in self.points]
        size = max(1, min(_STEPS_PER_END, len(rewards) // 2))
        return (sum(rewards[:size]) / size, sum(rewards[-size:]) / size) if rewards else None


def write_options(options: TrainOptions, paths: RunPaths) -> None:
    """Write the command line of a run to its folder, readable by its owner only.

    Flags may contain API keys, which a resumed run needs.
    """
    text = json.dumps(asdict(options), indent=2)
    path = paths.output / RUN_FILE
    unfinished = path.with_suffix(".new")
    with naming_writes(path):
        unfinished.touch(mode=0o600)
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(path)


def read_options(folder: Path) -> TrainOptions:
    """Read the command line of the run in a folder; raise `ConfigError` if there is none."""
    path = folder / RUN_FILE
    try:
        return TrainOptions.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ConfigError(
            f"--resume {folder}: there is no run to resume; expected an output folder of "
            f"atropos-train, with {RUN_FILE}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--resume {folder}: {path} cannot be read: {error}") from error


def phases(plan: RunPlan, *, unties: bool) -> list[str]:
    """Return the titles of the phases of a run in order."""
    evaluated = [each for each in plan.environments if each.is_evaluated]
    unmeasured = [e.name for e in evaluated if not report.read_evaluation(e.evaluation("before"))]
    titles = ["Copy the model for the engine"] if unties else []
    titles.append(
        f"Start the trajectory service and use the engine at {without_secrets(plan.engine_url)}"
        if plan.engine_url
        else "Start the trajectory service and the inference engine"
    )
    if unmeasured:  # those of a resumed run may have been measured
        titles.append(f"Measure before training: `evaluate` of {', '.join(unmeasured)}")
    titles.append(f"Train for {plan.steps} steps of {plan.work}")
    if evaluated:
        titles.append("Measure after training")
    return [*titles, "Write the report"]


class TrainRun:
    """The phases of one run; every process it starts has ended when `run` returns or raises."""

    def __init__(
        self, plan: RunPlan, paths: RunPaths, progress: RunProgress, *, model: ModelFacts
    ) -> None:
        self._plan = plan
        self._paths = paths
        self._progress = progress
        self._unties = needs_untying(plan, model)
        self._supervisor = Supervisor()

    def run(self) -> TrainResult:
        """Run all phases.

        Raises:
            ProcessFailedError: One of the processes ended or was not ready in time.
            AtroposError: Another part failed, or the report could not be written.
        """
        with self._supervisor:
            if self._unties:
                self._plan = replace(self._plan, engine_model=self._untie())
            loop = self._build_loop()
            before = self._start(loop)
            loop.reinforce()
            after = self._evaluate(loop, "after")
        try:
            return self._report(before, after)
        except OSError as error:
            raise AtroposError(f"the report could not be written: {error}") from error

    def _start(self, loop: TrainingLoop) -> Evaluations:
        """Start the processes, and evaluate the model before the trainer changes it."""
        if self._plan.starts_together:
            loop.start_together()
            return {}
        loop.start_servers()
        loop.wait_for_servers(reload_from=None)
        before = self._evaluate(loop, "before")
        loop.start_trainer()
        return before

    def _untie(self) -> Path:
        """Write an untied copy of the model, whose output layer vLLM on a CPU can update."""
        from transformers import AutoConfig, AutoTokenizer

        from example_trainer.images import IMAGE_MODELS, TokenizerWithProcessor
        from example_trainer.model import auto_class_of, load_pretrained
        from example_trainer.weight_sync import export_for_engine

        self._progress.begin("copy", "Copying the model for the engine", expected="a minute")
        folder = self._paths.output / "engine_model"
        if not folder.is_dir():
            source = self._plan.model
            config = AutoConfig.from_pretrained(source)
            try:
                model = load_pretrained(auto_class_of(config), source)
            except loading_errors() as error:
                raise unloadable(source, error) from error
            tokenizer = AutoTokenizer.from_pretrained(source)
            if config.model_type in IMAGE_MODELS:
                tokenizer = TokenizerWithProcessor(tokenizer, source)
            export_for_engine(model, folder, tokenizer=tokenizer)
        return folder

    def _build_loop(self) -> TrainingLoop:
        engine_port, service_port = find_free_ports(2)
        stack = build_stack(
            self._plan, self._paths, ports=(engine_port, service_port), inherited=os.environ
        )
        return TrainingLoop(
            stack,
            self._plan,
            self._paths,
            progress=self._progress,
            supervisor=self._supervisor,
            reward=None,
        )

    def _evaluate(self, loop: TrainingLoop, when: str) -> Evaluations:
        results: dict[str, Mapping[str, float]] = {}
        for environment in self._plan.environments:
            if not environment.is_evaluated:
                continue
            known = report.read_evaluation(environment.evaluation(when))
            if known and when == "before":  # measured before the run was interrupted
                results[environment.name] = known
                continue
            self._progress.begin(
                f"evaluate_{when}_{environment.name}",
                f"Measuring {when} training: `evaluate` of {environment.name}",
                expected="depends on the environment",
            )
            metrics = loop.evaluate(environment, when)
            if metrics:
                results[environment.name] = metrics
                self._progress.note(
                    ", ".join(
                        f"{key} {report.with_interval(metrics, key)}"
                        for key in measured_names(metrics)
                    )
                )
        return results

    def _report(self, before: Evaluations, after: Evaluations) -> TrainResult:
        self._progress.begin("report", "Writing the report", expected="a few seconds")
        paths, environments = self._paths, self._plan.environments
        metrics = [environment.metrics for environment in environments]
        metric, points = report.find_rewards(metrics, paths.trainer_metrics)
        if points:
            report.write_curve(points, paths.curve, metric=metric)
        one = metrics[0] if len(metrics) == 1 and metrics[0].is_file() else None
        held_out = [
            HeldOut(f"{name}: {key}", before.get(name, {}).get(key), results[key])
            for name, results in after.items()
            for key in measured_names(results)
        ]
        groups = [groups_files(environment.groups) for environment in environments]
        num_groups = report.write_rollouts_page(
            groups, paths.rollouts, groups_per_end=_GROUPS_PER_END
        )
        names = ", ".join(environment.name for environment in environments)
        write_report(
            paths.trainer_metrics,
            paths.report,
            environment_path=one,
            held_out=held_out,
            title=f"Training of {Path(self._plan.model).name} on {names}",
            seconds=self._progress.elapsed_s,
            groups=groups,
            rollouts_path=paths.rollouts,
        )
        self._progress.end()
        result = TrainResult(
            before, after, metric, points, num_groups > 0, self._progress.elapsed_s
        )
        self._write_summary(result)
        return result

    def _write_summary(self, result: TrainResult) -> None:
        summary = {
            "model": self._plan.model,
            "environments": [environment.name for environment in self._plan.environments],
            "steps": self._plan.steps,
            "seed": self._plan.seed,
            "evaluations_before": result.before,
            "evaluations_after": result.after,
            "reward_metric": result.metric.key,
            "reward_first_and_last_steps": result.ends,
            "seconds": result.seconds,
            "seconds_by_phase": self._progress.seconds_by_phase,
        }
        self._paths.summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def needs_untying(plan: RunPlan, model: ModelFacts) -> bool:
    """Return whether the engine needs an untied copy of the model.

    On a CPU, vLLM has a packed copy of a tied output layer, which in-place updates do not change.
    """
    launches_vllm = plan.engine_url is None and plan.engine == "vllm"
    return model.is_tied and not plan.on_gpu and launches_vllm


if __name__ == "__main__":
    main()
