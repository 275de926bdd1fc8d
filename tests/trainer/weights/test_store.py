"""Reading a store: limits, and HTTP servers that send something else than they were asked for."""

from __future__ import annotations

import socket
import tracemalloc
import uuid

import pytest

from atroposlib.errors import ConfigError
from example_trainer.weights.format import DamagedWeightsError, WeightsError
from example_trainer.weights.publishing import WeightsPublisher
from example_trainer.weights.store import StoreError, WeightStore
from tests.trainer.weights.checkpoints import (
    changed,
    follow_once,
    same_bits,
    some_tensors,
    write_checkpoint,
)
from tests.trainer.weights.misbehaving_server import MOST_SENT_BYTES, MisbehavingFolder

ENOUGH_BYTES = MOST_SENT_BYTES // 4


@pytest.fixture
def memory_is_bounded():
    """Fail if a test allocates a large part of what a server sends."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < ENOUGH_BYTES
    finally:
        tracemalloc.stop()


@pytest.fixture(params=["file", "memory", "http"])
def stored(request, tmp_path):
    """A store with the files `ten`, of 10 bytes, and `empty`."""
    (tmp_path / "ten").write_bytes(b"0123456789")
    (tmp_path / "empty").touch()
    if request.param == "http":
        with MisbehavingFolder(tmp_path) as server:
            yield WeightStore(server.url)
    elif request.param == "file":
        yield WeightStore(str(tmp_path))
    else:
        store = WeightStore(f"memory://{uuid.uuid4().hex}/store")
        store.write("ten", b"0123456789")
        store.write("empty", b"")
        yield store


def test_file_is_read_up_to_its_limit(stored):
    assert stored.read("ten") == b"0123456789"
    assert stored.read("ten", max_bytes=10) == b"0123456789"
    assert stored.read("empty", max_bytes=0) == b""
    with pytest.raises(DamagedWeightsError, match="ten has more than 9 bytes") as refused:
        stored.read("ten", max_bytes=9)
    assert refused.value.name == "ten"


def test_missing_file_is_none_and_its_parts_are_an_error(stored):
    assert stored.read("missing") is None
    with pytest.raises(FileNotFoundError):
        stored.read_part("missing", 0, 1)


def test_part_is_read_where_the_file_has_it(stored):
    assert stored.read_part("ten", 3, 7) == b"3456"
    with pytest.raises((StoreError, DamagedWeightsError), match="ten"):
        stored.read_part("ten", 8, 12)


def test_part_comes_from_a_server_without_ranges(tmp_path):
    (tmp_path / "ten").write_bytes(b"0123456789")
    with MisbehavingFolder(tmp_path, has_ranges=False) as server:
        store = WeightStore(server.url)

        assert store.read_part("ten", 3, 7) == b"3456"
        with pytest.raises(StoreError, match="no bytes 12 to 14: 0 came"):
            store.read_part("ten", 12, 14)
        assert server.encodings == ["identity", "identity"]


@pytest.mark.usefixtures("memory_is_bounded")
def test_endless_body_is_not_read_to_its_end(tmp_path):
    with MisbehavingFolder(tmp_path) as server:
        server.faults = {"body": "endless", "part": "endless part"}
        store = WeightStore(server.url)

        with pytest.raises(DamagedWeightsError, match="more than 1000 bytes"):
            store.read("body", max_bytes=1000)
        assert store.read_part("body", 500, 1000) == bytes(500)
        assert store.read_part("part", 500, 1000) == bytes(500)


@pytest.mark.usefixtures("memory_is_bounded")
def test_compressed_body_is_refused_before_it_is_read(tmp_path):
    with MisbehavingFolder(tmp_path) as server:
        server.faults = {"": "gzip"}
        store = WeightStore(server.url)

        for read in (lambda: store.read("file"), lambda: store.read_part("file", 0, 1000)):
            with pytest.raises(StoreError, match="sent Content-Encoding gzip, expected identity"):
                read()


@pytest.mark.usefixtures("memory_is_bounded")
def test_endless_manifest_is_damaged(tmp_path):
    with MisbehavingFolder(tmp_path) as server, pytest.MonkeyPatch.context() as patched:
        patched.setattr("example_trainer.weights.store.MOST_MANIFEST_BYTES", 1000)
        server.faults = {"manifest.json": "endless"}

        with pytest.raises(DamagedWeightsError, match=r"manifest.json has more than 1000 bytes"):
            WeightStore(server.url).manifest()


@pytest.fixture
def published(tmp_path):
    """Folder of a store with two versions, and the tensors of the second."""
    store, tensors = WeightStore(str(tmp_path / "store")), some_tensors()
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publisher.publish(write_checkpoint(tmp_path / "new", tensors), 1)
        tensors = changed(tensors, 2)
        publisher.publish(write_checkpoint(tmp_path / "new", tensors), 2)
    return tmp_path / "store", tensors


@pytest.mark.parametrize("has_ranges", [True, False])
def test_version_is_fetched_over_http(tmp_path, published, has_ranges, monkeypatch):
    monkeypatch.setattr("example_trainer.weights.local._PART_BYTES", 1000)
    root, tensors = published

    with MisbehavingFolder(root, has_ranges=has_ranges) as server:
        fetched = follow_once(WeightStore(server.url), tmp_path / "into")

    assert same_bits(fetched, tensors)


@pytest.mark.parametrize("fault", ["gzip", "endless", "endless part"])
@pytest.mark.parametrize("files", ["data", "files"])
@pytest.mark.usefixtures("memory_is_bounded")
def test_hostile_server_is_an_error_and_not_the_end_of_the_memory(
    tmp_path, published, fault, files
):
    with MisbehavingFolder(published[0]) as server:
        server.faults = {files: fault}

        with pytest.raises(WeightsError):
            follow_once(WeightStore(server.url), tmp_path / "into")

    assert not (tmp_path / "into" / "current").exists()


def test_manifest_that_followers_would_refuse_is_not_published(tmp_path, published, monkeypatch):
    monkeypatch.setattr("example_trainer.weights.publishing.MOST_MANIFEST_BYTES", 1000)
    store = WeightStore(str(published[0]))

    with (
        WeightsPublisher(store, tmp_path / "mirror") as publisher,
        pytest.raises(ConfigError, match="keep fewer versions"),
    ):
        publisher.publish(write_checkpoint(tmp_path / "new", some_tensors(3)), 3)

    assert store.manifest().head.version == 2


def test_server_that_is_down_at_the_start_is_named_without_its_secret():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        url = f"ftp://me:hunter2@127.0.0.1:{deaf.getsockname()[1]}/run"  # pragma: allowlist secret
        with pytest.raises(StoreError, match=r"cannot open ftp://.*refused") as failed:
            WeightStore(url)

    assert "hunter2" not in str(failed.value)


def test_empty_url_is_refused():
    with pytest.raises(ConfigError, match="the URL of the store is empty"):
        WeightStore("")
