"""Write the pages of the documentation site: `python -m helpers.site_pages`, then `mkdocs build`.

    Markdown pages of the repository ──► build/pages, under the same paths
    files that they link to ───────────► a page that shows the file
    docstrings, commands, imports ─────► reference/python, errors, commands; docs/architecture

Pages keep their paths, so links between them work as in the repository. Nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers.import_drawing import draw_imports
from tests.contract.import_graph import import_graph

__all__ = ["PACKAGES", "PUBLIC_MODULES", "linked_files", "write_site_pages"]

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = REPOSITORY / "build" / "pages"

PUBLIC_MODULES: Mapping[str, Sequence[str]] = {
    "Vocabulary": ("atroposlib.scored_data", "atroposlib.type_definitions"),
    "Environments": (
        "atroposlib.envs.base",
        "atroposlib.envs.single_turn_env",
        "atroposlib.envs.multi_turn_env",
        "atroposlib.envs.conversation",
        "atroposlib.envs.tools",
        "atroposlib.envs.eval",
        "atroposlib.envs.teacher_distillation_env",
        "atroposlib.envs.config",
    ),
    "Inference servers": (
        "atroposlib.envs.server_handling.config",
        "atroposlib.envs.server_handling.server_baseline",
        "atroposlib.envs.server_handling.server_manager",
    ),
    "Reward functions": ("atroposlib.envs.reward_fns.reward_function",),
    "Adapters and workspaces": (
        "atroposlib.adapters.interface",
        "atroposlib.workspaces.interface",
    ),
    "Clients of the service": ("atroposlib.api.client", "atroposlib.api.client_consumer"),
    "Wire formats": ("atroposlib.wire", "atroposlib.wire.groups"),
    "Utilities": (
        "atroposlib.utils.score_pool",
        "atroposlib.utils.advantages",
        "atroposlib.utils.tokenize_for_trainer",
    ),
    "Trainer": ("example_trainer.config", "example_trainer.loss", "example_trainer.loss_choice"),
}

PACKAGES: Sequence[str] = (
    "environments", "example_trainer", "atroposlib.cli", "atroposlib.adapters",
    "atroposlib.serving", "atroposlib.envs", "atroposlib.tasks", "atroposlib.agent_tasks",
    "atroposlib.viewer", "atroposlib.exporting", "atroposlib.api", "atroposlib.workspaces",
    "atroposlib.wire", "atroposlib.sandbox", "atroposlib.frontend", "atroposlib.utils",
    "atroposlib.scored_data", "atroposlib.errors",
)  # fmt: skip
"""Packages of the drawing of imports, and modules of the vocabulary."""

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)#\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
LANGUAGES = {
    ".py": "python",
    ".sh": "bash",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".toml": "toml",
}
MAX_SHOWN_BYTES = 200_000
NOT_IN_SEARCH = "---\nsearch:\n  exclude: true\n---\n\n"
STYLE = """.md-grid { max-width: 76rem; }
.md-typeset pre > code { font-size: .62rem; line-height: 1.35; }
.md-typeset h1 { color: var(--md-default-fg-color); font-weight: 700; letter-spacing: -.015em; }
.md-typeset h2, .md-typeset h3 { font-weight: 600; letter-spacing: -.01em; }
.md-typeset td code { word-break: normal; overflow-wrap: anywhere; }
.md-typeset td:first-child { min-width: 8rem; }
svg.imports { width: 100%; height: auto; }
svg.imports path { fill: none; stroke: var(--md-default-fg-color--lighter); stroke-width: 1.4; }
svg.imports path:hover { stroke: var(--md-accent-fg-color); stroke-width: 3; }
svg.imports rect { fill: var(--md-code-bg-color); stroke: var(--md-default-fg-color--light); }
svg.imports text { fill: var(--md-default-fg-color); font-size: 12px; text-anchor: middle; }
@media print { .md-typeset pre > code { white-space: pre-wrap; } }
/* Tables of five columns or more get the space of the list of headings. */
.md-main__inner:has(th:nth-child(5)) > .md-sidebar--secondary { display: none; }
.md-typeset table:not([class]):has(th:nth-child(5)) { font-size: .6rem; }
.md-typeset table:not([class]):has(th:nth-child(5)) :is(td, th) {
  min-width: 3rem; padding: .6em .8em;
}
.md-typeset table:not([class]):has(th:nth-child(5)) td:first-child:not([style]) { min-width: 8rem; }
.md-typeset table:not([class]):has(th:nth-child(5)) td:last-child:not([style]) { min-width: 18rem; }
"""


def tracked(pattern: str) -> list[Path]:
    """Return the files under version control that match, relative to the repository."""
    found = subprocess.run(
        ["git", "ls-files", pattern], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return [Path(line) for line in found.stdout.splitlines()]


def is_page(path: Path) -> bool:
    """Whether a Markdown file is a page, and not part of a task or a template."""
    return not {"tasks", "new_env_templates", ".github", "tests"} & set(path.parts)


def linked_files(text: str, page: Path) -> Iterator[Path]:
    """Yield the files and folders of the repository that a page links to."""
    for _, target, _ in LINK.findall(text):
        if "://" in target or target.startswith("mailto:"):
            continue
        yield Path(os.path.normpath(page.parent / target))


def page_of(path: Path) -> Path | None:
    """Return the page that shows a linked file or folder; None if the file is missing."""
    place = REPOSITORY / path
    if place.is_dir():
        return path / "README.md" if (place / "README.md").exists() else path / "files.md"
    if not place.exists():
        return None
    return path if path.suffix == ".md" else path.with_name(f"{path.name}.md")


def rewritten(text: str, page: Path) -> str:
    """Return a page whose links to files and folders lead to pages that show them."""

    def replace(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        shown = page_of(Path(os.path.normpath(page.parent / target)))
        if shown is None:
            return match[0]
        return f"[{label}]({os.path.relpath(shown, page.parent)}{anchor})"

    return "".join(
        part if is_code else LINK.sub(replace, part) for part, is_code in code_and_text(text)
    )


def code_and_text(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a page, each with whether it is a fenced block."""
    for number, part in enumerate(re.split(r"(^```.*?^```[^\n]*$)", text, flags=re.M | re.S)):
        yield part, number % 2 == 1


