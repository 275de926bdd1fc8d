"""Weights that are damaged, not finite, or replaced on disk while the torch engine uses them."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.errors import ConfigError
from tests.trainer.tiny import save_tiny_model, tiny_config
from tests.trainer.torch_engine.conftest import LocalEngine, serve_locally
from tests.trainer.torch_engine.test_updates import gaps_by_token

pytestmark = pytest.mark.slow

NAME = "model.layers.1.mlp.up_proj.weight"
NAN = float("nan")
POISONED = 200
"""A token whose embedding is NaN."""


def reload(local: LocalEngine, folder: Path) -> httpx.Response:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    return local.http.post("/collective_rpc", json=body)


def scores(local: LocalEngine) -> list[float]:
    """Return the logprobs of some tokens under the weights in use."""
    [choice] = local.complete([9, 30, 31, 32, 40], max_tokens=0, echo=True)["choices"]
    found: list[float] = choice["logprobs"]["token_logprobs"][1:]
    return found


def changed_copy(source: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Copy the folder of a model with other tensors."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def sharded_copy(model: Any, target: Path) -> list[Path]:
    """Save other weights of the same shape in several files; return these."""
    import torch

    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.8)
    other.save_pretrained(target, max_shard_size="100KB")
    shards = sorted(target.glob("*.safetensors"))
    assert len(shards) > 1
    return shards


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may damage."""
    return Path(shutil.copytree(model_folder, tmp_path / "served"))


@pytest.fixture
def local(folder: Path) -> Iterator[LocalEngine]:
    with serve_locally(folder, weight_version="7") as engine:
        yield engine


def test_engine_whose_file_is_overwritten_in_place_keeps_its_weights(
    local: LocalEngine, folder: Path
) -> None:
    path = folder / "model.safetensors"
    before = scores(local)

    # Not truncated, which would end this process if the file were mapped.
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))

    assert scores(local) == before


def test_own_memory_copies_each_storage_once() -> None:
    import torch

    from example_trainer.model import own_memory

    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4, bias=False) for name in "abc"})
    model["b"].weight = model["a"].weight
    model["c"].weight.data = model["a"].weight.data.T
    model.register_buffer("scale", model["a"].weight.data[0])
    values = [tensor.clone() for tensor in model.state_dict().values()]
    storage = model["a"].weight.untyped_storage().data_ptr()

    own_memory(model)

    found = list(model.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(found, values, strict=True))
    [new] = {tensor.untyped_storage().data_ptr() for tensor in found}
    assert new != storage
    assert model["b"].weight is model["a"].weight


def test_reload_of_a_file_that_changes_meanwhile_leaves_the_weights(
    local: LocalEngine, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    *_, last = sharded_copy(model, tmp_path / "other")
    data = last.read_bytes()
    before = scores(local)
    load = safetensors.torch.load
    replaced = [data[:-8], data[:1000] + bytes(len(data) - 1000)]

    def load_then_replace(content: bytes) -> Any:
        if content == data:
            last.write_bytes(replaced[0])
        return load(content)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "load", load_then_replace)
        truncated = reload(local, tmp_path / "other")
        last.write_bytes(data)
        replaced.reverse()
        rewritten = reload(local, tmp_path / "other")

    for answer in (truncated, rewritten):
        assert answer.status_code == 400
        assert last.name in answer.json()["error"]["message"]
    assert scores(local) == before
    assert local.http.get("/server_info").json()["torch_engine"]["weight_version"] == "7"


def test_reload_without_one_of_the_files_leaves_the_weights(
    local: LocalEngine, model: Any, tmp_path: Path
) -> None:
    *_, last = sharded_copy(model, tmp_path / "other")
    data = last.read_bytes()
    before = scores(local)

    for damaged in (b"", data[:4], data[:50], (2**60).to_bytes(8, "little") + data[8:], data[:-1]):
        last.write_bytes(damaged)
        assert last.name in reload(local, tmp_path / "other").json()["error"]["message"]
    last.unlink()
    assert last.name in reload(local, tmp_path / "other").json()["error"]["message"]
    assert scores(local) == before

    last.write_bytes(data)
    assert reload(local, tmp_path / "other").status_code == 200
    assert scores(local) != before


