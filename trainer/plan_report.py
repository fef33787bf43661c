"""What ``plan`` shows: tables for people, JSON, a picture."""

from pathlib import Path

from parallelize.planner.memory import RankMemory
from parallelize.planner.topology import node_map
from trainer.errors import UserError
from trainer.hardware import GIB
from trainer.layout_rules import layout_advice
from trainer.planner import SEARCHED, Plan, Planner, Prediction
from trainer.traced_rank import TracedRank

_MEMORY = ("parameters", "gradients", "optimizer", "gathered", "activations", "logits", "buffers")
_TIME = {
    "compute": "compute",
    "tp": "tensor-parallel communication",
    "fsdp": "FSDP communication not hidden",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "other": "between steps",
}


def plan_text(planner: Planner, plan: Plan) -> str:
    lines = [_heading(planner), ""]
    if plan.best:
        rows = [_row(planner, prediction) for prediction in plan.best]
        lines += _table(
            [
                "",
                "layout",
                "schedule",
                "micro-batch",
                "recompute",
                "GiB",
                "s/step",
                "tokens/s",
                "MFU",
                "besides computing",
            ],
            rows,
        )
        lines += ["", "The first:", *_details(planner, plan.best[0])]
    else:
        lines.append("No layout fits.")
    n_shown, n_rejected = len(plan.best), sum(plan.rejected.values())
    lines += ["", f"Of {plan.n_choices:,} choices, {n_rejected:,} cannot run:"]
    lines += [f"  {count:>6,}  {reason}" for reason, count in plan.rejected.most_common()]
    lines.append(f"  {plan.n_choices - n_rejected - n_shown:>6,}  others are slower")
    return "\n".join(lines)


def explain_text(planner: Planner, prediction: Prediction) -> str:
    over = prediction.peak_bytes - planner.usable_bytes
    verdict = (
        "It fits." if over <= 0 else f"It does not fit: stage rank {_fullest(prediction)} is {over / GIB:.1f} GiB over."
    )
    lines = [_heading(planner), "", _name(prediction)]
    lines += [
        f"{prediction.time.total_s:.2f} s a step, {prediction.tokens_per_s:,.0f} tokens/s, MFU {100 * prediction.mfu:.1f}%. {verdict}",
        *(f"advice: {text}" for text in layout_advice(prediction.choice)),
        *_details(planner, prediction),
    ]
    return "\n".join(lines)


def trace_text(rank: int, predicted: RankMemory, traced: TracedRank) -> str:
    return (
        f"pipeline rank {rank}, traced: peak {traced.peak_bytes / GIB:.2f} GiB (predicted {predicted.peak_bytes / GIB:.2f}), "
        f"optimizer {traced.optimizer_bytes:,} bytes (predicted {predicted.optimizer:,})"
    )


def measured_text(prediction: Prediction, measured_s: float) -> str:
    return f"measured {measured_s:8.3f} s a step, predicted {prediction.time.total_s:8.3f}: {_name(prediction)}"


def as_dict(planner: Planner, plan: Plan | None, *predictions: Prediction) -> dict:
    """For --json: units are in the names."""
    cluster = planner.cluster
    result = {
        "model_parameters": planner.architecture.n_params,
        "gpu": cluster.gpu.name,
        "n_nodes": cluster.n_nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "usable_bytes": round(planner.usable_bytes),
        "times": cluster.calibration.label,
        "layouts": [_prediction_dict(prediction) for prediction in (plan.best if plan else predictions)],
    }
    if plan:
        result |= {"n_choices": plan.n_choices, "rejected": dict(plan.rejected)}
    return result


def keys_of(prediction: Prediction) -> dict:
    """Configuration key -> value of a choice."""
    config = prediction.choice.config
    keys = {f"parallel.{key}": getattr(config.parallel, key) for key in SEARCHED}
    mode = config.activation_checkpoint.mode
    return keys | {"training.micro_batch_size": prediction.job.micro_batch_size, "activation_checkpoint.mode": mode}


def _prediction_dict(prediction: Prediction) -> dict:
    job, layout = prediction.job, prediction.job.layout
    return {
        "keys": keys_of(prediction),
        "pp": layout.pp, "dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "cp": layout.cp, "tp": layout.tp,
        "schedule": prediction.choice.config.parallel.schedule if layout.pp > 1 else None,
        "virtual_stages": job.virtual_stages, "layers_per_stage": list(job.layers_per_stage),
        "micro_batch_size": job.micro_batch_size, "n_microbatches": job.n_microbatches, "recompute": job.recompute,
        "memory_by_pipeline_rank_bytes": [vars(rank) | {"peak": rank.peak_bytes} for rank in prediction.memory],
        "peak_bytes": prediction.peak_bytes,
        "time_s": vars(prediction.time) | {"total_s": prediction.time.total_s},
        "tokens_per_s": prediction.tokens_per_s, "mfu": prediction.mfu,
    }  # fmt: skip


