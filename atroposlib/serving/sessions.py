"""Our environments as episodes of remote clients; the pages of protocols build on it.

    index or seed ─► item ─► conversation ─► messages ─► text of the policy ─► reward, messages ─► …
                                    └► tools ─► call of the policy ─► result ─► …

`EpisodeHost` owns the environment and its open episodes. Their number is limited, an episode
without requests is closed after a time, and a failed episode does not affect others. Clients read
the kind of a failure; its traceback is in the log only.

An environment can be served if it is a `SingleTurnEnv`, whose `prompt` and `score` become an
episode of one turn, or a `MultiTurnEnv`, whose conversations are episodes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from atroposlib.adapters.env import AdapterEnv, GuardedConversation
from atroposlib.adapters.interface import finite_reward
from atroposlib.api.auth import Role, TokenTable, read_token_file
from atroposlib.envs.conversation import ChatMessage, Conversation, Outcome, Reply, Turn
from atroposlib.envs.multi_turn_env import MultiTurnEnv
from atroposlib.envs.reporting import weigh
from atroposlib.envs.single_turn_env import SingleTurnEnv
from atroposlib.envs.tools import Tool, ToolConversation, ToolResult
from atroposlib.errors import AtroposError, ConfigError
from atroposlib.utils.aio import end_task, settle
from atroposlib.utils.text import inert_line
from atroposlib.utils.web_pages import WebPageMiddleware, WebPageRule, names_of_address

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = [
    "EpisodeHost",
    "PlayedTurn",
    "RefusedRequestError",
    "ServedEpisode",
    "ServingSettings",
    "difference_from_training",
    "explain_invalid_requests",
    "protect",
    "require_servable",
    "text_of_messages",
]

logger = logging.getLogger(__name__)

TRAIN, TEST = "train", "test"
"""Splits: items of `get_next_item`, and those of `eval_items`."""
CLOSE_S = 15.0
"""Time limit of closing one episode, and the environment."""
SETUP_S = 900.0
MAX_SWEEP_PAUSE_S = 5.0
MAX_REASONS = 20
"""Errors of one invalid request that are reported."""
BODY_BYTES = 1024 * 1024
"""Bytes of a request in addition to four for each character of a turn."""

Result = TypeVar("Result")


class RefusedRequestError(AtroposError, RuntimeError):
    """A request cannot be answered; the text is for the client.

    Attributes:
        status: HTTP status that fits the reason.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServingSettings(BaseModel):
    """Limits of a served environment; immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_tasks: int = Field(
        1000, ge=1, le=1_000_000, description="Number of training items that clients can select."
    )
    max_sessions: int = Field(
        64,
        ge=1,
        le=10_000,
        description="Maximum number of open episodes; further ones are refused.",
    )
    idle_timeout_s: float = Field(
        600.0,
        gt=0,
        le=86_400,
        description="Seconds without a request after which an episode is closed.",
    )
    step_timeout_s: float = Field(
        60.0, gt=0, le=86_400, description="Time limit of one turn of the environment in seconds."
    )
    max_text_chars: int = Field(
        200_000, ge=1, le=10_000_000, description="Maximum number of characters of one turn."
    )
    token_file: Path | None = Field(
        None,
        description="File with bearer tokens, as for run-api; clients need one of the role trainer "
        "or admin.",
    )


def require_servable(env_cls: type[Any]) -> None:
    """Check that an environment has episodes for remote clients.

    Raises:
        ConfigError: it has neither prompts and scores nor conversations.
    """
    name = getattr(env_cls, "__name__", env_cls)
    if not isinstance(env_cls, type) or not issubclass(env_cls, (SingleTurnEnv, MultiTurnEnv)):
        raise ConfigError(
            f"{name} cannot be served: it collects its trajectories itself; expected a "
            "SingleTurnEnv, with `prompt` and `score`, or a MultiTurnEnv, with `start_conversation`"
        )
    own = (MultiTurnEnv.collect_trajectory, AdapterEnv.collect_trajectory)
    if issubclass(env_cls, MultiTurnEnv) and env_cls.collect_trajectory not in own:
        raise ConfigError(
            f"{name} cannot be served: its collect_trajectory changes rollouts, so the rewards of "
            "its conversations are not those of its training"
        )


def difference_from_training(env_cls: type[Any]) -> str | None:
    """Return how the rewards of clients may differ from those of our groups; None if they do not.

    Example: `group_scores of GSM8kEnv applies to groups of our own training only`.
    """
    base = SingleTurnEnv if issubclass(env_cls, SingleTurnEnv) else MultiTurnEnv
    names = ("collect_trajectories", "group_scores", "postprocess_histories")
    if issubclass(env_cls, AdapterEnv):
        return None
    changed = [n for n in names if getattr(env_cls, n, None) is not getattr(base, n, None)]
    if not changed:
        return None
    verb = "apply" if len(changed) > 1 else "applies"
    return f"{', '.join(changed)} of {env_cls.__name__} {verb} to groups of our own training only"


def text_of_messages(messages: Sequence[ChatMessage]) -> str:
    """Return the texts of messages, one after another; parts that are not text are left out."""
    texts = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else [{"text": content or ""}]
        texts += [
            str(part["text"]) for part in parts if isinstance(part, Mapping) and "text" in part
        ]
    return "\n\n".join(texts)


@dataclass(frozen=True)
class PlayedTurn:
    """The environment's answer to a turn or a tool call."""

    messages: list[ChatMessage] = field(default_factory=list)
    """Next messages for the policy."""
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Unweighted parts of the reward; empty if it is a number."""
    is_done: bool = False
    outcome: Outcome | None = None
    """The end of the episode; None while it continues."""
    history: list[ChatMessage] | None = None
    """Chat that replaces the one so far, before `messages`."""
    tool_result: ToolResult | None = None


class AnswerConversation(Conversation):
    """An item of a `SingleTurnEnv`: its prompt, and the score of the first answer."""

    def __init__(self, env: Any, item: Any) -> None:
        self._env = env
        self._item = item

    def opening(self) -> Sequence[ChatMessage]:
        messages: Sequence[ChatMessage] = self._env._checked_prompt(self._item)
        return messages

    async def reply(self, turn: Turn) -> Reply:
        return await self.score(turn.text, is_truncated=False)

    async def score(self, text: str, *, is_truncated: bool) -> Reply:
        """Score a completion; a client does not repeat the start that prompts give it."""
        prefill = self._env.prefill
        completion = text if text.startswith(prefill) else prefill + text
        answer = self._env._shown(completion, is_cut=is_truncated)
        [score] = await self._env.weighed_scores(self._item, [answer])
        return Reply(reward=score.parts or score.total, is_done=True)


class ServedEpisode:
    """One episode of a client. Its requests are answered one after another.

    Attributes:
        id: identifies the episode; hard to guess.
        messages: the first messages for the policy.
        tools: tools that the client may call; empty if calls are part of the texts.
        rewards: [T] reward of each turn so far.
        last_used: time of the last request.
        is_done: Whether the conversation is over.
        ended: set when the episode has been closed.
    """

    def __init__(
        self, host: EpisodeHost, conversation: Conversation, *, split: str, index: int
    ) -> None:
        self.id = secrets.token_hex(16)
        self.split = split
        self.index = index
        self.messages: list[ChatMessage] = []
        self.tools: list[Tool] = []
        self.rewards: list[float] = []
        self.is_done = False
        self.ended = asyncio.Event()
        self.last_used = host.clock()
        self.num_running = 0
        self._host = host
        self._conversation = conversation
        self._chat: list[ChatMessage] = []
        self._lock = asyncio.Lock()
        self._is_closed = False

    @property
    def total_reward(self) -> float:
        return sum(self.rewards)

    async def begin(self) -> None:
        """Start the conversation."""
        conversation = self._conversation
        if isinstance(conversation, GuardedConversation):
            await conversation.begin()
        self._chat = list(conversation.opening())
        self.messages = list(self._chat)
        if self._host.offers_tools and has_native_tools(conversation):
            assert isinstance(conversation, ToolConversation)
            self.tools = list(conversation.tools)
            self.messages = list(conversation.messages)  # clients describe the tools themselves
            if [tool.name for tool in self.tools] != [tool.name for tool in self._host.tools]:
                raise ConfigError("its tools differ from those of the first item")

    async def write(self, text: str, *, is_truncated: bool = False) -> PlayedTurn:
        """Play a turn of the policy.

        Args:
            text: the completion.
            is_truncated: Whether a token limit of the client ended it; the episode then ends.

        Raises:
            RefusedRequestError: the episode is over, the text is too long, or the environment
                failed, which ends the episode.
        """
        limit = self._host.settings.max_text_chars
        if len(text) > limit:
            raise RefusedRequestError(
                f"the turn has {len(text)} characters; at most {limit} are accepted", status=413
            )
        return await self._guarded(lambda: self._play(text, is_truncated=is_truncated))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> PlayedTurn:
        """Play a turn that calls one tool; the result is `tool_result`.

        Raises:
            RefusedRequestError: as for `write`.
        """
        if not self.tools:
            raise RefusedRequestError("this environment has no tools to call", status=400)
        call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        call = call.replace("<", "\\u003c")  # a text must not end the block
        limit = self._host.settings.max_text_chars
        if len(call) > limit:
            raise RefusedRequestError(
                f"the call has {len(call)} characters; at most {limit} are accepted", status=413
            )
        text = f"<tool_call>\n{call}\n</tool_call>"
        return await self._guarded(lambda: self._play(text, is_truncated=False))

    async def close(self) -> None:
        """Release the episode; safe to repeat. Errors of the environment are logged."""
        if self._is_closed:
            return
        self._mark_closed()
        try:
            await asyncio.wait_for(settle(self._conversation.close()), CLOSE_S)
        except Exception:
            logger.exception("episode %s of %s was not closed", self.id[:8], self._host.name)

    def _mark_closed(self) -> None:
        self._is_closed = True
        self.ended.set()
        self._host.forget(self)

    async def _guarded(self, play: Callable[[], Awaitable[PlayedTurn]]) -> PlayedTurn:
        self.num_running += 1
        try:
            async with self._lock:
                if self._is_closed or self.is_done:
                    raise RefusedRequestError("the episode is over; start another", status=409)
                played = await self._host.within_limits(play(), "the turn")
        except RefusedRequestError as error:
            if error.status >= 500:
                await self.close()
            raise
        except asyncio.CancelledError:
            await asyncio.shield(self.close())  # an interrupted turn cannot be repeated
            raise
        finally:
            self.num_running -= 1
            self.last_used = self._host.clock()
        if played.is_done:
            self.is_done = True
            await self.close()
        return played

    async def _play(self, text: str, *, is_truncated: bool) -> PlayedTurn:
        conversation = self._conversation
        self._chat = [*self._chat, {"role": "assistant", "content": text}]
        num_known = len(self._results())
        outcome: Outcome | None = "truncated" if is_truncated else None
        if not is_truncated:
            reply = await conversation.reply(Turn(text, len(self.rewards), tuple(self._chat)))
        elif isinstance(conversation, AnswerConversation):
            reply = await conversation.score(text, is_truncated=True)
        else:
            return await self._unfinished(PlayedTurn(outcome=outcome))
        if not isinstance(reply, Reply):
            raise TypeError(f"{type(conversation).__name__}.reply returned {reply!r:.100}")
        weighed = weigh(reply.reward, self._host.reward_weights, "reply gave the reward")
        finite_reward(weighed.total, self._host.name)
        self.rewards.append(weighed.total + 0.0)  # not -0.0
        history = None if reply.history is None else list(reply.history)
        self._chat = [*(self._chat if history is None else history), *reply.chat_messages()]
        results = self._results()[num_known:]
        played = PlayedTurn(
            messages=reply.chat_messages(),
            reward=self.rewards[-1],
            reward_parts=weighed.parts,
            is_done=reply.is_done,
            outcome=outcome or ("done" if reply.is_done else None),
            history=history,
            tool_result=results[-1] if results else None,
        )
        if reply.is_done or len(self.rewards) < self._host.max_turns:
            return played
        return await self._unfinished(played)

    async def _unfinished(self, played: PlayedTurn) -> PlayedTurn:
        """End an episode at a limit: add the reward of an unfinished conversation."""
        self._mark_closed()
        await settle(self._conversation.close())  # an adapter scores the episode here
        weighed = weigh(
            self._conversation.unfinished_reward, self._host.reward_weights, "unfinished_reward is"
        )
        finite_reward(weighed.total, self._host.name)
        if played.outcome == "truncated":
            self.rewards.append(weighed.total)
        else:
            self.rewards[-1] += weighed.total
        parts = dict(played.reward_parts)
        for name, value in weighed.parts.items():
            parts[name] = parts.get(name, 0.0) + value
        return PlayedTurn(
            messages=played.messages,
            reward=played.reward + weighed.total,
            reward_parts=parts,
            is_done=True,
            outcome=played.outcome or "out_of_turns",
            tool_result=played.tool_result,
        )

    def _results(self) -> list[ToolResult]:
        conversation = self._conversation
        return conversation.results if isinstance(conversation, ToolConversation) else []


def has_native_tools(conversation: Conversation) -> bool:
    """Whether the tools of a conversation can be called without the texts of our calls."""
    if not isinstance(conversation, ToolConversation):
        return False
    kind = type(conversation)
    return (
        kind.find_calls is ToolConversation.find_calls and kind.opening is ToolConversation.opening
    )


class EpisodeHost:
    """An environment and the episodes of its clients.

    Args:
        env: the environment; this object sets it up and closes it.
        settings: limits.
        offers_tools: Whether clients call tools by name instead of writing calls as text.
        clock: returns seconds, for the time-out of idle episodes.

    Attributes:
        name: name of the environment.
        tools: tools of its conversations, from `open` on; empty without `offers_tools`.
        max_turns: turns of one episode.
        reward_weights: weights of the named parts of rewards.
        sweeps: called again and again while the environment is served, to remove what is idle.
    """

    def __init__(
        self,
        env: Any,
        settings: ServingSettings,
        *,
        offers_tools: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_servable(type(env))
        self.env = env
        self.settings = settings
        self.offers_tools = offers_tools
        self.clock = clock
        self.name: str = env.name or type(env).__name__
        self.tools: list[Tool] = []
        self.max_turns: int = env.limits().max_turns if isinstance(env, MultiTurnEnv) else 1
        self.reward_weights: Mapping[str, float] = env.config.reward_weights
        self.max_sessions = settings.max_sessions
        self.sweeps: list[Callable[[], Awaitable[Any]]] = [self.close_idle]
        self._items: list[Any] = []
        self._test_items: Sequence[Any] = ()
        self._has_all_items = False
        self._drawing = asyncio.Lock()
        self._episodes: dict[str, ServedEpisode] = {}
        self._num_starting = 0
        self._next_index = 0
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def description(self) -> str:
        """First paragraph of the docstring of the environment's class."""
        return (type(self.env).__doc__ or self.name).strip().partition("\n\n")[0]

    @property
    def num_open(self) -> int:
        """Number of open episodes, including those that are starting."""
        return len(self._episodes) + self._num_starting

    async def open(self) -> None:
        """Set the environment up, and start a first episode to see its tools.

        Raises:
            ConfigError: it has no items, or an episode that clients cannot play.
        """
        await asyncio.wait_for(settle(self.env.setup()), SETUP_S)
        if isinstance(self.env, AdapterEnv):
            limit = self.env.config.max_concurrent_episodes or self.env.adapter.max_concurrent
            self.max_sessions = min(self.max_sessions, limit or self.max_sessions)
        self._test_items = self.env.eval_items()
        await self._draw_items(1)
        if not self._items:
            raise ConfigError(f"{self.name} has no items: get_next_item returned None")
        try:
            conversation = self._conversation(self._items[0])
        except TypeError as error:
            raise ConfigError(f"{self.name} cannot be served: {error}") from error
        try:
            if self.offers_tools and has_native_tools(conversation):
                assert isinstance(conversation, ToolConversation)
                self.tools = list(conversation.tools)
        finally:
            await settle(conversation.close())
        self._sweeper = asyncio.create_task(self._sweep())

    async def close_episodes(self) -> None:
        """Close all episodes; no further ones are started."""
        self.max_sessions = 0
        await asyncio.gather(*(episode.close() for episode in list(self._episodes.values())))

    async def close(self) -> None:
        """Close all episodes and the environment."""
        if self._sweeper is not None:
            await end_task(self._sweeper)
        await self.close_episodes()
        try:
            await asyncio.wait_for(settle(self.env.close()), CLOSE_S)
            await asyncio.wait_for(self.env._close_score_pool(), CLOSE_S)
            await asyncio.wait_for(self.env.server.close(), CLOSE_S)
        except Exception:
            logger.exception("%s was not closed", self.name)
        self.env._close_records()

    def num_tasks(self, split: str) -> int:
        """Return the number of items of a split.

        Raises:
            RefusedRequestError: there is no such split.
        """
        if split not in self.splits():
            raise RefusedRequestError(
                f"there is no split {split[:100]!r}; there are {', '.join(self.splits())}",
                status=400,
            )
        if split == TEST:
            return len(self._test_items)
        return len(self._items) if self._has_all_items else self.settings.num_tasks

    def splits(self) -> list[str]:
        """Return the splits that have items."""
        return [TRAIN, TEST] if len(self._test_items) else [TRAIN]

    def index_of(self, split: str, index: int | None, seed: int | None) -> int:
        """Return the index of a request: the given one, that of a seed, or the next.

        Raises:
            RefusedRequestError: the index is out of range.
        """
        count = self.num_tasks(split)
        if index is None and seed is None:
            index, self._next_index = self._next_index % count, self._next_index + 1
        if split == TRAIN:
            # Clients may know this number from the time before the last item was drawn.
            count = self.settings.num_tasks
        if index is None:
            index = random.Random(seed).randrange(count)
        if not 0 <= index < count:
            raise RefusedRequestError(
                f"index {index} of the split {split} is out of range; expected 0 to {count - 1}",
                status=400,
            )
        return index

    async def start(
        self, split: str = TRAIN, index: int | None = None, seed: int | None = None
    ) -> ServedEpisode:
        """Start an episode; see `index_of` for its item.

        Raises:
            RefusedRequestError: too many episodes are open, there is no such item, or the
                environment failed.
        """
        chosen = self.index_of(split, index, seed)
        if self.num_open >= self.max_sessions:
            raise RefusedRequestError(
                f"{self.num_open} episodes are open, which is the limit; close one or try later",
                status=503,
            )
        self._num_starting += 1
        try:
            return await self._begin(split, chosen)
        finally:
            self._num_starting -= 1

    async def _begin(self, split: str, index: int) -> ServedEpisode:
        item = await self.within_limits(self._item(split, index), "the item")
        try:
            conversation = self._conversation(item)
        except Exception as error:
            raise self._refusal("the start", error) from error
        # Nothing is awaited in between: a conversation that is not closed may keep a program.
        episode = ServedEpisode(self, conversation, split=split, index=index)
        try:
            await self.within_limits(episode.begin(), "the start")
        except BaseException:
            await asyncio.shield(episode.close())
            raise
        self._episodes[episode.id] = episode
        return episode

    def find(self, episode_id: str) -> ServedEpisode:
        """Return an open episode.

        Raises:
            RefusedRequestError: there is no open episode with this id.
        """
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise RefusedRequestError("there is no such episode, or it is over", status=404)
        return episode

    def forget(self, episode: ServedEpisode) -> None:
        """Remove a closed episode."""
        self._episodes.pop(episode.id, None)

    async def close_idle(self) -> int:
        """Close the episodes without a request for `idle_timeout_s`; return their number."""
        oldest = self.clock() - self.settings.idle_timeout_s
        idle = [e for e in self._episodes.values() if e.last_used < oldest and not e.num_running]
        for episode in idle:
            logger.info("episode %s of %s was idle; it is closed", episode.id[:8], self.name)
            await episode.close()
        return len(idle)

    async def within_limits(self, step: Awaitable[Result], what: str) -> Result:
        """Await a step of the environment within `step_timeout_s`.

        Raises:
            RefusedRequestError: it failed or took too long; the log has the details.
        """
        limit_s = self.settings.step_timeout_s
        task = asyncio.ensure_future(step)
        try:
            done, _ = await asyncio.wait({task}, timeout=limit_s)
        finally:
            if not task.done():
                task.cancel()
        if not done:
            await asyncio.wait({task}, timeout=CLOSE_S)
            logger.warning("%s: %s took more than %g s", self.name, what, limit_s)
            raise RefusedRequestError(
                f"{what} of the environment took more than {limit_s:g} s", status=504
            )
        try:
            return task.result()
        except RefusedRequestError:
            raise
        except asyncio.CancelledError as error:
            raise RefusedRequestError(f"{what} cancelled itself", status=500) from error
        except Exception as error:
            raise self._refusal(what, error) from error

    def _refusal(self, what: str, error: Exception) -> RefusedRequestError:
        """Log an error of the environment, and return the one for the client."""
        logger.error("%s: %s failed", self.name, what, exc_info=error)
        return RefusedRequestError(
            f"{what} of the environment failed ({type(error).__name__}); the log of the server "
            "has the details",
            status=500,
        )

    def _conversation(self, item: Any) -> Conversation:
        if isinstance(self.env, SingleTurnEnv):
            return AnswerConversation(self.env, item)
        conversation = self.env.start_conversation(item)
        if not isinstance(conversation, Conversation):
            raise TypeError(f"start_conversation returned {conversation!r:.100}")
        return conversation

    async def _item(self, split: str, index: int) -> Any:
        if split == TEST:
            return self._test_items[index]
        await self._draw_items(index + 1)
        if not self._items:
            raise RefusedRequestError("the environment has no item now; try later", status=503)
        return self._items[index % len(self._items)]

    async def _draw_items(self, count: int) -> None:
        """Draw training items until there are `count`, or no more."""
        async with self._drawing:
            while len(self._items) < count and not self._has_all_items:
                item = await settle(self.env.get_next_item())
                if item is None:
                    self._has_all_items = bool(self._items)
                    return
                self._items.append(item)

    async def _sweep(self) -> None:
        pause_s = min(MAX_SWEEP_PAUSE_S, self.settings.idle_timeout_s / 4)
        while True:
            await asyncio.sleep(pause_s)
            for sweep in self.sweeps:
                try:
                    await sweep()
                except Exception:
                    logger.exception("%s: idle episodes were not closed", self.name)


