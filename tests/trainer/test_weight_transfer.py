"""Weight updates by vLLM's transfer engines: settings, what is sent, requests, failures."""

from __future__ import annotations

import base64
import pickle
import shlex
import sys
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from atroposlib.errors import ConfigError, InferenceError, MissingExtraError
from example_trainer import weight_transfer
from example_trainer.engine import EngineControl
from example_trainer.vllm_manager import transfer_flags, vllm_command, vllm_environment
from example_trainer.weight_sync import InPlaceSync
from example_trainer.weight_transfer import WeightTransfer, _TransferRoutes, checkpoint_weights
from tests.trainer.scripted_vllm import ScriptedVllm
from tests.trainer.tiny import tiny_config, tiny_llama

pytestmark = pytest.mark.slow


def served_with(backend: str | None) -> dict[str, Any]:
    """Answers of an engine with a transfer engine and two workers."""
    transfer = {"backend": backend} if backend else None
    settings = {"weight_transfer_config": transfer, "model_config": {}}
    return {
        "/server_info": (200, {"vllm_config": settings}),
        "/get_world_size": (200, {"world_size": 2}),
    }


def transfer_config(folder, **settings):
    """Settings for a transfer on a machine that need not have a GPU."""
    backend = settings.pop("sync_transport", "nccl")
    return tiny_config(folder, **settings).model_copy(update={"sync_transport": backend})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"device": "cpu"}, "nccl needs a GPU, but device=cpu: use disk"),
        ({"engine": "torch"}, "needs engine=vllm"),
        ({"weight_bridge_mode": "none"}, "weight_bridge_mode=in_place"),
        ({"sync_transport": "ipc", "world_size": 2}, "one trainer process"),
        ({"sync_transport": "ipc", "engine_urls": ["http://a:1"]}, "one engine on its GPU"),
    ],
)
def test_setting_that_cannot_work_is_refused(tmp_path, settings, reason):
    base = {"device": "cuda", "sync_transport": "nccl", "weight_bridge_mode": "in_place"}

    with pytest.raises(ValidationError, match=reason):
        tiny_config(tmp_path, **{**base, **settings})


def test_launched_engine_gets_the_transfer_engine_and_may_unpickle_only_for_ipc(tmp_path):
    for backend, unpickles in (("nccl", False), ("ipc", True), ("disk", False)):
        config = transfer_config(tmp_path, sync_transport=backend, device="cuda")
        environment = vllm_environment(config, {}, updatable=True)

        flags = shlex.join(vllm_command(config, "model"))
        assert (shlex.join(transfer_flags(backend)) in flags) == (backend != "disk")
        assert ("VLLM_ALLOW_INSECURE_SERIALIZATION" in environment) == unpickles


def test_transfer_without_vllm_names_its_extra(tmp_path, monkeypatch):
    for name in ("vllm", "vllm.distributed.weight_transfer.base"):  # the second may be imported
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(MissingExtraError, match="vllm is not installed"):
        WeightTransfer(transfer_config(tmp_path, vllm_port=1))


def test_nccl_with_a_launched_engine_on_the_trainers_gpu_is_refused(tmp_path):
    pytest.importorskip("vllm")
    sync = InPlaceSync(transfer_config(tmp_path, vllm_port=1, device="cuda"))

    with pytest.raises(ConfigError, match="choose another one with --vllm-gpu"):
        sync.check_before_load()
    sync.close()


@pytest.mark.parametrize("backend", [None, "ipc"])
def test_running_engine_without_this_transfer_engine_is_refused_with_its_command(tmp_path, backend):
    pytest.importorskip("vllm")
    with ScriptedVllm(served_with(backend)) as engine:
        sync = InPlaceSync(transfer_config(tmp_path, vllm_port=engine.port))
        with pytest.raises(ConfigError) as refused:
            sync.check_before_load()
        sync.close()

    assert f"has the transfer engine {backend or 'none'}" in str(refused.value)
    assert '--weight-transfer-config \'{"backend": "nccl"}\'' in str(refused.value)


