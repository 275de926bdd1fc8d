"""Command-line flags of the trainer, generated from the fields of `config`, and its exit codes.

`create_full_parser` serves `atropos-grpo`, `create_unified_parser` the launcher `atropos-grpo-run`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from atroposlib.errors import AtroposError, ConfigError, MissingExtraError
from atroposlib.utils.command_parser import CommandParser, exit_code_of, prepare_command
from atroposlib.utils.starting import collection_paused
from atroposlib.utils.writable import FULL_DISK
from example_trainer import config as fields
from example_trainer.config import (
    TrainingConfig,
    default_device,
    require_model_folder,
    require_reference,
)
from example_trainer.weight_sync import require_built_mode

if TYPE_CHECKING:
    from example_trainer.run_log import LiveDisplay

__all__ = [
    "add_atropos_args",
    "add_debug_args",
    "add_distributed_args",
    "add_grpo_args",
    "add_lora_args",
    "add_mode_args",
    "add_model_args",
    "add_training_args",
    "add_vllm_args",
    "add_wandb_args",
    "config_from_args",
    "create_base_parser",
    "create_full_parser",
    "create_unified_parser",
    "describe_errors",
    "parse_args",
    "parse_layer_indices",
    "require_extra",
    "run_training",
    "torchrun_settings",
]

logger = logging.getLogger("example_trainer")

_FLAGS_BY_FIELD = {
    "model_name": ("--model", "--model-name"),
    "vllm_gpu_memory_utilization": ("--gpu-memory-utilization", "--vllm-gpu-memory-utilization"),
}
_DEST_BY_FIELD = {"vllm_gpu_memory_utilization": "gpu_memory_utilization"}
_FIELDS_WITHOUT_FLAG = {"single_copy"}


OFTEN_NEEDED = (
    *("training_steps", "lr", "batch_size", "gradient_accumulation_steps", "seq_len", "seed"),
    *("algorithm", "kl_coef", "weight_bridge_mode", "vllm_port", "gpu_memory_utilization"),
    *("atropos_url", "save_path", "checkpoint_interval", "resume", "use_wandb", "wandb_project"),
    *("device", "train_dtype", "microbatch_tokens", "lora", "lora_r"),
    "quiet",
)
"""Fields that `--help` shows; `--help all` shows every flag."""


MAX_LAYER = 9999
"""Largest layer index that flags take."""


def parse_layer_indices(text: str) -> list[int] | None:
    """Parse `0-3,28-31` into sorted, unique layer indices; `none` and an empty string mean all.

    Raises:
        argparse.ArgumentTypeError: a part is not an index up to `MAX_LAYER`, or an ascending `a-b`
            range of such.
    """
    indices: set[int] = set()
    if text.strip().lower() == "none":  # as for other settings that may be absent
        return None
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.strip().isdecimal() or (dash and not last.strip().isdecimal()):
            raise argparse.ArgumentTypeError(
                f"{part!r} is not a layer index (0, 1, 2, ...) or a range such as 0-3"
            )
        low, high = int(first), int(last) if dash else int(first)
        if high > MAX_LAYER:
            raise argparse.ArgumentTypeError(f"{part!r}: expected indices up to {MAX_LAYER}")
        if high < low:
            raise argparse.ArgumentTypeError(f"range {part!r} is descending; write {high}-{low}")
        indices.update(range(low, high + 1))
    return sorted(indices) or None


def parse_arguments(text: str) -> dict[str, Any]:
    """Parse a JSON object, such as `{"beta": 0.1}`.

    Raises:
        argparse.ArgumentTypeError: it is something else.
    """
    try:
        arguments = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not JSON: {error}") from error
    if not isinstance(arguments, dict):
        example = '{"beta": 0.1}'
        raise argparse.ArgumentTypeError(f"{text!r:.80}: expected an object, such as {example}")
    return arguments


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name is given twice")
    return values


def function_path(text: str) -> str:
    """Return `FILE.py:NAME` with an absolute path, since a run may change to another folder."""
    file, _, name = text.rpartition(":")
    return f"{Path(file).absolute()}:{name}" if file.endswith(".py") else text


def _device(text: str) -> str:
    # argparse also converts the default "auto", but only after --help would have exited.
    return default_device() if text == "auto" else text


def _optional(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    parse.__name__ = getattr(kind, "__name__", "value")  # argparse names the type in its errors
    return parse


def _value_options(name: str, field: FieldInfo) -> dict[str, Any]:
    annotation = field.annotation
    if name == "device":
        return {"type": _device, "default": "auto"}
    if name.endswith("_layer_indices"):
        return {"type": parse_layer_indices}
    if name.endswith("_fn"):
        return {"type": function_path, "metavar": "FILE.py:NAME"}
    if typing.get_origin(annotation) is dict:
        return {"type": parse_arguments, "metavar": "JSON", "default": {}}
    optional = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    if optional:
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is Literal:
        return {"choices": list(typing.get_args(annotation))}
    if typing.get_origin(annotation) is list:
        return {"nargs": "+", "type": typing.get_args(annotation)[0]}
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction if field.default else "store_true"}
    return {"type": _optional(annotation) if optional else annotation}  # type: ignore[arg-type]


def _add_flags(parser: argparse.ArgumentParser, title: str, group: type[BaseModel]) -> None:
    section = parser.add_argument_group(title)
    for name, field in group.model_fields.items():
        if name in _FIELDS_WITHOUT_FLAG:
            continue
        flags = _FLAGS_BY_FIELD.get(name, ("--" + name.replace("_", "-"),))
        options: dict[str, Any] = {
            "dest": _DEST_BY_FIELD.get(name, name),
            "help": (field.description or "").replace("%", "%%"),
        }
        if field.is_required():
            options["required"] = True
        else:
            options["default"] = field.default
        section.add_argument(*flags, **{**options, **_value_options(name, field)})


def _adder(
    *sections: tuple[str, type[BaseModel]],
) -> Callable[[argparse.ArgumentParser], None]:
    def add(parser: argparse.ArgumentParser) -> None:
        for title, group in sections:
            _add_flags(parser, title, group)

    return add


add_model_args = _adder(("model", fields.ModelFields))
add_training_args = _adder(("training", fields.TrainingFields))
add_grpo_args = _adder(("grpo", fields.GrpoFields), ("other loss terms", fields.ExtraLossFields))
add_vllm_args = _adder(("vllm", fields.VllmFields))
add_atropos_args = _adder(("atropos", fields.AtroposFields))
add_wandb_args = _adder(("metrics", fields.WandbFields))
add_mode_args = _adder(("mode", fields.ModeFields))
add_lora_args = _adder(("lora", fields.LoraFields))
add_distributed_args = _adder(("distributed", fields.DistributedFields))
add_debug_args = _adder(("debug", fields.DebugFields))

_COMMON_ARGS = (
    *(add_model_args, add_training_args, add_grpo_args, add_vllm_args, add_atropos_args),
    add_wandb_args,
)


def create_base_parser(description: str) -> CommandParser:
    """Return a parser without flags that shows defaults in its help."""
    return CommandParser(
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
        often=OFTEN_NEEDED,
    )


def create_unified_parser() -> CommandParser:
    """Return the parser of the one-command launcher, without mode, LoRA and cluster flags."""
    parser = create_base_parser("Launch a vLLM engine and train against it with GRPO.")
    for add in (*_COMMON_ARGS, add_debug_args):
        add(parser)
    return parser


def create_full_parser() -> CommandParser:
    """Return the parser with every flag."""
    parser = create_base_parser("Train a language model with GRPO on an Atropos service.")
    for add in (*_COMMON_ARGS, add_mode_args, add_lora_args, add_distributed_args, add_debug_args):
        add(parser)
    return parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the full set of flags, from `sys.argv` when `argv` is None."""
    return create_full_parser().parse_args(argv)


