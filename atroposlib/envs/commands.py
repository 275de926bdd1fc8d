"""The command line of an environment script.

run_cli ─► command class of the environment (`make_command`: a field per flag, `env.group_size`)
        ─► instance with the given flags ─► `run()`: layer settings, build, execute

`serve` and `process` show a live view of the run if their output is a terminal.
"""

from __future__ import annotations

import inspect
import logging
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_cli import Cmd, FailedExecutionException

from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.constants import NAMESPACE_SEP
from atroposlib.envs.run_snapshot import ErrorLine, RecentErrors, RunSnapshot
from atroposlib.envs.running import (
    build_environment,
    file_of,
    outside_event_loop,
    run_foreground,
)
from atroposlib.envs.server_handling.config import (
    APIServerConfig,
    ServerBaseline,
    ServerConfigs,
    ServerManagerConfig,
    server_class_of,
)
from atroposlib.envs.settings import (
    COMMANDS,
    ENV_PREFIX,
    HELP_WORDS,
    MAY_STAND_ALONE,
    OPENAI_PREFIX,
    Defaults,
    Flag,
    Settings,
    field_values,
    flags_of,
    forced_env_settings,
    help_text,
    is_structured,
    layer_settings,
    read_command,
    short_help_text,
    shown_default,
    shown_servers,
    shown_settings,
    single_server_settings,
)
from atroposlib.errors import (
    ConfigError,
    EpisodeError,
    InferenceError,
    MissingExtraError,
    NoDataError,
    TrajectoryApiError,
)
from atroposlib.utils.cli import UsageError, refused_values
from atroposlib.utils.command_parser import exit_code_of, prepare_command, print_output
from atroposlib.utils.text import InertFormatter, inert_line, near_name, without_secrets
from atroposlib.utils.writable import require_writable_file, require_writable_folder

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv

__all__ = [
    "DATASET_PATH_FLAG",
    "JSON_FLAG",
    "EnvCommand",
    "EvaluateCommand",
    "ProcessCommand",
    "ServeCommand",
    "TeacherServeCommand",
    "ViewedCommand",
    "environment_defaults",
    "evaluate_command",
    "flag_fields",
    "load_yaml",
    "make_command",
    "process_command",
    "run_cli",
    "run_viewed",
    "serve_command",
    "snapshot_of",
    "with_teacher",
]


def run_viewed(
    env: BaseEnv, main: Callable[[], Coroutine[Any, Any, None]], *, quiet: bool
) -> Callable[[], Coroutine[Any, Any, None]]:
    """Return `main` with a live view, or unchanged if no view can be shown.

    Args:
        env: the environment that `main` runs.
        main: its main coroutine function.
        quiet: Whether to write plain log lines instead.
    """
    # Checked first, so that plain runs do not import the view.
    if quiet or not sys.stdout.isatty():
        return main
    from atroposlib.envs.live_view import can_show

    return (lambda: _with_view(env, main)) if can_show(sys.stdout) else main


async def _with_view(env: BaseEnv, main: Callable[[], Awaitable[None]]) -> None:
    from atroposlib.envs.live_view import TerminalDisplay

    errors = RecentErrors()
    has_ended = False

    def take_snapshot() -> RunSnapshot | None:
        snapshot = snapshot_of(env, errors.lines)
        return replace(snapshot, activity="ended") if snapshot and has_ended else snapshot

    logging.getLogger().addHandler(errors)
    try:
        async with TerminalDisplay(take_snapshot, stream=sys.stdout):
            try:
                await main()
            finally:
                has_ended = True
    finally:
        logging.getLogger().removeHandler(errors)


def snapshot_of(env: BaseEnv, errors: tuple[ErrorLine, ...] = ()) -> RunSnapshot | None:
    """Return the state of an environment for the live view; None before its first rollout."""
    figures = env.run_figures
    if figures.begun_at is None:
        return None
    groups_per_s, tokens_per_s = figures.rates()
    staleness = figures.recent_staleness
    return RunSnapshot(
        name=env.wandb_prepend or env.desired_name,
        elapsed_s=figures.elapsed_s,
        step=env.curr_step,
        group_size=env.config.group_size,
        groups_done=figures.num_groups,
        groups_per_s=groups_per_s,
        tokens_done=figures.num_tokens,
        tokens_per_s=tokens_per_s,
        staleness_mean=sum(staleness) / len(staleness) if staleness else None,
        staleness_max=max(staleness, default=None),
        scores=tuple(figures.recent_scores),
        drops=dict(env.drop_counts),
        failures=dict(env.failure_counts),
        stragglers=dict(env.straggler_counts),
        errors=errors,
        **(_offline_part(env) if env.service_session is None else _serving_part(env)),
    )


