"""A task in a folder, in the format of Harbor: `task.toml`, `instruction.md`, `environment/`, ...

    NAME/
    ├── task.toml        limits, network, artifacts, variables
    ├── instruction.md   what the agent reads
    ├── environment/     Dockerfile and its files, or files only
    ├── tests/           test.sh and its files, which the agent never sees
    └── solution/        solve.sh and its files, which the agent never sees

Every key of the format is known. A key that cannot be honoured and changes what the task is ends
the load; one that only changes how fast it runs becomes a note. Unknown keys are errors.

Source: Harbor, "Task configuration", version 0.26.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NoReturn, TypeVar, cast

from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.utils.text import near_name
from atroposlib.workspaces.interface import NO_NETWORK, Network

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Artifact", "Task", "find_task_folders", "load_task", "load_tasks", "resolve_variables"]

T = TypeVar("T")
KeyPath = tuple[str | int, ...]

HUB_PREFIX = "hf:"
MEBIBYTE = 2**20
_MOST_SECONDS = 86_400.0
_MOST_MEBIBYTES = 2**20
_MOST_CPUS = 1024
_MAX_TEXT_BYTES = 2**20
_MAX_DEPTH = 64
_MAX_DOTS = 200
"""Dots in a part of a line of TOML that may be a key, whose parts take quadratic time."""
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]{0,299}", re.ASCII)
_MAX_FILES = 100_000
_MAX_ENTRIES = 1000
_VERSIONS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_COMPOSE_FILES = (
    "docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml",
    "singularity-compose.yaml",
)  # fmt: skip
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?\}", re.DOTALL)
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PACKAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
_HOST_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])", re.IGNORECASE)
_SIZE_MEBIBYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}


@dataclass(frozen=True)
class Artifact:
    """A file or folder that the verifier sees."""

    source: str
    """Absolute path in the agent's workspace."""
    exclude: tuple[str, ...] = ()
    """Shell patterns of paths, relative to `source` or to a folder below it, that are left out."""


