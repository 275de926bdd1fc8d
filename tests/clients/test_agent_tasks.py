"""Agents left as they are on five of the tasks: they solve them, and train their engine's tokens.

With a scripted engine the agents write the tasks' own solutions. With a real vLLM the model is of
random weights that often calls tools; the engine is asked again for every sampled token.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.adapters.env import AdapterEnv, AdapterEnvConfig, environment_class
from atroposlib.agent_tasks.agents import PRESETS
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.multi_turn_env import TokenSequence
from atroposlib.scored_data import IGNORE_INDEX, check_group
from tests.adapters.engine_tokens import mismatches
from tests.adapters.task_folders import NEEDS_WORKSPACES
from tests.clients.engine import PolicyEngine, mistakes_in
from tests.clients.installing import NotInstallableError, node_folder, node_program, python_of
from tests.clients.scripts import Call, Turn
from tests.end_to_end.conftest import EngineWithModel, serve_with_vllm
from tests.templates.make_tokenizers import FAMILIES, FOLDER

pytestmark = [
    *(pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(1800)),
    NEEDS_WORKSPACES,
]

TASKS = Path(__file__).parents[2] / "environments/agent_tasks/tasks"
FIVE = ("append-line", "find-bad-commit", "rename-photos", "sales-totals", "write-status")
FAMILY = "qwen3"
INSTALL_S = 900.0
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CALLS = {"claude-code": ("Bash", "command"), "codex": ("exec_command", "cmd")}
"""Tool and argument of an agent that runs a command; `bash` and `command` of the others."""
ENDINGS = {
    "mini-swe-agent": Turn("", (Call("bash", {"command": SUBMIT}),)),
    "smolagents": Turn("", (Call("final_answer", {"answer": "done"}),)),
}


def turns_of(agent: str, command: str) -> tuple[Turn, Turn]:
    """Return the turns of a model that gives one command to an agent, and ends."""
    if agent == "shell":
        return Turn(f"```sh\n{command}\n```"), Turn("Done.")
    name, argument = CALLS.get(agent, ("bash", "command"))
    call = Call(name, {argument: command})
    return Turn("I do it.", (call,), thought="One command."), ENDINGS.get(agent, Turn("Done."))


def prefix_of(agent: str) -> str | None:
    """Return the folder of an agent's software, which is installed if missing."""
    if not PRESETS[agent].package:
        return None
    try:
        if PRESETS[agent].runtime == "node":
            return str(node_folder(agent, limit_s=INSTALL_S))
        return str(python_of(agent, limit_s=INSTALL_S).parents[1])
    except NotInstallableError as error:
        pytest.skip(f"{agent}: {error}")


