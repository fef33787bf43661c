"""Where data lies: prepared shards, files of Megatron and nanoGPT, text that is cached, data sets, URLs; and what is refused."""

import gzip
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from tests.tiny import tiny_config
from trainer.config_load import load_config
from trainer.data import sources
from trainer.data.indexed import IndexedTokens, IndexedWriter
from trainer.data.loader import checked, make_loader
from trainer.data.prepare import prepare
from trainer.data.samples import Samples, load_samples
from trainer.data.tokenizer import load_tokenizer
from trainer.errors import UserError

ROOT = Path(__file__).parents[2]
TEXTS = [f"document {number} " + "word " * (number % 7) for number in range(600)]


@pytest.fixture
def lines(tmp_path) -> str:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(path)


BEST_FIT = dict(data__isolate_documents=True, data__packing="best_fit")


def load(seq_len: int = 32, vocab_size: int = 300, **keys) -> Samples:
    return load_samples(tiny_config(training__seq_len=seq_len, **keys), vocab_size)


def stream(samples: Samples, name: str = "") -> list[int]:
    of_source = samples.rows[name].stream
    return of_source.read(0, len(of_source)).tolist()


def expected_stream(tokenizer: str = "bytes") -> list[int]:
    loaded = load_tokenizer(tokenizer)
    return [token for text in TEXTS for token in [*loaded.encode(text).tolist(), loaded.eos_id]]


def megatron_file(
    prefix: Path, sequences: list[list[int]], dtype=np.int32, code: int = 4, documents=None, modes=b"", first=0
):
    """As the format's description says, by other means than the reader's or writer's. ``first``: byte of the first sequence."""
    documents = range(len(sequences) + 1) if documents is None else documents
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents))
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    at, size = 0, np.dtype(dtype).itemsize
    for sequence in sequences:
        index += struct.pack("<q", at or first)
        at += len(sequence) * size
    index += b"".join(struct.pack("<q", document) for document in documents) + modes
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(sequence, dtype).tobytes() for sequence in sequences))


def test_prepared_shards_hold_the_documents_in_order_and_say_so(tmp_path, lines):
    manifest = prepare([lines], "bytes", tmp_path / "out", 2)
    assert (
        manifest["documents"] == 600 and manifest["tokens"] == len(expected_stream()) and manifest["dtype"] == "uint16"
    )
    for shard in manifest["shards"]:
        for suffix, key in ((".bin", "crc32"), (".idx", "index_crc32")):
            assert zlib.crc32((tmp_path / "out" / f"{shard['name']}{suffix}").read_bytes()) == shard[key]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["000000.bin", "000000.idx", "manifest.json"]
    samples = load(data__path=str(tmp_path / "out"))
    assert stream(samples) == expected_stream() == stream(load(data__path=lines))
    assert samples.identity == load(data__path=lines).identity  # wherever the tokens lie
    assert samples.rows[""].stream.n_documents == 600


