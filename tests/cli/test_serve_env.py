"""`atropos-serve-env`: how environments are found, what is refused, and how a server stops."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from atroposlib.cli.serve_env import find_environment, main
from atroposlib.errors import ConfigError
from tests.serving.served import OWN

pytestmark = pytest.mark.slow

GUESSING = "environments/number_guessing.py"

TWO = """
from tests.serving.own_environments import EchoEnv, QuestionEnv

class First(EchoEnv):
    pass

class Second(QuestionEnv):
    pass
"""


def refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> str:
    """Run the command, which must refuse its words with one line, and return that line."""
    monkeypatch.setattr(sys, "argv", ["atropos-serve-env", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (GUESSING, "NumberGuessingEnv"),
        ("environments/gsm8k_server_axolotl.py", "GSM8kEnv"),
        (f"{OWN}:EchoEnv", "EchoEnv"),
        (f"{GUESSING}:NumberGuessingEnv", "NumberGuessingEnv"),
    ],
)
def test_environment_is_found(target: str, name: str) -> None:
    assert find_environment(target).__name__ == name


def test_adapter_is_found() -> None:
    pytest.importorskip("gymnasium", reason="the extra gymnasium is not installed")

    assert find_environment("gymnasium:FrozenLake-v1").name == "gymnasium_FrozenLake-v1"


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("missing.py", "there is no file missing.py"),
        ("number_guessing", "expected the path of a script, module:Class, or KIND:NAME"),
        ("gymnasum:FrozenLake-v1", "did you mean gymnasium"),
        (f"{OWN}:EcoEnv", "has no class 'EcoEnv'; did you mean EchoEnv"),
        ("environments/card_table.py", "holds no complete environment"),
    ],
)
def test_environment_that_does_not_exist_is_refused(target: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        find_environment(target)


def test_script_with_several_environments_asks_for_one(tmp_path: Path) -> None:
    script = tmp_path / "two_environments.py"
    script.write_text(TWO)

    with pytest.raises(ConfigError, match=r"two_environments\.py:First, .*:Second"):
        find_environment(str(script))

    assert find_environment(f"{script}:Second").__name__ == "Second"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([GUESSING], "--as"),
        ([GUESSING, "--as", "opnenv"], "did you mean openenv"),
        ([GUESSING, "--as", "verifiers", "--port", "65536"], "from 0 to 65535"),
        ([GUESSING, "--as", "verifiers", "--max-sessions", "0"], "--max-sessions: "),
        ([GUESSING, "--as", "verifiers", "--env.highst", "5"], "did you mean --env.highest?"),
        ([GUESSING, "--as", "verifiers", "--env.highest", "1"], "highest"),
        ([GUESSING, "--as", "verifiers", "--args", "a=1"], "is not one"),
        ([f"{OWN}:CollectingEnv", "--as", "verifiers"], "CollectingEnv cannot be served"),
    ],
)
def test_wrong_words_are_refused_before_anything_starts(
    words: list[str],
    reason: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert reason in refused(capsys, monkeypatch, *words)


@pytest.mark.parametrize(("protocol", "package"), [("openenv", "openenv"), ("ors", "openreward")])
def test_missing_package_is_named_with_its_extra(
    protocol: str,
    package: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")

    line = refused(capsys, monkeypatch, GUESSING, "--as", protocol)

    assert f"{package} is not installed" in line
    assert f"'.[{protocol}]'" in line


def test_package_is_only_for_verifiers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = [GUESSING, "--as", "openenv", "--package", str(tmp_path)]

    assert "only --as verifiers" in refused(capsys, monkeypatch, *words)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_closes_open_episodes_and_ends_the_server(
    signum: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "atroposlib.cli.serve_env", GUESSING, "--as", "verifiers"]
    command += ["--port", "0", "--package", str(tmp_path / "package"), "--env.highest", "7"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().split(" (")[0].split()[-1]
            with httpx.stream("POST", f"{url}/v1/episodes", json={}, timeout=60) as held:
                lines = held.iter_lines()
                opening = next(lines)
                server.send_signal(signum)
                rest = list(lines)
            output = server.stdout.read()
            code = server.wait(timeout=60)
        finally:
            server.kill()

    assert "from 1 to 7" in opening
    assert rest == []
    assert code == 128 + signum
    assert "pip install" in output
    assert output.endswith("stopped; all episodes are closed\n")
    assert (tmp_path / "package" / "atropos_number_guessing.py").exists()
