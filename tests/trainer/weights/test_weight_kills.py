"""Publishers and followers killed with SIGKILL before each of their file operations."""

from __future__ import annotations

import itertools

import pytest

from example_trainer.weights.local import verify_store
from example_trainer.weights.publishing import WeightsPublisher
from example_trainer.weights.store import WeightStore
from tests.trainer.weights.checkpoints import (
    changed,
    digest_of_current,
    follow_once,
    killed_at,
    opened,
    same_bits,
    some_tensors,
    write_checkpoint,
)

pytestmark = pytest.mark.slow

FIRST = some_tensors()
SECOND = changed(FIRST, 1)
THIRD = changed(SECOND, 2)


def publish(store, folder, tensors, version):
    with WeightsPublisher(store, folder / "mirror") as publisher:
        publisher.publish(write_checkpoint(folder / "new", tensors), version)


def kill_publishers(tmp_path, moments):
    """Kill a publisher of version 2 at each moment; return how often it was."""
    num_killed = 0
    for moment in moments:
        folder = tmp_path / str(moment)
        store = WeightStore(str(folder / "store"))
        publish(store, folder, FIRST, 1)
        source = write_checkpoint(folder / "new", SECOND)

        def work(store=store, folder=folder, source=source):
            with WeightsPublisher(store, folder / "mirror") as publisher:
                publisher.publish(source, 2)

        was_killed = killed_at(moment, work)
        seen = store.manifest().head.version
        found = follow_once(store, folder / "into")
        assert same_bits(found, FIRST if seen == 1 else SECOND), moment
        publish(store, folder, THIRD, 3)
        assert same_bits(follow_once(store, folder / "into"), THIRD), moment
        assert same_bits(follow_once(store, folder / "late"), THIRD), moment
        check_nothing_is_left(store, folder)
        if not was_killed:
            return num_killed
        num_killed += 1
    return num_killed


def check_nothing_is_left(store, folder):
    manifest = store.manifest()
    names = {*store.names("data"), *store.names("files")}
    assert names == manifest.stored_names()
    assert not list(folder.joinpath("mirror").rglob(".partial-*"))
    (folder / "scratch").mkdir()
    assert verify_store(store, manifest, folder / "scratch") == []


def kill_followers(tmp_path, moments):
    """Kill a follower on its way from version 1 to 3 at each moment; return how often it was."""
    store = WeightStore(str(tmp_path / "store"))
    publish(store, tmp_path, FIRST, 1)
    ready = [tmp_path / f"into{moment}" for moment in moments]
    for folder in ready:
        follow_once(store, folder)
    first = digest_of_current(ready[0])
    publish(store, tmp_path, SECOND, 2)
    publish(store, tmp_path, THIRD, 3)
    third = store.manifest().head.weights_sha256
    num_killed = 0
    for moment, folder in zip(moments, ready, strict=True):
        was_killed = killed_at(moment, lambda folder=folder: follow_once(store, folder))
        assert digest_of_current(folder) in (first, third), moment
        assert same_bits(follow_once(store, folder), THIRD), moment
        with opened(folder) as local:
            assert not list(local.downloads.iterdir())
            assert not list(local.root.rglob(".partial-*"))
        num_killed += was_killed
    return num_killed


def test_killed_publisher_leaves_a_readable_store_which_the_next_one_repairs(tmp_path):
    assert kill_publishers(tmp_path, range(2, 200, 9)) >= 4


@pytest.mark.long
def test_publisher_killed_at_every_file_operation(tmp_path):
    assert kill_publishers(tmp_path, itertools.count(1)) >= 40


def test_killed_follower_keeps_a_whole_version_and_continues(tmp_path):
    assert kill_followers(tmp_path, range(1, 60, 5)) >= 4


@pytest.mark.long
def test_follower_killed_at_every_file_operation(tmp_path):
    assert kill_followers(tmp_path, range(1, 90)) >= 20
