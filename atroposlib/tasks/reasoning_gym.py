"""Items of the reasoning-gym package: generation, split, prompts and scores.

    (seed, iteration) -> task -> complexity -> generator parameters -> item -> messages
    completion -> answer -> is it safe? -> score of the package, at most highest_score

All functions are deterministic. Training items never repeat a question of the evaluation set. The
package is imported on first use.

Several scorers of the package run the answer as Python code, with `eval` or sympy's `parse_expr`.
They receive an answer only if its syntax tree consists of literals or, for sympy, of names,
arithmetic and well-known functions: with `eval`, names refer to the scorer's variables, one of
which is the right answer. Other scorers repeat a move by a number in the answer; such numbers have
few digits.

Some scorers give partial credit to trivial answers. For these tasks, only the score above that of
the best trivial answer counts, and items whose answer can be copied from the question are skipped.
A right answer always scores 1.0.
"""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import math
import multiprocessing
import operator
import re
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from random import Random
from typing import Any, Literal

from pydantic import Field

from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.tasks.single_turn_parts import SavedRolloutsConfig
from atroposlib.utils.text import near_name

__all__ = [
    "CORRECT",
    "START_COMPLEXITY",
    "Curriculum",
    "ReasoningGymEnvConfig",
    "TaskItem",
    "eval_items",
    "extract_answer",
    "is_safe_answer",
    "prompt_messages",
    "score_completion",
    "task_names",
    "train_item",
    "train_task_and_complexity",
]

logger = logging.getLogger(__name__)

START_COMPLEXITY = 0.3
"""Complexity of a task's first item under `curriculum`."""
CORRECT = 0.5
"""Minimum score of a correct completion, for accuracies."""


class ReasoningGymEnvConfig(SavedRolloutsConfig):
    """Settings of the tasks, of their complexity, of evaluations and of saved rollouts."""

    task_names: list[str] = Field(
        default_factory=list,
        description="Tasks of the reasoning-gym package; empty means all that can be built.",
    )
    task_params: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Generator parameters by task; they override those of the complexity.",
    )
    system_prompt: str | None = Field(
        None, description="System message; None is the default prompt, an empty text sends none."
    )
    top_p: float = Field(0.95, gt=0, le=1, description="Nucleus of rollouts; 1 disables it.")
    eval_temperature: float = Field(0.1, ge=0, description="Sampling temperature of evaluations.")
    eval_budget_factor: float = Field(
        2.0, gt=0, description="Token limit of evaluations, as a multiple of max_token_length."
    )
    seed: int = Field(42, ge=0, description="Seed of the training items.")
    eval_seed: int = Field(123, ge=0, description="Seed of the evaluation items.")
    num_eval_samples_per_task: int = Field(
        5, ge=1, description="Number of evaluation items per task."
    )
    max_eval_tasks: int = Field(
        20, ge=1, description="Maximum number of evaluated tasks, drawn by eval_seed."
    )
    complexity_mode: Literal["curriculum", "random"] | None = Field(
        None,
        description="Complexity of training items: the package's defaults (None), uniformly drawn "
        "(random), or by the accuracy of each task (curriculum).",
    )
    curriculum_target_accuracy: float = Field(
        0.7, ge=0, le=1, description="Accuracy at which the complexity does not change."
    )
    mask_too_long_completions: bool = Field(
        True, description="Whether truncated completions are excluded from the policy update."
    )

    def validate_config(self) -> None:
        """Check settings against each other.

        Raises:
            ConfigError: `task_params` has tasks that `task_names` does not list.
        """
        missing = sorted(set(self.task_params) - set(self.task_names)) if self.task_names else []
        if missing:
            raise ConfigError(
                f"task_params names {', '.join(missing)}, which task_names does not list"
            )


