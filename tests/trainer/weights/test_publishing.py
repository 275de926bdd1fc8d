"""Publish and follow: equal bytes, late joiners, damage, several publishers."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from atroposlib.errors import ConfigError
from example_trainer.weights.cli import main
from example_trainer.weights.format import PIECE_BYTES, DamagedWeightsError, WeightsError
from example_trainer.weights.local import apply_deltas, fetch_head, verify_store
from example_trainer.weights.publishing import PublisherLease, PublishRules, WeightsPublisher
from example_trainer.weights.store import StoreError, WeightStore
from tests.trainer.weights.checkpoints import (
    changed,
    follow_once,
    opened,
    same_bits,
    some_tensors,
    write_checkpoint,
)

pytestmark = pytest.mark.slow


@pytest.fixture(params=["file", "memory"])
def store(request, tmp_path):
    if request.param == "file":
        return WeightStore(f"file://{tmp_path}/store")
    return WeightStore(f"memory://{uuid.uuid4().hex}/store")


def publish_all(publisher, folder, versions):
    """Publish 1, 2, ... and return the tensors of each."""
    tensors, published = some_tensors(), []
    for version in range(1, versions + 1):
        publisher.publish(write_checkpoint(folder, tensors), version)
        published.append(tensors)
        tensors = changed(tensors, version)
    return published


def test_hundred_versions_are_restored_bit_by_bit(store, tmp_path):
    rules = PublishRules(keep_versions=10, anchor_every=30, anchor_share=10.0)
    tensors = some_tensors()
    with WeightsPublisher(store, tmp_path / "mirror", rules=rules) as publisher:
        for version in range(1, 101):
            publisher.publish(write_checkpoint(tmp_path / "new", tensors), version)
            assert same_bits(follow_once(store, tmp_path / "into"), tensors), version
            tensors = changed(tensors, version)

    manifest = store.manifest()
    assert [entry.serial for entry in manifest.versions] == list(range(91, 101))
    assert set(store.names("data")) == {
        name for name in manifest.stored_names() if name.startswith("data")
    }


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]


@st.composite
def histories(draw):
    """Names and shapes of tensors, and their values in three versions."""
    seed = draw(st.integers(0, 2**32))
    generator = torch.Generator().manual_seed(seed)
    shapes = draw(
        st.lists(
            st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3)),
            min_size=1,
            max_size=5,
        )
    )
    versions = []
    for _ in range(3):
        tensors = {}
        for i, (dtype, shape) in enumerate(shapes):
            values = torch.randn(shape, generator=generator) * 3
            if versions and torch.rand((), generator=generator) < 0.3:
                tensors[f"t{i}"] = versions[-1][f"t{i}"]
            else:
                tensors[f"t{i}"] = values.to(dtype)
        versions.append(tensors)
    return versions


@settings(max_examples=25)
@given(histories())
def test_any_types_and_shapes_are_restored_bit_by_bit(tmp_path_factory, versions):
    folder = tmp_path_factory.mktemp("any")
    store = WeightStore(f"memory://{uuid.uuid4().hex}")
    with WeightsPublisher(store, folder / "mirror") as publisher:
        for version, tensors in enumerate(versions):
            publisher.publish(write_checkpoint(folder / "new", tensors), version)
            assert same_bits(follow_once(store, folder / "into"), tensors)
    assert same_bits(follow_once(store, folder / "late"), versions[-1])


def test_tensors_of_several_pieces_and_files_are_restored(store, tmp_path):
    large = torch.arange(PIECE_BYTES // 2 + 1000, dtype=torch.int32)
    folder = write_checkpoint(tmp_path / "new", {"large": large})
    write_checkpoint(tmp_path / "other", {"small": torch.ones(3)})
    (tmp_path / "other" / "model.safetensors").rename(folder / "model-2.safetensors")
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publisher.publish(folder, 1)
        large[-1] = 7
        write_checkpoint(folder, {"large": large})
        report = publisher.publish(folder, 2)

    assert report.entry.delta.num_bytes < 1000
    assert same_bits(
        follow_once(store, tmp_path / "into"), {"large": large, "small": torch.ones(3)}
    )


def test_config_and_tokenizer_come_with_the_weights(store, tmp_path):
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publish_all(publisher, tmp_path / "new", 2)
        (tmp_path / "new" / "config.json").write_text('{"model_type": "qwen3"}')
        publisher.publish(tmp_path / "new", 3)

    follow_once(store, tmp_path / "into")

    files = {path.name for path in (tmp_path / "into" / "current").iterdir()}
    assert files >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert "qwen3" in (tmp_path / "into" / "current" / "config.json").read_text()


@pytest.mark.parametrize("has_links", [True, False])
def test_config_that_changes_without_the_weights_reaches_followers(
    store, tmp_path, monkeypatch, has_links
):
    def refuse(*_):
        raise OSError(errno.EPERM, "no hard links here")

    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    new, current = tmp_path / "new", tmp_path / "into" / "current"
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        [published] = publish_all(publisher, new, 1)
        follow_once(store, tmp_path / "into")
        (new / "config.json").write_text('{"model_type": "qwen3"}')
        (new / "tokenizer.json").unlink()
        publisher.publish(new, 2)

    assert same_bits(follow_once(store, tmp_path / "into"), published)
    assert "qwen3" in (current / "config.json").read_text()
    names = {"model.safetensors", "config.json", "atropos_version.json"}
    assert {path.name for path in current.iterdir()} == names
    with opened(tmp_path / "into") as local:
        assert local.record().version == 2


def test_files_that_a_manifest_cannot_name_are_left_out_with_a_warning(store, tmp_path, caplog):
    checkpoint = write_checkpoint(tmp_path / "new", some_tensors())
    names = ["config.json~", "notes (copy).txt"]
    for name in names:
        (checkpoint / name).write_text("x")

    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publisher.publish(checkpoint, 1)

    assert store.manifest().files.keys() == {"config.json", "tokenizer.json"}
    for name in names:
        assert f"{name} is not published" in caplog.text


def test_only_the_files_that_transformers_loads_are_published(store, tmp_path):
    tensors = some_tensors()
    single = write_checkpoint(tmp_path / "single", tensors)
    save_file({"rng.torch": torch.zeros(4)}, single / "trainer_state.safetensors")
    several = write_checkpoint(tmp_path / "several", tensors)
    (several / "model.safetensors").rename(several / "model-00001.safetensors")
    weight_map = dict.fromkeys(tensors, "model-00001.safetensors")
    index = json.dumps({"weight_map": weight_map})
    (several / "model.safetensors.index.json").write_text(index)
    save_file({"layers.0": torch.zeros(4)}, several / "consolidated.safetensors")

    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publisher.publish(single, 1)
        report = publisher.publish(several, 2)

    assert report.entry.changed_fraction == 0
    assert same_bits(follow_once(store, tmp_path / "into"), tensors)


def test_late_joiner_takes_the_newest_anchor_and_a_follower_only_deltas(store, tmp_path):
    rules = PublishRules(anchor_every=4, anchor_share=10.0)
    with WeightsPublisher(store, tmp_path / "mirror", rules=rules) as publisher:
        published = publish_all(publisher, tmp_path / "new", 3)
        follow_once(store, tmp_path / "early")
        for version in range(4, 8):
            tensors = changed(published[-1], version)
            published.append(tensors)
            publisher.publish(write_checkpoint(tmp_path / "new", tensors), version)
    manifest = store.manifest()
    anchors = [entry.anchor.name for entry in manifest.versions if entry.anchor]
    store.remove(anchors[0])
    assert same_bits(follow_once(store, tmp_path / "late"), published[-1])
    store.remove(anchors[1])

    assert same_bits(follow_once(store, tmp_path / "early"), published[-1])


def test_publisher_without_its_last_version_fetches_it(store, tmp_path):
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        published = publish_all(publisher, tmp_path / "new", 3)

    tensors = changed(published[-1], 9)
    with WeightsPublisher(store, tmp_path / "elsewhere") as publisher:
        report = publisher.publish(write_checkpoint(tmp_path / "new", tensors), 4)

    assert report.entry.anchor is None
    assert same_bits(follow_once(store, tmp_path / "into"), tensors)


def test_damaged_last_version_of_a_publisher_is_fetched_again(store, tmp_path):
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        published = publish_all(publisher, tmp_path / "new", 2)
    damage(tmp_path / "mirror" / "current" / "model.safetensors")

    tensors = changed(published[-1], 9)
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publisher.publish(write_checkpoint(tmp_path / "new", tensors), 3)

    assert same_bits(follow_once(store, tmp_path / "into"), tensors)


def damage(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x10
    path.write_bytes(content)


def test_same_version_again_is_not_published_twice(store, tmp_path):
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publish_all(publisher, tmp_path / "new", 2)
        report = publisher.publish(tmp_path / "new", 2)

    assert not report.is_new
    assert store.manifest().head.serial == 2


def test_same_version_with_another_config_is_refused(store, tmp_path):
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publish_all(publisher, tmp_path / "new", 2)
        (tmp_path / "new" / "config.json").write_text('{"model_type": "other"}')
        with pytest.raises(ConfigError, match="already has version 2"):
            publisher.publish(tmp_path / "new", 2)
        assert publisher.publish(tmp_path / "new", 3).is_new

    follow_once(store, tmp_path / "into")
    assert "other" in (tmp_path / "into" / "current" / "config.json").read_text()


def test_older_version_is_refused_unless_the_run_was_resumed(store, tmp_path):
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        published = publish_all(publisher, tmp_path / "new", 3)
        write_checkpoint(tmp_path / "new", published[0])
        for version in (2, 3):
            with pytest.raises(ConfigError, match="already has version 3"):
                publisher.publish(tmp_path / "new", version)
        publisher.publish(tmp_path / "new", 2, rewinds=True)

    assert [entry.version for entry in store.manifest().versions] == [1, 2, 3, 2]
    assert same_bits(follow_once(store, tmp_path / "into"), published[0])


def test_publisher_deletes_no_files_but_its_own(store, tmp_path):
    others = ["data/train.csv", "data/00000001.safetensors", "files/notes.txt", "epochs/3.pt"]
    left = [
        "data/00000001-0.delta", f"data/.new-{'0' * 32}-00000001-0.safetensors",
        f"files/{'0' * 64}", "epochs/00000000",
    ]  # fmt: skip
    for name in [*others, *left]:
        store.write(name, b"content")

    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publish_all(publisher, tmp_path / "new", 2)

    found = {name for folder in ("data", "files", "epochs") for name in store.names(folder)}
    assert found >= set(others)
    assert not found & set(left)


def test_other_model_is_refused_and_nothing_changes(store, tmp_path):
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publish_all(publisher, tmp_path / "new", 2)
        before = store.read("manifest.json")
        write_checkpoint(tmp_path / "new", {"embed": torch.ones(2)})
        with pytest.raises(ConfigError, match="a model with other tensors"):
            publisher.publish(tmp_path / "new", 3)

    assert store.read("manifest.json") == before


def test_follower_of_another_run_is_refused_and_nothing_changes(tmp_path):
    for name in ("one", "two"):
        with WeightsPublisher(WeightStore(str(tmp_path / name)), tmp_path / f"m{name}") as each:
            publish_all(each, tmp_path / "new", 2)
    follow_once(WeightStore(str(tmp_path / "one")), tmp_path / "into")
    before = sorted(tmp_path.joinpath("into").rglob("*"))

    with pytest.raises(ConfigError, match="nothing was changed") as refused:
        follow_once(WeightStore(str(tmp_path / "two")), tmp_path / "into")

    assert "\n" not in str(refused.value)
    assert sorted(tmp_path.joinpath("into").rglob("*")) == before


def test_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")

    with pytest.raises(ConfigError, match="has other files"), opened(tmp_path):
        pass


@pytest.mark.parametrize("name", ["downloads", "checkpoints"])
def test_folder_with_a_link_to_other_files_is_refused(tmp_path, name):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("precious")
    (tmp_path / "into").mkdir()
    (tmp_path / "into" / name).symlink_to(tmp_path / "precious")

    with pytest.raises(ConfigError, match="is a link"), opened(tmp_path / "into"):
        pass


@pytest.mark.parametrize("name", ["checkpoints/step_100/model.pt", "downloads/mine.zip"])
def test_folder_whose_files_have_other_names_is_refused_and_keeps_them(tmp_path, name):
    for number in ("100", "200", "300"):
        other = tmp_path / "into" / name.replace("100", number)
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("mine")
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(ConfigError, match="has other files, such as"), opened(tmp_path / "into"):
        pass

    assert sorted(tmp_path.rglob("*")) == before


def test_two_followers_in_one_folder_are_refused(tmp_path):
    with (
        opened(tmp_path / "into"),
        pytest.raises(ConfigError, match="another process uses"),
        opened(tmp_path / "into"),
    ):
        pass


def test_second_publisher_is_refused_and_may_start_after_the_first(store, tmp_path):
    with WeightsPublisher(store, tmp_path / "a") as publisher:
        publish_all(publisher, tmp_path / "new", 1)
        with pytest.raises(ConfigError, match="has another publisher"):
            WeightsPublisher(store, tmp_path / "b").open()
    with WeightsPublisher(store, tmp_path / "b") as publisher:
        publisher.publish(write_checkpoint(tmp_path / "new", some_tensors(1)), 2)

    assert store.manifest().epoch == 2


def test_lease_of_a_killed_publisher_expires_and_the_late_one_cannot_write(tmp_path):
    store = WeightStore(f"memory://{uuid.uuid4().hex}")
    now = 1000.0
    first = PublisherLease(store, clock=lambda: now)
    publisher = WeightsPublisher(store, tmp_path / "a", lease=first)
    publisher.open()
    publish_all(publisher, tmp_path / "new", 1)

    with pytest.raises(ConfigError, match="its lease ends in 60 s"):
        PublisherLease(store, clock=lambda: now).acquire()
    second = PublisherLease(store, clock=lambda: now + 61)
    second.acquire()
    write_checkpoint(tmp_path / "new", changed(some_tensors(), 5))
    with pytest.raises(ConfigError, match="another publisher took over"):
        publisher.publish(tmp_path / "new", 2)

    assert store.manifest().head.version == 1
    second.release()
    publisher.close()


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"epoch": "x"}',
        b'{"epoch": -1}',
        b'{"renewed_at": []}',
        b'{"renewed_at": 1%s}' % (400 * b"0"),
        b'{"renewed_at": NaN}',
        b"1",
    ],
)
def test_malformed_lease_is_none(content):
    store = WeightStore(f"memory://{uuid.uuid4().hex}/store")
    store.write("lease.json", content)

    lease = PublisherLease(store)
    lease.acquire()
    lease.release()

    assert lease.epoch == 1


def test_text_of_a_lease_is_one_line_in_errors():
    store = WeightStore(f"memory://{uuid.uuid4().hex}/store")
    store.write("lease.json", b'{"renewed_at": 1000, "host": "\\u001b[2J\\nversion 1 is fine"}')

    with pytest.raises(ConfigError, match="has another publisher") as refused:
        PublisherLease(store, clock=lambda: 1000.0).acquire()

    assert str(refused.value).isprintable()


def test_publisher_that_was_overtaken_is_refused_at_the_same_epoch():
    store = WeightStore(f"memory://{uuid.uuid4().hex}")
    store.create("epochs/00000001", b'{"owner": "another one", "renewed_at": 1000}')

    with pytest.raises(ConfigError, match="same time; if it was killed, its claim ends in 59 s"):
        PublisherLease(store, clock=lambda: 1001.0).acquire()


@pytest.mark.parametrize("claim", [b'{"owner": "another one", "renewed_at": 1000}', b"unreadable"])
def test_publisher_that_was_killed_while_it_claimed_an_epoch_does_not_block_the_store(claim):
    store = WeightStore(f"memory://{uuid.uuid4().hex}")
    store.create("epochs/00000001", claim)

    lease = PublisherLease(store, clock=lambda: 1061.0)
    lease.acquire()
    lease.release()

    assert lease.epoch == 2
    assert store.names("epochs") == ["epochs/00000002"]


@pytest.fixture
def without_locks(monkeypatch):
    """A network file system that has no locks."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("without_locks")
