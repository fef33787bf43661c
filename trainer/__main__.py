"""``python -m trainer COMMAND``, also installed as ``meshloom COMMAND``."""

import argparse
import json
import os
import sys

from trainer.config import Config
from trainer.config_load import key_help, load_config, split_overrides
from trainer.errors import EXIT_BAD_INPUT, UserError
from trainer.signals import StopRequest


def train(options, overrides) -> int:
    stop = StopRequest()  # before torch loads, so that Ctrl-C is never a traceback
    config = load_config(options.config, overrides)
    from trainer import train

    return train.main(config, stop)


def verify(options, overrides) -> int:
    from trainer import verify_command

    return verify_command.main(options, load_config(options.config, overrides))


def schema(options, overrides) -> int:
    if overrides:
        raise UserError(f"schema takes no configuration keys ({overrides[0].shown})")
    print(json.dumps(Config.model_json_schema(), indent=1))
    return 0


COMMANDS = {
    train: "train as this one process, or as one rank under torchrun (./run_train.sh starts them all)",
    verify: "show that a config gives the same numbers at its layout as on one process",
    schema: "print the JSON schema of the configuration, for editors",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer", allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for function, text in COMMANDS.items():
        command = commands.add_parser(
            function.__name__, help=text, description=text, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.set_defaults(run=function)
        if function is verify:
            command.add_argument(
                "--nproc", metavar="N", type=int, help="processes (default: its GPUs, else what the layout needs)"
            )
            command.add_argument(
                "--steps", metavar="K", type=int, default=3, help="optimizer steps to compare (default 3)"
            )
            command.add_argument("--json", action="store_true", help="print the result as JSON")
        if function is not schema:
            command.add_argument(
                "--config", metavar="C", help="a TOML file, or a name from train_configs/ (default: all defaults)"
            )
            command.epilog = "Any configuration key can be set as --section.key=value:\n" + key_help()
    try:
        rest, overrides = split_overrides(sys.argv[1:])
        options = parser.parse_args(rest)
        return options.run(options, overrides)
    except UserError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(error.message(), file=sys.stderr)
        return EXIT_BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
