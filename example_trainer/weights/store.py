"""Access to a weights store: a folder, or a URL of a file system that fsspec knows.

Names are relative to the URL. Written files appear whole or not at all: a local file is renamed
into place, and object stores replace objects atomically. Messages show URLs without secrets. A
read has a limit, whatever the store sends: an HTTP server can send another body than its headers
say, or one that decompresses to gigabytes.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import fsspec
from fsspec.asyn import sync
from fsspec.implementations.local import LocalFileSystem

from atroposlib.errors import ConfigError
from atroposlib.utils.text import hide_secrets, hide_secrets_of_requests, without_secrets
from atroposlib.utils.writable import flush_to_disk
from example_trainer.weights.format import (
    MOST_FILE_BYTES,
    MOST_MANIFEST_BYTES,
    DamagedWeightsError,
    Manifest,
    WeightsError,
    parse_manifest,
)

__all__ = ["MANIFEST", "StoreError", "WeightStore"]

MANIFEST = "manifest.json"
_PUT_IS_ATOMIC = {"abfs", "adl", "az", "gcs", "gs", "memory", "oss", "s3", "s3a"}
"""Protocols where an object is replaced as a whole; elsewhere files are renamed into place."""
_SCRATCH = ".new-"
_CHUNK_BYTES = 2**20


class StoreError(WeightsError):
    """The store did not answer, or refused access."""


class WeightStore:
    """Files below a URL.

    Args:
        url: A folder, or a URL such as `s3://bucket/run`. `http://` can only be read.

    Raises:
        ConfigError: the URL is empty or malformed, or the package of its file system is missing.
        StoreError: its server does not answer.
    """

    def __init__(self, url: str) -> None:
        self.shown_url = without_secrets(url)
        hide_secrets_of_requests()
        if not url:  # of an unset variable; fsspec would take the working directory
            raise ConfigError("the URL of the store is empty; expected a folder or a URL")
        if url.startswith(("http://", "https://")) and "?" in url:
            raise ConfigError(f"{self.shown_url}: expected the URL of a folder, without a query")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise ConfigError(
                f"{self.shown_url} cannot be opened: {hide_secrets(str(error))}; expected a folder "
                "or a URL of a file system that fsspec knows, whose package is installed"
            ) from None
        except Exception as error:  # noqa: BLE001 - some file systems connect, each with own errors
            reason = hide_secrets(f"{type(error).__name__}: {error}")
            raise StoreError(f"cannot open {self.shown_url}: {reason}") from None
        self._root = str(self._root).rstrip("/")
        protocols = self._fs.protocol
        self._protocols = {protocols} if isinstance(protocols, str) else set(protocols)
        self._is_local = isinstance(self._fs, LocalFileSystem)
        self._is_http = not self._protocols.isdisjoint({"http", "https"})

    @property
    def local_root(self) -> Path | None:
        """The folder, if the store is on this host's file system."""
        return Path(self._root) if self._is_local else None

    def read(self, name: str, *, max_bytes: int = MOST_FILE_BYTES) -> bytes | None:
        """Return a file, None if it does not exist.

        Raises:
            DamagedWeightsError: it has more than `max_bytes`; the rest is not read.
        """
        path, limit = self._path(name), max_bytes + 1
        with self._errors(f"read {name}"):
            try:
                if self._is_http:
                    content: bytes = sync(self._fs.loop, self._http_bytes, path, limit)
                else:
                    content = self._fs.cat_file(path, start=0, end=limit)
            except FileNotFoundError:
                return None
        if len(content) > max_bytes:
            raise DamagedWeightsError(
                f"{self.shown_url}/{name} has more than {max_bytes} bytes", name=name
            )
        return content

    def read_part(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop`.

        Raises:
            FileNotFoundError: there is no such file.
            DamagedWeightsError: it is shorter.
            StoreError: the store failed, or returned something else.
        """
        path = self._path(name)
        with self._errors(f"read {name}"):
            if self._is_http:
                content: bytes = sync(self._fs.loop, self._http_part, path, start, stop)
            else:
                content = self._fs.cat_file(path, start=start, end=stop)
                if len(content) > stop - start:  # a file system that has no ranges
                    content = content[start:stop]
        if len(content) != stop - start:
            message = f"{self.shown_url}/{name} has no bytes {start} to {stop}: {len(content)} came"
            if self._is_http:  # whose answers may be cut off
                raise StoreError(message)
            raise DamagedWeightsError(message, name=name)
        return content

    async def _http_bytes(self, url: str, limit: int) -> bytes:
        async with self._http_response(url) as response:
            return await _first_bytes(response.content, limit)

    async def _http_part(self, url: str, start: int, stop: int) -> bytes:
        async with self._http_response(url, Range=f"bytes={start}-{stop - 1}") as response:
            # A server that has no ranges sends the whole file.
            skipped = 0 if response.status == 206 else start
            while skipped:
                chunk = await response.content.read(min(skipped, _CHUNK_BYTES))
                if not chunk:
                    return b""
                skipped -= len(chunk)
            return await _first_bytes(response.content, stop - start)

    @contextlib.asynccontextmanager
    async def _http_response(self, url: str, **headers: str) -> AsyncIterator[Any]:
        """Yield a response whose body is neither read nor decompressed yet."""
        session = await self._fs.set_session()
        options = {**self._fs.kwargs, "auto_decompress": False}
        options["headers"] = {
            **options.get("headers", {}), **headers, "Accept-Encoding": "identity"
        }  # fmt: skip
        async with session.get(self._fs.encode_url(url), **options) as response:
            if response.status == 404:
                raise FileNotFoundError(url)
            response.raise_for_status()
            encoding = response.headers.get("Content-Encoding", "identity")
            if encoding.lower() != "identity":
                raise OSError(f"the server sent Content-Encoding {encoding}, expected identity")
            yield response

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a file."""
        with self._errors(f"write {name}"):
            if self._is_local:
                self._write_locally(name, content)
            elif self._protocols & _PUT_IS_ATOMIC:
                self._fs.pipe_file(self._path(name), content)
            else:
                scratch = self._scratch(name)
                self._fs.pipe_file(scratch, content)
                self._fs.mv(scratch, self._path(name))

    def create(self, name: str, content: bytes) -> bool:
        """Write a file that must not exist; return whether it did not.

        Where the file system cannot exclude two writers, both may succeed within a moment.
        """
        with self._errors(f"write {name}"):
            try:
                if self._is_local:
                    Path(self._path(name)).parent.mkdir(parents=True, exist_ok=True)
                self._fs.pipe_file(self._path(name), content, mode="create")
            except FileExistsError:
                return False
            except (NotImplementedError, TypeError):
                if self._fs.exists(self._path(name)):
                    return False
                self._fs.pipe_file(self._path(name), content)
            return True

    def upload(self, source: Path, name: str) -> None:
        """Copy a local file to the store."""
        with self._errors(f"write {name}"):
            if self._is_local:
                self._write_locally(name, source)
            elif self._protocols & _PUT_IS_ATOMIC:
                self._fs.put_file(str(source), self._path(name))
            else:
                scratch = self._scratch(name)
                self._fs.put_file(str(source), scratch)
                self._fs.mv(scratch, self._path(name))

    def names(self, folder: str) -> list[str]:
        """Return the names of the files in a folder of the store, unfinished ones included."""
        with self._errors(f"list {folder}"):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(self._path(folder), detail=False)
            except FileNotFoundError:
                return []
        return sorted(f"{folder}/{str(path).rstrip('/').rsplit('/', 1)[-1]}" for path in found)

    def remove(self, name: str) -> None:
        """Delete a file, if it exists."""
        with self._errors(f"delete {name}"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def manifest(self) -> Manifest | None:
        """Return the manifest, None if nothing was published yet.

        Raises:
            DamagedWeightsError: it cannot be read.
        """
        content = self.read(MANIFEST, max_bytes=MOST_MANIFEST_BYTES)
        if content is None:
            return None
        try:
            return parse_manifest(content)
        except DamagedWeightsError as error:
            raise DamagedWeightsError(f"{self.shown_url}: {error}", name=MANIFEST) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _scratch(self, name: str) -> str:
        folder, _, last = name.rpartition("/")
        return self._path(f"{folder}/{_SCRATCH}{uuid.uuid4().hex}-{last}".lstrip("/"))

    def _write_locally(self, name: str, content: bytes | Path) -> None:
        target = Path(self._path(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(self._scratch(name))
        try:
            with scratch.open("wb") as file:
                if isinstance(content, bytes):
                    file.write(content)
                else:
                    with content.open("rb") as source:
                        while part := source.read(2**24):
                            file.write(part)
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)
        flush_to_disk(target.parent)

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except WeightsError:
            raise
        except FileNotFoundError as error:
            raise FileNotFoundError(hide_secrets(str(error))) from None
        except Exception as error:  # noqa: BLE001 - each file system has its own errors
            reason = hide_secrets(f"{type(error).__name__}: {error}")
            # Not chained: a traceback could show the URL with its secrets.
            raise StoreError(f"cannot {action} at {self.shown_url}: {reason}") from None


async def _first_bytes(stream: Any, limit: int) -> bytes:
    """Return at most `limit` bytes of an aiohttp stream."""
    content = bytearray()
    while len(content) < limit:
        chunk = await stream.read(min(limit - len(content), _CHUNK_BYTES))
        if not chunk:
            break
        content += chunk
    return bytes(content)
