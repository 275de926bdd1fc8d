"""`atropos-demo`: train a small language model on one machine, by one command.

    tiny model --supervised--> some accuracy --RL, four processes--> more accuracy --> report

Accuracy on held-out problems is measured through the inference server that samples the rollouts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from atroposlib.errors import AtroposError, InferenceError
from atroposlib.utils.command_parser import (
    CommandParser,
    exit_code_of,
    prepare_command,
    reader_may_leave,
)
from example_trainer.demo.held_out import HeldOutResult, measure_held_out
from example_trainer.demo.settings import (
    DemoPaths,
    DemoSettings,
    demo_plan,
    environment_settings,
    require_clone,
    settings_for,
)
from example_trainer.demo.student import Student, make_student, teach_student
from example_trainer.demo.task import Problem, held_out_problems
from example_trainer.launch import report
from example_trainer.launch.options import shown_path
from example_trainer.launch.preflight import (
    choose_engine,
    positive_number,
    prepare_folder,
    read_model,
    require_packages,
    whole_number,
)
from example_trainer.launch.report import RunProgress, curve_text
from example_trainer.launch.stack import Supervisor, TrainingLoop, build_stack, ending_signals
from example_trainer.loss_choice import ALGORITHMS
from example_trainer.processes import find_free_ports
from example_trainer.reporting.page import HeldOut
from example_trainer.reporting.run_folder import groups_files
from example_trainer.reporting.writing import write_report

_ENVIRONMENT_PACKAGES = {"examples": ("reasoning_gym",)}
_REAL_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
_PHASES_OF_TINY_MODEL = (
    "Create a small language model with random weights",
    "Train it on sums by supervised learning, first with all steps, then with some direct answers",
)
_PHASES = (
    "Start the trajectory service and the inference engine",
    "Measure accuracy on problems never trained on",
    "Reinforcement learning: environment, engine and trainer run at the same time",
    "Measure again",
    "Write the report",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo.

    Exits with 0 on success, 1 if a process failed, 2 on invalid settings, 130 after Ctrl-C and 143
    after SIGTERM. Every process that it started has ended in each of these cases.
    """
    prepare_command()
    with ending_signals():
        try:
            _run(_parser().parse_args(argv))
        except KeyboardInterrupt:
            print("\ninterrupted; every process has ended", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
        except (AtroposError, OSError) as error:  # such as a full disk
            print(f"\natropos-demo: {error}", file=sys.stderr)
            sys.exit(exit_code_of(error))


def _run(args: argparse.Namespace) -> None:
    # From dependencies, which Python compiles on the first run.
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    engine, engine_note = choose_engine(args.engine)
    require_packages(extras=_ENVIRONMENT_PACKAGES, launches_vllm=engine == "vllm")
    require_clone()
    settings = settings_for(
        args.profile,
        model=args.model,
        seed=args.seed,
        steps=args.steps,
        lr=args.lr,
        max_tokens=args.max_tokens,
        algorithm=args.algorithm,
        engine=engine,
    )
    output = args.output or Path("demo_runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    paths = DemoPaths(output.resolve())
    if args.model is not None:
        read_model(args.model)
    prepare_folder(paths.output, subfolders=[paths.logs])

    with RunProgress() as progress:
        progress.note(
            f"output goes to {shown_path(paths.output)}, "
            f"logs of the processes to {shown_path(paths.logs)}"
        )
        if engine_note:
            progress.note(engine_note)
        progress.announce(
            "a few minutes on two CPU cores; nothing is downloaded"
            if settings.uses_tiny_model
            else f"with {settings.model}; the duration depends on the model",
            [*(_PHASES_OF_TINY_MODEL if settings.uses_tiny_model else ()), *_PHASES],
        )
        result = Demo(settings, paths, progress).run()
    with reader_may_leave():
        _print_result(settings, paths, result)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="atropos-demo",
        description="Create a small language model, train it on a little arithmetic, then improve "
        "it by reinforcement learning with four processes: an inference engine, the trajectory "
        "service, an environment and the GRPO trainer.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", help="hub name or folder of a model to use instead of the small one")
    add("--seed", type=whole_number(0), default=0, help="seed of the run (default 0)")
    add("--steps", type=whole_number(1), help="trainer steps (default: the profile's)")
    add("--lr", type=positive_number, help="learning rate (default 2e-4; 1e-6 with --model)")
    add(
        "--max-tokens",
        type=whole_number(32),
        help="maximum tokens of prompt and completion (default 64; 1024 with --model)",
    )
    add(
        "--algorithm",
        choices=ALGORITHMS,
        metavar="NAME",
        help=f"policy loss of the trainer: {', '.join(ALGORITHMS)} (default: the trainer's)",
    )
    add(
        "--engine",
        choices=["vllm", "torch"],
        help="inference engine; torch needs no vLLM (default: vllm, torch if it is not installed)",
    )
    add("--output", type=Path, help="folder to write to (default demo_runs/<date>-<time>)")
    add(
        "--profile",
        choices=["full", "quick"],
        default="full",
        help="full: visible improvement; quick: three steps through every part, about a minute",
    )
    return parser


def _print_result(settings: DemoSettings, paths: DemoPaths, result: DemoResult) -> None:
    before, after = result.before, result.after
    print(f"\n{curve_text(result.points)}\n")
    print(f"held-out accuracy, {before.num_problems} problems never trained on")
    print(f"  before   {before.accuracy:6.1%}")
    print(f"  after    {after.accuracy:6.1%}   ({after.accuracy - before.accuracy:+.1%})")
    print(f"in {result.seconds:.0f} s, seed {settings.seed}\n")
    print(f"reward curve  {shown_path(paths.curve)}")
    print(f"report        {shown_path(paths.report)}")
    print(f"rollouts      {shown_path(paths.rollouts)}")
    print(f"model         {shown_path(paths.final_model)}")
    print(f"logs          {shown_path(paths.logs)}\n")
    print("the same with a real model on a GPU, here on grade-school mathematics:")
    print(
        f"  .venv/bin/atropos-train environments/gsm8k_server.py --model {_REAL_MODEL} --steps 200"
    )


_NUM_WARM_UP_PROBLEMS = 256
_GROUPS_PER_END = 16


class DemoResult(NamedTuple):
    """Results of a run."""

    before: HeldOutResult
    after: HeldOutResult
    points: list[report.RewardPoint]
    seconds: float


class Demo:
    """The phases of one run; every process it starts has ended when `run` returns or raises."""

    def __init__(self, settings: DemoSettings, paths: DemoPaths, progress: RunProgress) -> None:
        self.settings = settings
        self.paths = paths
        self.progress = progress
        self._supervisor = Supervisor()

    def run(self) -> DemoResult:
        """Run all phases.

        Raises:
            ProcessFailedError: One of the processes ended or was not ready in time.
            AtroposError: Another part failed.
        """
        with self._supervisor:
            problems = held_out_problems(environment_settings(self.settings))
            student = self._make_student() if self._makes_model else None
            loop = self._build_loop()
            loop.start_servers()
            if student is not None:
                self._warm_up(student, problems)
            # The engine has started on the random weights meanwhile.
            loop.wait_for_servers(reload_from=self.paths.tiny_model if student else None)
            # The trainer loads during the measurement.
            loop.start_trainer()
            before = self._measure(loop, problems, "before")
            loop.reinforce()
            after = self._measure(loop, problems, "after")
        return self._report(before, after)

    @property
    def _model(self) -> str:
        given = self.settings.model or self.settings.warmed_up_model
        return str(given or self.paths.tiny_model)

    @property
    def _makes_model(self) -> bool:
        return self.settings.uses_tiny_model and self.settings.warmed_up_model is None

    def _make_student(self) -> Student:
        self.progress.begin("make", "Creating a small model", expected="a few seconds")
        student = make_student(
            environment_settings(self.settings),
            shape=self.settings.shape,
            seed=self.settings.seed,
            folder=self.paths.tiny_model,
        )
        self.progress.note(
            f"{student.model.num_parameters():,} parameters, "
            f"a vocabulary of {len(student.tokenizer)}"
        )
        return student

    def _build_loop(self) -> TrainingLoop:
        import torch

        engine_port, service_port = find_free_ports(2)
        plan = demo_plan(
            self.settings, self.paths, model=self._model, on_gpu=torch.cuda.is_available()
        )
        stack = build_stack(
            plan, self.paths, ports=(engine_port, service_port), inherited=os.environ
        )
        return TrainingLoop(
            stack, plan, self.paths, progress=self.progress, supervisor=self._supervisor
        )

    def _warm_up(self, student: Student, problems: list[Problem]) -> None:
        settings = self.settings.warm_up
        self.progress.begin(
            "warm_up",
            "Supervised learning while the engine starts",
            expected="a minute or two",
        )

        last_step = 0
        self.progress.note("solutions with all steps:")

        def on_check(step: int, loss: float, accuracy: float) -> None:
            nonlocal last_step
            self._supervisor.check()
            if step < last_step:
                self.progress.note("then some solutions without steps:")
            last_step = step
            state = f"step {step}, loss {loss:.2f}, accuracy {accuracy:.0%}"
            self.progress.update(min(accuracy, settings.worked_accuracy), None, state)

        worked, mixed = teach_student(
            student,
            environment_settings(self.settings),
            measured=problems[:_NUM_WARM_UP_PROBLEMS],
            settings=settings,
            seed=self.settings.seed,
            on_check=on_check,
        )
        self.progress.note(
            f"accuracy with all steps: {worked.accuracy:.0%} after {worked.steps} optimizer steps"
        )
        self.progress.note(
            f"accuracy with {settings.direct_share:.0%} direct answers: {mixed.accuracy:.0%} after "
            f"{mixed.steps} more"
        )
        if worked.accuracy < settings.worked_accuracy:
            self.progress.note(f"this machine is slow: stopped after {settings.limit_s:g} s")

    def _measure(self, loop: TrainingLoop, problems: list[Problem], when: str) -> HeldOutResult:
        self.progress.begin(
            f"measure_{when}",
            f"Measuring {when} training: {len(problems)} problems never trained on",
            expected="a few seconds",
        )

        def on_tick(num_answered: int) -> None:
            loop.check()
            self.progress.update(num_answered, len(problems), f"{num_answered} answers")

        try:
            result = measure_held_out(
                f"{loop.stack.engine_url}/v1",
                model_name=self._model,
                problems=problems,
                max_tokens=self.settings.max_tokens // 2,
                on_tick=on_tick,
            )
        except InferenceError:
            loop.check()  # rather report the process that failed, if one did
            raise
        self.progress.note(f"{result.num_correct} of {result.num_problems} correct")
        return result

    def _report(self, before: HeldOutResult, after: HeldOutResult) -> DemoResult:
        self.progress.begin("report", "Writing the report", expected="a few seconds")
        paths = self.paths
        points = report.read_rewards(paths.environment_metrics)
        report.write_curve(points, paths.curve)
        groups = [groups_files(paths.groups)]
        report.write_rollouts_page(groups, paths.rollouts, groups_per_end=_GROUPS_PER_END)
        name = "a small model" if self.settings.uses_tiny_model else Path(self._model).name
        title = f"Training of {name} on sums"
        write_report(
            paths.trainer_metrics,
            paths.report,
            environment_path=paths.environment_metrics,
            held_out=[
                HeldOut(
                    "share of right answers", before.accuracy, after.accuracy, after.num_problems
                )
            ],
            title=title,
            seconds=self.progress.elapsed_s,
            groups=groups,
            rollouts_path=paths.rollouts,
        )
        self.progress.end()
        result = DemoResult(before, after, points, self.progress.elapsed_s)
        figures = {
            "title": title,
            "accuracy_before": before.accuracy,
            "accuracy_after": after.accuracy,
            "num_held_out": before.num_problems,
            "seed": self.settings.seed,
            "engine": self.settings.engine,
            "steps": self.settings.steps,
            "seconds": result.seconds,
            "seconds_by_phase": self.progress.seconds_by_phase,
        }
        paths.summary.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        return result


if __name__ == "__main__":
    main()
