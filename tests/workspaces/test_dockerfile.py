"""The subset of Dockerfiles that workspaces on this machine are prepared from."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from atroposlib.errors import ConfigError
from atroposlib.sandbox import SandboxLimits
from atroposlib.workspaces import WorkspaceSpec
from atroposlib.workspaces.dockerfile import BuildPlan, CopyStep, RunStep, read_plan


def plan_of(folder: Path, text: str, *, installed: Sequence[str] = ()) -> BuildPlan:
    (folder / "Dockerfile").write_text(text)
    spec = WorkspaceSpec("task", source=folder)
    return read_plan(
        spec, are_missing=lambda names: [name for name in names if name not in installed]
    )


def copied(plan: BuildPlan) -> dict[str, str]:
    """Return the contents of all files that are copied, by path."""
    contents = {}
    for step in plan.steps:
        if isinstance(step, CopyStep):
            with tarfile.open(fileobj=io.BytesIO(step.archive())) as archive:
                for member in archive:
                    content = archive.extractfile(member) if member.isreg() else None
                    if content is not None:
                        contents["/" + member.name] = content.read().decode()
    return contents


def runs(plan: BuildPlan) -> list[RunStep]:
    return [step for step in plan.steps if isinstance(step, RunStep)]


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "sub" / "c.py").write_text("c")
    (tmp_path / "sub" / "deep" / "d.txt").write_text("d")
    (tmp_path / "sub" / "link").symlink_to("c.py")
    return tmp_path


@pytest.mark.parametrize(
    ("instruction", "expected"),
    [
        ("COPY a.txt .", {"/app/a.txt": "a"}),
        ("COPY a.txt ./", {"/app/a.txt": "a"}),
        ("COPY a.txt /app", {"/app/a.txt": "a"}),
        ("COPY a.txt renamed", {"/app/renamed": "a"}),
        ("COPY a.txt /data/", {"/data/a.txt": "a"}),
        ("COPY a.txt /mnt", {"/mnt/a.txt": "a"}),
        ("COPY a.txt b.txt /data", {"/data/a.txt": "a", "/data/b.txt": "b"}),
        ("COPY *.txt ./", {"/app/a.txt": "a", "/app/b.txt": "b"}),
        ("COPY sub /data", {"/data/c.py": "c", "/data/deep/d.txt": "d"}),
        ("COPY sub/ sub/", {"/app/sub/c.py": "c", "/app/sub/deep/d.txt": "d"}),
        ('COPY ["a.txt", "with space"]', {"/app/with space": "a"}),
        ("COPY --chown=app:app --chmod=755 a.txt b", {"/app/b": "a"}),
        ("ADD a.txt /x/y/z", {"/x/y/z": "a"}),
        ("ENV D=/data\nCOPY a.txt ${D}/x", {"/data/x": "a"}),
        ("COPY a.txt ${MISSING:-other}", {"/app/other": "a"}),
        ('ENV D="/a b"\nCOPY a.txt $D/x', {"/a b/x": "a"}),
        ('ENV D=/data\nCOPY ["a.txt", "$D/x"]', {"/data/x": "a"}),
        ("COPY <<EOF conf.ini\n[x]\ny = 1\nEOF", {"/app/conf.ini": "[x]\ny = 1\n"}),
        ("ENV Y=1\nCOPY <<EOF c\ny = $Y, ${Y}, \\$Y\nEOF", {"/app/c": "y = 1, 1, $Y\n"}),
        ("ENV Y=1\nCOPY <<'EOF' c\ny = $Y\nEOF", {"/app/c": "y = $Y\n"}),
        ("COPY <<-EOF c\n\tx\n\t\ty\n\tEOF", {"/app/c": "x\ny\n"}),
    ],
)
def test_copy_places_files(context: Path, instruction: str, expected: dict[str, str]) -> None:
    plan = plan_of(context, f"FROM python:3.11\nWORKDIR /app\n{instruction}\n")

    assert copied(plan) == expected


def test_copy_keeps_links_and_permissions(context: Path) -> None:
    (context / "a.txt").chmod(0o755)
    plan = plan_of(context, "FROM x\nCOPY a.txt sub /app/\nCOPY --chmod=600 b.txt /app/\n")

    members: dict[str, tarfile.TarInfo] = {}
    for step in plan.steps:
        assert isinstance(step, CopyStep)
        with tarfile.open(fileobj=io.BytesIO(step.archive())) as archive:
            members |= {member.name: member for member in archive}
    assert members["app/a.txt"].mode == 0o755
    assert members["app/b.txt"].mode == 0o600
    assert (members["app/link"].issym(), members["app/link"].linkname) == (True, "c.py")


def test_run_has_variables_and_folder_of_its_place(context: Path) -> None:
    text = """
