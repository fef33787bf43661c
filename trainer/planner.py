"""Predicting every layout that the rules allow, and choosing the fastest that fits."""

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from models.decoder_config import DecoderConfig
from parallelize.layout import Layout
from parallelize.planner.hardware import Cluster
from parallelize.planner.memory import RankMemory, rank_fits, rank_memory
from parallelize.planner.numbers import ElementBytes, Job, ModelNumbers, Shapes, SplitTrace, UnitTrace, with_one_table
from parallelize.planner.replay import Replay, action_orders, replay
from parallelize.planner.step_time import StepTime, UnitTime, least_s, send_s, stage_times, step_time, unit_time
from parallelize.schedules import schedule_of
from trainer.build import defers_projection, flops_per_token, precision_of
from trainer.config import Config
from trainer.config_rules import layers_per_stage_of
from trainer.errors import UserError
from trainer.layout_rules import Choice, layout_problems, recomputed_split_backward, reshards
from trainer.traced_units import TracedUnits

# GPipe, LoopedBFS and DualPipeV take no less time than one of these, and hold more activations.
_SCHEDULES = (
    ("1F1B", None),
    ("Interleaved1F1B", 2),
    ("Interleaved1F1B", 4),
    ("InterleavedZeroBubble", 2),
    ("ZBVZeroBubble", None),
)
# Keys of [parallel] that a search decides.
SEARCHED = ("tp", "pp", "dp_shard", "dp_replicate", "schedule", "virtual_stages", "schedule_microbatches", "balance")
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_RECOMPUTE = ("none", "selective", "full")
_USABLE = 0.92  # of a GPU's memory: the rest is CUDA's context, communication buffers and fragmentation
_DEEPEST = 64  # pipeline ranks
_RUN = 8  # micro-batches per pipeline rank in a run of the schedule, if not all are in one


@dataclass(frozen=True)
class Prediction:
    """One choice, with its memory by pipeline rank and the time of a step."""

    choice: Choice
    job: Job
    memory: tuple[RankMemory, ...]
    time: StepTime
    tokens_per_s: float
    mfu: float

    @property
    def peak_bytes(self) -> int:
        return max(rank.peak_bytes for rank in self.memory)


@dataclass(frozen=True)
class Plan:
    """best: fastest first. rejected: reason -> choices. n_choices: looked at in all; those in no list were slower."""

    best: list[Prediction]
    rejected: Counter
    n_choices: int


def for_gpu(config: Config, cluster: Cluster) -> Config:
    """The config with ``precision.compute = "auto"`` as it is on the cluster's GPU, wherever this runs."""
    if config.precision.compute != "auto":
        return config
    compute = "float32" if cluster.gpu.name == "cpu" else "bfloat16"
    return config.model_copy(update={"precision": config.precision.model_copy(update={"compute": compute})})


