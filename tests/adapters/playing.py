"""Environments of adapters at an engine with scripted replies."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from atroposlib.adapters.env import AdapterEnv, AdapterEnvConfig, environment_class
from atroposlib.adapters.registry import adapter_class, split_spec
from atroposlib.envs.base import APIServerConfig
from atroposlib.scored_data import IGNORE_INDEX, check_group
from tests.fakes import CharTokenizer, ScriptedEngine

__all__ = ["adapter_env", "check_tokens", "group_of", "playing", "roll_out"]


@contextlib.asynccontextmanager
async def adapter_env(
    spec: str,
    args: Mapping[str, Any],
    policy: Callable[[str], str],
    **settings: Any,
) -> AsyncIterator[AdapterEnv]:
    """Set up the environment of a task set; close it and its engine at the end.

    Args:
        spec: `KIND:NAME`.
        args: arguments of the adapter.
        policy: the reply to a prompt.
        settings: settings of the environment.
    """
    defaults = {
        "use_wandb": False,
        "tokenizer_name": "characters",
        "group_size": 2,
        **adapter_class(split_spec(spec)[0]).default_settings,
        "max_token_length": 20_000,
    }
    config = AdapterEnvConfig(adapter=spec, adapter_args=dict(args), **{**defaults, **settings})
    async with ScriptedEngine(policy) as engine:
        server = APIServerConfig(
            model_name="m", base_url=engine.base_url, server_type="vllm", health_check=False
        )
        env = environment_class(spec)(config, server)
        try:
            await env.setup()
            yield env
        finally:
            await env.close()
            await env.server.close()


async def roll_out(env: AdapterEnv, item: Any = None) -> Any:
    """Return the group of an item, the next one by default, after the checks of its tokens."""
    chosen = await env.get_next_item() if item is None else item
    rollouts, _ = await env.collect_trajectories(chosen)
    group = await env.postprocess_histories(rollouts)
    check_group(group)
    for rollout in rollouts:
        check_tokens(rollout)
    return rollouts, group


def check_tokens(rollout: Any) -> None:
    """Check that exactly the completions of the policy are trained, token by token."""
    for sequence in rollout.sequences:
        written = [m["content"] for m in sequence.messages if m["role"] == "assistant"]
        labels = zip(sequence.tokens, sequence.masks, strict=True)
        trained = [token for token, mask in labels if mask != IGNORE_INDEX]
        assert set(sequence.masks) <= {IGNORE_INDEX, *trained}
        eos = CharTokenizer().eos_token
        assert CharTokenizer().decode(trained).replace(eos, "") == "".join(written)


@contextlib.asynccontextmanager
async def playing(
    engine: ScriptedEngine,
    spec: str,
    args: dict[str, Any] | None = None,
    *,
    server: APIServerConfig | None = None,
    **settings: Any,
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
    server = server or APIServerConfig(
        model_name="m", base_url=engine.base_url, server_type="vllm", health_check=False
    )
    env = environment_class(spec)(config, server)
    try:
        await env.setup()
        yield env
    finally:
        await env.close()
        await env.server.close()


async def group_of(env: AdapterEnv) -> Any:
    rollouts, _ = await env.collect_trajectories(await env.get_next_item())
    return await env.postprocess_histories(rollouts)
