"""Agents that work on tasks: programs left as they are, by preset or by command.

    AgentSettings ─► find_agent ─► Agent ─► command_for(task, model) ─► AgentCommand
                     once, at start          once a rollout

An agent runs in the box of its workspace. Its software stays in the virtual environment or the
`node_modules` of this machine, which the box shows read-only at the same path. It reaches the model
at an address of the box, with a key that is good for this rollout only.

Texts of a task are never parsed by a shell: a command is split first, and filled in word by word.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import random
import shlex
import shutil
import string
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from atroposlib.agent_tasks.folder import Task
from atroposlib.agent_tasks.runner import AgentCommand
from atroposlib.errors import ConfigError
from atroposlib.utils.text import near_name

__all__ = [
    "PRESETS",
    "STATE_FOLDER",
    "Agent",
    "AgentSettings",
    "ModelAddress",
    "Preset",
    "agent_of_item",
    "find_agent",
    "split_command",
]

PROGRAMS = Path(__file__).parent / "programs"
PROGRAMS_IN_BOX = "/opt/atropos/programs"
STATE_FOLDER = "/tmp/atropos"
"""Folder of a box for the settings and logs of agents."""
INSTRUCTION_FILE = f"{STATE_FOLDER}/instruction.md"
MAX_WORD_BYTES = 128 * 1024 - 1
"""Longest argument of a program on Linux, and longest variable with its name."""
SYSTEM_FOLDERS = (Path("/usr"), Path("/bin"), Path("/lib"), Path("/lib64"))
"""Folders of this machine that every box shows."""


@dataclass(frozen=True)
class ModelAddress:
    """Where and how an agent asks the model."""

    port: int
    """Port on 127.0.0.1 of the box."""
    target: str
    """`host:port` of this machine that it leads to."""
    api_key: str = field(repr=False)
    model: str
    max_tokens: int
    temperature: float

    @property
    def root_url(self) -> str:
        """Base URL of Anthropic clients, which add `/v1` themselves."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        return f"{self.root_url}/v1"


@dataclass(frozen=True)
class Preset:
    """An agent that is known by name; its command is written with placeholders."""

    summary: str
    command: tuple[str, ...]
    runtime: Literal["python", "node"]
    package: str
    """Distribution or npm package; empty if the program needs the standard library only."""
    install: str = ""
    """Command that installs it."""
    module: str = ""
    """Module by which its presence in an interpreter is recognized."""
    env: Mapping[str, str] = field(default_factory=dict)


def _program(*words: str) -> tuple[str, ...]:
    return (
        *("{python}", *words, "--model", "{model}", "--max-turns", "{max_turns}"),
        *("--max-tokens", "{max_tokens}", "--temperature", "{temperature}"),
    )


def _framework(name: str) -> tuple[str, ...]:
    return _program(f"{PROGRAMS_IN_BOX}/frameworks.py", name)


