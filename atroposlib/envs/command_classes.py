"""What the commands of an environment do: `serve`, `process`, `evaluate` and `check`.

An instance holds what was typed; `run()` layers the settings, builds the environment and runs it.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, Field
from pydantic_cli import Cmd

from atroposlib.envs.config_layers import ENV_PREFIX, Defaults, Settings, layer_settings
from atroposlib.envs.construction import build_environment
from atroposlib.envs.env_view import run_viewed
from atroposlib.envs.flags import MAY_STAND_ALONE
from atroposlib.envs.foreground import outside_event_loop, run_foreground
from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.resolve import ServerConfigs
from atroposlib.envs.settings_text import shown_settings
from atroposlib.utils.cli import UsageError
from atroposlib.utils.secret_masking import without_secrets
from atroposlib.utils.writable import require_writable_file, require_writable_folder

__all__ = [
    "DATASET_PATH_FLAG",
    "JSON_FLAG",
    "CheckCommand",
    "EnvCommand",
    "EvaluateCommand",
    "ProcessCommand",
    "ServeCommand",
    "ViewedCommand",
    "load_yaml",
]

DATASET_PATH_FLAG = "dataset-path"
DATASET_PATH_SETTING = "dataset_path"
JSON_FLAG = "json"

_LOCAL_HOSTS = ("localhost", "0.0.0.0", "127.0.0.1")


class EnvCommand(Cmd):  # type: ignore[misc]  # an untyped base
    """One command of one environment.

    Subclasses made by `serve_command` and its siblings add a field per flag. An environment may
    subclass such a class further and return it from `get_cli_serve_config_cls`.
    """

    model_config = ConfigDict(protected_namespaces=(), arbitrary_types_allowed=True)

    command: ClassVar[str]
    env_cls: ClassVar[type[Any]]
    defaults: ClassVar[Defaults]

    config: str | None = Field(
        None, description="YAML file with sections env: and openai:; flags override it."
    )

    def run(self) -> None:
        """Layer the settings, build the environment and run it to its end.

        Raises:
            UsageError: the settings cannot be used.
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
        """The effective settings: defaults, then the YAML file, then what was typed."""
        return layer_settings(
            self.command, self.defaults, yaml_config, self.typed_flags(), env_name=self.env_cls.name
        )

    def typed_flags(self) -> dict[str, Any]:
        """What was typed, by full flag name; defaults are left out."""
        return {name: getattr(self, name) for name in self.model_fields_set}

    def check(self, settings: Settings) -> None:
        """Refuse or warn about settings this command cannot use. Called before anything starts."""

    def require_places(self, settings: Settings) -> None:
        """Find out before any work whether the places that this command writes to can be written.

        Raises:
            ConfigError: one cannot; the message names it and the setting.
        """
        env = settings.env
        if env.data_path_to_save_groups is not None and self.command != "evaluate":
            # Not the file: a new name is taken where it exists.
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
        """Constructor arguments beyond the usual four, for subclasses that add flags."""
        return {}

    def shown_extra(
        self, extra: Mapping[str, Any], *, only_changed: bool = False
    ) -> dict[str, Any]:
        """Those arguments as sections of a YAML file, secrets masked; all, or what is changed."""
        return {}

    def execute(self, settings: Settings, extra: Mapping[str, Any]) -> None:
        """Build the environment and run its main coroutine."""
        raise NotImplementedError


class ViewedCommand(EnvCommand):
    """A command that shows a live view of the run where its output is a terminal."""

    quiet: bool = Field(
        False,
        description="Plain log lines instead of the live view in a terminal; needs no value.",
        json_schema_extra={MAY_STAND_ALONE: True},
    )


class ServeCommand(ViewedCommand):
    """Roll out groups and send them to the trajectory service until the trainer is done."""

    command = "serve"

    def execute(self, settings: Settings, extra: Mapping[str, Any]) -> None:
        """Print the settings that are not the defaults and run the main loop."""
        env = build_environment(self.env_cls, settings, extra)
        env.settings_yaml = _yaml_text({**shown_settings(settings), **self.shown_extra(extra)})
        changed = {
            **shown_settings(settings, only_changed=True),
            **self.shown_extra(extra, only_changed=True),
        }
        sys.stdout.write("# settings that differ from the defaults of the library\n")
        sys.stdout.write(_yaml_text(changed))
        sys.stdout.flush()
        run_foreground(run_viewed(env, env.env_manager, quiet=self.quiet))


