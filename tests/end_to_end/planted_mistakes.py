"""Every command with a mistake planted: what it ends with, as a table.

    python -m tests.end_to_end.planted_mistakes [PART OF A NAME ...]

Each row really runs its command, against an engine and a service on free ports, in an empty folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from atroposlib.utils.starting import vllm_command
from example_trainer.processes import find_free_port
from tests.byte_tokenizer import save_byte_tokenizer
from tests.envs.live_service import REGISTRATION, LiveService
from tests.fakes import Fault, ScriptedEngine
from tests.trainer.tiny import tiny_llama

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240.0
SHORT_S = "2"

ENVIRONMENT = """
from atroposlib.envs.single_turn_env import SingleTurnEnv

class MineEnv(SingleTurnEnv):
    name = "mine"
    default_settings = {"group_size": 2, "max_token_length": 64, "use_wandb": False,
                        "ensure_scores_are_not_same": False, "max_batches_offpolicy": 1}

    async def get_next_item(self):
        return {"word": "red"}

    def eval_items(self):
        return [{"word": "red"}]

    def prompt(self, item):
        return [{"role": "user", "content": f"Repeat: {item['word']}"}]

    async def score(self, item, answer):
        return float(item["word"] in answer)

    def check_gold_answer(self, item):
        return item["word"]

if __name__ == "__main__":
    MineEnv.cli()
"""


class Engine(ScriptedEngine):
    """The scripted engine with vLLM's `/tokenize`; its tokenizer is that of `./tok`."""

    def _add_routes(self, app: web.Application) -> None:
        super()._add_routes(app)
        app.router.add_post("/tokenize", self._guarded(self._tokenize))
        app.router.add_post("/collective_rpc", self._refuse_without_method)
        app.router.add_get("/server_info", self._server_info)

    async def _refuse_without_method(self, _: web.Request) -> web.Response:
        """Refuse as vLLM does where it offers updates in place."""
        return web.Response(status=400)

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"vllm_config": {"device_config": {"device": "cpu"}}})

    def _tokenize(self, body: dict[str, Any], fault: Fault | None) -> dict[str, Any]:
        ids = self.tokenizer.encode(body["prompt"], add_special_tokens=False)
        return {"tokens": ids, "count": len(ids)}

    def _model_card(self) -> dict[str, Any]:
        return {**super()._model_card(), "root": "./tok"}


@dataclass(frozen=True)
class Row:
    """One command with one mistake.

    Attributes:
        mistake: What is wrong.
        command: The words of the command; `{...}` are places of the stage.
        expected: What the last line must hold.
        exit_code: What the command ends with.
        first: A command that is run before, and fails.
    """

    mistake: str
    command: str
    expected: str
    exit_code: int = 2
    first: str = ""

    @property
    def name(self) -> str:
        """The mistake and the command, for ids of tests."""
        return f"{self.mistake}: {self.command.split(' --')[0]}"


ENGINE = "--openai.base_url {engine} --openai.server_type vllm --openai.model_name tiny"
TOK = "--env.tokenizer_name ./tok"
SERVE = f"mine.py serve {TOK} {ENGINE} --env.rollout_server_url {{api}}"
PROCESS = f"mine.py process {TOK} {ENGINE} --env.total_steps 2"
EVALUATE = f"mine.py evaluate {TOK} {ENGINE}"
GRPO = "atropos-grpo --model-name ./model --device cpu --save-path grpo"
GRPO_ALONE = f"{GRPO} --weight-bridge-mode off"
TRAIN = "atropos-train mine.py --model ./model --device cpu --no-evaluate --steps 1"
SFT = "atropos-sft-gen {out} --tokenizer ./tok"
DPO = "atropos-dpo-gen {out} --tokenizer ./tok"
DEAD = "http://127.0.0.1:9"

MODEL_LINE = "serves no model 'X'; it serves: tiny. Use --openai.model_name tiny"
TOKENIZER_LINE = "the tokenizer ./othertok is not the engine's: "
START_ENGINE = f"start it ({vllm_command()} tiny --port 9), or set base_url (--openai.base_url)"
NO_SERVICE = "is not a trajectory service; check the address, `run-api` starts"
UNWRITABLE = "cannot be written: "


