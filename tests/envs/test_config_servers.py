"""One or several servers: every row of the table of `resolve_openai_configs`."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pydantic_cli import FailedExecutionException

from atroposlib.envs.server_handling.config import (
    APIServerConfig,
    ServerBaseline,
    resolve_openai_configs,
)
from atroposlib.utils.cli import UsageError, merge_dicts

logger = logging.getLogger(__name__)

ONE = APIServerConfig(model_name="own", base_url="http://own/v1")
TWO = [ONE, APIServerConfig(model_name="second")]
BASELINE = ServerBaseline(model_name="base")
MAPPING = {"model_name": "yaml", "base_url": "http://yaml/v1"}
LISTED = [{"model_name": "a"}, {"base_url": "http://b/v1"}]
TYPED = {"model_name": "typed", "base_url": "http://typed/v1"}


def resolve(default: Any, yaml: Any = None, typed: dict[str, Any] | None = None) -> Any:
    """Merge the single server as the commands do, then decide."""
    single = default[0] if isinstance(default, list) and len(default) == 1 else default
    own = {} if isinstance(single, list) else single.model_dump()
    entries = yaml if isinstance(yaml, list) else [yaml or {}]
    merged = merge_dicts(own, entries[0] if len(entries) == 1 else {}, typed or {})
    flags = {f"openai.{name}": value for name, value in (typed or {}).items()}
    return resolve_openai_configs(
        default_server_configs=default,
        openai_config_dict=merged,
        yaml_config={} if yaml is None else {"openai": yaml},
        cli_passed_flags={"env.group_size": 1, **flags},
        logger=logger,
    )


@pytest.mark.parametrize("default", [[], [ONE], TWO, ONE, BASELINE])
def test_resolve_several_yaml_servers_are_taken_as_they_are(default: Any) -> None:
    resolved = resolve(default, LISTED)

    # What an entry leaves out takes the class default, not the environment's own value.
    assert resolved == [
        APIServerConfig(model_name="a"),
        APIServerConfig(base_url="http://b/v1"),
    ]


@pytest.mark.parametrize("default", [[], [ONE], TWO, ONE, BASELINE])
def test_resolve_several_yaml_servers_and_a_flag_are_refused(default: Any) -> None:
    with pytest.raises(FailedExecutionException) as caught:
        resolve(default, LISTED, TYPED)

    assert caught.value.exit_code == 2
    assert "several servers are configured" in caught.value.message


@pytest.mark.parametrize("yaml", [None, MAPPING, [MAPPING]])
def test_resolve_several_default_servers_and_a_flag_are_refused(yaml: Any) -> None:
    with pytest.raises(FailedExecutionException) as caught:
        resolve(TWO, yaml, TYPED)

    assert caught.value.exit_code == 2


@pytest.mark.parametrize("yaml", [MAPPING, [MAPPING]])
def test_resolve_several_default_servers_and_one_yaml_server_are_refused(yaml: Any) -> None:
    with pytest.raises(UsageError, match="this environment uses several; list all of them"):
        resolve(TWO, yaml)


@pytest.mark.parametrize("yaml", [None, {}, [{}], []])
def test_resolve_several_default_servers_alone_are_kept(yaml: Any) -> None:
    assert resolve(TWO, yaml) is TWO


@pytest.mark.parametrize("yaml", [MAPPING, [MAPPING]])
@pytest.mark.parametrize("as_list", [True, False])
def test_resolve_single_server_merges_yaml(yaml: Any, as_list: bool) -> None:
    resolved = resolve([ONE] if as_list else ONE, yaml)

    expected = APIServerConfig(**MAPPING)
    assert resolved == ([expected] if as_list else expected)


@pytest.mark.parametrize("yaml", [None, MAPPING, [MAPPING]])
@pytest.mark.parametrize("as_list", [True, False])
def test_resolve_single_server_flags_win(yaml: Any, as_list: bool) -> None:
    resolved = resolve([ONE] if as_list else ONE, yaml, TYPED)

    expected = APIServerConfig(**TYPED)
    assert resolved == ([expected] if as_list else expected)


@pytest.mark.parametrize("as_list", [True, False])
def test_resolve_single_server_alone_is_kept(as_list: bool) -> None:
    default: Any = [ONE] if as_list else ONE

    assert resolve(default) == default


def test_resolve_baseline_alone_is_kept() -> None:
    assert resolve(BASELINE) is BASELINE


@pytest.mark.parametrize(
    ("yaml", "typed"), [(MAPPING, None), ([MAPPING], None), (None, MAPPING), ({}, MAPPING)]
)
def test_resolve_baseline_with_a_url_becomes_one_server(yaml: Any, typed: Any) -> None:
    resolved = resolve(ServerBaseline(timeout=7), yaml, typed)

    assert resolved == APIServerConfig(timeout=7, **MAPPING)


@pytest.mark.parametrize(("yaml", "typed"), [({"model_name": "x"}, None), (None, {"timeout": 3})])
def test_resolve_baseline_with_its_own_fields_stays_a_baseline(yaml: Any, typed: Any) -> None:
    resolved = resolve(BASELINE, yaml, typed)

    assert type(resolved) is ServerBaseline
    assert resolved == ServerBaseline(**{"model_name": "base", **(yaml or {}), **(typed or {})})


def test_resolve_empty_list_alone_is_one_default_server() -> None:
    assert resolve([]) == [APIServerConfig()]


@pytest.mark.parametrize(("yaml", "typed"), [(MAPPING, None), ([MAPPING], None), (None, MAPPING)])
def test_resolve_empty_list_uses_overrides(yaml: Any, typed: Any) -> None:
    assert resolve([], yaml, typed) == [APIServerConfig(**MAPPING)]


def test_resolve_own_server_class_keeps_its_fields() -> None:
    class Own(APIServerConfig):
        region: str = "here"

    resolved = resolve([Own(region="there")], None, {"model_name": "x"})

    assert resolved == [Own(region="there", model_name="x")]


def test_resolve_default_of_unexpected_type_gives_one_server_and_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        resolved = resolve_openai_configs(
            default_server_configs="nonsense",
            openai_config_dict=MAPPING,
            yaml_config={},
            cli_passed_flags={},
            logger=logger,
        )

    assert resolved == [APIServerConfig(**MAPPING)]
    assert "config_init returned str" in caplog.text


def test_resolve_refused_value_names_the_entry() -> None:
    with pytest.raises(UsageError, match=r"openai\.1\.timeout: .*\(got 'soon'\)"):
        resolve([ONE], [{}, {"timeout": "soon"}])
