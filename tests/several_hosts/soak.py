"""A soak: random faults on several hosts for minutes or an hour, then an exact account.

    python -m tests.several_hosts.soak --minutes 60 [--seed 0]

Every fault of the table may strike, at random moments. Parts are killed in the first 40 % of the
time only, so that memory and file descriptors of the processes that remain can be judged.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.several_hosts.account import RunAccount, settle
from tests.several_hosts.cluster import ClusterRun
from tests.several_hosts.faults import FAULTS, Fault, run_isolated, wait_until_recovered
from tests.several_hosts.faults import describe as describe_account

__all__ = ["Samples", "growth_findings", "soak"]

JUDGED_PARTS = ("service", "env1", "env2", "trainer")
_KILLS = ("killed", "host lost")
_KILLING_SHARE = 0.4
_SAMPLE_S = 1.0
_MIB = 2**20
MAX_GROWTH_SHARE = 0.1
MAX_GROWTH_MIB = 24.0
MAX_MORE_FILES = 16


@dataclass
class Samples:
    """Memory and open files of one process over time."""

    resident_mib: list[float] = field(default_factory=list)
    num_files: list[int] = field(default_factory=list)

    def add(self, pid: int) -> None:
        """Add the state of a process, unless it has ended."""
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            num_files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        except (OSError, IndexError):
            return
        self.resident_mib.append(pages * 4096 / _MIB)
        self.num_files.append(num_files)

    @property
    def growth_mib(self) -> float:
        """Median memory of the last third, less that of the second third."""
        second, last = self._thirds(self.resident_mib)
        return statistics.median(last) - statistics.median(second)

    @property
    def more_files(self) -> float:
        """Median number of open files of the last third, less that of the second third."""
        second, last = self._thirds(self.num_files)
        return statistics.median(last) - statistics.median(second)

    @staticmethod
    def _thirds(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
        third = len(values) // 3
        return values[third : 2 * third], values[2 * third :]


def growth_findings(samples: dict[str, Samples]) -> list[str]:
    """Return the parts whose memory or number of open files grows.

    The first third of the time, in which caches fill, does not count. The limits are generous
    towards noise: a leak of a few kilobytes per group exceeds them within an hour.
    """
    found = []
    for part, taken in samples.items():
        limit_mib = max(MAX_GROWTH_MIB, MAX_GROWTH_SHARE * statistics.median(taken.resident_mib))
        if taken.growth_mib > limit_mib:
            found.append(f"{part} grew by {taken.growth_mib:.0f} MiB")
        if taken.more_files > MAX_MORE_FILES:
            found.append(f"{part} has {taken.more_files:.0f} more open files")
    return found


class Sampler:
    """Samples the judged parts once a second, in a thread; a new process starts a new series."""

    def __init__(self, run: ClusterRun) -> None:
        self._run = run
        self._by_pid: dict[tuple[str, int], Samples] = {}
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, Samples]:
        """Return the samples of the present process of each part."""
        self._has_ended.set()
        self._thread.join()
        return {
            part: self._by_pid[part, self._run.parts[part].pid]
            for part in JUDGED_PARTS
            if (part, self._run.parts[part].pid) in self._by_pid
        }

    def _sample(self) -> None:
        while not self._has_ended.wait(_SAMPLE_S):
            for name in JUDGED_PARTS:
                pid = self._run.parts[name].pid
                self._by_pid.setdefault((name, pid), Samples()).add(pid)


@dataclass(frozen=True)
class SoakResult:
    """What was done, and what was found."""

    happened: Counter[str]
    """Kind of fault → number of times."""
    account: RunAccount
    samples: dict[str, Samples]
    num_kills: int

    def findings(self) -> list[str]:
        return [
            *self.account.findings(max_unrecorded=2 * self.num_kills),
            *growth_findings(self.samples),
        ]


def soak(*, duration_s: float, seed: int, on_fault: Callable[[str], None]) -> SoakResult:
    """Let faults strike for a time; return the account and the samples."""
    rng = random.Random(seed)
    happened: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        run = ClusterRun(Path(folder), seed=seed)
        try:
            run.start()
            sampler = Sampler(run)
            started = time.monotonic()
            num_kills = 0
            while (passed_s := time.monotonic() - started) < duration_s:
                fault = draw(rng, may_kill=passed_s < _KILLING_SHARE * duration_s)
                happened[fault.kind] += 1
                num_kills += fault.kills_environment
                strike(run, fault, rng)
                on_fault(f"{time.monotonic() - started:.0f} s: {fault.name}")
            samples = sampler.stop()
            account = settle(run)
        finally:
            run.close()
    return SoakResult(happened, account, samples, num_kills)


def draw(rng: random.Random, *, may_kill: bool) -> Fault:
    """Draw a kind of fault, then one of its kind."""
    kinds = sorted({fault.kind for fault in FAULTS if may_kill or fault.kind not in _KILLS})
    kind = rng.choice(kinds)
    return rng.choice([fault for fault in FAULTS if fault.kind == kind])


def strike(run: ClusterRun, fault: Fault, rng: random.Random) -> None:
    """Let a fault begin and end, wait until all parts work, and give them a moment."""
    fault.begin(run)
    time.sleep(fault.duration_s)
    fault.end(run)
    wait_until_recovered(run, fault.name)
    time.sleep(rng.uniform(0.0, 5.0))


def describe(result: SoakResult) -> str:
    """Return the figures of a soak as lines."""
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(result.happened.items()))
    lines = [
        f"faults: {faults}",
        describe_account(result.account),
        "| part | samples | memory (MiB) | growth (MiB) | open files | more open files |",
        "|---|---|---|---|---|---|",
    ]
    for part, taken in result.samples.items():
        lines.append(
            f"| {part} | {len(taken.num_files)} | {statistics.median(taken.resident_mib):.0f} "
            f"| {taken.growth_mib:+.1f} | {statistics.median(taken.num_files):.0f} "
            f"| {taken.more_files:+.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Print the figures; exit code 1 when something does not add up or grows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    run_isolated("tests.several_hosts.soak", sys.argv[1:])

    result = soak(
        duration_s=60 * arguments.minutes,
        seed=arguments.seed,
        on_fault=lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(describe(result))
    findings = result.findings()
    print("; ".join(findings) or "nothing lost, nothing trained twice, no growth")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
