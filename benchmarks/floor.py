"""The trainer against a loop written by hand: the same model, data, optimizer and loss, and nothing else.

    python benchmarks/floor.py [--steps 40] [--rounds 3] [--compile]

One process, the debug model as shipped. ``plain_loop`` is what one would write in an afternoon: scaled dot-product
attention, fused AdamW, cross-entropy, no logs. Fresh processes take turns, and both begin with the same weights: that
the losses agree shows that they do the same work. Prints tokens per second of each, and the ratio round by round.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

_SKIPPED = 5  # first steps, which do not count


class PlainBlock(nn.Module):
    """A Llama block as short as it can be written; names as in our checkpoints, so that weights can be copied."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, ffn_dim: int, eps: float):
        super().__init__()
        self.head_dim = dim // n_heads
        kv_dim = n_kv_heads * self.head_dim
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps), nn.RMSNorm(dim, eps)
        self.wq, self.wk, self.wv = (nn.Linear(dim, out, bias=False) for out in (dim, kv_dim, kv_dim))
        self.wo = nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, ffn_dim, bias=False), nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x, cos, sin):
        n_sequences, length, _ = x.shape
        y = self.attention_norm(x)
        q, k, v = (
            w(y).view(n_sequences, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.wo(y.transpose(1, 2).reshape(n_sequences, length, -1))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


def turn(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class PlainLlama(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.tok_embeddings = nn.Embedding(a.vocab_size, a.dim)
        self.layers = nn.ModuleList(
            PlainBlock(a.dim, a.n_heads, a.n_kv_heads, a.ffn_dim, a.norm_eps) for _ in range(a.n_layers)
        )
        self.norm, self.output = nn.RMSNorm(a.dim, a.norm_eps), nn.Linear(a.dim, a.vocab_size, bias=False)
        half = a.dim // a.n_heads // 2
        self.frequencies = a.rope_theta ** -(torch.arange(half, dtype=torch.float32) / half)

    def forward(self, tokens):
        angles = torch.outer(torch.arange(tokens.shape[1], dtype=torch.float32), self.frequencies)
        cos, sin = angles.cos(), angles.sin()
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, cos, sin)
        return self.output(self.norm(x))


def plain_loop(n_steps: int, compiled: bool, overrides: Sequence = ()) -> dict:
    """Seconds of each step and its loss. ``overrides``: of debug.toml."""
    from models.decoder import Decoder
    from models.initialize import draw_slice, initial_std
    from trainer.config_load import load_config
    from trainer.config_rules import resolve_config
    from trainer.data.loader import StepSampler
    from trainer.data.samples import load_samples

    config = load_config("debug.toml", list(overrides))
    architecture, training, optimizer_keys = resolve_config(config, 1).architecture, config.training, config.optimizer
    model = PlainLlama(architecture)
    ours = Decoder(architecture, training.seq_len)
    with torch.no_grad():
        target = model.state_dict()
        for name, parameter in ours.named_parameters():
            shape, std = tuple(parameter.shape), initial_std(ours.config, name)
            value = draw_slice(config.job.seed, name, std, shape, (0,) * len(shape), shape)
            target[name.replace("attention.", "").replace("feed_forward.", "")].copy_(value)
    if compiled:
        for block in model.layers:
            block.compile()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": optimizer_keys.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=optimizer_keys.lr, betas=optimizer_keys.betas, eps=optimizer_keys.eps, fused=True,
    )  # fmt: skip
    samples = load_samples(config, architecture.vocab_size)
    batches = iter(StepSampler(training.global_batch_size, 0, 1, first_step=1))
    n_tokens, warmup = training.global_batch_size * training.seq_len, config.lr_schedule.warmup_steps
    seconds, losses = [], []
    for step in range(1, n_steps + 1):
        start = time.perf_counter()
        batch = [samples[sample] for sample in next(batches)]
        tokens, labels = (torch.stack([row[key] for row in batch]) for key in ("tokens", "labels"))
        for group in optimizer.param_groups:
            group["lr"] = optimizer_keys.lr * min(1.0, step / (warmup + 1))
        total = 0.0
        for inputs, targets in zip(tokens.split(training.micro_batch_size), labels.split(training.micro_batch_size)):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / n_tokens
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))
        seconds.append(time.perf_counter() - start)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"losses": losses, "seconds": seconds, "tokens_per_step": n_tokens, "memory_peak_bytes": peak_bytes}


def trainers_loop(n_steps: int, compiled: bool) -> dict:
    """The same of ``./run_train.sh`` with everything that it does by default: from one logged step to the next."""
    with tempfile.TemporaryDirectory(prefix="meshloom-floor-") as folder:
        keys = [f"--training.steps={n_steps}", "--lr_schedule.decay=constant", "--checkpoint.interval=0"]
        command = [sys.executable, "-m", "trainer.launch", *keys, f"--job.output_dir={folder}/run"]
        if compiled:
            command.append("--compile.enabled=true")
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        run = Path(folder) / "run"
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines = [line for line in (run / "logs/rank-00000.log").read_text().splitlines() if ": step " in line]
    ends = [datetime.fromisoformat(line.split(" ")[0]) for line in lines]
    seconds = [records[0]["step_time_s"], *((b - a).total_seconds() for a, b in zip(ends, ends[1:]))]
    return {"losses": [record["loss"] for record in records], "seconds": seconds}


def main(n_steps: int, n_rounds: int, compiled: bool) -> None:
    ratios, rates = [], {"by hand": [], "trainer": []}
    for round_ in range(n_rounds):
        seen = {}
        for name in ("by hand", "trainer") if round_ % 2 else ("trainer", "by hand"):
            if name == "trainer":
                seen[name] = trainers_loop(n_steps, compiled)
            else:
                command = [
                    sys.executable,
                    __file__,
                    "--steps",
                    str(n_steps),
                    "--plain",
                    *(["--compile"] if compiled else []),
                ]
                seen[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        apart = max(abs(a / b - 1) for a, b in zip(seen["trainer"]["losses"], seen["by hand"]["losses"]))
        assert apart < 1e-4, f"not the same work: losses differ by {apart:.1e}"
        n_tokens = seen["by hand"]["tokens_per_step"]
        for name, run in seen.items():
            rates[name].append(n_tokens / statistics.median(run["seconds"][_SKIPPED:]))
        ratios.append(rates["trainer"][-1] / rates["by hand"][-1])
        print(
            f"round {round_ + 1}: by hand {rates['by hand'][-1]:,.0f}, trainer {rates['trainer'][-1]:,.0f} tokens/s, "
            f"ratio {ratios[-1]:.3f}; losses within {apart:.1e}", flush=True,
        )  # fmt: skip
    shown = ", ".join(f"{name} {statistics.median(values):,.0f}" for name, values in rates.items())
    print(
        f"median of {n_rounds}: {shown} tokens/s; ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="compile each block in both")
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    from trainer.config_load import split_overrides

    rest, overrides = split_overrides(sys.argv[1:])
    options = parser.parse_args(rest)
    if options.plain:
        print(json.dumps(plain_loop(options.steps, options.compile, overrides)))
    else:
        main(options.steps, options.rounds, options.compile)
