r"""AIME 2024 as an evaluation without an environment: an example of `EvalBase`.

    problem -> n completions -> the one \boxed{} of each -> math-verify in a worker -> pass@k

    python environments/eval_environments/aime24_hermes_example.py \
        --server-url http://localhost:8000/v1 --model-name MODEL

Metrics: `accuracy` (mean over the completions), and `pass@k` for k = `pass_at_n`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from atroposlib.envs.dataset_items import hub_rows
from atroposlib.envs.eval import EvalBase, eval_runner, pass_at_k
from atroposlib.errors import ConfigError
from atroposlib.tasks.evaluations import boxed_grade, format_math_answer_instruction
from atroposlib.utils.local_records import read_records
from atroposlib.utils.score_pool import ScorePool

__all__ = ["AIME24"]

SYSTEM_PROMPT = (
    "You reason before you answer. Write your reasoning between <think> and </think>, check it, "
    "and give your solution after the closing tag."
)


class AIME24(EvalBase):
    """Evaluate a model on AIME 2024.

    Attributes:
        use_system_prompt: Whether a system message asks for reasoning.
        dataset_path: JSONL file with `problem` and `answer`; None loads the data set of the hub.
    """

    use_system_prompt: bool = False
    dataset_path: str | None = None

    def setup_data(self) -> list[Any]:
        if self.dataset_path is not None:
            return read_records(Path(self.dataset_path), ("problem", "answer"))
        return hub_rows("HuggingFaceH4/aime_2024", split="train")

    async def __call__(self, server_manager: Any) -> dict[str, Any]:
        self.score_pool = ScorePool()
        try:
            return await super().__call__(server_manager)
        finally:
            self.score_pool.close()

    async def run_item(self, server: Any, data_item: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}] if self.use_system_prompt else []
        request = f"{data_item['problem']}\n\n{format_math_answer_instruction()}"
        messages.append({"role": "user", "content": request})
        chat = await self.chat_completion(server, messages)
        gold = str(data_item["answer"])
        texts = [
            "" if choice.finish_reason == "length" else choice.message.content or ""
            for choice in chat.choices
        ]
        grades = [await boxed_grade(self.score_pool, gold, text) for text in texts]
        num_correct = sum(grade.score > 0 for grade in grades)
        metrics = {
            "accuracy": num_correct / len(grades),
            f"pass@{self.pass_at_n}": pass_at_k(len(grades), num_correct, self.pass_at_n),
        }
        answers = [grade.answer for grade in grades]
        return metrics, {"messages": messages, "gold": gold, "answers": answers, **metrics}


def aime24() -> AIME24:
    """Evaluate a model on AIME 2024."""
    return AIME24(
        pass_at_n=1,
        pass_at_n_samples=4,
        temperature=0.6,
        top_p=0.95,
        eval_dir="aime24_results",
        use_system_prompt=True,
    )


def main() -> None:
    """Run the command line of this process."""
    try:
        asyncio.run(eval_runner(aime24))
    except ConfigError as error:
        sys.stderr.write(f"aime24_hermes_example: error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
