"""The asynchronous client of the trajectory service, for environments."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from atroposlib.api.client_address import service_address
from atroposlib.api.client_bodies import (
    BINARY_LANE_HEADERS,
    Body,
    Encoder,
    encode_body,
    is_on_this_machine,
    plain,
)
from atroposlib.api.client_rules import (
    POST_RETRY,
    RetryRule,
    delivered_groups,
    with_status_defaults,
)
from atroposlib.api.client_transport import AsyncTransport
from atroposlib.errors import TrajectoryApiError
from atroposlib.utils.secret_masking import without_secrets
from atroposlib.utils.side_thread import SideThread
from atroposlib.wire import encode_group, encode_groups

__all__ = ["TrajectoryApiClient"]


class TrajectoryApiClient:
    """Asynchronous client; one per event loop, safe for concurrent use.

    Every method waits for the service and raises `TrajectoryApiError` when it refuses or cannot be
    reached. Requests that may be repeated are. A posted group carries an `Idempotency-Key`; where
    the service honours it, repeating is safe in every case, and groups outlast a service that is
    restarted. Cancelling is safe, but a posted group may have arrived.

    Args:
        base_url: address of the service, e.g. `http://localhost:8000`.
        timeout_s: limit on one attempt.
        retry: when failed requests are repeated.
        post_retry: the same for posted groups.
        token: shown to a service that asks for one; never logged.

    Raises:
        ConfigError: the address or the token cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 60.0,
        retry: RetryRule | None = None,
        post_retry: RetryRule | None = None,
        token: str | None = None,
    ) -> None:
        self.base_url = service_address(base_url)
        self._side_thread = SideThread()
        self._compresses = not is_on_this_machine(self.base_url)
        self._transport = AsyncTransport(
            self.base_url,
            timeout_s=timeout_s,
            retry=retry or RetryRule(),
            post_retry=post_retry or POST_RETRY,
            token=token,
        )

    async def __aenter__(self) -> TrajectoryApiClient:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def num_outages(self) -> int:
        """How often the service was not there; a new count says it may have been replaced."""
        return self._transport.num_outages

    async def close(self) -> None:
        """Close the connections; the client may be used again and then opens new ones."""
        self._side_thread.close()
        await self._transport.close()

    async def register_trainer(self, **registration: Any) -> int:
        """Register a trainer with the fields of `POST /register`; return its id."""
        body = plain(registration)
        return int(
            (await self._transport.send("POST", "/register", body, is_repeatable=True))["uuid"]
        )

    async def register_env(
        self,
        *,
        max_token_length: int,
        desired_name: str,
        weight: float,
        group_size: int,
        min_batch_allocation: float | None = None,
        earlier: tuple[int, str] | None = None,
    ) -> dict[str, Any]:
        """Register an environment; `status` of the answer is `success` or asks to wait.

        `earlier` is the id and the run of an earlier registration: where a trainer has taken that
        run over, the environment keeps its id.
        """
        request = {
            "max_token_length": max_token_length,
            "desired_name": desired_name,
            "weight": weight,
            "group_size": group_size,
            "min_batch_allocation": min_batch_allocation,
        }
        if earlier is not None:
            request["env_id"], request["run_id"] = earlier
        return dict(await self._transport.send("POST", "/register-env", plain(request)))

    async def disconnect_env(self, env_id: int) -> None:
        """Sign an environment off; raises when the service does not know it."""
        body = plain({"env_id": env_id})
        answer = await self._transport.send("POST", "/disconnect-env", body, is_repeatable=True)
        if answer.get("status") != "success":
            raise TrajectoryApiError(
                f"POST {without_secrets(self.base_url)}/disconnect-env: {answer.get('error')}",
                status=200,
            )

    async def info(self) -> dict[str, Any]:
        """Return `batch_size` and `max_token_len`, -1 before a trainer registered."""
        return dict(await self._get("/info"))

    async def wandb_info(self) -> dict[str, Any]:
        """Return `group` and `project`, None before a trainer registered."""
        return dict(await self._get("/wandb_info"))

    async def status(self) -> dict[str, Any]:
        """Return `current_step` and `queue_size` (groups)."""
        return dict(await self._get("/status"))

    async def status_env(self, env_id: int) -> dict[str, Any]:
        """Return the queue as one environment sees it; status 404 asks it to register again."""
        body = plain({"env_id": env_id})
        answer = await self._transport.send("GET", "/status-env", body, is_repeatable=True)
        return with_status_defaults(answer)

    async def batch(self) -> list[dict[str, Any]] | None:
        """Take the next batch, None when none is ready; raises when no trainer is registered."""
        answer = await self._transport.send(
            "GET", "/batch", headers=BINARY_LANE_HEADERS, is_repeatable=True
        )
        return delivered_groups(answer, self.base_url)

    async def latest_example(self) -> dict[str, Any]:
        """Return the group queued last."""
        return dict(await self._get("/latest_example"))

    async def post_group(
        self, group: Mapping[str, Any], *, key: str | None = None
    ) -> dict[str, Any]:
        """Post one group.

        Args:
            group: fields of a scored group.
            key: names this delivery. Posts under one key are stored once by services that honour
                keys; None makes a new one.

        Raises:
            GroupError: the group is malformed; nothing was sent.
            TrajectoryApiError: the service refused it, or stayed away for too long.
        """
        return await self._post("/scored_data", encode_group, group, key)

    async def post_groups(
        self, groups: Sequence[Mapping[str, Any]], *, key: str | None = None
    ) -> dict[str, Any]:
        """Post groups together: stored all or none; otherwise like `post_group`."""
        return await self._post("/scored_data_list", encode_groups, groups, key)

    async def _post(
        self, path: str, encode: Encoder, value: Any, key: str | None
    ) -> dict[str, Any]:
        """Post in the best format the service takes; what it takes is remembered."""
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        refused: list[Body] = []
        traits = self._transport.traits
        for form in traits.formats():
            # In a thread: a long group must not hold up the rollouts that share this event loop.
            body = await self._side_thread.run(
                encode_body, encode, value, form, zstd=self._compresses
            )
            try:
                answer = dict(
                    await self._transport.send("POST", path, body, headers=headers, is_post=True)
                )
            except TrajectoryApiError as error:
                if not traits.may_be_format(error.status, body):
                    raise
                refused.append(body)
                refusal = error
            else:
                traits.drop(refused)
                return answer
        raise refusal

    async def _get(self, path: str) -> Any:
        return await self._transport.send("GET", path, is_repeatable=True)
