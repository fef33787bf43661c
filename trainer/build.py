"""The composition root: the one file that builds models and plans and puts them together."""

import contextlib
import importlib.util
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from models.decoder import Decoder
from models.decoder_config import DecoderConfig
from models.initialize import draw_slice, initial_std
from models.lora import adaptable, add_adapters
from models.names import is_adapter
from parallelize.apply import ResolvedPlan, Treatment, parallelize_inside, parallelize_part, resolve_plan
from parallelize.float8 import Float8, NothingChosen
from parallelize.fsdp import Precision
from parallelize.layout import Layout
from parallelize.linear_cross_entropy import linear_cross_entropy
from parallelize.local_model import LocalModel, collect, original_names
from parallelize.local_styles import first_row
from parallelize.materialize import fill_parameters, materialize
from parallelize.mesh import Mesh
from parallelize.pipeline import Pipeline, split_stage
from parallelize.plan import decoder_plan
from trainer.config import Config
from trainer.config import Float8 as Float8Keys
from trainer.config_rules import Resolved
from trainer.config_training import Lora
from trainer.data.rows import IGNORED
from trainer.errors import UserError
from trainer.extend import Family, extension_of
from trainer.hf_directory import HfWeights
from trainer.layout_rules import reshards
from trainer.loss import TokenLoss
from trainer.optimizer import build_optimizer
from trainer.rank import on_main_rank
from trainer.step import InTurn, TrainStep
from trainer.tuning import glob_problems, group_of, is_frozen, is_lora, lora_scale, matches


def compute_dtype(config: Config, device_type: str) -> str:
    """ "auto" resolved: bfloat16 on a GPU, float32 on a CPU."""
    wanted = config.precision.compute
    return wanted if wanted != "auto" else "bfloat16" if device_type == "cuda" else "float32"


def precision_of(config: Config, device_type: str) -> Precision:
    """The dtypes of the ``[precision]`` section."""
    return Precision(
        param=getattr(torch, config.precision.param),
        frozen=getattr(torch, config.precision.frozen or config.precision.param),
        compute=getattr(torch, compute_dtype(config, device_type)),
        reduce=getattr(torch, config.precision.reduce),
    )


def treatment_of(config: Config, layout: Layout, device_type: str) -> Treatment:
    """The config's flags as the numbers and dtypes that ``parallelize`` takes."""
    return Treatment(
        precision=precision_of(config, device_type),
        float8=_float8_of(config.float8, device_type),
        recompute=config.activation_checkpoint.mode,
        recompute_every=config.activation_checkpoint.every,
        compile_backend=config.compile.backend if config.compile.enabled else None,
        compile_mode=config.compile.mode,
        memory_budget=config.compile.memory_budget,
        reshard_after_forward=reshards(config, layout),
    )


def _float8_of(section: Float8Keys, device_type: str) -> Float8 | None:
    if section.recipe == "none":
        return None
    named = f'float8.recipe = "{section.recipe}"'
    if importlib.util.find_spec("torchao") is None:
        raise UserError(f"{named} needs torchao: pip install 'meshloom[float8]'")
    if not section.emulate and (device_type != "cuda" or torch.cuda.get_device_capability() < (8, 9)):
        raise UserError(
            f"{named} needs a GPU with float8 units (H100 and later); float8.emulate = true computes its rounding alone"
        )
    return Float8(section.recipe, section.layers, section.min_features, section.emulate)


def build_meta_parts(resolved: Resolved, stage_indices: tuple[int, ...] = (0,)) -> tuple[list[nn.Module], ResolvedPlan]:
    """Stage modules on the meta device, not yet parallel, and the plan resolved on the whole model."""
    config, architecture = resolved.config, resolved.architecture
    whole = meta_model(config, architecture)
    whole.output.defers = defers_projection(config)
    plan = decoder_plan(
        sequence_parallel=config.parallel.sequence_parallel,
        loss_parallel=config.parallel.loss_parallel,
        tie_embeddings=architecture.tie_embeddings,
        qk_norm=architecture.qk_norm,
        replicated_kv_heads=architecture.n_kv_heads if resolved.replicates_kv_heads else None,
    )
    if own_plan := _family(config).plan:
        plan = own_plan(plan, config.parallel.sequence_parallel)
    parts = [split_stage(whole, plan, resolved.layers_per_stage, stage) for stage in stage_indices]
    return parts, resolve_plan(whole, plan)


