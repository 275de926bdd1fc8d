"""The container file installs what exists, as a user without privileges, and copies no secret."""

from __future__ import annotations

import fnmatch
import re
import shlex
import subprocess

import yaml

from tests.packaging.installed import REPOSITORY

FILE = REPOSITORY / "containers" / "Containerfile"


def instructions() -> list[tuple[str, str]]:
    """Return each instruction and its words, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(encoding="utf-8"), flags=re.M)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage, by its name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for word, rest in instructions():
        if word == "FROM":
            found[rest.split(" AS ")[1]] = [(word, rest)]
        elif found:
            list(found.values())[-1].append((word, rest))
    return found


def test_images_run_as_a_number_that_is_not_root() -> None:
    built = stages()

    for name in ("service", "environment"):
        assert built[name][0] == ("FROM", f"runtime AS {name}")
        assert not any(word == "USER" for word, _ in built[name])
    assert ("USER", "${USER_ID}:${USER_ID}") in built["runtime"]
    assert ("ARG", "USER_ID=1000") in built["runtime"]


def test_base_image_is_pinned_and_packages_have_the_tested_versions() -> None:
    arguments = dict(
        rest.split("=", 1) for word, rest in instructions() if word == "ARG" and "=" in rest
    )
    (install,) = [rest for word, rest in stages()["packages"] if word == "RUN"]

    assert re.fullmatch(r"\S+/python:3\.\d+\.\d+-slim-\w+", arguments["BASE"])
    # The slim image has no compiler; an extra of the packages is compiled when it is installed.
    assert arguments["BUILD_BASE"] == arguments["BASE"].replace("-slim", "")
    assert "-c .ci/constraints.txt" in install


def test_service_has_a_health_check_and_starts_the_command_of_the_package() -> None:
    service = dict(stages()["service"])
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")

    assert "/health/live" in service["HEALTHCHECK"]
    command = yaml.safe_load(service["CMD"])
    assert f'{command[0]} = "' in project
    assert command[-1] == service["VOLUME"]


def test_what_is_copied_is_in_the_build_context_and_secrets_are_not() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").split("\n")
    allowed = [line[1:] for line in lines if line.startswith("!")]
    (program,) = [
        yaml.safe_load(rest)[1] for word, rest in stages()["environment"] if word == "CMD"
    ]
    extras = re.findall(r"EXTRAS=([\w,-]+)", FILE.read_text(encoding="utf-8"))

    assert lines[1] == "*"
    assert all((REPOSITORY / path).exists() for path in allowed)
    assert "environments" in allowed
    assert (REPOSITORY / program).exists()
    assert extras == ["redis"]
    for secret in (".env", "tokens", "atropos_runs/run.sqlite3"):
        assert not any(fnmatch.fnmatch(secret, pattern) for pattern in allowed), secret


def test_installed_package_data_are_tracked_files() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "containers", ".dockerignore"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert listed.split() == [".dockerignore", "containers/Containerfile"]
    for word, rest in instructions():
        if word == "COPY":
            assert shlex.split(rest)[-1] != "/"
