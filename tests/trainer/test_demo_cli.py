"""The door of the demo: flags, refusals, exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from example_trainer.demo import cli
from example_trainer.demo import settings as repository
from example_trainer.demo.cli import main


def run_main(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return int(stop.value.code or 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--sed", "1"),
        ("--seed", "-1"),
        ("--steps", "0"),
        ("--steps", "x"),
        ("--profile", "huge"),
        ("--lr", "-1"),
        ("--lr", "nan"),
        ("--lr", "inf"),
        ("--max-tokens", "257"),
    ],
)
def test_main_wrong_flag_exits_with_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(*arguments) == 2
    assert arguments[0] in capsys.readouterr().err


def test_main_output_folder_in_use_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious.txt").write_text("mine")

    assert run_main("--output", str(tmp_path)) == 2

    assert "is not empty; choose another folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_main_full_disk_is_one_line_that_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill_disk(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", fill_disk)

    code = run_main("--profile", "quick", "--engine", "torch", "--output", str(tmp_path / "run"))

    assert code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("atropos-demo: [Errno 28] No space left on device: ")
    assert str(tmp_path / "run") in lines[-1]


def test_main_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_ENVIRONMENT_PACKAGES", {"examples": ("no_such_package",)})

    assert run_main() == 2

    assert "pip install '.[examples]'" in capsys.readouterr().err


def test_main_outside_a_clone_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(repository, "REPOSITORY", tmp_path)

    assert run_main("--output", str(tmp_path / "out")) == 2

    assert "clone the repository" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_main_model_that_is_not_there_is_said_in_a_line_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no-model").mkdir()
    output = tmp_path / "out"

    for model in (tmp_path / "none", tmp_path / "no-model"):
        assert run_main("--model", str(model), "--output", str(output)) == 2

        shown = capsys.readouterr()
        assert shown.out == ""
        assert f"atropos-demo: model '{model}' cannot be loaded: " in shown.err
        assert len(shown.err.strip().splitlines()) == 1
        assert not output.exists()


def test_main_signal_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)

    run_main("--help")

    assert signal.getsignal(signal.SIGTERM) is before


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from example_trainer.demo.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'vllm', 'transformers', 'matplotlib') if m in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )

    assert "--model" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
