from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.envs.server_handling.proxy.requests import Thought, split_thinking, with_thinking


@pytest.mark.parametrize(
    ("completion", "thought"),
    [
        ("<think>\nhm\n</think>\n\nYes.", Thought("hm", "Yes.")),
        (" <think>a</think>b</think>", Thought("a", "b</think>")),
        ("hm</think> Yes.", Thought("hm", "Yes.")),  # the prompt opened it
        ("<think>hm", Thought("hm", "")),  # cut
        ("<think></think>Yes.", Thought("", "Yes.")),
        (" Yes. ", Thought(None, " Yes. ")),
        ("Yes. <think>hm</think>", Thought(None, "Yes. <think>hm</think>")),
        ("", Thought(None, "")),
    ],
)
def test_split_thinking_takes_only_what_comes_first(completion: str, thought: Thought) -> None:
    assert split_thinking(completion) == thought


@given(st.text("ab \n", min_size=1), st.text("ab \n"))
def test_thinking_written_back_splits_into_the_same_parts(thinking: str, text: str) -> None:
    written = with_thinking(thinking, text)

    assert split_thinking(written) == Thought(thinking.strip(), text.strip())
