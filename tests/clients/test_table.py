"""The page on clients says what the tests run."""

from __future__ import annotations

from pathlib import Path

from tests.clients.installing import PINS, pinned_version
from tests.clients.registry import CLIENTS, ENVIRONMENTS
from tests.clients.table import PAGE, page


def test_page_is_the_registrys() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m tests.clients.table > docs/clients.md"


def test_every_requirement_is_pinned_at_the_version_of_the_registry() -> None:
    for environment in ENVIRONMENTS.values():
        for requirement in environment.requirements:
            name, _, version = (
                requirement.rpartition("@") if environment.is_node else requirement.partition("==")
            )
            assert pinned_version(environment.name, name.partition("[")[0]) == version


def test_pins_name_versions_and_no_registry() -> None:
    for file in PINS.rglob("*"):
        if file.is_file():
            text = file.read_text("utf-8")
            assert "resolved" not in text
            assert "index-url" not in text
            if file.suffix == ".txt":
                assert all("==" in line for line in text.splitlines())


def test_clients_have_names_of_their_own_and_environments_are_used() -> None:
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)
    assert {client.environment for client in CLIENTS} | {"node"} == set(ENVIRONMENTS)


def test_programs_are_those_of_the_clients() -> None:
    words = " ".join(part for client in CLIENTS for part in client.command)
    others = {"axolotl_dataset.py", "skyrl_batches.py", "trl_grpo.py", "verifiers_shop"}
    others |= {"trl_async_grpo.py", "verl_batches.py"}
    for program in Path(__file__).parent.joinpath("programs").iterdir():
        assert program.name in words or program.name in others | {"__pycache__"}, program
