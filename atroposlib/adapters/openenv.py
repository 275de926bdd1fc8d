"""Environments that an OpenEnv server serves, one WebSocket session per rollout.

    open      /openapi.json, /schema, /metadata ─► protocol, kind of actions; trial sessions
    episode   connect ─► reset(seed) ─► turn ─► step ─► observation, reward, done ─► … ─► close

Environments with MCP tools are played as conversations with tools, each call a step. Those with
actions of their own get the fields of an action from the text of a turn; arguments map names to
actions and observations to text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import re
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from packaging.version import InvalidVersion, Version
from pydantic import Field

from atroposlib.adapters.gymnasium import EVAL_SEEDS, find_action
from atroposlib.adapters.interface import Adapter, Episode, Item, finite_reward
from atroposlib.adapters.remote import (
    OPEN_REQUEST_S,
    TOO_MANY_REQUESTS,
    HttpAnswer,
    HttpSession,
    RemoteArgs,
    TaskOrder,
    choose,
    numbers_of,
    read_pairs,
    repeat_until_connected,
    server_address,
    shown_value,
    split_names,
)
from atroposlib.adapters.tool_episode import (
    ForeignTool,
    ToolEpisode,
    ToolOutcome,
    ToolQuestion,
    answer_argument,
    why_not_sent,
)
from atroposlib.envs.conversation import ChatMessage, Reply, Turn
from atroposlib.errors import (
    ConfigError,
    EpisodeConnectionError,
    EpisodeFailedError,
    EpisodeRewardError,
    EpisodeTimeoutError,
)
from atroposlib.utils.text import near_name, texts_in_tag

__all__ = ["OpenEnvAdapter", "OpenEnvArgs", "OpenEnvEpisode", "OpenEnvToolEpisode"]

API_TITLE = "OpenEnv Environment HTTP API"
API_MAJOR = 1
NUM_TRIAL_SESSIONS = 16
"""Sessions that `open` tries to hold at once, to find the limit of the server."""
PING_S = 10.0
"""Interval of keep-alive messages."""
PONG_S = 20.0
"""Time limit of their answers; servers whose event loop is busy answer late."""
CLOSING_S = 12.0
MAX_REFERENCES = 20
"""References of a schema that refer to each other."""

_CODE = re.compile(r"\(code: (?:WSErrorCode\.)?(\w+)\)\s*\Z")
_CONVERTERS: dict[str, Any] = {"string": str, "integer": int, "number": float}

Result = TypeVar("Result")


class OpenEnvArgs(RemoteArgs):
    """The mapping between text and an environment; the defaults follow the server's schema."""

    headers_file: Path | None = Field(
        None, description="YAML file with HTTP headers, such as Authorization."
    )
    interface: Literal["auto", "tools", "actions"] = Field(
        "auto", description="Whether the policy calls MCP tools, or writes actions."
    )
    prompt: str | None = Field(
        None, description="First message; {actions} stands for the form of an action."
    )
    actions: dict[str, Any] | None = Field(
        None, description="Values of the action field by the name that the policy writes."
    )
    action_field: str | None = Field(
        None, description="Field of an action that holds the text of the policy."
    )
    action_constants: dict[str, Any] = Field(
        default_factory=dict, description="Further fields of every action."
    )
    observation_field: str | None = Field(
        None, description="Field of an observation that is shown; None: all of them, as JSON."
    )
    observation_template: str = Field(
        "{text}",
        description="Message with an observation; {text} and {value[FIELD]} are replaced.",
    )
    answer_tool: str | None = Field(
        None, description="Tool that gets the first turn without a call as its only argument."
    )
    reset_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of every reset."
    )
    split: str | None = Field(
        None, description="Split of tasks, if the environment has any; None: train or the first."
    )
    eval_split: str | None = Field(
        None, description="Split of tasks of evaluations; None: test or the first."
    )
    invalid_reward: float = Field(
        -0.1, allow_inf_nan=False, description="Reward of a turn that holds no valid action."
    )
    ends_on_invalid: bool = Field(
        False, description="Whether a turn that holds no valid action ends the episode."
    )


class InvalidActionError(Exception):
    """The server refused an action that does not fit its schema."""


