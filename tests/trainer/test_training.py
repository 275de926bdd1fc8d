"""The loop on scripted groups: the preferred token rises, splits do not matter, faults are met."""

from __future__ import annotations

import json

import pytest
import torch

from atroposlib.api.client import LeasedBatch
from atroposlib.errors import ConfigError, GroupError
from atroposlib.utils.run_log import MetricsLog
from example_trainer.batch import build_batch
from example_trainer.config import TrainingConfig
from example_trainer.model import create_optimizer
from example_trainer.parallel import ONE_PROCESS
from example_trainer.rows import RowRules
from example_trainer.scoring import token_logprobs_BT
from example_trainer.training import Trainer
from tests.trainer.tiny import SavedTokenizer, group, tiny_config, tiny_llama

pytestmark = pytest.mark.slow

PREFERRED, REJECTED = 7, 8


class ScriptedFeed:
    """Hands out the same groups for every step."""

    last_recorded_step = 0

    def __init__(self, groups):
        self._groups = groups
        self.steps = []
        self.policy_versions = []
        self.acknowledged = []
        self.checkpoints = []
        self.refused = []

    def next_batch(self, step):
        self.steps.append(step)
        return LeasedBatch(self._groups, f"{step}-1")

    def refuse(self, step, batch_id):
        self.refused.append((step, batch_id))

    def acknowledge(self, batch_id, *, steps_done):
        self.acknowledged.append((batch_id, steps_done))

    def state(self):
        return {"run_id": "scripted"}

    def wants_checkpoint(self):
        return False

    def saved(self, step):
        self.checkpoints.append(step)

    def report_policy(self, version):
        self.policy_versions.append(version)


class RecordingSync:
    """Writes down when the engine would have got which weights."""

    publishes_final = True

    def __init__(self):
        self.published = []
        self.made_room = []

    def check_before_load(self):
        pass

    def start(self, model, tokenizer, *, source):
        pass

    def before_step(self, *, sync_follows):
        self.made_room.append(sync_follows)

    def publish(self, model, *, checkpoint, step=0):
        self.published.append(checkpoint.name if checkpoint else None)

    def check_alive(self):
        pass

    def returns_processed_logprobs(self):
        return False

    def close(self):
        pass


def make_trainer(
    tmp_path,
    *,
    groups=None,
    model=None,
    reference=None,
    policy=None,
    parallel=ONE_PROCESS,
    **settings,
):
    config = tiny_config(tmp_path, **settings)
    model = model or tiny_llama()
    return Trainer(
        config,
        model=model,
        tokenizer=SavedTokenizer(),
        optimizer=create_optimizer(model, config),
        feed=ScriptedFeed(groups or [group([[PREFERRED], [REJECTED]] * 2, [1.0, 0.0] * 2)]),
        weight_sync=RecordingSync(),
        run_log=MetricsLog(use_wandb=False, metrics_path=tmp_path / "metrics.jsonl"),
        policy=policy,
        reference=reference,
        parallel=parallel,
        processed_logprobs=settings.get("logprobs_mode") == "processed",
    )


def probability(model, token):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1].softmax(-1)[token].item()


def test_run_raises_the_preferred_token_and_lowers_the_rejected_one(tmp_path):
    trainer = make_trainer(tmp_path, training_steps=8)
    before = probability(trainer.model, PREFERRED), probability(trainer.model, REJECTED)

    final = trainer.run()

    assert probability(trainer.model, PREFERRED) > 2 * before[0]
    assert probability(trainer.model, REJECTED) < before[1]
    assert (final / "model.safetensors").is_file()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[0]["train/reward_mean"] == 0.5


def test_learning_rate_that_the_optimizer_determines_is_not_reported(tmp_path):
    adafactor = {"optimizer": "adafactor", "adafactor_relative_step": True}

    make_trainer(tmp_path / "own", training_steps=1, **adafactor).run()
    make_trainer(tmp_path / "set", training_steps=1).run()

    own, of_config = (
        json.loads((tmp_path / name / "metrics.jsonl").read_text()) for name in ("own", "set")
    )
    assert "train/lr" not in own
    assert of_config["train/lr"] == 1e-2