def shown_file(path: Path) -> str:
    """Return the page of a file that is not Markdown, or of a folder."""
    place = REPOSITORY / path
    if place.is_dir():
        lines = [f"- `{each.relative_to(path)}`" for each in tracked(f"{path}/*")]
        return f"{NOT_IN_SEARCH}# {path}\n\n" + "\n".join(lines) + "\n"
    data = place.read_bytes()[:MAX_SHOWN_BYTES].decode("utf-8", "replace")
    fence = "`" * (max([2, *(len(run) for run in re.findall(r"`+", data))]) + 1)
    language = LANGUAGES.get(path.suffix, "text")
    return f"{NOT_IN_SEARCH}# {path}\n\n{fence}{language}\n{data.rstrip()}\n{fence}\n"


def write(path: Path, text: str) -> None:
    """Write a page of the site, unless another page has written it."""
    target = PAGES / path
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def python_pages() -> Iterator[tuple[Path, str]]:
    """Yield the pages made from docstrings."""
    lines = ["# Python API", "", "Names that start with an underscore are internal.", ""]
    for title, modules in PUBLIC_MODULES.items():
        lines += [f"## {title}", ""]
        for module in modules:
            lines.append(f"- [{module}]({module}.md)")
            yield Path(f"reference/{module}.md"), f"::: {module}\n"
        lines.append("")
    yield Path("reference/python.md"), "\n".join(lines)
    yield Path("reference/errors.md"), "::: atroposlib.errors\n"


def commands() -> dict[str, str]:
    """Return the module of each console command, by its name."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return {name: target.split(":")[0] for name, target in project["scripts"].items()}


def help_of(command: tuple[str, str]) -> str:
    """Return the help of a command, as a terminal of 100 columns shows it."""
    name, module = command
    program = f"import sys; sys.argv[0] = {name!r}; from {module} import main; main()"
    shown = subprocess.run(
        [sys.executable, "-c", program, "--help"],
        cwd=REPOSITORY,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if shown.returncode != 0:
        raise SystemExit(f"{name} --help ended with code {shown.returncode}: {shown.stderr[-500:]}")
    return shown.stdout


def commands_page() -> str:
    """Return the page with the help of all commands."""
    by_name = commands()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        helps = pool.map(help_of, by_name.items())
    lines = [
        "# Commands",
        "",
        "The output of `COMMAND --help`; many have `--help all` as well.",
        "",
    ]
    for name, text in zip(by_name, helps, strict=True):
        lines += [f"## {name}", "", "```text", text.rstrip(), "```", ""]
    return "\n".join(lines)


def package_of(module: str) -> str | None:
    """Return the package of the drawing to which a module belongs: the longest that fits."""
    fitting = [name for name in PACKAGES if module == name or module.startswith(f"{name}.")]
    return max(fitting, key=len, default=None)


def package_imports() -> Counter[tuple[str, str]]:
    """Return the number of imports between packages, by importer and imported package."""
    counts: Counter[tuple[str, str]] = Counter()
    for importer, targets in import_graph(lazy=True).items():
        source = package_of(importer)
        for target in map(package_of, targets):
            if source and target and source != target:
                counts[source, target] += 1
    return counts


def architecture_page() -> str:
    """Return the page about the architecture, followed by the imports between packages."""
    counts = package_imports()
    imports = {
        package: {target: n for (source, target), n in counts.items() if source == package}
        for package in PACKAGES
    }
    text = (REPOSITORY / "docs/architecture.md").read_text().rstrip()
    lines = [
        *("", "## Imports of this version", ""),
        "Generated from the source. An arrow is left out where a longer way of arrows exists; the",
        "table has all imports, with their number.",
        *("", draw_imports(imports), ""),
        "| package | imports |",
        "|---|---|",
    ]
    for package, targets in imports.items():
        shown = ", ".join(f"`{name}` {targets[name]}" for name in sorted(targets))
        lines.append(f"| `{package}` | {shown or 'none of these'} |")
    return "\n".join([text, *lines]) + "\n"


def write_site_pages() -> None:
    """Write all pages to `build/pages`, which is emptied first."""
    shutil.rmtree(PAGES, ignore_errors=True)
    write(Path("docs/architecture.md"), architecture_page())
    pages = [path for path in tracked("*.md") if is_page(path)]
    for page in pages:
        text = (REPOSITORY / page).read_text()
        write(page, rewritten(text, page))
        for path in linked_files(text, page):
            shown = page_of(path)
            if shown is not None and path.suffix != ".md" and not (REPOSITORY / shown).exists():
                write(shown, shown_file(path))
        for first, second in IMAGE.findall(text):
            image = Path(os.path.normpath(page.parent / (first or second)))
            if "://" not in str(image):
                (PAGES / image).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(REPOSITORY / image, PAGES / image)
    for path, text in python_pages():
        write(path, text)
    write(Path("site.css"), STYLE)
    write(Path("reference/commands.md"), commands_page())


if __name__ == "__main__":
    write_site_pages()
