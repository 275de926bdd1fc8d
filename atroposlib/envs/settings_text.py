"""Settings as people may see them: plain values, secrets masked."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import PydanticUndefined, to_jsonable_python

from atroposlib.envs.config_layers import Settings
from atroposlib.envs.server_handling.config import APIServerConfig, ServerBaseline
from atroposlib.envs.server_handling.resolve import ServerConfigs
from atroposlib.utils.secret_masking import mask_secrets

__all__ = ["shown_default", "shown_servers", "shown_settings"]


def shown_settings(settings: Settings, *, only_changed: bool = False) -> dict[str, Any]:
    """The effective settings in the shape of a YAML file, so that a run can be repeated from it.

    Servers that are discovered stand as the few settings somebody changed, usually none; what is
    left to the server manager's own defaults is not listed.

    Args:
        settings: of the run.
        only_changed: Whether to leave out what has the default of its class, and empty sections.
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
    """A default as text; None when there is no default.

    Args:
        name: Full name of the setting; its last part tells whether the value is a secret.
        default: Any value a field may hold.
    """
    if default is PydanticUndefined:
        return None
    value = next(iter(_plain({name.rpartition(".")[2]: default}).values()))
    if isinstance(value, str):
        return value or '""'
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def shown_servers(servers: ServerConfigs, *, only_changed: bool = False) -> Any:
    """Servers as a section of a YAML file.

    Args:
        servers: of the run.
        only_changed: Whether to leave out what has the default of its class.
    """
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
