"""Secrets of run files: references instead of values, which are known to one process only.

    run.yaml: `${NAME}` ─► Part.secrets ─► placement ─► variable NAME of the part's process
    settings file: `${NAME}` ─► this program ─► file without a name ─► environment

A value that looks like a secret is refused when the run file is read: the file, the objects of
Kubernetes and the output of `--dry-run` are seen by others. References are possible in `variables`,
and in an environment's `settings` under keys that the environment masks in its logs and files.

`python -m example_trainer.cluster.run_secrets FILE WORD...` runs Python with the words, in which
FILE is replaced by a copy with the values.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from atroposlib.errors import ConfigError
from atroposlib.utils.command_parser import end_command
from atroposlib.utils.text import MASK, hide_secrets, mask_secrets
from atroposlib.utils.yaml_text import read_yaml

REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
SHORTEST_MASKED = 6
"""Shorter values are not masked in texts: they would occur by chance."""
MAX_VALUES = 200_000
MAX_DEPTH = 50
PROGRAM = "example_trainer.cluster.run_secrets"
_SECRET_KEY = re.compile(
    r"((api|private|access|secret)_?keys?|secrets?|passw(or)?ds?|passphrase|^pwd|authorization"
    r"|credentials?|^bearer|(access|auth|hf|hub|api|bearer|bot|refresh|session)_tokens?|^token)"
    r"(_\d+)?$",
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile(
    r"((^|_)(KEY|TOKEN|SECRETS?|AUTH)|_PWD|API_?KEYS?|PASSW(OR)?DS?|PGPASS|PASSPHRASE|CREDENTIALS?)"
    r"(_(\d+|[A-Z]))?$",
    re.IGNORECASE,
)
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ASSIGNED = re.compile(
    r"\b(\w*(?:API_?KEY|ACCESS_KEY|TOKEN|SECRET|PASSW(?:OR)?D))=(?![\"']?(?:[$/~<]|\d+\b|[\"']|\s|$))"
)
"""A shell's assignment of a value, and not of a variable, a file or a number."""
_FORMATS = re.compile(
    r"\bsk-[\w-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bglpat-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}|\bA[KS]IA[0-9A-Z]{16}\b|\bAIza[\w-]{30,}"
    r"|(?<=\bBearer )[\w.~+/=-]{8,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
"""Keys of well-known services, wherever they are."""
_PLACEHOLDERS = frozenset({"", "none", "null", "empty", "dummy", "unused", "x", "not-needed", MASK})
_NAMES_OF_SECRETS = frozenset(
    {("kubernetes", "token_secret"), ("kubernetes", "pull_secret"), ("service", "tokens")}
)
"""Keys of the run file whose values are names."""

Place = tuple[str | int, ...]


def check_secrets(content: Any) -> None:
    """Raise `ValueError` for the first secret, or misplaced reference, in a parsed run file."""
    for place, value in _leaves(content):
        if place[:2] in _NAMES_OF_SECRETS:
            continue
        problem = _problem(place, value)
        if problem:
            raise ValueError(f"{_shown(place)}: {problem}")


def reference_in(value: object) -> str | None:
    """Return the name in `${NAME}`; None for any other value."""
    found = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    return found[1] if found else None


def references_of(settings: Any) -> list[str]:
    """Return the names of all references in nested settings, each once."""
    names = (reference_in(value) for _, value in _leaves(settings))
    return list(dict.fromkeys(name for name in names if name is not None))


def hide_values(text: str, values: Collection[str]) -> str:
    """Return a text with known secrets, and with keys of well-known services, masked."""
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= SHORTEST_MASKED:
            text = text.replace(value, MASK)
    return _FORMATS.sub(MASK, hide_secrets(text))


def fill(settings: Any, values: Mapping[str, str]) -> Any:
    """Return a copy of nested settings with values in place of references.

    Raises:
        ConfigError: A reference has no value.
    """
    if isinstance(settings, Mapping):
        return {key: fill(value, values) for key, value in settings.items()}
    if isinstance(settings, list):
        return [fill(value, values) for value in settings]
    name = reference_in(settings)
    if name is None:
        return settings
    if not values.get(name):
        raise ConfigError(f"${{{name}}}: the variable {name} is not set; export it")
    return values[name]


def _leaves(content: Any) -> Iterator[tuple[Place, Any]]:
    """Yield the values that are neither mappings nor lists, with their places.

    Raises:
        ValueError: There are more than `MAX_VALUES`, as in a file whose aliases multiply.
    """
    waiting: list[tuple[Place, Any]] = [((), content)]
    for _ in range(MAX_VALUES):
        if not waiting:
            return
        place, value = waiting.pop()
        pairs: list[tuple[str | int, Any]] = []
        if isinstance(value, Mapping):
            pairs = [(str(key), each) for key, each in value.items()]
        elif isinstance(value, list | tuple):
            pairs = list(enumerate(value))
        else:
            yield place, value
        waiting += [((*place, key), each) for key, each in reversed(pairs)]
        if len(place) > MAX_DEPTH:
            raise ValueError(f"{_shown(place[:3])}: more than {MAX_DEPTH} levels of keys and lists")
    raise ValueError(f"more than {MAX_VALUES} values; expected a run file")


def _problem(place: Place, value: Any) -> str:
    """Return why a value may not be there; empty if it may."""
    section, keys = _section(place), [key for key in place if isinstance(key, str)]
    if (name := reference_in(value)) is not None:
        return _misplaced(section, keys, name)
    if value is None or isinstance(value, bool) or str(value).lower() in _PLACEHOLDERS:
        return ""
    text = str(value)
    if section == "variables" and "${" in text:
        return "expected ${NAME} as the whole value; nothing else is replaced"
    is_secret = any(_is_secret_key(key, section) for key in keys)
    if is_secret or hide_secrets(text) != text or _FORMATS.search(text):
        return f"looks like a secret; {_REMEDY}"
    if section in ("slurm", "flags") and (found := _ASSIGNED.search(text)):
        return f"assigns a secret to {found[1]}; {_REMEDY}"
    return ""


_REMEDY = (
    "expected ${NAME} in variables, or in settings of an environment, where NAME is a variable of "
    "atropos-up or a key of kubernetes.token_secret"
)


def _section(place: Place) -> str:
    """Return the kind of place: variables, flags, settings, or the section of the file."""
    kinds = ("variables", "flags", "settings")
    return next((str(key) for key in place[:3] if key in kinds), str(place[0]) if place else "")


def _misplaced(section: str, keys: Sequence[str], name: str) -> str:
    if section == "variables":
        return ""
    if section != "settings":
        return f"${{{name}}} is possible in variables, or in settings of an environment"
    if any(mask_secrets({key: name})[key] == MASK for key in keys):
        return ""
    return (
        f"an environment masks values of keys such as api_key and password, but not of "
        f"{keys[-1]!r}; set a variable to ${{{name}}} instead"
    )


def _is_secret_key(key: str, section: str) -> bool:
    pattern = _SECRET_VARIABLE if section == "variables" else _SECRET_KEY
    name = _CAPITAL.sub("_", key.rpartition(".")[2].replace("-", "_"))
    return pattern.search(name) is not None


def _shown(place: Place) -> str:
    keys = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in place)
    return "".join(keys).lstrip(".")


def main(argv: Sequence[str] | None = None) -> None:
    """Replace this process by Python with a filled copy of the settings file."""
    file, *words = sys.argv[1:] if argv is None else argv
    try:
        settings = read_yaml(Path(file).read_text(encoding="utf-8"))
        filled = yaml.safe_dump(fill(settings, os.environ), sort_keys=False)
    except ConfigError as error:
        end_command(PROGRAM, error, code=2)
    except (OSError, ValueError, yaml.YAMLError) as error:
        end_command(PROGRAM, f"{file} cannot be read: {type(error).__name__}", code=2)
    place = f"/dev/fd/{_nameless_file(filled.encode())}"
    words = [place if word == file else word for word in words]
    os.execv(sys.executable, [sys.executable, *words])


def _nameless_file(content: bytes) -> int:
    """Return a descriptor, which child processes inherit, of a file that has no name."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("settings", 0)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
        os.set_inheritable(descriptor, True)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


if __name__ == "__main__":
    main()
