"""Whole runs on images: the shipped environments, a scripted engine, the real service, a step."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("PIL", reason="the extra examples is not installed")

from PIL import Image

from atroposlib.errors import ConfigError
from atroposlib.tasks.images import ImageEnv
from environments.multimodal_dpo import (
    clevr_cogen_a_train,
    clevr_complex,
    ocr_vqa,
    pixmo_clocks,
    pixmo_count,
    pixmo_point_explanations,
)
from environments.multimodal_dpo.draw_samples import DATA
from example_trainer.batch import build_batch, split_batch
from example_trainer.images import image_support
from example_trainer.launch.preflight import read_model
from example_trainer.merging import MergedModel
from example_trainer.model import load_model_and_tokenizer
from example_trainer.policy import open_reference, prepare_policy
from example_trainer.rows import RowRules
from example_trainer.trainers import train
from example_trainer.weight_sync import export_for_engine
from tests.environments.offline import make_env
from tests.fakes import ScriptedEngine
from tests.trainer.test_trainers import ScriptedEnvironment, run_config
from tests.trainer.tiny import move_adapters, save_tiny_model, tiny_config
from tests.trainer.tiny_images import (
    image_group,
    image_tokens,
    picture,
    save_tiny_vl,
    support,
    tiny_vl,
)

pytestmark = pytest.mark.slow

RIGHT = {
    clevr_cogen_a_train.MultimodalExampleEnv: "\\boxed{{{}}}",
    clevr_complex.MultimodalComplexEnv: "\\boxed{{{}}}",
    ocr_vqa.OcrVqaEnv: "<answer>{}</answer>",
    pixmo_clocks.ClockDatasetEnv: "<answer>{}</answer>",
    pixmo_count.PixmoCountEnv: "<answer>{}</answer>",
    pixmo_point_explanations.PixmoPointExplanationsEnv: "<answer>{}</answer>",
}
"""Environment to a right answer."""


class ScriptedImageEngine(ScriptedEngine):
    """A multimodal vLLM: prompts have all tokens of their images, answers their ids on request."""

    def __init__(self, replies: list[str], num_tokens: Any) -> None:
        super().__init__(replies)
        self._num_tokens = num_tokens

    def _chat(self, body: dict[str, Any], fault: Any) -> dict[str, Any]:
        prompt_ids = self._prompt_of(body["messages"])
        answers = self._sample(prompt_ids, body, fault)
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": text},
                "finish_reason": reason,
                "token_ids": [min(t, 255) for t in ids] if body.get("return_token_ids") else None,
                "logprobs": {"content": [_entry(t) for t in ids]} if body.get("logprobs") else None,
            }
            for i, (text, ids, reason) in enumerate(answers)
        ]
        envelope = self._envelope("chat.completion", choices)
        return envelope | {"prompt_token_ids": prompt_ids if body.get("return_token_ids") else None}

    def _prompt_of(self, messages: list[dict[str, Any]]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            content = message["content"]
            parts = [{"text": content}] if isinstance(content, str) else content
            for part in parts:
                if "image_url" in part:
                    ids += image_tokens(self._num_tokens(part["image_url"]["url"]))
                else:
                    text = f"[{message['role']}]{part['text']}"
                    ids += [min(t, 255) for t in self.tokenizer.encode(text)]
        return ids


def _entry(token_id: int) -> dict[str, Any]:
    return {"token": "", "logprob": -5.0, "bytes": None, "top_logprobs": []}


def num_tokens(url: str) -> int:
    """As the processor of `save_tiny_vl` does: 8 x 8 pixels a token, at most 1024 pixels."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    width, height = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size
    rows, columns = smart_resize(height, width, factor=8, min_pixels=64, max_pixels=1024)
    return rows * columns // 64


