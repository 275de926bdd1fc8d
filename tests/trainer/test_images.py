"""Groups with images: equal to transformers' own forward, aligned with tokens, and bounded."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL", reason="the extra examples is not installed")

from PIL import Image

from atroposlib.errors import ConfigError, GroupError
from example_trainer.batch import Batch, build_batch
from example_trainer.images import TEXT_ONLY, ImageSupport, decode_image, image_support
from example_trainer.loss import LossInputs, make_loss
from example_trainer.model import use_packed_attention
from example_trainer.policy import prepare_policy
from example_trainer.rows import RowRules, rows_from_group
from example_trainer.training import row_rules
from tests.trainer.tiny import tiny_config
from tests.trainer.tiny_images import (
    IMAGE,
    KINDS,
    encoded,
    image_group,
    image_tokens,
    picture,
    support,
    tiny_vl,
)

WIDE, TALL, SMALL = picture(24, 16, seed=1), picture(8, 32, seed=2), picture(8, 8, seed=3)
# A token stands for 8 x 8 pixels: 3 x 2, 1 x 4 and 1.
NUM_TOKENS = {WIDE: 6, TALL: 4, SMALL: 1}

TEXT_GROUP = image_group([[1, 2, 3], [1, 2, 3]], [[7, 8, 9, 10], [8, 7]], None)


def mixed_groups(*, is_expanded: bool) -> list[dict[str, Any]]:
    """A group with one image, one with several of different sizes, one of text."""

    def tokens(*pictures: str) -> list[int]:
        found = [5, 6]
        for image in pictures:
            found += [*image_tokens(NUM_TOKENS[image] if is_expanded else 1), 11]
        return found

    return [
        image_group(
            [tokens(WIDE), tokens(WIDE), tokens(WIDE)],
            [[20, 21, 22], [23], [24, 25]],
            [WIDE, WIDE, WIDE],
        ),
        TEXT_GROUP,
        image_group(
            [tokens(TALL, SMALL), tokens(), tokens(SMALL, WIDE, TALL)],
            [[30, 31], [32, 33, 34], [35]],
            [[TALL, SMALL], None, [SMALL, f"data:image/png;base64,{WIDE}", TALL]],
        ),
    ]


def pixels_of(reader_process: Any, picture_: str) -> tuple[torch.Tensor, torch.Tensor]:
    content = base64.b64decode(picture_.rpartition(",")[2])
    return reader_process(Image.open(io.BytesIO(content)).convert("RGB"))


def transformers_loss(
    model: Any, groups: list[dict[str, Any]], images: ImageSupport, config: Any, totals: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss and the logprobs of each trajectory from one padded forward of transformers.

    The groups contain all tokens of their images.
    """
    assert images.reader is not None
    tokens = [ids for group in groups for ids in group["tokens"]]
    masks = [ids for group in groups for ids in group["masks"]]
    width = max(map(len, tokens))
    attention = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in tokens])
    input_ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in tokens])
    labels = torch.tensor([ids + [-100] * (width - len(ids)) for ids in masks])
    payloads = []
    for group in groups:
        for entry in group["images"] or ():
            payloads += [entry] if isinstance(entry, str) else entry or []
    processed = [pixels_of(images.reader.process, payload) for payload in payloads]
    vision = {}
    if processed:
        vision = {
            "pixel_values": torch.cat([pixels for pixels, _ in processed]),
            "image_grid_thw": torch.cat([grid for _, grid in processed]),
            "mm_token_type_ids": (input_ids == IMAGE).int(),
        }
    logits = model(input_ids=input_ids, attention_mask=attention, **vision).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
    labels = labels[:, 1:]
    advantages = torch.zeros(labels.shape, dtype=logprobs.dtype)
    i = 0
    for group in groups:
        for row in rows_from_group({**group, "images": None}, replace(row_rules(config))):
            advantages[i, : len(row.advantages) - 1] = torch.tensor(row.advantages[1:])
            i += 1
    inference = torch.where(labels == -100, 1.0, -3.0).to(logprobs.dtype)
    kept = torch.where(labels == -100, 0.0, logprobs)
    terms = make_loss(config)(LossInputs(kept, labels, advantages, inference), totals)
    return terms.loss, [row[label != -100] for row, label in zip(logprobs, labels, strict=True)]


def trainer_loss(
    model: Any, batch: Batch, config: Any, policy: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss: Any = 0.0
    logprobs = []
    for microbatch in batch.microbatches:
        scores = policy.scorer(microbatch)
        terms = make_loss(config)(
            LossInputs(
                scores.logprobs_BT,
                microbatch.labels_BT,
                microbatch.advantages_BT.to(scores.logprobs_BT.dtype),
                microbatch.inference_logprobs_BT.to(scores.logprobs_BT.dtype),
                sequence_ids_BT=microbatch.sequence_ids_BT,
            ),
            batch.totals,
        )
        loss = loss + terms.loss
        logprobs.append(scores.logprobs_BT[microbatch.labels_BT != -100])
    return loss, logprobs


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packing", ["off", "on"])
@pytest.mark.parametrize("is_expanded", [True, False], ids=["runs", "placeholders"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_logprobs_and_gradients_equal_those_of_transformers(
    kind: str, is_expanded: bool, packing: str, tmp_path: Path
) -> None:
    model = tiny_vl(kind, dtype=torch.float64)
    images = support(model, tmp_path)
    config = tiny_config(tmp_path, packing=packing)
    rules = replace(row_rules(config), images=images, vocabulary=300)
    if packing == "on":
        use_packed_attention(model)
    policy = prepare_policy(model, config)
    assert not policy.scorer._whole_logits

    batch = build_batch(
        mixed_groups(is_expanded=is_expanded), rules, microbatch_size=3, packs=policy.packs
    )
    loss, logprobs = trainer_loss(model, batch, config, policy)
    expected_loss, expected = transformers_loss(
        model, mixed_groups(is_expanded=True), images, config, batch.totals
    )

    assert policy.packs == (packing == "on")
    found, wanted = torch.cat(logprobs), torch.cat(expected)
    # Packed microbatches have another order.
    torch.testing.assert_close(found.sort().values, wanted.sort().values, rtol=0, atol=1e-10)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-10)
    ours, theirs = gradients(model, loss), gradients(model, expected_loss)
    assert ours.keys() == theirs.keys() == dict(model.named_parameters()).keys()
    assert any("visual" in name and grad.abs().max() > 1e-4 for name, grad in ours.items())
    for name, grad in theirs.items():
        torch.testing.assert_close(ours[name], grad, rtol=0, atol=1e-8, msg=name)
