"""One version of the weights on this host: a folder that engines load, and its updates.

    current -> checkpoints/00000012-v120      the newest complete version
    checkpoints/.partial-...                  being written
    downloads/                                files of the store, resumed after an interruption

A version is written next to the current one, verified, and then `current` is switched. A process
that is killed at any point leaves the version before it.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import mmap
import os
import re
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from atroposlib.errors import ConfigError
from atroposlib.utils.writable import flush_to_disk, lock_file, naming_writes
from example_trainer.weights.format import (
    MOST_FILE_BYTES,
    Chain,
    DamagedWeightsError,
    DeltaIndex,
    Manifest,
    Piece,
    StoredFile,
    TensorSpec,
    VersionEntry,
    WeightsError,
    architecture_of,
    choose_chain,
    decode_piece,
    header_size,
    parse_header,
    parse_index,
    pieces_of,
)
from example_trainer.weights.store import WeightStore

__all__ = [
    "RECORD",
    "WEIGHTS",
    "LocalVersion",
    "LocalWeights",
    "MappedWeights",
    "apply_deltas",
    "apply_in_order",
    "fetch_head",
    "file_digest",
    "verify_store",
]

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
RECORD = "atropos_version.json"
_PART_BYTES = 2**23
_PARTIAL = ".partial-"
_OWN_CHECKPOINT = re.compile(r"[0-9]{8,}-v[0-9]+(-[0-9a-f]{8})?")
_OWN_DOWNLOAD = re.compile(r"[0-9a-f]{64}(\.part)?")
_THREADS = min(4, os.cpu_count() or 1)

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


class LocalVersion(BaseModel):
    """Record of a version in a checkpoint folder."""

    run: str
    architecture: str
    serial: int
    version: int
    weights_sha256: str


class MappedWeights:
    """A safetensors file mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = header_size(file.read(8))
                self.specs: list[TensorSpec] = parse_header(file.read(size))
                self._file_bytes = os.fstat(file.fileno()).st_size
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError, DamagedWeightsError) as error:
            raise DamagedWeightsError(f"{path} cannot be read: {error}") from error
        self.data_start = 8 + size
        expected = self.data_start + (self.specs[-1].stop if self.specs else 0)
        if self._file_bytes != expected:
            raise DamagedWeightsError(f"{path} has {self._file_bytes} bytes, expected {expected}")
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)

    def header(self) -> bytes:
        return self._bytes[: self.data_start].tobytes()

    def data(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return bytes of the data section, without copying them."""
        return self._bytes[self.data_start + start : self.data_start + stop]


class LocalWeights:
    """A folder with the current version; one process uses it at a time.

    Args:
        root: The folder; it is created, and must be empty or one of an earlier call.

    Raises:
        ConfigError: the folder has other content, or another process uses it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._checkpoints = root / "checkpoints"
        self.downloads = root / "downloads"
        self._lock: IO[bytes] | None = None

    def open(self) -> None:
        """Claim the folder and delete what an interrupted process left, except downloads."""
        known = {"checkpoints", "downloads", "current", "lock"}
        if self.root.is_dir() and not known >= {
            path.name for path in self.root.iterdir() if not path.name.startswith(_PARTIAL)
        }:
            raise ConfigError(
                f"{self.root} has other files; expected a new folder or one of an earlier call"
            )
        for folder in (self._checkpoints, self.downloads):
            if folder.is_symlink():  # files there are deleted
                raise ConfigError(f"{folder} is a link; expected a folder of an earlier call")
        for folder, own in ((self._checkpoints, _OWN_CHECKPOINT), (self.downloads, _OWN_DOWNLOAD)):
            names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
            others = [name for name in names if not own.fullmatch(name) and name[0] != "."]
            if others:
                raise ConfigError(
                    f"{folder} has other files, such as {others[0]}; expected a new folder or one "
                    "of an earlier call"
                )
        self.downloads.mkdir(parents=True, exist_ok=True)
        self._checkpoints.mkdir(exist_ok=True)
        self._lock = (self.root / "lock").open("ab")
        try:
            lock_file(
                self._lock.fileno(),
                self.root,
                refusal=f"another process uses {self.root}; give each follower a folder of its own",
            )
        except ConfigError:
            self._lock.close()
            raise
        for folder in (self.root, self._checkpoints):
            for leftover in folder.glob(f"{_PARTIAL}*"):
                is_link = leftover.is_symlink()
                leftover.unlink() if is_link else shutil.rmtree(leftover)
        self._drop_old(keep=2)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    @property
    def current(self) -> Path:
        """Link to the folder of the current version."""
        return self.root / "current"

    def record(self) -> LocalVersion | None:
        """Return the current version, None without one."""
        try:
            content = (self.current / RECORD).read_bytes()
            found = LocalVersion.model_validate_json(content)
        except (FileNotFoundError, ValidationError):
            return None
        return found if (self.current / WEIGHTS).is_file() else None

    def new_folder(self) -> Path:
        """Return a new folder for a version, which `install` makes the current one."""
        folder = self._checkpoints / f"{_PARTIAL}{uuid.uuid4().hex}"
        folder.mkdir()
        return folder

    def install(self, folder: Path, version: LocalVersion) -> Path:
        """Make a folder with all files of a version the current one; return its new path."""
        (folder / RECORD).write_text(version.model_dump_json(), encoding="utf-8")
        for path in folder.iterdir():
            flush_to_disk(path)
        flush_to_disk(folder)
        target = self._checkpoints / f"{version.serial:08d}-v{version.version}"
        if target.exists():  # damaged, or of an interrupted call: it is not in use
            target = target.with_name(f"{target.name}-{uuid.uuid4().hex[:8]}")
        folder.rename(target)
        flush_to_disk(self._checkpoints)
        link = self.root / f"{_PARTIAL}current"
        link.unlink(missing_ok=True)
        link.symlink_to(Path("checkpoints") / target.name)
        link.replace(self.current)
        flush_to_disk(self.root)
        self.drop_downloads()
        self._drop_old(keep=2)
        return target

    def rename_current(self, version: LocalVersion) -> None:
        """Record that the weights of the current version are those of another one as well."""
        scratch = self.current / f"{_PARTIAL}record"
        scratch.write_text(version.model_dump_json(), encoding="utf-8")
        flush_to_disk(scratch)
        scratch.replace(self.current / RECORD)

    def forget(self) -> None:
        """Delete all versions, which are of another run."""
        self.current.unlink(missing_ok=True)
        for folder in self._checkpoints.iterdir():
            if _OWN_CHECKPOINT.fullmatch(folder.name):
                shutil.rmtree(folder)
        self.drop_downloads()

    def drop_downloads(self) -> None:
        for download in self.downloads.iterdir():
            if _OWN_DOWNLOAD.fullmatch(download.name):
                download.unlink()

    def _drop_old(self, *, keep: int) -> None:
        """Delete old versions; an engine may still read the one before the current one."""
        now = self.current.resolve().name
        found = [
            path
            for path in self._checkpoints.iterdir()
            if path.name != now and _OWN_CHECKPOINT.fullmatch(path.name)
        ]
        found.sort(key=lambda path: path.stat().st_mtime)
        for path in found[: max(0, len(found) - (keep - 1))]:
            shutil.rmtree(path, ignore_errors=True)


def fetch_head(
    store: WeightStore, manifest: Manifest, local: LocalWeights, *, trust_current: bool = True
) -> Path:
    """Make the newest version of the manifest the current one; return its folder.

    Downloads the chain with the fewest bytes. Damaged files are fetched once more, then another
    chain is tried.

    Raises:
        ConfigError: the folder has weights of another run.
        WeightsError: the store does not answer, or no chain is intact; nothing has changed.
        FileNotFoundError: a file was deleted since the manifest was read.
    """
    record = local.record()
    _require_same_run(store, manifest, local, record)
    if record and record.weights_sha256 == manifest.head.weights_sha256 and trust_current:
        local.drop_downloads()  # of a process that was killed after the switch
        head = _record_of_head(manifest)
        if record != head:  # a step that changed no weight, such as a skipped one
            _follow_equal_weights(store, manifest, local)
        return local.current.resolve()
    known = record.weights_sha256 if record and trust_current else None
    damaged: dict[str, int] = {}
    has_restarted = False
    while True:
        banned = {name for name, times in damaged.items() if times > 1}
        chain = choose_chain(manifest.versions, known, damaged=banned)
        needed = {file.name for file in manifest.files.values()}
        if chain is None or needed & banned:
            names = ", ".join(sorted(damaged)) or "the anchors are missing"
            raise WeightsError(
                f"no intact way to version {manifest.head.version} at {store.shown_url} "
                f"(damaged: {names}); the next version with intact files will be used"
            )
        try:
            return _fetch_chain(store, manifest, chain, local)
        except DamagedWeightsError as error:
            logger.warning("%s; trying again", error)
            if error.name:
                damaged[error.name] = damaged.get(error.name, 0) + 1
            elif not has_restarted:
                # The local weights or a download of an earlier process may be damaged.
                has_restarted, known = True, None
                local.drop_downloads()
            else:
                raise WeightsError(f"{store.shown_url}: {error}") from error


def _follow_equal_weights(store: WeightStore, manifest: Manifest, local: LocalWeights) -> None:
    """Make the newest version the current one, which has the weights of the one before.

    Config and tokenizer may have changed: an engine must not see them with the record of another
    version, so they are written to a new folder.
    """
    current, head = local.current.resolve(), _record_of_head(manifest)
    found = {path.name for path in current.iterdir() if not path.name.startswith(".")}
    if found - {WEIGHTS, RECORD} == manifest.files.keys() and all(
        file_digest(current / name) == file.sha256 for name, file in manifest.files.items()
    ):
        local.rename_current(head)
        return
    folder = local.new_folder()
    try:
        for name, file in manifest.files.items():
            (folder / name).write_bytes(_small_file(store, file))
        try:
            os.link(current / WEIGHTS, folder / WEIGHTS)
        except OSError:  # a file system without hard links
            shutil.copyfile(current / WEIGHTS, folder / WEIGHTS)
        local.install(folder, head)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _require_same_run(
    store: WeightStore, manifest: Manifest, local: LocalWeights, record: LocalVersion | None
) -> None:
    if record is None:
        return
    if record.run != manifest.run:
        what = f"run {record.run[:12]}, the store has run {manifest.run[:12]}"
    elif record.architecture != manifest.architecture:
        what = "a model with other tensors"
    else:
        return
    raise ConfigError(
        f"{local.root} has weights of {what} ({store.shown_url}); nothing was changed: use another "
        "folder, or delete this one"
    )


def _fetch_chain(store: WeightStore, manifest: Manifest, chain: Chain, local: LocalWeights) -> Path:
    head = manifest.head
    deltas = [
        _download(store, entry.delta, local.downloads) for entry in chain.deltas if entry.delta
    ]
    base = local.current.resolve() / WEIGHTS
    if chain.anchor is not None and chain.anchor.anchor is not None:
        anchor = chain.anchor.anchor
        base = _download_anchor(store, anchor, local.downloads, manifest.architecture)
    folder = local.new_folder()
    try:
        for name, file in manifest.files.items():
            (folder / name).write_bytes(_small_file(store, file))
        if deltas:
            digest = apply_deltas(base, deltas, folder / WEIGHTS)
        else:
            base.rename(folder / WEIGHTS)
            # `_download` has compared the content with this digest.
            digest = chain.anchor.anchor.sha256 if chain.anchor and chain.anchor.anchor else ""
        if digest != head.weights_sha256:
            raise DamagedWeightsError(
                f"version {head.version} was restored with other bytes than published"
            )
        return local.install(folder, _record_of_head(manifest))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _record_of_head(manifest: Manifest) -> LocalVersion:
    head = manifest.head
    return LocalVersion(
        run=manifest.run,
        architecture=manifest.architecture,
        serial=head.serial,
        version=head.version,
        weights_sha256=head.weights_sha256,
    )


def apply_deltas(base_path: Path, delta_paths: list[Path], target: Path) -> str:
    """Write the weights after consecutive deltas, piece by piece; return their digest.

    Raises:
        DamagedWeightsError: a file is damaged, or a delta does not apply to the one before it.
    """
    base = MappedWeights(base_path)
    num_pieces = sum(1 for _ in pieces_of(base.specs))
    indexes = [parse_index(_mapped(path), num_pieces=num_pieces) for path in delta_paths]
    for before, after in itertools.pairwise(indexes):
        if before.weights_sha256 != after.base_sha256:
            raise DamagedWeightsError("two deltas are not consecutive")

    def restore(piece: Piece) -> NDArray[np.uint8]:
        data = base.data(piece.start, piece.stop)
        for index, path in zip(indexes, delta_paths, strict=True):
            data = _apply(index, path, piece, data)
        return data

    digest = hashlib.sha256(base.header())
    with naming_writes(target.parent), target.open("wb") as file:
        file.write(base.header())
        for data in apply_in_order(restore, pieces_of(base.specs)):
            file.write(data.data)
            digest.update(data.data)
    return digest.hexdigest()


def _mapped(path: Path) -> memoryview:
    if not path.stat().st_size:
        raise DamagedWeightsError(f"{path} is empty, not a delta file")
    return np.memmap(path, mode="r").data


def _apply(
    index: DeltaIndex, path: Path, piece: Piece, data: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    frame = index.frames.get((piece.tensor, piece.number))
    if frame is None:
        return data
    # Mapped for each piece: a map keeps a file open, and a chain may have thousands.
    part = _mapped(path)[frame.offset : frame.offset + frame.num_bytes]
    return decode_piece(data, part, piece.width)


def apply_in_order(
    work: Callable[[_Given], _Made], given: Iterable[_Given], *, threads: int = _THREADS
) -> Iterator[_Made]:
    """Yield `work(each)` in order, computed by threads with a bounded number of results ahead."""
    with ThreadPoolExecutor(threads) as pool:
        ahead: deque[Future[_Made]] = deque()
        for each in given:
            ahead.append(pool.submit(work, each))
            if len(ahead) > 2 * threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _download(store: WeightStore, file: StoredFile, folder: Path) -> Path:
    """Return a verified local copy of a file; continue an interrupted download."""
    # By content: another run at the same URL has files of the same names.
    target = folder / file.sha256
    if target.is_file():
        return target
    part = target.with_name(f"{target.name}.part")
    digest = hashlib.sha256()
    with naming_writes(folder), part.open("a+b") as output:
        output.seek(0)
        while known := output.read(_PART_BYTES):
            digest.update(known)
        done = output.tell()
        free = shutil.disk_usage(folder).free
        if file.num_bytes - done > free:
            raise WeightsError(
                f"{store.shown_url}/{file.name} has {file.num_bytes} bytes, {folder} has {free} "
                "left; free some space"
            )
        while done < file.num_bytes:
            piece = store.read_part(file.name, done, min(done + _PART_BYTES, file.num_bytes))
            output.write(piece)
            output.flush()
            digest.update(piece)
            done += len(piece)
        os.fsync(output.fileno())
    if done != file.num_bytes or digest.hexdigest() != file.sha256:
        part.unlink()
        raise DamagedWeightsError(
            f"{store.shown_url}/{file.name} is damaged: its checksum is not that of the manifest",
            name=file.name,
        )
    part.rename(target)
    return target


def _download_anchor(store: WeightStore, file: StoredFile, folder: Path, architecture: str) -> Path:
    """Return a verified local copy of whole weights with the tensors of the manifest."""
    path = _download(store, file, folder)
    try:
        specs = MappedWeights(path).specs
    except DamagedWeightsError as error:
        raise DamagedWeightsError(
            f"{store.shown_url}/{file.name} is not a safetensors file: {error}", name=file.name
        ) from error
    if architecture_of(specs) != architecture:
        raise DamagedWeightsError(
            f"{store.shown_url}/{file.name} has other tensors (names, types or shapes) than the "
            "manifest says",
            name=file.name,
        )
    return path


def verify_store(store: WeightStore, manifest: Manifest, scratch: Path) -> list[str]:
    """Download every file of a store and restore every version; return what is wrong.

    Args:
        store: The store.
        manifest: Its manifest.
        scratch: Empty folder with space for two versions and their files.
    """
    problems: list[str] = []
    for file in manifest.files.values():
        try:
            _small_file(store, file)
        except DamagedWeightsError as error:
            problems.append(str(error))
    base: Path | None = None
    for entry in manifest.versions:
        anchor = _fetched(
            store, entry.anchor, scratch, problems, architecture=manifest.architecture
        )
        if entry.anchor and entry.anchor.sha256 != entry.weights_sha256:
            problems.append(f"version {entry.version}: its anchor has other bytes")
        delta = _fetched(store, entry.delta, scratch, problems)
        restored = _restored(entry, base, delta, scratch / f"{entry.serial}.restored", problems)
        # Named by content: two versions with equal weights share a file.
        paths, base = {base, anchor, delta, restored}, anchor or restored
        for path in paths - {base}:
            path.unlink() if path else None
    return problems


def _fetched(
    store: WeightStore,
    file: StoredFile | None,
    folder: Path,
    problems: list[str],
    *,
    architecture: str | None = None,
) -> Path | None:
    """Return a local copy of a delta, or of an anchor with this architecture, None without it."""
    if file is None:
        return None
    try:
        if architecture is not None:
            return _download_anchor(store, file, folder, architecture)
        return _download(store, file, folder)
    except (DamagedWeightsError, FileNotFoundError) as error:
        problems.append(str(error))
        (folder / file.sha256).unlink(missing_ok=True)
        return None


def _restored(
    entry: VersionEntry,
    base: Path | None,
    delta: Path | None,
    target: Path,
    problems: list[str],
) -> Path | None:
    """Return the file with a version restored by its delta, None if that is not possible."""
    if base is None or delta is None:
        if entry.anchor is None:
            problems.append(f"version {entry.version} cannot be restored")
        return None
    try:
        if apply_deltas(base, [delta], target) == entry.weights_sha256:
            return target
        problems.append(f"version {entry.version}: its delta leads to other bytes")
    except DamagedWeightsError as error:
        problems.append(f"version {entry.version}: {error}")
    target.unlink(missing_ok=True)
    return None


def _small_file(store: WeightStore, file: StoredFile) -> bytes:
    content = None
    # More is never published; a manifest of unknown origin could name anything.
    if file.num_bytes <= MOST_FILE_BYTES:
        # An object store refuses a range of an empty file.
        content = store.read(file.name, max_bytes=file.num_bytes) if file.num_bytes else b""
    if content is None or hashlib.sha256(content).hexdigest() != file.sha256:
        raise DamagedWeightsError(f"{store.shown_url}/{file.name} is damaged", name=file.name)
    return content
