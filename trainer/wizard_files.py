"""What the wizard writes: a config in which every key says what it is, and a script for Slurm."""

import re
import shlex
import textwrap
from pathlib import Path

from trainer.config import Config
from trainer.config_load import key_schemas, toml_text

ROOT = Path(__file__).resolve().parents[1]
_SLURM = ROOT / "launch" / "slurm.sh"
_WIDTH = 100


def config_text(config: Config, heading: list[str], always: set[str]) -> str:
    """The keys that differ from their defaults, and those in ``always``, each below a comment with its meaning."""
    lines = [
        line for text in heading for line in textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    ]
    for section in type(config).model_fields:
        table = getattr(config, section)
        default, plain = type(table)(), table.model_dump(exclude_none=True)
        written = []
        for name in type(table).model_fields:
            key, value = f"{section}.{name}", getattr(table, name)
            if value is not None and (value != getattr(default, name) or key in always):
                meaning = textwrap.wrap(
                    key_schemas()[key]["description"], _WIDTH, initial_indent="# ", subsequent_indent="# "
                )
                written += [*meaning, f"{name} = {toml_text(plain[name])}"]
        if written:
            lines += ["", f"[{section}]", *written]
    return "\n".join(lines) + "\n"


def slurm_text(config_path: Path, n_nodes: int, gpus_per_node: int) -> str:
    """launch/slurm.sh for this config and this many nodes: ``sbatch`` it, with flags of your cluster before its name."""
    text = _SLURM.read_text(encoding="utf-8")
    name = re.sub(r"[^\w.-]", "-", config_path.stem)
    for pattern, line in (
        (r"^#SBATCH --job-name=.*$", f"#SBATCH --job-name={name}"),
        (r"^#SBATCH --nodes=\d+$", f"#SBATCH --nodes={n_nodes}"),
        (r"^#SBATCH --gpus-per-node=\d+$", f"#SBATCH --gpus-per-node={gpus_per_node}"),
        (r"^#   sbatch .*$", f"#   sbatch --partition=P {config_path.with_suffix('.sh').name}"),
        (
            r"^set -euo pipefail$",
            "set -euo pipefail\n"
            f"MESHLOOM_REPOSITORY=${{MESHLOOM_REPOSITORY:-{shlex.quote(str(ROOT))}}}\n"
            f'set -- --config {shlex.quote(str(config_path))} "$@"',
        ),
    ):
        text, n = re.subn(pattern, lambda _, line=line: line, text, flags=re.MULTILINE)
        assert n == 1, f"{_SLURM} has {n} lines like {pattern}"
    return text