def rows() -> list[Row]:
    """All rows of the table."""
    made = [
        *_environment_rows(),
        *_service_rows(),
        *_data_rows(),
        *_grpo_rows(),
        *_train_rows(),
    ]
    for folder in ("{file}/sub", "/proc/none"):
        made += _unwritable_rows(folder)
    return made


def _environment_rows() -> list[Row]:
    made = []
    for command in (SERVE, PROCESS, EVALUATE):
        wrong_model = command.replace("model_name tiny", "model_name X")
        wrong_tokenizer = command.replace("./tok ", "./othertok ")
        missing = command.replace("./tok ", "./notok ")
        dead = command.replace("{engine}", f"{DEAD}/v1") + " --openai.startup_timeout 2"
        elsewhere = command.replace("{engine}", "{api}/v1")
        made += [
            Row("wrong model", wrong_model, MODEL_LINE),
            Row("wrong tokenizer", wrong_tokenizer, TOKENIZER_LINE),
            Row("missing tokenizer", missing, "tokenizer './notok' cannot be loaded"),
            Row("dead engine", dead, START_ENGINE),
            Row("wrong port of the engine", elsewhere, "base_url"),
            Row("typo", f"{command} --env.group_sise 4", "did you mean --env.group_size"),
        ]
    return [
        *made,
        Row("wrong port of the service", SERVE.replace("{api}", "{root}"), NO_SERVICE),
        Row("typo", f"mine.py check {TOK} --env.group_sise 4", "did you mean --env.group_size"),
        Row("typo", "mine.py serv", "did you mean serve"),
    ]


def _service_rows() -> list[Row]:
    return [
        Row("port in use", "run-api --port {taken}", "choose another with --port"),
        Row("typo", "run-api --prot 1", "did you mean --port"),
        Row("port in use", "view-run --port {taken} --file {groups} --tokenizer ./tok",
            "choose another with --port"),
        Row("typo", "view-run --prot 1", "did you mean --port"),
        Row("missing file", "view-run --port 0 --file none.jsonl", "cannot be read"),
        Row("missing run", "view-run --port 0 --run none", "there is no stored run"),
    ]  # fmt: skip


def _data_rows() -> list[Row]:
    made = []
    for command in (SFT, DPO):
        here = command.replace("{out}", "o.jsonl")
        made += [
            Row("dead service", f"{here} --api-url {DEAD}", "`run-api` starts one"),
            Row("wrong port of the service", f"{here} --api-url {{root}}", NO_SERVICE),
            Row("typo", f"{here} --tokeniser x", "did you mean --tokenizer"),
            Row("missing tokenizer", here.replace("./tok", "./notok") + " --api-url {api}",
                "notok"),
        ]  # fmt: skip
    return [
        *made,
        Row("typo", "atropos-replay scor {groups}", "did you mean score"),
        Row("typo", "atropos-replay score {groups} --env mine.py --env.group_sise 2",
            "did you mean --env.group_size"),
    ]  # fmt: skip


def _grpo_rows() -> list[Row]:
    in_place = f"{GRPO} --weight-bridge-mode in_place"
    updating = f"{in_place} --engine-urls {{root}} --atropos-url {{fresh}}"
    other = f"{updating} --batch-size 8"
    return [
        Row("wrong model", f"{GRPO_ALONE} --model ./nomodel --atropos-url {{api}}", "./nomodel"),
        Row("missing tokenizer", f"{GRPO_ALONE} --model ./onlymodel --atropos-url {{api}}",
            "./onlymodel"),
        Row("dead service", f"{GRPO_ALONE} --atropos-url {DEAD} --service-timeout-s 2",
            "`run-api` starts one"),
        Row("wrong port of the service", f"{GRPO_ALONE} --atropos-url {{root}}", NO_SERVICE),
        Row("typo", f"{GRPO_ALONE} --batch-sise 2", "did you mean --batch-size"),
        Row("dead engine", f"{in_place} --engine-urls {DEAD} --atropos-url {{api}}",
            f"start it with VLLM_SERVER_DEV_MODE=1 {vllm_command()}"),
        Row("wrong port of the engine", f"{in_place} --vllm-port {{taken}} --atropos-url {{api}}",
            "wait for the engine to be ready, or choose another --vllm-port"),
        Row("port in use", f"{GRPO} --weight-bridge-mode none --vllm-port {{taken}}",
            "choose another --vllm-port"),
        Row("other settings after a failed first start", other, "--replace-run of the trainer",
            first=updating),
        Row("the same with --replace-run", f"{other} --replace-run",
            "Stop it and let the trainer launch the engine"),
    ]  # fmt: skip


