from types import SimpleNamespace
from typing import Any

from atroposlib.utils.force_diverse_samples import generate_with_diverse_first_tokens


class Environment:
    """Borrows the function as a method; its server knows three first tokens."""

    generate = generate_with_diverse_first_tokens

    def __init__(self, first_tokens: dict[str, float] | None) -> None:
        self.server = self
        self.first_tokens = first_tokens
        self.requests: list[dict[str, Any]] = []

    async def chat_completion(self, **request: Any) -> Any:
        self.requests.append(request)
        logprobs = None
        if request.get("logprobs") and self.first_tokens is not None:
            top = [SimpleNamespace(token=t, logprob=p) for t, p in self.first_tokens.items()]
            logprobs = SimpleNamespace(content=[SimpleNamespace(top_logprobs=top)])
        reply = SimpleNamespace(content=" and so on")
        return SimpleNamespace(choices=[SimpleNamespace(message=reply, logprobs=logprobs)])

    async def fallback_generate(self, *arguments: Any) -> list[str]:
        return ["fallback", *map(str, arguments[1:])]


async def test_completions_start_with_distinct_tokens():
    environment = Environment({"A": -0.1, "B": -2.0, "C": -5.0})

    completions = await environment.generate(
        [{"role": "user", "content": "q"}], prefill="So: ", n=8, max_tokens=10
    )

    assert sorted(completions) == ["A and so on", "B and so on", "C and so on"]
    first, *rest = environment.requests
    assert (first["max_tokens"], first["temperature"], first["top_logprobs"]) == (1, 0.0, 20)
    assert {r["messages"][-1]["content"] for r in rest} == {"So: A", "So: B", "So: C"}
    assert all(r["n"] == 1 and r["max_tokens"] == 9 and r["top_p"] == 0.3 for r in rest)
    assert rest[0]["extra_body"] == {"min_p": 0.5, "repetition_penalty": 1.05}


async def test_at_most_n_completions():
    environment = Environment({str(i): -1.0 for i in range(20)})

    assert len(set(await environment.generate([], n=4))) == 4


async def test_likelier_tokens_are_drawn_more_often():
    drawn = []
    for _ in range(200):
        (completion,) = await Environment({"likely": -0.05, "rare": -3.0}).generate([], n=1)
        drawn.append(completion.split()[0])

    # exp(-0.05) / (exp(-0.05) + exp(-3)) = 0.95; far from a coin's 0.5 for any luck
    assert drawn.count("likely") > 150


async def test_server_without_logprobs_uses_the_fallback():
    assert await Environment(None).generate([], "p", 2, 5, 0.7) == [
        "fallback",
        "p",
        "2",
        "5",
        "0.7",
    ]
