"""Run the code blocks of README and docs as a newcomer would, in a fresh clone.

    clone -> the install lines of README -> each block of `plan.STEPS`, in its order

Blocks run as printed, by bash or Python, in the folder of the clone and in a network namespace of
their own where the machine allows it, so that fixed ports are free and nothing can be downloaded.
What stands in for missing parts: `hub` for the model hub, `engine` for vLLM with a GPU model.

`--package wheel` installs the wheel in place of the clone, and removes the clone's modules, so that
only installed code runs; `make demo`, which installs the clone, is left out. `--package sdist`
walks in the unpacked source archive.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.first_hour.blocks import Block, blocks_of_pages
from tests.first_hour.plan import STEPS, NotRun, Run, match_blocks

__all__ = ["Walk", "main"]

REPOSITORY = Path(__file__).parents[2]
STAND_INS = Path(__file__).with_name("stand_ins")


TRACEBACK = "Traceback (most recent call last)"


class BlockFailedError(Exception):
    """A block did not do what its page promises; the message ends with its output."""


class Walk:
    """One walk through the pages.

    Args:
        folder: Where the clone, the hub cache and the logs are made.
        package: What is tried in place of the clone: `wheel`, `sdist`, or "".
    """

    def __init__(self, folder: Path, package: str = "") -> None:
        self.package = package
        self.packages = folder / "dist"
        self.clone = folder / "atropos"
        self.venv = self.clone / ".venv"
        self.logs = folder / "logs"
        self.home = folder / "home"
        self.hub = folder / "hub"
        self.is_new = not self.clone.exists()
        for made in (self.logs, self.home):
            made.mkdir(parents=True, exist_ok=True)

    @property
    def _isolate(self) -> str:
        """Shell lines that bring up loopback, and a machine called `host` as in the pages."""
        hosts = self.home / "hosts"
        hosts.write_text(f"127.0.0.1 localhost host {socket.gethostname()}\n")
        return f'ip link set lo up && mount --bind {hosts} /etc/hosts && exec "$@"'

    @functools.cached_property
    def isolation(self) -> tuple[str, ...]:
        """The prefix of a command that runs without a network, all ports free; () if impossible."""
        for flags in (("--net",), ("--net", "--map-root-user")):
            prefix = ("unshare", *flags, "--mount", "bash", "-c", self._isolate, "isolated")
            try:
                subprocess.run([*prefix, "true"], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                continue
            return prefix
        return ()

    def prepare(self) -> None:
        """Clone the last commit, or build the package from it, and write the hub cache."""
        _call("git", "clone", "--quiet", str(REPOSITORY), str(self.clone))
        if self.package:
            uv = str(Path(sys.executable).with_name("uv"))
            _call(uv, "build", "--quiet", "--out-dir", str(self.packages), cwd=self.clone)
        if self.package == "wheel":
            for package in ("atroposlib", "example_trainer"):
                for module in list((self.clone / package).rglob("*.py")):
                    module.unlink()
        if self.package == "sdist":
            shutil.rmtree(self.clone)
            (archive,) = self.packages.glob("*.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(self.clone.parent, filter="data")
            (self.clone.parent / archive.name.removesuffix(".tar.gz")).rename(self.clone)
        self._write_hub()

    def update(self) -> None:
        """Bring an earlier clone and what is installed from it to the last commit."""
        self._write_hub()
        _call("git", "fetch", "--quiet", "origin", "HEAD", cwd=self.clone)
        _call("git", "reset", "--quiet", "--hard", "FETCH_HEAD", cwd=self.clone)
        _call("git", "clean", "--quiet", "-fd", cwd=self.clone)
        pip = str(self.venv / "bin" / "pip")
        _call(pip, "install", "--quiet", "--no-deps", "--force-reinstall", ".", cwd=self.clone)

    def _write_hub(self) -> None:
        _call(sys.executable, "-m", "tests.first_hour.hub", str(self.hub), cwd=REPOSITORY)

    def run(self, block: Block, step: Run) -> None:
        """Run one block.

        Raises:
            BlockFailedError: It ended with an error, ran too long or did not print what it should.
        """
        if step.save_as:
            (self.clone / step.save_as).write_text(block.text, encoding="utf-8")
        scripts = [block.text]
        if step.one_by_one:
            scripts = _commands(block.text)
        if step.is_install and self.package == "wheel":
            (wheel,) = self.packages.glob("*.whl")
            scripts = [block.text.replace("'.[", f"'{wheel}[")]
        for number, script in enumerate(scripts, start=1):
            name = f"{block.page.replace('/', '-')}-{block.line}-{number}.log"
            if step.save_as and not step.command:
                continue
            if block.language == "python" and not step.command:
                (self.clone / "block.py").write_text(block.text, encoding="utf-8")
                script = "python block.py"
            self._run_script(step.command or script, step, self.logs / name)

    def _run_script(self, script: str, step: Run, log: Path) -> None:
        with log.open("w+", encoding="utf-8") as output:
            isolation = () if step.needs_network else self.isolation
            shell = subprocess.Popen(
                [*isolation, "bash", "-eo", "pipefail", "-c", f"{step.before}\n{script}"],
                cwd=self.clone / step.cwd,
                env=self._environment(network=step.needs_network),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_default_interrupts,
            )
            try:
                problem = _wait(shell, step, log)
            finally:
                _end_session(shell)
        text = log.read_text(encoding="utf-8", errors="replace")
        missing = [pattern for pattern in step.shows if not re.search(pattern, text)]
        if problem is None and missing:
            problem = f"did not print {missing[0]!r}"
        if problem is None and TRACEBACK in text:
            problem = "printed a traceback"
        if problem is not None:
            tail = "\n".join(text.splitlines()[-40:])
            raise BlockFailedError(f"{problem}\n{script.strip()}\n--- output, last lines\n{tail}")

    def _environment(self, *, network: bool) -> dict[str, str]:
        kept = {"LANG", "LC_ALL", "TMPDIR", "TERM"}
        if network:
            kept |= {name for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_"))}
        environment = {name: value for name, value in os.environ.items() if name in kept}
        path = [str(STAND_INS / "bin"), str(self.venv / "bin"), os.environ.get("PATH", "")]
        environment |= {
            "HOME": str(self.home),
            "PATH": os.pathsep.join(path),
            "HF_HOME": str(self.hub),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(STAND_INS),
            "FIRST_HOUR_REPOSITORY": str(REPOSITORY),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",  # several processes compute at once
            "DO_NOT_TRACK": "1",
        }
        if network:
            environment["PIP_CONSTRAINT"] = str(self.clone / ".ci" / "constraints.txt")
        return environment


def _default_interrupts() -> None:
    """Let Ctrl-C reach a block whatever the parent of this walk does with it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _call(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, cwd=cwd, check=True)


