"""The planner's hardware table, where mesh axes lie on it, and what operations cost. Starts no process."""

from dataclasses import replace

import pytest

from benchmarks.calibrate import START, Constants, fit
from benchmarks.planner_peers import interleaving_gain, peers
from benchmarks.published_runs import read_folder
from parallelize.layout import Layout
from parallelize.planner.hardware import cluster_of
from parallelize.planner.op_time import seconds
from parallelize.planner.operations import Attention, Collective, Elementwise, Matmul
from parallelize.planner.topology import crosses_nodes, members_per_node, node_map
from trainer.plan_measure import half_length, half_size

EXAMPLE = Layout(pp=4, dp_shard=4, tp=4)  # 64 GPUs, 8 nodes of 8
GPU = cluster_of("a100", n_nodes=8)


def test_where_the_axes_of_64_gpus_lie():
    found = {
        axis: (crosses_nodes(EXAMPLE, axis, 8), members_per_node(EXAMPLE, axis, 8)) for axis in ("pp", "dp_shard", "tp")
    }
    # A node holds two tensor-parallel groups of one stage: two of the four data-parallel ranks.
    assert found == {"pp": (True, 1), "dp_shard": (True, 2), "tp": (False, 4)}
    assert node_map(EXAMPLE, 8).splitlines() == [
        "64 GPUs on 8 nodes of 8: pp 4 x dp_shard 4 x tp 4",
        "  pp              4  16 of 16 groups cross nodes, 1 of 4 ranks a node (ranks 0, 16, 32, 48)",
        "  dp_shard        4  16 of 16 groups cross nodes, 2 of 4 ranks a node (ranks 0, 4, 8, 12)",
        "  tp              4  all 16 groups inside a node",
    ]


def test_only_some_groups_may_cross():
    assert "1 of 4 groups cross nodes, 1 of 3 ranks a node (ranks 6, 7, 8)" in node_map(Layout(dp_shard=4, tp=3), 8)
    assert crosses_nodes(Layout(tp=16), "tp", 8) and members_per_node(Layout(tp=16), "tp", 8) == 8


def test_large_matmuls_near_their_peak_small_ones_far_below():
    def efficiency(m, k, n):
        return Matmul(m, k, n).flops / seconds(Matmul(m, k, n), GPU, Layout()) / GPU.gpu.peak_flops

    assert 0.6 < efficiency(8192, 8192, 8192) < GPU.calibration.matmul_efficiency
    assert efficiency(8192, 8192, 8192) > efficiency(2048, 8192, 8192) > efficiency(2048, 8192, 128)
    assert efficiency(1, 8192, 8192) < 0.02  # bound by reading the weights
    assert seconds(Elementwise(2), GPU, Layout()) == GPU.calibration.launch_s


def test_attention_by_its_shape():
    def speed(**changed):
        operation = Attention(**{**dict(batch=1, n_heads=32, n_kv_heads=8, seq_len=4096, head_dim=128), **changed})
        return operation.flops / seconds(operation, GPU, Layout())

    assert speed() > speed(seq_len=1024) and speed() > speed(head_dim=64) and speed() > speed(backward=True)


def test_collectives_go_at_their_slowest_link():
    def time(kind, layout, axis, size=10**9):
        return seconds(Collective(kind, axis, size), GPU, layout)

    inside, half, single = Layout(dp_shard=8), Layout(dp_shard=8, tp=4), Layout(dp_shard=8, tp=8)
    assert time("all_gather", Layout(), "dp_shard") == 0
    assert time("all_gather", inside, "dp_shard") < time("all_gather", half, "dp_shard") / 2
    assert time("all_gather", half, "dp_shard") == pytest.approx(time("all_gather", single, "dp_shard") / 2, rel=0.01)
    assert time("all_reduce", single, "dp_shard") == pytest.approx(
        2 * time("reduce_scatter", single, "dp_shard"), rel=0.01
    )
    assert time("send", Layout(pp=8), "pp") < time("send", Layout(pp=2, tp=8), "pp")
    assert time("all_gather", single, "dp_shard", 1) < 2e-4  # latency alone


def test_every_calibration_says_where_it_comes_from():
    assert {gpu: cluster_of(gpu, 1).calibration.label.split(" (")[0] for gpu in ("a100", "a100-40", "h100", "h200", "b200")} == {
        "a100": "calibrated on published A100 runs", "a100-40": "calibrated on published A100 runs",
        "h100": "calibrated on published H100 runs", "h200": "uncalibrated", "b200": "uncalibrated",
    }  # fmt: skip


