"""Images in chats: the tokens, logprobs and caches of the engine against transformers' forward."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL", reason="the extra examples is not installed")

from PIL import Image

from atroposlib.errors import GroupError
from example_trainer.batch import build_batch
from example_trainer.images import ImageReader, image_support
from example_trainer.policy import prepare_policy
from example_trainer.rows import RowRules
from example_trainer.torch_engine.images import PromptImages, PromptReader
from tests.trainer.tiny import tiny_config
from tests.trainer.tiny_images import (
    IMAGE,
    KINDS,
    VISION_END,
    VISION_START,
    encoded,
    image_group,
    picture,
    save_tiny_chat_vl,
    tiny_vl,
)
from tests.trainer.torch_engine.conftest import LocalEngine, serve_locally, wait_until

pytestmark = pytest.mark.slow

# A token stands for 8 x 8 pixels: 3 x 2, 1 x 4 and 1.
WIDE, TALL, SMALL = picture(24, 16, seed=1), picture(8, 32, seed=2), picture(8, 8, seed=3)
OTHER_WIDE = picture(24, 16, seed=4)
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("images")
    return {kind: save_tiny_chat_vl(root / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module", params=KINDS)
def local(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[LocalEngine]:
    with serve_locally(folders[request.param]) as engine:
        yield engine


@pytest.fixture(scope="module")
def one_kind(folders: dict[str, Path]) -> Iterator[LocalEngine]:
    with serve_locally(folders["qwen3_vl"]) as engine:
        yield engine


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def image(payload: str) -> dict[str, Any]:
    url = payload if "," in payload or ":" in payload else f"data:image/png;base64,{payload}"
    return {"type": "image_url", "image_url": {"url": url}}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


QUESTION = [user(text("a "), image(WIDE), text("b"), image(TALL))]


def chat(local: LocalEngine, messages: list[Any], **options: Any) -> Any:
    body = {"messages": messages, "max_tokens": 8, "seed": 1, "logprobs": True}
    answer = local.http.post(CHAT, json={**body, "return_token_ids": True, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(local: LocalEngine, *parts: dict[str, Any]) -> str:
    answer = local.http.post(CHAT, json={"messages": [user(*parts)]})
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def logprobs_of(choice: Any) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def reader_of(local: LocalEngine) -> tuple[Any, ImageReader]:
    """A model of its own, with transformers' attention, and its reader of images."""
    from transformers import AutoModelForImageTextToText

    folder = local.state.served.path
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    reader = image_support(model, folder).reader
    assert reader is not None
    return model, reader


@torch.no_grad()
def transformers_logprobs(local: LocalEngine, tokens: list[int], *payloads: str) -> list[float]:
    """The logprobs of the tokens after the first, by one forward of transformers.

    The tokens have all those of their images.
    """
    model, reader = reader_of(local)
    opened = [Image.open(io.BytesIO(base64.b64decode(each))) for each in payloads]
    pixels, grids = zip(*(reader.process(each.convert("RGB")) for each in opened), strict=True)
    ids = torch.tensor([tokens])
    logits = model(
        input_ids=ids,
        pixel_values=torch.cat(pixels),
        image_grid_thw=torch.cat(grids),
        mm_token_type_ids=(ids == IMAGE).int(),
    ).logits[0, :-1]
    chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None])
    return [float(each) for each in chosen[:, 0]]


def test_prompt_has_all_tokens_of_the_images_and_logprobs_are_those_of_transformers(
    local: LocalEngine,
) -> None:
    answer = chat(local, QUESTION, prompt_logprobs=0)

    prompt, [choice] = answer["prompt_token_ids"], answer["choices"]
    encode = local.tokenizer.encode
    assert prompt == [
        *encode("[user]a "), VISION_START, *[IMAGE] * 6, VISION_END, *encode("b"),
        VISION_START, *[IMAGE] * 4, VISION_END, *encode("<264>[assistant]"),
    ]  # fmt: skip
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    expected = transformers_logprobs(local, [*prompt, *choice["token_ids"]], WIDE, TALL)
    entries = answer["prompt_logprobs"][1:]
    found = [entry[str(token)]["logprob"] for entry, token in zip(entries, prompt[1:], strict=True)]
    assert found + logprobs_of(choice) == pytest.approx(expected, abs=1e-4)


