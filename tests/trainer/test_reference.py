"""The KL penalty: its reference, scored in the trainer or sent by groups, and its gradient."""

from __future__ import annotations

import pytest
import torch

from atroposlib.errors import ConfigError
from example_trainer.batch import build_batch
from example_trainer.config import require_reference
from example_trainer.loss import BatchTotals, KlPenalty, LossInputs, TrainingLoss
from example_trainer.model import load_model_and_tokenizer
from example_trainer.policy import open_reference, prepare_policy
from tests.trainer.test_training import make_trainer
from tests.trainer.tiny import group, save_tiny_model, tiny_config, tiny_llama

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_coef": 0.1}, "kl_coef=0.1 needs a reference: --reference-model NAME_OR_PATH"),
        ({"reference_model": "m"}, "reference_model has no effect without a KL penalty"),
        ({"kl_coef": 0.1, "reference_model": "m"}, None),
        ({"kl_coef": 0.1, "reference_model": "groups"}, None),
        ({"kl_coef": 0.1, "weight_bridge_mode": "lora_only"}, None),
        ({}, None),
    ],
)
def test_kl_penalty_without_a_reference_ends_at_the_start(tmp_path, settings, message):
    config = tiny_config(tmp_path, **settings)

    if message is None:
        require_reference(config)
    else:
        with pytest.raises(ConfigError, match=message) as caught:
            require_reference(config)
        assert "\n" not in str(caught.value)


def make_reference(tmp_path, model, **settings):
    config = tiny_config(tmp_path, kl_coef=0.5, **settings)
    return open_reference(config, model, prepare_policy(model, config))


def scored_gradient(tmp_path, given, *, reference=None, **settings):
    """Gradient and metrics of one step of a model that left its reference."""
    model = tiny_llama(seed=1)
    trainer = make_trainer(tmp_path, model=model, kl_coef=0.5, max_grad_norm=1e9, **settings)
    if reference is not None:
        trainer = make_trainer(
            tmp_path, model=model, kl_coef=0.5, max_grad_norm=1e9, reference=reference, **settings
        )
    found = []
    trainer._optimizer.step = lambda: found.extend(p.grad.clone() for p in model.parameters())
    metrics = trainer.train_on(
        build_batch(given, trainer._rules, microbatch_size=4, packs=settings.get("packing") == "on")
    )
    return torch.cat([g.flatten() for g in found]), metrics


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("packing", ["on", "off"])
def test_scored_reference_gives_what_sent_logprobs_give(tmp_path, packing, temperature):
    folder = save_tiny_model(tmp_path / "reference")  # of seed 0
    params = {"temperature": temperature}
    plain = group([[7, 9], [8, 8, 8]], [1.0, 0.0], generation_params=params)
    rows = []
    with torch.no_grad():
        for tokens in plain["tokens"]:
            logits = tiny_llama(seed=0)(input_ids=torch.tensor([tokens])).logits[0] / temperature
            logprobs = logits.log_softmax(-1)
            rows.append([0.0, *(float(logprobs[t, i]) for t, i in enumerate(tokens[1:]))])
    settings = {"packing": packing, "logprobs_mode": "processed"}
    reference = make_reference(
        tmp_path, tiny_llama(seed=1), reference_model=str(folder), packing=packing
    )

    scored, metrics = scored_gradient(tmp_path, [plain], reference=reference, **settings)

    assert metrics["grpo/mean_kl"] > 0
    if temperature == 1.0:  # what groups send is at temperature 1
        sent, as_sent = scored_gradient(tmp_path, [{**plain, "ref_logprobs": rows}], **settings)
        torch.testing.assert_close(scored, sent, atol=1e-6, rtol=1e-4)
        assert metrics["grpo/mean_kl"] == pytest.approx(as_sent["grpo/mean_kl"], rel=1e-4)
    else:
        inputs = reference._scorer(
            build_batch([plain], make_trainer(tmp_path)._rules, microbatch_size=4).microbatches[0]
        )
        wanted = torch.tensor([value for row in rows for value in row[3:]])
        assert float(inputs.logprobs_BT.sum()) == pytest.approx(float(wanted.sum()), rel=1e-4)


