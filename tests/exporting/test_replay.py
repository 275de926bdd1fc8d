"""`atropos-replay`: scoring again without a model, posting to a real service, comparing."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from atroposlib.cli import replay
from atroposlib.exporting.groups import ExportGroup
from atroposlib.exporting.replay import (
    NotRecordedError,
    RecordedGroup,
    RecordedModel,
    ReplayedTurn,
    Rescored,
    comparison_text,
    record_run,
    rescoring_text,
)
from tests.exporting.conftest import Service
from tests.exporting.samples import make_group, make_groups, read_records, write_groups

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]

SINGLE_TURN = """
from atroposlib.envs.single_turn_env import SingleTurnEnv


class AddingEnv(SingleTurnEnv):
    name = "adding"

    async def setup(self):
        self.next = 0

    async def get_next_item(self):
        self.next += 1
        return None if self.next > 50 else self.next - 1

    def prompt(self, item):
        return [{"role": "user", "content": f"What is {item} + {item}?"}]

    async def score(self, item, answer):
        if not answer:
            return -1.0
        return float(answer == f"The answer is {item + item}")
"""

SEVERAL_TURNS = """
from atroposlib.envs.base import BaseEnv


class AskingTwiceEnv(BaseEnv):
    name = "twice"

    async def setup(self):
        self.next = 0

    async def get_next_item(self):
        self.next += 1
        return self.next

    async def collect_trajectory(self, item):
        messages = [{"role": "user", "content": f"first {item}"}]
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for follow_up in ("again", None):
                answer = await managed.chat_completion(messages=messages, n=1, max_tokens=20)
                text = answer.choices[0].message.content
                messages.append({"role": "assistant", "content": text})
                if follow_up:
                    messages.append({"role": "user", "content": follow_up})
            [node] = managed.get_state()["nodes"]
        score = float(len(messages[1]["content"]) + len(messages[3]["content"]))
        return {"tokens": node.tokens, "masks": node.masked_tokens, "scores": score}, []

    async def evaluate(self, *args, **kwargs):
        pass
"""


@pytest.fixture
def score(
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., Any]:
    """Scores groups with a script; in this process, where transformers is loaded already."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(code: str, groups: list[Any], *words: object, env: str = "") -> SimpleNamespace:
        script = tmp_path / "some_environment.py"
        script.write_text(code)
        source = write_groups(tmp_path / "recorded.jsonl", groups)
        flags = ("--env", env or script, *words, "--env.tokenizer_name", tokenizer.name_or_path)
        argv = ["atropos-replay", "score", source, *flags]
        monkeypatch.setattr(sys, "argv", [str(word) for word in argv])
        code_of_exit: Any = 0
        try:
            replay.main()
        except SystemExit as ended:
            code_of_exit = ended.code
        shown = capsys.readouterr()
        return SimpleNamespace(returncode=code_of_exit, stdout=shown.out, stderr=shown.err)

    return run