def test_other_completions_and_conversations_of_the_prompt_have_the_logprobs_of_transformers(
    local: LocalEngine,
) -> None:
    local.engine.reset_caches().result()
    first = chat(local, QUESTION, n=3)
    turns = [*QUESTION, {"role": "assistant", "content": "c"}, user(image(SMALL), text("d"))]

    before = local.engine.counts().cached_tokens
    second = chat(local, turns)

    for choice in first["choices"]:
        tokens = [*first["prompt_token_ids"], *choice["token_ids"]]
        expected = transformers_logprobs(local, tokens, WIDE, TALL)[-len(choice["token_ids"]) :]
        assert logprobs_of(choice) == pytest.approx(expected, abs=1e-4)
    assert local.engine.counts().cached_tokens - before > 20  # both images of the first turn
    [choice] = second["choices"]
    tokens = [*second["prompt_token_ids"], *choice["token_ids"]]
    expected = transformers_logprobs(local, tokens, WIDE, TALL, SMALL)[-len(choice["token_ids"]) :]
    assert logprobs_of(choice) == pytest.approx(expected, abs=1e-4)


def test_caches_of_an_image_are_not_used_for_another_of_its_size(local: LocalEngine) -> None:
    greedy = {"temperature": 0, "max_tokens": 4}
    question = "what is in this image, and what is not?"
    local.engine.reset_caches().result()
    alone = chat(local, [user(image(OTHER_WIDE), text(question))], **greedy)
    local.engine.reset_caches().result()
    chat(local, [user(image(WIDE), text(question))], **greedy)

    after = chat(local, [user(image(OTHER_WIDE), text(question))], **greedy)

    assert after["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    assert logprobs_of(after["choices"][0]) == pytest.approx(
        logprobs_of(alone["choices"][0]), abs=1e-5
    )


def test_prompts_that_start_together_have_their_own_images(local: LocalEngine) -> None:
    messages = [[user(image(each), text("a"))] for each in (WIDE, OTHER_WIDE, TALL, WIDE)]
    messages.append([user(text("without an image"))])
    greedy = {"temperature": 0, "max_tokens": 6}
    alone = [chat(local, each, **greedy)["choices"][0] for each in messages]
    local.engine.reset_caches().result()
    local.engine.pause("keep").result()

    with ThreadPoolExecutor(len(messages)) as pool:
        try:
            answers = [pool.submit(chat, local, each, **greedy) for each in messages]
            wait_until(lambda: local.engine.counts().waiting == len(messages))
        finally:
            local.engine.resume().result()

    for answer, expected in zip(answers, alone, strict=True):
        [choice] = answer.result()["choices"]
        assert choice["token_ids"] == expected["token_ids"]
        assert logprobs_of(choice) == pytest.approx(logprobs_of(expected), abs=1e-4)


def test_image_of_different_questions_is_computed_once(one_kind: LocalEngine) -> None:
    # The image ends in the middle of a block, and the questions differ from their first token on.
    shared = user(text("look. "), *[image(OTHER_WIDE)] * 12)
    questions = ["a and b?", "c and d?", "e and f?", "g and h?"]
    messages = [[{**shared, "content": [*shared["content"], text(each)]}] for each in questions]
    greedy = {"temperature": 0, "max_tokens": 6}
    alone = []
    for each in messages:
        one_kind.engine.reset_caches().result()
        alone.append(chat(one_kind, each, **greedy))
    one_kind.engine.reset_caches().result()
    cached = one_kind.engine.counts().cached_tokens
    one_kind.engine.pause("keep").result()

    with ThreadPoolExecutor(len(messages)) as pool:
        try:
            answers = [pool.submit(chat, one_kind, each, **greedy) for each in messages]
            wait_until(lambda: one_kind.engine.counts().waiting == len(messages))
        finally:
            one_kind.engine.resume().result()

    num_shared = len("[user]look. ") + 12 * 8
    assert one_kind.engine.counts().cached_tokens == cached + 3 * num_shared
    for answer, expected in zip(answers, alone, strict=True):
        [choice], [own] = answer.result()["choices"], expected["choices"]
        assert choice["token_ids"] == own["token_ids"]
        assert logprobs_of(choice) == pytest.approx(logprobs_of(own), abs=1e-4)


def holds_none(reader: PromptReader) -> bool:
    """Whether the images of ended requests are released; threads hold the last for a moment."""
    gc.collect()
    return not reader._in_use


async def test_equal_images_of_open_requests_are_processed_once(one_kind: LocalEngine) -> None:
    _, reader = reader_of(one_kind)
    processed: list[Any] = []

    def process(picture: Any) -> Any:
        processed.append(picture)
        return reader.process(picture)

    pixels_PD, _ = reader.process(Image.new("RGB", (8, 8)))  # of one token
    prompts = PromptReader(
        replace(reader, process=process), max_tokens=7, numbers_per_token=pixels_PD.numel()
    )

    async def read(*payloads: str) -> PromptImages:
        places = {f"images[{n}]": payload for n, payload in enumerate(payloads)}
        _, images = await prompts.read([7, IMAGE] * len(payloads), places)
        return images

    first, second = await read(WIDE), await read(SMALL, WIDE)
    shared = second.aligned.images[1] is first.aligned.images[0]
    num_processed = len(processed)
    with pytest.raises(GroupError, match=r"images\[1\]: all images together have more"):
        await read(TALL, WIDE, SMALL)  # the limit of a prompt counts images of other prompts too
    del first, second
    while not holds_none(prompts):  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.002)
    await read(WIDE)
    prompts.close()

    assert shared
    assert num_processed == 2
    assert len(processed) == 4


