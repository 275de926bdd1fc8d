"""Secrets in run files: refused as values, and unseen by every output as references."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from atroposlib.errors import ConfigError
from example_trainer.cluster import cli
from example_trainer.cluster.kubernetes import KubernetesRun
from example_trainer.cluster.local import LocalRun, SupervisorRecord
from example_trainer.cluster.parts import TOKEN_VARIABLE
from example_trainer.cluster.placement import PartStatus, RunStatus
from example_trainer.cluster.ray_cluster import RayRun
from example_trainer.cluster.run_file import read_run_file
from example_trainer.cluster.run_secrets import hide_values
from example_trainer.cluster.slurm import SlurmRun
from tests.cluster.scripted_run import ROOT

VALUE = "Tr0ub4dor-and-3"
KEY = "sk-" + "a1B2" * 8
PRIVATE = "-----BEGIN OPENSSH PRIVATE KEY-----"  # pragma: allowlist secret


def written(folder: Path, **sections: Any) -> Path:
    content = {
        "name": "run",
        "engines": [{"kind": "torch"}],
        "environments": [{"program": "env.py"}],
        "trainer": {"model": "m", "steps": 1},
        "kubernetes": {"image": "i", "token_secret": "keys"},  # pragma: allowlist secret
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**content, **sections}))
    return file


def environment(**changes: Any) -> dict[str, Any]:
    return {"environments": [{"program": "env.py", **changes}]}


def trainer(**changes: Any) -> dict[str, Any]:
    return {"trainer": {"model": "m", "steps": 1, **changes}}


@pytest.mark.parametrize(
    ("sections", "place"),
    [
        (environment(settings={"openai": {"api_key": VALUE}}), "settings.openai.api_key"),
        (environment(settings={"openai": [{"api_key": VALUE}]}), "settings.openai[0].api_key"),
        (environment(settings={"env": {"credentials": {"user": [VALUE]}}}), "user[0]"),
        (environment(settings={"env": {"judge": {"hf_token": 123456789}}}), "judge.hf_token"),
        (environment(settings={"env": {"header": f"Bearer {VALUE}"}}), "env.header"),
        (environment(settings={"env": {"db": f"pg://me:{VALUE}@host/x"}}), "env.db"),
        (environment(settings={"env": {"url": f"http://h/?api_key={VALUE}"}}), "env.url"),
        (environment(settings={"env": {"notes": ["a", {"b": f"key {KEY}"}]}}), "notes[1].b"),
        (environment(settings={"env": {"file": f"{PRIVATE}\nabc"}}), "env.file"),
        (environment(flags={"openai.api_key": VALUE}), "flags.openai.api_key"),
        (environment(flags={"env.args": [f"OPENAI_API_KEY={VALUE}"]}), "flags.env.args[0]"),
        (environment(variables={"JUDGE_KEY": VALUE}), "variables.JUDGE_KEY"),
        (trainer(flags={"api-key": VALUE}), "trainer.flags.api-key"),
        (trainer(flags={"loss-fn-args": {"api_key": VALUE}}), "trainer.flags.loss-fn-args.api_key"),
        (trainer(variables={"WANDB_API_KEY": VALUE}), "trainer.variables.WANDB_API_KEY"),
        ({"engines": [{"flags": {"api-key": VALUE}}]}, "engines[0].flags.api-key"),
        ({"engines": [{"kind": "url", "urls": [f"http://u:{VALUE}@h"]}]}, "engines[0].urls[0]"),
        ({"variables": {"HF_TOKEN": [VALUE]}}, "variables.HF_TOKEN[0]"),
        ({"variables": {"OTHER": KEY}}, "variables.OTHER"),
        ({"variables": {"OPENAI_API_KEY_2": VALUE}}, "variables.OPENAI_API_KEY_2"),
        ({"variables": {"DB_PWD": VALUE}}, "variables.DB_PWD"),
        ({"variables": {"B": "${B:-x}"}}, "variables.B"),
        ({"variables": {"B": "pre-${B}"}}, "variables.B"),
        (environment(settings={"env": {"authToken": VALUE}}), "env.authToken"),
        (environment(settings={"env": {"api_keys": [VALUE]}}), "env.api_keys[0]"),
        ({"service": {"flags": {"password": VALUE}}}, "service.flags.password"),
        ({"slurm": {"setup": f"export WANDB_API_KEY={VALUE}\n"}}, "slurm.setup"),
        ({"slurm": {"options": [f"--export=DB_PASSWORD={VALUE}"]}}, "slurm.options[0]"),
        ({"kubernetes": {"image": "i", "password": VALUE}}, "kubernetes.password"),
        ({"api_key": VALUE}, "api_key"),
        # References where the value would be seen.
        (environment(flags={"openai.api_key": "${KEY}"}), "flags.openai.api_key"),
        (environment(settings={"env": {"note": "${KEY}"}}), "settings.env.note"),
        (trainer(flags={"run-name": "${KEY}"}), "trainer.flags.run-name"),
        ({"slurm": {"account": "${KEY}"}}, "slurm.account"),
    ],
)
def test_secret_is_refused_by_its_place_and_not_printed(
    tmp_path: Path, sections: dict[str, Any], place: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        read_run_file(written(tmp_path, **sections))

    message = str(refused.value)
    assert f"{place}: " in message
    assert "${NAME}" in message or "${KEY}" in message
    assert VALUE not in message
    assert KEY not in message


@pytest.mark.parametrize(
    "text",
    [
        f'environments: [{{settings: {{openai: {{api_key: "{VALUE}}}}}',
        f"a: b: {VALUE}",
        f"api_key: [{VALUE}",
    ],
)
def test_broken_file_is_named_without_its_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)

    with pytest.raises(ConfigError, match=r"expected YAML in line \d+, column \d+: ") as refused:
        read_run_file(tmp_path / "run.yaml")

    assert VALUE not in str(refused.value)


BOMB = "a0: &a0 []\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize("text", [BOMB, "a: &a [*a]", "a: " + "[" * 60 + "]" * 60, "[" * 2000])
def test_file_that_is_deep_or_multiplies_itself_is_refused_soon(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)

    with pytest.raises(ConfigError, match=r"levels of keys and lists|an alias refers to itself"):
        read_run_file(tmp_path / "run.yaml")


def test_token_in_place_of_its_name_is_not_printed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"service.tokens.trainer: .* got \*\*\*") as refused:
        read_run_file(written(tmp_path, service={"tokens": {"trainer": VALUE}}))

    assert VALUE not in str(refused.value)


def test_usual_settings_are_accepted(tmp_path: Path) -> None:
    settings = {
        "env": {"stop_token": "<|im_end|>", "max_token_length": 64, "prompt": "Price: ${x} each"},
        "openai": {
            "api_key": "none",  # pragma: allowlist secret
            "url": "https://host/@name?tokens=3",
        },
    }
    sections = {
        **environment(settings=settings, flags={"env.token_budget": 3}),
        "variables": {"TOKENIZERS_PARALLELISM": "true", "HF_HOME": "/cache", "HF_TOKEN": ""},
        "slurm": {"setup": "export HF_TOKEN=$(cat ~/token)\nexport WANDB_API_KEY=$KEY MAX_TOKEN=9"},
    }

    assert read_run_file(written(tmp_path, **sections)).secret_names == []


def run_with_references(folder: Path) -> Path:
    return written(
        folder,
        **environment(
            settings={"openai": {"api_key": "${JUDGE}"}}, variables={"TOOL_KEY": "${TOOL}"}
        ),
        variables={"WANDB_API_KEY": "${WANDB}"},
        service={"tokens": {"trainer": "TOKEN", "environment": "TOKEN"}, "port": 8100},
    )


@pytest.fixture
def secret_variables(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names = ("JUDGE", "TOOL", "WANDB", "TOKEN")
    for name in names:
        monkeypatch.setenv(name, f"{VALUE}-{name}")
    return [f"{VALUE}-{name}" for name in names]


@pytest.mark.parametrize("placement", [LocalRun, SlurmRun, KubernetesRun, RayRun])
def test_dry_run_shows_references_and_no_values(
    tmp_path: Path, secret_variables: list[str], placement: Any
) -> None:
    file = run_with_references(tmp_path)
    run = read_run_file(file)

    texts = "\n".join(placement(run, file).render().values())

    assert sorted(run.secret_names) == ["JUDGE", "TOKEN", "TOOL", "WANDB"]
    assert "api_key: ${JUDGE}" in texts
    assert VALUE not in texts
    assert "WANDB_API_KEY=${WANDB}" not in texts  # a shell or a pod would take it literally


def test_pods_take_references_from_the_secret(tmp_path: Path) -> None:
    file = run_with_references(tmp_path)

    files = KubernetesRun(read_run_file(file), file).render()

    (deployment,) = yaml.safe_load_all(files["environments.yaml"])
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    keys = {
        each["name"]: each["valueFrom"]["secretKeyRef"]
        for each in container["env"]
        if "valueFrom" in each
    }
    assert keys == {
        variable: {"name": "keys", "key": key}
        for variable, key in (
            ("WANDB_API_KEY", "WANDB"),
            ("TOOL_KEY", "TOOL"),
            ("JUDGE", "JUDGE"),
            (TOKEN_VARIABLE, "TOKEN"),
        )
    }
    names = [each["name"] for each in container["env"]]
    assert len(names) == len(set(names))


def test_pods_with_references_need_a_secret(tmp_path: Path) -> None:
    sections = {"variables": {"HF_TOKEN": "${HF}"}, "kubernetes": {"image": "i"}}
    file = written(tmp_path, **sections)

    with pytest.raises(ConfigError, match=r"kubernetes\.token_secret: expected"):
        KubernetesRun(read_run_file(file), file).render()


PROBE = """
import json, os, sys
from atroposlib.envs.commands import load_yaml
config = sys.argv[sys.argv.index("--config") + 1]
print(json.dumps([config, load_yaml(config), sys.argv[1:]]))
"""


def run_filled(folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "probe.py").write_text(PROBE)
    file = folder / "settings.yaml"
    file.write_text("openai: {api_key: '${JUDGE}', texts: ['${x} is text', 3]}\n")
    words = [str(file), str(folder / "probe.py"), "serve", "--config", str(file)]
    return subprocess.run(
        [sys.executable, "-m", "example_trainer.cluster.run_secrets", *words],
        env={"PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_program_reads_values_that_are_in_no_file_and_no_command(tmp_path: Path) -> None:
    done = run_filled(tmp_path, {"JUDGE": VALUE})

    assert done.returncode == 0, done.stderr
    config, content, words = json.loads(done.stdout)
    assert content == {"openai": {"api_key": VALUE, "texts": ["${x} is text", 3]}}
    assert config.startswith("/dev/fd/")
    assert VALUE not in str(words)
    assert not any(VALUE in path.read_text() for path in tmp_path.iterdir())


def test_reference_without_a_value_ends_the_program_as_invalid_settings(tmp_path: Path) -> None:
    done = run_filled(tmp_path, {})

    assert (done.returncode, done.stdout) == (2, "")
    assert "${JUDGE}: the variable JUDGE is not set; export it" in done.stderr


def test_missing_variable_is_named_before_anything_starts(tmp_path: Path) -> None:
    file = written(tmp_path, variables={"HF_TOKEN": "${NO_SUCH_VARIABLE}"})

    expected = r"service: \$\{NO_SUCH_VARIABLE\}: the variable NO_SUCH_VARIABLE is not set"
    with pytest.raises(ConfigError, match=expected):
        LocalRun(read_run_file(file), file).supervise(lambda text: None)


def test_status_and_logs_mask_what_a_program_printed(
    tmp_path: Path, secret_variables: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_with_references(tmp_path)
    run = read_run_file(file)
    said = f"ValueError: {secret_variables[0]} {KEY} http://me:{VALUE}@host"
    log = run.output / "logs" / "trainer.log"
    log.parent.mkdir(parents=True)
    log.write_text(f"{said}\n")
    SupervisorRecord(run.output).folder.mkdir()
    SupervisorRecord(run.output).write(
        RunStatus("failed", (PartStatus("trainer", "failed", 0, said),), f"trainer {said}")
    )

    for command in ("status", "logs"):
        with pytest.raises(SystemExit):
            cli.main([command, str(file)])

    printed = capsys.readouterr().out
    assert printed.count("ValueError: *** *** http://***@host") == 3
    assert VALUE not in printed


def test_short_values_are_not_masked() -> None:
    assert hide_values("1 of 10 steps", ["1", "steps"]) == "1 of 10 steps"
