"""The pieces that feed TRL's asynchronous trainer; tests/clients runs the trainer itself."""

from __future__ import annotations

import itertools
import queue
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from atroposlib.api.client import LeasedBatch, batches
from atroposlib.api.trainers import FaceRules, groups_of_rows
from atroposlib.api.trainers.trl import (
    EngineReload,
    NoWeightTransfer,
    SampleBuffer,
    SampleLedger,
    ServiceRolloutWorker,
    samples_of,
    samples_per_step,
    tree_attention_on_cpu,
)
from atroposlib.errors import ConfigError, GroupError, InferenceError

pytestmark = pytest.mark.slow

TOKENS = [[1, 2, 3, 7, 5, 9], [1, 2, 3, 8, 5, 9], [1, 2, 3, 7, 5, 9], [1, 2, 3, 8, 5, 9]]
GROUP = {
    "tokens": TOKENS,
    "masks": [[-100, -100, -100, row[3], -100, row[5]] for row in TOKENS],
    "scores": [1.0, 0.0, 1.0, 0.0],
    "inference_logprobs": [[1.0, 1.0, 1.0, -3.4, 1.0, -3.4]] * 4,
}


def arguments(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{
            "max_steps": 3,
            "token_budget": 0,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "world_size": 3,
            **fields,
        }
    )