class OpenEnvSession:
    """One environment on the server: a WebSocket connection that is not opened a second time."""

    def __init__(self, adapter: OpenEnvAdapter) -> None:
        self._adapter = adapter
        self._client: Any = None

    async def reset(self, kwargs: Mapping[str, Any]) -> Any:
        """Connect and reset; tried again while the server is unreachable or full."""

        async def attempt() -> Any:
            try:
                await self.connect()
                return await self.ask(self._client.reset(**kwargs))
            except EpisodeConnectionError:
                await self.close()
                raise

        limit_s = min(self._adapter.args.reconnect_s, 0.8 * self._adapter.step_timeout_s)
        return await repeat_until_connected(attempt, limit_s=limit_s, where=self._adapter.url)

    async def connect(self) -> None:
        self._client = self._adapter.client_class(
            base_url=self._adapter.url,
            message_timeout_s=self._adapter.step_timeout_s,
            websocket_ping_interval_s=PING_S,
            websocket_ping_timeout_s=PONG_S,
            headers=dict(self._adapter.headers) or None,
            mode="simulation",
        )
        await self.ask(self._client.connect())

    async def step(self, action: Mapping[str, Any]) -> Any:
        return await self.ask(self._client.step(dict(action)))

    async def is_accepted(self) -> bool:
        """Connect; return whether the server has room for the session."""
        await self.connect()
        try:
            await self.ask(self._client.state())
        except EpisodeConnectionError as error:
            if "CAPACITY_REACHED" in str(error):
                return False
            raise
        except EpisodeFailedError as error:
            if "FACTORY_ERROR" in str(error):
                raise
        return True  # some environments have no state before their first reset

    async def ask(self, call: Awaitable[Result]) -> Result:
        """Await a call of the client, with its errors named by their cause."""
        from websockets.exceptions import ConnectionClosed

        url = self._adapter.url
        try:
            return await call
        except (asyncio.TimeoutError, TimeoutError) as error:
            raise EpisodeTimeoutError(f"{url}: no answer in time") from error
        except (ConnectionClosed, OSError) as error:
            raise EpisodeConnectionError(f"{url}: {type(error).__name__}: {error}") from error
        except RuntimeError as error:
            found = _CODE.search(str(error))
            code = found[1] if found else ""
            if code == "VALIDATION_ERROR":
                raise InvalidActionError(str(error)) from error
            if code == "CAPACITY_REACHED":
                raise EpisodeConnectionError(f"{url}: {error}") from error
            raise EpisodeFailedError(f"{url}: {error}") from error

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(client.close(), CLOSING_S)


def _one_session_class() -> type[Any]:
    """Return openenv's generic client without its reconnection.

    A new connection has a new environment, so the state of the episode would be lost unnoticed.
    """
    from openenv.core.generic_client import GenericEnvClient

    class OneSessionClient(GenericEnvClient):  # type: ignore[misc]
        async def _ensure_connected(self) -> None:
            # A closed socket is read once more: a refused session has left the reason in it.
            if self._ws is None:
                raise ConnectionError("the connection of the session is closed")

    return OneSessionClient


class Progress:
    """Rewards and measurements of one episode."""

    def __init__(self, where: str, metrics: dict[str, float]) -> None:
        self._where = where
        self._metrics = metrics
        self._has_reward = False

    def reward_of(self, result: Any) -> float:
        """Return the reward of a step; a step within the episode may have none.

        Raises:
            EpisodeRewardError: it is not finite, or the episode ended without any.
        """
        observation = result.observation if isinstance(result.observation, Mapping) else {}
        metadata = result.metadata or observation.get("metadata") or {}
        self._metrics["steps"] = self._metrics.get("steps", 0.0) + 1
        self._metrics.update(numbers_of(metadata))
        is_truncated = observation.get("truncated", metadata.get("truncated", False))
        self._metrics["truncated"] = float(is_truncated is True)
        if result.reward is not None:
            self._has_reward = True
            return finite_reward(result.reward, f"step of {self._where}")
        if result.done and not self._has_reward:
            raise EpisodeRewardError(f"{self._where} ended without a reward")
        return 0.0


