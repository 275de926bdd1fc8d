"""TRL's asynchronous GRPO trainer on batches of the service.

    environments ─► service ─► batches() ─► ServiceRolloutWorker ─► AsyncGRPOTrainer
         ▲                         ▲           one thread              │        │
         │                         └── acknowledge: each optimizer step ┘        │
         └──── engine ◄── weights (WeightTransferProtocol), and their version ◄──┘

`from_service` returns the arguments of the trainer. TRL drains single samples, reads one
micro-batch ahead, and drops samples that are too stale; `SampleLedger` follows each sample, so that
a batch is acknowledged after the optimizer step that used its last sample. Samples of batches that
are not finished when training ends are returned to the service. At the end of the run, TRL receives
a copy of an earlier sample in place of the micro-batch that it reads ahead and never trains on.

TRL has no code path for CPUs: `cpu_trainer_class` returns a trainer with one, for trials and tests.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from atroposlib.api.client import BatchIterator, LeasedBatch, batches
from atroposlib.api.trainers import FaceRules, TrainerRow, groups_of_rows
from atroposlib.errors import ConfigError, GroupError, InferenceError, MissingExtraError
from atroposlib.utils.text import hide_secrets_of_requests, without_secrets

__all__ = [
    "EngineReload",
    "NoWeightTransfer",
    "ServiceRolloutWorker",
    "cpu_trainer_class",
    "from_service",
    "samples_of",
]

logger = logging.getLogger(__name__)

_TRAINER = "TRL's asynchronous GRPO"
_ADVANTAGE_EPS = 1e-8
_JOIN_S = 90.0
_ROOM_CHECK_S = 1.0
_REPEAT_S = 10.0


def from_service(
    base_url: str,
    args: Any,
    *,
    weight_transfer: Any = None,
    ignored_fields: Collection[str] = (),
    **options: Any,
) -> dict[str, Any]:
    """Return the arguments with which `AsyncGRPOTrainer` trains on batches of a service.

    Args:
        base_url: address of the service.
        args: TRL's `AsyncGRPOConfig`, with `max_steps` and with `token_budget=0`.
        weight_transfer: TRL's `WeightTransferProtocol`, e.g. `EngineReload`; None lets TRL send the
            weights to the engine over NCCL.
        ignored_fields: optional fields of groups that are left out instead of rejected.
        **options: further arguments of `batches`, such as `token`, `max_token_len` or `lease_s`.
            A lease must outlast two optimizer steps.

    Raises:
        ConfigError: a setting of `args` does not fit; the message names it.
        MissingExtraError: TRL is not installed.

    Example:
        >>> args = AsyncGRPOConfig("out", max_steps=20, token_budget=0)
        >>> arguments = from_service("http://localhost:8000", args)
        >>> AsyncGRPOTrainer(model="Qwen/Qwen2.5-1.5B-Instruct", args=args, **arguments).train()
    """
    _trl()
    from datasets import Dataset

    stream = batches(
        base_url,
        batch_size=samples_per_step(args),
        num_steps=args.max_steps,
        acknowledge="explicit",
        **options,
    )
    worker = ServiceRolloutWorker(stream, args, ignored_fields=ignored_fields)
    return {
        "rollout_worker": worker,
        "weight_transfer": weight_transfer,
        "callbacks": [worker.callback()],
        # TRL requires prompts; those of the environments are used instead.
        "train_dataset": Dataset.from_dict({"prompt": ["prompts are those of the environments"]}),
    }


def samples_per_step(args: Any) -> int:
    """Return the samples of one optimizer step, on all processes together.

    Raises:
        ConfigError: the number of steps is open, or TRL would not use a fixed number per step.
    """
    if args.max_steps <= 0:
        raise ConfigError("max_steps: set it to the optimizer steps of the run, e.g. max_steps=200")
    if args.token_budget is None or args.token_budget > 0:
        raise ConfigError(
            f"token_budget: {args.token_budget}, with which TRL uses a varying number of samples "
            "per optimizer step; set token_budget=0, and limit the length of samples with "
            "max_token_len"
        )
    per_device = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return int(per_device * args.world_size)


def _trl() -> Any:
    try:
        from trl.experimental import async_grpo
    except ImportError as error:
        raise MissingExtraError("trl", extra="trl") from error
    return async_grpo


class _Share:
    """A batch and the number of its samples that are neither trained nor dropped."""

    def __init__(self, batch: LeasedBatch, num_left: int) -> None:
        self.batch = batch
        self.num_left = num_left


class SampleLedger:
    """Follows the samples of batches, from the queue to the optimizer step; thread-safe.

    TRL trains on samples in the order in which they leave the queue, the same number in each step.
    """

    def __init__(self) -> None:
        self.num_expected = 0
        """Samples that were not dropped, wherever they are."""
        self.num_handed_out = 0
        self.num_trained = 0
        self._lock = threading.Lock()
        self._in_training: deque[_Share] = deque()
        self._finished: list[LeasedBatch] = []

    def open(self, batch: LeasedBatch, num_samples: int) -> _Share:
        """Add a batch, whose samples enter the queue."""
        share = _Share(batch, num_samples)
        with self._lock:
            self.num_expected += num_samples
            if not num_samples:
                self._finished.append(batch)
        return share

    def hand_out(self, share: _Share) -> None:
        """Count a sample that TRL will train on."""
        with self._lock:
            self.num_handed_out += 1
            self._in_training.append(share)

    def drop(self, share: _Share) -> None:
        """Count a sample that nothing trains on."""
        with self._lock:
            self.num_expected -= 1
            self._settle(share)

    def trained(self, num_samples: int) -> None:
        """Count the oldest samples handed out as trained."""
        with self._lock:
            for _ in range(num_samples):
                self._settle(self._in_training.popleft())
            self.num_trained += num_samples

    def take_finished(self) -> list[LeasedBatch]:
        """Return the batches all of whose samples are settled, each once."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def _settle(self, share: _Share) -> None:
        share.num_left -= 1
        if share.num_left == 0:
            self._finished.append(share.batch)


