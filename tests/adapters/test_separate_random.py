"""`separate_random`: a generator per thread for the modules of a library."""

from __future__ import annotations

import random
import sys
import types
from typing import Any

import pytest

from atroposlib.adapters.interface import separate_random


class LazyCorpus:
    """Loads its data with the first attribute, as those of nltk do; here it is missing."""

    def __getattr__(self, name: str) -> Any:
        raise LookupError(f"resource not found: {name}")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("lottery")
    monkeypatch.setitem(sys.modules, "lottery", module)
    return module


def test_functions_of_the_global_generator_are_replaced(library: types.ModuleType) -> None:
    library.draw, library.shuffle = random.random, random.shuffle  # type: ignore[attr-defined]
    library.own = random.Random(1).random  # type: ignore[attr-defined]
    own = library.own

    separate_random("lottery").seed(7)

    assert library.draw() == random.Random(7).random()
    assert library.shuffle is not random.shuffle
    assert library.own is own


def test_lazy_objects_are_left_alone(library: types.ModuleType) -> None:
    library.words = LazyCorpus()  # type: ignore[attr-defined]
    library.random = random  # type: ignore[attr-defined]

    source = separate_random("lottery")

    assert library.random is source
