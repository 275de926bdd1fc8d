"""The settings of a run: merge defaults, YAML file and flags; show them; parse and explain flags.

config_init ──┐
forced ───────┼─► merge ─► validated by the environment's own config class
YAML env: ────┤
--env.* ──────┘            (servers: the same without `forced`, then `resolve_openai_configs`)

The flags of a command are the fields of its pydantic model. Syntax: `--name=value` or
`--name value`, without abbreviations; `env.` and `openai.` are optional if the rest is unambiguous.
Every flag takes a value, booleans too, except those that may stand alone (true). A list takes
several words, repeated flags or one JSON array; a mapping one JSON object; `None` clears an
optional setting. A word after a flag is a value unless it starts with two dashes, so `-1` is one.

The functions here are pure.
"""

from __future__ import annotations

import json
import logging
import textwrap
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined, to_jsonable_python

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.constants import ENV_NAMESPACE, NAMESPACE_SEP, OPENAI_NAMESPACE
from atroposlib.envs.server_handling.config import (
    APIServerConfig,
    ServerBaseline,
    ServerConfigs,
    ServerManagerConfig,
    resolve_openai_configs,
    server_class_of,
    server_entries,
)
from atroposlib.utils.cli import (
    UsageError,
    extract_namespace,
    merge_dicts,
    refused_values,
)
from atroposlib.utils.text import is_masked, mask_secrets, near_name

__all__ = [
    "COMMANDS",
    "ENV_PREFIX",
    "HELP_WORDS",
    "MAY_STAND_ALONE",
    "OPENAI_PREFIX",
    "Defaults",
    "Flag",
    "Settings",
    "describe_type",
    "field_values",
    "flags_of",
    "forced_env_settings",
    "help_text",
    "is_structured",
    "layer_settings",
    "read_command",
    "read_flags",
    "server_layers",
    "short_help_text",
    "shown_default",
    "shown_servers",
    "shown_settings",
    "single_server_settings",
    "yaml_layers",
]

logger = logging.getLogger(__name__)

COMMANDS = ("serve", "process", "evaluate", "check")

ENV_PREFIX = f"{ENV_NAMESPACE}{NAMESPACE_SEP}"
OPENAI_PREFIX = f"{OPENAI_NAMESPACE}{NAMESPACE_SEP}"

TOLERATED_SERVER_KEYS = frozenset({"weight"})
"""Keys without effect that published YAML files have under a server."""

PUBLISHED_ENV_KEYS = frozenset(
    (
        *("dataset_path", "debug_mode", "group_name", "max_gen_per_turn"),
        *("run_name", "score_buffer_size", "start_tok_length"),
    )
)
"""Keys that earlier environments passed without declaring them; they are not misspelled."""

EXTRA_SECTIONS = frozenset({"teacher"})
"""Top-level sections that only some commands read."""


class Defaults(NamedTuple):
    """The defaults of an environment: the results of its `config_init`."""

    config_class: type[BaseEnvConfig]
    env_settings: Mapping[str, Any]
    """Field values of the environment's config, including undeclared ones."""
    servers: ServerConfigs


class Settings(NamedTuple):
    """The effective settings of one run."""

    env: BaseEnvConfig
    servers: ServerConfigs
    manager: ServerManagerConfig
    manager_given: frozenset[str]
    """Fields of `manager` that the YAML file or a flag set."""


def field_values(model: BaseModel) -> dict[str, Any]:
    """Return the values of a model by field name; nested models are not converted."""
    return dict(model)


