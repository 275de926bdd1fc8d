"""Returns and advantages of trajectories with a reward per step, in NumPy; pure.

Torch tensors are accepted instead of arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "BoolVector",
    "NumpyArrayLike",
    "TensorLike",
    "allclose_to_first",
    "compute_discounted_returns",
    "compute_grpo_process_supervision_advantages",
    "compute_stats",
]

NumpyArrayLike = npt.ArrayLike
"""A number, a nested sequence of numbers, or an array."""

TensorLike = NumpyArrayLike
"""An older name of `NumpyArrayLike`."""

BoolVector = npt.NDArray[np.bool_]
"""(N,) booleans."""


def allclose_to_first(
    values: NumpyArrayLike,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
    return_vector: bool = False,
) -> bool | BoolVector:
    """Compare every element along the first axis with the first one.

    Args:
        values: (N, ...) rectangular.
        rtol: relative tolerance, as in `numpy.allclose`.
        atol: absolute tolerance.
        equal_nan: whether NaN equals NaN; if not, a first element with NaN differs from itself.
        return_vector: return a result for each element instead of one for all.

    Returns:
        Whether all are close; or (N,) booleans.
    """
    array = np.asarray(values)
    close = np.isclose(array, array[:1], rtol=rtol, atol=atol, equal_nan=equal_nan)
    vector: BoolVector = np.asarray(close.reshape(len(array), -1).all(axis=1))
    return vector if return_vector else bool(vector.all())


def compute_stats(data: Sequence[Any]) -> dict[str, float]:
    """Return `{"mean": ..., "var": ...}`, the population variance, of all numbers in nested lists.

    Raises:
        ValueError: there are no numbers, or a value is neither a number nor a sequence.
    """
    numbers = np.asarray(_flatten(data), dtype=np.float64)
    if not len(numbers):
        raise ValueError("no numbers: the lists are empty")
    return {"mean": float(numbers.mean()), "var": float(numbers.var())}


def _flatten(data: Any) -> list[float]:
    if isinstance(data, bool | int | float | np.number):
        return [float(data)]
    if hasattr(data, "tolist"):
        return _flatten(data.tolist())
    if isinstance(data, str | bytes | dict) or not hasattr(data, "__iter__"):
        raise ValueError(f"expected numbers in nested lists, found {type(data).__name__}")
    return [number for entry in data for number in _flatten(entry)]


def compute_discounted_returns(rewards: NumpyArrayLike, gamma: float) -> npt.NDArray[np.floating]:
    """Sum the rewards from each step to the end, later ones discounted: `G_t = r_t + gamma G_t+1`.

    Args:
        rewards: (T,) one reward per step.
        gamma: discount per step, 0 to 1.

    Returns:
        (T,) returns; float32 for lists and integers, otherwise of the dtype of `rewards`.

    Source: Sutton & Barto 2018, "Reinforcement Learning: An Introduction", equation 3.9.
    """
    array = np.asarray(rewards)
    is_floating = not isinstance(rewards, list | tuple) and np.issubdtype(array.dtype, np.floating)
    returns = np.array(array, dtype=array.dtype if is_floating else np.float32)
    for step in range(len(returns) - 2, -1, -1):
        returns[step] += gamma * returns[step + 1]
    return returns


def compute_grpo_process_supervision_advantages(
    rewards: Sequence[Sequence[float]], gamma: float | None = None, std_tol: float = 1e-8
) -> list[npt.NDArray[np.floating]]:
    """Turn the step rewards of a group of trajectories into advantages per step.

    Rewards are normalized over all steps of the group together, then summed from each step to the
    end of its trajectory.

    Args:
        rewards: [G][T] step rewards; trajectories may differ in length.
        gamma: discount of later steps; None sums them undiscounted.
        std_tol: minimum standard deviation of the rewards.

    Returns:
        [G] arrays of shape (T,).

    Raises:
        ValueError: the rewards are equal up to `std_tol`, or empty.

    Source: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.3. Differs in allowing a
    discount.
    """
    stats = compute_stats(rewards)
    std = float(np.sqrt(stats["var"]))
    if std < std_tol:
        raise ValueError(
            f"the rewards have a standard deviation of {std}, less than {std_tol}: "
            "a group without differences has no advantages"
        )
    return [
        compute_discounted_returns(
            (np.asarray(trajectory, dtype=np.float64) - stats["mean"]) / std,
            1.0 if gamma is None else gamma,
        )
        for trajectory in rewards
    ]
