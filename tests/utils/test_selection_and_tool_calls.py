import pytest

from atroposlib.utils.best_of_n_selection import select_best_index
from atroposlib.utils.tool_call_parser import extract_tool_call, parse_tool_call

TOOLS = [{"name": "search"}, {"type": "function", "function": {"name": "open"}}]


@pytest.mark.parametrize(
    ("primary", "secondary", "options", "expected"),
    [
        ([1, 2, 2], [5, 5, 4], {}, 2),
        ([1, 1], [1, 2], {"secondary_lower_is_better": False}, 1),
        ([3, 1], [0, 0], {"primary_higher_is_better": False}, 1),
        ([1, 1, 1], [2, 2, 2], {}, 0),
        ([7], [0], {}, 0),
    ],
)
def test_select_best_index(primary, secondary, options, expected):
    assert select_best_index(primary, secondary, **options) == expected


@pytest.mark.parametrize(("primary", "secondary"), [([], []), ([1], []), ([1], [1, 2])])
def test_select_best_index_needs_scores_of_both_kinds(primary, secondary):
    with pytest.raises(ValueError, match="at least one candidate"):
        select_best_index(primary, secondary)


@pytest.mark.parametrize(
    ("text", "tags", "expected"),
    [
        ("a <tool_call>\n x \n</tool_call> b <tool_call>y</tool_call>", None, "x"),
        ("<call>1</call><tool_call>2</tool_call>", ["call", "tool_call"], "1"),
        ("<tool_call>2</tool_call>", ["call", "tool_call"], "2"),
        ("<tool_call>open", None, None),
        ("<tool_call></tool_call>", None, ""),
    ],
)
def test_extract_tool_call(text, tags, expected):
    assert extract_tool_call(text, tags) == expected


def call(text: str) -> str:
    return f"thinking\n<tool_call>{text}</tool_call>"


@pytest.mark.parametrize(
    ("text", "tools", "expected"),
    [
        ('{"name": "search", "arguments": {"q": 1}}', TOOLS, ("search", {"q": 1}, False)),
        ('{"name": "open"}', TOOLS, ("open", {}, False)),
        ("{'name': 'search', 'arguments': {}}", TOOLS, ("search", {}, False)),
        (
            '{"name": "search", "arguments": {"q": "it\'s"}}',
            TOOLS,
            ("search", {"q": "it's"}, False),
        ),
        ('{"name": "search", "arguments": {"q": "a\nb"}}', None, ("search", {"q": "a\nb"}, False)),
        ('{"name": "other", "arguments": {"q": 1}}', TOOLS, ("-ERROR-", {"q": 1}, True)),
        ('{"arguments": 3}', TOOLS, ("-ERROR-", 3, True)),
        ('{"arguments": [3]}', None, ("", [3], False)),
        ('{"name": ["search"]}', TOOLS, ("-ERROR-", {}, True)),
        ("[1]", None, ("-ERROR-", {}, True)),
        ("{broken", None, ("-ERROR-", {}, True)),
        ("", None, ("-ERROR-", {}, True)),
        ("[" * 100_000, None, ("-ERROR-", {}, True)),
    ],
)
def test_parse_tool_call(text, tools, expected):
    assert parse_tool_call(call(text), tools) == expected


@pytest.mark.parametrize("response", ['{"name": "search"}', "", None])
def test_parse_tool_call_without_tags_is_an_error(response):
    assert parse_tool_call(response) == ("-ERROR-", {}, True)


def test_a_tag_that_is_repeated_and_never_closed_is_no_call():
    assert extract_tool_call("<tool_call>" * 100_000) is None
