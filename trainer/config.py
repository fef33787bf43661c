"""Every configuration key: its type, default, unit and meaning.

Sections are typed, frozen and strict. Reading files and the command line is ``config_load.py``; rules
that tie several keys together are ``config_rules.py``.
"""

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, field_validator

from trainer.config_training import Lora, LrSchedule, Optimizer, Training
from trainer.config_types import Count, CountOrOff, Dtype, Fraction, Positive, Section, Table

TorchSchedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


class Job(Section):
    output_dir: str | None = Field(
        None,
        min_length=1,
        description='folder of everything the run writes (default: "outputs/" and the config file\'s name, with the '
        "--parallel overrides behind it, so that layouts can be compared)",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="seed of the initial weights")
    imports: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description="Python files of yours that register a model family, a loss or an optimizer hook (docs/api.md); also "
        "--import FILE",
    )
    step_timeout_s: Annotated[float, Field(ge=0, le=1_000_000)] = Field(
        600.0,
        description="end the job, with the stacks of all ranks, when a step and its data take longer (the first step: "
        "5 times as long); 0: never",
    )
    gc_interval: CountOrOff = Field(
        50,
        description="steps between collections of Python's cyclic garbage, on every rank at the same step; 0: whenever Python "
        "likes, on each rank at another time",
    )


class Model(Section):
    family: str = Field("llama", description='"llama", "qwen", or one that a file of job.imports registers')
    size: str = Field("debug", description="named size of the family; any key below overrides one of its numbers")
    hf_path: str | None = Field(
        None,
        min_length=1,
        description="a Hugging Face directory (config.json, safetensors) to take architecture and initial weights from, "
        "instead of family and size",
    )
    dim: Count | None = Field(None, description="width of the residual stream")
    n_layers: Count | None = Field(None, description="number of decoder blocks")
    n_heads: Count | None = Field(None, description="query heads")
    n_kv_heads: Count | None = Field(None, description="key/value heads; divides n_heads")
    head_dim: Count | None = Field(None, description="channels per head (default dim / n_heads)")
    ffn_dim: Count | None = Field(None, description="hidden width of the feed-forward")
    vocab_size: Count | None = Field(None, description="rows of the embedding; at least the tokenizer's ids")
    norm_eps: Positive | None = Field(None, description="epsilon of the norms")
    rope_theta: Positive | None = Field(None, description="base of the rotary frequencies")
    rope_factor: Annotated[float, Field(ge=1)] | None = Field(
        None, description="stretch of the rotary frequencies to longer contexts, as in Llama 3.1; 1: none"
    )
    rope_low_freq_factor: Positive | None = Field(
        None, description="wavelengths above rope_original_positions / this are divided by rope_factor"
    )
    rope_high_freq_factor: Positive | None = Field(
        None, description="wavelengths below rope_original_positions / this are kept"
    )
    rope_original_positions: Count | None = Field(None, description="context length before the stretch")
    tie_embeddings: bool | None = Field(None, description="one matrix for input embedding and output")
    qkv_bias: bool | None = Field(None, description="biases on the query, key and value projections")
    wo_bias: bool | None = Field(None, description="a bias on the attention's output projection")
    qk_norm: bool | None = Field(None, description="a norm over each query and key head")


DataKind = Literal["auto", "text", "jsonl", "parquet", "prepared", "megatron", "nanogpt", "hf", "chat"]
_PATH = (
    "text, .jsonl or .parquet, also .gz and .zst, also a pattern such as data/*.jsonl; a folder that prepare made; a .bin with or "
    "without .idx; hf://NAME; or a URL of these"
)


class DataSource(Section):
    path: str = Field(min_length=1, description=_PATH)
    source: DataKind = Field("auto", description="what lies there, where its name does not say so")
    weight: Annotated[float, Field(ge=0)] = Field(1.0, description="share of the samples, in proportion to the others'")
    epochs: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="instead of weight, of all sources or none: a source with 2 is read twice while one with 1 is read once",
    )