def _offline_part(env: BaseEnv) -> dict[str, Any]:
    is_over = env.run_figures.is_over
    return {
        "activity": "closing" if is_over else "rolling out",
        "step_word": "group",
        "total_steps": env.n_groups_to_process,
        "groups_running": env.run_figures.num_items_running,
        "most_groups_running": env.max_num_workers,
        "oldest_rollout_s": env.run_figures.oldest_item_s,
    }


def _serving_part(env: BaseEnv) -> dict[str, Any]:
    now = time.time()
    queue_groups = env._registration.queue_status().queue_groups
    started = [record["start_time"] for record in env.running_items.values()]
    is_batch_known = env.config.batch_size > 0
    return {
        "activity": _activity(env),
        "total_steps": env.config.total_steps,
        "groups_running": len(started),
        "most_groups_running": env.max_num_workers,
        "groups_sending": max(0, len(env.workers) - len(started)),
        "oldest_rollout_s": max(0.0, now - min(started)) if started else None,
        "queue_groups": queue_groups,
        "queue_batches": queue_groups * env.config.group_size / env.config.batch_size
        if is_batch_known
        else None,
    }


def _activity(env: BaseEnv) -> str:
    if env.run_figures.is_over:
        return "closing"
    if not env._registration.session().is_registered:
        return "waiting for the service"
    if env.evaluation_runner.is_running:
        return "evaluating"
    if env._registration.are_starts_held_back:
        return "held back: queue is full"
    return "rolling out" if env.workers else "waiting for items or room"


DATASET_PATH_FLAG = "dataset-path"
JSON_FLAG = "json"

_LOCAL_HOSTS = ("localhost", "0.0.0.0", "127.0.0.1")


