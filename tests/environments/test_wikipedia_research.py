"""Wikipedia research: articles and their quality, tools, statements, topics, variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.conversation import Turn
from atroposlib.errors import ConfigError
from environments.community.wikipedia_research.wikipedia_article_creator import (
    MAX_ARTICLE_CHARACTERS,
    Statements,
    Topic,
    WikipediaArticleCreatorEnv,
    assess,
    facts_of,
    read_article,
    read_statements,
    read_topics,
    sections_of,
)
from tests.environments.offline import PROBED, make_env, ready_env
from tests.fakes import ScriptedEngine

pytest.importorskip("bm25s")

ARTICLE = "# Karsholm\n\n## Harbor\nFerries land.\n\n## References\nThe page of Karsholm."
FINAL = f"Final Step:\n```markdown\n{ARTICLE}\n```"


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    ("answer", "article"),
    [
        (FINAL, ARTICLE),
        (f"I know enough.\n{FINAL}\nDone.", ARTICLE),
        ("Final Step: the article\n\n```markdown\na\n```\nb\n```\n", "a\n```\nb"),
        (FINAL.replace("Final Step:", "My Final Step:"), None),
        (FINAL.replace("```markdown", "```"), None),
        (FINAL.removesuffix("```"), None),
        (f"```markdown\n{ARTICLE}\n```\nFinal Step:", None),
        ("Final Step:\n```markdown\n\n```", None),
        ("Final Step:\n```markdown\n" + "x" * (MAX_ARTICLE_CHARACTERS + 1) + "\n```", None),
        ("Final Step:\n" * 50_000, None),
        ("", None),
    ],
)
def test_article(answer: str, article: str | None) -> None:
    assert read_article(answer) == article


@pytest.mark.parametrize(
    ("article", "sections"),
    [
        (ARTICLE, ["harbor", "references"]),
        ("## A\ntext\n## A\ntext\n### B ##\ntext\n## C\n## D", ["a", "b"]),
        ("# A\ntext\n# B\ntext", ["b"]),
        ("#A\ntext\n" + "#" * 7 + " B\ntext", []),
        ("text", []),
    ],
)
def test_sections(article: str, sections: list[str]) -> None:
    assert sections_of(article) == sections


def test_quality() -> None:
    facts = ["The ferries carry salt.", "Bread rises slowly.", "It is old."]

    quality = assess(ARTICLE, facts, min_sections=4)

    length = len(" ".join(ARTICLE.split()))
    assert quality.structure == pytest.approx(0.7 * 2 / 4 + 0.3)
    assert quality.comprehensiveness == pytest.approx(0.7 * length / 3000 + 0.3 * 2 / 5)
    assert quality.fact_usage == pytest.approx(1 / 3)
    assert quality.total == pytest.approx(
        0.3 * quality.structure + 0.4 * quality.comprehensiveness + 0.3 / 3
    )
    assert assess("x" * 9000, [], min_sections=3).total == pytest.approx(0.4 * 0.7)


def test_facts_are_sentences() -> None:
    text = "It is short. The ferry to Karsholm leaves at seven every morning.\n" + "x" * 600

    assert facts_of(text) == ["The ferry to Karsholm leaves at seven every morning."]


@pytest.mark.parametrize(
    ("verdict", "statements"),
    [
        ("CORRECT: 6\nINCORRECT: 2\nUNKNOWN: 0", Statements(0.75, 0.25, 0.0)),
        ("<think>CORRECT: 1</think>**CORRECT:** 0\nINCORRECT: 0\nUNKNOWN: 2", Statements(0, 0, 1)),
        ("**CORRECT: 6**\n- INCORRECT: **2**\n* UNKNOWN: 0", Statements(0.75, 0.25, 0.0)),
        ("CORRECT: 0\nINCORRECT: 0\nUNKNOWN: 0", None),
        ("CORRECT: 6\nCORRECT: 2\nUNKNOWN: 0", None),
        ("CORRECT: 6\nINCORRECT: 2", None),
        ("CORRECT: -6\nINCORRECT: 2\nUNKNOWN: 0", None),
        ("CORRECT: 6000\nINCORRECT: 2\nUNKNOWN: 0", None),
        ("", None),
    ],
)
def test_statements(verdict: str, statements: Statements | None) -> None:
    assert read_statements(verdict) == statements


async def rollout_of(
    turns: list[str], monkeypatch: pytest.MonkeyPatch, *, topic: Topic, **settings: Any
) -> tuple[Any, Any, dict[str, float]]:
    written = iter(turns)

    def play(prompt: str) -> str:
        if "You check an article" in prompt:
            return "CORRECT: 1\nINCORRECT: 3\nUNKNOWN: 0"
        return next(written) if "Write an article about" in prompt else PROBED

    async with ScriptedEngine(play) as engine:
        env = make_env(
            WikipediaArticleCreatorEnv,
            engine,
            monkeypatch,
            **{"max_token_length": 30_000, "max_article_tokens": 9_000, **settings},
        )
        await env.setup()
        env.train = {topic.title: topic}
        rollout, _ = await env.collect_trajectory((0, topic.title))
        group = await env.postprocess_histories([rollout])
        metrics = env.metrics_of([rollout], "train") | env.metrics_of([rollout], "eval")
        await env.close()
        await env.server.close()
    return rollout, group, metrics


async def test_research_ends_with_an_article(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [
        "I begin.",
        "<think>ferry?</think>" + call("web_search", query="tramway of Brune", filter_year=1931),
        call("visit_page", url="brune-tram") + call("visit_page", url="no-page"),
        FINAL,
    ]

    rollout, group, metrics = await rollout_of(
        turns, monkeypatch, topic=Topic("The tramway of Brune")
    )

    contents = [str(message["content"]) for message in rollout.messages]
    assert (rollout.outcome, len(rollout.rewards)) == ("done", 4)
    assert not any("ferry?" in text for text in contents)
    assert "Continue: call a tool" in contents[3]
    assert "[brune-tram]" in contents[5]
    assert "no search has found this page" in contents[7]
    assert rollout.conversation.facts
    quality = assess(ARTICLE, rollout.conversation.facts, min_sections=3)
    assert rollout.rewards[-1] == pytest.approx(quality.total)
    assert len(group["tokens"]) == 2  # the turn with thinking ends the first sequence
    assert group["advantages"][-1][-1] == pytest.approx(quality.total)
    assert metrics["eval/completion_rate"] == 1.0
    assert metrics["train/avg_steps_per_article"] == 4.0


async def test_judge_compares_statements_with_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = Topic("Karsholm", "Karsholm is an island.")

    rollout, _, metrics = await rollout_of(
        [FINAL], monkeypatch, topic=topic, compare_statements=True
    )

    quality = assess(ARTICLE, [], min_sections=3).total
    assert rollout.rewards == [pytest.approx((quality + 0.25) / 2)]
    assert metrics["train/avg_factual_accuracy"] == 0.25
    assert metrics["train/avg_pct_incorrect"] == 0.75


async def test_research_without_an_article_earns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout, _, metrics = await rollout_of(
        ["Hm."] * 3, monkeypatch, topic=Topic("Karsholm"), max_steps=3
    )

    assert (rollout.rewards, rollout.outcome) == ([0.0] * 3, "out_of_turns")
    assert metrics["eval/completion_rate"] == 0.0


@pytest.mark.parametrize("year", [999, 10**30])
async def test_years_have_bounds(year: int, monkeypatch: pytest.MonkeyPatch) -> None:
    env = await ready_env(WikipediaArticleCreatorEnv, monkeypatch)
    conversation = env.start_conversation(await env.get_next_item())

    turn = Turn(call("web_search", query="tea", filter_year=year), 0, ())

    assert "a year from 1000 to 2100" in str((await conversation.reply(turn)).messages)


async def test_topics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "own.json"

    path.write_text(json.dumps(["Tea", {"title": "Tides", "text": "They rise."}]))

    assert read_topics(path) == [Topic("Tea"), Topic("Tides", "They rise.")]
    for content in ("[]", "{}", '["Tea", "Tea"]', "[3]", "[[", '[{"text": "x"}]'):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"own\.json"):
            read_topics(path)
    env = await ready_env(WikipediaArticleCreatorEnv, monkeypatch)
    assert (len(env.train), len(env.test)) == (10, 3)
    with pytest.raises(ConfigError, match="cannot be read"):
        await ready_env(WikipediaArticleCreatorEnv, monkeypatch, topics_file="other.json")
    (tmp_path / "wikipedia_articles.json").write_text('["Tea", "Tides"]')
    monkeypatch.chdir(tmp_path)
    env = await ready_env(WikipediaArticleCreatorEnv, monkeypatch)
    assert {*env.train, *env.test} == {"Tea", "Tides"}


def test_variables_change_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODEL_NAME": "m", "MAX_STEPS": "4", "TEMPERATURE": "0.2"}.items():
        monkeypatch.setenv(name, value)

    config, server = WikipediaArticleCreatorEnv.config_init()

    assert (config.max_steps, config.temperature, config.tokenizer_name) == (4, 0.2, "m")  # type: ignore[attr-defined]
    assert server.model_name == "m"
    monkeypatch.setenv("MAX_STEPS", "0")
    with pytest.raises(ConfigError, match="MAX_STEPS"):
        WikipediaArticleCreatorEnv.config_init()
