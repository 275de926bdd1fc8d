"""Answers that do not depend on the question earn no more than guessing does.

    constants, names of the scorer, gold answers of other items, copies of the question
        ─► scored against items of every task of reasoning-gym ─► the best of them ─► its cap

    constants in every form that an environment reads, gold answers of other items
        ─► one group of every shipped environment per item ─► the best of them ─► its cap

`python -m tests.adversary.test_constant_answers` prints the table of the best answers to the tasks.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import re
import resource
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from atroposlib.envs.conversation import visible_text
from atroposlib.envs.multi_turn_env import MultiTurnEnv
from atroposlib.tasks import reasoning_gym as tasks
from atroposlib.tasks.reasoning_gym import ReasoningGymEnvConfig, TaskItem
from atroposlib.utils.aio import settle
from environments.card_table import PAGE
from tests.environments.test_process_on_text import CARDS, make_environment
from tests.fakes import CharTokenizer, ScriptedEngine

pytestmark = pytest.mark.slow

RIGHT_BY_CHANCE = {
    "acre": (0.67, "on, off or undetermined"),
    "aiw": (0.5, "a small number"),
    "binary_alternation": (0.6, "a small number of swaps"),
    "calendar_arithmetic": (0.3, "a day of the week, or yes or no"),
    "circuit_logic": (0.75, "0 or 1"),
    "count_bits": (0.3, "about half of some thirty bits"),
    "course_schedule": (0.67, "true or false"),
    "family_relationships": (0.3, "one of some twenty relations"),
    "game_of_life_halting": (0.67, "true or false"),
    "gcd": (0.6, "random numbers have small common divisors"),
    "isomorphic_strings": (0.6, "true or false"),
    "knight_swap": (0.6, "the share that cannot be solved"),
    "largest_island": (0.3, "a small number"),
    "letter_counting": (0.6, "a small number"),
    "mahjong_puzzle": (0.67, "one of four words"),
    "maze": (0.67, "a small number of steps"),
    "number_format": (0.67, "the largest number, where that or the smallest is asked for"),
    "polynomial_equations": (0.5, "a product without a constant term has the root 0 alone"),
    "ransom_note": (0.6, "true or false"),
    "rectangle_count": (0.3, "a number up to ten"),
    "rotten_oranges": (0.6, "a small number, or that some never rot"),
    "self_reference": (0.5, "a small number"),
    "shortest_path": (0.5, "the share that cannot be solved"),
    "syllogism": (0.67, "yes or no"),
    "zebra_puzzles": (0.5, "one of four names"),
}
"""Share of items for which one answer may be right, where it is more than `CHANCE`, and why."""
CHANCE = 0.2
PARTIAL = 0.1
"""What one answer may earn on average where it is not right."""
LUCKY = 2
"""Items for which an answer may be right besides, so that few items can be tried."""
SLOW = frozenset(
    [
        *("arc_agi", "codeio", "countdown", "figlet_font", "futoshiki", "group_anagrams"),
        *("intermediate_integration", "knight_swap", "polynomial_multiplication", "puzzle24"),
        *("rubiks_cube", "simple_integration", "sokoban", "spell_backward", "word_ladder"),
        *("sudoku", "zebra_puzzles"),
    ]
)
"""Tasks whose items or scores take long."""
MANY_ITEMS, FEW_ITEMS, SLOW_ITEMS = 24, 6, 8
NUM_DONORS = 8
NONE_GIVEN = frozenset(["boxnet", "rush_hour"])
"""Tasks whose entries hold no answer that is right."""

NUMBERS = [*map(str, range(13)), "24", "42", "100", "-1", "0.0", "0.5", "1.0", "1/2", "3.14"]
WORDS = ["yes", "no", "Yes", "No", "YES", "NO", "True", "False", "true", "false", "None", "null"]
WORDS += ["none", "N/A", "unknown", "answer", "A", "B", "C", "D", "E", "a", "i", "x", "P", "hello"]
WORDS += [
    "on",
    "off",
    "undetermined",
    "even",
    "odd",
    "valid",
    "invalid",
    "infeasible",
    "impossible",
]
WORDS += ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "zero"]
WORDS += ["north", "left", "right", "up", "down", "mother", "father", "sister", "brother", "one"]
WORDS += ["alpha", "red", "blue", "green", "knight", "knave", "Alice", "Bob", "two", "true.", "the"]
WORDS += ["A)", "(A)", "A.", "(B)", "Ron", "Pass", "Chi", "Pon"]
LISTS = ["True False", "yes no", "on off undetermined", "True or False", "A B C D", "ABCD", "0 1"]
LISTS += ["0123456789", " ".join(map(str, range(100))), ", ".join(map(str, range(1, 51)))]
LISTS += ["abcdefghijklmnopqrstuvwxyz", "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"]
EMPTY = [
    "[]",
    "{}",
    "()",
    "[[]]",
    '""',
    "''",
    '[""]',
    "[{}]",
    "[None]",
    "set()",
    ".",
    "-",
    "_",
    "?",
]
BOARDS = ["[0]", "[1]", "[[0]]", "[[1]]", "[[0,0],[0,0]]", "[0, 0, 0]", "[1, 2, 3]", "0 0\n0 0"]
BOARDS += [str([[0] * size] * size).replace(" ", "") for size in (3, 5, 10)]
BOARDS += ["\n".join([" ".join("123456789"[:size])] * size) for size in (4, 5, 9)]
STRANGE = ["nan", "NaN", "inf", "-inf", "Infinity", "1e308", "1e999", "-1e999", "0e0", "1_0", "0x0"]
STRANGE += ["9" * 400, "9" * 4400, "\u0660", "\u0663", "\uff11", "\u00b2", "\u00bd", "\u221e", "1j"]
STRANGE += [str(["NaN"] * size).replace("'", "") for size in range(1, 11)]
STRANGE += ["\x00", "\u00a0", "\u200b", "\U0001f600", "nan+nanj", "</think>", "<answer>"]
STRANGE += ["\\boxed{0}", "\\boxed{1} \\boxed{2}", "\\boxed{}", "$0$"]
CODE = ["def f(x): return x", "lambda: 1", "print(1)", "import os", "__import__('os')", "self"]
CODE += ["entry['answer']", "metadata", "eval('1')", "open('x')", "[].append(1)", "answer or 1"]
FORMS = ["0:00", "00:00", "12:00", "00:00:00", "12:00:00", "12:00:00.000", "0 days", "50 days"]
FORMS += ["0 days, 00:00", "50 days, 12:00:00", "2020-01-01", "A=1,B=2", "w,A1,A2", "1->2", "C4"]
FORMS += [
    "Move disk 1 from Peg 1 to Peg 2",
    "(P \u2228 \u00acP)",
    "P \u2192 P",
    "x + C",
    "2 \u00d7 2",
]
FORMS += ["UDLR", "U R F", "R+1", "A+1 B+1", "A \u2192 A", "aba", "a knight", "0 + 0i", "(0, 0)"]
CONSTANTS = list(
    dict.fromkeys([*NUMBERS, *WORDS, *LISTS, *EMPTY, *BOARDS, *STRANGE, *CODE, *FORMS])
)


class Found(NamedTuple):
    """An answer and what it earns."""

    answer: str
    share_right: float
    partial: float
    """Mean over all items of what it earns where it is not right."""

    @property
    def mean(self) -> float:
        return self.share_right + self.partial


def names_of_scorer(task: str) -> list[str]:
    """The variables and attributes of a task's scorer, bare and in brackets."""
    from reasoning_gym.factory import DATASETS

    found: set[str] = set()
    for kind in DATASETS[task][0].__mro__[:-1]:
        scorer = vars(kind).get("score_answer")
        if scorer is not None:
            found.update(scorer.__code__.co_varnames, scorer.__code__.co_names)
    names = sorted(found)
    return [*names, *(f"[{name}]" for name in names)]


