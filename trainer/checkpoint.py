"""The state of a run, saved and loaded at any layout.

A folder ``checkpoints/step-00000100`` holds model and optimizer by parameter name, the RNG state of each
rank, and ``trainer_state.json`` with sizes and checksums of the other files. It is written under a temporary
name and renamed last.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from models.names import is_adapter
from parallelize.local_model import LocalModel
from trainer.checkpoint_files import damage_in, read_tensors, stored_tensors
from trainer.checkpoint_folder import checkpoint_root, holds_adapters, read_state
from trainer.checkpoint_writer import CheckpointWriter
from trainer.config import Config
from trainer.data.tokenizer import digest_of
from trainer.errors import UserError
from trainer.optimizer import create_state, optimizer_tensors
from trainer.rank import on_main_rank
from trainer.tuning import is_lora


class Checkpointer:
    """Saves and loads the whole state of a run. Every method is called by all ranks together."""

    def __init__(
        self,
        config: Config,
        model: LocalModel,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        data: dict[str, int] | None = None,
    ):
        """``data``: ``Samples.identity`` of the training data, for a run that will be saved."""
        self.writer = CheckpointWriter(checkpoint_root(config), config.checkpoint)
        # In the background a copy is written, while the run changes the state itself.
        pinned = device.type == "cuda"
        self.stager = BlockingAsyncStager(cache_staged_state_dict=pinned) if config.checkpoint.async_save else None
        self.config = json.loads(config.model_dump_json())
        self.tokenizer = digest_of(config.data.tokenizer)  # now: its file may be gone when a save must not fail
        self.data = data
        self.origin: dict = {}  # what the Hugging Face directory of the weights said, for an export one day
        # A tied weight is one tensor in the file. The last stage writes and reads it as well as the first;
        # where one rank holds both, the first is saved and the copy follows it.
        self.named = model.copies | model.named
        self.followers = {name: parameter for name, parameter in model.copies.items() if name in model.named}
        self.trained = model.trained_copies | model.trained
        self.saved = self.trained if is_lora(config) else self.named  # adapters alone
        self.base: dict | None = None  # what they stand beside
        self.optimizer = optimizer
        self.device = device

    def save(self, step: int, validation_loss: float | None, nonfinite: dict[str, int]) -> None:
        """Write the state after ``step``, or start writing it. Raises ``SaveFailed``.

        ``validation_loss``: of this step, if it was measured; ``nonfinite``: ``NonFiniteGuard.state``.
        """
        tensors = self._tensors()
        if self.stager is not None:
            self.writer.wait()  # the copy of the one before may still be needed
            tensors = self.stager.stage(tensors)
        self.writer.write(step, tensors, {
            "step": step,
            **nonfinite,
            "validation_loss": validation_loss,
            "data": self.data,
            "samples_seen": step * self.config["training"]["global_batch_size"],
            "world_size": dist.get_world_size(),
            "config": self.config,
            "tokenizer": self.tokenizer,
            "origin": self.origin,
            "base": self.base,
            "torch": torch.__version__,
        })  # fmt: skip

    def load(self, folder: Path) -> dict:
        """Read the state in place, at whatever layout it was written. Returns its ``trainer_state.json``.

        Raises ``UserError`` listing every parameter that is missing, left over, or of another shape or dtype.
        """
        create_state(self.optimizer)
        tensors = self._tensors()
        state = read_state(folder)
        self.origin = state["origin"]
        stored = on_main_rank(stored_tensors, folder)
        generators = {name for name in tensors if name.startswith("rng.")}
        self._check_keys(folder, {name: t for name, t in tensors.items() if name not in generators}, stored)
        if not generators <= stored.keys():  # more ranks than before: the new ones keep their own state
            tensors = {name: tensor for name, tensor in tensors.items() if name not in generators}
            generators = set()
        read_tensors(folder, tensors, alone=False)
        for name in generators:
            _set_rng_state(name, tensors[name])
        self._copy_to_followers(self.saved)
        return state

    def load_weights(self, folder: Path) -> None:
        """Read the weights alone, converting their dtype: how a new run starts from a checkpoint of another.

        Of a checkpoint of adapters these, of another all else. Raises ``UserError``.
        """
        if damage := damage_in(folder):
            raise UserError(*damage)
        state = read_state(folder)
        self.origin, adapts = state["origin"], holds_adapters(state)
        others = {name: parameter for name, parameter in self.named.items() if not is_adapter(name)}
        named = self.saved if adapts else others
        tensors = self._weights(named)
        stored = on_main_rank(stored_tensors, folder)
        self._check_keys(folder, tensors, {n: t for n, t in stored.items() if n.startswith("model.")}, any_dtype=True)
        read_tensors(folder, tensors, alone=False)
        self._copy_to_followers(named)

    def _copy_to_followers(self, named: dict[str, nn.Parameter]) -> None:
        for name, parameter in self.followers.items():
            if name in named:
                _copy_parameter(named[name], parameter, self.optimizer)

    @staticmethod
    def _weights(named: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        return {f"model.{name}": parameter.detach() for name, parameter in named.items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = self._weights(self.saved)
        state = optimizer_tensors(self.optimizer, self.trained)
        tensors |= {f"optimizer.{name}": tensor for name, tensor in state.items()}
        rank = dist.get_rank()
        tensors[f"rng.cpu.{rank}"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state()
        return tensors

    @staticmethod
    def _check_keys(folder: Path, expected: dict[str, torch.Tensor], stored: dict, any_dtype: bool = False) -> None:
        # DCP itself ignores what is left over in the file and converts dtypes in silence. One rank knows
        # only its own stages, so what is left over is judged on the union over ranks.
        problems = []
        for name, tensor in expected.items():
            if name not in stored:
                problems.append(f"{folder}: {name} is missing")
            elif tuple(stored[name].size) != tuple(tensor.shape):
                problems.append(
                    f"{folder}: {name} has shape {tuple(stored[name].size)}, the model {tuple(tensor.shape)}"
                )
            elif not any_dtype and stored[name].properties.dtype != tensor.dtype:
                problems.append(f"{folder}: {name} is {stored[name].properties.dtype}, the model's {tensor.dtype}")
        known: list = [None] * dist.get_world_size()
        dist.all_gather_object(known, (sorted(expected), problems))
        everything = set().union(*(names for names, _ in known))
        left_over = [name for name in stored if not name.startswith("rng.") and name not in everything]
        problems = sorted({problem for _, found in known for problem in found})
        problems += [f"{folder}: {name} has no place in the model" for name in left_over]
        if problems:
            shown = problems[:20] + ([f"... and {len(problems) - 20} more"] if len(problems) > 20 else [])
            raise UserError(*shown)


@torch.no_grad()
def _copy_parameter(source: nn.Parameter, target: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    target.copy_(source)
    for kind, tensor in optimizer.state.get(source, {}).items():
        optimizer.state[target][kind].copy_(tensor)


def _set_rng_state(name: str, state: torch.Tensor) -> None:
    torch.cuda.set_rng_state(state) if name.startswith("rng.cuda.") else torch.set_rng_state(state)
