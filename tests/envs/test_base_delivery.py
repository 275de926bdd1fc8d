"""What becomes of a group on its way out: admitted, recorded, dropped and counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atroposlib.envs.reporting import LengthBias
from atroposlib.errors import TrajectoryApiError
from tests.envs.small_environment import SmallEnv

MakeEnv = Callable[..., Any]


class RecordingSession:
    """Takes groups instead of a service; may refuse them."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.sent: list[Any] = []
        self.refusal = refusal

    async def send(self, groups: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.sent.append(groups)

    def numbered_rollout(self) -> AbstractContextManager[None]:
        return nullcontext()


def group(**changes: Any) -> dict[str, Any]:
    return {
        "tokens": [[65, 66], [65, 67, 68]],
        "masks": [[-100, 66], [-100, 67, 68]],
        "scores": [1.0, 0.0],
        **changes,
    }


@pytest.fixture
def env(make_env: MakeEnv) -> Any:
    environment = make_env()
    environment.service_session = RecordingSession()
    return environment


async def test_send_one_group_posts_an_object(env: Any) -> None:
    await env.handle_send_to_api(group(), "item")

    (sent,) = env.service_session.sent
    assert sent["scores"] == [1.0, 0.0]
    assert sent["ref_logprobs"] is sent["overrides"] is sent["group_overrides"] is None
    assert env.items_sent_this_step == 1
    assert env.completion_lengths == [1, 2]
    assert env.rollouts_for_wandb == [[("AB", 1.0)]]


async def test_send_list_posts_one_list_without_nones_and_drops(env: Any) -> None:
    await env.handle_send_to_api([group(), None, group(scores=[1.0, 1.0])])

    assert [len(sent) for sent in env.service_session.sent] == [1]
    assert isinstance(env.service_session.sent[0], list)
    assert env.drop_counts == {"scores_equal": 1}


async def test_send_twice_the_same_group_works(env: Any) -> None:
    once = group()

    await env.handle_send_to_api(once)
    await env.handle_send_to_api(once)

    assert len(env.service_session.sent) == 2


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (group(scores=[0.5, 0.5]), "scores_equal"),
        (group(tokens=[[1]], masks=[[1]], scores=[1.0]), "wrong_size"),
        (group(masks=[[-100], [-100, 67, 68]]), "malformed"),
        ({"tokens": [[1], [2]]}, "malformed"),
        (group(group_overrides={"group_size": "2"}), "malformed"),
    ],
)
async def test_send_drops_and_counts(
    env: Any, candidate: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    await env.handle_send_to_api(candidate)

    assert env.service_session.sent == []
    assert env.items_sent_this_step == 0
    assert env.drop_counts == {reason: 1}
    assert f"group dropped ({reason})" in caplog.text


@pytest.mark.parametrize("size", [None, np.int64(2)])
async def test_group_size_may_be_of_the_settings_or_of_numpy(env: Any, size: Any) -> None:
    await env.handle_send_to_api(group(group_overrides={"group_size": size}))

    assert len(env.service_session.sent) == 1


class FullDisk:
    """A file that cannot be written."""

    def write(self, _: str) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.write("")


async def test_group_is_sent_if_its_file_cannot_be_written(
    make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_env(data_path_to_save_groups="g.jsonl")
    env.service_session = RecordingSession()
    env.jsonl_writer._file.close()
    env.jsonl_writer._file = FullDisk()

    await env.handle_send_to_api(group())
    env._close_records()

    assert len(env.service_session.sent) == 1
    assert env.failure_counts == {"OSError": 1}
    assert "sent, but not saved: [Errno 28] No space left on device: 'g.jsonl'" in caplog.text
    assert "g.jsonl is not complete" in caplog.text


async def test_group_that_is_only_saved_fails_with_its_file(make_env: MakeEnv) -> None:
    env = make_env(data_path_to_save_groups="g.jsonl")
    env.jsonl_writer._file.close()
    env.jsonl_writer._file = FullDisk()

    with pytest.raises(OSError, match=r"No space left on device: 'g\.jsonl'"):
        await env.handle_send_to_api(group(), do_send_to_api=False)


async def test_drops_of_one_reason_are_told_ever_more_rarely(
    env: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(25):
        await env.handle_send_to_api({"tokens": [[1], [2]]})

    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(told) == 10
    assert told[-1].endswith("; 10 so far")


async def test_masks_that_are_not_labels_are_sent_with_one_warning(
    env: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = group(masks=[[-100, 66], [0, 1, 1]])

    for _ in range(3):
        await env.handle_send_to_api(wrong)

    assert len(env.service_session.sent) == 3
    warnings = [r.getMessage() for r in caplog.records if "masks[1][0] is 0" in r.getMessage()]
    assert len(warnings) == 1
    assert "expected -100 or the token, 65" in warnings[0]


async def test_send_too_long_is_dropped_unless_told_otherwise(env: Any) -> None:
    env.max_token_len = 3

    await env.handle_send_to_api(group())
    await env.handle_send_to_api(group(), abort_on_any_max_length_exceeded=False)

    assert env.drop_counts == {"too_long": 1}
    assert len(env.service_session.sent) == 1


async def test_send_numpy_arrays_become_lists(env: Any) -> None:
    await env.handle_send_to_api(group(scores=np.array([1.0, 0.0], dtype=np.float32)))

    assert env.service_session.sent[0]["scores"] == [1.0, 0.0]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
async def test_send_scores_that_are_arrays_of_one_number(env: Any, shape: tuple[int, ...]) -> None:
    scores = [np.full(shape, 1.0), np.full(shape, 0.0)]

    await env.handle_send_to_api(group(scores=scores))

    assert json.dumps(env.service_session.sent[0]["scores"]) == "[1.0, 0.0]"


async def test_send_empty_logprobs_count_as_not_given(env: Any) -> None:
    await env.handle_send_to_api(group(inference_logprobs=[], advantages=[]))

    assert env.service_session.sent[0]["inference_logprobs"] is None
    assert not env.drop_counts


async def test_send_adds_messages_when_asked(env: Any) -> None:
    env.config.include_messages = True

    await env.handle_send_to_api(group())
    await env.handle_send_to_api(group(messages=[["own"], ["own"]]))

    assert env.service_session.sent[0]["messages"] == [
        [{"role": "user", "content": "AB"}],
        [{"role": "user", "content": "ACD"}],
    ]
    assert env.service_session.sent[1]["messages"] == [["own"], ["own"]]


async def test_send_refusal_is_logged_with_the_services_words(
    env: Any, caplog: pytest.LogCaptureFixture
) -> None:
    env.service_session = RecordingSession(TrajectoryApiError("422: scores[0] is text", status=422))

    await env.handle_send_to_api([group(), group()])

    assert env.drop_counts == {"refused_by_service": 2}
    assert "scores[0] is text" in caplog.text


async def test_send_without_registration_says_so(make_env: MakeEnv) -> None:
    with pytest.raises(RuntimeError, match="only be sent while serving"):
        await make_env().handle_send_to_api(group())


async def test_record_only_writes_the_file_and_sends_nothing(make_env: MakeEnv) -> None:
    env = make_env(data_path_to_save_groups="out/groups.jsonl")

    await env.handle_send_to_api(group(extra={"seed": 3}), do_send_to_api=False)

    (record,) = _lines(env)
    assert record["extra"] == {"seed": 3}
    assert "env_id" not in record


async def test_record_group_that_cannot_be_written_is_dropped_naming_the_key(
    make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_env(data_path_to_save_groups="groups.jsonl")

    await env.handle_send_to_api(group(metadata={1, 2}), do_send_to_api=False)

    assert env.drop_counts == {"not_encodable": 1}
    assert "metadata" in caplog.text


def test_output_file_that_exists_gets_a_number(make_env: MakeEnv, tmp_path: Path) -> None:
    (tmp_path / "groups.jsonl").write_text("kept")

    env = make_env(data_path_to_save_groups="groups.jsonl")

    assert env.config.data_path_to_save_groups == "groups_1.jsonl"
    assert (tmp_path / "groups.jsonl").read_text() == "kept"


async def test_table_keeps_the_latest_and_clamps(make_env: MakeEnv) -> None:
    env = make_env(num_rollouts_to_keep=2, num_rollouts_per_group_for_logging=9)

    for score in (1.0, 2.0, 3.0):
        await env.add_rollouts_for_wandb(group(scores=[score, 0.0]), None)

    assert [rows[0] for rows in env.rollouts_for_wandb] == [("AB", 2.0), ("AB", 3.0)]
    assert [len(rows) for rows in env.rollouts_for_wandb] == [2, 2]


async def test_table_takes_text_and_score_of_rows_that_hold_more(make_env: MakeEnv) -> None:
    env = make_env()
    env.rollouts_for_wandb = [[("text", 1.0, "answer", "more")]]

    metrics = await env.create_rollout_table({})

    assert metrics["train/rollouts"]["rows"] == [["text", 1.0]]


def test_run_log_start_writes_settings_that_have_no_json_form_as_text(make_env: MakeEnv) -> None:
    env = make_env(wandb_name="n", reward=max, vocabulary={"a"})
    started: list[dict[str, Any]] = []
    env.run_log.start = lambda **run: started.append(run)

    env._reporter.start_local_run()

    assert started[0]["config"]["reward"] == str(max)
    assert started[0]["config"]["vocabulary"] == ["a"]


async def test_wandb_log_empties_the_buffers_and_merges_all_servers(make_env: MakeEnv) -> None:
    env = make_env()
    env.wandb_prepend = "small_0"
    env.completion_lengths = [10, 20]
    env.task_duration = [1.0, 3.0]
    env.failed_task_duration = [1.0]
    env.server.servers = [_MeteredServer(), _MeteredServer()]
    logged: list[dict[str, Any]] = []
    env.run_log.log = lambda metrics, step: logged.append(metrics)

    await SmallEnv.wandb_log(env)

    assert logged[0]["small_0_train/completion_lengths"] == 15.0
    assert logged[0]["small_0_train/completion_lengths_p95"] == 0.0
    assert logged[0]["small_0_train_perf/task_duration_mean"] == 2.0
    assert "small_0_train_perf/failed_task_duration_mean" not in logged[0]
    assert logged[0]["server/server_0_x"] == logged[0]["server/server_1_x"] == 1
    assert (env.completion_lengths, env.task_duration) == ([], [])
    assert env.failed_task_duration == [1.0]


class _MeteredServer:
    async def wandb_metrics(self, metrics: dict[str, Any], name: str) -> dict[str, Any]:
        return {**metrics, f"server/{name}_x": 1}


def _lines(env: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in env.jsonl_writer.path.read_text().splitlines()]


async def test_lengths_of_kept_and_dropped_groups_are_logged_once(env: Any) -> None:
    logged: list[dict[str, Any]] = []
    env.run_log.log = lambda metrics, step: logged.append(metrics)
    env.max_token_len = 4
    long = {"tokens": [[65] * 9, [65] * 3], "masks": [[65] * 9, [65] * 3]}

    await env.handle_send_to_api(group())  # 1 and 2 trained tokens
    await env.handle_send_to_api(group(**long))  # 9 and 3, and 9 is too long
    await env.handle_send_to_api(group(scores=[0.0, 0.0]))  # 1 and 2 again
    await env.wandb_log({})
    await env.wandb_log({})

    found = {name: value for name, value in logged[0].items() if name.startswith("lengths/")}
    assert found == {
        "lengths/kept_mean_tokens": 1.5,
        "lengths/dropped_mean_tokens": 3.75,
        "lengths/dropped_too_long_mean_tokens": 6.0,
        "lengths/dropped_scores_equal_mean_tokens": 1.5,
        "lengths/dropped_to_kept_ratio": 2.5,
    }
    assert not any(name.startswith("lengths/") for name in logged[1])


def test_length_bias_in_seconds_compares_lost_with_used_rollouts() -> None:
    bias = LengthBias()

    bias.add_durations([1.0, 3.0], [])
    bias.add_durations([], [8.0])

    assert bias.metrics() == {
        "lengths/used_mean_s": 2.0,
        "lengths/lost_mean_s": 8.0,
        "lengths/lost_to_used_ratio": 4.0,
    }
