"""Every console command: help that answers at once, and mistakes refused in one line."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from atroposlib.api.trainers.conformance import Checklist
from atroposlib.cli.trainer_check import CheckSettings
from atroposlib.utils.command_parser import CommandParser

REPOSITORY = Path(__file__).parents[2]
MISSPELT = {  # a flag of each command with a letter missing, and the flag
    "run-api": ("--prt", "--port"),
    "view-run": ("--tokenzer", "--tokenizer"),
    "view-run-multimodal": ("--tokenzer", "--tokenizer"),
    "atropos-new-env": ("--kidn", "--kind"),
    "atropos-sft-gen": ("--tokenzer", "--tokenizer"),
    "atropos-dpo-gen": ("--tokenzer", "--tokenizer"),
    "atropos-replay": ("--data-dri", "--data-dir"),
    "atropos-compare": ("--metrc", "--metric"),
    "atropos-serve-env": ("--prt", "--port"),
    "atropos-tasks": ("--workspcaes", "--workspaces"),
    "atropos-trainer-check": ("--comand", "--command"),
    "inference-node-wandb-watcher": ("--api_adr", "--api_addr"),
    "atropos-grpo": ("--modle", "--model"),
    "atropos-grpo-run": ("--modle", "--model"),
    "atropos-demo": ("--stpes", "--steps"),
    "atropos-train": ("--stpes", "--steps"),
    "atropos-speedrun": ("--ouptut", "--output"),
    "atropos-up": ("--dtach", "--detach"),
    "atropos-report": ("--outptu", "--output"),
    "atropos-weights": ("--enigne-url", "--engine-url"),
}


def console_scripts() -> dict[str, str]:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    section = text.split("[project.scripts]\n")[1].split("\n[")[0]
    return dict(re.findall(r'^([\w-]+) = "([\w.:]+)"$', section, re.MULTILINE))


SCRIPTS = console_scripts()


def call(script: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    module, function = SCRIPTS[script].split(":")
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit) as ended:
        getattr(importlib.import_module(module), function)()
    return ended.value.code


@pytest.mark.parametrize("script", MISSPELT)
def test_misspelt_flag_is_one_line_with_the_near_name(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    misspelt, flag = MISSPELT[script]
    subcommands = {"atropos-replay": ["diff", "a", "b"], "atropos-speedrun": ["run"]}
    words = subcommands.get(script, [])

    code = call(script, [*words, misspelt, "x"], monkeypatch)

    errors = capsys.readouterr().err
    assert code == 2
    assert errors.count("\n") == 1
    assert f"unrecognized argument {misspelt}; did you mean {flag}?" in errors


@pytest.mark.parametrize("script", SCRIPTS)
def test_unknown_flag_is_refused_with_2(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = call(script, ["--no-command-has-this"], monkeypatch)

    errors = capsys.readouterr().err
    assert code == 2
    assert errors.count("\n") == 1
    assert "--no-command-has-this" in errors


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("run-api", ["--store", "sqllite"], "argument --store: "),
        ("run-api", ["--port", "x"], "argument --port: "),
        ("atropos-sft-gen", ["out", "--format", "tokns"], "did you mean tokens?"),
        ("atropos-sft-gen", ["out", "--file", "none.jsonl"], "none.jsonl"),
        ("atropos-sft-gen", ["out", "--group-size", "0"], "expected an integer from 1"),
        ("atropos-dpo-gen", ["out", "--run", "none"], "there is no run none"),
        ("atropos-replay", ["scoer"], "did you mean score?"),
        ("atropos-replay", ["diff", "none.jsonl", "none.jsonl"], "none.jsonl"),
        ("atropos-new-env", ["x", "--kind", "gaem"], "did you mean game?"),
        ("atropos-report", ["none.jsonl"], "none.jsonl"),
        ("atropos-demo", ["--steps", "0"], "argument --steps: "),
        ("atropos-demo", ["--steps", "x"], "argument --steps: "),
        ("atropos-grpo", ["--model", "m", "--algorithm", "grpoo"], "did you mean grpo?"),
        ("atropos-grpo", ["--model", "m", "--lr", "-1"], "--lr: "),
        ("view-run", ["--file", "none.jsonl"], "none.jsonl"),
        ("atropos-weights", ["publish", "none", "store", "--version", "1"], "none is not a folder"),
        ("atropos-weights", ["publish", "none", "store", "--version", "x"], "--version: "),
        ("atropos-up", ["none.yaml"], "none.yaml: cannot be read"),
        ("atropos-up", ["none.yaml", "--on", "slrum"], "did you mean slurm?"),
        ("atropos-up", ["status", "none.yaml", "--lines", "0"], "--lines: "),
        ("atropos-weights", ["list", "nosuch://x"], "nosuch://x cannot be opened"),
    ],
)
def test_bad_value_or_missing_file_is_one_line(
    script: str,
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)

    code = call(script, words, monkeypatch)

    errors = capsys.readouterr().err + (f"{code}\n" if isinstance(code, str) else "")
    assert code not in (0, None)
    assert said in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_answers(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(script, ["--help"], monkeypatch) in (0, None)
    assert capsys.readouterr().out.startswith(f"usage: {script}")


def test_short_help_shows_what_is_needed_and_often_needed() -> None:
    parser = CommandParser(prog="tool", often=("lr",))
    parser.add_argument("--model", required=True)
    parser.add_argument("--lr")
    parser.add_argument("--rare")

    text = parser.short_help()

    assert text.startswith("usage: tool --model MODEL [--flag value ...]\n")
    assert text.index("needed:\n  --model") < text.index("often needed:")
    assert "--lr" in text.split("often needed:")[1]
    assert "--rare" not in text
    assert "All others, 1 of them: tool --help all" in text
    assert "--rare" in parser.format_help()


@pytest.mark.parametrize(
    "words", [["table"], ["verify", "benchmarks/speedrun/results/forty-steps.json"]]
)
def test_results_of_speedruns_may_be_read_in_part(
    words: list[str], monkeypatch: pytest.MonkeyPatch, leave_reader: Callable[[], None]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    leave_reader()

    assert call("atropos-speedrun", words, monkeypatch) == 0


def test_result_of_a_trainer_check_may_be_read_in_part(
    monkeypatch: pytest.MonkeyPatch, leave_reader: Callable[[], None]
) -> None:
    async def check(_: CheckSettings) -> tuple[Checklist, list[str]]:
        return Checklist(), []

    monkeypatch.setattr("atroposlib.cli.trainer_check.check", check)
    leave_reader()

    assert call("atropos-trainer-check", ["http://127.0.0.1:1"], monkeypatch) == 0
