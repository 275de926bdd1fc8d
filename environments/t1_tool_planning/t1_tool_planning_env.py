"""Tool planning (T1): the calls that each request of a travel conversation needs.

    user turn -> calls -> recorded reply, next user turn -> calls -> ... -> mean reward of the turns

No call runs. The conversation goes on as it was recorded, whatever the policy called. The expected
calls of a turn are those of the data's plan, Python code that is parsed and never executed. With a
vLLM server on port 9004, and without the hub:

    python environments/t1_tool_planning/t1_tool_planning_env.py process --env.total_steps 4 \
        --env.dataset_path environments/data/t1_tool_planning_sample \
        --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import json
import logging
import random
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, Item
from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn
from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig
from atroposlib.envs.multi_turn_env import MultiTurnEnv, MultiTurnEnvConfig, Rollout
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import default_configs
from atroposlib.tasks.tool_calls import read_calls
from atroposlib.utils.local_records import read_records
from atroposlib.utils.model_paths import use_cache_without_hub

__all__ = [
    "PlannedCall",
    "PlanningConversation",
    "PlanningDialogue",
    "T1ToolPlanningConfig",
    "T1ToolPlanningEnv",
    "TurnReward",
    "calls_of_plan",
    "dialogue_of",
    "score_turn",
]

logger = logging.getLogger(__name__)

CARD = EnvironmentCard(
    task="call the tools that each request of a travel conversation needs, or none",
    turns="one per user turn, up to 16",
    reward="mean of the turns, 0 to 1: 0.1, 0.5 F1 of tools, 0.3 F1 of parameters, 0.1 all tools",
    data="T1 from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/t1_tool_planning_sample "
    "--env.total_steps 4",
)

MODEL = "Qwen/Qwen3-1.7B"
SAMPLE = Path(__file__).parents[1] / "data" / "t1_tool_planning_sample"
HUB_DATASET = "capitalone/T1"
MAX_PLAN_CHARACTERS = 20_000
BASE, NAMES, PARAMETERS, ALL_NAMES = 0.1, 0.5, 0.3, 0.1
"""Parts of the reward of a turn in which tools are called, as expected."""
FREE_TEXT = frozenset({"seek_information"})
"""Tools whose arguments are sentences for the user: their presence is compared only."""
POSITIONAL: Mapping[str, Sequence[str]] = {
    "adjust_date": ("date", "days"),
    "get_results_from_cache": ("key",),
    "save_to_cache": ("key", "value"),
    "seek_information": ("query",),
}
"""Names of parameters that plans give by position; of other tools, `arg1`, `arg2`, ..."""
DESCRIPTIONS: Mapping[str, str] = {
    "adjust_date": "Move a date by a number of days.",
    "get_results_from_cache": "Read results that were saved earlier in the conversation.",
    "save_to_cache": "Save results under a key for later turns.",
    "search_nearest": "Find the places that are nearest to given ones.",
    "seek_information": "Ask the user for something that a search needs and that is missing.",
    "sort_results": "Sort results.",
    **{f"search_{kind}": f"Search {kind}." for kind in ("attractions", "flights", "hotels")},
    **{f"filter_{kind}": f"Keep some of the {kind} found." for kind in ("attractions", "flights")},
    "filter_hotels": "Keep some of the hotels found.",
    "search_restaurants": "Search restaurants.",
    "filter_restaurants": "Keep some of the restaurants found.",
}
SYSTEM_PROMPT = """You plan tool calls for a travel assistant. For each message of the user, write \
all calls that it needs, and nothing else. These are the tools:
<tools>
{tools}
</tools>

A call is a JSON object with name and arguments within tags, one block per call:
<tool_call>
{{"name": "NAME", "arguments": {{"PARAMETER": "VALUE"}}}}
</tool_call>