def _family(config: Config) -> Family:
    """What a file of the user's says of the model, if it is one of its families."""
    return extension_of(config.job.imports).families.get(config.model.family, Family({}))


def meta_model(config: Config, architecture: DecoderConfig) -> Decoder:
    """The whole model on the meta device, with adapters, and parameters frozen as the config says.

    Globs that match nothing are let pass: ``check_tuning`` has seen them on the model of the run, of which this may be a block.
    """
    precision = precision_of(config, "cpu")
    with torch.device("meta"):
        whole = (_family(config).model or Decoder)(architecture, n_positions=config.training.seq_len)
        whole = whole.to(precision.param)
    if is_lora(config):
        targets = [name for name in adaptable(whole) if matches(name, config.lora.targets)]
        add_adapters(whole, targets, config.lora.rank, lora_scale(config.lora))
    for name, parameter in whole.named_parameters():
        if is_frozen(config, name):
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(precision.frozen)
    return whole


def trained_names(config: Config, architecture: DecoderConfig) -> list[str]:
    """The parameters of the whole model that are trained."""
    return [name for name, parameter in meta_model(config, architecture).named_parameters() if parameter.requires_grad]


def flops_per_token(config: Config, architecture: DecoderConfig) -> int:
    """``DecoderConfig.flops_per_token`` of this training: without gradients of frozen matrices, and with adapters."""
    flops = architecture.flops_per_token(config.training.seq_len)
    if not (is_lora(config) or config.training.freeze):
        return flops
    for name, parameter in meta_model(config, architecture).named_parameters():
        looked_up = name == "tok_embeddings.weight" and not architecture.tie_embeddings
        if is_adapter(name):
            flops += (6 if parameter.requires_grad else 4) * parameter.numel()
        elif not parameter.requires_grad and not looked_up:
            flops -= 2 * parameter.numel()
    return flops


def with_matching_globs(config: Config, architecture: DecoderConfig) -> Config:
    """The config without globs that match nothing in a model with fewer layers than the run's."""
    whole = meta_model(config, architecture)
    names, projections = [name for name, _ in whole.named_parameters()], adaptable(whole)

    def matching(globs: tuple[str, ...], among: list[str]) -> tuple[str, ...]:
        return tuple(glob for glob in globs if any(matches(name, [glob]) for name in among))

    groups = [group.model_copy(update={"match": matching(group.match, names)}) for group in config.optimizer.groups]
    targets = matching(config.lora.targets, projections) or Lora().targets
    sections = {
        "training": config.training.model_copy(update={"freeze": matching(config.training.freeze, names)}),
        "lora": config.lora.model_copy(update={"targets": targets}),
        "optimizer": config.optimizer.model_copy(update={"groups": tuple(group for group in groups if group.match)}),
    }
    return config.model_copy(update=sections)


def check_tuning(config: Config, architecture: DecoderConfig) -> list[str]:
    """What is wrong with the config's globs over parameters and projections, held against the whole model."""
    whole, trained = meta_model(config, architecture), trained_names(config, architecture)
    frozen = [name for name, parameter in whole.named_parameters() if not parameter.requires_grad]
    return list(glob_problems(config, trained, frozen, adaptable(whole)))


def defers_projection(config: Config) -> bool:
    """Whether the loss projects piece by piece: of a vocabulary that is spread only where its logits may be."""
    training, parallel = config.training, config.parallel
    return 0 < training.loss_chunk_tokens < training.seq_len and (parallel.tp == 1 or parallel.loss_parallel)


def build_units(resolved: Resolved, mesh: Mesh, device_type: str) -> Decoder:
    """A decoder of one block on meta, in the compute dtype, that each unit can be taken from: all but FSDP2."""
    (part,), resolved_plan = build_meta_parts(resolved)
    treatment = treatment_of(resolved.config, resolved.layout, device_type)
    parallelize_inside(part.to(treatment.precision.compute), resolved_plan, mesh, treatment)
    return part


def allocate_units(part: Decoder, device: torch.device) -> None:
    """Real memory with some weights in it, for units that only time is wanted of."""
    materialize(part, device)
    part.rebuild_buffers(device)
    generator = torch.Generator(device).manual_seed(0)  # not the run's own
    with torch.no_grad():
        for parameter in part.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.normal_(std=0.02, generator=generator)