def _train_rows() -> list[Row]:
    return [
        Row("wrong model", TRAIN.replace("./model", "./nomodel"), "./nomodel"),
        Row("wrong model", f"{TRAIN} --engine-url {{engine}}", "it serves: tiny"),
        Row("wrong tokenizer", f"{TRAIN} {TOK}", "takes the tokenizer of --model; leave it out"),
        Row("missing tokenizer", TRAIN.replace("./model", "./onlymodel"), "onlymodel' cannot be"),
        Row("wrong port of the engine", f"{TRAIN} --engine-url {{api}}",
            "omit --engine-url to launch one"),
        Row("dead engine", f"{TRAIN} --engine-url {DEAD}",
            f"start it with VLLM_SERVER_DEV_MODE=1 {vllm_command()}"),
        Row("typo", f"{TRAIN} --stesp 3", "did you mean --steps"),
        Row("typo", f"{TRAIN} --env.group_sise 3", "did you mean --env.group_size"),
        Row("typo", TRAIN.replace("mine.py", "mein.py"), "mein.py: there is no such file"),
        Row("port in use", f"{TRAIN} --engine-args=--port={{taken}}",
            "with --engine-url"),
        Row("other settings after a failed first start", f"{TRAIN} --output run --lr 1e-5",
            "continue it with --resume", first=f"{TRAIN} --output run --engine-args=--nonsense"),
    ]  # fmt: skip


def _unwritable_rows(folder: str) -> list[Row]:
    sft, dpo = (each.replace("{out}", f"{folder}/o.jsonl") for each in (SFT, DPO))
    places = [
        (f"{PROCESS} --env.data_path_to_save_groups {folder}/g.jsonl",
         "--env.data_path_to_save_groups"),
        (f"{EVALUATE} --env.data_dir_to_save_evals {folder}", "--env.data_dir_to_save_evals"),
        (f"{SERVE} --env.metrics_path {folder}/m.jsonl", "--env.metrics_path"),
        (f"{PROCESS} --env.metrics_path {folder}/m.jsonl", "--env.metrics_path"),
        (f"mine.py check {TOK} --json {folder}/r.json", "--json"),
        (f"run-api --port 0 --data-dir {folder}", "--data-dir"),
        (f"{sft} --api-url {{api}}", ""),
        (f"{dpo} --api-url {{api}}", ""),
        (f"atropos-replay score {{groups}} --env mine.py {TOK} --save {folder}/s.jsonl", "--save"),
        (f"{GRPO_ALONE} --save-path {folder}/c --atropos-url {{api}}", "--save-path"),
        (f"{TRAIN} --output {folder}", "--output"),
        (f"atropos-new-env myenv --kind single-turn --dir {folder}", "--dir"),
    ]  # fmt: skip
    return [
        Row("unwritable", command, f"choose another place with {flag}" if flag else UNWRITABLE)
        for command, flag in places
    ]