Give only parameters that the message, or the conversation so far, asks for. Where an argument is \
the result of another call, give it a name of your choice. If a message needs no tool, answer \
without a block. Results are not shown to you; you read the reply that the user received."""


class T1ToolPlanningConfig(HubItemsConfig, MultiTurnEnvConfig):
    """Settings of the data set, whose `dataset_subset` is a domain, and of conversations."""

    dataset_subset: str | None = Field(
        None,
        description="Domain of the hub's files: hotel, flight, restaurant or attraction; None "
        "takes all.",
    )
    max_turns: int = Field(
        16, ge=1, description="User turns of one conversation; those after them are left out."
    )
    max_turn_tokens: int | None = Field(
        512, ge=1, description="Token limit of one turn; None: the rest of the conversation's."
    )


class PlannedCall(NamedTuple):
    """A call with the arguments that are compared."""

    name: str
    arguments: Mapping[str, Any]
    """JSON values by parameter."""
    references: frozenset[str] = frozenset()
    """Parameters whose value is an expression, such as the result of another call."""


class PlanningDialogue(NamedTuple):
    """One item; all have one entry per user turn."""

    requests: tuple[str, ...]
    replies: tuple[str, ...]
    """The recorded reply to each request; may be empty."""
    plans: tuple[tuple[PlannedCall, ...], ...]
    """Expected calls of each request; empty if it needs none."""


class TurnReward(NamedTuple):
    """The reward of a turn, and its two F1."""

    reward: float
    tool_call_f1: float
    tool_param_f1: float


def calls_of_plan(code: str) -> tuple[PlannedCall, ...]:
    """Return the calls of a plan in the order of the code, which is parsed only.

    Calls of builtins, of methods, and of names that the plan imports or defines are no tools.

    Raises:
        ValueError: it is not Python, or longer than `MAX_PLAN_CHARACTERS`.
    """
    if len(code) > MAX_PLAN_CHARACTERS:
        raise ValueError(f"a plan of {len(code)} characters; at most {MAX_PLAN_CHARACTERS}")
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"a plan is not Python ({error})") from error
    own = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found = [
        (node.lineno, node.col_offset, _planned_call(node.func.id, node))
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id not in own
        and not hasattr(builtins, node.func.id)
    ]
    return tuple(call for _, _, call in sorted(found, key=lambda entry: entry[:2]))


def _planned_call(name: str, node: ast.Call) -> PlannedCall:
    by_position = dict(enumerate(POSITIONAL.get(name, ())))
    given = {by_position.get(i, f"arg{i + 1}"): value for i, value in enumerate(node.args)}
    given |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
    arguments: dict[str, Any] = {}
    references = set()
    for parameter, value in given.items():
        try:
            arguments[parameter] = json.loads(json.dumps(ast.literal_eval(value)))
        except (ValueError, TypeError, RecursionError, MemoryError):  # an expression, or no JSON
            arguments[parameter] = None
            references.add(parameter)
    return PlannedCall(name, arguments, frozenset(references))


def dialogue_of(row: Mapping[str, Any], *, max_turns: int) -> PlanningDialogue:
    """Return the conversation of a row, cut after `max_turns` user turns.

    `Filled_Template` is a list of messages, `"user: ..."` and `"assistant: ..."`, or their lines;
    `Filled_Plan` has one plan per user turn, in a list or in fenced blocks.

    Raises:
        ValueError: the row has no user turn, another number of plans, or a plan is not Python.
    """
    requests: list[str] = []
    replies: list[str] = []
    for role, text in _messages(str(row["Filled_Template"])):
        if role == "user":
            requests.append(text)
            replies.append("")
        elif replies:  # a greeting before the first request is left out
            replies[-1] = f"{replies[-1]}\n{text}".strip()
    plans = _plans(str(row["Filled_Plan"]))
    if not requests or len(plans) != len(requests):
        raise ValueError(f"{len(requests)} user turns and {len(plans)} plans")
    expected = tuple(calls_of_plan(plan) for plan in plans[:max_turns])
    return PlanningDialogue(tuple(requests[:max_turns]), tuple(replies[:max_turns]), expected)


def _messages(text: str) -> list[tuple[str, str]]:
    entries = _as_list(text)
    if entries is None:
        entries = re.split(r"^(?=(?:user|assistant)\s*:)", text, flags=re.I | re.M)
    messages = []
    for entry in entries:
        if isinstance(entry, Mapping):
            role, content = str(entry.get("role", "")), str(entry.get("content", ""))
        else:
            role, _, content = str(entry).partition(":")
        if content.strip():
            messages.append((role.strip().lower(), content.strip()))
    return messages


def _plans(text: str) -> list[str]:
    fence = r"```(?:python)?[ \t]*\n?(.*?)```"
    entries = _as_list(text)
    if entries is None:
        return re.findall(fence, text, re.DOTALL) or [text]
    return ["\n".join(re.findall(fence, str(e), re.DOTALL)) or str(e) for e in entries]


def _as_list(text: str) -> list[Any] | None:
    """Return a list written as JSON or as a Python literal; None for other text."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(value, list):
            return value
    return None


