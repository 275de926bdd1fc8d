"""A run's whole state as bytes, written in slices; pure.

A snapshot is a byte that tells its format, then parts: one letter, the length (8 bytes, little
endian) and MessagePack. The head holds everything that is small; chunks of the queue, of the ids
of payloads to discard and of the idempotency keys follow. `freeze` copies references, which takes
a few milliseconds per 100,000 queued groups; the encoding after it can be interrupted between any
two parts, while the run goes on.
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
from atroposlib.api.records import PayloadFlaw
from atroposlib.api.run_state import RunState
from atroposlib.api.schemas import Registration
from atroposlib.errors import ConfigError

__all__ = ["FrozenRun", "freeze", "restore", "snapshot"]

_FORMAT = b"\x01"
_HEAD, _QUEUE, _DISCARDABLE, _KEYS = b"h", b"q", b"d", b"k"
_LENGTH_BYTES = 8
_CHUNK = 2000
_MAX_COUNT = 2**63 - 1

_Entry = TypeVar("_Entry")


class _Head(msgspec.Struct):
    """The part of a state that does not grow with the queue."""

    registration: dict[str, Any] | None
    run_id: str | None
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
    taken_over_run_id: str | None = None
    set_aside_groups: list[tuple[int, PayloadFlaw]] = []


_encode = msgspec.msgpack.Encoder().encode
_head_decoder = msgspec.msgpack.Decoder(_Head)
_queue_decoder = msgspec.msgpack.Decoder(list[QueuedGroup])
_ids_decoder = msgspec.msgpack.Decoder(list[int])
_keys_decoder = msgspec.msgpack.Decoder(list[tuple[str, KeyEntry]])


class FrozenRun:
    """The state of a run at one moment, ready to be encoded while the run goes on."""

    def __init__(self, state: RunState) -> None:
        self._head = _head_of(state)
        self._entries = state.queue.entries()
        self._lists: list[tuple[bytes, list[Any]]] = [
            (_DISCARDABLE, state.payloads.discardable),
            (_KEYS, list(state.keys.items())),
        ]
        self._parts = [_FORMAT]

    def encode_in_slices(self) -> Iterator[None]:
        """Encode a part, about a millisecond of work, per step of the iteration."""
        self._add(_HEAD, self._head)
        yield
        for chunk in _chunked(self._entries):
            self._add(_QUEUE, [group for _, group in chunk])
            yield
        for kind, entries in self._lists:
            for chunk in _chunked(entries):
                self._add(kind, chunk)
                yield

    def content(self) -> bytes:
        """Return the snapshot; every slice must have been encoded."""
        return b"".join(self._parts)

    def _add(self, kind: bytes, value: object) -> None:
        content = _encode(value)
        self._parts += [kind, len(content).to_bytes(_LENGTH_BYTES, "little"), content]


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
    """Bring a state to where a snapshot was taken, whatever was applied to it before.

    Raises:
        ConfigError: the snapshot is damaged, or was written by a later version of the service.
    """
    try:
        parts = list(_parts_of(content))
        (head,) = (_head_decoder.decode(part) for kind, part in parts if kind == _HEAD)
        queue = [g for kind, part in parts if kind == _QUEUE for g in _queue_decoder.decode(part)]
        given_up = [
            i for kind, part in parts if kind == _DISCARDABLE for i in _ids_decoder.decode(part)
        ]
        keys = [k for kind, part in parts if kind == _KEYS for k in _keys_decoder.decode(part)]
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(
            f"the run's snapshot cannot be read ({error}); serve the run with the version that "
            "wrote it, or start another run"
        ) from error
    state.start_over()
    _restore_head(state, head)
    for group in queue:
        state.queue.append(group)
    for env in state.envs:
        if not env.has_searchable_size:
            for group in state.envs.stop_buffering(env):
                state.queue.append(group)
    state.payloads.give_up(given_up)
    state.keys.restore(keys)


def _parts_of(content: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Split a snapshot into its parts; ValueError when it is none of ours, or cut off."""
    if content[:1] != _FORMAT:
        raise ValueError(f"format {content[:1].hex() or 'none'}, expected {_FORMAT.hex()}")
    view = memoryview(content)
    position = 1
    while position < len(view):
        start = position + 1 + _LENGTH_BYTES
        end = start + int.from_bytes(view[position + 1 : start], "little")
        if end > len(view):
            raise ValueError("its end is missing")
        yield bytes(view[position : position + 1]), view[start:end]
        position = end


def _head_of(state: RunState) -> _Head:
    delivery = state.delivery
    return _Head(
        registration=state.registration.model_dump() if state.registration else None,
        run_id=state.run_id,
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
        latest_is_held=state.payloads.latest_is_held,
        counters={name: min(n, _MAX_COUNT) for name, n in sorted(state.counters.items())},
        epoch=state.epoch,
        fence=state.fence,
        taken_over_run_id=state.taken_over_run_id,
        set_aside_groups=list(state.set_aside_groups),
    )


def _plain(env: EnvRecord) -> EnvRecord:
    """Copy an environment without what only this replica knows."""
    return dataclasses.replace(env, largest_group=env.group_size or 1, buffer=list(env.buffer))


def _restore_head(state: RunState, head: _Head) -> None:
    if head.registration is not None:
        try:
            state.registration = Registration.model_validate(head.registration)
        except ValueError as error:  # of an earlier version, which took any number
            state.set_aside("registration", error)
    state.run_id = head.run_id
    state.started_at = head.started_at
    state.trainer_ids.extend(int(trainer_id, 16) for trainer_id in head.trainer_ids)
    state.envs.restore(head.envs)
    state.delivery.next_id = head.next_batch_id
    state.delivery.restore(head.in_flight, head.returned)
    state.delivery.acknowledged.update(head.acknowledged)
    state.step = head.step
    state.is_started = head.is_started
    state.policy_version = head.policy_version
    state.payloads.latest = head.latest
    state.payloads.latest_is_held = head.latest_is_held
    state.counters.update(head.counters)  # adds up
    state.epoch = head.epoch
    state.fence = head.fence
    state.taken_over_run_id = head.taken_over_run_id
    state.set_aside_groups.extend(head.set_aside_groups)
    state.payloads.note_delivered(head.past)


def _chunked(items: list[_Entry]) -> Iterator[list[_Entry]]:
    remaining = iter(items)
    while chunk := list(islice(remaining, _CHUNK)):
        yield chunk
