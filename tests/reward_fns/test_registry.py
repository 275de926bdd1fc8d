from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs import reward_fns
from atroposlib.envs.reward_fns import CombinedReward, RewardFunction, registry
from atroposlib.envs.reward_fns.accuracy_reward import AccuracyReward
from atroposlib.envs.reward_fns.cascading_r1_math_reward import cascading_r1_math_reward
from atroposlib.envs.reward_fns.chandas_meter_reward import ChandasMeterReward
from atroposlib.envs.reward_fns.cosine_scaled_reward import CosineScaledReward
from atroposlib.envs.reward_fns.crossword_format_reward import CrosswordFormatReward
from atroposlib.envs.reward_fns.format_reward import FormatReward
from atroposlib.envs.reward_fns.r1_reward import AccuracyXReward, FormatReasoningReward, R1Reward
from atroposlib.envs.reward_fns.reasoning_steps_reward import ReasoningStepsReward
from atroposlib.envs.reward_fns.registry import LegacyFunctionWrapper, RewardRegistry
from atroposlib.envs.reward_fns.repetition_penalty_reward import RepetitionPenaltyReward
from atroposlib.errors import ConfigError
from tests.reward_fns.helpers import ConstantReward, RaisingReward

CLASSES = {
    "accuracy": AccuracyReward,
    "accuracyx": AccuracyXReward,
    "chandas_meter": ChandasMeterReward,
    "combined": CombinedReward,
    "cosine_scaled": CosineScaledReward,
    "crossword_format": CrosswordFormatReward,
    "crosswordformat": CrosswordFormatReward,
    "format": FormatReward,
    "format_reasoning": FormatReasoningReward,
    "r1": R1Reward,
    "reasoning_steps": ReasoningStepsReward,
    "repetition_penalty": RepetitionPenaltyReward,
}


@pytest.fixture
def names() -> RewardRegistry:
    return RewardRegistry()


@pytest.mark.parametrize("suffix", ["", "_reward"])
@pytest.mark.parametrize(("name", "cls"), CLASSES.items())
def test_get_finds_each_class_by_both_names(
    name: str, suffix: str, cls: type[RewardFunction]
) -> None:
    assert registry.get(name + suffix) is cls
    assert name in registry.list_registered()


@pytest.mark.parametrize("name", ["cascading_r1_math", "cascading_r1_math_reward"])
def test_create_wraps_the_cascading_function(name: str) -> None:
    reward = registry.create(name)

    assert registry.get(name) is cascading_r1_math_reward
    assert isinstance(reward, LegacyFunctionWrapper)
    assert reward.name == "cascading_r1_math_reward"


@pytest.mark.parametrize("name", sorted({*CLASSES, "cascading_r1_math"} - {"combined"}))
def test_every_reward_function_can_be_pickled(name: str) -> None:
    reward = pickle.loads(pickle.dumps(registry.create(name, weight=2.0)))

    assert reward.weight == 2.0


def test_importing_the_package_stays_light() -> None:
    heavy = ["torch", "scipy", "math_verify", "transformers", "sympy", "chandas", "numpy"]
    script = f"import atroposlib.envs.reward_fns, sys; print(*set({heavy}) & set(sys.modules))"

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == ""


def test_register_is_a_call_and_a_decorator_with_and_without_arguments(
    names: RewardRegistry,
) -> None:
    @names.register
    class PlainWordsReward(ConstantReward):
        pass

    @names.register(name="custom_reward")
    class Named(ConstantReward):
        pass

    assert names.register(ConstantReward, "called") is ConstantReward
    assert names.get("plain_words") is names.get("plainwords") is PlainWordsReward
    assert names.get("custom") is names.get("custom_reward") is Named
    assert names.get("called") is ConstantReward
    assert {"custom", "custom_reward", "plain_words", "plainwords"} <= set(names.list_registered())
    assert "custom_" not in names.list_registered()


@pytest.mark.parametrize("thing", [dict, len, "name", ConstantReward()])
def test_register_refuses_what_is_not_a_reward_class(names: RewardRegistry, thing: Any) -> None:
    with pytest.raises(TypeError, match="not a subclass of RewardFunction"):
        names.register(thing)


def test_register_function_is_a_call_and_a_decorator(names: RewardRegistry) -> None:
    def one(completions: list[Any], **kwargs: Any) -> float:
        return 1.0

    @names.register_function("two_reward")
    def two(completions: list[Any], **kwargs: Any) -> list[float]:
        return [2.0 for _ in completions]

    names.register_function("one", one)

    assert names.get("one_reward") is one
    assert names.create("one")(["a", "b"]) == [1.0, 1.0]
    assert names.create("two", weight=3.0)(["a", "b"]) == [6.0, 6.0]
    with pytest.raises(TypeError, match="cannot be called"):
        names.register_function("three", 3)  # type: ignore[call-overload]


