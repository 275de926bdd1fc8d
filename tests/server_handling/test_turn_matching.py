"""Which recorded sequence a request continues, and with which tokens; tables by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from atroposlib.envs.server_handling.turn_recording import (
    ChatRequest,
    Continuation,
    NodeRecord,
    NodeRecords,
    RecordedReply,
    RecordedTurns,
    SequenceNode,
    TurnEnd,
    continue_chat,
    continue_ids,
    digest,
    earlier_turns,
    make_node,
    matched_length,
    message_key,
)

END = 99
"""The token of an end of turn, absent from texts."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def keys(*messages: dict[str, Any]) -> list[str]:
    return [message_key(message) for message in messages]


def reply(text: str, calls: list[Any] | None = None, *, raw: str | None = None) -> RecordedReply:
    return RecordedReply(raw or text, text, calls, keeps_thinking=False)


def turns(*texts: str) -> RecordedTurns:
    """User and assistant in turn; the last text is the recorded reply."""
    roles = (user, assistant)
    earlier = [frozenset(keys(roles[i % 2](text))) for i, text in enumerate(texts[:-1])]
    return RecordedTurns(tuple(earlier), reply(texts[-1]), tools_key="t")


def end_of(text: str, num_tokens: int, conversation: RecordedTurns | None = None) -> TurnEnd:
    return TurnEnd(
        num_tokens=num_tokens, text_length=len(text), num_reply_ids=1, num_end_ids=1,
        hides_specials=True, end_text="", conversation=conversation, weight_version=None,
        metadata={"finish_reason": f"of {text}"},
    )  # fmt: skip


def node(text: str, *tokens: int) -> SequenceNode:
    ids = list(tokens) or [1]
    return SequenceNode(full_text=text, tokens=ids, masked_tokens=ids, logprobs=[-0.5] * len(ids))


@pytest.mark.parametrize(
    ("request_texts", "expected"),
    [
        (("a", "b"), 2),
        (("a", "b", "c"), 2),  # it goes on after the reply
        (("a",), 0),  # shorter than the conversation
        (("a", "x"), 0),  # another reply
        (("x", "b"), 0),  # another beginning
        ((), 0),
    ],
)
def test_matched_length_table(request_texts: tuple[str, ...], expected: int) -> None:
    roles = (user, assistant)
    messages = [roles[i % 2](text) for i, text in enumerate(request_texts)]

    assert matched_length(turns("a", "b"), keys(*messages)) == expected


def test_conversation_counts_its_reply() -> None:
    assert (turns("a", "b").num_turns, turns("a", "b", "c", "d").num_turns) == (2, 4)
    assert not turns("a", "b").has_thinking


def test_earlier_turns_are_the_recorded_then_the_added() -> None:
    added = keys(user("a"), assistant("b"), user("c"))
    parent = turns("a", "b")

    assert earlier_turns(None, added[:1]) == (frozenset(added[:1]),)
    assert earlier_turns(parent, added) == (
        *parent.earlier, parent.reply.keys, frozenset({added[2]}),
    )  # fmt: skip
    assert earlier_turns(parent, added[:1]) == parent.earlier  # it continues the reply itself


@pytest.mark.parametrize(
    ("tokens", "masks", "added", "expected"),
    [
        ([1, 7, END], [-100, 7, END], [END, 5], [1, 7, END, 5]),  # its end of turn only once
        ([1, 7, END], [-100, 7, END], [5], [1, 7, END, 5]),
        ([1, 7], [-100, 7], [END, 5], [1, 7, END, 5]),  # truncated: the prompt ends the turn
        ([1, 7, 98, END], [-100, 7, 98, END], [98, END, 5], [1, 7, 98, END, 5]),
        ([1, 7, 98, END], [-100, 7, 98, END], [END, 5], [1, 7, 98, END, 5]),
        ([1, 7, END], [-100, 7, -100], [END, 5], [1, 7, END, END, 5]),  # it was not sampled
        ([1, 7, END], [-100, 7, END], [], [1, 7, END]),
        ([1, 7], [-100, 7], [7, 5], [1, 7, 7, 5]),  # a token of the text is repeated
        ([1, END, END], [-100, END, END], [END, 5], [1, END, END, 5]),
        ([1, END, END], [-100, END, END], [END, END, 5], [1, END, END, 5]),  # the longest overlap
        ([1, 7, END], [-100, 7, END], [7, END, 5], [1, 7, END, 7, END, 5]),  # 7 is in the text
    ],
)
def test_continued_ids_table(
    tokens: list[int], masks: list[int], added: list[int], expected: list[int]
) -> None:
    before = SequenceNode(
        full_text="x", tokens=tokens, masked_tokens=masks, logprobs=[0.0] * len(tokens)
    )

    assert continue_ids(before, added, lambda token_id: token_id >= 98) == expected


