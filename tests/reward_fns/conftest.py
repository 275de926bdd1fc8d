from __future__ import annotations

from collections.abc import Iterator

import pytest

from atroposlib.envs.reward_fns import registry


@pytest.fixture
def own_registrations() -> Iterator[None]:
    """Forget what the test registers."""
    before = dict(registry._entries)
    yield
    registry._entries.clear()
    registry._entries.update(before)
