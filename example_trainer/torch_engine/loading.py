"""Load a model into a `TorchEngine`, with sizes that fit the machine.

At the end the engine scores a few tokens, and the result is compared with transformers' own
attention: a model whose attention the engine does not support is rejected at the start. If the
context is longer than a window of the attention, one token after such a window is compared too.
Tokens that are generated have to get the same logprobs as when they are scored at once: layers with
states that the engine does not keep fail this. If tokens after a cached prompt get others, every
prompt is computed as a whole.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from atroposlib import __version__
from atroposlib.errors import ConfigError
from example_trainer.config import loading_errors, require_model_folder, unloadable
from example_trainer.images import ImageReader, image_support
from example_trainer.model import (
    FOREIGN_ERRORS,
    PLAIN_LAYERS,
    auto_class_of,
    load_pretrained,
    own_memory,
    tokens_to_test_attention,
)
from example_trainer.torch_engine.attention import (
    PackedBatch,
    PackedTokens,
    SlotCache,
    use_slot_attention,
)
from example_trainer.torch_engine.batching import EngineLimits
from example_trainer.torch_engine.generation import TorchEngine
from example_trainer.torch_engine.images import PromptImages, PromptReader
from example_trainer.torch_engine.jobs import Job, PromptRequest
from example_trainer.torch_engine.protocol import ServedTorchModel
from example_trainer.torch_engine.recurrent import RECURRENT_LAYERS, use_slot_states
from example_trainer.torch_engine.server import EngineState
from example_trainer.vllm_manager import cpu_cache_gib

logger = logging.getLogger(__name__)

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
_CHECKED_TOKENS = 16
_GENERATED_TOKENS = (4, 8)
"""Of two sequences, the second of which moves to the slot of the first."""
_CONTINUED_TOKENS, _NEW_TOKENS = 40, 8
"""Of a prompt that continues another, and how many of them are new."""
_CHECKED_IMAGE = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAANElEQVR42u3MMREAIAwEMArFv2Lu6oDl10RAaq9MnzS4"
    "adACgUAgEAgEAoFAIBAIfuqFwQB9LgLy4CuODgAAAABJRU5ErkJggg=="
)
"""A gradient of 64 x 64 pixels, as base64 of a PNG."""
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.2}
"""Largest difference of a logprob that rounding explains."""


@dataclass(frozen=True)
class TorchEngineOptions:
    """The command line of the engine."""

    model: str
    served_model_name: str | None = None
    device: str = "auto"
    dtype: DtypeName = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.85
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    max_logprobs: int = 20
    logprobs_mode: str = "raw_logprobs"
    seed: int = 0
    weight_version: str | None = None


def load_engine(options: TorchEngineOptions) -> EngineState:
    """Load the model and start its engine.

    Raises:
        ConfigError: The model cannot be loaded or served, or does not fit.
    """
    device = _device_of(options.device)
    model, tokenizer = _load_model(options, device)
    _require_known_layers(model)
    images = image_support(model, options.model)
    with _refusing(model):
        image_check = None if images.reader is None else _check_of_images(model, images.reader)
        reference = _reference_logprobs(model)
        beyond = _reference_beyond_window(model, longest=_context_of(options, model))
    if any(map(math.isnan, reference)):
        raise ConfigError(
            f"model {options.model!r} computes NaN: its weights have NaN or infinity, or their "
            "type cannot represent the activations"
        )
    use_slot_attention(model)
    with _refusing(model):
        continues_from_states = use_slot_states(model)
        sizes = _cache_sizes(model)
    limits = _limits(options, model, device, sizes)
    engine = TorchEngine(
        model,
        limits,
        is_processed=options.logprobs_mode == "processed_logprobs",
        keeps_prefixes=options.enable_prefix_caching and continues_from_states,
        seed=options.seed,
        weight_version=options.weight_version,
        image_token_id=None if images.reader is None else images.reader.image_token_id,
    )
    served = ServedTorchModel(
        name=options.served_model_name or options.model,
        path=options.model,
        tokenizer=tokenizer,
        vocabulary_size=model.get_input_embeddings().num_embeddings,
        end_ids=_end_ids(model, tokenizer),
        limits=limits,
        max_logprobs=options.max_logprobs,
        image_reader=_prompt_reader(images.reader, image_check, limits),
        obstacle_to_images=images.obstacle,
    )
    engine.reports_failures = False
    try:
        _compare(engine, reference, beyond, dtype=model.dtype)
        if image_check is not None:
            _compare_with_image(engine, image_check, dtype=model.dtype)
        _compare_continued(engine, dtype=model.dtype)
    except BaseException:
        engine.close()
        raise
    engine.reports_failures = True
    return EngineState(engine, served, _info(options, model, served, device))


def _unserved(model: Any, reason: object) -> ConfigError:
    return ConfigError(f"the torch engine cannot serve {type(model).__name__}: {reason}; use vLLM")


@contextlib.contextmanager
def _refusing(model: Any) -> Iterator[None]:
    """Raise `ConfigError` for errors of a model's own code."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except ConfigError as error:
        raise _unserved(model, error) from error
    except FOREIGN_ERRORS as error:
        reason = str(error).partition("\n")[0]
        raise _unserved(model, f"{type(error).__name__}: {reason}") from error


