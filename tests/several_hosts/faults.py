"""The fault table: one run on several hosts, one fault after the other, and an exact account.

    python -m tests.several_hosts.faults [--rows cut] [--seed 0]

Needs root, which makes namespaces, and nginx. Prints a row per fault:

    seconds        until every environment has a group acknowledged and the trainer has made a step
    acknowledged   groups that the service acknowledged from the start of the fault until then
    trained        of these, in the batch of exactly one step
    queued         of these, in the queue at the end
    lost, twice    of these, the others
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.several_hosts.account import RunAccount, settle
from tests.several_hosts.cluster import ClusterRun
from tests.several_hosts.network import CUT, Impairment
from tests.several_hosts.plain_clients import PlainClusterRun

__all__ = ["CLOCK_FAULTS", "FAULTS", "Fault", "missing_tools", "run_isolated", "run_table"]

_INSIDE = "ATROPOS_TESTS_IN_NAMESPACES"
_NAMESPACES = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_TOOLS = ("nginx", "ip", "openssl", "curl", "unshare", "cc")
_PAIRS = (("env1", "service"), ("env1", "engine"), ("trainer", "service"), ("trainer", "engine"))
_LIMIT_S = 150.0

Action = Callable[[ClusterRun], None]


@dataclass(frozen=True)
class Fault:
    """A fault that begins, lasts and ends."""

    kind: str
    name: str
    duration_s: float
    begin: Action
    end: Action
    kills_environment: bool = False


@dataclass(frozen=True)
class Row:
    """Outcome of one fault."""

    fault: Fault
    began_at: float
    """Seconds of the monotonic clock, which all processes of a machine share."""
    recovered_at: float
    recovery_s: float
    """From the end of the fault."""
    num_steps: int
    """Steps of the trainer while the fault lasted."""
    restarted: tuple[str, ...]
    """Parts that ended and were started again."""


def _impair(impairment: Impairment, source: str, destination: str, run: ClusterRun) -> None:
    run.network.impair(run.hosts[source], run.hosts[destination], impairment)


def _impair_both(impairment: Impairment, one: str, other: str, run: ClusterRun) -> None:
    _impair(impairment, one, other, run)
    _impair(impairment, other, one, run)


def _heal(run: ClusterRun) -> None:
    run.network.heal()


def _send(number: signal.Signals, part: str, run: ClusterRun) -> None:
    run.parts[part].send(number)


def _nothing(run: ClusterRun) -> None:
    pass


def _lose_host(host: str, run: ClusterRun) -> None:
    """Cut a host off and end its parts, whose connections are not closed for the other hosts."""
    for other in run.hosts:
        if other != host:
            _impair_both(CUT, host, other, run)
    for part in run.parts.values():
        if part.host.name == host:
            part.hold()
            part.end(signal.SIGKILL)


def _return_host(host: str, run: ClusterRun) -> None:
    run.network.heal()
    for part in run.parts.values():
        part.is_held = False


def _fill_disk(run: ClusterRun) -> None:
    with (run.data / "other_program").open("wb", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size) == size:
                    pass


def _free_disk(run: ClusterRun) -> None:
    (run.data / "other_program").unlink()


def _pair_faults() -> Iterator[Fault]:
    for pair in _PAIRS:
        one, other = pair
        both = f"{one} - {other}"
        for kind, name, duration_s, impairment in (
            ("delay", "200 ms each way", 15.0, Impairment(delay_s=0.2)),
            ("loss", "5 % each way", 15.0, Impairment(loss=0.05)),
            ("cut", "cut for 10 s", 10.0, CUT),
            ("long cut", "cut for 30 s", 30.0, CUT),
        ):
            begin = partial(_impair_both, impairment, *pair)
            yield Fault(kind, f"{both}: {name}", duration_s, begin, _heal)
        for source, destination in (pair, pair[::-1]):
            name = f"{both}: packets to {destination} dropped for 20 s"
            begin = partial(_impair, CUT, source, destination)
            yield Fault("half-open", name, 20.0, begin, _heal)


def _part_faults() -> Iterator[Fault]:
    for part in ("service", "proxy", "engine", "env1", "trainer"):
        kill = partial(_send, signal.SIGKILL, part)
        stop, go_on = (partial(_send, number, part) for number in (signal.SIGSTOP, signal.SIGCONT))
        is_env = part == "env1"
        yield Fault("killed", f"{part}: kill -9", 0.0, kill, _nothing, is_env)
        yield Fault("stopped", f"{part}: SIGSTOP for 20 s", 20.0, stop, go_on)
    for host in ("service", "engine", "env1", "trainer"):
        lose, restore = partial(_lose_host, host), partial(_return_host, host)
        name = f"host of {host}: no power for 10 s"
        yield Fault("host lost", name, 10.0, lose, restore, host == "env1")
    yield Fault("disk", "service: disk full for 10 s", 10.0, _fill_disk, _free_disk)


def _set_clock(host: str, ahead_s: int, run: ClusterRun) -> None:
    run.set_clock(host, ahead_s)
    assert abs(run.time_of_day(host) - time.time() - ahead_s) < _LIMIT_S


def _clock_faults() -> Iterator[Fault]:
    """Clocks that jump, and jump back at the end of the fault."""
    for host in ("service", "engine", "env1", "trainer"):
        for name, ahead_s in (("2 hours ahead", 7200), ("2 hours back", -7200)):
            begin, end = partial(_set_clock, host, ahead_s), partial(_set_clock, host, 0)
            yield Fault("clock", f"{host}: clock {name} for 20 s", 20.0, begin, end)


FAULTS = (*_pair_faults(), *_part_faults())
CLOCK_FAULTS = tuple(_clock_faults())
"""These need a run whose hosts have clocks of their own."""


def missing_tools() -> str | None:
    """Return the reason why this machine cannot be several hosts; None if it can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)}; apt-get install nginx-light iproute2 openssl curl gcc"
    if os.getuid() != 0 or not os.access("/dev/net/tun", os.W_OK):
        return "hosts of their own need root and /dev/net/tun"
    made = subprocess.run([*_NAMESPACES, "true"], check=False, capture_output=True)
    return "no right to make namespaces" if made.returncode else None


