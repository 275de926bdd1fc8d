from __future__ import annotations

from types import SimpleNamespace

import pytest

from atroposlib.envs.server_handling.config import (
    VALID_REASONING_EFFORTS,
    APIServerConfig,
    ReasoningConfig,
)
from atroposlib.envs.server_handling.openai_server import OpenAIServer

OPENAI = "https://api.openai.com/v1"
OPENROUTER = "https://openrouter.ai/api/v1"


def test_default_is_off_and_adds_nothing() -> None:
    config = ReasoningConfig()

    assert (config.enabled, config.effort, config.max_tokens) == (False, None, None)
    assert not config.is_reasoning_kwargs_active()
    assert config.build_extra_body() is None


@pytest.mark.parametrize(
    ("config", "openrouter", "openai"),
    [
        (ReasoningConfig(enabled=True), {"enabled": True}, "medium"),
        (ReasoningConfig(effort="high"), {"enabled": True, "effort": "high"}, "high"),
        (ReasoningConfig(max_tokens=4096), {"enabled": True, "max_tokens": 4096}, "medium"),
        (
            ReasoningConfig(enabled=True, effort="xhigh", max_tokens=8192),
            {"enabled": True, "effort": "xhigh"},
            "xhigh",
        ),
        (ReasoningConfig(max_tokens=500), {"enabled": True, "max_tokens": 500}, "medium"),
        (ReasoningConfig(max_tokens=128000), {"enabled": True, "max_tokens": 128000}, "medium"),
        (ReasoningConfig(effort="none"), {"enabled": True, "effort": "none"}, "none"),
    ],
)
def test_body_follows_the_provider(
    config: ReasoningConfig, openrouter: dict[str, object], openai: str
) -> None:
    assert config.is_reasoning_kwargs_active()
    assert config.build_extra_body(OPENROUTER) == {"reasoning": openrouter}
    assert config.build_extra_body(OPENAI) == {"reasoning_effort": openai}


@pytest.mark.parametrize("effort", sorted(VALID_REASONING_EFFORTS))
def test_effort_passes_unchanged_and_maps_to_tokens(effort: str) -> None:
    config = ReasoningConfig(effort=effort)

    limit = ReasoningConfig.EFFORT_TO_MAX_TOKENS[effort]
    assert config.build_extra_body(OPENAI) == {"reasoning_effort": effort}
    assert config.build_extra_body(use_max_tokens=True) == {
        "reasoning": {"enabled": True, "max_tokens": limit}
    }


def test_unknown_effort_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid reasoning_effort"):
        ReasoningConfig(effort="invalid")


def test_env_config_without_the_fields_is_off() -> None:
    assert ReasoningConfig.from_env_config(SimpleNamespace()) == ReasoningConfig()


def test_env_config_fields_are_read() -> None:
    env_config = SimpleNamespace(
        thinking_mode=True, reasoning_effort="high", max_reasoning_tokens=8000
    )

    config = ReasoningConfig.from_env_config(env_config)

    assert config == ReasoningConfig(enabled=True, effort="high", max_tokens=8000)


def inject(base_url: str, reasoning: ReasoningConfig | None, **kwargs: object) -> dict[str, object]:
    server = OpenAIServer(APIServerConfig(base_url=base_url, api_key="k"), reasoning)
    return server._inject_reasoning_kwargs(kwargs)


def test_injection_keeps_other_extra_fields_and_wins_over_equal_ones() -> None:
    kwargs = inject(
        OPENROUTER,
        ReasoningConfig(effort="low"),
        extra_body={"provider": "x", "reasoning": {"enabled": False}},
    )

    assert kwargs == {
        "extra_body": {"provider": "x", "reasoning": {"enabled": True, "effort": "low"}}
    }


def test_injection_for_openai_fixes_temperature_and_renames_the_limit() -> None:
    kwargs = inject(OPENAI, ReasoningConfig(effort="low"), temperature=0.2, max_tokens=9)

    assert kwargs == {
        "extra_body": {"reasoning_effort": "low"},
        "temperature": 1.0,
        "max_completion_tokens": 9,
    }


def test_injection_knows_the_official_endpoint_when_no_url_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)

    kwargs = inject("", ReasoningConfig(effort="low"))

    assert kwargs["extra_body"] == {"reasoning_effort": "low"}


def test_injection_without_reasoning_changes_nothing() -> None:
    assert inject(OPENAI, None, max_tokens=3) == {"max_tokens": 3}