class Stage:
    """An engine, a service with a registered trainer, and an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "mine.py").write_text(ENVIRONMENT)
        (folder / "afile").write_text("")
        (folder / "groups.jsonl").write_text(
            '{"tokens": [[5, 6], [5, 7]], "masks": [[-100, 6], [-100, 7]], "scores": [0, 1], '
            '"messages": [[{"role": "user", "content": "Repeat: red"}, '
            '{"role": "assistant", "content": "red"}], [{"role": "user", "content": "Repeat: red"}'
            ', {"role": "assistant", "content": "blue"}]]}\n'
        )
        (folder / "tok").mkdir()
        self.tokenizer = save_byte_tokenizer(folder / "tok")
        self._save_other_tokenizer(folder / "othertok")
        self._save_models()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engine = self._call(self._start_engine())
        self.service = LiveService(find_free_port())
        self.service.start()
        self._call(self._register())
        self.fresh_service = LiveService(find_free_port())
        self.fresh_service.start()

    def _save_other_tokenizer(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder / "tok")
        tokenizer.add_tokens(["check", "apples"])
        tokenizer.save_pretrained(folder)

    def _save_models(self) -> None:
        """Write a tiny model whose output layer is its embedding, once without its tokenizer."""
        model = tiny_llama()
        model.config.tie_word_embeddings = True
        model.tie_weights()
        for name in ("model", "onlymodel"):
            model.save_pretrained(self.folder / name)
        self.tokenizer.save_pretrained(self.folder / "model")

    async def _start_engine(self) -> Engine:
        from transformers import AutoTokenizer

        engine = Engine(
            ["red", "blue"],
            model="tiny",
            aliases=(),
            tokenizer=AutoTokenizer.from_pretrained(self.folder / "tok"),
        )
        await engine.start()
        return engine

    async def _register(self) -> None:
        from atroposlib.api.client import TrajectoryApiClient

        client = TrajectoryApiClient(self.service.url)
        await client.register_trainer(**{**REGISTRATION, "num_steps": 1000})
        await client.batch()
        await client.close()

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def close(self) -> None:
        """End the engine and the service."""
        self.service.stop()
        self.fresh_service.stop()
        self._call(self.engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def words(self, command: str) -> list[str]:
        """The words to run for the command of a row."""
        text = command.format(
            engine=self.engine.base_url,
            root=self.engine.root_url,
            api=self.service.url,
            fresh=self.fresh_service.url,
            taken=self.service.port,
            file="afile",
            groups="groups.jsonl",
            out="{out}",
        )
        program, *rest = text.split()
        if program.endswith(".py"):
            return [sys.executable, program, *rest]
        return [str(Path(sys.executable).with_name(program)), *rest]

    def run(self, row: Row) -> tuple[int, list[str]]:
        """Run a row; return its exit code and the lines that are no progress messages."""
        if row.first:
            code, lines = self._run(row.first)
            if code == 0:
                return code, [*lines, "the first command did not fail"]
        return self._run(row.command)

    def _run(self, command: str) -> tuple[int, list[str]]:
        done = subprocess.run(
            self.words(command),
            capture_output=True,
            text=True,
            cwd=self.folder,
            timeout=TIMEOUT_S,
            check=False,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "HF_HUB_OFFLINE": "1",
                "WANDB_MODE": "disabled",
            },
        )
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return done.returncode, [line for line in lines if not is_progress(line)]


def is_progress(line: str) -> bool:
    """Whether a line is a message of the log, or one of a library, rather than the error."""
    marks = (" INFO ", " WARNING ", "UserWarning:", "Disabling PyTorch", "groups:", " items")
    return any(mark in line for mark in marks) or line.startswith("waiting up to ")


def table_line(row: Row, code: int, lines: Sequence[str], folder: Path) -> str:
    """One line of the table: the row, what the command ended with, and its last line."""
    shown = lines[-1] if lines else ""
    return f"{row.name} | {code} | `{shown.replace(str(folder), 'FOLDER')}`"


def problem_of(row: Row, code: int, lines: Sequence[str]) -> str:
    """What a row lacks; empty when it is as it should be."""
    if code != row.exit_code:
        return f"exit code {code}, expected {row.exit_code}"
    if any("Traceback" in line for line in lines):
        return "traceback"
    if not lines or row.expected not in lines[-1]:
        return f"the last line lacks {row.expected!r}"
    return f"{len(lines)} lines" if len(lines) > 1 else ""


@contextlib.contextmanager
def open_stage() -> Iterator[Stage]:
    """A stage in a folder of its own, closed and removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder))
        try:
            yield stage
        finally:
            stage.close()


def main() -> None:
    """Print the table."""
    wanted = sys.argv[1:]
    chosen = [row for row in rows() if not wanted or any(part in row.name for part in wanted)]
    num_wrong = 0
    with open_stage() as stage:
        for row in chosen:
            try:
                code, lines = stage.run(row)
            except subprocess.TimeoutExpired:
                code, lines = -1, ["time is up"]
            problem = problem_of(row, code, lines)
            num_wrong += bool(problem)
            line = table_line(row, code, lines, stage.folder)
            print(f"{'!!' if problem else '| '} {line}", flush=True)
            if problem:
                print(f"   {problem}\n   " + "\n   ".join(lines[-6:]), flush=True)
    print(f"{len(chosen)} rows, {num_wrong} not as expected")
    sys.exit(bool(num_wrong))


if __name__ == "__main__":
    main()