def test_images_of_ended_requests_are_released(one_kind: LocalEngine) -> None:
    reader = one_kind.state.served.image_reader
    assert reader is not None
    chat(one_kind, QUESTION)

    wait_until(lambda: holds_none(reader))


def test_sampled_image_tokens_are_tokens_like_others(local: LocalEngine) -> None:
    always = {"logit_bias": {str(IMAGE): 100}, "temperature": 0}
    written = chat(local, QUESTION, max_tokens=64, **always)
    local.engine.reset_caches().result()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(chat, local, QUESTION, max_tokens=64, **always)
        wait_until(lambda: local.engine.counts().running or writing.done())
        # Starts while the other one runs with such tokens as its newest.
        for each in (SMALL, OTHER_WIDE, TALL):
            found = chat(local, [user(image(each))], temperature=0, max_tokens=1)
            prompt = found["prompt_token_ids"]
            [token] = found["choices"][0]["token_ids"]
            expected = transformers_logprobs(local, [*prompt, token], each)[-1]
            assert logprobs_of(found["choices"][0]) == pytest.approx([expected], abs=1e-4)

    [again], [first] = writing.result()["choices"], written["choices"]
    assert again["token_ids"] == first["token_ids"] == [IMAGE] * 64
    assert logprobs_of(again) == pytest.approx(logprobs_of(first), abs=1e-4)


def test_images_are_computed_again_after_a_preemption(folders: dict[str, Path]) -> None:
    options = {"max_tokens": 40, "ignore_eos": True, "n": 6, "temperature": 1.0}
    found = []
    for num_bytes in (2**28, 2**17):
        with serve_locally(
            folders["qwen2_5_vl"], kv_cache_memory_bytes=num_bytes, max_model_len=128
        ) as engine:
            found.append(chat(engine, QUESTION, **options))
            preemptions = engine.engine.counts().preemptions

    assert preemptions > 0
    for ours, theirs in zip(*(answer["choices"] for answer in found), strict=True):
        assert ours["token_ids"] == theirs["token_ids"]
        assert logprobs_of(ours) == pytest.approx(logprobs_of(theirs), abs=1e-4)


def test_new_weights_of_the_vision_encoder_are_used(tmp_path: Path, local: LocalEngine) -> None:
    kind = Path(local.state.served.path).name
    before = chat(local, QUESTION, prompt_logprobs=0)["prompt_logprobs"]
    model = tiny_vl(kind)
    with torch.no_grad():
        for parameter in model.base_model.visual.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(tmp_path)

    local.engine.reload(tmp_path, version="2").result()
    after = chat(local, QUESTION, prompt_logprobs=0)["prompt_logprobs"]
    local.engine.reload(Path(local.state.served.path), version=None).result()
    restored = chat(local, QUESTION, prompt_logprobs=0)["prompt_logprobs"]

    assert restored == before
    # The tokens before the first image do not see it.
    assert after[:5] == before[:5]
    assert after[-1] != before[-1]


def test_group_of_the_engine_has_the_logprobs_of_the_trainer(
    tmp_path: Path, local: LocalEngine
) -> None:
    answer = chat(local, QUESTION, n=4)
    prompt = answer["prompt_token_ids"]
    completions = [choice["token_ids"] for choice in answer["choices"]]
    sampled = [logprobs_of(choice) for choice in answer["choices"]]
    group = image_group(
        [prompt] * 4,
        completions,
        [[part["image_url"]["url"] for part in QUESTION[0]["content"] if "image_url" in part]] * 4,
        inference_logprobs=[[1.0] * len(prompt) + each for each in sampled],
    )
    model, _ = reader_of(local)
    rules = RowRules(seq_len=256, images=image_support(model, local.state.served.path))
    policy = prepare_policy(model, tiny_config(tmp_path))

    batch = build_batch([group], rules, microbatch_size=4, packs=policy.packs)

    for microbatch in batch.microbatches:
        is_trained = microbatch.labels_BT != -100
        scores = policy.scorer(microbatch).logprobs_BT[is_trained]
        torch.testing.assert_close(
            scores.detach(), microbatch.inference_logprobs_BT[is_trained], atol=1e-4, rtol=0
        )
    assert sum(int((m.labels_BT != -100).sum()) for m in batch.microbatches) == sum(
        map(len, completions)
    )