def test_file_system_without_locks_gets_a_lease(tmp_path):
    store = WeightStore(str(tmp_path / "store"))
    now = 1000.0
    lease = PublisherLease(store, clock=lambda: now)
    publisher = WeightsPublisher(store, tmp_path / "a", lease=lease)
    publisher.open()
    published = publish_all(publisher, tmp_path / "new", 2)

    with pytest.raises(ConfigError, match=r"has another publisher: .* its lease ends in 60 s"):
        PublisherLease(store, clock=lambda: now).acquire()
    publisher.close()
    later = PublisherLease(store, clock=lambda: now)
    later.acquire()
    later.release()

    assert same_bits(follow_once(store, tmp_path / "into"), published[-1])


@pytest.mark.parametrize("part", ["delta", "anchor", "config"])
def test_damaged_file_is_never_used(tmp_path, part, caplog):
    store = WeightStore(str(tmp_path / "store"))
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publish_all(publisher, tmp_path / "new", 2)
        follow_once(store, tmp_path / "into")
        publisher.publish(write_checkpoint(tmp_path / "new", changed(some_tensors(), 9)), 3)
    manifest = store.manifest()
    name = {
        "delta": manifest.versions[1].delta.name,
        "anchor": manifest.versions[0].anchor.name,
        "config": manifest.files["config.json"].name,
    }[part]
    damage(tmp_path / "store" / name)
    folder = "into" if part == "config" else "late"

    with pytest.raises(WeightsError, match="no intact way to version 3"):
        follow_once(store, tmp_path / folder)

    assert not (tmp_path / "late" / "current").exists()
    assert f"{name} is damaged" in caplog.text


