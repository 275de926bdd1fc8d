"""The documentation site: links of pages lead to pages, and nothing is loaded from other hosts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from helpers.site_pages import (
    PACKAGES,
    PUBLIC_MODULES,
    architecture_page,
    commands,
    linked_files,
    package_of,
    page_of,
    rewritten,
    shown_file,
)
from tests.contract.import_graph import import_graph
from tests.packaging.installed import REPOSITORY


def test_link_to_a_file_leads_to_the_page_that_shows_it() -> None:
    text = "[state](../atroposlib/api/state.py) and [rules](wire.md#fields)\n```\n[a](b.py)\n```\n"

    page = rewritten(text, Path("docs/service.md"))

    assert page == text.replace("state.py)", "state.py.md)")


def test_link_to_a_missing_file_stays_and_fails_the_strict_build() -> None:
    assert page_of(Path("docs/missing.py")) is None
    assert rewritten("[x](missing.py)", Path("docs/a.md")) == "[x](missing.py)"


def test_links_of_other_hosts_are_no_files() -> None:
    text = "[a](https://example.org/x.py) [b](../README.md#map)"

    assert list(linked_files(text, Path("docs/a.md"))) == [Path("README.md")]


def test_shown_file_with_fences_is_inside_a_longer_fence() -> None:
    shown = shown_file(Path("helpers/site_pages.py"))

    fence = re.search(r"^(`{3,})python$", shown, re.M)
    assert fence is not None
    assert shown.rstrip().endswith(f"\n{fence[1]}")


def test_pages_of_the_navigation_and_modules_of_the_reference_exist() -> None:
    text = (REPOSITORY / "mkdocs.yml").read_text()
    places = re.findall(r"^\s+- (?:[^:\n]+: )?(\S+\.md)$", text, re.M)
    modules = [name for names in PUBLIC_MODULES.values() for name in names]

    written = [place for place in places if not place.startswith("reference/")]
    assert len(written) > 50
    assert [place for place in written if not (REPOSITORY / place).exists()] == []
    paths = [REPOSITORY / name.replace(".", "/") for name in modules]
    assert [p for p in paths if not (p.with_suffix(".py").exists() or p.is_dir())] == []
    assert {"run-api", "atropos-train"} <= set(commands())


def test_architecture_page_has_every_package_and_the_imports_of_today() -> None:
    page = architecture_page()

    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.+) \|$", page, re.M))
    assert list(rows) == list(PACKAGES)
    assert {package_of(module) for module in import_graph(lazy=True)} >= set(PACKAGES)
    assert re.findall(r"<text [^>]+>([\w.]+)</text>", page) == sorted(PACKAGES)
    assert "`atroposlib.errors` " in rows["atroposlib.api"]
    assert "atroposlib.envs" not in rows["atroposlib.api"]


def test_workflows_and_templates_are_yaml() -> None:
    files = [*(REPOSITORY / ".github").rglob("*.yml"), REPOSITORY / "CITATION.cff"]

    assert len(files) >= 4
    for file in files:
        assert isinstance(yaml.safe_load(file.read_text()), dict), file


@pytest.mark.long
@pytest.mark.timeout(900)
def test_site_is_built_without_warnings_and_loads_nothing_from_other_hosts() -> None:
    subprocess.run(["make", "site"], cwd=REPOSITORY, check=True)

    site = REPOSITORY / "build" / "site"
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?:https?:)?//([^/\"]+)")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 200
    assert {host for page in pages for host in loaded.findall(page.read_text())} == set()
    assert "atroposlib.envs.base.BaseEnv" in (site / "search" / "search_index.json").read_text()
