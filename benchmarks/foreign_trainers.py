"""The trainers of the published runs, as operation lists: what ``planner_accuracy`` costs and replays.

Megatron-style: parameters are whole on every data-parallel rank (ZeRO-1 shards the optimizer alone), gradients
are reduced once a step, pipelines run 1F1B. They are not FSDP2 runs.
"""

from dataclasses import dataclass, replace

from parallelize.layout import Layout
from parallelize.planner.hardware import Cluster
from parallelize.planner.op_time import seconds
from parallelize.planner.operations import Attention, Collective, Elementwise, Matmul
from parallelize.planner.replay import StageTime, action_orders, replay
from parallelize.schedules import balance_uniform, schedule_of


@dataclass(frozen=True)
class Run:
    """One published run.

    style: llama (SwiGLU, ZeRO-1, no dropout) or gpt (GELU, plain data parallelism, dropout, tied embeddings).
    ffn: width of an MLP. batches in sequences. kernel: of the attention: flash1, flash2, fused (softmax), torch.
    fused_norm: RMSNorm in one kernel. recompute: none, attention (the core alone) or layer.
    drains: if above 1, the published time is that of so many pipelines, each of a part of the batch, with no
    optimizer step.
    measured_s: seconds of a step, None where it ran out of memory.
    """

    model: str
    style: str
    hidden: int
    n_layers: int
    n_heads: int
    ffn: int
    vocab: int
    seq_len: int
    global_batch: int
    micro_batch: int
    tp: int
    pp: int
    dp: int
    kernel: str = "fused"
    fused_norm: bool = True
    recompute: str = "none"
    sequence_parallel: bool = False
    drains: int = 1
    measured_s: float | None = None
    n_kv_heads: int | None = None  # None: as many as n_heads

    @property
    def layout(self) -> Layout:
        return Layout(pp=self.pp, dp_shard=self.dp, tp=self.tp)

    @property
    def n_microbatches(self) -> int:
        return max(1, self.global_batch // (self.dp * self.micro_batch))

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch * self.seq_len

    @property
    def kv_width(self) -> int:
        """Of keys, and of values."""
        return self.hidden * (self.n_kv_heads or self.n_heads) // self.n_heads

    @property
    def layer_parameters(self) -> int:
        mlp = (3 if self.style == "llama" else 2) * self.ffn
        return self.hidden * (2 * self.hidden + 2 * self.kv_width + mlp)

    @property
    def split_outside(self) -> int:
        """Ranks that share the activations between the tensor-parallel matmuls."""
        return self.tp if self.sequence_parallel else 1


@dataclass(frozen=True)
class Kernels:
    """How the trainers' own kernels compare with those that ``op_time`` knows. Fitted beside the calibration."""

    flash1: float = 0.5  # efficiency of flash-attention 1, as a part of flash-attention 2's
    torch_norm: float = 1.5  # bytes that the unfused RMSNorm moves, over those of TORCH_NORM
    zero: float = 0.3  # speed of ZeRO's reductions and gathers over dp, as a part of one undisturbed ring


# Bytes that each kernel reads and writes for one element, forward and backward.
FUSED_NORM = (4,), (8,)
TORCH_NORM = (6, 8, 4, 8, 6, 4), (4, 8, 6, 8, 16, 16, 12, 6)  # in fp32, one kernel an operation
ROTARY = (4, 6, 6, 6), (4, 6, 6, 6)
BIAS = (2,), (2,)
SWIGLU = (4, 6), (10, 6, 6)
GELU = (4,), (6,)
ADD = (6,), ()
DROPOUT_ADD = (7,), (5,)
SOFTMAX = {"fused": ((4,), (6,)), "torch": ((4, 5, 6, 8, 6), (6, 12, 6, 5, 4))}  # torch: scale, mask, fp32, bf16
DROPOUT = (5,), (5,)
CROSS_ENTROPY = (6, 8, 4), (8, 6)  # in fp32

Operations = tuple[list, list]  # of the forward, of the backward


def _join(parts: list[Operations]) -> Operations:
    return [op for part in parts for op in part[0]], [op for part in parts for op in part[1]]


def _elementwise(kernels, n_elements: float) -> Operations:
    forward, backward = ([Elementwise(int(each * n_elements)) for each in direction] for direction in kernels)
    return forward, backward


def _norm(run: Run, kernels: Kernels) -> Operations:
    n_elements = run.tokens * run.hidden / run.split_outside
    if run.fused_norm:
        return _elementwise(FUSED_NORM, n_elements)
    return _elementwise(TORCH_NORM, n_elements * kernels.torch_norm)


def _linear(tokens: int, k: int, n: int) -> Operations:
    """A matmul and its two gradients. The weight's is added to what earlier micro-batches left."""
    return [Matmul(tokens, k, n)], [Matmul(tokens, n, k), Matmul(k, tokens, n), Elementwise(8 * k * n)]


def _attention(run: Run, kernels: Kernels) -> Operations:
    n_heads, s, d = run.n_heads // run.tp, run.seq_len, run.hidden // run.n_heads
    if run.kernel.startswith("flash"):
        work = run.micro_batch / (kernels.flash1 if run.kernel == "flash1" else 1)  # slower: as if it had more to do
        forward = Attention(work, n_heads, n_heads * run.kv_width // run.hidden, s, d)
        return [forward], [replace(forward, backward=True)]
    rows = run.micro_batch * n_heads * s
    scores, values = Matmul(rows, d, s), Matmul(rows, s, d)
    softmax = _elementwise(SOFTMAX[run.kernel], rows * s)
    dropout = _elementwise(DROPOUT, rows * s) if run.style == "gpt" else ([], [])
    return _join([([scores], [values, scores]), softmax, dropout, ([values], [values, scores])])


def _tp_sum(run: Run) -> Operations:
    """Sum over the tensor-parallel ranks: of activations in the forward, of their gradients in the backward."""
    if run.tp == 1:
        return [], []
    size = 2 * run.tokens * run.hidden
    if run.sequence_parallel:
        # Of the backward's two, Megatron-LM hides the reduce_scatter behind the weights' gradients.
        gather = Collective("all_gather", "tp", size)
        return [Collective("reduce_scatter", "tp", size), gather], [gather]
    return [Collective("all_reduce", "tp", size)], [Collective("all_reduce", "tp", size)]


def layer_operations(run: Run, kernels: Kernels) -> Operations:
    """What one device does for one layer and micro-batch."""
    tokens, h, tp, llama = run.tokens, run.hidden, run.tp, run.style == "llama"
    residual = _elementwise(ADD if llama else DROPOUT_ADD, tokens * h / run.split_outside)
    return _join(
        [
            _norm(run, kernels),
            _linear(tokens, h, (h + 2 * run.kv_width) // tp),
            _elementwise(ROTARY if llama else BIAS, tokens * (h + run.kv_width) / tp),
            _attention(run, kernels),
            _linear(tokens, h // tp, h),
            _tp_sum(run),
            residual,
            _norm(run, kernels),
            *[_linear(tokens, h, run.ffn // tp)] * (2 if llama else 1),
            _elementwise(SWIGLU if llama else GELU, tokens * run.ffn / tp),
            _linear(tokens, run.ffn // tp, h),
            _tp_sum(run),
            residual,
        ]
    )


def head_operations(run: Run, kernels: Kernels) -> Operations:
    """The final norm, the logits, the loss in fp32. llama's trainer gathers the logits on every rank."""
    n_logits, gather = run.tokens * run.vocab, ([], [])
    if run.style == "llama" and run.tp > 1:
        gather = [Collective("all_gather", "tp", 2 * n_logits)], []
    elif run.style == "gpt":
        n_logits /= run.tp
    linear = _linear(run.tokens, run.hidden, run.vocab // run.tp)
    return _join([_norm(run, kernels), linear, _tp_sum(run), gather, _elementwise(CROSS_ENTROPY, n_logits)])


def embedding_operations(run: Run) -> Operations:
    n_elements = run.tokens * run.hidden
    forward, backward = [Elementwise(4 * n_elements)], [Elementwise(8 * n_elements)]
    if run.tp > 1:
        forward.append(Collective("all_reduce", "tp", 2 * n_elements))
    return forward, [*backward, Elementwise(6 * run.vocab * run.hidden // run.tp)]


def _total(operations: list, run: Run, cluster: Cluster) -> float:
    return sum(seconds(operation, cluster, run.layout) for operation in operations)


def stage_times(run: Run, cluster: Cluster, kernels: Kernels) -> list[StageTime]:
    """By stage: its layers, the embedding on the first, the head on the last; recomputed layers run again."""
    layer, head, embedding = (
        [_total(part, run, cluster) for part in operations]
        for operations in (layer_operations(run, kernels), head_operations(run, kernels), embedding_operations(run))
    )
    overhead, again = cluster.calibration.microbatch_s / 2, 0.0
    if run.recompute == "layer":
        again = layer[0]
    elif run.recompute == "attention":
        again = _total(_attention(run, kernels)[0], run, cluster)
    times = []
    for stage, n_layers in enumerate(balance_uniform(run.n_layers, run.pp)):
        forward, backward = overhead + n_layers * layer[0], overhead + n_layers * (layer[1] + again)
        for is_here, extra in ((stage == 0, embedding), (stage == run.pp - 1, head)):
            forward, backward = forward + is_here * extra[0], backward + is_here * extra[1]
        times.append(StageTime(forward, backward, 0.0))
    return times


def pipeline_seconds(run: Run, times: list[StageTime], send_s: float) -> float:
    """End of the 1F1B replay. In the steady state each micro-batch adds the same: many are not replayed one by one."""

    def end(n_microbatches: int) -> float:
        return replay(action_orders(schedule_of("1F1B"), run.pp, 1, n_microbatches), times, send_s).end_s

    few, some, n = 3 * run.pp, 4 * run.pp, run.n_microbatches / run.drains
    once = end(int(n)) if n <= some and n == int(n) else end(some) + (n - some) * (end(some) - end(few)) / run.pp
    return run.drains * once


def stage_parameters(run: Run, stage: int) -> float:
    """Parameters of one rank of the stage. A tied embedding counts once where both its ends are."""
    ends = (stage == 0) + (stage == run.pp - 1)
    if run.style == "gpt":
        ends = min(ends, 1)
    n_layers = balance_uniform(run.n_layers, run.pp)[stage]
    return (n_layers * run.layer_parameters + ends * run.vocab * run.hidden) / run.tp


def optimizer_seconds(run: Run, cluster: Cluster, kernels: Kernels) -> float:
    """Gradients, optimizer and parameters of the largest stage, none of it overlapped."""
    llama = run.style == "llama"
    parameters = max(stage_parameters(run, stage) for stage in range(run.pp))
    updates = [
        Elementwise(int(14 * parameters)),  # gradients: norm, scaling and a copy
        Elementwise(int(30 * parameters / (run.dp if llama else 1))),  # Adam, fp32 in and out
    ]
    size = int(2 * parameters)
    sums = [Collective("all_reduce", "dp_shard", size)]
    if llama:  # the reduction of the gradients, the gathering of the parameters
        sums.append(Collective("all_gather", "dp_shard", size))
    return _total(updates, run, cluster) + _total(sums, run, cluster) / (kernels.zero if llama else 1.0)


def step_seconds(run: Run, cluster: Cluster, kernels: Kernels) -> float:
    """One optimizer step: the pipeline, then the optimizer."""
    boundary = 2 * run.tokens * run.hidden
    if run.style == "gpt" or run.sequence_parallel:
        boundary //= run.tp  # each tensor-parallel rank sends its part (Megatron-LM's scatter-gather)
    send_s = seconds(Collective("send", "pp", boundary), cluster, run.layout)
    pipeline = pipeline_seconds(run, stage_times(run, cluster, kernels), send_s)
    after = optimizer_seconds(run, cluster, kernels) if run.drains == 1 else 0.0
    return pipeline + after + cluster.calibration.step_s


def activation_bytes(run: Run) -> tuple[float, float]:
    """Kept of one layer and micro-batch for the backward: without recomputation, and with.

    The tensors that autograd saves, counted as in arXiv 2205.05198, for llama's kernels.
    """
    h = run.hidden
    # Around the matmuls: two residual sums, what was added to them, two norms' outputs; unfused norms' fp32 steps too.
    outside = 12 * h if run.fused_norm else 26 * h
    attention = 10 * h / run.tp  # q, k, v, output, one of them twice
    mlp = 8 * run.ffn / run.tp  # gate, up, silu, product
    # Of each score: bf16, fp32 softmax, bf16 again; in a fused kernel softmax's input, output and a copy.
    scores = {"torch": 8, "fused": 6}.get(run.kernel, 0) * run.micro_batch * run.n_heads / run.tp * run.seq_len**2
    full = run.tokens * (outside / run.split_outside + attention + mlp) + scores
    return full, 2 * run.tokens * h / run.split_outside


def memory_bytes(run: Run) -> float:
    """Most that any stage's rank holds: ZeRO-1 state (bf16 weights and gradients, 12 bytes sharded over dp),
    activations in flight, and logits.

    Logits are of the whole vocabulary on every rank: bf16, and in fp32 themselves, their softmax, its product with
    the targets and the gradient; where gathered from tensor-parallel ranks, also the parts and their concatenation.
    """
    full, kept = activation_bytes(run)
    logits = run.tokens * run.vocab * (2 + 4 + 4 + 4 + 4 + (10 if run.tp > 1 else 0))
    worst = 0.0
    for stage, n_layers in enumerate(balance_uniform(run.n_layers, run.pp)):
        in_flight = n_layers * min(run.n_microbatches, run.pp - stage)
        activations = in_flight * kept + full if run.recompute == "layer" else in_flight * full
        state = stage_parameters(run, stage) * (2 + 2 + 12 / run.dp)
        worst = max(worst, state + activations + (logits if stage == run.pp - 1 else 0))
    return worst
