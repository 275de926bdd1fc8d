"""One part of `h200.py`: `python -m h200_parts TASK`; exits with 1 if a check or a case failed."""

from __future__ import annotations

import importlib
import json
import logging
import sys

from h200_parts.records import PartTask, Records


def main() -> None:
    """Run the part with the settings in `sys.argv[1]`."""
    logging.basicConfig(level=logging.WARNING)
    task = PartTask(**json.loads(sys.argv[1]))
    records = Records(task)
    with records.case("whole part"):
        # A part without its packages, such as TRL, is reported as one that fails.
        importlib.import_module(f"h200_parts.{task.module}").part(task, records)
    sys.exit(bool(records.num_failures))


if __name__ == "__main__":
    main()
