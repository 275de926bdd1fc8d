"""What the two entry points share: logging, signals and exit codes.

Turn the absence of an optional package into an error that names the extra bringing it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from pydantic import ValidationError

from atroposlib.errors import AtroposError, ConfigError, MissingExtraError
from atroposlib.utils.command_parser import exit_code_of
from example_trainer.cli import describe_errors
from example_trainer.config import TrainingConfig, require_model_folder, require_reference
from example_trainer.weight_sync import require_built_mode

if TYPE_CHECKING:
    from example_trainer.training import StepView

__all__ = [
    "require_extra",
    "run_door",
]


@contextmanager
def require_extra(extra: str) -> Iterator[None]:
    """Import optional packages inside this; a missing one raises `MissingExtraError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "a package", extra=extra) from error


logger = logging.getLogger("example_trainer")


def run_door(parser: argparse.ArgumentParser, make_config: Callable[[], TrainingConfig]) -> None:
    """Make the config and train.

    Exits with 2 when the settings can never work or torch is missing, with 1 and the cause when
    training fails, with 128 + n after signal n. SIGINT and SIGTERM unwind the run, so every child
    ends first.
    """
    try:
        with require_extra("trainer"):
            config = make_config()
            import torch  # noqa: F401 - told here when missing, not in the middle of the start
        require_built_mode(config)
        require_reference(config)
        require_model_folder(config.model_name)
    except MissingExtraError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except ValidationError as error:
        parser.error(describe_errors(error))
    except ConfigError as error:
        parser.error(str(error))
    logging.basicConfig(
        level=logging.INFO if config.trainer_rank == 0 else logging.WARNING,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line per poll otherwise
    signal.signal(signal.SIGTERM, _exit_on_signal)
    # Heavy imports come after the flags were found to be right.
    from transformers.utils.logging import disable_progress_bar

    from example_trainer.trainers import train

    disable_progress_bar()  # one bar per saved file otherwise
    try:
        with _live_view(config) as view:
            train(config, view=view)
    except KeyboardInterrupt:
        logger.info("interrupted")
        sys.exit(128 + signal.SIGINT)
    except AtroposError as error:
        logger.error("%s", error)
        sys.exit(exit_code_of(error))
    except Exception:
        logger.exception("training failed")
        sys.exit(1)


def _live_view(config: TrainingConfig) -> contextlib.AbstractContextManager[StepView | None]:
    """Return the live view where there is a terminal to show it on, and somebody wants it."""
    from example_trainer.live_view import LiveDisplay, can_show

    if config.quiet or config.trainer_rank != 0 or not can_show(sys.stderr):
        return contextlib.nullcontext()
    return LiveDisplay(config.model_name, config.training_steps, stream=sys.stderr)


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    # The second signal of an impatient sender must not interrupt the clean-up of the first.
    signal.signal(number, signal.SIG_IGN)
    logger.info("received %s, ending", signal.Signals(number).name)
    sys.exit(128 + number)
