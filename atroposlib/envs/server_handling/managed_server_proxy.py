"""Command-line program that serves the agent proxy; re-exports its public names.

python -m atroposlib.envs.server_handling.managed_server_proxy --config proxy.json
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atroposlib.envs.running import favour_event_loop
from atroposlib.envs.server_handling.proxy.app import KEEP_ALIVE_S, create_app
from atroposlib.envs.server_handling.proxy.refusals import ProxyRefusal, openai_error_body
from atroposlib.envs.server_handling.proxy.requests import (
    ChatCompletionProxyRequest,
    ChatMessage,
    RenderResponse,
    ServerEntry,
    SessionCreateRequest,
    SessionCreateResponse,
)
from atroposlib.envs.server_handling.proxy.sessions import ProxySettings, SessionState, config_of
from atroposlib.errors import ConfigError
from atroposlib.utils.command_parser import CommandParser, prepare_command
from atroposlib.utils.web_pages import names_of_address

__all__ = [
    "ChatCompletionProxyRequest",
    "ChatMessage",
    "ProxyFile",
    "ProxySettings",
    "RenderResponse",
    "SessionCreateRequest",
    "SessionCreateResponse",
    "SessionState",
    "create_app",
    "main",
    "openai_error",
]

logger = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ProxyFile(BaseModel):
    """The configuration file of the program."""

    model_config = ConfigDict(protected_namespaces=(), extra="forbid")

    model_name: str
    """Model the servers serve."""
    tokenizer_name: str = "none"
    """Its tokenizer: a hub name or a directory; `none` uses `model_name`."""
    servers: list[ServerEntry] = Field(min_length=1)
    settings: ProxySettings = Field(default_factory=ProxySettings)


def openai_error(
    message: str,
    status: int = 400,
    type_: str = "invalid_request_error",
    code: str | None = None,
) -> JSONResponse:
    """Return an error response in OpenAI's shape."""
    refusal = ProxyRefusal(message, status=status, kind=type_, code=code or str(status))
    return JSONResponse(openai_error_body(refusal), status_code=status)


def read_proxy_file(path: Path) -> ProxyFile:
    """Read the configuration file.

    Raises:
        ConfigError: it cannot be read, or a field is missing, unknown or invalid; the message never
            contains keys of the file.
    """
    try:
        return ProxyFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, entry['loc'])) or 'file'}: {entry['msg']}"
            for entry in error.errors(include_input=False, include_url=False)
        )
        raise ConfigError(f"{path}: {problems}") from None


def main(argv: Sequence[str] | None = None) -> None:
    """Serve the proxy until it is stopped."""
    prepare_command()
    parser = CommandParser(description="Serve tracked sessions to unmodified agents.")
    parser.add_argument("--config", type=Path, required=True, help="JSON file: model and servers")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (%(default)s)")
    parser.add_argument("--port", type=int, default=9100, help="port to bind (%(default)s)")
    arguments = parser.parse_args(argv)
    try:
        file = read_proxy_file(arguments.config)
    except ConfigError as error:
        parser.error(str(error))
    _serve(file, host=arguments.host, port=arguments.port)


def _serve(file: ProxyFile, *, host: str, port: int) -> None:
    import uvicorn

    from atroposlib.envs.server_handling.openai_compatible import load_tokenizer
    from atroposlib.envs.server_handling.server_manager import ServerManager

    logging.basicConfig(level=logging.INFO)
    if host not in _LOOPBACK and file.settings.admin_key is None:
        logger.warning(
            "any machine that reaches %s may open sessions and change the servers; "
            "set settings.admin_key and settings.require_keys in the configuration file",
            host,
        )
    configs = [
        config_of(entry, model_name=file.model_name, tokenizer_name=file.tokenizer_name)
        for entry in file.servers
    ]
    app = create_app(
        ServerManager(configs),
        load_tokenizer(configs[0]),
        file.model_name,
        settings=file.settings.model_copy(
            update={"allowed_hosts": (*file.settings.allowed_hosts, *names_of_address(host))}
        ),
    )
    favour_event_loop()
    # No access log: URLs contain session names, which grant access while keys are not required.
    uvicorn.run(app, host=host, port=port, access_log=False, timeout_keep_alive=KEEP_ALIVE_S)


if __name__ == "__main__":
    main()
