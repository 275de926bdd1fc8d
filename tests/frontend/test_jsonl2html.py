from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from atroposlib.frontend.jsonl2html import (
    create_html_for_group,
    generate_html,
    get_score_class,
    main,
)
from tests.growth import assert_linear

NESTED = {
    "messages": [
        [
            {"role": "system", "content": "You are a helpful assistant"},
            {"role": "user", "content": "What is 2+2?"},
            {"role": "assistant", "content": "2+2 equals 4"},
        ]
    ],
    "scores": [1.0],
}


class Page(HTMLParser):
    """Collects the elements of a page."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}


@pytest.mark.parametrize(
    ("score", "css_class"),
    [
        (1, "reward-positive"),
        (0.5, "reward-positive"),
        (0, "reward-zero"),
        (-0.1, "reward-negative"),
        ("1", ""),
        (None, ""),
        ([1], ""),
    ],
)
def test_get_score_class(score: Any, css_class: str) -> None:
    assert get_score_class(score) == css_class


def test_group_shows_string_messages_with_their_scores() -> None:
    markup = create_html_for_group({"messages": ["first **bold**", "second"], "scores": [1, -1]}, 3)

    assert "<summary>Group 3</summary>" in markup
    assert "first <strong>bold</strong>" in markup
    items = [attrs for tag, attrs in Page(markup).elements if tag == "div" and attrs.get("id")]
    assert [(i["id"], i["class"]) for i in items] == [
        ("group-3-item-0", "item reward-positive"),
        ("group-3-item-1", "item reward-negative"),
    ]
    assert markup.count("Reward: ") == 2
    assert "<h3>Content 1</h3>" in markup


def test_group_shows_roles_and_contents_of_chats() -> None:
    markup = create_html_for_group(NESTED, 0)

    for text in ("You are a helpful assistant", "What is 2+2?", "2+2 equals 4"):
        assert text in markup
    for role in ("System", "User", "Assistant"):
        assert role in markup


@pytest.mark.parametrize("group", [{}, {"messages": [], "scores": []}, {"messages": None}])
def test_group_without_items_is_empty(group: dict[str, Any]) -> None:
    assert create_html_for_group(group, 0) == ""


def test_group_of_unequal_lengths_is_cut_to_the_shorter(caplog: pytest.LogCaptureFixture) -> None:
    markup = create_html_for_group({"messages": ["one", "two", "three"], "scores": [1]}, 0)

    assert "one" in markup
    assert "two" not in markup
    assert "3 messages and 1 scores" in caplog.text


@pytest.mark.parametrize(
    "attack",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[x](javascript:alert(1))",
        "![x](http://elsewhere/pixel.png)",
        "<https://elsewhere>",
        "<style>body{display:none}</style>",
        "</div></details><script>alert(1)</script>",
        "```\n</code></pre><script>alert(1)</script>\n```",
        "|a|\n|-|\n|<iframe src=x>|",
        '<a href="x" onclick="alert(1)">',
        "&lt;script&gt;alert(1)&lt;/script&gt;",
        "$title ${groups} $$",
    ],
)
@pytest.mark.parametrize("as_chat", [False, True])
def test_model_output_never_becomes_active_markup(attack: str, as_chat: bool) -> None:
    chat: Any = [{"role": attack, "content": attack}] if as_chat else attack
    score: Any = attack

    page = Page(create_html_for_group({"messages": [chat], "scores": [score]}, 0))

    harmless = {"details", "summary", "div", "span", "h3", "p", "strong", "pre", "code", "br"}
    assert page.tags() <= harmless | {"table", "thead", "tbody", "tr", "th", "td"}
    names = {name for _, attrs in page.elements for name in attrs}
    assert names <= {"class", "id", "tabindex", "open", "align"} | {
        "data-index",
        "data-best",
        "data-mean",
        "data-differs",
        "data-score",
    }


@pytest.mark.parametrize(
    "text",
    [
        r"\{1, 2\} \(x\) \\",
        "# # _ #\n_ _ _ _",
        "#### _\n---\n***",
        "__init__ and _x_",
        "rows |  : | :\n  and spaces  \nstay",
    ],
)
def test_text_keeps_its_characters_under_markdown(text: str) -> None:
    markup = create_html_for_group({"messages": [text], "scores": [0]}, 0)

    block = markup.split('<div class="content-block">')[1].split("</div>")[0]
    shown = re.sub("<[^>]+>", "", block.replace("<br>", "\n"))
    assert html.unescape(shown).strip() == text


def test_style_shows_marks_that_became_markup(tmp_path: Path) -> None:
    source = tmp_path / "g.jsonl"
    source.write_text(json.dumps({"messages": ["2*3*4\n\n#### 24"], "scores": [0]}))

    generate_html(source)

    page = source.with_suffix(".html").read_text()
    assert "2<em>3</em>4" in page
    assert '.content-block em::after { content: "*";' in page
    assert "<h4>24</h4>" in page
    assert '.content-block h4::before { content: "#### "; }' in page


def test_answer_may_begin_with_a_fence() -> None:
    chat = [{"role": "assistant", "content": "```python\nprint()\n```"}]

    markup = create_html_for_group({"messages": [chat], "scores": [0]}, 0)

    assert "<pre><code>print()\n</code></pre>" in markup


def test_prompt_of_the_group_is_folded_from_the_second_on() -> None:
    prompt = [{"role": "system", "content": "rules"}, {"role": "user", "content": "2 + 2"}]
    chats = [[*prompt, {"role": "assistant", "content": answer}] for answer in ("4", "4", "5")]

    markup = create_html_for_group({"messages": chats, "scores": [1, 1, 0]}, 0)

    items = markup.split("<h3>")[1:]
    assert ["<details" in item for item in items] == [False, True, True]
    for item in items:
        assert "rules" in item
        before_answer = item.split("Assistant")[0]
        assert before_answer.count("<details") == before_answer.count("</details>")


def test_prompts_that_differ_are_not_folded() -> None:
    chats = [[{"role": "user", "content": text}] for text in ("one", "two")]

    assert "folded" not in create_html_for_group({"messages": chats, "scores": [1, 0]}, 0)


@pytest.mark.parametrize(
    ("gold", "texts"), [("<b>4", ["&lt;b&gt;4"]), (["first", "second"], ["first", "second"])]
)
def test_gold_answer_is_shown_once(gold: Any, texts: list[str]) -> None:
    markup = create_html_for_group({**NESTED, "gold_answer": gold}, 0)

    folded = markup.split('<details class="gold">')[1].split("</details>")[0]
    for text in texts:
        assert text in folded


@pytest.mark.parametrize("gold", [None, 4, {"a": 1}, [3]])
def test_gold_answer_that_is_no_text_is_left_out(gold: Any) -> None:
    assert "Gold" not in create_html_for_group({**NESTED, "gold_answer": gold}, 0)


def test_rewards_are_shown_without_digits_of_floating_point() -> None:
    group = {"messages": ["x", "y"], "scores": [-1.7999999999999998, 0.22547386273360412]}

    markup = create_html_for_group(group, 0)

    assert "Reward: -1.8<" in markup
    assert "Reward: 0.225474<" in markup
    assert 'data-score="-1.8"' in markup


def test_thinking_tags_stay_visible() -> None:
    markup = create_html_for_group({"messages": ["<think>hm</think>ok"], "scores": [0]}, 0)

    assert "&lt;think&gt;hm&lt;/think&gt;ok" in markup


def test_list_content_shows_texts_and_only_embedded_images() -> None:
    content = [
        {"type": "text", "text": "look *here*"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "https://elsewhere/x.png"}},
        {"type": "audio"},
    ]
    group = {"messages": [[{"role": "user", "content": content}, "bare"]], "scores": [0]}

    markup = create_html_for_group(group, 0)

    images = [attrs for tag, attrs in Page(markup).elements if tag == "img"]
    assert [image["src"] for image in images] == ["data:image/png;base64,AAAA"]
    for text in ("look <em>here</em>", "[image: https://elsewhere/x.png]", "[audio part]", "bare"):
        assert text in markup


@pytest.mark.parametrize(
    ("images", "sources"),
    [
        (["iVBORw0KGgoAAAA"] * 2, ["data:image/png;base64,iVBORw0KGgoAAAA"]),
        ("/9j/AAAA", ["data:image/jpeg;base64,/9j/AAAA"]),
        (["data:image/gif;base64,AAAA"], ["data:image/gif;base64,AAAA"]),
        (["https://elsewhere/x.png", 'iVBORw0KGgo"onerror=x', 3, None], []),
        ({"url": "x"}, []),
        (None, []),
    ],
)
def test_images_of_the_group_are_shown_once(images: Any, sources: list[str]) -> None:
    markup = create_html_for_group({**NESTED, "images": images}, 0)

    found = [attrs for tag, attrs in Page(markup).elements if tag == "img"]
    assert [image["src"] for image in found] == sources
    assert "onerror" not in {name for _, attrs in Page(markup).elements for name in attrs}


def test_null_content_and_tool_calls_are_shown() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "search"}]}

    markup = create_html_for_group({"messages": [[message]], "scores": [1]}, 0)

    assert "search" in markup
    assert "None" not in markup


@pytest.mark.parametrize("filler", ["[", "![", "[a](", "**a", "> ", "- ", "`a``", "\\", "&#"])
def test_degenerate_completions_are_rendered_in_time(filler: str) -> None:
    def render(times: int) -> None:
        create_html_for_group({"messages": [filler * 625 * times], "scores": [0]}, 0)

    assert_linear(render)


def test_generate_html_writes_one_page_with_the_readable_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "<groups>.jsonl"
    lines = [
        json.dumps(NESTED),
        "",
        "not json",
        json.dumps({"messages": None, "scores": [1]}),
        json.dumps({"scores": [1]}),
        "[1]",
        json.dumps({"messages": [], "scores": []}),
        json.dumps({"messages": ["plain text"], "scores": [0]}),
    ]
    source.write_text("\n".join(lines))

    generate_html(str(source))

    markup = (tmp_path / "<groups>.html").read_text()
    assert "Rendered Messages - &lt;groups&gt;.jsonl" in markup
    assert '<main id="groups-container"' in markup
    assert "plain text" in markup
    assert "Group 1" in markup
    assert "Group 2" not in markup
    printed = capsys.readouterr()
    assert "wrote 2 groups" in printed.out
    for number in (3, 4, 5, 6):
        assert f"line {number} skipped" in printed.err


def test_page_loads_nothing_and_runs_only_its_own_script(tmp_path: Path) -> None:
    source = tmp_path / "g.jsonl"
    source.write_text(json.dumps({"messages": ["x"], "scores": [1]}))

    generate_html(source, tmp_path / "new" / "page.html")

    markup = (tmp_path / "new" / "page.html").read_text()
    page = Page(markup)
    assert not [a for _, a in page.elements if "src" in a]
    assert [a["href"] for _, a in page.elements if "href" in a] == ["#groups-container"]
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert "default-src 'none'" in markup
    assert "script-src 'sha256-" in markup
    assert "$" not in markup


def test_empty_input_says_so(tmp_path: Path) -> None:
    source = tmp_path / "g.jsonl"
    source.touch()

    generate_html(source)

    assert "No data" in source.with_suffix(".html").read_text()


def test_page_does_not_replace_its_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "groups.html"  # as given to `process`
    source.write_text(json.dumps(NESTED))

    generate_html(source)
    with pytest.raises(SystemExit):
        generate_html(source, source)

    assert source.read_text() == json.dumps(NESTED)
    assert (tmp_path / "groups.html.html").is_file()
    assert "would replace the groups" in capsys.readouterr().err


def test_missing_input_exits_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        generate_html(tmp_path / "none.jsonl")

    assert exit_info.value.code == 1
    assert "none.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["IN", "OUT"], ["--input_path", "IN", "--output_path", "OUT"]]
)
def test_command_line_takes_both_forms(arguments: list[str], tmp_path: Path) -> None:
    source, target = tmp_path / "g.jsonl", tmp_path / "o.html"
    source.write_text(json.dumps(NESTED))
    names = {"IN": str(source), "OUT": str(target)}

    main([names.get(argument, argument) for argument in arguments])

    assert "2+2 equals 4" in target.read_text()


def test_command_line_without_input_exits_with_two() -> None:
    with pytest.raises(SystemExit) as exit_info:
        main([])

    assert exit_info.value.code == 2


def test_parts_of_a_reward_are_shown_after_it() -> None:
    parts = [{"answer": 1.0, "<b>": -0.5}, "nonsense"]

    markup = create_html_for_group(
        {"messages": ["x", "y"], "scores": [0.5, 1], "reward_parts": parts}, 0
    )

    assert markup.count("Parts:") == 1
    assert "Parts: answer 1.0, &lt;b&gt; -0.5</p>" in markup


def test_page_says_and_counts_which_groups_are_tokenized_from_text(tmp_path: Path) -> None:
    source = tmp_path / "groups.jsonl"
    marked = {**NESTED, "tokenized_from_text": True}
    source.write_text("".join(json.dumps(group) + "\n" for group in (NESTED, marked)))

    generate_html(source)

    page = source.with_suffix(".html").read_text(encoding="utf-8")
    assert "1 of 2 groups are tokenized from text" in page
    assert create_html_for_group(marked, 0).count("tokenized from text") == 1
    assert "tokenized from text" not in create_html_for_group(NESTED, 0)


def test_heading_has_step_and_question_and_groups_that_differ_come_first(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "1 + 1\n<b>?</b>"}]
    groups = [
        {"messages": [chat, chat], "scores": [1.0, 1.0], "policy_version": 3},
        {"messages": [chat, chat], "scores": [1.0, 0.0], "step": 12, "policy_version": 3},
    ]
    source = tmp_path / "groups.jsonl"
    source.write_text("".join(json.dumps(group) + "\n" for group in groups))

    generate_html(source)

    markup = source.with_suffix(".html").read_text()
    about = '<span class="about">step {}: 1 + 1 &lt;b&gt;?&lt;/b&gt;</span></summary>'
    second, first = (markup.index(f"Group {i}" + about.format(s)) for i, s in ((1, 12), (0, 3)))
    assert second < first