def test_damaged_delta_is_avoided_by_a_newer_anchor(tmp_path, caplog):
    store = WeightStore(str(tmp_path / "store"))
    rules = PublishRules(anchor_every=2, anchor_share=10.0)
    with WeightsPublisher(store, tmp_path / "mirror", rules=rules) as publisher:
        publish_all(publisher, tmp_path / "new", 1)
        follow_once(store, tmp_path / "into")
        tensors = changed(changed(some_tensors(), 1), 2)
        publisher.publish(write_checkpoint(tmp_path / "new", changed(some_tensors(), 1)), 2)
        publisher.publish(write_checkpoint(tmp_path / "new", tensors), 3)
    damage(tmp_path / "store" / store.manifest().versions[1].delta.name)

    assert same_bits(follow_once(store, tmp_path / "into"), tensors)
    assert "trying again" in caplog.text


def test_damaged_local_weights_are_replaced(tmp_path):
    store = WeightStore(str(tmp_path / "store"))
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publish_all(publisher, tmp_path / "new", 1)
        follow_once(store, tmp_path / "into")
        damage(tmp_path / "into" / "current" / "model.safetensors")
        tensors = changed(some_tensors(), 1)
        publisher.publish(write_checkpoint(tmp_path / "new", tensors), 2)

    assert same_bits(follow_once(store, tmp_path / "into"), tensors)


