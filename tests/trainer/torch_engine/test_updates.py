"""Weight updates, pauses and aborted requests of the torch engine under load."""

from __future__ import annotations

import copy
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from atroposlib.scored_data import read_spans
from example_trainer.engine import EngineControl
from example_trainer.lora import add_adapters
from example_trainer.merging import MergingSync
from example_trainer.torch_engine.jobs import Job, PromptRequest
from example_trainer.weight_sync import InPlaceSync, export_for_engine
from tests.trainer.tiny import SavedTokenizer, move_adapters, tiny_config
from tests.trainer.torch_engine.conftest import LocalEngine, serve_locally, wait_until

pytestmark = pytest.mark.slow

LONG = {"max_tokens": 200, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def other_model(model_folder: Path) -> Any:
    """Other weights of the same shape."""
    import torch
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.8)
    return other


@pytest.fixture(scope="module")
def other_folder(other_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_for_engine(other_model, tmp_path_factory.mktemp("other") / "weights")


@pytest.fixture
def local(model_folder: Path) -> Iterator[LocalEngine]:
    with serve_locally(model_folder, weight_version="7") as engine:
        yield engine


@pytest.fixture
def control(local: LocalEngine) -> Iterator[EngineControl]:
    control = EngineControl(local.url)
    yield control
    control.close()


def in_background(local: LocalEngine, pool: ThreadPoolExecutor, **options: Any) -> Future[Any]:
    """Start a long request and return once tokens of it exist."""
    generated = local.engine.counts().generated_tokens
    future = pool.submit(local.complete, [9, 30, 31], **{**LONG, **options})
    wait_until(lambda: local.engine.counts().generated_tokens > generated + 20)
    return future


@contextmanager
def held_back(local: LocalEngine, num_tokens: int) -> Iterator[None]:
    """Let the engine generate about `num_tokens` tokens meanwhile, so that no request ends."""
    engine, is_over = local.engine, threading.Event()
    step, most = engine.batch.step, engine.counts().generated_tokens + num_tokens

    def step_later() -> None:
        while not (is_over.is_set() or engine._commands or engine.counts().generated_tokens < most):
            is_over.wait(0.002)
        step()

    engine.batch.step = step_later
    try:
        yield
    finally:
        is_over.set()
        engine.batch.step = step


def gaps_by_token(model: Any, choice: Any) -> list[float]:
    """Return [C] differences between the logprobs of a choice and those of a model."""
    import torch

    prompt, tokens = choice["prompt_token_ids"], choice["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    found = choice["logprobs"]["token_logprobs"]
    rows = enumerate(zip(tokens, found, strict=True))
    return [abs(float(logprobs[t, token]) - value) for t, (token, value) in rows]


def test_kept_requests_continue_under_new_weights_with_new_caches(
    local: LocalEngine, control: EngineControl, model: Any, other_model: Any, other_folder: Path
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with held_back(local, 100):
            future = in_background(local, pool, n=4)
            control.require_in_place_updates()
            control.reload_weights(other_folder, pause_mode="keep", version=12)
        choices = future.result()["choices"]
    after = local.complete([9, 30, 31], max_tokens=20)["choices"][0]

    for choice in choices:
        before, after_update = choice["weight_versions"]
        assert (before["version"], after_update["version"]) == ("7", "12")
        assert before["num_tokens"] + after_update["num_tokens"] == len(choice["token_ids"]) == 200
        count = before["num_tokens"]
        assert max(gaps_by_token(model, choice)[:count]) < 1e-4
        assert max(gaps_by_token(other_model, choice)[count:]) < 1e-4
    assert after["weight_versions"] == [{"version": "12", "num_tokens": len(after["token_ids"])}]
    assert max(gaps_by_token(other_model, after)) < 1e-4
    assert local.http.get("/server_info").json()["torch_engine"]["weight_version"] == "12"


@pytest.mark.parametrize("discard", ["reload", "reset"])
def test_caches_of_finished_requests_end_with_the_weights(
    local: LocalEngine, model: Any, other_model: Any, other_folder: Path, discard: str
) -> None:
    prompt = list(range(10, 60))
    local.complete(prompt, max_tokens=20)
    if discard == "reload":
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(other_folder)}}
        local.http.post("/collective_rpc", json=body).raise_for_status()
    else:
        local.http.post("/reset_prefix_cache").raise_for_status()
    cached = local.engine.counts().cached_tokens

    after = local.complete(prompt, max_tokens=20)["choices"][0]

    assert local.engine.counts().cached_tokens == cached
    used = other_model if discard == "reload" else model
    assert max(gaps_by_token(used, after)) < 1e-4


def test_a_reload_without_a_version_leaves_the_key_out(
    local: LocalEngine, other_folder: Path
) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(other_folder)}}

    assert local.http.post("/collective_rpc", json=body).json() == {"results": [None]}

    assert "weight_versions" not in local.complete([9], max_tokens=2)["choices"][0]


