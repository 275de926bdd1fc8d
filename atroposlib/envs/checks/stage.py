"""Building an environment for a check: scripted servers, a temporary folder, no hub.

settings -> adjusted -> constructor -> servers replaced by scripted ones -> Stage
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atroposlib.envs.checks.char_tokenizer import CharTokenizer
from atroposlib.envs.checks.scripted_model import ScriptedModel, ScriptedServer
from atroposlib.envs.running import build_environment
from atroposlib.envs.settings import Settings

__all__ = ["OTHER_SEED", "Stage", "local_tokenizers", "seeded", "staged_settings"]

SEED = 0
OTHER_SEED = 1
MIN_GROUP_SIZE, MAX_GROUP_SIZE = 5, 8
CHARACTERS_PER_TOKEN = 4


@dataclass
class Stage:
    """One environment ready to be checked."""

    env: Any
    model: ScriptedModel

    @classmethod
    def build(cls, env_cls: type[Any], settings: Settings, *, is_stand_in: bool) -> Stage:
        """Construct an environment and put the scripted model behind its servers."""
        env = build_environment(env_cls, settings)
        model = ScriptedModel(
            env.tokenizer, is_stand_in=is_stand_in, judge_reply=env.check_judge_reply
        )
        configs = env.server_configs or [server.config for server in env.server.servers]
        env.server.servers = [ScriptedServer(model, config) for config in configs]
        return cls(env, model)


def staged_settings(settings: Settings, folder: Path, *, is_stand_in: bool) -> Settings:
    """Return the settings of a run with what a check needs: no accounts, files in `folder`."""
    group_size = min(max(settings.env.group_size, MIN_GROUP_SIZE), MAX_GROUP_SIZE)
    factor = CHARACTERS_PER_TOKEN if is_stand_in else 1
    changes = {
        "group_size": group_size,
        "max_token_length": settings.env.max_token_length * factor,
        "use_wandb": False,
        "data_path_to_save_groups": None,
        "data_dir_to_save_evals": str(folder / "evaluation"),
        "metrics_path": str(folder / "metrics.jsonl"),
    }
    manager = settings.manager.model_copy(update={"testing": True, "slurm": False})
    return settings._replace(env=settings.env.model_copy(update=changes), manager=manager)


@contextmanager
def local_tokenizers(name: str) -> Iterator[bool]:
    """Let the base class load only a tokenizer that is on this machine.

    Yields:
        Whether a character tokenizer stands in for the configured one.
    """
    base: Any = importlib.import_module("atroposlib.envs.base")  # it must not be imported above
    if _is_local(name):
        yield False
        return
    before = vars(base).get("AutoTokenizer")
    base.AutoTokenizer = _StandIn
    try:
        yield before is None or before.__module__.startswith("transformers")
    finally:
        if before is None:
            del base.AutoTokenizer
        else:
            base.AutoTokenizer = before


class _StandIn:
    """Takes the place of `AutoTokenizer`."""

    @staticmethod
    def from_pretrained(name: str, *_: Any, **__: Any) -> CharTokenizer:
        """Return the character tokenizer, whatever the name."""
        return CharTokenizer(template_bos=True)


def _is_local(name: str) -> bool:
    """Whether a tokenizer is a folder, or a hub repository whose files are in the cache."""
    if Path(name).is_dir():
        return True
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str)
    except HFValidationError:
        return False


@contextmanager
def seeded(seed: int = SEED) -> Iterator[None]:
    """Seed Python's and NumPy's generators, and put their state back afterwards."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