class OpenEnvEpisode(Episode):
    """One episode whose turns are actions."""

    def __init__(self, adapter: OpenEnvAdapter, item: Item) -> None:
        super().__init__()
        self._adapter = adapter
        self._item = item
        self._session = OpenEnvSession(adapter)
        self._progress = Progress(adapter.url, self.metrics)
        self._num_invalid = 0

    async def begin(self) -> Sequence[ChatMessage]:
        result = await self._session.reset(_reset_kwargs(self._item))
        text = self._adapter.text_of(_started(result, self._adapter.url))
        return [{"role": "user", "content": f"{self._adapter.prompt}\n\n{text}".strip()}]

    async def reply(self, turn: Turn) -> Reply:
        action = self._adapter.action_of(turn.answer)
        try:
            result = None if action is None else await self._session.step(action)
        except InvalidActionError:
            result = None
        if result is None:
            self._num_invalid += 1
            self.metrics["invalid_answers"] = self._num_invalid
            args = self._adapter.args
            return Reply(
                f"That is not a valid action. {self._adapter.action_help}",
                reward=args.invalid_reward,
                is_done=args.ends_on_invalid,
            )
        reward = self._progress.reward_of(result)
        text = self._adapter.text_of(result.observation)
        return Reply(text, reward=reward, is_done=bool(result.done))

    async def close(self) -> None:
        await self._session.close()


class OpenEnvToolEpisode(ToolEpisode):
    """One episode whose calls of MCP tools are steps."""

    def __init__(self, adapter: OpenEnvAdapter, item: Item) -> None:
        super().__init__()
        self._adapter = adapter
        self._item = item
        self._session = OpenEnvSession(adapter)
        self._progress = Progress(adapter.url, self.metrics)

    async def open_session(self) -> ToolQuestion:
        result = await self._session.reset(_reset_kwargs(self._item))
        observation = _started(result, self._adapter.url)
        shown = {name: value for name, value in observation.items() if value not in ("", None)}
        text = self._adapter.text_of(observation) if shown.keys() - {"metadata"} else ""
        question = f"{self._adapter.prompt}\n\n{text}".strip()
        return ToolQuestion([{"role": "user", "content": question}], self._adapter.tools)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        try:
            result = await self._session.step({**self._adapter.args.action_constants, **action})
        except InvalidActionError as error:
            return ToolOutcome(str(error), is_error=True)
        reward = self._progress.reward_of(result)
        text, is_error = _tool_result(result.observation, self._adapter.url)
        return ToolOutcome(text, is_error=is_error, reward=reward, is_done=bool(result.done))

    async def finish(self, turn: Turn) -> Reply:
        tool = self._adapter.answer_tool
        if tool is None:
            return Reply(is_done=True)
        outcome = await self.call_tool(tool.name, answer_argument(tool, turn.answer))
        return Reply(reward=outcome.reward, is_done=True)

    async def close(self) -> None:
        await self._session.close()


def _reset_kwargs(item: Item) -> dict[str, Any]:
    return {"seed": item["seed"], **item["reset"]}


def _started(result: Any, where: str) -> Mapping[str, Any]:
    if result.done:
        raise EpisodeFailedError(f"{where}: reset returned an episode that is over")
    if not isinstance(result.observation, Mapping):
        raise EpisodeFailedError(f"{where}: reset returned {result.observation!r:.100}")
    return result.observation


def _tool_result(observation: Any, where: str) -> tuple[str, bool]:
    """Return the text of a tool's result, and whether it is an error."""
    if not isinstance(observation, Mapping):
        raise EpisodeFailedError(f"{where}: a call returned {observation!r:.100}")
    error = observation.get("error")
    if isinstance(error, Mapping):
        if error.get("error_type") == "transport_error":
            raise EpisodeFailedError(f"{where}: {error.get('message')}")
        return shown_value(error.get("message") or "the call failed"), True
    result = observation.get("result")
    if not isinstance(result, Mapping) or not isinstance(result.get("content"), list):
        return shown_value(observation if "result" not in observation else result), False
    texts = [block.get("text") for block in result["content"] if isinstance(block, Mapping)]
    found = [text for text in texts if isinstance(text, str)]
    shown = "\n".join(found) if found else result.get("data")
    return shown_value(shown), result.get("is_error") is True


