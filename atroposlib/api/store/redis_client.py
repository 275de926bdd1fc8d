"""The client of a Redis server: made from a URL, shown by an address, its errors told apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atroposlib.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from redis.asyncio import Redis

__all__ = ["address_of", "connect", "is_passing"]

_SOCKET_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 32


def connect(url: str) -> Redis:
    """Return a client that connects when it is used, and never tries again by itself.

    Raises:
        ConfigError: the URL is malformed.
        MissingExtraError: the client library is not installed.
    """
    try:
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        raise MissingExtraError("redis", extra="redis") from error
    try:
        pool = BlockingConnectionPool.from_url(url, max_connections=_MAX_CONNECTIONS)
    except ValueError:
        # The reason may quote the URL with its password, so nothing of it is passed on.
        raise ConfigError(
            "the Redis URL is malformed; expected redis://[[user]:password@]host[:port][/database]"
            ", rediss://... or unix:///path; percent-encode special characters in the password"
        ) from None
    pool.connection_kwargs.update(
        decode_responses=False,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
        socket_connect_timeout=_CONNECT_TIMEOUT_S,
        socket_timeout=_SOCKET_TIMEOUT_S,
    )
    return Redis(connection_pool=pool)


def address_of(client: Redis) -> str:
    """Return host, port and database, or the path of the socket; never a password."""
    settings = client.connection_pool.connection_kwargs
    if "path" in settings:
        return f"unix://{settings['path']}"
    host, port = settings.get("host", "localhost"), settings.get("port", 6379)
    return f"{host}:{port}/{settings.get('db', 0)}"


def is_passing(error: Exception) -> bool:
    """Whether waiting may help: the server is away, starts, or hands over to another."""
    from redis import exceptions

    refusals = (exceptions.AuthenticationError, exceptions.AuthorizationError)
    if isinstance(error, refusals) or isinstance(error.__cause__, refusals):
        return False
    passing = (
        exceptions.ConnectionError,
        exceptions.TimeoutError,
        exceptions.ReadOnlyError,
        exceptions.ClusterDownError,
        exceptions.MasterDownError,
        exceptions.TryAgainError,
    )
    return isinstance(error, passing) or str(error).startswith(("BUSY ", "LOADING ", "MISCONF "))
