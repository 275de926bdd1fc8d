from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.tools import Tool
from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.sandbox import Sandbox, SandboxUnavailableError, open_sandbox
from atroposlib.scored_data import check_group
from atroposlib.tasks.web_search import LocalCorpus
from environments.smolagents_integration.smolagents_env import (
    CORPUS,
    MAX_TOOL_CALLS,
    SAMPLE,
    AgentProcessError,
    AgentRun,
    AgentTimeoutError,
    PageTools,
    ReplayedSteps,
    SmolagentsEnv,
    agent_process,
    is_near_answer,
    is_right_answer,
    run_agent,
    score_parts,
)
from tests.clients.installing import NotInstallableError, python_of
from tests.environments.offline import make_env, read_groups, run_process
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

GOOD = "Thought: easy.\n<code>\nfinal_answer(78)\n</code>"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return open_sandbox()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def agent_python() -> str:
    """An interpreter with smolagents, in an environment of its own."""
    try:
        return str(python_of("smolagents", limit_s=120.0))
    except NotInstallableError as error:
        pytest.skip(f"smolagents is not installed: {error}")


@pytest.mark.parametrize(
    ("answer", "gold", "is_right"),
    [
        ("78", "78", True),
        (" $1,078.0 ", "1078", True),
        ("50%", "50", True),
        ("78 tonnes", "78", False),
        ("-78", "78", False),
        ("rye, 3", "rye, 3", True),
        ("Rye;3.0", "rye, 3", True),
        ("3, rye", "rye, 3", False),
        ("rye", "rye, 3", False),
        ("132; 133; 134", "132, 133, 134", True),
        ("13, 213, 3134", "132, 133, 134", False),
        ("12", "1, 2", False),
        ("132, 133", "132,133", True),
        ("132133", "132,133", True),
        ("1 2", "12", False),
        ("!", "%", False),
        ("The North.", "the north", True),
        ("north", "south", False),
        ("1e999", "5", False),
        ("nan", "5", False),
        ("", "", False),
        ("", "78", False),
    ],
)
def test_answers_are_compared_by_the_rules_of_gaia(answer: str, gold: str, is_right: bool) -> None:
    assert is_right_answer(answer, gold) is is_right


@pytest.mark.parametrize(
    ("answer", "gold", "is_near"),
    [
        ("78.5", "78", True),
        ("80", "78", False),
        ("132133000", "132, 133, 134", False),
        ("It is the north.", "north", True),
        ("northern", "north", False),
        ("north " * 100, "north", False),
        ("anything", "?", False),
        ("", "north", False),
    ],
)
def test_nearly_right_answers(answer: str, gold: str, is_near: bool) -> None:
    assert is_near_answer(answer, gold) is is_near


def parts(answer: str, texts: list[str], *, num_errors: int = 0, is_own: bool = True) -> Any:
    run = AgentRun(answer, texts, num_errors, is_own)
    return score_parts(run, "78", max_steps=4, length_penalty_weight=0.1)


def test_parts_of_a_score_are_computed_by_hand() -> None:
    best = parts("78", [GOOD])
    late = parts("77.9", ["<code>\nx\n</code>", "Thought: x", GOOD, GOOD], num_errors=2)
    nothing = parts("", [], is_own=False)
    long = parts("78", [GOOD + "x" * 4000])

    assert sum(best.values()) == pytest.approx(1.0)
    # correctness 0.5 / 2; forms 1/2, 0, 1, 1; 2 of 4 steps failed; 4 of 4 steps: efficiency 0.5
    assert late == pytest.approx(
        {"correctness": 0.25, "format": 0.125, "final_answer": 0.1}
        | {"execution": 0.05, "efficiency": 0.05, "length": 0.0}
    )
    assert sum(nothing.values()) == 0.0
    assert long["length"] == pytest.approx(-0.1 * (len(GOOD) + 2000) / 1000)


def steps_in(sandbox: Sandbox, *tools: Tool, **files: bytes) -> ReplayedSteps:
    return ReplayedSteps(sandbox, tools, files, timeout_s=60.0)