EVALUATED_BY_PYTHON = frozenset(["binary_matrix", "n_queens", "spiral_matrix", "string_insertion"])
EVALUATED_BY_SYMPY = frozenset(
    [
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
    ]
)
MATH_FUNCTIONS = frozenset(["Abs", "Rational", "exp", "ln", "log", "sqrt"]) | frozenset(
    ["acos", "asin", "atan", "cos", "cosh", "cot", "csc", "sec", "sin", "sinh", "tan", "tanh"]
)
LITERAL_NODES = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Load)
ARITHMETIC_NODES = (
    ast.Name,
    ast.BinOp,
    ast.UnaryOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.Div,
    ast.FloorDiv,
    ast.Mod,
    ast.Pow,
    ast.USub,
    ast.UAdd,
)
STRING_OF_LETTERS = re.compile(r"[A-E]+")
"""An answer of string_insertion, which Python reads as a name; no scorer has such a variable."""
MANY_MOVES = {"rubiks_cube": re.compile(r"\d{2}"), "rush_hour": re.compile(r"[+-]\d{2}")}
PROPOSITION = re.compile(r"[A-Z\u00ac\u2227\u2228\u2192\u2194()\s]{1,500}")
LONG_EXPONENT = re.compile(r"[0-9._][eE][-+]?[0-9_]{3}")
"""sympy expands such a number: 1e999999999 never ends."""
MAX_ANSWER_CHARACTERS = 10_000
MAX_LENGTHENING = 4
"""Maximum length of an answer as a multiple of the gold answer's, if that is more."""
MAX_EXPRESSION_CHARACTERS = 2_000
MAX_POWER = 1_000

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def extract_answer(completion: str) -> str | None:
    """Return the answer of a completion; None unless there is exactly one.

    Text inside `<think>` is ignored. The chat template may have opened the block in the prompt, and
    a block that is not closed extends to the end.
    """
    text = _without_thinking(completion)
    match = ANSWER.search(text) if text.count("<answer>") == 1 else None
    return None if match is None else match[1].strip() or None


def _without_thinking(completion: str) -> str:
    *thoughts, rest = completion.split("</think>")
    shown: list[str] = []
    for thought in thoughts:
        before, opened, _ = thought.partition("<think>")
        if opened:
            shown.append(before)
        else:  # opened by the chat template: everything so far was thinking
            shown.clear()
    return "".join([*shown, rest.partition("<think>")[0]])


def is_safe_answer(answer: str, task: str, *, gold: str | None = None) -> bool:
    """Whether an answer may be passed to the scorer of a task, which may run it as code.

    Args:
        answer: result of `extract_answer`.
        task: name of the task in the package.
        gold: answer of the item; None if many are right.
    """
    if len(answer) > max(MAX_ANSWER_CHARACTERS, MAX_LENGTHENING * len(gold or "")):
        return False
    if task in MANY_MOVES:
        return MANY_MOVES[task].search(answer) is None
    if task == "propositional_logic":
        # Its scorer enumerates the values of every variable.
        return PROPOSITION.fullmatch(answer) is not None
    if task == "string_insertion" and STRING_OF_LETTERS.fullmatch(answer):
        return True
    if task not in EVALUATED_BY_PYTHON | EVALUATED_BY_SYMPY:
        return True
    if len(answer) > max(MAX_EXPRESSION_CHARACTERS, MAX_LENGTHENING * len(gold or "")):
        return False
    if task in EVALUATED_BY_SYMPY and LONG_EXPONENT.search(answer):
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except SyntaxError:
        # `eval` also fails, and those scorers then compare texts.
        return task in EVALUATED_BY_PYTHON
    except (ValueError, RecursionError, MemoryError):
        return False
    if task in EVALUATED_BY_SYMPY:
        try:
            return _is_arithmetic(tree)
        except RecursionError:
            return False
    return all(isinstance(node, LITERAL_NODES) for node in ast.walk(tree))


def _is_arithmetic(tree: ast.Expression) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            named = isinstance(node.func, ast.Name) and node.func.id in MATH_FUNCTIONS
            if not named or node.keywords:
                return False
        elif isinstance(node, ast.Constant):
            # sympy evaluates strings; complex and boolean constants are not answers.
            if type(node.value) not in (int, float):
                return False
        elif not isinstance(node, LITERAL_NODES + ARITHMETIC_NODES):
            return False
    return _power(tree.body) <= MAX_POWER


def _power(node: ast.AST) -> float:
    """Return an upper bound of the exponents; those of nested powers multiply."""
    inner = max([1.0, *map(_power, ast.iter_child_nodes(node))])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(node.left) * _bound(node.right)
    return inner