def run_isolated(module: str, arguments: Sequence[str]) -> None:
    """Replace this process by the same module in namespaces that end with it, unless it is that.

    Exits with 2 where this machine cannot be several hosts.
    """
    if os.environ.get(_INSIDE):
        return
    reason = missing_tools()
    if reason is not None:
        print(reason, file=sys.stderr)
        sys.exit(2)
    command = [*_NAMESPACES, sys.executable, "-m", module, *arguments]
    os.execvpe(command[0], command, {**os.environ, _INSIDE: "1"})


def apply(run: ClusterRun, fault: Fault) -> Row:
    """Let a fault begin and end, and wait until every part does its work again."""
    began_at, starts, steps = time.monotonic(), _num_starts(run), run.num_steps()
    fault.begin(run)
    time.sleep(fault.duration_s)
    num_steps = run.num_steps() - steps
    fault.end(run)
    wait_until_recovered(run, fault.name)
    recovered_at = time.monotonic()
    return Row(
        fault=fault,
        began_at=began_at,
        recovered_at=recovered_at,
        recovery_s=recovered_at - began_at - fault.duration_s,
        num_steps=num_steps,
        restarted=tuple(part for part, n in _num_starts(run).items() if n > starts[part]),
    )


def wait_until_recovered(run: ClusterRun, name: str) -> None:
    """Wait for a new group of each environment, and then for a new step."""
    before = {env: len(run.acknowledged_by(env)) for env in run.environments}
    run.wait_for(
        lambda: all(len(run.acknowledged_by(env)) > before[env] for env in run.environments),
        f"group of every environment after {name}",
        limit_s=_LIMIT_S,
    )
    steps = run.num_steps()
    run.wait_for(lambda: run.num_steps() > steps, f"step after {name}", limit_s=_LIMIT_S)


