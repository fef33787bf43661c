"""``sample``: continue a prompt greedily. A quick look at a model on one device, with no ambition to serve one."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

from models.names import is_adapter
from parallelize.grad_norm import local_tensor
from parallelize.mesh import Mesh
from trainer.adapters import weights_of, with_weights_of
from trainer.build import build_model
from trainer.checkpoint_files import damage_in, read_tensors
from trainer.checkpoint_folder import holds_adapters, read_state
from trainer.config import Config
from trainer.config_load import load_config
from trainer.config_rules import Resolved, resolve_config
from trainer.data.chat_template import ChatTemplate, find_template
from trainer.data.tokenizer import Tokenizer, load_tokenizer_for
from trainer.errors import UserError
from trainer.hf_import import config_of_directory
from trainer.rank import run_rank
from trainer.tuning import is_lora


def main(options: argparse.Namespace) -> int:
    if (options.checkpoint is None) == (options.hf is None):
        raise UserError("sample needs one of --checkpoint STEP_DIR and --hf DIR")
    if options.tokens < 1:
        raise UserError(f"--tokens {options.tokens}: at least 1 is needed")
    config = _config_of(options)
    architecture = resolve_config(config, 1).architecture
    tokenizer = load_tokenizer_for(config.data.tokenizer, architecture.vocab_size)
    if options.system is not None and not options.chat:
        raise UserError("--system needs --chat")
    try:
        prompt = _asked(options, config, tokenizer) if options.chat else tokenizer.encode_prompt(options.prompt)
    except (UnicodeEncodeError, TypeError):
        raise UserError("--prompt is not valid UTF-8") from None
    if not prompt:
        raise UserError("--prompt is empty: give at least one token to continue")
    sizes = {"seq_len": len(prompt) + options.tokens, "global_batch_size": 1, "micro_batch_size": 1}
    config = config.model_copy(update={"training": config.training.model_copy(update=sizes)})
    resolved = resolve_config(config, 1)

    def work(device: torch.device, _) -> int:
        ids = _continue(resolved, device, prompt, options.tokens, tokenizer.eos_id)
        print(tokenizer.decode(ids[len(prompt) :] if options.chat else ids))
        return 0

    return run_rank(work)


def _asked(options: argparse.Namespace, config: Config, tokenizer: Tokenizer) -> list[int]:
    """Ids of a user's message, and of the header with which the assistant is asked to speak."""
    messages = [{"role": "user", "content": options.prompt}]
    if options.system is not None:
        messages.insert(0, {"role": "system", "content": options.system})
    template = ChatTemplate(find_template(config.data.tokenizer, config.data.chat_template), tokenizer)
    try:
        return template.encode_question(messages)
    except ValueError as error:
        raise UserError(str(error)) from None


def _config_of(options: argparse.Namespace) -> Config:
    """The model of a directory or of a checkpoint, with its tokenizer, and without any parallelism."""
    if options.hf is not None:
        return config_of_directory(options.hf, options.tokenizer)
    saved = read_state(Path(options.checkpoint))["config"]["data"]
    config = load_config(None)
    data = config.data.model_copy(
        update={"tokenizer": options.tokenizer or saved["tokenizer"], "chat_template": saved.get("chat_template")}
    )
    return with_weights_of(config.model_copy(update={"data": data}), options.checkpoint)


def _continue(resolved: Resolved, device: torch.device, prompt: list[int], n_tokens: int, eos_id: int) -> list[int]:
    assert dist.get_world_size() == 1
    config, mesh = resolved.config, Mesh(resolved.layout, device.type)
    model = build_model(resolved, mesh, device, initialise=config.checkpoint.init_from is None or is_lora(config))
    for folder in weights_of(config):
        if damage := damage_in(folder):
            raise UserError(*damage)
        others = {name: p for name, p in model.named.items() if not is_adapter(name)}
        named = model.trained if holds_adapters(read_state(folder)) else others
        read_tensors(folder, {f"model.{name}": local_tensor(p.detach()) for name, p in named.items()})
    model.parts[0].output.defers = False  # logits are what is wanted here
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + n_tokens:
            logits = model.parts[0](torch.tensor([ids], device=device))
            ids.append(int(logits[0, -1].argmax()))
            if ids[-1] == eos_id:
                break
    return ids
