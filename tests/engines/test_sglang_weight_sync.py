"""After an update from disk SGLang's real server reports the logprobs of the trainer's weights.

Run by `tests/engines/sglang_stage.sh`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from example_trainer.config import TrainingConfig
from example_trainer.weight_sync import InPlaceSync
from tests.end_to_end.conftest import EngineWithModel
from tests.engines.test_sglang_engine import sglang_engine

__all__ = ["sglang_engine"]

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

TOLERANCE = 1e-3


def sample(engine: EngineWithModel, prompt: Sequence[int]) -> tuple[list[int], list[float], str]:
    """One completion: its tokens, the logprobs the engine reports, the version it names."""
    answer = httpx.post(
        f"{engine.base_url.removesuffix('/v1')}/generate",
        json={
            "input_ids": list(prompt),
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 20, "ignore_eos": True},
        },
        timeout=120.0,
    )
    answer.raise_for_status()
    found = answer.json()
    logprobs = found["meta_info"]["output_token_logprobs"]
    return (
        found["output_ids"],
        [entry[0] for entry in logprobs],
        found["meta_info"]["weight_version"],
    )


def largest_gap(model: Any, prompt: Sequence[int], tokens: list[int], logprobs: Any) -> float:
    import torch

    from example_trainer.scoring import token_logprobs_BT

    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        expected_BT = token_logprobs_BT(model(ids[:, :-1]).logits, ids[:, 1:])
    return float((expected_BT[0, len(prompt) - 1 :] - torch.tensor(logprobs)).abs().max())


@pytest.mark.parametrize("pause_mode", ["keep", "none", "wait"])
def test_update_from_disk_makes_the_engine_report_the_trainers_logprobs(
    sglang_engine: EngineWithModel, tmp_path: Path, pause_mode: str
) -> None:
    import torch

    prompt = sglang_engine.tokenizer.encode("What is 3 plus 1?")
    model = copy.deepcopy(sglang_engine.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * parameter.std(correction=0) * torch.randn_like(parameter))
    config = TrainingConfig(
        model_name="tiny",
        device="cpu",
        weight_bridge_mode="in_place",
        engine="sglang",
        vllm_port=httpx.URL(sglang_engine.base_url).port,
        sync_pause_mode=pause_mode,
        save_path=str(tmp_path / "saves"),
    )
    sync = InPlaceSync(config)

    sync.check_before_load()
    sync.publish(sglang_engine.model, checkpoint=None, step=1)
    before = sample(sglang_engine, prompt)
    sync.publish(model, checkpoint=None, step=2)
    after = sample(sglang_engine, prompt)
    sync.close()

    assert largest_gap(sglang_engine.model, prompt, *before[:2]) < TOLERANCE
    assert largest_gap(model, prompt, *before[:2]) > 0.1
    assert largest_gap(model, prompt, *after[:2]) < TOLERANCE
    assert (before[2], after[2]) == ("1", "2")
