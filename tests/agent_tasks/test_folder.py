"""Task folders: every key of the format, and one clear error for everything else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from atroposlib.agent_tasks.folder import (
    Artifact,
    find_task_folders,
    key_lines,
    load_task,
    load_tasks,
    resolve_variables,
    shown_limits,
)
from atroposlib.errors import ConfigError
from atroposlib.workspaces.interface import Network
from tests.agent_tasks.task_folders import write_task

COMPLETE = """\
schema_version = "1.4"
source = "made for a test"
artifacts = ["/app/a.txt", { source = "/app/out", exclude = ["*.pyc"], destination = "out" }]

[task]
name = "org/complete"
version = "1.2.0"
description = "d"
authors = [{ name = "A", email = "a@example.com" }]
keywords = ["k"]

[metadata]
difficulty = "hard"
tags = [
    "one",  # a comment with ]
    "two",
]
anything = { at = ["all"] }

[environment]
build_timeout_sec = 120
cpus = 2
memory_mb = 1024
storage_mb = 2048
gpus = 0
network_mode = "allowlist"
allowed_hosts = ["PyPI.org.", "*.example.com", "192.0.2.0/24", "2001:db8::1"]
workdir = "/work/"

[environment.env]
MODE = "${MODE:-fast}"

[agent]
timeout_sec = 30.5
network_mode = "no-network"

[verifier]
timeout_sec = 40
environment_mode = "separate"

[verifier.env]
JUDGE = "x"

