"""The adapter of task folders: agents in boxes, at an engine with scripted replies."""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.adapters.registry import make_adapter
from atroposlib.adapters.tasks import MODEL_PORT, TasksAdapter, arguments_of, parts_of_reward
from atroposlib.agent_tasks.runner import TaskRun
from atroposlib.agent_tasks.trace import sendable
from atroposlib.envs.base import APIServerConfig
from atroposlib.errors import ConfigError, EpisodeError, EpisodeFailedError
from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.wire import decode_group
from tests.adapters.playing import adapter_env, group_of, playing, roll_out
from tests.adapters.task_folders import NEEDS_WORKSPACES, write_task
from tests.fakes import ScriptedEngine

pytestmark = [pytest.mark.slow, NEEDS_WORKSPACES]


@pytest.fixture(autouse=True)
def own_workspaces(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    make_env: Callable[..., Any],
) -> None:
    make_env()  # puts the character tokenizer in place
    monkeypatch.setenv("ATROPOS_WORKSPACES_DIR", str(tmp_path_factory.mktemp("workspaces")))


def shell_policy(*commands: str) -> Callable[[str], str]:
    """Return a policy of the agent `shell` that writes commands one after the other, then ends."""

    def reply(prompt: str) -> str:
        number = prompt.count("[exit code") + prompt.count("[killed after")
        return f"```sh\n{commands[number]}\n```" if number < len(commands) else "Done."

    return reply


async def test_shell_solves_a_task_with_exact_tokens_and_a_trace(tmp_path: Path) -> None:
    write_task(tmp_path, "be-ready")
    policy = shell_policy("ls; false", "echo ready > status.txt && cat status.txt")

    async with adapter_env(f"tasks:{tmp_path}", {}, policy, include_messages=True) as env:
        rollouts, group = await roll_out(env)

    assert group["scores"] == [1.0, 1.0]
    assert all(rollout.metrics["num_turns"] == 3 for rollout in rollouts)
    trace = group["traces"][0]
    assert (trace["task"], trace["agent"], trace["outcome"]) == ("be-ready", "shell", "done")
    turns = [event for event in trace["events"] if event["kind"] == "turn"]
    results = [event for event in trace["events"] if event["kind"] == "tool_result"]
    assert [turn["row"] for turn in turns] == [0, 0, 0]
    sampled = [mask for mask in group["masks"][0] if mask != IGNORE_INDEX]
    assert sum(turn["num_tokens"] for turn in turns) == len(sampled)
    assert [result["exit_code"] for result in results] == [1, 0]
    assert results[1]["text"] == "[exit code 0]\nready"
    assert [(c["path"], c["kind"]) for c in trace["changes"]] == [("/app/status.txt", "added")]
    assert [event["at"] for event in trace["events"]] == sorted(e["at"] for e in trace["events"])
    phases = {e["text"]: e["at"] for e in trace["events"] if e["kind"] == "phase"}
    assert all(phases["agent"] < e["at"] < phases["artifacts"] for e in (*turns, *results))
    kinds = [e["kind"] for e in trace["events"] if e["kind"] in ("turn", "output")]
    assert kinds[:2] == ["turn", "output"]  # the agent prints what it was told
    assert group["messages"][0][-1] == {"role": "assistant", "content": "Done."}
    json.dumps(trace)


async def test_task_that_is_not_done_scores_zero(tmp_path: Path) -> None:
    write_task(tmp_path, "be-ready")

    async with adapter_env(f"tasks:{tmp_path}", {}, shell_policy("echo no > status.txt")) as env:
        _, group = await roll_out(env)

    assert group["scores"] == [0.0, 0.0]


