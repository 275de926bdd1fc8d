"""Names that programs import from the service, and what tools see on `app.state`."""

from __future__ import annotations

import inspect

import pytest

import atroposlib.api
import atroposlib.api.server as server
import atroposlib.api.utils as utils
from atroposlib.cli import run_api
from atroposlib.scored_data import GROUP_FIELDS
from tests.api.helpers import Service

ROUTES = {
    "root": "/",
    "register": "/register",
    "register_env_url": "/register-env",
    "disconnect_env": "/disconnect-env",
    "wandb_info": "/wandb_info",
    "info": "/info",
    "get_batch": "/batch",
    "get_latest_example": "/latest_example",
    "scored_data": "/scored_data",
    "scored_data_list": "/scored_data_list",
    "get_status": "/status",
    "get_status_env": "/status-env",
    "reset_data": "/reset_data",
}


def test_api_exports_the_app_of_the_server():
    assert atroposlib.api.__all__ == ["app"]
    assert atroposlib.api.app is server.app
    assert server.app.title == "AtroposLib API"


def test_api_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = atroposlib.api.nothing


@pytest.mark.parametrize(("name", "path"), ROUTES.items())
def test_route_functions_are_coroutines_behind_their_paths(name, path):
    function = getattr(server, name)

    assert inspect.iscoroutinefunction(function)
    assert path in server.app.openapi()["paths"]


def test_models_have_the_fields_of_the_contract():
    assert server.MIN_ENV_WEIGHT == 0.01
    assert server.logger.name == "atroposlib.api.server"
    assert server.Info().batch_size == -1
    assert set(server.Status.model_fields) == {"current_step", "queue_size"}
    assert set(server.EnvIdentifier.model_fields) == {"env_id"}
    assert set(server.RegisterEnv.model_fields) == {
        "max_token_length",
        "desired_name",
        "weight",
        "group_size",
        "min_batch_allocation",
        *("env_id", "run_id"),  # ours: a registration that outlives a consumer
    }


def test_scored_data_becomes_a_dictionary_of_fourteen_keys():
    group = server.ScoredData(tokens=[[1]], masks=[[1]], scores=[1])

    assert server._scored_data_to_dict(group) == {
        **{field.name: None for field in GROUP_FIELDS if not field.is_note},
        "tokens": [[1]],
        "masks": [[1]],
        "scores": [1.0],
    }
    assert list(server.ScoredData.model_fields) == [field.name for field in GROUP_FIELDS]


async def test_process_scored_data_answers_like_the_route():
    await server.app.state.run.reset()

    answer = await server._process_scored_data(
        server.ScoredData(tokens=[[1]], masks=[[1]], scores=[1])
    )

    assert answer == {"status": "received"}
    assert len(server.app.state.queue) == 1
    await server.app.state.run.reset()


def test_utils_has_the_three_queue_functions():
    assert {
        name: list(inspect.signature(getattr(utils, name)).parameters) for name in utils.__all__
    } == {
        "find_groups_summing_to_target": ["buffer", "target_size"],
        "grab_batch_with_minimum_allocations": ["queue", "batch_size", "env_configs"],
        "grab_exact_from_heterogeneous_queue": ["queue", "batch_size"],
    }


def test_run_api_main_takes_no_arguments():
    assert not inspect.signature(run_api.main).parameters


def test_app_state_shows_the_run_under_the_known_names():
    service = Service()
    state = service.app.state
    assert (state.batchsize, state.group, state.started, state.latest) == (-1, None, False, None)
    assert (state.num_steps, state.save_checkpoint_interval, state.checkpoint_dir) == (-1, -1, "")

    service.start(starting_step=2)
    service.register_env(group_size=4, desired_name="e")
    service.push(4, 1, env_id=0)

    assert (state.batchsize, state.group, state.project) == (32, "test", "test")
    assert (state.started, state.status_dict, state.max_token_len) == (True, {"step": 2}, 512)
    assert [group.num_sequences for group in state.queue] == [4]
    assert [group.num_sequences for group in state.buffer[0]] == [1]
    assert (state.curr_batch, len(state.requesters)) == ([], 1)
    env = state.envs[0]
    assert (env["registered_id"], env["real_name"], env["group_size"]) == (0, "e_0", 4)
    assert state.latest == state.queue[0]
