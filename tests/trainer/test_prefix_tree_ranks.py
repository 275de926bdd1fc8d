"""Two ranks that compute equal prefixes once have the loss and gradient of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch.distributed.tensor import DTensor

from example_trainer.loss_choice import ALGORITHMS
from example_trainer.parallel import ONE_PROCESS, Parallel, open_parallel
from example_trainer.policy import prepare_policy
from tests.trainer.test_prefix_tree import SEQ_LEN, groups_of_a_batch, in_float64, tokens_of
from tests.trainer.test_training import make_trainer
from tests.trainer.tiny import group, tiny_config, tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.long]

TOLERANCE = 1e-8
MODES = ("data", "fsdp")


def two_sequences() -> list[dict[str, Any]]:
    """One group that fits a single pass, so that the second rank has no sequence."""
    completions = [tokens_of(1, 8), tokens_of(2, 8)]
    prompt = tuple(tokens_of(0, 24))
    one = group(completions, [1.0, 0.0], prompt=prompt, logprob=-3.0)
    return [{**one, "ref_logprobs": [[-3.2] * len(tokens) for tokens in one["tokens"]]}]


CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in ALGORITHMS},
    "sequence_mean": {"loss_reduction": "sequence_mean"},
    "entropy": {"entropy_coef": 0.3},
    "limited_passes": {"microbatch_tokens": 90},
    "recomputed": {"gradient_checkpointing": True},
    "one_pass": {"groups": two_sequences()},
}


def first_step(
    folder: Path, case: str, parallel: Parallel = ONE_PROCESS, **settings: Any
) -> dict[str, Any]:
    """Return the loss and gradient of a run's first batch, and this rank's passes."""
    settings = {
        "logprobs_mode": "processed",
        "max_grad_norm": 1e9,
        "shared_prefixes": "on",
        "seq_len": SEQ_LEN,
        "kl_coef": 0.1,
        "distill_coef": 0.2,
        "groups": groups_of_a_batch(),
        **CASES[case],
        **settings,
    }
    groups = settings.pop("groups")
    model = in_float64(tiny_llama(), recomputes=settings.get("gradient_checkpointing", False))
    policy = prepare_policy(model, tiny_config(folder, **settings), parallel)
    trainer = make_trainer(
        folder, groups=groups, model=model, policy=policy, parallel=parallel, **settings
    )
    gradients: list[torch.Tensor] = []

    def capture() -> None:
        for parameter in model.parameters():
            gradient = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients.append(whole.clone())

    trainer._optimizer.step = capture
    shares = trainer._take_shares()[1] if parallel.is_main else None
    batch = parallel.scatter(shares)
    loss = trainer.train_on(batch)["train/loss"]
    return {
        "loss": loss,
        "gradients": gradients,
        "trees": [microbatch.tree is not None for microbatch in batch.microbatches],
    }


def train_as_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for mode in MODES:
        ranks = {
            "world_size": 2,
            "trainer_rank": rank,
            "parallel_mode": mode,
            "init_method": f"file://{folder / mode}",
        }
        with open_parallel(tiny_config(folder, **ranks)) as parallel:
            for case in CASES:
                step = first_step(folder / f"rank_{rank}", case, parallel, **ranks)
                torch.save(step, folder / f"{mode}_{case}_{rank}.pt")


@pytest.fixture(scope="module")
def steps_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the first steps of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(2):
        (folder / f"rank_{rank}").mkdir()
    torch.multiprocessing.spawn(train_as_rank, args=(folder,), nprocs=2)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_have_the_gradient_of_one_process(
    steps_of_ranks: Path, tmp_path: Path, case: str
) -> None:
    as_tree = first_step(tmp_path, case)
    flat = first_step(tmp_path, case, shared_prefixes="off")
    assert all(as_tree["trees"])
    assert not any(flat["trees"])
    assert any(float(gradient.abs().max()) > 1e-4 for gradient in as_tree["gradients"])

    for mode in MODES:
        steps = [torch.load(steps_of_ranks / f"{mode}_{case}_{rank}.pt") for rank in range(2)]

        assert len({len(step["trees"]) for step in steps}) == 1
        assert sorted(step["trees"][0] for step in steps) == [case != "one_pass", True]
        for step in steps:
            for expected in (as_tree, flat):
                assert step["loss"] == pytest.approx(expected["loss"], abs=TOLERANCE)
                for found, other in zip(step["gradients"], expected["gradients"], strict=True):
                    torch.testing.assert_close(found, other, atol=TOLERANCE, rtol=0)
