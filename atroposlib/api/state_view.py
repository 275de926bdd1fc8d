"""Read-only views of a run under the attribute names that tools look for on `app.state`."""

from __future__ import annotations

from starlette.datastructures import State

from atroposlib.api.queue import QueuedGroup
from atroposlib.api.run import Run
from atroposlib.api.run_state import RunState

__all__ = ["StateView"]


class StateView(State):
    """What `app.state` is: the run under `run`, and figures derived from it.

    Groups are listed by their descriptions; their payloads are in the store.
    """

    def __init__(self, run: Run) -> None:
        super().__init__({"run": run})

    @property
    def _run(self) -> RunState:
        run: Run = self._state["run"]
        return run.state

    @property
    def queue(self) -> list[QueuedGroup]:
        """Groups that wait for a batch, oldest first."""
        return list(self._run.queue)

    @property
    def buffer(self) -> dict[int, list[QueuedGroup]]:
        """Groups that wait for others to add up to their environment's group size."""
        return {env.env_id: list(env.buffer) for env in self._run.envs if env.buffer}

    @property
    def curr_batch(self) -> list[list[QueuedGroup]]:
        """Always empty: batches are formed when they are asked for."""
        return []

    @property
    def started(self) -> bool:
        """Whether the trainer has asked for a batch."""
        return self._run.is_started

    @property
    def envs(self) -> list[dict[str, object]]:
        """Registered environments."""
        return [
            {
                "max_context_len": env.max_token_length,
                "weight": env.weight,
                "desired_name": env.desired_name,
                "real_name": env.real_name,
                "registered_id": env.env_id,
                "last_update": env.last_update,
                "connected": env.is_connected,
                "min_batch_allocation": env.min_batch_allocation,
                "group_size": env.largest_group,
            }
            for env in self._run.envs
        ]

    @property
    def requesters(self) -> list[int]:
        """Ids given to trainers."""
        return list(self._run.trainer_ids)

    @property
    def latest(self) -> QueuedGroup | None:
        """Description of the group queued last."""
        return self._run.latest

    @property
    def group(self) -> str | None:
        """Run group of the trainer."""
        return self._run.registration.wandb_group if self._run.registration else None

    @property
    def project(self) -> str | None:
        """Project of the trainer."""
        return self._run.registration.wandb_project if self._run.registration else None

    @property
    def batchsize(self) -> int:
        """Sequences per batch, -1 before registration."""
        return self._run.registration.batch_size if self._run.registration else -1

    @property
    def max_token_len(self) -> int:
        """Length limit of trajectories, -1 before registration."""
        return self._run.registration.max_token_len if self._run.registration else -1

    @property
    def checkpoint_dir(self) -> str:
        """Shared directory for checkpoints, empty before registration."""
        return self._run.registration.checkpoint_dir if self._run.registration else ""

    @property
    def save_checkpoint_interval(self) -> int:
        """Steps between environment checkpoints, -1 before registration."""
        return self._run.registration.save_checkpoint_interval if self._run.registration else -1

    @property
    def num_steps(self) -> int:
        """Planned steps, -1 before registration."""
        return self._run.registration.num_steps if self._run.registration else -1

    @property
    def status_dict(self) -> dict[str, int]:
        """The step counter."""
        return {"step": self._run.step}