def protect(app: ASGIApp, settings: ServingSettings, *, address: str) -> ASGIApp:
    """Wrap an application: tokens, sizes of requests, and requests of foreign web pages.

    Args:
        app: the application of a protocol.
        settings: limits.
        address: host name or address to listen on.

    Raises:
        ConfigError: the token file cannot be read.
    """
    tokens = None if settings.token_file is None else read_token_file(settings.token_file)
    rule = WebPageRule(
        allowed_hosts=names_of_address(address),
        machine_name=socket.gethostname(),
        checks_host=tokens is None,
    )
    limited = _ClientGate(app, tokens, max_bytes=BODY_BYTES + 4 * settings.max_text_chars)
    return WebPageMiddleware(limited, rule=rule)


class _ClientGate:
    """Refuses requests without a token of a trainer, and bodies over `max_bytes`."""

    def __init__(self, app: ASGIApp, tokens: TokenTable | None, *, max_bytes: int) -> None:
        self._app = app
        self._tokens = tokens
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not self._is_known(headers.get(b"authorization", b"")):
            await _refuse(scope, receive, send, 401, "a bearer token of a trainer is required")
            return
        text = f"the body is too large; at most {self._max_bytes} bytes are accepted"
        declared = headers.get(b"content-length", b"")
        if declared and not (declared.isdigit() and int(declared[:20]) <= self._max_bytes):
            await _refuse(scope, receive, send, 413, text)
            return
        is_too_large, received = False, 0

        async def limited() -> Message:
            nonlocal is_too_large, received
            message = await receive()
            received += len(message.get("body", b""))
            if scope["type"] == "http" and received > self._max_bytes:
                is_too_large = True
                raise RefusedRequestError(text, status=413)
            return message

        async def answer(message: Message) -> None:
            if not is_too_large:  # else applications answer that the body cannot be read
                await send(message)

        try:
            await self._app(scope, limited, answer)
        except RefusedRequestError:
            if not is_too_large:
                raise
        if is_too_large:
            await _refuse(scope, receive, send, 413, text)  # nothing is sent before a body

    def _is_known(self, authorization: bytes) -> bool:
        if self._tokens is None:
            return True
        scheme, _, token = authorization.partition(b" ")
        holder = self._tokens.find(token.strip()) if scheme.lower() == b"bearer" else None
        return holder is not None and holder.role in (Role.TRAINER, Role.ADMIN)


def explain_invalid_requests(app: FastAPI) -> None:
    """Answer requests of another form with the place and the reason, without what was sent.

    The default answer repeats the input, and fails if that is not valid in an answer: NaN, or half
    of a surrogate pair.
    """
    from fastapi.exceptions import RequestValidationError
    from starlette.responses import JSONResponse

    async def answer(request: Request, error: Exception) -> Response:
        found = error.errors() if isinstance(error, RequestValidationError) else []
        reasons = [
            {
                "type": each["type"],
                "loc": [inert_line(str(part), max_characters=100) for part in each["loc"]],
                "msg": inert_line(each["msg"], max_characters=300),
            }
            for each in found[:MAX_REASONS]
        ]
        return JSONResponse({"detail": reasons}, 422)

    app.add_exception_handler(RequestValidationError, answer)


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, text: str) -> None:
    from starlette.responses import JSONResponse

    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": text})
        return
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    await JSONResponse({"detail": text}, status, headers)(scope, receive, send)
