"""What torch says when something outside the code is missing, in words that name what can be done about it."""

import errno
import re
import sys
import traceback
from dataclasses import dataclass

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
# A file and a function of the traceback -> what it was doing; the innermost frame that is in the table counts.
_PHASES = (
    (r"torch/autograd/|pipelining/_backward", r".*", "backward"),
    (r"torch/optim/|trainer/optimizer", r".*", "the optimizer's step"),
    (r"trainer/build|parallelize/materialize|trainer/hf_directory", r"build_model|materialize|fill_parameters|read", "building the model"),
    (r"trainer/loss|parallelize/linear_cross_entropy", r".*", "the loss"),
    (r"models/|pipelining/stage", r"forward.*", "forward"),
)  # fmt: skip
_STATE_ADVICE = 'a larger parallel.dp_shard, tp or pp (more processes), precision.param = "bfloat16" or precision.moments = "bfloat16"'
_OUT_OF_MEMORY_ADVICE = {
    "building the model": _STATE_ADVICE,
    "the optimizer's step": _STATE_ADVICE,
    "the loss": "half of training.micro_batch_size, or of training.loss_chunk_tokens",
}
_ACTIVATION_ADVICE = (
    'half of training.micro_batch_size, activation_checkpoint.mode = "full", a larger parallel.tp or pp, '
    'precision.param = "bfloat16"'
)


@dataclass(frozen=True)
class Known:
    """A message of torch, as a regular expression, and what it means to the user."""

    pattern: str
    meaning: str
    by_system: bool = False  # also where Python's OSError says it: of connections, those are not between ranks


# The first that is found counts.
_KNOWN = (
    Known(
        r"shared memory|/dev/shm|shm\b.*No space|torch_shm_manager",
        "/dev/shm, through which loader workers hand over batches, is too small: set data.workers = 0, or give the container "
        "more (docker run --shm-size=8g, or --ipc=host; Kubernetes: an emptyDir of medium Memory at /dev/shm)",
        by_system=True,
    ),
    Known(
        r"No space left on device|Disk quota exceeded|Read-only file system|File too large",
        "no room to write: see job.output_dir (checkpoint.keep_latest says how many checkpoints stay, metrics.tensorboard = false "
        "writes less) and data.cache_dir (default ~/.cache/meshloom)",
        by_system=True,
    ),
    Known(
        r"Too many open files",
        "too many open files: raise the limit (ulimit -n 65536) in the shell or job script that starts the run",
        by_system=True,
    ),
    Known(
        r"EADDRINUSE|[Aa]ddress already in use",
        "the port is in use, by another job or by what is left of one: set MASTER_PORT to another, the same on every machine",
        by_system=True,
    ),
    Known(
        r"clients? joined|Timed out .*waiting for clients|RendezvousTimeoutError|Rendezvous.*timed out",
        "not every process of the job came: are NNODES and --nproc the same on every machine, and has each been started "
        "with its own NODE_RANK?",
    ),
    Known(
        r"client socket has (timed out|failed)|Connection refused|ECONNREFUSED|No route to host|Name or service not known"
        r"|ECONNRESET|Connection reset|failed to connect|Broken pipe",
        "cannot reach another process of the job: does MASTER_ADDR name machine 0 as the others see it, has the job there "
        "been started, and is MASTER_PORT open between the machines? (python -m trainer doctor looks at this one)",
    ),
    Known(
        r"Unable to find address for|[Nn]o socket interface found|couldn't find.*interface|Failed to find.*interface",
        "a network interface that was asked for is not there: see GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in the environment "
        "(ip addr lists what there is)",
    ),
    Known(
        r"collective operation timeout|Watchdog caught|NCCL.*[Tt]ime[d ]?\s?out|Timed out waiting \d+ms|[Ww]ait timeout",
        "ranks waited for each other too long: one is slow, hung or gone (its last words are in logs/ of job.output_dir). If "
        "steps are that long, raise job.step_timeout_s; a job that should go on by itself wants --max-restarts",
    ),
    Known(
        r"Duplicate GPU detected|invalid device ordinal",
        "more processes than GPUs: --nproc is at most the GPUs of the machine (CUDA_VISIBLE_DEVICES hides some)",
    ),
    Known(
        r"driver .*(insufficient|too old)|no kernel image is available|CUDA initialization|forward compatibility",
        "this torch does not fit the GPU or its driver: python -m trainer doctor prints both; install the torch build of the "
        "driver's CUDA version",
    ),
    Known(
        r"ncclRemoteError|ncclSystemError|ncclInternalError|ncclUnhandledCudaError|NCCL error",
        "NCCL failed: another rank may have ended first (look for the first error above). If it is the first: NCCL_DEBUG=INFO says "
        "more, NCCL_SOCKET_IFNAME and NCCL_IB_DISABLE=1 choose links, and /dev/shm must not be tiny",
    ),
    Known(
        r"device-side assert",
        "a check on the GPU failed, most often an id outside the vocabulary: is model.vocab_size at least the tokenizer's? "
        "CUDA_LAUNCH_BLOCKING=1 shows where",
    ),
)  # fmt: skip


def is_out_of_memory(error: BaseException | None) -> bool:
    """Is it, or what it was raised from, torch's or Python's word for memory that is not there?"""
    return any(
        isinstance(link, MemoryError)
        or type(link).__name__ == "OutOfMemoryError"  # torch's, which need not be loaded here
        or "DefaultCPUAllocator: " in str(link)
        for link in _chain(error)
    )


def explain(error: BaseException, doing: str = "") -> str | None:
    """What an error of torch or of the system means and what helps, on one line; None for one that is not known.

    ``doing``: what was under way, for out of memory, such as "step 3".
    """
    if is_out_of_memory(error):
        phase = phase_of(error)
        doing = "" if doing == "starting" or phase == "building the model" else doing
        where = " of ".join(filter(None, [phase, doing]))
        advice = _OUT_OF_MEMORY_ADVICE.get(phase, _ACTIVATION_ADVICE)
        return f"out of memory{f' in {where}' if where else ''}. What helps: {advice}; python -m trainer plan predicts what fits"
    for link in _chain(error):
        for known in _KNOWN:  # others than these types are bugs of ours, whatever they say
            if isinstance(link, (RuntimeError, OSError) if known.by_system else RuntimeError):
                if re.search(known.pattern, str(link)):
                    return known.meaning
    return None


def phase_of(error: BaseException) -> str:
    """The part of a step in which it was raised, read off its traceback; "" if none is to be seen."""
    for link in reversed(list(_chain(error))):  # the original knows best
        for frame in reversed(traceback.extract_tb(link.__traceback__)):
            for file, function, phase in _PHASES:
                if re.search(file, frame.filename) and re.fullmatch(function, frame.name):
                    return phase
    return ""


def is_no_room(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _NO_ROOM


def say_explained(error: BaseException) -> None:
    """Above the traceback that Python is going to print: what it means, where that is known."""
    if text := explain(error):
        print(f"error: {text}\nwhat was said:", file=sys.stderr, flush=True)


def _chain(error: BaseException | None):
    """The error and what it was raised from: a pipeline stage wraps the original."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
