"""`/bridge`: what the engine is, and pausing it while its weights change."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute

from example_trainer.companion.state import CompanionState

__all__ = ["bridge_routes"]

_TOLD = (
    "CUDA_VISIBLE_DEVICES",
    "LOGDIR",
    "NUM_INFERENCE_NODES",
    "VLLM_BRIDGE_CONFIG_PATH",
    "VLLM_ENABLE_SHARED_WEIGHTS",
    "VLLM_WORKER_MULTIPROC_METHOD",
)
"""Environment variables `/bridge/debug` shows; others may hold keys."""


def bridge_routes(state: CompanionState, app: FastAPI) -> APIRouter:
    """Return the routes under `/bridge`; memory is never shared with a trainer."""
    router = APIRouter(prefix="/bridge")

    @router.get("/info")
    async def info() -> dict[str, Any]:
        state.engine()
        return {
            "enabled": False,
            "shared_weights": False,
            "update_count": 0,
            "last_update_time": None,
            "model_name": state.facts.model,
            "device": state.facts.device,
        }

    @router.get("/state_dict_info")
    async def state_dict_info() -> dict[str, Any]:
        state.engine()
        facts = state.facts
        return {"model": facts.model, "dtype": facts.dtype, "shared_weights_enabled": False}

    _add_pausing(router, state)
    _add_sleeping(router, state)

    @router.get("/debug")
    async def debug() -> dict[str, Any]:
        engine = state.find_engine()
        return {
            "engine_type": None if engine is None else type(engine).__name__,
            "vllm_version": _vllm_version(),
            "patch_applied": False,
            "env_vars": {n: state.environment[n] for n in _TOLD if n in state.environment},
            "model_config": {"model": state.facts.model, "dtype": state.facts.dtype},
        }

    @router.get("/list_endpoints")
    async def list_endpoints() -> dict[str, Any]:
        routes = [route for route in app.routes if isinstance(route, APIRoute)]
        return {
            "endpoints": [
                {"path": route.path, "methods": sorted(route.methods)} for route in routes
            ]
        }

    return router


def _add_pausing(router: APIRouter, state: CompanionState) -> None:
    @router.post("/pause")
    async def pause() -> dict[str, str]:
        """Freeze running requests and start none; their caches are computed again afterwards."""
        engine = state.engine()
        if not _can(engine, "pause_generation"):
            return {"status": "not_supported"}
        await engine.pause_generation(mode="keep")
        return {"status": "paused"}

    @router.post("/resume")
    async def resume() -> dict[str, str]:
        engine = state.engine()
        if not _can(engine, "resume_generation"):
            return {"status": "not_supported"}
        await engine.resume_generation()
        return {"status": "resumed"}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        engine = state.engine()
        return {"paused": _can(engine, "is_paused") and bool(await engine.is_paused())}


def _add_sleeping(router: APIRouter, state: CompanionState) -> None:
    @router.post("/sleep")
    async def sleep() -> dict[str, str]:
        await state.engine().sleep()
        return {"status": "sleeping"}

    @router.post("/wake_up")
    async def wake_up() -> dict[str, str]:
        await state.engine().wake_up()
        return {"status": "awake"}

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"sleeping": bool(await state.engine().is_sleeping())}


def _can(engine: Any, method: str) -> bool:
    # vLLM learned to pause in 0.12; the class says what the installed one can.
    return callable(getattr(type(engine), method, None))


def _vllm_version() -> str | None:
    try:
        import vllm
    except ImportError:
        return None
    return str(vllm.__version__)
