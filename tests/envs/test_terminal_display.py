"""The live view on a terminal that is a stream of text."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs import commands as env_view
from atroposlib.envs.commands import run_viewed, snapshot_of
from atroposlib.envs.live_view import LineStream, TerminalDisplay
from atroposlib.envs.run_snapshot import RunSnapshot
from tests.envs.live_service import LiveService, ScriptedTrainer, until

pytestmark = pytest.mark.slow

MakeEnv = Callable[..., Any]

SNAPSHOT = RunSnapshot(name="small", activity="rolling out", elapsed_s=1.0, step=3, total_steps=9)


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _terminal_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "30")


@contextlib.contextmanager
def terminal_in_place() -> Iterator[FakeTerminal]:
    """A terminal in the place of both streams, with a log handler that writes to it.

    Not a fixture: between fixtures and the test pytest puts streams of its own in place.
    """
    fake = FakeTerminal()
    handler = logging.StreamHandler(fake)
    logging.getLogger().addHandler(handler)
    try:
        with contextlib.redirect_stdout(fake), contextlib.redirect_stderr(fake):
            yield fake
            assert sys.stdout is fake
            assert sys.stderr is fake
    finally:
        logging.getLogger().removeHandler(handler)
    assert handler.stream is fake


def read_to_the_end(terminal: int) -> str:
    """Read a pseudo-terminal until its other end is closed, and close it."""
    written = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while part := os.read(terminal, 65536):
            written += part
    os.close(terminal)
    return written.decode()


def in_a_thread(function: Callable[[], str]) -> Future[str]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text)


async def test_display_shows_log_lines_and_prints_above_the_view() -> None:
    with terminal_in_place() as terminal:
        async with TerminalDisplay(lambda: SNAPSHOT, stream=terminal, interval_s=0.01):
            await until(lambda: "rolling out" in terminal.getvalue())
            logging.getLogger("tests").warning("a line\nwith \x1b[2J two")
            print("printed [bold]as it is[/bold]")
            print("not ended", end="")
            await until(lambda: "as it is" in terminal.getvalue())

    text = without_codes(terminal.getvalue())
    assert text.index("a line\n") < text.index("with ␛[2J two\n")
    assert "printed [bold]as it is[/bold]\n" in text
    assert "not ended\n" in text
    assert text.rstrip().endswith("╯")
    assert "\x1b[2J" not in terminal.getvalue()


async def test_display_shows_lines_of_handlers_that_look_their_stream_up() -> None:
    handler = logging._StderrHandler(logging.WARNING)
    log = logging.getLogger("tests.own_handler")
    log.addHandler(handler)
    log.propagate = False

    with terminal_in_place() as terminal:
        async with TerminalDisplay(lambda: SNAPSHOT, stream=terminal, interval_s=0.01):
            await until(lambda: "rolling out" in terminal.getvalue())
            log.warning("said by itself")
    log.removeHandler(handler)

    assert "said by itself\n" in without_codes(terminal.getvalue())


async def test_display_leaves_the_terminal_alone_while_there_is_nothing_to_show() -> None:
    with terminal_in_place() as terminal:
        async with TerminalDisplay(lambda: None, stream=terminal, interval_s=0.01):
            await asyncio.sleep(0.03)
            assert sys.stdout is terminal
            print("\rplain", end="")

    assert terminal.getvalue() == "\rplain"


async def test_display_that_fails_ends_itself_and_not_the_run() -> None:
    snapshots = [SNAPSHOT]

    with terminal_in_place() as terminal:
        async with TerminalDisplay(snapshots.pop, stream=terminal, interval_s=0.01):
            await until(lambda: "the live view failed" in terminal.getvalue())
            await until(lambda: sys.stdout is terminal)
            print("the run goes on")

    assert "the run goes on\n" in terminal.getvalue()


async def test_display_gives_the_terminal_back_when_the_run_raises() -> None:
    async def fail(terminal: FakeTerminal) -> None:
        async with TerminalDisplay(lambda: SNAPSHOT, stream=terminal, interval_s=0.01):
            await until(lambda: "rolling out" in terminal.getvalue())
            raise KeyError

    with terminal_in_place() as terminal, pytest.raises(KeyError):
        await fail(terminal)

    assert terminal.getvalue().endswith("\x1b[?25h")  # the cursor is shown again


async def test_display_terminal_that_takes_nothing_does_not_hold_up_the_loop() -> None:
    class StoppedTerminal(FakeTerminal):
        def __init__(self) -> None:
            super().__init__()
            self.is_asked = threading.Event()
            self.goes_on = threading.Event()

        def write(self, text: str) -> int:
            self.is_asked.set()
            assert self.goes_on.wait(10), "the loop waits for the terminal"
            return super().write(text)

    terminal = StoppedTerminal()
    async with TerminalDisplay(lambda: SNAPSHOT, stream=terminal, interval_s=0.01):
        await until(terminal.is_asked.is_set)
        for _ in range(20):
            await asyncio.sleep(0.001)
        terminal.goes_on.set()

    assert "rolling out" in terminal.getvalue()


def test_line_stream_passes_on_whole_lines_and_the_last_state_of_a_progress_bar() -> None:
    lines: list[str] = []
    stream = LineStream(io.StringIO(), lines.append)

    stream.write("one\ntw")
    stream.flush()
    stream.writelines(["o\n", "\r 10%\r 50%", "\r100%\n", "crlf\r\n"])
    stream.write("end")
    stream.finish()

    assert lines == ["one", "two", "100%", "crlf", "end"]
    assert not stream.isatty()


async def test_display_sends_lines_and_not_the_view_through_the_stream() -> None:
    # W&B records what goes through the stream; thousands of views would bury the lines.
    ours, theirs = pty.openpty()
    reading = in_a_thread(lambda: read_to_the_end(ours))
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        recorded: list[str] = []
        write = stream.write
        stream.write = lambda text: recorded.append(text) or write(text)
        with contextlib.redirect_stdout(stream):
            async with TerminalDisplay(lambda: SNAPSHOT, stream=stream, interval_s=0.01):
                await until(lambda: sys.stdout is not stream)
                print("a line")
                await until(lambda: recorded)
                sys.stdout.write = write  # as W&B does when its recording ends
                print("another line")
    shown = reading.result(10)

    assert recorded == ["a line\n"]
    assert without_codes(shown).index("a line") < without_codes(shown).rindex("rolling out")
    assert "another line" in shown


@pytest.mark.parametrize(("quiet", "is_terminal"), [(True, True), (False, False)])
def test_run_viewed_quiet_or_no_terminal_runs_plainly(
    make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch, quiet: bool, is_terminal: bool
) -> None:
    monkeypatch.setattr(sys, "stdout", FakeTerminal() if is_terminal else io.StringIO())
    env = make_env()

    assert run_viewed(env, env.env_manager, quiet=quiet) == env.env_manager


def test_run_viewed_terminal_that_cannot_move_its_cursor_runs_plainly(
    make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    env = make_env()

    with terminal_in_place():
        assert run_viewed(env, env.env_manager, quiet=False) == env.env_manager


async def test_snapshot_of_a_served_environment(service: LiveService, make_env: MakeEnv) -> None:
    service.start()
    env = make_env(rollout_server_url=service.url)
    assert snapshot_of(env) is None

    async with ScriptedTrainer(service.url, num_steps=1000) as trainer:
        await trainer.register()
        serving = asyncio.create_task(env.env_manager())
        await asyncio.wait_for(trainer.train(3), 60)
        await until(lambda: env.curr_step == 3)
        snapshot = None

        def is_held_back() -> bool:
            nonlocal snapshot
            snapshot = snapshot_of(env)
            return snapshot is not None and snapshot.activity == "held back: queue is full"

        await until(is_held_back)
        serving.cancel()
        await asyncio.wait({serving})

    assert snapshot is not None
    assert (snapshot.name, snapshot.step, snapshot.total_steps) == ("small_0", 3, 1000)
    assert (snapshot.group_size, snapshot.most_groups_running) == (2, 4)
    assert snapshot.groups_done >= 6
    assert snapshot.tokens_done == 4 * snapshot.groups_done  # two trained tokens, twice
    assert set(snapshot.scores) == {0.0, 1.0}
    assert snapshot.queue_groups
    assert snapshot.queue_batches == snapshot.queue_groups * 2 / 4
    assert snapshot.staleness_max is not None
    after = snapshot_of(env)
    assert after is not None
    assert after.activity == "closing"


async def test_snapshot_counts_drops_and_failures(make_env: MakeEnv) -> None:
    env = make_env(data_path_to_save_groups="groups.jsonl", ensure_scores_are_not_same=True)
    env.n_groups_to_process, env.group_size_to_process = 3, 2
    env.count_failure("ValueError")
    same = {"tokens": [[65]] * 2, "masks": [[65]] * 2, "scores": [0.5, 0.5]}
    env.run_figures.begin()

    await env.handle_send_to_api(same, do_send_to_api=False)
    await env.handle_send_to_api(dict(same, masks=None), do_send_to_api=False)
    snapshot = snapshot_of(env)

    assert snapshot is not None
    assert snapshot.drops == {"scores_equal": 1, "malformed": 1}
    assert snapshot.failures == {"ValueError": 1}
    assert (snapshot.groups_done, snapshot.tokens_done) == (2, 2)
    assert snapshot.scores == (0.5, 0.5, 0.5, 0.5)
    assert (snapshot.step_word, snapshot.queue_groups) == ("group", None)


async def test_process_in_a_terminal_ends_with_the_last_figures(make_env: MakeEnv) -> None:
    env = make_env(data_path_to_save_groups="groups.jsonl")
    env.n_groups_to_process, env.group_size_to_process = 3, 2

    with terminal_in_place() as terminal:
        await run_viewed(env, env.process_manager, quiet=False)()

    last = without_codes(terminal.getvalue()).rpartition("╭─ small")[2]
    assert "now        ended" in last
    assert "group      3 of 3" in last
    assert "mean 0.500 of the last 6" in last
    assert not [h for h in logging.getLogger().handlers if type(h).__name__ == "RecentErrors"]


SCRIPT = """
import sys
from pathlib import Path
from tests.envs.conftest import CharTokenizers
from tests.envs.small_environment import SERVERS, SmallEnv, small_config
from atroposlib.envs import base

