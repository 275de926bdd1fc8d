"""The accessibility environment: the two rules, what a rewrite may change, the shipped pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atroposlib.errors import ConfigError
from environments.community.accessibility_env.accessibility_env import (
    DEFAULT_PATH,
    RULES,
    SAMPLE,
    AccessibilityConfig,
    AccessibilityEnv,
    PageError,
    read_page,
    score_rewrite,
)
from tests.environments.offline import PROBED, make_env, ready_env
from tests.fakes import ScriptedEngine

PAGE = '<p>Hi</p><img src="a/cat.jpg"><input name="q">'
BOTH = ["missing_alt_text", "missing_label"]
FIXED = '<p>Hi</p><img src="a/cat.jpg" alt="A cat"><input name="q" aria-label="Query">'


@pytest.mark.parametrize(
    ("html", "score"),
    [
        (FIXED, 1.0),
        (FIXED.replace("><", ">\n <!-- new --> <").upper().replace("HI", "Hi"), -2.0),  # names
        ('<p>Hi</p><img alt="A cat" src="a/cat.jpg"><label>Query <input name="q"></label>', 1.0),
        ('<p>Hi</p><img src="a/cat.jpg" alt="A cat"><input name="q">', 0.4),  # 0.8 * 1 / 2
        ('<p>Hi</p><img src="a/cat.jpg" alt="cat.JPG"><input name="q" title="Query">', 0.4),
        ('<p>Hi</p><img src="a/cat.jpg" alt="Photo."><input name="q" title="Query">', 0.4),
        ('<p>Hi</p><img src="a/cat.jpg" alt=""><label></label><input name="q">', -0.5),
        (PAGE, -0.5),
        ("<p>Hi</p>", -2.0),  # the elements with issues are gone
        ("", -2.0),
        (FIXED.replace("Hi", "Hello"), -2.0),
        (FIXED.replace("Hi", "Hi there"), -2.0),
        (FIXED.replace('name="q"', ""), -2.0),
        (FIXED.replace("<p>", '<p onclick="f()">'), -2.0),
        (FIXED + "<script>f()</script>", -2.0),
        (FIXED + "</div>", -2.0),
        (FIXED + "<label>", -2.0),
        (f"{FIXED}<!--{'x' * 20_000}-->", -2.0),
    ],
)
def test_score(html: str, score: float) -> None:
    assert score_rewrite(f"Here:\n```html\n{html}\n```", PAGE, BOTH) == pytest.approx(score)


def test_answer_without_a_closed_block_or_a_page_without_issues() -> None:
    assert score_rewrite(FIXED, PAGE, BOTH) == -2.0
    assert score_rewrite(f"```\n{FIXED}", PAGE, ["missing_label"]) == -1.0
    assert score_rewrite(f"```\n{FIXED}\n```", PAGE, []) == 0.0
    assert score_rewrite("", PAGE, []) == 0.0


@pytest.mark.parametrize(
    ("html", "names"),
    [
        ('<img src="a.png">', ["missing_alt_text"]),
        ('<img src="a.png" alt="A boat">', []),
        ('<img src="a.png" alt="" role="presentation">', []),
        ('<input type="image" src="a.png">', ["missing_alt_text"]),
        ('<input type="hidden"><input type="submit">', []),
        ('<label for="b">City</label><select id="a"></select>', ["missing_label"]),
        ('<label for="a">City</label><select id="a"></select>', []),
        ('<h2 id="h">City</h2><textarea aria-labelledby="h"></textarea>', []),
        ('<textarea aria-labelledby="h"></textarea>', ["missing_label"]),
        ("<label> * <input></label>", ["missing_label"]),
        ("<ul><li>one<li>two</ul><input title='City'>", []),
    ],
)
def test_rules(html: str, names: list[str]) -> None:
    page = read_page(html)

    assert [name for name, is_violated in RULES.items() if is_violated(page)] == names


@pytest.mark.parametrize(
    "html",
    ["", "text", "</p>", "<p></div></p>", "<b>", "<b>" * 200, "<p a=1 a=2></p>", "<img" * 9000],
)
def test_text_that_is_not_a_page(html: str) -> None:
    with pytest.raises(PageError):
        read_page(html)


async def test_shipped_pages_are_used_without_a_file_at_the_default_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    env = await ready_env(AccessibilityEnv, monkeypatch)
    rows = [*env.train, *env.test]

    assert AccessibilityConfig().dataset_path == DEFAULT_PATH
    AccessibilityEnv.check_inputs(AccessibilityConfig())
    assert len(rows) == 20
    for row in rows:
        gold, issues = env.check_gold_answer(row), row["issues_to_fix"]
        assert await env.score(row, gold) == 1.0
        others = [env.check_gold_answer(other) for other in rows if other is not row]
        assert {score_rewrite(o, row["html"], issues) for o in others} == {-float(len(issues))}

    (tmp_path / "data").mkdir()
    own = {"html": "<input>", "issues_to_fix": ["missing_label"]}
    lacking = {"html": "<p></p>", "issues_to_fix": ["missing_label"]}
    (tmp_path / DEFAULT_PATH).write_text(f"{json.dumps(own)}\n{json.dumps(own)}\n")
    await env.setup()
    assert env.train[0]["html"] == "<input>"
    (tmp_path / DEFAULT_PATH).write_text(json.dumps(lacking))
    with pytest.raises(ConfigError, match="no training page"):
        await env.setup()
    (tmp_path / DEFAULT_PATH).write_text(json.dumps({**own, "issues_to_fix": ["contrast"]}))
    with pytest.raises(ConfigError, match="got 'contrast'"):
        await env.setup()


async def test_group_has_the_scores_of_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = iter([f"```\n{FIXED}\n```", f"```\n{PAGE}\n```", "I do not know."])

    def play(prompt: str) -> str:
        return next(replies) if "accessibility issues" in prompt else PROBED

    async with ScriptedEngine(play) as engine:
        env = make_env(
            AccessibilityEnv, engine, monkeypatch, group_size=3, dataset_path=str(SAMPLE)
        )
        item = {"html": PAGE, "issues_to_fix": BOTH, "fixed_html": None}
        group, _ = await env.collect_trajectories(item)
        await env.server.close()

    assert group["scores"] == [1.0, -0.5, -2.0]
