"""Helpful doctors: the final diagnosis, the patient's view of a consultation, another server."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from environments.community.helpful_doctors.helpful_doctors_env import (
    GREETING,
    PATIENT,
    SILENCE,
    DoctorEnv,
    final_diagnosis,
    is_gold_diagnosis,
    patient_chat,
    split_case,
)
from tests.environments.offline import PROBED, make_env, ready_env
from tests.fakes import ScriptedEngine

ROW = {
    "question": "A man of 45 has a red toe. Which is the most likely diagnosis?",
    "answer": "Gout",
    "options": {"A": "Gout", "B": "Septic arthritis"},
}


@pytest.mark.parametrize(
    ("answer", "diagnosis"),
    [
        ("Final diagnosis: Gout", "Gout"),
        ("\n **Final Diagnosis:** Gout.\nRest well.", "Gout."),
        ("final diagnosis:", ""),
        ("My final diagnosis: gout", None),
        ("Since when?\nFinal diagnosis: gout", None),
        ("", None),
    ],
)
def test_final_diagnosis(answer: str, diagnosis: str | None) -> None:
    assert final_diagnosis(answer) == diagnosis


@pytest.mark.parametrize(
    ("diagnosis", "gold", "others", "is_right"),
    [
        ("gout", "Gout", [], True),
        ("Acute gout of the big toe.", "Gout", ["Gout", "Septic arthritis"], True),
        ("Gouty arthritis", "Gout", [], False),  # another word
        ("Type-1 diabetes mellitus", "Type 1 diabetes mellitus", [], True),
        ("Gout or septic arthritis", "Gout", ["Septic arthritis"], False),
        ("Viral pneumonia", "Pneumonia", ["Viral pneumonia"], False),
        ("Viral pneumonia", "Viral pneumonia", ["Pneumonia"], True),
        ("Gout" + ", or a disease" * 5, "Gout", [], False),  # 75 characters more
        ("", "Gout", [], False),
        ("Gout", "?", [], False),
    ],
)
def test_gold_diagnosis(diagnosis: str, gold: str, others: list[str], is_right: bool) -> None:
    assert is_gold_diagnosis(diagnosis, gold, others) == is_right


def test_question_of_the_examiners_is_not_part_of_the_case() -> None:
    assert split_case(ROW["question"]) == (  # type: ignore[arg-type]
        "A man of 45 has a red toe.",
        "Which is the most likely diagnosis?",
    )
    assert split_case("He coughs. He sneezes.") == ("He coughs. He sneezes.", "")


def test_patient_sees_questions_without_thinking() -> None:
    chat = [
        {"role": "system", "content": "You are a doctor."},
        {"role": "user", "content": GREETING},
        {"role": "assistant", "content": "<think>gout?</think>Where does it hurt?"},
        {"role": "user", "content": "My toe."},
        {"role": "assistant", "content": "<think>I see"},
    ]

    first, *rest = patient_chat("A red toe.", chat)

    assert "A red toe." in first["content"]
    assert GREETING in first["content"]
    assert rest == [
        {"role": "user", "content": "Where does it hurt?"},
        {"role": "assistant", "content": "My toe."},
        {"role": "user", "content": SILENCE},
    ]


def play(prompt: str) -> str:
    """The patient, and a doctor who asks once and then knows."""
    if PATIENT[:40] in prompt:
        assert "Gout" not in prompt
        return "My toe hurts."
    if GREETING not in prompt:
        return PROBED
    return "Final diagnosis: gout" if "My toe hurts." in prompt else "Where does it hurt?"


async def rollout_of(monkeypatch: pytest.MonkeyPatch, doctor: Any, **settings: Any) -> Any:
    async with ScriptedEngine(doctor) as engine:
        env = make_env(DoctorEnv, engine, monkeypatch, **settings)
        rollout, _ = await env.collect_trajectory(ROW)
        await env.server.close()
        await env.close()
    return rollout


async def test_consultation_with_a_right_diagnosis_earns_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollout = await rollout_of(monkeypatch, play)

    assert rollout.rewards == [0.0, 1.0]
    assert rollout.outcome == "done"
    contents = [message["content"] for message in rollout.messages]
    assert contents[1:] == [
        GREETING,
        "Where does it hurt?",
        "My toe hurts.",
        "Final diagnosis: gout",
    ]
    assert "Which is the most likely diagnosis?" in contents[0]


async def test_consultation_without_a_diagnosis_earns_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rollout = await rollout_of(monkeypatch, play, max_turns=1)

    assert (rollout.rewards, rollout.outcome) == ([0.0], "out_of_turns")


async def test_patient_on_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine(["My toe hurts."], model="patient") as patient:
        other = {"patient_base_url": patient.base_url, "patient_model_name": "patient"}
        rollout = await rollout_of(monkeypatch, play, **other)
        requests = [request.body for request in patient.requests]

    assert rollout.rewards == [0.0, 1.0]
    assert [(body["model"], body["temperature"]) for body in requests] == [("patient", 0.7)]


async def test_patient_at_a_hosted_address_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XAI_API_KEY", raising=False)

    with pytest.raises(ConfigError, match="XAI_API_KEY is not set, and the patient at https"):
        await ready_env(DoctorEnv, monkeypatch, patient_base_url="https://127.0.0.1:9/v1")


async def test_one_diagnosis_for_all_shipped_cases_earns_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = await ready_env(DoctorEnv, monkeypatch, **DoctorEnv.check_settings)
    rows = [*env.train, *env.test]

    def mean(diagnosis: str) -> float:
        return statistics.fmean(
            is_gold_diagnosis(diagnosis, row["answer"], list(row["options"].values()))
            for row in rows
        )

    assert len(rows) == 20
    assert all(row["answer"] in row["options"].values() for row in rows)
    assert max(mean(row["answer"]) for row in rows) == 0.05
    assert mean("Gout, measles, asthma, stroke, migraine, pneumonia") <= 0.2
