from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.envs.conversation import Turn
from atroposlib.scored_data import check_group
from environments.word_sums import SumConversation, WordSum, WordSumsEnv
from tests.environments.offline import make_env, read_groups, run_process
from tests.fakes import ScriptedEngine

PROBLEM = WordSum(1234, 5678, 90)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<answer>7006742</answer>", 1.0),
        ("<think>hm</think>It is <answer> 7,006,742 </answer>.", 1.0),
        ("<answer>7006741</answer>", 0.0),
        ("7006742", 0.0),
        ("<think><answer>7006742</answer>", 0.0),
        ("", 0.0),
    ],
)
async def test_score_of_an_answer(text: str, score: float) -> None:
    reply = await SumConversation(PROBLEM).reply(Turn(text, 0, ()))

    assert (reply.reward, reply.is_done) == (score, True)


async def test_wrong_call_costs_and_right_call_is_answered() -> None:
    text = call("multiply", a=1234, b=5678) + call("divide", a=1, b=2)

    reply = await SumConversation(PROBLEM).reply(Turn(text, 0, ()))

    assert (reply.reward, reply.is_done) == (-0.1, False)
    assert '"content": "7006652"' in str(reply.messages)
    assert "there is no tool 'divide'; there are add, multiply" in str(reply.messages)


class Calculating:
    """Every second rollout asks the tools, the others guess."""

    def __init__(self) -> None:
        self.num_problems = 0

    def __call__(self, prompt: str) -> str:
        numbers = re.search(r"receives (\d+) boxes with (\d+) parts each, and (\d+)", prompt)
        if numbers is None:
            return "ok"  # the look for a route that gives token ids
        boxes, parts, loose = map(int, numbers.groups())
        results = re.findall(r'"content": "(\d+)"', prompt)
        if len(results) == 1:
            return call("add", a=int(results[0]), b=loose)
        if len(results) == 2:
            return f"<answer>{results[1]}</answer>"
        self.num_problems += 1
        return call("multiply", a=boxes, b=parts) if self.num_problems % 2 else "<answer>1</answer>"


async def test_process_writes_sequences_with_masked_tool_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "groups.jsonl"
    async with ScriptedEngine(Calculating()) as engine:
        env = make_env(WordSumsEnv, engine, monkeypatch, data_path_to_save_groups=str(out))
        await run_process(env, num_groups=2, group_size=4)

    for group in read_groups(out):
        check_group(group)
        assert sorted(group["scores"]) == [0.0, 0.0, 1.0, 1.0]
        for ids, masks, score in zip(group["tokens"], group["masks"], group["scores"], strict=True):
            trained = "".join(chr(i) for i, m in zip(ids, masks, strict=True) if m != -100)
            assert "<tool_response>" not in trained
            assert trained.count("<tool_call>") == (2 if score else 0)


async def test_problems_go_on_where_a_checkpoint_left_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine(["ok"]) as engine:
        env, again = (make_env(WordSumsEnv, engine, monkeypatch) for _ in range(2))
    for one in (env, again):
        one.checkpoint_dir, one.wandb_prepend, one.curr_step = str(tmp_path), "sums_0", 1
        await one.setup()

    problems = [await env.get_next_item() for _ in range(3)]
    env.save_checkpoint(1)
    again.load_checkpoint()

    assert await again.get_next_item() == await env.get_next_item() not in problems


def test_environment_passes_the_check() -> None:
    report = check_environment(WordSumsEnv)

    assert report.passed, report.text