def test_unknown_versions_of_some_tokens_are_null_and_the_others_are_named(
    local: LocalEngine, other_folder: Path
) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(other_folder)}}
    with ThreadPoolExecutor(1) as pool:
        with held_back(local, 100):
            future = in_background(local, pool)
            local.http.post("/collective_rpc", json=body).raise_for_status()
        [choice] = future.result()["choices"]

    spans = read_spans(choice["weight_versions"], 200, completion_index=0)

    assert [span.version for span in spans] == ["7", None]
    assert all(span.num_tokens > 0 for span in spans)


def test_waiting_pause_lets_requests_finish_and_holds_new_ones(
    local: LocalEngine, control: EngineControl, other_folder: Path
) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = in_background(local, pool)
        local.http.post("/pause", params={"mode": "wait"})
        assert running.done() or running.result(timeout=60)
        assert local.http.get("/is_paused").json() == {"is_paused": True}
        held = pool.submit(local.complete, [9], max_tokens=3)
        wait_until(lambda: local.engine.counts().waiting == 1)
        assert not held.done()
        local.http.post("/resume")
        assert len(held.result()["choices"][0]["token_ids"]) <= 3

    [versions] = running.result()["choices"][0]["weight_versions"]
    assert versions == {"version": "7", "num_tokens": 200}
    assert local.http.get("/is_paused").json() == {"is_paused": False}


def test_waiting_pause_ends_when_the_clients_it_waits_for_disconnect(local: LocalEngine) -> None:
    engine = local.engine
    jobs = [Job(PromptRequest((9,), max_tokens=250), on_done=lambda _: None) for _ in range(2)]
    for job in jobs:
        engine.submit(job)
    paused = engine.pause("wait")
    engine.abort(jobs)

    paused.result(timeout=60)

    assert engine.is_paused
    engine.resume().result(timeout=60)
    assert local.complete([9], max_tokens=2)["choices"]