def score_turn(expected: Sequence[PlannedCall], answer: str) -> TurnReward:
    """Return the reward of a turn, without its thinking, and the two F1 that it is made of.

    A turn that rightly calls nothing earns 1, one that wrongly does or does not earns 0. Otherwise
    the reward is 0.1 + 0.5 F1(tools) + 0.3 F1(parameters), and 0.1 if the tools are exactly right.
    Repeated calls count as often as they are written. A block that is not a call, or not closed,
    is a call of no tool.
    """
    read = read_calls(answer)
    written = [
        PlannedCall(str(call.get("name", "")), call["arguments"])
        for call in read.calls
        if isinstance(call.get("arguments"), dict)
    ]
    num_broken = read.num_broken + len(read.calls) - len(written) + read.rest.count("<tool_call>")
    if not expected or not (written or num_broken):
        is_right = not (expected or written or num_broken)
        return TurnReward(*[float(is_right)] * 3)
    names = Counter(call.name for call in written) + Counter({"": num_broken})
    name_f1 = _f1(Counter(call.name for call in expected), names)
    any_value = {(call.name, p) for call in expected for p in call.references}
    any_value |= {
        (call.name, p) for call in expected for p in call.arguments if call.name in FREE_TEXT
    }
    parameter_f1 = _f1(_parameters(expected, any_value), _parameters(written, any_value))
    earned = BASE + NAMES * name_f1 + PARAMETERS * parameter_f1 + ALL_NAMES * (name_f1 == 1.0)
    return TurnReward(earned, name_f1, parameter_f1)


def _f1(expected: Counter[Any], written: Counter[Any]) -> float:
    """Return the F1 of two multisets; 1.0 if both are empty."""
    total = expected.total() + written.total()
    return 2 * (expected & written).total() / total if total else 1.0


def _parameters(calls: Iterable[PlannedCall], any_value: set[tuple[str, str]]) -> Counter[Any]:
    return Counter(
        (call.name, name, "" if (call.name, name) in any_value else _canonical(value))
        for call in calls
        for name, value in call.arguments.items()
    )


def _canonical(value: Any) -> str:
    """Return a text that is equal for equal values.

    Case, spaces, the order of a list and the list around a single value do not matter.
    """
    if isinstance(value, list):
        return "\n".join(sorted(_canonical(entry) for entry in value))
    if isinstance(value, Mapping):
        return "\n".join(sorted(f"{key} {_canonical(entry)}" for key, entry in value.items()))
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return " ".join(str(value).casefold().split())


def tool_definitions(dialogues: Iterable[PlanningDialogue]) -> str:
    """Return the tools of the plans as lines of JSON, with the parameters that plans give them."""
    used: dict[str, dict[str, dict[str, str]]] = {name: {} for name in DESCRIPTIONS}
    for call in (call for d in dialogues for plan in d.plans for call in plan):
        parameters = used.setdefault(call.name, {})
        for name, value in call.arguments.items():
            shown = {"description": "a result"} if name in call.references else _type_of(value)
            parameters.setdefault(name, shown)
    return "\n".join(
        json.dumps(
            {
                "name": name,
                "description": DESCRIPTIONS.get(name, ""),
                "parameters": {"type": "object", "properties": parameters},
            }
        )
        for name, parameters in sorted(used.items())
        if parameters
    )


def _type_of(value: Any) -> dict[str, str]:
    names = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return {"type": names.get(type(value), "string")}


class PlanningConversation(Conversation):
    """A recorded conversation; the policy writes the calls of each user turn.

    Attributes:
        turns: rewards of the turns so far.
    """

    def __init__(self, dialogue: PlanningDialogue, tools: str) -> None:
        self.dialogue = dialogue
        self.turns: list[TurnReward] = []
        self._tools = tools

    def opening(self) -> list[ChatMessage]:
        return [
            {"role": "system", "content": SYSTEM_PROMPT.format(tools=self._tools)},
            {"role": "user", "content": self.dialogue.requests[0]},
        ]

    async def reply(self, turn: Turn) -> Reply:
        """Score the turn; the rewards of all turns add up to their mean."""
        requests, replies, plans = self.dialogue
        self.turns.append(score_turn(plans[turn.index], turn.answer))
        reward = self.turns[-1].reward / len(plans)
        if turn.index + 1 == len(requests):
            return Reply(reward=reward, is_done=True)
        said = f"(The user read: {replies[turn.index]})\n\n" if replies[turn.index] else ""
        return Reply(said + requests[turn.index + 1], reward=reward)


