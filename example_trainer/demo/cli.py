"""`atropos-demo`: watch a small language model get better, on one machine, by one command."""

from __future__ import annotations

import argparse
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from atroposlib.errors import AtroposError
from atroposlib.utils.command_parser import CommandParser, exit_code_of
from example_trainer.launch.options import shown_path
from example_trainer.launch.preflight import prepare_folder, read_model, require_packages
from example_trainer.launch.stack import ending_signals
from example_trainer.loss_choice import ALGORITHMS

if TYPE_CHECKING:
    from example_trainer.demo.run import DemoResult
    from example_trainer.demo.settings import DemoPaths, DemoSettings

__all__ = ["main"]

_ENVIRONMENT_PACKAGES = {"examples": ("reasoning_gym",)}
_REAL_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
_PHASES_OF_TINY_MODEL = (
    "Make a small language model with random weights",
    "Teach it sums by supervised learning, then a bad habit: to answer without working them out",
)
_PHASES = (
    "Start the trajectory service and the inference engine",
    "Measure: problems never trained on",
    "Reinforcement learning: the environment, vLLM and the trainer work at the same time",
    "Measure again",
    "Write the report",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo.

    Exits with 0 when all went well, 1 when a part failed, 2 on wrong settings, 130 after Ctrl-C and
    143 after SIGTERM; no process it started is left in any of these cases.
    """
    with ending_signals():
        try:
            _run(_parser().parse_args(argv))
        except KeyboardInterrupt:
            print("\ninterrupted; every process has ended", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
        except AtroposError as error:
            print(f"\natropos-demo: {error}", file=sys.stderr)
            sys.exit(exit_code_of(error))


def _run(args: argparse.Namespace) -> None:
    from example_trainer.demo.settings import DemoPaths, require_clone, settings_for

    # Python repeats these for other people's packages when it compiles them, on the first run.
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    require_packages(extras=_ENVIRONMENT_PACKAGES)
    require_clone()
    settings = settings_for(
        args.profile,
        model=args.model,
        seed=args.seed,
        steps=args.steps,
        lr=args.lr,
        max_tokens=args.max_tokens,
        algorithm=args.algorithm,
    )
    output = args.output or Path("demo_runs") / datetime.now().strftime("%Y%m%d-%H%M%S")
    paths = DemoPaths(output.resolve())
    if args.model is not None:
        read_model(args.model)
    prepare_folder(paths.output, subfolders=[paths.logs])

    from example_trainer.demo.run import Demo
    from example_trainer.launch.report import RunProgress

    with RunProgress() as progress:
        progress.note(
            f"everything goes to {shown_path(paths.output)}; "
            f"logs of the processes to {shown_path(paths.logs)}"
        )
        progress.announce(
            "a few minutes on two CPU cores; nothing is downloaded"
            if settings.uses_tiny_model
            else f"with {settings.model}, as long as that takes",
            [*(_PHASES_OF_TINY_MODEL if settings.uses_tiny_model else ()), *_PHASES],
        )
        result = Demo(settings, paths, progress).run()
    _print_result(settings, paths, result)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="atropos-demo",
        description="Make a small language model from scratch, teach it a little arithmetic, then "
        "let it get better by reinforcement learning through four real processes: vLLM, the "
        "trajectory service, an environment and the GRPO trainer.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", help="hub name or folder of a model to use instead of the small one"
    )
    parser.add_argument("--seed", type=_whole(0), default=0, help="seed of everything (default 0)")
    parser.add_argument("--steps", type=_whole(1), help="trainer steps (default: the profile's)")
    parser.add_argument("--lr", type=float, help="learning rate (default 2e-4; 1e-6 with --model)")
    parser.add_argument(
        "--max-tokens",
        type=_whole(32),
        help="longest prompt and completion together (default 64; 1024 with --model)",
    )
    parser.add_argument(
        "--algorithm",
        choices=ALGORITHMS,
        metavar="NAME",
        help=f"policy loss of the trainer: {', '.join(ALGORITHMS)} (default: the trainer's)",
    )
    parser.add_argument(
        "--output", type=Path, help="folder to write to (default demo_runs/<date>-<time>)"
    )
    parser.add_argument(
        "--profile",
        choices=["full", "quick"],
        default="full",
        help="full learns visibly; quick passes once through every part in about a minute",
    )
    return parser


def _whole(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return whole_number


def _print_result(settings: DemoSettings, paths: DemoPaths, result: DemoResult) -> None:
    from example_trainer.launch.report import curve_text

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


if __name__ == "__main__":
    main()
