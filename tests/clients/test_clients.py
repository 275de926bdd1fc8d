"""Every client, unmodified, leaves exactly the engine's own tokens behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.clients.engine import calls_at, mistakes_in
from tests.clients.installing import NotInstallableError
from tests.clients.registry import CLIENTS, Client
from tests.clients.running import Outcome, installed_command, run_client
from tests.templates.make_tokenizers import FAMILIES

pytestmark = pytest.mark.slow

INSTALL_LIMIT_S = 600.0
SHARE_INSTALL_LIMIT_S = 60.0
SHARE = 2


def families_of(number: int, client: Client) -> list[str]:
    """Return the families a client is run with: every one, or one that thinks and one in turn."""
    if client.runs_every_family:
        return sorted(FAMILIES)
    others = sorted(FAMILIES.keys() - {"qwen3"})
    return ["qwen3", others[number % len(others)]]


CASES = [
    pytest.param(client, family, id=f"{client.name}-{family}")
    for number, client in enumerate(CLIENTS)
    for family in families_of(number, client)
]


@pytest.mark.clients
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("client", "family"), CASES)
async def test_client_leaves_the_engines_own_tokens(
    client: Client, family: str, tmp_path: Path
) -> None:
    await check_client(client, family, tmp_path, install_limit_s=INSTALL_LIMIT_S)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("position", range(SHARE))
async def test_share_of_the_commit_leaves_the_engines_own_tokens(
    position: int, tmp_path: Path
) -> None:
    light = [client for client in CLIENTS if client.is_light]
    number = number_of_commit() * SHARE + position

    await check_client(
        light[number % len(light)],
        sorted(FAMILIES)[number % len(FAMILIES)],
        tmp_path,
        install_limit_s=SHARE_INSTALL_LIMIT_S,
    )


def number_of_commit() -> int:
    """Return how many commits led here, so that each commit has its share; 0 without git."""
    command = ["git", "rev-list", "--count", "HEAD"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return int(done.stdout) if done.returncode == 0 else 0


async def check_client(
    client: Client, family: str, folder: Path, *, install_limit_s: float
) -> None:
    """Run a client and check its answers, its tools' results and the recorded tokens."""
    try:
        command = installed_command(client, limit_s=install_limit_s)
    except NotInstallableError as error:
        pytest.skip(f"{client.name}: {error}")

    outcome = await run_client(client, command, family, folder)

    engine = outcome.engine
    if family in client.fails_with:
        pytest.xfail(client.fails_with[family])
    assert outcome.exit_code == 0, outcome.output
    assert all(answer in outcome.output for answer in client.answers), outcome.output
    assert engine.num_played == len(engine.calls) == len(client.turns), outcome.output
    last = engine.prompt_text(engine.calls[-1])
    assert all(result in last for result in client.reads), last
    assert mistakes_in(outcome.nodes, engine) == []
    assert len(outcome.nodes) == client.num_rows
    check_sessions(client, outcome)
    assert any(
        engine.tokenizer.encode(engine.tokenizer.decode(call.completion_ids)) != call.completion_ids
        for call in engine.calls
    ), "every reply was sampled as its text is tokenized"


def check_sessions(client: Client, outcome: Outcome) -> None:
    """Check that each session has its own conversations, whole and no others."""
    sessions = outcome.sessions
    assert len(sessions) == client.num_sessions
    if not sessions:
        return
    num_rows = client.num_rows // client.num_sessions
    assert [len(nodes) for nodes in sessions.values()] == [num_rows] * len(sessions)
    calls = [calls_at(nodes, outcome.engine) for nodes in sessions.values()]
    num_calls = len(client.turns) // client.num_sessions
    assert [len(numbers) for numbers in calls] == [num_calls] * len(sessions)
    every = sorted(number for numbers in calls for number in numbers)
    assert every == list(range(len(client.turns)))