def test_interrupted_download_is_continued(tmp_path, monkeypatch):
    monkeypatch.setattr("example_trainer.weights.local._PART_BYTES", 1000)
    store = WeightStore(str(tmp_path / "store"))
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publish_all(publisher, tmp_path / "new", 1)
    parts = []

    class Failing(WeightStore):
        def read_part(self, name, start, stop):
            parts.append(start)
            if len(parts) == 3:
                raise StoreError("the line is down")
            return super().read_part(name, start, stop)

    failing = Failing(str(tmp_path / "store"))
    with opened(tmp_path / "into") as local:
        with pytest.raises(StoreError):
            fetch_head(failing, store.manifest(), local)
        fetch_head(failing, store.manifest(), local)

        assert parts[:4] == [0, 1000, 2000, 2000]
        assert same_bits(load_file(local.current / "model.safetensors"), some_tensors())


def test_verify_finds_what_is_damaged(tmp_path):
    store = WeightStore(str(tmp_path / "store"))
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publish_all(publisher, tmp_path / "new", 3)
    (tmp_path / "scratch").mkdir()
    manifest = store.manifest()

    intact = verify_store(store, manifest, tmp_path / "scratch")
    damage(tmp_path / "store" / manifest.versions[1].delta.name)
    problems = verify_store(store, manifest, tmp_path / "scratch")

    assert intact == []
    assert len(problems) == 3  # the file, and the two versions after it
    assert "is damaged" in problems[0]


