"""Where the inference servers of a cluster job are, and their configs."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Mapping, Sequence

from atroposlib.envs.server_handling.config import APIServerConfig, ServerBaseline
from atroposlib.errors import ConfigError

__all__ = ["configs_from_baseline", "configs_on_slurm", "slurm_hosts", "slurm_urls"]

logger = logging.getLogger(__name__)

LOCAL_URLS = tuple(f"http://localhost:{port}/v1" for port in range(9004, 9008))
"""Where a baseline looks for servers outside a cluster job."""

FIRST_SLURM_PORT = 9000
GPUS_PER_NODE = 8

HostLister = Callable[[str], Sequence[str]]


def slurm_hosts(nodelist: str) -> list[str]:
    """Return the host names of a Slurm node list, asking `scontrol`."""
    command = ["scontrol", "show", "hostnames", nodelist]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"SLURM_JOB_NODELIST is {nodelist!r} but its hosts cannot be listed: {error}"
        ) from error
    return [line.strip() for line in listing.stdout.splitlines() if line.strip()]


def slurm_urls(hosts: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the address of every inference server of a job.

    Hosts after the first NUM_TRAINING_NODES serve; each has one server per INFER_TP of its
    GPUS_PER_NODE.

    Raises:
        ConfigError: a variable is missing or not a number above 0.
    """
    num_training_nodes = _integer(environ, "NUM_TRAINING_NODES", default=None)
    tensor_parallel = _integer(environ, "INFER_TP", default=1)
    gpus = _integer(environ, "GPUS_PER_NODE", default=GPUS_PER_NODE)
    for name, number in (("INFER_TP", tensor_parallel), ("GPUS_PER_NODE", gpus)):
        if number < 1:
            raise ConfigError(f"{name} is {number}; expected at least 1")
    ports = range(FIRST_SLURM_PORT, FIRST_SLURM_PORT + gpus // tensor_parallel)
    return [f"http://{host}:{port}/v1" for host in hosts[num_training_nodes:] for port in ports]


def configs_from_baseline(
    baseline: ServerBaseline,
    environ: Mapping[str, str],
    list_hosts: HostLister = slurm_hosts,
) -> list[APIServerConfig]:
    """Return one config per discovered server, with the baseline's settings.

    Inside a Slurm job of two or more nodes the job's servers, otherwise `LOCAL_URLS`.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST")
    hosts = list_hosts(nodelist) if nodelist else []
    urls = slurm_urls(hosts, environ) if len(hosts) >= 2 else LOCAL_URLS
    settings = {name: getattr(baseline, name) for name in ServerBaseline.model_fields}
    return [APIServerConfig(**settings, api_key="x", base_url=url) for url in urls]


def configs_on_slurm(
    configs: Sequence[APIServerConfig],
    environ: Mapping[str, str],
    list_hosts: HostLister = slurm_hosts,
) -> list[APIServerConfig]:
    """Return one copy of the first config per server of the Slurm job.

    Outside a job, or on one node, the configs are used as they are.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST")
    if not nodelist:
        logger.warning("slurm is on but SLURM_JOB_NODELIST is not set; using servers as configured")
        return list(configs)
    hosts = list_hosts(nodelist)
    if len(hosts) < 2:
        logger.info("the Slurm job has one node; using servers as configured")
        return list(configs)
    return [
        configs[0].model_copy(update={"base_url": url}, deep=True)
        for url in slurm_urls(hosts, environ)
    ]


def _integer(environ: Mapping[str, str], name: str, *, default: int | None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ConfigError(f"{name} is not set; a Slurm job needs it to find its inference nodes")
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text!r}; expected a whole number") from error
