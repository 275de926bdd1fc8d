"""`check_environment` and the command `check`: report the rules that an environment breaks.

Both run without GPU, model and network; a scripted model serves the requests (`checks.harness`).
In a test: `report = check_environment(MyEnv); assert report.passed, report.text`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from atroposlib.envs.checks.report import CheckReport, Outcome
from atroposlib.envs.commands import DATASET_PATH_FLAG, JSON_FLAG, EnvCommand, make_command
from atroposlib.envs.settings import ENV_PREFIX, Settings
from atroposlib.utils.cli import UsageError
from atroposlib.utils.command_parser import reader_may_leave
from atroposlib.utils.writable import require_writable_file

__all__ = [
    "CheckCommand",
    "CheckReport",
    "Outcome",
    "check_command",
    "check_environment",
]

DATASET_PATH_SETTING = "dataset_path"
CHECK_FLAGS: dict[str, Any] = {
    DATASET_PATH_FLAG: (
        str | None,
        Field(None, description="Small local data set, passed on as env.dataset_path."),
    ),
    JSON_FLAG: (str | None, Field(None, description="File for the report as JSON.")),
}


def check_environment(
    env_cls: type[Any], *, dataset_path: str | Path | None = None, **settings: Any
) -> CheckReport:
    """Check an environment class; findings are reported, not raised.

    Args:
        env_cls: the environment.
        dataset_path: small local data set, for environments with a setting of that name.
        **settings: further settings; they override those of `config_init` and `check_settings`.
    """
    from atroposlib.envs.checks.harness import check_class  # imports the inference clients

    flags = {f"env.{name}": value for name, value in settings.items()}
    if dataset_path is not None:
        flags["dataset-path"] = str(dataset_path)
    return check_class(env_cls, lambda: check_command(env_cls)(**flags).layered({}))


class CheckCommand(EnvCommand):
    """Run the environment against a scripted model, without GPU and network, and report."""

    command = "check"

    def typed_flags(self) -> dict[str, Any]:
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
        path = self.typed_flags().get(JSON_FLAG)
        if path is not None:
            require_writable_file(path, f"--{JSON_FLAG}")

    def execute(self, settings: Settings, extra: Mapping[str, Any]) -> None:
        """Print the report and write it as JSON if requested; exits with 1 if a rule is broken.

        Raises:
            Exception: `setup` refused the name or the arguments of a task set.
        """
        from rich.console import Console

        from atroposlib.envs.checks.harness import run_checks

        report = run_checks(self.env_cls, settings)
        if report.mistake is not None:
            raise report.mistake
        console = Console()
        with console.capture() as printed:  # its own printing exits where the reader has left
            report.print_to(console)
        with reader_may_leave():
            sys.stdout.write(printed.get())
        path = self.typed_flags().get(JSON_FLAG)
        if path is not None:
            Path(path).write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
        if any(outcome.name == "leftovers" for outcome in report.failures):
            sys.stdout.flush()
            os._exit(1)  # leftover threads would keep this process alive
        if not report.passed:
            raise SystemExit(1)


def check_command(env_cls: type[Any]) -> type[CheckCommand]:
    """Return the `check` command of an environment; its `check_settings` override the defaults."""
    with warnings.catch_warnings():
        # The flag is --json; pydantic has a deprecated method of that name.
        warnings.filterwarnings("ignore", message='Field name "json"', category=UserWarning)
        # A class that is not a BaseEnv may lack the attribute.
        own_settings = getattr(env_cls, "check_settings", {})
        return make_command(env_cls, CheckCommand, CHECK_FLAGS, own_settings)