@pytest.fixture(autouse=True)
def own_workspaces(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_WORKSPACES_DIR", str(tmp_path_factory.mktemp("workspaces")))
    if shutil.which("node") is None:
        with contextlib.suppress(NotInstallableError):
            node = node_program(limit_s=INSTALL_S)
            monkeypatch.setenv("PATH", str(node.parent), prepend=":")


@contextlib.asynccontextmanager
async def environment(
    agent: str, server: APIServerConfig, tokenizer: Path, **settings: Any
) -> AsyncIterator[AdapterEnv]:
    spec = f"tasks:{TASKS}"
    args = {"agent": agent, "tasks": list(FIVE), "shuffle": False, "max_agent_turns": 6}
    config = AdapterEnvConfig(
        adapter=spec,
        adapter_args={**args, "agent_prefix": prefix_of(agent), **settings.pop("args", {})},
        use_wandb=False,
        tokenizer_name=str(tokenizer),
        **{"max_token_length": 100_000, "max_turn_tokens": 4096, "num_eval_items": 0, **settings},
    )
    env = environment_class(spec)(config, server)
    try:
        await env.setup()
        yield env
    finally:
        await env.close()
        await env.server.close()


@pytest.mark.parametrize("agent", PRESETS)
async def test_agent_solves_five_tasks_with_the_engines_own_tokens(agent: str) -> None:
    solutions = [(TASKS / name / "solution/solve.sh").read_text("utf-8") for name in FIVE]
    turns = [turn for solution in solutions for turn in turns_of(agent, solution)]
    rollouts = []

    engine = PolicyEngine(FAMILY, turns)
    async with engine:
        server = APIServerConfig(
            base_url=engine.base_url, server_type="vllm", model_name="policy", timeout=60
        )
        args = {"tool_parser": FAMILIES[FAMILY].tool_parser}
        async with environment(agent, server, FOLDER / FAMILY, args=args) as env:
            for name in FIVE:
                item = await env.get_next_item()
                assert item["task"] == name
                rollout, _ = await env.collect_trajectory(item)
                rollouts.append(rollout)

    found = {r.item["task"]: (r.rewards, r.trace["outcome"]) for r in rollouts}
    assert found == {name: ([1.0], "done") for name in FIVE}, rollouts[-1].trace["events"][-3:]
    assert engine.num_played == len(turns) == len(engine.calls)
    nodes: list[Any] = [
        SimpleNamespace(
            tokens=sequence.tokens,
            masked_tokens=sequence.masks,
            logprobs=sequence.inference_logprobs,
        )
        for rollout in rollouts
        for sequence in rollout.sequences
    ]
    assert mistakes_in(nodes, engine) == []
    for rollout in rollouts:
        events = rollout.trace["events"]
        assert len([event for event in events if event["kind"] == "turn"]) == 2
        calls = [event["name"] for event in events if event["kind"] == "tool_call"]
        assert calls[:1] == [call.name for call in turns[0].calls]
        assert len(rollout.sequences) == rollout.metrics["num_rows"]


CALL_TEXTS = [
    f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    for name, arguments in (
        ("bash", {"command": "ls"}),
        ("bash", {"command": "echo ready > /app/status.txt"}),
        ("exec_command", {"cmd": "ls"}),
        ("exec_command", {"cmd": "echo ready > /app/status.txt"}),
        ("Bash", {"command": "echo ready > /app/status.txt"}),
    )
]
MODEL_TOKENS = 40_960


@pytest.fixture(scope="module")
def calling_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineWithModel]:
    folder = tmp_path_factory.mktemp("calling_model")
    save_calling_model(folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with serve_with_vllm(folder, tokenizer, max_model_len=MODEL_TOKENS) as engine:
        yield engine


def save_calling_model(folder: Path) -> None:
    """Save a random model that writes noise, a tool call now and then, and short turns."""
    import torch
    from transformers import AutoTokenizer

    from example_trainer.demo.settings import TinyModelShape, build_model, save_tiny_model

    tokenizer = AutoTokenizer.from_pretrained(FOLDER / FAMILY)
    tokenizer.add_tokens(CALL_TEXTS)
    shape = TinyModelShape(hidden_size=64, num_layers=2, num_heads=2, max_length=MODEL_TOKENS)
    model = build_model(tokenizer, shape, seed=0)
    with torch.no_grad():
        # The first number of the residual stream is a constant, so its output weight is a bias.
        model.model.embed_tokens.weight[:, 0] = 10.0
        model.lm_head.weight[:, 0] = 0.0
        for text in (*CALL_TEXTS, tokenizer.eos_token):
            odds = len(tokenizer) * (2.0 if '"bash"' in text else 0.5)
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(text), 0] = math.log(odds) / 8
    save_tiny_model(model, tokenizer, folder)


def sampled_paths(row: TokenSequence) -> Iterator[int]:
    """Yield a digest of each trained token with everything before it."""
    path = 0
    for token, mask in zip(row.tokens, row.masks, strict=True):
        path = hash((path, token))
        if mask != IGNORE_INDEX:
            yield path


REAL = ("codex", "langgraph", "mini-swe-agent", "openai-agents", "pydantic-ai", "smolagents")


@pytest.mark.parametrize("agent", REAL)
async def test_agent_on_a_real_engine_trains_what_it_sampled(
    agent: str, calling_engine: EngineWithModel
) -> None:
    server = APIServerConfig(
        base_url=calling_engine.base_url,
        server_type="vllm",
        model_name=calling_engine.model_name,
        timeout=600,
    )
    settings = {
        **{"max_token_length": MODEL_TOKENS, "max_turn_tokens": 24, "group_size": 2},
        "ensure_scores_are_not_same": False,
    }
    groups = []

    async with environment(agent, server, calling_engine.folder, **settings) as env:
        for _ in FIVE:
            rollouts, _ = await env.collect_trajectories(await env.get_next_item())
            groups.append((rollouts, await env.postprocess_histories(rollouts)))

    num_turns, num_tokens, wrong = 0, 0, []
    for rollouts, group in groups:
        check_group(group)
        wrong += mismatches(
            group, base_url=calling_engine.base_url, model=calling_engine.model_name
        )
        for rollout in rollouts:
            turns = [event for event in rollout.trace["events"] if event["kind"] == "turn"]
            assert all(turn["row"] is not None for turn in turns)
            # Branches share the turns before they part.
            sampled = len({path for row in rollout.sequences for path in sampled_paths(row)})
            assert sum(turn["num_tokens"] for turn in turns) >= sampled > 0
            num_turns, num_tokens = num_turns + len(turns), num_tokens + sampled
    print(f"{agent}: {num_turns} turns, {num_tokens} sampled tokens, {len(wrong)} mismatches")
    assert not wrong, wrong[:10]
    assert num_turns >= len(FIVE)
