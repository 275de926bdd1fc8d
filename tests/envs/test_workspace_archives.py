"""Files of workspaces in the turn journal: kept with the turns, and removed with them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn
from atroposlib.envs.multi_turn_env import MultiTurnEnv, MultiTurnEnvConfig
from atroposlib.envs.turn_journal import TurnJournal
from atroposlib.envs.workspace_archives import WorkspaceArchives
from atroposlib.utils.aio import SideThread
from atroposlib.workspaces import (
    CommandResult,
    FileChange,
    LazyWorkspace,
    Workspace,
    WorkspaceContentError,
    WorkspaceError,
)
from tests.envs.live_service import until
from tests.fakes import ScriptedEngine

MIB = 2**20
GROUP = "0123456789abcdef" * 2


class FilesInMemory(Workspace):
    """A workspace whose commands write files: `run([name, content])`."""

    workdir = "/"

    def __init__(self, env: WritingEnv) -> None:
        self.files: dict[str, str] = {}
        self._env = env
        self._revision = 0

    @property
    def revision(self) -> int:
        return self._revision

    async def run(self, command: Sequence[str], **options: Any) -> CommandResult:
        self._revision += 1
        name, content = command
        if content:
            self.files[name] = content
        else:
            self.files.pop(name, None)
        return CommandResult(0, "exit", (), 0.0)

    async def save(self, *, max_bytes: int = MIB) -> bytes:
        if self._env.save_error is not None:
            raise self._env.save_error
        self._env.num_saved += 1
        return json.dumps(self.files).encode()

    async def load(self, archive: bytes, *, max_bytes: int = MIB) -> None:
        try:
            self.files = json.loads(archive)
        except ValueError as error:
            raise WorkspaceContentError(f"damaged: {error}") from error
        self._revision += 1
        self._env.num_loaded += 1

    async def collect(self, paths: Sequence[str], *, max_bytes: int) -> bytes:
        raise NotImplementedError

    async def put(self, archive: bytes) -> None:
        raise NotImplementedError

    async def changes(self, *, max_diff_bytes: int = 0) -> list[FileChange]:
        raise NotImplementedError

    async def close(self) -> None:
        self._env.num_closed += 1


class Writing(Conversation):
    """Writes a file in each of five turns, removes one, and holds the fourth turn at a gate."""

    def __init__(self, env: WritingEnv) -> None:
        self.env = env
        self.number = env.num_started
        env.num_started += 1
        self.workspace = LazyWorkspace(self.fork)
        self.forked: FilesInMemory | None = None

    async def fork(self) -> Workspace:
        self.forked = FilesInMemory(self.env)
        return self.forked

    def opening(self) -> Sequence[ChatMessage]:
        return [{"role": "user", "content": f"write {self.number}"}]

    async def reply(self, turn: Turn) -> Reply:
        if turn.index == 3:
            self.env.num_held += 1
            await self.env.gate.wait()
        if turn.index != self.env.quiet_turn:
            await self.workspace.run([f"file-{self.number}", f"{self.number} {turn.index}"])
            await self.workspace.run([f"turn-{turn.index}", str(self.number)])
            await self.workspace.run(["turn-0", "" if turn.index else "0"])
        assert self.forked is not None
        is_done = turn.index == 4
        return Reply(json.dumps(self.forked.files), reward=float(turn.index), is_done=is_done)

    def state(self) -> Any:
        return self.number

    def restore(self, state: int) -> None:
        self.number = state

    async def close(self) -> None:
        await self.workspace.close()


class WritingEnv(MultiTurnEnv):
    name = "writing"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = asyncio.Event()
        self.save_error: Exception | None = None
        self.quiet_turn = -1
        self.num_started = self.num_held = 0
        self.num_saved = self.num_loaded = self.num_closed = 0

    async def get_next_item(self) -> int:
        return 1

    def start_conversation(self, item: int) -> Writing:
        return Writing(self)


@pytest.fixture
async def make_writing(make_env: Callable[..., Any]) -> AsyncIterator[Callable[..., WritingEnv]]:
    make_env()  # puts the character tokenizer in place
    made: list[WritingEnv] = []
    async with ScriptedEngine(lambda prompt: "x") as engine:

        def make(*, is_held: bool = True) -> WritingEnv:
            config = MultiTurnEnvConfig(
                use_wandb=False, tokenizer_name="characters", group_size=3, include_messages=True
            )
            server = APIServerConfig(
                model_name="m", base_url=engine.base_url, server_type="vllm", health_check=False
            )
            made.append(WritingEnv(config, server))
            if not is_held:
                made[-1].gate.set()
            return made[-1]

        yield make
        for env in made:
            await env.server.close()


async def open_journal(folder: Path, *, max_bytes: int = MIB) -> TurnJournal:
    return await TurnJournal.open(folder / "turns.sqlite", {}, max_bytes=max_bytes)


async def roll_out(env: WritingEnv, journal: TurnJournal) -> Any:
    async with journal.group("item", step=0, is_dropped=lambda: False):
        rollouts, _ = await env.collect_trajectories("item")
        return await env.postprocess_histories(rollouts)


async def stop_in_fourth_turn(env: WritingEnv, folder: Path) -> None:
    """End the rollouts as a kill would, while the fourth turns are answered."""
    journal = await open_journal(folder)
    rolling = asyncio.create_task(roll_out(env, journal))
    await until(lambda: env.num_held == 3)
    rolling.cancel()
    await asyncio.wait({rolling})
    await journal.close()


def archives(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "turns.sqlite.workspaces").glob("*/*"))


async def test_files_continue_with_their_rollouts(
    make_writing: Callable[..., WritingEnv], tmp_path: Path
) -> None:
    calm, first, second = make_writing(is_held=False), make_writing(), make_writing(is_held=False)
    rollouts, _ = await calm.collect_trajectories("item")
    wanted = await calm.postprocess_histories(rollouts)
    await stop_in_fourth_turn(first, tmp_path)
    kept = archives(tmp_path)
    journal = await open_journal(tmp_path)
    num_bytes = journal.num_bytes

    group = await roll_out(second, journal)

    assert kept == ["0-2.tar.gz", "1-2.tar.gz", "2-2.tar.gz"]
    assert num_bytes > sum(len(name) for name in kept)
    assert group == wanted
    assert (second.num_loaded, first.num_closed, second.num_closed) == (3, 3, 3)
    assert journal.num_bytes == 0
    assert not (tmp_path / "turns.sqlite.workspaces").exists()
    await journal.close()


async def test_turn_that_changes_nothing_writes_nothing(
    make_writing: Callable[..., WritingEnv], tmp_path: Path
) -> None:
    first, second = make_writing(), make_writing(is_held=False)
    first.quiet_turn = second.quiet_turn = 2
    await stop_in_fourth_turn(first, tmp_path)
    kept = archives(tmp_path)
    journal = await open_journal(tmp_path)

    group = await roll_out(second, journal)

    assert kept == ["0-1.tar.gz", "1-1.tar.gz", "2-1.tar.gz"]
    assert first.num_saved == 6
    assert second.num_saved == 3  # of the fourth turns; the files of the last ones are not needed
    assert '"turn-1": "0", "turn-3": "0"' in json.dumps(group["messages"]).replace("\\", "")
    await journal.close()


async def test_finished_rollout_needs_no_files(
    make_writing: Callable[..., WritingEnv], tmp_path: Path
) -> None:
    first, second = make_writing(is_held=False), make_writing(is_held=False)
    for env in (first, second):
        journal = await open_journal(tmp_path)
        with pytest.raises(asyncio.CancelledError):
            await play_and_stop(env, journal)
        assert archives(tmp_path) == []
        await journal.close()

    assert (second.num_loaded, second.num_saved) == (0, 0)


async def play_and_stop(env: WritingEnv, journal: TurnJournal) -> None:
    async with journal.group("item", step=0, is_dropped=lambda: False):
        await env.collect_trajectories("item")
        raise asyncio.CancelledError


@pytest.mark.parametrize("damage", ["missing", "malformed"])
async def test_rollout_whose_files_are_damaged_starts_again(
    damage: str,
    make_writing: Callable[..., WritingEnv],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = make_writing(), make_writing(is_held=False)
    await stop_in_fourth_turn(first, tmp_path)
    [path] = (tmp_path / "turns.sqlite.workspaces").glob("*/1-2.tar.gz")
    path.unlink() if damage == "missing" else path.write_bytes(b"{")
    journal = await open_journal(tmp_path)

    group = await roll_out(second, journal)

    assert len(group["scores"]) == 3
    assert (second.num_loaded, second.num_started, second.num_closed) == (
        2,
        4,
        4 - (damage == "missing"),
    )
    assert "the workspace of Writing raised" in caplog.text
    assert journal.num_bytes == 0
    await journal.close()


@pytest.mark.parametrize(
    ("error", "max_bytes", "message"),
    [
        (
            WorkspaceError("cannot be saved"),
            MIB,
            "the workspace of Writing is not saved: cannot be",
        ),
        (OSError(28, "No space left"), MIB, "is not saved: [Errno 28] No space left"),
        (None, 1000, "is full"),
    ],
)
async def test_rollout_whose_files_are_not_saved_is_played_without_the_journal(
    error: Exception | None,
    max_bytes: int,
    message: str,
    make_writing: Callable[..., WritingEnv],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = make_writing(is_held=False)
    env.save_error = error
    journal = await open_journal(tmp_path, max_bytes=max_bytes)

    group = await roll_out(env, journal)

    assert len(group["scores"]) == 3
    assert message in caplog.text
    assert journal.is_usable
    assert journal.num_bytes == 0
    assert archives(tmp_path) == []
    await journal.close()


async def test_archives_without_a_group_are_removed_at_the_start(
    make_writing: Callable[..., WritingEnv], tmp_path: Path
) -> None:
    await stop_in_fourth_turn(make_writing(), tmp_path)
    folder = tmp_path / "turns.sqlite.workspaces"
    [group] = folder.iterdir()
    (group / "0-3.tar.gz.new").write_bytes(b"unfinished")
    (group / "1-3.tar.gz").write_bytes(b"whose row was not written")
    (folder / GROUP).mkdir()
    (folder / GROUP / "0-0.tar.gz").write_bytes(b"orphan")
    (folder / "notes").mkdir()
    journal = await open_journal(tmp_path)

    assert sorted(path.name for path in folder.iterdir()) == sorted([group.name, "notes"])
    assert archives(tmp_path) == ["0-2.tar.gz", "1-2.tar.gz", "1-3.tar.gz", "2-2.tar.gz"]

    await roll_out(make_writing(is_held=False), journal)

    assert journal.num_bytes == 0
    assert [path.name for path in folder.iterdir()] == ["notes"]
    await journal.close()


async def test_archives_are_removed_at_the_end_of_the_run(
    make_writing: Callable[..., WritingEnv], tmp_path: Path
) -> None:
    await stop_in_fourth_turn(make_writing(), tmp_path)
    journal = await open_journal(tmp_path)

    await journal.clear()

    assert not (tmp_path / "turns.sqlite.workspaces").exists()
    await journal.close()


async def test_turns_of_another_run_are_removed_with_their_files(
    make_writing: Callable[..., WritingEnv], tmp_path: Path
) -> None:
    await stop_in_fourth_turn(make_writing(), tmp_path)
    journal = await open_journal(tmp_path)
    env = make_writing(is_held=False)

    async with journal.group("item", step=-1, is_dropped=lambda: False):
        assert archives(tmp_path) == []
        await env.collect_trajectories("item")

    assert env.num_loaded == 0
    await journal.close()


async def test_attribute_of_earlier_conversations_is_not_taken_for_a_workspace(
    make_writing: Callable[..., WritingEnv], tmp_path: Path
) -> None:
    env = make_writing(is_held=False)

    class Older(Writing):
        def __init__(self, env: WritingEnv) -> None:
            super().__init__(env)
            self.own = self.workspace
            self.workspace = "/tmp/files"  # type: ignore[assignment]

        async def reply(self, turn: Turn) -> Reply:
            return Reply("go on", is_done=turn.index == 4)

        async def close(self) -> None:
            return

    env.start_conversation = lambda item: Older(env)  # type: ignore[method-assign]
    journal = await open_journal(tmp_path)

    group = await roll_out(env, journal)

    assert len(group["scores"]) == 3
    assert not (tmp_path / "turns.sqlite.workspaces").exists()
    await journal.close()


async def test_archive_replaces_an_unfinished_one_and_belongs_to_its_owner(tmp_path: Path) -> None:
    archives = WorkspaceArchives(tmp_path / "files", SideThread())
    path = archives.path(GROUP, 3, 7)
    archives.write(path, b"earlier")
    path.with_name(f"{path.name}.new").write_bytes(b"half of an archive")

    archives.write(path, b"whole")

    assert path.read_bytes() == b"whole"
    assert path.stat().st_mode & 0o777 == 0o600
    assert {folder.stat().st_mode & 0o777 for folder in path.parents[:2]} == {0o700}
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert archives.sizes(GROUP) == {3: 5}
