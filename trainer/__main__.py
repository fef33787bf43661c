"""``python -m trainer COMMAND``, also installed as ``meshloom COMMAND``."""

import argparse
import json
import os
import signal
import sys

if __name__ == "__main__":  # while all is loaded Ctrl-C ends this process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from trainer.config import Config
from trainer.config_load import key_help, key_page, load_config, split_overrides
from trainer.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, UserError
from trainer.explain import say_explained
from trainer.runs import STATES_HELP
from trainer.signals import StopRequest

_NPROC = {"metavar": "N", "type": int, "help": "processes (default: its GPUs, else what the layout needs)"}
_JSON = {"action": "store_true", "help": "print the result as JSON"}
_CHECKPOINT = {"metavar": "STEP_DIR", "help": "a checkpoint folder, such as outputs/debug/checkpoints/step-00000100"}
_HF = {"metavar": "DIR", "help": "a Hugging Face directory"}


def train(options, overrides) -> int:
    stop = StopRequest()  # before torch loads, so that Ctrl-C is never a traceback
    config = load_config(options.config, overrides)
    from trainer import train

    return train.main(config, stop)


def verify(options, overrides) -> int:
    from trainer import verify_command

    return verify_command.main(options, load_config(options.config, overrides))


def evaluate(options, overrides) -> int:
    from trainer import evaluate

    return evaluate.main(options, overrides)


def sample(options, overrides) -> int:
    _no_keys("sample", overrides)
    from trainer import sample

    return sample.main(options)


def import_hf(options, overrides) -> int:
    _no_keys("import-hf", overrides)
    from trainer import hf_import

    return hf_import.import_command(options)


def export_hf(options, overrides) -> int:
    if options.config is None:
        _no_keys("export-hf without --config", overrides)
    config = load_config(options.config, overrides) if options.config else None
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages: a third of the reading goes into page faults
    from trainer import hf_export

    return hf_export.export_command(options, config)


def plan(options, overrides) -> int:
    from trainer import plan_command

    return plan_command.main(options, overrides)


def pipeline_plot(options, overrides) -> int:
    from trainer import pipeline_plot

    return pipeline_plot.main(options, overrides)


def bench(options, overrides) -> int:
    from trainer import bench

    return bench.main(options, overrides)


def prepare(options, overrides) -> int:
    _no_keys("prepare", overrides)
    from trainer import prepare_command

    return prepare_command.main(options)


def inspect_data(options, overrides) -> int:
    from trainer import inspect_data

    return inspect_data.main(options, load_config(options.config, overrides))


def runs(options, overrides) -> int:
    _no_keys("runs", overrides)
    from trainer import runs

    return runs.main(options)


def doctor(options, overrides) -> int:
    from trainer import doctor

    return doctor.main(options, overrides)


def wizard(options, overrides) -> int:
    from trainer import wizard

    return wizard.main(options, overrides)


def schema(options, overrides) -> int:
    _no_keys("schema", overrides)
    print(key_page() if options.markdown else json.dumps(Config.model_json_schema(), indent=1))
    return 0


def _no_keys(command: str, overrides) -> None:
    if overrides:
        raise UserError(f"{command} takes no configuration keys ({overrides[0].shown})")


