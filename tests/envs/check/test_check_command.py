"""`python env.py check`, from words to exit code, and on the environments of this repository."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.check import check_environment
from atroposlib.envs.commands import run_cli
from environments.gsm8k_server import GSM8kEnv
from environments.reasoning_gym_environment.reasoning_gym_environment import ReasoningGymEnv
from tests.byte_tokenizer import save_byte_tokenizer
from tests.envs.check.defects import CleanEnv, GarbageScoresBest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[3]


class LocalConfig(BaseEnvConfig):
    dataset_path: str | None = None


class LocalEnv(CleanEnv):
    env_config_cls = LocalConfig
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": "small.txt"}

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Any]:
        return LocalConfig(tokenizer_name="no/such-tokenizer"), CleanEnv.config_init()[1]

    async def setup(self) -> None:
        Path(str(self.config.dataset_path)).read_text()  # noqa: ASYNC240 - before anything runs
        await super().setup()


def call(env_cls: Any, line: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["env.py", *line.split()])
    with pytest.raises(SystemExit) as caught:
        run_cli(env_cls)
    return int(caught.value.code or 0)


def test_check_command_clean_environment_exits_0_with_a_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = call(CleanEnv, f"check --json {tmp_path / 'report.json'}", monkeypatch)

    report = json.loads((tmp_path / "report.json").read_text())
    assert (code, report["passed"], len(report["checks"])) == (0, True, 20)
    assert "20 passed" in capsys.readouterr().out


def test_check_command_whose_reader_has_left_passes_and_writes_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave_reader: Callable[[], None]
) -> None:
    leave_reader()

    code = call(CleanEnv, f"check --json {tmp_path / 'report.json'}", monkeypatch)

    assert code == 0
    assert json.loads((tmp_path / "report.json").read_text())["passed"]


def test_check_command_defect_exits_1_with_place_rule_and_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = call(GarbageScoresBest, "check", monkeypatch)

    shown = capsys.readouterr().out
    assert code == 1
    assert "defects.py:" in shown
    assert "the meaningless answer scores 2, the gold answer 1" in shown
    for word in ("at:", "seen:", "rule:", "remedy:", "1 failed"):
        assert word in shown


def test_check_command_takes_the_data_set_of_the_class_and_of_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.txt").write_text("data")

    assert call(LocalEnv, "check --dataset-path other.txt", monkeypatch) == 0
    assert call(LocalEnv, "check", monkeypatch) == 1
    assert "'small.txt'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("check --dataset-path x", "CleanEnv has no setting dataset_path"),
        ("check --env.group_siz 3", "did you mean --env.group_size?"),
    ],
)
def test_check_command_wrong_line_exits_2(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(CleanEnv, line, monkeypatch) == 2
    assert message in capsys.readouterr().err


REFUSES_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}"


@pytest.mark.parametrize(
    ("template", "seen", "remedy"),
    [
        (None, "does not render the conversation: it has none", "of an instruct model"),
        (REFUSES_SYSTEM + "{% endif %}", "TemplateError: no system role", "use the roles"),
    ],
)
def test_check_with_a_real_template_that_refuses_the_rollout_says_so_once(
    template: str | None, seen: str, remedy: str, tmp_path: Path
) -> None:
    tokenizer = save_byte_tokenizer(tmp_path / "made")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    report = check_environment(GSM8kEnv, tokenizer_name=str(tmp_path / "tokenizer"))

    [failure] = report.failures
    assert failure.name == "rollout"
    assert seen in failure.detail
    assert remedy in failure.remedy
    assert "gsm8k_server.py:" in str(failure.where)


def test_check_with_a_stand_in_says_that_no_template_was_tried() -> None:
    report = check_environment(CleanEnv, tokenizer_name="no/such-tokenizer")

    assert any("chat template was not tried" in note for note in report.notes)


@pytest.mark.long
def test_check_environment_reasoning_gym_passes_every_rule() -> None:
    report = check_environment(ReasoningGymEnv, max_eval_tasks=3)

    assert report.passed, report.text
    assert [o.name for o in report.outcomes if o.status == "skipped"] == []


@pytest.mark.long
def test_check_command_gsm8k_runs_as_a_script() -> None:
    done = subprocess.run(
        [sys.executable, "environments/gsm8k_server.py", "check"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "20 passed" in done.stdout
