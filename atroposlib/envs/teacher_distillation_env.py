"""Environments whose groups carry a teacher's log-probabilities of every token.

admitted group -> teacher reads each trajectory -> distill_token_ids and distill_logprobs -> sent

The teacher is asked for admitted groups only. A group it cannot answer for goes on without.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.constants import NAMESPACE_SEP, OPENAI_NAMESPACE
from atroposlib.envs.server_handling.config import (
    ServerConfigs,
    resolve_openai_configs,
    server_class_of,
)
from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ServerBaseline
from atroposlib.envs.server_handling.server_manager import ServerManager, ServerManagerConfig
from atroposlib.envs.settings import (
    OPENAI_PREFIX,
    field_values,
    server_layers,
    single_server_settings,
)
from atroposlib.errors import ConfigError
from atroposlib.scored_data import ScoredDataGroup
from atroposlib.utils.cli import UsageError, extract_namespace, merge_dicts

__all__ = [
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "ScoredDataGroup",
    "ServerBaseline",
    "ServerManager",
    "ServerManagerConfig",
    "TeacherDistillationConfig",
    "TeacherDistillationEnv",
    "logger",
    "resolve_openai_configs",
]

logger = logging.getLogger(__name__)

NOT_WANTED = -1
"""A `top_k` of this or less asks the teacher nothing."""


class TeacherDistillationConfig(BaseEnvConfig):
    """Settings of an environment with a teacher.

    Example:
        TeacherDistillationConfig(teacher_enabled=True, teacher_top_k=8, group_size=8)
    """

    teacher_enabled: bool = Field(
        False, description="Send a teacher's log-probabilities along with every group."
    )
    teacher_top_k: int = Field(
        0,
        ge=NOT_WANTED,
        description="Likeliest tokens per position to take from the teacher; 0 takes the token "
        "that stands there only, -1 asks the teacher nothing.",
    )


class TeacherDistillationEnv(BaseEnv):
    """An environment that asks a teacher about its trajectories before they are sent.

    Write the hooks of `BaseEnv`; nothing changes for them. An environment that has its own
    constructor need not know of the teacher: what `serve` was told under `--teacher.*` stands in
    `teacher_server_configs` before the constructor runs.

    Args:
        config: settings.
        server_configs: inference servers of the policy.
        slurm: find those through Slurm.
        testing: use scripted ones.
        teacher_server_configs: servers of the teacher, a list or a single config; None takes the
            attribute of that name.

    Attributes:
        teacher_server_configs: the teacher's servers, set by subclasses; None without a teacher.
        teacher_server: the teacher, or None.
        teacher_namespace: prefix of the flags and name of the YAML section.

    Raises:
        ConfigError: `teacher_enabled` without servers, or a teacher with another tokenizer.
    """

    config: TeacherDistillationConfig

    env_config_cls = TeacherDistillationConfig
    teacher_namespace = "teacher"
    teacher_server_configs: Any = None  # as `config_init` has servers
    teacher_server: ServerManager | None = None

    def __init__(
        self,
        config: TeacherDistillationConfig,
        server_configs: Any,
        slurm: bool = False,
        testing: bool = False,
        *,
        teacher_server_configs: Any = None,
    ) -> None:
        super().__init__(config, server_configs, slurm=slurm, testing=testing)
        if teacher_server_configs is not None:
            self.teacher_server_configs = teacher_server_configs
        if not config.teacher_enabled:
            return
        if self.teacher_server_configs is None:
            raise ConfigError(
                "teacher_enabled is true, but no teacher server configuration was provided; give "
                "--teacher.base_url and --teacher.model_name to serve, a section teacher: in its "
                "YAML file, or set the attribute teacher_server_configs"
            )
        self.connect_teacher(self.teacher_server_configs)

    def connect_teacher(self, server_configs: Any) -> None:
        """Use these servers as the teacher from now on.

        Args:
            server_configs: a list of server configs, a single one, or a `ServerBaseline`.

        Raises:
            ConfigError: the teacher's tokenizer differs from this environment's.
        """
        if not isinstance(server_configs, Sequence) and (
            isinstance(server_configs, APIServerConfig)
            or not isinstance(server_configs, ServerBaseline)
        ):
            server_configs = [server_configs]
        self.teacher_server = ServerManager(server_configs, slurm=False, testing=False)
        first = server_configs[0] if isinstance(server_configs, Sequence) else server_configs
        is_named = first.tokenizer_name not in ("", "none")
        self._validate_teacher_tokenizer_compatibility(
            first.tokenizer_name if is_named else first.model_name
        )

    def _validate_teacher_tokenizer_compatibility(self, teacher_tokenizer_name: str) -> None:
        """Refuse a teacher whose token ids mean something else than ours."""
        if teacher_tokenizer_name == self.tokenizer.name_or_path:
            return
        import transformers

        try:
            teacher = transformers.AutoTokenizer.from_pretrained(
                teacher_tokenizer_name, use_fast=True
            )
        except Exception as error:  # the hub, the disk and the files all fail in their own ways
            raise ConfigError(
                "Cross-tokenizer distillation is not supported, and the teacher's tokenizer "
                f"{teacher_tokenizer_name!r} cannot be loaded for comparison: {error}"
            ) from error
        if teacher.get_vocab() != self.tokenizer.get_vocab():
            raise ConfigError(
                "Cross-tokenizer distillation is not supported: the vocabulary of "
                f"{teacher_tokenizer_name!r} differs from that of {self.tokenizer.name_or_path!r}; "
                "use a teacher of the same model family"
            )

    async def complete_groups(self, groups: list[ScoredDataGroup]) -> list[ScoredDataGroup]:
        """Ask the teacher about admitted groups, for `worker_timeout` seconds at most."""
        groups = await super().complete_groups(groups)
        groups = list(await asyncio.gather(*map(self._attach_in_time, groups)))
        if self.config.teacher_enabled and self.teacher_server is not None:
            for group in groups:
                if self._top_k(group) > NOT_WANTED and group.get("distill_token_ids") is None:
                    self.count_failure("teacher_logprobs")
        return groups

    async def _attach_in_time(self, group: ScoredDataGroup) -> ScoredDataGroup:
        timeout_s = self.config.worker_timeout if self.config.worker_timeout > 0 else None
        try:
            return await asyncio.wait_for(self._attach_teacher_distillation(group), timeout_s)
        except asyncio.TimeoutError:
            logger.warning("no teacher for a group: it took more than %s s", timeout_s)
            return group

    async def _attach_teacher_distillation(self, group: ScoredDataGroup) -> ScoredDataGroup:
        """Fill `distill_token_ids` and `distill_logprobs`, both [G][L][K], in place.

        Both are None when the group does not want a teacher, or the teacher fails for one of its
        trajectories.
        """
        if not self.config.teacher_enabled or self.teacher_server is None:
            return group
        group["distill_token_ids"] = group["distill_logprobs"] = None
        top_k = self._top_k(group)
        if top_k <= NOT_WANTED:
            return group
        tokens = group["tokens"]
        answers = await asyncio.gather(
            *(self._fetch_teacher_for_sequence(token_ids, top_k) for token_ids in tokens),
            return_exceptions=True,
        )
        fetched = []
        for position, (token_ids, answer) in enumerate(zip(tokens, answers, strict=True)):
            if isinstance(answer, BaseException):
                logger.warning("no teacher for a group: trajectory %d: %r", position, answer)
                return group
            if not len(answer[0]) == len(answer[1]) == len(token_ids):
                logger.warning(
                    "no teacher for a group: trajectory %d has %d tokens, the teacher gave %d rows "
                    "of ids and %d of logprobs",
                    *(position, len(token_ids), len(answer[0]), len(answer[1])),
                )
                return group
            fetched.append(answer)
        group["distill_token_ids"] = [ids for ids, _ in fetched]
        group["distill_logprobs"] = [logprobs for _, logprobs in fetched]
        return group

    def _top_k(self, group: ScoredDataGroup) -> int:
        """What this group asks of the teacher; `NOT_WANTED` when nothing."""
        overrides = group.get("group_overrides") or {}
        if not group.get("tokens") or overrides.get("skip_teacher_top_k"):
            return NOT_WANTED
        top_k: int = overrides.get("teacher_top_k", self.config.teacher_top_k)
        return top_k

    async def _fetch_teacher_for_sequence(
        self, token_ids: list[int], top_k: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return the teacher's likeliest ids and their logprobs, both [L][K], for one trajectory.

        Position t holds what the teacher expects *at* t after reading the tokens before it; the
        first position has nothing before it and is empty.
        """
        assert self.teacher_server is not None, "there is no teacher; see connect_teacher"
        rows = await self.teacher_server.get_logprobs(
            input_ids=token_ids, top_k=top_k, max_tokens=1, split="train"
        )
        return rows["prompt_topk_token_ids"], rows["prompt_topk_logprobs"]

    async def _run_close_hook(self) -> None:
        await super()._run_close_hook()
        if self.teacher_server is not None:
            await self.reporter.tolerate(
                self.teacher_server.close(), "closing the teacher's connections"
            )

    @classmethod
    def teacher_config_init(cls) -> ServerConfigs | None:
        """Return the default servers of the teacher; None: `serve` must be told."""
        return None

    @classmethod
    def _resolve_teacher_server_configs(
        cls,
        default_teacher_server_configs: ServerConfigs | None,
        yaml_config: Mapping[str, Any],
        cli_passed_flags: Mapping[str, Any],
    ) -> ServerConfigs | None:
        """Lay the YAML section and the flags of the teacher over its defaults.

        Returns:
            The teacher's servers, or None when nothing says anything about a teacher.

        Raises:
            UsageError: an unknown key, a refused value, or flags that meet several servers.
        """
        flags = extract_namespace(cli_passed_flags, f"{cls.teacher_namespace}{NAMESPACE_SEP}")
        section = yaml_config.get(cls.teacher_namespace)
        default = default_teacher_server_configs
        if default is None:
            if not section and not flags:
                return None
            default = APIServerConfig()
        try:
            entries = server_layers(section, server_class_of(default))
            is_server = isinstance(default, APIServerConfig)
            if (entries or flags) and isinstance(default, ServerBaseline) and not is_server:
                default = APIServerConfig(**field_values(default))
            only = entries[0] if len(entries) == 1 else {}
            return resolve_openai_configs(
                default_server_configs=default,
                openai_config_dict=merge_dicts(single_server_settings(default), only, flags),
                yaml_config={OPENAI_NAMESPACE: only if len(entries) < 2 else entries},
                cli_passed_flags={f"{OPENAI_PREFIX}{name}": flags[name] for name in flags},
                logger=logger,
            )
        except UsageError as error:
            raise UsageError(_as_teachers(error.message, cls.teacher_namespace)) from error

    @classmethod
    def get_cli_serve_config_cls(cls) -> type:
        """Return the command class of `serve`, with the flags of the teacher."""
        from atroposlib.envs.commands import with_teacher

        return with_teacher(cls, super().get_cli_serve_config_cls())


def _as_teachers(message: str, namespace: str) -> str:
    """Name the teacher's settings in a message that speaks of the policy's servers."""
    return message.replace(OPENAI_PREFIX, f"{namespace}{NAMESPACE_SEP}").replace(
        f"{OPENAI_NAMESPACE}:", f"{namespace}:"
    )