class ProcessCommand(ViewedCommand):
    """Make groups and write them to a JSONL file and an HTML page; no service is needed."""

    command = "process"

    def check(self, settings: Settings) -> None:
        """Require an output file and a number of groups."""
        if settings.env.data_path_to_save_groups is None:
            raise UsageError("env.data_path_to_save_groups: process needs a file to write to")
        if settings.env.total_steps < 0:
            raise UsageError(
                f"env.total_steps: process needs the number of groups to make, "
                f"got {settings.env.total_steps}"
            )
        _warn_if_local(settings.servers)

    def execute(self, settings: Settings, extra: Mapping[str, Any]) -> None:
        """Make `total_steps` groups of `group_size`."""
        env = build_environment(self.env_cls, settings, extra)
        env.process_mode = True
        env.n_groups_to_process = settings.env.total_steps
        env.group_size_to_process = settings.env.group_size
        run_foreground(run_viewed(env, env.process_manager, quiet=self.quiet))


class EvaluateCommand(EnvCommand):
    """Run the environment's evaluation once and write its results."""

    command = "evaluate"

    def check(self, settings: Settings) -> None:
        """Warn about local servers."""
        _warn_if_local(settings.servers)

    def execute(self, settings: Settings, extra: Mapping[str, Any]) -> None:
        """Write `evaluate_config.yaml` where results are kept, then evaluate."""
        env = build_environment(self.env_cls, settings, extra)
        if settings.env.data_dir_to_save_evals is not None:
            directory = Path(settings.env.data_dir_to_save_evals)
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "evaluate_config.yaml").write_text(
                _yaml_text(shown_settings(settings)), encoding="utf-8"
            )
        run_foreground(env._run_evaluate)


class CheckCommand(EnvCommand):
    """Run the environment against a scripted model, without GPU and network, and report."""

    command = "check"

    def typed_flags(self) -> dict[str, Any]:
        """What was typed; the data set under the name of its setting.

        Raises:
            UsageError: the environment has no such setting.
        """
        flags = super().typed_flags()
        path = flags.pop(DATASET_PATH_FLAG, None)
        if path is None:
            return flags
        known = {*self.defaults.config_class.model_fields, *self.defaults.env_settings}
        if DATASET_PATH_SETTING not in known:
            raise UsageError(
                f"--{DATASET_PATH_FLAG}: {self.env_cls.__name__} has no setting "
                f"{DATASET_PATH_SETTING}; add one to its config, or use the setting it has"
            )
        return {**flags, f"{ENV_PREFIX}{DATASET_PATH_SETTING}": path}

    def require_places(self, settings: Settings) -> None:
        """Find out whether the report can be written; nothing else is."""
        path = self.typed_flags().get(JSON_FLAG)
        if path is not None:
            require_writable_file(path, f"--{JSON_FLAG}")

    def execute(self, settings: Settings, extra: Mapping[str, Any]) -> None:
        """Print the report, and write it as JSON where that was asked for.

        Raises:
            SystemExit: 1 when a rule is broken.
        """
        from rich.console import Console

        from atroposlib.envs.check import run_checks

        report = run_checks(self.env_cls, settings)
        report.print_to(Console())
        path = self.typed_flags().get(JSON_FLAG)
        if path is not None:
            Path(path).write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
        if any(outcome.name == "leftovers" for outcome in report.failures):
            sys.stdout.flush()
            os._exit(1)  # what was left running would keep this process from ending
        if not report.passed:
            raise SystemExit(1)


def load_yaml(path: str) -> dict[str, Any]:
    """Read a YAML file of settings; an empty file holds none.

    Raises:
        UsageError: the file is missing, unreadable or no mapping.
    """
    import yaml

    try:
        with Path(path).open(encoding="utf-8") as file:  # its errors then name the file
            content = yaml.safe_load(file)
    except OSError as error:
        raise UsageError(f"config: cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"config: {path} is not YAML: {error}") from error
    if content is not None and not isinstance(content, dict):
        raise UsageError(f"config: {path} must hold sections such as env: and openai:")
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
                "use --openai.base_url for another one",
                UserWarning,
                stacklevel=2,
            )
            return