class OpenEnvAdapter(Adapter):
    """One server; an item is the seed of an episode, and its task if the environment has tasks."""

    args_cls = OpenEnvArgs
    default_settings: ClassVar[Mapping[str, Any]] = {"max_turns": 16, "max_token_length": 4096}
    limits_replies = True
    args: OpenEnvArgs

    def __init__(self, name: str, args: OpenEnvArgs, **settings: Any) -> None:
        super().__init__(name, args, **settings)
        self.url = server_address(name, "openenv").url
        self.headers: Mapping[str, str] = {}
        self.prompt = ""
        self.action_help = ""
        self.tools: Sequence[ForeignTool] = ()
        self.answer_tool: ForeignTool | None = None
        self.client_class: Any = None
        self._action_schema: Mapping[str, Any] = {}
        self._fields: Mapping[str, Any] = {}
        self._splits: dict[str, TaskOrder] = {}
        self._split = ""
        self._eval_split = ""

    async def open(self) -> None:
        self.headers = read_pairs(self.args.headers_file, "headers_file")
        self.client_class = await asyncio.to_thread(_one_session_class)  # imports for seconds
        timeout_s = max(self.step_timeout_s, OPEN_REQUEST_S)
        http = HttpSession(self.url, headers=self.headers, timeout_s=timeout_s)
        try:
            schema, description = await repeat_until_connected(
                lambda: self._read_server(http), limit_s=self.args.reconnect_s, where=self.url
            )
            self._action_schema = schema["action"]
            self._fields = _fields_of(self._action_schema)
            self._check_observation_field(schema["observation"])
            await self._read_splits(http)
        finally:
            await http.close()
        await repeat_until_connected(
            self._try_sessions, limit_s=self.args.reconnect_s, where=self.url
        )
        self._choose_interface()
        prompt = self.args.prompt or f"{description}\n\n{{actions}}"
        self.prompt = prompt.replace("{actions}", self.action_help).strip()

    async def item(self, index: int) -> Item:
        seed = random.Random(f"{self.seed}:{index}").randrange(EVAL_SEEDS)
        return self._item(seed, self._split, index)

    async def eval_items(self, limit: int) -> Sequence[Item]:
        order = self._splits.get(self._eval_split)
        count = limit if order is None else min(limit, order.num_tasks)
        return [self._item(EVAL_SEEDS + i, self._eval_split, i) for i in range(count)]

    def start(self, item: Item) -> OpenEnvEpisode | OpenEnvToolEpisode:
        return OpenEnvToolEpisode(self, item) if self.tools else OpenEnvEpisode(self, item)

    def action_of(self, answer: str) -> dict[str, Any] | None:
        """Return the action of a turn; None if it holds none."""
        tagged = texts_in_tag(answer, "action")
        text = (tagged[-1] if tagged else answer).strip()
        names = self.args.actions
        if names is not None:
            number = find_action(answer, {name.lower(): i for i, name in enumerate(names)})
            return None if number is None else self._with_field(list(names.values())[number])
        if self.args.action_field is None:
            try:
                action = json.loads(text)
            except (ValueError, RecursionError):
                return None
            if not isinstance(action, dict) or why_not_sent(action) is not None:
                return None
            return {**self.args.action_constants, **action}
        field = self._fields.get(self.args.action_field, {})
        value = _converted(text, _value_schema(field, self._action_schema))
        return None if value is None else self._with_field(value)

    def text_of(self, observation: Any) -> str:
        """Return the message with an observation."""
        field = self.args.observation_field
        value = observation if isinstance(observation, Mapping) else {"observation": observation}
        shown = {k: v for k, v in value.items() if k != "metadata" and v is not None}
        if field is not None:
            text = shown_value(value.get(field, ""))
        else:
            text = shown_value(next(iter(shown.values())) if len(shown) == 1 else shown)
        try:
            return self.args.observation_template.format(text=text, value=value)
        except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"observation_template does not fit the observation {shown!r:.100}: {error!r}"
            ) from error

    def _item(self, seed: int, split: str, index: int) -> Item:
        order = self._splits.get(split)
        task = {} if order is None else {"split": split, "index": order.at(index)}
        return {"seed": seed, "reset": {**self.args.reset_kwargs, **task}}

    def _with_field(self, value: Any) -> dict[str, Any]:
        if self.args.action_field is None and isinstance(value, Mapping):
            return {**self.args.action_constants, **value}
        return {**self.args.action_constants, str(self.args.action_field): value}

    async def _read_server(self, http: HttpSession) -> tuple[Mapping[str, Any], str]:
        """Check the protocol; return the schemas and the description of the environment."""
        api = await http.get("/openapi.json")
        schema = _checked_schema(api, await http.get("/schema"), self.url)
        metadata = await http.get("/metadata")
        details = metadata.json() if metadata.is_ok else {}
        return schema, str(details.get("description") or "")

    async def _read_splits(self, http: HttpSession) -> None:
        listed = await http.get("/list_environments")
        names = listed.json() if listed.is_ok else []
        if not isinstance(names, list):
            raise ConfigError(f"{listed.where}: expected a list of names, got {names!r:.100}")
        splits = await http.get(f"/{names[0]}/splits") if names else None
        if splits is None or not splits.is_ok:
            if self.args.split or self.args.eval_split:
                raise ConfigError(f"split: the environment of {self.url} has no tasks")
            return
        known = split_names(splits)
        self._split = choose(self.args.split, known, "train", "split")
        others = [name for name in known if name != self._split] or known
        self._eval_split = choose(
            self.args.eval_split, known if self.args.eval_split else others, "test", "eval_split"
        )
        for split in {self._split, self._eval_split}:
            answer = await http.post(f"/{names[0]}/num_tasks", {"split": split})
            count = answer.json().get("num_tasks")
            if not isinstance(count, int) or count < 1:
                raise ConfigError(f"split {split!r} of {self.url} has {count!r} tasks")
            self._splits[split] = TaskOrder(count, self.seed)

    async def _try_sessions(self) -> None:
        """Open sessions at once: the first lists the tools, and their number is the limit."""
        count = 1 if self.args.max_concurrent else NUM_TRIAL_SESSIONS
        sessions = [OpenEnvSession(self) for _ in range(count)]
        try:
            trials = await asyncio.gather(
                *(session.is_accepted() for session in sessions), return_exceptions=True
            )
            failed = [trial for trial in trials if isinstance(trial, BaseException)]
            if failed:
                raise failed[0]
            accepted = [trial is True for trial in trials]
            if not any(accepted):
                raise EpisodeConnectionError("the server has no free session")
            self.max_concurrent = self.args.max_concurrent or sum(accepted)
            if self.args.interface != "actions" and self._may_have_tools():
                self.tools = await self._listed_tools(sessions[accepted.index(True)])
        except EpisodeConnectionError as error:
            if _is_refused_handshake(error):
                raise ConfigError(
                    f"{self.url} has no WebSocket route /ws, or refuses its connections ({error}); "
                    "expected a server of openenv 0.10, and headers_file if it asks for a key"
                ) from error
            raise
        finally:
            await asyncio.gather(*(session.close() for session in sessions))

    def _may_have_tools(self) -> bool:
        own = self._fields.keys() - {"metadata"}
        return not own or own == {"type", "tool_name", "arguments"} or own == {"type"}

    async def _listed_tools(self, session: OpenEnvSession) -> list[ForeignTool]:
        try:
            result = await session.step({"type": "list_tools"})
        except (EpisodeFailedError, InvalidActionError):
            return []  # an environment without MCP
        listed = result.observation.get("tools") if isinstance(result.observation, Mapping) else []
        return [
            ForeignTool(tool["name"], tool.get("description") or "", tool.get("input_schema") or {})
            for tool in listed or []
        ]

    def _choose_interface(self) -> None:
        if self.args.interface == "tools" and not self.tools:
            raise ConfigError(f"interface: the environment of {self.url} lists no MCP tools")
        if self.tools:
            names = [tool.name for tool in self.tools]
            if self.args.answer_tool is not None:
                wanted = choose(self.args.answer_tool, names, "", "answer_tool")
                self.answer_tool = self.tools[names.index(wanted)]
                answer_argument(self.answer_tool, "")
            return
        own = [name for name in self._fields if name not in self._hidden_fields()]
        if self.args.action_field is not None:
            choose(self.args.action_field, own, "", "action_field")
        elif len(own) == 1:
            self.args = self.args.model_copy(update={"action_field": own[0]})
        elif not own and self.args.actions is None:
            raise ConfigError(
                f"{self.url}: its actions have no fields and it lists no tools; there is nothing "
                "that a policy could write"
            )
        elif self.args.actions is not None and not all(
            isinstance(value, Mapping) for value in self.args.actions.values()
        ):
            raise ConfigError(
                f"actions: an action has the fields {', '.join(own)}; set action_field, or give "
                "each action as a mapping of its fields"
            )
        self._check_required_fields()
        self.action_help = self._form_of_actions()

    def _check_required_fields(self) -> None:
        """Refuse a mapping to one field that leaves out others which every action needs."""
        if self.args.action_field is None:
            return
        known = {self.args.action_field, *self._hidden_fields()}
        missing = [name for name in self._action_schema.get("required") or () if name not in known]
        if missing:
            raise ConfigError(
                f"action_constants: an action of {self.url} also requires {', '.join(missing)}"
            )

    def _hidden_fields(self) -> set[str]:
        return {"metadata", *self.args.action_constants}

    def _form_of_actions(self) -> str:
        if self.args.actions is not None:
            names = ", ".join(self.args.actions)
            return f"Write one action as <action>NAME</action>; the actions are: {names}."
        field = self.args.action_field
        if field is not None:
            schema = self._action_schema
            details = _value_schema(self._fields.get(field, {}), schema)
            kind = details.get("type") or "value"
            choices = details.get("enum")
            about = f", one of: {', '.join(map(str, choices))}" if choices else f" ({kind})"
            if kind == "object":
                about = f", a JSON object of the form {_with_definitions(details, schema)}"
            described = f" {details['description']}." if details.get("description") else ""
            return f"Write your action as <action>{field.upper()}</action>{about}.{described}"
        hidden = self._hidden_fields()
        shown = {name: field for name, field in self._fields.items() if name not in hidden}
        return (
            "Write your action as a JSON object within <action></action>; its fields are: "
            f"{_with_definitions(shown, self._action_schema)}"
        )

    def _check_observation_field(self, schema: Mapping[str, Any]) -> None:
        field, known = self.args.observation_field, schema.get("properties") or {}
        if field is not None and known and field not in known:
            hint = near_name(field, known) or f"; expected one of: {', '.join(known)}"
            raise ConfigError(f"observation_field: unknown field {field!r}{hint}")