def build_model(
    resolved: Resolved,
    mesh: Mesh,
    device: torch.device,
    initialise: bool = True,
    allocate: Callable[[nn.Module, torch.device], None] = materialize,
) -> LocalModel:
    """Build on meta, split, parallelize, allocate this rank's shards and initialise them.

    Initial values come from the Hugging Face directory, if the config names one, else they are drawn.
    ``initialise`` False leaves them as the memory was, for a checkpoint to fill.
    """
    config, architecture = resolved.config, resolved.architecture
    indices = tuple(stage for stage, rank in enumerate(resolved.stage_ranks) if rank == mesh.index("pp"))
    parts, resolved_plan = build_meta_parts(resolved, indices)
    treatment = treatment_of(config, resolved.layout, device.type)
    originals = original_names(resolved_plan.plan)

    value_of = initial_values(config, architecture, on_main_rank) if initialise else None

    def initial_value(name, *slice_of):
        return value_of(originals.get(name, name), *slice_of)

    for part in parts:
        try:
            parallelize_part(part, resolved_plan, mesh, treatment)
        except NothingChosen as error:
            raise UserError(f"float8.recipe: {error}") from None
        allocate(part, device)
        part.rebuild_buffers(device)
        if initialise:
            fill_parameters(part, initial_value)
    ends = resolved.stage_ranks[0], resolved.stage_ranks[-1]
    return collect(parts, indices, resolved_plan.plan, mesh, ends)


def initial_values(
    config: Config, architecture: DecoderConfig, once: Callable = lambda function, *arguments: function(*arguments)
) -> Callable[[str, tuple, tuple, tuple], torch.Tensor]:
    """(name, shape, start, stop) -> the slice of a parameter's initial value, from the Hugging Face directory or drawn.

    once: how the directory's check is called. Raises ``UserError``.
    """
    weights = None
    if config.model.hf_path:
        weights = HfWeights(config.model.hf_path)
        once(weights.check, parameter_shapes(architecture), architecture.tie_embeddings)

    start_of = getattr(_family(config).model, "initial_std", initial_std)

    def initial_value(name, shape, start, stop):
        if weights is not None and not is_adapter(name):
            return weights.read(name, shape, start, stop)
        return draw_slice(config.job.seed, name, start_of(architecture, name), shape, start, stop)

    return initial_value


def token_loss(resolved: Resolved, mesh: Mesh) -> TokenLoss:
    """The loss of a micro-batch, from logits or piece by piece from what comes before them."""
    tp_mesh, vocab_size = mesh.axis("tp"), resolved.architecture.vocab_size
    first_id = 0 if tp_mesh is None else first_row(vocab_size, tp_mesh)
    piece = resolved.config.training.loss_chunk_tokens
    if own := extension_of(resolved.config.job.imports).loss:
        return TokenLoss(summed=own)
    return TokenLoss(partial(linear_cross_entropy, ignored=IGNORED, piece=piece, mesh=tp_mesh, first_id=first_id))


def build_train_step(
    resolved: Resolved, model: LocalModel, mesh: Mesh, device: torch.device, **pipeline_options
) -> TrainStep:
    """The optimizer and everything that one step does to the model. ``pipeline_options``: of ``Pipeline``, if any."""
    config, layout = resolved.config, resolved.layout
    section = config.optimizer
    optimizer = build_optimizer(
        [*model.trained.items(), *model.trained_copies.items()],
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        group_of=partial(group_of, config),
        small_moments=config.precision.moments == "bfloat16" != config.precision.param,
    )
    for hook in extension_of(config.job.imports).optimizer_hooks:
        hook(optimizer, dict(model.trained))
    loss_fn = token_loss(resolved, mesh)
    if layout.pp == 1:
        micro_batches = InTurn(
            model, loss_fn, config.training.micro_batch_size, reduce_once=not reshards(config, layout)
        )
    else:
        micro_batches = Pipeline(
            model.parts, model.stage_indices, len(resolved.layers_per_stage), config.parallel.schedule,
            resolved.n_microbatches, resolved.n_schedule_runs, mesh, device, loss_fn, **pipeline_options,
        )  # fmt: skip
    sharded_logits = layout.tp > 1 and config.parallel.loss_parallel
    return TrainStep(
        micro_batches, loss_fn, model, optimizer, layout, config.training.max_grad_norm,
        loss_context=loss_parallel if sharded_logits else contextlib.nullcontext,
    )  # fmt: skip


def parameter_shapes(architecture: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter of the whole model, a tied one once."""
    with torch.device("meta"):
        model = Decoder(architecture, n_positions=1)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
