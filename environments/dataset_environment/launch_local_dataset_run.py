"""Start the programs of a training run on this machine: service, environment, trainer.

    python environments/dataset_environment/launch_local_dataset_run.py --config gsm8k_debug

The inference server must be running, or the trainer must start one (`weight-bridge-mode` in the
`trainer` section). When the trainer ends, or another program fails, all programs are terminated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from atroposlib.errors import ConfigError
from atroposlib.tasks.siblings import sibling_imports
from atroposlib.utils.text import without_secrets

if TYPE_CHECKING or __package__:
    from environments.dataset_environment.dataset_env import RunFile, read_run_file
else:
    with sibling_imports(__file__):
        from dataset_env import RunFile, read_run_file

__all__ = ["commands", "environment_settings", "main"]

POLL_S = 0.5
GRACE_S = 15.0
DEFAULT_PORT = 8000


def environment_settings(run: RunFile) -> dict[str, Any]:
    """Return the YAML content that `dataset_env.py serve --config` takes."""
    return {
        "env": run.env.model_dump(mode="json", exclude_unset=True),
        "openai": [s.model_dump(mode="json", exclude_unset=True) for s in run.servers],
    }


def commands(run: RunFile, env_file: Path) -> dict[str, list[str]]:
    """Return the command lines of the three programs by name, in the order of their start.

    Args:
        run: contents of the YAML file.
        env_file: file with the `environment_settings`.

    Raises:
        ConfigError: the URL of the service is not on this machine.
    """
    address = urlsplit(run.env.rollout_server_url)
    if address.hostname not in ("localhost", "127.0.0.1"):
        raise ConfigError(
            f"rollout_server_url is {without_secrets(run.env.rollout_server_url)}; expected one on "
            "localhost, since the service is started here"
        )
    port = str(address.port or DEFAULT_PORT)
    flags = {"atropos-url": run.env.rollout_server_url, **run.trainer}
    script = Path(__file__).with_name("dataset_env.py")
    return {
        "service": [sys.executable, "-m", "atroposlib.cli.run_api", "--port", port],
        "environment": [sys.executable, str(script), "serve", "--config", str(env_file)],
        "trainer": [sys.executable, "-m", "example_trainer.grpo", *_flags(flags)],
    }


def _flags(settings: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


def _run_all(lines: dict[str, list[str]]) -> int:
    """Run the programs until the trainer ends or another one fails; return its exit code."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, line in lines.items():
            running[name] = subprocess.Popen(line)
        while True:
            for name, process in running.items():
                code = process.poll()
                if code is not None and (name == "trainer" or code != 0):
                    sys.stdout.write(f"{name} ended with exit code {code}\n")
                    return code
            time.sleep(POLL_S)
    finally:
        for process in reversed(running.values()):
            process.terminate()
        for process in running.values():
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; exit with the code of the trainer."""
    parser = argparse.ArgumentParser(description="Train on a data set, on this machine.")
    parser.add_argument("--config", default="dataset_local", help="path, or name under configs/")
    parser.add_argument("--dry-run", action="store_true", help="only print the command lines")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:  # readable by its owner only: it holds keys
        path = Path(folder, "environment.yaml")
        try:
            run = read_run_file(arguments.config, os.environ)
            lines = commands(run, path)
        except ConfigError as error:
            sys.stderr.write(f"{parser.prog}: error: {error}\n")
            sys.exit(2)
        if arguments.dry_run:
            sys.stdout.write("".join(" ".join(line) + "\n" for line in lines.values()))
            return
        path.write_text(json.dumps(environment_settings(run)), encoding="utf-8")  # YAML as well
        sys.exit(_run_all(lines))


if __name__ == "__main__":
    main()
