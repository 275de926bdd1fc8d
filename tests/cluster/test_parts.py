"""The parts of a run file: their names, commands, settings and order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from atroposlib.errors import ConfigError
from example_trainer.cli import config_from_args, create_full_parser
from example_trainer.cluster.parts import Addresses, Part, part_names, plan_parts
from example_trainer.cluster.run_file import RunFile
from example_trainer.cluster.slurm import Layout, SlurmRun, step_command

OUTPUT = Path("/out")


def make_run(**changes: Any) -> RunFile:
    return RunFile.model_validate(
        {
            "name": "small",
            "output": OUTPUT,
            "environments": [{"program": "environments/gsm8k_server.py"}],
            "trainer": {"model": "m", "steps": 3},
            **changes,
        }
    )


def plan(run: RunFile) -> dict[str, Part]:
    names = part_names(run)
    addresses = Addresses(
        hosts={name: f"host-of-{name}" for name in names},
        ports={name: 9000 + number for number, name in enumerate(names)},
        output=OUTPUT,
        settings=OUTPUT / "settings",
    )
    return {part.name: part for part in plan_parts(run, addresses)}


def settings_of(part: Part) -> Any:
    [text] = part.files.values()
    return yaml.safe_load(text)


def test_parts_start_in_order_and_the_trainer_waits_for_the_servers():
    parts = plan(make_run(engines=[{"count": 2}]))

    assert list(parts) == part_names(make_run(engines=[{"count": 2}]))
    assert list(parts) == [
        "service",
        "engine-0",
        "engine-1",
        "environment-gsm8k-server",
        "trainer",
    ]
    assert parts["trainer"].after == ("service", "engine-0", "engine-1")


@pytest.mark.parametrize(
    "changes",
    [
        {"environments": [{"program": "a.py", "count": 2}, {"program": "b.py", "name": "a-0"}]},
        {
            "engines": [{"name": "service"}],
            "service": {"replicas": 2, "store": "redis", "redis_url": "redis://host"},
        },
    ],
)
def test_parts_of_one_name_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"two parts are named (environment-a|service)-0; "):
        plan(make_run(**changes))


def test_command_of_the_trainer_resumes_and_names_every_engine():
    trainer = {"model": "m", "steps": 3, "flags": {"device": "cpu"}}
    engines = [{"count": 2}, {"kind": "url", "urls": ["http://x:1"]}]

    command = plan(make_run(engines=engines, trainer=trainer))["trainer"].command

    words = command[command.index("example_trainer.grpo") + 1 :]
    config = config_from_args(create_full_parser().parse_args(words))
    assert config.resume_or_start
    assert config.engine_urls == [
        "http://host-of-engine-0:9001",
        "http://host-of-engine-1:9002",
        "http://x:1",
    ]
    assert config.atropos_url == "http://host-of-service:9000"


def test_weights_and_shares_are_divided_among_the_processes_of_an_environment():
    parts = plan(
        make_run(environments=[{"program": "a.py", "count": 2, "weight": 3, "min_share": 0.5}])
    )

    for name in ("environment-a-0", "environment-a-1"):
        env = settings_of(parts[name])["env"]
        assert (env["inference_weight"], env["min_batch_allocation"]) == (1.5, 0.25)


def test_environment_gets_each_engine_as_a_server():
    one = settings_of(plan(make_run())["environment-gsm8k-server"])
    two = settings_of(plan(make_run(engines=[{"count": 2}]))["environment-gsm8k-server"])

    assert one["openai"]["base_url"] == "http://host-of-engine-0:9001/v1"
    assert [server["base_url"] for server in two["openai"]] == [
        "http://host-of-engine-0:9001/v1",
        "http://host-of-engine-1:9002/v1",
    ]


def test_flags_of_each_program_keep_their_form():
    parts = plan(
        make_run(
            environments=[
                {"program": "a.py", "flags": {"env.use_wandb": False, "env.names": ["x", "y"]}}
            ],
            trainer={
                "model": "m",
                "steps": 3,
                "flags": {
                    "gradient-checkpointing": False,
                    "lr": 1e-5,
                    "seed": None,
                    "loss-fn-args": {"cap": 0.5},
                },
            },
        )
    )

    assert parts["environment-a"].command[-4:] == ("--env.use_wandb=false", "--env.names", "x", "y")
    assert parts["trainer"].command[-3:] == (
        "--no-gradient-checkpointing",
        "--lr=1e-05",
        '--loss-fn-args={"cap": 0.5}',
    )


def test_share_of_a_killed_environment_is_soon_free_unless_a_flag_says_otherwise():
    usual = plan(make_run())["service"].command
    given = plan(make_run(service={"flags": {"env-expiry-s": 90}}))["service"].command

    assert "--env-expiry-s=30.0" in usual
    assert [word for word in given if word.startswith("--env-expiry-s")] == ["--env-expiry-s=90"]


def test_several_gpus_train_under_torchrun():
    one = plan(make_run(trainer={"model": "m", "steps": 3, "gpus": 4}))["trainer"]
    two = plan(make_run(trainer={"model": "m", "steps": 3, "gpus": 4, "nodes": 2}))["trainer"]

    assert "--standalone" in one.command
    assert "--rdzv-endpoint=host-of-trainer:29500" in two.command
    assert "--nproc-per-node=4" in two.command


def test_another_trainer_has_its_own_flags_with_values_of_the_run():
    section = {
        "program": "my_trainer.py",
        "model": "m",
        "steps": 3,
        "flags": {
            "service": "{service_url}",
            "engines": ["{engine_urls}"],
            "all": "{engine_urls}",
            "weights": "{output}/weights",
            "steps": "{steps}",
            "template": "{question} {} ${model}",
            "bf16": True,
        },
    }
    engines = [{"count": 2}]

    alone = plan(make_run(engines=engines, trainer=section))["trainer"]
    spread = plan(make_run(trainer={**section, "program": "mine.trainer", "gpus": 2}))["trainer"]

    urls = ["http://host-of-engine-0:9001", "http://host-of-engine-1:9002"]
    assert alone.command[1:] == (
        "my_trainer.py",
        "--service=http://host-of-service:9000",
        "--engines",
        *urls,
        f"--all={','.join(urls)}",
        "--weights=/out/weights",
        "--steps=3",
        "--template={question} {} ${model}",
        "--bf16",
    )
    assert spread.command[1:7] == (
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        "--nproc-per-node=2",
        "--standalone",
        "-m",
    )
    assert spread.command[7] == "mine.trainer"


def test_tokens_are_names_of_secrets_and_never_in_commands_or_files():
    run = make_run(service={"tokens": {"environment": "ENV_TOKEN"}, "token_file": "/tokens"})

    parts = plan(run)

    assert parts["environment-gsm8k-server"].secrets == {"ATROPOS_API_TOKEN": "ENV_TOKEN"}
    assert parts["trainer"].secrets == {}


def layout_run(**slurm: Any) -> RunFile:
    return make_run(
        engines=[{"count": 3, "tensor_parallel": 2}],
        trainer={"model": "m", "steps": 3, "nodes": 2, "gpus": 4},
        slurm={"gpus_per_node": 4, "environment_nodes": 1, **slurm},
    )


def test_slurm_engines_have_the_ports_of_the_contract_and_their_own_gpus():
    run = layout_run()
    layout = Layout.of(run)
    hosts = [f"h{number}" for number in range(layout.num_nodes)]

    addresses = layout.addresses(run, hosts)

    assert (layout.num_training, layout.num_nodes) == (3, 5)
    assert [addresses.url(f"engine-{number}") for number in range(3)] == [
        "http://h3:9000",
        "http://h3:9001",
        "http://h4:9000",
    ]
    assert addresses.hosts["environment-gsm8k-server"] == "h2"
    steps = {
        part.name: step_command(part, layout, addresses, hosts)
        for part in plan_parts(run, addresses)
    }
    assert "CUDA_VISIBLE_DEVICES=2,3" in steps["engine-1"]
    assert "CUDA_VISIBLE_DEVICES=0,1" in steps["engine-2"]
    assert "--nodelist=h0,h1" in steps["trainer"]
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3" in steps["trainer"]


def test_slurm_job_is_queued_again_and_exports_the_port_layout(tmp_path):
    run = layout_run(partition="gpu", time="1:00:00", setup="module load cuda")

    script = SlurmRun(run, tmp_path / "run.yaml").render()["job.sbatch"]

    for line in (
        "#SBATCH --requeue",
        "#SBATCH --nodes=5",
        "#SBATCH --partition=gpu",
        "export NUM_TRAINING_NODES=3",
        "export GPUS_PER_NODE=4",
        "export INFER_TP=2",
        "module load cuda",
    ):
        assert line in script.splitlines()


@pytest.mark.parametrize(
    ("slurm", "said"),
    [
        ({"gpus_per_node": 1}, "one needs 2 GPUs"),
        ({"inference_nodes": 1}, "need at least 2"),
    ],
)
def test_slurm_layout_that_does_not_fit_is_refused(slurm, said):
    with pytest.raises(ConfigError, match=said):
        Layout.of(layout_run(**slurm))
