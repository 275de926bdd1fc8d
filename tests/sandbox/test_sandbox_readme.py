from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import atroposlib.sandbox
from atroposlib.sandbox import SandboxUnavailableError, open_sandbox

README = Path(atroposlib.sandbox.__file__).with_name("README.md")


def test_program_of_the_readme_runs() -> None:
    try:
        open_sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    [program] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("42\n exit True\n", "")


def test_readme_names_every_module() -> None:
    modules = {path.name for path in README.parent.glob("*.py")} - {"__init__.py"}

    assert modules == set(re.findall(r"^\| `(\w+\.py)` \|", README.read_text(), re.MULTILINE))
