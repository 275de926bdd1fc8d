"""The placement of a run on a Ray cluster: its supervisor is submitted, and creates the rest.

    atropos-up ──► RaySupervisor ──► PartHost per part     (`ray_supervisor`)
     may leave

The actors of a run are those whose names start with `NAME.` in the namespace of its run file; no
other is ended. The output folder and the working directory are on storage that all nodes share.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from atroposlib.errors import AtroposError, ConfigError, MissingExtraError
from example_trainer.cluster.parts import Resources
from example_trainer.cluster.placement import ENDED, PartState, RunStatus
from example_trainer.cluster.ray_hosts import GRACE_S, read_json
from example_trainer.cluster.ray_supervisor import (
    ENDING_S,
    STATE_FILE,
    SUPERVISOR,
    RaySupervisor,
    actor_options,
    placeless_parts,
    unit_names,
)
from example_trainer.cluster.run_file import RunFile
from example_trainer.cluster.supervision import tail_of
from example_trainer.launch.options import RunPaths

_ANSWER_S = 60.0
_LOG_S = 10.0
_POLL_S = 0.25
_HEADER = """\
# The actors of run {name}. A service or an engine is reached at the node of its actor, on a port
# that is free there: `node-of-PART` and 0 below. `python` is the interpreter of the node's Ray.
"""


class RayRunError(AtroposError, RuntimeError):
    """An actor of a run did not answer."""


class RayRun:
    """A run on a Ray cluster, from any machine that reaches the cluster and the output folder.

    A placement; the supervisor gets the content of the run file, not the file.
    """

    def __init__(self, run: RunFile, file: Path) -> None:
        self._run = run
        self._file = file

    def render(self) -> Mapping[str, str]:
        """Return the actors as YAML, and the settings files of the parts by name."""
        parts = placeless_parts(self._run)
        content = {
            "address": self._run.ray.address,
            "folder": str(self._run.folder),
            "output": str(self._run.output),
            "supervisor": actor_options(self._run, SUPERVISOR, Resources()),
            "actors": [
                {
                    "options": actor_options(self._run, unit, part.resources),
                    "command": list(part.command),
                    "variables": dict(part.variables),
                    "secrets": dict(part.secrets),
                    "ready_url": part.ready_url,
                    "after": list(part.after),
                    "restarts": vars(part.restarts).copy(),
                }
                for part in parts
                for unit in unit_names(part)
            ],
        }
        text = yaml.safe_dump(content, sort_keys=False, width=100)
        files = {name: text for part in parts for name, text in part.files.items()}
        return {"ray.yaml": _HEADER.format(name=self._run.name) + text, **files}

    def submit(self) -> str:
        """Create the supervisor, which creates all other actors; do not wait for them.

        Raises:
            MissingExtraError: Ray is not installed.
            ConfigError: The run is invalid or on the cluster already, or there is no cluster.
        """
        placeless_parts(self._run)
        ray = self._connect()
        name = self._run.name
        if self._actor(SUPERVISOR) is not None:
            if self.status().state not in ENDED:
                raise ConfigError(
                    f"run {name} is on this cluster already; end it with `atropos-up down "
                    f"{self._file}`, or give the new run another name"
                )
            self._remove_actors()
        options = actor_options(self._run, SUPERVISOR, Resources())
        supervisor = ray.remote(RaySupervisor).options(**options)
        handle = supervisor.remote(self._run.model_dump_json(), uuid.uuid4().hex)
        self._answer(handle.status)
        return f"run {name} is on the Ray cluster {ray.get_runtime_context().gcs_address}"

    def status(self) -> RunStatus:
        ray = self._connect()
        supervisor = self._actor(SUPERVISOR)
        if supervisor is not None:
            try:
                found: RunStatus = self._answer(supervisor.status)
                return found
            except RayRunError as error:
                # Its name is still known for a moment after its end.
                if not isinstance(error.__cause__, ray.exceptions.ActorDiedError):
                    raise
        saved = read_json(self._run.output / STATE_FILE)
        if not saved:
            return RunStatus("none")
        last = RunStatus.from_json(saved["status"])
        if last.state in ENDED:
            return last
        unknown: PartState = "unknown"
        parts = tuple(part._replace(state=unknown) for part in last.parts)
        return RunStatus("lost", parts, "its supervisor is not on the cluster")

    def logs(self, part: str, *, lines: int) -> Iterable[str]:
        known = [unit for each in placeless_parts(self._run) for unit in unit_names(each)]
        if part not in known:
            raise ConfigError(f"{part!r} is not a part of this run; expected one of {known}")
        self._connect()
        host = self._actor(part)
        if host is not None:
            with contextlib.suppress(RayRunError):  # it is being restarted
                found: list[str] = self._answer(host.log, lines, limit_s=_LOG_S)
                return found
        return tail_of(RunPaths(self._run.output).logs / f"{part}.log", lines=lines)

    def down(self) -> str:
        self._connect()
        supervisor = self._actor(SUPERVISOR)
        if supervisor is not None:
            with contextlib.suppress(RayRunError):  # programs end with their actors too
                self._answer(supervisor.stop)
                self._wait_for_end(supervisor)
        count = self._remove_actors()
        return f"run {self._run.name}: ended {count} actors"

    def _wait_for_end(self, supervisor: Any) -> None:
        deadline = time.monotonic() + ENDING_S + GRACE_S
        while self._answer(supervisor.status).state not in ENDED:
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _connect(self) -> Any:
        """Return the package `ray`, connected to the cluster."""
        try:
            import ray
        except ImportError as error:
            raise MissingExtraError("ray", extra="ray") from error
        if not ray.is_initialized():
            address = self._run.ray.address
            try:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"ray.address: no Ray cluster at {address!r} ({error}); start one with "
                    "`ray start --head`, or set RAY_ADDRESS"
                ) from error
        return ray

    def _actor(self, unit: str) -> Any:
        """Return the handle of an actor of this run, None if there is none."""
        import ray

        try:
            return ray.get_actor(f"{self._run.name}.{unit}", namespace=self._run.ray.namespace)
        except ValueError:
            return None

    def _remove_actors(self) -> int:
        """End the actors of this run; return how many there were."""
        import ray

        prefix = f"{self._run.name}."
        units = [
            actor["name"].removeprefix(prefix)
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == self._run.ray.namespace and actor["name"].startswith(prefix)
        ]
        # The supervisor first, since it replaces hosts.
        for unit in sorted(units, key=lambda each: each != SUPERVISOR):
            handle = self._actor(unit)
            if handle is not None:
                ray.kill(handle, no_restart=True)
        deadline = time.monotonic() + _ANSWER_S
        while any(map(self._actor, units)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)  # another run may use the names only then
        return len(units)

    def _answer(self, method: Any, *arguments: Any, limit_s: float = _ANSWER_S) -> Any:
        """Return the answer of an actor, which Ray may restart meanwhile."""
        import ray

        deadline = time.monotonic() + limit_s
        while True:
            try:
                remaining_s = max(0.0, deadline - time.monotonic())
                return ray.get(method.remote(*arguments), timeout=remaining_s)
            except ray.exceptions.ActorUnavailableError as error:
                if time.monotonic() >= deadline:
                    raise RayRunError(f"run {self._run.name}: {error}") from error
                time.sleep(_POLL_S)
            except ray.exceptions.RayError as error:
                raise RayRunError(
                    f"run {self._run.name}: an actor did not answer in {limit_s:g} s ({error})"
                ) from error