def _bound(exponent: ast.AST) -> float:
    """Return an upper bound of the absolute value of an exponent; infinite if unknown."""
    if isinstance(exponent, ast.Constant):
        return abs(exponent.value)  # type: ignore[arg-type]
    if isinstance(exponent, ast.Name):
        return 1.0
    if isinstance(exponent, ast.UnaryOp):
        return _bound(exponent.operand)
    if isinstance(exponent, ast.Call):
        return max([1.0, *map(_bound, exponent.args)])
    if isinstance(exponent, ast.BinOp):
        left, right = _bound(exponent.left), _bound(exponent.right)
        if isinstance(exponent.op, ast.Add | ast.Sub):
            return left + right
        if isinstance(exponent.op, ast.Mult):
            return left * right
        divisor = exponent.right
        is_division = isinstance(exponent.op, ast.Div | ast.FloorDiv)
        if is_division and isinstance(divisor, ast.Constant) and _bound(divisor) >= 1:
            return left
    return math.inf


def as_key(params: Mapping[str, Any]) -> str:
    """Return parameters as text, for use as a cache key."""
    return json.dumps(params, sort_keys=True)


def make_dataset(task: str, params: Mapping[str, Any], *, seed: int, size: int = 1) -> Any:
    """Return a generator of `size` entries of a task; entry i is made from `seed + i`."""
    return _package().factory.create_dataset(task, size=size, seed=seed, **params)


@lru_cache(maxsize=512)
def scoring_dataset(task: str, params_key: str) -> Any:
    """Return a generator for scoring; cached, since some read word lists on creation."""
    return make_dataset(task, json.loads(params_key), seed=0)


@lru_cache(maxsize=64)
def buildable_tasks(wanted: tuple[str, ...], params_key: str) -> tuple[str, ...]:
    """Return the requested tasks, sorted; all that can be built without a request.

    Raises:
        ConfigError: a name is unknown, or a requested task refuses its parameters.
    """
    known = _package().factory.DATASETS
    params = json.loads(params_key)
    for name in (*wanted, *params):
        if name not in known:
            raise ConfigError(f"reasoning-gym has no task {name!r}{near_name(name, known)}")
    if not wanted:
        return tuple(name for name in sorted(known) if _refusal(name, params.get(name)) is None)
    for name in wanted:
        refusal = _refusal(name, params.get(name))
        if refusal is not None:
            raise ConfigError(f"task {name!r} cannot be built with these task_params: {refusal}")
    return tuple(sorted(set(wanted)))


@lru_cache(maxsize=4096)
def complexity_params(task: str, complexity: float) -> Mapping[str, Any]:
    """Return the generator parameters of a complexity, from the package's curriculum of the task.

    Every attribute of a curriculum has a list of levels; complexity 0 is the first level of each,
    1 the last. The complexity is lowered if the generator refuses it. A task without a curriculum
    has only its defaults.
    """
    factory = _package().factory
    if not factory.has_curriculum(task):
        return {}
    while complexity >= 0:
        curriculum = factory.create_curriculum(task)
        fields: list[str] = []
        for name, attribute in curriculum.attributes.items():
            level = round(complexity * (len(attribute.levels) - 1))
            curriculum.set_attr_level(name, level)
            fields += _field_names(attribute)
        made = curriculum.generate_configuration()
        params = {field: getattr(made, field) for field in fields}
        refusal = _refusal(task, params)
        if refusal is None:
            return params
        logger.debug("%s refuses complexity %.2f: %s", task, complexity, refusal)
        complexity = round(complexity - 0.1, 2)
    return {}


def _field_names(attribute: Any) -> list[str]:
    from reasoning_gym.coaching.attributes import RangeAttributeDefinition

    if isinstance(attribute, RangeAttributeDefinition):
        return [attribute.lower_field_name, attribute.upper_field_name]
    return [attribute.field_name]


def _refusal(task: str, params: Mapping[str, Any] | None) -> str | None:
    try:
        make_dataset(task, params or {}, seed=0)
    except (AssertionError, TypeError, ValueError) as error:
        return str(error) or repr(error)
    return None