def test_a_megatron_file_made_elsewhere_is_read(tmp_path):
    sequences = [[5, 6, 7], [8], [9, 10], [11] * 60, [12]]
    for name, dtype, code in (("a", np.int32, 4), ("b", np.uint16, 8), ("c", np.int64, 5), ("d", np.uint8, 1)):
        megatron_file(tmp_path / name, sequences, dtype, code, documents=[0, 2, 3, 5])
        for path in (f"{name}.bin", f"{name}.idx", name):
            samples = load(data__path=str(tmp_path / path))
            assert stream(samples) == sum(sequences, [])
            assert samples.rows[""].stream.document_starts().tolist() == [0, 4, 6]
    megatron_file(tmp_path / "f", [*sequences, []], documents=[0, 2, 2, 5, 5, 6, 6])  # with documents of nothing
    of_f = load(data__path=str(tmp_path / "f"), data__isolate_documents=True)
    assert stream(of_f) == sum(sequences, []) and of_f.rows[""].stream.document_starts()[:3].tolist() == [0, 4, 4]
    assert (
        of_f.rows[""].documents(1)[-1][0] < 32 and len(load(data__path=str(tmp_path / "f"), **BEST_FIT).rows[""]) == 3
    )
    (tmp_path / "f.idx").unlink()
    megatron_file(tmp_path / "e", sequences, modes=bytes(5))
    (tmp_path / "f.bin").unlink()
    assert stream(load(data__path=str(tmp_path / "?.bin")))[-67:] == sum(sequences, [])
    # and what we write is by the same description
    writer = IndexedWriter(tmp_path / "ours", np.dtype(np.int32))
    for sequence in sequences:
        writer.add([np.array(sequence[:1])], is_last=False)
        writer.add([np.array(sequence[1:2]), np.array(sequence[2:], dtype=np.int64)])
    writer.finish()
    megatron_file(tmp_path / "theirs", sequences)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_a_document_of_millions_is_found_without_reading_the_index(tmp_path):
    writer = IndexedWriter(tmp_path / "a", np.dtype(np.uint16))
    for number in range(3000):
        writer.add([np.full(number % 5 + 1, number)])
    writer.finish()
    tokens = IndexedTokens(tmp_path / "a")
    assert tokens.n_documents == 3000
    for document in (0, 1, 2, 1499, 2998, 2999):
        start = int(tokens.starts(document, document + 1)[0])
        assert tokens.document_at(start) == document and tokens.document_at(start + 1) == document + 1
        assert tokens.tokens[start] == document


def test_a_nanogpt_file_is_read(tmp_path):
    ids = [1, 2, 256, 3, 256, 256, 4] * 20
    np.array(ids, dtype=np.uint16).tofile(tmp_path / "train.bin")
    samples = load(data__path=str(tmp_path / "train.bin"))
    assert stream(samples) == ids
    assert samples.rows[""].stream.document_starts().tolist()[:5] == [0, 3, 5, 6, 10]
    np.array([5, 6], dtype=np.uint16).tofile(tmp_path / "train_2.bin")
    assert stream(load(data__path=str(tmp_path / "train*.bin"))) == [*ids, 5, 6]
    (tmp_path / "odd.bin").write_bytes(b"odd")
    with pytest.raises(UserError, match="odd.bin: 3 bytes are not a row of uint16 token ids"):
        load(data__path=str(tmp_path / "odd.bin"))
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(ids)
    (tmp_path / "llmc.bin").write_bytes(header.tobytes() + np.array(ids, np.uint16).tobytes())
    assert stream(load(data__path=str(tmp_path / "llmc.bin"))) == ids
    header[1] = 7
    (tmp_path / "llmc.bin").write_bytes(header.tobytes() + np.array(ids, np.uint32).tobytes())
    with pytest.raises(UserError, match="llmc.bin: its header says version 7"):
        load(data__path=str(tmp_path / "llmc.bin"))
    for dtype in (np.int32, np.int64):
        np.array(ids, dtype).tofile(tmp_path / "wide.bin")
        with pytest.raises(UserError, match="wide.bin: every second id is near 0: these are ids of 32 bits or more"):
            load(data__path=str(tmp_path / "wide.bin"))