class EnvCommand(Cmd):  # type: ignore[misc]  # an untyped base
    """One command of one environment.

    `make_command` adds a field per flag. An environment may subclass the result and return it from
    `get_cli_serve_config_cls`.
    """

    model_config = ConfigDict(protected_namespaces=(), arbitrary_types_allowed=True)

    command: ClassVar[str]
    env_cls: ClassVar[type[Any]]
    defaults: ClassVar[Defaults]

    config: str | None = Field(
        None, description="YAML file with sections env: and openai:; flags override it."
    )

    def run(self) -> None:
        """Merge the settings, build the environment and run it to its end.

        Raises:
            UsageError: invalid settings.
            SystemExit: a signal ended the run.
        """
        yaml_config = load_yaml(self.config) if self.config else {}
        settings = self.layered(yaml_config)
        self.check(settings)
        self.require_places(settings)
        if self.command != "check":
            self.env_cls.check_inputs(settings.env)
        extra = self.extra_arguments(yaml_config)
        outside_event_loop(lambda: self.execute(settings, extra))

    def layered(self, yaml_config: Mapping[str, Any]) -> Settings:
        """Return the effective settings: defaults, then the YAML file, then flags."""
        name = class_name(self.env_cls, self.defaults)
        return layer_settings(
            self.command, self.defaults, yaml_config, self.typed_flags(), env_name=name
        )

    def typed_flags(self) -> dict[str, Any]:
        """Return the given flags by full name, without defaults."""
        return {name: getattr(self, name) for name in self.model_fields_set}

    def check(self, settings: Settings) -> None:
        """Reject settings that this command cannot use, or warn; called before anything starts."""

    def require_places(self, settings: Settings) -> None:
        """Raise `ConfigError` if a path that this command writes to is not writable."""
        env = settings.env
        if env.data_path_to_save_groups is not None and self.command != "evaluate":
            # Not the file: if it exists, a new name is chosen.
            folder = Path(env.data_path_to_save_groups).parent
            require_writable_folder(folder, "--env.data_path_to_save_groups")
        if env.data_dir_to_save_evals is not None and self.command != "process":
            require_writable_folder(env.data_dir_to_save_evals, "--env.data_dir_to_save_evals")
        if env.metrics_path is not None:
            require_writable_file(env.metrics_path, "--env.metrics_path")
        else:
            logs = Path("logs")
            require_writable_folder(logs if logs.exists() else logs.parent, "--env.metrics_path")

    def extra_arguments(self, yaml_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return constructor arguments in addition to the usual four, for commands with flags."""
        return {}

    def shown_extra(
        self, extra: Mapping[str, Any], *, only_changed: bool = False
    ) -> dict[str, Any]:
        """Return `extra` as sections of a YAML file, with secrets masked."""
        return {}

    def execute(self, settings: Settings, extra: Mapping[str, Any]) -> None:
        """Build the environment and run its main coroutine."""
        raise NotImplementedError


class ViewedCommand(EnvCommand):
    """A command that shows a live view of the run if its output is a terminal."""

    quiet: bool = Field(
        False,
        description="Whether to write plain log lines instead of the live view; needs no value.",
        json_schema_extra={MAY_STAND_ALONE: True},
    )


class ServeCommand(ViewedCommand):
    """Roll out groups and send them to the trajectory service until the trainer is done."""

    command = "serve"

    def execute(self, settings: Settings, extra: Mapping[str, Any]) -> None:
        env = build_environment(self.env_cls, settings, extra)
        env.settings_yaml = _yaml_text({**shown_settings(settings), **self.shown_extra(extra)})
        changed = {
            **shown_settings(settings, only_changed=True),
            **self.shown_extra(extra, only_changed=True),
        }
        heading = "# settings that differ from the defaults of the library"
        print_output(f"{heading}\n{_yaml_text(changed)}", end="")
        run_foreground(run_viewed(env, env.env_manager, quiet=self.quiet))


class ProcessCommand(ViewedCommand):
    """Make groups and write them to a JSONL file and an HTML page; no service is needed."""

    command = "process"

    def check(self, settings: Settings) -> None:
        if settings.env.data_path_to_save_groups is None:
            raise UsageError("env.data_path_to_save_groups: process needs a file to write to")
        if settings.env.total_steps < 0:
            raise UsageError(
                f"env.total_steps: process needs the number of groups to make, "
                f"got {settings.env.total_steps}"
            )
        if not settings.manager.testing:
            _warn_if_local(settings.servers)

    def execute(self, settings: Settings, extra: Mapping[str, Any]) -> None:
        env = build_environment(self.env_cls, settings, extra)
        env.process_mode = True
        env.n_groups_to_process = settings.env.total_steps
        env.group_size_to_process = settings.env.group_size
        run_foreground(run_viewed(env, env.process_manager, quiet=self.quiet))


class EvaluateCommand(EnvCommand):
    """Run the environment's evaluation once and write its results."""

    command = "evaluate"

    def check(self, settings: Settings) -> None:
        if not settings.manager.testing:
            _warn_if_local(settings.servers)

    def execute(self, settings: Settings, extra: Mapping[str, Any]) -> None:
        env = build_environment(self.env_cls, settings, extra)
        if settings.env.data_dir_to_save_evals is not None:
            directory = Path(settings.env.data_dir_to_save_evals)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "evaluate_config.yaml").write_text(
                _yaml_text(shown_settings(settings)), encoding="utf-8"
            )
        run_foreground(env._run_evaluate)


def load_yaml(path: str) -> dict[str, Any]:
    """Read a YAML file of settings; an empty file gives an empty mapping.

    Keys that are given twice are warned of, since only the last value is used.

    Raises:
        UsageError: the file is missing, unreadable or not a mapping.
    """
    import yaml

    from atroposlib.utils.yaml_text import describe_yaml, read_with_repeats

    try:
        content, repeated = read_with_repeats(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"config: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"config: {path} is not YAML: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"config: {path} is not YAML{describe_yaml(error)}") from error
    if content is not None and not isinstance(content, dict):
        raise UsageError(f"config: {path} must hold sections such as env: and openai:")
    if repeated:
        warnings.warn(
            f"{path}: only the last value of {', '.join(repeated)} is used",
            UserWarning,
            stacklevel=2,
        )
    return content or {}


def _yaml_text(content: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)


