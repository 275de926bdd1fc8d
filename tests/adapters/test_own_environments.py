"""The tests of each ecosystem, in an environment that has its packages."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.adapters.own_environments import ECOSYSTEMS, REPOSITORY, environment_of, python_with
from tests.clients.installing import NotInstallableError

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(2400)]

LIMIT_S = 1500


@pytest.mark.parametrize("name", ECOSYSTEMS)
def test_adapters_pass_their_tests_with_the_installed_packages(name: str) -> None:
    try:
        python = python_with(name)
    except NotInstallableError as error:
        pytest.skip(f"{name}: {error}")
    # `make figures-all` measures these tests too.
    measured = ["coverage", "run", "-m"] if "COVERAGE_PROCESS_CONFIG" in os.environ else []
    command = [str(python), "-m", *measured, "pytest", "-q", "--run-clients"]
    command += ["-p", "no:cacheprovider"]

    done = subprocess.run(
        [*command, *ECOSYSTEMS[name].tests],
        cwd=REPOSITORY,
        env=environment_of(python),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )

    output = done.stdout[-20_000:] + done.stderr[-5_000:]
    assert done.returncode == 0, output
    assert re.search(r"\b[1-9]\d* passed", done.stdout), output
    skipped = re.findall(r"^SKIPPED .*", done.stdout, re.MULTILINE)
    print(f"{name}:", done.stdout.strip().splitlines()[-1], *skipped, sep="\n")
