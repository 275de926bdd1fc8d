"""`AdapterEnv`: the task set of another library as one of our environments.

    adapter.item ─► G x rollout ─► group ─► service
                      │
                      ├ Episode       ─► GuardedConversation ─► play, on a managed server
                      └ AgentEpisode  ─► run ─► requests ─► agent proxy, one session per rollout

An exception of the other library, a call that does not return, an invalid reward and a lost server
fail the rollout, counted as `failures/<name of the exception>`. A failed rollout is repeated up to
`episode_retries` times, so that one failure does not cost the group. Sessions are closed however a
rollout ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from pydantic import Field

from atroposlib.adapters.interface import (
    Adapter,
    AgentEndpoint,
    AgentEpisode,
    Episode,
    EpisodeEnd,
    Item,
    finite_reward,
)
from atroposlib.adapters.registry import adapter_class, make_adapter, split_spec
from atroposlib.adapters.remote import repeat_until_connected
from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn, is_chat
from atroposlib.envs.multi_turn_env import (
    ChatPolicy,
    MultiTurnEnv,
    MultiTurnEnvConfig,
    Policy,
    Rollout,
    TokenPolicy,
    TokenSequence,
    TurnSpan,
    discounted_return,
    play,
    rollout_of_record,
)
from atroposlib.envs.reporting import Reward, weigh
from atroposlib.envs.server_handling.chat_rendering import special_spellings, without_specials
from atroposlib.envs.server_handling.proxy import (
    AgentProxy,
    AgentSession,
    AgentTurn,
    ProxySettings,
)
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.single_turn_env import RESERVED_TOKENS
from atroposlib.errors import (
    AtroposError,
    ConfigError,
    EpisodeError,
    EpisodeFailedError,
    EpisodeRewardError,
    EpisodeTimeoutError,
    MissingExtraError,
)
from atroposlib.utils.text import without_lone_surrogates

__all__ = ["AdapterEnv", "AdapterEnvConfig", "environment_class"]

logger = logging.getLogger(__name__)

CLOSE_S = 15.0
"""Time limit of closing one episode."""
OPEN_S = 900.0
"""Time limit of loading a task set."""
OUTAGE_S = 3600.0
"""Time for which the next item is asked for again while its source cannot be reached."""
MAX_FAILED_ITEMS = 3
"""Items in a row that the other library may fail to make before the run ends."""
MIN_AGENT_TOKENS = 16

Result = TypeVar("Result")


class AdapterEnvConfig(MultiTurnEnvConfig):
    """Settings of environments of other libraries."""

    adapter: str = Field("", description="Task set as KIND:NAME, such as gymnasium:FrozenLake-v1.")
    adapter_args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the adapter, by name; set with --args."
    )
    adapter_seed: int = Field(0, description="Seed of the choice and order of items.")
    step_timeout_s: float = Field(
        60.0, gt=0, description="Time limit of one call of the other library in seconds."
    )
    conversation_timeout_s: float | None = Field(
        900.0, gt=0, description="Time limit of one rollout in seconds; None: no limit."
    )
    episode_retries: int = Field(
        1,
        ge=0,
        le=100,
        description="Number of times a rollout is repeated that the other library broke.",
    )
    max_concurrent_episodes: int | None = Field(
        None,
        ge=1,
        description="Number of episodes that run at the same time; None: the adapter's own limit.",
    )
    num_eval_items: int = Field(
        32, ge=0, le=1_000_000, description="Number of items of an evaluation."
    )


class GuardedConversation(Conversation):
    """An episode as a conversation: time limits, and exceptions named by their cause."""

    def __init__(
        self,
        episode: Episode,
        *,
        where: str,
        step_timeout_s: float,
        begin_timeout_s: float | None = None,
        limits_replies: bool = False,
        specials: re.Pattern[str] | None = None,
    ) -> None:
        self.episode = episode
        self._specials = specials
        self._where = where
        self._step_timeout_s = step_timeout_s
        self._begin_timeout_s = begin_timeout_s or step_timeout_s
        self._reply_timeout_s = None if limits_replies else step_timeout_s
        self._opening: Sequence[ChatMessage] = ()
        self._has_ended = False
        self.is_closed = False

    async def begin(self) -> None:
        self._opening = self._inert(await self._call(self.episode.begin(), self._begin_timeout_s))

    def opening(self) -> Sequence[ChatMessage]:
        return self._opening

    async def reply(self, turn: Turn) -> Reply:
        reply = await self._call(self.episode.reply(turn), self._reply_timeout_s)
        self._has_ended = True  # after an invalid reward, nothing is left to score
        self._check_reward(reply.reward)
        self._has_ended = reply.is_done
        messages = reply.messages
        if not (reply.is_done or messages or reply.history):
            messages = [{"role": "user", "content": ""}]  # an observation without text
        return replace(
            reply,
            messages=self._inert(messages),
            history=None if reply.history is None else self._inert(reply.history),
        )

    async def close(self) -> None:
        """Score an episode that a limit ended, and close it; errors of closing are logged."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            if self._opening and not self._has_ended:
                limit_s = min(self._step_timeout_s, CLOSE_S)
                self.unfinished_reward = await self._call(self.episode.truncated(), limit_s)
                self._check_reward(self.unfinished_reward)
        finally:
            await close_quietly(self.episode, self._where)

    def _inert(self, messages: Any) -> Any:
        """Return messages that spell no special tokens; turns of the policy are unchanged.

        Halves of surrogate pairs are replaced, which no tokenizer takes. `play` reports what is not
        a chat.
        """
        if isinstance(messages, str):
            return _inert_text(messages, self._specials)
        if not is_chat(messages):
            return messages
        return [
            message
            if message["role"] == "assistant" or "content" not in message
            else {**message, "content": _map_texts(message["content"], self._specials)}
            for message in messages
        ]

    async def _call(self, call: Awaitable[Result], limit_s: float | None) -> Result:
        try:
            return await _within(call, limit_s, self._where)
        except BaseException:
            self._has_ended = True  # nothing is left to score
            raise

    def _check_reward(self, reward: Reward) -> None:
        _checked_reward(reward, self._where)