def forced_env_settings(
    command: str, env_settings: Mapping[str, Any], *, env_name: str | None
) -> dict[str, Any]:
    """Return a command's changes of the environment's defaults; YAML and flags override them.

    Args:
        command: One of `COMMANDS`.
        env_settings: The environment's defaults.
        env_name: The class attribute `name`.
    """
    if command == "serve":
        unnamed = env_settings.get("wandb_name") is None and env_name is not None
        return {"wandb_name": env_name} if unnamed else {}
    if command == "evaluate":
        return {"use_wandb": True}
    if command == "check":
        # A check has neither an account nor a teacher.
        return {
            "use_wandb": False,
            **({"teacher_enabled": False} if "teacher_enabled" in env_settings else {}),
        }
    forced: dict[str, Any] = {
        "ensure_scores_are_not_same": False,
        "include_messages": True,
        "use_wandb": True,
    }
    if env_settings.get("data_path_to_save_groups") is None:
        forced["data_path_to_save_groups"] = f"data/{env_name or 'groups'}.jsonl"
    return forced


def layer_settings(
    command: str,
    defaults: Defaults,
    yaml_config: Mapping[str, Any],
    flags: Mapping[str, Any],
    *,
    env_name: str | None = None,
) -> Settings:
    """Merge the layers of one command into validated settings.

    Args:
        command: One of `COMMANDS`.
        defaults: Defaults of the environment.
        yaml_config: Parsed YAML file, or an empty mapping.
        flags: Given flags by full name (`env.group_size`), with values of `read_flags`.
        env_name: The environment's class attribute `name`.

    Raises:
        UsageError: an unknown key, an invalid value, or contradictory settings.
    """
    sections = yaml_layers(yaml_config, defaults)
    env_settings = merge_dicts(
        _opened(defaults.env_settings, {**sections.env, **extract_namespace(flags, ENV_PREFIX)}),
        forced_env_settings(command, defaults.env_settings, env_name=env_name),
        sections.env,
        extract_namespace(flags, ENV_PREFIX),
    )
    server_settings = merge_dicts(
        single_server_settings(defaults.servers),
        sections.servers[0] if len(sections.servers) == 1 else {},
        extract_namespace(flags, OPENAI_PREFIX),
    )
    manager_flags = {key: flags[key] for key in ServerManagerConfig.model_fields if key in flags}
    manager_settings = merge_dicts(sections.manager, manager_flags)
    return Settings(
        env=_validated(defaults.config_class, env_settings, ENV_PREFIX),
        servers=resolve_openai_configs(
            default_server_configs=defaults.servers,
            openai_config_dict=server_settings,
            yaml_config={OPENAI_NAMESPACE: sections.servers},
            cli_passed_flags=flags,
            logger=logger,
        ),
        manager=_validated(ServerManagerConfig, manager_settings, ""),
        manager_given=frozenset(manager_settings),
    )


class YamlLayers(NamedTuple):
    """The parts of a YAML file, each checked for unknown keys."""

    env: dict[str, Any]
    servers: list[dict[str, Any]]
    manager: dict[str, Any]


def yaml_layers(yaml_config: Mapping[str, Any], defaults: Defaults) -> YamlLayers:
    """Split a parsed YAML file into its parts.

    Masked secrets, as in `evaluate_config.yaml`, count as not given. Keys that do not resemble a
    known one cause a warning; under `env` they become attributes of the config.

    Raises:
        UsageError: a section has the wrong shape, or a key is misspelled.
    """
    manager_keys = set(ServerManagerConfig.model_fields)
    sections = {ENV_NAMESPACE, OPENAI_NAMESPACE, *manager_keys, *EXTRA_SECTIONS}
    for key in yaml_config.keys() - sections:
        hint = near_name(str(key), sections)
        if hint:
            raise UsageError(f"unknown section {key}: in the YAML file{hint}")
        logger.warning(
            "section %s: of the YAML file is not used by this command; settings of the environment "
            "are in %s:, of inference servers in %s:",
            key,
            ENV_NAMESPACE,
            OPENAI_NAMESPACE,
        )
    env = yaml_config.get(ENV_NAMESPACE) or {}
    if not isinstance(env, Mapping):
        raise UsageError(f"{ENV_NAMESPACE}: expected settings by name, got {env!r}")
    known = {*defaults.config_class.model_fields, *defaults.env_settings}
    _unknown_keys(env, known, ENV_PREFIX, published=PUBLISHED_ENV_KEYS)
    return YamlLayers(
        env=_without_masked(env),
        servers=server_layers(yaml_config.get(OPENAI_NAMESPACE), server_class_of(defaults.servers)),
        manager={key: yaml_config[key] for key in manager_keys if yaml_config.get(key) is not None},
    )


