"""One rank of the real job, built and run without memory or peers: what it would keep and send."""

from collections import Counter
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor, Shard

from parallelize.layout import Layout
from parallelize.mesh import Mesh
from parallelize.planner.fake import fake_memory, fake_rank, gpu_kernels, without_peers
from parallelize.planner.recorder import Recorder
from trainer.build import build_model, build_train_step, defers_projection
from trainer.config_rules import Resolved
from trainer.loss import torchs_cross_entropy
from trainer.optimizer import create_state

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TracedRank:
    """Bytes on one rank, as counted by storage.

    parameters_bytes, gradients_bytes, optimizer_bytes: its shards, gradients as they are at the end of a step.
    peak_bytes: most of a whole step. collectives, collective_bytes: (axis, kind) -> how often in a step, and of how
    many bytes in all, as ``Collective`` counts them.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    collectives: dict[tuple[str, str], int]
    collective_bytes: dict[tuple[str, str], int]


# What issues each of them is one thing alone: DTensor over tp, FSDP2 over data ranks, the schedule over pp.
_COLLECTIVES = {
    "_c10d_functional::all_gather_into_tensor": ("tp", "all_gather"),
    "_c10d_functional::reduce_scatter_tensor": ("tp", "reduce_scatter"),
    "_c10d_functional::all_reduce": ("tp", "all_reduce"),
    "c10d::_allgather_base_": ("dp_shard", "all_gather"),
    "c10d::_reduce_scatter_base_": ("dp_shard", "reduce_scatter"),
    "c10d::allreduce_": ("dp_replicate", "all_reduce"),
    "c10d::send": ("pp", "send"),
}
_SCALARS = 64  # elements: smaller sums are of the loss and the like, over all ranks


class _CollectiveCount:
    """Callback of a ``Recorder``."""

    def __init__(self, layout: Layout):
        self.layout = layout
        self.counts: Counter = Counter()
        self.bytes: Counter = Counter()

    def __call__(self, function, args, result) -> None:
        key = _COLLECTIVES.get(function.name().split(".")[0])
        if key is None or getattr(self.layout, key[0]) == 1:
            return
        tensors = [tensor for tensor in pytree.tree_leaves((args, result)) if isinstance(tensor, torch.Tensor)]
        whole = max(tensors, key=torch.Tensor.numel)
        if whole.numel() > _SCALARS:
            self.counts[key] += 1
            self.bytes[key] += whole.numel() * whole.element_size()


def trace_rank(resolved: Resolved, pp_rank: int = 0) -> TracedRank:
    """Run one step of pipeline rank ``pp_rank`` (first of its tensor and data ranks) on fake tensors."""
    layout, training = resolved.layout, resolved.config.training
    with fake_rank(layout.world_size, pp_rank * layout.stage_ranks) as mode, gpu_kernels():
        mesh = Mesh(layout, "cpu")
        model = build_model(resolved, mesh, _CPU, initialise=False, allocate=lambda part, _: fake_memory(part, mode))
        with mode:
            step = build_train_step(resolved, model, mesh, _CPU, **_pipeline_options(resolved, mesh))
        step.loss_fn.summed = torchs_cross_entropy
        if layout.pp > 1:
            without_peers(step.micro_batches.schedule)
        collectives = _CollectiveCount(layout)
        recorder = Recorder(collectives)
        parts = list(model.parts)
        recorder.track([list(part.parameters()) for part in parts])
        parameters = recorder.live_bytes
        recorder.track([list(part.buffers()) for part in parts])
        before = recorder.live_bytes
        with mode, recorder:
            create_state(step.optimizer)
            optimizer = recorder.live_bytes - before
            n_sequences = resolved.n_microbatches * training.micro_batch_size
            tokens, labels = (torch.zeros(n_sequences, training.seq_len, dtype=torch.int64) for _ in range(2))
            recorder.restart_peak()
            collectives.counts.clear()
            collectives.bytes.clear()
            step.forward_backward(tokens, labels)
            step.optimizer.step()
            gradients = sum(
                _storage_bytes(parameter.grad)
                for part in parts
                for parameter in part.parameters()
                if parameter.grad is not None
            )
        return TracedRank(
            parameters, gradients, optimizer, recorder.peak_bytes, dict(collectives.counts), dict(collectives.bytes)
        )


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def _pipeline_options(resolved: Resolved, mesh: Mesh) -> dict:
    config, layout = resolved.config, resolved.layout
    if layout.pp == 1:
        return {}
    n_stages = len(resolved.layers_per_stage)
    batch, length = config.training.micro_batch_size, config.training.seq_len
    compute = getattr(torch, config.precision.compute)
    stream = length // layout.tp if config.parallel.sequence_parallel else length

    def hidden() -> torch.Tensor:
        return torch.empty(batch, stream, resolved.architecture.dim, dtype=compute, requires_grad=True)

    def shapes_of(stage: int) -> dict:
        takes = torch.empty(batch, length, dtype=torch.int64) if stage == 0 else hidden()
        if stage < n_stages - 1:
            return {"input_args": (takes,), "output_args": (hidden(),)}
        vocab = resolved.architecture.vocab_size
        if defers_projection(config):
            whole = torch.empty(batch, length, resolved.architecture.dim, dtype=compute, requires_grad=True)
            weight = torch.empty(-(-vocab // layout.tp), resolved.architecture.dim, dtype=compute, requires_grad=True)
            return {"input_args": (takes,), "output_args": (whole, weight)}
        if layout.tp == 1 or not config.parallel.loss_parallel:
            logits = torch.empty(batch, length, vocab, dtype=compute, requires_grad=True)
            return {"input_args": (takes,), "output_args": (logits,)}
        local = torch.empty(batch, length, vocab // layout.tp, dtype=compute)
        logits = DTensor.from_local(local, mesh.axis("tp"), [Shard(2)], run_check=False)
        return {"input_args": (takes,), "output_args": (logits.requires_grad_(),), "output_grads": (logits.detach(),)}

    return {"shapes_of": shapes_of}
