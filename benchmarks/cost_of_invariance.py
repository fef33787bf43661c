"""Measure what layout invariance costs, and write docs/cost_of_invariance.md.

    python benchmarks/cost_of_invariance.py       # about 5 minutes; 8 GiB of memory

Each rank is one process here, in a group whose other members are imitated: building a model communicates nothing.
"""

import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

BUILDS = [  # size, layout
    ("3.2-1B", {}),
    ("3.2-1B", dict(dp_shard=8)),
    ("3.2-1B", dict(tp=8)),
    ("3-8B", dict(dp_shard=8)),
    ("3.1-405B", dict(tp=8, pp=8, dp_shard=8)),
]
PAGE = """# What layout invariance costs

Made by `python benchmarks/cost_of_invariance.py` on torch {torch}, {machine}, one thread a rank.

## Initial weights

Every parameter is drawn in blocks of rows, each from its own generator seeded by (seed, name, block), on the CPU; a
rank draws the blocks that its slice touches (`models/initialize.py`). "Beyond the shards": the peak of the process's
memory while it builds and initialises, less what it held before and less the parameters it keeps.

| model | layout | parameters of rank 0 | build and initialise | memory beyond the shards |
|---|---|---|---|---|
{builds}

To compare: filling the 1B model on one process by `normal_` on each whole tensor, without any rule, takes
{plain_s:.1f} s. Tensor-parallel ranks draw whole rows of the matrices that are split by columns (`wo`, `w2`) and
keep their part: that is what makes the initialisation of the tp layouts longer than their share of the weights. It
happens once a run; a resumed run skips it.

The largest single tensor of 405B, the embedding of {embedding_shape}, is {embedding_gib:.1f} GiB in fp32. Drawing the
slice of one rank of tp 8 x dp_shard 8 takes {slice_s:.2f} s and {slice_mib:.0f} MiB beyond the slice of
{slice_own_mib:.0f} MiB: never a full parameter.

## Counting tokens

One all-reduce of one integer a step, before the first micro-batch: {count_us:.0f} us of a step of {step_ms:.0f} ms of
the debug model on 2 ranks (gloo), {count_share:.2%}.
"""


def peak_bytes() -> int:
    """The most memory this process has held, from the kernel."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build(size: str, degrees: dict) -> dict:
    """Build and initialise rank 0 of a layout; seconds and bytes."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from parallelize.mesh import Mesh
    from trainer.build import build_model
    from trainer.config_load import Override, load_config
    from trainer.config_rules import layout_needs, resolve_config

    keys = {"model.size": size, "training.global_batch_size": 64, "training.micro_batch_size": 1}
    keys |= {f"parallel.{axis}": degree for axis, degree in degrees.items()}
    config = load_config(None, [Override(key, str(value)) for key, value in keys.items()])
    world_size = layout_needs(config.parallel)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    resolved = resolve_config(config, world_size)
    mesh = Mesh(resolved.layout, "cpu")
    before, start = peak_bytes(), time.perf_counter()
    model = build_model(resolved, mesh, torch.device("cpu"))
    seconds = time.perf_counter() - start
    own = sum(p.to_local().untyped_storage().nbytes() for p in model.named.values())
    return {"layout": str(resolved.layout), "s": seconds, "own": own, "beyond": peak_bytes() - before - own}


def plain(size: str) -> dict:
    """``normal_`` on every whole tensor of a model: the cost without any rule."""
    from models import FAMILIES
    from models.decoder import Decoder

    with torch.device("meta"):
        model = Decoder(FAMILIES["llama"][size], n_positions=128)
    start = time.perf_counter()
    with torch.no_grad():
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return {"s": time.perf_counter() - start}


def largest_slice() -> dict:
    """The embedding of 405B, as rank 63 of tp 8 x dp_shard 8 draws it."""
    from models import FAMILIES
    from models.initialize import draw_slice

    config = FAMILIES["llama"]["3.1-405B"]
    shape = config.vocab_size, config.dim
    rows = config.vocab_size // 64
    before, start = peak_bytes(), time.perf_counter()
    part = draw_slice(0, "tok_embeddings.weight", 0.02, shape, (63 * rows, 0), (64 * rows, config.dim))
    seconds, own = time.perf_counter() - start, part.untyped_storage().nbytes()
    return {"s": seconds, "own": own, "beyond": peak_bytes() - before - own, "shape": shape}


def count_tokens(rank: int, store: str, out: str) -> None:
    """On each of two ranks: the median time of the count, and of a whole step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    from parallelize.mesh import Mesh, sum_over_ranks
    from trainer.build import build_model, build_train_step
    from trainer.config_load import load_config
    from trainer.config_rules import resolve_config
    from trainer.loss import count_valid

    resolved = resolve_config(load_config("debug"), 2)
    mesh, device = Mesh(resolved.layout, "cpu"), torch.device("cpu")
    step = build_train_step(resolved, build_model(resolved, mesh, device), mesh, device)
    tokens = torch.randint(0, 256, (8, 128))

    def median(function, n: int) -> float:
        times = []
        for _ in range(n):
            dist.barrier()
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return statistics.median(times[n // 5 :])

    seen = {
        "count": median(lambda: sum_over_ranks(count_valid(tokens)), 100),
        "step": median(lambda: step(tokens, tokens), 10),
    }
    if rank == 0:
        Path(out).write_text(json.dumps(seen))


def in_own_process(*call) -> dict:
    """Call a function of this file in a fresh process: peak memory is counted from its start."""
    output = subprocess.run([sys.executable, __file__, json.dumps(call)], check=True, capture_output=True, text=True)
    return json.loads(output.stdout.splitlines()[-1])


def main() -> None:
    rows = []
    for size, degrees in BUILDS:
        seen = in_own_process("build", size, degrees)
        own, beyond = seen["own"] / 2**30, seen["beyond"] / 2**20
        rows.append(f"| {size} | {seen['layout']} | {own:.2f} GiB | {seen['s']:.1f} s | {beyond:.0f} MiB |")
        print(rows[-1], flush=True)
    largest = in_own_process("largest_slice")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "seen.json"
        torch.multiprocessing.start_processes(count_tokens, (f"{folder}/store", str(out)), nprocs=2)
        counted = json.loads(out.read_text())
    page = PAGE.format(
        torch=torch.__version__.split("+")[0], machine=f"{platform.machine()} CPU", builds="\n".join(rows),
        plain_s=in_own_process("plain", "3.2-1B")["s"], embedding_shape=" x ".join(f"{n:,}" for n in largest["shape"]),
        embedding_gib=4 * largest["shape"][0] * largest["shape"][1] / 2**30, slice_s=largest["s"],
        slice_mib=largest["beyond"] / 2**20, slice_own_mib=largest["own"] / 2**20, count_us=counted["count"] * 1e6,
        step_ms=counted["step"] * 1e3, count_share=counted["count"] / counted["step"],
    )  # fmt: skip
    (ROOT / "docs" / "cost_of_invariance.md").write_text(page)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        torch.set_num_threads(1)
        function, *arguments = json.loads(sys.argv[1])
        print(json.dumps(globals()[function](*arguments)))
    else:
        main()
