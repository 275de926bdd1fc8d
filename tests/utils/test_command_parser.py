"""What commands prepare in their process."""

from __future__ import annotations

import os
import subprocess
import sys

HIDDEN_TORCH = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == "torch" else find_spec(name, *args)
from atroposlib.utils.command_parser import prepare_command
prepare_command()
import transformers
assert not transformers.is_torch_available()
"""


def test_command_in_an_install_without_torch_prints_no_advice_to_install_it() -> None:
    variables = {k: v for k, v in os.environ.items() if k != "TRANSFORMERS_NO_ADVISORY_WARNINGS"}

    done = subprocess.run(
        [sys.executable, "-c", HIDDEN_TORCH], env=variables, capture_output=True, text=True
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