@dataclass(frozen=True)
class Task:
    """One task; everything that `task.toml` says, with defaults filled in."""

    name: str
    folder: Path
    instruction: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """`[metadata]`: difficulty, category, tags, ..."""
    image: str | None = None
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the environment, `${NAME}` as written; see `resolve_variables`."""
    cpus: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    build_timeout_s: float = 600.0
    agent_timeout_s: float = 600.0
    agent_network: Network = NO_NETWORK
    verifier_timeout_s: float = 600.0
    verifier_network: Network = NO_NETWORK
    verifier_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    is_verifier_separate: bool = True
    """Whether the verifier is spared what the agent changed in system and home folders."""
    artifacts: tuple[Artifact, ...] = ()
    """Empty: what the agent changed."""
    solution_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()
    """Keys without effect here, each with its file, line and reason."""

    @property
    def environment_folder(self) -> Path:
        return self.folder / "environment"

    @property
    def tests_folder(self) -> Path:
        return self.folder / "tests"

    @property
    def solution_folder(self) -> Path:
        return self.folder / "solution"


def load_task(folder: Path) -> Task:
    """Read one task folder.

    Raises:
        ConfigError: the message has the file, the line and what was expected.
    """
    file = folder / "task.toml"
    if not file.is_file():
        raise ConfigError(f"{folder} is not a task: it has no task.toml")
    _check_files(folder)
    document = _Document(file, _read_text(file))
    task = _read_task(document, folder)
    _check_structure(document, task)
    return task


def load_tasks(path: str | Path) -> list[Task]:
    """Read a folder of task folders, by name; or one task folder, or a data set of a hub.

    Args:
        path: a task, a folder of tasks, or a folder of groups of tasks; or `hf:NAME` or
            `hf:NAME@REVISION`, a data set of the Hugging Face hub with one of the three.

    Raises:
        ConfigError: a task cannot be read, two tasks have one name, or there is none.
    """
    root = _from_hub(str(path)) if str(path).startswith(HUB_PREFIX) else Path(path)
    tasks: dict[str, Task] = {}
    for folder in find_task_folders(root):
        task = load_task(folder)
        if task.name in tasks:
            raise ConfigError(
                f"{folder} and {tasks[task.name].folder} are both called {task.name}; names are "
                "those of the folders, or task.name of task.toml, and each needs its own"
            )
        tasks[task.name] = task
    return [tasks[name] for name in sorted(tasks)]


def find_task_folders(root: Path) -> list[Path]:
    """Return the folders with a `task.toml`: `root`, its folders, or those one level below.

    Raises:
        ConfigError: there is none.
    """
    if not root.is_dir():
        raise ConfigError(f"there is no folder {root}; expected a task or a folder of tasks")
    if (root / "task.toml").exists():
        return [root]
    found = []
    for folder in _folders(root):
        if (folder / "task.toml").exists():
            found.append(folder)
        else:
            found += [below for below in _folders(folder) if (below / "task.toml").exists()]
    if not found:
        raise ConfigError(
            f"{root} has no task: expected a folder with task.toml and instruction.md in it, or "
            "one level below (atropos-tasks new NAME writes one)"
        )
    return found


def resolve_variables(
    env: Mapping[str, str], variables: Mapping[str, str], where: str
) -> dict[str, str]:
    """Replace values `${NAME}` and `${NAME:-default}` by variables of the machine.

    Raises:
        ConfigError: a variable is missing and has no default; values are not in the message.
    """
    resolved = {}
    for key, value in env.items():
        named = _VARIABLE.fullmatch(value)
        if named is None:
            resolved[key] = value
        elif named[1] in variables:
            resolved[key] = variables[named[1]]
        elif named[2] is not None:
            resolved[key] = named[2]
        else:
            raise ConfigError(
                f"{where}: {key} needs the variable {named[1]} of this machine, which is not set "
                f"or not released to tasks; set it, and ATROPOS_TASK_VARIABLES={named[1]} (names, "
                "separated by commas)"
            )
    return resolved


def _folders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise MissingExtraError("huggingface_hub", extra="trainer") from None
    repo, _, revision = name[len(HUB_PREFIX) :].partition("@")
    try:
        folder = snapshot_download(repo, repo_type="dataset", revision=revision or None)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"the data set {repo} of the hub cannot be loaded: {reason}; a local folder of tasks "
            "needs no hub"
        ) from error
    return _without_links(Path(folder))


def _without_links(snapshot: Path) -> Path:
    """Return a copy of a snapshot, whose files are links into the cache; made once."""
    copy = snapshot.parents[1] / "atropos_tasks" / snapshot.name
    if not copy.exists():
        try:
            copy.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".copying-", dir=copy.parent) as made:
                shutil.copytree(snapshot, Path(made, snapshot.name))
                Path(made, snapshot.name).rename(copy)
        except OSError as error:
            if not copy.exists():  # another process may have been faster
                raise ConfigError(f"{copy} cannot be written: {error}") from error
    return copy


def _read_text(file: Path) -> str:
    try:
        if file.stat().st_size > _MAX_TEXT_BYTES:
            raise ConfigError(f"{file} is larger than {_MAX_TEXT_BYTES} bytes")
        # A byte order mark, with which Windows programs begin a file, is skipped.
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8: {error}") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None


class _Document:
    """A TOML file, and the line of each of its keys."""

    def __init__(self, file: Path, text: str) -> None:
        self.file = file
        self.notes: list[str] = []
        for number, row in enumerate(text.split("\n"), start=1):
            if row.count(".") > _MAX_DOTS and max(p.count(".") for p in row.split("=")) > _MAX_DOTS:
                raise ConfigError(f"{file}:{number}: expected keys of up to {_MAX_DEPTH} parts")
        try:
            self.data: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            found = re.search(r"\(at line (\d+), column \d+\)", str(error))
            line = found[1] if found else str(text.count("\n") + 1)
            reason = str(error).partition(" (at ")[0]
            raise ConfigError(f"{file}:{line}: not valid TOML: {reason}") from None
        except (RecursionError, ValueError):
            raise ConfigError(
                f"{file}: not read: expected up to {_MAX_DEPTH} tables and arrays within each "
                "other, and integers of 64 bits"
            ) from None
        if _depth(self.data) > _MAX_DEPTH:
            raise ConfigError(
                f"{file}: expected up to {_MAX_DEPTH} tables and arrays within each other"
            )
        self._lines = key_lines(text)

    def where(self, path: KeyPath) -> str:
        known = next(
            (self._lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self._lines), 1
        )
        return f"{self.file}:{known}: {_dotted(path)}"

    def refuse(self, path: KeyPath, message: str) -> NoReturn:
        raise ConfigError(f"{self.where(path)}: {message}") from None

    def note(self, path: KeyPath, message: str) -> None:
        self.notes.append(f"{self.where(path)}: {message}")


def _depth(value: Any) -> int:
    """Return how many tables and arrays are within each other."""
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [v.values() if isinstance(v, dict) else v for v in level]
        level = [each for values in inner for each in values if isinstance(each, (dict, list))]
    return depth


def _dotted(path: KeyPath) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")


_LEXEME = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |(?P<string>\"{3}(?:\\.|[^\\])*?\"{3,5}|'{3}.*?'{3,5}|\"(?:\\.|[^\"\\\n])*\"|'[^'\n]*')
    |(?P<open>[\[{]) | (?P<close>[\]}]) | (?P<newline>\n) | (?P<equals>=)
    |(?P<bare>[A-Za-z0-9_-]+) | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


def key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line of each key of valid TOML, by its path; arrays of tables count from 0.

    Keys within inline tables and arrays are left out: their line is that of the outer key.
    """
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    num_tables: dict[KeyPath, int] = {}
    for line, statement in _statements(text):
        words = [word for kind, word in statement if kind in ("bare", "string")]
        if statement[0][0] == "open":
            is_array = len(statement) > 1 and statement[1] == ("open", "[")
            table = _innermost(tuple(map(_unquoted, words)), num_tables, enter_last=not is_array)
            if is_array:
                index = num_tables.get(table, -1) + 1
                num_tables[table] = index
                lines.setdefault(table, line)
                table = (*table, index)
            lines.setdefault(table, line)
            continue
        is_key = True
        path = table
        for kind, word in statement:
            if kind == "equals":
                is_key = False
            elif is_key and kind in ("bare", "string"):
                path = (*path, _unquoted(word))
                lines.setdefault(path, line)
    return lines