def test_verify_finds_a_file_that_is_cut_off(tmp_path):
    store = WeightStore(str(tmp_path / "store"))
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publish_all(publisher, tmp_path / "new", 1)
    (tmp_path / "scratch").mkdir()
    manifest = store.manifest()
    anchor = tmp_path / "store" / manifest.head.anchor.name
    os.truncate(anchor, 100)

    problems = verify_store(store, manifest, tmp_path / "scratch")

    assert f"{anchor} has no bytes 0 to" in problems[0]


def test_checkpoint_without_one_of_its_files_is_refused(store, tmp_path):
    folder = write_checkpoint(tmp_path / "new", some_tensors())
    index = {"weight_map": dict.fromkeys([*some_tensors(), "head"], "model-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    refused = pytest.raises(ConfigError, match=r"lacks 1 of the 8 .* head in model-00002")
    with WeightsPublisher(store, tmp_path / "mirror") as publisher, refused:
        publisher.publish(folder, 1)

    assert store.manifest() is None


def test_full_disk_names_its_folder(tmp_path):
    store = WeightStore(str(tmp_path / "store"))
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publish_all(publisher, tmp_path / "new", 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"large: '{tmp_path}/into/downloads'"):
            follow_once(store, tmp_path / "into")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_verify_accepts_versions_with_equal_weights(tmp_path):
    store = WeightStore(str(tmp_path / "store"))
    rules = PublishRules(anchor_every=1)
    with WeightsPublisher(store, tmp_path / "mirror", rules=rules) as publisher:
        source = write_checkpoint(tmp_path / "new", some_tensors())
        publisher.publish(source, 1)
        publisher.publish(source, 2)
        publisher.publish(write_checkpoint(source, changed(some_tensors(), 3)), 3)
    (tmp_path / "scratch").mkdir()

    assert verify_store(store, store.manifest(), tmp_path / "scratch") == []


def replace_anchor(root, content):
    """Replace the last version's anchor, with a manifest that names its digest."""
    path = root / "manifest.json"
    manifest = json.loads(path.read_text())
    head = manifest["versions"][-1]
    digest = hashlib.sha256(content).hexdigest()
    (root / head["anchor"]["name"]).write_bytes(content)
    head["anchor"].update(num_bytes=len(content), sha256=digest)
    head["weights_sha256"] = digest
    path.write_text(json.dumps(manifest))


def bytes_of(folder, tensors):
    return (write_checkpoint(folder, tensors) / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["pickle", "truncated", "other tensors"])
def test_anchor_without_the_form_of_the_weights_is_never_used(tmp_path, kind):
    store = WeightStore(str(tmp_path / "store"))
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publish_all(publisher, tmp_path / "new", 1)
    content = {
        "pickle": b"\x80\x04 not safetensors",
        "truncated": bytes_of(tmp_path / "cut", some_tensors())[:-1],
        "other tensors": bytes_of(tmp_path / "other", {"embed": torch.zeros(3)}),
    }[kind]
    replace_anchor(tmp_path / "store", content)
    manifest = store.manifest()
    (tmp_path / "scratch").mkdir()

    with pytest.raises(WeightsError, match="no intact way to version 1"):
        follow_once(store, tmp_path / "into")
    (problem,) = verify_store(store, manifest, tmp_path / "scratch")

    assert not (tmp_path / "into" / "current").exists()
    assert f"{manifest.head.anchor.name} " in problem
    assert "other tensors" in problem or "not a safetensors file" in problem


def test_verify_finds_an_anchor_of_another_version(tmp_path):
    store = WeightStore(str(tmp_path / "store"))
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publish_all(publisher, tmp_path / "new", 1)
    path = tmp_path / "store" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["versions"][0]["weights_sha256"] = 64 * "0"
    path.write_text(json.dumps(manifest))
    (tmp_path / "scratch").mkdir()

    problems = verify_store(store, store.manifest(), tmp_path / "scratch")

    assert problems == ["version 1: its anchor has other bytes"]


def test_secrets_of_urls_are_not_shown(caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    store = WeightStore("http://user:hunter2@127.0.0.1:9/run")  # pragma: allowlist secret

    with pytest.raises(StoreError) as failed:
        store.manifest()

    assert "hunter2" not in str(failed.value) + store.shown_url + caplog.text
    assert failed.value.__cause__ is None


def test_http_url_with_a_query_is_refused_without_showing_it():
    with pytest.raises(ConfigError, match="without a query") as refused:
        WeightStore("http://host/run?token=hunter2")  # pragma: allowlist secret

    assert "hunter2" not in str(refused.value)


def test_unknown_protocol_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"nosuch://x cannot be opened: .*expected a folder"):
        WeightStore("nosuch://x")


def test_download_of_another_run_is_not_taken_for_this_one(tmp_path, monkeypatch):
    """A follower is killed before its first version, and the store is used again."""
    store = WeightStore(str(tmp_path / "store"))
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publisher.publish(write_checkpoint(tmp_path / "new", some_tensors(0)), 1)
    with monkeypatch.context() as patched:
        patched.setattr("example_trainer.weights.local._small_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            follow_once(store, tmp_path / "into")
    shutil.rmtree(tmp_path / "store")

    with WeightsPublisher(store, tmp_path / "mirror_2") as publisher:
        publisher.publish(write_checkpoint(tmp_path / "new", some_tensors(1)), 1)

    assert same_bits(follow_once(store, tmp_path / "into"), some_tensors(1))


def interrupt(*_):
    raise KeyboardInterrupt


def test_empty_delta_is_damaged(tmp_path):
    (tmp_path / "delta").touch()
    weights = write_checkpoint(tmp_path / "base", some_tensors()) / "model.safetensors"

    with pytest.raises(DamagedWeightsError, match="empty"):
        apply_deltas(weights, [tmp_path / "delta"], tmp_path / "target")


def test_chain_of_more_deltas_than_a_process_may_open_files_is_applied(tmp_path):
    store = WeightStore(str(tmp_path / "store"))
    rules = PublishRules(keep_versions=60, anchor_every=100, anchor_share=100.0)
    with WeightsPublisher(store, tmp_path / "mirror", rules=rules) as publisher:
        newest = publish_all(publisher, tmp_path / "new", 60)[-1]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/dev/fd").iterdir())

    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 40, before[1]))
    try:
        found = follow_once(store, tmp_path / "into")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    assert same_bits(found, newest)


def test_missing_file_is_named_without_the_secret_of_its_url(monkeypatch):
    store = WeightStore("memory://missing")

    def fail(path, **_):
        url = f"https://me:secret@host/{path}"  # pragma: allowlist secret
        raise FileNotFoundError(url)

    monkeypatch.setattr(store._fs, "cat_file", fail)

    with pytest.raises(FileNotFoundError) as caught:
        store.read_part("data/x", 0, 1)

    assert "data/x" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "place",
    ["me:hunter2@host:9001", "http://me:hunter2@[::1"],  # pragma: allowlist secret
)
def test_wrong_address_of_an_engine_is_shown_without_its_secret(
    tmp_path, monkeypatch, capsys, place
):
    words = ["follow", str(tmp_path), "--into", str(tmp_path / "into"), "--engine-url", place]
    monkeypatch.setattr("sys.argv", ["atropos-weights", *words])

    with pytest.raises(SystemExit) as ended:
        main()

    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert place.rpartition("@")[2] in printed
    assert "hunter2" not in printed


@pytest.mark.parametrize("command", ["list", "verify"])
def test_reader_of_a_list_may_leave(tmp_path, command):
    with WeightsPublisher(WeightStore(str(tmp_path / "store")), tmp_path / "mirror") as publisher:
        publish_all(publisher, tmp_path / "new", 1)
    reading, writing = os.pipe()
    os.close(reading)

    with os.fdopen(writing, "w") as output:
        done = subprocess.run(
            [sys.executable, "-u", "-m", "example_trainer.weights.cli", command, "store"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert (done.returncode, done.stderr) == (0, "")


def test_file_larger_than_the_disk_is_not_downloaded(tmp_path, monkeypatch):
    store = WeightStore(str(tmp_path / "store"))
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publisher.publish(write_checkpoint(tmp_path / "new", some_tensors()), 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)

    with pytest.raises(WeightsError, match="100 left"):
        follow_once(store, tmp_path / "into")

    assert not any(path.stat().st_size for path in (tmp_path / "into" / "downloads").iterdir())