def plot(planner: Planner, prediction: Prediction, path: Path) -> None:
    """Memory by pipeline rank and the parts of a step, as a PNG. Raises ``UserError``."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install -e '.[plot]'") from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (memory, time) = plt.subplots(1, 2, figsize=(12, 5), width_ratios=(3, 1), layout="constrained")
    ranks = range(len(prediction.memory))
    below = [0.0 for _ in ranks]
    for part in _MEMORY:
        sizes = [getattr(rank, part) / GIB for rank in prediction.memory]
        memory.bar(ranks, sizes, bottom=below, label=part)
        below = [low + size for low, size in zip(below, sizes)]
    memory.axhline(planner.usable_bytes / GIB, color="black", linestyle="--", label="usable")
    memory.set(xlabel="pipeline rank", ylabel="GiB", title=_name(prediction), xticks=list(ranks))
    memory.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, frameon=False)
    low = 0.0
    for part, label in _TIME.items():
        seconds = getattr(prediction.time, f"{part}_s")
        time.bar(0, seconds, bottom=low, label=label)
        low += seconds
    time.set(ylabel="seconds a step", title=planner.cluster.calibration.label, xticks=[])
    time.legend(loc="upper center", bbox_to_anchor=(0.5, -0.05), frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: cannot be written: {error}") from None
    plt.close(figure)


def _heading(planner: Planner) -> str:
    cluster, training = planner.cluster, planner.config.training
    n_gpus = cluster.n_nodes * cluster.gpus_per_node
    return (
        f"{_count(planner.architecture.n_params)} parameters on {n_gpus} x {cluster.gpu.name} ({cluster.n_nodes} node(s) of "
        f"{cluster.gpus_per_node}), {training.global_batch_size} sequences of {training.seq_len} tokens a step. "
        f"{planner.usable_bytes / GIB:.1f} of {cluster.gpu.memory_bytes / GIB:.1f} GiB a GPU are counted on. "
        f"Times: {cluster.calibration.label}."
    )


def _name(prediction: Prediction) -> str:
    job = prediction.job
    schedule = f", {_schedule(prediction)}" if job.layout.pp > 1 else ""
    return f"{job.layout}{schedule}, micro-batch {job.micro_batch_size}, recompute {prediction.choice.config.activation_checkpoint.shown}"


def _schedule(prediction: Prediction) -> str:
    job = prediction.job
    if job.layout.pp == 1:
        return "-"
    name = prediction.choice.config.parallel.schedule
    return f"{name} x{job.virtual_stages}" if job.virtual_stages > 1 else name


def _count(n: int) -> str:
    return f"{n / 1e9:.2f}B" if n >= 1e8 else f"{n / 1e6:.1f}M"


def _fullest(prediction: Prediction) -> int:
    return max(range(len(prediction.memory)), key=lambda rank: prediction.memory[rank].peak_bytes)


def _row(planner: Planner, prediction: Prediction) -> list[str]:
    job, time = prediction.job, prediction.time
    rest = {label: getattr(time, f"{part}_s") for part, label in _TIME.items() if part != "compute"}
    largest = max(rest, key=rest.get)
    share = rest[largest] / time.total_s
    return [
        "", str(job.layout), _schedule(prediction), str(job.micro_batch_size), prediction.choice.config.activation_checkpoint.shown,
        f"{prediction.peak_bytes / GIB:.1f}", f"{time.total_s:.2f}", f"{prediction.tokens_per_s:,.0f}",
        f"{100 * prediction.mfu:.1f}%", f"{largest} {100 * share:.0f}%" if share > 0.005 else "nothing",
    ]  # fmt: skip


def _details(planner: Planner, prediction: Prediction) -> list[str]:
    job, time = prediction.job, prediction.time
    lines = [""]
    if job.layout.pp > 1:
        lines += [
            f"Layers by stage: {', '.join(map(str, job.layers_per_stage))}. {job.n_microbatches} micro-batches.",
            "",
        ]
    rows = [
        [str(rank), *(f"{getattr(memory, part) / GIB:.2f}" for part in _MEMORY), f"{memory.peak_bytes / GIB:.2f}"]
        for rank, memory in enumerate(prediction.memory)
    ]
    lines += ["GiB at the worst moment of each pipeline rank:", *_table(["rank", *_MEMORY, "peak"], rows), ""]
    lines.append("Seconds of a step:")
    for part, label in _TIME.items():
        spent = getattr(time, f"{part}_s")
        lines.append(f"  {spent:>9.3f}  {100 * spent / time.total_s:>5.1f}%  {label}")
    return [*lines, "", node_map(job.layout, planner.cluster.gpus_per_node)]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip() for row in [head, *rows]]
