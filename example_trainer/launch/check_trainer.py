"""Check flags of `atropos-grpo` without training.

    python -m example_trainer.launch.check_trainer FLAG...  ─► exit code 0, or 2 and one line

`atropos-up` runs this before it starts a service and engines, in the folder and with the variables
of the trainer, because those decide which functions of the user are found.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from atroposlib.errors import AtroposError
from atroposlib.utils.command_parser import end_command
from example_trainer.cli import config_from_args, create_full_parser, describe_errors
from example_trainer.launch.preflight import require_trainable


def main(argv: Sequence[str] | None = None) -> None:
    """Exit with 2 if the trainer would reject its settings."""
    parser = create_full_parser()
    parser.prog = "atropos-grpo"
    try:
        require_trainable(config_from_args(parser.parse_args(argv)))
    except ValidationError as error:
        end_command(parser.prog, describe_errors(error), code=2)
    except AtroposError as error:
        end_command(parser.prog, error, code=2)


if __name__ == "__main__":
    main()