PRESETS: dict[str, Preset] = {
    "shell": Preset(
        "a loop of this project: one shell command per reply, for small models",
        _program("-I", f"{PROGRAMS_IN_BOX}/shell.py"),
        runtime="python",
        package="",
    ),
    "mini-swe-agent": Preset(
        "mini-swe-agent's program `mini`",
        (
            *("{bin}/mini", "--model", "openai/{model}", "--yolo", "--exit-immediately"),
            *("--cost-limit", "0", "--config", "mini.yaml"),
            *("--config", "agent.step_limit={max_turns}"),
            *("--config", "model.model_kwargs.max_tokens={max_tokens}"),
            *("--output", f"{STATE_FOLDER}/mini.json", "--task={instruction}"),
        ),
        runtime="python",
        package="mini-swe-agent",
        install="pip install mini-swe-agent mcp",
        module="minisweagent",
        env={
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{STATE_FOLDER}/mini",
        },
    ),
    "smolagents": Preset(
        "a ToolCallingAgent of smolagents with a shell tool",
        _framework("smolagents"),
        runtime="python",
        package="smolagents",
        install="pip install 'smolagents[openai]'",
        module="smolagents",
    ),
    "openai-agents": Preset(
        "an agent of the OpenAI Agents SDK with a shell tool",
        _framework("openai-agents"),
        runtime="python",
        package="openai-agents",
        install="pip install openai-agents",
        module="agents",
        env={"OPENAI_AGENTS_DISABLE_TRACING": "1"},
    ),
    "pydantic-ai": Preset(
        "an agent of Pydantic AI with a shell tool",
        _framework("pydantic-ai"),
        runtime="python",
        package="pydantic-ai-slim",
        install="pip install 'pydantic-ai-slim[openai]'",
        module="pydantic_ai",
    ),
    "langgraph": Preset(
        "LangChain's agent, a LangGraph graph, with a shell tool",
        _framework("langgraph"),
        runtime="python",
        package="langgraph",
        install="pip install langchain langchain-openai langgraph",
        module="langgraph",
        env={"LANGSMITH_TRACING": "false"},
    ),
    "claude-code": Preset(
        "Claude Code without a person",
        (
            *("{bin}/claude", "--print", "--model", "{model}", "--max-turns", "{max_turns}"),
            *("--permission-mode", "acceptEdits", "--allowedTools", "Bash,Edit,Write"),
        ),
        runtime="node",
        package="@anthropic-ai/claude-code",
        install="npm install @anthropic-ai/claude-code",
        env={
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{max_tokens}",
            "CLAUDE_CONFIG_DIR": f"{STATE_FOLDER}/claude",
            "DISABLE_AUTOUPDATER": "1",
        },
    ),
    "codex": Preset(
        "Codex CLI without a person",
        (
            *("{node}", "{bin}/codex", "exec", "--skip-git-repo-check"),
            *("--dangerously-bypass-approvals-and-sandbox", "-c", 'model="{model}"'),
            *("-c", 'model_provider="policy"', "-c", "model_context_window=100000"),
            *("-c", 'model_providers.policy.name="policy"'),
            *("-c", 'model_providers.policy.base_url="{base_url}"'),
            *("-c", 'model_providers.policy.env_key="OPENAI_API_KEY"'),
            *("-c", 'model_providers.policy.wire_api="responses"'),
            *("-c", 'web_search="disabled"', "-"),
        ),
        runtime="node",
        package="@openai/codex",
        install="npm install @openai/codex",
    ),
}
"""Every preset by name. A preset whose command has no `{instruction}` reads it from its input."""

PLACEHOLDERS = (
    *("instruction", "instruction_file", "task", "workspace", "base_url", "root_url", "api_key"),
    *("model", "max_tokens", "temperature", "max_turns", "python", "bin", "node"),
)


class AgentSettings(BaseModel):
    """One of the agents of a task set."""

    model_config = ConfigDict(extra="forbid")

    agent: str | list[str] = Field(
        "shell",
        description="Name of a preset, or a command with placeholders, as one text or as words.",
    )
    name: str = Field(
        "", max_length=64, description="Name in traces and metrics; empty: that of the program."
    )
    weight: float = Field(
        1.0, gt=0, le=1e6, description="Frequency among the agents, relative to the others."
    )
    prefix: str | None = Field(
        None,
        description="Folder of its software: a virtual environment, or the parent of "
        "node_modules; None: what PATH and this interpreter have.",
    )
    env: dict[str, str] = Field(
        default_factory=dict, description="Variables of its process, with placeholders."
    )
    max_turns: int = Field(30, ge=1, le=10_000, description="Limit of its turns, if it has one.")


@dataclass(frozen=True)
class Software:
    """An agent's programs on this machine."""

    words: Mapping[str, str] = field(default_factory=dict)
    """Values of `{python}`, `{bin}` and `{node}`."""
    folders: tuple[Path, ...] = ()
    """Folders of this machine that a box must show, at the same paths."""
    version: str = ""


