"""``prepare`` and ``inspect-data``, as they are called: processes, kills, what is printed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.test_data_sources import ROOT, TEXTS, expected_stream, lines, load, stream  # noqa: F401 (a fixture)
from trainer.data.mixture import Mixture
from trainer.data.prepare import prepare
from trainer.data.rows import TokenRows, labels_of
from trainer.data.samples import Samples
from trainer.data.stream import MemoryTokens, TokenStream
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import UserError


def test_shards_are_the_same_for_any_number_of_workers_and_go_on_after_a_kill(tmp_path, lines, monkeypatch):
    from trainer.data import prepare as module

    monkeypatch.setattr(module, "_LEAST_SHARD_BYTES", 4000)
    prepare([lines], "bytes", tmp_path / "a", 1)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(names) > 8
    prepare([lines], "bytes", tmp_path / "b", 2)
    # As a kill leaves it: no manifest, a shard without its report, one half written.
    plan_and_reports = _interrupted(tmp_path / "a", tmp_path / "c", lines)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("00000[1-9].bin")}
    prepare([lines], "bytes", tmp_path / "c", 2)
    assert plan_and_reports and all(path.stat().st_mtime_ns == then for path, then in before.items())
    for other in ("b", "c"):
        assert sorted(path.name for path in (tmp_path / other).iterdir()) == names
        for name in names:
            assert (tmp_path / other / name).read_bytes() == (tmp_path / "a" / name).read_bytes(), name


def _interrupted(whole: Path, folder: Path, lines: str) -> int:
    """A copy of a finished preparation in the state of one that was killed in its first part."""
    from trainer.data import prepare as module

    folder.mkdir()
    manifest = json.loads((whole / "manifest.json").read_text())
    for number, shard in enumerate(manifest["shards"]):
        if number == 0:
            (folder / "000000.bin.tmp").write_bytes(b"half")
            continue
        for suffix in (".bin", ".idx"):
            os.link(whole / f"{shard['name']}{suffix}", folder / f"{shard['name']}{suffix}")
        report = {key: shard[key] for key in ("documents", "tokens")} | {"skipped_lines": 0, "skipped_examples": []}
        (folder / f"{shard['name']}.json").write_text(json.dumps(report | {"shard": shard}))
    shards = [[vars(part) for part in parts] for parts in module._shards([lines], None)]
    plan = {
        "format": 1,
        "sources": manifest["sources"],
        "tokenizer": "bytes",
        "text_field": "text",
        "bad_lines": "error",
    }
    (folder / "plan.json").write_text(json.dumps(plan | {"shards": shards}))
    return len(manifest["shards"])


def test_prepare_that_is_killed_leaves_no_worker_and_no_data_set_and_goes_on(tmp_path):
    big = tmp_path / "big.jsonl"
    big.write_text(json.dumps({"text": "some words " * 200}) + "\n", encoding="utf-8")
    big.write_text(big.read_text() * 20_000)
    command = [
        sys.executable,
        "-m",
        "trainer",
        "prepare",
        "--input",
        str(big),
        "--tokenizer",
        "smollm2",
        "--out",
        "out",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for number, begun, code in ((signal.SIGTERM, "0*.tmp", 75), (signal.SIGKILL, "0*.json", -signal.SIGKILL)):
        process = subprocess.Popen([*command, "--workers=2"], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
        while not list((tmp_path / "out").glob(begun)) and process.poll() is None:
            time.sleep(0.02)
        with pytest.raises(UserError, match="another prepare is writing there"):
            prepare([str(big)], "smollm2", tmp_path / "out", 1)
        workers = _children(process.pid)
        process.send_signal(number)
        assert process.wait() == code and workers
        with pytest.raises(UserError, match="no manifest.json in it"):
            load(data__path=str(tmp_path / "out"))
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{worker}").exists() for worker in workers):
            assert time.monotonic() < deadline, "workers live on"
            time.sleep(0.1)
    big.write_text(json.dumps({"text": "other"}) + "\n")
    changed = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert changed.returncode == 2 and "holds a preparation with other sources" in changed.stderr


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_prepare_on_the_command_line(tmp_path, lines, capsys, monkeypatch):
    Path(lines).write_text(Path(lines).read_text() + "not json\n")
    out = str(tmp_path / "out")
    arguments = ["prepare", "--input", str(tmp_path / "*.jsonl"), "--tokenizer=bytes", f"--out={out}", "--workers=1"]
    assert _main(arguments, monkeypatch) == 2
    assert f"error: {lines}:601, byte " in capsys.readouterr().err
    assert _main([*arguments, "--bad-lines=skip"], monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "tokens of 600 documents in 1 shards, uint16" in printed and "1 bad line skipped" in printed
    assert _main(arguments, monkeypatch) == 2
    assert "other bad_lines" in capsys.readouterr().err
    assert load(data__path=out).warnings == [f"data.path: 1 bad line skipped, such as {lines}:601, byte {_last(lines)}: not one JSON object a line (Expecting value: line 1 column 1 (char 0))"]  # fmt: skip
    for wrong, message in {
        ("--input", "none-*.jsonl"): "no such file",
        ("--tokenizer", "none.json"): "no such file",
        ("--workers", "0"): "at least 1 is needed",
        ("--out", str(tmp_path)): "is not empty, and holds no prepared data",
        ("--input", str(tmp_path)): "is a folder: name the files in it",
    }.items():
        assert _main([*arguments, f"{wrong[0]}={wrong[1]}"], monkeypatch) == 2
        assert message in capsys.readouterr().err


def test_a_finished_preparation_is_checked_when_it_is_asked_for_again(tmp_path, lines, capsys, monkeypatch):  # noqa: F811
    arguments = ["prepare", f"--input={lines}", "--tokenizer=bytes", f"--out={tmp_path / 'out'}", "--workers=1"]
    for said in ("", "is complete, and every file in it is what was written"):
        assert _main(arguments, monkeypatch) == 0
        assert said in capsys.readouterr().out
    shard = tmp_path / "out/000000.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert _main(arguments, monkeypatch) == 2
    assert f"{shard} is not what was written" in capsys.readouterr().err


def test_a_file_that_is_mended_or_changed_while_it_is_read(tmp_path, monkeypatch):
    from trainer.data import prepare as module

    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match="not valid UTF-8"):
        prepare([str(path)], "bytes", out, 1)
    path.write_text("mended")
    run = module._run
    monkeypatch.setattr(module, "_run", lambda *arguments: (run(*arguments), path.write_text("changed")))
    with pytest.raises(UserError, match="a.txt was changed while it was read"):
        prepare([str(path)], "bytes", out, 1)
    assert not (out / "manifest.json").exists()


def test_small_files_share_a_shard(tmp_path, monkeypatch):
    from trainer.data import prepare as module

    monkeypatch.setattr(module, "_LEAST_SHARD_BYTES", 1000)
    monkeypatch.setattr(module, "_SHARDS", 1 << 20)
    sizes = [300, 300, 300, 300, 1500, 100, 0, 100]
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.txt").write_bytes(bytes([97 + number]) * size)
    manifest = prepare([str(tmp_path / f"{number}.txt") for number in range(8)], "bytes", tmp_path / "out", 1)
    assert [[Path(path).stem for path in shard["sources"]] for shard in manifest["shards"]] == [
        ["0", "1", "2"], ["3"], ["4"], ["5"], ["7"],
    ]  # fmt: skip
    expected = [token for number, size in enumerate(sizes) if size for token in [*[97 + number] * size, 256]]
    assert stream(load(data__path=str(tmp_path / "out"))) == expected


def _last(lines: str) -> int:
    return Path(lines).stat().st_size - len("not json\n")


def _main(arguments, monkeypatch) -> int:
    from trainer import __main__ as command

    monkeypatch.setattr(sys, "argv", ["trainer", *arguments])
    return command.main()


def test_inspect_data_shows_documents_and_what_is_not_trained(tmp_path, lines, capsys, monkeypatch):
    keys = [f"--data.path={lines}", "--data.shuffle=false", "--training.seq_len=40", "--training.global_batch_size=2"]
    keys += ["--training.micro_batch_size=1"]
    assert _main(["inspect-data", "--step=2", *keys], monkeypatch) == 0
    expected, ids = ["step 2: samples 2 to 3, of 40 tokens each"], expected_stream()
    for row in (2, 3):
        expected += ["", f"sample {row}: row {row} of {(len(ids) - 1) // 40}; 40 of 40 labels count"]
        borders = [0, *(place for place in range(1, 40) if ids[40 * row + place - 1] == 256), 40]
        for first, last in zip(borders, borders[1:]):
            document = ids[: 40 * row + first].count(256)
            text = bytes(i for i in ids[40 * row + first : 40 * row + last] if i < 256).decode()
            expected += [f"--- document {document}, tokens {first} to {last - 1} of the row"]
            expected += [text + "<end>" * (ids[40 * row + last - 1] == 256)]
    assert capsys.readouterr().out.splitlines() == expected
    for wrong, message in {
        ("--step=9999", "--data.epochs=1"): "the data ends before",
        ("--samples=0",): "--samples 0: at least 1",
        ("--data.curriculum=[{step = 2, weights = {b = 1}}]",): "there are none",
        ("--data.packing=best_fit",): "needs data.isolate_documents",
    }.items():
        assert _main(["inspect-data", *wrong, *keys], monkeypatch) == 2
        assert message in capsys.readouterr().err


def test_inspect_data_shows_packed_documents_whole_and_their_padding(tmp_path, lines, capsys, monkeypatch):  # noqa: F811
    keys = [f"--data.path={lines}", "--training.seq_len=80", "--training.global_batch_size=600", "--data.shuffle=false"]
    keys += ["--training.micro_batch_size=1", "--data.packing=best_fit", "--data.isolate_documents=true"]
    assert _main(["inspect-data", "--samples=60", *keys], monkeypatch) == 0
    printed = capsys.readouterr().out.splitlines()
    heads = [number for number, line in enumerate(printed) if line.startswith("--- document")]
    assert len(heads) > 60 and any(line.startswith("--- padding") for line in printed)
    for number in heads:  # all but the end, which is a label alone; the first token is nobody's label
        document, text = int(printed[number].split()[2].rstrip(",")), printed[number + 1]
        assert text.replace("[[d]]", "d", 1) == TEXTS[document]


def test_inspect_data_marks_what_is_not_trained():
    from trainer.inspect_data import describe

    rows = TokenRows(TokenStream([MemoryTokens(np.frombuffer(b"question answer!.", np.uint8), [0])]), 16)
    masked = {
        "tokens": rows[0]["tokens"],
        "labels": labels_of(torch.tensor([*b"question answer!."]), torch.arange(17) >= 9),
    }
    rows.__class__ = type("Masked", (TokenRows,), {"__getitem__": lambda self, row: masked})
    lines = list(describe(Samples({"": rows}, Mixture([(0, [1])]), 0, True), 0, load_tokenizer("bytes")))
    assert lines[0] == "sample 0: row 0 of 1; 8 of 16 labels count"
    assert lines[2] == "q[[uestion ]]answer!"


def test_hugging_face_data_sets_map_style_and_streamed(tmp_path, lines, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    cache = dict(data__cache_dir=str(tmp_path / "cache"))
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    assert stream(load(data__path=str(tmp_path / "saved"), **cache)) == expected_stream()
    streamed = f"hf://json?data_files={lines}&streaming=true"
    assert stream(load(data__path=streamed, **cache)) == expected_stream()
    first = stream(load(data__path=f"{streamed}&take=100", **cache))
    assert first == expected_stream()[: len(first)] and first.count(256) == 100
    for path, message in {
        "hf://json?splitt=x": "unknown 'splitt'",
        f"hf://json?data_files={lines}&take=x": "is not a number",
        f"hf://json?data_files={tmp_path}/none.jsonl": "FileNotFoundError",
    }.items():
        with pytest.raises(UserError, match=message):
            load(data__path=path, **cache)
    with pytest.raises(UserError, match="no column 'body'"):
        load(data__path=str(tmp_path / "saved"), data__text_field="body", **cache)
