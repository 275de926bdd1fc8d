"""`/lora`: one LoRA adapter at a time, attached to every later `/generate`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, Field

from example_trainer.companion.payloads import RequestError
from example_trainer.companion.state import Adapter, CompanionState

__all__ = ["adapter_routes"]

_CONFIG_NAME = "adapter_config.json"


class LoadRequest(BaseModel):
    """Body of `POST /lora/load`."""

    adapter_path: str = Field(min_length=1)
    adapter_name: str | None = Field(default=None, min_length=1)


def adapter_routes(state: CompanionState) -> APIRouter:
    """Return the routes under `/lora`."""
    router = APIRouter(prefix="/lora")

    @router.get("/status")
    async def status() -> dict[str, Any]:
        adapter = state.adapter
        return {
            "lora_available": state.facts.has_lora,
            "active_adapter_path": None if adapter is None else adapter.path,
            "active_adapter_name": None if adapter is None else adapter.name,
            "active_adapter_id": None if adapter is None else adapter.number,
            "load_count": state.load_count,
            "available_adapters": _available_adapters(state.environment.get("LOGDIR")),
        }

    @router.post("/load")
    async def load(request: LoadRequest) -> dict[str, Any]:
        async with state.adapters_lock:
            return await _load(state, request)

    @router.post("/unload")
    async def unload() -> dict[str, Any]:
        async with state.adapters_lock:
            engine, adapter = state.engine(), state.adapter
            state.adapter = None
            if adapter is not None:
                await engine.remove_lora(adapter.number)
        return {
            "status": "unloaded",
            "previous_adapter": None if adapter is None else adapter.path,
            "previous_name": None if adapter is None else adapter.name,
        }

    return router


async def _load(state: CompanionState, request: LoadRequest) -> dict[str, Any]:
    engine = state.engine()
    if not state.facts.has_lora:
        raise RequestError("this engine takes no adapters; start it with --enable-lora")
    path = Path(request.adapter_path)
    config = await asyncio.to_thread(_read_config, path)
    number = state.load_count + 1
    adapter = Adapter(request.adapter_name or f"adapter_{number}", number, str(path))
    await _add_to_engine(engine, state.find_types().lora_request(adapter.name, number, str(path)))
    previous, state.adapter, state.load_count = state.adapter, adapter, number
    if previous is not None:
        await engine.remove_lora(previous.number)
    return {
        "status": "loaded",
        "adapter_path": adapter.path,
        "adapter_name": adapter.name,
        "adapter_id": adapter.number,
        "load_count": state.load_count,
        "adapter_config": {
            "r": config.get("r"),
            "lora_alpha": config.get("lora_alpha"),
            "target_modules": config.get("target_modules"),
            "base_model": config.get("base_model_name_or_path"),
        },
    }


async def _add_to_engine(engine: Any, lora_request: Any) -> None:
    try:
        added = await engine.add_lora(lora_request)
    except Exception as error:
        # The engine's process reports a bad adapter as a plain exception of its own.
        raise RequestError(f"the engine refused the adapter: {error}") from error
    if not added:
        raise RequestError("the engine refused the adapter; its log says why")


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise HTTPException(404, f"adapter_path: no directory {path}")
    file = path / _CONFIG_NAME
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"adapter_path: {file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise RequestError(f"adapter_path: {file} holds no object")
    return config


def _available_adapters(folder: str | None) -> list[str]:
    if not folder or not Path(folder).is_dir():
        return []
    return sorted(str(file.parent) for file in Path(folder).glob(f"*/{_CONFIG_NAME}"))