def test_node_keeps_what_was_sampled_before_it() -> None:
    parent = SequenceNode(
        full_text="ab", tokens=[1, 7, 8], masked_tokens=[-100, 7, 8], logprobs=[1.0, -0.5, -0.25]
    )

    made = make_node(
        full_text="abc",
        prompt_ids=[1, 7, 8, 5],
        completion_ids=[6, END],
        completion_logprobs=[-0.75],
        finish_reason="stop",
        parent=parent,
        notes={"weight_versions": ["3"]},
    )

    assert made.tokens == [1, 7, 8, 5, 6, END]
    assert made.masked_tokens == [-100, 7, 8, -100, 6, END]
    assert made.logprobs == [1.0, -0.5, -0.25, 1.0, -0.75, 1.0]
    assert made.metadata == {"finish_reason": "stop", "weight_versions": ["3"]}
    assert made.full_text == "abc"


@pytest.mark.parametrize(
    ("prompt_ids", "masks"),
    [
        ([1, 7, 9, 5], [-100, 7, -100, -100, 6]),  # other tokens from the third on
        ([2, 7, 8], [-100, -100, -100, 6]),
        ([1, 7], [-100, 7, 6]),  # a part of the parent
    ],
)
def test_node_masks_what_differs_from_its_parent(prompt_ids: list[int], masks: list[int]) -> None:
    parent = SequenceNode(
        full_text="ab", tokens=[1, 7, 8], masked_tokens=[-100, 7, 8], logprobs=[1.0, -0.5, -0.25]
    )

    made = make_node(
        full_text="", prompt_ids=prompt_ids, completion_ids=[6], completion_logprobs=[-1.0, -2.0],
        finish_reason="length", parent=parent,
    )  # fmt: skip

    assert made.masked_tokens == masks
    assert made.logprobs[-1] == -1.0
    assert len(made.logprobs) == len(made.tokens)
    assert made.metadata == {"finish_reason": "length"}


def test_node_without_a_parent_masks_its_prompt_and_takes_other_numbers() -> None:
    made = make_node(
        full_text="", prompt_ids=[1.0, 2], completion_ids=[3], completion_logprobs=["-0.5"],
        finish_reason="stop", parent=None,
    )  # fmt: skip

    assert (made.tokens, made.masked_tokens) == ([1, 2, 3], [-100, -100, 3])
    assert made.logprobs == [1.0, 1.0, -0.5]


def two_turns() -> NodeRecord:
    """The text `ab`, `a` and `ab` being its two ends."""
    tokens = node("ab", 1, 7, END, 5, 8, END)
    ends = (end_of("a", 3, turns("q", "a")), end_of("ab", 6, turns("q", "a", "r", "b")))
    return NodeRecord(tokens, ends)


def test_record_up_to_one_of_its_ends() -> None:
    record = two_turns()

    assert record.last is record.ends[1]
    assert NodeRecord(node("x")).last is None
    assert record.up_to(2) is record
    assert record.up_to(3) is record
    first = record.up_to(1)
    assert (first.node.full_text, first.node.tokens) == ("a", [1, 7, END])
    assert (first.node.masked_tokens, first.node.logprobs) == ([1, 7, END], [-0.5] * 3)
    assert (first.node.metadata, first.ends) == ({"finish_reason": "of a"}, record.ends[:1])