def _commands(text: str) -> list[str]:
    """Return the commands of a block, continued lines joined, comment lines left out."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def _wait(shell: subprocess.Popen[bytes], step: Run, log: Path) -> str | None:
    """Wait for the end of a block; return what went wrong, or None."""
    deadline = time.monotonic() + step.limit_s
    interrupted = False
    # A block of servers in the background goes on when its shell has ended.
    while shell.poll() is None or (
        step.until and not interrupted and shell.returncode == 0 and _session(shell.pid)
    ):
        if time.monotonic() > deadline:
            return f"ran for more than {step.limit_s:g} seconds"
        text = log.read_text(encoding="utf-8", errors="replace")
        if TRACEBACK in text and not interrupted:
            time.sleep(2)  # so that the log has all of it
            return "printed a traceback"
        matched = bool(step.until) and all(re.search(pattern, text) for pattern in step.until)
        if matched and shell.poll() is not None:
            return None
        if matched and not interrupted:
            os.killpg(shell.pid, signal.SIGINT)
            interrupted = True
        time.sleep(0.05)
    if interrupted:
        return None
    if step.until and not interrupted:
        return f"ended with {shell.returncode} before it printed {step.until!r}"
    if shell.returncode != step.exit_code:
        return f"ended with {shell.returncode} in place of {step.exit_code}"
    return None


def _end_session(shell: subprocess.Popen[bytes]) -> None:
    """End what a block left running: every process of its session."""
    for wanted in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + 20
        for pid in _session(shell.pid):
            try:
                os.kill(pid, wanted)
            except ProcessLookupError:
                continue
        while _session(shell.pid) and time.monotonic() < deadline:
            shell.poll()
            time.sleep(0.05)
    shell.wait()


def _session(leader: int) -> list[int]:
    """Return the processes of a session that still run."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(folder.name))
    return found


def main(words: Sequence[str]) -> int:
    """Walk through the pages and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.first_hour", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="pages, or first words of blocks, to run; all by default"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where to work; the folder of an earlier walk is updated instead of installed "
        "again (default: a temporary folder, removed when nothing failed)",
    )
    parser.add_argument(
        "--package",
        choices=("wheel", "sdist"),
        default="",
        help="install this package of the last commit, and run the blocks without the clone",
    )
    arguments = parser.parse_args(words)
    steps = match_blocks(blocks_of_pages(REPOSITORY), STEPS)
    folder = (arguments.folder or Path(tempfile.mkdtemp(prefix="first-hour-"))).absolute()
    print(f"first hour in {folder}", flush=True)
    walk = Walk(folder, arguments.package)
    if walk.package and not walk.is_new:
        parser.error(f"--package needs a new folder; {folder} is that of an earlier walk")
    if walk.is_new:
        walk.prepare()
    else:
        walk.update()
    results = [
        _take(walk, block, step)
        for block, step in steps
        if isinstance(step, Run)
        and (walk.is_new if step.is_install else _is_chosen(block, arguments.names))
        and not (walk.package == "wheel" and block.first_line.startswith("make "))
    ]
    print("\nblocks that are not run:")
    for block, step in steps:
        if isinstance(step, NotRun):
            print(f"  {block.page}:{block.line} {block.first_line[:50]!r}: {step.reason}")
    failed = [name for name, passed in results if not passed]
    print(f"\n{len(results) - len(failed)} passed, {len(failed)} failed")
    for name in failed:
        print(f"  FAILED {name}")
    if failed:
        print(f"logs: {walk.logs}")
    elif arguments.folder is None:
        shutil.rmtree(folder)
    return 1 if failed else 0


def _is_chosen(block: Block, names: Sequence[str]) -> bool:
    return not names or any(
        name == block.page or block.first_line.startswith(name) for name in names
    )


def _take(walk: Walk, block: Block, step: Run) -> tuple[str, bool]:
    """Run a block; return its name, and whether it passed."""
    began = time.monotonic()
    name = f"{block.page}:{block.line} {block.first_line[:60]}"
    print(name, end=" ", flush=True)
    try:
        walk.run(block, step)
    except BlockFailedError as error:
        print(f"FAILED\n{error}\n", flush=True)
        return name, False
    print(f"... {time.monotonic() - began:.0f} s", flush=True)
    return name, True