def test_tied_weights_are_sent_once_under_the_names_of_the_checkpoint():
    model = tiny_llama()
    names = set(model.state_dict())
    model.config.tie_word_embeddings = True
    model.tie_weights()

    weights = checkpoint_weights(model)

    assert set(weights) == names - {"lm_head.weight"}
    assert torch.equal(weights["model.norm.weight"], model.model.norm.weight)


class RecordedSender:
    """Stands for vLLM's trainer side: drives the routes, and keeps what it was given."""

    def __init__(self, client, source):
        self.client, self.source = client, source
        self.sent: list[list[tuple[str, torch.dtype]]] = []
        self.num_shutdowns = 0

    def send_weights(self):
        self.client.start_weight_update()
        metadata = self.source.metadata()
        pairs = list(self.source)
        assert [(m.name, m.dtype) for m in metadata] == [(n, t.dtype) for n, t in pairs]
        self.client.update_weights({"names": [m.name for m in metadata]})
        self.sent.append([(name, tensor.dtype) for name, tensor in pairs])
        self.client.finish_weight_update()

    def shutdown(self):
        self.num_shutdowns += 1


@pytest.fixture
def senders(monkeypatch):
    """Senders that were made, in place of those of vLLM, which need a GPU."""
    pytest.importorskip("vllm")
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    made: list[RecordedSender] = []
    begun: list[Any] = []

    def begin(info, *, client, source):
        begun.append(info)
        made.append(RecordedSender(client, source))
        return made[-1]

    monkeypatch.setattr(WeightTransferTrainerFactory, "trainer_init", staticmethod(begin))
    monkeypatch.setattr(weight_transfer, "select_device", lambda device: None)
    return made, begun


def test_update_pauses_sends_in_the_engines_type_names_the_version_and_resumes(tmp_path, senders):
    made, begun = senders
    with ScriptedVllm(served_with("nccl")) as engine:
        transfer = WeightTransfer(transfer_config(tmp_path, vllm_port=engine.port, dtype="float16"))
        transfer.require_backend()
        transfer.send(tiny_llama(), 7)
        transfer.send(tiny_llama(), 8)
        transfer.close()

    update = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    update += ["/reset_prefix_cache", "/resume"]
    assert [path for path in engine.paths if path not in served_with("nccl")] == [
        *update,
        *update,
        "/shutdown_weight_transfer_engine",
    ]
    versions = [body for path, _, body in engine.requests if path == "/finish_weight_update"]
    assert versions == [{"weight_version": "7"}, {"weight_version": "8"}]
    assert (begun[0].world_size, begun[0].master_address) == (3, "127.0.0.1")
    assert len(begun) == 1
    assert {dtype for _, dtype in made[0].sent[1]} == {torch.float16}
    assert made[0].num_shutdowns == 1


def test_failed_update_resumes_the_engine_and_the_next_one_connects_again(tmp_path, senders):
    made, _ = senders
    with ScriptedVllm(served_with("nccl")) as engine:
        transfer = WeightTransfer(transfer_config(tmp_path, vllm_port=engine.port))
        engine.answers["/update_weights"] = (500, {"error": "NCCL timeout"})
        with pytest.raises(InferenceError, match="NCCL timeout"):
            transfer.send(tiny_llama(), 1)
        assert engine.paths[-1] == "/resume"
        del engine.answers["/update_weights"]
        transfer.send(tiny_llama(), 1)
        transfer.close()

    assert [sender.num_shutdowns for sender in made] == [1, 1]


def test_update_is_not_repeated_for_an_engine_that_has_it(tmp_path, senders):
    with ScriptedVllm(served_with("nccl")) as good, ScriptedVllm(served_with("nccl")) as away:
        away.answers["/pause"] = (503, {})
        urls = [f"http://127.0.0.1:{engine.port}" for engine in (good, away)]

        def recover(pause_s):
            del away.answers["/pause"]

        config = transfer_config(tmp_path, engine_urls=urls)
        sync = InPlaceSync(config, sleep=recover)
        sync.publish(tiny_llama(), checkpoint=None, step=1)
        repeated = [engine.paths.count("/finish_weight_update") for engine in (good, away)]
        sync.publish(tiny_llama(), checkpoint=None, step=2)
        sync.close()

    assert repeated == [1, 1]
    assert [engine.paths.count("/finish_weight_update") for engine in (good, away)] == [2, 2]


