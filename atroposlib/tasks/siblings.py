"""Import of one environment file by another in the same folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["sibling_imports"]


@contextmanager
def sibling_imports(file: str, folder: str = "") -> Iterator[None]:
    """Make the Python files next to a program importable by their bare names.

    A file of `environments/` is a module of the repository, and a program that runs from anywhere.
    It imports the environment that it extends like this:

        if TYPE_CHECKING or __package__:
            from environments.gsm8k_server import GSM8kEnv
        else:
            with sibling_imports(__file__):
                from gsm8k_server import GSM8kEnv

    Args:
        file: `__file__` of the program.
        folder: folder searched first, relative to that of the program.

    Raises:
        SystemExit: the file is missing.
    """
    path = Path(file).resolve()
    places = [path.parent / folder, path.parent]
    sys.path += [str(place) for place in places if str(place) not in sys.path]
    try:
        yield
    except ModuleNotFoundError as error:
        wanted = f"{error.name}.py"
        if any((place / wanted).is_file() for place in places):
            raise
        raise SystemExit(
            f"{path.name}: error: it extends {wanted} of the repository; copy that file to "
            f"{path.parent} as well"
        ) from error
