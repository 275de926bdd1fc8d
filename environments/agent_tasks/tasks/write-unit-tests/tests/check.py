"""Run /app/test_intervals.py with right and with wrong versions of the function."""

import json
import stat
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from isolated import run_program

TESTS = Path("/app/test_intervals.py")
MAX_BYTES = 100_000
PROGRAM = """
import io
import unittest

outcome = unittest.TestResult()
try:
    import test_intervals
    suite = unittest.defaultTestLoader.loadTestsFromModule(test_intervals)
    suite.run(outcome)
    result = [outcome.testsRun - len(outcome.skipped), outcome.wasSuccessful()]
except BaseException:
    result = [outcome.testsRun, False]
"""
RIGHT = {
    "original": """
def merge_intervals(intervals):
    for start, end in intervals:
        if end < start:
            raise ValueError(f"the interval ({start}, {end}) ends before it starts")
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
""",
    "recursive": """
def merge_intervals(intervals):
    if any(last < first for first, last in intervals):
        raise ValueError("an end is before its start")

    def join(rest):
        if len(rest) < 2:
            return rest
        (a, b), (c, d), *others = rest
        if c > b + 1:
            return [(a, b), *join(rest[1:])]
        return join([(a, max(b, d)), *others])

    return join(sorted(tuple(pair) for pair in intervals))
""",
    "edges": """
def merge_intervals(intervals):
    edges = []
    for low, high in intervals:
        if high < low:
            raise ValueError("wrong interval")
        edges += [(low, 0), (high + 1, 1)]
    merged, depth, start = [], 0, None
    for place, kind in sorted(edges):
        if kind == 0:
            start = place if depth == 0 else start
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                merged.append((start, place - 1))
    return merged
""",
    "while": """
def merge_intervals(intervals):
    rest = sorted(map(tuple, intervals), key=lambda pair: pair[0])
    found = []
    while rest:
        low, high = rest.pop(0)
        if low > high:
            raise ValueError("low end is higher")
        while rest and rest[0][0] - high <= 1:
            other = rest.pop(0)
            if other[0] > other[1]:
                raise ValueError("low end is higher")
            high = high if high > other[1] else other[1]
        found.append((low, high))
    return found
""",
}
CHANGES = {
    "does not merge what touches": ("merged[-1][1] + 1", "merged[-1][1]"),
    "merges over a gap": ("merged[-1][1] + 1", "merged[-1][1] + 2"),
    "forgets a longer interval": ("max(merged[-1][1], end)", "end"),
    "keeps the first end": ("max(merged[-1][1], end)", "merged[-1][1]"),
    "does not sort": ("sorted(intervals)", "list(intervals)"),
    "does not reject": ("if end < start:", "if False:"),
    "rejects a single integer": ("if end < start:", "if end <= start:"),
    "another error": ("raise ValueError", "raise KeyError"),
    "changes the input": ("    merged = []", "    intervals.sort()\n    merged = []"),
    "lists": (
        "(merged[-1][0], max(merged[-1][1], end))",
        "[merged[-1][0], max(merged[-1][1], end)]",
    ),
}


def passes(tests, version):
    """Whether at least one test was run, and none failed."""
    sources = {"test_intervals": tests, "intervals": version}
    result = run_program(PROGRAM, sources, None)
    return isinstance(result, list) and len(result) == 2 and result[0] > 0 and result[1] is True


def score(tests):
    for name, version in RIGHT.items():
        if not passes(tests, version):
            print(f"the tests fail with a right version: {name}")
            return 0.0
    missed = [
        name
        for name, (old, new) in CHANGES.items()
        if passes(tests, RIGHT["original"].replace(old, new))
    ]
    print(f"wrong versions with which no test fails: {', '.join(missed) or 'none'}")
    return 1 - len(missed) / len(CHANGES)


reward = 0.0
try:
    if stat.S_ISREG(TESTS.lstat().st_mode) and TESTS.stat().st_size <= MAX_BYTES:
        reward = round(score(TESTS.read_text("utf-8")), 6)
except (OSError, ValueError) as error:
    print(f"{TESTS} cannot be read: {error}")
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward}))
