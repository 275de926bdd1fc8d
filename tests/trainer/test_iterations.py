"""Several updates on one batch: the proximal policy stays, the clip acts, layouts do not matter."""

from __future__ import annotations

import copy

import pytest
import torch

from example_trainer.batch import build_batch
from example_trainer.model import create_optimizer
from example_trainer.rows import RowRules
from tests.trainer.kill_supervisor import seeded_groups
from tests.trainer.parallel_runs import largest_difference, run_trainer, service_with
from tests.trainer.test_training import PREFERRED, REJECTED, make_trainer, probability
from tests.trainer.tiny import group, save_tiny_model, tiny_config, tiny_llama

pytestmark = pytest.mark.slow

NUM_ITERATIONS = 4
PROMPT = (1, 2, 3)


def groups_of_a_batch():
    return [
        group([[4, 5, 6], [7, 8]], [1.0, 0.0], prompt=PROMPT, logprob=-3.4),
        group([[9], [10, 11, 12, 13]], [0.0, 0.5], prompt=(1, 2, 3, 4, 5, 6), logprob=-3.5),
    ]


def trained(tmp_path, *, packs=False, min_shared_fraction=None, **settings):
    """The weights and metrics after one step."""
    settings = {"lr": 0.02, "num_iterations": NUM_ITERATIONS, "max_grad_norm": 1e9, **settings}
    trainer = make_trainer(tmp_path, optimizer="adamw", weight_decay=0.0, **settings)
    batch = build_batch(
        groups_of_a_batch(), RowRules(seq_len=64), microbatch_size=2, packs=packs,
        min_shared_fraction=min_shared_fraction,
    )  # fmt: skip
    return trainer.model.state_dict(), trainer.train_on(batch)


def by_hand(tmp_path, **settings):
    """Clipped updates on the same batch, in plain torch and one sequence at a time."""
    model = tiny_llama()
    config = tiny_config(
        tmp_path, lr=0.02, optimizer="adamw", weight_decay=0.0, max_grad_norm=1e9, **settings
    )
    optimizer = create_optimizer(model, config)
    proximal_model = copy.deepcopy(model)
    sequences = []
    for given in groups_of_a_batch():
        scores = torch.tensor(given["scores"])
        advantages = (scores - scores.mean()) / (scores.std(correction=0) + 1e-8)
        sequences += zip(given["tokens"], given["masks"], advantages, strict=True)
    num_tokens = sum(label != -100 for _, masks, _ in sequences for label in masks)
    bound = []
    for _ in range(NUM_ITERATIONS):
        loss = torch.zeros(())
        bound.append(0)
        for tokens, masks, advantage in sequences:
            ids, labels = torch.tensor([tokens]), torch.tensor(masks[1:])
            is_trained = labels != -100

            def logprobs(of_model, ids=ids, is_trained=is_trained):
                every = of_model(input_ids=ids).logits[0, :-1].log_softmax(-1)
                return every.gather(1, ids[0, 1:, None])[:, 0][is_trained]

            with torch.no_grad():
                old = logprobs(proximal_model)
            ratio = (logprobs(model) - old).exp()
            weight = (old - given_logprobs(given_of(tokens), tokens)).exp().clamp(max=2.0)
            clipped = ratio.clamp(0.8, 1.28)
            loss = loss + (weight * torch.max(-advantage * ratio, -advantage * clipped)).sum()
            above = (ratio > 1.28) & (advantage > 0)
            bound[-1] += int((above | ((ratio < 0.8) & (advantage < 0))).sum())
        (loss / num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), bound[-1] / num_tokens


def given_of(tokens):
    return next(given for given in groups_of_a_batch() if tokens in given["tokens"])


def given_logprobs(given, tokens):
    logprobs = given["inference_logprobs"][given["tokens"].index(tokens)]
    return torch.tensor([value for value in logprobs if value != 1.0])


def test_updates_equal_those_by_hand(tmp_path):
    weights, metrics = trained(tmp_path)
    expected, bound_fraction = by_hand(tmp_path)

    assert largest_difference(weights, expected) < 1e-5
    assert metrics["grpo/last_iteration_bound_fraction"] == pytest.approx(bound_fraction)
    assert bound_fraction > 0


