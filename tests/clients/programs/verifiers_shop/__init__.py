"""A taskset of verifiers, and a harness whose agent is the loop of `openai_chat.py`."""

from verifiers_shop.shop import ShopHarness, ShopTaskset

__all__ = ["ShopHarness", "ShopTaskset"]
