from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.envs.conversation import Reply, Turn
from atroposlib.workspaces import WorkspaceError, open_workspaces
from environments.program_repair import TASKS, BrokenProgram, ProgramRepairEnv, RepairConversation
from tests.environments.offline import make_env
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

BROKEN = [BrokenProgram(i, j) for i, task in enumerate(TASKS) for j in range(len(task.bugs))]


def call(command: str) -> Turn:
    text = json.dumps({"name": "shell", "arguments": {"command": command}})
    return Turn(f"<tool_call>{text}</tool_call>", 0, ())


def answer() -> Turn:
    return Turn("It is repaired.", 1, ())


@pytest.fixture
async def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProgramRepairEnv]:
    monkeypatch.setenv("ATROPOS_WORKSPACES_DIR", str(tmp_path / "cache"))
    try:
        open_workspaces()
    except WorkspaceError as error:
        pytest.skip(str(error))
    env = object.__new__(ProgramRepairEnv)
    env.config, env.iter = ProgramRepairEnv.config_init()[0], 0
    await env.setup()
    yield env
    await env.close()


async def results_of(source: str, program: BrokenProgram) -> list[Any]:
    names: dict[str, Any] = {}
    exec(source, names)
    found = []
    for arguments in json.loads(json.dumps(program.task.cases)):
        try:
            found.append(names[program.name](*arguments))
        except IndexError as error:
            found.append(repr(error))
    return found


@pytest.mark.parametrize("program", BROKEN)
async def test_every_bug_fails_a_case_and_is_in_the_source(program: BrokenProgram) -> None:
    part, _ = program.task.bugs[program.bug_number]

    assert program.correct_source.count(part) == 1
    assert await results_of(program.correct_source, program) == program.expected()
    assert await results_of(program.source, program) != program.expected()


async def test_repaired_program_is_judged_by_hidden_cases(env: ProgramRepairEnv) -> None:
    program = BROKEN[0]
    attempts = {
        "right": str(env.check_gold_answer(program)[0]),
        "unchanged": call("python3 check.py").text,
        "examples only": call(
            "echo 'def median(n): return {3: 2, 6: 3.5, 1: 5}[len(n)]' > median.py; "
            "python3 check.py"
        ).text,
        "prints": call("echo 'print([2, 3.5])\nimport os\nos._exit(0)' > median.py").text,
        "nested": call("echo 'print(\"[\" * 50_000)\nimport os\nos._exit(0)' > median.py").text,
        "removed": call("rm median.py").text,
        "link": call("rm median.py; ln -s /etc/passwd median.py").text,
        "too large": call("head -c 200000 /dev/zero > median.py").text,
        "folder": call("rm median.py; mkdir median.py; touch median.py/x").text,
    }

    async def reward(text: str) -> tuple[Reply, Any]:
        conversation = env.start_conversation(program)
        first = await conversation.reply(Turn(text, 0, ()))
        last = await conversation.reply(answer())
        await conversation.close()
        return first, last.reward

    ends = dict(zip(attempts, await asyncio.gather(*map(reward, attempts.values())), strict=True))

    assert {name: end[1] for name, end in ends.items()} == dict.fromkeys(attempts, 0.0) | {
        "right": 1.0
    }
    assert "WRONG" in str(ends["unchanged"][0].messages)
    assert "WRONG" not in str(ends["examples only"][0].messages)


async def test_right_program_may_print_and_warn(env: ProgramRepairEnv) -> None:
    program = BrokenProgram(0, 0)
    right = program.correct_source
    sources = {
        "prints": right.replace("    ordered", "    print(numbers)\n    ordered", 1),
        "writes errors": f"import sys\nprint('loaded', file=sys.stderr)\n{right}",
        "causes a warning": right.replace("% 2 == 1", "% 2 is 1"),
    }

    rewards = {}
    for name, source in sources.items():
        conversation = env.start_conversation(program)
        await conversation.reply(call(f"cat > median.py <<'END'\n{source}END"))
        rewards[name] = (await conversation.reply(answer())).reward
        await conversation.close()

    assert rewards == dict.fromkeys(sources, 1.0)


async def test_conversation_continues_with_its_files(env: ProgramRepairEnv) -> None:
    program = BROKEN[4]
    first, second = env.start_conversation(program), env.start_conversation(program)
    await first.reply(Turn(env.check_gold_answer(program)[0], 0, ()))
    await first.reply(call("rm -r check.py __pycache__"))

    second.restore(first.state())
    await second.workspace.load(await first.workspace.save())
    listed = await second.reply(call("ls; exit 3"))

    assert second.results[:2] == first.results
    assert '"run_lengths.py\\n\\n(exit code 3)"' in str(listed.messages)
    assert (await second.reply(answer())).reward == 1.0
    for conversation in (first, second):
        await conversation.close()


async def test_programs_go_on_where_a_checkpoint_left_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine(["ok"]) as engine:
        env, again = (make_env(ProgramRepairEnv, engine, monkeypatch) for _ in range(2))
    for one in (env, again):
        one.checkpoint_dir, one.wandb_prepend, one.curr_step = str(tmp_path), "repair_0", 1

    programs = [await env.get_next_item() for _ in range(5)]
    env.save_checkpoint(1)
    again.load_checkpoint()
    later = [await again.get_next_item() for _ in range(20)]

    assert later == [await env.get_next_item() for _ in range(20)]
    assert later[:5] != programs


async def test_items_are_read_back_from_the_journal(env: ProgramRepairEnv) -> None:
    item = await env.get_next_item()

    assert env.decode_item(json.loads(json.dumps(env.encode_item(item)))) == item
    assert isinstance(env.start_conversation(item), RepairConversation)


@pytest.mark.long
def test_environment_passes_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_WORKSPACES_DIR", str(tmp_path / "cache"))
    try:
        open_workspaces()
    except WorkspaceError as error:
        pytest.skip(str(error))

    report = check_environment(ProgramRepairEnv)

    assert report.passed, report.text