@lru_cache(maxsize=1)
def _package() -> Any:
    try:
        with warnings.catch_warnings():  # of packages that it imports, when they are compiled
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
            import reasoning_gym.factory
    except ImportError as error:
        raise MissingExtraError("reasoning-gym", extra="examples") from error
    return reasoning_gym


if multiprocessing.parent_process() is not None:
    # In a scoring worker, import the package together with this module: it takes seconds, which
    # would count towards the time limit of the first call.
    with contextlib.suppress(MissingExtraError):  # raised by the first call instead
        _package()


TRIED = 0.01
"""The package's score for a wrong answer to puzzle24."""
TOLERANCE = 1e-3
PLAIN = re.compile(r"[0-9+\-*/()\s]{1,2000}")
NOT_FINITE = re.compile(r"nan|inf", re.IGNORECASE)
FLOORS: Mapping[str, float] = {
    "calendar_arithmetic": 0.6,  # any day of the week, or a number that is off by a tenth
    "figlet_font": 0.2,  # two letters of the word
    "polynomial_equations": 0.9,  # one number, 0.1 from the root
    "rectangle_count": 0.6,  # a count that is off by one or two
    "spell_backward": 0.25,  # letters that happen to be the same
    "time_intervals": 0.98,  # a time within a fiftieth of the longest interval
    "word_sorting": 0.2,  # the words in any order
}
"""Maximum score of the package for answers that solve nothing."""
NO_WAY_TO_FILL = '["No solution"]'
CONTAINED = 0.8
"""The same for an answer that contains the right one, such as a list of options. The package
scores it by the fraction that is right."""
OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def highest_score(task: str, answer: str, entry: Mapping[str, Any]) -> float:
    """Return the maximum score of an answer, whatever the package's scorer returns.

    Covers flaws of its scorers. countdown finds numbers by their digits, and so misses 0e0 and
    1_19. puzzle24 does not compare the numbers with those given. coin_flip compares the beginnings
    of texts. NaN counts as distance 0 and as sorted. Any text counts as "no solution".
    """
    if task == "countdown":
        return float(PLAIN.fullmatch(answer) is not None)
    if task == "puzzle24":
        return 1.0 if _makes_24(answer, entry["metadata"]["numbers"]) else TRIED
    if task == "coin_flip":
        return float(_is_probability(answer, entry))
    if task in ("complex_arithmetic", "number_sorting"):
        return float(NOT_FINITE.search(answer) is None)
    if task == "polynomial_equations" and not str(entry["answer"]).strip():
        return float(answer in ('""', "''"))
    return 1.0


def partial_credit(
    task: str, score: float, trivial_scores: Sequence[float], *, contains_gold: bool
) -> float:
    """Rescale the package's score of a wrong answer: 0 up to the best trivial answer, then linear.

    Args:
        task: name in the package.
        score: score of the package, below 1.
        trivial_scores: scores of the package for the `trivial_answers` to the same entry.
        contains_gold: whether the answer contains the right one.
    """
    contained = CONTAINED if contains_gold else 0.0
    floor = max([contained, FLOORS.get(task, 0.0), *trivial_scores])
    return (score - floor) / (1.0 - floor) if score > floor else 0.0


def trivial_answers(task: str, entry: Mapping[str, Any]) -> list[str]:
    """Return answers that solve nothing; empty for tasks without credit for such answers.

    They are the words or the board of the question, or a board filled with one value.
    """
    write = TRIVIAL.get(task)
    return [] if write is None else write(entry)


def can_be_copied(task: str, entry: Mapping[str, Any]) -> bool:
    """Whether the answer of an entry is empty or already shown in the question.

    Most strings of string_insertion need no insertion, and the package scores the gold answer of
    jugs without a solution as wrong.
    """
    if entry["answer"] is None:
        return False
    answer = str(entry["answer"]).strip()
    if task == "jugs" and answer == NO_WAY_TO_FILL:
        return True
    if task == "pool_matrix":
        return bool(entry["metadata"]["pool_size"] == 1)
    shown = SHOWN.get(task)
    return not answer or (shown is not None and answer == shown(entry["metadata"]))


