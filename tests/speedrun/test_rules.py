"""The rules of the speedrun: entries, results, the table, and what a trainer consumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from atroposlib.errors import AtroposError, ConfigError
from example_trainer.demo.settings import REPOSITORY, DemoPaths
from example_trainer.speedrun import rules
from example_trainer.speedrun.cli import keep, main, recorded
from example_trainer.speedrun.rules import (
    Consumption,
    Result,
    SeedResult,
    SpeedrunEntry,
    StartingModel,
)

ENTRIES = sorted((REPOSITORY / "benchmarks" / "speedrun").glob("*.yaml"))
ENTRY = """
name: mine
author: someone
date: 2026-11-26
explanation: Larger steps. They need fewer batches.
settings:
  steps: 4
  groups_per_step: 2
  group_size: 4
  trainer: {lr: 1.0e-3, algorithm: dr_grpo, gradient_checkpointing: false}
"""


def write_entry(folder: Path, text: str = ENTRY) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def one_run(seed: int, *, num_correct: int = 420, **consumed: Any) -> SeedResult:
    defaults: dict[str, Any] = {
        "steps": 4, "groups": 8, "sequences": 32, "tokens": 640, "completion_tokens": 320,
        "held_out_prompts": 0, "prompts_sha256": "0" * 64,
    }  # fmt: skip
    return SeedResult(
        seed=seed,
        seconds=10.0 + seed,
        cpu_seconds=15.0 + seed,
        num_correct=num_correct,
        num_problems=512,
        seconds_by_phase={"measure": 2.5},
        consumed=Consumption(**{**defaults, **consumed}),
    )


def result_for(entry: SpeedrunEntry, *runs: SeedResult, **changes: Any) -> Result:
    fields: dict[str, Any] = {
        "rules": rules.RULES,
        "name": entry.name,
        "author": entry.author,
        "date": entry.date,
        "settings": entry.settings.model_dump(mode="json"),
        "entry_sha256": entry.digest,
        "held_out_sha256": rules.HELD_OUT_SHA256,
        "start": StartingModel(sha256="0" * 64, accuracy=0.35),
        "runs": list(runs) or [one_run(seed) for seed in rules.SEEDS],
        "machine": {"cores": 2},
        "versions": {},
    }
    return Result(**{**fields, **changes})


@pytest.mark.parametrize("path", ENTRIES, ids=lambda path: path.stem)
def test_every_entry_of_the_repository_follows_the_rules(path: Path) -> None:
    entry = rules.read_entry(path)

    assert entry.name == path.stem


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("trainer: {learning_rate: 1}", "an entry may not set 'learning_rate'"),
        ("trainer: {model_name: other}", "an entry may not set 'model_name'"),
        ("trainer: {checkpoint_interval: 1}", "an entry may not set 'checkpoint_interval'"),
        ("environment: {eval_seed: 1}", "an entry may not set 'eval_seed'"),
        ("environment: {task_names: [x]}", "environment.task_names"),
        ("engine_flags: {model: other}", "an entry may not set 'model'"),
        ("steps: 0", "settings.steps"),
        ("seed: 3", "settings.seed: unknown setting"),
        ("threads: 3", "settings.threads"),
    ],
)
def test_setting_that_the_rules_fix_is_refused_in_one_line(
    setting: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ENTRY.partition("settings:")[0]
    path = write_entry(tmp_path, f"{base}settings:\n  {setting}\n")

    with pytest.raises(SystemExit) as ended:
        main(["run", str(path)])

    errors = capsys.readouterr().err.strip()
    assert ended.value.code == 2
    assert said in errors
    assert "\n" not in errors


@pytest.mark.parametrize("text", ["- 1", "{", "name: Upper Case"])
def test_file_that_is_no_entry_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        rules.read_entry(write_entry(tmp_path, text))


def test_digest_depends_on_settings_and_not_on_their_spelling(tmp_path: Path) -> None:
    first = rules.read_entry(write_entry(tmp_path))
    respelt = ENTRY.replace("steps: 4", "steps:    4\n  engine: torch").replace("Larger", "Big")
    changed = ENTRY.replace("steps: 4", "steps: 5")

    assert rules.read_entry(write_entry(tmp_path, respelt)).digest == first.digest
    assert rules.read_entry(write_entry(tmp_path, changed)).digest != first.digest


def test_run_has_the_settings_of_the_entry_and_the_task_of_the_rules(tmp_path: Path) -> None:
    entry = rules.read_entry(write_entry(tmp_path))

    settings = rules.demo_settings(entry, seed=2, start_model=tmp_path)

    assert (settings.seed, settings.steps, settings.sequences_per_step) == (2, 4, 8)
    assert settings.environment_sections["env"]["eval_seed"] == rules.HELD_OUT_SEED
    assert settings.trainer_flags == ("--lr=0.001", "--algorithm=dr_grpo",
                                      "--no-gradient-checkpointing")  # fmt: skip


def test_result_of_three_passing_runs_counts(tmp_path: Path) -> None:
    entry = rules.read_entry(write_entry(tmp_path))

    result = result_for(entry)

    assert rules.violations(result, entry) == []
    assert (result.seconds, result.cpu_seconds) == (11.0, 16.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rules": 0}, "version 0 of the rules"),
        ({"entry_sha256": "1" * 64}, "not those of the result"),
        ({"settings": {}}, "do not have its fingerprint"),
        ({"held_out_sha256": "1" * 64}, "held-out problems are not those"),
        ({"start": StartingModel(sha256="0", accuracy=0.7)}, "answers 70.0% right"),
        ({"machine": {"cores": None}}, "not restricted to 2 cores"),
    ],
)
def test_result_that_breaks_a_rule_does_not_count(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    entry = rules.read_entry(write_entry(tmp_path))

    found = rules.violations(result_for(entry, **changes), entry)

    assert any(said in reason for reason in found)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (one_run(1, num_correct=409), "seed 1: 79.9% is below 80%"),
        (one_run(1, held_out_prompts=2), "seed 1: 2 trained groups have a held-out problem"),
        (one_run(1, steps=3, sequences=24), "seed 1: the trainer took 3 batches, expected 4"),
        (one_run(1, sequences=31), "seed 1: the batches do not have the sequences"),
        (one_run(3), "runs of the seeds [0, 2, 3]"),
    ],
)
def test_run_that_breaks_a_rule_does_not_count(run: SeedResult, said: str, tmp_path: Path) -> None:
    entry = rules.read_entry(write_entry(tmp_path))

    found = rules.violations(result_for(entry, one_run(0), run, one_run(2)), entry)

    assert len(found) == 1
    assert said in found[0]


def test_table_is_ordered_by_the_median_and_replaces_the_old_one(tmp_path: Path) -> None:
    entry = rules.read_entry(write_entry(tmp_path))
    slow = result_for(entry, *(run.model_copy(update={"seconds": 33.0}) for run in
                               (one_run(0), one_run(1), one_run(2))))  # fmt: skip

    lines = rules.table([(slow, entry), (result_for(entry), entry)]).splitlines()
    page = f"a\n{rules.TABLE_START}\nold\n{rules.TABLE_END}\nb\n"

    assert lines[2].startswith("| 1 | **11.0** | 16.0 | 3.00x | 82.0%, 82.0%, 82.0% | 4 | `mine` |")
    assert lines[2].endswith("| Larger steps. |")
    assert lines[3].startswith("| 2 | **33.0** |")
    assert "| evaluation | 2.5 | 2.5 |" in rules.phases_table([(slow, entry)] * 2)
    written = rules.with_table(page, "new")
    assert "old" not in written
    assert rules.with_table(written, "new") == written


def test_entry_of_the_page_follows_the_rules(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "speedrun.md").read_text(encoding="utf-8")
    text = page.partition("```yaml\n")[2].partition("```")[0]

    assert rules.read_entry(write_entry(tmp_path, text)).name == "my-entry"


def test_page_shows_the_recorded_results() -> None:
    page = (REPOSITORY / "docs" / "speedrun.md").read_text(encoding="utf-8")
    folder = REPOSITORY / "benchmarks" / "speedrun"
    if not list((folder / "results").glob("*.json")):
        pytest.skip("no result is recorded yet")

    shown = rules.tables(recorded(folder / "results", folder))

    assert rules.with_table(page, shown) == page


def test_verify_reports_a_changed_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_entry(tmp_path)
    result = tmp_path / "result.json"
    result.write_text(result_for(rules.read_entry(path)).model_dump_json(), encoding="utf-8")

    codes = []
    for text in (ENTRY, ENTRY.replace("steps: 4", "steps: 3")):
        with pytest.raises(SystemExit) as ended:
            main(["verify", str(result), "--entry", str(write_entry(tmp_path, text))])
        codes.append(ended.value.code)

    assert codes == [0, 1]
    assert "not those of the result" in capsys.readouterr().err


def test_consumed_held_out_prompt_is_found_in_the_journal(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    from example_trainer.demo.settings import TinyModelShape, require_clone
    from example_trainer.demo.student import make_student, prompt_text
    from example_trainer.demo.task import training_problems
    from example_trainer.speedrun.running import consumption, require_held_out

    require_clone()
    held_out = require_held_out()[:3]
    trained = training_problems(rules.task_settings(), 2)
    shape = TinyModelShape(hidden_size=32, num_layers=1, num_heads=1)
    student = make_student(rules.task_settings(), shape=shape, seed=0, folder=tmp_path / "model")
    paths = DemoPaths(tmp_path / "run")
    journal = paths.checkpoints / "journal"
    journal.mkdir(parents=True)
    for step, problem in enumerate([*trained, held_out[1]], start=1):
        prompt = student.tokenizer.encode(prompt_text(student.tokenizer, problem.messages))
        completion = student.tokenizer.encode("<answer>1</answer>")
        group = {
            "tokens": [[*prompt, *completion]] * 2,
            "masks": [[*[-100] * len(prompt), *completion]] * 2,
        }
        record = {"run_id": "r", "step": step, "batch_id": "1-1", "groups": [group]}
        (journal / f"step_{step}.batch").write_bytes(msgspec.msgpack.encode(record))

    found = consumption(paths, tmp_path / "model", held_out)

    assert (found.steps, found.groups, found.sequences) == (3, 3, 6)
    assert found.held_out_prompts == 1
    assert 0 < found.completion_tokens < found.tokens


@pytest.mark.parametrize(
    "text",
    [
        ENTRY.replace("2026-11-26", "2026-13-45"),
        "a: !!bool q",
        "a: !!timestamp x",
        "steps: 1" + "0" * 5000,
        "[" * 20_000,
        " " * (rules.MAX_FILE_BYTES + 1),
        ENTRY.replace("lr: 1.0e-3", "lr: abc"),
        ENTRY.replace("lr: 1.0e-3", "lr: .nan"),
        ENTRY.replace("lr: 1.0e-3", "lr: -1"),
        ENTRY.replace("lr: 1.0e-3", "weight_decay: .inf"),
    ],
)
def test_absurd_entry_is_refused_in_one_line(tmp_path, text):
    with pytest.raises(ConfigError) as refused:
        rules.read_entry(write_entry(tmp_path, text))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seconds", 1e308),
        ("cpu_seconds", -1),
        ("num_correct", 10**400),
        ("num_problems", -1),
        ("seconds_by_phase", {"start": 1e308}),
    ],
)
def test_result_with_absurd_numbers_is_refused(tmp_path, key, value):
    run = msgspec.json.decode(one_run(0).model_dump_json())
    with pytest.raises(ValueError, match=key):
        SeedResult.model_validate({**run, key: value})


def test_result_of_many_brackets_is_refused(tmp_path):
    (tmp_path / "result.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read"):
        rules.read_result(tmp_path / "result.json")


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("<script>x</script> first. Second.", "&lt;script&gt;x&lt;/script&gt; first."),
        (f"a {rules.TABLE_END} b", "a &lt;!-- end of the speedrun table --&gt; b"),
        ("[x](javascript:y) | c", r"\[x\](javascript:y) \| c"),
        (r"a\| b", r"a\\\| b"),
    ],
)
def test_explanation_is_text_of_one_cell(text, cell):
    assert rules.short_explanation(text) == cell


def test_page_that_cannot_be_written_is_one_line(monkeypatch, capsys):
    def fail(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("example_trainer.speedrun.cli.write_file", fail)

    with pytest.raises(SystemExit) as ended:
        main(["table", "--write"])

    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("\natropos-speedrun: [Errno 28] No space left")


def test_result_that_cannot_be_written_is_printed(tmp_path, capsys):
    result = rules.read_result(
        REPOSITORY / "benchmarks" / "speedrun" / "results" / "demo-settings.json"
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(AtroposError, match="printed above"):
        keep(result, tmp_path / "file" / "result.json")
    assert Result.model_validate_json(capsys.readouterr().out) == result