def copies(question: str) -> list[str]:
    """Parts of a question, at fixed places of the list; empty where there is none."""
    lines = [line.strip() for line in question.strip().split("\n") if line.strip()]
    blocks = [block.strip() for block in re.split(r"\n\s*\n", question) if block.strip()]
    bodies = [block.partition("\n")[2] for block in blocks]
    quoted = re.findall(r"['\"`]([^'\"`\n]+)['\"`]", question)
    lists = re.findall(r"\[\[.*?\]\]|\[[^\[\]]*\]|\{[^{}]*\}", question, re.DOTALL)
    numbers = re.findall(r"-?\d+\.?\d*", question)
    words = re.findall(r"[A-Za-z]+", lines[-1])
    boards = [_at(blocks, i) for i in (-1, -2, -3)] + [_at(bodies, i) for i in (-1, -2, -3)]
    found = [question, question.rpartition(":")[2], " ".join(words), ", ".join(words)]
    found += [_at(lines, i) for i in (0, 1, 2, 3, -4, -3, -2, -1)]
    found += [_at(lines, i).partition(":")[2] for i in (-3, -2, -1, 0, 1)]
    found += [_at(quoted, i) for i in (0, 1, 2, -2, -1)] + [_at(lists, i) for i in (0, 1, -2, -1)]
    found += [_at(numbers, i) for i in (0, 1, 2, -3, -2, -1)] + [str(len(numbers))]
    found += [max(numbers, key=float, default=""), min(numbers, key=float, default="")]
    found += [re.sub(r"\d", "0", _at(lists, i)) for i in (0, -1)]
    found += [re.sub(r"[_.0]", digit, board) for board in boards for digit in "_12"]
    return [text.strip() for text in found]