class CurriculumStage(Section):
    step: Count = Field(description="the first step with these weights")
    weights: Annotated[dict[str, Annotated[float, Field(ge=0)]], AfterValidator(Table)] = Field(
        description="new weights by source; those it does not name keep theirs"
    )


class Data(Section):
    source: DataKind | Literal["bundled"] = Field(
        "auto",
        description='what lies at data.path, where its name does not say so; "auto" without a path, and "bundled": a novel that '
        "ships with the code",
    )
    path: str | None = Field(None, min_length=1, description=_PATH)
    sources: Annotated[dict[Annotated[str, Field(pattern=r"^[\w-]+$")], DataSource], AfterValidator(Table)] = Field(
        default_factory=Table,
        description="instead of path, tables [data.sources.NAME] with path, weight and, where the name does not say it, source",
    )
    curriculum: tuple[CurriculumStage, ...] = Field(
        (), description="tables [[data.curriculum]] with step, the first with other weights, and weights = {NAME = ...}"
    )
    epochs: CountOrOff = Field(
        0,
        description="end the run before the first step that would read a row of a source once more than this; 0: never",
    )
    text_field: str = Field(
        "text", min_length=1, description="of a JSONL line, or column of a parquet file: what is read"
    )
    bad_lines: Literal["error", "skip"] = Field(
        "error", description="a line that is no JSON, has no text or is not UTF-8: say where and stop, or leave it out"
    )
    cache_dir: str | None = Field(
        None,
        min_length=1,
        description="where the tokens of text that is not small are kept (default: ~/.cache/meshloom)",
    )
    tokenizer: str | None = Field(
        None,
        min_length=1,
        description='"bytes", "smollm2" (bundled, 49,152 ids), or a tokenizer.json of Hugging Face or its folder '
        '(default: model.hf_path, else "bytes")',
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="seed of the order of the rows")
    shuffle: bool = Field(True, description="draw a new order of the rows every epoch; false: in file order")
    packing: Literal["concatenate", "best_fit"] | None = Field(
        None,
        description='how documents become rows: one after another, cut where a row ends; or whole, wherever they fit best: "best_fit" '
        '(default: "best_fit" for sft and lora, else "concatenate")',
    )
    isolate_documents: bool | None = Field(
        None,
        description="attention does not cross the border of a document, and its positions start at 0 (default: true for sft and lora)",
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="file of the jinja template by which conversations become text (default: the tokenizer's own)",
    )
    too_long: Literal["error", "skip", "truncate"] = Field(
        "error",
        description="conversations longer than a row: stop and name them, leave them out, or leave out what is behind seq_len",
    )
    workers: CountOrOff = Field(0, description="loader processes per rank; 0: read in the training process")


