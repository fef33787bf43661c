"""``python -m trainer COMMAND``, also installed as ``meshloom COMMAND``."""

import argparse
import os
import sys

from trainer.config_load import key_help, load_config, split_overrides
from trainer.errors import EXIT_BAD_INPUT, UserError

COMMANDS = {"train": "train a model as this process, or as one rank under torchrun"}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any configuration key can be set as --section.key=value:\n" + key_help(),
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        command.add_argument(
            "--config",
            metavar="C",
            help="a TOML file, or a name from train_configs/ (default: every key at its default)",
        )
    try:
        rest, overrides = split_overrides(sys.argv[1:])
        options = parser.parse_args(rest)
        config = load_config(options.config, overrides)
    except UserError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(error.message(), file=sys.stderr)
        return EXIT_BAD_INPUT
    from trainer import train

    return train.main(config)


if __name__ == "__main__":
    sys.exit(main())