@dataclass(frozen=True)
class Agent:
    """An agent with its software; the same for all tasks."""

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    software: Software
    weight: float
    max_turns: int

    @cached_property
    def names_instruction(self) -> bool:
        """Whether a placeholder has the instruction; otherwise it is the standard input."""
        used = {name for text in self._templates for name in placeholders_of(text)}
        return bool(used & {"instruction", "instruction_file"})

    def command_for(self, task: Task, model: ModelAddress, *, workdir: str) -> AgentCommand:
        """Return what is executed in the workspace of one rollout.

        Raises:
            ConfigError: an argument or a variable is too long for the system.
        """
        values = {
            **self.software.words,
            "instruction": task.instruction,
            "instruction_file": INSTRUCTION_FILE,
            "task": task.name,
            "workspace": workdir,
            "base_url": model.base_url,
            "root_url": model.root_url,
            "api_key": model.api_key,
            "model": model.model,
            "max_tokens": str(model.max_tokens),
            "temperature": f"{model.temperature:g}",
            "max_turns": str(self.max_turns),
        }
        words = [text.format_map(values) for text in self.command]
        variables = {name: text.format_map(values) for name, text in self.env.items()}
        for word in (*words, *(f"{name}={value}" for name, value in variables.items())):
            if len(word.encode()) > MAX_WORD_BYTES:
                raise ConfigError(
                    f"agent {self.name!r}, task {task.name!r}: an argument or a variable has "
                    f"{len(word.encode()):,} bytes, at most {MAX_WORD_BYTES:,} are possible; "
                    "name the instruction as {instruction_file}"
                )
        needs_file = any("instruction_file" in placeholders_of(text) for text in self._templates)
        return AgentCommand(
            name=self.name,
            command=words,
            env={**client_variables(model), **variables},
            files={INSTRUCTION_FILE: task.instruction} if needs_file else {},
            read_only=self._read_only(),
            stdin=b"" if self.names_instruction else task.instruction.encode(),
            version=self.software.version,
            forwards={model.port: model.target},
        )

    @property
    def _templates(self) -> tuple[str, ...]:
        return (*self.command, *self.env.values())

    def _read_only(self) -> dict[str, Path]:
        shown = {str(folder): folder for folder in self.software.folders}
        if any(text.startswith(PROGRAMS_IN_BOX) for text in self.command):
            shown[PROGRAMS_IN_BOX] = PROGRAMS
        return shown


