import numpy as np
import pytest

from atroposlib.utils.advantages import (
    allclose_to_first,
    compute_discounted_returns,
    compute_grpo_process_supervision_advantages,
    compute_stats,
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 1.0 + 1e-9, 1.0], True),
        ([1.0, 1.1], False),
        ([[1, 2], [1, 2]], True),
        ([[1, 2], [1, 3]], False),
        ([5], True),
    ],
)
def test_allclose_to_first_compares_along_the_first_axis(values, expected):
    assert allclose_to_first(values) is expected


def test_allclose_to_first_answers_per_element():
    vector = allclose_to_first([[1, 2], [1, 2.5], [1, 2]], return_vector=True)

    assert vector.tolist() == [True, False, True]
    assert vector.dtype == bool


def test_allclose_to_first_nan_differs_from_itself_unless_told():
    assert allclose_to_first([float("nan")], return_vector=True).tolist() == [False]
    assert allclose_to_first([float("nan")] * 2, equal_nan=True) is True


def test_compute_stats_of_jagged_lists():
    # 1, 2, 3, 4, 5: mean 3, squares 55 / 5 - 9 = 2
    assert compute_stats([[1, 2, 3], [4, 5]]) == {"mean": 3.0, "var": 2.0}


def test_advantages_of_tensors_equal_those_of_lists():
    torch = pytest.importorskip("torch")
    of_lists = compute_grpo_process_supervision_advantages([[1, 2, 3], [4, 5]])

    of_tensors = compute_grpo_process_supervision_advantages(
        [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])]
    )

    assert compute_stats([np.array(4.0), torch.tensor(6)]) == {"mean": 5.0, "var": 1.0}
    assert [a.tolist() for a in of_tensors] == [a.tolist() for a in of_lists]


def test_compute_stats_variance_of_equal_numbers_is_not_negative():
    assert compute_stats([0.1] * 10)["var"] >= 0


@pytest.mark.parametrize("data", [[], [[], []], ["a"], [{"a": 1}], [None]])
def test_compute_stats_refuses_what_holds_no_numbers(data):
    with pytest.raises(ValueError, match=r"numbers"):
        compute_stats(data)


@pytest.mark.parametrize(
    ("rewards", "gamma", "expected"),
    [
        ([1, 1, 1], 0.9, [2.71, 1.9, 1.0]),  # 1 + 0.9 * (1 + 0.9 * 1)
        ([1.0, 2.0, 3.0], 0.0, [1.0, 2.0, 3.0]),
        ([1, 2, 3], 1.0, [6, 5, 3]),
        ([], 0.5, []),
        (np.array([1, 1, 1]), 0.5, [1.75, 1.5, 1.0]),  # integers are not cut off
    ],
)
def test_compute_discounted_returns(rewards, gamma, expected):
    returns = compute_discounted_returns(rewards, gamma)

    assert returns.dtype == np.float32
    np.testing.assert_allclose(returns, expected, rtol=1e-6)


def test_compute_discounted_returns_keeps_dtype_and_input():
    rewards = np.array([1.0, 1.0], dtype=np.float64)

    returns = compute_discounted_returns(rewards, 0.5)

    assert returns.dtype == np.float64
    assert rewards.tolist() == [1.0, 1.0]


def test_compute_discounted_returns_takes_tensors():
    torch = pytest.importorskip("torch")

    assert compute_discounted_returns(torch.tensor([1.0, 1.0]), 0.5).tolist() == [1.5, 1.0]


def test_process_supervision_advantages_worked_by_hand():
    # mean 3, std sqrt(2): (-2, -1, 0) / sqrt(2) and (1, 2) / sqrt(2), summed from the back
    root = np.sqrt(2)

    first, second = compute_grpo_process_supervision_advantages([[1, 2, 3], [4, 5]])

    np.testing.assert_allclose(first, [-3 / root, -1 / root, 0], atol=1e-12)
    np.testing.assert_allclose(second, [3 / root, 2 / root])


def test_process_supervision_advantages_discounts():
    first, second = compute_grpo_process_supervision_advantages([[0, 2], [1]], gamma=0.5)

    # mean 1, std sqrt(2/3)
    std = np.sqrt(2 / 3)
    np.testing.assert_allclose(first, [(-1 + 0.5) / std, 1 / std])
    np.testing.assert_allclose(second, [0], atol=1e-12)


def test_process_supervision_advantages_refuses_equal_rewards():
    with pytest.raises(ValueError, match="standard deviation"):
        compute_grpo_process_supervision_advantages([[0.1, 0.1], [0.1]])