def found_text(records: NodeRecords, nodes: list[SequenceNode], prompt: str, **how: bool) -> Any:
    found = records.find_text(nodes, prompt, **how)
    return None if found is None else (found.record.node.full_text, found.added_text)


def test_text_continues_the_longest_prefix() -> None:
    records, record = NodeRecords(), two_turns()
    records.add(record)
    bare = node("a!")
    nodes = [bare, record.node]

    assert found_text(records, nodes, "abc") == ("ab", "c")
    assert found_text(records, nodes, "ac") == ("a", "c")  # up to its first end
    assert found_text(records, nodes, "a!c") == ("a!", "c")
    assert found_text(records, nodes, "ab") == ("ab", "")
    assert found_text(records, nodes, "b") is None
    assert found_text(records, [], "ab") is None
    assert found_text(records, nodes, "abc", only_bare=True) is None
    assert found_text(records, nodes, "a!c", only_bare=True) == ("a!", "c")


def test_first_of_equal_texts_wins_and_a_whole_sequence_before_a_part() -> None:
    records, record = NodeRecords(), two_turns()
    records.add(record)
    whole, again = node("a", 3), node("a", 4)

    found = [records.find_text(nodes, "ax") for nodes in ([whole, again], [record.node, whole])]

    assert [one.record.node for one in found if one is not None] == [whole, whole]
    assert not any(one.is_rerendered or one.is_same_reply for one in found if one is not None)


def test_records_of_other_nodes_are_forgotten() -> None:
    records, record = NodeRecords(), two_turns()
    records.add(record)
    other = NodeRecord(node("z"), (end_of("z", 1),))
    records.add(other)

    records.forget_others([record.node, node("bare")])

    assert found_text(records, [record.node], "ac") == ("a", "c")
    found = records.find_text([other.node], "z")
    assert found is not None
    assert found.record.ends == ()  # now bare text


def found_conversation(
    records: NodeRecords, nodes: list[SequenceNode], *messages: dict[str, Any], prompt: str = ""
) -> NodeRecord | None:
    return records.find_conversation(nodes, messages, keys(*messages), prompt)


def recorded(text: str, conversation: RecordedTurns) -> NodeRecord:
    return NodeRecord(node(text), (end_of(text, 1, conversation),))


def test_conversation_continues_the_longest_that_matches() -> None:
    records, record = NodeRecords(), two_turns()
    records.add(record)
    long = (user("q"), assistant("a"), user("r"), assistant("b"), user("s"))

    assert found_conversation(records, [record.node], *long) == record
    shorter = found_conversation(records, [record.node], *long[:2], user("other"))
    assert shorter is not None
    assert shorter.ends == record.ends[:1]
    assert found_conversation(records, [record.node], user("q"), assistant("x")) is None
    assert found_conversation(records, [node("bare")], *long) is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_conversation_prefers_the_reply_as_it_was_sent(order: tuple[int, int]) -> None:
    records = NodeRecords()
    spaced, plain = recorded("x", turns("q", " b ")), recorded("y", turns("q", "b"))
    for one in (spaced, plain):
        records.add(one)
    nodes = [(spaced.node, plain.node)[i] for i in order]

    assert found_conversation(records, nodes, user("q"), assistant("b")) == plain
    assert found_conversation(records, nodes, user("q"), assistant(" b ")) == spaced


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_conversation_prefers_the_ids_of_calls_then_the_prompt(order: tuple[int, int]) -> None:
    def call(id_: str) -> dict[str, Any]:
        return {"id": id_, "type": "function", "function": {"name": "f", "arguments": "{}"}}

    records = NodeRecords()
    both = [
        recorded(text, RecordedTurns(turns("q", "").earlier, reply("", [call(text)]), "t"))
        for text in ("x", "y")
    ]
    for one in both:
        records.add(one)
    nodes = [both[i].node for i in order]

    for one in both:
        message = assistant("") | {"tool_calls": [call(one.node.full_text)]}
        assert found_conversation(records, nodes, user("q"), message, prompt="x") == one
    unknown = assistant("") | {"tool_calls": [call("z")]}
    for one in both:
        prompt = one.node.full_text + " and more"
        assert found_conversation(records, nodes, user("q"), unknown, prompt=prompt) == one