def server_layers(section: Any, server_class: type[BaseModel]) -> list[dict[str, Any]]:
    """Return the servers of a YAML section, without unknown keys and masked secrets.

    Args:
        section: One server, a list of servers, or None.
        server_class: Class with the known fields.

    Raises:
        UsageError: the section has the wrong shape, or a key is misspelled.
    """
    servers = server_entries(section)
    known = set(server_class.model_fields)
    for entry in servers:
        for key in _unknown_keys(entry, known | TOLERATED_SERVER_KEYS, OPENAI_PREFIX):
            del entry[key]
        for key in TOLERATED_SERVER_KEYS & entry.keys() - known:
            logger.warning("openai.%s has no effect", key)
            del entry[key]
    return [_without_masked(entry) for entry in servers]


def single_server_settings(servers: ServerConfigs) -> dict[str, Any]:
    """Return the environment's defaults of its only server; empty if it lists none or several."""
    if isinstance(servers, list | tuple):
        return field_values(servers[0]) if len(servers) == 1 else {}
    return field_values(servers) if isinstance(servers, ServerBaseline) else {}


def _unknown_keys(
    given: Iterable[Any], known: set[str], prefix: str, *, published: Collection[str] = ()
) -> list[Any]:
    """Warn about unknown keys and return them.

    Raises:
        UsageError: a key resembles a setting and is not one of the `published` ones.
    """
    full_names = sorted(prefix + name for name in known)
    unknown = [key for key in given if key not in known]
    hints = {
        key: near_name(f"{prefix}{key}", full_names) for key in unknown if key not in published
    }
    misspelled = [
        f"{prefix}{key} in the YAML file: no such setting{hint}"
        for key, hint in hints.items()
        if hint
    ]
    if misspelled:
        raise UsageError("\n".join(misspelled))
    for key in unknown:
        logger.warning("%s%s in the YAML file is not a setting of this environment", prefix, key)
    return unknown


def _without_masked(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if not is_masked(value)}


