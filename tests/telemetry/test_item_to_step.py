"""One trace from an item to the step that trained on it, through the real programs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.conversation import Turn
from atroposlib.envs.multi_turn_env import MultiTurnEnv, MultiTurnEnvConfig
from atroposlib.envs.tools import ToolConversation
from example_trainer.trainers import train
from tests.byte_tokenizer import save_byte_tokenizer
from tests.envs.live_service import LiveService
from tests.fakes import ScriptedEngine
from tests.telemetry.spans import ReadSpan, spans_in
from tests.trainer.tiny import save_tiny_model, tiny_config

pytestmark = pytest.mark.slow

CALL = '<tool_call>{"name": "price", "arguments": {"product": "tea"}}</tool_call>'
SECRET = "hunter2-of-the-prompt"  # pragma: allowlist secret


def price(product: str) -> int:
    """Look up a price."""
    return {"tea": 3}[product]


class Shop(ToolConversation):
    async def score(self, turn: Turn) -> float:
        return float(turn.answer.count("3"))


class ShopEnv(MultiTurnEnv):
    name = "shop"

    async def get_next_item(self) -> str:
        return SECRET

    def start_conversation(self, item: str) -> Shop:
        return Shop([{"role": "user", "content": item}], [price])


@pytest.fixture
def service(free_port: int) -> Iterator[LiveService]:
    live = LiveService(free_port)
    yield live
    live.stop()


def save_model(folder: Path) -> Any:
    """Save a model with an embedding for each token of the environment; return its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    save_tiny_model(folder)
    config = LlamaConfig.from_pretrained(folder)
    config.vocab_size, config.max_position_embeddings = 512, 2048
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return save_byte_tokenizer(folder)


async def run_all(service: LiveService, tmp_path: Path) -> ScriptedEngine:
    """Serve items to a trainer that takes two steps."""
    answers = cycle(["3", "33"])
    tokenizer = save_model(tmp_path / "model")
    async with ScriptedEngine(
        lambda prompt: next(answers) if "tool_response" in prompt else CALL, tokenizer=tokenizer
    ) as engine:
        server = APIServerConfig(
            model_name="m", base_url=engine.base_url, server_type="vllm", health_check=False
        )
        config = MultiTurnEnvConfig(
            rollout_server_url=service.url,
            use_wandb=False,
            tokenizer_name=str(tmp_path / "model"),
            group_size=2,
            max_num_workers=1,
            max_token_length=1500,
            ensure_scores_are_not_same=False,
        )
        env = ShopEnv(config, server)
        settings = tiny_config(
            tmp_path,
            model_name=str(tmp_path / "model"),
            atropos_url=service.url,
            weight_bridge_mode="off",
            training_steps=2,
            gradient_accumulation_steps=1,
            seq_len=2048,
            use_wandb=False,
            quiet=True,
        )
        training = asyncio.create_task(asyncio.to_thread(train, settings))
        await asyncio.wait_for(env.env_manager(), 120)
        await training
    return engine


async def test_one_trace_follows_an_item_to_its_step(
    service: LiveService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "spans.jsonl"
    monkeypatch.setenv("ATROPOS_TRACING", f"file:{path}")
    monkeypatch.chdir(tmp_path)
    service.start()

    engine = await run_all(service, tmp_path)
    service.stop()

    spans = spans_in(path)
    steps = [span for span in spans if span.name == "rl.step"]
    assert [step.attributes["rl.policy.version"] for step in steps] == [1, 2]
    (group_link,) = steps[0].links
    trace = [span for span in spans if span.trace_id == group_link[0]]
    assert parents_of(trace) == {
        "rl.item": {""},
        "rl.rollout": {"rl.item"},
        "rl.turn": {"rl.rollout"},
        "text_completion m": {"rl.turn"},
        "execute_tool price": {"rl.turn"},
        "rl.score": {"rl.turn"},
        "rl.group": {"rl.item"},
        "rl.queue": {"rl.group"},
        "rl.lease": {"rl.group"},
        "rl.train": {"rl.group"},
    }
    check_attributes(trace, steps[0])
    assert {span.service for span in spans} == {
        "atropos-environment", "atropos-service", "atropos-trainer",
    }  # fmt: skip
    assert SECRET not in path.read_text()
    seen_by_engine = {request.headers.get("traceparent", "") for request in engine.requests}
    requests = {f"00-{s.trace_id}-{s.span_id}-01" for s in spans if s.name == "text_completion m"}
    assert requests <= seen_by_engine


def parents_of(trace: list[ReadSpan]) -> dict[str, set[str]]:
    names = {span.span_id: span.name for span in trace}
    parents = defaultdict(set)
    for span in trace:
        parents[span.name].add(names[span.parent_id] if span.parent_id else "")
    return dict(parents)


def check_attributes(trace: list[ReadSpan], step: ReadSpan) -> None:
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for span in trace:
        assert span.start_ns <= span.end_ns
        by_name[span.name].append(span.attributes)
    assert sorted(span["rl.rollout.index"] for span in by_name["rl.rollout"]) == [0, 1]
    assert sorted(span["rl.turn.index"] for span in by_name["rl.turn"]) == [0, 0, 1, 1]
    assert by_name["rl.item"][0]["rl.environment.name"] == "shop"
    assert {span["gen_ai.operation.name"] for span in by_name["text_completion m"]} == {
        "text_completion"
    }
    assert all(span["gen_ai.usage.output_tokens"] > 0 for span in by_name["text_completion m"])
    (group,), (lease,) = by_name["rl.group"], by_name["rl.lease"]
    assert sorted(group["rl.rewards"]) == sorted(s["rl.reward"] for s in by_name["rl.rollout"])
    assert (lease["rl.lease.outcome"], lease["rl.batch.attempt"]) == ("acknowledged", 1)
    assert lease["rl.batch.id"] == step.attributes["rl.batch.id"]
    (trained,) = (span for span in trace if span.name == "rl.train")
    assert trained.links == [(step.trace_id, step.span_id)]
    assert trained.attributes["rl.policy.version"] == step.attributes["rl.step"] == 1
