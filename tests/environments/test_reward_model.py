from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.envs.check import check_environment
from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.scored_data import check_group
from atroposlib.tasks.preferences import (
    PreferenceCase,
    PreferenceDesk,
    PreferenceTimeoutError,
    choice_scores,
    preference_page,
    read_choice,
    serve_preferences,
)
from environments.reward_model_env import SAMPLE, SAMPLE_MODEL, RewardModel, RewardModelEnv
from tests.environments.offline import PROBED, make_env, read_groups, run_process
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow  # imports torch

PROMPT = [{"role": "user", "content": "Which is better?"}]
CASE = PreferenceCase(PROMPT, ["first", "second", "third"])
HOSTILE = "</pre><script>alert(1)</script><form action='https://elsewhere.example'>"


@pytest.fixture(scope="module")
def reward_model() -> RewardModel:
    pytest.importorskip("torch")
    return RewardModel.load(str(SAMPLE_MODEL), device="cpu", max_tokens=None, batch_size=2)


def test_classifier_prefers_a_finished_sentence(reward_model: RewardModel) -> None:
    good = "Give it six hours of sun and water when the soil is dry."

    rated = reward_model.rate(PROMPT, [good, "", "%$#xq zz(", good[:20]])

    assert rated[0] == max(rated) > sorted(rated)[-2]


def test_classifier_rates_alone_as_in_a_batch(reward_model: RewardModel) -> None:
    answers = ["A short one.", "A longer answer, which is padded differently.", "\ud800 x" * 300]

    together = reward_model.rate(PROMPT, answers)

    alone = [reward_model.rate(PROMPT, [answer])[0] for answer in answers]
    assert together == pytest.approx(alone, abs=1e-4)
    assert reward_model.rate(PROMPT, []) == []


@pytest.mark.parametrize("model_padding", [None, 0, 255])
@pytest.mark.parametrize("tokenizer_padding", ["<pad>", None])
@pytest.mark.parametrize("side", ["left", "right"])
def test_decoder_rates_alone_as_in_a_batch(
    model_padding: int | None, tokenizer_padding: str | None, side: str
) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 128}
    tokens = {"pad_token_id": model_padding, "bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(**sizes, **tokens, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(SAMPLE_MODEL)
    tokenizer.pad_token, tokenizer.padding_side = tokenizer_padding, side
    model = GPT2ForSequenceClassification(config).eval()
    rated = RewardModel(model, tokenizer, max_tokens=None, batch_size=2)
    answers = ["A short one.", "A longer answer, which is padded differently."]

    together = rated.rate(PROMPT, answers)

    alone = [rated.rate(PROMPT, [answer])[0] for answer in answers]
    assert together == pytest.approx(alone, abs=1e-4)


def test_classifier_of_two_labels_without_template_gives_their_difference(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SAMPLE_MODEL)
    tokenizer.chat_template = None
    model = AutoModelForSequenceClassification.from_pretrained(
        SAMPLE_MODEL, num_labels=2, ignore_mismatched_sizes=True
    )
    model.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(tmp_path)

    loaded = RewardModel.load(str(tmp_path), device="cpu", max_tokens=64, batch_size=8)
    [rated] = loaded.rate(PROMPT, ["an answer"])

    with torch.inference_mode():
        inputs = tokenizer("Which is better?", "an answer", return_tensors="pt")
        low, high = model.eval()(**inputs).logits[0].tolist()
    assert rated == pytest.approx(high - low, abs=1e-4)


@pytest.mark.parametrize(
    ("path", "device", "message"),
    [
        ("no/such/folder", "cpu", "cannot be loaded"),
        (str(SAMPLE_MODEL), "cuda:99", "cannot be loaded on cuda:99"),
        (str(SAMPLE_MODEL), "nonsense", "cannot be loaded on nonsense"),
    ],
)
@pytest.mark.usefixtures("offline_hub")
def test_unusable_reward_model_is_one_clear_error(path: str, device: str, message: str) -> None:
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=message):
        RewardModel.load(path, device=device, max_tokens=None, batch_size=2)


def test_model_with_three_labels_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    AutoModelForSequenceClassification.from_pretrained(
        SAMPLE_MODEL, num_labels=3, ignore_mismatched_sizes=True
    ).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(SAMPLE_MODEL).save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match="has 3 labels; expected 1"):
        RewardModel.load(str(tmp_path), device="cpu", max_tokens=None, batch_size=2)


def test_missing_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)

    with pytest.raises(MissingExtraError, match="rewardfns"):
        RewardModel.load(str(SAMPLE_MODEL), device="cpu", max_tokens=None, batch_size=2)


async def test_process_posts_groups_with_the_scores_of_the_classifier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "groups.jsonl"
    replies = [PROBED, PROBED, "Water it when the soil is dry.", "%%x$", ""]
    async with ScriptedEngine(replies) as engine:
        env = make_env(
            RewardModelEnv,
            engine,
            monkeypatch,
            dataset_path=str(SAMPLE),
            reward_model=str(SAMPLE_MODEL),
            data_path_to_save_groups=str(out),
        )
        monkeypatch.undo()  # the reward model has a tokenizer of its own
        await run_process(env, num_groups=1, group_size=3)

    [group] = read_groups(out)
    check_group(group)
    assert len(set(group["scores"])) == 3