[solution.env]
S = "y"
"""


def make_task(folder: Path, toml: str = "") -> Path:
    """Write a task that loads, with the given `task.toml`."""
    for name in ("environment", "tests", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(toml, encoding="utf-8")
    (folder / "instruction.md").write_text("Do it.\n", encoding="utf-8")
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        load_task(folder)
    return str(refused.value)


def test_task_with_every_key_has_all_values(tmp_path: Path) -> None:
    task = load_task(make_task(tmp_path / "t", COMPLETE))

    assert task.name == "org/complete"
    assert task.instruction == "Do it.\n"
    assert task.metadata["tags"] == ["one", "two"]
    assert task.artifacts == (Artifact("/app/a.txt"), Artifact("/app/out", ("*.pyc",)))
    assert (task.cpus, task.memory_bytes, task.disk_bytes) == (2, 2**30, 2**31)
    assert (task.build_timeout_s, task.agent_timeout_s, task.verifier_timeout_s) == (120, 30.5, 40)
    assert task.workdir == "/work"
    assert task.agent_network == Network()
    hosts = ("pypi.org", "*.example.com", "192.0.2.0/24", "2001:db8::1")
    assert task.verifier_network == Network("allowlist", hosts)
    assert (task.env, task.verifier_env) == ({"MODE": "${MODE:-fast}"}, {"JUDGE": "x"})
    assert task.solution_env == {"S": "y"}
    assert task.notes == ()
    assert "no network" in shown_limits(task)


def test_task_without_keys_has_the_defaults_of_the_format(tmp_path: Path) -> None:
    task = load_task(make_task(tmp_path / "plain"))

    assert task.name == "plain"
    assert task.agent_network == task.verifier_network == Network("public")
    assert task.is_verifier_separate
    assert task.artifacts == ()


def test_paths_have_one_slash_at_their_start(tmp_path: Path) -> None:
    text = "artifacts = ['//app//out/', '///app/./log']\n[environment]\nworkdir = '//app'\n"

    task = load_task(make_task(tmp_path / "slashes", text))

    assert task.artifacts == (Artifact("/app/out"), Artifact("/app/log"))
    assert task.workdir == "/app"


def test_task_of_an_older_version_is_read(tmp_path: Path) -> None:
    old = (
        'version = "1.0"\n[environment]\nmemory = "2G"\nstorage = "512M"\nallow_internet = false\n'
    )

    task = load_task(make_task(tmp_path / "old", old))

    assert (task.memory_bytes, task.disk_bytes) == (2**31, 2**29)
    assert task.agent_network == task.verifier_network == Network()


@pytest.mark.parametrize(
    ("toml", "line", "said"),
    [
        ("[agent]\ntimeout_secs = 3\n", 2, "unknown key; did you mean timeout_sec?"),
        ("[environmant]\n", 1, "unknown key; did you mean environment?"),
        ("a = 1\n", 1, "a: unknown key; known: agent, artifacts"),
        ("[agent]\n\n# c\ntimeout_sec = '3'\n", 4, "seconds above 0 to 86400, got '3'"),
        ("[agent]\ntimeout_sec = 0\n", 2, "seconds above 0 to 86400, got 0"),
        ("[agent]\ntimeout_sec = inf\n", 2, "seconds above 0"),
        ("[agent]\ntimeout_sec = true\n", 2, "seconds above 0"),
        ("[verifier]\ntimeout_sec = 86401\n", 2, "seconds above 0"),
        ("[environment]\nmemory_mb = 1.5\n", 2, "integer from 1 to 1048576, got 1.5"),
        ("[environment]\nmemory = '2X'\n", 2, "'2G' or '512M', got '2X'"),
        ("[environment]\nmemory = '2G'\nmemory_mb = 3\n", 2, "differs from memory_mb = 3"),
        ("[environment]\ncpus = -1\n", 2, "number of CPUs above 0"),
        ("[environment]\nos = 'Windows'\n", 2, "workspaces run Linux"),
        ("[environment]\nos = 'bsd'\n", 2, "expected linux or windows"),
        ("[environment]\ngpus = 1\n", 2, "not supported: workspaces have no accelerator"),
        ("[environment.tpu]\ntype = 'v4'\n", 1, "not supported"),
        ("[environment.healthcheck]\ncommand = 'x'\n", 1, "not supported"),
        ("[[environment.mcp_servers]]\nname = 'x'\n", 1, "give the servers to the agent"),
        ("[environment]\nworkdir = 'app'\n", 2, "an absolute path"),
        ("[environment]\nnetwork_mode = 'pubic'\n", 2, "got 'pubic'; did you mean public?"),
        ("[agent]\nallowed_hosts = ['a.b']\n", 2, 'only with network_mode = "allowlist"'),
        (
            "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['https://a.b/']\n",
            3,
            "without scheme, port and path; got 'https://a.b/'",
        ),
        (
            "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['300.1.1.1']\n",
            3,
            "expected host names",
        ),
        ("[environment.env]\n'A B' = 'x'\n", 1, "names of variables"),
        ("[verifier.env]\nA = 1\n", 1, "expected a string for A, got int"),
        ("[verifier]\ncollect = [{ command = 'x' }]\n", 2, "not supported"),
        ("[verifier.environment]\ndocker_image = 'x'\n", 2, "a second copy of the environment"),
        (
            "[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\n",
            3,
            'only with environment_mode = "separate"',
        ),
        ("\n[[steps]]\nname = 'a'\n", 2, "make each step a task"),
        ("artifacts = ['a']\n", 1, "artifacts[0].source: expected an absolute path"),
        ("artifacts = ['/a/../b']\n", 1, "without '..'"),
        ("artifacts = ['/']\n", 1, "below /"),
        ("artifacts = [1]\n", 1, "artifacts[0]: expected a path or a table"),
        ("[[artifacts]]\nsource = '/a'\n[[artifacts]]\nsorce = '/b'\n", 3, "source is missing"),
        ("[[artifacts]]\nsource='/a'\n\n[[artifacts]]\nsource='/a'\nservice='db'\n", 6, "service"),
        ("[task]\nname = 'x'\n", 2, "ORGANIZATION/NAME, got 'x'"),
        ("schema_version = '2.0'\n", 1, "from 1.0 to 1.4, got '2.0'"),
        ("x = = 1\n", 1, "not valid TOML"),
        ("[agent]\ntimeout_sec = 1\n[agent]\n", 3, "not valid TOML"),
        ("x = '", 1, "not valid TOML"),
    ],
)
def test_bad_key_or_value_is_refused_with_its_line(
    tmp_path: Path, toml: str, line: int, said: str
) -> None:
    folder = make_task(tmp_path / "t", toml)

    message = refusal(folder)

    assert message.startswith(f"{folder / 'task.toml'}:{line}: "), message
    assert said in message


def test_key_without_effect_becomes_a_note(tmp_path: Path) -> None:
    toml = '[agent]\nuser = "root"\n[environment]\nskills_dir = "/s"\n'
    folder = make_task(tmp_path / "t", f"{toml}[verifier.environment]\ncpus = 1\n")

    notes = load_task(folder).notes

    assert [note.split(": ")[1] for note in notes] == [
        "environment.skills_dir", "agent.user", "verifier.environment.cpus",
    ]  # fmt: skip
    assert notes[1].startswith(f"{folder / 'task.toml'}:2: ")


def test_value_of_a_variable_is_not_in_messages_and_repr(tmp_path: Path) -> None:
    toml = '[environment.env]\nKEY = "hunter2"\n"BAD NAME" = "hunter3"\n'
    folder = make_task(tmp_path / "t", toml)
    good = make_task(tmp_path / "good", '[environment.env]\nKEY = "hunter2"\n')

    assert "hunter" not in refusal(folder)
    assert "hunter" not in repr(load_task(good))


def test_canary_lines_are_left_out_of_the_instruction(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "t")
    text = "<!-- benchmark data, canary GUID 1 -->\n# CANARY 2\n\n# Title\ntext with canary\n"
    (folder / "instruction.md").write_text(text)

    assert load_task(folder).instruction == "# Title\ntext with canary\n"


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        ("instruction.md", "\n", "is empty"),
        ("environment/docker-compose.yaml", "x", "describe it by a Dockerfile"),
        ("trajectory.json", "{}", "agents start without turns"),
        ("instruction.md", b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_file_that_is_not_supported_is_refused(
    tmp_path: Path, path: str, content: str | bytes, said: str
) -> None:
    folder = make_task(tmp_path / "t")
    (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)

    message = refusal(folder)

    assert str(folder / path) in message
    assert said in message


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = make_task(tmp_path / "t")
    (folder / missing).unlink()

    assert Path(missing).name in refusal(folder)


def test_missing_environment_is_refused_without_an_image(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "t")
    (folder / "environment").rmdir()

    assert "environment.docker_image" in refusal(folder)

    (folder / "task.toml").write_text('[environment]\ndocker_image = "debian:12"\n')
    assert load_task(folder).image == "debian:12"


@pytest.mark.parametrize("part", ["environment", "tests", "solution"])
@pytest.mark.parametrize("target", ["/etc/hostname", "../instruction.md", "../../other"])
def test_link_out_of_its_folder_is_refused(tmp_path: Path, part: str, target: str) -> None:
    folder = make_task(tmp_path / "t")
    (folder / part / "link").symlink_to(target)

    assert f"{folder / part / 'link'} is a link that leads out of {part}/" in refusal(folder)


def test_links_within_a_folder_and_circles(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "t")
    (folder / "environment" / "a").write_text("x")
    (folder / "environment" / "link").symlink_to("a")
    assert load_task(folder).name == "t"

    (folder / "tests" / "circle").symlink_to("circle")
    assert "circle" in refusal(folder)


def test_linked_part_of_a_task_is_refused(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "t")
    (folder / "solution").rmdir()
    (folder / "solution").symlink_to("tests")

    assert "solution is a link" in refusal(folder)


def test_tasks_are_found_in_groups_and_sorted(tmp_path: Path) -> None:
    for name in ("b", "group/a", ".hidden/c", "group/deep/d"):
        make_task(tmp_path / name)

    assert [task.name for task in load_tasks(tmp_path)] == ["a", "b"]
    assert [task.name for task in load_tasks(str(tmp_path / "b"))] == ["b"]


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    make_task(tmp_path / "one" / "a")
    make_task(tmp_path / "two" / "a")

    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "two" / "a"))):
        load_tasks(tmp_path)


def test_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no task"):
        find_task_folders(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        find_task_folders(tmp_path / "none")


def test_data_set_of_a_hub_that_is_not_in_the_cache_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(ConfigError, match="local folder of tasks needs no hub"):
        load_tasks("hf:example/no-such-tasks")


def test_data_set_of_a_hub_in_the_cache_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    revision = "0" * 40
    dataset = tmp_path / "datasets--org--tasks"
    (dataset / "refs").mkdir(parents=True)
    (dataset / "refs" / "main").write_text(revision)
    task = make_task(dataset / "snapshots" / revision / "a")
    (dataset / "blobs").mkdir()
    for number, path in enumerate(path for path in sorted(task.rglob("*")) if path.is_file()):
        path.rename(dataset / "blobs" / str(number))
        path.symlink_to(dataset / "blobs" / str(number))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "huggingface_hub._snapshot_download.HF_HUB_CACHE", str(tmp_path), raising=False
    )

    assert [task.name for task in load_tasks("hf:org/tasks")] == ["a"]
    assert [task.name for task in load_tasks("hf:org/tasks@main")] == ["a"]


def test_variables_are_resolved_or_refused_by_name() -> None:
    env = {"A": "${X}", "B": "${Y:-d}", "C": "plain ${X}", "D": "${X:-d}", "E": "${Y:-}"}

    assert resolve_variables(env, {"X": "1"}, "t") == {
        "A": "1", "B": "d", "C": "plain ${X}", "D": "1", "E": "",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="t: A needs the variable X of this machine"):
        resolve_variables(env, {}, "t")


def test_lines_of_keys() -> None:
    toml = """\