OTHER_JOINTS = "\u2228\u2192\u2194"
"""OR, IMPLIES and IFF."""
ScoreAnswer = Callable[[str, Mapping[str, Any]], float]
"""The package's score of an answer to an entry."""
NOT_VALID = 0.05
"""The package's score for a conclusion that does not follow."""


def repeats_a_premise(answer: str, entry: Mapping[str, Any], score: ScoreAnswer) -> bool:
    """Whether a part of a conclusion, joined by AND, follows from one premise alone."""
    if answer == entry["metadata"]["example_answer"]:
        return False
    alone = [
        {**entry, "metadata": {**entry["metadata"], "premises": [premise]}}
        for premise in entry["metadata"]["premises"]
    ]
    return any(score(part, one) > NOT_VALID for part in _joined_by_and(answer) for one in alone)


def concludes_anything(entry: Mapping[str, Any], score: ScoreAnswer) -> bool:
    """Whether an entry of propositional_logic is unusable.

    Its premises contradict each other, so that everything follows, or its example does not follow.
    """
    variable = entry["metadata"]["variables"][0]
    contradiction = score(f"{variable} ∧ ¬{variable}", entry)
    example = str(entry["metadata"]["example_answer"])
    return contradiction > NOT_VALID or score(example, entry) < 1.0


def _joined_by_and(proposition: str) -> list[str]:
    """Return the operands of the outermost AND; the whole proposition without one."""
    text = proposition.strip()
    while text.startswith("(") and _closing(text) == len(text) - 1:
        text = text[1:-1].strip()
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and character in OTHER_JOINTS:
            return [text]
        if depth == 0 and character == "∧":
            parts.append(text[start:i])
            start = i + 1
    if not parts:
        return [text]
    return [part for joined in (*parts, text[start:]) for part in _joined_by_and(joined)]