def _inert_text(text: str, specials: re.Pattern[str] | None) -> str:
    return without_specials(without_lone_surrogates(text), specials)


def _map_texts(content: Any, specials: re.Pattern[str] | None) -> Any:
    if isinstance(content, str):
        return _inert_text(content, specials)
    if not isinstance(content, list | tuple):
        return content
    return [
        {**part, "text": _inert_text(part["text"], specials)}
        if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        else part
        for part in content
    ]


def _checked_reward(reward: Any, where: str) -> None:
    try:
        total = weigh(reward, {}, f"{where} gave the reward").total
    except (TypeError, ValueError) as error:
        raise EpisodeRewardError(str(error)) from error
    finite_reward(total, where)


async def _within(call: Awaitable[Result], timeout_s: float | None, where: str) -> Result:
    """Await a call of another library; its exceptions become an `EpisodeError`."""
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    finally:
        if not task.done():
            task.cancel()
    if not done:
        await asyncio.wait({task}, timeout=CLOSE_S)
        raise EpisodeTimeoutError(f"{where}: no answer within {timeout_s:g} s")
    try:
        return task.result()
    except asyncio.CancelledError as error:
        raise EpisodeFailedError(f"{where} cancelled itself") from error
    except AtroposError:
        raise
    except Exception as error:  # any exception of the other library fails this rollout only
        text = f"{type(error).__name__}: {error}"
        raise EpisodeFailedError(f"{where} raised {text[:500]}") from error


async def close_quietly(episode: Episode | AgentEpisode, where: str) -> None:
    """Close an episode within a time limit; a failure is logged, since the rollout has ended."""
    try:
        await _within(episode.close(), CLOSE_S, where)
    except AtroposError as error:
        logger.warning("an episode was not closed: %s", error)


