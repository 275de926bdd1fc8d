"""Putting an export on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError

__all__ = ["check_repository", "push_to_hub"]


def check_repository(name: str) -> str:
    """Return the name of a repository if the hub could have it; ConfigError otherwise."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--push-to-hub {name}: expected OWNER/NAME ({error})") from error
    return name


def push_to_hub(
    path: Path, repository: str, *, is_public: bool, load: Callable[..., Any] | None = None
) -> None:
    """Upload an export as the split `train`; the account is the one of `hf auth login`.

    Args:
        path: JSONL, Parquet or dataset folder.
        repository: OWNER/NAME; made when missing.
        is_public: whether everybody may read a repository that is made here.
        load: reads the export; `datasets.load_dataset` by default.

    Raises:
        ConfigError: the hub cannot be reached or refuses; the export is unharmed.
    """
    if load is None:
        from datasets import load_dataset

        load = load_dataset
    try:
        load(*_load_arguments(path), split="train").push_to_hub(repository, private=not is_public)
    except Exception as error:  # of three libraries, each with errors of its own
        raise ConfigError(
            f"{path} is written but not on the hub ({type(error).__name__}: {error}); "
            f"when the hub can be reached: hf upload --repo-type dataset {repository} {path}"
        ) from error


def _load_arguments(path: Path) -> tuple[Any, ...]:
    if path.is_dir():
        return (str(path),)
    kind = "parquet" if path.suffix == ".parquet" else "json"
    return (kind, None, None, str(path))
