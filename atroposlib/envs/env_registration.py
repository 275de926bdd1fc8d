"""Registering an environment with the trajectory service, and keeping that standing.

wandb_info (waits for the trainer) -> register-env (waits for it to start) -> info
status-env, again and again; an id the service forgot goes back to register-env
"""

from __future__ import annotations

import logging
import time
from typing import Any

from atroposlib.envs.capacity import CapacityLimits, QueueStatus, derived_batch_size
from atroposlib.envs.env_delivery import DeliveringEnv
from atroposlib.envs.env_hooks import settle
from atroposlib.envs.env_metrics import dated_run_name
from atroposlib.envs.env_session import UNKNOWN_ENV_STATUSES, EnvSession
from atroposlib.errors import ConfigError, TrajectoryApiError

__all__ = ["RegisteredEnv"]

logger = logging.getLogger(__name__)


class RegisteredEnv(DeliveringEnv):
    """The registered half of a serving environment.

    Attributes:
        retry_interval_s: seconds between two attempts while the service or trainer is missing.
        env_id: id of the registration, None before it.
        status_dict: latest `/status-env` reply, None before the first.
        max_num_workers: rollouts at once, whatever the queue.
        checkpoint_interval: trainer steps between two checkpoints.
    """

    retry_interval_s = 1.0

    env_id: int | None
    status_dict: dict[str, Any] | None
    max_num_workers: int
    checkpoint_interval: int
    _asked_steps: int
    _groups_in_status: int

    def _open_session(self) -> EnvSession:
        from atroposlib.api.client import RetryRule, TrajectoryApiClient

        client = TrajectoryApiClient(
            self.config.rollout_server_url,
            # The session repeats posts itself: the id in them may have changed meanwhile.
            post_retry=RetryRule(attempts=1),
            token=self._service_token(),
        )
        return EnvSession(client, retry_s=self.retry_interval_s)

    def _service_token(self) -> str | None:
        """Return what the service is shown when it asks for a token."""
        return None

    def _joined_session(self) -> EnvSession:
        if self.service_session is None:
            self.service_session = self._open_session()
        return self.service_session

    async def setup_wandb(self) -> None:
        """Open the Weights & Biases run under the trainer's project, once the trainer named it.

        Does nothing when the environment has set `wandb_project` and opened a run by itself.
        """
        if not self.config.use_wandb or self.wandb_project is not None:
            return
        session = self._joined_session()

        async def project_and_group() -> dict[str, Any] | None:
            reply = await session.client.wandb_info()
            return reply if reply["project"] is not None else None

        reply = await session.ask(project_and_group, waiting_for="the trainer to register")
        self.wandb_project, self.wandb_group = reply["project"], reply["group"]
        stem = self.config.wandb_name
        self._start_run_log(name=dated_run_name(stem, now=time.time()) if stem else None)

    async def _register_env(self) -> dict[str, Any]:
        """Ask once to be registered; return the reply."""
        session = self._joined_session()
        # Where a trainer took over from an export or another trainer, the environment keeps its id.
        earlier = session.earlier_registration
        return await session.client.register_env(
            **({} if earlier is None else {"earlier": earlier}),
            max_token_length=self.config.max_token_length,
            desired_name=self.desired_name,
            weight=self.config.inference_weight,
            group_size=self.config.group_size,
            min_batch_allocation=self.config.min_batch_allocation,
        )

    async def register_env(self) -> None:
        """Register with the service, waiting for it and for the trainer to start.

        Raises:
            ConfigError: neither the config nor the trainer gives a number of steps.
        """
        session = self._joined_session()

        async def accepted() -> dict[str, Any] | None:
            reply = await self._register_env()
            return reply if reply["status"] == "success" else None

        reply = await session.ask(accepted, waiting_for="the trainer to start")
        is_first = session.env_id is None
        self.env_id = reply["env_id"]
        self.wandb_prepend = reply["wandb_name"]
        if is_first or reply["starting_step"] < self.curr_step:
            # A later step is left to `env_step_checks`: boundaries may lie on the way to it.
            self.curr_step = reply["starting_step"]
        self.checkpoint_dir = reply["checkpoint_dir"]
        self.checkpoint_interval = reply["checkpoint_interval"]
        self._trainer_steps = reply["num_steps"]
        self.config.total_steps = self._last_step(reply["num_steps"])
        session.enter(reply["env_id"], run_id=reply.get("run_id"))
        self._name_metrics_file(reply["wandb_name"])
        logger.info("registered as %s at step %d", self.wandb_prepend, self.curr_step)
        if is_first and self.curr_step > 0:
            self.load_checkpoint()

    def _last_step(self, trainer_steps: int) -> int:
        """Return the step to end at: the trainer's last, or `total_steps` where that is less."""
        asked = self._asked_steps
        if asked == -1:
            if trainer_steps == -1:
                raise ConfigError(
                    "total_steps is -1, but the trainer registered no number of steps either; "
                    "set --env.total_steps"
                )
            return trainer_steps
        if self.config.end_with_trainer and 0 < trainer_steps < asked:
            return trainer_steps
        return asked

    async def get_server_info(self) -> None:
        """Take batch size and length limit from the trainer.

        Raises:
            ConfigError: no batch size is known, or a group does not fit a batch.
        """
        session = self._joined_session()
        info = await session.ask(session.client.info, waiting_for="the trainer's settings")
        if info["batch_size"] != -1:
            self.config.batch_size = info["batch_size"]
        if info["max_token_len"] != -1:
            self.max_token_len = info["max_token_len"]
        if self.max_token_len <= 0:
            logger.info("the trainer sets no length limit; groups of any length are sent")
        batch_size, group_size = self.config.batch_size, self.config.group_size
        if batch_size == -1:
            raise ConfigError(
                "no batch size is known: the trainer registered none and env.batch_size is -1"
            )
        if group_size > batch_size:
            raise ConfigError(
                f"group_size is {group_size} but the trainer's batch_size is {batch_size}; "
                "a group must fit into one batch"
            )

    async def get_status(self) -> None:
        """Fetch the queue's status into `status_dict`, registering again when we were forgotten."""
        session = self._joined_session()
        groups_in_status = 0

        async def status() -> dict[str, Any] | None:
            nonlocal groups_in_status
            for _ in range(2):  # the second time under a new registration
                groups_in_status = session.num_groups_sent
                try:
                    if session.env_id is not None:
                        return await session.status(session.env_id)
                except TrajectoryApiError as error:
                    if error.status not in UNKNOWN_ENV_STATUSES:
                        raise
                    logger.warning(
                        "the service does not know us any more (%s); registering again", error
                    )
                session.forget_registration()
                await settle(self.register_env())
                await settle(self.get_server_info())
            return None

        self.status_dict = await session.ask(status, waiting_for="the status of the queue")
        self._groups_in_status = groups_in_status
        self.server.policy_version = self.status_dict.get("policy_version")
        self.max_num_workers = self._most_workers()
        if self.config.inference_weight >= 0:
            await settle(self.server.update_weight(self.status_dict.get("env_weight", 1.0)))

    def _most_workers(self) -> int:
        if self.config.max_num_workers != -1:
            return self.config.max_num_workers
        return self.config.max_num_workers_per_node * len(self.server.servers)

    @property
    def derived_batch_size(self) -> int:
        """Sequences of each batch this environment may fill, -1 when unknown."""
        if self.status_dict is None:
            return self.config.batch_size
        return derived_batch_size(
            batch_size=self.config.batch_size,
            unallocated_fraction=self.status_dict.get("unallocated_fraction", 1.0),
            min_batch_allocation=self.config.min_batch_allocation,
        )

    def _queue_status(self) -> QueueStatus:
        reply = self.status_dict or {"current_step": self.curr_step, "queue_size": 0}
        unreported = self._joined_session().num_groups_sent - self._groups_in_status
        return QueueStatus.from_reply(reply, unreported_groups=unreported)

    def _capacity_limits(self) -> CapacityLimits:
        return CapacityLimits(
            group_size=self.config.group_size,
            batch_size=self.config.batch_size,
            max_batches_offpolicy=self.config.max_batches_offpolicy,
            max_workers=self.max_num_workers,
            total_steps=self.config.total_steps,
            min_batch_allocation=self.config.min_batch_allocation,
        )
