"""The wheel and the environments made of it, once for a whole run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging.installed import REPOSITORY, Installed, build, make_environment


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source=REPOSITORY, out=tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """`pip install .`: no extras, not editable."""
    return make_environment(tmp_path_factory.mktemp("light") / "venv", str(wheel))


@pytest.fixture(scope="session")
def with_examples(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """`pip install '.[examples]'`."""
    return make_environment(tmp_path_factory.mktemp("examples") / "venv", f"{wheel}[examples]")
