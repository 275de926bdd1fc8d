"""Every route of the trajectory API: requests, answers and state, as the contract has them."""

from __future__ import annotations

import uuid

import pytest

from tests.api.helpers import GROUP_KEYS, REGISTRATION, Service, make_group

pytestmark = pytest.mark.slow


@pytest.fixture
def service() -> Service:
    return Service()


def test_root_says_who_answers(service):
    assert service.get("/").json() == {"message": "AtroposLib API"}


def test_neutral_answers_before_anything_is_registered(service):
    assert service.get("/info").json() == {"batch_size": -1, "max_token_len": -1}
    assert service.status() == {"current_step": 0, "queue_size": 0}
    assert service.get("/wandb_info").json() == {"group": None, "project": None}
    assert service.get("/latest_example").json() == {
        "tokens": [],
        "masks": [],
        "scores": [],
        "advantages": [],
        "ref_logprobs": [],
        "generation_params": [],
        "inference_logprobs": [],
        "messages": [],
        "images": [],
    }
    assert service.get("/batch").json() == {
        "status": "error",
        "message": "Trainer not registered. Call /register first.",
        "batch": [],
    }


def test_register_answers_a_uuid_as_integer_and_stores_the_settings(service):
    answer = service.register(wandb_group="g", wandb_project="p", starting_step=7)

    assert uuid.UUID(int=answer.json()["uuid"]).version == 4
    assert service.get("/info").json() == {"batch_size": 32, "max_token_len": 512}
    assert service.get("/wandb_info").json() == {"group": "g", "project": "p"}
    assert service.get("/status").json()["current_step"] == 7


@pytest.mark.parametrize(
    ("field", "change"),
    [(field, "missing") for field in sorted(REGISTRATION)]
    + [(field, "null") for field in sorted(REGISTRATION) if not field.startswith("wandb_")],
)
def test_register_without_a_field_is_422(service, field, change):
    request = {**REGISTRATION, field: None}
    if change == "missing":
        del request[field]

    answer = service.post("/register", json=request)

    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", field]


def test_register_takes_null_for_names_of_weights_and_biases_as_no_name(service):
    answer = service.register(wandb_group=None, wandb_project=None)
    repeated = service.register(wandb_group="", wandb_project="")

    assert (answer.status_code, repeated.status_code) == (200, 200)
    assert service.get("/wandb_info").json() == {"group": "", "project": ""}


@pytest.mark.parametrize("batch_size", [0, -8, 1.5, 2**70])
def test_register_batch_size_out_of_range_is_422(service, batch_size):
    answer = service.register(batch_size=batch_size)

    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", "batch_size"]


def test_register_converts_numbers_laxly_and_ignores_unknown_fields(service):
    answer = service.register(batch_size="8", max_token_len=16.0, colour="blue")

    assert answer.status_code == 200
    assert service.get("/info").json() == {"batch_size": 8, "max_token_len": 16}


def test_register_twice_with_the_same_settings_continues_the_run(service):
    first = service.register().json()["uuid"]
    service.push(4)

    second = service.register(starting_step=99)

    assert second.status_code == 200
    assert second.json()["uuid"] != first
    assert service.status() == {"current_step": 0, "queue_size": 1}


def test_register_with_other_settings_is_409_naming_both_values(service):
    service.register()

    answer = service.register(batch_size=64)

    assert answer.status_code == 409
    assert "batch_size is 32, this request says 64" in answer.json()["detail"]
    assert service.get("/info").json()["batch_size"] == 32


def test_register_with_replace_changes_the_settings(service):
    service.register()

    answer = service.register(batch_size=64, starting_step=5, replace=True)

    assert answer.status_code == 200
    assert service.get("/info").json()["batch_size"] == 64
    assert service.get("/status").json()["current_step"] == 5


def test_register_after_early_data_initialises_and_keeps_the_data(service):
    service.push(4)

    service.register(batch_size=4)

    assert service.get("/info").json()["batch_size"] == 4
    assert service.take() == [0]


def test_register_env_waits_until_the_trainer_asks_for_a_batch(service):
    waiting = {"status": "wait for trainer to start"}
    assert service.register_env() == waiting
    service.register()
    assert service.register_env() == waiting

    service.get("/batch")

    assert service.register_env()["status"] == "success"


def test_batch_before_register_does_not_let_environments_in(service):
    service.get("/batch")
    service.register()

    assert service.register_env() == {"status": "wait for trainer to start"}


def test_register_env_answers_id_name_and_run_settings(service):
    service.start(starting_step=3)

    answers = [service.register_env(desired_name=name) for name in ("a", "b", "a")]

    assert len({answer.pop("run_id") for answer in answers}) == 1
    assert answers[0] == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "a_0",
        "checkpoint_dir": "/tmp/test",
        "starting_step": 3,
        "checkpoint_interval": 100,
        "num_steps": 1000,
    }
    assert [(a["env_id"], a["wandb_name"]) for a in answers] == [(0, "a_0"), (1, "b_0"), (2, "a_1")]


@pytest.mark.parametrize(
    "change",
    [
        {"group_size": 0},
        {"group_size": -4},
        {"min_batch_allocation": -0.1},
        {"desired_name": None},
        {"weight": "heavy"},
        {"max_token_length": 1.5},
    ],
)
def test_register_env_out_of_range_is_422(service, change):
    service.start()
    request = {"max_token_length": 10, "desired_name": "e", "weight": 1, **change}

    answer = service.post("/register-env", json=request)

    assert answer.status_code == 422


def test_register_env_accepts_an_allocation_above_one(service):
    service.start()

    assert service.register_env(min_batch_allocation=1.5)["status"] == "success"


