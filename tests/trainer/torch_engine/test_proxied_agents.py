"""The tests of agents behind the proxy, run over the torch engine."""

import pytest

from tests.end_to_end.test_proxy_dialects import (  # noqa: F401
    manager,
    test_required_tool_is_called_and_its_tokens_are_the_engines,
    test_tool_loop_is_one_sequence_of_the_engines_own_tokens,
)

pytestmark = pytest.mark.slow