def _closing(text: str) -> int:
    """Return the position of the bracket that closes the first one; -1 without one."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i
    return -1


def _as_lines(board: Sequence[Sequence[Any]]) -> str:
    return "\n".join(" ".join(map(str, row)) for row in board)


def _filled(entry: Mapping[str, Any]) -> list[str]:
    """Return the board with all blanks filled with 1, with 2, ..."""
    puzzle = entry["metadata"]["puzzle"]
    return [
        _as_lines([[cell or digit for cell in row] for row in puzzle])
        for digit in range(1, len(puzzle) + 1)
    ]


def _dead_or_unchanged(entry: Mapping[str, Any]) -> list[str]:
    """Return the board of the game of life without living cells, and the board shown."""
    shown = str(entry["question"]).rpartition("\n\n")[2].strip().rstrip(".")
    return [re.sub("1", "0", shown), shown]


def _all_alike(entry: Mapping[str, Any]) -> list[str]:
    """Return two answers: all are knights, and all are knaves."""
    terms, names = entry["metadata"]["knight_knave_terms"], entry["metadata"]["names"]
    kinds = (terms["a_knight"], terms["a_knave"])
    return [", and ".join(f"{name} is {kind}" for name in names) for kind in kinds]


TRIVIAL: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "futoshiki": _filled,
    "game_of_life": _dead_or_unchanged,
    "knights_knaves": _all_alike,
    "letter_jumble": lambda entry: [" ".join(entry["metadata"]["scrambled_words"])],
    "mini_sudoku": _filled,
    "prime_factorization": lambda entry: [str(entry["metadata"]["number"])],
    "sentence_reordering": lambda entry: [str(entry["question"]).rpartition("sentence: ")[2]],
    "spell_backward": lambda entry: [str(entry["metadata"]["word"])],
    "string_manipulation": lambda entry: [str(entry["metadata"]["string"])],
    "sudoku": _filled,
    "word_sorting": lambda entry: [", ".join(entry["metadata"]["transformed_words"])],
}
SHOWN: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "number_sequence": lambda metadata: str(metadata["sequence"][-2]),
    "polynomial_multiplication": lambda metadata: str(metadata["polynomial_expr"]),
    "rotate_matrix": lambda metadata: _as_lines(metadata["matrix"]),
    "string_insertion": lambda metadata: str(metadata["string"]),
    "string_manipulation": lambda metadata: str(metadata["string"]),
}
"""Part of a question that may equal its answer."""


def _makes_24(answer: str, numbers: list[int]) -> bool:
    used: list[int] = []
    try:
        tree = ast.parse(answer.strip(), mode="eval") if PLAIN.fullmatch(answer) else None
        return (
            tree is not None and _value(tree.body, used) == 24 and sorted(used) == sorted(numbers)
        )
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Return the exact value of an expression and append its numbers to `used`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, used)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def _is_probability(answer: str, entry: Mapping[str, Any]) -> bool:
    rational = (entry.get("metadata") or {}).get("rational") or {}
    golds = [str(entry["answer"])]
    if rational:
        golds.append(f"{rational['numerator']}/{rational['denominator']}")
    try:
        # As floats: as a fraction, 1e999999999 would be expanded.
        numerator, _, denominator = answer.replace(",", "").partition("/")
        value = float(numerator) / float(denominator or 1)
        return any(math.isclose(value, float(Fraction(gold)), rel_tol=TOLERANCE) for gold in golds)
    except (ValueError, ZeroDivisionError, OverflowError):
        return False


DEFAULT_SYSTEM_PROMPT = (
    "You are an AI that thinks deeply and may reason for as long as a problem needs. Put all of "
    "your reasoning inside <think> </think> tags: work step by step, question each step, and "
    "check the result before you settle on it. After the closing tag give exactly one final "
    "answer inside <answer> </answer> tags, with nothing else in them and in the form the "
    "problem asks for."
)

MAX_ATTEMPTS = 200
"""Maximum draws of a training question that is not in the evaluation set."""

BARE_ANSWER_TASKS = frozenset(["propositional_logic", "quantum_lock"])
"""Tasks whose scorer would read the tags as variables or buttons."""

DRAWS_PER_ITEM, DIFFERENT_DRAWS_PER_ITEM = 100, 4
"""Maximum draws for one evaluation item: in all, and of usable entries."""

EXACT_ANSWER_TASKS = frozenset(["game_of_life_halting"])
"""Tasks whose scorer accepts any text; answers are compared with the gold answer instead."""


@dataclass(frozen=True)
class TaskItem:
    """One question of one task; sufficient to build its scorer in another process."""

    task: str
    """Name in the reasoning-gym package."""
    params: dict[str, Any]
    """Generator parameters, without seed and size."""
    entry: dict[str, Any]
    """Entry of the package: `question`, `answer` (None if many are right), `metadata`."""
    complexity: float | None = None
    """In [0, 1]; None means the package's default parameters."""

    @property
    def question(self) -> str:
        return str(self.entry["question"])


def task_names(config: ReasoningGymEnvConfig) -> tuple[str, ...]:
    """Return the tasks to draw from, sorted.

    Raises:
        ConfigError: a name is unknown, or the package refuses its parameters.
    """
    return buildable_tasks(tuple(config.task_names), as_key(config.task_params))


def eval_items(config: ReasoningGymEnvConfig) -> list[TaskItem]:
    """Return the evaluation set: distinct questions from `eval_seed` at default complexity.

    At most `max_eval_tasks` tasks with at most `num_eval_samples_per_task` questions each.
    """
    return [item for task in _eval_task_names(config) for item in _eval_items(task, config)]


def train_task_and_complexity(
    config: ReasoningGymEnvConfig, iteration: int
) -> tuple[str, float | None]:
    """Return the task of a training item, and its complexity by `complexity_mode`.

    For `curriculum` it is the initial complexity, which the environment replaces.
    """
    rng = Random(f"{config.seed}/{iteration}")
    task = rng.choice(task_names(config))
    if config.complexity_mode == "random":
        return task, rng.random()
    return task, START_COMPLEXITY if config.complexity_mode == "curriculum" else None


