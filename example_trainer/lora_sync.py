"""Getting LoRA adapters into an engine: hot-swapped while it runs, or at a restart."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError, EngineSetupError, InferenceError
from example_trainer.checkpointing import replace_directory
from example_trainer.config import TrainingConfig
from example_trainer.engine_connection import EngineConnection
from example_trainer.engine_control import EngineControl
from example_trainer.lora import engine_rank
from example_trainer.owned_engine import OwnedEngine
from example_trainer.vllm_manager import check_vllm_health

__all__ = ["AdapterFolders", "LoraRestartSync", "LoraSwapSync"]

logger = logging.getLogger(__name__)

_VLLM_ROUTE = "/v1/load_lora_adapter"
_COMPANION_ROUTE = "/lora/load"
_ADAPTER_DIRECTORY = re.compile(r"adapter_step_(\d+)")


class AdapterFolders:
    """The directories `adapter_step_<step>` under `save_path` that adapters are published from.

    Every step has a path of its own: vLLM keeps the caches of an adapter it knows by its path. As
    many are kept as checkpoints (`keep_checkpoints`). A resumed run also removes those that the
    run wrote before it was interrupted; other runs' are left alone.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self._root = Path(config.save_path)
        self._keep = config.keep_checkpoints
        self._written = self._found() if config.resume else []
        """Oldest first."""

    def write(self, model: Any, step: int) -> Path:
        """Write the adapters the model has after `step`; returns the directory."""
        path = self._root / f"adapter_step_{step}"
        self._written = [each for each in self._written if each != path] + [path]
        return replace_directory(path, model.save_pretrained)

    def drop_old(self) -> None:
        """Delete all but the newest.

        To be called once the engine serves the adapters written last: it may load those before
        again until then.
        """
        if self._keep is None:
            return
        for path in self._written[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)
        self._written = self._written[-self._keep :]

    def _found(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        steps = {
            int(match[1]): path
            for path in self._root.iterdir()
            if (match := _ADAPTER_DIRECTORY.fullmatch(path.name))
        }
        return [steps[step] for step in sorted(steps)]


class LoraSwapSync:
    """Swaps the adapter of a running vLLM that is not ours, under one name, without a pause.

    A stock vLLM is asked by its own route, the companion server (`companion`) by its `/lora/load`.

    Rollouts ask for the model `lora_name`. Requests under way go on with the new adapter from
    their next token, with the caches of the old one; new requests use the new one alone.
    """

    mode = "lora_only"
    publishes_final = True

    def __init__(self, config: TrainingConfig) -> None:
        self._config = config
        self._engine = EngineConnection(f"http://{config.vllm_connect_host}:{config.vllm_port}")
        self._route = _VLLM_ROUTE
        self._folders = AdapterFolders(config)

    def check_before_load(self) -> None:
        """Fail when no engine is there, or one that takes no adapters."""
        if not check_vllm_health(self._config.vllm_port, self._config.vllm_connect_host):
            raise EngineSetupError(
                f"no engine answers GET {self._engine.shown_url}/health with 200; "
                "weight_bridge_mode=lora_only needs a running vLLM: start one, or use "
                "--weight-bridge-mode lora_restart, which launches its own"
            )
        # Without a name the routes refuse and change nothing; 404 and 405 mean no route.
        statuses = {}
        for route in (_VLLM_ROUTE, _COMPANION_ROUTE):
            statuses[route] = self._engine.send("POST", route, json={}).status_code
            if statuses[route] in (400, 422):
                self._route = route
                break
        else:
            raise ConfigError(
                f"the engine at {self._engine.shown_url} takes no adapters while it runs (POST "
                f"{_VLLM_ROUTE} answered {statuses[_VLLM_ROUTE]}); start vLLM with --enable-lora "
                f"--max-lora-rank {engine_rank(self._config.lora_r)} and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True "
                "in its environment, or use --weight-bridge-mode lora_restart"
            )

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        """Load the adapters as they are."""
        self.publish(model, step=step, checkpoint=None)

    def before_step(self, *, sync_follows: bool) -> None:
        """Nothing to do: the engine keeps generating during the step."""

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        """Write the adapters and let the engine take them in place of those it has."""
        directory = self._folders.write(model, step)
        name, path = self._config.lora_name, str(directory.resolve())
        if self._route == _COMPANION_ROUTE:
            body: dict[str, Any] = {"adapter_name": name, "adapter_path": path}
        else:
            body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        answer = self._engine.send("POST", self._route, json=body)
        if answer.status_code != 200:
            raise InferenceError(
                f"POST {self._engine.shown_url}{self._route} answered {answer.status_code}: "
                f"{answer.text[:500]}; the model is served as {self._config.lora_name!r} and the "
                "engine must be able to read the directory"
            )
        self._folders.drop_old()

    def check_alive(self) -> None:
        """The engine is not ours; a dead one shows at the next swap."""

    def returns_processed_logprobs(self) -> bool:
        """Ask the engine; False where it does not tell."""
        with contextlib.closing(EngineControl(self._engine.base_url)) as control:
            return control.returns_processed_logprobs()

    def close(self) -> None:
        """Close the connection; the engine runs on with the adapters it has."""
        self._engine.close()


class LoraRestartSync(OwnedEngine):
    """Owns an engine and restarts it on the adapters; rollouts ask for the model `lora_name`."""

    mode = "lora_restart"
    mode_for_running_engine = "lora_only"

    def __init__(self, config: TrainingConfig) -> None:
        super().__init__(config)
        self._folders = AdapterFolders(config)

    def start(self, model: Any, tokenizer: Any, *, source: str, step: int = 0) -> None:
        """Launch the engine on the model and the adapters as they are; wait until it is healthy."""
        self._launch(self._folders.write(model, step))

    def publish(self, model: Any, *, checkpoint: Path | None, step: int = 0) -> None:
        """Restart the engine on the present adapters."""
        directory = self._folders.write(model, step)
        self._server.stop()
        self._launch(directory)

    def _launch(self, directory: Path) -> None:
        rank = engine_rank(self._config.lora_r)
        more = ["--enable-lora", "--max-lora-rank", str(rank)]
        more += ["--lora-modules", f"{self._config.lora_name}={directory.resolve()}"]
        self._server.start(self._config.model_name, more=more)
        self._folders.drop_old()
