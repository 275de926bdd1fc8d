"""The losses inside the loop: each algorithm learns, a teacher needs no rewards."""

from __future__ import annotations

import json

import pytest
import torch

from atroposlib.errors import GroupError
from example_trainer.loss_choice import ALGORITHMS
from tests.trainer.test_training import PREFERRED, REJECTED, make_trainer, probability
from tests.trainer.tiny import VOCAB, group, tiny_llama

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_raises_the_preferred_token(tmp_path, algorithm):
    trainer = make_trainer(tmp_path, algorithm=algorithm, training_steps=6)
    before = [probability(trainer.model, token) for token in (PREFERRED, REJECTED)]

    trainer.run()

    assert probability(trainer.model, PREFERRED) > 1.5 * before[0]
    assert probability(trainer.model, REJECTED) < before[1]


def test_entropy_bonus_keeps_the_policy_more_random(tmp_path):
    entropies = []
    for coef in (0.0, 1.0):
        trainer = make_trainer(tmp_path / str(coef), training_steps=12, entropy_coef=coef, lr=0.02)

        trainer.run()

        lines = (tmp_path / str(coef) / "metrics.jsonl").read_text().splitlines()
        entropies.append([json.loads(line)["train/entropy"] for line in lines])
    without, with_bonus = entropies
    assert with_bonus[0] == without[0]
    assert with_bonus[-1] > without[-1]


def test_demonstrations_raise_their_tokens_without_rewards(tmp_path):
    shown = group([[PREFERRED]], [0.0], group_overrides={"sft": True})
    trainer = make_trainer(tmp_path, groups=[shown], training_steps=6)
    before = probability(trainer.model, PREFERRED)

    trainer.run()

    assert probability(trainer.model, PREFERRED) > 2 * before


def taught_by(teacher, completion, *, top_k=8):
    """A group of one trajectory with no reward and the teacher's top choices at every position."""
    given = group([completion], [0.0])
    tokens = torch.tensor(given["tokens"])
    with torch.no_grad():
        logprobs, ids = teacher(input_ids=tokens).logits.log_softmax(-1)[0, :-1].topk(top_k)
    given["distill_token_ids"] = [[[], *ids.tolist()]]
    given["distill_logprobs"] = [[[], *logprobs.tolist()]]
    return given


# The reverse KL leaves what is outside the teacher's choices alone, so it is given all of them.
@pytest.mark.parametrize(("kind", "top_k"), [("cross_entropy", 8), ("reverse_kl", VOCAB)])
def test_teacher_pulls_the_student_without_rewards(tmp_path, kind, top_k):
    teacher = tiny_llama(seed=1)
    with torch.no_grad():
        teacher.lm_head.weight *= 20  # a teacher with opinions
    groups = [taught_by(teacher, words, top_k=top_k) for words in ([7, 8, 9], [4, 5])]
    trainer = make_trainer(
        tmp_path, groups=groups, training_steps=40, distill_coef=1.0, distill_loss=kind
    )

    def divergence():
        tokens = torch.tensor([[1, 2, 3, 7, 8]])
        with torch.no_grad():
            p, q = (m(input_ids=tokens).logits[0, 2:].log_softmax(-1) for m in (teacher, student))
        return float((p.exp() * (p - q)).sum(-1).mean())

    student = trainer.model
    before = divergence()

    trainer.run()

    assert divergence() < 0.5 * before


def test_rewards_move_nothing_where_the_policy_loss_is_off(tmp_path):
    rewarded = group([[PREFERRED], [REJECTED]], [1.0, 0.0])
    trainer = make_trainer(tmp_path, groups=[rewarded], training_steps=3, policy_coef=0.0)
    before = trainer.model.lm_head.weight.detach().clone()

    trainer.run()

    assert torch.equal(trainer.model.lm_head.weight, before)


def test_rewards_do_not_mix_with_a_teacher_where_the_policy_loss_is_off(tmp_path):
    lessons = [taught_by(tiny_llama(seed=1), words) for words in ([7, 8], [4, 5])]
    heads = []
    for advantage in (0.0, 3.0):
        trainer = make_trainer(
            tmp_path / str(advantage),
            groups=[lesson | {"advantages": [advantage]} for lesson in lessons],
            training_steps=2,
            policy_coef=0.0,
            distill_coef=1.0,
        )
        trainer.run()
        heads.append(trainer.model.lm_head.weight.detach())

    assert torch.equal(*heads)


def test_teacher_arrays_without_a_coefficient_are_refused_by_name(tmp_path):
    trainer = make_trainer(tmp_path, groups=[taught_by(tiny_llama(), [7])], training_steps=1)

    with pytest.raises(GroupError, match=r"distill_token_ids: .*--distill-coef"):
        trainer.run()


def test_teacher_of_another_vocabulary_is_refused(tmp_path):
    given = taught_by(tiny_llama(), [7])
    given["distill_token_ids"][0][-1][0] = VOCAB
    trainer = make_trainer(tmp_path, groups=[given], training_steps=1, distill_coef=1.0)

    with pytest.raises(GroupError, match="teacher and student must use one tokenizer"):
        trainer.run()


def test_parts_of_the_loss_are_logged_and_add_up(tmp_path):
    teacher = tiny_llama(seed=1)
    sampled = group([[7], [8]], [1.0, 0.0], ref_logprobs=[[-1.0] * 4] * 2, logprob=-2.0)
    shown = group([[9]], [1.0], group_overrides={"sft": True})
    taught = taught_by(teacher, [5]) | {"ref_logprobs": [[-3.0] * 4]}
    trainer = make_trainer(
        tmp_path,
        groups=[sampled, shown, taught],
        training_steps=1,
        policy_coef=0.75,
        kl_coef=0.1,
        distill_coef=0.5,
        sft_coef=0.25,
    )

    trainer.run()

    metrics = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["distill/token_count"] == 1
    assert metrics["sft/token_count"] == 1
    expected = 0.75 * metrics["grpo/policy_loss"] + metrics["grpo/kl_penalty"]
    expected += 0.25 * metrics["sft/loss"] + 0.5 * metrics["distill/loss"]
    assert metrics["train/loss"] == pytest.approx(expected, abs=1e-6)
    assert metrics["grpo/kl_penalty"] == pytest.approx(0.1 * metrics["grpo/mean_kl"], abs=1e-6)
