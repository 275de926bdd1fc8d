"""A teacher behind every kind of engine: rows that stand at the positions of their tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.teacher_distillation_env import TeacherDistillationEnv
from tests.envs.test_teacher_distillation_env import bare_env
from tests.fakes import CharTokenizer, ScriptedEngine, logprob_of
from tests.scripted_dialects import ScriptedSGLang, ScriptedTrl

TOKENS = [[1, 104, 105, 2], [1, 97]]

WITH_PROMPT_LOGPROBS: dict[str, tuple[str, Callable[[], ScriptedEngine]]] = {
    "vllm": ("vllm", ScriptedEngine),
    "vllm companion": (
        "vllm",
        lambda: ScriptedEngine(returns_token_ids=False, offers_generate=True),
    ),
    "sglang": ("sglang", ScriptedSGLang),
    "trl with vllm inside": ("trl", ScriptedEngine),
}
WITHOUT: dict[str, tuple[str, Callable[[], ScriptedEngine]]] = {
    "openai": ("openai", ScriptedEngine),
    "trl of its own": ("trl", ScriptedTrl),
}


@pytest.fixture
async def attached(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[int], Any]]:
    """Attach a teacher's rows to a group, by the engine that the test names."""
    server_type, make_engine = request.param
    async with make_engine() as engine:
        config = APIServerConfig(
            base_url=engine.base_url,
            server_type=server_type,
            model_name="scripted",
            api_key="x",
        )
        manager = ServerManager([config])
        manager.servers[0].tokenizer = CharTokenizer()

        async def attach(top_k: int) -> Any:
            env = bare_env(top_k=top_k, teacher=manager)
            group: Any = {"tokens": TOKENS, "group_overrides": None}
            return await TeacherDistillationEnv._attach_teacher_distillation(env, group)

        yield attach
        await manager.close()


@pytest.mark.parametrize(
    "attached", WITH_PROMPT_LOGPROBS.values(), ids=WITH_PROMPT_LOGPROBS, indirect=True
)
@pytest.mark.parametrize("top_k", [0, 1, 3])
async def test_rows_stand_at_their_tokens(attached: Callable[[int], Any], top_k: int) -> None:
    group = await attached(top_k)

    for tokens, ids, logprobs in zip(
        TOKENS, group["distill_token_ids"], group["distill_logprobs"], strict=True
    ):
        assert ids[0] == logprobs[0] == []  # nothing stands before the first token
        for t, token in enumerate(tokens[1:], start=1):
            assert len(ids[t]) == len(logprobs[t]) >= max(1, top_k)
            assert dict(zip(ids[t], logprobs[t], strict=True))[token] == logprob_of(token, t)


@pytest.mark.parametrize("attached", WITHOUT.values(), ids=WITHOUT, indirect=True)
async def test_engine_without_prompt_logprobs_leaves_the_group_as_it_is(
    attached: Callable[[int], Any], caplog: pytest.LogCaptureFixture
) -> None:
    group = await attached(2)

    assert group["distill_token_ids"] is group["distill_logprobs"] is None
    assert group["tokens"] == TOKENS
    assert "no teacher for a group" in caplog.text