def test_a_pattern_stands_for_token_files_of_one_kind(tmp_path):
    np.arange(200, dtype=np.uint16).tofile(tmp_path / "a.bin")
    for name, write in {
        "readme.md": lambda path: path.write_text("text " * 20),
        "b.bin": lambda path: megatron_file(path.with_suffix(""), [[1] * 40]),
    }.items():
        write(tmp_path / name)
        with pytest.raises(UserError, match=f"files of more than one kind, .*/a.bin .nanogpt. and .*/{name[:2]}"):
            load(data__path=str(tmp_path / "*"))
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda folder: (folder / "a.idx").write_bytes(b"short"), "cannot be read as the index"),
        (lambda folder: (folder / "a.idx").write_bytes(b"x" * 99), "not a Megatron index of version 1"),
        (lambda folder: (folder / "a.bin").write_bytes(b"x"), "one of the two is of another file"),
        (lambda folder: megatron_file(folder / "a", [[1] * 40], np.float32, 7), "none of integers"),
        (lambda folder: (folder / "a.idx").write_bytes((folder / "a.idx").read_bytes() + b"xyz"), "do not hold"),
        (lambda folder: (folder / "a.idx").unlink(), "a.idx beside it"),
        (lambda folder: (folder / "a.bin").unlink(), "no such file"),
        (lambda folder: megatron_file(folder / "a", [[1] * 40] * 3, documents=[0, 2, 1, 3]), "a.idx is damaged, .* not in order"),
        (lambda folder: megatron_file(folder / "a", [[1] * 40] * 3, documents=[0, -1, 3]), "a.idx is damaged, .* not in order"),
        (lambda folder: megatron_file(folder / "a", [[1] * 40] * 3, documents=[0, 2, 9]), "a.idx is damaged, .* not sequences 0 to 2"),
        (lambda folder: megatron_file(folder / "a", [[1] * 40] * 3, documents=[1, 3]), "a.idx is damaged, .* not sequences 0 to 2"),
        (lambda folder: megatron_file(folder / "a", [[1] * 40] * 3, first=8), "a.idx is damaged, .* not lie one behind another"),
        (lambda folder: megatron_file(folder / "a", [[1, 2] * 40, [3, 300]]), "a.bin, token 81: id 300, but the model has vocab_size = 300"),
        (lambda folder: megatron_file(folder / "a", [[1, -2] * 40]), "a.bin, token 1: id -2"),
    ],
)  # fmt: skip
def test_damaged_token_files_are_named(tmp_path, change, message):
    megatron_file(tmp_path / "a", [[1, 2, 3] * 40])
    change(tmp_path)
    with pytest.raises(UserError, match=message):
        load(data__path=str(tmp_path / "a.bin"), data__source="megatron")


@pytest.mark.parametrize("workers", [0, 1])
def test_an_id_beyond_the_vocabulary_that_the_start_does_not_see_ends_the_run_where_it_is_read(
    tmp_path, monkeypatch, workers
):
    from trainer.data import indexed as module

    monkeypatch.setattr(module, "_LOOKED_AT", 4)
    monkeypatch.setattr(module, "_WINDOW", 1)
    ids = np.arange(320, dtype=np.uint16) % 200
    ids[100] = 300
    ids.tofile(tmp_path / "train.bin")
    config = tiny_config(data__path=str(tmp_path / "train.bin"), data__shuffle=False, data__workers=workers)
    samples = load_samples(config, 300)
    batches = checked(iter(make_loader(samples, config.data, 1, 0, 1, 1)), samples)
    for _ in range(3):
        next(batches)
    with pytest.raises(UserError, match="train.bin, token 100: id 300, but the model has vocab_size = 300"):
        next(batches)


def test_prepared_data_of_another_tokenizer_or_with_a_lost_shard_is_refused(tmp_path, lines):
    out = tmp_path / "out"
    prepare([lines], "bytes", out, 1)
    with pytest.raises(UserError, match="prepared with the tokenizer 'bytes', which is not data.tokenizer = 'smollm2'"):
        load(data__path=str(out), data__tokenizer="smollm2", vocab_size=50_000)
    megatron_file(out / "000000", [[1] * 100], np.uint16, 8)
    with pytest.raises(UserError, match="holds 100 tokens of 1 documents, but .* says"):
        load(data__path=str(out))
    for content, message in {"{}": "'format'", '{"format": 1}': "no tokenizer, sources"}.items():
        (out / "manifest.json").write_text(content)
        with pytest.raises(UserError, match=f"is not the manifest of prepared data: {message}"):
            load(data__path=str(out))


def test_text_that_is_not_small_is_tokenized_once_into_a_cache(tmp_path, lines, monkeypatch):
    monkeypatch.setattr(sources, "IN_MEMORY_BYTES", 1000)
    keys = dict(data__path=lines, data__cache_dir=str(tmp_path / "cache"), data__bad_lines="skip")
    assert stream(load(**keys)) == expected_stream()
    (folder,) = (tmp_path / "cache").glob("tokens-*[!k]")
    before = (folder / "000000.bin").stat().st_mtime_ns
    assert stream(load(**keys)) == expected_stream()
    assert (folder / "000000.bin").stat().st_mtime_ns == before
    with Path(lines).open("a") as file:
        file.write('{"text": "more"}\n{"text": 3}\n')
    again = load(**keys)
    assert stream(again)[-5:] == [*b"more", 256]
    assert "1 bad line skipped" in again.warnings[0] and f"{lines}:602, byte" in again.warnings[0]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="set data.cache_dir"):
        load(**keys | dict(data__cache_dir=str(tmp_path / "file/x")))