def test_new_scores_are_shown_next_to_the_recorded_ones(
    score: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    groups = make_groups(tokenizer, 3)
    groups[1] = make_group(
        tokenizer, "What is 1 + 1?", ["The answer is 2", "The answer is"], [1.0, 0.0], cut=[1]
    )
    unasked = make_group(tokenizer, "Who are you?", ["me", "you"], [1.0, 0.0])

    done = score(SINGLE_TURN, [*groups, unasked], "--save", tmp_path / "new.jsonl")

    assert done.returncode == 0, done.stderr
    # 1, -1, 0, 2 before; the first answer is right, the others are wrong
    assert "3 of 4 groups scored again, 3 changed, 5 of 10 trajectories" in done.stdout
    assert "line 1: 2: -1 to 0, 4: 2 to 0" in done.stdout
    assert "line 2: 2: 0 to -1" in done.stdout  # the completion was cut: its answer is empty
    assert "1 groups not found" in done.stdout
    saved = read_records(tmp_path / "new.jsonl")
    assert [group["scores"] for group in saved] == [[1, 0, 0, 0], [1, -1], [1, 0, 0, 0]]
    assert saved[0]["old_scores"] == [1, -1, 0, 2]
    assert saved[0]["tokens"] == groups[0]["tokens"]


def test_output_that_cannot_be_printed_loses_no_scores(
    score: Callable[..., Any], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("builtins.print", fail)

    done = score(SINGLE_TURN, make_groups(tokenizer, 2), "--save", tmp_path / "new.jsonl")

    assert done.returncode == 1
    assert len(read_records(tmp_path / "new.jsonl")) == 2


def test_groups_of_a_task_set_are_scored_by_its_name(
    score: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    rows = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(3)]
    questions = tmp_path / "sums.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = json.dumps({"reward_functions": ["answer_text"]})
    group = make_group(tokenizer, "What is 2 + 2?", ["4", "5"], [0.0, 1.0])

    done = score("", [group], "--env.adapter_args", arguments, env=f"dataset:{questions}")

    assert done.returncode == 0, done.stderr
    assert "line 1: 1: 0 to 1, 2: 1 to 0" in done.stdout


def two_turns(tokenizer: Any, item: int, first: str, second: str) -> tuple[list[int], list[int]]:
    end = f"{tokenizer.eos_token}"
    parts = [
        (f"<|im_start|>user\nfirst {item}{end}\n<|im_start|>assistant\n", False),
        (f"{first}{end}", True),
        (f"\n<|im_start|>user\nagain{end}\n<|im_start|>assistant\n", False),
        (f"{second}{end}", True),
    ]
    ids: list[int] = []
    masks: list[int] = []
    for text, is_trained in parts:
        own = tokenizer.encode(text, add_special_tokens=False)
        ids += own
        masks += own if is_trained else [-100] * len(own)
    return ids, masks


def test_several_turns_are_played_as_they_were(score: Callable[..., Any], tokenizer: Any) -> None:
    rows = [two_turns(tokenizer, 2, *texts) for texts in (("a", "bb"), ("a", "cccc"), ("dd", "e"))]
    group = {
        "tokens": [row[0] for row in rows],
        "masks": [row[1] for row in rows],
        "scores": [0.0, 0.0, 3.0],
    }

    done = score(SEVERAL_TURNS, [group], "--max-items", 5)

    assert done.returncode == 0, done.stderr
    assert "1 of 1 groups scored again, 1 changed, 2 of 3 trajectories" in done.stdout
    assert "line 1: 1: 0 to 3, 2: 0 to 5" in done.stdout


def test_search_ends_when_items_repeat_and_nothing_scored_is_a_failure(
    score: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    unasked = [make_group(tokenizer, f"Who is {i}?", ["me", "you"], [1.0, 0.0]) for i in range(2)]
    seven_in_turn = SINGLE_TURN.replace(
        "None if self.next > 50 else self.next - 1", "self.next % 7"
    )

    done = score(seven_in_turn, unasked, "--save", tmp_path / "new.jsonl")

    assert done.returncode == 1
    assert "the environment repeats its items: 7 different prompts in 107 items" in done.stderr
    assert "items/s" in done.stderr  # progress
    assert "2 groups not found" in done.stdout
    assert "no group was scored" in done.stderr
    assert not (tmp_path / "new.jsonl").exists()


def test_items_that_come_late_are_still_looked_for(
    score: Callable[..., Any], tokenizer: Any
) -> None:
    late = make_group(tokenizer, "What is 3 + 3?", ["The answer is 6", "no"], [0.0, 0.0])
    every_prompt_often = SINGLE_TURN.replace(
        "None if self.next > 50 else self.next - 1", "(self.next - 1) // 90"
    )

    done = score(every_prompt_often, [late], "--max-items", 300)

    assert done.returncode == 0, done.stderr
    assert "1 of 1 groups scored again" in done.stdout


def test_script_without_the_environment_and_unknown_flags_are_said(
    score: Callable[..., Any], tokenizer: Any
) -> None:
    groups = make_groups(tokenizer, 1)

    none = score("x = 1", groups)
    unknown = score(SINGLE_TURN, groups, "--env.group_sise", 3)
    refused = score(SINGLE_TURN, groups, "--env.group_size", "three")

    assert (none.returncode, unknown.returncode, refused.returncode) == (2, 2, 2)
    assert "has no environment; name one as" in none.stderr
    assert "unknown flag --env.group_sise" in unknown.stderr
    assert "env.group_size: input should be a valid integer" in refused.stderr
    assert "Traceback" not in none.stderr + unknown.stderr + refused.stderr


def test_settings_of_a_yaml_file_are_read(
    score: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    code = SINGLE_TURN.replace("        if not answer:", "        if self.config.group_name:")
    code = code.replace("-1.0", "float(self.config.group_name)")
    code = code.replace("float(answer ==", "float(not answer ==")
    config_class = "class Config(SingleTurnEnvConfig):\n    group_name: str = ''\n\n\nclass Adding"
    code = code.replace("import SingleTurnEnv", "import SingleTurnEnv, SingleTurnEnvConfig")
    code = code.replace("class Adding", config_class, 1)
    code = code.replace('name = "adding"', 'name = "adding"\n    env_config_cls = Config')
    settings = tmp_path / "settings.yaml"
    settings.write_text("env:\n  group_name: '7.5'\n")
    groups = make_groups(tokenizer, 1)

    done = score(code, groups, "--config", settings)
    missing = score(code, groups, "--config", tmp_path / "none.yaml")

    assert done.returncode == 0, done.stderr
    assert "7.5 now" in done.stdout
    assert missing.returncode == 2
    assert "config: cannot read" in missing.stderr


def test_place_for_new_scores_is_looked_at_before_scoring(
    score: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")

    done = score(SINGLE_TURN, make_groups(tokenizer, 1), "--save", tmp_path / "file" / "new.jsonl")

    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"atropos-replay: {tmp_path / 'file'} cannot be written: it is a file; expected a folder; "
        "choose another place with --save"
    ]


def test_what_was_not_recorded_is_never_made_up() -> None:
    group = RecordedGroup(
        "line 1", [[1, 2, 3], [1, 2, 4]], [[-100, 2, 3], [-100, 2, 4]], [0, 1], None
    )
    model = RecordedModel([group], end_ids=[3])
    with pytest.raises(NotRecordedError):
        model.answer([1], 1)
    assert model.replay_next() is group

    turns = model.answer([1], 2)

    assert [turn.ids for turn in turns] == [[2, 3], [2, 4]]
    assert [model.finish_reason(turn) for turn in turns] == ["stop", "length"]
    with pytest.raises(NotRecordedError, match=r"1 replies .* 0 are recorded; the item is"):
        model.answer([1], 1)
    with pytest.raises(NotRecordedError):
        model.answer([1, 2], 1)


def test_reply_of_a_rendered_chat_ends_before_the_line_break_of_the_template() -> None:
    model = RecordedModel([], end_ids=[3], tail_ids=[9])

    turns = [ReplayedTurn([2, 3, 9], []), ReplayedTurn([2, 4, 9], [])]

    assert [model.finish_reason(turn) for turn in turns] == ["stop", "length"]
    assert [model.without_end(turn.ids) for turn in turns] == [[2], [2, 4, 9]]


@pytest.mark.long
def test_groups_are_posted_at_a_pace(
    start_service: Callable[..., Service], run_command: Run, groups_file: Path, tmp_path: Path
) -> None:
    service = start_service("--run", "r", "--data-dir", str(tmp_path))
    service.register()
    lines = groups_file.read_text().splitlines()
    groups_file.write_text(
        "\n".join([lines[0], "broken", *lines[1:4], '{"tokens": 1}', *lines[4:]])
    )
    words = ("--api-url", service.url, "--rate", 20, "--skip", 2, "--num-groups", 8)

    started = time.monotonic()
    done = run_command("replay", "post", groups_file, *words)
    duration_s = time.monotonic() - started

    assert done.returncode == 0, done.stderr
    assert "8 groups, 32 trajectories posted" in done.stdout
    assert "line 2 is left out" in done.stderr
    assert duration_s > 7 / 20
    assert service.status()["queue_size"] == 8
    first = httpx.get(f"{service.url}/groups/0/payload").json()
    assert first["tokens"] == json.loads(lines[2])["tokens"]
    # The stored run is a record, too.
    again = run_command(
        "replay", "post", "r", "--data-dir", tmp_path, "--api-url", service.url, "--num-groups", 2
    )
    assert "2 groups, 8 trajectories posted" in again.stdout, again.stderr


@pytest.mark.long
def test_service_that_is_gone_is_said_with_how_to_go_on(
    run_command: Run, groups_file: Path, free_port: int
) -> None:
    url = f"http://127.0.0.1:{free_port}"

    done = run_command("replay", "post", groups_file, "--api-url", url, "--patience-s", 0.1)

    assert done.returncode == 2
    assert "is the trajectory service running there?" in done.stderr


async def test_posting_stops_where_the_service_went_away(groups: list[Any]) -> None:
    from atroposlib.errors import TrajectoryApiError
    from atroposlib.exporting.posting import PostingStoppedError, post_groups

    class Failing:
        num_posts = 0

        async def post_group(self, group: Any, *, key: str) -> None:
            self.num_posts += 1
            if self.num_posts == 2:
                raise TrajectoryApiError("POST answered 422: bad", status=422)
            if self.num_posts > 3:
                raise TrajectoryApiError("POST got no answer")

    notices: list[str] = []
    with pytest.raises(PostingStoppedError, match="got no answer") as caught:
        await post_groups(
            Failing(),  # type: ignore[arg-type]
            ((f"line {i}", group) for i, group in enumerate(groups)),
            groups_per_s=None,
            max_in_flight=1,
            notify=notices.append,
        )

    assert (caught.value.posted.num_groups, caught.value.posted.num_rejected) == (2, 1)
    assert notices == ["line 1 was rejected: POST answered 422: bad"]


async def test_group_that_was_not_answered_is_not_skipped(groups: list[Any]) -> None:
    from atroposlib.errors import TrajectoryApiError
    from atroposlib.exporting.posting import PostingStoppedError, post_groups

    class FailingOnce:
        num_posts = 0

        async def post_group(self, group: Any, *, key: str) -> None:
            self.num_posts += 1
            number = self.num_posts
            await asyncio.sleep(0)
            if number == 3:
                raise TrajectoryApiError("POST got no answer")

    with pytest.raises(PostingStoppedError) as caught:
        await post_groups(
            FailingOnce(),  # type: ignore[arg-type]
            ((f"line {i}", group) for i, group in enumerate(groups)),
            groups_per_s=None,
            max_in_flight=8,
        )

    assert caught.value.posted.num_before_failure == 2
    assert caught.value.posted.num_groups > 2


async def test_cancelled_posting_ends_its_requests_and_counts_the_groups_before(
    groups: list[Any],
) -> None:
    from atroposlib.exporting.posting import Posted, post_groups

    asked = asyncio.Event()

    class Hanging:
        num_posts = 0

        async def post_group(self, group: Any, *, key: str) -> None:
            self.num_posts += 1
            if self.num_posts > 2:
                asked.set()
                await asyncio.Event().wait()

    posted = Posted()
    posting = asyncio.create_task(
        post_groups(
            Hanging(),  # type: ignore[arg-type]
            ((f"line {i}", group) for i, group in enumerate(groups)),
            groups_per_s=None,
            max_in_flight=2,
            posted=posted,
        )
    )
    await asked.wait()
    posting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await posting
    assert (posted.num_groups, posted.num_before_failure) == (2, 2)


def test_interrupted_posting_is_said_with_how_to_go_on(
    groups: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def interrupt(*_: Any, posted: Any, **__: Any) -> None:
        posted.num_groups, posted.num_before_failure = 5, 4
        raise KeyboardInterrupt

    async def info(_: Any) -> None:
        pass

    monkeypatch.setattr("atroposlib.exporting.posting.post_groups", interrupt)
    monkeypatch.setattr("atroposlib.api.client.TrajectoryApiClient.info", info)
    source = str(write_groups(tmp_path / "groups.jsonl", groups))
    monkeypatch.setattr(sys, "argv", ["atropos-replay", "post", source, "--skip", "2"])

    with pytest.raises(SystemExit) as ended:
        replay.main()

    assert ended.value.code == 130
    assert "stopped; to continue, run the same command with --skip 6, which sends 1 groups" in (
        capsys.readouterr().err
    )


def test_means_are_of_the_trajectories_that_have_both_scores() -> None:
    rescored = [Rescored("line 1", [0.0, 1.0], [None, 1.0])]

    text = rescoring_text(rescored, num_groups=1)

    assert "mean score 1 before, 1 now" in text
    assert "1 trajectories keep their scores" in text


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["post", "G", "--skip", "-1"], 2, "--skip: expected a number from 0"),
        (["post", "G", "--num-groups", "-1"], 2, "--num-groups: expected a number from 0"),
        (["post", "G", "--in-flight", "0"], 2, "--in-flight: expected an integer from 1"),
        (["score", "G", "--env", "e.py", "--max-items", "0"], 2, "--max-items: expected an"),
        (["score", "G", "--env", "gem:x"], 2, "gem-llm is not installed"),
        (["export-traces", "G", "--output", "OUT"], 1, "No space left on device: 'OUT/group-"),
    ],
)
def test_command_that_cannot_run_ends_with_one_line(
    words: list[str],
    code: int,
    reason: str,
    groups_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from atroposlib.adapters import registry
    from atroposlib.cli import replay
    from atroposlib.errors import MissingExtraError

    def missing(*_: Any, **__: Any) -> None:
        raise MissingExtraError("gem-llm", extra="gem")

    def no_space(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(registry, "_require", missing)
    monkeypatch.setattr(Path, "write_text", no_space)
    places = {"G": str(groups_file), "OUT": str(tmp_path / "out")}
    monkeypatch.setattr(sys, "argv", ["replay", *(places.get(word, word) for word in words)])

    with pytest.raises(SystemExit) as ended:
        replay.main()

    assert ended.value.code == code
    assert reason.replace("OUT", places["OUT"]) in capsys.readouterr().err


def test_file_of_groups_that_cannot_be_written_is_removed(tmp_path: Path) -> None:
    from atroposlib.cli import replay

    with pytest.raises(TypeError):
        replay._write_new(tmp_path / "out.jsonl", [{"a": 1}, {"a": object()}])

    assert not (tmp_path / "out.jsonl").exists()


def test_two_runs_are_compared_by_prompt() -> None:
    def group(prompt: int, answers: list[int], scores: list[float]) -> ExportGroup:
        return ExportGroup(
            tokens=[[prompt, answer] for answer in answers],
            masks=[[-100, answer] for answer in answers],
            scores=scores,
        )

    first = record_run([("line 1", group(1, [5, 6], [0, 1])), ("line 2", group(2, [5], [1]))])
    second = record_run([("line 1", group(3, [5], [1])), ("line 2", group(1, [6, 7], [1, 1]))])

    text = comparison_text(first, second, names=("a", "b"))

    assert "1 prompts are in both, 1 only in a, 1 only in b" in text
    assert "1 different completions of these prompts are in both" in text
    assert "mean score of 1 of them is higher in the second run, of 0 lower" in text
    assert "line 1 and line 2: 0.5 to 1" in text
    assert "mean score              0.6667  1" in text


def test_diff_whose_reader_has_left_is_no_failure(groups_file: Path, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    reading, writing = os.pipe()
    os.close(reading)
    with errors.open("w") as stream, open(writing, "wb") as pipe:  # noqa: PTH123 - a descriptor
        done = subprocess.run(
            [*(sys.executable, "-m", "atroposlib.cli.replay", "diff"), groups_file, groups_file],
            stdout=pipe,
            stderr=stream,
            check=False,
        )

    assert (done.returncode, errors.read_text()) == (0, "")


def test_diff_names_what_cannot_be_read(
    run_command: Run, groups_file: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text(groups_file.read_text().splitlines()[0] + "\n{\n")

    done = run_command("replay", "diff", groups_file, broken)

    assert done.returncode == 0, done.stderr
    assert "line 2 is left out: not JSON" in done.stderr
    assert "1 prompts are in both, 19 only in" in done.stdout


def test_group_without_masks_or_with_odd_logprobs_is_left_out(
    score: Callable[..., Any], tokenizer: Any
) -> None:
    good, unmasked, odd = make_groups(tokenizer, 3)
    del unmasked["masks"]
    odd["inference_logprobs"] = 1.5

    done = score(SINGLE_TURN, [good, unmasked, odd])

    assert done.returncode == 0, done.stderr
    assert "1 of 1 groups scored again" in done.stdout
    assert "line 2 is left out: masks: missing; every group needs it" in done.stderr
    assert "line 3 is left out: Expected array | null, got float" in done.stderr
