"""The wizard at a pseudo-terminal, up to a run of the config that it wrote."""

import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.dist.runs import records
from trainer.config_load import load_config

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "--model.dim=32", "--model.n_layers=2", "--model.n_heads=2", "--model.n_kv_heads=1", "--model.ffn_dim=64",
    "--training.seq_len=16", "--training.global_batch_size=4",
]  # fmt: skip


class Terminal:
    """A wizard with a terminal of its own."""

    def __init__(self, folder: Path, *arguments: str):
        self.ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainer", "wizard", *TINY, *arguments], cwd=folder, stdin=theirs, stdout=theirs,
            stderr=theirs, start_new_session=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""

    def expect(self, words: str) -> str:
        """What is shown up to these words."""
        deadline = time.monotonic() + 90
        while words not in self.seen:
            try:
                self.seen += os.read(self.ours, 4096).decode(errors="replace")
            except OSError:  # the process has ended
                raise AssertionError(f"{words!r} did not come:\n{self.seen}") from None
            assert time.monotonic() < deadline, self.seen
        before, _, self.seen = self.seen.partition(words)
        return before

    def answer(self, question: str, text: str) -> None:
        """``question``: "" if it has been seen."""
        if question:
            self.expect(question)
        self.expect("]: ")
        os.write(self.ours, f"{text}\n".encode())

    def end(self) -> tuple[int, str]:
        """The exit code and what came last."""
        while True:
            try:
                chunk = os.read(self.ours, 4096)
            except OSError:
                break
            self.seen += chunk.decode(errors="replace")
        os.close(self.ours)
        return self.process.wait(timeout=60), self.seen


def test_questions_answers_and_a_real_run(tmp_path):
    (tmp_path / "book.txt").write_text("It is a truth universally acknowledged. " * 50)
    terminal = Terminal(tmp_path)
    terminal.answer("Model:", "gpt-4")
    assert "neither a directory nor a known size" in terminal.expect("Model:")
    terminal.answer("", "llama debug")
    terminal.answer("Data:", "bok.txt")
    terminal.expect("no such file")
    terminal.answer("Data:", "book.txt")
    terminal.answer("Tokenizer:", "")
    terminal.answer("Method:", "sft")
    terminal.expect("the data are text")
    terminal.answer("Method:", "")
    terminal.answer("Goal:", "1 day")
    terminal.answer("Goal:", "150 tokens")
    terminal.answer("Hardware:", "4x8 potatoes")
    terminal.answer("Hardware:", "here")
    shown = terminal.expect("Name of the config")
    assert "layout" in shown and "peak" in shown and "3 steps of 64 tokens, 192 in all: about" in shown, shown
    terminal.answer("", "mine.toml")
    terminal.answer("Start it now?", "yes")
    code, last = terminal.end()
    assert code == 0 and "step 3/3" in last, last
    assert len(records(tmp_path / "outputs/mine")) == 3
    config = load_config(str(tmp_path / "mine.toml"))
    assert config.data.path == str(tmp_path / "book.txt") and config.model.dim == 32
    assert re.search(r"^# tokens per sequence\nseq_len = 16$", (tmp_path / "mine.toml").read_text(), re.MULTILINE)


def test_ctrl_c_leaves_nothing(tmp_path):
    terminal = Terminal(tmp_path, "--model", "llama debug", "--data", "bundled")
    terminal.expect("Tokenizer:")
    terminal.expect("]: ")
    os.write(terminal.ours, b"\x03")
    code, last = terminal.end()
    assert code == 130 and "Traceback" not in last, last
    assert not os.listdir(tmp_path)