def test_first_of_equal_conversations_wins() -> None:
    records = NodeRecords()
    both = [recorded("x", turns("q", "b")) for _ in range(2)]
    for one in both:
        records.add(one)

    found = found_conversation(records, [one.node for one in both], user("q"), assistant("b"))

    assert found is not None
    assert found.node is both[0].node


@pytest.mark.parametrize(
    ("said", "content", "expected"),
    [
        ("why</think> ok", "why</think> ok", 4),
        (" ok\n", "ok", 3),
        ("why</think> ok", " ok", 2),
        ("why</think>\n\n", "\n\n", 2),
        ("why</think> ok", "why</think> ok ", 1),
        ("", "\n\n", 1),
        ("<think></think><think>", "", 1),
        ("why</think> ok", "no", 0),
    ],
)
def test_likeness_table(said: str, content: str, expected: int) -> None:
    assert reply(said).likeness(content) == expected


def test_reply_with_calls_may_come_back_without_its_text() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    sent = assistant("") | {"tool_calls": [call]}
    other = assistant("other") | {"tool_calls": [call]}

    recorded_reply = reply("Look: ", [call], raw="Look: <tool_call>")

    assert recorded_reply.call_ids == ("a",)
    assert message_key(sent) in recorded_reply.keys
    assert message_key(other) not in recorded_reply.keys
    assert message_key(assistant("Look: <tool_call>")) in recorded_reply.keys
    assert message_key(assistant("")) not in reply("text").keys
    assert message_key(assistant("raw")) in reply("text", raw="raw").keys


def test_digest_depends_on_values_only() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})
    assert len(digest([])) == 32


def written(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> str:
    """A template: `u:question|a:answer|a:`."""
    return "".join(f"{each['role'][0]}:{each['content']}|" for each in messages) + "a:"


def continued(
    end_text: str, *messages: dict[str, Any], thinks: bool = False, strips: bool = False
) -> Continuation | None:
    """Continue the recorded chat `u:q|a:b`, whose turn ended with the given text."""
    turn = replace(turns("q", "b"), tools_key="", has_thinking=thinks)
    record = NodeRecord(node("u:q|a:b"), (replace(end_of("u:q|a:b", 1, turn), end_text=end_text),))
    records = NodeRecords()
    records.add(record)
    request = ChatRequest.of(messages, None, written)
    return continue_chat(records, [record.node], request, written, strips_thinking=strips)


@pytest.mark.parametrize(
    ("end_text", "sent", "added_text", "is_rerendered"),
    [
        ("|", "b", "|u:r|a:", False),  # the turn ended with the end of the template
        ("", "b", "|u:r|a:", False),  # without an end, for example at the limit of tokens
        ("!", "b", "|u:r|a:", True),  # with another end, which is kept
        ("", "b ", "|u:r|a:", True),  # the prompt is still within the turn as it was sent
        ("!", "b ", "|u:r|a:", True),
    ],
)
def test_chat_goes_on_after_the_end_of_its_turn(
    end_text: str, sent: str, added_text: str, is_rerendered: bool
) -> None:
    found = continued(end_text, user("q"), assistant(sent), user("r"))

    assert found is not None
    assert (found.added_text, found.is_rerendered) == (added_text, is_rerendered)
    assert found.record.node.full_text == "u:q|a:b"


@pytest.mark.parametrize(("thinks", "strips"), [(True, True), (True, False), (False, True)])
def test_thinking_that_a_template_may_drop_starts_a_new_sequence(
    thinks: bool, strips: bool
) -> None:
    chat = (user("q"), assistant("b "), user("r"))

    found = continued("!", *chat, thinks=thinks, strips=strips)

    assert (found is None) == (thinks and strips)


def test_partial_reply_is_part_of_what_is_added() -> None:
    for end_text in ("", "!"):
        found = continued(end_text, user("q"), assistant("b"), user("r"), assistant("so"))

        assert found is not None
        assert found.added_text == "|u:r|a:so"