def test_run_publishes_at_the_interval_and_at_the_end(tmp_path):
    trainer = make_trainer(tmp_path, training_steps=5, vllm_restart_interval=2)

    trainer.run()

    sync = trainer._weight_sync
    assert sync.published == [None, None, "final_model"]
    assert trainer._feed.policy_versions == [2, 4, 5]
    assert sync.made_room == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("interval", "recorded", "versions"),
    [(1, 3, [3, 4, 5]), (2, 3, [2, 4, 5]), (2, 4, [4, 5]), (1, 5, [5])],
)
def test_repeated_steps_update_the_engine_once_with_the_newest_weights(
    tmp_path, interval, recorded, versions
):
    trainer = make_trainer(tmp_path, training_steps=5, vllm_restart_interval=interval)
    trainer._feed.last_recorded_step = recorded

    trainer.run()

    assert trainer._feed.policy_versions == versions
    made_room = trainer._weight_sync.made_room
    assert [step for step, makes in enumerate(made_room, start=1) if makes] == versions


def test_run_with_interval_0_never_publishes(tmp_path):
    trainer = make_trainer(tmp_path, training_steps=2, vllm_restart_interval=0)

    trainer.run()

    assert trainer._weight_sync.published == []


def test_run_saves_resumable_checkpoints_and_hands_them_to_the_sync(tmp_path):
    trainer = make_trainer(
        tmp_path, training_steps=3, checkpoint_interval=2, vllm_restart_interval=2
    )

    trainer.run()

    assert trainer._weight_sync.published == ["step_2", "final_model"]
    assert (tmp_path / "saves" / "step_2" / "trainer" / "trainer_state.json").is_file()
    assert trainer._feed.checkpoints == [2]


def test_run_acknowledges_each_batch_once_and_keeps_the_newest_checkpoints(tmp_path):
    trainer = make_trainer(tmp_path, training_steps=4, checkpoint_interval=1, keep_checkpoints=2)

    trainer.run()

    assert trainer._feed.acknowledged == [("0-1", 1), ("1-1", 2), ("2-1", 3), ("3-1", 4)]
    kept = sorted(path.name for path in (tmp_path / "saves").iterdir())
    assert kept == ["final_model", "step_3", "step_4"]


def test_run_hands_a_batch_back_that_it_cannot_honour(tmp_path):
    groups = [group([[7]], [1.0], images=["x"])]
    trainer = make_trainer(tmp_path, groups=groups, on_bad_group="stop")

    with pytest.raises(GroupError, match="images"):
        trainer.run()

    assert trainer._feed.refused == [(0, "0-1")]


GOOD = group([[PREFERRED], [REJECTED]] * 2, [1.0, 0.0] * 2)
BAD = group([[PREFERRED, 31], [REJECTED]], [1.0, 0.0], images=["x"])
OUTSIDE = group([[PREFERRED, 4711], [REJECTED]], [1.0, 0.0])


def test_run_leaves_bad_groups_out_and_counts_them(tmp_path, caplog):
    trainer = make_trainer(tmp_path / "mixed", groups=[BAD, GOOD, OUTSIDE], training_steps=2)
    expected = make_trainer(tmp_path / "good", groups=[GOOD], training_steps=2)

    trainer.run()
    expected.run()

    for ours, theirs in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    text = (tmp_path / "mixed" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["train/bad_groups"] for line in lines] == [2, 2]
    assert [line["train/num_groups"] for line in lines] == [1, 1]
    assert trainer._feed.refused == []
    assert "2 of 3 groups were left out (--on-bad-group stop ends the run instead)" in caplog.text
    assert "group 0: images: the model is text only" in caplog.text


def test_batch_without_a_trained_token_is_named(tmp_path, caplog):
    trainer = make_trainer(tmp_path, training_steps=1, seq_len=3)  # as long as the prompt

    trainer.run()

    assert "no token of this batch is trained" in caplog.text
    assert "4 sequences were truncated to seq_len" in caplog.text