async def test_variables_and_files_live_on_from_step_to_step(sandbox: Sandbox) -> None:
    steps = steps_in(sandbox, data=b"4,5\n")

    first = await steps.run("import random\nx = {'a', 'b', random.random()}\nprint('once')\nlen(x)")
    await steps.run("order = list(x)\nwith open('made', 'w') as f: f.write(open('data').read())")
    failed = await steps.run("y = 1\n1 / 0")
    last = await steps.run("print(order == list(x), y)\nfinal_answer(open('made').read())")

    assert (first.output, first.logs) == ("3", "once\n")
    assert failed.error == "line 2: ZeroDivisionError: division by zero"
    assert (last.logs, last.output, last.is_final) == ("True 1\n", "4,5\n", True)


async def test_tool_is_called_once_and_its_result_recorded(sandbox: Sandbox) -> None:
    calls: list[tuple[str, int]] = []

    async def look(word: str, number: int = 1) -> str:
        """Look a word up."""
        calls.append((word, number))
        if word == "bad":
            raise ValueError("no such word")
        return word * number

    steps = steps_in(sandbox, Tool.of(look))

    first = await steps.run("a = look('x', number=3)\nb = look('y')\nprint(a, b)")
    await steps.run("try:\n    look('bad')\nexcept RuntimeError as e:\n    c = str(e)")
    wrong = await steps.run("look(1, 2, 3)")
    odd = await steps.run("look(print)")
    last = await steps.run("final_answer([a, b, c, look('z', 2)])")

    assert first.logs == "xxx y\n"
    assert calls == [("x", 3), ("y", 1), ("bad", 1), ("z", 2)]
    assert last.output == "['xxx', 'y', 'ValueError: no such word', 'zz']"
    assert "look takes 2 arguments" in str(wrong.error)
    assert "numbers, texts and lists" in str(odd.error)


async def test_number_of_tool_calls_is_limited(sandbox: Sandbox) -> None:
    def look() -> str:
        """Return a text."""
        return "x"

    result = await steps_in(sandbox, Tool.of(look)).run("while True: look()")

    assert result.error == f"a task may have {MAX_TOOL_CALLS} tool calls"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("while True: pass", "the program was ended"),
        ("import os; os._exit(0)", "the program gave no result"),
        ("import os; os._exit(3)", "the program was ended"),
        (
            "import os\nfor i in range(3, 20):\n  try: os.write(i, b'{')\n  except OSError: 0",
            "gave",
        ),
        ("x = 'a' * 10**10", "MemoryError"),
        ("raise SystemExit", "SystemExit"),
        ("def", "SyntaxError"),
        ("import urllib.request as u; u.urlopen('http://127.0.0.1:80')", "URLError"),
        ("open('/etc/passwd')", "Error"),
        ("look('x')", "NameError"),
        ("#" * 200_000, "a step may have"),
    ],
)
async def test_hostile_step_ends_in_an_error_and_the_next_one_runs(
    sandbox: Sandbox, code: str, error: str
) -> None:
    steps = ReplayedSteps(sandbox, [], {}, timeout_s=60.0)
    steps._limits = replace(steps._limits, cpu_s=2)

    hostile = await steps.run(code)
    after = await steps.run("1 + 1")

    assert error in str(hostile.error)
    assert not hostile.is_final
    assert after.output == "2"


async def test_long_output_is_cut(sandbox: Sandbox) -> None:
    result = await steps_in(sandbox).run("for i in range(10**6): print('x' * 100)\n'y' * 10**6")

    assert (len(result.logs), len(result.output)) == (20_000, 20_000)


async def test_page_tools_open_only_what_was_found() -> None:
    pages = PageTools(LocalCorpus.load(CORPUS))

    found = await pages.search_pages("lighthouse")
    name = found[1 : found.index("]")]

    assert await pages.open_page(name)
    with pytest.raises(ValueError, match="search first"):
        await PageTools(LocalCorpus.load(CORPUS)).open_page(name)