class Parallel(Section):
    layout: Literal["manual", "auto"] = Field(
        "manual",
        description='"auto": the planner chooses all keys of this section, micro-batch size and recompute for the GPUs '
        "that are there, at the start of train",
    )
    tp: Count = Field(1, description="tensor parallel degree")
    pp: Count = Field(1, description="pipeline stages (ranks)")
    cp: Count = Field(1, description="context parallel degree; only 1 for now")
    dp_shard: Count | Literal[-1] = Field(-1, description="FSDP2 degree; -1: all ranks that are left")
    dp_replicate: Count = Field(1, description="copies of the sharded model (HSDP)")
    schedule: (
        TorchSchedule | Annotated[str, Field(pattern=r"\.[cC][sS][vV]$", description="the path of a .csv file")]
    ) = Field("1F1B", description="pipeline schedule: torch's name in any case, or a file (docs/parallelism.md)")

    @field_validator("schedule", mode="before")
    @classmethod
    def _any_case(cls, value):
        names = {name.lower(): name for name in get_args(TorchSchedule)}
        return names.get(value.lower(), value) if isinstance(value, str) else value

    schedule_microbatches: Count | None = Field(
        None,
        description="micro-batches in one run of the schedule, of which a step makes several; default: all of a step "
        "in one run. GPipe, LoopedBFS and DualPipeV keep activations of a whole run",
    )
    virtual_stages: Count | None = Field(
        None, description="stages per pipeline rank (default: 2 for the interleaved and V-shaped schedules, else 1)"
    )
    balance: Literal["uniform", "flops", "measured"] | tuple[Count, ...] = Field(
        "uniform",
        description='layers per stage: "uniform" (differ by at most 1), "flops" (the slowest stage as fast as can be, the head '
        'counted), "measured" (the same by seconds, measured at the first start of a run), or a list, one number a stage',
    )
    replicate_kv_heads: bool = Field(
        False, description="with tp a multiple of n_kv_heads: every rank computes all key/value heads and uses its own"
    )
    tp_across_nodes: bool = Field(
        False,
        description="let a tensor parallel group span machines, whose links are many times slower than a machine's",
    )
    sequence_parallel: bool = Field(True, description="with tp: shard the residual stream and norms over the sequence")
    loss_parallel: bool = Field(True, description="with tp: keep the logits sharded over the vocabulary")
    reshard_after_forward: Literal["auto", "always", "never"] = Field(
        "auto",
        description="free gathered parameters after each forward and reduce gradients after each backward, or keep both "
        'whole for the step ("never": faster, more memory); "auto": always with dp_shard and without pp',
    )


class Precision(Section):
    param: Dtype = Field("float32", description="stored parameters and their gradients")
    frozen: Dtype | None = Field(None, description="stored parameters that are not trained (default: as param)")
    compute: Dtype | Literal["auto"] = Field(
        "auto", description='forward and backward; "auto": bfloat16 on a GPU, else float32'
    )
    reduce: Dtype = Field("float32", description="gradient reduction over data ranks")
    moments: Literal["param", "bfloat16"] = Field(
        "param",
        description="what the optimizer's two moments are stored in, as param or at half of float32's memory; they are updated in "
        "float32",
    )


class ActivationCheckpoint(Section):
    mode: Literal["none", "selective", "full"] = Field(
        "none",
        description='recompute in the backward: nothing; all but attention and every second matmul ("selective"); each whole block',
    )
    every: Count = Field(1, description="recompute only each so many-th block, from the first on; 1: all")

    @property
    def shown(self) -> str:
        return self.mode if self.every == 1 or self.mode == "none" else f"{self.mode} of every {self.every} blocks one"


class Float8(Section):
    recipe: Literal["none", "tensorwise", "rowwise"] = Field(
        "none",
        description="matmuls of the blocks in float8, with one scale a tensor or one a row (needs the extra float8)",
    )
    layers: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        ("*",), description='globs of the projections within a block, such as "feed_forward.*"'
    )
    min_features: Count = Field(1024, description="projections with fewer inputs or outputs stay as they are")
    emulate: bool = Field(
        False, description="compute only its rounding, on any device: for tests of the loss where no GPU has float8"
    )


class Compile(Section):
    enabled: bool = Field(False, description="torch.compile each decoder block")
    backend: Literal["inductor", "aot_eager", "eager"] = Field("inductor", description="compiler back end")
    mode: Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"] = Field(
        "default",
        description="of inductor: CUDA graphs around each block (reduce-overhead), kernels chosen by measuring them "
        "(max-autotune-no-cudagraphs), or both",
    )
    memory_budget: Fraction = Field(
        1.0,
        description="share of a block's activations that inductor may keep, choosing itself what to compute again: 0 is as "
        'activation_checkpoint.mode = "full", 1 keeps all that speeds it up',
    )