@pytest.mark.parametrize(
    ("settings", "rest"),
    [({}, "no gradient"), ({"entropy_coef": 0.1}, "only the gradient of the other terms")],
)
def test_batch_without_an_advantage_is_named(tmp_path, caplog, settings, rest):
    equal = GOOD | {"scores": [1.0] * 4}
    trainer = make_trainer(tmp_path, groups=[equal], training_steps=1, **settings)

    trainer.run()

    assert f"demonstration or teacher logprobs: this batch had {rest}" in caplog.text


def test_logprobs_that_are_masked_where_tokens_are_trained_are_named(tmp_path, caplog):
    # The prompt has the logprobs, the completion the placeholder.
    shifted = GOOD | {"inference_logprobs": [[-1.0, -1.0, -1.0, 1.0]] * 4}
    trainer = make_trainer(tmp_path, groups=[shifted], training_steps=1)

    trainer.run()

    assert "mean inference logprob 1.00: masks and logprobs disagree" in caplog.text


@pytest.mark.parametrize("pad_multiple", [1, 6, 64])
def test_sequences_and_padding_end_with_the_learned_positions_of_the_model(
    tmp_path, caplog, pad_multiple
):
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, **shape, bos_token_id=0, eos_token_id=0))
    long = group([[PREFERRED] * 20, [REJECTED]] * 2, [1.0, 0.0] * 2)
    trainer = make_trainer(
        tmp_path,
        groups=[long],
        model=model,
        training_steps=1,
        packing="off",
        pad_multiple=pad_multiple,
    )

    trainer.run()

    assert "seq_len=64 exceeds the 16 positions of the model" in caplog.text
    assert "2 sequences were truncated to seq_len" in caplog.text
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["train/truncated_rows"], line["train/truncation_rate"]) == (2, 0.5)


HUGE = GOOD | {"scores": [1e308, -1e308] * 2}
HUGE_TOKENS = GOOD | {"advantages": [1e308, -1e308] * 2}
MADE_FROM_TEXT = GOOD | {"tokenized_from_text": True}


@pytest.mark.parametrize("group", [HUGE, HUGE_TOKENS, OUTSIDE, MADE_FROM_TEXT])
def test_batch_that_nobody_can_train_on_does_not_end_a_run_that_trains(tmp_path, caplog, group):
    trainer = make_trainer(tmp_path, training_steps=2)
    batches = iter([[GOOD], *[[group]] * 5, [GOOD, group]])
    trainer._feed.next_batch = lambda step: LeasedBatch(next(batches), f"{step}-1")

    trainer.run()

    assert trainer.steps_done == 2
    assert trainer._feed.refused == [(1, "1-1")] * 5
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/bad_groups"] for line in lines] == [0, 6]
    assert [line["train/skipped_steps"] for line in lines] == [0, 0]
    assert "no group of batch 1-1 can be trained" in caplog.text


def test_tokens_made_from_text_end_a_run_at_its_start_and_are_not_met_again(tmp_path):
    trainer = make_trainer(tmp_path, groups=[MADE_FROM_TEXT])

    with pytest.raises(ConfigError, match="tokenized_from_text"):
        trainer.run()

    assert trainer._feed.refused == [(0, "0-1")]


def test_run_passes_over_a_batch_without_a_good_group_and_stops_after_three(tmp_path, caplog):
    trainer = make_trainer(tmp_path, training_steps=2)
    batches = iter([[BAD, BAD], [BAD], [OUTSIDE]])
    trainer._feed.next_batch = lambda step: LeasedBatch(next(batches), f"{step}-1")

    with pytest.raises(GroupError, match=r"no group of 3 batches in a row .* group 0: tokens\[0\]"):
        trainer.run()

    assert trainer.steps_done == 0
    assert trainer._feed.refused == [(0, "0-1")] * 3
    assert "no group of batch 0-1 can be trained" in caplog.text


def gradient_of(tmp_path, groups, *, batch_size, seed=0):
    """The gradient one batch leaves before the optimiser, in double precision."""
    model = tiny_llama(seed=seed, dtype=torch.float64)
    trainer = make_trainer(tmp_path, model=model, batch_size=batch_size)
    gradients = {}

    class Stop(Exception):
        pass

    def capture(*_args, **_kwargs):
        gradients.update({name: p.grad.clone() for name, p in model.named_parameters()})
        raise Stop

    trainer._optimizer.step = capture
    trainer.config = trainer.config.model_copy(update={"max_grad_norm": 1e9})
    with pytest.raises(Stop):
        trainer.train_on(build_batch(groups, RowRules(seq_len=128), microbatch_size=batch_size))
    return gradients


