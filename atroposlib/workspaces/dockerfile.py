"""Steps that prepare a base: those of a Dockerfile, or the copy of a folder.

The subset is that of tasks for agents: COPY and ADD of files, RUN, WORKDIR, ENV, ARG and SHELL.
FROM is not looked up: /usr of this machine stands for every image. Packages that `apt-get install`
names must be installed on this machine.

Source: Docker, "Dockerfile reference", https://docs.docker.com/reference/dockerfile/.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import posixpath
import re
import shlex
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from atroposlib.errors import ConfigError
from atroposlib.workspaces.interface import WorkspaceSpec

__all__ = ["BuildPlan", "CopyStep", "RunStep", "missing_packages", "read_plan"]

MAX_CONTEXT_FILES = 100_000
IGNORED = (
    *("USER", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL", "VOLUME"),
    *("MAINTAINER", "ONBUILD"),
)
MANAGERS = re.compile(
    r"\b(apt-get|apt|apk|yum|dnf|microdnf|zypper|pacman|dpkg|sudo|useradd|adduser)\b"
)
VARIABLE = re.compile(r"\\\$|\$(\w+)|\$\{(\w+)(?::([-+])([^}]*))?\}")
HEREDOC = re.compile(r"(?<!\S)<<(-?)([\"']?)(\w+)\2")
QUOTED = re.compile(r"""('[^']*')|"(?:\\.|[^"\\])*"|(?:\\.|\$\{[^}]*\}|[^'"\\])+""", re.DOTALL)
"""Parts of a text: in single quotes, as the first group; in double quotes; without quotes."""
ASSIGNMENT = re.compile(r"\w+=.*", re.DOTALL)
REDIRECTION = re.compile(r"[0-9&]?>+\s*&?[\w/.-]+")
FLAG = re.compile(r"--([a-z-]+)(?:=(\S*))?\s+")
ARCHIVE = re.compile(r"\.(tar|tgz|tbz2|txz|tar\.\w+)$")
PODMAN = "use the kind podman"


