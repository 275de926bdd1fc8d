"""A teacher's choices from the wire to the gradient, against forward passes of both models."""

from __future__ import annotations

import json
import math

import pytest
import torch

from atroposlib.scored_data import IGNORE_INDEX
from tests.trainer.test_training import make_trainer
from tests.trainer.tiny import group, tiny_llama

pytestmark = pytest.mark.slow

TOP_K = 3
# Lengths differ, so that rows are padded or packed; the first has two turns, the last is cut.
TOKENS = [[1, 2, 3, 7, 8, 4, 5, 9], [1, 2, 3, 6], [1, 2, 3, 9, 9, 8, 7, 6, 5, 4, 10, 11]]
MASKS = [
    [-100, -100, -100, 7, 8, -100, -100, 9],
    [-100, -100, -100, 6],
    [-100, -100, -100, 9, 9, 8, 7, 6, 5, 4, 10, 11],
]
SEQ_LEN = 10


def opinionated(seed):
    model = tiny_llama(seed=seed)
    with torch.no_grad():
        model.lm_head.weight *= 20
    return model


def rows_at(model, tokens):
    """[L-1][V]: row t - 1 holds the logits of what stands at position t."""
    return model(input_ids=torch.tensor([tokens])).logits[0, :-1]


def as_sent(teacher):
    """The group as an environment sends it: at t, the token and the teacher's logprobs for it."""
    ids, logprobs = [], []
    for tokens in TOKENS:
        ids.append([[]])
        logprobs.append([[]])
        with torch.no_grad():
            rows = rows_at(teacher, tokens).log_softmax(-1)
        for row, token in zip(rows, tokens[1:], strict=True):
            chosen = sorted({*row.topk(TOP_K).indices.tolist(), token})
            ids[-1].append(chosen)
            logprobs[-1].append(row[chosen].tolist())
    sent = group([[]], [1.0], distill_token_ids=ids, distill_logprobs=logprobs)
    return sent | {"tokens": TOKENS, "masks": MASKS, "scores": [1.0, 0.0, 0.5]}


def expected_loss(student, sent, *, kind, temperature):
    """The loss and the divergence, position by position, without a batch."""
    losses, divergences = [], []
    for i, tokens in enumerate(TOKENS):
        rows = rows_at(student, tokens)
        for t in range(1, min(len(tokens), SEQ_LEN)):
            if MASKS[i][t] == IGNORE_INDEX:
                continue
            ids = sent["distill_token_ids"][i][t]
            log_p = torch.tensor(sent["distill_logprobs"][i][t]).div(temperature).log_softmax(-1)
            log_q = (rows[t - 1] / temperature).log_softmax(-1)[ids]
            divergences.append((log_p.exp() * (log_p - log_q)).sum())
            if kind == "cross_entropy":
                losses.append(-(log_p.exp() * log_q).sum())
            else:
                within = log_q.log_softmax(-1)
                losses.append((within.exp() * (within - log_p)).sum())
    return torch.stack(losses).mean(), torch.stack(divergences).mean()


@pytest.mark.parametrize("packing", ["on", "off"])
@pytest.mark.parametrize(
    ("kind", "temperature"), [("cross_entropy", 1.0), ("cross_entropy", 2.0), ("reverse_kl", 1.0)]
)
def test_step_is_the_gradient_of_the_divergence_at_the_students_own_positions(
    tmp_path, kind, temperature, packing
):
    sent = as_sent(opinionated(seed=1))
    student = opinionated(seed=2)
    loss, divergence = expected_loss(student, sent, kind=kind, temperature=temperature)
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in student.parameters()))
    trainer = make_trainer(
        tmp_path,
        groups=[sent],
        model=opinionated(seed=2),
        training_steps=1,
        seq_len=SEQ_LEN,
        packing=packing,
        policy_coef=0.0,
        distill_coef=1.0,
        distill_loss=kind,
        distill_temperature=temperature,
    )

    trainer.run()

    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["distill/token_count"] == 3 + 1 + 7
    assert metrics["distill/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["distill/kl"] == pytest.approx(divergence.item(), rel=1e-5)
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
