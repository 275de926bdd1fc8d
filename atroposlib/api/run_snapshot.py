"""A run's whole state as bytes, written in slices; pure.

A snapshot is one MessagePack array: the format, a head with everything that is small, then chunks
of the queue and chunks of the idempotency keys. `freeze` copies references and takes about a
millisecond per 100,000 queued groups; the encoding that follows can be interrupted anywhere, while
the run goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeVar

import msgspec

from atroposlib.api.delivery import Handout
from atroposlib.api.env_registry import EnvRecord
from atroposlib.api.idempotency import KeyEntry
from atroposlib.api.queue import QueuedGroup
from atroposlib.api.run_state import RunState
from atroposlib.api.schemas import Registration
from atroposlib.errors import ConfigError

__all__ = ["FrozenRun", "freeze", "restore", "snapshot"]

_FORMAT = 1
_CHUNK = 2000

_Entry = TypeVar("_Entry")


class _Head(msgspec.Struct):
    """The part of a state that does not grow with the queue."""

    registration: dict[str, Any] | None
    started_at: float | None
    trainer_ids: list[str]
    envs: list[EnvRecord]
    next_batch_id: int
    in_flight: list[Handout]
    returned: list[Handout]
    acknowledged: list[tuple[int, int]]
    past: list[QueuedGroup]
    step: int
    is_started: bool
    policy_version: int | None
    latest: QueuedGroup | None
    latest_is_held: bool
    counters: dict[str, int]
    epoch: int
    fence: int


class _Snapshot(msgspec.Struct, array_like=True):
    format: int
    head: bytes
    queue: list[bytes]
    discardable: list[bytes]
    keys: list[bytes]


_encode = msgspec.msgpack.Encoder().encode
_queue_decoder = msgspec.msgpack.Decoder(list[QueuedGroup])
_ids_decoder = msgspec.msgpack.Decoder(list[int])
_keys_decoder = msgspec.msgpack.Decoder(list[tuple[str, KeyEntry]])


class FrozenRun:
    """The state of a run at one moment, ready to be encoded while the run goes on."""

    def __init__(self, state: RunState) -> None:
        self._head = _head_of(state)
        self._queue = list(state.queue)
        self._discardable = list(state.discardable)
        self._keys = list(state.keys.items())
        self._snapshot = _Snapshot(_FORMAT, b"", [], [], [])

    def encode_in_slices(self) -> Iterator[None]:
        """Encode a part, about a millisecond of work, per step of the iteration."""
        self._snapshot.head = _encode(self._head)
        yield
        entries: list[tuple[list[Any], list[bytes]]] = [
            (self._queue, self._snapshot.queue),
            (self._discardable, self._snapshot.discardable),
            (self._keys, self._snapshot.keys),
        ]
        for items, chunks in entries:
            for chunk in _chunked(items):
                chunks.append(_encode(chunk))
                yield

    def content(self) -> bytes:
        """Return the snapshot; every slice must have been encoded."""
        return _encode(self._snapshot)


def freeze(state: RunState) -> FrozenRun:
    """Note the state as it is now."""
    return FrozenRun(state)


def snapshot(state: RunState) -> bytes:
    """Return the whole state as bytes, at one go."""
    frozen = freeze(state)
    for _ in frozen.encode_in_slices():
        pass
    return frozen.content()


def restore(state: RunState, content: bytes) -> None:
    """Bring a state that nothing was applied to, to where a snapshot was taken.

    Raises:
        ConfigError: the snapshot is damaged, or was written by a later version of the service.
    """
    try:
        found = msgspec.msgpack.decode(content, type=_Snapshot)
        if found.format != _FORMAT:
            raise ConfigError(
                f"the run's snapshot has format {found.format}, this service reads {_FORMAT}; "
                "serve the run with the version that wrote it, or start another run"
            )
        head = msgspec.msgpack.decode(found.head, type=_Head)
        queue = [group for chunk in found.queue for group in _queue_decoder.decode(chunk)]
        discardable = [i for chunk in found.discardable for i in _ids_decoder.decode(chunk)]
        keys = [item for chunk in found.keys for item in _keys_decoder.decode(chunk)]
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"the run's snapshot cannot be read ({error}); serve the run with the version that "
            "wrote it, or start another run"
        ) from error
    _restore_head(state, head)
    for group in queue:
        state.queue.append(group)
    state.put_back_discardable(discardable)
    state.keys.restore(keys)


def _head_of(state: RunState) -> _Head:
    delivery = state.delivery
    return _Head(
        registration=state.registration.model_dump() if state.registration else None,
        started_at=state.started_at,
        trainer_ids=[f"{trainer_id:x}" for trainer_id in state.trainer_ids],
        envs=[_plain(env) for env in state.envs],
        next_batch_id=delivery.next_id,
        in_flight=list(delivery.in_flight.values()),
        returned=list(delivery.returned.values()),
        acknowledged=list(delivery.acknowledged.items()),
        past=list(state.past),
        step=state.step,
        is_started=state.is_started,
        policy_version=state.policy_version,
        latest=state.latest,
        latest_is_held=state.latest_is_held,
        counters=dict(sorted(state.counters.items())),
        epoch=state.epoch,
        fence=state.fence,
    )


def _plain(env: EnvRecord) -> EnvRecord:
    """Copy an environment without what only this replica knows."""
    return dataclasses.replace(env, largest_group=env.group_size or 1, buffer=list(env.buffer))


def _restore_head(state: RunState, head: _Head) -> None:
    state.registration = Registration(**head.registration) if head.registration else None
    state.started_at = head.started_at
    state.trainer_ids.extend(int(trainer_id, 16) for trainer_id in head.trainer_ids)
    state.envs.restore(head.envs)
    state.delivery.next_id = head.next_batch_id
    state.delivery.restore(head.in_flight, head.returned)
    state.delivery.acknowledged.update(head.acknowledged)
    state.step = head.step
    state.is_started = head.is_started
    state.policy_version = head.policy_version
    state.latest = head.latest
    state.latest_is_held = head.latest_is_held
    state.counters.update(head.counters)
    state.epoch = head.epoch
    state.fence = head.fence
    state.release(state.past.add(head.past))


def _chunked(items: list[_Entry]) -> Iterator[list[_Entry]]:
    remaining = iter(items)
    while chunk := list(islice(remaining, _CHUNK)):
        yield chunk