def _statements(text: str) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    """Yield each header or assignment with its first line."""
    line, depth, first = 1, 0, 1
    statement: list[tuple[str, str]] = []
    for found in _LEXEME.finditer(text):
        kind, word = cast(str, found.lastgroup), found[0]
        if kind == "newline" and not depth and statement:
            yield first, statement
            statement = []
        elif kind not in ("comment", "newline") and not word.isspace():
            if not statement:
                first = line
            statement.append((kind, word))
            depth += (kind == "open") - (kind == "close")
        line += word.count("\n")
    if statement:
        yield first, statement


def _unquoted(word: str) -> str:
    return word[1:-1] if word[0] in "\"'" else word


def _innermost(
    path: tuple[str, ...], num_tables: Mapping[KeyPath, int], *, enter_last: bool
) -> KeyPath:
    """Return a path of a header with the index of the current entry of each array of tables."""
    found: KeyPath = ()
    for n, part in enumerate(path):
        found = (*found, part)
        if found in num_tables and (enter_last or n < len(path) - 1):
            found = (*found, num_tables[found])
    return found


class _Table:
    """One table of the document; `close` refuses the keys that were not asked for."""

    def __init__(self, document: _Document, data: Mapping[str, Any], path: KeyPath = ()) -> None:
        self.document = document
        self.data = data
        self.path = path
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def get(self, key: str, convert: Callable[[Any], T]) -> T | None:
        """Return a converted value; None if the key is absent."""
        self._known.append(key)
        if key not in self.data:
            return None
        try:
            return convert(self.data[key])
        except ValueError as error:
            self.refuse(key, str(error))

    def refuse(self, key: str, message: str) -> NoReturn:
        self.document.refuse((*self.path, key), message)

    def unsupported(self, key: str, reason: str, *, is_harmless: Any = None) -> None:
        """Refuse a key that changes what the task is, unless it has the harmless value."""
        self._known.append(key)
        if key in self.data and self.data[key] not in (is_harmless, [], {}):
            self.refuse(key, f"not supported: {reason}")

    def without_effect(self, key: str, convert: Callable[[Any], T], reason: str) -> T | None:
        """Check a key that changes how a task runs, and note that it has no effect here."""
        value = self.get(key, convert)
        if value is not None:
            self.document.note((*self.path, key), f"without effect: {reason}")
        return value

    def table(self, key: str) -> _Table:
        """Return a table; an empty one if it is absent."""
        data = self.get(key, _mapping) or {}
        return _Table(self.document, data, (*self.path, key))

    def close(self) -> None:
        for key in self.data:
            if key not in self._known:
                hint = near_name(key, self._known) or f"; known: {', '.join(sorted(self._known))}"
                self.refuse(key, f"unknown key{hint}")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a table, got {_shown(value)}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"expected a string, got {_shown(value)}")
    return value


