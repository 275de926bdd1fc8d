"""Logprobs by chunks equal those of whole logits, gradient included, in less memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from example_trainer.scoring import auto_chunk_tokens, linear_logprobs

pytestmark = pytest.mark.slow

N, D, V, K = 37, 8, 50, 3


def inputs(dtype, *, bias):
    torch.manual_seed(1)
    tensors = {
        "hidden": torch.randn(N, D, dtype=dtype),
        "weight": torch.randn(V, D, dtype=dtype),
        "bias": torch.randn(V, dtype=dtype) if bias else None,
    }
    for tensor in tensors.values():
        if tensor is not None:
            tensor.requires_grad_()
    return tensors


def whole(hidden, weight, bias, targets, temperatures):
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(-1, targets), -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("chunk", [1, 5, 37, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("with_temperatures", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_chunks_give_the_values_and_gradients_of_whole_logits(
    dtype, tolerance, chunk, bias, with_temperatures, with_entropy
):
    targets = torch.randint(0, V, (N, K))
    targets[:, 1] = targets[:, 0]  # one id twice
    temperatures = torch.rand(N, dtype=dtype) + 0.5 if with_temperatures else None
    slopes = torch.randn(N, K, dtype=dtype)
    entropy_slopes = torch.randn(N, dtype=dtype) if with_entropy else torch.zeros(N, dtype=dtype)
    given, reference = inputs(dtype, bias=bias), inputs(dtype, bias=bias)

    found = linear_logprobs(
        given["hidden"],
        given["weight"],
        given["bias"],
        targets,
        temperatures_N=temperatures,
        chunk_tokens=chunk,
    )
    loss = (found.logprobs_NK * slopes).sum()
    (loss + (found.entropy_N * entropy_slopes).sum() if with_entropy else loss).backward()
    logprobs, entropy = whole(*reference.values(), targets, temperatures)
    ((logprobs * slopes).sum() + (entropy * entropy_slopes).sum()).backward()

    torch.testing.assert_close(found.logprobs_NK, logprobs, atol=tolerance, rtol=0)
    torch.testing.assert_close(found.entropy_N, entropy, atol=tolerance, rtol=0)
    for name, tensor in given.items():
        if tensor is not None:
            torch.testing.assert_close(
                tensor.grad, reference[name].grad, atol=10 * tolerance, rtol=tolerance
            )


def test_gradient_passes_the_numerical_check():
    torch.manual_seed(1)
    sizes = [(3, 2), (6, 2), (6,)]
    given = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    targets = torch.tensor([[0, 5], [3, 3], [1, 2]])

    def call(hidden, weight, bias):
        return linear_logprobs(hidden, weight, bias, targets, chunk_tokens=2).logprobs_NK

    def entropy(hidden, weight, bias):
        return linear_logprobs(hidden, weight, bias, targets, chunk_tokens=2).entropy_N

    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradcheck(entropy, given)


def test_frozen_output_layer_gets_no_gradient():
    given = inputs(torch.float32, bias=False)
    weight = given["weight"].detach()

    linear_logprobs(
        given["hidden"], weight, None, torch.zeros(N, 1).long()
    ).logprobs_NK.sum().backward()

    assert weight.grad is None
    assert given["hidden"].grad.abs().sum() > 0


def test_no_token_gives_a_zero_gradient():
    given = inputs(torch.float32, bias=False)

    found = linear_logprobs(given["hidden"][:0], given["weight"], None, torch.zeros(0, 1).long())
    found.logprobs_NK.sum().backward()

    assert given["weight"].grad.abs().sum() == 0


def test_autocast_projects_in_bfloat16_forward_and_backward():
    given = inputs(torch.float32, bias=False)
    targets = torch.randint(0, V, (N, 1))
    reference = inputs(torch.float32, bias=False)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_logprobs(given["hidden"], given["weight"], None, targets, chunk_tokens=7)
    found.logprobs_NK.sum().backward()
    logprobs, _ = whole(reference["hidden"], reference["weight"], None, targets, None)
    logprobs.sum().backward()

    assert found.logprobs_NK.dtype == torch.float32
    assert given["weight"].grad.dtype == torch.float32
    torch.testing.assert_close(found.logprobs_NK, logprobs, atol=0.1, rtol=0.02)
    torch.testing.assert_close(given["weight"].grad, reference["weight"].grad, atol=0.1, rtol=0.05)


def test_chunks_are_smaller_for_larger_vocabularies():
    cpu = torch.device("cpu")

    assert auto_chunk_tokens(1_000, cpu) > auto_chunk_tokens(100_000, cpu) >= 16


MEASURE = """
import re, sys, torch
from example_trainer.scoring import linear_logprobs
torch.set_num_threads(1)  # each thread would keep memory of its own
hidden = torch.randn(2048, 32, requires_grad=True)
weight = torch.randn(16384, 32, requires_grad=True)
labels = torch.randint(0, 16384, (2048, 1))
def peak():  # of this program; getrusage would begin with the peak of whoever started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
if sys.argv[1] == "chunks":
    logprobs = linear_logprobs(hidden, weight, None, labels).logprobs_NK
else:
    logprobs = (hidden @ weight.T).log_softmax(-1).gather(-1, labels)
logprobs.sum().backward()
print((peak() - before) / 1024)
"""


@pytest.mark.slow
@pytest.mark.long
def test_chunks_take_a_fraction_of_the_memory_of_whole_logits():
    mebibytes = {
        how: float(
            subprocess.run(
                [sys.executable, "-c", MEASURE, how], capture_output=True, text=True, check=True
            ).stdout
        )
        for how in ("chunks", "whole")
    }

    assert mebibytes["whole"] > 2 * 128  # the logits and their gradient, 128 MiB each
    # The rest, such as code in memory, varies by 100 MiB between runs.
    assert mebibytes["chunks"] < mebibytes["whole"] - 128
