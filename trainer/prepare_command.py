"""``prepare``: from files to a folder of memory-mapped shards that any number of runs train from. Loads no torch."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from trainer.data.documents import expand
from trainer.data.prepare import MANIFEST, check_shards, prepare
from trainer.errors import EXIT_STOPPED, UserError
from trainer.signals import on_stop_signal


def main(options: argparse.Namespace) -> int:
    """Print what was made. Raises ``UserError``."""
    n_workers = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
    if n_workers < 1:
        raise UserError(f"--workers {n_workers}: at least 1 is needed")
    paths = list(dict.fromkeys(path for pattern in options.input for path in expand(pattern, "--input")))
    out, start = Path(options.out), time.perf_counter()
    was_finished = (out / MANIFEST).is_file()
    on_stop_signal(signal.default_int_handler)  # each of them as Ctrl-C
    try:
        manifest = prepare(paths, options.tokenizer, out, n_workers, options.text_field, options.bad_lines == "skip")
        if was_finished:
            check_shards(out, manifest)
            print(f"{out} is complete, and every file in it is what was written:")
    except KeyboardInterrupt:
        print("stopped; the same command goes on with what is left", file=sys.stderr)
        return EXIT_STOPPED
    except OSError as error:
        raise UserError(f"--out {options.out} cannot be written: {error}") from None
    elapsed_s = time.perf_counter() - start
    print(
        f"{manifest['tokens']:,} tokens of {manifest['documents']:,} documents in {len(manifest['shards'])} shards, "
        f"{manifest['dtype']}, {elapsed_s:.1f} s"
    )
    if manifest["skipped_lines"]:
        print(f"{manifest['skipped_lines']:,} bad line{'s' * (manifest['skipped_lines'] > 1)} skipped, such as")
        print("\n".join(f"  {line}" for line in manifest["skipped_examples"]))
    print(f"train from it: --data.path={options.out} --data.tokenizer={options.tokenizer}")
    return 0
