"""The page that compares runs: labels, lines and tables worked out by hand, and what is refused."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from atroposlib.utils.writable import write_file
from example_trainer.reporting.comparison import MAX_RUNS, make_labels
from example_trainer.reporting.page import Series, overlay_chart
from example_trainer.reporting.writing import main, settings_path, write_settings
from tests.trainer.reporting.test_report import EVIL, Tags, record


def write_run(folder: Path, *records: Mapping[str, Any], **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(one)}\n" for one in records))
    write_settings(metrics, settings, {})
    return folder


def compare(*words: object) -> str:
    main([str(word) for word in words])
    return Path("comparison.html").read_text()


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as ending:
        main([str(word) for word in words])
    said = capsys.readouterr().err
    assert ending.value.code == 2
    assert said.count("\n") == 1
    return said


def cells_of(page: str, row: str) -> list[str]:
    found = re.search(f'<tr><th scope="row">{re.escape(row)}</th>(.*?)</tr>', page)
    assert found, row
    return re.findall("<td>(.*?)</td>", found[1])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["/a/x", "/a/y"], ["x", "y"]),
        (["/a/x/run", "/a/y/run", "/a/z"], ["x/run", "y/run", "z"]),
        (["/run", "/a/run"], ["/run", "a/run"]),
        (["/a/b", "/a/b/c"], ["b", "c"]),
    ],
)
def test_labels_have_the_parents_that_tell_them_apart(paths: list[str], labels: list[str]) -> None:
    assert make_labels([Path(path) for path in paths]) == labels


def test_page_shows_each_run_in_its_color_with_its_own_length_and_metrics(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rewards = [0.1, 0.2, 0.6, 0.5]
    long = write_run(
        Path("long"),
        *(record(i, **{"train/reward_mean": r}) for i, r in enumerate(rewards, start=1)),
    )
    short = write_run(
        Path("short"),
        *(record(i, **{"train/reward_mean": 0.3, "train/mfu": 0.5}) for i in (1, 2)),
    )

    page = compare(long, short)

    assert capsys.readouterr().out == "comparison.html: 2 runs, the longest of 4 steps\n"
    Tags(page)
    lines = dict(re.findall("<figcaption><b>(.*?)</b>.*?<svg.*?</g?svg>(.*?)</figure>", page))
    assert 'class="c0"></i>long (0.5)' in lines["Reward of the trained batches: mean"]
    assert 'class="c1"></i>short (0.3)' in lines["Reward of the trained batches: mean"]
    assert lines["Use of the device"].count("<i ") == 1
    assert 'class="c1"></i>short (0.5)' in lines["Use of the device"]
    assert cells_of(page, "reward") == ["0.1 → 0.5<small>best 0.6 at 3</small>", "0.3 → 0.3"]
    assert cells_of(page, "loss") == ["1 → 0.25", "1 → 0.5"]


def test_settings_that_differ_are_shown_and_places_are_folded() -> None:
    one = write_run(Path("one"), record(1), lr=1e-6, seed=1, save_path="one", only={"a": EVIL})
    two = write_run(Path("two"), record(1), lr=3e-6, seed=1, save_path="two")

    page = compare(one, two)

    assert "1 of 4 settings are equal" in page
    assert cells_of(page, "lr") == ["1e-06", "3e-06"]
    assert cells_of(page, "only")[1] == "not set"
    main_table, details = page.split("<details>")
    assert "save_path" not in main_table
    assert cells_of(details, "save_path") == ["one", "two"]
    assert 'scope="row">seed<' not in page
    assert "script" not in Tags(page).names


def test_run_without_settings_is_named_and_names_are_escaped() -> None:
    evil = write_run(Path("<script>&"), record(1), lr=1.0)
    plain = write_run(Path("plain"), record(1), lr=1.0)
    settings_path(plain / "metrics.jsonl").unlink()

    page = compare(evil, plain)

    assert "Settings were not found next to the metrics of: plain." in page
    assert "script" not in Tags(page).names
    assert "&lt;script&gt;&amp;" in page


def test_lines_of_different_length_are_averaged_over_the_same_steps() -> None:
    def chart(*lengths: int) -> list[list[str]]:
        runs = {i: Series("", range(n), range(n)) for i, n in enumerate(lengths)}
        drawn = overlay_chart("", runs, x_range=(0, 999))
        return [
            re.findall(f'"line c{i}" points="([^"]*)"', drawn)[0].split() for i in range(len(runs))
        ]

    short, long = chart(96, 960)

    assert long[: len(short)] == short


@pytest.mark.parametrize("again", ["run", "./run/", "run/metrics.jsonl", "link"])
def test_a_run_given_twice_is_refused(capsys: pytest.CaptureFixture[str], again: str) -> None:
    run = write_run(Path("run"), record(1))
    Path("link").symlink_to("run")

    assert "the same run is given twice" in refused(capsys, run, again)
    assert not Path("comparison.html").exists()


def test_unusable_arguments_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(Path(f"run{i}"), record(1)) for i in range(MAX_RUNS + 1)]
    empty = write_run(Path("empty"))

    assert f"7 runs; expected at most {MAX_RUNS}" in refused(capsys, *runs)
    assert "empty/metrics.jsonl: no metrics of a trainer" in refused(capsys, runs[0], empty)
    assert "none: cannot be read (No such file" in refused(capsys, runs[0], "none")
    assert "--groups belongs to the report of one run" in refused(
        capsys, *runs[:2], "--groups", "g.jsonl"
    )
    assert not Path("comparison.html").exists()


def test_only_a_page_of_several_runs_is_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (write_run(Path(name), record(1)) for name in ("one", "two"))
    main([str(one)])
    report = one / "report.html"
    before = report.read_text()

    assert "exists and is not a comparison" in refused(capsys, one, two, "--output", report)
    assert report.read_text() == before
    compare(one, two)
    assert "two" in compare(two, one)


def test_report_of_one_run_does_not_replace_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (write_run(Path(name), record(1)) for name in ("one", "two"))
    metrics = two / "metrics.jsonl"
    before = metrics.read_text()

    assert "exists and is not a page" in refused(capsys, one, "--output", metrics)
    assert metrics.read_text() == before
    main([str(one)])
    main([str(one)])


def test_page_does_not_replace_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (write_run(Path(name), record(1)) for name in ("one", "two"))
    device = Path("device")  # such as /dev/null, which a root user can replace
    os.mkfifo(device)

    for runs in ([one], [one, two]):
        assert "device is not a regular file" in refused(capsys, *runs, "--output", device)
    with pytest.raises(OSError, match="not a regular file"):
        write_file(device, b"page")

    assert device.is_fifo()


def test_environments_in_the_folders_give_accuracy_settings_and_held_out_results() -> None:
    accuracies = {"one": [0.25, 0.75], "two": [0.5]}
    for run, values in accuracies.items():
        write_run(Path(run), record(1), record(2), training_steps=2)
        environment = Path(run) / "environments" / "sums"
        environment.mkdir(parents=True)
        (environment / "environment_metrics.jsonl").write_text(
            "".join(
                f'{{"step": {i}, "sums_0_train/percent_correct": {value}, "x_train/reward/a": 1}}\n'
                for i, value in enumerate(values, start=1)
            )
        )
        (environment / "environment_metrics.settings.yaml").write_text(
            f"env:\n  group_size: {len(values)}\n  seed: 0\n  only_{run}: 1\n"
        )
    after = {"sums": {"eval/accuracy": 0.5, "eval/accuracy_ci_low": 0.25}}
    summary = {"steps": 2, "environments": ["sums"], "evaluations_after": after}
    Path("one/summary.json").write_text(json.dumps(summary))

    page = compare("one", "two")

    assert page.index("<b>Accuracy</b>") < page.index("First, last and best values</h2>")
    assert "<b>Part of the reward: a</b>" in page
    assert cells_of(page, "accuracy") == ["0.25 → 0.75<small>best 0.75 at 2</small>", "0.5"]
    assert cells_of(page, "held-out sums: eval/accuracy") == ["0.5", "not measured"]
    assert cells_of(page, "env.group_size") == ["2", "1"]
    assert "only_" not in page
