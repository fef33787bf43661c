"""Each feature does something: parity alone cannot tell a feature that is silently off."""

from collections import Counter

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from parallelize.grad_norm import local_tensor
from tests.dist.parity import CPU
from tests.dist.pool import mesh_of
from tests.tiny import make_batch, tiny_config
from trainer.build import build_model, build_train_step
from trainer.config_rules import resolve_config


class CountOps(TorchDispatchMode):
    """How often each operation ran, by the name before its overload."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name().split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def built(config, world_size):
    resolved = resolve_config(config, world_size)
    mesh = mesh_of(resolved.layout)
    model = build_model(resolved, mesh, CPU)
    return resolved, mesh, model, build_train_step(resolved, model, mesh, CPU)


def ops_of_one_step(config) -> tuple[int, int]:
    _, _, _, step = built(config, 1)
    with CountOps() as count:
        step.forward_backward(*make_batch(config, 1))
    counts = count.counts
    return counts["aten::mm"] + counts["aten::addmm"], counts["aten::_scaled_dot_product_flash_attention_for_cpu"]


def test_recompute_computes_again(ranks):
    """4 layers of 7 matmuls, and the output: full repeats all of a layer, selective every second matmul."""
    ops = {
        mode: ranks(1, ops_of_one_step, tiny_config(activation_checkpoint__mode=mode, training__micro_batch_size=8))[0]
        for mode in ("none", "selective", "full")
    }
    matmuls, attentions = zip(*ops.values())
    assert matmuls[0] == 3 * (4 * 7 + 1)
    # The last matmul of a block is not repeated: nothing in the backward needs its result.
    assert 4 * 2 <= matmuls[1] - matmuls[0] <= 4 * 4
    assert 4 * 6 <= matmuls[2] - matmuls[0] <= 4 * 7
    assert attentions == (4, 4, 8)


def test_every_second_block_is_recomputed(ranks):
    """Blocks 0 and 2 of 4."""
    half = tiny_config(activation_checkpoint__mode="full", activation_checkpoint__every=2, training__micro_batch_size=8)
    matmuls, attentions = ranks(1, ops_of_one_step, half)[0]
    assert (2 * 6 <= matmuls - 3 * (4 * 7 + 1) <= 2 * 7, attentions) == (True, 6)


def bytes_saved(config) -> int:
    """Most that autograd keeps at once of a compiled step's forward."""
    _, _, model, step = built(config, 1)
    tokens, labels = make_batch(config, 1)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.nbytes) or tensor, lambda tensor: tensor):
        step.loss_fn.n_tokens = torch.tensor(1)
        step.micro_batches.forward(tokens[:8], labels[:8])
    return sum(saved)


def test_the_compiler_keeps_within_its_memory_budget(ranks):
    keys = dict(compile__enabled=True, training__micro_batch_size=8, model__n_layers=1)
    all_, none = (
        ranks(1, bytes_saved, tiny_config(compile__memory_budget=budget, **keys), timeout_s=300)[0] for budget in (1.0, 0.0)
    )
    assert none < 0.7 * all_, (none, all_)


def losses_of_steps(config, world_size, n_steps) -> list[float]:
    resolved, mesh, _, step = built(config, world_size)
    losses = []
    for seed in range(n_steps):
        tokens, labels = make_batch(config, seed)
        per_rank = len(tokens) // resolved.layout.dp
        mine = slice(mesh.dp_index * per_rank, (mesh.dp_index + 1) * per_rank)
        losses.append(step(tokens[mine], labels[mine]).loss.item())
    dtypes = {state["exp_avg_sq"].dtype for state in step.optimizer.state.values()}
    return [losses, dtypes]


def test_moments_in_half_the_memory_train_the_same_at_any_layout(ranks):
    """Within what the rounding of single moments may turn over; and nearly as moments in fp32 do."""
    small = tiny_config(precision__moments="bfloat16", optimizer__lr=0.01)
    one, dtypes = ranks(1, losses_of_steps, small, 1, 4)[0]
    assert dtypes == {torch.bfloat16}
    split = small.model_copy(update={"parallel": small.parallel.model_copy(update={"tp": 2})})
    for losses, _ in ranks(4, losses_of_steps, split, 4, 4):
        assert losses == pytest.approx(one, rel=2e-5)
    exact, dtypes = ranks(1, losses_of_steps, tiny_config(optimizer__lr=0.01), 1, 4)[0]
    assert dtypes == {torch.float32}
    assert exact == pytest.approx(one, rel=1e-2) and exact != one