@pytest.mark.parametrize("env_cls", RIGHT, ids=lambda cls: cls.name)
def test_shipped_environment_trains_a_tiny_model_on_its_images(
    env_cls: type[ImageEnv], tmp_path: Path, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_vl(tmp_path / "model")

    async def collect() -> list[dict[str, Any]]:
        async with ScriptedImageEngine(["no"], num_tokens) as engine:
            folder = str(DATA / f"{env_cls.name}_sample")
            env = make_env(env_cls, engine, monkeypatch, dataset_path=folder, group_size=2)
            await env.setup()
            groups = []
            for _ in range(2):
                item = await env.get_next_item()
                engine.replies = [RIGHT[env_cls].format(item["gold"]), "I cannot see it."]
                group, _ = await env.collect_trajectories(item)
                groups.append(group)
            await env.server.close()
            return groups

    groups = asyncio.run(collect())
    monkeypatch.undo()  # the tokenizer of the environment
    config = run_config(
        tmp_path,
        service,
        "saves",
        weight_bridge_mode="off",
        training_steps=1,
        seq_len=2048,
        on_bad_group="stop",
    )
    with ScriptedEnvironment(service.url, [_merged(groups)]):
        final = train(config)

    for group in groups:
        assert (group["scores"], "tokenized_from_text" in group) == ([1.0, -1.0], False)
        assert len(set(group["images"])) == 1
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(final / "model.safetensors")
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert any(name.startswith("visual.") for name in changed)
    assert any("layers" in name for name in changed)
    metrics = json.loads((tmp_path / "saves" / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["train/grad_norm"] > 0
    assert metrics["train/skipped_steps"] == 0
    assert metrics["train/trained_tokens"] == sum(
        mask != -100 for group in groups for masks in group["masks"] for mask in masks
    )


def _merged(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Two groups of two trajectories as one of four, the batch of a step."""
    names = ("tokens", "masks", "scores", "images", "inference_logprobs", "finish_reasons")
    merged: dict[str, Any] = {name: [v for g in groups for v in g[name]] for name in names}
    return merged


GROUP = image_group(
    [[5, *image_tokens(), 6]] * 4, [[20, 21], [22], [23, 24], [25]], [picture(24, 16)] * 4
)
PROCESSOR = "preprocessor_config.json"


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_checkpoint_has_the_processor_and_a_run_resumes_from_it(
    kind: str, tmp_path: Path, service: Any
) -> None:
    save_tiny_vl(tmp_path / "model", kind)
    settings = {"weight_bridge_mode": "off", "checkpoint_interval": 1, "on_bad_group": "stop"}
    config = run_config(tmp_path, service, "saves", training_steps=2, **settings)

    with ScriptedEnvironment(service.url, [GROUP, GROUP]):
        train(config)
    resumed = config.model_copy(update={"resume": True, "training_steps": 3, "replace_run": True})
    with ScriptedEnvironment(service.url, [GROUP]):
        final = train(resumed)

    expected = (tmp_path / "model" / PROCESSOR).read_bytes()
    for folder in (tmp_path / "saves" / "step_2", final):
        assert (folder / PROCESSOR).read_bytes() == expected
    model, _ = load_model_and_tokenizer(config, source=str(final))
    assert image_support(model, str(final)).reader is not None


def test_gradient_checkpointing_gives_the_same_weights(tmp_path: Path, service: Any) -> None:
    save_tiny_vl(tmp_path / "model")
    finals = []
    for is_on in (True, False):
        config = run_config(
            tmp_path,
            service,
            f"saves_{is_on}",
            weight_bridge_mode="off",
            training_steps=1,
            gradient_checkpointing=is_on,
            replace_run=True,
        )
        with ScriptedEnvironment(service.url, [GROUP]):
            finals.append(load_file(train(config) / "model.safetensors"))

    for name, value in finals[0].items():
        torch.testing.assert_close(value, finals[1][name], rtol=1e-4, atol=1e-5)


def test_frozen_vision_encoder_is_unchanged_and_the_rest_is_trained(
    tmp_path: Path, service: Any
) -> None:
    save_tiny_vl(tmp_path / "model")
    config = run_config(
        tmp_path,
        service,
        "saves",
        weight_bridge_mode="off",
        training_steps=1,
        freeze_vision=True,
    )

    with ScriptedEnvironment(service.url, [GROUP]):
        after = load_file(train(config) / "model.safetensors")

    before = load_file(tmp_path / "model" / "model.safetensors")
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed
    assert not any(name.startswith("visual.") for name in changed)


def test_frozen_vision_encoder_has_no_trained_adapters(tmp_path: Path) -> None:
    # Its layers are named like those of the text model, except for those of the attention.
    config = tiny_config(
        tmp_path,
        model_name=str(save_tiny_vl(tmp_path / "model", "qwen2_5_vl")),
        freeze_vision=True,
        lora=True,
        lora_target_modules=["gate_proj"],
    )

    model, _ = load_model_and_tokenizer(config)

    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 4  # A and B in each of two blocks of the text model
    assert not any("visual" in name for name in trained)


def test_frozen_vision_of_a_text_model_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    config = tiny_config(tmp_path, model_name=str(tmp_path / "model"), freeze_vision=True)

    with pytest.raises(ConfigError, match="freeze_vision: a model of type llama has no vision"):
        load_model_and_tokenizer(config)


def test_adapters_train_on_images_and_are_saved_with_the_processor(tmp_path: Path) -> None:
    save_tiny_vl(tmp_path / "model", "qwen2_5_vl")
    config = tiny_config(
        tmp_path, model_name=str(tmp_path / "model"), weight_bridge_mode="lora_only", lora_r=4
    )
    model, _ = load_model_and_tokenizer(config)
    images = image_support(model, str(tmp_path / "model"))
    policy = prepare_policy(model, config)
    rules = RowRules(seq_len=64, images=images)

    batch = build_batch([GROUP], rules, microbatch_size=4, packs=policy.packs)
    policy.scorer(batch.microbatches[0]).logprobs_BT.sum().backward()

    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained
    assert all("lora_" in name and "visual" not in name for name in trained)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_merged_model_has_the_files_of_the_loaded_one_and_gives_the_same_logprobs(
    kind: str, tmp_path: Path
) -> None:
    save_tiny_vl(tmp_path / "model", kind)
    config = tiny_config(tmp_path, model_name=str(tmp_path / "model"), lora=True, lora_r=4)
    model, _ = load_model_and_tokenizer(config)
    move_adapters(model)

    export_for_engine(MergedModel(model.eval()), tmp_path / "export")

    names = set(load_file(tmp_path / "model" / "model.safetensors"))
    assert set(load_file(tmp_path / "export" / "model.safetensors")) == names | {"lm_head.weight"}
    loaded = type(model).from_pretrained(tmp_path / "export").eval()
    rules = RowRules(seq_len=64, images=image_support(model, str(tmp_path / "model")))
    [microbatch] = build_batch([GROUP], rules, microbatch_size=4).microbatches
    scores = [prepare_policy(m, config).scorer(microbatch).logprobs_BT for m in (model, loaded)]
    torch.testing.assert_close(scores[0], scores[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_tied", [True, False])
def test_export_for_an_engine_gives_the_same_logprobs(is_tied: bool, tmp_path: Path) -> None:
    model = tiny_vl("qwen2_vl", tie_word_embeddings=is_tied).eval()
    images = support(model, tmp_path / "processor")
    config = tiny_config(tmp_path)

    export_for_engine(model, tmp_path / "export")

    settings = json.loads((tmp_path / "export" / "config.json").read_text())
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert not settings["tie_word_embeddings"]
    assert "lm_head.weight" in exported
    loaded = type(model).from_pretrained(tmp_path / "export").eval()
    [microbatch] = build_batch(
        [GROUP], RowRules(seq_len=64, images=images), microbatch_size=4
    ).microbatches
    scores = [prepare_policy(m, config).scorer(microbatch).logprobs_BT for m in (model, loaded)]
    torch.testing.assert_close(scores[0], scores[1])


def test_reference_scores_images_and_one_of_text_is_refused(tmp_path: Path) -> None:
    save_tiny_vl(tmp_path / "model")
    save_tiny_model(tmp_path / "text")
    settings = {"model_name": str(tmp_path / "model"), "kl_coef": 0.1}
    config = tiny_config(tmp_path, reference_model=str(tmp_path / "model"), **settings)
    model, _ = load_model_and_tokenizer(config)
    policy = prepare_policy(model, config)
    images = image_support(model, str(tmp_path / "model"))
    rules = RowRules(seq_len=64, images=images, uses_reference=True, scores_reference=True)
    batch = build_batch([GROUP], rules, microbatch_size=4, packs=policy.packs)

    reference = open_reference(config, model, policy)
    assert reference is not None
    scores = policy.scorer(batch.microbatches[0]).logprobs_BT
    ref_logprobs = reference.logprobs_BT(batch.microbatches[0])

    trained = batch.microbatches[0].labels_BT != -100
    torch.testing.assert_close(scores[trained].detach(), ref_logprobs[trained])
    text = tiny_config(tmp_path, reference_model=str(tmp_path / "text"), **settings)
    with pytest.raises(ConfigError, match="reads no images and the trained model does"):
        open_reference(text, model, policy)


def test_gradients_of_the_ranks_shares_add_up(tmp_path: Path) -> None:
    model = tiny_vl("qwen3_vl", dtype=torch.float64)
    images = support(model, tmp_path)
    policy = prepare_policy(model, tiny_config(tmp_path))
    text = image_group([[1, 2]] * 2, [[3], [4]], None)
    batch = build_batch([GROUP, text], RowRules(seq_len=64, images=images), microbatch_size=2)

    def gradient(batches: Any) -> list[torch.Tensor]:
        model.zero_grad()
        for part in batches:
            for microbatch in part.microbatches:
                (policy.scorer(microbatch).logprobs_BT.sum() / batch.totals.num_tokens).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    whole, parts = gradient([batch]), gradient(split_batch(batch, 2))
    for ours, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_plan_of_a_launch_reads_a_model_with_images(tmp_path: Path) -> None:
    folder = save_tiny_vl(tmp_path / "model", tie_word_embeddings=True)

    facts = read_model(str(folder))

    whole = tiny_vl("qwen2_vl", tie_word_embeddings=True)
    assert facts.num_parameters == sum(p.numel() for p in whole.parameters())
    assert (facts.is_tied, facts.context_tokens) == (True, 4096)
