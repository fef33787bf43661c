"""This rank's share of a model, with every parameter under its name in the whole."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallelize.mesh import Mesh
from parallelize.partial_gradients import sum_partial_gradients
from parallelize.plan import Plan
from parallelize.recompute import named_parameters
from parallelize.tied import TiedWeight


@dataclass(frozen=True)
class LocalModel:
    """Stages' modules and their parameters.

    parts:  the modules, in the order of ``stage_indices``.
    named:  their parameters by name in the whole model, each of the model's once.
    copies: second holders of a tied weight (the last stage's of the first's), by the name of the original.
    tied:   the same as what keeps them equal; empty without a pipeline, where both names are one parameter.
    """

    parts: tuple[nn.Module, ...]
    stage_indices: tuple[int, ...]
    named: dict[str, nn.Parameter]
    copies: dict[str, nn.Parameter]
    tied: tuple[TiedWeight, ...]

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Those of ``named`` that are not frozen."""
        return {name: parameter for name, parameter in self.named.items() if parameter.requires_grad}

    @property
    def trained_copies(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.copies.items() if parameter.requires_grad}

    def more_to_come(self, coming: bool) -> None:
        """Say before a micro-batch whether the step has another: till the last, FSDP2 leaves parameters and gradients whole.

        Not for a model that reshards after its forward.
        """
        for part in self.parts:
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(not coming)
                part.set_reshard_after_backward(not coming)

    def complete_gradients(self) -> None:
        """After a step's last backward: add what other ranks hold of a gradient that FSDP2 has not summed."""
        sum_partial_gradients([*self.named.values(), *self.copies.values()])
        for weight in self.tied:
            if weight.holders[0].requires_grad:
                weight.sum_gradients()

    def free_gathered(self) -> None:
        """Free the parameters that a forward without a backward has left gathered."""
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def original_names(plan: Plan) -> dict[str, str]:
    """Name of a tied weight's second holder -> name of the weight."""
    return {f"{copy}.weight": f"{original}.weight" for original, copy in plan.tied}


def collect(
    parts: Sequence[nn.Module], stage_indices: tuple[int, ...], plan: Plan, mesh: Mesh, ends: tuple[int, int]
) -> LocalModel:
    """Name the parameters of this rank's parts. ``ends``: the pipeline ranks of the first and of the last stage."""
    originals = original_names(plan)
    named: dict[str, nn.Parameter] = {}
    copies: dict[str, nn.Parameter] = {}
    for part in parts:
        for name, parameter in named_parameters(part):
            place, name = (copies, originals[name]) if name in originals else (named, name)
            assert name not in place, f"two parts of this rank hold {name}"
            place[name] = parameter
    tied = []
    if mesh.layout.pp > 1:
        for name in originals.values():
            holders = [held[name] for held in (named, copies) if name in held]
            if holders:
                tied.append(TiedWeight.of(holders, mesh.axis("pp"), ends))
    return LocalModel(tuple(parts), stage_indices, named, copies, tuple(tied))
