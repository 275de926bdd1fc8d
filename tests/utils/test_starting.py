import gc

import pytest

from atroposlib.utils.starting import collection_paused


@pytest.fixture(autouse=True)
def unfrozen():
    yield
    gc.unfreeze()


def test_collection_is_paused_during_imports():
    frozen = gc.get_freeze_count()

    with collection_paused():
        assert not gc.isenabled()

    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_collection_skips_what_a_program_imported():
    with collection_paused(freezes=True):
        made = [[]]

    assert gc.get_freeze_count() > 0
    assert not any(each is made for each in gc.get_objects())


def test_collection_continues_after_a_failed_import():
    with pytest.raises(ModuleNotFoundError), collection_paused():
        raise ModuleNotFoundError("torch")

    assert gc.isenabled()