@pytest.mark.parametrize("algorithm", ["dapo", "gspo", "cispo", "ipo"])
@pytest.mark.parametrize(
    "layout", [{"packs": True}, {"packs": True, "min_shared_fraction": 0.0}], ids=["packed", "tree"]
)
def test_updates_do_not_depend_on_the_layout(tmp_path, algorithm, layout):
    padded, metrics = trained(tmp_path, algorithm=algorithm, packing="off")
    other, other_metrics = trained(tmp_path, algorithm=algorithm, packing="on", **layout)

    assert largest_difference(padded, other) < 1e-4
    assert other_metrics["train/loss"] == pytest.approx(metrics["train/loss"], abs=1e-5)
    assert other_metrics["grpo/last_iteration_kl"] == pytest.approx(
        metrics["grpo/last_iteration_kl"], abs=1e-4
    )


def test_metrics_are_those_of_the_first_update(tmp_path):
    _, once = trained(tmp_path, num_iterations=1)
    _, often = trained(tmp_path)

    assert {name: often[name] for name in once} == once
    assert set(often) - set(once) == {
        "grpo/last_iteration_loss", "grpo/last_iteration_bound_fraction", "grpo/last_iteration_kl",
    }  # fmt: skip
    assert often["grpo/last_iteration_kl"] > 0
    assert often["grpo/last_iteration_loss"] < often["train/loss"]


def test_clip_bounds_the_change_of_the_policy(tmp_path):
    _, clipped = trained(tmp_path, num_iterations=16)
    _, free = trained(tmp_path, num_iterations=16, algorithm="importance_sampling",
                      ratio_anchor="trainer", advantage_std="population")  # fmt: skip

    assert 0 < clipped["grpo/last_iteration_kl"] < free["grpo/last_iteration_kl"]


def test_reference_is_scored_once_per_batch(tmp_path):
    class Reference:
        num_bytes = 0
        num_calls = 0

        def logprobs_BT(self, microbatch):
            self.num_calls += 1
            return torch.full_like(microbatch.inference_logprobs_BT, -3.0)

    reference = Reference()
    trainer = make_trainer(
        tmp_path, reference=reference, kl_coef=0.1, reference_model="m", num_iterations=3
    )
    batch = build_batch(
        groups_of_a_batch(),
        RowRules(seq_len=64, uses_reference=True, scores_reference=True),
        microbatch_size=2,
    )

    trainer.train_on(batch)

    assert reference.num_calls == len(batch.microbatches)


def test_gradient_that_is_not_finite_ends_the_updates_of_its_batch(tmp_path):
    trainer = make_trainer(tmp_path, num_iterations=3, lr=1e30, max_grad_norm=1e9)
    batch = build_batch(groups_of_a_batch(), RowRules(seq_len=64), microbatch_size=2)

    metrics = trainer.train_on(batch)

    assert metrics["train/skipped_steps"] == 1.0
    assert metrics["train/grad_norm"] < 1e9


def test_run_learns_more_from_each_batch(tmp_path):
    once = make_trainer(tmp_path / "once", training_steps=3)
    often = make_trainer(tmp_path / "often", training_steps=3, num_iterations=3)

    once.run()
    often.run()

    assert often.steps_done == 3
    assert probability(often.model, PREFERRED) > probability(once.model, PREFERRED)
    assert probability(often.model, REJECTED) < probability(once.model, REJECTED)


@pytest.mark.long
def test_two_ranks_equal_one(tmp_path):
    save_tiny_model(tmp_path / "model")
    found = []
    for ranks in (1, 2):
        (tmp_path / f"service_{ranks}").mkdir()
        with service_with(seeded_groups(6), tmp_path / f"service_{ranks}", f"r{ranks}") as service:
            found.append(
                run_trainer(
                    service,
                    tmp_path / f"ranks_{ranks}",
                    "--num-iterations",
                    "3",
                    ranks=ranks,
                    steps=6,
                    final="final_model/model.safetensors",
                )
            )

    (weights, metrics), (other, other_metrics) = found
    assert largest_difference(weights, other) < 1e-5
    for name in ("train/loss", "grpo/last_iteration_loss", "grpo/last_iteration_kl"):
        assert [m[name] for m in metrics] == pytest.approx(
            [m[name] for m in other_metrics], abs=1e-5
        )