def test_groups_that_bring_logprobs_keep_them(tmp_path):
    folder = save_tiny_model(tmp_path / "reference")
    reference = make_reference(tmp_path, tiny_llama(seed=1), reference_model=str(folder))
    sent = group([[7, 9], [8]], [1.0, 0.0], ref_logprobs=[[-9.0] * 5, [-9.0] * 4])
    plain = group([[7], [8]], [1.0, 0.0])

    alone, _ = scored_gradient(tmp_path, [sent])
    beside, _ = scored_gradient(tmp_path, [sent], reference=reference)
    together, metrics = scored_gradient(tmp_path, [sent, plain], reference=reference)

    assert torch.equal(alone, beside)
    assert metrics["grpo/mean_kl"] > 0
    assert not torch.equal(alone, together)


def test_logprobs_that_a_group_leaves_open_are_scored_whatever_the_other_groups_are(tmp_path):
    folder = save_tiny_model(tmp_path / "reference")
    reference = make_reference(tmp_path, tiny_llama(seed=1), reference_model=str(folder))
    plain = group([[7, 9], [8]], [1.0, 0.0])
    open_ones = {**plain, "ref_logprobs": [[1.0] * 5, [1.0] * 4]}

    expected, _ = scored_gradient(tmp_path, [plain], reference=reference)
    found, metrics = scored_gradient(tmp_path, [open_ones], reference=reference)

    assert metrics["grpo/mean_kl"] > 0
    assert torch.equal(found, expected)


def test_reference_of_adapters_is_the_model_without_them(tmp_path):
    folder = save_tiny_model(tmp_path / "model")
    settings = {
        "model_name": str(folder),
        "weight_bridge_mode": "lora_only",
        "kl_coef": 0.5,
        "lora_r": 4,
    }
    config = tiny_config(tmp_path, **settings)
    model, _ = load_model_and_tokenizer(config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    policy = prepare_policy(model, config)
    reference = open_reference(config, model, policy)
    trainer = make_trainer(tmp_path, model=model, reference=reference, **settings)
    batch = build_batch([group([[7, 9], [8]], [1.0, 0.0])], trainer._rules, microbatch_size=2)
    microbatch = batch.microbatches[0]

    found = reference.logprobs_BT(microbatch)

    base = tiny_llama(seed=0)
    mask = microbatch.labels_BT != -100
    with torch.no_grad():
        logprobs = base(input_ids=microbatch.tokens_BT).logits.log_softmax(-1)
    wanted = logprobs.gather(-1, microbatch.labels_BT.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(found[mask], wanted[mask])
    assert not torch.allclose(policy.scorer(microbatch).logprobs_BT[mask], wanted[mask])
    assert trainer.train_on(batch)["grpo/mean_kl"] > 0
    assert all(p.requires_grad for name, p in model.named_parameters() if "lora_" in name)


def test_reference_with_a_smaller_vocabulary_is_refused(tmp_path):
    folder = save_tiny_model(tmp_path / "reference")
    model = tiny_llama()
    model.resize_token_embeddings(40)

    with pytest.raises(ConfigError, match="has 32 tokens and the trained model 40"):
        make_reference(tmp_path, model, reference_model=str(folder))


def test_reference_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"reference_model .*nowhere.* cannot be loaded"):
        make_reference(tmp_path, tiny_llama(), reference_model=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("is_unbiased", [True, False])
def test_unbiased_penalty_has_the_gradient_of_the_divergence_itself(estimator, is_unbiased):
    # Every token of a vocabulary of four once, weighed by its probability: the expectation.
    logits = torch.tensor([0.3, -0.2, 1.1, 0.4], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([1.0, 0.1, -0.3, 0.2], dtype=torch.float64).log_softmax(-1)
    loss = TrainingLoss(kl=KlPenalty(1.0, estimator, is_unbiased=is_unbiased), policy_coef=0.0)
    expectation = 0.0
    for token in range(4):
        inputs = LossInputs(
            trainer_logprobs_BT=logits.log_softmax(-1)[token].view(1, 1),
            labels_BT=torch.tensor([[token]]),
            advantages_BT=torch.zeros(1, 1),
            inference_logprobs_BT=torch.ones(1, 1),
            ref_logprobs_BT=reference[token].view(1, 1),
        )
        terms = loss(inputs, BatchTotals(num_tokens=1, num_sequences=1))
        expectation = expectation + logits.softmax(-1)[token].detach() * terms.loss

    (found,) = torch.autograd.grad(expectation, logits)

    logprobs = logits.log_softmax(-1)
    divergence = (logprobs.exp() * (logprobs - reference)).sum()
    (exact,) = torch.autograd.grad(divergence, logits)
    assert torch.allclose(found, exact, atol=1e-12) is is_unbiased