async def test_interpreter_without_smolagents_names_the_extra(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    (tmp_path / "smolagents.py").write_text("raise ModuleNotFoundError(name='smolagents')")
    variables = {"PYTHONPATH": str(tmp_path), "OPENAI_BASE_URL": "", "OPENAI_API_KEY": ""}
    async with agent_process(sys.executable, variables, is_verbose=False) as process:
        with pytest.raises(MissingExtraError, match=r"\[smolagents\]"):
            await run_agent(process, {"question": ""}, steps_in(sandbox))


async def test_interpreter_that_is_none_is_a_setting_error() -> None:
    with pytest.raises(ConfigError, match=r"--env\.agent_python"):
        async with agent_process("/no/such/python", {}, is_verbose=False):
            pass


async def test_process_that_dies_is_an_error_and_gets_no_secrets(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\nexit 1\n")
    program.chmod(0o755)
    async with agent_process(str(program), {"A": "b"}, is_verbose=False) as process:
        with pytest.raises(AgentProcessError, match="ended without a result"):
            await run_agent(process, {"question": ""}, steps_in(sandbox))

    seen = (tmp_path / "seen").read_text()
    assert "A=b" in seen
    assert "HF_TOKEN" not in seen


@pytest.mark.parametrize("name", ["../test.jsonl", "missing.csv", ".main.py", "a/b"])
async def test_attachment_outside_the_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    row = {"Question": "q", "Final answer": "a", "file_name": name}
    (data / "train.jsonl").write_text(json.dumps(row) + "\n")
    (data / "test.jsonl").write_text(json.dumps(row) + "\n")
    async with ScriptedEngine() as engine:
        env = make_env(SmolagentsEnv, engine, monkeypatch, dataset_path=str(data))
        with pytest.raises(ConfigError, match="attached file"):
            env._question(row)


async def test_layout_of_gaia_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "2023" / "validation"
    folder.mkdir(parents=True)
    (folder / "note.txt").write_text("hi")
    rows = [
        {"Question": f"q{i}", "Final answer": "a", "task_id": "t", "Level": 2}
        | {"file_name": "note.txt" if i == 0 else ""}
        for i in range(5)
    ]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with ScriptedEngine() as engine:
        env = make_env(SmolagentsEnv, engine, monkeypatch, dataset_path=str(tmp_path))
        train, test = env._read()

        assert (len(train), len(test)) == (4, 1)
        assert env._question(test[0]).files == {"note.txt": b"hi"}


class Counting:
    """Every second agent reads the file and answers; the others answer at once, wrongly."""

    def __init__(self) -> None:
        self.num_agents = 0

    def __call__(self, prompt: str) -> str:
        if "[user]" not in prompt:
            return "ok"  # the look for a route that gives token ids
        if "Execution logs:\n" in prompt.rpartition("[user]")[2]:
            return "Thought: the sum.\n<code>\nfinal_answer(total)\n</code>"
        self.num_agents += 1
        if self.num_agents % 2:
            return "Thought: guess.\n<code>\nfinal_answer('guess')\n</code>"
        return (
            "Thought: I read it.\n<code>\nrows = open('harvest.csv').read().split()[1:]\n"
            "total = sum(int(r.split(',')[2]) for r in rows if ',rye,' in r)\nprint(total)\n</code>"
        )


async def test_agents_leave_one_sequence_each_with_the_engines_tokens(
    agent_python: str, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = tmp_path / "data", tmp_path / "groups.jsonl"
    data.mkdir()
    (data / "harvest.csv").write_bytes((SAMPLE / "harvest.csv").read_bytes())
    row = {"Question": "Rye?", "Final answer": "78", "file_name": "harvest.csv"}
    for split in ("train", "test"):
        (data / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    async with ScriptedEngine(Counting()) as engine:
        env = make_env(
            SmolagentsEnv,
            engine,
            monkeypatch,
            dataset_path=str(data),
            agent_python=agent_python,
            max_concurrent_processes=1,
            max_token_length=60_000,
            data_path_to_save_groups=str(out),
        )
        await run_process(env, num_groups=1, group_size=2)

    [group] = read_groups(out)
    check_group(group)
    assert len(group["tokens"]) == 2
    assert max(group["scores"]) == pytest.approx(1.0)
    assert min(group["scores"]) == pytest.approx(0.5)
    for ids, masks, score in zip(group["tokens"], group["masks"], group["scores"], strict=True):
        trained = "".join(chr(i) for i, m in zip(ids, masks, strict=True) if m > 2)
        assert trained.count("<code>") == (2 if score == max(group["scores"]) else 1)
        assert "Execution logs" not in trained
        assert "Calling tools" not in "".join(chr(i) for i in ids if i > 2)


async def test_agent_over_its_time_is_ended_and_counted(
    agent_python: str, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine(Counting()) as engine:
        env = make_env(
            SmolagentsEnv,
            engine,
            monkeypatch,
            dataset_path=str(SAMPLE),
            agent_python=agent_python,
            process_timeout=0.2,
        )
        await env.setup()
        item = await env.get_next_item()
        with pytest.raises(AgentProcessError, match=r"did not end within 0\.2 s"):
            await env.collect_trajectory(item)
        await env.server.close()
        await env.close()

    assert not agent_processes()


def agent_processes() -> list[bytes]:
    """Return the command lines of agents that this process started."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{child}/cmdline").read_bytes() for child in children]
    return [command for command in commands if b"agent_process" in command]


@pytest.mark.usefixtures("sandbox")
async def test_evaluation_reports_the_fraction_of_right_answers(
    agent_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = "Thought: known.\n<code>\nfinal_answer(2870)\n</code>"
    async with ScriptedEngine([reply]) as engine:
        env = make_env(
            SmolagentsEnv,
            engine,
            monkeypatch,
            dataset_path=str(SAMPLE),
            agent_python=agent_python,
            data_dir_to_save_evals=str(tmp_path),
            max_token_length=60_000,
        )
        await env.setup()
        await env.evaluate()
        await env.server.close()
        await env.close()

    report = json.loads((tmp_path / "metrics.json").read_text())
    assert report["results"]["all"]["eval/success_rate"] == 0.5


FAKE_AGENT = """#!/bin/sh
read task
case "$task" in *slow*) sleep 60 ;; esac
echo '{"kind": "done", "answer": "7", "texts": [], "num_errors": 0, "is_own_answer": true}'
"""


def make_fake_agents(
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *,
    questions: list[str],
    process_timeout: float,
) -> SmolagentsEnv:
    agent, data = folder / "agent", folder / "data"
    agent.write_text(FAKE_AGENT)
    agent.chmod(0o755)
    data.mkdir()
    rows = [json.dumps({"Question": name, "Final answer": "7"}) + "\n" for name in questions]
    for split in ("train", "test"):
        (data / f"{split}.jsonl").write_text("".join(rows))
    return make_env(
        SmolagentsEnv,
        engine,
        monkeypatch,
        dataset_path=str(data),
        agent_python=str(agent),
        process_timeout=process_timeout,
        data_dir_to_save_evals=str(folder / "evaluation"),
    )


@pytest.mark.usefixtures("sandbox")
async def test_evaluation_in_which_every_agent_is_late_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine(["ok"]) as engine:
        env = make_fake_agents(
            engine, monkeypatch, tmp_path, questions=["slow"], process_timeout=0.5
        )
        await env.setup()
        with pytest.raises(AgentTimeoutError, match="none of 1 agents"):
            await env.evaluate()
        await env.server.close()
        await env.close()


@pytest.mark.usefixtures("sandbox")
async def test_late_agent_is_wrong_in_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine(["ok"]) as engine:
        env = make_fake_agents(
            engine, monkeypatch, tmp_path, questions=["slow", "fast"], process_timeout=600.0
        )
        await env.setup()
        roll_out = env._roll_out

        async def roll_out_or_be_late(question: Any, **options: Any) -> Any:
            if question.question == "slow":
                raise AgentTimeoutError("late")
            return await roll_out(question, **options)

        env._roll_out = roll_out_or_be_late  # type: ignore[method-assign]
        await env.evaluate()
        await env.server.close()
        await env.close()

    report = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    results = report["results"]["all"]
    assert results["eval/success_rate"] == results["eval/timed_out_rate"] == 0.5


@pytest.mark.clients
@pytest.mark.usefixtures("sandbox")
def test_environment_passes_its_check(agent_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from atroposlib.envs.check import check_environment

    settings = {**SmolagentsEnv.check_settings, "agent_python": agent_python}
    monkeypatch.setattr(SmolagentsEnv, "check_settings", settings)

    report = check_environment(SmolagentsEnv)

    assert report.passed, report.text
