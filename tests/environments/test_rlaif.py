from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.envs.single_turn_env import Trajectory
from environments.rlaif_server import SAMPLE, Chat, RLAIFEnv, pair_scores, read_chat, steered
from tests.environments.offline import make_env
from tests.fakes import ScriptedEngine

USER, REPLY = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
MORE = {"role": "user", "content": "And?"}


@pytest.mark.parametrize(
    ("conversation", "chat"),
    [
        ([USER, REPLY], Chat([USER], "Hello")),
        ([SYSTEM, USER, REPLY], Chat([SYSTEM, USER], "Hello")),
        ([USER, REPLY, MORE, REPLY], Chat([USER, REPLY, MORE], "Hello")),
        ([USER, REPLY, MORE], Chat([USER], "Hello")),  # one more, or it would end with a reply
        ([USER, MORE], Chat([USER], "")),
        ([USER], None),
        ([SYSTEM, USER], None),
        ([REPLY, REPLY], None),
        ([], None),
    ],
)
def test_chat_of_a_conversation(conversation: list[dict[str, str]], chat: Chat | None) -> None:
    assert read_chat(conversation) == chat


def test_steering_takes_the_place_of_system_messages() -> None:
    first, *rest = steered([SYSTEM, USER], "Prefer rhymes.")

    assert first["role"] == "system"
    assert "Prefer rhymes." in first["content"]
    assert rest == [USER]


@pytest.mark.parametrize(
    ("is_cut", "margins", "scores"),
    [
        ([False, False], {(0, 1): 0.25}, [0.25, -0.25]),
        ([False, False], {(0, 1): 0.0}, None),  # a tie
        ([True, False], {}, [-1.0, 1.0]),
        ([True, True], {}, None),
        # Two whole answers and a cut one: (0.5 + 1) / 2, (-0.5 + 1) / 2, (-1 - 1) / 2.
        ([False, False, True], {(0, 1): 0.5}, [0.75, 0.25, -1.0]),
        # Twelfths that sum to 0 for each answer: 1 + 4 - 5, -1 - 2 + 3, -4 + 2 + 2, 5 - 3 - 2.
        (
            [False] * 4,
            {
                pair: twelfths / 12
                for pair, twelfths in zip(
                    combinations(range(4), 2), (1, 4, -5, -2, 3, 2), strict=True
                )
            },
            None,
        ),
    ],
)
def test_scores_of_pairs(
    is_cut: list[bool], margins: dict[tuple[int, int], float], scores: list[float] | None
) -> None:
    assert pair_scores(is_cut, margins) == scores


class Policy:
    """Answers well where it is steered, badly elsewhere; judges like a reader."""

    def __init__(self, *, always_a: bool = False) -> None:
        self.always_a = always_a
        self.num_judged = 0

    def __call__(self, prompt: str) -> str:
        if "Criterion: " in prompt:
            self.num_judged += 1
            a = prompt.partition("<answer A ")[2].partition("</answer A")[0]
            return "\\boxed{A}" if self.always_a or "good" in a else "\\boxed{B}"
        return "a good answer" if "has this taste" in prompt else "a bad answer"


def rlaif(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    chosen = {"group_size": 2, "dataset_path": str(SAMPLE), **settings}
    return make_env(RLAIFEnv, engine, monkeypatch, **chosen)


async def test_steered_answer_keeps_its_own_tokens_and_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Policy()
    async with ScriptedEngine(policy) as engine:
        env = rlaif(engine, monkeypatch, steering_probability=1.0, include_messages=True)
        await env.setup()
        group, _ = await env.collect_trajectories(await env.get_next_item())
        await env.server.close()

    texts = ["".join(map(chr, tokens)) for tokens in group["tokens"]]
    assert ["good answer" in text for text in texts] == [True, False]
    assert ["has this taste" in text for text in texts] == [True, False]
    assert [chat[0]["role"] for chat in group["messages"]] == ["system", "user"]
    assert group["scores"] == [0.5, -0.5]
    assert policy.num_judged == 6
    assert env.judgements == [("a good answer", "a bad answer", "\\boxed{A}")]


async def test_judge_that_always_names_the_first_place_decides_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ScriptedEngine(Policy(always_a=True)) as engine:
        env = rlaif(engine, monkeypatch, steering_probability=1.0)
        await env.setup()
        group, _ = await env.collect_trajectories(await env.get_next_item())
        await env.server.close()

    assert group is None


async def test_cut_answer_loses_without_a_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy()
    async with ScriptedEngine(policy) as engine:
        env = rlaif(engine, monkeypatch)
        cut, whole = (Trajectory("x", reason, [1], [1], [0.0]) for reason in ("length", "stop"))
        scores = await env._scores(Chat([USER], ""), [cut, whole])
        await env.server.close()

    assert (scores, policy.num_judged) == ([-1.0, 1.0], 0)


async def test_chat_beyond_the_limit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine(Policy()) as engine:
        env = rlaif(engine, monkeypatch, max_token_length=100)
        long = Chat([{"role": "user", "content": "x" * 200}], "")
        assert await env.collect_trajectories(long) == (None, [])
        await env.server.close()


async def test_evaluation_counts_votes_against_the_replies_of_the_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: dict[str, float] = {}
    async with ScriptedEngine(Policy()) as engine:
        env = rlaif(engine, monkeypatch)
        await env.setup()
        monkeypatch.setattr(env.run_log, "log", lambda metrics, step: logged.update(metrics))
        await env.evaluate()
        await env.server.close()

    assert logged["eval/share_of_votes"] == 0.5  # neither is "good": always B, either order


def test_environment_passes_the_check() -> None:
    report = check_environment(RLAIFEnv)

    assert report.passed, report.text
