"""Publish versions of the weights to a store, one publisher at a time.

A version's files are written first and the manifest last, which replaces the one before it. A
publisher that is killed at any point leaves the last version readable; the next one deletes what
is not in the manifest. The publisher keeps the last version on this host, as the base of deltas.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atroposlib.errors import ConfigError
from atroposlib.utils.text import inert_line
from atroposlib.utils.writable import cache_folder, lock_file, naming_writes
from example_trainer.weights.format import (
    MOST_FILE_BYTES,
    MOST_MANIFEST_BYTES,
    NEVER_PUBLISHED,
    DamagedWeightsError,
    Frame,
    Manifest,
    Piece,
    StoredFile,
    TensorSpec,
    VersionEntry,
    WeightsError,
    architecture_of,
    encode_piece,
    is_anchor_due,
    is_published_name,
    kept_entries,
    pack_index,
    pieces_of,
    weights_header,
)
from example_trainer.weights.local import (
    WEIGHTS,
    LocalVersion,
    LocalWeights,
    MappedWeights,
    apply_in_order,
    fetch_head,
    file_digest,
)
from example_trainer.weights.store import MANIFEST, WeightStore

__all__ = ["PublishReport", "PublishRules", "WeightsPublisher", "default_mirror"]

logger = logging.getLogger(__name__)

_LEASE = "lease.json"
_EPOCHS = "epochs"
_DATA = "data"
_FILES = "files"
_OWN_NAMES = re.compile(
    rf"{_EPOCHS}/(\.new-[0-9a-f]{{32}}-)?[0-9]{{8,}}"
    rf"|{_DATA}/(\.new-[0-9a-f]{{32}}-)?[0-9]{{8,}}-[0-9]+\.(delta|safetensors)"
    rf"|{_FILES}/(\.new-[0-9a-f]{{32}}-)?[0-9a-f]{{64}}"
)
"""Files of publishers, also unfinished ones. Others are never deleted: the URL may be that of a
folder or bucket with more in it, such as data sets in `data`."""
_INDEX = f"{WEIGHTS}.index.json"
_NOT_LOADED = ("consolidated", "trainer_state")
"""The weights once more under other names, and the optimizer of earlier checkpoints of ours."""
_LEASE_S = 60.0
_MOST_LEASE_BYTES = 2**16
_LARGEST_NUMBER = 2**53
"""Of a lease: integers up to it are exact as floating-point numbers."""
_MAX_QUOTED_CHARACTERS = 200
"""Of a lease, in a message."""


def default_mirror(url: str) -> Path:
    """Return the folder of the last version of a store, in the user's cache."""
    return cache_folder("weights") / hashlib.sha256(url.encode()).hexdigest()[:16]


class PublishRules(NamedTuple):
    """Limits of what a store keeps."""

    keep_versions: int = 20
    """Versions in the manifest; older ones stay only if these need them."""
    anchor_every: int = 50
    """Versions between two anchors at most."""
    anchor_share: float = 0.5
    """An anchor is written when the deltas since the last one exceed this share of the weights."""


class PublishReport(NamedTuple):
    """Result of a publication."""

    entry: VersionEntry
    is_new: bool
    """False if the store had the same version with the same weights, config and tokenizer."""
    compare_s: float
    """Seconds to compare and compress."""
    upload_s: float


