import gc
import subprocess
import sys

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


def test_soft_limit_of_open_files_is_raised():
    code = (
        "import resource\n"
        "from atroposlib.utils.starting import allow_open_files\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "allow_open_files()\n"
        "soft, after = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "print(soft > 64 or hard == 64, after == hard)\n"
    )

    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ran.stdout.split() == ["True", "True"]