def _num_starts(run: ClusterRun) -> dict[str, int]:
    return {name: part.num_starts for name, part in run.parts.items()}


def run_table(
    faults: Sequence[Fault], *, seed: int, is_plain: bool, on_row: Callable[[str], None]
) -> tuple[list[str], RunAccount]:
    """Run the faults one after the other; return the lines of the table and the account."""
    with tempfile.TemporaryDirectory() as folder:
        has_clocks = any(fault in CLOCK_FAULTS for fault in faults)
        kind = PlainClusterRun if is_plain else ClusterRun
        run = kind(Path(folder), seed=seed, has_clocks=has_clocks)
        try:
            run.start()
            rows = []
            for fault in faults:
                rows.append(apply(run, fault))
                on_row(f"{fault.name}: recovered after {rows[-1].recovery_s:.1f} s")
            account = settle(run)
        finally:
            run.close()
    return [line_of(row, account) for row in rows], account


HEADER = (
    "| fault | steps meanwhile | restarted | seconds to recover | acknowledged | trained | queued "
    "| lost | twice |\n|---|---|---|---|---|---|---|---|---|"
)


def line_of(row: Row, account: RunAccount) -> str:
    """Return the line of the table of a fault."""
    names = [
        name for name, at in account.acknowledged.items() if row.began_at <= at < row.recovered_at
    ]
    times = [account.trained[name] for name in names]
    queued = lost = times.count(0)
    if len(account.missing) <= account.num_queued:
        lost = 0
    else:
        queued = 0
    cells = [
        row.fault.name,
        str(row.num_steps),
        ", ".join(row.restarted) or "-",
        f"{row.recovery_s:.1f}",
        *map(str, (len(names), times.count(1), queued, lost, sum(t > 1 for t in times))),
    ]
    return f"| {' | '.join(cells)} |"


def describe(account: RunAccount) -> str:
    """Return the figures of a whole run."""
    text = (
        f"{len(account.acknowledged)} groups acknowledged, {len(account.trained)} trained in "
        f"{account.num_steps} steps, {account.num_queued} queued, {len(account.unrecorded)} "
        "trained without a record of the acknowledgement"
    )
    if not account.losses:
        return text
    is_equal = account.losses == account.replayed_losses
    return f"{text}; losses {'equal' if is_equal else 'differ from'} those of the replay"


def select(rows: Sequence[str]) -> list[Fault]:
    """Return the faults of the named kinds and those whose name contains a text; [] is all."""
    every = (*FAULTS, *CLOCK_FAULTS)
    kinds = {fault.kind for fault in every}
    texts = [row for row in rows if row not in kinds]
    return [
        fault
        for fault in every
        if not rows or fault.kind in rows or any(text in fault.name for text in texts)
    ]


def main() -> int:
    """Print the table and what does not add up; exit code 1 if anything does not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = sorted({fault.kind for fault in (*FAULTS, *CLOCK_FAULTS)})
    parser.add_argument("--rows", nargs="*", default=[], help=f"of {', '.join(kinds)}; or a text")
    parser.add_argument("--plain", action="store_true", help="no engine, no model; for few rows")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    run_isolated("tests.several_hosts.faults", sys.argv[1:])

    faults = select(arguments.rows)
    lines, account = run_table(
        faults,
        seed=arguments.seed,
        is_plain=arguments.plain,
        on_row=lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(HEADER, *lines, sep="\n")
    # An environment that is killed may not record its last groups, one per worker.
    findings = account.findings(max_unrecorded=2 * sum(f.kills_environment for f in faults))
    print(f"\n{describe(account)}")
    print("; ".join(findings) or "nothing lost, nothing trained twice")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