async def test_evaluation_has_each_agent_and_held_out_tasks(tmp_path: Path) -> None:
    for name in ("train-1", "train-2", "eval-1"):
        write_task(tmp_path, name)
    agents = [{"agent": "shell"}, {"agent": "shell", "name": "brief", "max_turns": 1}]
    args = {"agents": agents, "eval_tasks": ["eval-*"]}
    policy = shell_policy("echo ready > status.txt")

    async with adapter_env(f"tasks:{tmp_path}", args, policy, num_eval_items=9) as env:
        items = env.eval_items()
        rollouts = [await env.play_for_evaluation(item) for item in items]
        trained = {(await env.get_next_item())["task"] for _ in range(8)}

    assert items == [{"task": "eval-1", "agent": "shell"}, {"task": "eval-1", "agent": "brief"}]
    assert [rollout.metrics["num_turns"] for rollout in rollouts] == [2, 1]
    assert [rollout.metrics.get("reward/brief") for rollout in rollouts] == [None, 1.0]
    assert trained == {"train-1", "train-2"}


async def test_evaluation_on_a_server_without_token_ids_has_turns(tmp_path: Path) -> None:
    write_task(tmp_path, "be-ready")

    async with ScriptedEngine(shell_policy("echo ready > status.txt")) as engine:
        server = APIServerConfig(
            model_name="m",
            base_url=engine.base_url,
            server_type="openai",
            api_key="x",
            health_check=False,
        )
        async with playing(engine, f"tasks:{tmp_path}", server=server) as env:
            rollout = await env.play_for_evaluation(env.eval_items()[0])

    assert rollout.rewards == [1.0]
    assert rollout.metrics["num_turns"] == 2
    assert [message["role"] for message in rollout.messages[-2:]] == ["user", "assistant"]


async def test_agent_that_does_not_end_is_truncated_and_scored(tmp_path: Path) -> None:
    policy = shell_policy("echo ready > status.txt; sleep 1000")

    for limit_s in (3, 30):  # a busy machine may not come to the command within the first
        write_task(tmp_path, "be-ready", timeout_s=limit_s)
        async with adapter_env(f"tasks:{tmp_path}", {}, policy) as env:
            rollouts, group = await roll_out(env)
        if group["scores"] == [1.0, 1.0]:
            break

    assert [rollout.outcome for rollout in rollouts] == ["truncated", "truncated"]
    assert group["scores"] == [1.0, 1.0]
    assert rollouts[0].metrics["outcome/agent_timeout"] == 1


async def test_agent_that_does_not_ask_the_model_fails_its_rollout(tmp_path: Path) -> None:
    write_task(tmp_path, "be-ready")
    args = {"agent": "sh -c 'echo no model here; exit 3'"}

    async with adapter_env(f"tasks:{tmp_path}", args, str, episode_retries=0) as env:
        with pytest.raises(EpisodeFailedError, match=r"exit code 3.*no model here"):
            await env.collect_trajectory(await env.get_next_item())


async def test_command_of_ones_own_asks_the_model_through_the_box(tmp_path: Path) -> None:
    write_task(tmp_path, "be-ready")
    program = (
        "import json, os, sys, urllib.request as u; "
        "r = u.Request(sys.argv[1] + '/chat/completions', json.dumps({'model': sys.argv[2], "
        "'temperature': 0, 'top_p': 0.1, 'messages': [{'role': 'user', 'content': sys.argv[3]}]})"
        ".encode(), {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], "
        "'Content-Type': 'application/json'}); "
        "print(json.load(u.urlopen(r))['choices'][0]['message']['content'], "
        "file=open('status.txt', 'w'))"
    )
    command = ["/usr/bin/python3", "-c", program.replace("{", "{{").replace("}", "}}")]
    args = {"agent": [*command, "{base_url}", "{model}", "{instruction}"]}
    seen: list[str] = []

    def policy(prompt: str) -> str:
        seen.append(prompt)
        return "ready"

    async with adapter_env(f"tasks:{tmp_path}", args, policy) as env:
        _, group = await roll_out(env)

    assert group["scores"] == [1.0, 1.0]
    assert sum("Write the word ready to status.txt." in prompt for prompt in seen) == 2


async def test_branches_of_one_agent_are_rows_with_its_score(tmp_path: Path) -> None:
    write_task(tmp_path, "be-ready")
    args = {"agent": ["sh", "-c", f"{ASK} one; {ASK} two; echo ready > status.txt"]}

    async with adapter_env(f"tasks:{tmp_path}", args, "answer {}".format, group_size=2) as env:
        rollouts, group = await roll_out(env)

    assert [len(rollout.sequences) for rollout in rollouts] == [2, 2]
    assert group["scores"] == [1.0] * 4
    assert group["group_overrides"] == {"group_size": 4}
    assert [trace is None for trace in group["traces"]] == [False, True, False, True]
    turns = [e for e in group["traces"][0]["events"] if e["kind"] == "turn"]
    assert [turn["branch"] for turn in turns] == [0, 1]


