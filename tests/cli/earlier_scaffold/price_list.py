"""price_list: questions about a price list, answered with the help of tools.

python price_list.py check | process | evaluate | serve      (--help lists every setting)
"""

import re
from pathlib import Path

from atroposlib.envs.local_items import LocalItems, LocalItemsConfig
from atroposlib.envs.multi_turn_env import MultiTurnEnv, MultiTurnEnvConfig
from atroposlib.envs.tool_conversation import ToolConversation

DATA = Path(__file__).with_name("price_list_data.jsonl")
PROMPT = "{question} Look the prices up. End with <answer>NUMBER</answer>."
PRICES = {"apple": 3, "pear": 4, "melon": 11, "lemon": 2, "mango": 7}


class PriceListConfig(LocalItemsConfig, MultiTurnEnvConfig):
    """Settings of this environment; a field you add here is a flag."""


def price(product: str) -> int:
    """Look up the price of one piece.

    Args:
        product: Name of a fruit, in the singular.
    """
    return PRICES[product.lower()]


class PriceListConversation(ToolConversation):
    def __init__(self, item):
        super().__init__([{"role": "user", "content": PROMPT.format(**item)}], [price])
        self.gold = item["answer"]

    def reward_of_calls(self, results):
        return -0.1 * sum(result.is_error for result in results)

    async def score(self, turn):
        found = re.findall(r"<answer>\s*(\d+)\s*</answer>", turn.answer)
        return float(bool(found) and found[-1] == self.gold)  # or named parts: {"answer": 1.0}


class PriceListEnv(LocalItems, MultiTurnEnv):
    name = "price_list"
    env_config_cls = PriceListConfig
    columns = ("question", "answer")
    default_model = "Qwen/Qwen3-0.6B"
    default_settings = {"dataset_path": str(DATA), "group_size": 8, "max_turns": 6}

    def start_conversation(self, item):
        return PriceListConversation(item)

    def check_gold_answer(self, item):
        call = '<tool_call>{"name": "price", "arguments": {"product": "apple"}}</tool_call>'
        return [call, f"<answer>{item['answer']}</answer>"]


if __name__ == "__main__":
    PriceListEnv.cli()
