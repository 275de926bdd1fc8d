"""Groups on their way from the hooks to the trainer (sections 3, 4.2 and 4.7)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import GroupError
from tests.contract.scored_groups import scored, take
from tests.envs.live_service import LiveService, ScriptedTrainer, serve_until
from tests.envs.small_environment import SmallEnv
from tests.envs.test_base_delivery import RecordingSession
from tests.envs.test_base_offline import records

pytestmark = pytest.mark.slow

MakeEnv = Callable[..., Any]


def trajectory(score: float) -> dict[str, Any]:
    return {"tokens": [65, 66], "masks": [-100, 66], "scores": score}


MESSAGES = [
    [({"role": "user", "content": "q"}, {"role": "assistant", "content": "a"})] * 2,
    ([{"role": "user", "content": "q"}], [{"role": "user", "content": "q", "reward": None}]),
    [[{"role": "user", "content": [{"type": "text", "text": "q"}]}]] * 2,
    [[{"role": "tool", "content": "r", "tool_call_id": "1"}]] * 2,
]


@pytest.mark.parametrize("messages", MESSAGES, ids=["tuples", "tuple", "parts", "tool"])
async def test_messages_may_be_tuples_and_hold_other_than_text(
    service: LiveService, make_env: MakeEnv, messages: Any
) -> None:
    class Chatty(SmallEnv):
        async def collect_trajectories(self, item: Any) -> Any:
            return scored(messages=messages), []

    service.start()
    env = make_env(Chatty, rollout_server_url=service.url, data_path_to_save_groups="g.jsonl")

    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        await serve_until(env, trainer.train(3))

    assert env.drop_counts == {}
    assert trainer.groups[0]["messages"][0][0]["content"] == messages[0][0]["content"]


EXTRA = {
    "item_ids": ["a", "b"],
    "seed": 3,
    "metadata": {"level": 1},
    "parsed_actions": ["x", "y"],
    "ground_truths": "g",
    "_original_messages": [[]],
}


async def test_extra_keys_of_a_group_are_saved_and_disturb_nobody(
    service: LiveService, make_env: MakeEnv, tmp_path: Path
) -> None:
    class Extra(SmallEnv):
        async def collect_trajectories(self, item: Any) -> Any:
            return scored(**EXTRA), []

    service.start()
    env = make_env(Extra, rollout_server_url=service.url, data_path_to_save_groups="g.jsonl")

    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        await serve_until(env, trainer.train(3))

    assert env.drop_counts == {}
    saved = records(tmp_path / "g.jsonl")[0]
    assert {key: saved[key] for key in EXTRA} == EXTRA
    assert "env_id" not in saved
    assert not EXTRA.keys() & trainer.groups[0].keys()


@pytest.mark.parametrize(
    ("returned", "num_sent"),
    [
        ((scored(), []), 1),
        ((scored(), None), 1),
        (scored(), 1),
        (([scored(), None, scored()], []), 2),
        ([None, scored()], 1),
        ((None, []), 0),
        (None, 0),
        (([], []), 0),
        (([None, None], []), 0),
    ],
)
async def test_collect_trajectories_may_return_every_form(
    make_env: MakeEnv, returned: Any, num_sent: int
) -> None:
    class Returning(SmallEnv):
        async def collect_trajectories(self, item: Any) -> Any:
            return returned

    env = make_env(Returning)
    sent: list[Any] = []

    async def send(groups: Any) -> None:
        sent.extend(groups if isinstance(groups, list) else [groups])

    env._send_scored_data_to_api = send
    env.rollout_scheduler.start("item")
    [worker] = env.workers
    await worker

    assert len(sent) == num_sent
    assert env.failure_counts == {}


@pytest.mark.parametrize("returned", [(trajectory(1.0), ["later"]), trajectory(1.0), (None, ["l"])])
async def test_collect_trajectory_may_return_a_backlog_or_none(
    make_env: MakeEnv, returned: Any
) -> None:
    class Returning(SmallEnv):
        async def collect_trajectory(self, item: Any) -> Any:
            return returned

    env = make_env(Returning, ensure_scores_are_not_same=False)
    env._send_scored_data_to_api = take
    env.rollout_scheduler.start("item")
    [worker] = env.workers
    await worker

    assert env.failure_counts == {}
    assert len(env.backlog) == (2 if isinstance(returned, tuple) else 0)


async def test_results_that_are_none_are_left_to_the_environment_that_scores_later(
    make_env: MakeEnv,
) -> None:
    class Later(SmallEnv):
        async def collect_trajectory(self, item: Any) -> Any:
            self.num_items += 1
            return (None if self.num_items % 2 else [{"role": "user", "content": "c"}]), []

        async def postprocess_histories(self, trajectories: Any) -> Any:
            return [trajectories]

    env = make_env(Later, group_size=4)

    collected, backlog = await env.collect_trajectories("item")

    assert collected == [[{"role": "user", "content": "c"}]] * 2
    assert backlog == []


WHOLE = {
    **{"tokens": [65, 66], "masks": [-100, 66], "advantages": [0.0, 1.0]},
    **{"ref_logprobs": [0.0, -1.0], "inference_logprobs": [1.0, -0.5], "messages": [{"a": 1}]},
    **{"overrides": {"sft": True}, "images": "picture", "distill_token_ids": [[1], [2]]},
    **{"distill_logprobs": [[-1.0], [-2.0]]},
}


async def test_default_group_keeps_every_field_of_its_trajectories(make_env: MakeEnv) -> None:
    class Whole(SmallEnv):
        async def collect_trajectory(self, item: Any) -> Any:
            self.num_items += 1
            i = self.num_items
            switches = {"group_overrides": {"sft": i, f"only_{i}": i}}
            generation = {"generation_params": {"temperature": float(i)}}
            return {**WHOLE, **switches, **generation, "scores": float(i)}, [f"later {i}"]

    group, backlog = await make_env(Whole).collect_trajectories("item")

    for name, value in WHOLE.items():
        assert group[name] == [value, value], name
    assert group["scores"] == [1.0, 2.0]
    assert group["group_overrides"] == {"sft": 2, "only_1": 1, "only_2": 2}
    assert group["generation_params"] == {"temperature": 2.0}
    assert backlog == ["later 1", "later 2"]


@pytest.mark.parametrize("result", ["text", 3, ["list"], {"messages": []}])
async def test_default_group_of_other_results_is_a_value_error(
    make_env: MakeEnv, result: Any
) -> None:
    class Other(SmallEnv):
        async def collect_trajectory(self, item: Any) -> Any:
            return result, []

    with pytest.raises(ValueError, match="result 0 of collect_trajectory") as raised:
        await make_env(Other).collect_trajectories("item")

    assert isinstance(raised.value, GroupError)


@pytest.fixture
def env(make_env: MakeEnv) -> Any:
    environment = make_env()
    environment.service_session = RecordingSession()
    return environment


async def test_group_may_name_its_own_size(env: Any) -> None:
    tokens = [[1], [2], [3]]
    three = scored(tokens=tokens, masks=tokens, scores=[0.0, 1.0, 2.0])

    await env.handle_send_to_api(three)
    await env.handle_send_to_api({**three, "group_overrides": {"group_size": 3, "sft": True}})
    await env.handle_send_to_api(scored(group_overrides={"group_size": 3}))

    assert [len(group["tokens"]) for group in env.service_session.sent] == [3]
    assert env.drop_counts == {"wrong_size": 2}


@pytest.mark.parametrize(
    "broken",
    [
        scored(scores=[[1.0], [1.0]]),
        scored(scores=[float("nan"), 1.0]),
        scored(scores=[1.0]),
        scored(masks=None),
        {"tokens": [[1], [2]], "masks": [[1], [2]]},
        {"masks": [[1], [2]], "scores": [0.0, 1.0]},
        "no group",
        7,
    ],
    ids=range(8),
)
async def test_broken_group_is_skipped_with_a_warning_and_counted(
    env: Any, broken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await env.handle_send_to_api([broken, scored()])

    assert [len(groups) for groups in env.service_session.sent] == [1]
    assert sum(env.drop_counts.values()) == 1
    assert "group dropped" in caplog.text


async def test_group_of_one_is_sent(make_env: MakeEnv) -> None:
    env = make_env(group_size=1)
    env.service_session = RecordingSession()

    await env.handle_send_to_api({"tokens": [[1]], "masks": [[1]], "scores": [0.0]})

    assert len(env.service_session.sent) == 1


async def test_missing_fields_become_none_in_the_group_itself(env: Any) -> None:
    group = scored(overrides=[{"set_advantage_to_zero": True}, {}])

    await env.handle_send_to_api(group)

    for name in ("ref_logprobs", "group_overrides", "distill_token_ids", "distill_logprobs"):
        assert group[name] is None
    assert group["overrides"] == [{"set_advantage_to_zero": True}, {}]


@pytest.mark.parametrize(("limit", "is_sent"), [(2, False), (3, True), (0, True), (-1, True)])
async def test_length_limit_refuses_what_reaches_it(env: Any, limit: int, is_sent: bool) -> None:
    env.max_token_len = limit

    await env.handle_send_to_api(scored())

    assert len(env.service_session.sent) == int(is_sent)
    assert env.completion_lengths == [2, 2]  # counted either way


async def test_groups_sent_are_counted_and_a_list_stays_a_list(env: Any) -> None:
    await env.handle_send_to_api(scored())
    await env.handle_send_to_api([scored()])
    await env.handle_send_to_api([scored(), scored()])
    await env.handle_send_to_api([])
    await env.handle_send_to_api(scored(), do_send_to_api=False)

    kinds = [type(groups) for groups in env.service_session.sent]
    assert kinds == [dict, list, list]
    assert env.items_sent_this_step == 4


async def test_admitted_groups_reach_the_table_with_their_item(env: Any) -> None:
    seen: list[Any] = []

    async def keep(*arguments: Any) -> None:
        seen.append(arguments)

    env.add_rollouts_for_wandb = keep
    group = scored()

    await env.handle_send_to_api([group, scored(scores=[1.0, 1.0])], "item")

    assert seen == [(group, "item")]


async def test_table_of_all_trajectories(make_env: MakeEnv) -> None:
    env = make_env(num_rollouts_per_group_for_logging=-1)

    await env.add_rollouts_for_wandb(scored())

    assert env.rollouts_for_wandb == [[("AB", 1.0), ("AC", 0.0)]]