class AdapterEnv(MultiTurnEnv):
    """Plays the episodes of an adapter; made for one task set by `environment_class`.

    Attributes:
        adapter: the adapter, from `setup` on.
        iter: number of items handed out; kept in checkpoints.
        episodes_open: number of episodes that are running.
        episodes_started: number of episodes since the start, including repeated ones.
    """

    env_config_cls = AdapterEnvConfig
    config: AdapterEnvConfig
    adapter: Adapter
    default_model = "Qwen/Qwen3-0.6B"
    check_settings: ClassVar[Mapping[str, Any]] = {"num_eval_items": 4}
    mistakes: ClassVar = (ConfigError, MissingExtraError, EpisodeError)
    """Exceptions of `setup` that end `check` in one line: the name or an argument is wrong."""
    no_gold_answer: ClassVar = "the adapter knows no right answer"
    """Text of `check` in place of the advice to define `check_gold_answer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0
        self.episodes_open = 0
        self.episodes_started = 0
        self._eval_items: Sequence[Item] = ()
        self._slots: asyncio.Semaphore | None = None
        self._proxy: AgentProxy | None = None
        self._proxy_started: asyncio.Future[None] | None = None
        self._is_open = False

    @classmethod
    def check_inputs(cls, config: BaseEnvConfig) -> None:
        """Check the name, the package and the arguments of the adapter."""
        if isinstance(config, AdapterEnvConfig):
            make_adapter(config.adapter, config.adapter_args, seed=config.adapter_seed)

    async def setup(self) -> None:
        self.adapter = make_adapter(
            self.config.adapter,
            self.config.adapter_args,
            seed=self.config.adapter_seed,
            step_timeout_s=self.config.step_timeout_s,
        )
        self._is_open = True
        await _within(self.adapter.open(), OPEN_S, self.config.adapter)
        limit = self.config.max_concurrent_episodes or self.adapter.max_concurrent
        self._slots = None if limit is None else asyncio.Semaphore(limit)
        if self.config.num_eval_items:
            items = self.adapter.eval_items(self.config.num_eval_items)
            self._eval_items = await _within(items, OPEN_S, self.config.adapter)

    async def close(self) -> None:
        if self._proxy is not None:
            await self._proxy.close()
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(EpisodeError):
                await _within(self.adapter.close(), CLOSE_S, self.config.adapter)
        await super().close()

    async def get_next_item(self) -> Item:
        """Return the next item; one that the other library cannot make is left out."""
        for _ in range(MAX_FAILED_ITEMS - 1):
            try:
                return await self._next_item()
            except EpisodeFailedError as error:
                self.count_failure(type(error).__name__)
                logger.warning("item %d is left out: %s", self.iter - 1, error)
        return await self._next_item()

    async def _next_item(self) -> Item:
        index, self.iter = self.iter, self.iter + 1
        where = self.config.adapter
        return await repeat_until_connected(
            lambda: _within(self.adapter.item(index), OPEN_S, where), limit_s=OUTAGE_S, where=where
        )

    def eval_items(self) -> Sequence[Item]:
        return self._eval_items

    def start_conversation(self, item: Item) -> Conversation:
        """Return a conversation before its first message; `collect_trajectory` starts it."""
        episode = self.adapter.start(item)
        if not isinstance(episode, Episode):
            raise TypeError(f"{type(episode).__name__} runs a loop of its own; it has no turns")
        return GuardedConversation(
            episode,
            where=self.config.adapter,
            step_timeout_s=self.config.step_timeout_s,
            begin_timeout_s=self.adapter.begin_timeout_s,
            limits_replies=self.adapter.limits_replies,
        )

    async def collect_trajectory(self, item: Item) -> tuple[Rollout, list[Item]]:
        """Play one episode; repeat it if the other library breaks it."""
        return await self._roll_out_again(item, is_evaluation=False), []

    async def play_for_evaluation(self, item: Item) -> Rollout:
        return await self._roll_out_again(item, is_evaluation=True)

    async def _roll_out_again(self, item: Item, *, is_evaluation: bool) -> Rollout:
        for _ in range(self.config.episode_retries):
            try:
                return await self._roll_out(item, is_evaluation=is_evaluation)
            except EpisodeError as error:
                self.count_failure(type(error).__name__)
                logger.warning("a rollout is repeated: %s", error)
        return await self._roll_out(item, is_evaluation=is_evaluation)

    async def restored_rollout(self, item: Item, saved: dict[str, Any]) -> Rollout:
        """Return the recorded rollout; the other library plays no episode for it."""
        rollout = rollout_of_record(saved)
        rollout.item = item
        return rollout

    async def postprocess_histories(self, trajectories: Sequence[Rollout]) -> Any:
        group = await super().postprocess_histories(trajectories)
        discount = self.config.reward_discount
        item = trajectories[0].item
        self.adapter.note_rewards(
            item, [discounted_return(r.rewards, discount=discount) for r in trajectories]
        )
        return group

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        own = {"iter": self.iter, "adapter_state": self.adapter.state()}
        super().save_checkpoint(step, {**(data or {}), **own})

    @property
    def adapter_state(self) -> dict[str, Any]:
        """The adapter's state in checkpoints; assigning it restores the adapter."""
        return self.adapter.state()

    @adapter_state.setter
    def adapter_state(self, state: Mapping[str, Any]) -> None:
        self.adapter.restore(state)

    def check_gold_answer(self, item: Item) -> str | Sequence[str] | None:
        return self.adapter.gold_answer(item)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        metrics["adapter/episodes_open"] = self.episodes_open
        metrics["adapter/episodes_started"] = self.episodes_started
        if self._is_open:
            metrics.update({f"adapter/{k}": v for k, v in self.adapter.metrics().items()})
        await super().wandb_log(metrics)

    async def _roll_out(self, item: Item, *, is_evaluation: bool) -> Rollout:
        async with self._slots or contextlib.nullcontext():
            self.episodes_open += 1
            self.episodes_started += 1
            try:
                episode = self.adapter.start(item)
                if isinstance(episode, AgentEpisode):
                    rollout = await self._run_agent(episode, is_evaluation=is_evaluation)
                else:
                    rollout = await self._play(episode, is_evaluation=is_evaluation)
            finally:
                self.episodes_open -= 1
        rollout.item = item
        return rollout

    async def _play(self, episode: Episode, *, is_evaluation: bool) -> Rollout:
        conversation = GuardedConversation(
            episode,
            where=self.config.adapter,
            step_timeout_s=self.config.step_timeout_s,
            begin_timeout_s=self.adapter.begin_timeout_s,
            limits_replies=self.adapter.limits_replies,
            specials=self._specials,
        )
        async with self._policy(is_evaluation=is_evaluation) as policy:
            try:
                await conversation.begin()
                rollout = await play(
                    conversation,
                    policy,
                    limits=self.limits(),
                    reward_weights=self.config.reward_weights,
                )
            finally:
                await conversation.close()  # does nothing if `play` has closed it
        rollout.metrics = finite_metrics(episode.metrics)
        return rollout

    @cached_property
    def _specials(self) -> re.Pattern[str] | None:
        return special_spellings(self.tokenizer)

    @contextlib.asynccontextmanager
    async def _policy(self, *, is_evaluation: bool) -> AsyncIterator[Policy]:
        if is_evaluation:
            yield ChatPolicy(
                self.server, self.tokenizer, temperature=self.config.eval_temperature, split="eval"
            )
            return
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            yield TokenPolicy(managed, self.tokenizer, temperature=self.config.temperature)

    async def _run_agent(self, episode: AgentEpisode, *, is_evaluation: bool) -> Rollout:
        proxy = await self._started_proxy()
        temperature = self.config.eval_temperature if is_evaluation else self.config.temperature
        limits = self.limits()
        # The proxy lowers it to what remains of `max_token_length`.
        max_tokens = limits.max_turn_tokens or max(MIN_AGENT_TOKENS, limits.max_tokens)
        try:
            if isinstance(self.server, ServerManager):
                # The proxy refuses requests while the engine is down: the episode would fail.
                await self.server.wait_for_sem(is_training=not is_evaluation)
            async with proxy.session(
                tool_parser=episode.tool_parser,
                records_turns=episode.records_turns,
                temperature=temperature if episode.fixes_sampling else None,
                max_tokens=max_tokens if episode.fixes_sampling else None,
            ) as session:
                endpoint = AgentEndpoint(
                    base_url=session.base_url,
                    api_key=session.api_key,
                    model=session.model,
                    max_tokens=max_tokens,
                    temperature=temperature,
                    turns=session.turns,
                )
                end = await _within(
                    episode.run(endpoint),
                    self.config.conversation_timeout_s,
                    self.config.adapter,
                )
                _checked_reward(end.reward, self.config.adapter)
                return self._agent_rollout(session, end)
        finally:
            await close_quietly(episode, self.config.adapter)

    def _agent_rollout(self, session: AgentSession, end: EpisodeEnd) -> Rollout:
        """Return the record of an agent: its sequences, and its reward as that of one turn."""
        weighed = weigh(end.reward, self.config.reward_weights, self.config.adapter)
        chats = chats_of_rows(session.turns())
        sequences = [
            TokenSequence(
                tokens=node.tokens,
                masks=node.masked_tokens,
                inference_logprobs=node.logprobs,
                messages=chats.get(row) or list(end.messages),
                spans=[TurnSpan(0, 0, len(node.tokens))],
                finish_reason=(node.metadata or {}).get("finish_reason"),
            )
            for row, node in enumerate(session.nodes())
        ]
        if not sequences:
            raise EpisodeFailedError(f"{self.config.adapter} ended without asking the model")
        return Rollout(
            sequences=sequences,
            rewards=[weighed.total],
            reward_parts=[weighed.parts],
            messages=list(end.messages) or sequences[0].messages,
            outcome="truncated" if end.is_truncated else "done",
            metrics=finite_metrics(end.metrics),
            trace=end.trace,
        )

    async def _started_proxy(self) -> AgentProxy:
        if self._proxy is None or self._proxy_started is None:
            limit = max(1, self.limits().max_tokens - RESERVED_TOKENS)
            settings = ProxySettings(max_sequence_tokens=limit)
            proxy = AgentProxy(self.server, self.tokenizer, settings=settings)
            self._proxy, self._proxy_started = proxy, asyncio.ensure_future(proxy.start())
        proxy, started = self._proxy, self._proxy_started
        try:
            await asyncio.shield(started)
        except Exception:
            if self._proxy is proxy:
                self._proxy = None  # the next rollout starts another one
            raise
        return proxy


