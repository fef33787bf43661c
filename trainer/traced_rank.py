"""One rank of the real job, built and run without memory or peers: what it would keep and send."""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard

from parallelize.mesh import Mesh
from parallelize.planner.fake import fake_memory, fake_rank, gpu_kernels, without_peers
from parallelize.planner.recorder import Recorder
from trainer.build import build_model, build_train_step
from trainer.config_rules import Resolved
from trainer.loss import torchs_cross_entropy
from trainer.optimizer import create_state

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TracedRank:
    """Bytes on one rank, as counted by storage.

    parameters_bytes: with buffers. gradients_bytes, optimizer_bytes: between steps' ends. peak_bytes: of a whole step.
    collectives: name -> (calls, bytes of their results) in one step.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    operations: dict[str, int]


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
        recorder = Recorder()
        for part in model.parts:
            recorder.track([*part.parameters(), *part.buffers()])
        parameters = recorder.live_bytes
        with mode, recorder:
            create_state(step.optimizer)
            optimizer = recorder.live_bytes - parameters
            n_sequences = resolved.n_microbatches * training.micro_batch_size
            tokens, labels = (torch.zeros(n_sequences, training.seq_len, dtype=torch.int64) for _ in range(2))
            recorder.restart_peak()
            recorder.operations.clear()
            before = recorder.live_bytes
            step.forward_backward(tokens, labels)
            gradients = recorder.live_bytes - before
            step.optimizer.step()
        return TracedRank(parameters, gradients, optimizer, recorder.peak_bytes, dict(recorder.operations))


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
        if layout.tp == 1 or not config.parallel.loss_parallel:
            logits = torch.empty(batch, length, vocab, dtype=compute, requires_grad=True)
            return {"input_args": (takes,), "output_args": (logits,)}
        local = torch.empty(batch, length, vocab // layout.tp, dtype=compute)
        logits = DTensor.from_local(local, mesh.axis("tp"), [Shard(2)], run_check=False)
        return {"input_args": (takes,), "output_args": (logits.requires_grad_(),), "output_grads": (logits.detach(),)}

    return {"shapes_of": shapes_of}