def train_item(
    config: ReasoningGymEnvConfig, iteration: int, complexity: float | None = None
) -> TaskItem:
    """Return a training item, whose question is not in the evaluation set.

    Args:
        config: settings; `seed` and `iteration` determine task and question.
        iteration: number of the item, from 0.
        complexity: in [0, 1]; None takes that of `complexity_mode`.

    Raises:
        ConfigError: no question outside the evaluation set was found.
    """
    task, drawn = train_task_and_complexity(config, iteration)
    complexity = drawn if complexity is None else complexity
    held_out = _eval_questions(task, config)
    rng = Random(f"{config.seed}/{iteration}/{task}")
    for attempt in range(MAX_ATTEMPTS):
        # Lowered with every attempt, since the generator may not support the complexity.
        hardness = None if complexity is None else complexity * (1 - attempt / MAX_ATTEMPTS)
        params = _params(task, config, hardness)
        try:
            entry = make_dataset(task, params, seed=rng.randrange(2**32))[0]
        except (ValueError, AssertionError, IndexError, KeyError, RuntimeError) as error:
            logger.debug("%s could not make an item with %s: %s", task, params, error)
            continue
        if entry["question"] not in held_out and _asks_something(task, params, entry):
            return TaskItem(task, params, entry, hardness)
    raise ConfigError(
        f"no training question of {task!r} found outside the evaluation set in {MAX_ATTEMPTS} "
        "draws; lower num_eval_samples_per_task or widen task_params"
    )


def prompt_messages(item: TaskItem, config: ReasoningGymEnvConfig) -> list[dict[str, str]]:
    """Return the system message, if any, and the question."""
    prompt = DEFAULT_SYSTEM_PROMPT if config.system_prompt is None else config.system_prompt
    system = [{"role": "system", "content": prompt}] if prompt else []
    return [*system, {"role": "user", "content": item.question}]


NUMBER = re.compile(r"-?\d+(?:[./]\d+)?", re.ASCII)
MARKED_NUMBER = re.compile(
    r"(?:\*\*|`|\$|\\\(|\\boxed\{){0,4}\s{0,4}([-+]?\d(?:[\d.,/]*\d)?)\s{0,4}(?:\*\*|[`$}.]|\\\)){0,5}",
    re.ASCII,
)
"""A number in bold, as code, as a formula or in a box, or one that ends a sentence."""


def _unmarked(answer: str, gold: str | None) -> str:
    """Return the number in an answer, without its markup, if the right answer is a number."""
    found = MARKED_NUMBER.fullmatch(answer) if gold and NUMBER.fullmatch(gold) else None
    return found[1] if found else answer


def score_completion(completion: str, item: TaskItem) -> float:
    """Score a completion with the task's scorer.

    Args:
        completion: the whole completion, thinking included.
        item: the item.

    Returns:
        A score in [0, 1]. It is 0 without exactly one answer outside the thinking, for an unsafe
        answer, and if the scorer fails. It is at most `highest_score`, and below 1 it is rescaled
        by `partial_credit`.
    """
    answer = extract_answer(completion)
    if answer is None:
        return 0.0
    task = str((item.entry.get("metadata") or {}).get("source_dataset") or item.task)
    if task in EXACT_ANSWER_TASKS:
        return float(answer.lower() == str(item.entry["answer"]).lower())
    gold = None if item.entry["answer"] is None else str(item.entry["answer"])
    answer = _unmarked(answer, gold)
    if not is_safe_answer(answer, task, gold=gold):
        return 0.0
    highest = highest_score(task, answer, item.entry)
    if highest == 0.0:
        return 0.0
    dataset = scoring_dataset(item.task, as_key(item.params))
    scorer = partial(_score, dataset)
    # Some scorers expect the tags; for others they would be part of the answer.
    texts = [answer] if task in BARE_ANSWER_TASKS else [answer, f"<answer>{answer}</answer>"]
    score = min(highest, max(scorer(text, item.entry) for text in texts))
    if task == "propositional_logic" and repeats_a_premise(answer, item.entry, scorer):
        return min(score, NOT_VALID)
    if not 0.0 < score < 1.0:
        return score
    trivial = [scorer(text, item.entry) for text in trivial_answers(task, item.entry)]
    contains_gold = gold is not None and gold in answer
    return partial_credit(task, score, trivial, contains_gold=contains_gold)


