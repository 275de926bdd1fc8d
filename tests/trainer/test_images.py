"""Groups with images: equal to transformers' own forward, aligned with tokens, and bounded."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("PIL", reason="the extra examples is not installed")

from PIL import Image

from atroposlib.errors import GroupError
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
    save_tiny_vl,
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


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageSupport:
    return support(tiny_vl("qwen2_vl"), tmp_path_factory.mktemp("processor"))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_text_share_prefixes_and_those_with_images_do_not(
    kind: str, tmp_path: Path
) -> None:
    model = tiny_vl(kind, dtype=torch.float64)
    use_packed_attention(model)
    config = tiny_config(tmp_path, shared_prefixes="on")
    policy = prepare_policy(model, config)
    prompt = [*range(5, 45)]
    text = image_group([prompt] * 3, [[50, 51, 52], [50, 53], [54]], None)
    seen = image_group([[*prompt, *image_tokens()]], [[55, 56]], [WIDE])
    rules = replace(row_rules(config), images=support(model, tmp_path))

    def batch(groups: list[dict[str, Any]], shared: float | None) -> Batch:
        return build_batch(groups, rules, microbatch_size=4, packs=True, min_shared_fraction=shared)

    tree = batch([text], policy.min_shared_fraction)
    found, _ = trainer_loss(model, tree, config, policy)
    found_gradients = gradients(model, found)
    expected, _ = trainer_loss(model, batch([text], None), config, policy)

    assert tree.microbatches[0].tree is not None
    assert batch([text, seen], 0.0).microbatches[0].tree is None
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=0)
    for name, gradient in gradients(model, expected).items():
        torch.testing.assert_close(found_gradients[name], gradient, atol=1e-8, rtol=0)


@pytest.fixture
def rules(images: ImageSupport) -> RowRules:
    return RowRules(seq_len=128, images=images, vocabulary=300)


def test_placeholder_is_expanded_in_every_field_of_one_entry_per_token(rules: RowRules) -> None:
    group = image_group([[5, *image_tokens(), 6]], [[20, 21]], [WIDE])
    group |= {
        "advantages": [[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]],
        "ref_logprobs": [[-0.0, -0.1, -0.2, -0.3, -0.4, -0.5, -0.6]],
        "distill_token_ids": [[[t] for t in range(7)]],
        "distill_logprobs": [[[-float(t)] for t in range(7)]],
    }
    rules = replace(rules, uses_reference=True, uses_teacher=True)

    [row] = rows_from_group(group, rules)

    assert list(row.tokens) == [5, *image_tokens(6), 6, 20, 21]
    assert list(row.labels) == [-100] * 10 + [20, 21]
    assert list(row.advantages) == [0.0, 0.1, *[0.2] * 6, 0.3, 0.4, 0.5, 0.6]
    assert row.inference_logprobs is not None
    assert list(row.inference_logprobs) == [1.0] * 10 + [-3.0, -3.0]
    assert row.ref_logprobs is not None
    assert list(row.ref_logprobs) == [-0.0, -0.1, *[-0.2] * 6, -0.3, -0.4, -0.5, -0.6]
    assert row.distill_token_ids is not None
    assert [ids[0] for ids in row.distill_token_ids] == [0, 1, *[2] * 6, 3, 4, 5, 6]
    assert row.images is not None
    # Text at 0 and 1, the image of 2 x 3 tokens from 2 on, and the text after its longer side.
    assert row.images.positions_3L.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]


def test_versions_of_tokens_follow_the_expansion(rules: RowRules) -> None:
    group = image_group([[5, *image_tokens(), 6]] * 2, [[20, 21], [22, 23]], [WIDE] * 2)
    group["token_versions"] = [[[None, 5], [3, 1], [9, 1]], None]

    old, unknown = rows_from_group(group, replace(rules, oldest_version=5))

    assert list(old.labels) == [-100] * 11 + [21]
    assert list(unknown.labels) == [-100] * 10 + [22, 23]
    group["token_versions"][0][0][1] = 4
    with pytest.raises(GroupError, match=r"token_versions\[0\]: runs of 6 tokens"):
        rows_from_group(group, rules)


def test_image_at_the_end_is_left_out_and_no_truncation(rules: RowRules) -> None:
    group = image_group([[5]], [[20, 21, 11]], [WIDE])
    placeholder = image_tokens(6)
    group["tokens"] = [[5, 20, 21, *placeholder[:-1]]]
    group["masks"] = [[-100, 20, 21, *[-100] * (len(placeholder) - 1)]]
    group["inference_logprobs"] = [[1.0, -3.0, -3.0, *[1.0] * (len(placeholder) - 1)]]

    [row] = rows_from_group(group, replace(rules, truncated_completions="mask"))

    assert not row.is_truncated
    assert row.images is None
    assert [label for label in row.labels if label != -100] == [20, 21]


def test_advantage_of_a_whole_trajectory_is_kept(rules: RowRules) -> None:
    group = image_group([[*image_tokens(), 6]], [[20]], [WIDE], advantages=[0.5])

    [row] = rows_from_group(group, rules)

    assert list(row.advantages) == [0.5] * 10


def test_group_of_text_is_unchanged(rules: RowRules) -> None:
    assert rows_from_group(TEXT_GROUP, rules) == rows_from_group(
        TEXT_GROUP, replace(rules, images=TEXT_ONLY)
    )


def test_trajectories_share_a_processed_image_and_the_model_encodes_it_once(
    rules: RowRules,
) -> None:
    prompt = [*image_tokens(), 6]
    group = image_group([prompt] * 4, [[20], [21], [22], [23]], [WIDE] * 4)

    batch = build_batch([group], rules, microbatch_size=4)

    [microbatch] = batch.microbatches
    assert microbatch.pixels_PD is not None
    assert microbatch.image_grids_I3 is not None
    assert microbatch.image_grids_I3.tolist() == [[1, 4, 6]]
    assert len(microbatch.pixels_PD) == 24
    assert microbatch.image_places == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("seq_len", "length", "num_images"),
    [
        (9, 9, 1),  # [5 start 6 x image end | 11 ...]: the first image is whole
        (8, 2, 0),  # its last token may not be the last of the row, which is no input
        (5, 2, 0),
        (12, 11, 1),  # cut in the second image
        (16, 16, 2),
    ],
)
def test_truncation_keeps_whole_images_only(
    seq_len: int, length: int, num_images: int, rules: RowRules
) -> None:
    prompt = [5, *image_tokens(6), 11, *image_tokens(4), 12]
    group = image_group([prompt], [[20, 21]], [[WIDE, TALL]])

    [row] = rows_from_group(group, replace(rules, seq_len=seq_len))

    assert row.is_truncated
    assert list(row.tokens) == [*prompt, 20, 21][:length]
    assert len(row.labels) == len(row.advantages) == length
    assert (len(row.images.images) if row.images else 0) == num_images
    build_batch([group], replace(rules, seq_len=seq_len), microbatch_size=1)


ONE = [[5, *image_tokens(), 6]]


def encoded_bomb() -> str:
    """A PNG of 20000 x 20000 pixels in a few kilobytes."""
    return encoded(Image.new("1", (20_000, 20_000)))


BROKEN: dict[str, tuple[Any, str]] = {
    "a text": ("x", r"images: expected a list with the images of each trajectory"),
    "an entry too many": ([WIDE, WIDE], r"images: 2 entries, tokens has 1"),
    "a number": ([3], r"images\[0\]: expected base64, or a data: URL with base64, or a list"),
    "a number in a list": ([[3]], r"images\[0\]\[0\]: expected base64.*, got int"),
    "null in a list": ([[None]], r"images\[0\]\[0\]: expected base64.*, got NoneType"),
    "not base64": (["no image!"], r"images\[0\]\[0\]: 'no image!': expected base64"),
    "empty": ([[""]], r"images\[0\]\[0\]: not a readable image"),
    "no image": (["aGVsbG8="], r"images\[0\]\[0\]: not a readable image"),
    "an address": (["https://example.org/a.png"], r"is an address, which is not fetched"),
    "an address with commas": (["https://example.org/a,b.png"], "is not a data: URL with base64"),
    "a data URL of text": (["data:text/plain,hello"], "is not a data: URL with base64"),
    "a path": (["../../etc/hostname"], r"images\[0\]\[0\]: '../../etc/hostname': expected base64"),
    "a file URL": (["file:///etc/hostname"], r"is an address, which is not fetched"),
    "an SVG": ([base64.b64encode(b"<svg/>").decode()], r"not a readable image"),
    "a cut PNG": ([base64.b64encode(base64.b64decode(WIDE)[:200]).decode()], "not a readable"),
    "too many": ([[WIDE] * 65], r"images\[0\]: 65 images; expected at most 64"),
    "a narrow one": ([picture(2048, 4)], r"image processor rejects it: absolute aspect ratio"),
    "none": (None, r"tokens\[0\] has 1 runs of image tokens \(id 260\), images\[0\] has 0 images"),
    "two for one": ([[WIDE, WIDE]], r"tokens\[0\] has 1 runs .* images\[0\] has 2 images"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_images_are_refused_with_their_place(name: str, rules: RowRules) -> None:
    images, message = BROKEN[name]

    with pytest.raises(GroupError, match=f"group: .*{message}"):
        rows_from_group(image_group(ONE, [[20]], images), rules)


def test_decompression_bombs_are_refused_by_their_size(rules: RowRules) -> None:
    group = image_group(ONE, [[20]], [encoded_bomb()])

    with pytest.raises(
        GroupError, match=r"images\[0\]\[0\]: (not a readable|20000 x 20000 pixels)"
    ):
        rows_from_group(group, rules)


def test_large_image_is_refused_by_its_size(rules: RowRules) -> None:
    group = image_group(ONE, [[20]], [encoded(Image.new("1", (10_000, 5_001)))])

    with pytest.raises(GroupError, match="10000 x 5001 pixels; expected at most 50000000"):
        rows_from_group(group, rules)


def test_images_of_a_group_are_refused_by_their_sum(rules: RowRules) -> None:
    [group] = mixed_groups(is_expanded=True)[2:]
    rows_from_group(group, rules)
    assert rules.images.reader is not None
    limited = ImageSupport(replace(rules.images.reader, max_numbers=1000))

    with pytest.raises(GroupError, match="more than 1000 numbers"):
        rows_from_group(group, replace(rules, images=limited))


def test_payload_is_refused_by_its_length_before_it_is_decoded(rules: RowRules) -> None:
    with pytest.raises(GroupError, match=r"images\[0\]\[0\]: larger than 32000000 bytes"):
        rows_from_group(image_group(ONE, [[20]], ["A" * 43_000_000]), rules)


def test_wrong_number_of_image_tokens_names_trajectory_and_counts(rules: RowRules) -> None:
    prompts = [[*image_tokens(6), 6], [*image_tokens(5), 6]]
    group = image_group(prompts, [[20], [21]], [WIDE, WIDE])

    with pytest.raises(GroupError, match=r"tokens\[1\]\[1:6\]: 5 image tokens .* expected 6, or 1"):
        rows_from_group(group, rules)


def test_tokens_of_the_text_alone_are_refused_or_trained_without_the_image(
    rules: RowRules,
) -> None:
    group = image_group([[5, 6]], [[20]], [WIDE])

    with pytest.raises(GroupError, match=r"These are tokens of the text alone: sample with"):
        rows_from_group(group, rules)
    [row] = rows_from_group(group, replace(rules, unsupported_fields="ignore"))

    assert row.images is None
    assert list(row.tokens) == [5, 6, 20]


def test_trained_image_token_is_refused(rules: RowRules) -> None:
    group = image_group([[5, *image_tokens(), 6]], [[20]], [WIDE])
    group["masks"][0][2] = IMAGE

    with pytest.raises(GroupError, match=r"masks\[0\]\[2\]: trains an image token"):
        rows_from_group(group, rules)


def test_sampled_image_token_is_refused(rules: RowRules) -> None:
    group = image_group([[*image_tokens(), 6]], [[20, IMAGE, 21]], [WIDE])

    with pytest.raises(GroupError, match=r"tokens\[0\] has 2 runs of image tokens"):
        rows_from_group(group, rules)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: text,
        lambda text: f"data:image/any;base64,{text}",
        lambda text: {"type": "image_url", "image_url": {"url": f"data:image/x;base64,{text}"}},
        lambda text: {"type": "image", "image": text},
    ],
)
def test_every_form_of_a_payload_is_read(wrap: Any, kind: str) -> None:
    image = decode_image(wrap(encoded(Image.new("RGB", (6, 4), "red"), kind)), "images[0][0]")

    assert (image.mode, image.size) == ("RGB", (6, 4))
    assert image.getpixel((3, 2))[0] > 200


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    kind = "JPEG" if mode == "CMYK" else "PNG"
    image = Image.new("I;16", (4, 4)) if mode == "I;16" else Image.new("RGB", (4, 4)).convert(mode)

    assert decode_image(encoded(image, kind), "images[0][0]").mode == "RGB"


def test_transparent_areas_are_white_as_vllm_shows_them() -> None:
    image = decode_image(encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 0))), "images[0][0]")

    assert image.getpixel((0, 0)) == (255, 255, 255)


def test_recorded_rotation_is_applied_as_vllm_does() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by a quarter
    content = io.BytesIO()
    Image.new("RGB", (6, 4)).save(content, "JPEG", exif=exif)

    image = decode_image(base64.b64encode(content.getvalue()).decode(), "images[0][0]")

    assert image.size == (4, 6)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_damaged_image_is_read_or_refused(kind: str) -> None:
    content = base64.b64decode(picture(16, 12, kind=kind))
    random = Random(0)
    for _ in range(200):
        damaged = bytearray(content)
        for _ in range(random.randint(1, 6)):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        text = base64.b64encode(bytes(damaged[: random.randint(1, len(damaged))])).decode()
        with contextlib.suppress(GroupError):
            assert decode_image(text, "images[0][0]").mode == "RGB"


def test_models_that_read_images_without_pillow_name_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_vl(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)

    found = image_support(tiny_vl("qwen2_vl"), str(folder))

    assert found.reader is None
    assert found.obstacle.startswith("pillow is not installed; ")


@pytest.mark.parametrize("name", ["merge_size", "patch_size", "temporal_patch_size"])
def test_processor_of_another_model_is_named(tmp_path: Path, name: str) -> None:
    folder = save_tiny_vl(tmp_path)
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, name: 3}))

    found = image_support(tiny_vl("qwen2_vl"), str(folder))

    assert found.reader is None
    expected = f"has {name} 3, the vision encoder of the model has {settings[name]}"
    assert found.obstacle.endswith(expected)


def test_models_without_images_say_what_is_missing(tmp_path: Path) -> None:
    from tests.trainer.tiny import tiny_llama

    model = tiny_vl("qwen2_vl")

    assert image_support(tiny_llama(), "x") == TEXT_ONLY
    missing = image_support(model, str(tmp_path))
    sharded = image_support(model, str(tmp_path), is_sharded=True)

    assert missing.reader is None
    assert "needs the preprocessor_config.json" in missing.obstacle
    assert "--parallel-mode data" in sharded.obstacle
    rules = RowRules(seq_len=64, images=sharded)
    with pytest.raises(GroupError, match=r"group: images: sharded weights .* --unsupported-fields"):
        rows_from_group(image_group(ONE, [[20]], [WIDE]), rules)
