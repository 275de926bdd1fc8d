"""Sources of groups, and the fields of a group that an export reads.

    file       JSON Lines, one group per line, as `process` writes them
    run        the SQLite file of a stored run, which a service may be using
    live       the inspection routes of a service, without taking groups; may wait for more
    consume    the batches of a service, taken as its trainer after a reset

msgspec decodes five fields of a JSON group. Text that it rejects but Python's decoder accepts, such
as a lone surrogate that a model generated, is decoded by the latter.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from atroposlib.api.client_consumer import Consumer, GroupKey, InspectionClient, group_key
from atroposlib.api.client_transport import RetryRule, SyncClient, plain
from atroposlib.api.store.sqlite_file import APPLICATION_ID
from atroposlib.errors import ConfigError, GroupError, TrajectoryApiError
from atroposlib.scored_data import MAX_SCORE
from atroposlib.utils.text import without_secrets
from atroposlib.wire import WireFormat

__all__ = [
    "BatchClient",
    "ExportGroup",
    "RawGroup",
    "check_inspectable",
    "connect_read_only",
    "consume_groups",
    "export_group",
    "find_run",
    "full_group",
    "open_jsonl",
    "read_jsonl",
    "read_run",
    "watch_groups",
]

_MAX_UNPACKED_BYTES = 2**31


class RawGroup(NamedTuple):
    """An encoded group."""

    where: str
    """Place for messages: `line 12`, `group 7`."""
    format: WireFormat
    content: bytes


TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""An id that tokenizers accept; another one would end the decoding of all groups of a chunk."""


class ExportGroup(msgspec.Struct, gc=False):
    """The fields of a group that an export reads."""

    tokens: list[list[TokenId]]
    """[G][L] prompt and completion ids."""
    scores: list[float]
    """[G]."""
    masks: list[list[int]] | None = None
    """[G][L] the id where it is trained, -100 elsewhere."""
    messages: list[Any] | None = None
    """[G] one chat per trajectory."""
    tokenized_from_text: bool | None = None
    """Whether the tokens were made from text, because the server reports no token ids."""
    images: Any = None
    """[G] images, which no format contains."""

    @property
    def has_images(self) -> bool:
        return any(self.images) if isinstance(self.images, list) else self.images is not None


class _WholeGroup(ExportGroup, gc=False):
    """Those fields, and the others whose types are relied on where all fields are read."""

    inference_logprobs: list[list[float]] | None = None
    """[G][L]."""


_decoder = msgspec.json.Decoder(ExportGroup)


def export_group(raw: RawGroup) -> ExportGroup:
    """Decode the fields of a group that an export reads.

    Raises:
        GroupError: it is not a group; the message does not quote its content.
    """
    if raw.format == "json":
        try:
            group = _decoder.decode(raw.content)
        except (msgspec.DecodeError, UnicodeDecodeError):
            group = _converted(_plain_json(raw.content))
    else:
        group = _converted(_unpacked(raw.content))
    _check(group)
    return group


def full_group(raw: RawGroup) -> dict[str, Any]:
    """Decode all fields of a group, with its masks; raises like `export_group`."""
    if raw.format != "json":
        return _unpacked(raw.content)
    value = _plain_json(raw.content)
    if not isinstance(value, dict):
        raise GroupError(f"expected an object with tokens and scores, not {_kind(value)}")
    group = _converted(value, _WholeGroup)
    _check(group)
    if group.masks is None:
        raise GroupError("masks: missing; every group needs it")
    return value


def _plain_json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        # Its own message would quote the text, which is untrusted.
        reason = type(error).__name__
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg} at character {error.pos + 1}"
        raise GroupError(f"not JSON: {reason}") from error


def _converted(value: Any, kind: type[ExportGroup] = ExportGroup) -> ExportGroup:
    try:
        return msgspec.convert(value, kind)
    # A text with a lone surrogate in place of another value is the last.
    except (msgspec.ValidationError, RecursionError, UnicodeEncodeError) as error:
        raise GroupError(str(error).replace("`", "")) from error


def _unpacked(content: bytes) -> dict[str, Any]:
    from atroposlib.wire.binary_format import read_blob
    from atroposlib.wire.groups import plain_blob

    group: dict[str, Any] = read_blob(
        plain_blob(content, max_bytes=_MAX_UNPACKED_BYTES), as_arrays=False
    )
    return group


