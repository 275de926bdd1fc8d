"""`inference-node-wandb-watcher`: log the health of a node's engines to wandb, once per step.

wait for the run's project ─► each minute: probe the engines, log their health if the step increased
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.utils.command_parser import CommandParser, prepare_command
from atroposlib.utils.proxies import may_use_proxy

__all__ = ["main", "run", "update_wandb"]

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_ASK_S = 1.0
_PROBE_S = 60.0
_FIRST_PORT = 9000
_GPUS_PER_NODE = 8


def main() -> None:
    """Watch until stopped."""
    prepare_command()
    parser = CommandParser(
        prog="inference-node-wandb-watcher",
        description="Log to wandb which inference servers of this node are healthy.",
    )
    parser.add_argument(
        "--api_addr", required=True, help="trajectory service, such as http://HOST:8000"
    )
    parser.add_argument("--tp", type=int, required=True, help="tensor-parallel size of an engine")
    parser.add_argument("--node_num", type=int, required=True, help="index of this node")
    args = parser.parse_args()
    if args.tp < 1:
        parser.error(f"argument --tp: expected 1 or more, got {args.tp}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        run(args.api_addr, args.tp, args.node_num)
    except (ConfigError, MissingExtraError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        logger.info("stopped")


def run(api_addr: str, tp: int, node_num: int) -> None:
    """Watch until interrupted.

    Args:
        api_addr: Address of the trajectory service.
        tp: GPUs per engine; a node has eight.
        node_num: Index of this node, part of the metric names.
    """
    Watcher(api_addr, tp, node_num).watch()


def update_wandb(health_statuses: Mapping[str, float], step: int | None = None) -> None:
    """Log health to the wandb run of this process.

    Args:
        health_statuses: 1.0 for healthy, 0.0 otherwise, by metric name.
        step: Step of the trainer; None for wandb's own step.
    """
    import wandb

    wandb.log(dict(health_statuses), step=step)


class Watcher:
    """Polls the service and the engines; continues when either is unreachable.

    Args:
        api_addr: Address of the trajectory service.
        tp: GPUs per engine.
        node_num: Index of this node.
        engine_url: Returns the address of an engine, without a trailing slash.
        sleep: Replaced in tests.

    Raises:
        ConfigError: The address of the service is malformed.
    """

    def __init__(
        self,
        api_addr: str,
        tp: int,
        node_num: int,
        *,
        engine_url: Callable[[int], str] = lambda i: f"http://localhost:{_FIRST_PORT + i}",
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        from atroposlib.api.client_transport import service_address  # imports httpx

        self._api_addr = service_address(api_addr)
        self._engines = [engine_url(i) for i in range(_GPUS_PER_NODE // tp)]
        self._node_num = node_num
        self._sleep = sleep
        self._last_step = 0
        self._is_away = False

    def watch(self) -> None:
        """Wait for the trainer to register, then log until interrupted."""
        project, group = self._wait_for_project()
        wandb = _wandb()
        wandb.init(project=project, group=group, name=f"inf_node_{self._node_num}")
        while True:
            self.log_once()
            self._sleep(_PROBE_S)

    def log_once(self) -> bool:
        """Probe the engines and, if the step increased, log the result and return True."""
        healthy = self.probe()
        step = self._step()
        if step is None or step <= self._last_step:
            return False
        self._last_step = step
        update_wandb(healthy, step)
        return True

    def probe(self) -> dict[str, float]:
        """Return the health of each engine by metric name."""
        return {
            f"server/server_health_{self._node_num}_{i}": float(
                _get(f"{url}/health_generate") is not None
            )
            for i, url in enumerate(self._engines)
        }

    def _wait_for_project(self) -> tuple[str, str | None]:
        while True:
            answer = self._ask("/wandb_info")
            if answer.get("project") is not None:
                return str(answer["project"]), answer.get("group")
            self._sleep(_ASK_S)

    def _step(self) -> int | None:
        step = self._ask("/status").get("current_step")
        return step if isinstance(step, int) else None

    def _ask(self, path: str) -> dict[str, Any]:
        """Return a response of the service; without one, warn once per outage and return {}."""
        reply = _get(self._api_addr + path)
        try:
            answer = None if reply is None else reply.json()
        except ValueError:
            answer = None
        if isinstance(answer, dict):
            if self._is_away:
                logger.info("the trajectory service responds again")
            self._is_away = False
            return answer
        if not self._is_away:
            reason = (
                "no answer with status 200" if reply is None else "the answer is not a JSON object"
            )
            url = self._api_addr + path
            logger.warning("no valid response from %s: %s; retrying", url, reason)
        self._is_away = True
        return {}


def _get(url: str) -> Any:
    """Return a response with status 200, or None."""
    import httpx

    try:
        reply = httpx.get(url, timeout=_TIMEOUT_S, trust_env=may_use_proxy(url))
    except httpx.HTTPError:
        return None
    return reply if reply.status_code == 200 else None


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise MissingExtraError("wandb", extra="all") from error
    return wandb


if __name__ == "__main__":
    main()