class Planner:
    """Predicts and searches for one config on one cluster."""

    def __init__(self, config: Config, architecture: DecoderConfig, cluster: Cluster):
        self.config = config
        self.architecture = architecture
        self.cluster = cluster
        self.units = TracedUnits(config, architecture)
        self.usable_bytes = _USABLE * cluster.gpu.memory_bytes
        precision = precision_of(config, "cuda")
        self.elements = ElementBytes(
            precision.param.itemsize, precision.frozen.itemsize, precision.compute.itemsize, precision.reduce.itemsize,
            moment=precision.param.itemsize if config.precision.moments == "param" else 2,
        )  # fmt: skip
        self.numbers = ModelNumbers(
            architecture.dim, architecture.vocab_size, architecture.head_dim, architecture.tie_embeddings
        )
        self.flops_per_token = flops_per_token(config, architecture)
        self._times: dict[tuple, dict[str, UnitTime]] = {}

    def search(self, top: int = 5) -> Plan:
        """The ``top`` fastest choices that fit, exactly: in order of a time that none can beat, until the rest is slower."""
        rejected: Counter = Counter()
        runnable: list[tuple[Choice, Job]] = []
        n_choices = 0
        for choice in self._choices():
            n_choices += 1
            reason = next((reason for reason, _ in self._problems(choice)), None)
            if reason is not None:
                rejected[reason] += 1
                continue
            runnable.append((choice, self.job_of(choice)))
        self.units.trace_before({(job.layout.tp, job.recompute, 1) for _, job in runnable})
        # (seconds, number, whether they are the step's own, or else less)
        queue = [(self._least_s(job), number, False) for number, (_, job) in enumerate(runnable)]
        heapq.heapify(queue)
        best: list[Prediction] = []
        while queue and (len(best) < top or queue[0][0] < best[-1].time.total_s):
            _, number, is_time = heapq.heappop(queue)
            choice, job = runnable[number]
            if not (self._fits(job) if is_time else self._may_fit(job)):
                rejected["more memory than a GPU has"] += 1
            elif is_time:
                best.append(self.predict(choice, job))
                best.sort(key=lambda prediction: prediction.time.total_s)
                del best[top:]
            else:
                heapq.heappush(queue, (self._time(job).total_s, number, True))
        return Plan(best, rejected, n_choices)

    def predict(self, choice: Choice, job: Job | None = None) -> Prediction:
        """Memory and time of a choice without problems. Raises ``UserError`` for a schedule that is not modelled."""
        if job is None and (advice := next(recomputed_split_backward(choice), None)):
            raise UserError(f"not predicted: {advice}")
        job = job or self.job_of(choice)
        time = self._time(job)
        tokens = choice.config.training.global_batch_size * job.seq_len / time.total_s
        flops = tokens * self.flops_per_token
        peak = self.cluster.gpu.peak_flops * job.layout.world_size
        memory = tuple(self._memory(job, rank) for rank in range(job.layout.pp))
        return Prediction(choice, job, memory, time, tokens, flops / peak)

    def timeline(self, choice: Choice) -> tuple[Replay, float]:
        """When each pipeline rank runs what in one run of the schedule, and seconds of a send between ranks."""
        job = self.job_of(choice)
        orders = action_orders(job.schedule, job.layout.pp, job.virtual_stages, choice.n_in_a_run)
        send = send_s(job, self.numbers, self.cluster)
        return replay(orders, stage_times(job, self._times_of(job), self.cluster), send), send

    def job_of(self, choice: Choice) -> Job:
        """The numbers of a choice without problems."""
        config, layout = choice.config, choice.layout
        return Job(
            layout=layout,
            schedule=choice.schedule,
            virtual_stages=choice.virtual_stages,
            layers_per_stage=layers_per_stage_of(choice),
            seq_len=config.training.seq_len,
            micro_batch_size=config.training.micro_batch_size,
            n_microbatches=choice.n_microbatches,
            n_schedule_runs=choice.n_microbatches // choice.n_in_a_run if layout.pp > 1 else 1,
            recompute=config.activation_checkpoint.mode,
            reshard=reshards(config, layout),
            elements=self.elements,
            sequence_parallel=config.parallel.sequence_parallel,
            loss_parallel=config.parallel.loss_parallel,
            defers_projection=defers_projection(config),
            recompute_every=config.activation_checkpoint.every,
        )

    def _choices(self) -> Iterator[Choice]:
        n_gpus = self.cluster.n_nodes * self.cluster.gpus_per_node
        for tp in _divisors(n_gpus):
            for pp in _divisors(n_gpus // tp):
                for dp_replicate in _divisors(n_gpus // tp // pp):
                    layout = Layout(pp, dp_replicate, n_gpus // tp // pp // dp_replicate, 1, tp)
                    yield from self._choices_with(layout)

    def _choices_with(self, layout: Layout) -> Iterator[Choice]:
        config = self.config
        for name, virtual_stages in _SCHEDULES if layout.pp > 1 else _SCHEDULES[:1]:
            schedule = schedule_of(name)
            for n_in_a_run in self._runs(layout):
                parallel = config.parallel.model_copy(
                    update=dict(
                        tp=layout.tp, pp=layout.pp, dp_shard=layout.dp_shard, dp_replicate=layout.dp_replicate,
                        schedule=name, virtual_stages=virtual_stages, schedule_microbatches=n_in_a_run,
                        balance="flops" if layout.pp > 1 else "uniform",
                    )
                )  # fmt: skip
                for size in _MICRO_BATCHES:
                    if n_in_a_run and n_in_a_run * size * layout.dp >= config.training.global_batch_size:
                        continue  # one run is all there is
                    training = config.training.model_copy(update={"micro_batch_size": size})
                    for mode in ("none",) if schedule.splits_backward else _RECOMPUTE:
                        recompute = config.activation_checkpoint.model_copy(update={"mode": mode})
                        sections = {"parallel": parallel, "training": training, "activation_checkpoint": recompute}
                        yield Choice(config.model_copy(update=sections), self.architecture, layout, schedule)

    def _runs(self, layout: Layout) -> tuple[int | None, ...]:
        """Micro-batches in a run of the schedule: all, or as many as keep the bubble small; torch holds buffers for each."""
        return (None, _RUN * layout.pp) if layout.pp > 1 else (None,)

    def _problems(self, choice: Choice) -> Iterator[tuple[str, str]]:
        layout, per_node = choice.layout, self.cluster.gpus_per_node
        if layout.tp > per_node and not choice.config.parallel.tp_across_nodes:
            yield "tp crosses nodes", f"parallel.tp = {layout.tp} is above the {per_node} GPUs of a node"
        if layout.pp > _DEEPEST:
            yield f"more than {_DEEPEST} pipeline ranks", f"parallel.pp = {layout.pp}"
        yield from layout_problems(choice)

    def _may_fit(self, job: Job) -> bool:
        """Whether it could fit as far as the trace of one sequence tells: most that do not fit are known from here."""
        n_own = self.architecture.n_params / (job.layout.pp * job.layout.tp * job.layout.dp_shard)
        each = self.elements.param + 2 * self.elements.moment
        if self.config.training.method == "lora" or self.config.training.freeze:
            each = min(each, self.elements.frozen)
        if each * n_own > self.usable_bytes:
            return False
        one = self._traces(job, 1)
        return self._fits(job, {unit: _least(unit, trace, job) for unit, trace in one.items()})

    def _fits(self, job: Job, traces: dict[str, UnitTrace] | None = None) -> bool:
        traces = traces or self.traces_of(job)
        orders, shapes = job.orders_that_fill_memory(), self.shapes_of(job)
        return all(
            rank_fits(job, self.numbers, shapes, traces, orders, rank, self.usable_bytes)
            for rank in range(job.layout.pp)
        )

    def traces_of(self, job: Job) -> dict[str, UnitTrace]:
        return self._traces(job, job.micro_batch_size, job.layout.pp > 1 and job.schedule.splits_backward)

    def _traces(self, job: Job, micro_batch_size: int, split: bool = False) -> dict[str, UnitTrace]:
        traces = self.units.traces(job.layout.tp, job.recompute, micro_batch_size, split)
        if job.recompute_every == 1:
            return traces
        return traces | {"kept_block": self.units.traces(job.layout.tp, "none", micro_batch_size, split)["block"]}

    def _least_s(self, job: Job) -> float:
        return least_s(job, self.numbers, self.shapes_of(job), self._times_of(job), self.cluster)

    def _time(self, job: Job) -> StepTime:
        return step_time(job, self.numbers, self.shapes_of(job), self._times_of(job), self.cluster)

    def _memory(self, job: Job, rank: int) -> RankMemory:
        orders = job.orders_that_fill_memory()
        return rank_memory(job, self.numbers, self.shapes_of(job), self.traces_of(job), orders, rank)

    def shapes_of(self, job: Job) -> Shapes:
        """Parameters by unit, as the job holds them."""
        shapes = self.units.shapes(job.layout.tp)
        if job.recompute_every > 1:
            shapes = shapes | {"kept_block": shapes["block"]}
        return with_one_table(shapes) if self.numbers.tied and job.layout.pp == 1 else shapes

    def _times_of(self, job: Job) -> dict[str, UnitTime]:
        key = job.layout.tp, job.recompute, job.micro_batch_size
        if key not in self._times:
            self._times[key] = {
                unit: unit_time(trace, job.micro_batch_size, self.cluster, job.layout)
                for unit, trace in self._traces(job, 1).items()
            }
        return self._times[key]


def _least(unit: str, trace: UnitTrace, job: Job) -> UnitTrace:
    """No more than what a micro-batch of the job needs, from the trace of one sequence."""
    # What a head keeps that defers the projection is mostly its weight's gradient, as large for one as for many.
    kept = trace.kept_bytes * (1 if unit == "head" and job.defers_projection else job.micro_batch_size)
    between_halves = 0 if unit == "head" else kept
    split = SplitTrace(between_halves, 0, 0, 0, 0, 0)
    return replace(trace, kept_bytes=kept, forward_peak_bytes=kept, backward_peak_bytes=0, split=split)


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