# syntax=docker/dockerfile:1
ARG BASE=python:3.11
FROM ${BASE} AS final
ARG LEVEL=2
ENV A=1 B="two words"
ENV OLD old style
WORKDIR /srv
WORKDIR app
RUN echo one \\
    # a comment
    && echo two
ENV A=3
RUN ["touch", "x y"]
SHELL ["/bin/bash", "-c"]
RUN <<EOF
echo $A
echo end
EOF
USER app
CMD ["python"]
"""
    plan = plan_of(context, text)

    first, second, third = runs(plan)
    assert first.command == ("/bin/sh", "-c", "echo one && echo two")
    assert first.env == {
        **{"BASE": "python:3.11", "LEVEL": "2"},
        **{"A": "1", "B": "two words", "OLD": "old style"},
    }
    assert (first.cwd, plan.workdir) == ("/srv/app", "/srv/app")
    assert second.command == ("touch", "x y")
    assert third.command == ("/bin/bash", "-c", "echo $A\necho end\n")
    assert third.env["A"] == "3"
    assert plan.env == {"A": "3", "B": "two words", "OLD": "old style"}
    assert [note.split(": ")[1].split()[0] for note in plan.notes] == ["USER", "CMD"]
    assert first.where.endswith("Dockerfile:10")


@pytest.mark.parametrize(
    "text",
    [
        "RUN apt-get update && apt-get install -y --no-install-recommends git curl=1.0 "
        "&& rm -rf /var/lib/apt/lists/* && echo done",
        "RUN apt-get update\nRUN apt-get -y install git\nRUN apt-get clean; echo done",
        "RUN DEBIAN_FRONTEND=noninteractive apt-get install -y git > /dev/null 2>&1 && echo done",
    ],
)
def test_packages_of_the_machine_are_not_installed_again(context: Path, text: str) -> None:
    plan = plan_of(context, f"FROM x\n{text}\n", installed=["git", "curl"])

    assert [step.command[-1] for step in runs(plan)] == ["echo done"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('ENV A="x y"\nENV B=$A', "x y"),
        ('ENV A="x y"\nENV B="${A} z"', "x y z"),
        ('ENV A=\'"q"\'\nENV B="$A"', '"q"'),
        ("ENV A=x\nENV B='$A'", "$A"),
        ("ENV A=x\nENV B=\\$A", "$A"),
        ('ENV B=${A:-"x y"}', "x y"),
        ("ENV\tB=x", "x"),
    ],
)
def test_variables_are_replaced_but_not_split(context: Path, text: str, value: str) -> None:
    plan = plan_of(context, f"FROM x\n{text}\n")

    assert plan.env["B"] == value


@pytest.mark.parametrize("command", ['grep x <<< "hello"', 'python3 -c "print(1 << 2)"'])
def test_shift_and_string_as_input_are_no_heredocs(context: Path, command: str) -> None:
    plan = plan_of(context, f"FROM x\nRUN {command}\n")

    assert [step.command[-1] for step in runs(plan)] == [command]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM x\nRUN apt-get install -y git jq", r":2: needs packages .*: git jq; run `apt-get"),
        ("FROM x\n\nRUN apk add git", r":3: RUN apk needs root"),
        ("FROM x\nRUN for p in a b; do apt-get install $p; done", r":2: RUN apt-get needs root"),
        ('FROM x\nRUN ["apt-get", "install", "git"]', r":2: RUN apt-get needs root"),
        ("FROM x\nRUN sudo make install", r":2: RUN sudo needs root"),
        ("FROM x AS y\nFROM z\nCOPY --from=y a b", r":2: has a second FROM"),
        ("FROM x\nCOPY --from=y a.txt b", r":2: --from is not possible"),
        ("FROM x\nRUN --mount=type=secret,id=x cat /run/secrets/x", r":2: RUN --mount"),
        ("FROM x\nCOPY ../secret .", r":2: ../secret is outside the build context"),
        ("FROM x\nCOPY missing .", r":2: missing does not exist"),
        ("FROM x\nCOPY *.rs .", r":2: \*\.rs does not exist"),
        ("FROM x\nCOPY a.txt", r":2: expected one or more sources"),
        ("FROM x\nCOPY a.txt /usr/bin/x", r":2: /usr is read-only"),
        ("FROM x\nCOPY --chmod=u+x a.txt b", r":2: expected --chmod in octal"),
        ("FROM x\nADD https://example.org/x .", r":2: ADD of a URL"),
        ("FROM x\nENV", r":2: expected ENV NAME=value"),
        ("FROM x\nENV A=1 B", r":2: expected NAME=value, got 'B'"),
        ("FROM x\nENV A='1", r":2: cannot be split into words"),
        ("FROM x\nCOPY <<EOF y\nz", r":2: the heredoc EOF has no end"),
        ("FROM x\nCPY a b", r":2: CPY is not an instruction"),
        ("RUN true", r":1: expected FROM before RUN"),
        ("# nothing", r"Dockerfile: expected an instruction FROM"),
        ("# escape=`\nFROM x", r":1: expected the escape character"),
        ("FROM x\nSHELL bash", r":2: expected SHELL \["),
    ],
)
def test_error_names_file_and_line(context: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan_of(context, text)

    assert str(context / "Dockerfile") in str(caught.value)


def test_folder_without_dockerfile_is_copied(context: Path) -> None:
    (context / ".dockerignore").write_text("# kept small\nsub\n!sub/deep\n*.md\n**/b.txt\n")
    (context / "notes.md").write_text("x")
    plan = read_plan(WorkspaceSpec("task", source=context, workdir="/data"))

    assert plan.workdir == "/data"
    assert set(copied(plan)) == {"/data/a.txt", "/data/.dockerignore", "/data/sub/deep/d.txt"}


def test_fingerprint_depends_on_all_that_is_copied_or_run(context: Path) -> None:
    text = "FROM x\nCOPY sub /app\nRUN echo 1\n"
    first = plan_of(context, text).fingerprint

    assert plan_of(context, text).fingerprint == first
    assert plan_of(context, text.replace("1", "2")).fingerprint != first
    (context / "sub" / "c.py").write_text("changed")
    second = plan_of(context, text).fingerprint
    (context / "sub" / "c.py").chmod(0o755)
    assert len({first, second, plan_of(context, text).fingerprint}) == 3


def test_context_is_bounded_and_has_files_only(context: Path) -> None:
    (context / "large").write_bytes(bytes(2000))
    spec = WorkspaceSpec("task", source=context, limits=SandboxLimits(disk_bytes=1000))

    with pytest.raises(ConfigError, match="exceed 1000 bytes"):
        read_plan(spec)
    with pytest.raises(ConfigError, match="does not exist"):
        read_plan(WorkspaceSpec("task", source=context / "missing"))
    with pytest.raises(ConfigError, match="absolute workdir"):
        read_plan(WorkspaceSpec("task", workdir="app"))
