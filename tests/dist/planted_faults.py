"""Faults of the kinds that users of other trainers reported, planted into a worker while it observes a run."""

import contextlib
from unittest.mock import patch

import torch
import torch.distributed as dist

from models.decoder import Decoder
from parallelize.mesh import Mesh
from parallelize.tied import TiedWeight
from tests.dist.parity import CPU, numpy_tensors
from tests.dist.pool import mesh_of
from trainer import build, step
from trainer.config_rules import resolve_config
from trainer.data import loader
from trainer.loss import TokenLoss, count_valid
from trainer.observe import observe
from trainer.verify_command import batches_for


def observe_with(config, world_size: int, n_steps: int, fault: str | None):
    """Runs on each rank: ``verify``'s own observation, with a fault in it."""
    resolved = resolve_config(config, world_size)
    mesh = mesh_of(resolved.layout)
    with FAULTS[fault](resolved, mesh) if fault else contextlib.nullcontext():
        return numpy_tensors(observe(resolved, mesh, CPU, batches_for(resolved, mesh, n_steps)))


def without_style(pattern: str):
    def plant(resolved, mesh: Mesh):
        original = build.decoder_plan

        def decoder_plan(**flags):
            plan = original(**flags)
            del plan.tensor_parallel[pattern]
            return plan

        return patch.object(build, "decoder_plan", decoder_plan)

    return plant


def mean_per_micro_batch(resolved, mesh: Mesh):
    n = resolved.n_microbatches * resolved.layout.dp
    original = TokenLoss.__call__

    def call(self, logits, labels):
        self.n_tokens = count_valid(labels) * n
        return original(self, logits, labels)

    return patch.object(TokenLoss, "__call__", call)


def layers_counted_from_the_stage(resolved, mesh: Mesh):
    per_stage, original = resolved.layers_per_stage[0], build.draw_slice

    def draw_slice(seed, name, *arguments):
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            name = f"layers.{int(layer) % per_stage}.{rest}"
        return original(seed, name, *arguments)

    return patch.object(build, "draw_slice", draw_slice)


def scaled_by_world_size(resolved, mesh: Mesh):
    original = TokenLoss.__call__
    return patch.object(
        TokenLoss, "__call__", lambda self, logits, labels: original(self, logits, labels) * dist.get_world_size()
    )


def clipped_per_stage(resolved, mesh: Mesh):
    original = step.clip_by_norm

    def clip_by_norm(gradients, norm, max_norm):
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, (mesh.index("pp"), step.squared_norm_share(gradients, resolved.layout).item()))
        own = sum(share for stage, share in shares if stage == mesh.index("pp"))
        original(gradients, torch.tensor(own).sqrt(), max_norm)

    return patch.object(step, "clip_by_norm", clip_by_norm)


def tied_weights_untied(resolved, mesh: Mesh):
    return patch.object(TiedWeight, "sum_gradients", lambda self: None)


def data_rank_shifted(resolved, mesh: Mesh):
    original = loader.StepSampler.__init__

    def init(self, global_batch_size, dp_index, dp, first_step):
        original(self, global_batch_size, max(0, dp_index - 1), dp, first_step)

    return patch.object(loader.StepSampler, "__init__", init)


def averaged_by_fsdp(resolved, mesh: Mesh):
    from torch.distributed.fsdp import FSDPModule

    return patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)


def borders_only_on_the_first_stage(resolved, mesh: Mesh):
    original = Decoder.forward

    def forward(self, hidden, positions=None):
        return original(self, hidden, positions if mesh.index("pp") == 0 else None)

    return patch.object(Decoder, "forward", forward)


FAULTS = {
    "norm gradient not summed over tp": without_style("layers.*.attention_norm"),
    "plan pattern removed": without_style("layers.*.feed_forward.w2"),
    "mean per micro-batch": mean_per_micro_batch,
    "layers counted from the stage": layers_counted_from_the_stage,
    "scaled by world size": scaled_by_world_size,
    "clipped per stage": clipped_per_stage,
    "tied weights untied": tied_weights_untied,
    "data rank shifted": data_rank_shifted,
    "averaged by FSDP": averaged_by_fsdp,
    "borders only on the first stage": borders_only_on_the_first_stage,
}