def mixed_groups():
    return [
        group([[7, 8, 9], [4]], [1.0, 0.0], logprob=-3.0),
        group([[5] * 70, [6, 6]], [0.2, 0.9], logprob=-3.5),
    ]


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_gradient_does_not_depend_on_the_microbatch_split_nor_on_padding(tmp_path, batch_size):
    whole = gradient_of(tmp_path, mixed_groups(), batch_size=4)

    split = gradient_of(tmp_path, mixed_groups(), batch_size=batch_size)

    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, atol=1e-10, rtol=0)


def test_gradient_of_the_loop_equals_one_written_out_by_hand(tmp_path):
    groups = [group([[PREFERRED, 9], [REJECTED]], [1.0, 0.0])]

    gradient = gradient_of(tmp_path, groups, batch_size=2)

    # Advantages +1 and -1, three trained tokens: loss = -(l7 + l9 - l8) / 3.
    model = tiny_llama(dtype=torch.float64)
    first = model(input_ids=torch.tensor([[1, 2, 3, PREFERRED]])).logits.log_softmax(-1)[0]
    second = model(input_ids=torch.tensor([[1, 2, 3]])).logits.log_softmax(-1)[0]
    loss = -(first[2, PREFERRED] + first[3, 9] - second[2, REJECTED]) / 3
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad, atol=1e-7, rtol=0)


def engine_logprobs(model, completion, *, temperature):
    """Return the logprobs of an engine for a completion of the prompt 1 2 3."""
    tokens = torch.tensor([[1, 2, 3, *completion]])
    labels = torch.tensor([[-100, -100, *completion]])
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits
    row = token_logprobs_BT(logits, labels, torch.tensor([temperature]))[0, 2:]
    return [1.0, 1.0, 1.0, *row.tolist()]


