"""What is left after a run: the reward curve, a page of rollouts, the figures."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from atroposlib.frontend.jsonl2html import generate_html
from example_trainer.extras import require_extra
from example_trainer.reporting.series import rolling_mean

__all__ = [
    "SHARE_RIGHT",
    "RewardMetric",
    "RewardPoint",
    "count_steps",
    "curve_text",
    "next_commands",
    "read_rewards",
    "rolling_mean",
    "write_curve",
    "write_rollouts_page",
]


class RewardMetric(NamedTuple):
    """What an environment logs of the tries it has scored since the last step."""

    key: str
    """How the metric's name ends; the environment puts its own name before it."""

    label: str
    """What it is, for an axis."""

    summary: str
    """What it says, with `{:.0%}` or the like where the figure belongs."""

    limits: tuple[float, float] | None
    """Lowest and highest value it can have; None where there are none."""


SHARE_RIGHT = RewardMetric(
    key="train/percent_correct",
    label="share of tries that are right",
    summary="{:.0%} of the tries right",
    limits=(0.0, 1.0),
)


class RewardPoint(NamedTuple):
    """Mean reward of all tries the environment scored around one trainer step."""

    step: int
    reward: float


def read_rewards(metrics_path: Path, metric: RewardMetric = SHARE_RIGHT) -> list[RewardPoint]:
    """Read the environment's metrics; a last line that is still being written is left out.

    The environment's figures count every try. The trainer sees only groups whose scores differ,
    so its mean says little about how good the model is.
    """
    points = []
    with contextlib.suppress(FileNotFoundError):
        for line in metrics_path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                # The environment puts the name it registered under before its metrics.
                reward = next((v for k, v in record.items() if k.endswith(metric.key)), None)
                if reward is not None:
                    points.append(RewardPoint(int(record["step"]), float(reward)))
    return points


def count_steps(metrics_path: Path) -> int:
    """Return how many steps the trainer has logged."""
    try:
        return metrics_path.read_text(encoding="utf-8").count('"train/loss"')
    except FileNotFoundError:
        return 0


def write_curve(
    points: Sequence[RewardPoint], path: Path, *, metric: RewardMetric = SHARE_RIGHT
) -> None:
    """Draw the reward over the steps, with a rolling mean, as a PNG."""
    with require_extra("trainer"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    steps = [point.step for point in points]
    rewards = [point.reward for point in points]
    window = _window(len(points))
    # Without pyplot: no window system is touched, no global figure is kept.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, rewards, color="#9db4c0", linewidth=1, label="one step")
    axes.plot(
        steps,
        rolling_mean(rewards, window),
        color="#253237",
        linewidth=2,
        label=f"mean of {window} steps",
    )
    axes.set(xlabel="trainer step", ylabel=metric.label, ylim=metric.limits)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def curve_text(points: Sequence[RewardPoint], *, width: int = 72, height: int = 14) -> str:
    """Draw the rolling mean of the reward over the steps for a terminal, without colours."""
    with require_extra("trainer"):
        import plotext

    window = _window(len(points))
    rewards = rolling_mean([point.reward for point in points], window)
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, height)
    figure.title(f"{SHARE_RIGHT.label} (mean of {window} steps)")
    figure.label("trainer step", axis="x")
    figure.ruler("y").lim(0, 1)
    signal = figure.signal([point.step for point in points], rewards, marker="braille")
    signal.lines()
    figure.draw(signal)
    return str(plotext.uncolorize(figure.build().string()))


def write_rollouts_page(groups_path: Path, page_path: Path, *, groups_per_end: int) -> int:
    """Write a page of the first and the last groups of a run.

    Args:
        groups_path: JSONL of groups, oldest first.
        page_path: The HTML file; the chosen groups are written beside it as JSONL.
        groups_per_end: Groups taken from the start, and again from the end.

    Returns:
        Number of groups on the page.
    """
    chosen_path = page_path.with_suffix(".jsonl")
    with groups_path.open(encoding="utf-8") as lines:
        first = list(itertools.islice(lines, groups_per_end))
        last = deque(lines, maxlen=groups_per_end)
    chosen_path.write_text("".join([*first, *last]), encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()):  # it is a door and reports what it wrote
        generate_html(chosen_path, page_path)
    return len(first) + len(last)


def next_commands(model: str) -> list[str]:
    """Return the three commands that do the same with a real model on a GPU."""
    return [
        "run-api",
        f"atropos-grpo --model {model} --weight-bridge-mode in_place --vllm-restart-interval 1 "
        "--training-steps 200 --lr 1e-6",
        "python environments/gsm8k_server.py serve --slurm false --env.use_wandb false "
        f"--env.tokenizer_name {model} --openai.model_name {model} "
        "--openai.server_type vllm --openai.base_url http://localhost:9001/v1",
    ]


def _window(num_points: int) -> int:
    return max(1, min(20, num_points // 4))
