"""`check` on environments of several kinds, and on defects beyond the seeded ones."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.envs.checks import runner
from tests.envs.check.defects import CleanEnv
from tests.envs.check.other_environments import CLEAN, DEFECTS, STOPPED, LostSiblings, OwnClient
from tests.envs.small_environment import SmallEnv
from tests.envs.test_base_readme import readme_environment

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("env_cls", CLEAN)
def test_check_clean_environment_of_any_kind_passes(env_cls: type[CleanEnv]) -> None:
    report = check_environment(env_cls)

    assert report.passed, report.text


@pytest.mark.parametrize(("env_cls", "rule"), DEFECTS)
def test_check_defect_is_the_one_failure(env_cls: type[CleanEnv], rule: str) -> None:
    report = check_environment(env_cls)
    STOPPED.set()
    STOPPED.clear()

    # A busy machine holds the loop too, where a client loads its certificates for example.
    ignored = {"blocking"} - {rule}
    failures = [failure for failure in report.failures if failure.name not in ignored]
    assert [failure.name for failure in failures] == [rule], report.text
    assert "other_environments.py:" in (failures[0].where or "")


@pytest.mark.parametrize(("env_cls", "failed"), [(CleanEnv, set()), (LostSiblings, {"siblings"})])
def test_check_of_failed_rollouts_in_a_process_that_stands_still(
    monkeypatch: pytest.MonkeyPatch, env_cls: type[CleanEnv], failed: set[str]
) -> None:
    monkeypatch.setattr(runner, "SIBLING_LATENCY_S", 1e-9)  # has passed whenever it is looked at
    monkeypatch.setattr(runner, "CANCEL_LIMIT_S", 1e-9)

    report = check_environment(env_cls)

    ignored = {"blocking"}
    assert {failure.name for failure in report.failures} - ignored == failed, report.text


def test_check_environment_with_a_client_of_its_own_is_noted() -> None:
    report = check_environment(OwnClient)

    assert any("answers through self.server only" in note for note in report.notes), report.notes


def test_check_without_gold_answer_skips_the_scores_and_says_how_to_add_it() -> None:
    report = check_environment(readme_environment())

    skipped = {o.name: o.detail for o in report.outcomes if o.status == "skipped"}
    assert report.passed, report.text
    assert set(skipped) == {"spread", "wrong", "truncated"}
    assert "check_gold_answer(self, item)" in skipped["spread"]


def test_check_environment_inside_a_running_loop_and_with_settings() -> None:
    async def inside() -> Any:
        return check_environment(CleanEnv, group_size=6)

    import asyncio

    report = asyncio.run(inside())

    assert report.passed, report.text
    assert "group_size 6" in report.text


def test_check_dataset_path_without_such_a_setting_fails_the_settings() -> None:
    report = check_environment(CleanEnv, dataset_path="data")

    assert [failure.name for failure in report.failures] == ["config"]
    assert "has no setting dataset_path" in report.text


def test_check_environment_that_makes_its_own_tokens_is_told_so() -> None:
    report = check_environment(SmallEnv)

    assert "masks" in [failure.name for failure in report.failures]


def test_check_of_an_environment_with_a_property_as_name_has_the_name_of_the_class() -> None:
    class Named(CleanEnv):
        name = property(lambda env: "own")  # type: ignore[assignment]

    report = check_environment(Named)

    assert report.passed, report.text
    assert report.environment == "Named"