def _warn_if_local(servers: ServerConfigs) -> None:
    listed: Sequence[Any] = servers if isinstance(servers, Sequence) else [servers]
    for server in listed:
        url = server.base_url if isinstance(server, APIServerConfig) else None
        if url and any(host in url for host in _LOCAL_HOSTS):
            warnings.warn(
                f"the inference server is on this machine ({without_secrets(url)}); "
                "--openai.base_url URL selects another one",
                UserWarning,
                stacklevel=2,
            )
            return


Command = TypeVar("Command", bound=EnvCommand)


def serve_command(env_cls: type[Any]) -> type[ServeCommand]:
    """Return the `serve` command of an environment class."""
    return make_command(env_cls, ServeCommand)


def process_command(env_cls: type[Any]) -> type[ProcessCommand]:
    """Return the `process` command of an environment class."""
    return make_command(env_cls, ProcessCommand)


def evaluate_command(env_cls: type[Any]) -> type[EvaluateCommand]:
    """Return the `evaluate` command of an environment class."""
    return make_command(env_cls, EvaluateCommand)


def environment_defaults(env_cls: type[Any]) -> Defaults:
    """Call `config_init` of an environment.

    If its config has required fields and `config_init` does not set them, the class defaults are
    used, and the YAML file or flags must set the rest.

    Raises:
        ConfigError: `config_init` is not a class method, or does not return settings and servers.
        UsageError: `config_init` uses values that the config class rejects.
    """
    where = f"{env_cls.__name__}.config_init in {file_of(env_cls)}"
    if (
        not inspect.ismethod(env_cls.config_init)
        and inspect.signature(env_cls.config_init).parameters
    ):
        raise ConfigError(f"{where} is not a class method: write @classmethod in the line above it")
    try:
        returned = env_cls.config_init()
    except ValidationError as error:
        config_class: type[BaseEnvConfig] = env_cls.env_config_cls
        incomplete = all(detail["type"] == "missing" for detail in error.errors())
        if not incomplete or error.title != config_class.__name__:
            raise refused_values(error, "config_init: ") from error
        optional = {
            name: field.get_default(call_default_factory=True)
            for name, field in config_class.model_fields.items()
            if not field.is_required()
        }
        return Defaults(config_class, optional, ServerBaseline())
    if inspect.iscoroutine(returned):
        returned.close()  # otherwise Python warns that it was never awaited
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    if not is_pair or not isinstance(returned[0], BaseModel):
        raise ConfigError(
            f"{where} returned {_types_of(returned)}; expected settings and servers: a "
            "BaseEnvConfig and a list of APIServerConfig"
        )
    config, servers = returned
    return Defaults(type(config), field_values(config), servers)


def _types_of(returned: Any) -> str:
    # Not the values, which may have the key of an inference server.
    if isinstance(returned, tuple):
        return f"({', '.join(type(value).__name__ for value in returned)})"
    return type(returned).__name__


def class_name(env_cls: type[Any], defaults: Defaults) -> str | None:
    """Return the attribute `name` of an environment class; None if it has none, or a property.

    Raises:
        ConfigError: it is not a string, and `config_init` sets no `wandb_name` in its place.
    """
    name = env_cls.name
    if name is None or isinstance(name, str):
        return name
    if hasattr(name, "__get__"):  # a property, which only instances have
        return None
    if defaults.env_settings.get("wandb_name") is None:
        raise ConfigError(
            f"{env_cls.__name__}.name in {file_of(env_cls)} is {name!r:.60}; expected a string"
        )
    return str(name)


