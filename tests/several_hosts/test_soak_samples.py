"""The criterion of the soak for growth of memory and of open files."""

from __future__ import annotations

import os
import random

import pytest

from tests.several_hosts.soak import Samples, growth_findings


def samples(*, mib_per_sample: float = 0.0, files_per_sample: float = 0.0) -> Samples:
    rng = random.Random(0)
    return Samples(
        [300 + mib_per_sample * i + rng.uniform(-20, 20) for i in range(300)],
        [40 + round(files_per_sample * i) + rng.randint(-8, 8) for i in range(300)],
    )


def test_noise_is_no_growth():
    assert growth_findings({"service": samples()}) == []


@pytest.mark.parametrize(
    ("grown", "found"),
    [
        ({"mib_per_sample": 0.5}, "service grew by"),
        ({"files_per_sample": 0.3}, "service has"),
    ],
)
def test_growth_is_found(grown, found):
    (finding,) = growth_findings({"service": samples(**grown)})

    assert finding.startswith(found)


def test_sample_of_this_process_and_of_an_ended_one():
    taken = Samples()

    taken.add(os.getpid())
    taken.add(2**22 + 1)

    assert len(taken.resident_mib) == len(taken.num_files) == 1
    assert taken.resident_mib[0] > 1
