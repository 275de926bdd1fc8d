from __future__ import annotations

import pytest
from pydantic import ValidationError

from atroposlib.envs.server_handling import openai_server, server_baseline, server_manager
from atroposlib.envs.server_handling.config import (
    APIServerConfig,
    OpenaiConfig,
    ServerBaseline,
    ServerManagerConfig,
)


def test_defaults_are_those_of_the_contract() -> None:
    assert ServerBaseline().model_dump() == {
        "timeout": 1200,
        "num_max_requests_at_once": 512,
        "num_requests_for_eval": 64,
        "model_name": "default",
        "rolling_buffer_length": 1000,
        "server_type": "openai",
        "tokenizer_name": "none",
    }
    assert APIServerConfig().model_dump() == {
        **ServerBaseline().model_dump(),
        "api_key": "",
        "base_url": "",
        "n_kwarg_is_ignored": False,
        "health_check": True,
        "startup_timeout": 600.0,
    }
    assert ServerManagerConfig().model_dump() == {
        "slurm": False,
        "testing": False,
        "max_n_completions": 8,
        "proxy_url": None,
    }


def test_openai_config_is_the_same_class_wherever_it_is_imported_from() -> None:
    assert OpenaiConfig is APIServerConfig
    assert openai_server.OpenaiConfig is APIServerConfig
    assert server_manager.OpenaiConfig is APIServerConfig
    semaphore = server_baseline.AsyncSemWithAdaptiveWeight
    assert openai_server.AsyncSemWithAdaptiveWeight is semaphore


@pytest.mark.parametrize("empty", ["", None])
def test_empty_key_and_url_count_as_not_set(empty: str | None) -> None:
    config = APIServerConfig(api_key=empty, base_url=empty)

    assert config.known_base_url is None
    assert config.key_for_client is None


def test_server_with_a_url_and_no_key_gets_a_dummy_key() -> None:
    config = APIServerConfig(base_url="http://localhost:9001/v1")

    assert config.key_for_client == "x"


def test_key_is_not_in_the_printed_config() -> None:
    assert "sk-secret" not in repr(APIServerConfig(api_key="sk-secret"))  # pragma: allowlist secret


def test_unknown_fields_are_ignored_and_unknown_engines_refused() -> None:
    assert APIServerConfig(weight=1.0).timeout == 1200  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        APIServerConfig(server_type="other")  # type: ignore[arg-type]
