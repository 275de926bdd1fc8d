"""Task sets of other libraries, set up at a scripted engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from atroposlib.adapters.env import AdapterEnv, AdapterEnvConfig, environment_class
from atroposlib.envs.base import APIServerConfig
from tests.fakes import ScriptedEngine

__all__ = ["group_of", "playing"]


@contextlib.asynccontextmanager
async def playing(
    engine: ScriptedEngine, spec: str, args: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[AdapterEnv]:
    """Yield the environment of `KIND:NAME`, set up; its tokens are characters."""
    chosen = {"group_size": 2, "max_token_length": 20_000, "num_eval_items": 4, **settings}
    config = AdapterEnvConfig(
        adapter=spec,
        adapter_args=args or {},
        use_wandb=False,
        tokenizer_name="characters",
        **chosen,
    )
    server = APIServerConfig(
        model_name="m", base_url=engine.base_url, server_type="vllm", health_check=False
    )
    env = environment_class(spec)(config, server)
    try:
        await env.setup()
        yield env
    finally:
        await env.close()


async def group_of(env: AdapterEnv) -> Any:
    rollouts, _ = await env.collect_trajectories(await env.get_next_item())
    return await env.postprocess_histories(rollouts)