def client_variables(model: ModelAddress) -> dict[str, str]:
    """Return the variables from which OpenAI and Anthropic clients take address and key."""
    return {
        "OPENAI_BASE_URL": model.base_url,
        "OPENAI_API_KEY": model.api_key,
        "ANTHROPIC_BASE_URL": model.root_url,
        "ANTHROPIC_API_KEY": model.api_key,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


def agent_of_item(agents: Sequence[Agent], *, seed: int, index: int) -> Agent:
    """Return the agent of an item, by their weights; the same for equal numbers."""
    chance = random.Random(f"agents:{seed}:{index}")
    return chance.choices(agents, [agent.weight for agent in agents])[0]


def split_command(command: str | Sequence[str], where: str) -> tuple[str, ...]:
    """Return the words of a command, after a check of their placeholders.

    Raises:
        ConfigError: a quote is not closed, the command is empty, or a placeholder is unknown.
    """
    try:
        words = tuple(shlex.split(command) if isinstance(command, str) else command)
    except ValueError as error:
        raise ConfigError(f"{where}: {command!r:.200}: {error}") from error
    if not words or not words[0]:
        raise ConfigError(f"{where}: expected a command, got {command!r}")
    for word in words:
        check_placeholders(word, where)
    return words


def placeholders_of(text: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]


def check_placeholders(text: str, where: str) -> None:
    """Raise ConfigError for a placeholder that is unknown or has a format."""
    try:
        found = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(
            f"{where}: {text!r:.200}: {error}; write literal braces twice, as in {{{{ and }}}}"
        ) from error
    for _, name, spec, conversion in found:
        if name is None:
            continue
        if name in PLACEHOLDERS and (spec or conversion):
            raise ConfigError(f"{where}: {text!r:.200}: {{{name}}} takes no format")
        if name not in PLACEHOLDERS:
            known = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
            raise ConfigError(
                f"{where}: {text!r:.200}: unknown placeholder {{{name}}}"
                f"{near_name(name, PLACEHOLDERS)}; expected {known}, and literal braces twice"
            )


def find_agent(settings: AgentSettings, where: str = "agent") -> Agent:
    """Find the software of an agent on this machine.

    Args:
        settings: preset or command, and where its software is.
        where: start of error messages.

    Raises:
        ConfigError: a preset or placeholder is unknown, or the software is not installed.
    """
    preset = _preset_of(settings.agent, where)
    if preset is None:
        words = split_command(settings.agent, where)
        software = _own_software(settings.prefix, where)
        return _agent(settings, Path(words[0]).name, words, {}, software, where)
    if preset.runtime == "python":
        software = _python_software(preset, settings.prefix, where)
    else:
        software = _node_software(preset, settings.prefix, where)
    return _agent(settings, str(settings.agent), preset.command, preset.env, software, where)


def _agent(
    settings: AgentSettings,
    name: str,
    command: tuple[str, ...],
    env: Mapping[str, str],
    software: Software,
    where: str,
) -> Agent:
    for text in settings.env.values():
        check_placeholders(text, f"{where}: env")
    texts = (*command, *settings.env.values())
    used = {name for text in texts for name in placeholders_of(text)}
    for missing in used & {"python", "bin", "node"} - set(software.words):
        raise ConfigError(
            f"{where}: {{{missing}}} needs the folder of the software; "
            f"set its {_prefix_word(where)}"
        )
    return Agent(
        name=settings.name or name,
        command=command,
        env={**env, **settings.env},
        software=software,
        weight=settings.weight,
        max_turns=settings.max_turns,
    )


def _preset_of(agent: str | list[str], where: str) -> Preset | None:
    """Return the preset of a name; None for a command."""
    if not isinstance(agent, str) or len(agent.split()) != 1 or "/" in agent or "{" in agent:
        return None
    if agent not in PRESETS:
        raise ConfigError(
            f"{where}: there is no preset {agent!r}"
            f"{near_name(agent, PRESETS) or '; expected one of ' + ', '.join(PRESETS)}; a command "
            "of one word is written as a list"
        )
    return PRESETS[agent]


def _prefix_word(where: str) -> str:
    """Return the name of the argument: a list of `agents` has other names than a single one."""
    return "agent_prefix" if where == "agent" else "prefix"


def _folder(prefix: str, where: str) -> Path:
    folder = Path(prefix).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(f"{where}: {_prefix_word(where)}: {folder} is not a folder")
    if _is_private(folder):
        raise ConfigError(
            f"{where}: {_prefix_word(where)}: {folder} would show your home folder to the agent; "
            "expected a folder with nothing but its software"
        )
    return folder


def _own_software(prefix: str | None, where: str) -> Software:
    """Return the software of a command: a virtual environment, a Node folder or any folder."""
    if prefix is None:
        return Software()
    folder = _folder(prefix, where)
    if (folder / "pyvenv.cfg").is_file():
        return _virtual_environment(folder, where)
    if (folder / "node_modules").is_dir():
        node = _node_program(folder)
        words = {"bin": str(folder / "node_modules/.bin")}
        folders = [folder]
        if node is not None:
            words["node"] = str(node)
            folders.append(_root_of_program(node))
        return Software(words, _to_show(folders))
    bin_folder = folder / "bin"
    words = {"bin": str(bin_folder if bin_folder.is_dir() else folder)}
    return Software(words, _to_show([folder]))


def _python_software(preset: Preset, prefix: str | None, where: str) -> Software:
    if prefix is not None:
        folder = _folder(prefix, where)
        if not (folder / "bin/python").exists():
            raise ConfigError(f"{where}: {_prefix_word(where)}: {folder} has no bin/python")
        if not preset.package:
            return _virtual_environment(folder, where)
    elif not preset.package:
        own = _virtual_environment(Path(sys.base_prefix), where)
        python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        return Software({"python": f"{own.words['bin']}/{python}"}, own.folders)
    elif importlib.util.find_spec(preset.module) is not None:
        folder = Path(sys.prefix)
    else:
        found = shutil.which(Path(preset.command[0]).name) if "{bin}" in preset.command[0] else None
        folder = Path(sys.prefix) if found is None else Path(found).absolute().parent.parent
        if not (folder / "pyvenv.cfg").is_file():  # such as ~/.local, which has other things too
            folder = Path(sys.prefix)
    version = _installed_version(folder, preset.package)
    if version is None:
        raise ConfigError(
            f"{where}: {preset.package} is not installed in {folder}: {preset.install}; or name a "
            f"virtual environment that has it as {_prefix_word(where)}"
        )
    software = _virtual_environment(folder, where)
    return Software(software.words, software.folders, version)


def _node_software(preset: Preset, prefix: str | None, where: str) -> Software:
    program = preset.command[0 if "{bin}" in preset.command[0] else 1].rpartition("/")[2]
    if prefix is not None:
        folder = _folder(prefix, where)
    else:
        found = shutil.which(program)
        # PREFIX/bin/NAME leads to PREFIX/lib/node_modules/PACKAGE/..., or to another node_modules.
        parents = [] if found is None else list(Path(found).resolve().parents)
        modules = next((parent for parent in parents if parent.name == "node_modules"), None)
        if modules is None:
            raise ConfigError(
                f"{where}: {program} is not on PATH: {preset.install}; or name the folder that "
                f"has its node_modules as {_prefix_word(where)}"
            )
        folder = modules.parent
    package = folder / "node_modules" / preset.package
    if not (package / "package.json").is_file():
        raise ConfigError(
            f"{where}: {folder} has no node_modules/{preset.package}: cd {folder} && "
            f"{preset.install}"
        )
    about = json.loads((package / "package.json").read_text("utf-8"))
    words, folders = {"bin": str(folder / "node_modules/.bin")}, [folder / "node_modules"]
    if not (folder / "node_modules/.bin" / program).exists():  # installed with --global
        words["bin"] = str(folder.parent / "bin")
        folders.append(folder.parent / "bin")
    if any("{node}" in word for word in preset.command):
        node = _node_program(folder)
        if node is None:
            raise ConfigError(f"{where}: {program} needs Node: there is no `node` on PATH")
        words["node"] = str(node)
        folders.append(_root_of_program(node))
    return Software(words, _to_show(folders), str(about.get("version", "")))


def _node_program(folder: Path) -> Path | None:
    own = folder / "bin/node"
    found = str(own) if own.exists() else shutil.which("node")
    return None if found is None else Path(found).resolve()


def _root_of_program(program: Path) -> Path:
    """Return the folder with a program's `bin` and `lib`; the program alone elsewhere.

    An agent must not read a home folder because a program is in its `bin`.
    """
    root = program.parent.parent
    return root if program.parent.name == "bin" and not _is_private(root) else program


def _is_private(folder: Path) -> bool:
    """Whether a folder is, or contains, the home folder of this user."""
    try:
        home = Path.home()
    except RuntimeError:  # a user of any number in a container
        return False
    return home.resolve().is_relative_to(folder.resolve())


def _virtual_environment(folder: Path, where: str) -> Software:
    """Return a Python environment and the interpreter on which it is based."""
    # Links from one environment to another lead to the interpreter in the end.
    programs = [(folder / "bin/python").resolve()]
    settings = folder / "pyvenv.cfg"
    if settings.is_file():
        lines = (line.partition("=") for line in settings.read_text("utf-8").splitlines())
        home = {name.strip(): value.strip() for name, _, value in lines}.get("home")
        programs += [] if home is None else [Path(home) / "python"]
    bases = [program.parent.parent for program in programs]
    for base in bases:
        if _is_private(base) and not base.is_relative_to(folder):
            raise ConfigError(
                f"{where}: the interpreter of {folder} is in {base}, which has your home folder "
                "and would be shown to the agent; use another Python"
            )
    words = {"bin": str(folder / "bin"), "python": str(folder / "bin/python")}
    return Software(words, _to_show([folder, *bases]))


def _to_show(folders: Sequence[Path]) -> tuple[Path, ...]:
    """Return the folders that a box does not show anyway, without those inside another."""
    wanted: list[Path] = []
    for folder in sorted(set(folders), key=lambda path: len(path.parts)):
        shown = (*SYSTEM_FOLDERS, *wanted)
        if folder != Path("/") and not any(folder.is_relative_to(other) for other in shown):
            wanted.append(folder)
    return tuple(wanted)


def _installed_version(folder: Path, package: str) -> str | None:
    paths = [str(path) for path in folder.glob("lib/python*/site-packages")]
    for found in importlib.metadata.distributions(name=package, path=paths):
        return found.version
    return None
