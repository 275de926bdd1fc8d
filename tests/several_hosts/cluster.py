"""A training run on several hosts: service, engine, two environments and trainer.

                  TLS                         TLS
    environment ──────► nginx ► service  ◄────────── trainer
         └────────────► nginx ► engine   ◄──────────────┘

Every arrow crosses the network of `network.py`. The service checks tokens of three roles. All
hosts share a file system, through which the trainer passes weights to the engine. A part that ends
is started again at once, as a supervisor would do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.several_hosts.lines import read_lines
from tests.several_hosts.network import Host, Network

__all__ = ["GROUPS_PER_BATCH", "GROUP_SIZE", "ClusterRun", "Part", "make_certificates"]

GROUP_SIZE = 4
GROUPS_PER_BATCH = 4
_TLS_PORT, _SERVICE_PORT, _ENGINE_PORT = 8443, 8000, 9001
_ROLES = ("environment", "trainer", "admin")
_START_LIMIT_S = 240.0
_POLL_S = 0.1

_NGINX = """\
daemon off;
user root;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log crit;
events {{ worker_connections 512; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  server {{
    listen {address}:{port} ssl so_keepalive=10s:5s:3;
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    client_max_body_size 256m;
    location / {{
      proxy_pass http://127.0.0.1:{target};
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Host $host;
      proxy_read_timeout 1300s;
    }}
  }}
}}
"""


@dataclass
class Part:
    """A process on a host, which is started again when it ends."""

    name: str
    host: Host
    command: list[str]
    environment: Mapping[str, str]
    log: Path
    num_starts: int = 0
    is_held: bool = False
    """Whether it is not started again for now."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _changes: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        self.num_starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.host.command(self.command),
                stdout=log,
                stderr=log,
                env=dict(self.environment),
                start_new_session=True,
            )

    def hold(self) -> None:
        """Do not start it again for now; a restart that has begun is finished first."""
        with self._changes:
            self.is_held = True

    def start_again(self) -> None:
        """Start it if it was started before, has ended, and is not held."""
        with self._changes:
            if self.num_starts and not self.is_held and not self.is_alive:
                self.start()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children."""
        if self.is_alive:
            os.killpg(self.pid, number)

    def end(self, number: signal.Signals, *, limit_s: float = 30.0) -> None:
        """Send a signal and wait for the end; kill what does not end in time."""
        self.send(number)
        try:
            if self.process is not None:
                self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            self.process.wait()

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""


class ClusterRun:
    """The parts of one run under a folder, and what they have done so far.

    Attributes:
        parts: by name: service, proxy, engine, engine_proxy, env1, env2, trainer.
        environments: names of the environments.
        data: directory of the service's file, on a file system of its own.

    With `has_clocks`, the time of day of each host can be changed.
    """

    environments: tuple[str, ...] = ("env1", "env2")
    host_names: tuple[str, ...] = ("service", "engine", "env1", "env2", "trainer")
    checked_urls: tuple[tuple[str, str], ...] = (
        ("service", "/health/ready"),
        ("engine", "/v1/models"),
    )
    """Host and path of what answers before environments and trainer start."""

    def __init__(
        self, folder: Path, *, seed: int = 0, think_s: float = 0.5, has_clocks: bool = False
    ) -> None:
        self.folder = folder
        self._clock_library = compile_clock(folder) if has_clocks else None
        self.network = Network(seed=seed)
        self.hosts = {name: self.network.add_host(name) for name in self.host_names}
        self.data = folder / "service"
        self.data.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "runs", self.data], check=True)
        self.model = folder / "model"
        self._save_model()
        proxies = [self.hosts[name].address for name, _ in self.checked_urls]
        # Valid before the clock of a client was set back.
        self.set_clock("authority", -86400)
        make_certificates(folder, proxies, self._clock_variables("authority"))
        self._tokens = {role: f"token-of-the-{role}-role" for role in _ROLES}
        token_lines = [f"{role} {token}" for role, token in self._tokens.items()]
        (folder / "tokens").touch(mode=0o600)
        (folder / "tokens").write_text("\n".join(token_lines) + "\n")
        self.parts = {part.name: part for part in self._make_parts(think_s)}
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._has_ended = threading.Event()

    @property
    def saves(self) -> Path:
        return self.folder / "saves"

    @property
    def metrics(self) -> Path:
        return self.saves / "metrics.jsonl"

    def start(self) -> None:
        """Start every part; return once the trainer has made a step."""
        clients = ("trainer", *self.environments)
        for name, part in self.parts.items():
            if name not in clients:
                part.start()
        self.wait_for(self._servers_answer, "service and engine")
        self._supervisor.start()
        for name in clients:
            self.parts[name].start()
        self.wait_for(lambda: self.num_steps() > 1, "a step of the trainer")

    def set_clock(self, host: str, ahead_s: int) -> None:
        """Set the time of day of a host ahead of that of this machine."""
        self._clock(host).write_text(str(ahead_s))

    def time_of_day(self, host: str) -> float:
        """Return the Unix time that a new process on a host sees."""
        variables = {**os.environ, **self._clock_variables(host)}
        command = self.hosts[host].command(["date", "+%s"])
        return float(subprocess.run(command, check=True, capture_output=True, env=variables).stdout)

    def _clock(self, host: str) -> Path:
        return self.folder / f"{host}.clock"

    def _clock_variables(self, host: str) -> dict[str, str]:
        if self._clock_library is None:
            return {}
        return {"LD_PRELOAD": str(self._clock_library), "HOST_CLOCK_FILE": str(self._clock(host))}

    def close(self) -> None:
        """End every part and the network."""
        self._has_ended.set()
        if self._supervisor.is_alive():
            self._supervisor.join()
        for part in self.parts.values():
            part.send(signal.SIGCONT)
            part.end(signal.SIGKILL)
        self.network.close()
        subprocess.run(["umount", "--lazy", self.data], check=False)

    def wait_for(
        self, condition: Callable[[], bool], what: str, *, limit_s: float = _START_LIMIT_S
    ) -> float:
        """Wait until a condition holds; return the seconds that took.

        Raises:
            TimeoutError: it did not within `limit_s`; the message has the ends of all logs.
        """
        started = time.monotonic()
        while not condition():
            waited_s = time.monotonic() - started
            if waited_s > limit_s:
                logs = "".join(f"\n== {p.name}\n{p.log_tail()}" for p in self.parts.values())
                raise TimeoutError(f"no {what} within {limit_s:.0f} s{logs}")
            time.sleep(_POLL_S)
        return time.monotonic() - started

    def num_steps(self) -> int:
        """Steps that the trainer has made."""
        return len(read_lines(self.metrics))

    def acknowledged(self) -> dict[str, float]:
        """Name of each group that the service acknowledged → time of the acknowledgement."""
        records = [line for env in self.environments for line in self.acknowledged_by(env)]
        return {line["name"]: line["time"] for line in records}

    def acknowledged_by(self, env: str) -> list[dict[str, Any]]:
        """Return the record of an environment: `name` and `time` of each acknowledged group."""
        return read_lines(self._record(env))

    def _record(self, env: str) -> Path:
        return self.folder / f"{env}.acknowledged.jsonl"

    def status(self) -> dict[str, Any]:
        """Return the service's answer to `GET /status`, asked on its host."""
        return self._ask("service", f"http://127.0.0.1:{_SERVICE_PORT}/status", "admin")

    def drain(self) -> None:
        """End the environments, and wait until the trainer has taken every whole batch."""
        for name in self.environments:
            self.parts[name].hold()
            self.parts[name].end(signal.SIGINT, limit_s=60.0)
        self.wait_for(self._is_drained, "end of the queue")
        self.parts["trainer"].hold()
        self.parts["trainer"].end(signal.SIGTERM, limit_s=60.0)

    def _is_drained(self) -> bool:
        status = self.status()
        # No batch is between the queue and the end of its step.
        return (
            status["queue_size"] < GROUPS_PER_BATCH
            and status["current_step"] == self.num_steps()
            and not status.get("in_flight_batches", 0) + status.get("returned_batches", 0)
        )

    def _supervise(self) -> None:
        while not self._has_ended.wait(_POLL_S):
            for part in self.parts.values():
                part.start_again()

    def _servers_answer(self) -> bool:
        try:
            for host, path in self.checked_urls:
                self._ask("trainer", f"{self._url(host)}{path}", "trainer")
        except (subprocess.CalledProcessError, ValueError):
            return False
        return True

    def _ask(self, host: str, url: str, role: str) -> dict[str, Any]:
        header = f"Authorization: Bearer {self._tokens[role]}"
        command = ["curl", "--silent", "--fail", "--connect-timeout", "10", "--max-time", "60"]
        command += ["--header", header, "--cacert", str(self.folder / "ca.pem"), url]
        answer = subprocess.run(self.hosts[host].command(command), check=True, capture_output=True)
        return dict(json.loads(answer.stdout))

    def _url(self, host: str) -> str:
        return f"https://{self.hosts[host].address}:{_TLS_PORT}"

    def _save_model(self) -> None:
        from tests.end_to_end.conftest import save_spread_out_model

        save_spread_out_model(self.model)

    def _make_parts(self, think_s: float) -> list[Part]:
        engine = [sys.executable, "-m", "example_trainer.torch_engine", "--model", str(self.model)]
        engine += ["--port", str(_ENGINE_PORT), "--device", "cpu"]
        engine += ["--kv-cache-memory-bytes", str(2**26)]
        return [
            *self._service_parts(),
            self._part("engine", "engine", engine),
            self._proxy("engine_proxy", "engine", _ENGINE_PORT),
            *(self._env(name, think_s) for name in self.environments),
            self._part("trainer", "trainer", self._trainer_command(), role="trainer"),
        ]

    def _service_parts(self) -> list[Part]:
        service = [sys.executable, "-m", "atroposlib.cli.run_api", "--port", str(_SERVICE_PORT)]
        service += ["--data-dir", str(self.data), "--run", "hosts"]
        service += ["--token-file", str(self.folder / "tokens")]
        return [
            self._part("service", "service", service),
            self._proxy("proxy", "service", _SERVICE_PORT),
        ]

    def trainer_flags(self) -> dict[str, Any]:
        """Return the flags of the trainer, without dashes."""
        return {
            "model": self.model,
            "device": "cpu",
            "training-steps": 1_000_000,
            "batch-size": GROUP_SIZE * GROUPS_PER_BATCH,
            "gradient-accumulation-steps": 1,
            "seq-len": 128,
            "lr": 1e-4,
            "optimizer": "adamw",
            "checkpoint-interval": 20,
            "weight-bridge-mode": "in_place",
            "vllm-restart-interval": 2,
            "engine": "torch",
            "engine-urls": self._url("engine"),
            "save-path": self.saves,
            "metrics-path": self.metrics,
            "atropos-url": self._url("service"),
        }

    def _trainer_command(self) -> list[str]:
        arguments = [f"--{name}={value}" for name, value in self.trainer_flags().items()]
        trainer = ["-m", "tests.several_hosts.keeping_trainer", *arguments, "--quiet"]
        # What a supervisor would do: go on with the run if there is one.
        resume = f'[ -f "{self.saves}/journal/run.json" ] && set -- "$@" --resume; exec "$0" "$@"'
        return ["bash", "-c", resume, sys.executable, *trainer]

    def _env(self, name: str, think_s: float) -> Part:
        settings = {
            "env.rollout_server_url": self._url("service"),
            "env.tokenizer_name": self.model,
            "env.wandb_name": name,
            "env.use_wandb": "false",
            "env.group_size": GROUP_SIZE,
            "env.max_token_length": 64,
            "env.max_num_workers": 2,
            "env.max_batches_offpolicy": 8,
            "env.total_steps": -1,
            "env.steps_per_eval": 0,
            "env.record_path": self._record(name),
            "env.think_s": think_s,
            "env.metrics_path": self.folder / f"{name}.metrics.jsonl",
            "openai.server_type": "vllm",
            "openai.base_url": f"{self._url('engine')}/v1",
            "openai.model_name": self.model,
            "openai.api_key": "none",  # pragma: allowlist secret
        }
        command = [sys.executable, "-m", "tests.several_hosts.counting_env", "serve"]
        for key, value in settings.items():
            command += [f"--{key}", str(value)]
        return self._part(name, name, command, role="environment")

    def _proxy(self, name: str, host: str, target: int) -> Part:
        folder = self.folder / name
        folder.mkdir()
        text = _NGINX.format(
            folder=folder,
            address=self.hosts[host].address,
            port=_TLS_PORT,
            target=target,
            certificate=self.folder / "proxy.pem",
            key=self.folder / "proxy.key",
        )
        (folder / "nginx.conf").write_text(text)
        return self._part(name, host, ["nginx", "-c", str(folder / "nginx.conf")])

    def extra_part(self, name: str, command: list[str]) -> Part:
        """Return a part on the trainer's host that is not started again, not started yet."""
        return self._part(name, "trainer", command)

    def _part(self, name: str, host: str, command: list[str], *, role: str = "") -> Part:
        variables = {
            **os.environ,
            "SSL_CERT_FILE": str(self.folder / "ca.pem"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **self._clock_variables(host),
        }
        if role:
            variables["ATROPOS_API_TOKEN"] = self._tokens[role]
        log = self.folder / f"{name}.log"
        return Part(name, self.hosts[host], command, variables, log)


def compile_clock(folder: Path) -> Path:
    """Return a library that gives a process the time of day of its host."""
    library = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


def make_certificates(
    folder: Path, addresses: Sequence[str], variables: Mapping[str, str] | None = None
) -> None:
    """Create a private authority `ca.pem`, and `proxy.pem`, its certificate for addresses."""
    environment = {**os.environ, **(variables or {})}
    ca, leaf = folder / "ca", folder / "proxy"
    names = ",".join(f"IP:{address}" for address in addresses)
    common = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    own = f"-subj /CN=ca -keyout {ca}.key -out {ca}.pem -addext keyUsage=keyCertSign"
    signed = f"-subj /CN=proxy -keyout {leaf}.key -out {leaf}.pem -CA {ca}.pem -CAkey {ca}.key"
    leaf_names = f"-addext subjectAltName={names} -addext basicConstraints=CA:FALSE"
    for command in (f"{common} {own}", f"{common} {signed} {leaf_names}"):
        subprocess.run(command.split(), check=True, capture_output=True, env=environment)