@dataclass(frozen=True)
class CopyStep:
    """Files that are copied into the base."""

    where: str
    """File and line of the instruction."""
    files: Mapping[str, Path | bytes | None]
    """By absolute path in the base: a file or link of this machine, a content, or None for a
    folder."""
    mode: int | None = None
    """Permissions; None takes those of the files."""

    def archive(self) -> bytes:
        """Return the files as a tar archive with paths relative to /."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path, content in self.files.items():
                if path != "/":
                    self._add(archive, path.lstrip("/"), content)
        return buffer.getvalue()

    def _add(self, archive: tarfile.TarFile, name: str, content: Path | bytes | None) -> None:
        member = tarfile.TarInfo(name)
        if content is None or (isinstance(content, Path) and _is_folder(content)):
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
        elif isinstance(content, Path) and content.is_symlink():
            member.type, member.linkname = tarfile.SYMTYPE, str(content.readlink())
            archive.addfile(member)
        else:
            data = content if isinstance(content, bytes) else b""
            member.mode = 0o644
            if isinstance(content, Path):
                data, state = content.read_bytes(), content.stat()
                member.mode = state.st_mode & 0o777 | 0o600
                member.mtime = int(state.st_mtime)
            if self.mode is not None:
                member.mode = self.mode
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


@dataclass(frozen=True)
class RunStep:
    """A command that is run while a base is built."""

    where: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str


@dataclass
class BuildPlan:
    """The steps that turn an empty root folder into a base, and its variables and folder."""

    workdir: str
    env: dict[str, str]
    """Variables of all later commands."""
    steps: list[CopyStep | RunStep] = field(default_factory=list)
    fingerprint: str = ""
    notes: list[str] = field(default_factory=list)
    """Instructions without effect, with file and line."""


def read_plan(
    spec: WorkspaceSpec,
    *,
    variables: Mapping[str, str] | None = None,
    are_missing: Callable[[Sequence[str]], list[str]] | None = None,
) -> BuildPlan:
    """Return the steps that prepare a base.

    Args:
        spec: its `source` may have a Dockerfile.
        variables: those that exist before the first instruction, such as PATH.
        are_missing: returns which packages this machine does not have; None asks dpkg.

    Raises:
        ConfigError: an instruction is malformed or cannot be executed here; names file and line.
    """
    workdir = posixpath.normpath(spec.workdir)
    if not workdir.startswith("/"):
        raise ConfigError(f"{spec.name}: expected an absolute workdir, got {spec.workdir!r}")
    plan = BuildPlan(workdir, {})
    if spec.source is None:
        plan.steps.append(CopyStep(spec.name, {workdir: None}))
        return _fingerprinted(plan, {})
    context = spec.source
    if not context.is_dir():
        raise ConfigError(f"{spec.name}: the folder {context} does not exist")
    files = _context_files(context, spec.limits.disk_bytes)
    dockerfile = context / "Dockerfile"
    if dockerfile.is_file():
        missing = are_missing or missing_packages
        reader = _DockerfileReader(plan, context, files, dockerfile, variables or {}, missing)
        reader.read(dockerfile.read_text(encoding="utf-8", errors="replace"))
    else:
        found = {posixpath.join(workdir, name): path for name, path in files.items()}
        plan.steps.append(CopyStep(str(context), {workdir: None, **found}))
    return _fingerprinted(plan, files)


def missing_packages(names: Sequence[str]) -> list[str]:
    """Return the Debian packages that are not installed on this machine."""
    words = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", "--", *names]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return list(names)
    rows = {tuple(line.split()) for line in done.stdout.splitlines()}
    return [name for name in names if (name, "installed") not in rows]


class _Heredoc(NamedTuple):
    name: str
    content: str
    is_quoted: bool
    """Whether variables in it are not replaced."""


@dataclass(frozen=True)
class _Instruction:
    line: int
    name: str
    text: str
    heredocs: tuple[_Heredoc, ...]


def _instructions(text: str, file: Path) -> Iterator[_Instruction]:
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        start = number + 1
        line = lines[number].strip()
        number += 1
        if re.match(r"#\s*escape\s*=\s*`", line):
            raise ConfigError(f"{file}:{start}: expected the escape character \\")
        if not line or line.startswith("#"):
            continue
        while line.endswith("\\") and number < len(lines):
            following = lines[number].strip()
            number += 1
            if following and not following.startswith("#"):
                line = line[:-1].rstrip() + " " + following
        name, _, rest = re.sub(r"\s", " ", line.removesuffix("\\"), count=1).partition(" ")
        heredocs = []
        if name.upper() in ("RUN", "COPY", "ADD"):
            for dash, quote, word in HEREDOC.findall(rest):
                content = []
                while number < len(lines) and lines[number].strip() != word:
                    content.append(lines[number].lstrip("\t") if dash else lines[number])
                    number += 1
                if number == len(lines):
                    raise ConfigError(f"{file}:{start}: the heredoc {word} has no end")
                number += 1
                heredocs.append(_Heredoc(word, "\n".join([*content, ""]), bool(quote)))
        yield _Instruction(start, name.upper(), rest.strip(), tuple(heredocs))


class _DockerfileReader:
    """Turns the instructions of one Dockerfile into steps."""

    def __init__(
        self,
        plan: BuildPlan,
        context: Path,
        files: Mapping[str, Path],
        file: Path,
        variables: Mapping[str, str],
        are_missing: Callable[[Sequence[str]], list[str]],
    ) -> None:
        self._plan = plan
        self._context = context
        self._files = files
        self._file = file
        self._variables = variables
        self._are_missing = are_missing
        self._args: dict[str, str] = {}
        self._shell: tuple[str, ...] = ("/bin/sh", "-c")
        self._folders = {
            *("/", "/etc", "/home", "/home/agent", "/logs", "/media", "/mnt", "/opt", "/root"),
            *("/run", "/srv", "/tmp", "/usr", "/var", "/var/log", "/var/tmp"),
        }
        self._num_stages = 0
        self._has_workdir = False

    def read(self, text: str) -> None:
        for instruction in _instructions(text, self._file):
            self._where = f"{self._file}:{instruction.line}"
            if self._num_stages == 0 and instruction.name not in ("FROM", "ARG"):
                raise ConfigError(f"{self._where}: expected FROM before {instruction.name}")
            self._read_one(instruction)
        if not self._num_stages:
            raise ConfigError(f"{self._file}: expected an instruction FROM")
        if not self._has_workdir:
            self._plan.steps.append(CopyStep(str(self._file), {self._plan.workdir: None}))

    def _read_one(self, instruction: _Instruction) -> None:
        name, text = instruction.name, instruction.text
        if name in IGNORED:
            self._plan.notes.append(f"{self._where}: {name} has no effect in a workspace")
        elif name == "FROM":
            self._num_stages += 1
            if self._num_stages > 1:
                raise self._error("has a second FROM: builds in stages are not possible here")
        elif name == "ARG":
            for key, default in self._pairs(text, may_lack=True):
                self._args[key] = default or self._args.get(key, "")
        elif name == "ENV":
            if not text:
                raise self._error("expected ENV NAME=value", remedy="")
            pairs = self._pairs(text) if "=" in text.split()[0] else [self._pair(text)]
            self._plan.env.update(pairs)
        elif name == "WORKDIR":
            self._workdir(self._expand(text))
        elif name == "SHELL":
            self._shell = tuple(self._json(text) or ())
            if not self._shell:
                raise self._error('expected SHELL ["program", "argument"]', remedy="")
        elif name in ("COPY", "ADD"):
            self._copy(instruction)
        elif name == "RUN":
            self._run(instruction)
        else:
            raise ConfigError(f"{self._where}: {name} is not an instruction of a Dockerfile")

    def _error(self, problem: str, *, remedy: str = PODMAN) -> ConfigError:
        return ConfigError(f"{self._where}: {problem}" + (f"; {remedy}" if remedy else ""))

    def _expand(self, text: str) -> str:
        return VARIABLE.sub(self._value, text)

    def _value(self, found: re.Match[str]) -> str:
        variables = {**self._variables, **self._args, **self._plan.env}
        key = found[1] or found[2]
        if key is None:
            return "$"
        alternative = (found[4] or "").strip("\"'")
        if found[3] == "+":
            return alternative if variables.get(key) else ""
        return variables.get(key) or alternative

    def _words(self, text: str) -> list[str]:
        """Split a text into words, in which variables outside of single quotes are replaced.

        Values are inserted after the split: spaces and quotes in them have no meaning.
        """
        values: list[str] = []

        def place(found: re.Match[str]) -> str:
            values.append(self._value(found))
            return f"\0{len(values) - 1}\0"

        def places(part: re.Match[str]) -> str:
            return part[0] if part[1] else VARIABLE.sub(place, part[0])

        try:
            words = shlex.split(QUOTED.sub(places, text))
        except ValueError as error:
            raise self._error(f"cannot be split into words: {error}", remedy="") from error
        return [re.sub("\0(\\d+)\0", lambda found: values[int(found[1])], word) for word in words]

    def _json(self, text: str) -> list[str] | None:
        """Return the strings of a JSON list; None if the text is not one."""
        if not text.startswith("["):
            return None
        try:
            words = json.loads(text)
        except ValueError:
            return None
        return words if all(isinstance(word, str) for word in words) else None

    def _pairs(self, text: str, *, may_lack: bool = False) -> list[tuple[str, str]]:
        pairs = []
        for word in self._words(text):
            key, equals, value = word.partition("=")
            if not key or not (equals or may_lack):
                raise self._error(f"expected NAME=value, got {word!r}", remedy="")
            pairs.append((key, value))
        return pairs

    def _pair(self, text: str) -> tuple[str, str]:
        key, _, value = text.partition(" ")
        return key, self._expand(value.strip())

    def _flags(self, text: str, known: Sequence[str]) -> tuple[dict[str, str], str]:
        flags = {}
        while found := FLAG.match(text):
            if found[1] not in known:
                raise self._error(f"--{found[1]} is not possible here")
            flags[found[1]] = found[2] or ""
            text = text[found.end() :]
        return flags, text

    def _workdir(self, path: str) -> None:
        self._has_workdir = True
        self._plan.workdir = self._absolute(path)
        self._folders.add(self._plan.workdir)
        self._plan.steps.append(CopyStep(self._where, {self._plan.workdir: None}))

    def _absolute(self, path: str) -> str:
        start = self._plan.workdir if self._has_workdir else "/"
        return "/" + posixpath.normpath(posixpath.join(start, path)).strip("/")

    def _copy(self, instruction: _Instruction) -> None:
        flags, text = self._flags(instruction.text, ("chown", "chmod", "link"))
        words = [self._expand(word) for word in self._json(text) or ()] or self._words(text)
        if len(words) < 2:
            raise self._error("expected one or more sources and a destination", remedy="")
        *sources, last = words
        destination = self._absolute(last)
        if destination == "/usr" or destination.startswith("/usr/"):
            raise self._error("/usr is read-only: expected a destination outside of it")
        is_folder = last.endswith(("/", "/.")) or last == "." or destination in self._folders
        files: dict[str, Path | bytes | None] = {}
        heredocs = {each.name: each for each in instruction.heredocs}
        for source in sources:
            heredoc = HEREDOC.fullmatch(source)
            if heredoc:
                into = posixpath.join(destination, heredoc[3]) if is_folder else destination
                _, content, is_quoted = heredocs[heredoc[3]]
                files[into] = (content if is_quoted else self._expand(content)).encode()
                continue
            if instruction.name == "ADD" and ("://" in source or ARCHIVE.search(source)):
                raise self._error(
                    "ADD of a URL or an archive is not possible here: use COPY", remedy=""
                )
            files |= self._sources(source, destination, is_folder or len(sources) > 1)
        parents = {self._parent(path) for path in files}
        folders = {path: None for path in sorted(parents) if path != "/" and path not in files}
        self._folders |= {path for path, content in files.items() if content is None} | {*folders}
        try:
            mode = int(flags["chmod"], 8) & 0o777 if "chmod" in flags else None
        except ValueError as error:
            raise self._error("expected --chmod in octal, such as 755", remedy="") from error
        self._plan.steps.append(CopyStep(self._where, {**folders, **files}, mode))

    def _parent(self, path: str) -> str:
        return posixpath.dirname(path) or "/"

    def _sources(
        self, source: str, destination: str, is_folder: bool
    ) -> dict[str, Path | bytes | None]:
        """Return the files of one source by their paths in the base."""
        pattern = posixpath.normpath(source.lstrip("/") or ".")
        if pattern.startswith(".."):
            raise self._error(f"{source} is outside the build context", remedy="")
        found: dict[str, Path | bytes | None] = {}
        names = {pattern}
        if glob.has_magic(pattern):
            names = {name for name in self._tops() if _matches(name, pattern)}
        for name in sorted(names):
            below = "" if name == "." else name + "/"
            if name in self._files and not _is_folder(self._files[name]):
                base = posixpath.basename(name)
                into = posixpath.join(destination, base) if is_folder else destination
                found[into] = self._files[name]
            elif name == "." or name in self._files:
                found[destination] = None
                for path, place in self._files.items():
                    if path.startswith(below):
                        found[posixpath.join(destination, path[len(below) :])] = place
        if not found:
            raise self._error(f"{source} does not exist in {self._context}", remedy="")
        return found

    def _tops(self) -> Iterator[str]:
        return iter(self._files)

    def _run(self, instruction: _Instruction) -> None:
        flags, text = self._flags(instruction.text, ("mount", "network", "security"))
        if "mount" in flags and "type=cache" not in flags["mount"]:
            raise self._error("RUN --mount is not possible here, except for type=cache")
        command = self._json(text)
        if command is None and instruction.heredocs:
            text = instruction.heredocs[0].content
            if not HEREDOC.fullmatch(instruction.text.strip()):
                raise self._error("expected RUN <<NAME with the commands in the lines below")
        if command is None:
            text = self._without_packages(text)
            if not text:
                return
            command = [*self._shell, text]
        elif MANAGERS.search(" ".join(command)):
            raise self._refused(" ".join(command))
        env = {**self._args, **self._plan.env}
        cwd = self._plan.workdir if self._has_workdir else "/"
        self._plan.steps.append(RunStep(self._where, tuple(command), env, cwd))

    def _refused(self, text: str) -> ConfigError:
        found = MANAGERS.search(text)
        program = found[0] if found else text
        return self._error(
            f"RUN {program} needs root: workspaces of the kind bubblewrap use the programs below "
            "/usr of this machine",
            remedy=f"install what is needed on this machine, or {PODMAN}",
        )

    def _without_packages(self, text: str) -> str:
        """Leave out the installation of packages that this machine has."""
        if not MANAGERS.search(text):
            return text
        kept = []
        for part in re.split(r"&&|;|\n", text):
            words = self._words_of_command(part)
            if not words or re.fullmatch(r"rm -rf /var/lib/apt/lists\S*", " ".join(words)):
                continue
            while words and ASSIGNMENT.fullmatch(words[0]):
                del words[0]
            if words[:1] in (["apt-get"], ["apt"]):
                self._check_packages(words[1:], part)
            elif MANAGERS.search(part) or re.search(r"\||\(|\bif\b|\bfor\b", part):
                raise self._refused(text)
            else:
                kept.append(part.strip())
        return " && ".join(kept)

    def _words_of_command(self, part: str) -> list[str]:
        try:
            return shlex.split(REDIRECTION.sub("", part))
        except ValueError as error:
            raise self._error(
                "a RUN that installs packages has quotes around `;`, `&&` or a line end",
                remedy="write the installation as a RUN of its own",
            ) from error

    def _check_packages(self, words: list[str], part: str) -> None:
        names = [word for word in words if not word.startswith("-")]
        if names[:1] in (["update"], ["clean"], ["autoremove"], ["upgrade"]):
            return
        if names[:1] != ["install"]:
            raise self._refused(part)
        missing = self._are_missing([re.split(r"[=/]", name)[0] for name in names[1:]])
        if missing:
            packages = " ".join(missing)
            raise self._error(
                f"needs packages that this machine does not have: {packages}",
                remedy=f"run `apt-get install {packages}` on this machine, or {PODMAN}",
            )
        self._plan.notes.append(f"{self._where}: the packages of this machine are used")


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _context_files(context: Path, max_bytes: int) -> dict[str, Path]:
    """Return the files, links and folders of a build context by relative path, in order.

    Raises:
        ConfigError: they exceed `max_bytes`, or `MAX_CONTEXT_FILES` in number.
    """
    rules = _ignore_rules(context / ".dockerignore")
    found: dict[str, Path] = {}
    num_bytes = 0
    waiting = [context]
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            name = path.relative_to(context).as_posix()
            state = path.lstat()
            is_folder = stat.S_ISDIR(state.st_mode)
            is_ignored = _is_ignored(name, rules)
            if is_folder and not (is_ignored and all(ignores for _, ignores in rules)):
                waiting.append(path)
            if is_ignored:
                continue
            if not (is_folder or stat.S_ISREG(state.st_mode) or stat.S_ISLNK(state.st_mode)):
                raise ConfigError(f"{path}: expected a file, a link or a folder")
            found[name] = path
            num_bytes += state.st_size if stat.S_ISREG(state.st_mode) else 0
            if num_bytes > max_bytes or len(found) > MAX_CONTEXT_FILES:
                raise ConfigError(
                    f"{context}: the files exceed {max_bytes} bytes, or {MAX_CONTEXT_FILES} in "
                    "number; raise the limit of disk, or list files in .dockerignore"
                )
    return dict(sorted(found.items()))


def _ignore_rules(file: Path) -> list[tuple[str, bool]]:
    """Return the patterns of a .dockerignore, and whether each one ignores."""
    if not file.is_file():
        return []
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    rules = [
        (line.lstrip("!").strip("/"), not line.startswith("!"))
        for line in lines
        if line and not line.startswith("#")
    ]
    return [(pattern, ignores) for pattern, ignores in rules if pattern]


def _is_ignored(name: str, rules: Sequence[tuple[str, bool]]) -> bool:
    """Whether the last rule that matches a path, or a folder above it, ignores it."""
    ignored = False
    above = [name, *map(str, PurePosixPath(name).parents)]
    for pattern, ignores in rules:
        if any(_matches(path, pattern) for path in above):
            ignored = ignores
    return ignored


def _matches(name: str, pattern: str) -> bool:
    """Whether a path matches a pattern; `*` stops at a slash, `**` does not."""
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]*\])", pattern)
    expression = "".join(
        words.get(part, part if part.startswith("[") else re.escape(part)) for part in parts
    )
    return re.fullmatch(expression, name) is not None


def _fingerprinted(plan: BuildPlan, files: Mapping[str, Path]) -> BuildPlan:
    """Set the fingerprint: a digest of the steps and of the contents of all files."""
    digest = hashlib.sha256()

    def update(*words: object) -> None:
        digest.update(json.dumps([str(word) for word in words]).encode())

    for name, path in files.items():
        if path.is_symlink():
            update("link", name, path.readlink())
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            update("file", name, path.stat().st_mode & 0o111, content)
        else:
            update("folder", name)
    update(plan.workdir, plan.env)
    for step in plan.steps:
        if isinstance(step, RunStep):
            update("run", step.command, step.env, step.cwd)
        else:
            update(
                "copy", [(path, _origin(place)) for path, place in step.files.items()], step.mode
            )
    plan.fingerprint = digest.hexdigest()
    return plan


def _origin(content: Path | bytes | None) -> object:
    return content.name if isinstance(content, Path) else content