@pytest.mark.parametrize(("mode", "temperature"), [("raw", 1.0), ("processed", 0.5)])
def test_step_on_policy_finds_no_mismatch_when_temperature_follows_the_engine(
    tmp_path, mode, temperature
):
    model = tiny_llama()
    trainer = make_trainer(tmp_path, model=model, logprobs_mode=mode)
    sampled = group([[7, 9], [8]], [1.0, 0.0], generation_params={"temperature": 0.5})
    sampled["inference_logprobs"] = [
        engine_logprobs(model, completion, temperature=temperature) for completion in ([7, 9], [8])
    ]

    metrics = trainer.train_on(build_batch([sampled], RowRules(seq_len=64), microbatch_size=2))

    assert metrics["alignment/diff_abs_mean"] < 1e-5
    assert metrics["grpo/mean_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["alignment/missing_fraction"] == 0.0


def tempered_gradient(tmp_path, *, mode, temperature, **settings):
    """Gradient of a batch sampled at 0.5 whose logprobs the engine reports at `temperature`."""
    model = tiny_llama(dtype=torch.float64)
    trainer = make_trainer(tmp_path, model=model, logprobs_mode=mode, max_grad_norm=1e9, **settings)
    sampled = group([[7, 9], [8]], [1.0, 0.0], generation_params={"temperature": 0.5})
    sampled["inference_logprobs"] = [
        engine_logprobs(model, completion, temperature=temperature) for completion in ([7, 9], [8])
    ]
    found = []
    trainer._optimizer.step = lambda: found.extend(p.grad.clone() for p in model.parameters())
    trainer.train_on(build_batch([sampled], RowRules(seq_len=64), microbatch_size=2))
    return torch.cat([gradient.flatten() for gradient in found])


@pytest.mark.parametrize("anchor", ["trainer", "inference"])
@pytest.mark.parametrize(("mode", "temperature"), [("raw", 1.0), ("processed", 0.5)])
def test_gradient_is_that_of_the_policy_that_sampled_whatever_the_engine_reports(
    tmp_path, mode, temperature, anchor
):
    found = tempered_gradient(tmp_path, mode=mode, temperature=temperature, ratio_anchor=anchor)

    # On policy the gradient is that of -A log softmax(logits / 0.5), advantages 1 and -1, averaged
    # over three tokens.
    model = tiny_llama(dtype=torch.float64)
    loss = 0.0
    for completion, advantage in (([7, 9], 1.0), ([8], -1.0)):
        tokens = torch.tensor([[1, 2, 3, *completion]])
        logprobs = (model(input_ids=tokens[:, :-1]).logits / 0.5).log_softmax(-1)[0, 2:]
        for t, token in enumerate(completion):
            loss = loss - advantage * logprobs[t, token] / 3
    loss.backward()
    exact = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert float((found - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize(
    ("mode", "temperature", "right"), [("raw", 0.5, "processed"), ("processed", 1.0, "raw")]
)
def test_logprobs_of_the_other_mode_are_named_once(tmp_path, caplog, mode, temperature, right):
    model = tiny_llama()
    # With its own weights the temperature would hardly show.
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    sampled = group([[7, 9], [8]], [1.0, 0.0], generation_params={"temperature": 0.5})
    sampled["inference_logprobs"] = [
        engine_logprobs(model, completion, temperature=temperature) for completion in ([7, 9], [8])
    ]
    trainer = make_trainer(
        tmp_path,
        model=model,
        groups=[sampled, sampled],
        logprobs_mode=mode,
        training_steps=2,
        lr=1e-9,
    )

    trainer.run()

    warnings = [r.message for r in caplog.records if f"set --logprobs-mode {right}" in r.message]
    assert len(warnings) == 1


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_mismatch_of_the_other_mode_does_not_depend_on_the_microbatches(tmp_path, mode):
    plain = group([[7, 9], [8]], [1.0, 0.0], logprob=-2.0)
    groups = [plain, plain | {"generation_params": {"temperature": 0.5}}]

    whole, split = (
        make_trainer(tmp_path, logprobs_mode=mode).train_on(
            build_batch(groups, RowRules(seq_len=64), microbatch_size=size)
        )
        for size in (4, 1)
    )

    name = "alignment/other_mode_diff_abs_mean"
    assert whole[name] > 0.5  # of the tokens at temperature 1, whose mode does not matter, as well
    assert split[name] == pytest.approx(whole[name], rel=1e-5)


def test_step_whose_gradient_is_not_finite_leaves_the_weights(tmp_path):
    trainer = make_trainer(tmp_path)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    broken = build_batch([group([[7], [8]], [1.0, 0.0])], RowRules(seq_len=64), microbatch_size=2)
    broken.microbatches[0].advantages_BT[:] = float("nan")

    metrics = trainer.train_on(broken)

    assert metrics["train/skipped_steps"] == 1.0
    for old, new in zip(before, trainer.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_step_on_a_batch_without_trained_tokens_is_harmless(tmp_path):
    trainer = make_trainer(tmp_path)
    masked = {"tokens": [[1, 2]], "masks": [[-100, -100]], "scores": [1.0]}

    metrics = trainer.train_on(build_batch([masked], RowRules(seq_len=64), microbatch_size=2))

    assert metrics["train/loss"] == 0.0
    assert metrics["train/grad_norm"] == 0.0
    assert metrics["train/skipped_steps"] == 0.0


def test_checkpoints_go_by_minutes_where_no_interval_is_given(tmp_path):
    trainer = make_trainer(
        tmp_path, training_steps=6, checkpoint_interval=None, checkpoint_minutes=10
    )
    minutes = iter([3, 11, 12, 20, 22, 999])
    now = 0.0
    trainer._publisher._clock = lambda: now
    trainer._publisher._saved_at = 0.0
    steps = trainer._run_step

    def step_of_some_minutes():
        nonlocal now
        now = 60.0 * next(minutes)
        steps()

    trainer._run_step = step_of_some_minutes
    trainer.run()

    # After 11 and 22 minutes; the last step is followed by the final model.
    assert trainer._feed.checkpoints == [2, 5]


def test_checkpoint_policy_of_the_defaults_writes_little():
    config = TrainingConfig(model_name="m")

    assert (config.checkpoint_interval, config.checkpoint_minutes) == (None, 20.0)
    assert config.keep_checkpoints == 2