@pytest.mark.parametrize("value", [NAN, float("inf"), 1e300])
def test_reload_of_weights_that_are_not_finite_names_the_tensor(
    local: LocalEngine, folder: Path, tmp_path: Path, value: float
) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors[NAME] = tensors[NAME].double()
        tensors[NAME][3, 4] = value

    before = scores(local)

    answer = reload(local, changed_copy(folder, tmp_path / "other", change))

    assert answer.status_code == 400
    assert f"{NAME} in " in answer.json()["error"]["message"]
    assert scores(local) == before


def test_reload_with_an_index_that_is_deeply_nested_is_refused(
    local: LocalEngine, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)

    answer = reload(local, tmp_path)

    assert answer.status_code == 400
    assert "index.json cannot be read" in answer.json()["error"]["message"]


def test_reload_of_a_pipe_or_of_a_file_larger_than_the_model_is_refused_unread(
    local: LocalEngine, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with (tmp_path / "large.safetensors").open("wb") as file:
        file.truncate(2**40)

    for name, reason in (("pipe", "it is not a file"), ("large", f"it has {2**40} bytes")):
        index = {"weight_map": {NAME: f"{name}.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        answer = reload(local, tmp_path)
        assert answer.status_code == 400
        assert f"{name}.safetensors cannot be read: {reason}" in answer.json()["error"]["message"]
        assert answer.json()["error"]["message"].count("cannot be read") == 1


@pytest.fixture(scope="module")
def poisoned(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    """An engine whose logits are NaN after one token."""

    def change(tensors: dict[str, Any]) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        tensors.setdefault("lm_head.weight", embedding.clone())
        embedding[POISONED] = NAN

    folder = tmp_path_factory.mktemp("poisoned") / "model"
    changed_copy(model_folder, folder, change)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with serve_locally(folder) as engine:
        yield engine


@pytest.mark.parametrize(
    "options",
    [
        {"n": 3, "logprobs": 2},
        {"n": 2, "temperature": 0.0},
        {"max_tokens": 0, "prompt_logprobs": 0},
        {"max_tokens": 0, "echo": True, "logprobs": 2},
        {"logit_bias": {"5": 100.0}, "top_p": 0.5},
    ],
)
def test_request_whose_logits_are_not_finite_fails(
    poisoned: LocalEngine, options: dict[str, Any]
) -> None:
    body = {"prompt": [9, POISONED, 31], "max_tokens": 5, **options}

    answer = poisoned.http.post("/v1/completions", json=body)

    assert answer.status_code == 500
    assert "logits are NaN or infinite" in answer.json()["error"]["message"]
    assert poisoned.engine.counts()[:2] == (0, 0)


def test_stream_whose_logits_are_not_finite_ends_with_an_error(poisoned: LocalEngine) -> None:
    body = {"prompt": [9, POISONED], "stream": True}

    text = poisoned.http.post("/v1/completions", json=body).text

    assert "logits are NaN or infinite" in text


def test_other_requests_go_on_where_one_is_not_finite(poisoned: LocalEngine, model: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    bad = {"prompt": [[POISONED] * 100, [9, POISONED]], "n": 4, "max_tokens": 5}
    options = {"ignore_eos": True, "logit_bias": {str(POISONED): -100}}
    later: list[Any] = []

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(poisoned.complete, [9, 30], n=6, max_tokens=200, **options)
        while not later or not running.done():
            assert poisoned.http.post("/v1/completions", json=bad).status_code == 500
            # In slots that the failed ones had.
            later += poisoned.complete([9, 31], n=3, max_tokens=10, **options)["choices"]

    for choice in (*running.result()["choices"], *later):
        assert max(gaps_by_token(model, choice)) < 1e-4


def test_tokens_that_the_model_excludes_have_the_lowest_logprob(
    local: LocalEngine, model: Any
) -> None:
    import torch

    def exclude(_: Any, __: Any, logits: Any) -> Any:
        return logits.index_fill(-1, torch.tensor([31, 33]), -torch.inf)

    hook = local.engine.batch.model.lm_head.register_forward_hook(exclude)
    try:
        [choice] = local.complete(
            [9, 30, 31, 32], n=1, max_tokens=20, echo=True, temperature=1.0, ignore_eos=True
        )["choices"]
    finally:
        hook.remove()

    assert choice["logprobs"]["token_logprobs"][2] == -9999.0
    assert not {31, 33} & set(choice["token_ids"])
    assert min(choice["logprobs"]["token_logprobs"][4:]) > -9999.0


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def test_command_with_a_damaged_file_of_weights_ends_in_one_line(
    folder: Path, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    from example_trainer.torch_engine.__main__ import main

    damage(folder / "model.safetensors")

    with pytest.raises(SystemExit) as ended:
        main(["--model", str(folder), "--port", str(free_port)])

    assert ended.value.code == 2
    assert f"model '{folder}' cannot be loaded: " in capsys.readouterr().err.splitlines()[-1]


def test_trainer_with_a_damaged_file_of_weights_names_the_model(tmp_path: Path) -> None:
    from example_trainer.model import load_frozen_model, load_model_and_tokenizer

    folder = save_tiny_model(tmp_path / "model")
    damage(folder / "model.safetensors")
    config = tiny_config(tmp_path, model_name=str(folder))

    with pytest.raises(ConfigError, match=r"model .* cannot be loaded"):
        load_model_and_tokenizer(config)
    with pytest.raises(ConfigError, match=r"reference_model .* cannot be loaded"):
        load_frozen_model(str(folder), config)


def pickle_weights(folder: Path) -> None:
    """Replace the weights by a pickle that would write a file."""
    import torch

    class Code:
        def __reduce__(self) -> Any:
            return Path.touch, (folder / "was_run",)

    (folder / "model.safetensors").unlink()
    torch.save({NAME: Code()}, folder / "pytorch_model.bin")


def write_config(**fields: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return write


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (pickle_weights, "a pickle that could run code"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "recursion"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "'list' object"),
        (write_config(num_attention_heads=0), "zero"),
        (write_config(num_attention_heads="two"), "num_attention_heads"),
        (write_config(quantization_config={"quant_method": "aqlm"}), "aqlm"),
    ],
)
def test_folder_that_is_not_one_of_a_model_is_refused(
    tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    from example_trainer.model import load_model_and_tokenizer
    from example_trainer.torch_engine.loading import TorchEngineOptions, load_engine

    folder = save_tiny_model(tmp_path / "model")
    change(folder)

    with pytest.raises(ConfigError, match=f"cannot be loaded.*{reason}"):
        load_engine(TorchEngineOptions(model=str(folder)))
    with pytest.raises(ConfigError, match=f"cannot be loaded.*{reason}"):
        load_model_and_tokenizer(tiny_config(tmp_path, model_name=str(folder)))
    assert not (folder / "was_run").exists()


def test_model_that_computes_nan_is_not_served(folder: Path, tmp_path: Path) -> None:
    from example_trainer.torch_engine.loading import TorchEngineOptions, load_engine

    bad = changed_copy(folder, tmp_path / "other", lambda tensors: tensors[NAME].fill_(NAN))

    with pytest.raises(ConfigError, match="computes NaN"):
        load_engine(TorchEngineOptions(model=str(bad), device="cpu"))


def test_experts_are_replaced_from_a_checkpoint_that_has_each_by_itself(tmp_path: Path) -> None:
    """transformers joins the experts of a layer in memory; checkpoints and other engines do not."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from example_trainer.torch_engine.weights import replace_weights

    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16,
    )  # fmt: skip
    served, trained = Qwen3MoeForCausalLM(config), Qwen3MoeForCausalLM(config)
    trained.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in tensors

    replace_weights(served, tmp_path)

    state = trained.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in served.state_dict().items())

    del tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="lacks tensors of the served model"):
        replace_weights(Qwen3MoeForCausalLM(config), tmp_path)
