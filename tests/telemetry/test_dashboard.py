"""Every query of the Grafana dashboard names what the service exposes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from atroposlib.api.server import create_app
from tests.api.helpers import REGISTRATION, make_group

pytestmark = pytest.mark.slow

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana_dashboard.json"
NAME = re.compile(r"\b(?:atropos|process)_\w+")
LABEL = re.compile(r"\bby \(([^)]*)\)|\{\{(\w+)\}\}")


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Return the labels of each metric of a live service that has served a batch."""
    with TestClient(create_app()) as http:
        http.post("/register", json={**REGISTRATION, "batch_size": 2})
        http.get("/batch")
        http.post("/register-env", json={"max_token_length": 8, "desired_name": "e", "weight": 1})
        http.post("/scored_data", json=make_group(2, env_id=0))
        http.get("/batch")
        http.post("/scored_data", json=make_group(2, env_id=0))
        text = http.get("/metrics").text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        found[family.name] = found[f"{family.name}_total"] = set()
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def targets() -> list[dict[str, Any]]:
    dashboard = json.loads(DASHBOARD.read_text())
    return [target for panel in dashboard["panels"] for target in panel["targets"]]


def test_queries_name_metrics_of_the_service(exposed: dict[str, set[str]]) -> None:
    named = {name for target in targets() for name in NAME.findall(target["expr"])}

    assert len(named) > 25
    assert named - exposed.keys() == set()


def test_labels_of_queries_are_those_of_their_metrics(exposed: dict[str, set[str]]) -> None:
    wrong = []
    for target in targets():
        (metric,) = NAME.findall(target["expr"])
        text = target["expr"] + target["legendFormat"]
        labels = {part.strip() for pair in LABEL.findall(text) for part in "".join(pair).split(",")}
        # A metric without a sample yet, such as returned batches, has no labels to compare.
        if exposed[metric] and not labels - {""} <= exposed[metric]:
            wrong.append((metric, labels - exposed[metric]))

    assert wrong == []


def test_panels_do_not_overlap_and_have_their_own_ids() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    cells = [
        (column, row)
        for panel in panels
        for column in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for row in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]

    assert len(cells) == len(set(cells))
    assert len({panel["id"] for panel in panels}) == len(panels)