def test_waiting_pause_ends_when_a_step_fails(
    local: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(local.engine.batch, "step", fail)
    failed: Future[Job] = Future()
    local.engine.submit(Job(PromptRequest((9,)), on_done=failed.set_result))

    local.engine.pause("wait").result(timeout=60)

    assert "out of memory" in str(failed.result(timeout=60).error)


def test_closing_answers_requests_and_pauses(local: LocalEngine) -> None:
    engine = local.engine
    answered: Future[Job] = Future()
    engine.pause("keep").result(timeout=60)
    engine.submit(Job(PromptRequest((9,)), on_done=answered.set_result))
    cancelled = engine.pause("wait")
    cancelled.cancel()

    engine.close()

    assert "shutting down" in str(answered.result(timeout=60).error)


def test_aborting_pause_answers_with_the_tokens_so_far(local: LocalEngine) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = in_background(local, pool, n=2)
        local.http.post("/pause", params={"mode": "abort"})
        choices = running.result()["choices"]
        local.http.post("/resume")

    for choice in choices:
        assert choice["finish_reason"] == "abort"
        assert 0 < len(choice["token_ids"]) < 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_its_slots(local: LocalEngine, stream: bool) -> None:
    body = {"prompt": [9], "n": 64, "max_tokens": 250, "ignore_eos": True, "stream": stream}

    with (
        httpx.Client(base_url=local.url, timeout=0.3) as client,
        pytest.raises(httpx.ReadTimeout),
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        answer.read() if not stream else _stop_after_first(answer)

    wait_until(lambda: local.engine.counts()[:2] == (0, 0))
    assert local.engine.counts().generated_tokens < 64 * 250


def _stop_after_first(answer: httpx.Response) -> None:
    next(answer.iter_lines())
    raise httpx.ReadTimeout("enough")


def test_a_command_that_fails_does_not_end_the_engine(local: LocalEngine) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    local.engine._command(fail)

    assert local.complete([9], max_tokens=2)["choices"][0]["finish_reason"] == "length"


def test_wrong_checkpoints_are_named_and_leave_the_weights(
    local: LocalEngine, model: Any, model_folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(other_folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    cases: dict[str, dict[str, Any]] = {
        "shape": {**tensors, name: tensors[name][:-1].contiguous()},
        "lacks": {key: value for key, value in tensors.items() if key != name},
        "unknown": {**tensors, name + "_2": tensors[name].clone()},
        "type": {**tensors, name: tensors[name].char()},
    }
    folders = {}
    for case, changed in cases.items():
        folders[case] = tmp_path / case
        shutil.copytree(other_folder, folders[case])
        save_file(changed, folders[case] / "model.safetensors", metadata={"format": "pt"})
    truncated = tmp_path / "truncated"
    shutil.copytree(other_folder, truncated)
    data = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(data[: len(data) // 2])

    def reload(folder: Path) -> httpx.Response:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        return local.http.post("/collective_rpc", json=body)

    for case, folder in folders.items():
        answer = reload(folder)
        assert answer.status_code == 400, case
        assert name in answer.json()["error"]["message"]
        assert case in answer.json()["error"]["message"]
    for folder in (truncated, tmp_path / "nothing"):
        assert reload(folder).status_code == 400
    choice = local.complete([9, 30], max_tokens=20)["choices"][0]
    assert max(gaps_by_token(model, choice)) < 1e-4
    assert choice["weight_versions"][0]["version"] == "7"


def test_a_tied_model_is_updated_from_an_untied_checkpoint(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from example_trainer.demo.settings import train_tokenizer

    tokenizer: PreTrainedTokenizerFast = train_tokenizer(
        [[{"role": "user", "content": "a"}]], max_length=256
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    tied = LlamaForCausalLM(config)
    tied.save_pretrained(tmp_path / "tied")
    tokenizer.save_pretrained(tmp_path / "tied")
    with torch.no_grad():
        for parameter in tied.parameters():
            parameter.mul_(3)
    export_for_engine(tied, tmp_path / "update")

    with serve_locally(tmp_path / "tied") as local:
        control = EngineControl(local.url)
        assert not control.keeps_stale_output_layer()
        control.reload_weights(tmp_path / "update", pause_mode="keep", version=1)
        control.close()
        choice = local.complete([9, 30], max_tokens=20)["choices"][0]

    assert max(gaps_by_token(tied.eval(), choice)) < 1e-4


@pytest.mark.parametrize("urls", ["port", "named"])
def test_merged_adapters_make_it_report_the_trainers_logprobs(
    local: LocalEngine, model: Any, tmp_path: Path, urls: str
) -> None:
    policy = copy.deepcopy(model)
    settings = (
        {"engine_urls": [local.url]} if urls == "named" else {"vllm_port": urlsplit(local.url).port}
    )
    config = tiny_config(tmp_path, lora=True, engine="torch", **settings)
    add_adapters(policy, config)
    sync = MergingSync(config, InPlaceSync(config))
    sync.check_before_load()
    sync.start(policy, SavedTokenizer(), source=config.model_name)
    fresh = local.complete([9, 30], max_tokens=20)["choices"][0]
    gap_fresh = max(gaps_by_token(policy.eval(), fresh))

    move_adapters(policy)
    sync.publish(policy, checkpoint=tmp_path / "step_1", step=1)
    sync.close()

    after = local.complete([9, 30], max_tokens=20)["choices"][0]
    assert gap_fresh < 1e-4
    assert max(gaps_by_token(policy, fresh)) > 0.1
    assert max(gaps_by_token(policy, after)) < 1e-4
    assert after["weight_versions"][0]["version"] == "1"
