"""Records as a client, a damaged disk or a foreign program might leave them in the log of a run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
from pydantic import BaseModel

from atroposlib.api import records
from atroposlib.api.records import Record, encode_record, kind_of
from atroposlib.api.schemas import MAX_BATCH_SIZE, MAX_GROUP_SIZE, RegisterEnv, Registration
from atroposlib.api.state import RunState
from tests.api.helpers import REGISTRATION

__all__ = ["Forger"]

KINDS = get_args(Record)
ODD_INTEGERS = (0, 1, 2, 3, -1, 2**31, 2**40, 2**53, 2**63 - 1, -(2**63), 2**64 - 1)
ODD_VALUES: tuple[Any, ...] = (
    *ODD_INTEGERS,
    *(None, True, 0.5, 1e308, float("nan"), float("inf"), "", "x", "1f", "\x00", "9" * 5000),
    *([], [[]], [[1, 2]], {}, {"group_size": 2**40}, {1: 2.0}, b"\xff"),
)
ENV: dict[str, Any] = {"max_token_length": 1000, "desired_name": "env", "weight": 1.0}
SPOILT = 0.3
"""How often a forged record is spoilt in some place; the others fit the state they meet."""


class Forger:
    """Makes records for a state, most of which make sense there."""

    def __init__(self, rng: random.Random, state: RunState) -> None:
        self._rng = rng
        self._state = state
        self._num_groups = 0
        self._makers: dict[type[Any], Callable[[], list[Any]]] = {
            records.TrainerRegistered: self._trainer,
            records.EnvRegistered: self._env,
            records.GroupsAdmitted: self._groups,
            records.TicketReturned: lambda: [
                *(self._state.epoch, self._env_id(), self._rng.randint(0, 9)),
                *(self._rng.random() < 0.5, 1.0),
            ],
            records.BatchFormed: self._batch,
            records.ConsumerLeft: lambda: [rng.choice(("1f", "2a")), 1.0],
            records.BatchAcknowledged: lambda: [*self._token(), 1.0],
            records.BatchPassedOver: lambda: [*self._token(), 1.0],
            records.BatchHandedOut: lambda: [*self._token(), "r", 1.0, 2.0, "k"],
            records.BatchesReturned: lambda: [[self._token()], "lost", 1.0],
            records.EnvDisconnected: lambda: [self._env_id(), True, 1.0],
            records.EnvRevived: lambda: [self._env_id(), 1.0],
            records.EnvsSeen: lambda: [self._state.epoch, {0: 1.0}],
            records.PolicyVersionSet: lambda: [self._state.epoch, rng.choice(ODD_INTEGERS)],
            records.TrainerStarted: lambda: [self._state.epoch],
            records.GroupsRemoved: lambda: [[self._rng.randint(0, self._num_groups)], 1.0],
            records.GroupsSetAside: self._flaws,
            records.RunReset: lambda: [1.0],
        }

    def any_record(self) -> bytes:
        """Return the bytes of a record, sound, spoilt in a field, or damaged in transit."""
        kind = self._kind()
        fields = self._makers[kind]()
        if self._rng.random() < SPOILT:
            self._spoil(fields)
        content = b"\x01" + msgspec.msgpack.encode([kind_of(kind), *fields])
        if self._rng.random() < SPOILT / 3:
            content = self._damaged(content)
        return content

    def admitted_record(self) -> bytes:
        """Return the bytes of a record that clients can bring about by what the service accepts."""
        kind = self._kind()
        if kind is records.EnvRegistered:
            request = self._accepted(RegisterEnv, ENV)
            return encode_record(records.EnvRegistered(len(self._state.envs), request, 1.0))
        if kind is records.TrainerRegistered:
            settings = self._accepted(Registration, REGISTRATION)
            return encode_record(records.TrainerRegistered(settings, "2a", 1.0))
        return b"\x01" + msgspec.msgpack.encode([kind_of(kind), *self._makers[kind]()])

    def _kind(self) -> type[Any]:
        often = [records.GroupsAdmitted] * 12 + [records.BatchFormed, records.BatchAcknowledged] * 6
        rarely = self._rng.random() < 0.01  # what forgets everything
        kinds = [kind for kind in KINDS if (kind is records.RunReset) == rarely]
        return self._rng.choice(kinds if rarely else kinds + often)

    def _accepted(self, model: type[BaseModel], fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a request as odd as the model lets pass."""
        while True:
            name = self._rng.choice(list(model.model_fields))
            value = self._rng.choice((*ODD_VALUES, MAX_GROUP_SIZE, MAX_BATCH_SIZE, -1e9))
            try:
                return model.model_validate({**fields, name: value}).model_dump()
            except ValueError:
                continue

    def _trainer(self) -> list[Any]:
        changes = {"batch_size": self._rng.randint(1, 9), "replace": self._rng.random() < 0.5}
        return [Registration.model_validate({**REGISTRATION, **changes}).model_dump(), "1f", 1.0]

    def _env(self) -> list[Any]:
        size = self._rng.choice((None, 1, 3, 8, 101, MAX_GROUP_SIZE))
        share = self._rng.choice((None, 0.0, 0.3, 9.0))
        changes = {"group_size": size, "min_batch_allocation": share}
        return [len(self._state.envs), {**ENV, **changes}, 1.0, self._rng.choice((0, 0, 1, 2))]

    def _groups(self) -> list[Any]:
        groups = []
        for _ in range(self._rng.randint(1, 3)):
            size = self._rng.choice((1, 2, 3, 4, 5, 8, 100))
            env_id = self._rng.choice((None, self._env_id()))
            groups.append([self._num_groups, env_id, size, size, 10])
            self._num_groups += 1
        key = self._rng.choice((None, "a", "b"))
        digest = self._rng.randint(1, 2)
        return [self._state.epoch, groups, 1.0, 0, key, digest, 0, self._ticket(), []]

    def _ticket(self) -> int | None:
        return self._rng.choice((None, self._rng.randint(0, 9)))

    def _batch(self) -> list[Any]:
        planned = self._state.plan_batch() if self._state.registration else None
        ids = [group.group_id for group in planned or list(self._state.queue)[:2]]
        return [self._state.delivery.next_id, ids, "r", 1.0, None]

    def _flaws(self) -> list[Any]:
        group_ids = (self._rng.randint(0, self._num_groups) for _ in range(2))
        flaws = [[group_id, self._rng.choice(("missing", "damaged"))] for group_id in group_ids]
        return [*self._token(), flaws, 1.0]

    def _token(self) -> list[int]:
        pending = list(self._state.delivery.pending())
        if not pending:
            return [self._rng.randint(0, 9), 1]
        batch = self._rng.choice(pending)
        return [batch.batch_id, batch.attempt + (self._rng.random() < 0.3)]

    def _env_id(self) -> int:
        return self._rng.randint(0, len(self._state.envs))

    def _spoil(self, value: Any) -> None:
        """Put something odd in one place, as deep as it goes."""
        places = list(_places(value))
        container, key = self._rng.choice(places)
        container[key] = self._rng.choice(ODD_VALUES)

    def _damaged(self, content: bytes) -> bytes:
        at = self._rng.randrange(len(content))
        if self._rng.random() < 0.5:
            return content[:at]
        return content[:at] + bytes([self._rng.randrange(256)]) + content[at + 1 :]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = range(len(value)) if isinstance(value, list) else value
    for key in list(keys):
        yield value, key
        if isinstance(value[key], (list, dict)):
            yield from _places(value[key])