def test_a_file_overrides_any_number(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text('base = "h100"\n[gpu]\nmemory_bytes = 96e9\n[network_link]\nbytes_per_s = 12.5e9\n')
    cluster = cluster_of(str(path), 2, 4)
    assert (cluster.gpu.memory_bytes, cluster.network_link.bytes_per_s, cluster.node_link.bytes_per_s) == (
        96e9,
        12.5e9,
        450e9,
    )
    assert (cluster.n_nodes, cluster.gpus_per_node, cluster.calibration.label[-21:]) == (
        2,
        4,
        ", changed by ours.toml"[1:],
    )
    path.write_text('base = "a100"\n[calibration]\nmatmul_efficiency = 0.7\n')
    assert cluster_of(str(path), 1).calibration.label == "set by ours.toml"


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "base = None: use one of a100"),
        ('base = "v100"', "base = 'v100': use one of a100"),
        ('base = "h100"\n[gpu]\nflops = 1', "gpu.flops = 1: no such key; use one of peak_flops, memory_bytes"),
        ('base = "h100"\n[gpu]\npeak_flops = "fast"', "gpu.peak_flops = 'fast': use a number, 1 or more"),
        ('base = "h100"\n[gpu]\npeak_flops = 0', "gpu.peak_flops = 0: use a number, 1 or more"),
        ('base = "h100"\n[gpu]\npeak_flops = 1e-300', "gpu.peak_flops = 1e-300: use a number, 1 or more"),
        ('base = "h100"\n[gpu]\nname = "cpu"', "gpu.name = 'cpu': no such key"),
        ('base = ["h100"]', "base = ['h100']: use one of"),
        ('base = "h100"\n[calibration]\nattention_backward = 7', "attention_backward = 7: use a part"),
        ('base = "h100"\n[calibration]\nfsdp_exposed = 9', "fsdp_exposed = 9: use a number from 0 to 1"),
        ('base = "h100"\n[node_link]\nlatency_s = -1', "node_link.latency_s = -1: use a number from 0"),
        ('base = "h100"\n[calibration]\nmemory_efficiency = 80', "memory_efficiency = 80: use a part"),
        ('base = "h100"\n[calibration]\nlabel = 1', "calibration.label = 1: use a text"),
        ('base = "h100"\n[network]\nbytes_per_s = 1', "network: not a section; use base"),
        ("base = ", "cannot be read as TOML"),
    ],
)
def test_what_a_file_cannot_say(tmp_path, text, said):
    path = tmp_path / "ours.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        cluster_of(str(path), 1)
    assert said in str(raised.value) and "ours.toml" in str(raised.value)


def test_no_such_gpu_or_file():
    with pytest.raises(
        ValueError, match="unknown GPU 'v100': use one of a100, a100-40, h100, h200, b200, cpu, or the path"
    ):
        cluster_of("v100", 1)
    with pytest.raises(ValueError, match="absent.toml: cannot be read"):
        cluster_of("absent.toml", 1)
    with pytest.raises(ValueError, match="0 nodes of 8 GPUs"):
        cluster_of("a100", 0)


LLAMA_COLUMNS = (
    "World Size,Average Step Time,activation_checkpointing_type,kernel,micro_batch_size,model_parallel_size,"
    "pipe_parallel_size,file,sequence_parallel"
)
GPT_COLUMNS = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
    "data parallelism,pipeline parallelism,iteration time (ms)"
)


def test_published_rows_are_read_by_their_columns(tmp_path):
    with pytest.raises(ValueError, match="no .csv file of published runs here; give their folder with --published"):
        read_folder(tmp_path)
    (tmp_path / "a.csv").write_text(
        f"{LLAMA_COLUMNS}\n64,OOM Error,every_layer,flash_attention2 + RMS kernel,2,4,2,llama_30B_8k_seq,True\n"
    )
    (tmp_path / "b.csv").write_text(
        f"{GPT_COLUMNS}\n16,64,2,1024,16,24,2048,2,4,2,500\n16,64,4,1024,16,24,2048,2,4,2,900\n"
    )
    llama, quick, slow = read_folder(tmp_path)
    assert (llama.run.layout, llama.run.hidden, llama.run.n_microbatches) == (Layout(pp=2, dp_shard=8, tp=4), 6656, 32)
    assert (llama.run.kernel, llama.run.recompute, llama.run.measured_s) == ("flash2", "layer", None)
    assert (quick.run.n_microbatches, quick.run.measured_s, quick.disturbed) == (8, 0.5, "") and slow.disturbed


def test_a_fit_finds_the_constants_behind_made_up_times(tmp_path):
    rows = [f"64,512,{mb},3072,32,30,2048,{tp},{64 // tp},1,1" for tp in (1, 2, 4, 8) for mb in (2, 4, 8)]
    (tmp_path / "made_up.csv").write_text("\n".join([GPT_COLUMNS, *rows]))
    truth = Constants().with_values({"matmul_efficiency": 0.6, "node_link_efficiency": 0.4})
    runs = [row.run for row in read_folder(tmp_path)]
    runs = [replace(run, measured_s=truth.step_seconds(run)) for run in runs]
    found = fit(runs, ["matmul_efficiency", "node_link_efficiency"], Constants(START), weights=100.0)
    assert found.calibration.matmul_efficiency == pytest.approx(0.6, rel=0.02)
    assert found.calibration.node_link_efficiency == pytest.approx(0.4, rel=0.05)


def test_ratios_that_published_runs_confirm():
    assert interleaving_gain(8, 8) == pytest.approx(
        (8 + 7) / (8 + 7 / 2)
    )  # bubbles: pp - 1, halved by two stages a rank
    speed = {(peer.row, peer.name.split(", ")[1]): peer.predicted for peer in peers() if peer.row in (12, 13)}
    gains = [speed[12, f"{n} GPUs"] / speed[13, f"{n} GPUs"] for n in (384, 768, 1536)]
    assert 1 < gains[0] < gains[1] < gains[2]  # tensor x pipeline parallel over ZeRO-3, by more at scale


@pytest.mark.parametrize("half", [0.0, 3.0, 200.0])
def test_the_half_size_behind_two_rates(half):
    rates = [(size / (size + half)) ** 3 for size in (128, 1024)]
    assert half_size(128, 1024, *rates) == pytest.approx(half, abs=1e-6)


def test_a_small_matmul_that_is_no_slower_than_a_large_one():
    assert half_size(128, 1024, 2.0, 1.0) == 0


@pytest.mark.parametrize("half", [0.0, 3.0, 420.0])
def test_the_half_length_behind_two_rates(half):
    rates = [size / (size + half) for size in (64, 512)]
    assert half_length(64, 512, *rates) == pytest.approx(half, abs=1e-6)
    assert half_length(64, 512, 2.0, 1.0) == 0