def test_stream_of_a_chat_with_images_has_its_tokens(one_kind: LocalEngine) -> None:
    whole = chat(one_kind, QUESTION, temperature=0)
    body = {"messages": QUESTION, "max_tokens": 8, "temperature": 0, "stream": True}

    with one_kind.http.stream("POST", CHAT, json={**body, "return_token_ids": True}) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]

    chunks = [json.loads(line) for line in lines]
    [prompt] = [chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids")]
    ids = [t for chunk in chunks for c in chunk["choices"] for t in c.get("token_ids") or ()]
    assert prompt == whole["prompt_token_ids"]
    assert ids == whole["choices"][0]["token_ids"]


def large() -> str:
    return encoded(Image.new("1", (8000, 8000)))


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([text("a"), image("https://a.example/b.png")], "^messages.0.content.1: .* not fetched"),
        ([image("file:///etc/hostname")], "^messages.0.content.0: .* not fetched"),
        (
            [image("data:image/png;base64,aaaa")],
            "^messages.0.content.0: not a readable image: expected .* formats PNG, JPEG, GIF",
        ),
        ([image("data:image/png;base64,%%")], "^messages.0.content.0: .* expected base64"),
        ([{"type": "image_url", "image_url": {}}], "^messages.0.content.0: expected base64"),
        ([{"type": "image_url", "image_url": None}], "^messages.0.content.0: expected base64"),
        ([image(large())], "8000 x 8000 pixels; expected at most"),
        ([image(WIDE), text("<260>")], "2 image tokens .id 260., expected one for each of the 1"),
        ([image(SMALL)] * 65, "65 images; expected at most 64"),
        ([image(picture(256, 256, seed=i)) for i in range(64)], "more than [0-9]+ numbers"),
        ([{"type": "video_url", "video_url": {"url": "a"}}], "parts of type text and image_url"),
        ([{"type": "text"}], "parts of type text and image_url"),
        (["a"], "parts of type text and image_url"),
    ],
)
def test_images_that_cannot_be_read_are_refused_with_their_place(
    one_kind: LocalEngine, parts: list[Any], named: str
) -> None:
    message = refused(one_kind, *parts)

    assert re.search(named, message), message
    assert len(message) < 500


def test_image_with_a_caption_in_the_same_part_is_read(one_kind: LocalEngine) -> None:
    answer = chat(one_kind, [user({**image(WIDE), "text": "a caption"})])

    assert answer["prompt_token_ids"].count(IMAGE) == 6


def test_image_that_the_chat_template_leaves_out_is_named(tmp_path: Path) -> None:
    folder = save_tiny_chat_vl(tmp_path, "qwen2_vl")
    template = "{% for message in messages %}{{ message.content[0].text }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)

    with serve_locally(folder) as engine:
        message = refused(engine, text("a"), image(WIDE))

    assert "0 image tokens (id 260), expected one for each of the 1 images" in message
    assert message.endswith("the chat template leaves out images of some messages, or all")


def test_text_with_an_image_token_and_no_image_is_text(one_kind: LocalEngine) -> None:
    answer = chat(one_kind, [user(text("<260>"))])

    assert answer["prompt_token_ids"].count(IMAGE) == 1


def test_images_beyond_the_context_are_refused_as_a_long_prompt(one_kind: LocalEngine) -> None:
    answer = one_kind.http.post(
        CHAT, json={"messages": [user(image(WIDE), text("a"))], "max_tokens": 10_000}
    )

    assert answer.status_code == 400
    assert "maximum context length" in answer.json()["error"]["message"]


def test_models_of_text_refuse_images(torch_engine: LocalEngine) -> None:
    message = refused(torch_engine, image(WIDE))

    assert message.startswith("messages.0.content.0: the model is text only")


def test_model_without_its_image_processor_serves_text(tmp_path: Path) -> None:
    folder = save_tiny_chat_vl(tmp_path, "qwen2_vl")
    (folder / "preprocessor_config.json").unlink()

    with serve_locally(folder) as engine:
        answer = chat(engine, [user(text("a"))])
        message = refused(engine, image(WIDE))

    assert len(answer["choices"][0]["token_ids"]) > 0
    assert "needs the preprocessor_config.json of the model" in message


@pytest.mark.parametrize(
    ("length", "whole"), [(1, 1), (3, 3), (4, 3), (8, 3), (9, 9), (12, 12), (20, 20)]
)
def test_cached_tokens_end_before_an_image_or_after_it(
    one_kind: LocalEngine, length: int, whole: int
) -> None:
    _, reader = reader_of(one_kind)

    tokens, aligned = reader.read_prompt([5, 6, VISION_START, IMAGE, 7, 8], {"a": WIDE})

    assert tokens == [5, 6, VISION_START, *[IMAGE] * 6, 7, 8]
    assert PromptImages.of_prompt(tokens, aligned).whole_length(length) == whole