def test_samples_per_step_counts_all_processes() -> None:
    assert samples_per_step(arguments()) == 24


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_steps": -1}, "max_steps: set it"),
        ({"token_budget": None}, "token_budget: None"),
        ({"token_budget": 512}, "token_budget=0"),
    ],
)
def test_samples_per_step_rejects_an_open_number(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        samples_per_step(arguments(**fields))


def batch(name: str) -> LeasedBatch:
    return LeasedBatch([], name)


def names(ledger: SampleLedger) -> list[str | None]:
    return [one.batch_id for one in ledger.take_finished()]


def test_ledger_finishes_a_batch_after_the_step_that_used_its_last_sample() -> None:
    ledger = SampleLedger()
    first, second = ledger.open(batch("1"), 3), ledger.open(batch("2"), 3)
    for share in (first, first, first, second):
        ledger.hand_out(share)

    ledger.trained(2)
    after_one = names(ledger)
    ledger.trained(2)
    after_two = names(ledger)

    assert (after_one, after_two, names(ledger)) == ([], ["1"], [])
    assert (ledger.num_trained, ledger.num_handed_out) == (4, 4)


def test_ledger_finishes_a_batch_whose_last_sample_was_dropped() -> None:
    ledger = SampleLedger()
    share = ledger.open(batch("1"), 2)
    ledger.drop(share)
    ledger.hand_out(share)

    ledger.trained(1)

    assert names(ledger) == ["1"]
    assert ledger.num_expected == 1


def test_ledger_finishes_a_batch_without_samples_at_once() -> None:
    ledger = SampleLedger()
    ledger.open(batch("1"), 0)

    assert names(ledger) == ["1"]


def test_buffer_passes_over_what_is_refused_and_repeats_the_last_sample_at_the_end() -> None:
    taken: list[str] = []

    def decide(sample: str, share: Any) -> bool:
        if sample != "stale":
            taken.append(sample)
        return sample != "stale"

    buffer = SampleBuffer(decide, lambda: len(taken) == 2)
    share = SampleLedger().open(batch("1"), 3)
    for sample in ("a", "stale", "b"):
        buffer.put_nowait((sample, share))

    assert [buffer.get(timeout=60) for _ in range(4)] == ["a", "b", "b", "b"]


def test_buffer_is_empty_before_the_first_sample() -> None:
    buffer = SampleBuffer(lambda sample, share: True, lambda: False)

    with pytest.raises(queue.Empty):
        buffer.get(timeout=0.001)


class Engine:
    """Answers as the development routes of vLLM do, and records them."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.paths: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.paths.append(path)
        if path == "/collective_rpc" and request.content == b"{}":
            return httpx.Response(404 if self.failing == "routes" else 400)
        return httpx.Response(500 if path == self.failing else 200, json={})


def reload_with(engine: Engine, directory: Path) -> EngineReload:
    transport = httpx.MockTransport(engine)
    return EngineReload("http://engine:8000/v1", directory, transport=transport)


def test_engine_reload_writes_the_weights_between_pause_and_resume(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    load_file = pytest.importorskip("safetensors.torch").load_file
    engine = Engine()
    transfer = reload_with(engine, tmp_path / "weights")

    transfer.init_weight_transfer()
    transfer.pause()
    transfer.send_weights(iter([("layer", torch.ones(2))]))
    transfer.resume()

    assert engine.paths == [
        "/collective_rpc", "/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"
    ]  # fmt: skip
    assert load_file(tmp_path / "weights" / "model.safetensors")["layer"].tolist() == [1.0, 1.0]


def test_engine_reload_without_the_routes_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        reload_with(Engine("routes"), tmp_path).init_weight_transfer()


def test_engine_reload_that_fails_leaves_the_engine_running(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    engine = Engine("/reset_prefix_cache")

    with pytest.raises(InferenceError, match="/reset_prefix_cache answered 500"):
        reload_with(engine, tmp_path).send_weights(iter([("layer", torch.ones(2))]))

    assert engine.paths[-1] == "/resume"


@pytest.fixture
def trl() -> Any:
    """What TRL packs samples into a row with, and its protocols."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("trl.experimental.async_grpo.packing", exc_type=ImportError)
        from trl.experimental.async_grpo import async_grpo_trainer, packing

    return SimpleNamespace(
        TreeRow=packing.TreeRow,
        protocol=async_grpo_trainer.RolloutWorkerProtocol,
        transfer=async_grpo_trainer.WeightTransferProtocol,
    )


def members_of(protocol: type[Any]) -> set[str]:
    return set(protocol.__annotations__) | {n for n in vars(protocol) if not n.startswith("_")}


def test_worker_and_transfers_have_the_members_of_trls_protocols(trl: Any) -> None:
    stream = batches("http://localhost:9", batch_size=24, num_steps=3, acknowledge="explicit")
    worker = ServiceRolloutWorker(stream, arguments(max_staleness=4, temperature=1.0))

    assert members_of(trl.protocol) <= set(dir(worker))
    for kind in (EngineReload, NoWeightTransfer):
        assert members_of(trl.transfer) <= set(dir(kind))


def rows(**fields: Any) -> list[Any]:
    rules = FaceRules("TRL", takes_advantages=True, needs_logprobs=True)
    (found,) = groups_of_rows(LeasedBatch([{**GROUP, **fields}], "1"), rules)
    return found


def test_samples_have_every_token_and_the_advantages_of_trls_own_worker(trl: Any) -> None:
    samples = samples_of(rows(policy_version=2), group_id=5, version=9)

    assert [sample.input_ids.tolist() for sample in samples] == TOKENS
    assert samples[0].completion_mask.tolist() == [0, 0, 0, 1, 0, 1]
    assert samples[0].old_log_probs.tolist() == pytest.approx([0, 0, 0, -3.4, 0, -3.4])
    # The mean of the scores is 0.5, and so is their population deviation.
    assert [sample.advantage for sample in samples] == pytest.approx([1, -1, 1, -1])
    assert {(sample.model_version, sample.group_id) for sample in samples} == {(2, 5)}
    assert samples[0].metrics == {"reward": 1.0, "reward_std": 0.5}


def test_samples_have_the_advantages_and_switches_of_the_environment(trl: Any) -> None:
    made = samples_of(
        rows(
            advantages=[[0.25] * 6, [-2.0] * 6, [9.0, 9.0, 9.0, 3.0, 9.0, 3.0], [1.0] * 6],
            overrides=[{}, {}, {}, {"set_advantage_to_zero": True}],
        ),
        group_id=0,
        version=9,
    )

    assert [sample.advantage for sample in made] == [0.25, -2.0, 3.0, 0.0]
    assert made[0].model_version == 9


def test_samples_reject_advantages_that_differ_within_a_trajectory(trl: Any) -> None:
    per_token = [[0.0] * 6, [0.0, 0.0, 0.0, 1.0, 0.0, 2.0], [0.0] * 6, [0.0] * 6]

    with pytest.raises(GroupError, match=r"advantages\[1\]: the values differ"):
        samples_of(rows(advantages=per_token), group_id=0, version=0)


def test_samples_leave_out_a_trajectory_without_trained_tokens(trl: Any) -> None:
    masks = [[-100] * 6, *GROUP["masks"][1:]]

    assert len(samples_of(rows(masks=masks), group_id=0, version=0)) == 3


@pytest.mark.parametrize("window", [None, 3])
def test_tree_attention_on_cpu_equals_attention_of_each_sample(
    trl: Any, window: int | None
) -> None:
    """A packed row gives every sample what plain causal attention gives it alone."""
    torch = pytest.importorskip("torch")
    row = trl.TreeRow()
    for sample in samples_of(rows(), group_id=0, version=0)[:2]:
        row.add({name: getattr(sample, name) for name in sample.__slots__})
    packed = row.pack()
    num_tokens, num_heads = len(packed["input_ids"]), 4
    torch.manual_seed(0)
    query = torch.randn(1, num_heads, num_tokens, 8)
    key, value = torch.randn(2, 1, 2, num_tokens, 8)  # two heads share one key

    made, _ = tree_attention_on_cpu(
        None, query, key, value, None, sliding_window=window, **_tree_arguments(packed)
    )

    assert num_tokens == 10  # two samples of 6 tokens share two; TRL forks one token earlier
    packed_at = _positions(row, packed)
    for positions in packed_at:
        distance = torch.arange(6)[:, None] - torch.arange(6)[None]
        is_seen = (distance >= 0) & (distance < (window or 99))
        alone = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, positions],
            key[:, :, positions],
            value[:, :, positions],
            attn_mask=is_seen,
            enable_gqa=True,
        )
        torch.testing.assert_close(made[:, positions], alone.transpose(1, 2))


def _tree_arguments(packed: dict[str, Any]) -> dict[str, Any]:
    names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    return {name: packed[name] for name in names}


def _positions(row: Any, packed: dict[str, Any]) -> list[list[int]]:
    """Return where the tokens of each sample are in the packed row, by following its paths."""
    ends = packed["tree_cu_seqlens_k"].tolist()
    paths = [packed["tree_kv_index"][start:end].tolist() for start, end in itertools.pairwise(ends)]
    ids = packed["input_ids"].tolist()
    found = []
    for sample in row.samples:
        tokens = sample["input_ids"].tolist()
        found.append(next(path for path in paths if [ids[at] for at in path] == tokens))
    return found
