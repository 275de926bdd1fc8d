"""The run file: what it accepts, how it names mistakes, and the examples."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

import example_trainer.cluster
from atroposlib.errors import ConfigError
from example_trainer.cluster.local import check_trainer_flags
from example_trainer.cluster.run_file import read_run_file

WITH_PASSWORD = "redis://u:hidden@host"  # pragma: allowlist secret
EXAMPLES = sorted((Path(example_trainer.cluster.__file__).parent / "examples").glob("*.yaml"))
SMALLEST = {
    "name": "small",
    "environments": [{"program": "environment.py"}],
    "trainer": {"model": "m", "steps": 3},
}


def write(place: Path, **changes: object) -> Path:
    path = place / "run.yaml"
    path.write_text(yaml.safe_dump({**SMALLEST, **changes}))
    return path


def test_paths_are_relative_to_the_file(tmp_path):
    run = read_run_file(write(tmp_path, folder="work", output="out"))

    assert (run.folder, run.output) == (tmp_path / "work", tmp_path / "work" / "out")


def test_output_with_parent_folders_is_one_path_and_links_are_kept_without(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "disk")

    outputs = [
        read_run_file(write(tmp_path, output=name)).output
        for name in ("./none/../../out", "link/../out", "link")
    ]

    assert outputs == [tmp_path.parent / "out", tmp_path / "out", tmp_path / "link"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_is_valid_and_its_programs_exist(path):
    run = read_run_file(path)

    assert all((run.folder / each.program).is_file() for each in run.environments)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trainr": {}}, "trainr: is not a key; did you mean trainer?"),
        ({"trainer": {"model": "m"}}, "trainer.steps: is required"),
        ({"trainer": {"model": "m", "steps": 0}}, "trainer.steps: input should be greater than"),
        ({"engines": [{"knd": "vllm"}]}, "engines[0].knd: is not a key; did you mean kind?"),
        ({"engines": [{"kind": "url"}]}, "engines[0]: kind: url and urls belong together"),
        ({"engines": [{"kind": "torch", "tensor_parallel": 2}]}, "tensor_parallel above 1 needs"),
        ({"service": {"replicas": 2}}, "service: replicas above 1 need store: redis"),
        (
            {"service": {"replicas": 2, "port": 65535, "store": "redis", "redis_url": "redis://h"}},
            "service: replicas have consecutive ports: expected a port up to 65534 for 2 replicas",
        ),
        (
            {"service": {"store": "redis", "redis_url": WITH_PASSWORD}},
            "service.redis_url: looks like a secret",
        ),
        ({"slurm": {"time": 86400}}, "slurm.time: expected a time in quotes"),
        ({"name": "No Name"}, "name: string should match pattern"),
        (
            {"environments": [{"program": "a.py"}, {"program": "b/a.py"}]},
            "two entries are named 'a'; give each its own name",
        ),
        (
            {
                "environments": [
                    {"program": "a.py", "min_share": 0.7},
                    {"program": "b.py", "min_share": 0.5},
                ]
            },
            "add up to 1.2; at most 1",
        ),
    ],
)
def test_mistake_is_one_line_with_its_key(tmp_path, changes, said):
    path = write(tmp_path, **changes)

    with pytest.raises(ConfigError) as refused:
        read_run_file(path)

    message = str(refused.value)
    assert message.startswith(f"{path}: ")
    assert said in message
    assert "\n" not in message
    assert "hidden" not in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a: [", "expected YAML"),
        (b"- a", "expected a mapping"),
        (b"\xff", "cannot be read"),
        (b"name: a\ntrainer: {}\nname: b", "each key once, got name in lines 1 and 3"),
        (b"a: 1\nb:\n  c: 1\n  c: 2", "each key once, got c in lines 3 and 4"),
    ],
)
def test_file_that_is_no_run_file_is_refused(tmp_path, content, said):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=said):
        read_run_file(path)


def test_flags_of_the_trainer_are_checked_where_torch_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    flags = {"lr": 1e-3, "lrr": 1}
    wrong = read_run_file(write(tmp_path, trainer={**SMALLEST["trainer"], "flags": flags}))

    check_trainer_flags(read_run_file(write(tmp_path)))
    with pytest.raises(SystemExit, match="2"):
        check_trainer_flags(wrong)