ASK = (
    '/usr/bin/python3 -I -c "import json, sys, urllib.request as u; '
    "body = json.dumps(dict(messages=[dict(role='user', content=sys.argv[1])])).encode(); "
    "request = u.Request('{base_url}/chat/completions', body); "
    "request.add_header('Authorization', 'Bearer {api_key}'); "
    "request.add_header('Content-Type', 'application/json'); "
    'print(u.urlopen(request).read())" '
)
"""Program that asks the model once; its argument is the question."""
STEAL = (
    "cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n' | grep -o 'sk-atropos-[^ ]*' | sort -u "
    "> stolen.txt"
)


async def test_agent_sees_only_its_own_key(tmp_path: Path) -> None:
    write_task(tmp_path, "be-ready", check="sort -u stolen.txt | grep -c sk-atropos")
    args = {"agent": ["sh", "-c", f"{ASK} hi; " + STEAL]}

    async with adapter_env(f"tasks:{tmp_path}", args, str, group_size=4) as env:
        _, group = await roll_out(env)

    assert group["scores"] == [1.0] * 4  # its own


async def test_agent_reaches_neither_engine_nor_other_routes(tmp_path: Path) -> None:
    write_task(tmp_path, "be-ready", check="cat open.txt | wc -l")
    probe = (
        "touch open.txt; for port in $(seq 1 64) {port} 8000; do "
        "(exec 3<>/dev/tcp/127.0.0.1/$port) 2>/dev/null && echo $port >> open.txt; done; "
        "for path in sessions servers setup; do "
        "/usr/bin/python3 -I -c \"import urllib.request as u; u.urlopen('{url}/$path')\" "
        "&& echo $path >> open.txt; done; true"
    )
    url = f"http://127.0.0.1:{MODEL_PORT}"

    async with ScriptedEngine(str) as engine:
        port = urllib.parse.urlsplit(engine.base_url).port
        command = f"{ASK} hi; {probe.format(port=port, url=url)}"
        args = {"agent": ["bash", "-c", command]}
        async with playing(engine, f"tasks:{tmp_path}", args) as env:
            group = await group_of(env)

    assert group["scores"] == [0.0, 0.0]


async def test_agent_cannot_forge_its_reward(tmp_path: Path) -> None:
    write_task(tmp_path, "be-ready")
    forge = (
        "mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; "
        "echo '{{\"reward\": 1}}' > /logs/verifier/reward.json; "
        "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; "
        "printf '#!/bin/sh\\necho ready\\n' > cat; chmod +x cat; "
        "ls /tests/ /solution/ > seen.txt 2>&1; true"
    )
    args = {"agent": ["sh", "-c", f"{ASK} hi; " + forge]}

    async with adapter_env(f"tasks:{tmp_path}", args, str) as env:
        rollouts, group = await roll_out(env)

    assert group["scores"] == [0.0, 0.0], rollouts[0].trace["verifier"]


async def test_names_and_arguments_of_an_agent_do_not_void_its_group(tmp_path: Path) -> None:
    write_task(tmp_path, "be-ready")
    name = "import os; os.close(os.open(b'/app/\\xff', os.O_CREAT))"
    args = {"agent": ["sh", "-c", f'{ASK} hi; python3 -c "{name}"']}

    async with adapter_env(f"tasks:{tmp_path}", args, str) as env:
        _, group = await roll_out(env)

    decode_group(json.dumps(group, allow_nan=False).encode())
    assert "/app/\\udcff" in [change["path"] for change in group["traces"][0]["changes"]]
    assert sendable(arguments_of('{"x": [NaN, "\\ud800"]}')) == {"x": ["nan", "\\ud800"]}


