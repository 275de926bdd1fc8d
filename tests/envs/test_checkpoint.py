from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from atroposlib.envs.reporting import load_env_checkpoint, save_env_checkpoint


def test_checkpoint_comes_back_from_the_documented_place(tmp_path: Path) -> None:
    path = save_env_checkpoint(tmp_path, "gsm8k_0", 20, {"iter": np.int64(5)})

    assert path == tmp_path / "env_checkpoints" / "gsm8k_0" / "step-20.json"
    assert load_env_checkpoint(str(tmp_path), "gsm8k_0", 20) == {"iter": 5}
    assert sorted(p.name for p in path.parent.iterdir()) == ["step-20.json"]


def test_restarted_environment_finds_the_newest_of_its_base_name(tmp_path: Path) -> None:
    save_env_checkpoint(tmp_path, "gsm8k_0", 20, {"iter": 1})
    save_env_checkpoint(tmp_path, "gsm8k_1", 40, {"iter": 2})
    save_env_checkpoint(tmp_path, "gsm8k_1", 80, {"iter": 3})
    save_env_checkpoint(tmp_path, "math_0", 60, {"iter": 4})

    assert load_env_checkpoint(tmp_path, "gsm8k_2", 70) == {"iter": 2}


def test_own_file_of_the_step_wins_over_a_newer_one_of_another_number(tmp_path: Path) -> None:
    own = save_env_checkpoint(tmp_path, "gsm8k_1", 20, {"iter": 1})
    other = save_env_checkpoint(tmp_path, "gsm8k_0", 20, {"iter": 2})
    os.utime(own, (1, 1))
    os.utime(other, (2, 2))

    assert load_env_checkpoint(tmp_path, "gsm8k_1", 20) == {"iter": 1}
    assert load_env_checkpoint(tmp_path, "gsm8k_7", 20) == {"iter": 2}


@pytest.mark.parametrize("prepend", ["gsm8k_0", None])
def test_without_a_checkpoint_there_is_none(tmp_path: Path, prepend: str | None) -> None:
    assert load_env_checkpoint(tmp_path, prepend, 20) is None


def test_names_that_only_begin_alike_are_not_mixed_up(tmp_path: Path) -> None:
    save_env_checkpoint(tmp_path, "math_hard_0", 10, {"iter": 9})

    assert load_env_checkpoint(tmp_path, "math_1", 10) is None


@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_unreadable_checkpoint_is_skipped_with_a_warning(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_env_checkpoint(tmp_path, "e_0", 10, {"iter": 1})
    save_env_checkpoint(tmp_path, "e_0", 20, {"iter": 2}).write_text(content)

    with caplog.at_level(logging.WARNING):
        assert load_env_checkpoint(tmp_path, "e_0", 20) == {"iter": 1}

    assert "step-20.json" in caplog.text


def test_value_without_json_form_is_refused_and_the_earlier_file_stays(tmp_path: Path) -> None:
    save_env_checkpoint(tmp_path, "e_0", 10, {"iter": 1})

    with pytest.raises(ValueError, match="rng: "):
        save_env_checkpoint(tmp_path, "e_0", 10, {"iter": 2, "rng": object()})

    assert load_env_checkpoint(tmp_path, "e_0", 10) == {"iter": 1}
