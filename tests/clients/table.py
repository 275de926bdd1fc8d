"""The table of clients: `python -m tests.clients.table > docs/clients.md`."""

# ruff: noqa: E501 -- prose of a table, a cell or a paragraph per line

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from tests.clients.installing import pinned_version
from tests.clients.registry import CLIENTS, Client

__all__ = ["PAGE", "page"]

PAGE = Path(__file__).parents[2] / "docs/clients.md"

_CONSTRAINTS = Path(__file__).parents[2] / ".ci/constraints.txt"

_HEAD = """\
# Programs tested with the agent proxy

Each program below runs unmodified, at the version given, with the proxy of [agents.md](agents.md). A test asks two
questions with several tool calls, some of them concurrent. The engine is scripted, samples unusual tokenizations, and
uses chat templates like those of Llama 3, Qwen 2.5, Qwen 3, Mistral and plain ChatML. The test asserts that the recorded
sequences contain every call of the engine, and that every trained token was sampled.

`make test-clients` runs the tests. It installs each program into its own virtual environment in the user's cache
(`ATROPOS_CLIENTS_DIR` selects another folder; 2.6 GB in total). Programs that cannot be installed are skipped, and the
reason is shown.

A conversation is one row if the program sends its history back unchanged. If it rewrites its history, each call is a
separate row; every row is exact.

| Program | Version | API | Rows of a conversation | What to set |
|---|---|---|---|---|
"""

_TAIL = """
`agent.environment` contains the values of `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and
`ANTHROPIC_API_KEY`; any model name is accepted.

{notes}

## Trainers and readers

| Program | Version | What works |
|---|---|---|
| Axolotl's Atropos plugin, its dataset | {axolotl} | receives every row with the tokens that were posted; a batch is \
acknowledged when it is sent, and the environment ends after the last one; groups need different `scores` and a shared \
prompt |
| TensorBoard | {tensorboard} | shows every metric of a run at its step |
| wandb, offline runs | {wandb} | the records of a run contain every metric at its step |
| TRL `GRPOTrainer` | {trl} | the programs of [other_trainers.md](other_trainers.md), for TRL and for Axolotl: every batch is \
acknowledged and the environment ends with the training; one process only. Tested in this project's virtual environment |
| TRL `AsyncGRPOTrainer` | {trl} | 20 steps on a CPU: every batch is acknowledged after its optimizer step, and the engine \
reloads each version of the weights. Tested in this project's virtual environment |
| verl, `DataProto` | {verl} | tensors and columns of its agent loop; its advantages within the groups of the service |
| SkyRL, `GeneratorOutput` | {skyrl} | its check of outputs and its conversion to tensors accept every batch |
"""


def page() -> str:
    """Return the whole page."""
    rows = "\n".join(_row(client) for client in CLIENTS)
    notes = "\n".join(_notes())
    versions = {name: _tested_version(name) for name in ("tensorboard", "trl", "wandb")}
    versions |= {name: pinned_version(name, name) for name in ("skyrl", "verl")}
    versions["axolotl"] = pinned_version("axolotl-plugin", "axolotl-plugin-atropos")
    return _HEAD + rows + "\n" + _TAIL.format(notes=notes, **versions)


def _tested_version(package: str) -> str:
    """Return the version of a package in this project's own environment."""
    lines = _CONSTRAINTS.read_text("utf-8").splitlines()
    (version,) = (line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))
    return version


def _notes() -> Iterator[str]:
    for client in CLIENTS:
        if client.notes:
            yield f"- **{client.name}**: {client.notes}"
        for family, reason in client.fails_with.items():
            yield f"- **{client.name}**, with templates like those of {family}: {reason}."


def _row(client: Client) -> str:
    apis = {"chat": "chat", "responses": "Responses", "messages": "Messages"}
    version = pinned_version(client.environment, client.package)
    rows = "1" if client.num_rows == client.num_conversations else "one per call"
    cells = (client.name, version, apis[client.api], rows, client.settings)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(page())
