"""`atropos-new-env`: write an environment with its test and a small data set."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from atroposlib.errors import ConfigError
from atroposlib.utils.command_parser import (
    CommandParser,
    end_command,
    prepare_command,
    reader_may_leave,
)
from atroposlib.utils.writable import naming_writes, require_writable_folder

__all__ = ["KINDS", "main", "write_environment"]

TEMPLATES = Path(__file__).with_name("new_env_templates")
KINDS: Mapping[str, str] = {
    "single-turn": "one prompt, one answer, scored by a function",
    "game": "several turns against a game, with a reward per turn",
    "tools": "a question answered with Python functions as tools",
    "judge": "free answers, rated by a judge model",
}
NEXT_STEPS = """\
wrote {files}

Now:
  {python} {script} check
      checks the environment, without a model or a network
  {python} -m pytest {test}
      runs its test, which includes that check; needs `pip install pytest`
  edit {script} and {data}
      the prompt, the score of an answer, the items
  {python} {script} process --env.total_steps 4 --env.use_wandb false \\
      --env.data_path_to_save_groups groups.jsonl --env.tokenizer_name MODEL \\
      --openai.model_name MODEL --openai.base_url http://localhost:9001/v1
      writes four groups, and groups.html, with a model that a vLLM server serves at that address
  {python} {script} serve ...
      sends groups to a trainer; --help lists every setting
"""


def main() -> None:
    """Write the files and print the next steps; exit code 2 when nothing was written."""
    prepare_command()
    parser = _parser()
    args = parser.parse_args()
    try:
        paths = write_environment(args.name, kind=args.kind, folder=Path(args.dir))
    except (ConfigError, OSError) as error:
        end_command(parser.prog, f"error: {error}", code=2)
    script, test, data = (str(path) for path in paths)
    steps = NEXT_STEPS.format(
        files=f"{script}, {test} and {data}",
        python=Path(sys.executable).name,
        script=script,
        test=test,
        data=data,
    )
    with reader_may_leave():
        print(steps, end="")


def write_environment(name: str, *, kind: str, folder: Path) -> list[Path]:
    """Write an environment, its test and its data set: all three files, or none.

    Args:
        name: Name of the environment and its module, in lower case with underscores.
        kind: Key in `KINDS`.
        folder: Created if missing.

    Returns:
        The three files, in this order.

    Raises:
        ConfigError: the name is not valid, or one of the files exists.
    """
    _check_name(name)
    stem = kind.replace("-", "_")
    class_name = "".join(part.capitalize() for part in name.split("_"))
    contents = {
        folder / f"{name}.py": TEMPLATES / f"{stem}.py.txt",
        folder / f"test_{name}.py": TEMPLATES / f"test_{stem}.py.txt",
        folder / f"{name}_data.jsonl": TEMPLATES / f"{stem}_data.jsonl",
    }
    taken = [str(path) for path in contents if path.exists()]
    if taken:
        raise ConfigError(
            f"{', '.join(taken)} would be overwritten; choose another name or another --dir"
        )
    require_writable_folder(folder, "--dir")
    written: list[Path] = []
    try:
        for path, template in contents.items():
            text = template.read_text(encoding="utf-8")
            text = text.replace("template_name", name).replace("TemplateName", class_name)
            with naming_writes(path), path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
    except BaseException:  # such as a full disk; with a part of the files it would not start again
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return list(contents)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name, re.ASCII):
        close = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
        close = close.strip("_0123456789")
        hint = f"; use {close}" if close else ""
        raise ConfigError(
            f"name {name!r}: expected lower-case letters, digits and underscores, a letter "
            f"first{hint}"
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise ConfigError(f"name {name!r} is a keyword of Python; use {name}_env")
    if name.startswith("test_") or name.endswith("_test") or name == "conftest":
        raise ConfigError(f"name {name!r}: pytest would collect the environment as a test")
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ConfigError(
            f"name {name!r}: {name}.py would shadow the module of that name; use {name}_env"
        )


def _parser() -> CommandParser:
    kinds = "\n".join(f"  {kind:13}{text}" for kind, text in KINDS.items())
    parser = CommandParser(
        prog="atropos-new-env",
        description="Write an environment with its test and a small data set, ready to run.\n\n"
        f"kinds:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="name of the module, such as word_sums")
    parser.add_argument("--kind", choices=KINDS, default="single-turn", help="(%(default)s)")
    parser.add_argument("--dir", default=".", help="folder to write to (%(default)s)")
    return parser


if __name__ == "__main__":
    main()