def _check(group: ExportGroup) -> None:
    num_sequences = len(group.tokens)
    if num_sequences == 0:
        raise GroupError("tokens: empty; a group needs at least one trajectory")
    # Some environments send an empty list for an optional field that they do not fill.
    masks, messages = group.masks or None, group.messages or None
    columns = {"scores": group.scores, "masks": masks, "messages": messages}
    for name, column in columns.items():
        if column is not None and len(column) != num_sequences:
            raise GroupError(f"{name}: {len(column)} entries, tokens has {num_sequences}")
    for i, (mask, ids) in enumerate(zip(group.masks or (), group.tokens, strict=False)):
        if len(mask) != len(ids):
            raise GroupError(f"masks[{i}]: {len(mask)} entries, tokens[{i}] has {len(ids)}")
    if not all(-MAX_SCORE <= score <= MAX_SCORE for score in group.scores):  # NaN is not either
        raise GroupError(f"scores: a score is not a finite number within ±{MAX_SCORE:g}")


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", type(None): "null"}.get(type(value), "a number")


def open_jsonl(path: Path) -> Path:
    """Return the path of a readable file.

    Raises:
        ConfigError: the file does not exist or is not readable.
    """
    try:
        with path.open("rb"):
            return path
    except OSError as error:
        raise ConfigError(f"the groups in {path} cannot be read: {error.strerror}") from error


def read_jsonl(path: Path) -> Iterator[RawGroup]:
    """Yield the lines of a file that are not blank, without decoding them."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.strip()
            if content:
                yield RawGroup(f"line {number}", "json", content)


_STATES = ("past", "in_flight", "queued")
_POLL_S = 1.0
_QUIET_ROUNDS_BEFORE_HINT = 5


def check_inspectable(client: InspectionClient) -> None:
    """Check that a service has the inspection routes.

    Raises:
        ConfigError: it does not have them.
        TrajectoryApiError: it is unreachable, or the role of the token does not suffice.
    """
    try:
        client.groups("queued", limit=1)
    except TrajectoryApiError as error:
        if error.status in (404, 405):
            raise ConfigError(
                f"the service at {without_secrets(client.base_url)} has no inspection routes; "
                "--consume takes its batches as a trainer would"
            ) from error
        raise


def watch_groups(
    client: InspectionClient,
    *,
    is_endless: bool,
    notify: Callable[[str], None] = lambda _: None,
    consumer: Consumer | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[RawGroup]:
    """Yield every group once: delivered ones, those in flight, queued ones, then new ones.

    Groups that the service discards between two polls are missed.

    Args:
        client: Client of the service.
        is_endless: Whether to wait for new groups.
        notify: Receives a line with the reason if no groups arrive.
        consumer: Registers in place of a trainer while there is none, and takes the groups that
            were yielded. None takes no groups.
        sleep: Replaced in tests.
    """
    seen: set[GroupKey] = set()
    reported: set[str] = set()
    num_quiet_rounds = 0
    try:
        while True:
            has_leased = consumer is not None and consumer.attend()
            entries = (entry for state in _STATES for entry in client.new_groups(state, seen))
            new = sorted(set(map(group_key, entries)))
            ids = [key.group_id for key in new]
            for payload in filter(None, client.payloads(ids)):
                yield RawGroup(f"group {payload.group_id}", payload.wire_format, payload.content)
            seen.update(new)
            if not is_endless:
                return
            if consumer is not None:
                consumer.settle()
            num_quiet_rounds = 0 if new else num_quiet_rounds + 1
            if num_quiet_rounds == _QUIET_ROUNDS_BEFORE_HINT:
                reason = _reason_for_no_groups(client)
                if reason not in reported:
                    notify(reason)
                reported.add(reason)
            sleep(0.0 if new or has_leased else _POLL_S)
    finally:
        if consumer is not None:
            consumer.release()


def _reason_for_no_groups(client: InspectionClient) -> str:
    if int(client.info()["batch_size"]) < 0:
        return (
            "no trainer is registered, so environments do not start; start one, or let this "
            "command be the trainer with --consume"
        )
    if not any(env["is_connected"] for env in client.envs()):
        return (
            "no environment is connected yet: start one with `serve`, and with "
            f"--env.rollout_server_url {without_secrets(client.base_url)} unless that is its "
            "default"
        )
    return "waiting for new groups; Ctrl-C ends the export and keeps the records written so far"


_SUFFIX = ".sqlite3"
_ROWS_PER_READ = 500


def find_run(run: str, data_dir: Path) -> Path:
    """Return the file of a run, given by its name in `data_dir` or by the path of its file.

    Raises:
        ConfigError: the run does not exist, or the file is not that of a run.
    """
    path = Path(run) if run.endswith(_SUFFIX) else data_dir / f"{run}{_SUFFIX}"
    if not path.is_file():
        files = sorted(data_dir.glob(f"*{_SUFFIX}"), key=lambda file: -file.stat().st_mtime)
        known = ", ".join(file.name.removesuffix(_SUFFIX) for file in files[:5])
        hint = f"; {data_dir} has {known}" if known else f"; {data_dir} has no runs"
        raise ConfigError(f"there is no run {run}{hint}; --data-dir names another directory")
    connection = connect_read_only(path)
    try:
        (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{path} is not the file of a run: {error}") from error
    finally:
        connection.close()
    if application_id != APPLICATION_ID:
        raise ConfigError(f"{path} is a database of another program")
    return path


def read_run(path: Path) -> Iterator[RawGroup]:
    """Yield the groups of a run in order of arrival, except discarded ones."""
    connection = connect_read_only(path)
    after = -1
    try:
        while rows := connection.execute(
            "SELECT group_id, content FROM payload WHERE group_id > ?"
            " AND group_id NOT IN (SELECT group_id FROM garbage) ORDER BY group_id LIMIT ?",
            (after, _ROWS_PER_READ),
        ).fetchall():
            for group_id, content in rows:
                is_json = content[:1] == b"{"
                yield RawGroup(f"group {group_id}", "json" if is_json else "msgpack", content)
            after = rows[-1][0]
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{path} cannot be read after group {after}: {error}") from error
    finally:
        connection.close()


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open the file of a run read-only; without a write-ahead log, SQLite creates no files."""
    is_in_use = path.with_name(path.name + "-wal").exists()
    options = "mode=ro" if is_in_use else "mode=ro&immutable=1"
    uri = f"{path.resolve().as_uri()}?{options}"
    # A generator may be closed by another thread than the one that started it.
    return sqlite3.connect(uri, uri=True, timeout=10.0, check_same_thread=False)