class Checkpoint(Section):
    enabled: bool = Field(True, description="false: write none, not even of the last step; the run cannot be resumed")
    interval: CountOrOff = Field(50, description="steps between checkpoints; 0: only the last step")
    keep_latest: CountOrOff = Field(3, description="newest checkpoints kept; 0: all")
    keep_every: CountOrOff = Field(0, description="and for good, those of every so many steps; 0: none")
    async_save: bool = Field(
        False, description="write in the background, from a copy in host memory: training waits for the copy alone"
    )
    timeout_s: Annotated[float, Field(ge=0, le=10_000)] = Field(
        1800.0, description="end the job when training waits longer for a checkpoint to be written; 0: never"
    )
    keep_best: bool = Field(
        False,
        description="keep the one with the lowest validation loss as well; it needs a validation at every checkpoint",
    )
    on_failure: Literal["stop", "warn"] = Field(
        "stop", description='a checkpoint cannot be written: stop, or go on (the last one must be): "warn"'
    )
    resume: str = Field(
        "auto",
        min_length=1,
        description='"auto": the newest checkpoint of output_dir, if any; "never"; or a checkpoint folder',
    )

    init_from: str | None = Field(
        None,
        min_length=1,
        description="a checkpoint folder whose weights and architecture, and nothing else, a new run starts from",
    )
    export_dir: str | None = Field(
        None, min_length=1, description="after the last step, write the model here as a Hugging Face directory"
    )
    export_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="of the files in export_dir"
    )


class Validation(Section):
    interval: CountOrOff = Field(0, description="steps between validations, and after the last step; 0: none")
    batches: Count = Field(
        10, description="global batches of each, always the same: the first of the text, in file order"
    )
    sets: Annotated[
        dict[Annotated[str, Field(pattern=r"^[\w-]+$")], Annotated[str, Field(min_length=1)]], AfterValidator(Table)
    ] = Field(
        default_factory=Table,
        description='files by name, such as {novels = "held_out.txt", code = "code.jsonl.gz"}: the loss of each, and of all '
        "together (default: the training text itself)",
    )


class Metrics(Section):
    log_interval: Count = Field(1, description="steps between logged steps; the last step is always logged")
    tensorboard: bool = Field(True, description="write TensorBoard event files")
    loss_spike: Annotated[float, Field(ge=0)] = Field(
        6.0, description="warn of a loss so many standard deviations above the mean of the 100 logged before; 0: off"
    )
    wandb_project: str | None = Field(
        None, min_length=1, description="report to Weights & Biases as well, under this project (needs the extra wandb)"
    )
    rank_logs: bool = Field(True, description="a log file of each rank in output_dir/logs")
    straggler_interval: CountOrOff = Field(
        0, description="steps between reports of the slowest rank, from a profile of one step on every rank; 0: none"
    )
    pipeline_steps: tuple[Count, ...] = Field(
        (), description="steps on which every action of the pipeline is timed, for pipeline-plot --measured"
    )


class Debug(Section):
    determinism: bool = Field(False, description="only deterministic kernels, and an error where there is none")
    anomaly: bool = Field(False, description="name the forward operation behind a nan in the backward; slow")
    profile_steps: tuple[Count, ...] = Field(
        (), description="steps that are traced, into output_dir/profile, for Perfetto or TensorBoard"
    )
    profile_ranks: tuple[CountOrOff, ...] = Field((0,), min_length=1, description="ranks that are traced")
    memory_history: bool = Field(
        False, description="on a GPU: note where memory is allocated, for the snapshot that is written when it runs out"
    )


class Config(Section):
    """The whole configuration, one attribute a TOML table."""

    job: Job = Job()
    model: Model = Model()
    data: Data = Data()
    training: Training = Training()
    lora: Lora = Lora()
    optimizer: Optimizer = Optimizer()
    lr_schedule: LrSchedule = LrSchedule()
    parallel: Parallel = Parallel()
    precision: Precision = Precision()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    float8: Float8 = Float8()
    compile: Compile = Compile()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    metrics: Metrics = Metrics()
    debug: Debug = Debug()
