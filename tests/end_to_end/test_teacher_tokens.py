"""A real teacher's log-probabilities, position by position, against its own forward pass."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.teacher_distillation_env import TeacherDistillationEnv
from tests.end_to_end.conftest import EngineWithModel
from tests.end_to_end.test_vllm_exact_tokens import TOLERANCE, forward_logprobs
from tests.envs.test_teacher_distillation_env import bare_env
from tests.trainer.test_training import make_trainer
from tests.trainer.tiny import group

pytestmark = pytest.mark.slow

TEXTS = ["It is 12 and 1.", "What is 7 plus 1? It is 8."]


async def attach(sent: Any, engine: EngineWithModel, *, server_type: Any, top_k: int) -> Any:
    config = APIServerConfig(
        base_url=engine.base_url,
        server_type=server_type,
        model_name=engine.model_name,
        tokenizer_name=str(engine.folder),
    )
    env = bare_env(top_k=top_k, teacher=ServerManager([config]))
    taught = await TeacherDistillationEnv._attach_teacher_distillation(env, sent)
    await env.teacher_server.close()
    return taught


@pytest.mark.parametrize("server_type", ["vllm", "trl"])
@pytest.mark.parametrize("top_k", [0, 4])
async def test_teacher_rows_are_the_forward_pass_at_each_token(
    server_type: Any, top_k: int, vllm_engine: EngineWithModel
) -> None:
    tokens = [vllm_engine.tokenizer.encode(text) for text in TEXTS]

    taught = await attach({"tokens": tokens}, vllm_engine, server_type=server_type, top_k=top_k)

    for ids, rows, values in zip(
        tokens, taught["distill_token_ids"], taught["distill_logprobs"], strict=True
    ):
        expected = forward_logprobs(vllm_engine.model, ids)
        assert (rows[0], values[0]) == ([], [])
        for t in range(1, len(ids)):
            found = dict(zip(rows[t], values[t], strict=True))
            likeliest = sorted(range(len(expected[t - 1])), key=expected[t - 1].__getitem__)
            assert set(found) == {ids[t], *likeliest[len(likeliest) - top_k :]}
            for token, logprob in found.items():
                assert logprob == pytest.approx(expected[t - 1][token], abs=TOLERANCE)


async def test_student_that_is_its_own_teacher_has_nothing_to_learn(
    vllm_engine: EngineWithModel, tmp_path: Path
) -> None:
    completions = [vllm_engine.tokenizer.encode(text) for text in TEXTS]
    sent = group(completions, [1.0, 0.0])

    taught = await attach(sent, vllm_engine, server_type="vllm", top_k=8)

    aligned = distillation_metrics(vllm_engine.model, taught, tmp_path / "aligned")
    assert aligned["distill/token_count"] == sum(map(len, completions))
    assert aligned["distill/loss"] == pytest.approx(0.0, abs=1e-5)
    late = {
        name: [[*rows[1:], []] for rows in taught[name]]
        for name in ("distill_token_ids", "distill_logprobs")
    }
    shifted = distillation_metrics(vllm_engine.model, taught | late, tmp_path / "shifted")
    assert shifted["distill/loss"] > 0.05  # thousands of times the aligned one


def distillation_metrics(model: Any, taught: Any, folder: Path) -> dict[str, float]:
    """What a step of the trainer says of a group; the reverse KL needs no tail of the teacher."""
    trainer = make_trainer(
        folder,
        groups=[taught],
        model=copy.deepcopy(model),
        training_steps=1,
        policy_coef=0.0,
        distill_coef=1.0,
        distill_loss="reverse_kl",
    )
    trainer.run()
    [line] = (folder / "metrics.jsonl").read_text().splitlines()
    metrics: dict[str, float] = json.loads(line)
    return metrics
