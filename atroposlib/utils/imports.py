"""Python objects that a setting names: `FILE.py:NAME` or `MODULE:NAME`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from atroposlib.errors import AtroposError, ConfigError
from atroposlib.utils.text import near_name

__all__ = ["described", "import_function", "import_object", "import_script"]


def import_script(path: Path) -> ModuleType:
    """Import a script under its own name, so that worker processes can import it too.

    Its folder becomes importable. Errors of the script itself are not caught.

    Raises:
        ConfigError: there is no such file, or it is not a Python file.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _own_script(path: Path) -> ModuleType:
    """Return the module of a script, which several settings may name, imported once."""
    present = sys.modules.get(path.stem)
    if present is not None and getattr(present, "__file__", None) == str(path):
        return present
    if path.stem in sys.stdlib_module_names or hasattr(present, "__path__"):
        raise ConfigError(
            f"{path} has the name of the module {path.stem}, which other code imports; rename it"
        )
    try:
        return import_script(path)
    except Exception:
        sys.modules.pop(path.stem, None)
        raise


def import_object(target: str) -> Any:
    """Return the object that `FILE.py:NAME` or `MODULE:NAME` names.

    Raises:
        ConfigError: the text has another form, or there is no such file, module or name.
    """
    start, _, name = target.rpartition(":")
    if not start or not name.isidentifier():
        raise ConfigError(f"{target!r}: expected FILE.py:NAME or MODULE:NAME")
    if start.endswith(".py"):
        module = _own_script(Path(start).absolute())
    else:
        try:
            module = importlib.import_module(start)
        except ModuleNotFoundError as error:
            raise ConfigError(f"{target!r}: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{start} has no {name!r}{near_name(name, vars(module))}")
    return getattr(module, name)


def described(error: BaseException, target: str) -> str:
    """Return type, line and message of an error in the code that `target` names.

    The line is the last one in the user's own file, whatever function it calls.
    """
    start = target.rpartition(":")[0]
    stem = start.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.lineno for frame in frames if Path(frame.filename).stem == stem]
    line = error.lineno if isinstance(error, SyntaxError) else own[-1] if own else None
    where = "" if line is None else f" in line {line}"
    return f"{type(error).__name__}{where}: {error}"


def import_function(target: str, arguments: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return the function that `target` names, with the `arguments` that follow its first one.

    Raises:
        ConfigError: there is none, importing it fails, or it does not take these arguments.
    """
    try:
        function = import_object(target)
    except AtroposError:
        raise
    except (Exception, SystemExit) as error:  # a script may end the program
        raise ConfigError(f"{target}: {described(error, target)}") from error
    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"{target} is not a function")
    try:
        inspect.signature(function).bind(None, **arguments)
    # ValueError: some built-in functions have no signature.
    except (TypeError, ValueError) as error:
        names = ", ".join(arguments) or "none"
        raise ConfigError(
            f"{target}: {error}; it is called with one value and the arguments: {names}"
        ) from error
    return partial(function, **arguments)
