"""Two engines behind a link of 20 Mbit/s follow a hundred versions of a trained model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from example_trainer.weights.publishing import PublishRules, WeightsPublisher
from example_trainer.weights.store import WeightStore
from tests.trainer.weights.slow_link import SlowFolder
from tests.trainer.weights.trained_versions import train_versions

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[3]
VERSIONS = 100
WAIT_S = 60


class Follower:
    """An engine and its follower, each a process."""

    def __init__(self, url: str, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        self._engine = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.weights.reloading_engine"],
            cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._url = f"http://127.0.0.1:{int(self._engine.stdout.readline())}"
        command = [sys.executable, "-m", "example_trainer.weights.cli", "follow", url]
        command += ["--into", str(folder), "--engine-url", self._url, "--poll-s", "0.1"]
        self._log = folder.with_suffix(".log")
        with self._log.open("wb") as log:
            self._follower = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=log)

    def loaded(self) -> list[dict[str, object]]:
        with urllib.request.urlopen(f"{self._url}/loaded") as answer:
            return json.load(answer)

    def wait_for(self, digest: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not any(each["sha256"] == digest for each in self.loaded()[-1:]):
            assert time.monotonic() < deadline, self._log.read_text()
            assert self._follower.poll() is None, self._log.read_text()
            time.sleep(0.02)

    def end(self) -> int:
        self._follower.terminate()
        code = self._follower.wait()
        self._engine.kill()
        self._engine.wait()
        self._engine.stdout.close()
        return code


@pytest.mark.long
def test_two_engines_behind_a_slow_link_follow_hundred_versions_in_a_tenth_of_the_bytes(tmp_path):
    store = WeightStore(str(tmp_path / "store"))
    digests, full_bytes = [], 0
    followers = []
    with (
        SlowFolder(tmp_path / "store", bits_per_s=20e6) as link,
        WeightsPublisher(store, tmp_path / "mirror", rules=PublishRules()) as publisher,
    ):
        try:
            for version, folder in train_versions(tmp_path, lr=2e-6, versions=VERSIONS):
                entry = publisher.publish(folder, version).entry
                shutil.rmtree(folder)
                digests.append(entry.weights_sha256)
                full_bytes += 2 * entry.weights_bytes
                if not followers:
                    followers += [Follower(link.url, tmp_path / f"into{i}") for i in range(2)]
                for follower in followers:
                    follower.wait_for(entry.weights_sha256)
            loaded = [follower.loaded() for follower in followers]
        finally:
            codes = [follower.end() for follower in followers]
        sent_bytes = link.sent_bytes

    print(f"{sent_bytes:,} of {full_bytes:,} bytes: {sent_bytes / full_bytes:.2%}")
    assert [[each["sha256"] for each in engine] for engine in loaded] == [digests, digests]
    assert all(each["paused"] for engine in loaded for each in engine)
    assert codes == [130, 130]
    assert sent_bytes <= 0.1 * full_bytes