a = 1
[[x.y]]
q = "\\"= [" # [
[x.y.z]
b.c = 2
[[x.y]]
q."r s" = [1,
  [2], # ]
]
text = '''
[no]
k = 1
'''
[k]
f = { a = 1 }
"""
    assert key_lines(toml) == {
        ("a",): 1,
        ("x", "y"): 2,
        ("x", "y", 0): 2,
        ("x", "y", 0, "q"): 3,
        ("x", "y", 0, "z"): 4,
        ("x", "y", 0, "z", "b"): 5,
        ("x", "y", 0, "z", "b", "c"): 5,
        ("x", "y", 1): 6,
        ("x", "y", 1, "q"): 7,
        ("x", "y", 1, "q", "r s"): 7,
        ("x", "y", 1, "text"): 10,
        ("k",): 14,
        ("k", "f"): 15,
    }


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("metadata = " + "[" * 20_000 + "]" * 20_000, "expected up to 64 tables and arrays"),
        ("[metadata]\nx = " + "[" * 100 + "]" * 100, "expected up to 64 tables and arrays"),
        ("[metadata]\nx = " + "{a=" * 2000 + "1" + "}" * 2000, "expected up to 64 tables"),
        ("[metadata]\n" + ".".join("a" * 300_000) + " = 1", "task.toml:2: expected keys of up to"),
        ("[metadata]\n" + ".".join("a" * 100) + " = 1", "expected up to 64 tables and arrays"),
        ("[agent]\ntimeout_sec = 1" + "0" * 5000, "integers of 64 bits"),
        ("[agent]\ntimeout_sec = 1" + "0" * 4000, "expected seconds above 0 to 86400"),
        ('[environment]\ndocker_image = "--volume=/:/host"', "expected the name of an image"),
        ('[environment]\ndocker_image = "a\\nRUN b"', "expected the name of an image"),
    ],
)
def test_hostile_document_is_refused(tmp_path: Path, toml: str, said: str) -> None:
    write_task(tmp_path / "t", {"task.toml": toml})

    with pytest.raises(ConfigError, match=said) as raised:
        load_task(tmp_path / "t")

    assert len(str(raised.value)) < 500


def test_byte_order_mark_of_a_windows_program_is_skipped(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "t", {"task.toml": "[agent]\ntimeout_sec = 5\n"})
    for name in ("task.toml", "instruction.md"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(b"\xef\xbb\xbf" + content)

    task = load_task(folder)

    assert task.instruction == load_task(write_task(tmp_path / "same")).instruction
    assert "agent 5 s" in ", ".join(shown_limits(task))
