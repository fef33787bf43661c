"""The planner's memory against a whole traced rank, for big models: python benchmarks/planner_memory.py [NAME ...].

Each line runs one rank of the real job on tensors without memory, so any machine will do; some take a minute.
"""

import sys
import time

from parallelize.planner.hardware import cluster_of
from parallelize.schedules import schedule_of
from trainer.config_load import load_config, split_overrides
from trainer.config_rules import architecture_of, resolve_config
from trainer.layout_rules import Choice
from trainer.planner import Planner
from trainer.traced_rank import trace_rank

GIB = 2**30
FULL = "--activation_checkpoint.mode=full"
SELECTIVE = "--activation_checkpoint.mode=selective"
NONE = "--activation_checkpoint.mode=none"

# config, GPUs, sequences a step, sequences a micro-batch, and the layout
LAYOUTS = [
    ("llama3_8b", 8, 16, 2, FULL),
    ("llama3_8b", 8, 8, 1, NONE),
    ("llama3_8b", 8, 16, 4, SELECTIVE, "--parallel.tp=4", "--parallel.dp_shard=2"),
    ("llama3_8b", 16, 32, 1, NONE, "--parallel.pp=4", "--parallel.dp_shard=4", "--parallel.schedule=Interleaved1F1B"),
    ("llama3_8b", 16, 16, 1, NONE, "--parallel.pp=4", "--parallel.dp_replicate=2", "--parallel.dp_shard=1",
     "--parallel.tp=2", "--parallel.schedule=GPipe"),
    ("llama3_70b", 64, 16, 1, FULL, "--parallel.dp_shard=2", "--parallel.schedule=1F1B", "--parallel.virtual_stages=1"),
    ("llama3_70b", 64, 8, 1, SELECTIVE, "--parallel.pp=1", "--parallel.schedule=1F1B", "--parallel.virtual_stages=1"),
    ("llama3_70b", 256, 64, 2, SELECTIVE, "--parallel.pp=8", "--parallel.dp_shard=4"),
    ("llama3_70b", 64, 64, 1, FULL, "--parallel.pp=1", "--parallel.tp=1", "--parallel.dp_shard=64",
     "--parallel.schedule=1F1B", "--parallel.virtual_stages=1"),
    ("llama3_70b", 128, 32, 1, FULL, "--parallel.pp=8", "--parallel.dp_shard=4", "--parallel.tp=4",
     "--parallel.balance=flops", "--parallel.virtual_stages=1", "--parallel.schedule=1F1B"),
    ("llama3_405b", 512, 64, 1, FULL),
    ("llama3_405b", 1024, 256, 1, FULL, "--parallel.pp=16", "--parallel.tp=4", "--parallel.dp_shard=16",
     "--parallel.virtual_stages=4", "--parallel.balance=flops"),
    ("llama3_405b", 512, 64, 1, SELECTIVE, "--parallel.pp=8", "--parallel.schedule=1F1B", "--parallel.virtual_stages=1"),
    ("llama3_405b", 256, 64, 1, FULL, "--parallel.pp=8", "--parallel.dp_shard=4", "--parallel.schedule=GPipe",
     "--parallel.virtual_stages=1", "--parallel.schedule_microbatches=8"),
    ("llama3_405b", 512, 64, 1, FULL, "--parallel.pp=1", "--parallel.dp_shard=64", "--parallel.schedule=1F1B",
     "--parallel.virtual_stages=1"),
    ("qwen3_32b", 64, 64, 1, FULL, "--parallel.tp=1", "--parallel.dp_shard=64"),
    ("qwen3_32b", 64, 16, 1, NONE, "--parallel.pp=4", "--parallel.dp_shard=4", "--parallel.tp=4"),
    ("qwen3_32b", 64, 32, 2, SELECTIVE),
    ("qwen3_32b", 64, 32, 1, FULL, "--parallel.pp=4", "--parallel.dp_shard=8", "--parallel.tp=2",
     "--parallel.schedule=Interleaved1F1B"),
    ("qwen3_32b", 32, 16, 2, NONE, "--parallel.pp=8", "--parallel.dp_shard=1", "--parallel.tp=4"),
    ("llama3_8b", 32, 32, 1, NONE, "--parallel.pp=4", "--parallel.dp_shard=4", "--parallel.tp=2",
     "--parallel.schedule=ZBVZeroBubble"),
    ("qwen3_32b", 64, 64, 1, NONE, "--parallel.pp=4", "--parallel.dp_shard=4", "--parallel.tp=4",
     "--parallel.schedule=InterleavedZeroBubble", "--parallel.virtual_stages=2"),
    ("llama3_70b", 64, 16, 1, NONE, "--parallel.pp=4", "--parallel.dp_shard=2", "--parallel.tp=8",
     "--parallel.schedule=DualPipeV", "--parallel.virtual_stages=2"),
]  # fmt: skip


def main(names: list[str]) -> None:
    worst = 0.0
    print("| model | layout | schedule | recompute | micro-batch | stage rank | predicted GiB | traced GiB | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    started = time.monotonic()
    for name, n_gpus, sequences, size, *keys in LAYOUTS:
        if names and name not in names:
            continue
        keys = [*keys, f"--training.global_batch_size={sequences}", f"--training.micro_batch_size={size}"]
        config = load_config(name, split_overrides([*keys, "--precision.compute=bfloat16"])[1])
        resolved = resolve_config(config, n_gpus)
        planner = Planner(config, architecture_of(config), cluster_of("h100", n_gpus // 8, 8))
        schedule = config.parallel.schedule
        prediction = planner.predict(Choice(config, planner.architecture, resolved.layout, schedule_of(schedule)))
        for rank in sorted({0, resolved.layout.pp - 1}):
            predicted = prediction.memory[rank].peak_bytes
            traced = trace_rank(resolved, rank).peak_bytes
            worst = max(worst, abs(predicted / traced - 1))
            print(
                f"| {name} | {resolved.layout} | {schedule if resolved.layout.pp > 1 else '-'} "
                f"| {config.activation_checkpoint.mode} | {size} | {rank} "
                f"| {predicted / GIB:.2f} | {traced / GIB:.2f} | {predicted / traced:.3f} |",
                flush=True,
            )
    print(f"\nLargest difference {100 * worst:.1f}%, {time.monotonic() - started:.0f} s on this machine.")


if __name__ == "__main__":
    main(sys.argv[1:])
