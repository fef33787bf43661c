"""``sample``: continue a prompt greedily. A quick look at a model on one device, with no ambition to serve one."""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist

from parallelize.grad_norm import local_tensor
from parallelize.mesh import Mesh
from trainer.build import build_model
from trainer.checkpoint import damage_in, read_state, read_tensors
from trainer.config import Config
from trainer.config_load import Override, load_config
from trainer.config_rules import Resolved, resolve_config
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import UserError
from trainer.rank import run_rank


def main(options: argparse.Namespace) -> int:
    if (options.checkpoint is None) == (options.hf is None):
        raise UserError("sample needs one of --checkpoint STEP_DIR and --hf DIR")
    if options.tokens < 1:
        raise UserError(f"--tokens {options.tokens}: at least 1 is needed")
    config = _config_of(options)
    resolve_config(config, 1)
    tokenizer = load_tokenizer(config.data.tokenizer)
    prompt = tokenizer.encode_prompt(options.prompt)
    if not prompt:
        raise UserError("--prompt is empty: give at least one token to continue")
    n_positions = len(prompt) + options.tokens
    config = config.model_copy(
        update={"training": config.training.model_copy(update={"seq_len": n_positions, "global_batch_size": 1, "micro_batch_size": 1})}
    )  # fmt: skip
    resolved = resolve_config(config, 1)

    def work(device: torch.device) -> int:
        print(tokenizer.decode(_continue(resolved, device, prompt, options.tokens, tokenizer.eos_id)))
        return 0

    return run_rank(work)


def _config_of(options: argparse.Namespace) -> Config:
    """The run that a checkpoint is of, or the model of a directory, without any parallelism."""
    if options.hf is not None:
        return load_config(None, [Override("model.hf_path", json.dumps(options.hf))])
    saved = Config.model_validate_json(json.dumps(read_state(Path(options.checkpoint))["config"]))
    plain = load_config(None)
    checkpoint = plain.checkpoint.model_copy(update={"init_from": options.checkpoint})
    # The architecture is spelled out in what was saved; the directory that it came from may be gone.
    model = saved.model.model_copy(update={"hf_path": None})
    return plain.model_copy(update={"model": model, "data": saved.data, "checkpoint": checkpoint})


def _continue(resolved: Resolved, device: torch.device, prompt: list[int], n_tokens: int, eos_id: int) -> list[int]:
    assert dist.get_world_size() == 1
    init_from = resolved.config.checkpoint.init_from
    mesh = Mesh(resolved.layout, device.type)
    model = build_model(resolved, mesh, device, initialise=init_from is None)
    if init_from is not None:
        if damage := damage_in(Path(init_from)):
            raise UserError(*damage)
        read_tensors(Path(init_from), {f"model.{name}": local_tensor(p.detach()) for name, p in model.named.items()})
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + n_tokens:
            logits = model.parts[0](torch.tensor([ids], device=device))
            ids.append(int(logits[0, -1].argmax()))
            if ids[-1] == eos_id:
                break
    return ids
