"""AdamW on bfloat16 weights: exact on average, repeatable, the same state as torch's."""

from __future__ import annotations

import pytest
import torch

from example_trainer.model import create_optimizer_for_params
from example_trainer.stochastic_adamw import AdamW, round_stochastically
from tests.trainer.tiny import tiny_config

SIZE = 20_000


def updates(optimizer_of, weights, *, steps, seed=0):
    """Train copies of weights on random gradients; returns the parameter."""
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = optimizer_of([parameter])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        parameter.grad = torch.randn(weights.shape, generator=generator).to(weights.dtype)
        optimizer.step()
    return parameter.detach(), optimizer


def weights_of(dtype):
    return (torch.randn(SIZE, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)


def test_rounding_is_exact_on_average_and_only_between_neighbours():
    generator = torch.Generator().manual_seed(0)
    # A quarter of the way from 1 to the next bfloat16, 1 + 2^-7; and numbers that need no rounding.
    value = torch.full((SIZE,), 1 + 2.0**-9)
    exact = torch.tensor([0.0, -1.5, 3.0, float("inf"), -float("inf")])

    rounded = round_stochastically(value, generator)

    assert set(rounded.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert float((rounded > 1).float().mean()) == pytest.approx(0.25, abs=0.02)
    assert float((round_stochastically(-value, generator) < -1).float().mean()) == pytest.approx(
        0.25, abs=0.02
    )
    assert torch.equal(round_stochastically(exact, generator).float(), exact)


def test_small_updates_survive_in_bfloat16_on_average():
    start = weights_of(torch.bfloat16)
    exact, _ = updates(
        lambda p: torch.optim.AdamW(p, lr=1e-6, weight_decay=0.0), start.float(), steps=12
    )
    wanted = exact - start.float()

    plain, _ = updates(lambda p: torch.optim.AdamW(p, lr=1e-6, weight_decay=0.0), start, steps=12)
    found, _ = updates(lambda p: AdamW(p, lr=1e-6, weight_decay=0.0), start, steps=12)

    lost = (plain.float() - start.float()) @ wanted / (wanted @ wanted)
    kept = (found.float() - start.float()) @ wanted / (wanted @ wanted)
    assert lost < 0.5
    assert kept == pytest.approx(1.0, abs=0.25)


def test_float32_weights_are_updated_like_torch_s():
    start = weights_of(torch.float32)

    plain, _ = updates(lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1), start, steps=3)
    found, _ = updates(lambda p: AdamW(p, lr=1e-3, weight_decay=0.1), start, steps=3)

    torch.testing.assert_close(found, plain)


def test_resumed_run_repeats_the_random_numbers():
    start = weights_of(torch.bfloat16)[:100]
    whole, _ = updates(lambda p: AdamW(p, lr=1e-4, weight_decay=0.0), start, steps=2)
    first = torch.nn.Parameter(start.clone())
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(100, generator=generator).bfloat16() for _ in range(2)]
    optimizer = AdamW([first], lr=1e-4, weight_decay=0.0)
    first.grad = gradients[0]
    optimizer.step()
    second = torch.nn.Parameter(first.detach().clone())
    resumed = AdamW([second], lr=1e-4, weight_decay=0.0)
    resumed.load_state_dict(optimizer.state_dict())
    second.grad = gradients[1]

    resumed.step()

    assert torch.equal(second, whole)


def test_weights_that_are_not_contiguous_are_updated(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16).t())
    parameter.grad = torch.ones_like(parameter)
    optimizer = create_optimizer_for_params([parameter], tiny_config(tmp_path, lr=0.5))

    optimizer.step()

    assert isinstance(optimizer, AdamW)
    torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 0.5))


def test_state_is_that_of_torch_s_adamw():
    start = weights_of(torch.bfloat16)[:10]
    _, ours = updates(lambda p: AdamW(p, lr=1e-4, weight_decay=0.0), start, steps=1)
    _, theirs = updates(lambda p: torch.optim.AdamW(p, lr=1e-4), start, steps=1)

    assert type(ours).__name__ == type(theirs).__name__  # checkpoints compare the names
    for name, value in theirs.state_dict()["state"][0].items():
        assert ours.state_dict()["state"][0][name].dtype == value.dtype
