"""Two sharded ranks train adapters, and keep an engine up to date, as one process does."""

from __future__ import annotations

import shutil

import pytest

from example_trainer.vllm_manager import is_port_in_use
from tests.trainer.kill_supervisor import seeded_groups
from tests.trainer.parallel_runs import largest_difference, run_trainer, service_with
from tests.trainer.tiny import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS = 6
SAVED = 5  # the checkpoint before the end
TOLERANCE = 1e-5
ADAPTERS = ["--lora-r", "4", "--lora-dropout", "0", "--lora-target-modules", "q_proj", "up_proj"]
RUNS = {
    "lora_restart": (
        ["--weight-bridge-mode", "lora_restart", *ADAPTERS],
        "final_adapter/adapter_model.safetensors",
    ),
    "in_place": (["--weight-bridge-mode", "in_place"], "final_model/model.safetensors"),
    "merged": (
        ["--weight-bridge-mode", "in_place", "--lora", *ADAPTERS],
        "final_model/model.safetensors",
    ),
}


@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.long
def test_two_sharded_ranks_with_an_engine_equal_one_process_also_when_resumed(
    tmp_path, free_port, kind
):
    save_tiny_model(tmp_path / "model")
    flags, final = RUNS[kind]
    flags = [*flags, "--vllm-restart-interval", "3"]
    flags += ["--vllm-port", str(free_port)]
    runs = {}
    for name, ranks in (("one", 1), ("two", 2)):
        with service_with(seeded_groups(STEPS), tmp_path, name) as service:
            runs[name] = run_trainer(
                service, tmp_path / name, *flags, ranks=ranks, steps=STEPS, final=final
            )
    folder = tmp_path / "resumed"
    shutil.copytree(tmp_path / "two", folder)
    for part in ("journal/step_6.batch", final):
        (folder / part).unlink()

    with service_with(seeded_groups(STEPS)[SAVED:], tmp_path, "resumed") as service:
        resumed, lines = run_trainer(
            service, folder, *flags, "--resume", ranks=2, steps=STEPS, final=final
        )

    weights, metrics = runs["two"]
    print(f"{kind}: {largest_difference(weights, runs['one'][0])} apart after {STEPS} steps")
    assert largest_difference(weights, runs["one"][0]) <= TOLERANCE
    assert largest_difference(resumed, runs["one"][0]) <= TOLERANCE
    assert [line["step"] for line in lines] == [line["step"] for line in metrics]
    assert metrics[-1]["train/loss"] == pytest.approx(runs["one"][1][-1]["train/loss"], abs=1e-5)
    log = (folder / "logs" / "vllm.log").read_text()
    if kind != "lora_restart":
        assert "reload_weights" in log
    else:
        assert f"--lora-modules training_adapter={folder / 'adapter_step_5'}" in log
    assert not is_port_in_use(free_port)
