"""The vLLM server the trainer may own: its command, its readiness, its end.

Only stock vLLM is used, over HTTP; the server is known by the process that was started, never
looked up by name or port.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from atroposlib.errors import ConfigError, InferenceError
from example_trainer.config import TrainingConfig
from example_trainer.processes import ManagedProcess, ProcessFailedError, wait_until_ready

__all__ = [
    "VllmServer",
    "check_vllm_health",
    "is_port_in_use",
    "vllm_command",
    "vllm_environment",
    "wait_for_vllm_ready",
]

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_NOTES = 15.0
_TORCHRUN_NAMES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip


def is_port_in_use(port: int, host: str = "127.0.0.1") -> bool:
    """Say whether something accepts connections on a port."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def check_vllm_health(port: int, host: str = "127.0.0.1") -> bool:
    """Say whether an engine answers `GET /health` with 200."""
    try:
        return httpx.get(f"http://{host}:{port}/health", timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def wait_for_vllm_ready(port: int, timeout: float = 120) -> bool:
    """Wait up to `timeout` seconds for an engine to become healthy; False when it did not."""
    deadline = time.monotonic() + timeout
    while not check_vllm_health(port):
        if time.monotonic() >= deadline:
            return False
        time.sleep(min(2.0, timeout))
    return True


def vllm_command(config: TrainingConfig, model_path: str) -> list[str]:
    """Return the argument vector of a stock vLLM server; it answers to `config.model_name`."""
    on_gpu = config.device.startswith("cuda")
    # bfloat16 is the flag's default and means a GPU; the trainer itself is float32 on a CPU.
    dtype = "float32" if config.dtype == "bfloat16" and not on_gpu else config.dtype
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model_path, "--served-model-name", config.model_name]
    command += ["--host", config.vllm_host, "--port", str(config.vllm_port)]
    command += ["--dtype", dtype, "--max-model-len", str(config.max_model_len)]
    if on_gpu:
        command += ["--gpu-memory-utilization", str(config.vllm_gpu_memory_utilization)]
    if config.logprobs_mode == "processed":
        command += ["--logprobs-mode", "processed_logprobs"]
    return command + shlex.split(config.vllm_args)


def vllm_environment(
    config: TrainingConfig, inherited: Mapping[str, str], *, updatable: bool
) -> dict[str, str]:
    """Return the environment of the server.

    Args:
        config: `vllm_gpu` chooses the GPU, counted among those this process was given.
        inherited: Environment of this process.
        updatable: Offer the routes that replace weights in place; they let anyone who reaches the
            port load files, so the server should stay on a loopback address.
    """
    # What torchrun tells this process would make the engine look for the trainer's other ranks.
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
    return environment


class VllmServer:
    """One vLLM server on a fixed port, started and stopped as often as needed.

    Args:
        config: Settings; output goes to `vllm.log` under `log_dir`.
        updatable: Whether it must offer in-place weight updates.
    """

    def __init__(self, config: TrainingConfig, *, updatable: bool) -> None:
        self._config = config
        self._updatable = updatable
        self._process: ManagedProcess | None = None

    def start(self, model_path: str, *, more: Sequence[str] = ()) -> None:
        """Start the server on a model, with more arguments, and wait until it is healthy.

        Raises:
            InferenceError: the port is taken.
            ProcessFailedError: it ended or was not ready in time; shows the tail of its log.
        """
        config = self._config
        if is_port_in_use(config.vllm_port, config.vllm_connect_host):
            raise InferenceError(
                f"port {config.vllm_port} is taken by another process, so the engine cannot be "
                "launched there; stop that process or choose another --vllm-port"
            )
        process = ManagedProcess(
            "vLLM",
            [*vllm_command(config, model_path), *more],
            log_path=Path(config.log_dir) / "vllm.log",
            env=vllm_environment(config, os.environ, updatable=self._updatable),
        )
        self._process = process
        logger.info("starting vLLM on port %d (log: %s)", config.vllm_port, process.log_path)
        process.start()
        try:
            waited_s = self._wait(process)
        except BaseException:
            self.stop()
            raise
        logger.info("vLLM is ready after %.0f s", waited_s)

    def _wait(self, process: ManagedProcess) -> float:
        config = self._config
        next_note_s = _SECONDS_BETWEEN_NOTES

        def note(waited_s: float) -> None:
            nonlocal next_note_s
            if waited_s >= next_note_s:
                logger.info("vLLM is still starting (%.0f s)", waited_s)
                next_note_s += _SECONDS_BETWEEN_NOTES

        return wait_until_ready(
            process,
            lambda: check_vllm_health(config.vllm_port, config.vllm_connect_host),
            timeout_s=config.vllm_start_timeout_s,
            on_wait=note,
        )

    def check_alive(self) -> None:
        """Raise when the server has ended although nobody stopped it.

        Raises:
            ProcessFailedError: shows how it ended and the tail of its log.
        """
        if self._process is not None and not self._process.is_alive():
            raise ProcessFailedError(self._process, self._process.describe_exit())

    def stop(self) -> None:
        """End the server and everything it started; harmless when it is not running."""
        process, self._process = self._process, None
        if process is not None:
            process.stop()