def test_several_files_are_read_in_the_order_of_their_names(tmp_path):
    (tmp_path / "b.txt").write_text("bb" * 20)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"body": "aa"}\n'))
    read = stream(load(data__path=str(tmp_path / "*"), data__text_field="body"))
    assert read == [97, 97, 256, *b"bb" * 20, 256]


def test_urls_are_read_where_they_are_and_token_files_are_fetched(tmp_path, lines, monkeypatch):
    import fsspec

    system = fsspec.filesystem("memory")
    system.pipe("/corpus/in.jsonl", Path(lines).read_bytes())
    cache = dict(data__cache_dir=str(tmp_path / "cache"))
    system.pipe("/corpus/[a] b 书.txt", b"in brackets, and long enough")
    assert stream(load(data__path="memory://corpus/*.jsonl", **cache)) == expected_stream()
    assert len(stream(load(8, data__path="memory://corpus/[a] b 书.txt", **cache))) == 29
    prepare([lines], "bytes", tmp_path / "out", 1)
    for path in (tmp_path / "out").iterdir():
        system.pipe(f"/prepared/{path.name}", path.read_bytes())
    assert stream(load(data__path="memory://prepared", **cache)) == expected_stream()
    assert stream(load(data__path="memory://prepared/000000.bin", **cache)) == expected_stream()
    for path, message in {
        "memory://corpus/none.jsonl": "no such file",
        "nowhere://x.jsonl": "nowhere",
    }.items():
        with pytest.raises(UserError, match=message):
            load(data__path=path, **cache)


def test_text_and_tokenizer_must_fit_the_model(tmp_path):
    (tmp_path / "s.txt").write_bytes(b"ten bytes!")
    with pytest.raises(UserError, match="fewer than one row of training.seq_len"):
        load(data__path=str(tmp_path / "s.txt"))
    for content in (b"", b"  \n\n"):
        (tmp_path / "e.txt").write_bytes(content)
        with pytest.raises(UserError, match="the file is empty"):
            load(data__path=str(tmp_path / "e.txt"))
    with pytest.raises(
        UserError, match=r'data.tokenizer = "smollm2" has 49152 ids, but the model has vocab_size = 320'
    ):
        load(data__tokenizer="smollm2", vocab_size=320)
    with pytest.raises(UserError, match="no such file"):
        load(data__tokenizer=str(tmp_path / "none.json"))
    (tmp_path / "t").mkdir()
    (tmp_path / "t/tokenizer.json").symlink_to(ROOT / "assets/smollm2/tokenizer.json")
    (tmp_path / "t/tokenizer_config.json").write_bytes(b"[]")
    with pytest.raises(UserError, match="tokenizer_config.json is not a JSON object"):
        load(data__tokenizer=str(tmp_path / "t"), vocab_size=50_000)
    (tmp_path / "bad.json").write_bytes(b"{}")
    with pytest.raises(UserError, match="not a tokenizer.json"):
        load(data__tokenizer=str(tmp_path / "bad.json"))


def test_sources_and_a_curriculum_in_toml(tmp_path, lines):
    (tmp_path / "b.txt").write_text("b" * 1000)
    text = f"""
[data.sources.english]
path = "{lines}"
weight = 7
[data.sources.other]
path = "{tmp_path}/b.txt"
weight = 3
[[data.curriculum]]
step = 3
weights = {{other = 7}}
[training]
seq_len = 32
global_batch_size = 20
"""
    (tmp_path / "c.toml").write_text(text)
    config = load_config(str(tmp_path / "c.toml"))
    samples = load_samples(config, 300)
    assert samples.tokens_by_source(40) == {"english": 28 * 32, "other": 12 * 32}
    assert samples.tokens_by_source(60) == {"english": 38 * 32, "other": 22 * 32}
    assert samples[0]["tokens"].shape == (32,)