class BatchClient(SyncClient):
    """Takes the batches of a run as its trainer, without retries."""

    def __init__(self, base_url: str, *, token: str | None) -> None:
        super().__init__(base_url, retry=RetryRule(attempts=1), token=token)

    def take_over(
        self, *, group_size: int, tasks_per_step: int, max_token_len: int, num_steps: int
    ) -> list[Any]:
        """Reset the run, register as its trainer, and return both responses.

        Raises:
            TrajectoryApiError: the service is unreachable or rejects a request.
        """
        settings = {
            "wandb_group": "test",
            "wandb_project": "test",
            "batch_size": group_size * tasks_per_step,
            "max_token_len": max_token_len,
            "checkpoint_dir": "checkpoints",
            "save_checkpoint_interval": 10,
            "starting_step": 0,
            "num_steps": num_steps,
        }
        return [self._fetch("/reset_data").text, self._ask("POST", "/register", plain(settings))]

    def next_groups(self) -> list[dict[str, Any]] | None:
        """Return the groups of the next batch, None if none is ready or no trainer is registered.

        Raises:
            TrajectoryApiError: the service is unreachable or rejects the request.
        """
        answer = self._ask("GET", "/batch")
        if not isinstance(answer, dict) or answer.get("status") == "error":
            return None
        return answer.get("batch")


def consume_groups(client: BatchClient) -> Iterator[RawGroup]:
    """Yield the groups of one batch after the other, without end."""
    number = 0
    while True:
        batch = client.next_groups()
        for group in batch or ():
            number += 1
            yield RawGroup(f"received group {number}", "json", json.dumps(group).encode())
        if not batch:
            time.sleep(_POLL_S)
