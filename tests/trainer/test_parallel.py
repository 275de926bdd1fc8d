"""Two ranks under torchrun train as one process does: same losses, same weights, same resume."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from atroposlib.errors import ConfigError
from atroposlib.scored_data import IGNORE_INDEX
from example_trainer.batch import build_batch, split_batch
from example_trainer.cli import torchrun_settings
from example_trainer.parallel import ONE_PROCESS, open_parallel
from example_trainer.rows import RowRules
from tests.trainer.kill_supervisor import seeded_groups
from tests.trainer.parallel_runs import largest_difference, run_trainer, service_with
from tests.trainer.tiny import group, save_tiny_model, tiny_config

pytestmark = pytest.mark.slow

STEPS = 20
TOLERANCE = 1e-5
FINAL = "final_model/model.safetensors"


@pytest.fixture(scope="module")
def start_service(tmp_path_factory):
    """Starts services that hold the same groups, one batch for every step."""
    with ExitStack() as running:

        def start(first=0):
            folder = tmp_path_factory.mktemp("service")
            groups = seeded_groups(STEPS)[first:]
            return running.enter_context(service_with(groups, folder, folder.name))

        yield start


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    save_tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def one_rank(runs_folder, start_service):
    """Final weights and metrics of one process."""
    return run_trainer(start_service(), runs_folder / "one", ranks=1, steps=STEPS, final=FINAL)


def assert_same_run(found, expected, label):
    weights, metrics = found
    expected_weights, expected_metrics = expected
    assert len(metrics) == len(expected_metrics) == STEPS
    figures = {
        name: max(
            abs(mine[name] - theirs[name])
            for mine, theirs in zip(metrics, expected_metrics, strict=True)
        )
        for name in ("train/loss", "train/grad_norm", "train/logp", "train/trained_tokens")
    }
    figures["final weights"] = largest_difference(weights, expected_weights)
    print(f"{label}, largest difference over {STEPS} steps: {figures}")
    assert max(figures.values()) <= TOLERANCE


@pytest.fixture(scope="module")
def sharded(runs_folder, start_service):
    """Final weights and metrics of two ranks that hold a part of the model each."""
    return run_trainer(start_service(), runs_folder / "fsdp", ranks=2, steps=STEPS, final=FINAL)


@pytest.mark.slow
@pytest.mark.long
def test_two_sharded_ranks_equal_one_over_twenty_steps(one_rank, sharded):
    assert_same_run(sharded, one_rank, "fsdp")


@pytest.mark.slow
@pytest.mark.long
def test_two_data_parallel_ranks_equal_one_over_twenty_steps(runs_folder, start_service, one_rank):
    found = run_trainer(
        start_service(),
        runs_folder / "data",
        "--parallel-mode",
        "data",
        ranks=2,
        steps=STEPS,
        final=FINAL,
    )

    assert_same_run(found, one_rank, "data")


@pytest.mark.slow
@pytest.mark.usefixtures("sharded")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.long
def test_checkpoint_of_sharded_ranks_continues_on_any_number_of_ranks(
    runs_folder, start_service, one_rank, ranks
):
    folder = runs_folder / f"resumed_by_{ranks}"
    shutil.copytree(runs_folder / "fsdp", folder)
    for name in (
        "step_15",
        "step_20",
        "final_model",
        "metrics.jsonl",
        "metrics_settings.json",
    ):
        path = folder / name
        path.unlink() if path.is_file() else shutil.rmtree(path)

    weights, metrics = run_trainer(
        start_service(first=10), folder, "--resume", ranks=ranks, steps=STEPS, final=FINAL
    )

    assert len(metrics) == STEPS - 10
    assert largest_difference(weights, one_rank[0]) <= TOLERANCE


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.long
def test_shares_hold_every_microbatch_once_and_are_equally_many(world_size):
    rows = [[5] * length for length in (1, 9, 3, 5, 2, 7)]
    batch = build_batch(
        [group(rows, [0.1 * n for n in range(6)])],
        RowRules(seq_len=64),
        microbatch_size=2,
        pad_multiple=1,
    )

    shares = split_batch(batch, world_size)

    assert len({len(share.microbatches) for share in shares}) == 1
    assert all(share.totals == batch.totals for share in shares)
    dealt = [mb for share in shares for mb in share.microbatches]
    trained = [mb for mb in dealt if (mb.labels_BT != IGNORE_INDEX).any()]
    assert sorted(map(id, trained)) == sorted(map(id, batch.microbatches))
    assert len(dealt) == len(shares) * -(-len(batch.microbatches) // world_size)


@pytest.mark.long
def test_shares_are_balanced_by_tokens():
    rows = [[5] * length for length in (30, 1, 1, 1, 1, 30)]
    batch = build_batch(
        [group(rows, [0.1 * n for n in range(6)])],
        RowRules(seq_len=64),
        microbatch_size=1,
        pad_multiple=1,
    )

    first, second = split_batch(batch, 2)

    cells = [sum(mb.tokens_BT.numel() for mb in share.microbatches) for share in (first, second)]
    assert cells == [38, 38]  # 3 prompt tokens each, one position lost to the shift: 32 + 3 + 3


@pytest.mark.long
def test_one_process_needs_no_group(tmp_path):
    with open_parallel(tiny_config(tmp_path)) as parallel:
        assert parallel is ONE_PROCESS
        assert parallel.scatter(["mine"]) == "mine"
        assert parallel.gather("mine") == ["mine"]
        assert parallel.broadcast("mine") == "mine"
        assert parallel.loss_factor == 1.0
        model = torch.nn.Linear(2, 2)
        assert parallel.whole_model(model) is model


@pytest.mark.long
def test_rank_beyond_the_number_of_processes_is_refused(tmp_path):
    config = tiny_config(tmp_path, trainer_rank=2, world_size=2)

    with (
        pytest.raises(ConfigError, match="trainer_rank=2 must be below world_size=2"),
        open_parallel(config),
    ):
        pass


def test_several_processes_without_torchrun_are_rejected_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)

    with (
        pytest.raises(ConfigError, match=r"world_size=2: .*MASTER_ADDR.*torchrun"),
        open_parallel(tiny_config(tmp_path, world_size=2)),
    ):
        pass


def test_rendezvous_address_of_an_unknown_kind_is_rejected(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"world_size=2: No rendezvous handler.*torchrun"),
        open_parallel(tiny_config(tmp_path, world_size=2, init_method="rank0:29500")),
    ):
        pass


@pytest.mark.long
def test_torchrun_variables_become_settings():
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}

    assert torchrun_settings(variables, device="cuda") == {
        "trainer_rank": 5,
        "world_size": 8,
        "device": "cuda:1",
    }
    assert torchrun_settings(variables, device="cpu") == {"trainer_rank": 5, "world_size": 8}
    assert torchrun_settings({}, device="cuda") == {}
    with pytest.raises(ConfigError, match="must be numbers"):
        torchrun_settings({**variables, "RANK": "x"}, device="cpu")


@pytest.mark.long
def test_sharded_adafactor_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="adafactor cannot be sharded"):
        tiny_config(tmp_path, world_size=2, optimizer="adafactor")


@pytest.mark.parametrize(("device", "current"), [("cuda:1", ["cuda:1"]), ("cuda", []), ("cpu", [])])
def test_gpu_of_one_process_is_the_current_one(tmp_path, monkeypatch, device, current):
    # A checkpoint has the random state of the current GPU, by which dropout continues.
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)

    with open_parallel(tiny_config(tmp_path, device=device)):
        assert chosen == current


def sum_as_rank(rank: int, folder: Path) -> None:
    ranks = {"world_size": 2, "trainer_rank": rank, "parallel_mode": "data"}
    ranks["init_method"] = f"file://{folder / 'meeting'}"
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(torch.ones(1)) for name in ("by_both", "by_one", "by_none")}
    )
    used = model["by_both"] + (model["by_one"] if rank else 0.0)
    with open_parallel(tiny_config(folder, **ranks)) as parallel:
        used.sum().backward()
        parallel.sum_gradients(model)
    gradients = {name: p.grad for name, p in model.items()}
    torch.save(gradients, folder / f"gradients_{rank}.pt")


def test_weights_that_no_rank_uses_keep_no_gradient(tmp_path):
    # Otherwise AdamW would decay them, and move them by their momentum, as one process does not.
    torch.multiprocessing.spawn(sum_as_rank, args=(tmp_path,), nprocs=2)

    for rank in range(2):
        gradients = torch.load(tmp_path / f"gradients_{rank}.pt")
        assert gradients == {
            "by_both": torch.tensor([2.0]),
            "by_one": torch.tensor([1.0]),
            "by_none": None,
        }