@pytest.mark.parametrize(
    ("choice", "scores"), [(1, [0.0, 1.0, 0.0]), (0, [1.0, 0.0, 0.0]), (None, [0.5, 0.5, 0.5])]
)
def test_scores_of_a_choice(choice: int | None, scores: list[float]) -> None:
    assert choice_scores(choice, 3) == scores


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b'{"choice": 1}',
        b'{"id": 5, "choice": 1}',
        b'{"id": "a"}',
        b'{"id": "a", "choice": -1}',
        b'{"id": "a", "choice": true}',
        b'{"id": "a", "choice": "1"}',
        b'{"id": "a", "choice": 1.5}',
        b'{"id": "' + b"a" * 5000 + b'", "choice": 1}',
        b"\xff\xfe",
        b"[" * 4000,
    ],
)
def test_malformed_line_is_refused(line: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        read_choice(line)


async def test_choices_of_the_file_answer_at_once_and_in_later_runs(tmp_path: Path) -> None:
    path = tmp_path / "choices.jsonl"
    lines = ["nonsense", json.dumps({"id": CASE.case_id, "choice": 2}), ""]
    path.write_text("\n".join(lines))

    for _ in range(2):
        desk = PreferenceDesk(path, max_pending=1)
        assert await desk.ask(CASE, timeout_s=60) == 2
        assert (desk.num_judged, desk.num_bad_lines) == (1, 1)
        await desk.close()


async def test_long_line_is_skipped_and_a_new_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "choices.jsonl"
    path.write_bytes(b"x" * 1_000_000)
    desk = PreferenceDesk(path, max_pending=1)
    with path.open("a") as file:
        file.write("x" * 9 + "\n" + json.dumps({"id": CASE.case_id, "choice": 2}) + "\n")
    desk.read_file()

    assert await desk.ask(CASE, timeout_s=60) == 2
    assert desk.num_bad_lines == 1

    path.write_text(json.dumps({"id": CASE.case_id, "choice": 0}) + "\n")
    desk.read_file()

    assert await desk.ask(CASE, timeout_s=60) == 0
    await desk.close()


async def test_program_may_append_choices_while_a_group_waits(tmp_path: Path) -> None:
    desk = PreferenceDesk(tmp_path / "choices.jsonl", max_pending=4)
    asked = [asyncio.ensure_future(desk.ask(CASE, timeout_s=60)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    [line] = (tmp_path / "choices.jsonl.pending").read_text().splitlines()
    pending = json.loads(line)
    with desk.path.open("a") as file:
        file.write(json.dumps({"id": pending["id"], "choice": 7}) + "\n")  # no such completion
        file.write(json.dumps({"id": pending["id"], "choice": 1}) + "\n")
    desk.read_file()

    assert pending["completions"] == list(CASE.completions)
    assert await asyncio.gather(*asked) == [1, 1]
    assert (desk.num_bad_lines, desk.pending) == (1, {})
    await desk.close()


async def test_equal_case_that_waited_for_room_takes_the_choice(tmp_path: Path) -> None:
    desk = PreferenceDesk(tmp_path / "choices.jsonl", max_pending=1)
    asking = [asyncio.create_task(desk.ask(CASE, timeout_s=60)) for _ in range(2)]
    for _ in range(4):
        await asyncio.sleep(0)

    assert desk.choose(CASE.case_id, 1)

    assert await asyncio.gather(*asking) == [1, 1]
    await desk.close()


async def test_choice_on_the_page_follows_a_line_without_an_end(tmp_path: Path) -> None:
    other = PreferenceCase(PROMPT, ["a", "b"])
    desk = PreferenceDesk(tmp_path / "choices.jsonl", max_pending=4)
    asked = [asyncio.ensure_future(desk.ask(case, timeout_s=60)) for case in (CASE, other)]
    for _ in range(4):
        await asyncio.sleep(0)
    desk.path.write_text(json.dumps({"id": other.case_id, "choice": 1}))

    assert desk.choose(CASE.case_id, 2)

    assert await asyncio.gather(*asked) == [2, 1]
    assert desk.num_bad_lines == 0
    await desk.close()


async def test_group_without_a_choice_times_out_and_leaves_nothing(tmp_path: Path) -> None:
    desk = PreferenceDesk(tmp_path / "choices.jsonl", max_pending=1)
    other = PreferenceCase(PROMPT, ["a", "b"])

    results = await asyncio.gather(
        *(desk.ask(case, timeout_s=0.01) for case in (CASE, other)), return_exceptions=True
    )

    assert [type(result) for result in results] == 2 * [PreferenceTimeoutError]
    assert (desk.num_timeouts, desk.pending) == (2, {})
    assert not desk.choose(CASE.case_id, 0)
    await desk.close()


async def test_same_answers_are_shown_once_and_scored_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine([PROBED, PROBED]) as engine:
        env = make_env(
            RewardModelEnv,
            engine,
            monkeypatch,
            source="human",
            dataset_path=str(SAMPLE),
            preferences_path=str(tmp_path / "choices.jsonl"),
        )
    await env.setup()
    assert env.desk is not None
    item = await env.get_next_item()

    scoring = asyncio.ensure_future(env.score_all(item, ["one", "two", "one", "two", "three"]))
    case_id, _ = await _next_case(env)
    page = preference_page(env.desk)
    assert env.desk.choose(case_id, 2)

    assert await scoring == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert [page.count(f"<pre>{text}</pre>") for text in ("one", "two", "three")] == [1, 1, 1]
    await env.close()


def test_page_escapes_every_text_and_cuts_long_ones(tmp_path: Path) -> None:
    case = PreferenceCase([{"role": HOSTILE, "content": HOSTILE}], [HOSTILE, "x" * 50_000])
    desk = PreferenceDesk(tmp_path / "choices.jsonl", max_pending=1)
    desk.pending[case.case_id] = case

    page = preference_page(desk)

    assert "<script" not in page
    assert "elsewhere.example&#x27;&gt;" in page
    assert "and 30000 more characters" in page
    assert page.count("<form") == 3


async def test_person_chooses_on_the_page_and_the_group_is_posted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "groups.jsonl"
    async with ScriptedEngine([PROBED, PROBED, "one", "two", "three"]) as engine:
        env = make_env(
            RewardModelEnv,
            engine,
            monkeypatch,
            source="human",
            dataset_path=str(SAMPLE),
            preferences_path=str(tmp_path / "choices.jsonl"),
            preference_timeout_s=60.0,
            data_path_to_save_groups=str(out),
        )
        running = asyncio.ensure_future(run_process(env, num_groups=1, group_size=3))
        case_id, case = await _next_case(env)
        async with httpx.AsyncClient(base_url=env.page_url) as person:
            shown = await person.get("/")
            form = {"id": case_id, "choice": str(list(case.completions).index("two"))}
            answered = await person.post("/choose", data=form)
        await asyncio.wait_for(running, 60)

    assert all(text in shown.text for text in ("one", "two", "three"))
    assert answered.status_code == 303
    [group] = read_groups(out)
    check_group(group)
    texts = [
        "".join(chr(i) for i, m in zip(ids, mask, strict=True) if m > 2)
        for ids, mask in zip(group["tokens"], group["masks"], strict=True)
    ]
    assert dict(zip(texts, group["scores"], strict=True)) == {"one": 0, "two": 1, "three": 0}


async def test_unjudged_group_fails_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine([PROBED, PROBED, "one", "two"]) as engine:
        env = make_env(
            RewardModelEnv,
            engine,
            monkeypatch,
            source="human",
            dataset_path=str(SAMPLE),
            preferences_path=str(tmp_path / "choices.jsonl"),
            preference_timeout_s=0.05,
        )
        running = asyncio.ensure_future(run_process(env, num_groups=1, group_size=2))
        while not env.failure_counts["PreferenceTimeoutError"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await env.close()

    assert env.desk.num_timeouts >= 1


async def _next_case(env: Any) -> tuple[str, PreferenceCase]:
    while env.desk is None or not env.desk.pending:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    case_id, case = next(iter(env.desk.pending.items()))
    return case_id, case


@pytest.mark.parametrize(
    ("form", "headers", "status"),
    [
        ({"id": CASE.case_id, "choice": "9"}, {}, 303),
        ({"id": "unknown", "choice": "1"}, {}, 303),
        ({"id": CASE.case_id, "choice": "-1"}, {}, 400),
        ({"id": CASE.case_id, "choice": "1" * 30}, {}, 400),
        ({"id": CASE.case_id}, {}, 400),
        ({"id": "x" * 5000, "choice": "1"}, {}, 400),
        ({"id": CASE.case_id, "choice": "1"}, {"Origin": "https://elsewhere.example"}, 403),
        ({"id": CASE.case_id, "choice": "1"}, {"Host": "elsewhere.example"}, 403),
    ],
)
async def test_page_refuses_wrong_and_foreign_requests(
    tmp_path: Path, form: dict[str, str], headers: dict[str, str], status: int
) -> None:
    desk = PreferenceDesk(tmp_path / "choices.jsonl", max_pending=1)
    desk.pending[CASE.case_id] = CASE
    async with (
        serve_preferences(desk, host="127.0.0.1", port=0) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        page = await client.get("/")
        answer = await client.post("/choose", data=form, headers=headers)

    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert answer.status_code == status
    assert not desk.path.exists()
    del desk.pending[CASE.case_id]
    await desk.close()


async def test_port_in_use_names_the_settings(tmp_path: Path) -> None:
    desk = PreferenceDesk(tmp_path / "choices.jsonl", max_pending=1)
    async with serve_preferences(desk, host="127.0.0.1", port=0) as url:
        with pytest.raises(ConfigError, match=r"--env\.preference_port"):
            async with serve_preferences(desk, host="127.0.0.1", port=int(url[:-1].split(":")[-1])):
                pass
    await desk.close()


def test_environment_passes_its_check() -> None:
    pytest.importorskip("torch")

    report = check_environment(RewardModelEnv)

    assert report.passed, report.text
