"""What the planner composes from units, against one rank of the real job traced whole."""

import pytest
import torch

from parallelize.mesh import Mesh
from parallelize.planner.communication import collectives
from parallelize.planner.fake import fake_memory, fake_rank
from parallelize.planner.hardware import cluster_of
from parallelize.planner.memory import rank_memory
from parallelize.schedules import schedule_of
from trainer.build import build_model
from trainer.config_load import load_config, split_overrides
from trainer.config_rules import architecture_of, resolve_config
from trainer.layout_rules import Choice
from trainer.planner import Planner
from trainer.traced_rank import trace_rank

SMALL = {"model.n_layers": 4, "training.micro_batch_size": 1, "training.seq_len": 1024}


def planned(name: str, world_size: int, **keys):
    """(planner, prediction, resolved) of a shipped config with some keys set."""
    keys = {"precision.compute": "bfloat16"} | keys
    config = load_config(name, split_overrides([f"--{key}={value}" for key, value in keys.items()])[1])
    resolved = resolve_config(config, world_size)
    planner = Planner(config, architecture_of(config), cluster_of("h100", 1, world_size))
    choice = Choice(config, planner.architecture, resolved.layout, schedule_of(config.parallel.schedule))
    return planner, planner.predict(choice), resolved


def check(planner, prediction, resolved, pp_rank: int, peak: float = 0.02) -> None:
    traced = trace_rank(resolved, pp_rank)
    memory = prediction.memory[pp_rank]
    assert memory.parameters == traced.parameters_bytes
    tunes = resolved.config.training.method != "pretrain"
    # Of adapters the moments alone say how large they are: there is a step count, of 4 bytes, for each tensor too.
    assert traced.gradients_bytes == (traced.optimizer_bytes // 2 // 1024 * 1024 if tunes else traced.parameters_bytes)
    assert memory.optimizer == traced.optimizer_bytes
    assert memory.peak_bytes == pytest.approx(traced.peak_bytes, rel=peak)
    job = prediction.job
    traces = planner.traces_of(job)
    counts, sizes = collectives(job, planner.numbers, planner.shapes_of(job), traces, pp_rank)
    assert counts == traced.collectives
    assert sizes == traced.collective_bytes


@pytest.mark.parametrize(
    "name, world_size, recompute, keys",
    [
        ("llama3_8b", 8, "none", {"training.global_batch_size": 16}),
        ("llama3_8b", 8, "full", {"training.global_batch_size": 8}),
        ("llama3_8b", 4, "selective", {"training.global_batch_size": 2, "parallel.tp": 2, "parallel.dp_shard": 2}),
        ("qwen3_0_6b", 8, "full", {"training.global_batch_size": 8, "parallel.tp": 2, "parallel.dp_shard": 4}),
        ("llama3_8b", 4, "none", {"parallel.dp_replicate": 2, "parallel.dp_shard": 2, "training.global_batch_size": 8}),
        ("llama3_8b", 2, "full", {"parallel.dp_replicate": 2, "parallel.dp_shard": 1, "training.global_batch_size": 4}),
        (
            "llama3_8b",
            2,
            "full",
            {"parallel.dp_replicate": 2, "parallel.dp_shard": 1, "training.global_batch_size": 2}
            | {"precision.reduce": "bfloat16"},
        ),
        ("llama3_8b", 1, "none", {"parallel.dp_shard": 1, "training.global_batch_size": 4}),
        ("llama3_8b", 8, "full", {"training.global_batch_size": 16, "training.loss_chunk_tokens": 256}),
        (
            "llama3_8b",
            4,
            "full",
            {"training.global_batch_size": 4, "parallel.tp": 2, "parallel.dp_shard": 2}
            | {"activation_checkpoint.every": 3, "precision.moments": "bfloat16", "training.loss_chunk_tokens": 256},
        ),
    ],
    ids=[
        "dp8",
        "dp8_one_microbatch",
        "dp2_tp2",
        "dp4_tp2_tied",
        "hsdp",
        "replicas",
        "one_microbatch_bf16",
        "one_gpu",
        "pieces",
        "every",
    ],
)
def test_without_a_pipeline(name, world_size, recompute, keys):
    keys = SMALL | keys | {"activation_checkpoint.mode": recompute}
    check(*planned(name, world_size, **keys), pp_rank=0)


@pytest.mark.parametrize(
    "name, world_size, keys",
    [
        (
            "llama3_8b",
            16,
            {"parallel.schedule": "1F1B", "parallel.tp": 2, "parallel.dp_replicate": 2, "parallel.dp_shard": 2},
        ),
        (
            "llama3_8b",
            4,
            {"parallel.schedule": "Interleaved1F1B", "parallel.dp_shard": 2, "parallel.balance": "[1,1,1,1]"},
        ),
        ("llama3_8b", 4, {"parallel.schedule": "GPipe", "parallel.dp_shard": 1, "parallel.tp": 2}),
        (
            "llama3_8b",
            4,
            {"parallel.schedule": "LoopedBFS", "parallel.dp_shard": 2, "parallel.schedule_microbatches": 2},
        ),
        ("qwen3_0_6b", 8, {"parallel.schedule": "1F1B", "parallel.dp_shard": 2, "parallel.tp": 2}),
        ("qwen2_5_7b", 4, {"parallel.schedule": "1F1B", "parallel.dp_shard": 1, "parallel.tp": 2}),
        (
            "qwen3_0_6b",
            4,
            {"parallel.schedule": "1F1B", "parallel.dp_shard": 2, "training.micro_batch_size": 2}
            | {"precision.reduce": "bfloat16"},
        ),
    ],
    ids=["1f1b_hsdp", "interleaved", "gpipe", "looped_in_runs", "tied", "biases", "tied_bf16_reduction"],
)
@pytest.mark.parametrize("pp_rank", [0, 1])
def test_with_a_pipeline(name, world_size, keys, pp_rank):
    shared = {"parallel.pp": 2, "training.global_batch_size": 8, "activation_checkpoint.mode": "none"}
    check(*planned(name, world_size, **SMALL | shared | keys), pp_rank=pp_rank)


@pytest.mark.parametrize(
    "schedule, keys", [("1F1B", {}), ("Interleaved1F1B", {"parallel.balance": "[1,1,1,1]"}), ("GPipe", {})]
)
@pytest.mark.parametrize("pp_rank", [0, 1])
def test_gathers_of_parameters_that_each_forward_frees(schedule, keys, pp_rank):
    shared = {"parallel.pp": 2, "parallel.dp_shard": 2, "training.global_batch_size": 8, "parallel.schedule": schedule}
    freed = {"parallel.reshard_after_forward": "always", "activation_checkpoint.mode": "full"}
    planner, prediction, resolved = planned("llama3_8b", 4, **SMALL | shared | freed | keys)
    traced, job = trace_rank(resolved, pp_rank), prediction.job
    traces = planner.units.traces(1, "full", 1)
    counts, sizes = collectives(job, planner.numbers, planner.shapes_of(job), traces, pp_rank)
    assert (counts, sizes) == (traced.collectives, traced.collective_bytes)
    # What a backward gathers stays, so that little is saved; none of it is counted.
    assert 0.999 < prediction.memory[pp_rank].peak_bytes / traced.peak_bytes < 1.1


@pytest.mark.parametrize(
    "name, world_size, keys",
    [
        ("llama3_8b", 8, {"parallel.schedule": "ZBVZeroBubble", "parallel.dp_shard": 2, "parallel.tp": 2}),
        ("llama3_8b", 4, {"parallel.schedule": "InterleavedZeroBubble", "parallel.dp_shard": 2}),
        ("llama3_8b", 2, {"parallel.schedule": "DualPipeV", "parallel.dp_shard": 1}),
        (
            "qwen3_0_6b",
            4,
            {"parallel.schedule": "ZBVZeroBubble", "parallel.dp_shard": 2, "parallel.schedule_microbatches": 4}
            | {"precision.compute": "float32", "training.global_batch_size": 16},
        ),
    ],
    ids=["zbv", "interleaved", "dualpipev", "fp32_in_runs"],
)
@pytest.mark.parametrize("pp_rank", [0, 1])
def test_with_a_split_backward(name, world_size, keys, pp_rank):
    shared = {"parallel.pp": 2, "parallel.virtual_stages": 2, "training.global_batch_size": 8}
    none = {"activation_checkpoint.mode": "none"}
    check(*planned(name, world_size, **SMALL | shared | none | keys), pp_rank=pp_rank)


LORA = {"training.method": "lora", "data.packing": "concatenate", "data.isolate_documents": "false"}


@pytest.mark.parametrize(
    "name, world_size, keys",
    [
        ("llama3_8b", 8, {"training.global_batch_size": 16}),
        ("llama3_8b", 4, {"parallel.tp": 2, "parallel.dp_shard": 2, "precision.frozen": "bfloat16"}),
        ("qwen3_0_6b", 4, {"parallel.pp": 2, "parallel.tp": 2, "parallel.dp_shard": 1}),
        (
            "llama3_8b",
            8,
            {
                "parallel.pp": 2,
                "parallel.dp_shard": 2,
                "parallel.tp": 2,
                "parallel.schedule": "ZBVZeroBubble",
                "parallel.virtual_stages": 2,
            },
        ),
        ("llama3_8b", 1, {"parallel.dp_shard": 1, "precision.frozen": "bfloat16"}),
    ],
    ids=["dp8", "tp2_dp2_bf16", "tied_pp2_tp2", "zbv", "one_gpu"],
)
def test_adapters(name, world_size, keys):
    shared = {"training.global_batch_size": 8, "activation_checkpoint.mode": "none"}
    check(*planned(name, world_size, **SMALL | LORA | shared | keys), pp_rank=0, peak=0.1)


SHIPPED = [
    ("llama3_8b", 8, {}),
    ("llama3_8b", 24, {"parallel.dp_shard": 6, "parallel.tp": 4, "training.global_batch_size": 24}),
    ("llama3_2_1b", 16, {"parallel.dp_shard": 8, "parallel.tp": 2}),
    ("llama3_70b", 256, {}),
    ("llama3_405b", 512, {}),
    ("qwen2_5_7b", 8, {"parallel.dp_shard": 4, "parallel.tp": 2}),
    (
        "qwen3_0_6b",
        6,
        {"parallel.dp_shard": 3, "parallel.tp": 2, "training.global_batch_size": 24, "training.micro_batch_size": 1},
    ),
    ("qwen3_8b", 8, {"parallel.pp": 4, "parallel.dp_shard": 1, "parallel.tp": 2}),
    ("qwen3_32b", 64, {}),
    ("smollm2_135m", 6, {"parallel.dp_shard": 2, "parallel.tp": 3, "training.seq_len": 2046}),
]


@pytest.mark.parametrize("name, world_size, keys", SHIPPED)
def test_parameters_of_every_shipped_config_to_the_byte(name, world_size, keys):
    planner, prediction, resolved = planned(name, world_size, **keys)
    for pp_rank in sorted({0, resolved.layout.pp // 2, resolved.layout.pp - 1}):
        with fake_rank(world_size, pp_rank * resolved.layout.stage_ranks) as mode:
            model = build_model(
                resolved, Mesh(resolved.layout, "cpu"), torch.device("cpu"), initialise=False,
                allocate=lambda part, _: fake_memory(part, mode),
            )  # fmt: skip
            storages = {
                parameter._local_tensor.untyped_storage()._cdata: parameter._local_tensor.untyped_storage().nbytes()
                for part in model.parts
                for parameter in part.parameters()
            }
        assert prediction.memory[pp_rank].parameters == sum(storages.values())


@pytest.mark.parametrize(
    "schedule, virtual_stages, n_microbatches",
    [("1F1B", 1, 24), ("Interleaved1F1B", 2, 24), ("InterleavedZeroBubble", 2, 24), ("ZBVZeroBubble", 2, 24)],
)
def test_a_few_rounds_have_the_memory_of_all(schedule, virtual_stages, n_microbatches):
    keys = {
        "parallel.pp": 4,
        "parallel.dp_shard": 1,
        "parallel.schedule": schedule,
        "parallel.virtual_stages": virtual_stages,
    }
    more = {"training.global_batch_size": n_microbatches, "model.n_layers": 8, "activation_checkpoint.mode": "none"}
    planner, prediction, _ = planned("llama3_8b", 4, **SMALL | keys | more)
    job = prediction.job
    traces = planner.units.traces(1, job.recompute, 1, split=True)
    for rank, memory in enumerate(prediction.memory):
        assert memory == rank_memory(job, planner.numbers, planner.shapes_of(job), traces, job.orders(), rank)
