"""Agents of tasks: commands with placeholders, and where the software of a preset is found."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atroposlib.agent_tasks.agents import (
    INSTRUCTION_FILE,
    PRESETS,
    PROGRAMS,
    AgentSettings,
    ModelAddress,
    agent_of_item,
    find_agent,
    placeholders_of,
    split_command,
)
from atroposlib.agent_tasks.folder import Task
from atroposlib.agent_tasks.runner import AgentCommand
from atroposlib.errors import ConfigError

INSTRUCTION = "Write `$(id)` to \"a; b\" {twice}\nand 'stop'."
KEY = "sk-1"
MODEL = ModelAddress(
    port=47100, target="127.0.0.1:9", api_key=KEY, model="policy", max_tokens=64, temperature=0.5
)


def command_of(agent: str | list[str], **settings: object) -> AgentCommand:
    found = find_agent(AgentSettings.model_validate({"agent": agent, **settings}))
    task = Task(name="a-task", folder=Path("/tasks/a-task"), instruction=INSTRUCTION)
    return found.command_for(task, MODEL, workdir="/app")


def test_command_values_are_single_words_whatever_they_contain() -> None:
    command = command_of("run --task={instruction} '{task} in {workspace}' {base_url}")

    assert command.command == [
        "run",
        f"--task={INSTRUCTION}",
        "a-task in /app",
        "http://127.0.0.1:47100/v1",
    ]
    assert command.stdin == b""


def test_command_without_the_instruction_reads_it_from_its_input() -> None:
    command = command_of(["my-agent"], env={"KEY": "{api_key}", "T": "{temperature}"})

    assert command.stdin == INSTRUCTION.encode()
    assert command.env["KEY"] == command.env["OPENAI_API_KEY"] == "sk-1"
    assert command.env["T"] == "0.5"
    assert command.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:47100"
    assert command.forwards == {47100: "127.0.0.1:9"}


def test_command_with_an_instruction_file_gets_the_file() -> None:
    command = command_of("run {instruction_file} {max_turns}", max_turns=7)

    assert list(command.command) == ["run", INSTRUCTION_FILE, "7"]
    assert command.files == {INSTRUCTION_FILE: INSTRUCTION}


def test_command_keeps_doubled_braces_as_one() -> None:
    assert list(command_of(["run", '{{"a": 1}}', "{model}"]).command)[1] == '{"a": 1}'


@pytest.mark.parametrize(
    "settings",
    [{"agent": "run {instruction}"}, {"agent": "run it", "env": {"TASK": "{instruction}"}}],
)
def test_command_with_a_text_too_long_for_the_system_is_refused(settings: dict[str, Any]) -> None:
    found = find_agent(AgentSettings.model_validate(settings))
    task = Task(name="long", folder=Path("/tasks/long"), instruction="x" * 200_000)

    with pytest.raises(ConfigError, match=r"task 'long'.*200,00\d bytes.*instruction_file"):
        found.command_for(task, MODEL, workdir="/app")


@pytest.mark.parametrize(("agent", "variable"), [("run it", "{bin}:/usr/bin"), ("shell", "{node}")])
def test_variable_that_needs_missing_software_is_refused(agent: str, variable: str) -> None:
    settings = AgentSettings(agent=agent, env={"PATH": variable})

    with pytest.raises(ConfigError, match="needs the folder of the software"):
        find_agent(settings)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("run {instruktion}", r"unknown placeholder \{instruktion\}.*did you mean instruction"),
        ("run {task.folder}", "unknown placeholder"),
        ("run {task!r}", r"\{task\} takes no format"),
        ("run {task:>9}", r"\{task\} takes no format"),
        ("run {}", "unknown placeholder"),
        ("run {task", "write literal braces twice"),
        ("run 'a", "No closing quotation"),
        ("", "expected a command"),
        ("run {python}", "needs the folder of the software"),
    ],
)
def test_command_that_cannot_be_filled_in_is_refused(command: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        find_agent(AgentSettings(agent=command))


def test_preset_with_a_similar_name_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"no preset 'smolagent'; did you mean smolagents"):
        find_agent(AgentSettings(agent="smolagent"))


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_known_placeholders(name: str) -> None:
    preset = PRESETS[name]

    assert split_command(preset.command, name) == preset.command
    assert preset.install or not preset.package
    assert all(placeholders_of(text) is not None for text in preset.env.values())


@pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name].package])
def test_preset_that_is_not_installed_names_its_command(name: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)

    with pytest.raises(ConfigError) as error:
        find_agent(AgentSettings(agent=name, prefix=str(tmp_path)), "agents[2]")

    assert str(error.value).startswith("agents[2]: ")
    assert PRESETS[name].install in str(error.value)


@pytest.mark.parametrize(
    ("where", "argument"), [("agent", "agent: agent_prefix"), ("agents[1]", r"agents\[1\]: prefix")]
)
def test_prefix_that_is_not_a_folder_is_refused(tmp_path: Path, where: str, argument: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{argument}: .*missing is not a folder"):
        find_agent(AgentSettings(agent="shell", prefix=str(tmp_path / "missing")), where)


def test_shell_needs_the_interpreter_only() -> None:
    command = command_of("shell")

    shown = {str(path) for path in command.read_only.values()}
    base = Path(sys.base_prefix)
    assert shown == {str(PROGRAMS)} | (set() if base.is_relative_to("/usr") else {str(base)})
    assert Path(command.command[0]).exists()


def test_virtual_environment_is_shown_with_its_interpreter(tmp_path: Path) -> None:
    base, folder = tmp_path / "python-3", tmp_path / "venv"
    (base / "bin").mkdir(parents=True)
    (base / "bin/python3").touch()
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to(base / "bin/python3")
    (folder / "pyvenv.cfg").write_text(f"home = {base}/bin\nversion = 3\n")

    command = command_of(["{bin}/my-agent"], prefix=str(folder))

    assert list(command.command) == [f"{folder}/bin/my-agent"]
    assert command.read_only == {str(base): base, str(folder): folder}


def test_node_package_is_shown_with_its_version(tmp_path: Path) -> None:
    package = tmp_path / "node_modules/@anthropic-ai/claude-code"
    package.mkdir(parents=True)
    (package / "package.json").write_text(json.dumps({"version": "9.9.9"}))
    programs = tmp_path / "node_modules/.bin"
    programs.mkdir()
    (programs / "claude").touch()

    command = command_of("claude-code", prefix=str(tmp_path))

    assert command.command[0] == str(programs / "claude")
    assert command.version == "9.9.9"
    assert command.read_only == {f"{tmp_path}/node_modules": tmp_path / "node_modules"}


def test_agent_of_item_follows_the_weights_and_is_repeatable() -> None:
    agents = [
        find_agent(AgentSettings(agent=["run"], name=name, weight=weight))
        for name, weight in (("often", 3), ("seldom", 1))
    ]

    names = [agent_of_item(agents, seed=1, index=index).name for index in range(400)]

    assert names == [agent_of_item(agents, seed=1, index=index).name for index in range(400)]
    assert 260 < Counter(names)["often"] < 340


def test_settings_refuse_weights_that_are_not_positive() -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        AgentSettings(agent="shell", weight=0)


def test_program_of_a_global_installation_is_found_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "lib/node_modules/@openai/codex"
    (package / "bin").mkdir(parents=True)
    (package / "package.json").write_text(json.dumps({"version": "1.2.3"}))
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in (package / "bin/codex.js", programs / "node"):
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    (programs / "codex").symlink_to(package / "bin/codex.js")
    monkeypatch.setenv("PATH", str(programs))

    command = command_of("codex")

    assert list(command.command[:2]) == [str(programs / "node"), str(programs / "codex")]
    assert command.version == "1.2.3"
    shown = set(command.read_only.values())
    assert all(any(path.is_relative_to(f) for f in shown) for path in (package, programs))
    assert command.stdin == INSTRUCTION.encode()


def test_program_that_is_not_on_path_names_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")

    with pytest.raises(ConfigError, match=r"claude is not on PATH: npm install @anthropic-ai"):
        find_agent(AgentSettings(agent="claude-code"))


def test_home_folder_is_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, folder = tmp_path / "home", tmp_path / "venv"
    (home / "bin").mkdir(parents=True)
    (home / "bin/python3").touch()
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to(home / "bin/python3")
    (folder / "pyvenv.cfg").touch()
    monkeypatch.setenv("HOME", str(home))

    with pytest.raises(ConfigError, match="has your home folder"):
        command_of(["{bin}/my-agent"], prefix=str(folder))
    for prefix in (home, tmp_path):
        with pytest.raises(ConfigError, match="would show your home folder"):
            command_of(["{bin}/my-agent"], prefix=str(prefix))


def test_node_in_a_home_folder_is_shown_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, folder = tmp_path / "home", tmp_path / "agent"
    (home / "bin").mkdir(parents=True)
    (home / "bin/node").write_text("#!/bin/sh\n")
    (home / "bin/node").chmod(0o755)
    (folder / "node_modules/.bin").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", str(home / "bin"))

    command = command_of(["{node}", "{bin}/my-agent"], prefix=str(folder))

    assert set(command.read_only.values()) == {folder, home / "bin/node"}