def test_disconnect_env_takes_the_environment_out_of_the_weights(service):
    service.start()
    for _ in range(2):
        service.register_env()

    answer = service.post("/disconnect-env", json={"env_id": 1})

    assert answer.json() == {"status": "success"}
    assert service.status_env(0).json()["env_weight"] == 1.0


@pytest.mark.parametrize("env_id", [-1, 0, 10**30])
def test_disconnect_env_unknown_id_is_a_failure(service, env_id):
    answer = service.post("/disconnect-env", json={"env_id": env_id})

    if env_id > 2**63:
        assert answer.status_code == 422
    else:
        assert answer.status_code == 200
        assert answer.json()["status"] == "failure"
        assert str(env_id) in answer.json()["error"]


def test_scored_data_is_received_and_delivered_with_fourteen_keys(service):
    service.register(batch_size=2)
    assert service.push(2) == [{"status": "received"}]

    (group,) = service.get("/batch").json()["batch"]

    assert set(group) == GROUP_KEYS
    assert group["tokens"] == [[0], [0]]
    assert all(group[key] is None for key in GROUP_KEYS - {"tokens", "masks", "scores"})


def test_scored_data_list_processes_in_order(service):
    service.register(batch_size=3)
    groups = [make_group(1, score=score) for score in (5, 6, 7)]

    answer = service.post("/scored_data_list", json=groups)

    assert answer.json() == {"status": "received", "groups_processed": 3}
    assert service.take() == [5, 6, 7]


def test_scored_data_list_empty_is_received(service):
    answer = service.post("/scored_data_list", json=[])

    assert answer.json() == {"status": "received", "groups_processed": 0}


def test_scored_data_list_reports_buffered_groups(service):
    service.start()
    env_id = service.register_env(group_size=4)["env_id"]
    groups = [make_group(n, env_id=env_id) for n in (4, 1, 2)]

    answer = service.post("/scored_data_list", json=groups)

    assert answer.json() == {
        "status": "received",
        "groups_processed": 3,
        "buffered": 2,
        "last_buffer_size": 3,
    }


def test_scored_data_list_with_one_malformed_group_stores_nothing(service):
    answer = service.post("/scored_data_list", json=[make_group(1), {"tokens": [[1]]}])

    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", 1, "masks"]
    assert service.get("/status").json()["queue_size"] == 0


def test_latest_example_is_the_group_queued_last(service):
    service.push(1, 2)

    latest = service.get("/latest_example").json()

    assert set(latest) == GROUP_KEYS
    assert latest["scores"] == [1, 1]


def test_latest_example_shows_released_groups_but_not_buffered_ones(service):
    service.start()
    env_id = service.register_env(group_size=8)["env_id"]
    service.push(3, 2, env_id=env_id)
    assert service.get("/latest_example").json()["tokens"] == []

    service.push(5, env_id=env_id)

    # 3 and 5 leave together; the last of the two was posted last, scored 0 as the first of its push
    assert len(service.get("/latest_example").json()["tokens"]) == 5


def test_status_env_tells_runs_apart_in_which_ids_are_given_anew(service):
    service.start()
    first = service.register_env()
    service.get("/reset_data")
    service.start()
    second = service.register_env()

    assert first["env_id"] == second["env_id"] == 0
    assert service.status_env(0).json()["run_id"] == second["run_id"] != first["run_id"]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_status_env_takes_the_id_in_the_body(service, method):
    service.start()
    env = service.register_env(group_size=4)

    answer = service.request(method, "/status-env", json={"env_id": 0})

    assert answer.json() == {
        "run_id": env["run_id"],
        "current_step": 0,
        "queue_size": 0,
        "unallocated_fraction": 1.0,
        "self_queue_size": 0,
        "max_group_size": 1,
        "env_weight": 1.0,
        "groups_to_start": None,
        "policy_version": None,
    }


def test_status_env_takes_the_id_as_query_parameter(service):
    service.start()
    service.register_env()

    assert service.get("/status-env?env_id=0").status_code == 200


@pytest.mark.parametrize("env_id", [-1, 0, 5])
def test_status_env_unknown_id_is_404(service, env_id):
    answer = service.status_env(env_id)

    assert answer.status_code == 404
    assert "register the environment again" in answer.json()["detail"]


def test_status_env_without_id_is_422(service):
    assert service.get("/status-env").status_code == 422
    assert service.status_env("x").status_code == 422


def test_status_env_zero_weight_total_gives_the_minimum_weight(service):
    service.start()
    service.register_env(weight=0)

    assert service.status_env(0).json()["env_weight"] == 0.01


def test_reset_data_forgets_the_run_each_time(service):
    for _ in range(2):
        service.start(starting_step=4)
        service.register_env()
        service.push(1)

        answer = service.get("/reset_data")

        assert (answer.status_code, answer.text) == (200, "Reset successful")
        assert answer.headers["content-type"].startswith("text/plain")
        assert service.get("/info").json() == {"batch_size": -1, "max_token_len": -1}
        assert service.status() == {"current_step": 0, "queue_size": 0}
        assert service.get("/wandb_info").json() == {"group": None, "project": None}
        assert service.get("/latest_example").json()["tokens"] == []
        assert service.get("/batch").json()["status"] == "error"
        assert service.status_env(0).status_code == 404
        assert service.register_env() == {"status": "wait for trainer to start"}


def test_reset_data_on_a_fresh_service_succeeds(service):
    assert service.get("/reset_data").text == "Reset successful"


def test_health_routes_answer(service):
    assert service.get("/health/live").json() == {"status": "live"}
    assert service.get("/health/ready").json()["status"] == "ready"


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json"])
def test_documentation_pages_answer(service, path):
    assert service.get(path).status_code == 200
