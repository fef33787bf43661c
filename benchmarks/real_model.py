"""Hold a real model against ``transformers``, train it on at several layouts, export it; write docs/real_model.md.

    python benchmarks/real_model.py HF_DIR [--steps 10]

HF_DIR: SmolLM2-135M or any model of the Llama or Qwen families. About 20 minutes on 2 cores. Needs the extra "test".
"""

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from models import FAMILIES  # noqa: E402
from models.hugging_face import config_json, hugging_face_name  # noqa: E402
from trainer.build import parameter_shapes  # noqa: E402

START, N_WINDOWS, WINDOW = 100_000, 4, 1024  # of the bundled novel: from this character, so many windows of tokens
LAYOUTS = {
    "one process": [],
    "pp 2 x dp_shard 2": ["--parallel.pp=2", "--parallel.dp_shard=2"],
    "tp 3 x pp 2": ["--parallel.tp=3", "--parallel.pp=2", "--parallel.sequence_parallel=false"],
}
PAGE = """# A real model, in and out

Made by `python benchmarks/real_model.py {name}` on torch {torch}, CPU, fp32, with {n_params:,}
parameters from a Hugging Face directory. The text is the bundled novel from character {start:,}: {n_windows} windows of {window} tokens.

## The same loss as transformers

| | loss, nats a token |
|---|---|
{losses}

Largest difference from `transformers` {transformers}: {worst:.1e} nats, nearly all of it from torch's own CPU kernel for the
cross-entropy, which adds up 49,152 terms one after another in fp32 (`trainer/loss.py`).

## The same training at any layout

{steps} steps of 4 sequences of 128 tokens from the directory, loss by step:

| step | {layouts} |
|---|{dashes}|
{curves}

## Out again

The checkpoint that tp 3 x pp 2 wrote, exported in fp32: `evaluate` says {evaluated:.6f}, `transformers` on the exported
directory {exported:.6f}.

## Speed and memory

Import and export of a random Llama 3.2 1B in bfloat16 ({gib:.2f} GiB), against `safetensors` loading and saving the same
file, each in a fresh process; medians of 5. Import waits until its files are on the disk, as a training checkpoint
does; export leaves that to the system, as `safetensors` does. Both read the checkpoint once for its checksums. Export
holds two output files of 0.5 GB in memory; what import maps from the files counts as memory here, but can be dropped by
the system at any time. The disk of the machine varies by a factor of two from one minute to the next.

| | seconds | seconds a GiB | peak memory beyond the interpreter's, GiB |
|---|---|---|---|
{speed}
"""


def trainer(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    ).stdout


def transformers_loss(folder: str, text: str) -> float:
    """Mean cross-entropy over the windows, each by itself."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
    total = 0.0
    with torch.no_grad():
        for window in range(N_WINDOWS):
            row = ids[window * WINDOW : (window + 1) * WINDOW + 1]
            total += F.cross_entropy(model(row[None, :-1]).logits[0], row[1:], reduction="sum").item()
    return total / (N_WINDOWS * WINDOW)


def evaluate(folder: str, text: Path, *flags: str) -> float:
    seen = trainer(
        "trainer", "evaluate", f"--model.hf_path={folder}", "--data.source=text", f"--data.path={text}", "--batches=1",
        f"--training.seq_len={WINDOW}", f"--training.global_batch_size={N_WINDOWS}", "--training.micro_batch_size=1",
        "--json", *flags,
    )  # fmt: skip
    return json.loads(seen)["loss"]


def curve(folder: str, run: Path, steps: int, flags: list[str]) -> list[float]:
    trainer(
        "trainer.launch", "--config=debug", f"--model.hf_path={folder}", f"--data.tokenizer={folder}",
        f"--job.output_dir={run}", f"--training.steps={steps}", "--training.global_batch_size=4",
        "--training.micro_batch_size=1", "--optimizer.lr=1e-4", "--lr_schedule.warmup_steps=2",
        "--metrics.tensorboard=false", *flags,
    )  # fmt: skip
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def peak() -> float:
    """The most memory that this process has held, GiB. (getrusage would count the parent's before the exec.)"""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**20


def speed_of(what: str, root: Path) -> dict:
    """In this fresh process: one of the three, on the 1B model below ``root``."""
    from safetensors.torch import load_file, save_file

    from trainer.hf_export import export
    from trainer.hf_import import import_directory

    os.sync()  # nothing of the one before is still on its way to the disk
    before, start = peak(), time.perf_counter()
    if what.startswith("safetensors"):
        copy = root / f"copy-{time.time_ns()}.safetensors"
        save_file(load_file(root / "hf" / "model.safetensors"), copy)
        if "fsync" in what:
            with copy.open("rb") as file:
                os.fsync(file.fileno())
    elif what == "import-hf":
        import_directory(str(root / "hf"), root / f"step-{time.time_ns()}")
    else:
        checkpoint = next(root.glob("step-*"))
        export(checkpoint, root / f"out-{time.time_ns()}", None, 500_000_000)
    return {"s": time.perf_counter() - start, "gib": peak() - before}


def speed_rows() -> tuple[float, list[str]]:
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="meshloom-speed-") as scratch:
        root, architecture = Path(scratch), FAMILIES["llama"]["3.2-1B"]
        (root / "hf").mkdir()
        shapes = parameter_shapes(architecture)
        tensors = {hugging_face_name(name): torch.randn(shape).bfloat16() for name, shape in shapes.items()}
        gib = sum(tensor.nbytes for tensor in tensors.values()) / 2**30
        save_file(tensors, root / "hf" / "model.safetensors", metadata={"format": "pt"})
        (root / "hf" / "config.json").write_text(json.dumps(config_json(architecture, "bfloat16", {})))
        kinds = ("safetensors", "safetensors, fsync", "import-hf", "export-hf")
        rounds = [{what: json.loads(_speed_process(what, root)) for what in kinds} for _ in range(5)]  # disks vary
    rows = []
    for what in kinds:
        seen = sorted((one[what] for one in rounds), key=lambda one: one["s"])[1]
        rows.append(f"| {what} | {seen['s']:.1f} | {seen['s'] / gib:.2f} | {seen['gib']:.1f} |")
    return gib, rows


