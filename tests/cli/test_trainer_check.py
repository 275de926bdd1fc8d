"""The conformance kit: a trainer that keeps every rule, and trainers that break one each."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.api.trainers.conformance import (
    RULE_NAMES,
    RULES,
    Checklist,
    Content,
    check_rows,
    report_text,
)
from atroposlib.cli.trainer_check import CheckSettings, check
from atroposlib.errors import ConfigError
from tests.envs.live_service import LiveService

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
SMALL_TRAINER = Path(__file__).with_name("small_trainer.py")
LEASED_ONLY = {"acknowledges", "busy_ack", "lost_lease"}


@pytest.fixture
def service(free_port: int) -> Iterator[LiveService]:
    live = LiveService(free_port)
    live.start()
    yield live
    live.stop()


async def checked(
    service: LiveService, command: str, rows: Path | None = None, **settings: Any
) -> Checklist:
    fields = {"port": 0, "vocabulary": 32, "without": (), "idle_s": 8, "limit_s": 60, **settings}
    result, _ = await check(CheckSettings(url=service.url, command=command, rows=rows, **fields))
    return result


def small_trainer(rows: Path, *flags: str) -> str:
    return " ".join([sys.executable, str(SMALL_TRAINER), "{url}", str(rows), *flags])


def results(checklist: Checklist, result: str) -> set[str]:
    return {name for name in RULE_NAMES if checklist.result(name) == result}


@pytest.mark.parametrize("batch_size", [4, 6])
async def test_a_trainer_that_keeps_every_rule_is_green(
    service: LiveService, tmp_path: Path, batch_size: int
) -> None:
    rows = tmp_path / "rows.jsonl"

    checklist = await checked(service, small_trainer(rows, f"--batch-size={batch_size}"), rows=rows)

    assert checklist.broken == {}
    assert results(checklist, "ok") == RULE_NAMES
    status = await asyncio.to_thread(lambda: httpx.get(f"{service.url}/status").json())
    assert status["current_step"] == 8


@pytest.mark.parametrize(
    ("flaw", "rule", "reason"),
    [
        ("registers", "registers", "did not register"),
        ("waits", "waits", "more than 30 requests"),
        ("acknowledges", "acknowledges", "took 8 batches and acknowledged none"),
        ("masks", "masks", "expected"),
        ("restart", "restart", "ended with exit code 1 after it"),
        ("busy", "busy", "ended with exit code 1 after it"),
        pytest.param("impatient", "busy", "Retry-After was 1 s", marks=pytest.mark.long),
        pytest.param("lost_batch", "lost_batch", "after it", marks=pytest.mark.long),
        pytest.param("outage", "outage", "after it", marks=pytest.mark.long),
        pytest.param("lost_lease", "lost_lease", "after it", marks=pytest.mark.long),
        pytest.param("versions", "versions", "after", marks=pytest.mark.long),
        pytest.param("advantages", "advantages", "has the advantages", marks=pytest.mark.long),
        pytest.param("rows", "rows", "was trained 0 times", marks=pytest.mark.long),
    ],
)
async def test_a_trainer_that_breaks_a_rule_is_told_which(
    service: LiveService, tmp_path: Path, flaw: str, rule: str, reason: str
) -> None:
    rows = tmp_path / "rows.jsonl"

    checklist = await checked(service, small_trainer(rows, f"--flaw={flaw}"), rows=rows)

    assert reason in checklist.broken[rule]
    # A batch that nothing acknowledges leaves the run without its last step.
    also = {"ends"} if flaw == "acknowledges" else set()
    assert set(checklist.broken) <= {rule, "busy_ack"} | also


async def test_the_loop_of_the_page_is_green(service: LiveService, tmp_path: Path) -> None:
    """`batches` of the client keeps every rule that can be seen from outside."""
    program = tmp_path / "loop.py"
    program.write_text(
        "import sys\n"
        "from atroposlib.api.client import batches\n"
        "with batches(sys.argv[1], batch_size=4, num_steps=8, max_token_len=64) as stream:\n"
        "    for batch in stream:\n"
        "        stream.set_policy_version(stream.num_acknowledged + 1)\n"
    )
    command = f"env PYTHONPATH={REPOSITORY} {sys.executable} {program} {{url}}"

    checklist = await checked(service, command)

    assert checklist.broken == {}
    assert results(checklist, "not exercised") == {"rows"}


async def test_a_trainer_without_leases_is_green_in_what_it_does(
    service: LiveService, tmp_path: Path
) -> None:
    """As published trainers take batches: without a lease, and with a second between requests."""
    program = tmp_path / "loop.py"
    text = SMALL_TRAINER.read_text(encoding="utf-8")
    text = text.replace("/batch?lease=60&wait={wait}", "/batch?wait={wait}")
    program.write_text(text.replace('if flaw != "acknowledges":', "if False:"))
    rows = tmp_path / "rows.jsonl"

    checklist = await checked(
        service, small_trainer(rows).replace(str(SMALL_TRAINER), str(program)), rows=rows
    )

    assert checklist.broken == {}
    assert results(checklist, "not exercised") == LEASED_ONLY


async def test_content_that_the_trainer_does_not_support_is_left_out(
    service: LiveService, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"

    checklist = await checked(
        service, small_trainer(rows, "--flaw=advantages"), rows=rows, without=("advantages",)
    )

    assert checklist.broken == {}
    assert results(checklist, "not exercised") == {"advantages"}


async def test_a_trainer_that_does_nothing_is_ended(service: LiveService, tmp_path: Path) -> None:
    program = tmp_path / "idle.py"
    program.write_text("import signal\nsignal.pause()\n")

    checklist = await checked(service, f"{sys.executable} {program}", idle_s=1)

    assert "sent no request for 1 s" in checklist.broken["registers"]


async def test_a_service_with_a_trainer_is_refused(service: LiveService) -> None:
    registration = {
        "wandb_group": "", "wandb_project": "", "batch_size": 2, "max_token_len": 8, "num_steps": 1,
        "checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0,
    }  # fmt: skip
    await asyncio.to_thread(
        lambda: httpx.post(f"{service.url}/register", json=registration).raise_for_status()
    )

    with pytest.raises(ConfigError, match="start an empty service"):
        await checked(service, "true")


async def test_a_command_that_does_not_exist_is_refused(service: LiveService) -> None:
    with pytest.raises(ConfigError, match="cannot be started"):
        await checked(service, "no-such-trainer")


@pytest.mark.parametrize("command", ["", "python 'train.py"])
async def test_a_command_that_cannot_be_split_is_refused(
    service: LiveService, command: str
) -> None:
    with pytest.raises(ConfigError, match="--command: expected"):
        await checked(service, command)


async def test_rows_that_are_not_text_are_a_broken_rule(
    service: LiveService, tmp_path: Path
) -> None:
    binary = tmp_path / "rows.bin"
    binary.write_bytes(b"\xff\n")

    command = small_trainer(tmp_path / "rows.jsonl", "--steps=1")
    checklist = await checked(service, command, rows=binary)

    assert "row 1 is not as documented" in checklist.broken["rows"]


def test_command_prints_the_table_and_exits_with_1_for_a_broken_rule(service: LiveService) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "atroposlib.cli.trainer_check", service.url, "--command", "true"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.returncode == 1, done.stderr
    assert "broken        registers" in done.stdout
    assert "remedy: send POST /register" in done.stdout
    assert "0 ok, 1 broken, 17 not exercised" in done.stdout


def test_content_has_batches_of_exact_size_and_no_trajectory_twice() -> None:
    content = Content(6, 32)

    sizes = [[len(group["tokens"]) for group in content.groups(slot)] for slot in range(9)]

    assert [sum(batch) for batch in sizes] == [6] * 9
    assert sizes[2] == [3, 1, 1, 1]
    assert len(content.posted) == 54
    assert all(0 < token < 32 for tokens in content.posted for token in tokens)


def written(content: Content) -> list[dict[str, Any]]:
    """Return the rows of a trainer that does everything right."""
    return [
        {
            "tokens": list(row.tokens),
            "trained": list(row.is_trained),
            "advantages": list(row.advantages or [1.0] * len(row.tokens)),
        }
        for row in content.posted.values()
    ]


def broken_by(rows: list[dict[str, Any]], content: Content, slot: int) -> dict[str, str]:
    checklist = Checklist()
    check_rows([json.dumps(row) for row in rows], content, {slot: 1}, checklist)
    return checklist.broken


def test_rows_are_compared_with_what_was_posted() -> None:
    content = Content(2, 32)
    content.groups(5)
    rows = written(content)
    unknown = {"tokens": [9, 9], "trained": [0, 1], "advantages": [0.0, 0.0]}
    off = {**rows[0], "advantages": [value + 0.5 for value in rows[0]["advantages"]]}
    masked = {**rows[0], "trained": [0] * len(rows[0]["trained"])}

    assert broken_by(rows, content, 5) == {}
    assert set(broken_by([*rows, rows[0]], content, 5)) == {"rows"}
    assert set(broken_by(rows[1:], content, 5)) == {"rows"}
    assert set(broken_by([*rows, unknown], content, 5)) == {"rows"}
    assert set(broken_by([off, rows[1]], content, 5)) == {"advantages"}
    assert set(broken_by([masked, rows[1]], content, 5)) == {"masks"}
    assert "row 1 is not as documented" in broken_by([{"tokens": 3}], content, 5)["rows"]
    shifted = {**rows[0], "trained": rows[0]["trained"][1:], "advantages": off["advantages"][1:]}
    for malformed in (shifted, {**rows[0], "tokens": [[1]]}, {**rows[0], "trained": [math.inf]}):
        assert "row 1 is not as documented" in broken_by([malformed], content, 5)["rows"]


def test_blank_lines_between_rows_are_skipped() -> None:
    content, checklist = Content(2, 32), Checklist()
    content.groups(5)

    lines = [line for row in written(content) for line in (json.dumps(row), "", " ")]
    check_rows(lines, content, {5: 1}, checklist)

    assert checklist.broken == {}


def test_report_names_reason_and_remedy_of_each_broken_rule() -> None:
    checklist = Checklist()
    checklist.saw("registers", "busy")
    checklist.broke("busy", "it ended")
    checklist.broke("busy", "a later reason")

    text = report_text(checklist, ["a note"])

    assert "reason: it ended" in text
    assert next(rule for rule in RULES if rule.name == "busy").remedy in text
    assert text.endswith("a note\n1 ok, 1 broken, 16 not exercised")


async def test_a_run_that_is_too_large_for_the_check_is_refused(
    service: LiveService, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="registered num_steps 101; the check supports up to 100"):
        await checked(service, small_trainer(tmp_path / "rows.jsonl", "--steps=101"))


async def test_a_compressed_registration_is_passed_on(service: LiveService, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"

    checklist = await checked(service, small_trainer(rows, "--gzip"), rows=rows)

    assert checklist.broken == {}
