"""The tests of exact tokens over vLLM, run over the torch engine."""

import pytest

from tests.end_to_end.test_vllm_exact_tokens import (  # noqa: F401
    manager,
    test_chat_and_text_routes_answer_through_the_openai_client,
    test_chat_without_a_limit_may_fill_the_context,
    test_penalties_and_limits_of_tokens_change_the_logits_by_their_formulas,
    test_prompt_beyond_the_context_raises_once_and_names_the_lengths,
    test_prompt_logprobs_equal_a_forward_pass,
    test_single_turn_tokens_and_raw_logprobs_equal_a_forward_pass,
    test_stop_string_and_token_limit_set_the_finish_reason,
    test_three_turns_stay_one_sequence_of_the_engines_own_tokens,
)

pytestmark = pytest.mark.slow