def _checked_schema(api: HttpAnswer, schema: HttpAnswer, url: str) -> Mapping[str, Any]:
    """Return the schemas of a server.

    Raises:
        ConfigError: it is not an OpenEnv server, or one of another protocol version.
    """
    info: Any = {}
    with contextlib.suppress(EpisodeFailedError, AttributeError):  # documents can be turned off
        info = api.json().get("info") or {}
    version = str(info.get("version", ""))
    with contextlib.suppress(InvalidVersion):
        if info.get("title") == API_TITLE and Version(version).major != API_MAJOR:
            raise ConfigError(
                f"{url} speaks version {version} of the {API_TITLE}; this adapter supports "
                f"version {API_MAJOR}, as of openenv 0.10"
            )
    try:
        found = schema.json()
        forms = [found["action"], found["observation"]]
        if all(isinstance(f, Mapping) and isinstance(_fields_of(f), Mapping) for f in forms):
            checked: Mapping[str, Any] = found
            return checked
    except (EpisodeFailedError, KeyError, TypeError):
        pass
    raise ConfigError(
        f"{url} is not an OpenEnv server: GET /schema returned status {schema.status} without the "
        "schemas of actions and observations; expected a server of openenv 0.10"
    )


def _fields_of(schema: Mapping[str, Any]) -> Any:
    return schema.get("properties") or {}


