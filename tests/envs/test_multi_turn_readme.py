"""The environments of the page on several turns work as printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.envs.conversation import Turn
from atroposlib.scored_data import check_group
from atroposlib.workspaces import WorkspaceError, WorkspaceSpec
from atroposlib.workspaces.local import LocalWorkspaces
from tests.envs.conversations import play_on
from tests.envs.small_environment import SERVERS
from tests.fakes import ScriptedEngine

PAGE = Path(__file__).parents[2] / "docs/several_turns.md"


def blocks_of_the_section() -> list[dict[str, Any]]:
    """The names each Python block of the section defines."""
    section = PAGE.read_text(encoding="utf-8")
    namespaces = []
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        namespaces.append({"__name__": "readme_block"})
        exec(compile(code, str(PAGE), "exec"), namespaces[-1])
    return namespaces


def test_game_of_the_readme_passes_the_check() -> None:
    game, *_ = blocks_of_the_section()

    report = check_environment(game["GuessingEnv"])

    assert report.passed, report.text


async def test_game_of_the_readme_makes_a_group(make_env: Callable[..., Any]) -> None:
    game, *_ = blocks_of_the_section()
    make_env()  # puts the character tokenizer in place
    config, _ = game["GuessingEnv"].config_init()
    async with ScriptedEngine(["50", "oh", "75"]) as engine:
        servers = [SERVERS[0].model_copy(update={"base_url": engine.base_url})]
        servers[0].server_type = "vllm"
        env = game["GuessingEnv"](config.model_copy(update={"group_size": 2}), servers)
        await env.setup()
        rollouts, _ = await env.collect_trajectories(75)
        group = await env.postprocess_histories(rollouts)

    check_group(group)
    assert len(group["advantages"]) == 2


async def test_tools_of_the_readme_answer_calls() -> None:
    _, tools, *_ = blocks_of_the_section()
    shopping = tools["Shopping"]("What do a cup and tea cost?", "11.5")
    call = '<tool_call>{"name": "price", "arguments": {"product": "%s"}}</tool_call>'
    async with ScriptedEngine(["ok", call % "tea" + call % "cup", "11.5"]) as engine:
        rollout = await play_on(engine, shopping)

    assert [result.content for result in shopping.results] == ["3.5", "8.0"]
    assert (rollout.outcome, rollout.rewards) == ("done", [0.0, 1.0])


async def test_last_example_of_the_readme_scores_a_wrong_total_zero() -> None:
    _, tools, *_ = blocks_of_the_section()

    reply = await tools["Shopping"]("?", "11.5").reply(Turn("12", 0, ()))

    assert (reply.reward, reply.is_done) == (0.0, True)


async def test_shell_of_the_readme_continues_with_its_files(tmp_path: Path) -> None:
    *_, shell = blocks_of_the_section()
    call = '<tool_call>{"name": "shell", "arguments": {"command": "%s"}}</tool_call>'
    try:
        workspaces = LocalWorkspaces(cache=tmp_path / "cache")
    except WorkspaceError as error:
        pytest.skip(str(error))
    (tmp_path / "source").mkdir()
    base = await workspaces.prepare(WorkspaceSpec("readme", source=tmp_path / "source"))
    first, second = (shell["ShellConversation"]("?", base) for _ in range(2))
    await first.reply(Turn(call % "touch done.sh; chmod +x done.sh", 0, ()))

    second.restore(first.state())
    await second.workspace.load(await first.workspace.save())

    assert (await second.reply(Turn("done", 1, ()))).reward == 1.0
    for conversation in (first, second):
        await conversation.close()
    await workspaces.close()