def _opened(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Convert nested models that a mapping will change to mappings, for a recursive merge."""
    return {
        key: dict(value)
        if isinstance(value, BaseModel) and isinstance(changes.get(key), Mapping)
        else value
        for key, value in settings.items()
    }


def _validated(model_class: type[Any], settings: Mapping[str, Any], prefix: str) -> Any:
    try:
        return model_class(**settings)
    except ValidationError as error:
        raise refused_values(error, prefix) from error


def shown_settings(settings: Settings, *, only_changed: bool = False) -> dict[str, Any]:
    """Return the effective settings in the shape of a YAML file that repeats the run.

    Discovered servers appear as their changed settings, usually an empty section. Settings with
    the server manager's defaults are omitted.

    Args:
        settings: Settings of the run.
        only_changed: Whether to omit empty sections and settings with the default of their class.
    """
    manager = settings.manager.model_dump(include=set(settings.manager_given))
    if only_changed:
        env = settings.env.model_dump(mode="json", exclude_defaults=True, fallback=str)
        servers = shown_servers(settings.servers, only_changed=True)
        shown = {"env": _plain(env), "openai": servers, **_plain(manager)}
        return {name: section for name, section in shown.items() if section}
    return {
        "env": _plain(settings.env),
        "openai": shown_servers(settings.servers),
        "slurm": settings.manager.slurm,
        "testing": settings.manager.testing,
        **_plain(manager),
    }


def shown_default(name: str, default: Any) -> str | None:
    """Return a default as text; None without a default.

    Args:
        name: Full name of the setting; its last part decides whether the value is a secret.
        default: Value of the field.
    """
    if default is PydanticUndefined:
        return None
    value = next(iter(_plain({name.rpartition(".")[2]: default}).values()))
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def shown_servers(servers: ServerConfigs, *, only_changed: bool = False) -> Any:
    """Return servers as a section of a YAML file, maybe without the defaults of their class."""
    if isinstance(servers, ServerBaseline) and not isinstance(servers, APIServerConfig):
        return _plain(servers.model_dump(exclude_unset=True))
    if not only_changed:
        return _plain(servers)
    if isinstance(servers, ServerBaseline):
        return _plain(servers.model_dump(exclude_defaults=True))
    changed = [server.model_dump(exclude_defaults=True) for server in servers]
    return _plain(changed if any(changed) else [])


def _plain(value: Any) -> Any:
    return mask_secrets(to_jsonable_python(value, serialize_unknown=True))


HELP_WORDS = ("--help", "-h")

MAY_STAND_ALONE = "may_stand_alone"
"""Key in `json_schema_extra` of a boolean field whose flag needs no value."""

SHORT_FORMS = {"tokenizer_name": f"{ENV_PREFIX}tokenizer_name"}
"""Full name of a name that both configs have; the server's tokenizer follows from its model."""

Command = TypeVar("Command", bound=BaseModel)

_SEQUENCES = (list, tuple, set, frozenset, Sequence)


class Flag(NamedTuple):
    """One flag of a command, as declared by its model."""

    name: str
    """Name without dashes: `env.group_size`."""
    annotation: Any
    default: Any
    """Default value; `PydanticUndefined` if the flag is required."""
    description: str
    may_stand_alone: bool = False
    """Whether it may be given without a value, which means true."""


def flags_of(model: type[BaseModel]) -> list[Flag]:
    """Return the flags of a command class, in the order of its fields."""
    return [
        Flag(
            name,
            field.annotation,
            field.get_default(call_default_factory=True),
            field.description or "",
            isinstance(field.json_schema_extra, dict)
            and bool(field.json_schema_extra.get(MAY_STAND_ALONE)),
        )
        for name, field in model.model_fields.items()
    ]


def read_flags(words: Sequence[str], flags: Sequence[Flag]) -> dict[str, Any]:
    """Parse the words after the subcommand.

    Args:
        words: Words, as split by the shell.
        flags: The flags of the command.

    Returns:
        The values of the given flags by name. Numbers stay text for the model to convert, so that
        its message names the field.

    Raises:
        UsageError: an unknown or ambiguous flag, a flag without value, or a word without a flag.
    """
    by_name = {flag.name: flag for flag in flags}
    typed: dict[str, list[str]] = {}
    for given, values in _occurrences(words):
        name = _full_name(given, by_name)
        if not values and by_name[name].may_stand_alone:
            values = ["true"]
        if not values:
            hint = ": true or false" if bool in _arms(by_name[name].annotation) else ""
            raise UsageError(f"--{name} needs a value{hint}")
        if _sequence_arm(by_name[name].annotation) is not None:
            typed.setdefault(name, []).extend(values)
        elif len(values) > 1:
            raise UsageError(f"--{name} takes one value, so {values[1]!r} belongs to no flag")
        else:
            typed[name] = values
    return {name: _convert(values, by_name[name]) for name, values in typed.items()}


def read_command(command_class: type[Command], words: Sequence[str]) -> Command:
    """Build a command from the words after its name.

    Raises:
        UsageError: a flag cannot be parsed, or its value is invalid.
    """
    try:
        return command_class(**read_flags(words, flags_of(command_class)))
    except ValidationError as error:
        raise refused_values(error) from error


def is_structured(annotation: Any) -> bool:
    """Whether values of this type are mappings, given as JSON on the command line."""
    return any(_is_mapping(arm) for arm in _arms(annotation))


def _occurrences(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    current: tuple[str, list[str]] | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            if current:
                yield current
            name, equals, value = word[2:].partition("=")
            current = (name, [value] if equals else [])
        elif current is None:
            raise UsageError(f"{word!r} belongs to no flag; settings are given as --name value")
        else:
            current[1].append(word)
    if current:
        yield current


def _full_name(name: str, known: Mapping[str, Flag]) -> str:
    """Return the full name of a flag that may lack its prefix."""
    if name in known:
        return name
    prefixed = [f"{space}{NAMESPACE_SEP}{name}" for space in (ENV_NAMESPACE, OPENAI_NAMESPACE)]
    meant = [full for full in prefixed if full in known]
    if SHORT_FORMS.get(name) in meant:
        return SHORT_FORMS[name]
    if len(meant) > 1:
        raise UsageError(
            f"--{name} is ambiguous: write {' or '.join(f'--{full}' for full in meant)}"
        )
    if not meant:
        raise UsageError(f"unknown flag --{name}{_suggestion(name, known)}")
    return meant[0]


def _suggestion(name: str, known: Mapping[str, Flag]) -> str:
    hint = near_name(name.replace("-", "_"), known)
    return hint.replace("did you mean ", "did you mean --") or "; --help all lists every flag"


def _convert(words: list[str], flag: Flag) -> Any:
    try:
        return _value(words, flag.annotation)
    except ValueError as error:
        raise UsageError(f"{flag.name}: {error}") from error


def _value(words: list[str], annotation: Any) -> Any:
    arms = _arms(annotation)
    if len(words) == 1 and _means_none(words[0], arms):
        return None
    sequence = _sequence_arm(annotation)
    if sequence is not None:
        return _sequence(words, sequence, takes_text=str in arms)
    return _scalar(words[0], arms)


def _sequence(words: list[str], sequence: Any, *, takes_text: bool) -> Any:
    if len(words) == 1 and words[0].lstrip().startswith("["):
        return _json(words[0], """a JSON array such as '["a", "b"]'""")
    if len(words) == 1 and takes_text:
        return words[0]
    members = get_args(sequence) or (Any,)
    mixed = get_origin(sequence) is tuple and members[1:] != (Ellipsis,)
    inner = Any if mixed else members[0]
    return [_value([word], inner) for word in words]


def _scalar(word: str, arms: list[Any]) -> Any:
    """Convert a word to a member of a closed set or a JSON object; other text stays."""
    for arm in arms:
        if word in (choices := _choices(arm)):
            return choices[word]
    looks_like_json = word.lstrip().startswith("{")
    if any(_is_mapping(arm) for arm in arms) and (looks_like_json or str not in arms):
        return _json(word, """a JSON object such as '{"name": 1}'""")
    return word


def _choices(arm: Any) -> dict[str, Any]:
    """Return the members of a closed set by their text; empty for other types."""
    if get_origin(arm) is Literal:
        return {str(choice): choice for choice in get_args(arm)}
    is_enum = isinstance(arm, type) and issubclass(arm, Enum)
    return {str(choice.value): choice for choice in arm} if is_enum else {}


def _json(word: str, wanted: str) -> Any:
    try:
        return json.loads(word)
    except ValueError as error:
        raise ValueError(f"expected {wanted}, got {word!r}: {error}") from error


def _arms(annotation: Any) -> list[Any]:
    """Return the members of a union, or the type itself."""
    if get_origin(annotation) is Annotated:
        return _arms(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [arm for member in get_args(annotation) for arm in _arms(member)]
    return [annotation]


def _sequence_arm(annotation: Any) -> Any | None:
    for arm in _arms(annotation):
        if (get_origin(arm) or arm) in _SEQUENCES:
            return arm
    return None


def _is_mapping(arm: Any) -> bool:
    kind = get_origin(arm) or arm
    return isinstance(kind, type) and issubclass(kind, (Mapping, BaseModel))


def _means_none(word: str, arms: list[Any]) -> bool:
    """Whether a word is `None`, or `null` or `none` for a type without text."""
    if type(None) not in arms and Any not in arms:
        return False
    return word == "None" or (str not in arms and Any not in arms and word in ("none", "null"))


_WIDTH = 100
_INDENT = 6

_GROUP_TITLES = {
    "env": "Environment",
    "openai": "Inference server",
    "teacher": "Teacher's inference server",
    "": "Other",
}


OFTEN_NEEDED = (
    "config",
    "env.tokenizer_name",
    "env.group_size",
    "env.max_token_length",
    "env.total_steps",
    "env.steps_per_eval",
    "env.rollout_server_url",
    "env.use_wandb",
    "env.include_messages",
    "env.data_path_to_save_groups",
    "env.data_dir_to_save_evals",
    "openai.base_url",
    "openai.model_name",
    "openai.api_key",
    "openai.server_type",
    "teacher.base_url",
    "teacher.model_name",
    "quiet",
    "dataset-path",
    "json",
)
"""Settings of all environments that the short help shows."""


def short_help_text(
    flags: Sequence[Flag], *, shared: Collection[str], usage: str, intro: str = ""
) -> str:
    """Return the help of one command, with the flags of the environment and the common ones.

    Args:
        flags: Flags of the command.
        shared: Names of the flags that every environment has.
        usage: Line that shows how the command is called.
        intro: Paragraphs between the usage and the flags.
    """
    own = [flag for flag in flags if flag.name not in shared]
    by_name = {flag.name: flag for flag in flags if flag.name in shared}
    often = [by_name[name] for name in OFTEN_NEEDED if name in by_name]
    blocks = [f"usage: {usage}", *([intro] if intro else [])]
    if own:
        blocks.append("\n".join(["Settings of this environment:", *map(_entry, own)]))
    blocks.append("\n".join(["Often needed:", *map(_entry, often)]))
    num_others = len(by_name) - len(often)
    blocks.append(
        f"All others, {num_others} of them: --help all. env. and openai. may be left out if the "
        "name is unambiguous."
    )
    return "\n\n".join(blocks) + "\n"


def help_text(flags: Sequence[Flag], *, usage: str, intro: str = "") -> str:
    """Return the help of one command, with all flags; arguments as for `short_help_text`."""
    groups: dict[str, list[Flag]] = {}
    for flag in flags:
        prefix, separator, _ = flag.name.partition(".")
        groups.setdefault(prefix if separator else "", []).append(flag)
    blocks = [f"usage: {usage}", *([intro] if intro else [])]
    # Flags without a prefix come last.
    for prefix in sorted(groups, key=lambda prefix: prefix == ""):
        title = _GROUP_TITLES.get(prefix, prefix)
        names = f" (--{prefix}.*)" if prefix else ""
        blocks.append("\n".join([f"{title}{names}:", *map(_entry, groups[prefix])]))
    return "\n\n".join(blocks) + "\n"


def _entry(flag: Flag) -> str:
    head = f"  --{flag.name} {describe_type(flag.annotation)}"
    default = shown_default(flag.name, flag.default)
    note = "(required)" if default is None else f"(default: {default})"
    body = textwrap.wrap(
        f"{flag.description} {note}".strip(),
        width=_WIDTH,
        initial_indent=" " * _INDENT,
        subsequent_indent=" " * _INDENT,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return "\n".join([head, *body])


def describe_type(annotation: Any) -> str:
    """Return the syntax of a value, such as `INT`, `TRUE|FALSE`, `TEXT...` or `{openai,vllm}`."""
    arms = [arm for arm in _arms(annotation) if arm is not type(None)] or [annotation]
    return "|".join(dict.fromkeys(map(_describe_arm, arms)))


def _describe_arm(arm: Any) -> str:
    if choices := _choices(arm):
        return "{" + ",".join(choices) + "}"
    kind = get_origin(arm) or arm
    if kind is Any or not isinstance(kind, type):
        return "VALUE"
    if _is_mapping(arm):
        return "JSON"
    if kind in _SEQUENCES:
        return f"{describe_type((get_args(arm) or (str,))[0])}..."
    names = {bool: "TRUE|FALSE", int: "INT", float: "FLOAT", str: "TEXT"}
    return names.get(kind, kind.__name__.upper())