def _at(parts: Sequence[str], index: int) -> str:
    return parts[index] if -len(parts) <= index < len(parts) else ""


def gold_of(item: TaskItem) -> str | None:
    """An answer that is right."""
    metadata = item.entry["metadata"]
    if item.task == "graph_color":
        return re.sub(r"(\d+):", r'"\1":', str(metadata["possible_answer"]))
    for known in (item.entry["answer"], metadata.get("example_answer")):
        if known is not None:
            return str(known)
    return metadata.get("example_correct_answer") or None  # large cubes have no example


def all_tasks() -> tuple[str, ...]:
    return tasks.task_names(ReasoningGymEnvConfig())


def items_of(task: str, *, num_items: int, seed: int = 7) -> list[TaskItem]:
    config = ReasoningGymEnvConfig(
        task_names=[task], eval_seed=seed, num_eval_samples_per_task=num_items
    )
    return tasks.eval_items(config)


def search(items: Sequence[TaskItem], donors: Sequence[TaskItem]) -> list[Found]:
    """Score what does not depend on the question, and copies of it, against items of one task."""
    task = items[0].task
    answers = [*CONSTANTS, *names_of_scorer(task), *(gold_of(donor) or "" for donor in donors)]
    answers += copies(donors[0].question)[:20] if donors else []
    tried = [[answer] * len(items) for answer in dict.fromkeys(text.strip() for text in answers)]
    tried += [list(row) for row in zip(*(copies(item.question) for item in items), strict=True)]
    return [_worth(row, items) for row in tried]


def _worth(answers: Sequence[str], items: Sequence[TaskItem]) -> Found:
    scores = [
        tasks.score_completion(f"<answer>{answer}</answer>", item) if answer else 0.0
        for answer, item in zip(answers, items, strict=True)
    ]
    return Found(
        answers[-1],
        statistics.fmean(score == 1.0 for score in scores),
        statistics.fmean(score if score < 1.0 else 0.0 for score in scores),
    )


def too_much(task: str, found: Sequence[Found], num_items: int) -> list[str]:
    """What earns more than guessing does."""
    cap, reason = RIGHT_BY_CHANCE.get(task, (CHANCE, "guessing"))
    luck = LUCKY / num_items if num_items < MANY_ITEMS else 0.0
    most_right, most_besides = cap + luck, PARTIAL + luck / 4
    return [
        f"{one.answer[:60]!r} is right for {one.share_right:.2f} of the items, {one.partial:.2f} "
        f"besides; at most {most_right:.2f} ({reason}) and {most_besides:.2f}"
        for one in found
        if one.share_right > most_right or one.partial > most_besides
    ]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def test_two_hundred_constants_are_tried() -> None:
    assert len(CONSTANTS) >= 200


@pytest.mark.parametrize("task", [task for task in all_tasks() if task not in SLOW])
def test_answers_that_solve_nothing_earn_no_more_than_guessing(task: str) -> None:
    items = items_of(task, num_items=FEW_ITEMS + 2)
    donors, asked = items[:2], items[2:]

    assert too_much(task, search(asked, donors), len(asked)) == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("task", all_tasks())
def test_of_many_items_as_well(task: str) -> None:
    items = items_of(task, num_items=NUM_DONORS + (SLOW_ITEMS if task in SLOW else MANY_ITEMS))
    donors, asked = items[:NUM_DONORS], items[NUM_DONORS:]

    assert too_much(task, search(asked, donors), len(asked)) == []