def test_error_of_the_gpu_link_names_engine_and_remedy(tmp_path, senders, monkeypatch):
    def fail(self):
        raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(RecordedSender, "send_weights", fail)
    with ScriptedVllm(served_with("nccl")) as engine:
        transfer = WeightTransfer(transfer_config(tmp_path, vllm_port=engine.port))
        with pytest.raises(InferenceError, match="unhandled system error; with --sync-transport"):
            transfer.send(tiny_llama(), 1)
        transfer.close()

    assert engine.paths[-1] == "/resume"


def test_handles_of_gpu_memory_are_pickled_as_the_route_expects():
    posts: list[tuple[str, Any]] = []

    class Recorder:
        def post(self, path, **options):
            posts.append((path, options["json"]["update_info"]))

    routes = _TransferRoutes(Recorder())  # type: ignore[arg-type]
    routes.update_weights({"names": ["a"], "ipc_handles": {"GPU-1": (1, "x")}})

    ((path, info),) = posts
    assert (path, sorted(info)) == ("/update_weights", ["ipc_handles_pickled", "names"])
    handles = pickle.loads(base64.b64decode(info["ipc_handles_pickled"]))
    assert handles == {"GPU-1": (1, "x")}


@pytest.mark.parametrize("size", [10**9, 0, -2, float("inf"), "many", None, [1]])
def test_absurd_number_of_workers_is_refused(size):
    answers = {"/get_world_size": (200, {"world_size": size})}
    with ScriptedVllm(answers) as engine:
        control = EngineControl(f"http://127.0.0.1:{engine.port}")
        with pytest.raises(InferenceError, match="get_world_size answered 200"):
            control.num_workers()
        control.close()


@pytest.mark.parametrize(
    "content", [{"vllm_config": "x"}, {"vllm_config": {"model_config": 1}}, [1]]
)
def test_absurd_settings_of_an_engine_are_as_no_settings(content):
    with ScriptedVllm(
        {"/server_info": (200, content), "/reset_prefix_cache": (200, [1])}
    ) as engine:
        control = EngineControl(f"http://127.0.0.1:{engine.port}")
        assert not control.returns_processed_logprobs()
        assert not control.keeps_stale_output_layer()
        assert control.transfer_backend() is None
        control.drop_caches()
        control.close()


@pytest.mark.parametrize("content", ["{", "[1]", "[" * 100_000, "", None])
def test_model_of_an_engine_whose_config_cannot_be_read_counts_as_tied(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    model = str(tmp_path) if content is not None else "x" * 5000
    settings = {"device_config": {"device": "cpu"}, "model_config": {"model": model}}
    with ScriptedVllm({"/server_info": (200, {"vllm_config": settings})}) as engine:
        control = EngineControl(f"http://127.0.0.1:{engine.port}")
        assert control.keeps_stale_output_layer()
        control.close()


@pytest.mark.parametrize("failure", [KeyError("x"), KeyboardInterrupt()])
def test_any_failure_disconnects_and_a_failing_end_does_not_hide_it(
    tmp_path, senders, monkeypatch, failure
):
    def fail(self):
        raise failure

    def fail_to_end(self):
        raise RuntimeError("already ended")

    monkeypatch.setattr(RecordedSender, "send_weights", fail)
    monkeypatch.setattr(RecordedSender, "shutdown", fail_to_end)
    with ScriptedVllm(served_with("nccl")) as engine:
        transfer = WeightTransfer(transfer_config(tmp_path, vllm_port=engine.port))
        for _ in range(2):
            with pytest.raises(type(failure)):
                transfer.send(tiny_llama(), 1)
        transfer.close()

    assert len(senders[0]) == 2
    assert engine.paths[-1] == "/resume"


@pytest.mark.parametrize(("device", "chosen"), [("cuda", []), ("cuda:1", [torch.device("cuda:1")])])
def test_only_a_numbered_gpu_is_made_the_current_one(monkeypatch, device, chosen):
    found = []
    monkeypatch.setattr(torch.cuda, "set_device", found.append)

    weight_transfer.select_device(device)

    assert found == chosen
