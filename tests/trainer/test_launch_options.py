"""The run that follows from a command line, a model, environments and a machine."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from example_trainer.cli import config_from_args, create_full_parser
from example_trainer.launch.cli import needs_untying, phases
from example_trainer.launch.options import (
    EnvironmentFile,
    Machine,
    RunPaths,
    RunPlan,
    TrainOptions,
    batch_sequences,
    batch_shares,
    make_plan,
    place,
    require_gpu_memory,
    shown_path,
    visible_gpus,
)
from example_trainer.launch.preflight import EnvironmentFacts, ModelFacts
from example_trainer.launch.stack import build_stack, trainer_arguments

PATHS = RunPaths(Path("/run"))
CPU = Machine(gpus=(), num_cores=4)
ONE_GPU = Machine(gpus=("3",), num_cores=4)
SMALL_GPU = Machine(gpus=("3",), num_cores=4, gpu_bytes=8 * 2**30)
FOUR_GPUS = Machine(gpus=("0", "1", "2", "3"), num_cores=4)
TINY = ModelFacts(num_parameters=1_000_000, context_tokens=1024, is_tied=False)
REAL = ModelFacts(num_parameters=500_000_000, context_tokens=32_768, is_tied=True)
FACTS = EnvironmentFacts("Asks", "asks", 8, 2048, 1, True, True)
OPTIONS = TrainOptions(files=(EnvironmentFile("asks.py"),), model="some/model")


def plan_of(
    options: TrainOptions = OPTIONS,
    *facts: EnvironmentFacts,
    model: ModelFacts = REAL,
    machine: Machine = ONE_GPU,
) -> tuple[RunPlan, list[str]]:
    chosen = make_plan(options, PATHS, model=model, environments=facts or [FACTS], machine=machine)
    return chosen.plan, chosen.notes


def trainer_config(plan: RunPlan) -> Any:
    [_, _, *words] = trainer_arguments(
        plan, PATHS, engine_url="http://127.0.0.1:1111", service_url="http://127.0.0.1:2222"
    )
    return config_from_args(create_full_parser().parse_args(words))


def test_one_gpu_is_shared_and_the_environments_limit_is_kept() -> None:
    plan, notes = plan_of()

    assert (plan.sequences_per_step, plan.context_tokens) == (16 * 8, 2048 + 1024)
    assert plan.environments[0].settings["max_token_length"] == 2048
    assert plan.engine_flags == ("--dtype", "bfloat16", "--gpu-memory-utilization", "0.45")
    assert (plan.engine_variables, plan.trainer_variables) == ({}, {})
    assert notes == [
        "GPU 3 is shared: the engine uses 45% of its memory (--gpu-memory-utilization), the "
        "trainer the rest"
    ]


def test_run_that_is_continued_repeats_its_steps_with_the_same_warmup() -> None:
    first = replace(OPTIONS, steps=20)
    later = first.with_steps(40)
    read = TrainOptions.from_json(json.loads(json.dumps(asdict(later.with_steps(200)))))

    assert [plan_of(options)[0].steps for options in (first, later, read)] == [20, 40, 200]
    warmups = [trainer_config(plan_of(each)[0]).warmup_steps for each in (first, later, read)]
    assert warmups == [2, 2, 2]


def test_trainer_on_a_gpu_is_mixed_and_on_a_cpu_float32() -> None:
    gpu, cpu = (trainer_config(plan_of(machine=machine)[0]) for machine in (ONE_GPU, CPU))

    assert (gpu.device, gpu.resolved_train_dtype, gpu.autocasts) == ("cuda", "mixed", True)
    assert (cpu.device, cpu.resolved_train_dtype, cpu.autocasts) == ("cpu", "float32", False)
    assert (gpu.lr, gpu.microbatch_tokens, gpu.gradient_checkpointing) == (1e-6, 8192, True)


def test_engine_on_gpus_without_bfloat16_chooses_its_type_itself() -> None:
    plan, _ = plan_of(machine=ONE_GPU._replace(has_bfloat16=False))

    assert "--dtype" not in plan.engine_flags


@pytest.mark.parametrize(
    ("variable", "count", "expected"),
    [
        ("", 2, ("0", "1")),
        ("3, 5", 2, ("3", "5")),
        ("GPU-8a,MIG-1", 2, ("GPU-8a", "MIG-1")),
        ("2,-1,3", 1, ("2",)),  # CUDA sees none after the invalid one
        ("1", 0, ()),
    ],
)
def test_visible_gpus_are_named_as_the_variable_names_them(
    variable: str, count: int, expected: tuple[str, ...]
) -> None:
    assert visible_gpus(variable, count) == expected


def test_model_without_a_chat_template_is_named() -> None:
    _, notes = plan_of(model=REAL._replace(has_chat_template=False))

    assert "has no chat template" in notes[0]


def test_several_gpus_are_parted_between_engine_and_trainer() -> None:
    plan, notes = plan_of(machine=FOUR_GPUS)

    assert plan.engine_variables["CUDA_VISIBLE_DEVICES"] == "3"
    assert plan.trainer_variables["CUDA_VISIBLE_DEVICES"] == "0"
    assert plan.engine_flags[-1] == "0.9"
    assert notes == [
        "trainer on GPU 0, engine on GPU 3; unused: GPUs 1, 2 (--engine-args "
        "'--tensor-parallel-size N' gives the engine N of them)"
    ]


@pytest.mark.parametrize(
    "engine_args",
    [
        "--tensor-parallel-size=3",
        "--tensor_parallel_size 3",
        "-tp 3",
        "-tp 1 --pipeline-parallel-size 3",
    ],
)
def test_parallel_engine_gets_all_gpus_but_the_trainers(engine_args: str) -> None:
    plan, notes = plan_of(replace(OPTIONS, engine_args=engine_args), machine=FOUR_GPUS)

    assert plan.engine_variables["CUDA_VISIBLE_DEVICES"] == "1,2,3"
    assert plan.trainer_variables["CUDA_VISIBLE_DEVICES"] == "0"
    assert notes == ["trainer on GPU 0, engine on GPUs 1, 2, 3"]


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (FOUR_GPUS, "uses 4 GPUs; there are 3 in addition to the trainer's"),
        (ONE_GPU, "there is one"),
    ],
)
def test_parallel_engine_beyond_the_gpus_is_refused(machine: Machine, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(replace(OPTIONS, engine_args="-tp 2 -dp 2"), machine=machine)


def test_share_of_the_engine_is_the_one_that_was_typed() -> None:
    flag = place(replace(OPTIONS, gpu_memory_utilization=0.3), ONE_GPU)
    argument = place(replace(OPTIONS, engine_args="--gpu-memory-utilization 0.2"), ONE_GPU)

    assert (flag.engine_share, flag.trainer_share) == (0.3, 0.7)
    assert argument.engine_share == 0.2
    assert place(OPTIONS, FOUR_GPUS).trainer_share == 1.0


def test_running_engine_leaves_the_trainer_a_gpu_of_its_own() -> None:
    plan, notes = plan_of(replace(OPTIONS, engine_url="http://host:9"), machine=FOUR_GPUS)

    assert plan.trainer_variables == {"CUDA_VISIBLE_DEVICES": "0"}
    assert place(replace(OPTIONS, engine_url="http://host:9"), ONE_GPU).trainer_share == 1.0
    assert notes == ["trainer on GPU 0"]


@pytest.mark.parametrize(
    ("machine", "flags", "refusal"),
    [
        # 7 billion parameters at 4 + 4 + 8 bytes are 104 GiB; 55 % of 80 GiB are 44.
        (
            ONE_GPU,
            (),
            r"need 104 GiB, and 44 GiB of GPU 3 are available to the trainer; .*a second GPU",
        ),
        # At 2 + 2 + 4 bytes they are 52.
        (ONE_GPU, ("--train-dtype=bfloat16",), "need 52 GiB"),
        (
            FOUR_GPUS,
            (),
            "80 GiB of GPU 0 are available to the trainer; use a smaller model, or --trainer",
        ),
        (FOUR_GPUS, ("--train-dtype=bfloat16",), None),
        (FOUR_GPUS, ("--train-layer-indices=0",), None),
        # Frozen weights of 2 bytes are 13.
        (ONE_GPU, ("--lora",), None),
        (SMALL_GPU, ("--lora",), "weights of 7.0 billion parameters need 13 GiB, and 4 GiB"),
        (SMALL_GPU, (), "train-dtype bfloat16, which needs half, or --trainer.lora, which"),
        (CPU, (), None),
    ],
)
def test_model_that_cannot_fit_is_refused_before_anything_starts(
    machine: Machine, flags: tuple[str, ...], refusal: str | None
) -> None:
    options = replace(OPTIONS, trainer_flags=("--optimizer=adamw", *flags))
    model = REAL._replace(num_parameters=7_000_000_000)
    machine = machine._replace(gpu_bytes=machine.gpu_bytes or 80 * 2**30)
    plan, _ = plan_of(options, model=model, machine=machine)

    def check() -> None:
        require_gpu_memory(model, trainer_config(plan), machine, place(options, machine))

    if refusal is None:
        check()
    else:
        with pytest.raises(ConfigError, match=refusal):
            check()


def test_cpu_with_a_real_model_is_cut_down_and_says_how_slow_it_is() -> None:
    plan, notes = plan_of(machine=CPU)

    assert plan.sequences_per_step == 4 * 8
    assert plan.environments[0].settings["max_token_length"] == 512
    assert "on a CPU" in notes[0]
    assert "a step takes about" in notes[1]


def test_cpu_limit_that_was_asked_for_is_kept() -> None:
    options = replace(OPTIONS, environment_flags={"": ("--env.max_token_length=2048",)})

    plan, notes = plan_of(options, machine=CPU)

    assert plan.environments[0].settings["max_token_length"] == 2048
    assert len(notes) == 1


def test_short_context_cuts_the_limit_down_and_says_so() -> None:
    plan, notes = plan_of(model=TINY, machine=CPU)

    assert plan.context_tokens == 1024
    assert plan.environments[0].settings["max_token_length"] == 1024
    assert notes == ["asks: max_token_length is 1024, not 2048, to fit the context of 1024 tokens"]


def test_short_context_leaves_room_for_prompts_where_only_completions_are_limited() -> None:
    plan, _ = plan_of(OPTIONS, FACTS._replace(limits_conversation=False), model=TINY)

    assert plan.environments[0].settings["max_token_length"] == 512


def test_limit_beyond_the_context_that_was_asked_for_is_refused() -> None:
    options = replace(OPTIONS, environment_flags={"asks": ("--env.max_token_length", "2048")})

    with pytest.raises(ConfigError, match="exceeds the context of 1024 tokens"):
        plan_of(options, model=TINY)


def test_trainer_understands_its_flags_and_those_typed_win() -> None:
    options = replace(OPTIONS, trainer_flags=("--clip-eps=0.1", "--microbatch-tokens=4096"))
    plan, _ = plan_of(options, model=TINY, machine=CPU)

    config = trainer_config(plan)

    assert config.sequences_per_step == plan.sequences_per_step
    assert (config.lr, config.device, config.seq_len) == (2e-4, "cpu", 1024)
    assert (config.clip_eps, config.microbatch_tokens) == (0.1, 4096)
    assert (config.weight_bridge_mode, config.vllm_port) == ("in_place", 1111)


def test_running_engine_is_updated_and_none_is_launched(tmp_path: Path) -> None:
    plan, _ = plan_of(replace(OPTIONS, engine_url="http://host:9"))

    stack = build_stack(
        replace(plan, environments=()), RunPaths(tmp_path), ports=(1, 2), inherited={}
    )

    assert stack.engine is None
    assert "--engine-urls=http://host:9" in stack.trainer.command
    assert "use the engine at http://host:9" in phases(plan, unties=False)[0]


def test_resumed_run_does_not_announce_the_measurement_that_it_skips(tmp_path: Path) -> None:
    plan, _ = plan_of()
    environment = replace(plan.environments[0], folder=tmp_path)
    plan = replace(plan, environments=(environment,))
    titles = phases(plan, unties=False)

    folder = environment.evaluation("before")
    folder.mkdir(parents=True)
    (folder / "metrics.json").write_text('{"results": {"all": {"eval/accuracy": 0.5}}}')

    assert set(titles) - set(phases(plan, unties=False)) == {
        f"Measure before training: `evaluate` of {environment.name}"
    }


def test_several_environments_share_the_batch_by_weight() -> None:
    options = replace(OPTIONS, files=(EnvironmentFile("a/x.py", 2.0), EnvironmentFile("b/x.py")))

    plan, _ = plan_of(options, FACTS, FACTS._replace(group_size=4))

    first, second = plan.environments
    assert (first.name, second.name) == ("x", "x-2")
    assert first.process_name == "environment x"
    # 16 groups of 6 on average are 96 sequences: 8 groups of 8, and 8 groups of 4.
    assert plan.sequences_per_step == 96
    assert first.settings["min_batch_allocation"] == (8 * 8 - 0.5) / 96
    assert second.settings["min_batch_allocation"] == (8 * 4 - 0.5) / 96
    assert first.settings["inference_weight"] == 2.0


def test_several_servers_of_an_environment_all_become_the_engine(tmp_path: Path) -> None:
    import yaml

    plan, _ = plan_of(OPTIONS, FACTS._replace(num_servers=2))
    environment = replace(plan.environments[0], folder=tmp_path)

    build_stack(
        replace(plan, environments=(environment,)), RunPaths(tmp_path), ports=(1, 2), inherited={}
    )

    written = yaml.safe_load(environment.config.read_text())
    assert [server["base_url"] for server in written["openai"]] == ["http://127.0.0.1:1/v1"] * 2


@pytest.mark.parametrize(
    ("sizes", "groups", "expected"),
    [
        ([8], 16, 128),
        ([8, 4], 16, 96),
        ([8, 6], 2, 24),  # 14 wanted; both sizes divide 24
        ([16], 1, 16),
    ],
)
def test_batch_sequences_are_whole_groups_of_every_size(
    sizes: list[int], groups: int, expected: int
) -> None:
    assert batch_sequences(sizes, groups) == expected


def test_batch_shares_never_reserve_more_than_the_batch() -> None:
    shares = batch_shares([3.0, 1.0, 1.0], [8, 8, 4], 64)

    assert [round(share * 64 + 0.5) for share in shares] == [32, 8, 12]
    assert sum(shares) < 1


def test_tied_model_is_copied_for_an_engine_on_the_cpu_alone() -> None:
    on_cpu, _ = plan_of(machine=CPU)
    on_gpu, _ = plan_of(machine=ONE_GPU)

    assert needs_untying(on_cpu, REAL)
    assert not needs_untying(on_gpu, REAL)
    assert not needs_untying(on_cpu, TINY)


def test_options_survive_their_file() -> None:
    options = replace(
        OPTIONS, trainer_flags=("--clip-eps=0.1",), environment_flags={"asks": ["--env.x=1"]}
    )

    again = TrainOptions.from_json(json.loads(json.dumps(asdict(options))))

    assert again == options


def test_path_is_shown_from_the_working_directory_where_it_lies_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert shown_path(tmp_path / "runs" / "a") == str(Path("runs", "a"))
    assert shown_path(tmp_path.parent) == str(tmp_path.parent)


def test_task_set_of_another_library_is_started_by_its_command() -> None:
    file = EnvironmentFile("gymnasium:FrozenLake-v1", 2.0)
    script = EnvironmentFile("folder/asks.py")

    assert file.program(Path("/work")) == ("-m", "atroposlib.cli.env", "gymnasium:FrozenLake-v1")
    assert script.program(Path("/work")) == ("/work/folder/asks.py",)
    assert TrainOptions(files=(file, file, script), model="m").names() == [
        "gymnasium_FrozenLake_v1",
        "gymnasium_FrozenLake_v1-2",
        "asks",
    ]


@pytest.mark.parametrize("stem", ["a_b", "A b", "A_B"])
def test_names_that_differ_only_by_spaces_or_case_are_numbered(stem: str) -> None:
    files = (EnvironmentFile("a b.py"), EnvironmentFile(f"{stem}.py"))

    assert TrainOptions(files=files, model="m").names() == ["a b", f"{stem}-2"]


def test_names_of_environments_are_different() -> None:
    files = [EnvironmentFile(f"{stem}.py") for stem in ("sums-2", "sums", "sums", "sums-hard")]

    names = TrainOptions(files=tuple(files), model="m").names()

    assert names == ["sums-2", "sums", "sums-3", "sums-hard"]


def test_common_start_lets_the_trainer_wait_for_the_engine() -> None:
    options = replace(OPTIONS, starts_together=True, evaluates=False)

    together, in_order = plan_of(options, machine=CPU)[0], plan_of(machine=CPU)[0]

    assert trainer_config(together).engine_wait_s == together.start_limit_s
    assert trainer_config(in_order).engine_wait_s == 0


def test_common_start_is_refused_if_an_evaluation_comes_first() -> None:
    with pytest.raises(ConfigError, match="add --no-evaluate"):
        plan_of(replace(OPTIONS, starts_together=True), machine=CPU)


def test_common_start_is_refused_on_a_shared_gpu() -> None:
    options = replace(OPTIONS, starts_together=True, evaluates=False)

    assert plan_of(options, machine=FOUR_GPUS)[0].starts_together
    with pytest.raises(ConfigError, match="separate GPUs"):
        plan_of(options, machine=ONE_GPU)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"steps": 3.5}, "steps: Input should be a valid integer"),
        ({"environment_flags": []}, "environment_flags: Input should be a valid dictionary"),
        ({"files": [[5]]}, "files.0.0: Input should be a valid string"),
        ({"engine": "sglang"}, "engine: Input should be 'vllm' or 'torch'"),
        ({"stepz": 3}, "stepz: unknown key"),
    ],
)
def test_saved_options_that_were_edited_wrongly_name_the_key(
    edit: dict[str, Any], message: str
) -> None:
    saved = {"files": [["environment.py", 1.0]], "model": "m", "trainer_flags": []}

    assert TrainOptions.from_json({**saved, "steps": "3"}).steps == 3
    with pytest.raises(ValueError, match=re.escape(message)):
        TrainOptions.from_json({**saved, **edit})