class T1ToolPlanningEnv(DatasetItems, MultiTurnEnv):
    """Conversations about travel; an item is a `PlanningDialogue`."""

    name = "t1_tool_planning"
    hub_dataset = HUB_DATASET
    test_fraction = 0.1
    columns = ("ID", "Filled_Template", "Filled_Plan")
    env_config_cls = T1ToolPlanningConfig
    config: T1ToolPlanningConfig  # type: ignore[assignment]
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    @classmethod
    def config_init(cls) -> tuple[T1ToolPlanningConfig, APIServerConfig]:
        return default_configs(
            T1ToolPlanningConfig,
            MODEL,
            group_size=4,
            batch_size=16,
            max_token_length=16384,
            wandb_name="t1_tool_planning",
        )

    async def setup(self) -> None:
        """Read the rows as dialogues; raises `ConfigError` if none can be read."""
        await super().setup()
        train: Any = await asyncio.to_thread(self._dialogues, self.train, "training")
        test: Any = await asyncio.to_thread(self._dialogues, self.test, "test")
        self.train, self.test = train, test
        self.tools = tool_definitions([*train, *test])

    def _dialogues(self, rows: Sequence[Mapping[str, Any]], split: str) -> list[PlanningDialogue]:
        dialogues, reasons = [], []
        for row in rows:
            try:
                dialogues.append(dialogue_of(row, max_turns=self.config.max_turns))
            except ValueError as error:
                reasons.append(f"row {row['ID']!r:.40}: {error}")
        if not dialogues:
            raise ConfigError(f"no {split} row can be read as a conversation; {reasons[0]}")
        if reasons:
            logger.warning("%d %s rows are left out; %s", len(reasons), split, reasons[0])
        return dialogues

    def _rows_of(self, source: Any) -> list[dict[str, Any]]:
        files = csv_files(hub_folder(source["path"]), source["split"], domain=source["subset"])
        rows = [row for file in files for row in read_records(file, self.columns)]
        random.Random(self.config.dataset_seed).shuffle(rows)
        return rows

    def start_conversation(self, item: Item) -> PlanningConversation:
        return PlanningConversation(item, self.tools)

    async def postprocess_histories(self, trajectories: Sequence[Rollout]) -> Any:
        """Return the group with one score per conversation, without advantages of turns."""
        group = await super().postprocess_histories(trajectories)
        if group is not None:
            del group["advantages"]
        return group

    def metrics_of(self, rollouts: Sequence[Rollout], area: str) -> dict[str, float]:
        if not rollouts:
            return {}
        values = [self._values(rollout) for rollout in rollouts]
        own = {f"{area}/{name}": statistics.fmean(v[name] for v in values) for name in values[0]}
        return {**own, **super().metrics_of(rollouts, area)}

    def evaluation_values(self, rollout: Rollout) -> dict[str, float]:
        own = {f"eval/{name}": value for name, value in self._values(rollout).items()}
        return {**own, **super().evaluation_values(rollout)}

    def is_correct(self, rollout: Rollout) -> bool:
        return self.score_of(rollout) > 1.0 - 1e-9

    def _values(self, rollout: Rollout) -> dict[str, float]:
        """Return the means over the turns of the data; a turn that was not reached counts as 0."""
        conversation: Any = rollout.conversation
        num_turns, turns = len(conversation.dialogue.plans), conversation.turns
        return {
            "avg_reward": sum(turn.reward for turn in turns) / num_turns,
            "tool_call_f1": sum(turn.tool_call_f1 for turn in turns) / num_turns,
            "tool_param_f1": sum(turn.tool_param_f1 for turn in turns) / num_turns,
        }

    def check_gold_answer(self, item: Item) -> Sequence[str]:
        return [_as_blocks(plan) or "This needs no tool." for plan in item.plans]


def _as_blocks(plan: Sequence[PlannedCall]) -> str:
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in plan]
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def hub_folder(repo: str) -> Path:
    """Download the CSV files of a data set of the hub, and return their folder.

    Raises:
        ConfigError: the data set cannot be loaded.
    """
    use_cache_without_hub(repo)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, repo_type="dataset", allow_patterns="*.csv"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{repo} cannot be loaded from the hub ({error}); --env.dataset_path takes local files "
            "instead"
        ) from error


def csv_files(folder: Path, split: str, *, domain: str | None) -> list[Path]:
    """Return the CSV files of a domain; those with the split in their path, if there are any.

    Raises:
        ConfigError: there is no CSV file of the domain.
    """
    paths = sorted(folder.rglob("*.csv"))
    found = [path for path in paths if (domain or "") in _path_in(folder, path)]
    if not found:
        raise ConfigError(f"{folder} has no CSV files of the domain {domain or 'all'}")
    return [path for path in found if split in _path_in(folder, path)] or found


def _path_in(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix().lower()


if __name__ == "__main__":
    T1ToolPlanningEnv.cli()
