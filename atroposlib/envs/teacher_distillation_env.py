"""Environments whose groups have a teacher's log-probabilities of every token.

admitted group -> teacher scores each trajectory -> distill_token_ids and distill_logprobs -> sent

The teacher scores admitted groups only. If it fails, the group is sent without these fields.
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
"""Largest `top_k` without a request to the teacher."""


class TeacherDistillationConfig(BaseEnvConfig):
    """Settings of an environment with a teacher.

    Example:
        TeacherDistillationConfig(teacher_enabled=True, teacher_top_k=8, group_size=8)
    """

    teacher_enabled: bool = Field(
        False, description="Whether to send a teacher's log-probabilities with every group."
    )
    teacher_top_k: int = Field(
        0,
        ge=NOT_WANTED,
        description="Number of the teacher's most likely tokens per position; 0 takes only the "
        "token of the trajectory, -1 disables requests to the teacher.",
    )


class TeacherDistillationEnv(BaseEnv):
    """An environment with a teacher that scores its trajectories before they are sent.

    The hooks are those of `BaseEnv`. A constructor need not take the teacher's servers: `serve`
    sets the attribute `teacher_server_configs` from `--teacher.*` before the constructor runs.

    Args:
        config: settings.
        server_configs: inference servers of the policy.
        slurm: Whether to discover them through Slurm.
        testing: Whether to use scripted servers.
        teacher_server_configs: servers of the teacher, a list or a single config; None uses the
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
        """Use these servers as the teacher: a list of configs, a single one, or a `ServerBaseline`.

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
        """Raise `ConfigError` if the teacher's vocabulary differs from this environment's."""
        if teacher_tokenizer_name == self.tokenizer.name_or_path:
            return
        import transformers

        try:
            teacher = transformers.AutoTokenizer.from_pretrained(
                teacher_tokenizer_name, use_fast=True
            )
        except Exception as error:  # the hub, the disk and the files raise different errors
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
        """Add the teacher's logprobs to admitted groups, within `worker_timeout` seconds."""
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

        Both are None if the group has no teacher, or the teacher fails for a trajectory.
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
        overrides = group.get("group_overrides") or {}
        if not group.get("tokens") or overrides.get("skip_teacher_top_k"):
            return NOT_WANTED
        top_k: int = overrides.get("teacher_top_k", self.config.teacher_top_k)
        return top_k

    async def _fetch_teacher_for_sequence(
        self, token_ids: list[int], top_k: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return the teacher's most likely ids and their logprobs, both [L][K], of one trajectory.

        Position t has the teacher's prediction of token t from the tokens before it; the first
        position is empty.
        """
        assert self.teacher_server is not None, "there is no teacher; see connect_teacher"
        rows = await self.teacher_server.get_logprobs(
            input_ids=token_ids, top_k=top_k, max_tokens=1, split="train"
        )
        return rows["prompt_topk_token_ids"], rows["prompt_topk_logprobs"]

    async def _run_close_hook(self) -> None:
        await super()._run_close_hook()
        if self.teacher_server is not None:
            await self._reporter.tolerate(
                self.teacher_server.close(), "closing the teacher's connections"
            )

    @classmethod
    def teacher_config_init(cls) -> ServerConfigs | None:
        """Return the default servers of the teacher; None if `serve` must get them as flags."""
        return None

    @classmethod
    def _resolve_teacher_server_configs(
        cls,
        default_teacher_server_configs: ServerConfigs | None,
        yaml_config: Mapping[str, Any],
        cli_passed_flags: Mapping[str, Any],
    ) -> ServerConfigs | None:
        """Merge the teacher's defaults, YAML section and flags; return None if all are missing.

        Raises:
            UsageError: an unknown key, an invalid value, or flags for several servers.
        """
        prefix = f"{cls.teacher_namespace}{NAMESPACE_SEP}"
        flags = extract_namespace(cli_passed_flags, prefix)
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
            message = error.message.replace(OPENAI_PREFIX, prefix)
            own_section = f"{cls.teacher_namespace}:"
            raise UsageError(message.replace(f"{OPENAI_NAMESPACE}:", own_section)) from error

    @classmethod
    def get_cli_serve_config_cls(cls) -> type:
        from atroposlib.envs.commands import with_teacher

        return with_teacher(cls, super().get_cli_serve_config_cls())