def schedule_name(config, world_size) -> str:
    _, _, _, step = built(config, world_size)
    return type(step.micro_batches.schedule).__name__


@pytest.mark.parametrize(
    "schedule", ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_the_schedule_is_the_one_asked_for(ranks, schedule):
    config = tiny_config(parallel__pp=2, parallel__schedule=schedule)
    assert ranks(2, schedule_name, config, 2) == [f"Schedule{schedule}"] * 2


def logits_placement(config, world_size) -> str:
    _, _, model, step = built(config, world_size)
    seen = []
    model.parts[0].output.register_forward_hook(lambda module, inputs, output: seen.append(output))
    step.forward_backward(*make_batch(config, 1))
    return "sharded" if isinstance(seen[0], DTensor) and seen[0].placements == (Shard(2),) else "whole"


@pytest.mark.parametrize("loss_parallel, expected", [(True, "sharded"), (False, "whole")])
def test_loss_parallel_keeps_logits_sharded(ranks, loss_parallel, expected):
    config = tiny_config(parallel__tp=2, parallel__loss_parallel=loss_parallel)
    assert ranks(2, logits_placement, config, 2) == [expected] * 2


def gathered_after_forward(config, world_size) -> bool:
    _, _, model, _ = built(config, world_size)
    tokens, _ = make_batch(config, 1)
    model.parts[0](tokens)
    weight = next(model.parts[0].layers["0"].parameters())
    return not isinstance(weight, DTensor)


@pytest.mark.parametrize("reshard, gathered", [("always", False), ("never", True), ("auto", False)])
def test_parameters_are_freed_after_the_forward(ranks, reshard, gathered):
    config = tiny_config(parallel__reshard_after_forward=reshard)
    assert ranks(2, gathered_after_forward, config, 2) == [gathered] * 2


def reductions_of_a_step(config, world_size) -> list[int]:
    """Gathers and reductions of parameters in one step of 2 micro-batches on each rank, per unit."""
    _, _, model, step = built(config, world_size)
    units = 2 + config.model.n_layers
    with CountOps() as seen:
        step.forward_backward(*(part[:4] for part in make_batch(config, 1)))
    return [seen.counts[kind] / units for kind in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")]


@pytest.mark.parametrize("reshard, gathers, reductions", [("always", 3.67, 2), ("never", 1, 1)])
def test_kept_whole_parameters_and_gradients_move_once_a_step(ranks, reshard, gathers, reductions):
    config = tiny_config(parallel__reshard_after_forward=reshard)
    for seen in ranks(2, reductions_of_a_step, config, 2):
        assert seen == pytest.approx([gathers, reductions], abs=0.01)


def residual_length(config, world_size) -> int:
    _, _, model, step = built(config, world_size)
    seen = []
    model.parts[0].layers["1"].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[1]))
    step.forward_backward(*make_batch(config, 1))
    return seen[0]


@pytest.mark.parametrize("sequence_parallel, length", [(True, 16), (False, 32)])
def test_sequence_parallel_shards_the_residual_stream(ranks, sequence_parallel, length):
    config = tiny_config(parallel__tp=2, parallel__sequence_parallel=sequence_parallel)
    assert ranks(2, residual_length, config, 2) == [length] * 2


def shard_sizes(config, world_size) -> list[float]:
    _, _, model, _ = built(config, world_size)
    return [local_tensor(p).numel() / p.numel() for name, p in model.named.items() if name.endswith("wq.weight")]


@pytest.mark.parametrize(
    "overrides, share",
    [({}, 1 / 4), (dict(parallel__tp=2), 1 / 4), (dict(parallel__dp_replicate=2), 1 / 2), (dict(parallel__pp=4), 1)],
)
def test_each_rank_holds_only_its_share(ranks, overrides, share):
    for sizes in ranks(4, shard_sizes, tiny_config(**overrides), 4):
        assert sizes and set(sizes) == {share}


def compiled_graphs(config, world_size) -> int:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    _, _, _, step = built(config, world_size)
    step.forward_backward(*make_batch(config, 1))
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_compile_compiles_the_blocks_once(ranks):
    """Four equal layers share one graph."""
    config = tiny_config(compile__enabled=True, compile__backend="aot_eager")
    assert ranks(1, compiled_graphs, config, 1) == [1]
    assert ranks(1, compiled_graphs, tiny_config(), 1) == [0]
