"""Formats with tokens of their own read what they write, and what vLLM's parsers read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atroposlib.envs.server_handling.tool_call_translator import ToolCallTranslator
from atroposlib.envs.server_handling.tool_formats import FunctionCall, ToolCallFormat, registry
from atroposlib.envs.server_handling.vllm_tool_format import open_vllm_format
from tests.growth import assert_linear
from tests.server_handling.tool_call_samples import CALLS, SEARCH, TEXTS, VALUES
from tests.templates.make_tokenizers import Family, load_tokenizer, save_tokenizer

pytestmark = pytest.mark.slow

Calls = list[tuple[str, Any]]

BAR, SPACE = "\uff5c", "\u2581"


def deepseek(name: str) -> str:
    return f"<{BAR}{name.replace(' ', SPACE)}{BAR}>"


BEGIN, END, SEP = (deepseek(f"tool {name}") for name in ("call begin", "call end", "sep"))
DEEPSEEK_V3 = (
    f"{deepseek('tool calls begin')}"
    f'{BEGIN}function{SEP}search\n```json\n{{"query": "cats"}}\n```{END}\n'
    f'{BEGIN}function{SEP}search\n```json\n{{"query": "dogs"}}\n```{END}'
    f"{deepseek('tool calls end')}"
)
DEEPSEEK_V31 = (
    f"{deepseek('tool calls begin')}"
    f'{BEGIN}search{SEP}{{"query": "cats"}}{END}{BEGIN}search{SEP}{{"query": "dogs"}}{END}'
    f"{deepseek('tool calls end')}"
)
KIMI = (
    "<|tool_calls_section_begin|>"
    '<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "cats"}'
    "<|tool_call_end|>"
    '<|tool_call_begin|>functions.search:1<|tool_call_argument_begin|>{"query": "dogs"}'
    "<|tool_call_end|><|tool_calls_section_end|>"
)
GLM = (
    "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>cats</arg_value>\n</tool_call>\n"
    "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>dogs</arg_value>\n</tool_call>"
)
PYTHON = "[search(query=\"cats\"), search(query='dogs')]"
LISTED = json.dumps(
    [{"name": "search", "arguments": {"query": query}} for query in ("cats", "dogs")]
)
SAMPLES = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "kimi_k2": KIMI,
    "glm45": GLM,
    "glm47": GLM.replace("\n<arg", "<arg"),
    "pythonic": PYTHON,
    "llama4_pythonic": f"<|python_start|>{PYTHON}<|python_end|>",
    "lfm2": f"<|tool_call_start|>{PYTHON}<|tool_call_end|>",
    "olmo3": "<function_calls>\nsearch(query='cats')\nsearch(query='dogs')\n</function_calls>",
    "jamba": f"<tool_calls>{LISTED}</tool_calls>",
    "hunyuan_a13b": f"<tool_calls>{LISTED}</tool_calls>",
    "phi4_mini_json": f"functools{LISTED}",
    "granite": f"<|tool_call|>{LISTED}",
    "granite4": "\n".join(
        f"<tool_call>{json.dumps(each)}</tool_call>" for each in json.loads(LISTED)
    ),
    "ernie45": "".join(
        f"<tool_call>\n{json.dumps(each)}\n</tool_call>\n" for each in json.loads(LISTED)
    ),
}
"""Two calls of `search` as the models of each name write them."""
TOKENS = (
    "<|end|>", deepseek("tool calls begin"), deepseek("tool calls end"), BEGIN, END, SEP,
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_end|>", "<|tool_call_argument_begin|>", "<tool_call>", "</tool_call>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|python_start|>", "<|python_end|>",
    "<|tool_call_start|>", "<tool_calls>", "</tool_calls>", "<|tool_call|>", "<think>", "</think>",
    "<minimax:tool_call>", "</minimax:tool_call>", "<|action_start|>", "<|plugin|>",
    "<|action_end|>", "<seed:tool_call>", "</seed:tool_call>", "<response>", "</response>",
)  # fmt: skip
EXPECTED = [("search", {"query": "cats"}), ("search", {"query": "dogs"})]
JSON_NAMES = ["deepseek_v3", "deepseek_v31", "kimi_k2", "jamba", "phi4_mini_json", "granite"]
PYTHON_NAMES = ["pythonic", "llama4_pythonic", "lfm2", "olmo3"]
ALL_NAMES = [*SAMPLES, "internlm"]


def format_of(name: str) -> ToolCallFormat:
    found = registry.find(name)
    assert found is not None
    return found


def read(name: str, text: str, tools: list[Any] | None = None) -> Calls:
    found = format_of(name).find_calls(text, 0, tools or [SEARCH])
    return [(call.name, json.loads(call.arguments)) for call in found]


def write(name: str, calls: Calls) -> str:
    return format_of(name).render(
        [FunctionCall(name=called, arguments=json.dumps(given)) for called, given in calls]
    )


ALONE = ("pythonic", "llama4_pythonic")
"""Their models write calls without a text before them."""


@pytest.mark.parametrize(
    ("name", "before"),
    [(name, "") for name in SAMPLES]
    + [(name, "Let me look.\n") for name in SAMPLES if name not in ALONE],
)
def test_what_models_write_is_read(name: str, before: str) -> None:
    for end in ("", "<|im_end|>", "\n"):
        found = format_of(name).find_calls(f"{before}{SAMPLES[name]}{end}", 0, [SEARCH])
        assert [(call.name, json.loads(call.arguments)) for call in found] == EXPECTED
        assert found[0].start == len(before)


@pytest.mark.parametrize("name", [*JSON_NAMES, "internlm"])
@settings(max_examples=40)
@given(calls=CALLS, before=TEXTS)
def test_any_calls_written_are_read_back(name: str, calls: Calls, before: str) -> None:
    text = write(name, calls)

    assert read(name, text) == calls
    assert format_of(name).find_calls(before + text, 0, [])[0].start == len(before)


@pytest.mark.parametrize("name", PYTHON_NAMES)
@settings(max_examples=40)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["search", "a.b", "_x1"]), st.dictionaries(TEXTS, VALUES, max_size=4)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_calls_written_as_python_are_read_back(name: str, calls: Calls) -> None:
    text = write(name, calls)
    assume(
        not any(mark in json.dumps(calls) for mark in ("<|tool_call_end|>", "</function_calls>"))
    )

    assert read(name, text) == calls


WITHOUT_TAGS = TEXTS.map(lambda text: text.replace("<", ""))


@settings(max_examples=40)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["f", "g.h"]),
            st.dictionaries(WITHOUT_TAGS.map(str.strip), WITHOUT_TAGS),
        ),
        min_size=1,
    )
)
def test_elements_of_glm_keep_texts(calls: Calls) -> None:
    assert read("glm45", write("glm45", calls)) == calls


def test_values_of_glm_take_types_from_the_schema() -> None:
    kinds = {"count": "integer", "rows": "array", "flag": "boolean", "text": "string"}
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    arguments = {"count": 3, "rows": [1, "a"], "flag": True, "text": "5", "other": "7"}

    assert read("glm45", write("glm45", [("f", arguments)]), tools) == [("f", arguments)]


MARKS = st.sampled_from(
    [
        *TOKENS,
        *("functools", "[", "]", "{}", '{"name": "f", "arguments": {}}', "f()", "f(a=", "'", "\n"),
        *(
            "functions.f:0",
            "function",
            "```json\n",
            "```",
            "f\n",
            "<function_calls>",
            ":1",
            "-" * 9,
        ),
        "</function_calls>",
    ]
)


@pytest.mark.parametrize("name", ALL_NAMES)
@settings(max_examples=60)
@given(text=st.lists(MARKS | TEXTS, max_size=30).map("".join), start=st.integers(0, 5))
def test_no_text_raises_and_found_calls_are_usable(name: str, text: str, start: int) -> None:
    for call in format_of(name).find_calls(text, start, [SEARCH, None, {"function": 3}]):
        assert call.name
        assert isinstance(json.loads(call.arguments), dict)
        assert start <= call.start < call.end <= len(text)
        call.arguments.encode()


@pytest.mark.parametrize("name", ALL_NAMES)
@settings(max_examples=40)
@given(calls=CALLS, data=st.data())
def test_cut_calls_never_raise(name: str, calls: Calls, data: st.DataObject) -> None:
    text = write(name, calls)

    read(name, text[: data.draw(st.integers(0, len(text)))])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deepseek_v3", DEEPSEEK_V3.replace('"dogs"}', '"dogs"')),
        ("deepseek_v31", f"{BEGIN}search{SEP}[1]{END}"),
        ("kimi_k2", KIMI.replace(":1", "")),
        ("glm45", "<tool_call>search\n<arg_key>query</arg_key>\ncats</tool_call>"),
        ("glm45", "<tool_call>search\n<arg_key>query</arg_key><arg_value>cats</tool_call>"),
        ("glm45", "<tool_call>search and"),
        ("pythonic", "search(query=1)"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[search(1)]"),
        ("pythonic", "[search(query=open('x'))]"),
        ("pythonic", "[search(query=1), other]"),
        ("pythonic", "[search(query={1, 2})]"),
        ("pythonic", "[search(query=1)] and"),
        ("pythonic", "[search(query=1e999)]"),
        ("pythonic", f"[f(a={'-' * 100_000}1)]"),
        ("pythonic", f"[f(a={'[' * 10_000})]"),
        ("pythonic", f"[{'a.' * 50_000}f(b=1)]"),
        ("lfm2", PYTHON),
        ("jamba", '<tool_calls>[{"name": "f"}, 3]</tool_calls>'),
        ("jamba", f"<tool_calls>{LISTED} and"),
        ("phi4_mini_json", "functools.wraps and functools"),
    ],
)
def test_broken_calls_are_none_at_all(name: str, text: str) -> None:
    assert read(name, text) == []


@pytest.mark.parametrize(
    ("start", "repeated", "end"),
    [
        ("", BEGIN * 200, ""),
        (f"{BEGIN}function{SEP}", "a" * 6_000, ""),
        (f"{BEGIN}", "a" * 6_000, ""),
        ("<|tool_call_begin|>functions.f", ":1" * 3_000, ""),
        ("<tool_call>", "a" * 6_000, ""),
        ("<tool_call>f", "<arg_key>" * 600, ""),
        ("<tool_call>f", "<arg_key>k</arg_key><arg_value>v</arg_value>" * 200, ""),
        ("<tool_call>f", "<arg_key>k</arg_key>" * 400, "<arg_value>"),
        ("[", "f(a=1)," * 400, "]"),
        ("", "<tool_calls>" * 500, ""),
        ("<tool_calls>", "[" * 6_000, ""),
        ("", "functools[" * 600, ""),
        ("<|tool_call_start|>", "<|" * 3_000, ""),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        "deepseek_v31",
        "kimi_k2",
        "glm45",
        "jamba",
        "lfm2",
        "pythonic",
        "phi4_mini_json",
    ],
)
def test_hostile_text_takes_no_square_of_its_length(
    name: str, start: str, repeated: str, end: str
) -> None:
    found = format_of(name)

    assert_linear(lambda times: found.find_calls(start + repeated * times + end, 0, [SEARCH]))


def test_ids_that_the_model_wrote_are_those_of_the_calls() -> None:
    translator = ToolCallTranslator(load_tokenizer("chatml"), "kimi_k2")

    _, calls, reason = translator.parse_model_output(KIMI, "auto", [SEARCH])

    assert calls is not None
    assert [call.id for call in calls] == ["functions.search:0", "functions.search:1"]
    assert reason == "tool_calls"


@pytest.fixture(scope="module")
def vllm_format(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ToolCallFormat]:
    """Return the parsers of vLLM, with a tokenizer that has all tokens."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    from transformers import AutoTokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(Family(("<|end|>",), TOKENS[1:], "hermes"), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def opened(name: str) -> ToolCallFormat:
        found = open_vllm_format(name, tokenizer)
        assert found is not None
        return found

    return opened


