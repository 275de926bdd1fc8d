r"""Sigma rules: write the detection rule that an analyst asks for.

    request -> [system, user] -> G completions -> \boxed{YAML}
        -> `detection` as a set of (path, value) -> Jaccard similarity to the gold rule

Rules of the model are parsed as plain YAML and never applied. `llm_judge_sigmarule_env.py` next to
this file has a judge score them. Requests come from the hub or from local files:

    python environments/community/cybersecurity_sigma/cybersecurity_sigma_env.py process \
        --env.dataset_path environments/community/cybersecurity_sigma/sample --env.total_steps 4
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import Field

from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError
from atroposlib.tasks.answers import FORMATS
from atroposlib.tasks.card import EnvironmentCard

__all__ = ["SigmaRuleConfig", "SigmaRuleEnv", "boxed_rule", "leaves", "read_rule", "score_rule"]

logger = logging.getLogger("environments.sigmarule")

CARD = EnvironmentCard(
    task="write a Sigma detection rule",
    turns="1",
    reward="Jaccard similarity of the detection to that of the gold rule, 0 to 1",
    data="Sigma rules from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/community/cybersecurity_sigma/sample "
    "--env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("sample")
MAX_RULE_CHARACTERS = 10_000
MAX_LEAVES = 1_000
SYSTEM_PROMPT = (
    "You write detection rules in the Sigma format. A rule is YAML with at least the keys title, "
    "logsource and detection; detection has named selections and a condition. You may reason first "
    "between <think> and </think>. Then write one complete rule in \\boxed{}, as in:\n\n"
    "\\boxed{\ntitle: Discovery by whoami\nlogsource:\n  category: process_creation\n"
    "  product: windows\ndetection:\n  selection:\n    Image|endswith: '\\whoami.exe'\n"
    "  condition: selection\n}"
)
Row = Mapping[str, Any]
Leaf = tuple[tuple[str, ...], str]
"""Keys on the way to a value, and the value as text in lower case."""


class _PlainLoader(yaml.BaseLoader):
    """Reads every value as text, and refuses aliases: a short text could stand for an endless one.

    A number in base 60 can have more digits than Python prints.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not accepted")
        return super().compose_node(parent, index)  # type: ignore[no-untyped-call]


class SigmaRuleConfig(HubItemsConfig, SingleTurnEnvConfig):
    """Settings of the requests, and sampling."""

    prompt_column: str = Field("prompt", description="Column of the request.")
    rule_column: str = Field("rule", description="Column of the gold rule, as YAML.")


def boxed_rule(answer: str) -> str | None:
    """Return the text in the only box of an answer, without a fence; None without such a box."""
    fields = FORMATS["latex_boxed"].extract(answer)
    if fields is None or len(fields["answer"]) > MAX_RULE_CHARACTERS:
        return None
    text = fields["answer"]
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        text = text.partition("\n")[2].removesuffix("```")
    return text


def read_rule(text: str) -> dict[str, Any] | None:
    """Return a rule that has a detection with a condition; None for any other text."""
    try:
        rule = yaml.load(text[:MAX_RULE_CHARACTERS], Loader=_PlainLoader)
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    detection = rule.get("detection") if isinstance(rule, dict) else None
    return rule if isinstance(detection, dict) and detection.get("condition") else None


def leaves(detection: Mapping[str, Any]) -> frozenset[Leaf]:
    """Return the values of a detection with their paths; the order of lists does not count."""
    return frozenset(leaf for leaf, _ in zip(_walk(detection, ()), range(MAX_LEAVES)))  # noqa: B905


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[Leaf]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _walk(inner, (*path, str(key)))
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner, (*path, "[]"))
    else:
        text = " ".join(str(value).casefold().split())
        # `field: x` and `field: [x]` are the same condition.
        yield (path if path[-1:] != ("[]",) else path[:-1]), text


def score_rule(answer: str, gold: str) -> float:
    """Return the Jaccard similarity of both detections; 0.0 without one readable rule.

    A detection that has nothing in common with the gold one but the condition scores 0.0.

    Args:
        answer: the completion without its thinking.
        gold: the gold rule.
    """
    rule, wanted = read_rule(boxed_rule(answer) or ""), read_rule(gold)
    if rule is None or wanted is None:
        return 0.0
    own, other = leaves(rule["detection"]), leaves(wanted["detection"])
    common = own & other
    if all(path[0] == "condition" for path, _ in common):
        return 0.0
    return len(common) / len(own | other)


class SigmaRuleEnv(DatasetItems, SingleTurnEnv):
    """Requests for detection rules; an item is a row with the columns of the settings."""

    name = "sigmarule"
    hub_dataset = "mmaisel1/nous-rl-hackathon-sigma"
    test_fraction = 0.1
    env_config_cls = SigmaRuleConfig
    config: SigmaRuleConfig
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 4096,
        "score_timeout_s": 5.0,
        "wandb_name": "sigmarule",
    }
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = (self.config.prompt_column, self.config.rule_column)
        self.columns = names  # type: ignore[misc]

    def _read(self) -> tuple[list[Row], list[Row]]:
        splits = super()._read()
        column = self.config.rule_column
        train, test = ([row for row in rows if read_rule(str(row[column]))] for rows in splits)
        num_left_out = sum(map(len, splits)) - len(train) - len(test)
        if num_left_out:
            logger.warning("%d requests without a readable gold rule are left out", num_left_out)
        if not train:
            raise ConfigError(f"no text of the column {column} is a Sigma rule with a detection")
        return train, test

    def prompt(self, item: Row) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": str(item[self.config.prompt_column])},
        ]

    async def score(self, item: Row, answer: str) -> float:
        """Parse and compare in a worker; a rule over the time limit scores 0.0."""
        gold = str(item[self.config.rule_column])
        return await self.score_pool.run(score_rule, answer, gold, default=0.0)

    def check_gold_answer(self, item: Row) -> str:
        return f"\\boxed{{\n{item[self.config.rule_column]}\n}}"


if __name__ == "__main__":
    SigmaRuleEnv.cli()