def _image(value: Any) -> str:
    """Return the name of an image; an option of a container engine is refused."""
    if _IMAGE.fullmatch(_text(value)) is None:
        raise ValueError(f"expected the name of an image, got {_shown(value)}")
    return str(value)


def _text_in(value: Any) -> str:
    if not _text(value).strip():
        raise ValueError("expected a string that is not empty")
    return str(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {_shown(value)}")
    return value


def _list_of(convert: Callable[[Any], T]) -> Callable[[Any], list[T]]:
    def convert_all(value: Any) -> list[T]:
        if not isinstance(value, list) or len(value) > _MAX_ENTRIES:
            raise ValueError(
                f"expected a list of up to {_MAX_ENTRIES} entries, got {_shown(value)}"
            )
        return [convert(entry) for entry in value]

    return convert_all


def _number(least: float, most: float, unit: str, *, is_open: bool = False) -> Any:
    """Return a converter of finite numbers; `is_open` excludes the lower bound."""

    def convert(value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and least <= value <= most and math.isfinite(value)) or (
            is_open and value == least
        ):
            lower = f"above {least:g}" if is_open else f"from {least:g}"
            raise ValueError(f"expected {unit} {lower} to {most:g}, got {_shown(value)}")
        return float(value)

    return convert


_seconds = _number(0, _MOST_SECONDS, "seconds", is_open=True)
_cpus = _number(0, _MOST_CPUS, "a number of CPUs", is_open=True)


def _integer(least: int, most: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"expected an integer from {least} to {most}, got {_shown(value)}")
        return value

    return convert


_mebibytes = _integer(1, _MOST_MEBIBYTES)


def _old_size(value: Any) -> int:
    found = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    size = float(found[1]) * _SIZE_MEBIBYTES[found[2].upper()] if found else 0.0
    if not 1 <= size <= _MOST_MEBIBYTES:
        raise ValueError(f"expected a size such as '2G' or '512M', got {_shown(value)}")
    return int(size)


def _variables(value: Any) -> dict[str, str]:
    env = _mapping(value)
    for key, text in env.items():
        if not _VARIABLE_NAME.fullmatch(key):
            raise ValueError(f"expected names of variables, got {_shown(key)}")
        if not isinstance(text, str) or "\0" in text:
            # The value may be a secret.
            raise ValueError(f"expected a string for {key}, got {type(text).__name__}")
    return env


def _user(value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError(f"expected the name or number of a user, got {_shown(value)}")
    return value


def _absolute(value: Any) -> str:
    path = PurePosixPath(_text(value))
    if not path.is_absolute() or ".." in path.parts:
        raise ValueError(f"expected an absolute path without '..', got {_shown(value)}")
    return f"/{str(path).lstrip('/')}"  # of two slashes at the start, POSIX keeps both


def _choice(*choices: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            hint = near_name(str(value), choices)
            raise ValueError(f"expected {' or '.join(choices)}, got {_shown(value)}{hint}")
        return value

    return convert


def _host(value: Any) -> str:
    """Return a host name, `*.name`, IP address or CIDR range in normal form."""
    host = _text(value).strip().lower().rstrip(".")
    try:
        return str(ipaddress.ip_network(host) if "/" in host else ipaddress.ip_address(host))
    except ValueError:
        labels = host.removeprefix("*.").split(".")
        # A last label of digits is a malformed address, never a name.
        if all(map(_HOST_LABEL.fullmatch, labels)) and not labels[-1].isdigit():
            return host
    raise ValueError(
        f"expected host names, *.NAME, IP addresses or ranges, without scheme, port and path; "
        f"got {_shown(value)}"
    )


def _read_task(document: _Document, folder: Path) -> Task:
    root = _Table(document, document.data)
    _read_versions(root)
    name = _read_package(root.table("task"))
    metadata = root.get("metadata", _mapping) or {}
    root.get("source", _text)
    root.unsupported("steps", "a task has one instruction here; make each step a task")
    root.unsupported("multi_step_reward_strategy", "a task has one instruction here")
    artifacts = _read_artifacts(root)
    environment = root.table("environment")
    resources = _read_environment(environment)
    baseline = _read_network(environment) or _old_network(environment) or Network("public")
    environment.close()
    agent = root.table("agent")
    agent_timeout_s = agent.get("timeout_sec", _seconds)
    agent.without_effect("user", _user, "all programs of a task run as one unprivileged user")
    agent_network = _read_network(agent) or baseline
    agent.close()
    verifier = _read_verifier(root.table("verifier"), baseline)
    solution = root.table("solution")
    solution_env = solution.get("env", _variables) or {}
    solution.close()
    root.close()
    return Task(
        name=name or folder.resolve().name,
        folder=folder,
        instruction=_read_instruction(folder / "instruction.md"),
        metadata=metadata,
        agent_timeout_s=agent_timeout_s or Task.agent_timeout_s,
        agent_network=agent_network,
        artifacts=artifacts,
        solution_env=solution_env,
        notes=tuple(document.notes),
        **resources,
        **verifier,
    )


def _read_versions(root: _Table) -> None:
    for key in ("schema_version", "version"):
        version = root.get(key, _text)
        if version is not None and version not in _VERSIONS:
            root.refuse(
                key, f"expected a version of the format from 1.0 to 1.4, got {_shown(version)}"
            )


def _read_package(table: _Table) -> str | None:
    name = table.get("name", _text)
    if name is not None and (not _PACKAGE_NAME.fullmatch(name) or ".." in name):
        table.refuse("name", f"expected ORGANIZATION/NAME, got {_shown(name)}")
    if table.data and name is None:
        table.document.refuse(table.path, "name is missing; expected ORGANIZATION/NAME")
    table.get("version", _text_in)
    table.get("description", _text)
    table.get("authors", _list_of(_mapping))
    table.get("keywords", _list_of(_text))
    table.close()
    return name


def _read_environment(table: _Table) -> dict[str, Any]:
    _read_os(table)
    for key, reason in (
        ("tpu", "workspaces have no accelerator"),
        ("mcp_servers", "give the servers to the agent in its command"),
        ("healthcheck", "a workspace has no service that starts with it; start it in test.sh"),
    ):
        table.unsupported(key, reason)
    table.unsupported("gpus", "workspaces have no accelerator", is_harmless=0)
    table.without_effect("gpu_types", _list_of(_text), "workspaces have no accelerator")
    table.without_effect("skills_dir", _text, "give the folder to the agent in its command")
    return {
        "image": table.get("docker_image", _image),
        "workdir": table.get("workdir", _absolute),
        "env": table.get("env", _variables) or {},
        "build_timeout_s": table.get("build_timeout_sec", _seconds) or Task.build_timeout_s,
        **_read_resources(table),
    }


def _read_os(table: _Table) -> None:
    system = table.get("os", lambda value: _choice("linux", "windows")(_text(value).lower()))
    if system == "windows":
        table.refuse("os", "not supported: workspaces run Linux")


def _read_resources(table: _Table) -> dict[str, Any]:
    memory = _read_size(table, "memory_mb", "memory")
    storage = _read_size(table, "storage_mb", "storage")
    return {
        "cpus": table.get("cpus", _cpus),
        "memory_bytes": None if memory is None else memory * MEBIBYTE,
        "disk_bytes": None if storage is None else storage * MEBIBYTE,
    }


def _read_size(table: _Table, key: str, old_key: str) -> int | None:
    size, old = table.get(key, _mebibytes), table.get(old_key, _old_size)
    if size is not None and old is not None and size != old:
        table.refuse(old_key, f"differs from {key} = {size}; remove {old_key}, the older key")
    return old if size is None else size


def _read_network(table: _Table) -> Network | None:
    """Return the network that a table names; None if it names none."""
    mode = table.get("network_mode", _choice("no-network", "public", "allowlist"))
    hosts = table.get("allowed_hosts", _list_of(_host))
    if mode is None and not hosts:
        return None
    if hosts and mode != "allowlist":
        table.refuse("allowed_hosts", 'only with network_mode = "allowlist"')
    name = cast(Literal["public", "allowlist"], mode)
    return NO_NETWORK if mode == "no-network" else Network(name, tuple(hosts or ()))


def _old_network(table: _Table) -> Network | None:
    is_allowed = table.get("allow_internet", _flag)
    return None if is_allowed is None else Network("public") if is_allowed else NO_NETWORK


def _read_verifier(table: _Table, baseline: Network) -> dict[str, Any]:
    timeout_s = table.get("timeout_sec", _seconds)
    env = table.get("env", _variables) or {}
    table.without_effect("user", _user, "all programs of a task run as one unprivileged user")
    table.unsupported("collect", "a workspace is one machine; write the files in the task")
    mode = table.get("environment_mode", _choice("shared", "separate"))
    own = table.table("environment")
    if "environment" in table and mode == "shared":
        table.refuse("environment", 'only with environment_mode = "separate"')
    own.unsupported("docker_image", "the verifier runs in a second copy of the environment")
    own_env = _read_environment(own)["env"]
    limits = ("cpus", "memory_mb", "memory", "storage_mb", "storage")
    for key in ("workdir", "build_timeout_sec", *limits):
        if key in own:
            table.document.note((*own.path, key), "without effect: the agent's values are used")
    network = _read_network(own) or _old_network(own) or baseline
    network = _read_network(table) or network
    own.close()
    table.close()
    return {
        "verifier_timeout_s": timeout_s or Task.verifier_timeout_s,
        "verifier_network": network,
        "verifier_env": {**own_env, **env},
        "is_verifier_separate": mode != "shared",
    }


def _read_artifacts(root: _Table) -> tuple[Artifact, ...]:
    entries = root.get("artifacts", _list_of(lambda value: value)) or []
    return tuple(_read_artifact(root.document, n, entry) for n, entry in enumerate(entries))


def _read_artifact(document: _Document, number: int, entry: Any) -> Artifact:
    path: KeyPath = ("artifacts", number)
    if not isinstance(entry, (str, dict)):
        document.refuse(path, f"expected a path or a table with source, got {_shown(entry)}")
    table = _Table(document, {"source": entry} if isinstance(entry, str) else entry, path)
    source = table.get("source", _absolute)
    if source is None:
        document.refuse(path, "source is missing; expected an absolute path")
    if source == "/":
        table.refuse("source", "expected a file or folder below /")
    exclude = table.get("exclude", _list_of(_text_in)) or []
    table.get("destination", _text)  # the place among the logs of Harbor
    table.unsupported("service", "a workspace is one machine", is_harmless="main")
    table.close()
    return Artifact(source, tuple(exclude))


def _read_instruction(file: Path) -> str:
    """Return the text without the canary lines at its start, which mark it for crawlers."""
    if not file.is_file():
        raise ConfigError(f"{file} is missing; it holds the text that the agent reads")
    lines = _read_text(file).split("\n")
    while lines and (_CANARY.fullmatch(lines[0].strip()) or not lines[0].strip()):
        lines.pop(0)
    if not lines:
        raise ConfigError(f"{file} is empty; it holds the text that the agent reads")
    return "\n".join(lines)


def _check_structure(document: _Document, task: Task) -> None:
    folder = task.folder
    if task.image is None and not task.environment_folder.is_dir():
        raise ConfigError(
            f"{task.environment_folder} is missing; expected a Dockerfile and its files, files "
            "that are copied to the working directory, or environment.docker_image in task.toml"
        )
    for name in _COMPOSE_FILES:
        if (task.environment_folder / name).exists():
            raise ConfigError(
                f"{task.environment_folder / name} is not supported: a workspace is one machine; "
                "describe it by a Dockerfile"
            )
    if (folder / "trajectory.json").exists():
        raise ConfigError(
            f"{folder / 'trajectory.json'} is not supported: agents start without turns"
        )
    test = task.tests_folder / "test.sh"
    if not test.is_file():
        raise ConfigError(f"{test} is missing; it verifies the result and writes the reward")
    mode = document.data.get("verifier", {})
    if "environment" in mode or mode.get("environment_mode") == "separate":
        for name in ("Dockerfile", "docker-compose.yaml"):
            if (task.tests_folder / name).exists():
                raise ConfigError(
                    f"{task.tests_folder / name} is not supported: the verifier runs in a second "
                    "copy of the task's environment"
                )


def _check_files(folder: Path) -> None:
    """Refuse links that lead out of their folder, special files, and too many files."""
    num_files = 0
    for part in ("task.toml", "instruction.md", "environment", "tests", "solution"):
        top = folder / part
        if top.is_symlink():
            raise ConfigError(f"{top} is a link; expected a file or folder of the task")
        root = top.resolve()
        for parent, folders, files in os.walk(top):
            for name in (*folders, *files):
                _check_file(Path(parent, name), root)
            num_files += len(folders) + len(files)
            if num_files > _MAX_FILES:
                raise ConfigError(f"{folder} has more than {_MAX_FILES} files; use an image")


def _check_file(path: Path, root: Path) -> None:
    if path.is_symlink():
        try:
            target = path.resolve()
        except (OSError, RuntimeError):  # up to Python 3.12
            target = path
        if target.is_symlink():
            raise ConfigError(f"{path} is a link that leads to itself")
        if not target.is_relative_to(root):
            raise ConfigError(
                f"{path} is a link that leads out of {root.name}/; copy the file in its place"
            )
    elif not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{path} is neither a file nor a folder")


def shown_limits(task: Task) -> Sequence[str]:
    """Return the limits of a task, one text each, for people."""
    network = {"none": "no network", "public": "public network"}.get(
        task.agent_network.mode, f"network: {', '.join(task.agent_network.allowed_hosts)}"
    )
    sizes = ((task.memory_bytes, "memory"), (task.disk_bytes, "disk"))
    return [
        f"agent {task.agent_timeout_s:g} s",
        f"verifier {task.verifier_timeout_s:g} s",
        *(f"{size // MEBIBYTE} MiB {name}" for size, name in sizes if size),
        network,
    ]