@pytest.mark.parametrize("name", SAMPLES)
def test_parsers_of_vllm_read_the_same(
    vllm_format: Callable[[str], ToolCallFormat], name: str
) -> None:
    theirs = vllm_format(name).find_calls(SAMPLES[name], 0, [SEARCH])

    assert [(call.name, json.loads(call.arguments)) for call in theirs] == EXPECTED


MINIMAX = (
    'Let me look.<minimax:tool_call>\n<invoke name="search">\n'
    '<parameter name="query">cats</parameter>\n</invoke>\n</minimax:tool_call>'
)


def test_a_format_that_only_vllm_knows_is_read_by_its_parser(
    vllm_format: Callable[[str], ToolCallFormat],
) -> None:
    parser = vllm_format("minimax_m2")
    tokenizer = parser._tokenizer  # type: ignore[attr-defined]
    translator = ToolCallTranslator(tokenizer, "minimax_m2")
    assert translator.parser is ToolCallTranslator(tokenizer, "minimax_m2").parser

    content, calls, reason = translator.parse_model_output(MINIMAX, "auto", [SEARCH])

    assert calls is not None
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("search", '{"query": "cats"}')
    ]
    assert (content, reason) == ("Let me look.", "tool_calls")
    assert (
        translator.reconstruct_raw_text_from_tool_calls([call.model_dump() for call in calls])
        == MINIMAX
    )
    assert translator.parse_model_output("no call", "auto", [SEARCH]) == ("no call", None, "stop")


def test_names_that_vllm_does_not_know_and_tokenizers_without_the_tokens_are_refused(
    vllm_format: Callable[[str], ToolCallFormat], caplog: pytest.LogCaptureFixture
) -> None:
    assert open_vllm_format("no_such_format", load_tokenizer("chatml")) is None
    assert open_vllm_format("deepseek_v3", load_tokenizer("chatml")) is None
    assert "vLLM's tool parser 'deepseek_v3' cannot be used" in caplog.text


def test_a_parser_that_needs_token_ids_is_refused(
    vllm_format: Callable[[str], ToolCallFormat], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = vllm_format("minimax_m2")._tokenizer  # type: ignore[attr-defined]

    assert open_vllm_format("openai", tokenizer) is None
    assert "vLLM's tool parser 'openai' cannot be used" in caplog.text