async def test_daemons_of_an_agent_end_with_it(tmp_path: Path) -> None:
    write_task(tmp_path, "be-ready")
    mark = f"31415{os.getpid()}"
    daemon = f"setsid sh -c 'sleep {mark} & exec sleep {mark}' >/dev/null 2>&1 < /dev/null & "
    args = {"agent": ["sh", "-c", f"{ASK} hi; " + daemon + "sleep 0.2; echo ready > status.txt"]}

    async with adapter_env(f"tasks:{tmp_path}", args, str) as env:
        _, group = await roll_out(env)

    assert group["scores"] == [1.0, 1.0]
    assert await no_process_with(f"sleep\0{mark}")


async def no_process_with(words: str) -> bool:
    """Whether no process has these words, within some seconds."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not _processes_with(words):
            return True
        await asyncio.sleep(0.05)
    return False


def _processes_with(words: str) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if words in _text(path)]


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


async def test_cancelled_rollout_leaves_no_process(tmp_path: Path) -> None:
    write_task(tmp_path, "be-ready")
    mark = f"27182{os.getpid()}"
    args = {"agent": ["sh", "-c", f"exec sleep {mark}"]}

    async with adapter_env(
        f"tasks:{tmp_path}", args, str, conversation_timeout_s=3.0, episode_retries=0
    ) as env:
        with pytest.raises(EpisodeError):
            await env.collect_trajectory(await env.get_next_item())

        assert await no_process_with(f"sleep\0{mark}")


def run_with(reward: float, parts: dict[str, float]) -> TaskRun:
    return TaskRun("done", reward, parts, 0, 0, "", [], [], 1.0, {})


@pytest.mark.parametrize(
    ("reward", "parts", "expected"),
    [
        (0.5, {}, 0.5),
        (1.5, {"a": 1.0, "b": 0.5}, {"a": 1.0, "b": 0.5}),
        (0.75, {"a": 1.0, "b": 0.5}, {"a": 0.5, "b": 0.25}),
        (0.2, {"a": 1.0, "b": 0.5}, 0.2),
    ],
)
def test_reward_has_parts_if_they_explain_it(
    reward: float, parts: dict[str, float], expected: Any
) -> None:
    assert parts_of_reward(run_with(reward, parts)) == expected


def test_arguments_that_are_not_json_remain_text() -> None:
    assert arguments_of('{"a": 1}') == {"a": 1}
    assert arguments_of("{") == "{"
    assert arguments_of({"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"agents": [{"agent": "shell"}], "agent": "shell"}, "agent and agents exclude"),
        ({"allowed_hosts": ["a.example"]}, "allowed_hosts needs network=allowlist"),
        ({"agent_prefx": "x"}, "unknown argument 'agent_prefx'"),
        ({"timeout_scale": 0}, "timeout_scale"),
    ],
)
def test_arguments_that_contradict_are_refused(args: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make_adapter("tasks:folder", args, seed=0)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"tasks": ["no-*"]}, r"tasks: 'no-\*' matches none of its 1 tasks: be-ready"),
        ({"eval_tasks": ["be-*"]}, "no task is left to train on"),
        ({"agents": [{"agent": "shell"}, {"agent": "shell"}]}, "a `name` of its own"),
        ({"agent": "shel"}, "did you mean shell"),
        ({"workspaces": "bubblewrp"}, "bubblewrp"),
    ],
)
async def test_adapter_that_cannot_be_opened_says_why(
    args: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    write_task(tmp_path, "be-ready")
    adapter = make_adapter(f"tasks:{tmp_path}", args, seed=0)

    with pytest.raises(ConfigError, match=expected):
        await adapter.open()
    await adapter.close()


async def test_items_cover_all_tasks_of_an_epoch_in_a_repeatable_order(tmp_path: Path) -> None:
    for name in "abcde":
        write_task(tmp_path, name)
    adapters = [make_adapter(f"tasks:{tmp_path}", {}, seed=4) for _ in range(2)]
    orders = []
    for adapter in adapters:
        assert isinstance(adapter, TasksAdapter)
        await adapter.open()
        orders.append([(await adapter.item(index))["task"] for index in range(10)])
        await adapter.close()

    assert orders[0] == orders[1]
    assert sorted(orders[0][:5]) == sorted(orders[0][5:]) == list("abcde")
