"""How a request asks a provider for reasoning, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from atroposlib.errors import ConfigError

__all__ = ["VALID_REASONING_EFFORTS", "ReasoningConfig", "is_official_openai"]

VALID_REASONING_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh"})


def is_official_openai(base_url: str | None) -> bool:
    """Whether requests to `base_url` reach OpenAI itself, whose reasoning fields differ."""
    return base_url is not None and "api.openai.com" in base_url


@dataclass
class ReasoningConfig:
    """Reasoning wanted from the model; giving an effort or a token limit switches it on.

    Attributes:
        enabled: Whether requests carry reasoning fields.
        effort: One of `VALID_REASONING_EFFORTS`; wins over `max_tokens`.
        max_tokens: Limit of reasoning tokens.
    """

    enabled: bool = False
    effort: str | None = None
    max_tokens: int | None = None

    EFFORT_TO_MAX_TOKENS: ClassVar[dict[str, int]] = {
        "none": 1024,
        "minimal": 3200,
        "low": 6400,
        "medium": 16000,
        "high": 25600,
        "xhigh": 30400,
    }

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in VALID_REASONING_EFFORTS:
            raise ConfigError(
                f"Invalid reasoning_effort {self.effort!r}; "
                f"expected one of {', '.join(self.EFFORT_TO_MAX_TOKENS)}"
            )
        if self.effort is not None or self.max_tokens is not None:
            self.enabled = True

    def is_reasoning_kwargs_active(self) -> bool:
        """Whether requests should carry reasoning fields."""
        return self.enabled

    def build_extra_body(
        self, base_url: str | None = None, use_max_tokens: bool = False
    ) -> dict[str, Any] | None:
        """Return the request fields that ask for this reasoning, None when it is off.

        Args:
            base_url: Where the request goes; OpenAI itself takes one flat field.
            use_max_tokens: Express an effort as its token limit of `EFFORT_TO_MAX_TOKENS`, for
                providers that know limits only.
        """
        if not self.enabled:
            return None
        if is_official_openai(base_url):
            return {"reasoning_effort": self.effort or "medium"}
        reasoning: dict[str, Any] = {"enabled": True}
        if self.effort is not None and use_max_tokens:
            reasoning["max_tokens"] = self.EFFORT_TO_MAX_TOKENS[self.effort]
        elif self.effort is not None:
            reasoning["effort"] = self.effort
        elif self.max_tokens is not None:
            reasoning["max_tokens"] = self.max_tokens
        return {"reasoning": reasoning}

    def add_to(self, kwargs: dict[str, Any], *, base_url: str | None) -> dict[str, Any]:
        """Return the arguments of a chat with the fields the provider understands.

        What else `extra_body` holds is kept. OpenAI itself also gets the only temperature its
        reasoning models take, and `max_tokens` under the name they know.

        Args:
            kwargs: Arguments of the request; not changed.
            base_url: Where the request goes.
        """
        body = self.build_extra_body(base_url)
        if body is None:
            return kwargs
        kwargs = {**kwargs, "extra_body": {**(kwargs.get("extra_body") or {}), **body}}
        if is_official_openai(base_url):
            kwargs["temperature"] = 1.0
            if kwargs.get("max_tokens"):
                kwargs["max_completion_tokens"] = kwargs.pop("max_tokens")
        return kwargs

    @classmethod
    def from_env_config(cls, env_config: Any) -> ReasoningConfig:
        """Read `thinking_mode`, `reasoning_effort` and `max_reasoning_tokens` of a config.

        Args:
            env_config: Any object; attributes it lacks count as off.
        """
        return cls(
            enabled=bool(getattr(env_config, "thinking_mode", False)),
            effort=getattr(env_config, "reasoning_effort", None),
            max_tokens=getattr(env_config, "max_reasoning_tokens", None),
        )