def flag_fields(
    model_class: type[BaseModel], prefix: str, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the field definitions of the flags of a settings class, for `create_model`.

    A required setting becomes an optional flag, because the YAML file may set it.

    Args:
        model_class: The settings class.
        prefix: Prefix of each name, including the separator: `env.`.
        values: Defaults that override those of the class.
    """
    definitions: dict[str, Any] = {}
    for name, field in model_class.model_fields.items():
        annotation: Any = field.annotation
        if is_structured(annotation):
            annotation = dict[str, Any] | annotation
        description = field.description or ""
        if name in values:
            default = values[name]
        elif field.is_required():
            default, description = None, f"{description} Must be set here or in the YAML file."
        else:
            default = field.get_default(call_default_factory=True)
        flag = Field(default, description=description.strip())
        definitions[f"{prefix}{name}"] = (annotation, flag)
    return definitions


def make_command(
    env_cls: type[Any],
    kind: type[Command],
    own_flags: Mapping[str, Any] = MappingProxyType({}),
    own_settings: Mapping[str, Any] = MappingProxyType({}),
) -> type[Command]:
    """Create the command class of an environment class.

    Args:
        env_cls: the environment.
        kind: the command without the environment's flags.
        own_flags: field definitions of additional flags.
        own_settings: settings that override those of `config_init`.
    """
    defaults = environment_defaults(env_cls)
    defaults = defaults._replace(env_settings={**defaults.env_settings, **own_settings})
    name = class_name(env_cls, defaults)
    forced = forced_env_settings(kind.command, defaults.env_settings, env_name=name)
    fields = {
        **flag_fields(defaults.config_class, ENV_PREFIX, {**defaults.env_settings, **forced}),
        **flag_fields(
            server_class_of(defaults.servers),
            OPENAI_PREFIX,
            single_server_settings(defaults.servers),
        ),
        **flag_fields(ServerManagerConfig, "", {}),
        **own_flags,
    }
    made: type[Command] = create_model(
        f"{env_cls.__name__}{kind.__name__}", __base__=kind, __doc__=kind.__doc__, **fields
    )
    made.env_cls, made.defaults = env_cls, defaults
    return made


_INTERRUPTED = 130
_MAX_MESSAGE = 1000
"""Characters of a refusal, which may quote a conversation."""


def run_cli(env_cls: type[Any]) -> NoReturn:
    """Run the command of this process's command line; never returns.

    Raises:
        SystemExit: 0 on success; 1 without data, completions, episodes or service; 2 on a usage
            error or an invalid setting; 128 + signal number after a signal. Other exceptions pass
            through, except refusals of an inference server or a chat template, which end with 1.
    """
    program = Path(sys.argv[0]).name
    prepare_command()
    try:
        _run_words(env_cls, sys.argv[1:], program)
    except FailedExecutionException as error:
        sys.stderr.write(f"{program}: error: {error.message}\n")
        sys.exit(error.exit_code)
    except (
        ConfigError,
        MissingExtraError,
        EpisodeError,
        InferenceError,
        NoDataError,
        TrajectoryApiError,
    ) as error:
        sys.stderr.write(f"{program}: error: {error}\n")
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except SystemExit as error:
        from atroposlib.envs.checks.report import traceback_site

        site = traceback_site(error.__traceback__)
        if site is not None:
            sys.stderr.write(f"{program}: error: {site} ended the program with SystemExit\n")
        raise
    except Exception as error:
        from atroposlib.envs.checks.harness import describe_unrendered
        from atroposlib.envs.checks.report import traceback_site
        from atroposlib.envs.server_handling.retry import describe_refusal

        message = describe_refusal(error) or describe_unrendered(error)
        if message is None:
            raise
        site = traceback_site(error.__traceback__) or env_cls.__name__
        sys.stderr.write(
            f"{program}: error: {site}: {inert_line(message, max_characters=_MAX_MESSAGE)}\n"
        )
        sys.exit(exit_code_of(error))
    sys.exit(0)


def _run_words(env_cls: type[Any], words: Sequence[str], program: str) -> None:
    if words and _is_help(words[0]):
        print_output(_overview(env_cls, program, is_full=_wants_all(words)), end="")
        return
    if not words or words[0].startswith("-"):
        usage = f"usage: {program} {{{','.join(COMMANDS)}}} [--name value ...]"
        raise UsageError(f"no command given; {usage}; --help explains them")
    name, flag_words = words[0], words[1:]
    if name not in COMMANDS:
        hint = near_name(name, COMMANDS) or f"; expected one of {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command {name!r}{hint} (see {program} --help)")
    command_class = _command_class(env_cls, name)
    flags = flags_of(command_class)
    if any(map(_is_help, flag_words)):
        intro = (command_class.__doc__ or "").strip()
        usage = f"{program} {name} [--name value ...]"
        print_output(_help(flags, usage, intro, is_full=_wants_all(flag_words)), end="")
        return
    command = read_command(command_class, flag_words)
    _show_progress_messages()
    command.run()


def _is_help(word: str) -> bool:
    return word.partition("=")[0] in HELP_WORDS


def _wants_all(words: Sequence[str]) -> bool:
    position = next(i for i, word in enumerate(words) if _is_help(word))
    return words[position].endswith("=all") or list(words[position + 1 : position + 2]) == ["all"]


def _help(flags: Sequence[Flag], usage: str, intro: str, *, is_full: bool) -> str:
    if is_full:
        return help_text(flags, usage=usage, intro=intro)
    shared = {
        *(f"{ENV_PREFIX}{name}" for name in BaseEnvConfig.model_fields),
        *(
            f"{prefix}{name}"
            for prefix in (OPENAI_PREFIX, "teacher.")
            for name in APIServerConfig.model_fields
        ),
        *ServerManagerConfig.model_fields,
        *ViewedCommand.model_fields,
        DATASET_PATH_FLAG,
        JSON_FLAG,
    }
    return short_help_text(flags, shared=shared, usage=usage, intro=intro)


def _command_class(env_cls: type[Any], name: str) -> Any:
    hooks = {
        "serve": env_cls.get_cli_serve_config_cls,
        "process": env_cls.get_cli_process_config_cls,
        "evaluate": env_cls.get_cli_evaluate_config_cls,
        "check": env_cls.get_cli_check_config_cls,
    }
    return hooks[name]()


def _overview(env_cls: type[Any], program: str, *, is_full: bool) -> str:
    classes = {name: _command_class(env_cls, name) for name in COMMANDS}
    flags = {name: flags_of(command_class) for name, command_class in classes.items()}
    lines = ["Commands:"]
    for name, command_class in classes.items():
        lines.append(f"  {name:10}{(command_class.__doc__ or '').strip()}")
    lines += ["", "The defaults below are those of serve."]
    for name in COMMANDS[1:]:
        changed = ", ".join(_differences(flags["serve"], flags[name]))
        lines += [f"Those of {name} differ: {changed}."] if changed else []
    usage = f"{program} {{{','.join(COMMANDS)}}} [--name value ...]"
    return _help(flags["serve"], usage, "\n".join(lines), is_full=is_full)


def _differences(serve: Sequence[Flag], other: Sequence[Flag]) -> list[str]:
    known = {flag.name: shown_default(flag.name, flag.default) for flag in serve}
    defaults = {flag.name: shown_default(flag.name, flag.default) for flag in other}
    return [
        f"{name} {default}"
        for name, default in defaults.items()
        if name in known and known[name] != default
    ]


def _show_progress_messages() -> None:
    """Show INFO messages, except those of each HTTP request, and warnings without their code."""
    warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"
    handler = logging.StreamHandler()
    handler.setFormatter(InertFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # The OpenAI client uses one httpx or the other; the agent proxy is a server of uvicorn.
    for package in ("httpx", "httpx2", "uvicorn"):
        logging.getLogger(package).setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own


_ARGUMENT = "teacher_server_configs"


class TeacherServeCommand(ServeCommand):
    """Roll out groups and send them with a teacher's logprobs until the trainer is done."""

    def extra_arguments(self, yaml_config: Mapping[str, Any]) -> dict[str, Any]:
        extra = super().extra_arguments(yaml_config)
        servers = self.env_cls._resolve_teacher_server_configs(
            default_teacher_server_configs=self.env_cls.teacher_config_init(),
            yaml_config=yaml_config,
            cli_passed_flags=self.typed_flags(),
        )
        return extra if servers is None else {**extra, _ARGUMENT: servers}

    def shown_extra(
        self, extra: Mapping[str, Any], *, only_changed: bool = False
    ) -> dict[str, Any]:
        shown = super().shown_extra(extra, only_changed=only_changed)
        if _ARGUMENT in extra:
            servers = shown_servers(extra[_ARGUMENT], only_changed=only_changed)
            shown[self.env_cls.teacher_namespace] = servers
        return shown


def with_teacher(env_cls: type[Any], command_class: type[Any]) -> type[TeacherServeCommand]:
    """Add the teacher's flags to `command_class`, the `serve` command of an environment class."""
    default = env_cls.teacher_config_init()
    servers = ServerBaseline() if default is None else default
    fields = flag_fields(
        server_class_of(servers),
        f"{env_cls.teacher_namespace}{NAMESPACE_SEP}",
        single_server_settings(servers),
    )
    make: Any = create_model  # its type requires literal bases
    made: type[TeacherServeCommand] = make(
        command_class.__name__,
        __base__=(TeacherServeCommand, command_class),
        __doc__=TeacherServeCommand.__doc__,
        **fields,
    )
    return made