def config_from_args(args: argparse.Namespace, **overrides: Any) -> TrainingConfig:
    """Build the config from parsed flags; `overrides` have precedence over them.

    Raises:
        pydantic.ValidationError: a value is out of bounds, or settings contradict each other.
    """
    given = vars(args)
    values = {
        name: given[dest]
        for name in TrainingConfig.model_fields
        if (dest := _DEST_BY_FIELD.get(name, name)) in given
    }
    return TrainingConfig(**{**values, **overrides})


def describe_errors(error: ValidationError) -> str:
    """Return the message of a validation error, with the flag and value of each problem."""
    lines = []
    for problem in error.errors():
        name = str(problem["loc"][0]) if problem["loc"] else ""
        flag = f"--{name.replace('_', '-')}: " if name else ""
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{flag}{message}" + (f" (got {problem['input']!r})" if name else ""))
    return "; ".join(lines)


def torchrun_settings(environment: Mapping[str, str], *, device: str) -> dict[str, Any]:
    """Return the settings given by torchrun's environment variables, empty outside torchrun.

    A `device` of `cuda` becomes the GPU of the local rank.

    Raises:
        ConfigError: a variable is not an integer.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return {}
    try:
        settings: dict[str, Any] = {
            "trainer_rank": int(environment["RANK"]),
            "world_size": int(environment["WORLD_SIZE"]),
        }
        local_rank = int(environment.get("LOCAL_RANK", "0"))
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers: {error}") from error
    if device == "cuda":
        settings["device"] = f"cuda:{local_rank}"
    return settings


@contextmanager
def require_extra(extra: str) -> Iterator[None]:
    """Context for imports of optional packages; a missing one raises `MissingExtraError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "a package", extra=extra) from error


def run_training(
    parser: argparse.ArgumentParser, make_config: Callable[[], TrainingConfig]
) -> None:
    """Make the config and train.

    Exits with 2 if settings are invalid or torch is missing, with 1 if training fails, and with
    128 + n after signal n. SIGINT and SIGTERM unwind the run, so that every child process ends
    first.
    """
    prepare_command()
    try:
        with require_extra("trainer"):
            config = make_config()
            with collection_paused(freezes=True):
                import torch  # noqa: F401 - reported here if missing, not later

                from example_trainer.model import require_device
        require_built_mode(config)
        require_reference(config)
        require_device(config.device)
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
    # Heavy imports follow the check of the flags.
    with collection_paused(freezes=True):
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
        from transformers.utils.logging import disable_progress_bar

        from example_trainer.trainers import train

    disable_progress_bar()  # one bar per saved file otherwise
    try:
        with _live_view(config) as view:
            train(config, view=view)
    except KeyboardInterrupt:
        logger.info("interrupted%s", _how_to_continue(config))
        sys.exit(128 + signal.SIGINT)
    except SystemExit:  # of `_exit_on_signal`
        logger.info("ended%s", _how_to_continue(config))
        raise
    except AtroposError as error:
        logger.error("%s", error)
        sys.exit(exit_code_of(error))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            logger.error("%s%s", error, _how_to_continue(config))
        else:
            logger.exception("training failed")
        sys.exit(1)


def _how_to_continue(config: TrainingConfig) -> str:
    from example_trainer.api import BatchJournal

    if not BatchJournal.exists(config.save_path):
        return ""
    return "; the same command with --resume continues the run"


def _live_view(config: TrainingConfig) -> contextlib.AbstractContextManager[LiveDisplay | None]:
    """Return the live view on rank 0 if stderr is a terminal and `quiet` is off."""
    from atroposlib.utils.line_stream import can_show
    from example_trainer.run_log import LiveDisplay

    if config.quiet or config.trainer_rank != 0 or not can_show(sys.stderr):
        return contextlib.nullcontext()
    return LiveDisplay(config.model_name, config.training_steps, stream=sys.stderr)


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    # A second signal must not interrupt the cleanup after the first.
    signal.signal(number, signal.SIG_IGN)
    logger.info("received %s, exiting", signal.Signals(number).name)
    sys.exit(128 + number)