vars(base)["AutoTokenizer"] = CharTokenizers
SmallEnv.config_init = classmethod(lambda cls: (small_config(total_steps=2), SERVERS))
SmallEnv.cli()
"""


def output_in_a_terminal(folder: Path, *words: str) -> str:
    """Run `process` on a real pseudo-terminal; return what it wrote."""
    (folder / "script.py").write_text(SCRIPT)
    ours, theirs = pty.openpty()
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "script.py", "process", "--env.use_wandb", "false", *words],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(root), "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(theirs)
    written = read_to_the_end(ours)
    assert process.wait(60) == 0, written
    return written


def test_process_command_in_a_terminal_shows_the_view(tmp_path: Path) -> None:
    text = output_in_a_terminal(tmp_path)

    assert "╭─ small" in without_codes(text)
    assert "group      2 of 2" in without_codes(text)
    assert "wrote 2 groups" in text


def test_process_command_quiet_writes_plain_lines(tmp_path: Path) -> None:
    text = output_in_a_terminal(tmp_path, "--quiet")

    assert "\x1b" not in text
    assert "group 2 of 2: 2 trajectories" in text


def test_env_view_imports_nothing_of_the_view_in_plain_runs() -> None:
    code = f"import sys, {env_view.__name__}\nassert 'rich' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True)