def drawn(task: str, *, num_items: int) -> Iterator[TaskItem]:
    """Items as they are trained on, of the default and of growing complexity."""
    for mode in (None,) if task in SLOW else (None, "random"):
        config = ReasoningGymEnvConfig(
            task_names=[task], complexity_mode=mode, num_eval_samples_per_task=1, seed=3
        )
        for iteration in range(num_items):
            complexity = None if mode is None else 0.4 * iteration / num_items
            yield tasks.train_item(config, iteration, complexity)


@pytest.mark.parametrize("task", [task for task in all_tasks() if task not in SLOW | NONE_GIVEN])
def test_gold_answers_score_one(task: str) -> None:
    for item in drawn(task, num_items=2):
        assert tasks.score_completion(f"<answer>{gold_of(item)}</answer>", item) == 1.0


@pytest.mark.long
@pytest.mark.parametrize("task", [task for task in all_tasks() if task not in NONE_GIVEN])
def test_gold_answers_of_many_seeds_score_one(task: str) -> None:
    for item in drawn(task, num_items=4 if task in SLOW else 20):
        gold = gold_of(item)
        if gold is not None:
            assert tasks.score_completion(f"<answer>{gold}</answer>", item) == 1.0


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("n_queens", "[valid_solutions]"),
        ("n_queens", "valid_solutions[0]"),
        ("binary_matrix", "[oracle_answer]"),
        ("spiral_matrix", "[oracle_answer]"),
        ("spiral_matrix", "oracle_answer"),
        ("string_insertion", "oracle_answer"),
        ("string_insertion", "[oracle_answer]"),
        ("number_sorting", "[NaN, NaN, NaN]"),
    ],
)
def test_names_and_what_is_no_number_earn_nothing(task: str, answer: str) -> None:
    for item in items_of(task, num_items=10):
        if task == "number_sorting":
            num_numbers = str(item.entry["answer"]).count(",") + 1
            answer = f"[{', '.join(['NaN'] * num_numbers)}]"
        assert tasks.score_completion(f"<answer>{answer}</answer>", item) == 0.0


def partial_score(task: str, answer: str, item: TaskItem) -> float:
    score = tasks.score_completion(f"<answer>{answer}</answer>", item)
    assert score <= 1.0
    return score if score < 1.0 else 0.0


def test_answers_of_other_games_of_life_earn_nothing() -> None:
    items = items_of("game_of_life", num_items=16)

    earned = [
        partial_score("game_of_life", str(other.entry["answer"]), item)
        for item in items
        for other in items
    ]

    assert statistics.fmean(earned) < 0.02


def test_board_that_is_nearly_right_earns_more_than_one_that_is_less_so() -> None:
    item = next(
        item
        for item in items_of("game_of_life", num_items=16)
        if str(item.entry["answer"]).count("1") > 5
    )
    gold = str(item.entry["answer"])

    missing = [gold.replace("1", "0", count) for count in (0, 1, 2)]
    scores = [tasks.score_completion(f"<answer>{board}</answer>", item) for board in missing]

    assert scores[0] == 1.0 > scores[1] > scores[2] > 0.0


def test_copies_of_premises_conclude_nothing() -> None:
    for item in items_of("propositional_logic", num_items=8):
        premises = item.entry["metadata"]["premises"]
        joined = " \u2227 ".join(f"({premise})" for premise in premises)
        weaker = f"({premises[0]}) \u2228 {item.entry['metadata']['variables'][0]}"
        for answer in (*premises, joined, f"({joined})", weaker):
            if answer != item.entry["metadata"]["example_answer"]:
                assert tasks.score_completion(f"<answer>{answer}</answer>", item) <= 0.05


def test_one_role_for_the_same_name_twice_is_no_hedge() -> None:
    for item in items_of("knights_knaves", num_items=8):
        names, terms = (item.entry["metadata"][key] for key in ("names", "knight_knave_terms"))
        kinds = (terms["a_knight"], terms["a_knave"])
        both = ", ".join(f"{names[0]} is {kind}" for kind in kinds)
        assert partial_score("knights_knaves", both, item) == 0.0