def _speed_process(what: str, root: Path) -> str:
    command = [sys.executable, __file__, "--speed-of", what, str(root)]
    environment = os.environ | {"THP_MEM_ALLOC_ENABLE": "1"}  # as the command export-hf itself sets it
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.splitlines()[-1]


def main(folder: str, steps: int) -> None:
    import transformers

    novel = gzip.open(ROOT / "assets" / "pride_and_prejudice.txt.gz", "rt", encoding="utf-8").read()
    text = novel[START : START + 6 * N_WINDOWS * WINDOW]
    with tempfile.TemporaryDirectory(prefix="meshloom-real-") as scratch:
        path = Path(scratch) / "text.txt"
        path.write_text(text, encoding="utf-8")
        losses = {"transformers": transformers_loss(folder, text)}
        losses |= {f"`evaluate`, {name}": evaluate(folder, path, *flags) for name, flags in LAYOUTS.items()}
        print(losses, flush=True)
        curves = {}
        for number, (name, flags) in enumerate(LAYOUTS.items()):
            curves[name] = curve(folder, Path(scratch) / f"run-{number}", steps, flags)
            print(name, curves[name], flush=True)
        checkpoint = Path(scratch) / "run-2" / "checkpoints" / f"step-{steps:08d}"
        evaluated = evaluate(folder, path, f"--checkpoint={checkpoint}")
        trainer("trainer", "export-hf", f"--checkpoint={checkpoint}", f"--out={scratch}/exported")
        exported = transformers_loss(f"{scratch}/exported", text)
        n_params = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_pretrained(folder).parameters())
    gib, speed = speed_rows()
    page = PAGE.format(
        name=Path(folder).name, torch=torch.__version__.split("+")[0], n_params=n_params, start=START,
        n_windows=N_WINDOWS, window=WINDOW, losses="\n".join(f"| {name} | {loss:.6f} |" for name, loss in losses.items()),
        transformers=transformers.__version__, worst=max(abs(loss - losses["transformers"]) for loss in losses.values()),
        steps=steps, layouts=" | ".join(curves), dashes="|".join(["---"] * len(curves)),
        curves="\n".join(
            f"| {step + 1} | {' | '.join(f'{values[step]:.6f}' for values in curves.values())} |" for step in range(steps)
        ),
        evaluated=evaluated, exported=exported, gib=gib, speed="\n".join(speed),
    )  # fmt: skip
    (ROOT / "docs" / "real_model.md").write_text(page)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--speed-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.speed_of:
        torch.set_num_threads(1)
        print(json.dumps(speed_of(options.speed_of[0], Path(options.speed_of[1]))))
    else:
        main(options.folder, options.steps)