_SERVED_LAYERS = PLAIN_LAYERS | RECURRENT_LAYERS | {"mlp", "moe"}


def _require_known_layers(model: Any) -> None:
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    others = sorted(set(kinds) - _SERVED_LAYERS)
    if others:
        raise _unserved(model, f"it has no caches for layers of {' and '.join(others)}")


class _CacheSizes(NamedTuple):
    """Memory of the caches, in bytes."""

    token: int
    """A token in the layers with attention."""
    sequence: int
    """A sequence in the recurrent layers."""


def _cache_sizes(model: Any) -> _CacheSizes:
    """Return the memory of the caches, which a forward pass determines.

    Layers may differ in it, and attention with compressed keys caches them expanded.
    """
    cache, packed = SlotCache(device=model.device, dtype=model.dtype), PackedTokens()
    cache.reserve(1, 1)
    packed.add_start(0, _check_ids(model, 1))
    batch = PackedBatch(packed, cache)
    ids, positions = batch.tokens_N[None], batch.positions_N[None]
    with torch.inference_mode():
        model(input_ids=ids, position_ids=positions, use_cache=False, batch=batch)
    sizes = _CacheSizes(cache.bytes_per_token(), cache.states.bytes_per_slot())
    if not any(sizes):
        raise ConfigError("it has attention layers of its own")
    return sizes


def _device_of(name: str) -> torch.device:
    if name != "auto":
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"--device {name} cannot be used: {reason}") from error
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _load_model(options: TorchEngineOptions, device: torch.device) -> tuple[Any, Any]:
    require_model_folder(options.model)
    from transformers import AutoConfig, AutoTokenizer

    dtype: Any = options.dtype
    if dtype == "auto" and device.type == "cpu":
        dtype = "float32"
    try:
        auto_class = auto_class_of(AutoConfig.from_pretrained(options.model))
        model = load_pretrained(auto_class, options.model, dtype=dtype)
    except loading_errors() as error:
        raise unloadable(options.model, error) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except loading_errors() as error:
        raise unloadable(options.model, error, part="the tokenizer of model") from error
    model = model.to(device).eval().requires_grad_(False)
    if device.type == "cpu":
        own_memory(model)
    return model, tokenizer


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    own = model.generation_config.eos_token_id
    ids = own if isinstance(own, list) else [own]
    return frozenset(each for each in (*ids, tokenizer.eos_token_id) if each is not None)


