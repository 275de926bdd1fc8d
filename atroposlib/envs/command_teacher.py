"""The `serve` command of environments with a teacher: it also takes `--teacher.*`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import create_model

from atroposlib.envs.command_classes import ServeCommand
from atroposlib.envs.command_factory import flag_fields
from atroposlib.envs.config_layers import single_server_settings
from atroposlib.envs.constants import NAMESPACE_SEP
from atroposlib.envs.server_handling.config import ServerBaseline
from atroposlib.envs.server_handling.resolve import server_class_of
from atroposlib.envs.settings_text import shown_servers

__all__ = ["TeacherServeCommand", "with_teacher"]

_ARGUMENT = "teacher_server_configs"


class TeacherServeCommand(ServeCommand):
    """Roll out groups and send them, a teacher's view added, until the trainer is done."""

    def extra_arguments(self, yaml_config: Mapping[str, Any]) -> dict[str, Any]:
        """The teacher's servers, when anything names one."""
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
        """The YAML section of the teacher."""
        shown = super().shown_extra(extra, only_changed=only_changed)
        if _ARGUMENT in extra:
            servers = shown_servers(extra[_ARGUMENT], only_changed=only_changed)
            shown[self.env_cls.teacher_namespace] = servers
        return shown


def with_teacher(env_cls: type[Any], command_class: type[Any]) -> type[TeacherServeCommand]:
    """Add the teacher's flags to the `serve` command of an environment class.

    Args:
        env_cls: a `TeacherDistillationEnv`.
        command_class: its command without them.
    """
    default = env_cls.teacher_config_init()
    servers = ServerBaseline() if default is None else default
    fields = flag_fields(
        server_class_of(servers),
        f"{env_cls.teacher_namespace}{NAMESPACE_SEP}",
        single_server_settings(servers),
    )
    make: Any = create_model  # knows its bases only when they are written out
    made: type[TeacherServeCommand] = make(
        command_class.__name__,
        __base__=(TeacherServeCommand, command_class),
        __doc__=TeacherServeCommand.__doc__,
        **fields,
    )
    return made
