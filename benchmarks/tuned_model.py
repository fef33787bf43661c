"""Hold a fine-tuning run against transformers and PEFT: export it, adapters both ways, and compare the loss over conversations.

    python benchmarks/tuned_model.py CHECKPOINT [--data assets/novel_questions_held_out.jsonl]

CHECKPOINT: of a run from a Hugging Face directory. Needs the extra "test"; about a minute for SmolLM2-135M.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402

from trainer.adapters import with_weights_of  # noqa: E402
from trainer.checkpoint_folder import holds_adapters, read_state  # noqa: E402
from trainer.config_load import load_config  # noqa: E402
from trainer.data.chat_template import ChatTemplate, find_template  # noqa: E402
from trainer.data.conversations import conversation_of  # noqa: E402
from trainer.data.tokenizer import load_tokenizer  # noqa: E402
from trainer.hf_export import export  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data", type=Path, default=ROOT / "assets/novel_questions_held_out.jsonl")
    options = parser.parse_args()
    base = with_weights_of(load_config(None), str(options.checkpoint)).model.hf_path
    name = read_state(options.checkpoint)["config"]["data"]["tokenizer"]
    chat = ChatTemplate(find_template(name, None), load_tokenizer(name))
    lines = options.data.read_text(encoding="utf-8").splitlines()
    encoded = list(chat.encode([chat.render(conversation_of(json.loads(line))) for line in lines]))

    def loss_of(model) -> float:
        total, n = 0.0, 0
        with torch.no_grad():
            for ids in encoded:
                tokens = torch.from_numpy(np.where(ids < 0, ~ids, ids).astype(np.int64))[None]
                labels = torch.from_numpy(np.where(ids < 0, -100, ids).astype(np.int64))[None, 1:]
                logits = model(tokens).logits[:, :-1].double()
                total += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
                n += int((labels != -100).sum())
        return total / n

    def ours(*arguments: str) -> str:
        command = [sys.executable, "-m", "trainer", "evaluate", "--training.method=sft", f"--data.path={options.data}",
                   f"--data.tokenizer={name}", "--training.seq_len=256", "--training.micro_batch_size=1", *arguments]  # fmt: skip
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    def read(folder) -> torch.nn.Module:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    with tempfile.TemporaryDirectory(prefix="meshloom-tuned-") as scratch:
        adapters, merged = Path(scratch) / "adapters", Path(scratch) / "merged"
        if not holds_adapters(read_state(options.checkpoint)):
            export(options.checkpoint, merged, "float32")
            print(f"run, evaluate             {ours('--checkpoint', str(options.checkpoint))}")
            print(f"exported, transformers    loss {loss_of(read(merged)):.6f}")
            print(f"exported, evaluate        {ours(f'--model.hf_path={merged}')}")
            return
        export(options.checkpoint, adapters, None)
        export(options.checkpoint, merged, "float32", merge=True)
        print(f"base, transformers        loss {loss_of(read(base)):.6f}")
        print(f"base, evaluate            {ours(f'--model.hf_path={base}')}")
        print(f"adapters, evaluate        {ours('--checkpoint', str(options.checkpoint))}")
        print(
            f"adapters, PEFT            loss {loss_of(peft.PeftModel.from_pretrained(read(base), adapters).eval()):.6f}"
        )
        print(f"merged, transformers      loss {loss_of(read(merged)):.6f}")
        print(f"merged, evaluate          {ours(f'--model.hf_path={merged}')}")


if __name__ == "__main__":
    main()