def _score(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    try:
        score = float(dataset.score_answer(answer, entry))
    except Exception as error:  # noqa: BLE001 - the package's scorers raise on malformed answers
        logger.debug("an answer could not be scored: %r", error)
        return 0.0
    return min(1.0, max(0.0, score)) if score == score else 0.0


def _asks_something(task: str, params: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    if task == "propositional_logic":
        dataset = scoring_dataset(task, as_key(params))
        return not concludes_anything(entry, partial(_score, dataset))
    return not can_be_copied(task, entry)


def _eval_task_names(config: ReasoningGymEnvConfig) -> tuple[str, ...]:
    names = task_names(config)
    if len(names) <= config.max_eval_tasks:
        return names
    return tuple(sorted(Random(config.eval_seed).sample(names, config.max_eval_tasks)))


def _eval_questions(task: str, config: ReasoningGymEnvConfig) -> frozenset[str]:
    if task not in _eval_task_names(config):
        return frozenset()
    return frozenset(item.question for item in _eval_items(task, config))


def _eval_items(task: str, config: ReasoningGymEnvConfig) -> tuple[TaskItem, ...]:
    params = as_key(_params(task, config, None))
    return _distinct_items(task, params, config.eval_seed, config.num_eval_samples_per_task)


@lru_cache(maxsize=256)
def _distinct_items(task: str, params_key: str, seed: int, num_items: int) -> tuple[TaskItem, ...]:
    params = json.loads(params_key)
    size = DRAWS_PER_ITEM * num_items
    dataset = make_dataset(task, params, seed=seed, size=size)
    items: dict[str, TaskItem] = {}
    num_drawn = 0
    for index in range(size):
        if len(items) == num_items or num_drawn == DIFFERENT_DRAWS_PER_ITEM * num_items:
            break
        item = TaskItem(task, params, dataset[index])
        if not _asks_something(task, params, item.entry):
            continue
        num_drawn += 1
        items.setdefault(item.question, item)
    return tuple(items.values())


def _params(task: str, config: ReasoningGymEnvConfig, complexity: float | None) -> dict[str, Any]:
    """Return generator parameters; those of the settings override those of the complexity."""
    own = config.task_params.get(task, {})
    if complexity is None:
        return dict(own)
    return {**complexity_params(task, round(complexity, 2)), **own}


WINDOW = 5
STEP, JUMP = 0.05, 0.1
TOO_EASY, TOO_HARD = 0.9, 0.3


class Curriculum:
    """The complexity of each task, in [0, 1], adjusted towards a target accuracy.

    The step after a group depends on the mean of the last five group accuracies: 0.1 if it is above
    0.9 or below 0.3, else 0.05, reduced by up to half if the five vary.

    Args:
        target_accuracy: accuracy at which the complexity does not change.
        accuracies: restored last group accuracies by task.
        complexities: restored complexities by task.
    """

    def __init__(
        self,
        *,
        target_accuracy: float,
        accuracies: Mapping[str, list[float]] | None = None,
        complexities: Mapping[str, float] | None = None,
    ) -> None:
        self.target_accuracy = target_accuracy
        self.accuracies = {task: list(values) for task, values in (accuracies or {}).items()}
        self.complexities = dict(complexities or {})

    def complexity(self, task: str) -> float:
        return self.complexities.get(task, START_COMPLEXITY)

    def record(self, task: str, accuracy: float) -> None:
        """Record the accuracy of a group, in [0, 1], and adjust the complexity of its task."""
        recent = [*self.accuracies.get(task, []), accuracy][-WINDOW:]
        self.accuracies[task] = recent
        moved = self.complexity(task) + _move(recent, self.target_accuracy)
        self.complexities[task] = min(1.0, max(0.0, moved))

    def metrics(self) -> dict[str, float]:
        if not self.complexities:
            return {}
        values = {f"curriculum/{task}": c for task, c in self.complexities.items()}
        return {**values, "curriculum/mean_complexity": statistics.fmean(values.values())}

    def state(self) -> dict[str, Any]:
        return {"accuracies": self.accuracies, "complexities": self.complexities}


def _move(recent: list[float], target: float) -> float:
    accuracy = statistics.fmean(recent)
    if accuracy > TOO_EASY:
        return JUMP
    if accuracy < TOO_HARD:
        return -JUMP
    if accuracy == target:
        return 0.0
    stability = max(0.5, 1 - statistics.pstdev(recent))
    return STEP * stability if accuracy > target else -STEP * stability
