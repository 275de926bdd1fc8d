"""A real teacher's log-probabilities, position by position, against its own forward pass."""

from __future__ import annotations

from typing import Any

import pytest

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.teacher_distillation_env import TeacherDistillationEnv
from tests.end_to_end.conftest import EngineWithModel
from tests.end_to_end.test_vllm_exact_tokens import TOLERANCE, forward_logprobs
from tests.envs.test_teacher_distillation_env import bare_env

pytestmark = pytest.mark.slow

TEXTS = ["It is 12 and 1.", "What is 7 plus 1? It is 8."]


@pytest.mark.parametrize("server_type", ["vllm", "trl"])
@pytest.mark.parametrize("top_k", [0, 4])
async def test_teacher_rows_are_the_forward_pass_at_each_token(
    server_type: Any, top_k: int, vllm_engine: EngineWithModel
) -> None:
    config = APIServerConfig(
        base_url=vllm_engine.base_url,
        server_type=server_type,
        model_name=vllm_engine.model_name,
        tokenizer_name=str(vllm_engine.folder),
    )
    env = bare_env(top_k=top_k, teacher=ServerManager([config]))
    tokens = [vllm_engine.tokenizer.encode(text) for text in TEXTS]

    group = await TeacherDistillationEnv._attach_teacher_distillation(env, {"tokens": tokens})
    await env.teacher_server.close()

    for ids, rows, values in zip(
        tokens, group["distill_token_ids"], group["distill_logprobs"], strict=True
    ):
        expected = forward_logprobs(vllm_engine.model, ids)
        assert (rows[0], values[0]) == ([], [])
        for t in range(1, len(ids)):
            found = dict(zip(rows[t], values[t], strict=True))
            likeliest = sorted(range(len(expected[t - 1])), key=expected[t - 1].__getitem__)
            assert set(found) == {ids[t], *likeliest[len(likeliest) - top_k :]}
            for token, logprob in found.items():
                assert logprob == pytest.approx(expected[t - 1][token], abs=TOLERANCE)