def _limits(
    options: TorchEngineOptions, model: Any, device: torch.device, sizes: _CacheSizes
) -> EngineLimits:
    length = _context_of(options, model)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not length:
        raise ConfigError(
            f"the config of {options.model} has no max_position_embeddings: set --max-model-len"
        )
    if most is not None and length > most:
        raise ConfigError(f"--max-model-len {length}: {options.model} reads at most {most} tokens")
    available = _cache_bytes(options, device)
    for_states = available - length * sizes.token
    if for_states < sizes.sequence:
        needed = length * sizes.token + sizes.sequence
        raise ConfigError(
            f"the caches of one sequence of {length} tokens take {needed / 2**30:.2f} GiB, "
            f"{available / 2**30:.2f} are available; lower --max-model-len or raise "
            "--kv-cache-memory-bytes"
        )
    num_seqs = options.max_num_seqs
    if sizes.sequence:  # the states of all sequences take at most half of the memory
        num_seqs = min(num_seqs, max(1, min(for_states, available // 2) // sizes.sequence))
    if num_seqs < options.max_num_seqs:
        logger.warning(
            "at most %d sequences run at the same time, not %d: the states of one take %.1f MiB",
            *(num_seqs, options.max_num_seqs, sizes.sequence / 2**20),
        )
    for_tokens = available - num_seqs * sizes.sequence
    return EngineLimits(
        max_model_len=length,
        max_num_seqs=num_seqs,
        max_cache_tokens=for_tokens // max(1, sizes.token),
        max_new_tokens=options.max_num_batched_tokens,
        state_tokens=-(-sizes.sequence // max(1, sizes.token)),
    )


def _prompt_reader(
    reader: ImageReader | None, check: _ImageCheck | None, limits: EngineLimits
) -> PromptReader | None:
    if reader is None or check is None:
        return None
    return PromptReader(
        reader, max_tokens=limits.max_model_len, numbers_per_token=check.numbers_per_token
    )


def _cache_bytes(options: TorchEngineOptions, device: torch.device) -> int:
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(options.gpu_memory_utilization * total - (total - free)))
    import psutil

    return cpu_cache_gib(psutil.virtual_memory().available) * 2**30


def _context_of(options: TorchEngineOptions, model: Any) -> int:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", 0)
    return options.max_model_len or most


def _check_ids(model: Any, num_tokens: int = _CHECKED_TOKENS) -> tuple[int, ...]:
    size = model.get_input_embeddings().num_embeddings
    return tuple((7 * position + 3) % size for position in range(num_tokens))


def _reference_logprobs(model: Any) -> list[float]:
    """Return the logprobs of tokens after the first, by the model's own attention."""
    ids = torch.tensor([_check_ids(model)], device=model.device)
    with torch.inference_mode():
        return _logprobs_of(model(input_ids=ids, use_cache=False).logits, ids)


def _logprobs_of(logits_1PV: torch.Tensor, ids_1P: torch.Tensor) -> list[float]:
    """Return the logprobs of the tokens after the first."""
    logprobs_PV = torch.log_softmax(logits_1PV[0, :-1].float(), dim=-1)
    chosen = logprobs_PV.gather(1, ids_1P[0, 1:].unsqueeze(1))
    return [float(value) for value in chosen.squeeze(1)]


def _reference_beyond_window(
    model: Any, *, longest: int
) -> tuple[tuple[int, ...], torch.Tensor] | None:
    """Return a prompt beyond all windows of the attention, and the logprobs of its next token.

    None if sequences of `longest` tokens exceed no window, or the model has no such logits alone.
    """
    number = tokens_to_test_attention(
        model.config.get_text_config(), at_least=_CHECKED_TOKENS, longest=longest
    )
    if number == _CHECKED_TOKENS:
        return None
    prompt = _check_ids(model, min(number, longest - 1))
    ids = torch.tensor([prompt], device=model.device)
    try:
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    except TypeError:
        return None
    return prompt, torch.log_softmax(logits.float(), dim=-1)


def _compare(
    engine: TorchEngine,
    reference: list[float],
    beyond: tuple[tuple[int, ...], torch.Tensor] | None,
    *,
    dtype: torch.dtype,
) -> None:
    """Raise `ConfigError` unless the engine computes the reference logprobs, also one by one."""
    ids = _check_ids(engine.batch.model)
    prompts = [PromptRequest(ids, max_tokens=0, prompt_top=0)]
    if beyond is not None:
        prompts.append(PromptRequest(beyond[0], max_tokens=1, seed=0))
    scored, *others = _finished(engine, prompts)
    found = _prompt_logprobs(scored)
    for job in others:
        assert beyond is not None
        found += job.completions[0].logprobs
        reference = [*reference, float(beyond[1][job.completions[0].tokens[0]])]
    _require_equal(engine, found, reference, dtype, "transformers' own attention")
    # States of layers, and steps with one token, are needed only by what is generated.
    starts = (ids[: _CHECKED_TOKENS // 2], ids[: _CHECKED_TOKENS // 4])
    prompts = [
        PromptRequest(start, max_tokens=number, seed=0)
        for start, number in zip(starts, _GENERATED_TOKENS, strict=True)
    ]
    generated = _finished(engine, prompts)
    for start, job in zip(starts, generated, strict=True):
        completion = job.completions[0]
        whole = PromptRequest((*start, *completion.tokens), max_tokens=0, prompt_top=0)
        [rescored] = _finished(engine, [whole])
        expected = _prompt_logprobs(rescored)[len(start) - 1 :]
        _require_equal(engine, completion.logprobs, expected, dtype, "all tokens at once")


class _ImageCheck(NamedTuple):
    """A prompt with an image, and what the model's own attention computes for it."""

    prompt_ids: tuple[int, ...]
    images: PromptImages
    logprobs: list[float]
    """Of the tokens after the first."""
    numbers_per_token: int
    """Numbers of the patches that an image token stands for."""


def _check_of_images(model: Any, reader: ImageReader) -> _ImageCheck:
    text, half = _check_ids(model), _CHECKED_TOKENS // 2
    prompt = (*text[:half], reader.image_token_id, *text[half:])
    ids, aligned = reader.read_prompt(prompt, {"the image of the check": _CHECKED_IMAGE})
    [image] = aligned.images
    tokens_1P = torch.tensor([ids], device=model.device)
    with torch.inference_mode():
        logits = model(
            input_ids=tokens_1P,
            pixel_values=image.pixels_PD.to(model.device),
            image_grid_thw=torch.tensor([image.grid], device=model.device),
            mm_token_type_ids=(tokens_1P == reader.image_token_id).int(),
            use_cache=False,
        ).logits
    return _ImageCheck(
        tuple(ids),
        PromptImages.of_prompt(ids, aligned),
        _logprobs_of(logits, tokens_1P),
        image.pixels_PD.numel() // reader.num_tokens(image),
    )


def _compare_with_image(engine: TorchEngine, check: _ImageCheck, *, dtype: torch.dtype) -> None:
    """Raise `ConfigError` unless a prompt with an image gets the logprobs of transformers."""
    if len(check.prompt_ids) >= engine.batch.limits.max_model_len:
        return
    request = PromptRequest(check.prompt_ids, check.images, max_tokens=0, prompt_top=0)
    [scored] = _finished(engine, [request])
    source = "transformers' own attention, after an image"
    _require_equal(engine, _prompt_logprobs(scored), check.logprobs, dtype, source)


def _compare_continued(engine: TorchEngine, *, dtype: torch.dtype) -> None:
    """Keep no caches of finished sequences if what continues them gets other logprobs."""
    prompt = _check_ids(engine.batch.model, _CONTINUED_TOKENS)
    shared, limits = engine.batch.shared, engine.batch.limits
    if not shared.is_enabled or limits.max_model_len < _CONTINUED_TOKENS + 2:
        return
    _finished(engine, [PromptRequest(prompt[:-_NEW_TOKENS], max_tokens=1, seed=0)])
    [continued] = _finished(engine, [PromptRequest(prompt, max_tokens=1, seed=0)])
    completion = continued.completions[0]
    whole = PromptRequest((*prompt, *completion.tokens), max_tokens=0, prompt_top=0)
    [rescored] = _finished(engine, [whole])
    worst = _worst_difference(completion.logprobs, _prompt_logprobs(rescored)[-1:])
    if not worst <= _TOLERANCES[dtype]:
        logger.info(
            "requests that continue others are computed as a whole: with cached tokens, a logprob "
            "of %s differs by %.3g",
            *(type(engine.batch.model).__name__, worst),
        )
        shared.is_enabled = False


def _require_equal(
    engine: TorchEngine,
    found: list[float],
    expected: list[float],
    dtype: torch.dtype,
    source: str,
) -> None:
    worst = _worst_difference(found, expected)
    if not worst <= _TOLERANCES[dtype]:
        raise _unserved(
            engine.batch.model, f"a logprob differs by {worst:.3g} from that of {source}"
        )


def _worst_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    # Equal ones first: tokens that the model excludes have minus infinity.
    pairs = zip(found, expected, strict=True)
    return max(0.0 if a == b else abs(a - b) for a, b in pairs)


def _finished(engine: TorchEngine, prompts: Sequence[PromptRequest]) -> list[Job]:
    """Return the jobs of prompts that run together; raises `ConfigError` if one fails."""
    num_done = threading.Semaphore(0)
    jobs = [Job(prompt, on_done=lambda _: num_done.release()) for prompt in prompts]
    for job in jobs:
        engine.submit(job)
    for _ in jobs:
        num_done.acquire()
    for job in jobs:
        if job.error is not None:
            raise _unserved(engine.batch.model, job.error) from job.error
    return jobs


def _prompt_logprobs(job: Job) -> list[float]:
    return [value for value, _ in job.prompt_logprobs or ()]


def _info(
    options: TorchEngineOptions, model: Any, served: ServedTorchModel, device: torch.device
) -> dict[str, Any]:
    """Return the answer of `/server_info`: keys of vLLM, and those of this engine."""
    return {
        "vllm_config": {
            "model_config": {
                "model": str(Path(options.model)),
                "served_model_name": served.name,
                "max_model_len": served.limits.max_model_len,
                "dtype": str(model.dtype),
                "logprobs_mode": options.logprobs_mode,
                "seed": options.seed,
            },
            "scheduler_config": {"max_num_seqs": served.limits.max_num_seqs},
        },
        "torch_engine": {
            "version": __version__,
            "transformers": version("transformers"),
            "device": str(device),
            "takes_weight_version": True,
        },
    }