def _value_schema(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of the value of a field.

    References are replaced, as of an `Enum` class, and null is left out if a field has a value of
    one kind or none.
    """
    for _ in range(MAX_REFERENCES):
        forms = [form for form in schema.get("anyOf") or () if form.get("type") != "null"]
        name = str(schema.get("$ref", "")).rpartition("/")[2]
        if name:
            own = {key: value for key, value in schema.items() if key != "$ref"}
            schema = {**(root.get("$defs") or {}).get(name, {}), **own}
        elif len(forms) == 1:
            own = {key: value for key, value in schema.items() if key != "anyOf"}
            schema = {**own, **forms[0]}
        else:
            break
    return schema


def _with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    text = json.dumps(schema, ensure_ascii=False)
    if '"$ref"' not in text or "$defs" not in root:
        return text
    return json.dumps({**schema, "$defs": root["$defs"]}, ensure_ascii=False)


def _is_refused_handshake(error: BaseException | None) -> bool:
    """Whether a server refused a connection for good, not because it is busy or starts."""
    from websockets.exceptions import InvalidHandshake, InvalidStatus

    while error is not None and not isinstance(error, InvalidHandshake):
        error = error.__cause__
    status = error.response.status_code if isinstance(error, InvalidStatus) else 0
    return error is not None and status != TOO_MANY_REQUESTS and status < 500


def _converted(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the text of an action as a value of its `_value_schema`; None if it does not fit."""
    choices = schema.get("enum")
    if choices:
        number = find_action(text, {str(c).lower(): i for i, c in enumerate(choices)})
        return None if number is None else choices[number]
    kind = schema.get("type")
    if kind == "boolean":
        return {"true": True, "false": False}.get(text.lower())
    try:
        value = _CONVERTERS.get(str(kind), json.loads)(text)
    except (ValueError, RecursionError):
        return text if kind is None else None
    if why_not_sent(value) is not None:
        return None
    return None if isinstance(value, float) and not math.isfinite(value) else value
