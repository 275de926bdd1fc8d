"""The argument parser of the console commands, and their exit codes.

Usage errors are one line with the nearest known name. Where a command names its common flags,
`--help` shows those only, and `--help all` shows every flag.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from atroposlib.errors import ConfigError, MissingExtraError, TrajectoryApiError
from atroposlib.utils.proxies import exempt_this_machine
from atroposlib.utils.starting import allow_open_files
from atroposlib.utils.text import inert_block, near_name
from atroposlib.utils.web_pages import check_allowed_host

__all__ = [
    "CommandParser",
    "end_command",
    "exit_code_of",
    "host_name",
    "integer_between",
    "number_between",
    "prepare_command",
    "print_output",
    "reader_may_leave",
]

_REFUSED_SETTINGS = (401, 403, 409)
"""HTTP statuses for an invalid token, and for settings that differ from those of the run."""


def exit_code_of(error: Exception) -> int:
    """Return the exit code of a command: 2 for invalid settings, 1 for failed work."""
    if isinstance(error, (ConfigError, MissingExtraError)):
        return 2
    is_refused = isinstance(error, TrajectoryApiError) and error.status in _REFUSED_SETTINGS
    return 2 if is_refused else 1


def end_command(command: str, message: object, *, code: int) -> NoReturn:
    """Print a message on standard error, without control characters, and end the process."""
    sys.stderr.write(f"{command}: {inert_block(str(message))}\n")
    sys.exit(code)


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Context of printing to a pipe whose reader may close it early, such as `| head`."""
    try:
        yield
        if sys.stdout is not None:  # as in a process that was started without one
            sys.stdout.flush()
    except BrokenPipeError:  # the interpreter must not flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_output(text: str, *, end: str = "\n") -> None:
    """Print a text on standard output, whose reader may have left; see `reader_may_leave`."""
    with reader_may_leave():
        sys.stdout.write(text + end)


def prepare_command() -> None:
    """Prepare the process of a command; `main` calls it first.

    Characters that the encoding of the terminal lacks are printed as `?`, instead of failing.
    Requests to this machine do not go to a proxy, and the limit of open files is raised.
    transformers, whose tokenizers need no PyTorch, does not advise to install it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    exempt_this_machine()
    allow_open_files()
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def integer_between(least: int, most: int) -> Callable[[str], int]:
    """Return a converter for `add_argument` that refuses other values than `least` to `most`."""

    def convert(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"expected an integer from {least} to {most}, got {text!r}"
            )
        return int(text)

    return convert


def host_name(text: str) -> str:
    """Return a host name in lower case; a converter for `add_argument`, of `--allowed-host`."""
    try:
        return check_allowed_host(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def number_between(least: float, most: float) -> Callable[[str], float]:
    """Return a converter for `add_argument` that refuses other values than `least` to `most`."""

    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most:  # also for NaN
            raise argparse.ArgumentTypeError(
                f"expected a number from {least:g} to {most:g}, got {text!r}"
            )
        return number

    return convert


class CommandParser(argparse.ArgumentParser):
    """An argument parser with one-line errors and a short help.

    Args:
        often: Destinations of the arguments in the short help; empty shows all of them.
        **options: Options of `argparse.ArgumentParser`.
    """

    def __init__(self, *, often: Collection[str] = (), **options: Any) -> None:
        super().__init__(**{**options, "add_help": False})
        self._often = frozenset(often)
        text = "show this help" + (", or every flag" if often else "") + ", and exit"
        self.add_argument("-h", "--help", action=_Help, help=text, **self._help_options())

    def _help_options(self) -> dict[str, Any]:
        return {"metavar": "all", "nargs": "?"} if self._often else {"nargs": 0}

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse like argparse; for an unknown flag, suggest the nearest name and exit with 2."""
        given = list(sys.argv[1:] if args is None else args)
        # Before argparse, which would report a mistyped required flag as missing.
        self.refuse_unknown(self._before_terminator(given))
        parsed, rest = self.parse_known_args(given, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return parsed

    def refuse_unknown(self, words: Iterable[str]) -> None:
        """Exit with 2 if a word is an unknown flag."""
        known = self._known_flags()
        unknown = [word for word in words if self._is_unknown_flag(word, known)]
        if unknown:
            self.error("; ".join(_explain(word, known) for word in unknown))

    def error(self, message: str) -> NoReturn:
        """Print one line instead of the usage, and exit with 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def short_help(self) -> str:
        """Return the help of the required and the common arguments."""
        shown = [action for action in self._actions if self._is_often(action)]
        formatter = self._get_formatter()
        needed = [f"{a.option_strings[0]} {a.dest.upper()}" for a in shown if _is_flag_needed(a)]
        made = " ".join(["%(prog)s", *needed, "[--flag value ...]"])
        formatter.add_usage(self.usage or made, [], [])
        formatter.add_text(self.description)
        for title, wanted in (("needed", True), ("often needed", False)):
            formatter.start_section(title)
            formatter.add_arguments(a for a in shown if _is_required(a) is wanted)
            formatter.end_section()
        num_others = len(self._actions) - len(shown)
        formatter.add_text(f"All others, {num_others} of them: {self.prog} --help all")
        return formatter.format_help()

    def _is_often(self, action: argparse.Action) -> bool:
        is_help = "--help" in action.option_strings
        return not self._often or is_help or action.dest in self._often or _is_required(action)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Reject a value that is not among the choices; suggest the nearest one."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        raise argparse.ArgumentError(
            action, f"invalid choice: {value!r}{near_name(str(value), choices)} (choose from "
            f"{', '.join(choices)})",
        )  # fmt: skip

    def _before_terminator(self, words: list[str]) -> list[str]:
        return words[: words.index("--")] if "--" in words else words

    def _known_flags(self) -> list[str]:
        flags = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    flags += parser._option_string_actions
        return flags

    def _is_unknown_flag(self, word: str, known: Collection[str]) -> bool:
        flag = word.split("=", 1)[0]
        if not flag.startswith("--") or len(flag) < 3 or " " in flag or flag in known:
            return False
        return not (self.allow_abbrev and any(each.startswith(flag) for each in known))


class _Help(argparse.Action):
    """`--help` in two lengths."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        # argparse's own defaults, so that the namespace has no entry of this name.
        options |= {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        super().__init__(option_strings, **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, CommandParser)
        is_short = parser._often and values != "all"
        parser._print_message(parser.short_help() if is_short else parser.format_help(), sys.stdout)
        parser.exit()


def _is_required(action: argparse.Action) -> bool:
    return action.required if action.option_strings else action.nargs not in ("?", "*")


def _is_flag_needed(action: argparse.Action) -> bool:
    return bool(action.option_strings) and action.required


def _explain(word: str, known: Iterable[str]) -> str:
    name, known = word.split("=", 1)[0], list(known)
    # A flag of a part of the command, without the name of the part.
    whole = [flag for flag in known if flag.partition(".")[2] == name.removeprefix("--")]
    hint = f"; did you mean {whole[0]}?" if whole else near_name(name, known)
    return f"unrecognized argument {word}{hint}"