class PublisherLease:
    """Right to write to a store, held by one publisher.

    On a local file system, a lock that ends with the process. Elsewhere, and on network file
    systems without locks, a file that is renewed from a thread and expires after a minute. Each
    publisher claims the next epoch.
    """

    def __init__(
        self,
        store: WeightStore,
        *,
        lease_s: float = _LEASE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._lease_s = lease_s
        self._clock = clock
        self._owner = uuid.uuid4().hex
        self._lock: IO[bytes] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.epoch = 0

    def acquire(self) -> None:
        """Claim the next epoch.

        Raises:
            ConfigError: another publisher is active.
        """
        root = self._store.local_root
        held = self._read(_LEASE)
        has_lock = root is not None and self._lock_folder(root, held)
        if not has_lock:
            self._require_expired(held)
        manifest = self._store.manifest()
        epoch = 1 + max(int(held.get("epoch", 0)), manifest.epoch if manifest else 0)
        while not self._store.create(self._epoch_name(epoch), self._record(epoch)):
            left_s = self._left_s(self._read(self._epoch_name(epoch)))
            if not has_lock and left_s > 0:
                self._refuse(
                    "one started at the same time; if it was killed, its claim ends in "
                    f"{left_s:.0f} s"
                )
            epoch += 1  # claimed by a process that was killed
        self.epoch = epoch
        self._renew()
        for name in self._store.names(_EPOCHS):
            if name != self._epoch_name(epoch) and _OWN_NAMES.fullmatch(name):
                self._store.remove(name)
        if not has_lock:
            self._thread = threading.Thread(target=self._keep, name="weights lease", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raise `ConfigError` if another publisher has claimed the store since."""
        held = self._read(_LEASE)
        if held.get("owner") != self._owner:
            self._refuse(f"another publisher took over ({held.get('host', 'unknown host')})")

    def release(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._read(_LEASE).get("owner") == self._owner:
            self._renew(is_released=True)
        if self._lock is not None:
            self._lock.close()

    def _lock_folder(self, root: Path, held: dict[str, Any]) -> bool:
        """Lock the folder; return whether its file system has locks."""
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._lock = (root / "publisher.lock").open("ab")
        except OSError as error:
            raise ConfigError(f"{root} cannot be written: {error.strerror}") from error
        holder = f"process {held.get('pid')} on {held.get('host')} publishes there"
        is_locked = False
        try:
            is_locked = lock_file(self._lock.fileno(), root, refusal=self._refusal(holder))
        finally:
            if not is_locked:
                self._lock.close()
                self._lock = None
        return is_locked

    def _left_s(self, held: dict[str, Any]) -> float:
        """Return the seconds until a lease or the claim of an epoch expires."""
        return float(held.get("renewed_at", 0)) + self._lease_s - self._clock()

    def _require_expired(self, held: dict[str, Any]) -> None:
        left_s = self._left_s(held)
        if not held or held.get("is_released") or left_s <= 0:
            return
        self._refuse(
            f"process {held.get('pid')} on {held.get('host')} publishes there; if it was killed, "
            f"its lease ends in {left_s:.0f} s"
        )

    def _refuse(self, reason: str) -> None:
        raise ConfigError(self._refusal(reason))

    def _refusal(self, reason: str) -> str:
        shown = inert_line(reason, max_characters=_MAX_QUOTED_CHARACTERS)
        return f"{self._store.shown_url} has another publisher: {shown}; end it, or use another URL"

    def _keep(self) -> None:
        while not self._ended.wait(self._lease_s / 4):
            try:
                self.check()
                self._renew()
            except ConfigError as error:
                logger.error("%s", error)
                return
            except WeightsError as error:
                logger.warning("the lease could not be renewed: %s", error)

    def _renew(self, *, is_released: bool = False) -> None:
        self._store.write(_LEASE, self._record(self.epoch, is_released=is_released))

    def _record(self, epoch: int, *, is_released: bool = False) -> bytes:
        record = {
            "owner": self._owner,
            "epoch": epoch,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "renewed_at": self._clock(),
            "is_released": is_released,
        }
        return json.dumps(record).encode()

    def _read(self, name: str) -> dict[str, Any]:
        """Return a lease or the claim of an epoch; empty if there is none that can be read."""
        try:
            found = json.loads(self._store.read(name, max_bytes=_MOST_LEASE_BYTES) or b"{}")
        except (ValueError, RecursionError, DamagedWeightsError):
            return {}
        is_lease = (
            isinstance(found, dict)
            and isinstance(found.get("epoch", 0), int)
            and isinstance(found.get("renewed_at", 0), int | float)
            and 0 <= found.get("epoch", 0) <= _LARGEST_NUMBER
            and 0 <= found.get("renewed_at", 0) <= _LARGEST_NUMBER
        )
        return found if is_lease else {}

    def _epoch_name(self, epoch: int) -> str:
        return f"{_EPOCHS}/{epoch:08d}"


class WeightsPublisher:
    """Publishes checkpoints to a store, between `open` and `close` or as a context manager.

    Args:
        store: Where to publish.
        mirror: Folder for the last version on this host; fetched from the store if it is missing.
        rules: What the store keeps.
        lease: Right to write; None: that of a new publisher.

    Raises:
        ConfigError: another publisher is active, or uses `mirror`.
    """

    def __init__(
        self,
        store: WeightStore,
        mirror: Path,
        *,
        rules: PublishRules | None = None,
        lease: PublisherLease | None = None,
    ) -> None:
        self._store = store
        self._local = LocalWeights(mirror)
        self._rules = rules or PublishRules()
        self._lease = lease or PublisherLease(store)
        self._has_verified = False

    def open(self) -> None:
        """Claim the store."""
        self._lease.acquire()
        try:
            self._local.open()
        except BaseException:
            self._lease.release()
            raise

    def close(self) -> None:
        self._local.close()
        with contextlib.suppress(WeightsError):  # the lease expires
            self._lease.release()

    def __enter__(self) -> WeightsPublisher:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def publish(self, source: Path, version: int, *, rewinds: bool = False) -> PublishReport:
        """Publish the checkpoint in a folder, and return once followers can see it.

        Args:
            source: Folder with safetensors files, config and tokenizer.
            version: Policy version, above the last one.
            rewinds: Whether `version` may be below the last one, after a run was resumed.

        Raises:
            ConfigError: the folder has no weights, or the store has other ones or newer versions.
            WeightsError: the store failed; a repeated call starts again.
        """
        started = time.perf_counter()
        weights = _SourceWeights(source)
        manifest = self._store.manifest()
        if manifest is not None:
            self._require_same_model(manifest, weights)
            if version < manifest.head.version:
                self._require_rewinding(manifest.head, version, rewinds)
        base = self._base(manifest) if manifest else None
        folder = self._local.new_folder()
        try:
            delta_path = folder / ".delta"
            with naming_writes(folder):
                written = _write_version(weights, base, folder / WEIGHTS, delta_path)
            compared = time.perf_counter()
            if manifest and version == manifest.head.version:
                is_same = written.sha256 == manifest.head.weights_sha256
                if is_same and weights.has_files(manifest):
                    return PublishReport(manifest.head, False, compared - started, 0.0)
                self._require_rewinding(manifest.head, version, rewinds)
            manifest = self._upload(manifest, weights, folder, written, version)
            delta_path.unlink(missing_ok=True)
            self._keep_as_base(manifest, weights, folder)
            self._collect_garbage(manifest)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return PublishReport(
            manifest.head, True, compared - started, time.perf_counter() - compared
        )

    def _require_same_model(self, manifest: Manifest, weights: _SourceWeights) -> None:
        if weights.architecture != manifest.architecture:
            raise ConfigError(
                f"{self._store.shown_url} has versions of a model with other tensors (names, types "
                f"or shapes) than {weights.folder}; use another URL"
            )

    def _require_rewinding(self, head: VersionEntry, version: int, rewinds: bool) -> None:
        if not rewinds:
            raise ConfigError(
                f"{self._store.shown_url} already has version {head.version}, so that {version} "
                "cannot be published; use a larger number, or another URL for another run"
            )

    def _base(self, manifest: Manifest) -> _Base:
        """Return the weights of the last version, to which the delta applies."""
        record = self._local.record()
        if record and record.run != manifest.run:
            self._local.forget()
        head = manifest.head
        folder = fetch_head(self._store, manifest, self._local)
        # Once per process: the folder may have been damaged since it was written.
        if not self._has_verified and file_digest(folder / WEIGHTS) != head.weights_sha256:
            logger.warning("%s is damaged; fetching it from the store", folder)
            folder = fetch_head(self._store, manifest, self._local, trust_current=False)
        self._has_verified = True
        return _Base(MappedWeights(folder / WEIGHTS), head.weights_sha256)

    def _upload(
        self,
        manifest: Manifest | None,
        weights: _SourceWeights,
        folder: Path,
        written: _WrittenVersion,
        version: int,
    ) -> Manifest:
        serial = manifest.head.serial + 1 if manifest else 1
        earlier = manifest.versions if manifest else []
        name = f"{_DATA}/{serial:08d}-{self._lease.epoch}"
        delta, anchor = None, None
        # A delta as large as the weights has no use.
        if manifest and written.delta_bytes < written.num_bytes:
            delta = StoredFile(
                name=f"{name}.delta", num_bytes=written.delta_bytes, sha256=written.delta_sha256
            )
            self._store.upload(folder / ".delta", delta.name)
        rules = self._rules
        if delta is None or is_anchor_due(
            earlier, delta.num_bytes, every=rules.anchor_every, share=rules.anchor_share
        ):
            anchor = StoredFile(
                name=f"{name}.safetensors", num_bytes=written.num_bytes, sha256=written.sha256
            )
            self._store.upload(folder / WEIGHTS, anchor.name)
        entry = VersionEntry(
            serial=serial,
            version=version,
            weights_sha256=written.sha256,
            weights_bytes=written.num_bytes,
            base_sha256=earlier[-1].weights_sha256 if delta else None,
            delta=delta,
            anchor=anchor,
            changed_fraction=written.changed_fraction,
            published_at=time.time(),
        )
        fresh = Manifest(
            run=manifest.run if manifest else uuid.uuid4().hex,
            architecture=weights.architecture,
            epoch=self._lease.epoch,
            versions=kept_entries([*earlier, entry], rules.keep_versions),
            files=self._upload_small_files(weights, manifest),
        )
        self._write_manifest(fresh)
        return fresh

    def _write_manifest(self, manifest: Manifest) -> None:
        content = manifest.model_dump_json(exclude_none=True).encode()
        if len(content) > MOST_MANIFEST_BYTES:
            raise ConfigError(
                f"the manifest of {len(manifest.versions)} versions has {len(content)} bytes, "
                f"expected at most {MOST_MANIFEST_BYTES}; keep fewer versions, or write anchors "
                "more often"
            )
        self._lease.check()
        self._store.write(MANIFEST, content)

    def _upload_small_files(
        self, weights: _SourceWeights, manifest: Manifest | None
    ) -> dict[str, StoredFile]:
        known = {file.name for file in manifest.files.values()} if manifest else set()
        files: dict[str, StoredFile] = {}
        for path in weights.other_files():
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            name = f"{_FILES}/{digest}"
            if name not in known:
                self._store.write(name, content)
                known.add(name)
            files[path.name] = StoredFile(name=name, num_bytes=len(content), sha256=digest)
        return files

    def _keep_as_base(self, manifest: Manifest, weights: _SourceWeights, folder: Path) -> None:
        head = manifest.head
        record = LocalVersion(
            run=manifest.run,
            architecture=weights.architecture,
            serial=head.serial,
            version=head.version,
            weights_sha256=head.weights_sha256,
        )
        self._local.install(folder, record)

    def _collect_garbage(self, manifest: Manifest) -> None:
        used = manifest.stored_names()
        try:
            for name in [*self._store.names(_DATA), *self._store.names(_FILES)]:
                if name not in used and _OWN_NAMES.fullmatch(name):
                    self._store.remove(name)
        except WeightsError as error:
            logger.warning("old files stay until the next version: %s", error)


class _SourceWeights:
    """Tensors of a checkpoint folder, in one safetensors file or several."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = _weight_files(folder)
        if not paths:
            raise ConfigError(
                f"{folder} has no safetensors files; expected the folder of a checkpoint"
            )
        self._sources: dict[str, tuple[MappedWeights, TensorSpec]] = {}
        for path in paths:
            mapped = MappedWeights(path)
            for spec in mapped.specs:
                if spec.name in self._sources:
                    raise ConfigError(f"{folder}: the tensor {spec.name} is in two files")
                self._sources[spec.name] = mapped, spec
        self._require_all_parts()
        self.header, self.specs = weights_header([spec for _, spec in self._sources.values()])
        self.architecture = architecture_of(self.specs)

    def _require_all_parts(self) -> None:
        """Raise `ConfigError` if a tensor that the index of several files names is missing."""
        files = _indexed_files(self.folder)
        missing = [name for name in files if name not in self._sources]
        if missing:
            raise ConfigError(
                f"{self.folder} lacks {len(missing)} of the {len(files)} tensors in its "
                f"{_INDEX}, the first is {missing[0]} in {files[missing[0]]}"
            )

    def data(self, piece: Piece) -> NDArray[np.uint8]:
        placed = self.specs[piece.tensor]
        mapped, spec = self._sources[placed.name]
        shift = spec.start - placed.start
        return mapped.data(piece.start + shift, piece.stop + shift)

    def other_files(self) -> Iterator[Path]:
        """Yield the config and the tokenizer: small files at the top of the folder."""
        for path in sorted(self.folder.iterdir()):
            is_weights = path.name.endswith(NEVER_PUBLISHED) or path.name.startswith(".")
            if not path.is_file() or is_weights or path.stat().st_size > MOST_FILE_BYTES:
                continue
            if is_published_name(path.name):
                yield path
            else:  # such as the backup of an editor
                logger.warning("%s is not published: not the name of a config or tokenizer", path)

    def has_files(self, manifest: Manifest) -> bool:
        """Return whether config and tokenizer are those of a manifest."""
        own = {path.name: file_digest(path) for path in self.other_files()}
        return own == {name: file.sha256 for name, file in manifest.files.items()}


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of an index, or all safetensors files without one."""
    found = sorted(folder.glob("*.safetensors"))
    indexed = {str(name) for name in _indexed_files(folder).values()}
    if indexed:
        # With the file that transformers prefers to an index, so that doubled names are reported.
        return [path for path in found if path.name in indexed | {WEIGHTS}]
    return [path for path in found if not path.name.startswith(_NOT_LOADED)] or found


def _indexed_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor by the index of several files; empty without one.

    Raises:
        ConfigError: it cannot be read.
    """
    path = folder / _INDEX
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error!r}") from error


class _Base(NamedTuple):
    """The last version on this host."""

    weights: MappedWeights
    sha256: str


class _WrittenVersion(NamedTuple):
    """Digests and sizes of a version's weights and delta."""

    sha256: str
    num_bytes: int
    delta_sha256: str
    delta_bytes: int
    changed_fraction: float | None


class _Difference(NamedTuple):
    piece: Piece
    data: NDArray[np.uint8]
    frame: bytes
    num_changed: int


def _write_version(
    weights: _SourceWeights, base: _Base | None, target: Path, delta_path: Path
) -> _WrittenVersion:
    """Write the weights as one file, and the delta to `base` if there is one."""

    def compare(piece: Piece) -> _Difference:
        data = weights.data(piece)
        if base is None:
            return _Difference(piece, data, b"", 0)
        frame, count = encode_piece(base.weights.data(piece.start, piece.stop), data, piece.width)
        return _Difference(piece, data, frame, count)

    digest, delta_digest = hashlib.sha256(weights.header), hashlib.sha256()
    frames: list[Frame] = []
    num_changed, delta_bytes = 0, 0
    with target.open("wb") as file, delta_path.open("wb") as delta:
        file.write(weights.header)
        for piece, data, frame, count in apply_in_order(compare, pieces_of(weights.specs)):
            file.write(data.data)
            digest.update(data.data)
            if frame:
                delta.write(frame)
                delta_digest.update(frame)
                frames.append(Frame(piece.tensor, piece.number, delta_bytes, len(frame)))
                delta_bytes += len(frame)
                num_changed += count
        if base is not None:
            index = pack_index(base.sha256, digest.hexdigest(), frames)
            delta.write(index)
            delta_digest.update(index)
            delta_bytes += len(index)
    return _WrittenVersion(
        sha256=digest.hexdigest(),
        num_bytes=target.stat().st_size,
        delta_sha256=delta_digest.hexdigest(),
        delta_bytes=delta_bytes,
        changed_fraction=None if base is None else num_changed / _num_elements(weights.specs),
    )


def _num_elements(specs: Sequence[TensorSpec]) -> int:
    return max(1, sum(spec.num_bytes // spec.width for spec in specs))
