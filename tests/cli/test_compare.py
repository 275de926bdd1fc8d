"""`atropos-compare`: differences on common items, and results that cannot be compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atroposlib.cli import compare
from atroposlib.envs.eval import evaluate_log


def write_run(
    folder: Path,
    scores: dict[str, list[float]],
    *,
    task: str = "sums",
    model: str = "m",
    named: bool = True,
    **sampling: Any,
) -> str:
    """Write the result of an evaluation with one or more scores per item; return its folder."""
    rows = [(item, i, score) for item, row in scores.items() for i, score in enumerate(row)]
    chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": "reply"}]
    samples = [
        {
            "messages": [{"role": "user", "content": item}, *chat[1:]],
            "score": score,
            **({"item_id": item, "sample_index": i} if named else {}),
            **({"metric_values": {"eval/mean_score": score}} if named else {}),
        }
        for item, i, score in rows
    ]
    mean = sum(score for *_, score in rows) / len(rows)
    metrics = {"eval/mean_score": mean, "eval/mean_score_ci_low": 0.0, "methods": {"tag": 1}}
    evaluate_log(
        metrics,
        eval_dir=folder,
        task_name=task,
        model_name=model,
        generation_parameters=sampling,
        samples=samples,
        verbose=False,
    )
    return str(folder)


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["atropos-compare", *words])
    compare.main()


def refusal(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    with pytest.raises(SystemExit) as ended:
        run(words, monkeypatch)
    errors = capsys.readouterr().err
    assert ended.value.code == 2
    assert errors.count("\n") == 1
    return errors


OLD = {f"item {i}": [float(i % 2)] for i in range(20)}
NEW = {name: [1.0] for name in OLD}


def test_json_has_metrics_and_paired_differences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = write_run(tmp_path / "old", OLD), write_run(tmp_path / "new", NEW, model="better")

    run([old, new, "--json"], monkeypatch)

    found = json.loads(capsys.readouterr().out)
    assert (found["task"], found["baseline"]) == ("sums", old)
    assert [(each["model"], each["num_items"]) for each in found["runs"]] == [
        ("m", 20),
        ("better", 20),
    ]
    [comparison] = found["comparisons"]
    [(name, difference)] = comparison["metrics"].items()
    assert (name, comparison["num_common_items"]) == ("eval/mean_score", 20)
    assert (difference["difference"], difference["test"]) == (0.5, "mcnemar")
    assert difference["p_value"] == pytest.approx(2 / 2**10)  # ten gained, none lost
    assert difference["ci_low"] < 0.5 < difference["ci_high"]


def test_text_shows_every_run_against_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write_run(tmp_path / "old", OLD, temperature=0.0)
    new = write_run(tmp_path / "new", NEW, temperature=0.6)

    run([old, new, old], monkeypatch)

    text = capsys.readouterr().out
    assert "eval/mean_score  0.5000    1.0000  +0.5000" in text
    assert "eval/mean_score  0.5000    0.5000  +0.0000" in text
    assert "temperature differs: 0.0 in the baseline, 0.6 in this run" in text
    assert "ci_low" not in text
    assert "methods" not in text


def test_differences_are_over_the_common_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write_run(tmp_path / "old", {"a": [1.0], "b": [0.0], "c": [0.0]})
    new = write_run(tmp_path / "new", {"b": [1.0], "c": [0.0], "d": [0.0]})

    run([old, new], monkeypatch)

    text = capsys.readouterr().out
    assert "over the 2 common items" in text
    assert "0.3333    0.3333  +0.5000" in text


def test_several_samples_are_compared_by_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write_run(tmp_path / "old", {"a": [1.0, 0.0], "b": [0.0, 0.0]})
    new = write_run(tmp_path / "new", {"a": [1.0, 1.0], "b": [0.0, 1.0]})

    run([old, new, "--json"], monkeypatch)

    [comparison] = json.loads(capsys.readouterr().out)["comparisons"]
    difference = comparison["metrics"]["eval/mean_score"]
    assert (difference["difference"], difference["num_items"]) == (0.5, 2)
    assert difference["test"] == "randomization"
    assert difference["p_value"] == pytest.approx(0.5, abs=0.02)  # 2 of 4 sign patterns


def test_samples_without_ids_are_matched_by_their_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write_run(tmp_path / "old", OLD, named=False)
    new = write_run(tmp_path / "new", NEW, named=False)

    run([old, new, "--json", "--metric", "score"], monkeypatch)

    [comparison] = json.loads(capsys.readouterr().out)["comparisons"]
    assert comparison["num_common_items"] == 20
    assert comparison["metrics"]["score"]["difference"] == 0.5


def test_results_without_samples_have_differences_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = write_run(tmp_path / "old", OLD), write_run(tmp_path / "new", NEW)
    (tmp_path / "new" / "samples.jsonl").unlink()

    run([old, new], monkeypatch)

    text = capsys.readouterr().out
    assert "samples.jsonl is missing" in text
    assert "+0.5000" in text


def test_earlier_result_is_named_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", OLD)
    latest = write_run(tmp_path / "run", NEW)

    run([str(tmp_path / "run" / "metrics-1.json"), latest, "--json"], monkeypatch)

    found = json.loads(capsys.readouterr().out)
    assert [each["metrics"]["eval/mean_score"] for each in found["runs"]] == [0.5, 1.0]
    assert found["comparisons"][0]["metrics"]["eval/mean_score"]["difference"] == 0.5


def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_a = write_run(tmp_path / "a", OLD)
    other_task = write_run(tmp_path / "b", OLD, task="products")
    other_items = write_run(tmp_path / "c", {"elsewhere": [1.0]})
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    for folder in (empty, broken):
        folder.mkdir()
    (empty / "progress.jsonl").write_text("{}\n")
    (broken / "metrics.json").write_text('{"results": 1}')

    def said(*words: str) -> str:
        return refusal([run_a, *words], monkeypatch, capsys)

    assert "two or more" in refusal([run_a], monkeypatch, capsys)
    assert "is an evaluation of sums" in said(other_task)
    assert "no item in common (20 and 1 items)" in said(other_items)
    assert "unfinished evaluation" in said(str(empty))
    assert "no result of an evaluation" in said(str(tmp_path / "missing"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trainer_metrics.jsonl").touch()
    assert "are compared by atropos-report RUN RUN" in said(str(tmp_path / "run"))
    before = write_run(tmp_path / "trained" / "environments" / "sums" / "evaluation_before", OLD)
    assert f"these folders of it have one: {before}" in said(str(tmp_path / "trained"))
    assert "metrics.json is not the result of an evaluation" in said(str(broken))
    assert "did you mean eval/mean_score?" in said(run_a, "--metric", "eval/mean_scor")


def test_broken_line_of_samples_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = write_run(tmp_path / "old", OLD), write_run(tmp_path / "new", NEW)
    (tmp_path / "new" / "samples.jsonl").write_text("{}\nnot JSON\n")

    assert "samples.jsonl: line 2 is not JSON" in refusal([old, new], monkeypatch, capsys)


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ("[" * 100_000, "RecursionError"),
        ('{"config_general": 1, "results": {"all": {}, "atropos|x|0": {}}}', "not an object"),
        ('{"config_general": {}, "results": {"all": [1], "atropos|x|0": {}}}', "not an object"),
        (
            '{"config_general": {"generation_parameters": [1]}, '
            '"results": {"all": {}, "atropos|x|0": {}}}',
            "not an object",
        ),
    ],
)
def test_metrics_of_another_form_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    metrics: str,
    reason: str,
) -> None:
    old, new = write_run(tmp_path / "old", OLD), write_run(tmp_path / "new", NEW)
    (tmp_path / "new" / "metrics.json").write_text(metrics)

    assert reason in refusal([old, new], monkeypatch, capsys)


def test_metric_values_of_another_form_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = write_run(tmp_path / "old", OLD), write_run(tmp_path / "new", NEW)
    (tmp_path / "new" / "samples.jsonl").write_text('{"item_id": "a", "metric_values": [1]}\n')

    assert "metric_values is not an object" in refusal([old, new], monkeypatch, capsys)


def test_values_that_are_not_finite_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = write_run(tmp_path / "old", OLD), write_run(tmp_path / "new", NEW)
    path = tmp_path / "new" / "metrics.json"
    report = json.loads(path.read_text())
    report["results"]["all"] |= {"eval/huge": 10**400, "eval/nan": float("nan")}
    path.write_text(json.dumps(report))

    run([old, new], monkeypatch)

    shown = capsys.readouterr().out
    assert "eval/mean_score" in shown
    assert "eval/huge" not in shown
    assert "eval/nan" not in shown


def test_numbers_whose_differences_are_not_finite_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = 1.7e308
    old = write_run(tmp_path / "old", {name: [-1.0] for name in OLD})
    new = write_run(tmp_path / "new", NEW)
    for folder, value in ((old, -huge), (new, huge)):
        path = Path(folder) / "metrics.json"
        report = json.loads(path.read_text())
        report["results"]["all"] |= {"eval/huge": value}
        path.write_text(json.dumps(report))
        samples = Path(folder) / "samples.jsonl"
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        for line in lines:
            line["metric_values"]["eval/huge"] = value
        samples.write_text("".join(json.dumps(line) + "\n" for line in lines))

    run([old, new, "--json"], monkeypatch)

    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert list(found["comparisons"][0]["metrics"]) == ["eval/mean_score"]


def test_names_with_escape_codes_are_shown_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write_run(tmp_path / "old", OLD)
    new = write_run(tmp_path / "new", NEW, model="\x1b]0;title\x07m\x1b[2J")

    run([old, new], monkeypatch)

    assert "\x1b" not in capsys.readouterr().out


def test_blank_lines_byte_order_marks_and_records_of_another_form_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = write_run(tmp_path / "old", OLD), write_run(tmp_path / "new", NEW)
    samples, metrics = tmp_path / "new" / "samples.jsonl", tmp_path / "new" / "metrics.json"
    samples.write_text(f'\ufeff{samples.read_text()}\n{{"messages": 5}}\n \n', encoding="utf-8")
    metrics.write_text(f"\ufeff{metrics.read_text()}", encoding="utf-8")

    run([old, new, "--json"], monkeypatch)

    [comparison] = json.loads(capsys.readouterr().out)["comparisons"]
    assert comparison["num_common_items"] == len(OLD)


def test_unreadable_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = write_run(tmp_path / "old", OLD), write_run(tmp_path / "new", NEW)
    samples = tmp_path / "new" / "samples.jsonl"
    opened = Path.open

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path == samples:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)

    assert f"Permission denied: '{samples}'" in refusal([old, new], monkeypatch, capsys)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
def test_full_disk_behind_standard_output_is_one_line(tmp_path: Path) -> None:
    old, new = write_run(tmp_path / "old", OLD), write_run(tmp_path / "new", NEW)

    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "atroposlib.cli.compare", old, new],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert (ended.returncode, ended.stderr) == (
        1,
        "atropos-compare: [Errno 28] No space left on device\n",
    )


def test_closed_standard_output_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = write_run(tmp_path / "old", OLD), write_run(tmp_path / "new", NEW)
    monkeypatch.setattr(sys, "stdout", None)

    run([old, new], monkeypatch)
