"""The README of the package runs as printed and lists every module."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs import reward_fns

README = Path(reward_fns.__file__).with_name("README.md")


@pytest.mark.usefixtures("own_registrations")
def test_readme_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "readme"}

    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)

    assert len(blocks) == 3


def test_readme_lists_every_module() -> None:
    listed = set(re.findall(r"`(\w+\.py)`", README.read_text(encoding="utf-8")))

    assert listed == {path.name for path in README.parent.glob("*.py")} - {"__init__.py"}
