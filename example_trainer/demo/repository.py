"""Where the clone of the repository is, whose environments the demo runs."""

from __future__ import annotations

import sys
from pathlib import Path

from atroposlib.errors import ConfigError

__all__ = ["ENVIRONMENT_DOOR", "REPOSITORY", "require_clone"]

REPOSITORY = Path(__file__).resolve().parents[2]
"""Root of the clone this module lies in."""

ENVIRONMENT_DOOR = (
    Path("environments") / "reasoning_gym_environment" / "reasoning_gym_environment.py"
)
"""Script of the environment the demo runs, relative to `REPOSITORY`."""


def require_clone() -> None:
    """Make `environments` importable.

    Raises:
        ConfigError: The package was installed without the repository around it.
    """
    if not (REPOSITORY / ENVIRONMENT_DOOR).is_file():
        raise ConfigError(
            f"the demo runs {ENVIRONMENT_DOOR} of the repository, and there is none under "
            f"{REPOSITORY}; clone the repository and type `make demo` there"
        )
    if str(REPOSITORY) not in sys.path:
        sys.path.append(str(REPOSITORY))