HOSTILE = [
    "U1000000000",
    " ".join(["R99999999"] * 20),
    "A+9999999999999",
    "A+1" * 100_000,
    "1e999999999",
    "-1e-999999999",
    "9" * 100_000,
    " \u2228 ".join(f"a{i}" for i in range(60)),
    " \u2228 ".join(f"(P{i} \u2192 Q{i})" for i in range(60)),
    "(" * 50_000,
    "[" * 100_000,
    "[" * 2_000 + "]" * 2_000,
    "9**9**9**9",
    "factorial(99999999)",
    "2 \u00d7 " * 50_000,
    "U" * 200_000,
    "a," * 100_000,
    "\u00ac" * 5_000 + "P",
]
CPU_S, MEMORY_BYTES = 900, 4 << 30


def _score_hostile(names: Sequence[str], sender: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    logging.disable()
    for task in names:
        item = items_of(task, num_items=1)[0]
        scores = [tasks.score_completion(f"<answer>{text}</answer>", item) for text in HOSTILE]
        sender.send((task, max(scores)))


def score_hostile(names: Sequence[str]) -> dict[str, float]:
    """The most that a hostile answer earns, of the tasks whose scorers end on all of them."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_score_hostile, args=(names, sender))
    process.start()
    sender.close()
    earned: dict[str, float] = {}
    with contextlib.suppress(EOFError):  # it was ended for its time or its memory
        while len(earned) < len(names):
            earned.update([receiver.recv()])
    process.join()
    return earned


LOOPING = ["propositional_logic", "rubiks_cube", "rush_hour"]
"""Tasks whose scorers do as much work as an answer says."""


def test_scorers_end_on_answers_that_ask_for_endless_work() -> None:
    earned = score_hostile(LOOPING)

    assert earned.keys() == set(LOOPING)
    assert max(earned.values()) < 0.1


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_scorers_of_all_tasks_end() -> None:
    names = all_tasks()

    earned = score_hostile(names)

    assert earned.keys() == set(names)
    assert max(earned.values()) < 0.1


BY_DESIGN = {
    "agent_tasks/agent_tasks_server.py": "its agents work in sandboxes, for minutes in all; "
    "`atropos-tasks validate` tries solutions that do nothing",
    "community/conversational_style_dpo/conversational_style_dpo_env.py": "an answer scores by the "
    "prompt that it was written for",
    "community/conversational_style_dpo/gsm8k_conversational_style_dpo_env.py": "the same",
    "community/cybersecurity_sigma/llm_judge_sigmarule_env.py": "a model rates the answers",
    "community/goofy_math/goofy_math_env.py": "a judge compares the right answers of a group",
    "community/humor_generation/humor_generation_env.py": "a model rates the answers",
    "community/meteorology_forecast/meteorology_forecast_env.py": "a model rates the answers",
    "community/philosophical_rlaif_env.py": "a judge compares the answers of a group",
    "community/punchline_vrcli/punchline_vrcli_env.py": "a model rates the reasoning, here one of "
    "random weights",
    "community/selcube/selcube_env.py": "each turn is a group, and the best reply is played",
    "game_environments/gymnasium/blackjack/blackjack_env_thinking.py": "a decision is compared "
    "with the best one, which often is to stick",
    "game_environments/gymnasium/blackjack_env.py": "the same under an earlier path",
    "eval_environments/arena_hard_environment.py": "its scripted judge looks for one sentence",
    "eval_environments/judgemark_eval.py": "the score of a text is the model's opinion",
    "eval_environments/mtbench_eval.py": "its scripted judge looks for one sentence",
    "eval_environments/refusalbench_environment.py": "any answer is wanted, or any refusal",
    "gsm8k_server_axolotl.py": "scores as gsm8k_server.py does",
    "gsm8k_server_teacher_distill.py": "scores as gsm8k_server.py does",
    "reasoning_gym_environment/reasoning_gym_environment.py": "searched above, task by task",
    "reasoning_gym_environment/reasoning_gym_teacher_distill.py": "searched above, task by task",
    "letter_counting_environment/letter_counting_environment.py": "drops groups that are mostly "
    "wrong, as all of them are here",
    "reward_model_env.py": "a model rates the answers",
    "rlaif_server.py": "a judge compares the answers of a group",
    "sft_loader_server.py": "it asks no model",
}
"""Environments that are not searched here, and why."""
EARNED_BY_CHANCE = {
    "community/poker_holdem/poker_holdem_env.py": (0.4, "one of six actions, and related ones"),
    "community/regex_generation/regex_generation_env.py": (
        0.5,
        "a regex without a match rejects all that it must reject",
    ),
    "community/solitaire_winning_probability/solitaire_winning_probability_env.py": (
        0.8,
        "any number up to the right one earns 0.2 or more, of -1 to 1",
    ),
    "community/ufc_prediction_env/ufc_image_env.py": (0.5, "one of two names"),
    "community/ufc_prediction_env/ufc_prediction_env.py": (0.5, "one of two names"),
    "community/xitter_env/xitter_env.py": (0.5, "a topic may be one of the agent's interests"),
    "community/wikipedia_research/wikipedia_article_creator.py": (
        1.0,
        "form and length of an article count, whatever it is about",
    ),
    "fundamental_prediction_environment.py": (0.67, "raised, maintained or reduced"),
    "game_environments/diplomacy_environment/diplomacy_env_minimal.py": (
        0.5,
        "all games begin alike, and a unit that has moved once stays",
    ),
    "game_environments/gymnasium/blackjack/blackjack_env_no_thinking.py": (1.0, "a fair policy"),
    "game_environments/hangman/hangman_env.py": (0.5, "common letters are found in most words"),
    "instruction_following_algorithm_environment.py": (0.7, "a question has the words it asks for"),
    "mcqa_thinking_env.py": (0.5, "one of some four letters"),
    "multimodal_dpo/clevr_cogen_a_train.py": (0.5, "a small number"),
    "multimodal_dpo/clevr_complex.py": (0.9, "yes, to most of the eight rows shipped"),
    "multimodal_dpo/pixmo_count.py": (0.9, "two, in most of the eight rows shipped"),
    "multimodal_dpo/pixmo_point_explanations.py": (0.4, "one of some shapes"),
    "number_guessing.py": (0.4, "any first guess tells something"),
    **{
        f"eval_environments/{name}_eval.py": (0.51, "one of two to five choices, for six items")
        for name in (
            *("agieval", "arc", "bbh", "boolq", "gpqa", "hellaswag", "musr", "piqa"),
            "winogrande",
        )
    },
}
"""Part of the gold answer's worth that one answer may earn, where it is more than `CHANCE`."""
ENVIRONMENTS = [path for path in CARDS if path not in BY_DESIGN]
QUICK = [
    "fundamental_prediction_environment.py",
    "infinimath/infinimath_env.py",
    "mcqa_thinking_env.py",
    "tool_calling_server.py",
]
"""Environments of one turn whose answers are scored at once."""
OF_MANY_TURNS = [
    "game_environments/gymnasium/gym_taxi.py",  # whose actions recur
    "tool_use_multiturn_server.py",  # which writes the answers between the calls itself
    "tool_use_turnlevel_advantage_server.py",
]
VALUES = [*NUMBERS, "yes", "no", "True", "A", "B", "C", "D", "x", "None", "[]", "{}", "nan", "inf"]
VALUES += ["1e999", "9" * 500, "\u0663", "1 2 3", "A B C D", "12:00", "raised", "e", "hit", "stick"]
VALUE_FORMS = ["{}", "<think>t</think> \\boxed{{{}}}", "t</think> <answer>\\boxed{{{}}}</answer>"]
VALUE_FORMS += ["<think>t</think> <answer>{}</answer>", "<think>t</think> The best answer is: {}"]
VALUE_FORMS += ["<guess>{}</guess>"]
WHOLE = ["", "   ", "<think>t</think>", "<think></think>", "</think>", "E" * 200]
WHOLE += ["<tool_call>{}</tool_call>", "<tool_call></tool_call>", "<tool_call>[]</tool_call>"]
WHOLE += ['<think>t</think><tool_call>{"name": "f", "arguments": {}}</tool_call>']
WHOLE += ['<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>']
WHOLE += [f"<think>t</think>\n```python\n{code}\n```" for code in ("print(0)", "pass", "1 / 0")]
WHOLE += ["<think>t</think>\n```python\nimport os\nos._exit(0)\n```"]
WHOLE += ["<think>t</think>\n```python\nprint(open(0).read())\n```"]
WHOLE += [
    "<think>t</think> \\boxed{1} \\boxed{2} \\boxed{3}",
    "<answer>1</answer><answer>2</answer>",
]
WHOLE += ["<think>t</think> The best answer is: A, B, C or D", "1: A\n2: B", "south", "pickup"]
WHOLE += ["<think>t</think> The revenue will be: raised and the magnitude will be: 5%"]
ECHOES = ["@prompt@", "@question@", "@last line@", "@first number@", "@last number@", "@last word@"]
"""Stand for parts of what was asked."""
COMPLETIONS = [*WHOLE, *(form.format(value) for form in VALUE_FORMS for value in VALUES)]
COPIES = [form.format(echo) for form in [*VALUE_FORMS, "<think>{}</think>"] for echo in ECHOES]
GOLD = "(the gold answer)"
REFUSAL = "I do not know."
"""Worth nothing, whatever an environment gives for it."""
GROUP_SIZE = 60
FEW_TURNS_COMPLETIONS = 80
"""Completions tried where each is a game."""


def fill_in(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Put parts of what was asked where a text has their names."""
    if "@" not in text:
        return text
    asked = [_text_of(message["content"]) for message in messages]
    lines = [line.strip() for line in asked[-1].split("\n") if line.strip()]
    numbers = re.findall(r"-?\d+\.?\d*", asked[-1])
    words = re.findall(r"\w+", asked[-1])
    parts = ["\n".join(asked), asked[-1], _at(lines, -1), _at(numbers, 0), _at(numbers, -1)]
    for name, part in zip(ECHOES, [*parts, _at(words, -1)], strict=True):
        text = text.replace(name, part)
    return text


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content or [])


class Impostor:
    """Says the same at every turn of a rollout, another thing in each; in the first, the gold."""

    def __init__(self, judge: Any) -> None:
        self.judge = judge
        self.known: dict[str, str] = {}
        self.gold: Sequence[str] = ()
        self.queue: list[str | None] = []

    def start(self, gold: Sequence[str], texts: Sequence[str]) -> None:
        """Begin with the rollouts of one group; no gold answer, no rollout of it."""
        self.known = {}
        self.gold = gold
        self.queue = [*([None] if gold else []), REFUSAL, *texts]

    def __call__(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        verdict = self.judge(body["messages"])
        if verdict is not None:
            return {"content": verdict}
        said = [
            str(m["content"] or "").strip() for m in body["messages"] if "assistant" in m["role"]
        ]
        forms = [{gold.strip(), visible_text(gold).strip()} for gold in self.gold]
        own = [text for text in said if text in self.known or any(text in form for form in forms)]
        if own and all(text in form for text, form in zip(own, forms, strict=False)) and forms:
            return {"content": self.gold[min(len(own), len(self.gold) - 1)]}
        if own and own[-1] in self.known:
            text: str | None = self.known[own[-1]]
        else:
            text = self.queue.pop(0) if self.queue else REFUSAL
        if text is None:
            return {"content": self.gold[0]}
        written = fill_in(text, body["messages"])
        self.known.setdefault(written.strip(), text)
        self.known.setdefault(visible_text(written).strip(), text)
        return {"content": written}

    def author(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Which of the texts a trajectory consists of; None for the gold one."""
        said = (str(m["content"]).strip() for m in messages if m["role"] == "assistant")
        return next((self.known[text] for text in said if text in self.known), None)


async def earned_in(path: str, folder: Path, *, num_items: int) -> dict[str, float]:
    """Mean part of the gold answer's worth that each completion earns in an environment.

    Under `GOLD` stands what the gold answers earn: 1, less where an item has none.
    """
    player = Impostor(lambda _: None)
    earned: dict[str, list[float]] = {}
    async with ScriptedEngine(messages=player, offers_completions=False) as provider:
        env = make_environment(path, provider, folder)
        env.config.group_size = GROUP_SIZE
        player.judge = env.check_judge_reply
        await env.setup()
        texts = list(COMPLETIONS)
        if isinstance(env, MultiTurnEnv):
            texts = texts[:: len(texts) // FEW_TURNS_COMPLETIONS]
        for _ in range(num_items):
            item = await settle(env.get_next_item())
            gold = await settle(env.check_gold_answer(item))
            turns = [gold] if isinstance(gold, str) else list(gold or [])
            tried = [text for text in texts if text not in turns]
            worths = {turns[0]: 1.0} if len(turns) == 1 and turns[0] in texts else {}
            best = -math.inf
            for start in range(0, len(tried), GROUP_SIZE - 2):
                player.start(turns, tried[start : start + GROUP_SIZE - 2])
                pairs = await _scores(env, item, player)
                best = max([best, *(score for _, score in pairs)])
                worths |= _worths(pairs, best)
            repeated = list(dict.fromkeys(turns)) if len(turns) > 1 else []
            for others in (repeated[: GROUP_SIZE - 1], COPIES):  # may begin as the gold one does
                player.start([], others)
                for text, worth in _worths(await _scores(env, item, player), best).items():
                    worths[text] = max(worth, worths.get(text, worth))
            for text, worth in worths.items():
                earned.setdefault(text, []).append(worth)
            if turns and turns[-1] not in texts:
                texts.append(turns[-1])
        await env.server.close()
        await env.close()
    return {text: sum(all_worths) / num_items for text, all_worths in earned.items()}


async def _scores(env: Any, item: Any, player: Impostor) -> list[tuple[str | None, float]]:
    """Play one group; returns who wrote each trajectory, and its score."""
    group, _ = await env.collect_trajectories(item)
    if isinstance(env, MultiTurnEnv):
        group = await settle(env.postprocess_histories(group))
    if group is None:
        return []
    return list(zip(map(player.author, group["messages"]), group["scores"], strict=True))


def _worths(pairs: Sequence[tuple[str | None, float]], best: float) -> dict[str, float]:
    """The part of the gold answer's worth that the texts of one group earn.

    Args:
        pairs: text, None for the gold answer, and score.
        best: of the gold answer; a constant may be its text, and may earn more.
    """
    if not pairs:
        return {}
    lowest = min(score for _, score in pairs)
    refusal = next((score for text, score in pairs if text == REFUSAL), lowest)
    span = best - refusal if best > refusal else 1.0
    return {GOLD if text is None else text: (score - refusal) / span for text, score in pairs}


def earns_too_much(path: str, earned: Mapping[str, float], *, luck: float) -> list[str]:
    """Which completions earn more than guessing does in an environment."""
    cap, reason = EARNED_BY_CHANCE.get(path, (CHANCE, "guessing"))
    return [
        f"{text[:80]!r} earns {worth:.2f} of the gold answer, at most {cap + luck:.2f} ({reason})"
        for text, worth in sorted(earned.items(), key=lambda pair: -pair[1])
        if text != GOLD and worth > cap + luck
    ]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: CharTokenizer())
    monkeypatch.chdir(PAGE.parents[1])  # the commands of the cards name files from there


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("path", QUICK)
async def test_completions_that_solve_nothing_earn_no_more_than_guessing(
    path: str, tmp_path: Path
) -> None:
    earned = await earned_in(path, tmp_path, num_items=3)

    assert len(earned) >= 200
    assert earned[GOLD] > 0.9
    assert earns_too_much(path, earned, luck=LUCKY / 6) == []


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("path", OF_MANY_TURNS)
async def test_gold_answers_of_many_turns_are_played_to_the_end(path: str, tmp_path: Path) -> None:
    earned = await earned_in(path, tmp_path, num_items=1)

    assert earned[GOLD] == 1.0


@pytest.mark.long
@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("path", ENVIRONMENTS)
async def test_in_all_environments_as_well(path: str, tmp_path: Path) -> None:
    if "bubblewrap" in CARDS[path].needs and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    for package in ("diplomacy", "smolagents", "textworld", "verifiers"):
        if package in CARDS[path].needs:
            pytest.importorskip(package)

    earned = await earned_in(path, tmp_path, num_items=6)

    assert earned[GOLD] >= 0.5  # otherwise the parts of it that others earn say nothing
    assert earns_too_much(path, earned, luck=1 / 6) == []


def table(found: Mapping[str, Found]) -> str:
    """The best answer of each task."""
    rows = [
        f"| {task} | {one.mean:.2f} | {one.share_right:.2f} | `{one.answer[:30]!r}` |"
        for task, one in found.items()
    ]
    return "\n".join(["| task | best mean | right for | answer |", "|---|---|---|---|", *rows])


def main() -> None:
    """Print the table of the best answers, of 16 items of each task."""
    best = {}
    for task in all_tasks():
        items = items_of(task, num_items=NUM_DONORS + (SLOW_ITEMS if task in SLOW else 16))
        found = search(items[NUM_DONORS:], items[:NUM_DONORS])
        best[task] = max(found, key=lambda one: one.mean)
    print(table(best))


if __name__ == "__main__":
    main()
