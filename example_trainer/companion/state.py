"""The engine behind the routes, vLLM's types it is spoken to with, and the adapter in use."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastapi import HTTPException

from atroposlib.errors import MissingExtraError

__all__ = ["Adapter", "CompanionState", "EngineFacts", "EngineTypes", "load_engine_types"]


class EngineTypes(NamedTuple):
    """What vLLM's engine wants its requests made of."""

    sampling_params: Any
    """`SamplingParams`."""
    final_only: Any
    """The output kind that answers once."""
    cumulative: Any
    """The output kind that answers with all there is so far."""
    lora_request: Any
    """`LoRARequest`."""
    client_errors: tuple[type[Exception], ...] = (ValueError,)
    """What the engine raises when the request is to blame."""


def load_engine_types() -> EngineTypes:
    """Import vLLM's types, which takes seconds.

    Raises:
        MissingExtraError: vLLM is not installed.
    """
    try:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind
    except ImportError as error:
        raise MissingExtraError("vllm", extra="vllm") from error
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:  # before it had exceptions of its own
        client_errors: tuple[type[Exception], ...] = (ValueError,)
    else:
        client_errors = (ValueError, VLLMClientError)
    return EngineTypes(
        SamplingParams,
        RequestOutputKind.FINAL_ONLY,
        RequestOutputKind.CUMULATIVE,
        LoRARequest,
        client_errors,
    )


@dataclass(frozen=True)
class EngineFacts:
    """What is told about the engine."""

    model: str | None = None
    dtype: str | None = None
    device: str | None = None
    has_lora: bool = False
    """Whether it was started with `--enable-lora`."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter the engine has loaded."""

    name: str
    number: int
    """Its id in the engine; each load gets a new one."""
    path: str


@dataclass
class CompanionState:
    """One engine and what was done to it.

    Args:
        find_engine: Returns vLLM's `AsyncLLM`, or what is like it; None before it is up.
        find_types: Returns the types it is spoken to with.
    """

    find_engine: Callable[[], Any]
    find_types: Callable[[], EngineTypes] = load_engine_types
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the process: `LOGDIR` is where adapters are looked for."""
    facts: EngineFacts = field(default_factory=EngineFacts)
    adapter: Adapter | None = None
    """Attached to every `/generate` request; None: the model alone."""
    load_count: int = 0
    adapters_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Two loads at a time must not leave the older of them in use."""
    _requests: itertools.count[int] = field(default_factory=itertools.count)

    def engine(self) -> Any:
        """Return the engine.

        Raises:
            HTTPException: 503, it is not up.
        """
        engine = self.find_engine()
        if engine is None:
            raise HTTPException(503, "the engine is not up")
        return engine

    def request_id(self) -> str:
        """Return an id that no other request of this process has."""
        return f"companion-{next(self._requests)}"
