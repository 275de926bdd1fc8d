"""`CONFIG.md` says what the settings classes say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.config_page import ENVIRONMENT_VARIABLES, SECTIONS, Section, config_page

REPOSITORY = Path(__file__).parents[2]
READ_VARIABLE = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\()\s*["']([A-Z][A-Z0-9_]+)["']""")


def test_config_page_in_the_repository_is_current() -> None:
    committed = (REPOSITORY / "CONFIG.md").read_text(encoding="utf-8")

    assert committed == config_page(), (
        "CONFIG.md is out of date; run: python -m helpers.config_page > CONFIG.md"
    )


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_config_page_lists_every_field_with_a_description(section: Section) -> None:
    page = config_page()

    for field_name, field in section.model.model_fields.items():
        assert f"| `{field_name}` |" in page
        assert field.description, f"{section.model.__name__}.{field_name} needs a description"


def test_config_page_lists_every_environment_variable_the_library_reads() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8") for path in (REPOSITORY / "atroposlib").rglob("*.py")
    )

    assert set(READ_VARIABLE.findall(sources)) <= set(ENVIRONMENT_VARIABLES)
