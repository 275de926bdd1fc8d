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
from atroposlib.utils.command_parser import CommandParser
from atroposlib.utils.writable import require_writable_folder

__all__ = ["KINDS", "main", "write_environment"]

TEMPLATES = Path(__file__).with_name("new_env_templates")
KINDS: Mapping[str, str] = {
    "single-turn": "one prompt, one answer, scored by a function",
    "game": "several turns against a game, with a reward for each",
    "tools": "a question answered with the help of Python functions",
    "judge": "free answers, rated by a model",
}
NEXT_STEPS = """\
wrote {files}

Now:
  {python} {script} check
      tries every rule of an environment, without a model or a network
  {python} -m pytest {test}
      its test, which includes that check
  edit {script} and {data}
      what is asked, what an answer is worth, the items
  {python} {script} process --env.total_steps 4 --env.use_wandb false \\
      --env.data_path_to_save_groups groups.jsonl --env.tokenizer_name MODEL \\
      --openai.model_name MODEL --openai.base_url http://localhost:9001/v1
      four groups from a model that a vLLM server at that address serves, and groups.html to read
  {python} {script} serve ...
      groups for a trainer; --help lists every setting
"""


def main() -> None:
    """Write the files and print the next steps; exit code 2 when nothing was written."""
    parser = _parser()
    args = parser.parse_args()
    try:
        paths = write_environment(args.name, kind=args.kind, folder=Path(args.dir))
    except (ConfigError, OSError) as error:
        sys.exit(_refused(str(error)))
    script, test, data = (str(path) for path in paths)
    print(
        NEXT_STEPS.format(
            files=f"{script}, {test} and {data}",
            python=Path(sys.executable).name,
            script=script,
            test=test,
            data=data,
        ),
        end="",
    )


def write_environment(name: str, *, kind: str, folder: Path) -> list[Path]:
    """Write the environment, its test and its data; nothing that exists is touched.

    Args:
        name: name of the environment and its module, in lower case with underscores.
        kind: one of `KINDS`.
        folder: made when missing.

    Returns:
        The three files, in this order.

    Raises:
        ConfigError: the name cannot be used, or one of the files exists.
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
    for path, template in contents.items():
        text = template.read_text(encoding="utf-8")
        text = text.replace("template_name", name).replace("TemplateName", class_name)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    return list(contents)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name, re.ASCII):
        close = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
        close = close.strip("_0123456789")
        hint = f"; {close} would do" if close else ""
        raise ConfigError(
            f"name {name!r}: expected lower-case letters, digits and underscores, a letter "
            f"first{hint}"
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise ConfigError(f"name {name!r} is a word of Python; {name}_env would do")
    if name.startswith("test_") or name.endswith("_test") or name == "conftest":
        raise ConfigError(f"name {name!r}: pytest would take the environment for a test")
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        raise ConfigError(
            f"name {name!r}: there is a module of that name, which {name}.py would hide; "
            f"{name}_env would do"
        )


def _refused(message: str) -> int:
    print(f"atropos-new-env: error: {message}", file=sys.stderr)
    return 2


def _parser() -> CommandParser:
    kinds = "\n".join(f"  {kind:13}{text}" for kind, text in KINDS.items())
    parser = CommandParser(
        prog="atropos-new-env",
        description="Write an environment with its test and a small data set, ready to run.\n\n"
        f"kinds:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="as word_sums: of the file and the module")
    parser.add_argument("--kind", choices=KINDS, default="single-turn", help="(%(default)s)")
    parser.add_argument("--dir", default=".", help="folder to write to (%(default)s)")
    return parser


if __name__ == "__main__":
    main()