class SampleBuffer(queue.Queue[Any]):
    """The queue that TRL drains.

    `decide` returns for each sample whether TRL may have it. Once `is_complete` says that TRL has
    all samples of the run, `get` repeats the last one, which TRL reads ahead and does not use.
    """

    def __init__(
        self, decide: Callable[[Any, _Share], bool], is_complete: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._decide = decide
        self._is_complete = is_complete
        self._last: Any = None

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        while self._last is None or not self._is_complete():
            sample, share = super().get(block, timeout)
            if self._decide(sample, share):
                self._last = sample
                break
        return self._last


class ServiceRolloutWorker:
    """TRL's `RolloutWorkerProtocol` on the batches of a stream.

    A thread leases batches and converts them; TRL's thread takes the samples and, through
    `callback`, reports each optimizer step.

    Args:
        stream: return value of `batches` with `acknowledge="explicit"`; closed by this object.
        args: TRL's `AsyncGRPOConfig`.
        ignored_fields: optional fields of groups that are left out instead of rejected.

    Attributes:
        rollout_buffer: queue of samples, drained by TRL.
        metrics_queue: queue of metrics, drained by TRL.
    """

    def __init__(
        self, stream: BatchIterator, args: Any, *, ignored_fields: Collection[str] = ()
    ) -> None:
        self._stream = stream
        self._samples_per_step = samples_per_step(args)
        self._max_steps = int(args.max_steps)
        self._max_staleness = int(args.max_staleness)
        self._rules = FaceRules(
            _TRAINER,
            temperature=float(args.temperature),
            takes_advantages=True,
            needs_logprobs=True,
            ignored_fields=tuple(ignored_fields),
        )
        self.rollout_buffer = SampleBuffer(self._decide, self._has_all)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._ledger = SampleLedger()
        self._version = 0
        self._first_step = self._last_step = 0
        self._num_groups = 0
        self._thread: threading.Thread | None = None
        self._room = threading.Event()
        self._lost: list[Any] = []
        """Tokens of trained batches that will be delivered again, since their lease had ended."""
        self._settled = threading.Event()
        self._is_stopping = self._has_ended = False
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Start to lease batches."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._feed, name="service-batches", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Return the batches that are not trained, and end."""
        if self._last_step >= self._max_steps:
            self._settle_repeats()
        self._is_stopping = True
        self._stream.stop_waiting()
        self._room.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        self._stream.close()

    def update_model_version(self, model_version: int) -> None:
        """Report to the service which weights the engine serves; environments store it."""
        self._version = model_version
        self._stream.set_policy_version(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """Raise if no more samples will arrive; called while TRL waits for one.

        An environment may be slow, so that `stale_after_s` without a sample is not an error;
        `idle_limit_s` of `batches` limits the wait.

        Raises:
            RuntimeError: the thread has failed; the cause is chained.
            ConfigError: the run has ended before TRL has done its steps.
        """
        if self._failure is not None:
            raise RuntimeError(f"no samples of the service: {self._failure}") from self._failure
        if self._has_ended:
            raise ConfigError(
                f"the run of the service ended after {self._stream.num_acknowledged} batches, and "
                f"TRL asks for more, {self._max_steps} in total: continue it with "
                "starting_step=... or replace=True, or raise idle_limit_s"
            )

    def callback(self) -> Any:
        """Return a callback of transformers that reports optimizer steps to this worker."""
        from transformers import TrainerCallback

        worker = self

        class AcknowledgeSteps(TrainerCallback):  # type: ignore[misc]  # it has no types here
            def on_train_begin(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
                worker.begin(state.global_step)

            def on_step_end(self, args: Any, state: Any, control: Any, **_others: Any) -> None:
                if state.is_world_process_zero:
                    worker.step_done(state.global_step)

        return AcknowledgeSteps()

    def begin(self, step: int) -> None:
        """Set the optimizer steps done before, if training is resumed."""
        self._first_step = self._last_step = step

    def step_done(self, step: int) -> None:
        """Acknowledge the batches whose samples are all trained after this optimizer step."""
        self._ledger.trained((step - self._last_step) * self._samples_per_step)
        self._last_step = step
        self._acknowledge()

    def _acknowledge(self) -> None:
        for batch in self._ledger.take_finished():
            # If samples were dropped, a step takes more than one batch; the run counts steps.
            num_steps = self._ledger.num_trained // self._samples_per_step
            num_before = self._stream.num_acknowledged
            is_trained = num_before < num_steps
            self._stream.ack(batch, is_trained=is_trained)
            if is_trained and self._stream.num_acknowledged == num_before:
                self._lost.append(_tokens_of(batch))
                self._room.set()

    def _settle_repeats(self) -> None:
        """Wait until trained batches whose lease had ended are delivered again.

        Otherwise the run would lack their steps, and environments would wait for them.
        """
        deadline = time.monotonic() + _REPEAT_S
        num_steps = self._max_steps - self._first_step
        while self._lost and self._stream.num_acknowledged < num_steps:
            if self._failure is not None or time.monotonic() >= deadline:
                return
            self._settled.wait(_ROOM_CHECK_S)
            self._settled.clear()

    def _was_trained(self, batch: LeasedBatch) -> bool:
        """Return whether a batch was trained before, under a lease that has ended."""
        if not self._lost or (tokens := _tokens_of(batch)) not in self._lost:
            return False
        self._lost.remove(tokens)
        return True

    def _has_all(self) -> bool:
        return self._ledger.num_handed_out >= self._num_samples_wanted

    @property
    def _num_samples_wanted(self) -> int:
        return (self._max_steps - self._first_step) * self._samples_per_step

    def _decide(self, sample: Any, share: _Share) -> bool:
        """Return whether TRL may have a sample; it would drop those that are too stale."""
        is_fresh = bool(self._version - sample.model_version <= self._max_staleness)
        if is_fresh:
            self._ledger.hand_out(share)
        else:
            self._ledger.drop(share)
            self.metrics_queue.put({"sample/dropped_stale_total": 1.0})
            self._acknowledge()
        self._room.set()
        return is_fresh

    def _feed(self) -> None:
        try:
            while self._wait_for_room():
                batch = self._stream.next_batch()
                if batch is None:
                    self._has_ended = not self._is_stopping
                    return
                if self._was_trained(batch):
                    self._stream.ack(batch)
                    self._settled.set()
                else:
                    self._push(batch)
        except BaseException as error:  # noqa: BLE001 - raised in TRL's thread by `check_health`
            self._failure = error

    def _wait_for_room(self) -> bool:
        """Wait until another batch is wanted; return False if no more are."""
        while not self._is_stopping:
            self._room.clear()
            num_waiting = self.rollout_buffer.qsize()
            is_short = self._ledger.num_expected < self._num_samples_wanted
            if num_waiting < self._samples_per_step and (is_short or self._lost):
                return True
            self._room.wait(_ROOM_CHECK_S)
        return False

    def _push(self, batch: LeasedBatch) -> None:
        samples: list[Any] = []
        num_rows = num_masked = 0
        for rows in groups_of_rows(batch, self._rules):
            num_rows += len(rows)
            num_masked += sum(not row.num_trained_tokens for row in rows)
            samples += samples_of(rows, group_id=self._num_groups, version=self._version)
            self._num_groups += 1
        if num_rows != self._samples_per_step:
            raise ConfigError(
                f"a batch of the service has {num_rows} sequences, an optimizer step of TRL "
                f"{self._samples_per_step}: register the latter as batch_size"
            )
        if num_masked:
            self.metrics_queue.put({"sample/masked_total": float(num_masked)})
        share = self._ledger.open(batch, len(samples))
        for sample in samples:
            self.rollout_buffer.put_nowait((sample, share))
        if not samples:
            self._acknowledge()


def _tokens_of(batch: LeasedBatch) -> list[Any]:
    return [group["tokens"] for group in batch.groups]


def samples_of(rows: Sequence[TrainerRow], *, group_id: int, version: int) -> list[Any]:
    """Convert one group to TRL's `RolloutSample`, without rows that have no trained token.

    Advantages are those of TRL's own worker, the score minus the mean, divided by the population
    standard deviation, unless the environment has set them.

    Args:
        rows: [G] rows of one group.
        group_id: number of the group in this run.
        version: policy version of rows that have none.

    Raises:
        GroupError: advantages differ within a trajectory; TRL has one per sample.
    """
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    scores = np.array([row.score for row in rows], dtype=float)
    centered = (scores - scores.mean()) / (scores.std() + _ADVANTAGE_EPS)
    samples = []
    for i, (row, advantage) in enumerate(zip(rows, centered, strict=True)):
        if not row.num_trained_tokens:
            continue
        assert row.logprobs is not None
        metrics = {"reward": row.score, "reward_std": float(scores.std())}
        samples.append(
            RolloutSample(
                prompt=row.messages[:-1],
                completion=row.messages[-1:],
                input_ids=np.asarray(row.tokens, dtype=np.int64),
                completion_mask=np.asarray(row.is_trained, dtype=np.int64),
                old_log_probs=np.asarray(row.logprobs, dtype=np.float32),
                advantage=_advantage_of(row, i, float(advantage)),
                model_version=version if row.policy_version is None else row.policy_version,
                group_id=group_id,
                metrics={**metrics, **{f"rewards/{k}": v for k, v in row.reward_parts.items()}},
            )
        )
    return samples


def _advantage_of(row: TrainerRow, i: int, of_score: float) -> float:
    if row.has_zeroed_advantage:
        return 0.0
    if row.advantages is None:
        return of_score
    pairs = zip(row.advantages, row.is_trained, strict=True)
    values = {value for value, is_trained in pairs if is_trained}
    if len(values) > 1:
        raise GroupError(
            f"advantages[{i}]: the values differ within the trajectory, and {_TRAINER} has one per "
            "sample; send the same value for all its tokens, or train without them: "
            "ignored_fields=['advantages']"
        )
    return values.pop()


class NoWeightTransfer:
    """TRL's `WeightTransferProtocol` that sends nothing: something else updates the engine."""

    def init_weight_transfer(self) -> None:
        pass

    def pause(self) -> None:
        pass

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        for _ in iterator:  # on several processes, each weight is gathered by all of them
            pass

    def resume(self) -> None:
        pass

    def destroy(self) -> None:
        pass


class EngineReload:
    """TRL's `WeightTransferProtocol` by files: a vLLM reloads the weights from a directory.

    Works without NCCL, for instance on a CPU. The weights are gathered in memory before they are
    written.

    Args:
        engine_url: address of a vLLM with its development routes (`VLLM_SERVER_DEV_MODE=1`),
            without `/v1`.
        directory: directory for the weights, which the engine's host can read.
        timeout_s: limit on one request; a large model takes minutes to reload.
        transport: replaces the network in tests.
    """

    def __init__(
        self,
        engine_url: str,
        directory: str | Path,
        *,
        timeout_s: float = 600.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._directory = Path(directory).resolve()
        self._shown_url = without_secrets(engine_url)
        hide_secrets_of_requests()
        # `trust_env=False`: proxies of the environment are not for a local engine.
        base_url = engine_url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(
            base_url=base_url, timeout=timeout_s, trust_env=False, transport=transport
        )

    def init_weight_transfer(self) -> None:
        """Check that the engine can reload its weights while it runs."""
        # A request without a method is rejected with 400 and has no effect; 404 means no route.
        status = self._send("/collective_rpc", json={}).status_code
        if status != 400:
            raise ConfigError(
                f"the engine at {self._shown_url} cannot reload its weights (POST /collective_rpc "
                f"answered {status}); start vLLM with VLLM_SERVER_DEV_MODE=1"
            )

    def pause(self) -> None:
        self._post("/pause", params={"mode": "keep"})

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Write the weights and let the engine load them; if that fails, it is resumed."""
        from safetensors.torch import save_file

        try:
            weights = {name: tensor.detach().cpu().contiguous() for name, tensor in iterator}
            self._directory.mkdir(parents=True, exist_ok=True)
            save_file(weights, self._directory / "model.safetensors")
            request = {
                "method": "reload_weights",
                "kwargs": {"weights_path": str(self._directory)},
            }
            self._post("/collective_rpc", json=request)
            self._post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        except BaseException:
            self.resume()
            raise

    def resume(self) -> None:
        self._post("/resume")

    def destroy(self) -> None:
        self._http.close()

    def _post(self, path: str, **options: Any) -> None:
        answer = self._send(path, **options)
        if answer.status_code != 200:
            raise InferenceError(
                f"POST {self._shown_url}{path} answered {answer.status_code}: {answer.text[:500]}"
            )

    def _send(self, path: str, **options: Any) -> httpx.Response:
        try:
            return self._http.post(path, **options)
        except httpx.HTTPError as error:
            raise InferenceError(f"POST {self._shown_url}{path} failed: {error!r}") from error


def cpu_trainer_class() -> type[Any]:
    """Return a subclass of TRL's `AsyncGRPOTrainer` that runs on a CPU.

    TRL 1.16 refuses a CPU in two places, and the subclass answers for both:

    - its constructor asks `torch.cuda.get_device_name` for the peak speed of the device
      (`get_peak_flops_per_device` in `trl/trainer/utils.py`); here that speed is unknown, and TRL
      leaves out the metrics derived from it;
    - its attention loads a CUDA kernel from the hub (`_flash_attn` in
      `trl/experimental/async_grpo/packing.py`); here it is computed with
      `scaled_dot_product_attention`, registered in transformers under TRL's name.

    Raises:
        MissingExtraError: TRL is not installed.
    """
    module = _trl()
    from transformers import AttentionInterface
    from trl.experimental.async_grpo import async_grpo_trainer
    from trl.experimental.async_grpo.packing import TREE_ATTENTION

    page: Any = async_grpo_trainer

    class CpuAsyncGRPOTrainer(module.AsyncGRPOTrainer):  # type: ignore[name-defined,misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            of_trl = page.get_peak_flops_per_device
            page.get_peak_flops_per_device = lambda accelerator, dtype: None
            try:
                super().__init__(*arguments, **options)
            finally:
                page.get_peak_flops_per_device = of_trl
            AttentionInterface.register(TREE_ATTENTION, tree_attention_on_cpu)

    return CpuAsyncGRPOTrainer


def tree_attention_on_cpu(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    tree_kv_index: Any,
    tree_cu_seqlens_q: Any,
    tree_cu_seqlens_k: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_others: Any,
) -> tuple[Any, None]:
    """Attend from each segment of TRL's packed tree to the path from its root; `(1, T, H, D)`.

    The arguments are those of TRL's `tree_attention`: segment s has the queries from
    `tree_cu_seqlens_q[s]`, and its keys are `tree_kv_index` from `tree_cu_seqlens_k[s]`, of which
    the last are those of the segment itself.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    if softcap:
        raise ConfigError("models with soft-capped attention need TRL's kernel, on a GPU")
    outputs = []
    for s in range(len(tree_cu_seqlens_q) - 1):
        queries = query[:, :, tree_cu_seqlens_q[s] : tree_cu_seqlens_q[s + 1]]
        path = tree_kv_index[tree_cu_seqlens_k[s] : tree_cu_seqlens_k[s + 1]]
        num_queries, num_keys = queries.shape[2], len(path)
        depth = torch.arange(num_keys)
        distance = depth[num_keys - num_queries :, None] - depth[None]
        is_seen = distance >= 0
        if sliding_window:
            is_seen &= distance < sliding_window
        outputs.append(
            scaled_dot_product_attention(
                queries,
                key.index_select(2, path),
                value.index_select(2, path),
                attn_mask=is_seen,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None
