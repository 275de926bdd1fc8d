"""`check` finds each seeded defect, and nothing else."""

from __future__ import annotations

import pytest

from atroposlib.envs.check import check_environment
from tests.envs.check.defects import DEFECTS, CleanEnv

pytestmark = pytest.mark.slow


def test_check_clean_environment_passes_every_rule() -> None:
    report = check_environment(CleanEnv)

    assert report.passed, report.text
    assert [o.name for o in report.outcomes if o.status == "skipped"] == []


@pytest.mark.parametrize(
    ("env_cls", "rule"), DEFECTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_check_seeded_defect_is_the_one_failure(env_cls: type[CleanEnv], rule: str) -> None:
    report = check_environment(env_cls)

    assert [failure.name for failure in report.failures] == [rule], report.text
    assert "defects.py:" in (report.failures[0].where or "")
