"""A follower and its engines: order of requests, failures, retries."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys

import pytest

from atroposlib.errors import ConfigError, InferenceError
from example_trainer.engine import EngineControl, SglangControl
from example_trainer.weights.cli import main
from example_trainer.weights.following import FollowedEngine, Follower
from example_trainer.weights.format import WeightsError
from example_trainer.weights.local import LocalWeights
from example_trainer.weights.publishing import WeightsPublisher
from example_trainer.weights.store import StoreError, WeightStore
from tests.trainer.scripted_vllm import ScriptedVllm
from tests.trainer.weights.checkpoints import changed, opened, some_tensors, write_checkpoint

pytestmark = pytest.mark.slow


class StoppedClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def published(tmp_path):
    """A store with version 1, its publisher, and a function that publishes the next one."""
    store = WeightStore(str(tmp_path / "store"))
    tensors = some_tensors()
    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        publisher.publish(write_checkpoint(tmp_path / "new", tensors), 1)

        def publish(version):
            nonlocal tensors
            tensors = changed(tensors, version)
            publisher.publish(write_checkpoint(tmp_path / "new", tensors), version)

        yield store, publish


def followed(engine, clock, kind=EngineControl):
    return FollowedEngine(kind(f"http://127.0.0.1:{engine.port}"), pause_mode="keep", clock=clock)


def reloads(engine):
    return [body for path, _, body in engine.requests if path == "/collective_rpc" and body]


def test_engine_loads_each_version_once_and_pauses_for_the_load_only(tmp_path, published):
    store, publish = published
    with ScriptedVllm() as engine, opened(tmp_path / "into") as local:
        follower = Follower(store, local, [followed(engine, StoppedClock())])
        follower.poll()
        follower.poll()
        publish(2)
        follower.poll()

    load = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]
    assert engine.paths == ["/collective_rpc", *load, *load]
    paths = [body["kwargs"]["weights_path"] for body in reloads(engine)]
    assert paths == [
        str(tmp_path / "into" / "checkpoints" / name) for name in ("00000001-v1", "00000002-v2")
    ]


def test_engine_is_told_a_version_whose_weights_are_those_of_the_one_before(tmp_path):
    store = WeightStore(str(tmp_path / "store"))
    source = write_checkpoint(tmp_path / "new", some_tensors())
    engine_of = {"kind": SglangControl, "clock": StoppedClock()}
    with (
        ScriptedVllm({"/model_info": (200, {})}) as engine,
        opened(tmp_path / "into") as local,
        WeightsPublisher(store, tmp_path / "mirror") as publisher,
    ):
        follower = Follower(store, local, [followed(engine, **engine_of)])
        for version in (1, 2):
            publisher.publish(source, version)
            assert follower.poll()
        assert follower.poll()
        record = local.record()

    bodies = [body for path, _, body in engine.requests if path == "/update_weights_from_disk"]
    assert [body["weight_version"] for body in bodies] == ["1", "2"]
    assert (record.serial, record.version) == (2, 2)


def test_sglang_is_told_the_version(tmp_path, published):
    store, _ = published
    answers = {"/model_info": (200, {}), "/update_weights_from_disk": (200, {"success": True})}
    with ScriptedVllm(answers) as engine, opened(tmp_path / "into") as local:
        follower = Follower(store, local, [followed(engine, StoppedClock(), SglangControl)])
        assert follower.poll()

    assert engine.paths == [
        "/pause_generation", "/update_weights_from_disk", "/continue_generation",
    ]  # fmt: skip
    assert engine.requests[1][2]["weight_version"] == "1"


def test_restarted_follower_lets_its_engine_load_again(tmp_path, published):
    store, _ = published
    with ScriptedVllm() as engine:
        for _ in range(2):
            with opened(tmp_path / "into") as local:
                Follower(store, local, [followed(engine, StoppedClock())]).poll()

    assert engine.paths.count("/resume") == 2


def test_engine_that_fails_is_retried_with_growing_waits_and_gets_the_newest(
    tmp_path, published, caplog
):
    store, publish = published
    clock = StoppedClock()
    with (
        ScriptedVllm({"/pause": (503, {})}) as engine,
        ScriptedVllm() as healthy,
        opened(tmp_path / "into") as local,
    ):
        follower = Follower(store, local, [followed(engine, clock), followed(healthy, clock)])
        attempts = []
        for _ in range(10):
            assert not follower.poll()
            attempts.append(engine.paths.count("/pause"))
            clock.now += 1
        publish(2)
        del engine.answers["/pause"]
        clock.now += 10
        assert follower.poll()

    assert attempts == [1, 2, 2, 3, 3, 3, 3, 4, 4, 4]  # after 1, 2, 4 and 8 seconds
    assert "trying again in 4 s" in caplog.text
    assert reloads(engine)[-1]["kwargs"]["weights_path"].endswith("00000002-v2")
    assert len(reloads(healthy)) == 2


def test_engine_that_is_down_is_retried(tmp_path, published, caplog):
    store, _ = published
    with ScriptedVllm() as engine:
        port = engine.port
    clock = StoppedClock()
    with opened(tmp_path / "into") as local:
        control = EngineControl(f"http://user:hunter2@127.0.0.1:{port}")  # pragma: allowlist secret
        follower = Follower(store, local, [FollowedEngine(control, clock=clock)])
        assert not follower.poll()

    assert "trying again" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("kind", [EngineControl, SglangControl])
def test_engine_behind_a_proxy_that_cannot_reach_it_is_retried(tmp_path, published, caplog, kind):
    store, _ = published
    clock = StoppedClock()
    with (
        ScriptedVllm({"/collective_rpc": (502, {}), "/model_info": (502, {})}) as proxy,
        opened(tmp_path / "into") as local,
    ):
        follower = Follower(store, local, [followed(proxy, clock, kind)])
        assert not follower.poll()
        proxy.answers = {"/model_info": (200, {})}
        clock.now += 10
        assert follower.poll()

    assert "answered 502; trying again" in caplog.text


def test_engines_that_are_down_are_named_with_the_reason_by_a_follower_that_ends(
    tmp_path, published, caplog
):
    store, _ = published
    refusing = [RefusingEngine(f"reason {i}", url=f"http://engine:{i}") for i in (1, 2)]
    with ScriptedVllm() as healthy, opened(tmp_path / "into") as local:
        engines = [
            FollowedEngine(refusing[0]), followed(healthy, StoppedClock()),
            FollowedEngine(refusing[1]),
        ]  # fmt: skip
        with pytest.raises(InferenceError) as failed:
            Follower(store, local, engines).follow_once()

    assert str(failed.value) == (
        "engine http://engine:1 did not load version 1: reason 1; "
        "engine http://engine:2 did not load version 1: reason 2"
    )
    assert len(reloads(healthy)) == 1
    assert "trying again" not in caplog.text


def ending_of(words, monkeypatch, capsys):
    """Exit code and standard error of the command."""
    monkeypatch.setattr(sys, "argv", ["atropos-weights", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, capsys.readouterr().err


def test_folder_that_cannot_be_made_is_named_with_its_flag(
    tmp_path, published, monkeypatch, capsys
):
    (tmp_path / "file").touch()
    store, place = tmp_path / "store", tmp_path / "file" / "folder"
    new = tmp_path / "new"
    commands = {
        "--into": ["follow", store, "--once"],
        "--scratch": ["verify", store],
        "--cache": ["publish", new, tmp_path / "store_2", "--version", "1"],
    }

    endings = {
        flag: ending_of([*words, flag, place], monkeypatch, capsys)
        for flag, words in commands.items()
    }

    assert endings == {
        flag: (
            2,
            f"atropos-weights: error: {place} cannot be written: {tmp_path / 'file'} is a file; "
            f"expected a folder; choose another place with {flag}\n",
        )
        for flag in commands
    }
    assert not (tmp_path / "store_2").exists()


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["missing"], 1, "missing has no versions yet"),
        (["store", "--engine-url", "engine"], 2, "expected an address"),
    ],
)
def test_follower_that_ends_with_an_error_leaves_no_empty_folder(
    tmp_path, published, words, code, reason, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)

    ending = ending_of(["follow", *words, "--into", "served", "--once"], monkeypatch, capsys)

    assert ending[0] == code
    assert reason in ending[1]
    assert not (tmp_path / "served").exists()


class RefusingEngine:
    """Refuses each load with the message."""

    def __init__(self, message, url="http://engine:9001"):
        self.shown_url = url
        self._message = message

    def require_in_place_updates(self):
        pass

    def keeps_stale_output_layer(self):
        return False

    def reload_weights(self, directory, *, pause_mode, version=0):
        raise InferenceError(self._message)


def test_text_of_an_engine_is_one_line_in_the_log(tmp_path, published, caplog):
    store, _ = published
    engine = RefusingEngine("answered 500: \r\n2026-01-01 INFO version 1 is fine \x1b[2J")
    with opened(tmp_path / "into") as local:
        assert not Follower(store, local, [FollowedEngine(engine)]).poll()

    (message,) = [record.getMessage() for record in caplog.records]
    assert message.isprintable()
    assert "answered 500" in message


def test_engine_that_can_never_update_ends_the_follower(tmp_path, published):
    store, _ = published
    with (
        ScriptedVllm({"/collective_rpc": (404, {})}) as engine,
        opened(tmp_path / "into") as local,
    ):
        follower = Follower(store, local, [followed(engine, StoppedClock())])
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
            follower.poll()


class BrokenStore(WeightStore):
    """Fails while `is_down`."""

    is_down = True

    def read(self, name, **options):
        if self.is_down:
            raise StoreError("cannot read manifest.json: timed out")
        return super().read(name, **options)


def test_store_that_is_down_is_retried_while_engines_keep_their_version(
    tmp_path, published, caplog
):
    _, publish = published
    store = BrokenStore(str(tmp_path / "store"))
    store.is_down = False
    clock = StoppedClock()
    with ScriptedVllm() as engine, opened(tmp_path / "into") as local:
        follower = Follower(store, local, [followed(engine, clock)], clock=clock)
        assert follower.poll()
        store.is_down = True
        publish(2)
        assert not follower.poll()
        store.is_down = False
        assert not follower.poll()  # not due yet
        clock.now += 1
        assert follower.poll()

    assert caplog.text.count("timed out; trying again in 1 s") == 1
    assert len(reloads(engine)) == 2


class AwayFolder(LocalWeights):
    """Cannot be read while `is_away`."""

    is_away = False

    def record(self):
        if self.is_away:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self.current))
        return super().record()


def test_folder_that_is_away_for_a_while_does_not_end_the_follower(tmp_path, published, caplog):
    store, publish = published
    clock = StoppedClock()
    local = AwayFolder(tmp_path / "into")
    local.open()
    with ScriptedVllm() as engine, contextlib.closing(local):
        follower = Follower(store, local, [followed(engine, clock)], clock=clock)
        assert follower.poll()
        publish(2)
        local.is_away = True
        assert not follower.poll()
        local.is_away = False
        clock.now += 10
        assert follower.poll()

    assert "Stale file handle" in caplog.text
    assert len(reloads(engine)) == 2


def test_empty_store_is_waited_for_and_said_once(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    store = WeightStore(str(tmp_path / "store"))
    with opened(tmp_path / "into") as local:
        follower = Follower(store, local)
        assert not follower.poll()
        assert not follower.poll()
        with pytest.raises(WeightsError, match="has no versions yet"):
            follower.follow_once()

    assert caplog.text.count("has no versions yet") == 1


def test_file_deleted_meanwhile_is_looked_up_in_the_next_manifest(tmp_path, published, caplog):
    store, publish = published
    publish(2)
    name = store.manifest().versions[0].anchor.name
    content = store.read(name)
    store.remove(name)
    clock = StoppedClock()
    with opened(tmp_path / "into") as local:
        follower = Follower(store, local, clock=clock)
        assert not follower.poll()
        store.write(name, content)
        clock.now += 1
        assert follower.poll()

    assert "is gone" in caplog.text


def test_disk_full_leaves_the_version_and_is_retried(tmp_path, published, monkeypatch, caplog):
    store, publish = published
    clock = StoppedClock()
    with opened(tmp_path / "into") as local:
        follower = Follower(store, local, clock=clock)
        assert follower.poll()
        publish(2)

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("example_trainer.weights.local.apply_deltas", full)
            assert not follower.poll()
        assert local.record().version == 1
        clock.now += 1
        assert follower.poll()
        assert local.record().version == 2

    assert "No space left" in caplog.text


@pytest.mark.parametrize("given", ["nan", "inf", "0", "-1", "soon"])
def test_time_between_looks_is_a_number_in_range(given, capsys, monkeypatch):
    words = ["follow", "store", "--into", "served", "--poll-s", given]
    monkeypatch.setattr(sys, "argv", ["atropos-weights", *words])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
    assert f"expected a number from 0.01 to 86400, got '{given}'" in capsys.readouterr().err