def test_register_reports_what_it_replaces(
    names: RewardRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    names.register(ConstantReward, "a")
    names.register(ConstantReward, "a")
    assert not caplog.records

    names.register(RaisingReward, "a")

    assert names.get("a") is RaisingReward
    assert "replaces" in caplog.text


def test_create_lets_params_win_over_keys_and_the_configuration_over_keywords(
    names: RewardRegistry,
) -> None:
    names.register(ConstantReward)
    config = {"type": "constant", "weight": 2.0, "value": 3.0, "params": {"value": 4.0}}

    reward = names.create(config, weight=9.0, name="n")

    assert (reward.weight, reward.name, reward(["a"])) == (2.0, "n", [8.0])
    assert config["params"] == {"value": 4.0}
    assert names.create("constant", value=5.0)(["a"]) == [5.0]


@pytest.mark.parametrize("config", [{}, {"params": {}}, {"type": 3}, {"type": "r1", "params": [1]}])
def test_create_refuses_a_malformed_configuration(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        registry.create(config)


def test_unknown_names_are_import_errors_that_name_the_nearest() -> None:
    with pytest.raises(ImportError, match="did you mean accuracy"):
        registry.create("accuraci")
    with pytest.raises(ImportError, match="'zzz'; known are"):
        registry.get("zzz")
    with pytest.raises(ImportError, match=r"\.\./x"):
        registry.get("../x")
    with pytest.raises(ImportError, match="'registry'"):
        registry.get("registry")  # a module of the package without a reward function


FILES = {
    "dropped_reward.py": "def dropped_reward(completions, **kwargs):\n    return 7.0\n",
    "shape.py": (
        "from atroposlib.envs.reward_fns import RewardFunction\n"
        "class AReward(RewardFunction):\n"
        "    def compute(self, completions, **kwargs):\n        return [1] * len(completions)\n"
        "class ShapeReward(AReward):\n    pass\n"
    ),
    "odd.py": "def format_reward(completions, **kwargs):\n    return 3.0\n",
    "broken.py": "import no_such_module_anywhere\n",
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    monkeypatch.setattr(reward_fns, "__path__", [*reward_fns.__path__, str(tmp_path)])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("atroposlib.envs.reward_fns."):
            del sys.modules[name]


def test_files_of_the_package_are_found_by_name(files: Path, names: RewardRegistry) -> None:
    assert names.create("dropped")(["a"]) == [7.0]
    assert names.get("dropped_reward") is names.get("dropped")
    assert names.get("shape").__name__ == "ShapeReward"
    assert names.create("odd_reward")(["a"]) == [3.0]
    with pytest.raises(ImportError, match="no_such_module_anywhere"):
        names.get("broken")


def test_load_required_functions_reads_mappings_and_objects() -> None:
    dataset = SimpleNamespace(
        dataset_reward_funcs=["r1"], types=[{"reward_funcs": [{"type": "format"}]}, {}]
    )
    config = SimpleNamespace(
        datasets=[dataset, {"reward_funcs": ["reasoning_steps"]}],
        reward_functions=["accuracy", {"type": "crossword_format", "weight": 2.0}],
        reward_funcs="repetition_penalty",
    )

    loaded = registry.load_required_functions(config)

    assert loaded == {
        "accuracy",
        "crossword_format",
        "format",
        "r1",
        "reasoning_steps",
        "repetition_penalty",
    }
    assert registry.load_required_functions(vars(config)) == loaded
    assert registry.load_required_functions({}) == set()
    with pytest.raises(ImportError, match="nothing_like_it"):
        registry.load_required_functions({"reward_funcs": ["nothing_like_it"]})


def echo(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(kwargs.get("level", -1))] * len(completions)


def strict(completions: list[Any], level: float = 0.0) -> list[float]:
    return [level] * len(completions)


@pytest.mark.parametrize("function", [echo, strict])
def test_wrapper_hands_parameters_to_every_call_and_the_call_wins(
    function: Callable[..., Any],
) -> None:
    reward = LegacyFunctionWrapper(function, weight=2.0, level=3, name="ignored")

    assert reward.name == function.__name__
    assert reward.config == {"level": 3}
    assert reward(["a"], solution="unused") == [6.0]
    assert reward(["a"], level=5) == [10.0]


def test_wrapper_refuses_a_parameter_the_function_does_not_know() -> None:
    with pytest.raises(ConfigError, match="'strict' takes no parameter levels; it takes level"):
        LegacyFunctionWrapper(strict, levels=3)


def test_wrapper_tolerates_errors_only_when_told() -> None:
    def fails(completions: list[Any]) -> list[float]:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        LegacyFunctionWrapper(fails)(["a"])
    assert LegacyFunctionWrapper(fails, tolerate_errors=True)(["a"]) == [0.0]