# name: (function, what it does, its own arguments, whether it takes a config; None: only its keys)
COMMANDS = {
    "train": (train, "train as this one process, or as one rank under torchrun (./run_train.sh starts them all)", {}, True),
    "evaluate": (
        evaluate,
        "the loss of a model on the config's validation sets, else its data, in file order, at the config's layout",
        {
            "--checkpoint": _CHECKPOINT
            | {"help": "weights to evaluate (default: the config's initial weights); without --config, by its run's config"},
            "--batches": {"metavar": "K", "type": int, "help": "global batches to read of each (default: all of it once)"},
            "--nproc": _NPROC,
            "--json": _JSON,
        },
        True,
    ),
    "sample": (
        sample,
        "continue a prompt with a model, greedily: a quick look",
        {
            "--checkpoint": _CHECKPOINT,
            "--hf": _HF,
            "--tokenizer": {"metavar": "T", "help": "as data.tokenizer (default: the model's own)"},
            "--prompt": {"metavar": "TEXT", "required": True, "help": "the text to continue"},
            "--chat": {
                "action": "store_true",
                "help": "the prompt is what a user says: ask with the model's chat template, and stop where its turn ends",
            },
            "--system": {"metavar": "TEXT", "help": "with --chat: a system prompt"},
            "--tokens": {"metavar": "K", "type": int, "default": 50, "help": "tokens to add at most (default 50)"},
        },
        False,
    ),
    "import-hf": (
        import_hf,
        "write a Hugging Face directory as a checkpoint that any layout can start from (checkpoint.init_from)",
        {
            "--hf": _HF | {"required": True},
            "--out": {"metavar": "DIR", "required": True, "help": "the checkpoint folder to write"},
        },
        False,
    ),
    "export-hf": (
        export_hf,
        "write a checkpoint as a Hugging Face directory",
        {
            "--checkpoint": _CHECKPOINT | {"help": "what to export (default: the newest checkpoint of --config)"},
            "--out": {"metavar": "DIR", "required": True, "help": "the directory to write"},
            "--dtype": {"choices": ["float32", "bfloat16", "float16"], "help": "of the files (default: as stored)"},
            "--merge": {
                "action": "store_true",
                "help": "of a lora run: the whole model, adapters added (default: adapters alone, as PEFT reads them)",
            },
            "--max-shard-gb": {"metavar": "X", "type": float, "default": 2.0, "help": "size of a file in GB (default 2)"},
        },
        True,
    ),
    "verify": (
        verify,
        "show that a config gives the same numbers at its layout as on one process",
        {
            "--nproc": _NPROC,
            "--steps": {"metavar": "K", "type": int, "default": 3, "help": "optimizer steps to compare (default 3)"},
            "--json": _JSON,
        },
        True,
    ),
    "plan": (
        plan,
        "predict memory and time of layouts on a cluster of GPUs, and choose: on any machine, without them",
        {
            "--gpu": {"metavar": "G", "default": "h100", "help": "a100, h100, h200, b200, cpu or a TOML file (default h100)"},
            "--nodes": {"metavar": "N", "type": int, "default": 1, "help": "machines (default 1)"},
            "--gpus-per-node": {"metavar": "N", "type": int, "default": 8, "help": "GPUs of each (default 8)"},
            "--top": {"metavar": "K", "type": int, "default": 5, "help": "layouts to show (default 5)"},
            "--explain": {
                "metavar": "LAYOUT",
                "help": "all about one layout instead: what differs from the config, as tp=8,pp=4,recompute=full",
            },
            "--trace": {
                "action": "store_true",
                "help": "with --explain: also run every stage of the real job on tensors without memory, and compare",
            },
            "--measure": {
                "metavar": "FILE",
                "help": "measure this machine with --gpus-per-node ranks instead, and write a file for --gpu",
            },
            "--measure-top": {
                "metavar": "K", "type": int, "default": 0,
                "help": "also train the K best for a few steps, on this machine, and compare",
            },
            "--write": {"metavar": "FILE", "help": "write the first layout as a config that trains"},
            "--plot": {"metavar": "FILE", "help": "draw its memory and time as a PNG"},
            "--json": _JSON,
        },
        True,
    ),
    "pipeline-plot": (
        pipeline_plot,
        "draw what pipeline ranks do over time, as a PNG and as a page that zooms",
        {
            "--gpu": {"metavar": "G", "default": "h100", "help": "as for plan (default h100): what the prediction is for"},
            "--measured": {
                "metavar": "RUN_DIR",
                "help": "also draw a step that this run noted (--metrics.pipeline_steps); its config is the default",
            },
            "--out": {"metavar": "NAME", "default": "pipeline", "help": "of NAME.png and NAME.html (default pipeline)"},
        },
        True,
    ),
    "bench": (
        bench,
        "train every combination of some keys for a few steps, each in a fresh process, and compare their speed",
        {
            "--vary": {
                "metavar": "KEY=[...]", "action": "append",
                "help": "a key and its values, such as 'compile.enabled=[false, true]', or a section and tables of its keys, "
                "such as 'parallel=[{tp = 2}, {pp = 2}]'; several times: every combination. Instead of or besides [matrix] of --config",
            },
            "--steps": {"metavar": "K", "type": int, "help": "optimizer steps that count, of each run (default 10)"},
            "--warmup-steps": {"metavar": "K", "type": int, "help": "steps before, which do not (default 3)"},
            "--repeat": {"metavar": "R", "type": int, "help": "runs of each cell, in alternating order (default 1)"},
            "--nproc": _NPROC,
            "--out": {"metavar": "DIR", "default": "outputs/bench", "help": "what is written; a bench there is gone on with (default outputs/bench)"},
            "--json": _JSON,
        },
        True,
    ),
    "prepare": (
        prepare,
        "tokenize files once, on all cores, into a folder of shards to train from (docs/data.md)",
        {
            "--input": {
                "metavar": "GLOB", "nargs": "+", "required": True,
                "help": "text, .jsonl, .parquet, also .gz and .zst; patterns, URLs, hf://NAME",
            },
            "--tokenizer": {"metavar": "T", "required": True, "help": "as data.tokenizer"},
            "--out": {"metavar": "DIR", "required": True, "help": "the folder to write; a killed preparation goes on in it"},
            "--workers": {"metavar": "N", "type": int, "help": "processes (default: one a core)"},
            "--text-field": {"metavar": "F", "default": "text", "help": "of a JSONL line or parquet row (default text)"},
            "--bad-lines": {
                "choices": ["error", "skip"], "default": "error",
                "help": "say where a line is bad and stop (default), or leave it out and count",
            },
        },
        False,
    ),
    "inspect-data": (
        inspect_data,
        "print the samples of a step as the model sees them: documents, and [[what is not trained]]",
        {
            "--step": {"metavar": "N", "type": int, "default": 1, "help": "the step (default 1)"},
            "--samples": {"metavar": "K", "type": int, "help": "print only the first K samples (default: all)"},
        },
        True,
    ),
    "runs": (
        runs,
        "a table of the runs below a folder, or two of them against each other",
        {
            "dir": {"metavar": "DIR", "nargs": "?", "default": "outputs", "help": "where to look (default outputs)"},
            "--compare": {
                "metavar": ("A", "B"), "nargs": 2,
                "help": "two run folders, or names in the table: where their losses part, and a plot of both",
            },
            "--tolerance": {
                "metavar": "X", "type": float, "default": 1e-5,
                "help": "relative difference of losses to look for, with --compare (default 1e-5)",
            },
            "--out": {"metavar": "FILE", "default": "compare.png", "help": "the plot (default compare.png)"},
            "--json": _JSON,
        },
        False,
    ),
    "doctor": (
        doctor,
        "look whether this machine is fit to train, and with a config, whether that can run here",
        {
            "--nproc": _NPROC | {"help": "ranks to measure with (default: its GPUs, else 2)"},
            "--quick": {"action": "store_true", "help": "leave out what takes seconds: matmuls and the all-reduce"},
            "--json": _JSON,
        },
        True,
    ),
    "wizard": (
        wizard,
        "ask a few questions, plan the layout, write a config that trains, and start it if wanted; every answer is a flag too",
        {
            "--model": {"metavar": "M", "help": 'a size, such as "llama 3-8B", or a Hugging Face directory'},
            "--data": {"metavar": "PATH", "help": 'a file, pattern, folder, URL or hf://NAME; or "bundled"'},
            "--tokenizer": {"metavar": "T", "help": "as data.tokenizer"},
            "--method": {"metavar": "M", "help": "as training.method"},
            "--goal": {"metavar": "G", "help": '"1000 steps" or "20B tokens"'},
            "--hardware": {"metavar": "H", "help": '"here", or NODES x GPUS KIND such as "4x8 h100" (KIND as plan --gpu)'},
            "--out": {"metavar": "FILE", "help": "the .toml file to write; for several nodes also the .sh beside it"},
            "--start": {"metavar": "YES", "help": "yes or no: start the run, if this machine can"},
            "--yes": {"action": "store_true", "help": "take what is proposed where no flag answers; asks nothing"},
        },
        None,
    ),
    "schema": (
        schema,
        "print the JSON schema of the configuration, for editors",
        {"--markdown": {"action": "store_true", "help": "a page for people instead (docs/config.md)"}},
        False,
    ),
}  # fmt: skip

_EPILOGS = {"runs": STATES_HELP}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (function, text, arguments, takes_config) in COMMANDS.items():
        command = commands.add_parser(
            name, help=text, description=text, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.set_defaults(run=function)
        for flag, settings in arguments.items():
            command.add_argument(flag, **settings)
        command.epilog = _EPILOGS.get(name)
        if takes_config:
            command.add_argument(
                "--config", metavar="C", help="a TOML file, or a name from train_configs/ (default: all defaults)"
            )
        if takes_config is not False:
            command.epilog = "Any configuration key can be set as --section.key=value:\n" + key_help()
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        rest, overrides = split_overrides(sys.argv[1:])
        options = parser.parse_args(rest)
        return options.run(options, overrides)
    except UserError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(error.message(), file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        say_explained(error)
        raise


if __name__ == "__main__":
    sys.exit(main())
