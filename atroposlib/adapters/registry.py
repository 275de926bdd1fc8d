"""The kinds of adapters: where each is implemented and which package it needs.

    KIND:NAME ─► KINDS[KIND] ─► is the package installed, in a supported version? ─► Adapter

Modules of adapters are imported on use, so that one missing package affects one kind only.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import ValidationError

from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.utils.cli import refused_values
from atroposlib.utils.text import near_name

if TYPE_CHECKING:  # programs that only need the names of the kinds do not import environments
    from atroposlib.adapters.interface import Adapter, AdapterArgs

__all__ = ["KINDS", "Kind", "adapter_class", "make_adapter", "read_args", "split_spec"]


@dataclass(frozen=True)
class Kind:
    """One kind of adapters."""

    summary: str
    """Description of the adapted task sets, in a few words."""
    target: str
    """Module and class, as `module:Class`."""
    names: str
    """Meaning of NAME, with an example."""
    extra: str | None = None
    """Extra of this package that installs what the kind needs; None: the core is enough."""
    package: str | None = None
    """Distribution that must be installed, if any."""
    versions: str = ""
    """Supported versions of it, as in `>=0.4,<0.5`."""


PAGES = "atroposlib.adapters"
KINDS: dict[str, Kind] = {
    "dataset": Kind(
        "data sets of files or of the hub, with reward functions by name",
        f"{PAGES}.dataset:DatasetAdapter",
        "a file, a folder or a name on the hub, such as tasks.jsonl or openai/gsm8k",
    ),
    "gem": Kind(
        "games of GEM",
        f"{PAGES}.gem:GemAdapter",
        "an environment id, such as game:GuessTheNumber-v0-easy",
        extra="gem",
        package="gem-llm",
        versions=">=0.1,<0.2",
    ),
    "gymnasium": Kind(
        "Gymnasium environments with discrete or text actions",
        f"{PAGES}.gymnasium:GymnasiumAdapter",
        "an environment id, such as FrozenLake-v1",
        extra="gymnasium",
        package="gymnasium",
        versions=">=1.0,<2",
    ),
    "inspect_ai": Kind(
        "tasks of Inspect, with their solvers and scorers",
        f"{PAGES}.inspect_ai:InspectAdapter",
        "a task as `inspect eval` takes it, such as inspect_evals/gsm8k or file.py@task",
        extra="inspect_ai",
        package="inspect-ai",
        versions=">=0.3.250,<0.4",
    ),
    "mcp": Kind(
        "the tools of MCP servers, for the tasks of a file",
        f"{PAGES}.mcp:McpAdapter",
        "a file of tasks, such as tasks.jsonl",
        extra="mcp",
        package="mcp",
        versions=">=2.3,<3",
    ),
    "nemo-gym": Kind(
        "resource servers of NeMo Gym, with tasks from a file",
        f"{PAGES}.nemo_gym:NemoGymAdapter",
        "the URL of a running resource server, such as http://127.0.0.1:8000",
    ),
    "openenv": Kind(
        "environments that an OpenEnv server serves",
        f"{PAGES}.openenv:OpenEnvAdapter",
        "the URL of a running server, such as http://127.0.0.1:8000",
        extra="openenv",
        package="openenv",
        versions=">=0.10,<0.11",
    ),
    "ors": Kind(
        "environments that a server of the Open Reward Standard serves",
        f"{PAGES}.ors:OrsAdapter",
        "URL or URL#ENVIRONMENT of a running server, such as http://127.0.0.1:8080#wordle",
        extra="ors",
        package="openreward",
        versions=">=0.1.157,<0.2",
    ),
    "reasoning-gym": Kind(
        "tasks of reasoning-gym, mixtures and curricula",
        f"{PAGES}.reasoning_gym:ReasoningGymAdapter",
        "a task, several joined by +, or all, such as chain_sum+leg_counting",
        extra="reasoning-gym",
        package="reasoning-gym",
        versions=">=0.1.20,<0.2",
    ),
    "tasks": Kind(
        "tasks in folders, worked on by agents left as they are",
        f"{PAGES}.tasks:TasksAdapter",
        "a folder of tasks, such as environments/agent_tasks/tasks, or hf:NAME of the hub",
    ),
    "textarena": Kind(
        "games of TextArena, against a random or a model opponent",
        f"{PAGES}.textarena:TextArenaAdapter",
        "a game id, such as GuessTheNumber-v0 or TicTacToe-v0",
        extra="textarena",
        package="textarena",
        versions=">=0.7,<0.8",
    ),
    "textworld": Kind(
        "text adventures of TextWorld",
        f"{PAGES}.textworld:TextWorldAdapter",
        "a challenge, several joined by +, or a game file, such as tw-simple",
        extra="textworld",
        package="textworld",
        versions=">=1.7,<2",
    ),
    "verifiers": Kind(
        "environments for verifiers, with their tools, loop and rubric",
        f"{PAGES}.verifiers:VerifiersAdapter",
        "an installed package, as verifiers names it, such as wordle or owner/wordle",
        extra="verifiers",
        package="verifiers",
        versions=">=0.1.9,!=0.2.*,!=0.3.*,<0.5",
    ),
}
"""Every kind, by the word before the colon."""


def split_spec(spec: str) -> tuple[str, str]:
    """Split `KIND:NAME`.

    Raises:
        ConfigError: the kind is unknown, or a part is missing.
    """
    kind, colon, name = spec.partition(":")
    if kind not in KINDS:
        raise ConfigError(
            f"{spec!r}: there is no adapter of the kind {kind!r}"
            f"{near_name(kind, KINDS) or '; expected one of ' + ', '.join(KINDS)}"
        )
    if not colon or not name:
        raise ConfigError(f"{spec!r}: expected {kind}:NAME, where NAME is {KINDS[kind].names}")
    return kind, name


def adapter_class(kind: str, *, needs_package: bool = True) -> type[Adapter]:
    """Import the adapter of a kind.

    Args:
        kind: a key of `KINDS`.
        needs_package: Whether its package must be installed; not to read its arguments only.

    Raises:
        MissingExtraError: its package is not installed.
        ConfigError: the installed version is not supported.
    """
    entry = KINDS[kind]
    if needs_package and entry.package is not None:
        _require(entry.package, entry.versions, extra=str(entry.extra))
    module, _, name = entry.target.partition(":")
    found: type[Adapter] = getattr(importlib.import_module(module), name)
    return found


def make_adapter(
    spec: str, args: Mapping[str, Any], *, seed: int, step_timeout_s: float = 60.0
) -> Adapter:
    """Make the adapter of `KIND:NAME`; it is not opened yet.

    Args:
        spec: `KIND:NAME`.
        args: values of its `args_cls`.
        seed: seed of the choice and order of items.
        step_timeout_s: time limit of one request to the other side, for adapters with requests.

    Raises:
        ConfigError: an unknown kind or argument, or a value out of range.
        MissingExtraError: the package of the kind is not installed.
    """
    kind, name = split_spec(spec)
    adapter_cls = adapter_class(kind)
    if name.startswith("~/"):
        name = str(Path(name).expanduser())  # no shell does so after a colon
    return adapter_cls(
        name, read_args(adapter_cls.args_cls, args), seed=seed, step_timeout_s=step_timeout_s
    )


def read_args(args_cls: type[AdapterArgs], args: Mapping[str, Any]) -> AdapterArgs:
    """Validate arguments; an unknown one is an error that suggests a similar name."""
    for name in args:
        if name not in args_cls.model_fields:
            known = ", ".join(args_cls.model_fields) or "none"
            hint = near_name(name, args_cls.model_fields) or f"; expected one of: {known}"
            raise ConfigError(f"--args: unknown argument {name!r}{hint}")
    try:
        return args_cls.model_validate(dict(args))
    except ValidationError as error:
        raise refused_values(error, "--args: ") from error


def _require(package: str, versions: str, *, extra: str) -> None:
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtraError(package, extra=extra) from None
    if not SpecifierSet(versions, prereleases=True).contains(Version(installed)):
        raise ConfigError(
            f"{package} {installed} is installed; this adapter supports {package}{versions}: "
            f"pip install '{package}{versions}'"
        )
