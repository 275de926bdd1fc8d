"""Found in place of vLLM during the walk; see `tests/first_hour/engine.py`."""

import os
import sys

sys.path.insert(0, os.environ["FIRST_HOUR_REPOSITORY"])

from tests.first_hour.engine import main

main()