def finite_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of metrics; others would spoil the means, or could not be logged.

    Numbers of NumPy and tensors of one element are numbers.
    """
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)
            if math.isfinite(number):
                numbers[name] = number
    return numbers


def chats_of_rows(turns: Sequence[AgentTurn]) -> dict[int, list[ChatMessage]]:
    """Return the chat of each row, from the last request that its sequence answered."""
    return {
        turn.row: [*map(dict, turn.messages), {"role": "assistant", **turn.reply}]
        for turn in sorted(turns, key=lambda turn: turn.end)
        if turn.row is not None and turn.messages
    }


def environment_class(spec: str) -> type[AdapterEnv]:
    """Return an `AdapterEnv` whose defaults are those of one task set.

    Args:
        spec: `KIND:NAME`.

    Raises:
        ConfigError: the kind is unknown.
        MissingExtraError: its package is not installed.
    """
    kind, name = split_spec(spec)
    defaults = {"adapter": spec, **adapter_class(kind).default_settings}
    attributes: dict[str, Any] = {
        "name": f"{kind}_{name}".replace("/", "_").replace(":", "_")[:64],
        "default_settings": defaults,
        "__doc__": f"The task set {spec}.",
        "__module__": __name__,
    }
    return type("AdapterEnv", (AdapterEnv,), attributes)
