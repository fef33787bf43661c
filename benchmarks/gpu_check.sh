#!/usr/bin/env bash
# What one GPU shows of Meshloom, in under 6 minutes: do the GPU tests pass, is the loss of a tiny model the one that a CPU
# computes, and how fast are a 1B model and blocks as wide as an 8B's, eager and compiled? Ends with a table and a verdict
# against 55% MFU (attention counted over the whole square: docs/observability.md).
#
#     benchmarks/gpu_check.sh [OUT]         # one GPU of the H200 class, torch 2.11 or later
#     benchmarks/gpu_check.sh --cpu [OUT]   # the same pieces with tiny models, on any machine: is this script well?
#
# Needs no network. PYTHON=/path/to/python chooses the interpreter (default: .venv's, else python3). Every piece has its own
# time-out: one that fails or hangs is a line in the table, and the others run. What each said is in OUT/PIECE/console.log
# (OUT: outputs/gpu_check). Exit code 0: everything ran and the verdict is good.
set -uf  # no names of files in the flags below
cd "$(dirname "$0")/.."
ROOT=$PWD
export PYTHONPATH=$ROOT
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}
MODE=gpu; [ "${1:-}" = --cpu ] && { MODE=cpu; shift; }
OUT=${1:-outputs/gpu_check}
DEADLINE=$(($(date +%s) + 345)); [ $MODE = cpu ] && DEADLINE=$(($(date +%s) + 3600))

# The models. 1B needs about 90 GiB without recompute, "8B wide" (4 of its 32 layers) about 60 with.
ONE_B="--config llama3_2_1b.toml --training.seq_len=8192 --training.micro_batch_size=2 --training.global_batch_size=4 --activation_checkpoint.mode=none"
EIGHT_B="--config llama3_8b.toml --model.n_layers=4 --training.seq_len=8192 --training.micro_batch_size=1 --training.global_batch_size=4 --activation_checkpoint.mode=selective"
COMPILED="--compile.enabled=true"
# The variants: name | seconds at most | flags. Names that begin with "1B" count for the verdict. An option that is new gets
# a line of its own, such as one with a chunked loss and one with float8: the flags of a base, and its own behind them.
VARIANTS=(
    "1B eager             | 70  | $ONE_B"
    "1B compiled          | 110 | $ONE_B $COMPILED"
    "8B wide, compiled    | 110 | $EIGHT_B $COMPILED"
    "8B wide, eager       | 70  | $EIGHT_B"
)
TINY="--config debug.toml --model.dim=64 --model.n_heads=4 --model.n_kv_heads=2 --model.n_layers=2 --model.ffn_dim=128 --training.seq_len=32"
if [ $MODE = cpu ]; then
    VARIANTS=(
        "1B eager             | 600 | $TINY"
        "1B compiled          | 900 | $TINY $COMPILED --compile.backend=aot_eager"
        "8B wide, eager       | 600 | $TINY --activation_checkpoint.mode=selective"
    )
fi
# The last step is traced for the kernel gaps. Two steps a record: one of them waits for no log.
SHARED="--nproc 1 --training.steps=16 --metrics.log_interval=2 --debug.profile_steps=[16] --lr_schedule.warmup_steps=5 --parallel.dp_shard=1"
SHARED="$SHARED --checkpoint.enabled=false --checkpoint.resume=never --metrics.tensorboard=false --validation.interval=0"

# piece NAME SECONDS COMMAND...: run it in OUT/NAME, its output in console.log, its exit code in code (124: out of time).
piece() {
    local name=$1 seconds=$2 folder="$OUT/$1" left=$((DEADLINE - $(date +%s))); shift 2
    rm -rf "$folder"; mkdir -p "$folder"
    if [ $left -lt 15 ]; then echo 124 >"$folder/code"; echo "error: not begun: no time was left" >"$folder/console.log"; return; fi
    [ $seconds -gt $left ] && seconds=$left
    echo "$(date +%T) $name (at most $seconds s)"
    timeout -k 5 "$seconds" "$@" >"$folder/console.log" 2>&1
    local code=$?
    echo $code >"$folder/code"
    [ $code = 0 ] || echo "$(date +%T) $name: exit code $code"
}

"$PYTHON" benchmarks/gpu_report.py environment $MODE || exit 1
mkdir -p "$OUT"

# 1. The GPU tests, and meanwhile (neither is timed) the tiny model on both devices. On a CPU: eager against compiled.
SAME="$TINY --nproc 1 --training.steps=5 --precision.compute=float32 --checkpoint.enabled=false --metrics.tensorboard=false"
if [ $MODE = gpu ]; then
    piece tests 90 "$PYTHON" -m pytest -o addopts=--strict-markers -q -m gpu tests/gpu &
    piece tiny-cpu 60 env CUDA_VISIBLE_DEVICES= "$PYTHON" -m trainer.launch $SAME "--job.output_dir=$OUT/tiny-cpu"
    piece tiny-gpu 60 "$PYTHON" -m trainer.launch $SAME "--job.output_dir=$OUT/tiny-gpu"
    wait
else
    piece tests 600 "$PYTHON" -m pytest -o addopts=--strict-markers -q -m gpu tests/gpu
    piece tiny-cpu 600 "$PYTHON" -m trainer.launch $SAME "--job.output_dir=$OUT/tiny-cpu"
    piece tiny-gpu 600 "$PYTHON" -m trainer.launch $SAME $COMPILED --compile.backend=eager "--job.output_dir=$OUT/tiny-gpu"
fi

# 2. The variants, one after another.
names=()
for variant in "${VARIANTS[@]}"; do
    IFS='|' read -r name seconds flags <<<"$variant"
    name=$(echo $name); names+=("$name")
    piece "$name" $seconds "$PYTHON" -m trainer.launch $flags $SHARED "--job.output_dir=$OUT/$name"
done

# 3. What it all says.
"$PYTHON" benchmarks/gpu_report.py table $MODE "$OUT" "${names[@]}"
