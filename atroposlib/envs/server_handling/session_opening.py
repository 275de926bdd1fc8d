"""Opening tracked sessions: at a server of our own, or at a managed-server proxy."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from atroposlib.envs.server_handling.managed_server import DummyManagedServer, ManagedServer
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.proxy_client import ProxyManagedServer, create_proxy_session
from atroposlib.envs.server_handling.session_server import present_server
from atroposlib.errors import ConfigError, NoTokenIdsError

__all__ = ["open_proxy_session", "open_session", "wants_placeholders"]

logger = logging.getLogger(__name__)

_DUMMY_SWITCH = "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"
_PROXY_KEY = "ATROPOS_PROXY_KEY"  # pragma: allowlist secret


def open_session(
    server: Any,
    tokenizer: Any,
    *,
    tool_parser: str | None,
    preserve_think_blocks: bool,
    policy_version: Callable[[], int | None],
) -> ManagedServer | DummyManagedServer:
    """Return a session that records the tokens of its requests: the exact ones where possible.

    Args:
        server: Where its requests go, or a `SessionServer` that decides each time.
        tokenizer: Renders chats and decodes completions; None: the server's own.
        tool_parser: Name of the tool-call format, None for none.
        preserve_think_blocks: Kept for callers; thinking is preserved either way.
        policy_version: What the service last called the policy; for engines that do not say.

    Raises:
        NoTokenIdsError: The server gives no token ids, and there is no tokenizer to make them from
            its texts.
    """
    has_no_ids = isinstance(present_server(server), OpenAIServer)
    if has_no_ids and wants_placeholders():
        return DummyManagedServer(server, tokenizer)
    session = ManagedServer(
        server,
        tokenizer,
        tool_parser=tool_parser,
        preserve_think_blocks=preserve_think_blocks,
        policy_version=policy_version,
    )
    if has_no_ids and session.tokenizer is None:
        raise NoTokenIdsError(
            "a server of type openai gives no token ids, and there is no tokenizer to make them "
            "from its texts; give managed_server one (--env.tokenizer_name), use server_type vllm "
            f"with such an engine, or set {_DUMMY_SWITCH}=1 to get placeholder tokens"
        )
    return session


def wants_placeholders() -> bool:
    """Whether sessions without token ids are to hold placeholder tokens; warns if so."""
    if os.environ.get(_DUMMY_SWITCH, "").lower() not in ("1", "true", "yes"):
        return False
    logger.warning(
        "server_type openai with %s: tracked sequences hold placeholder tokens, which exports "
        "and trainers refuse; without the variable texts are tokenized",
        _DUMMY_SWITCH,
    )
    return True


async def open_proxy_session(
    proxy_url: str | None, base_url: str | None, *, tool_parser: str | None, model_name: str
) -> ProxyManagedServer:
    """Return a session at a proxy, which records the tokens; closing it ends the session there.

    Args:
        proxy_url: Address of the proxy.
        base_url: Server the session is to use; None: the proxy chooses.
        tool_parser: Name of the tool-call format; None: Hermes.
        model_name: What answers say they come from.

    Raises:
        ConfigError: There is no address.
        RuntimeError: The proxy refused.
    """
    if proxy_url is None:
        raise ConfigError(
            "use_proxy is set but no proxy is known; set proxy_url or ATROPOS_PROXY_URL"
        )
    return await create_proxy_session(
        proxy_url,
        base_url,
        tool_parser=tool_parser or "hermes",
        model_name=model_name,
        admin_key=os.environ.get(_PROXY_KEY),
    )
