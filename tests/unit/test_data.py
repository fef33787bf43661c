import gzip
import json

import numpy as np
import pytest
import torch

from tests.tiny import tiny_config
from trainer.config import Data
from trainer.data.documents import read_documents
from trainer.data.loader import RowOrder, StepSampler, load_rows, make_loader
from trainer.data.rows import IGNORED, TokenRows, labels_of, token_stream
from trainer.data.tokenizer import ASSETS, ByteTokenizer, load_tokenizer
from trainer.errors import UserError


def test_b69_labels_are_the_next_tokens():
    rows = TokenRows(np.arange(101, dtype=np.int32), seq_len=10)
    assert len(rows) == 10
    for index in range(10):
        row = rows[index]
        assert row["tokens"].tolist() == list(range(index * 10, index * 10 + 10))
        assert row["labels"].tolist() == list(range(index * 10 + 1, index * 10 + 11))
    labels = [label for index in range(10) for label in rows[index]["labels"].tolist()]
    assert labels == list(range(1, 101))  # none skipped, none twice


def test_b69_the_first_answer_token_is_trained():
    tokens, n_prompt = torch.arange(9), 4
    labels = labels_of(tokens, trained=torch.arange(9) >= n_prompt)
    assert labels.tolist() == [IGNORED] * (n_prompt - 1) + [4, 5, 6, 7, 8]


def first_batch(seed=0, shuffle=True, job_seed=0):
    config = tiny_config(data__seed=seed, data__shuffle=shuffle, job__seed=job_seed)
    rows = TokenRows(np.arange(2001, dtype=np.int32), seq_len=10)
    return next(iter(make_loader(rows, config.data, 8, dp_index=0, dp=1, first_step=1)))["tokens"]


def test_b70_the_data_seed_decides_the_order():
    assert torch.equal(first_batch(1), first_batch(1))
    assert not torch.equal(first_batch(1), first_batch(2))
    assert torch.equal(first_batch(1, job_seed=5), first_batch(1, job_seed=6))
    assert first_batch(1, shuffle=False)[:, 0].tolist() == [0, 10, 20, 30, 40, 50, 60, 70]


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("first_step", [1, 4])
def test_the_global_batch_is_a_function_of_the_step(dp, first_step):
    """Across dp sizes, starts in the middle, and the end of an epoch (13 rows, 8 a step)."""
    order = RowOrder(n_rows=13, seed=3, shuffle=True)
    whole = iter(StepSampler(order, 8, 0, 1, first_step=1))
    expected = [next(whole) for _ in range(8)]
    shares = [iter(StepSampler(order, 8, index, dp, first_step)) for index in range(dp)]
    for step in range(first_step, 9):
        assert sum((next(share) for share in shares), []) == expected[step - 1]
    assert sorted(sum(expected, [])[:13]) == list(range(13))  # an epoch holds each row once


def test_workers_change_nothing():
    config = tiny_config()
    rows = TokenRows(np.arange(2001, dtype=np.int32), seq_len=10)
    plain = iter(make_loader(rows, config.data, 8, 0, 2, first_step=3))
    workers = iter(make_loader(rows, config.data.model_copy(update={"workers": 2}), 8, 0, 2, first_step=3))
    for _ in range(4):
        assert torch.equal(next(plain)["labels"], next(workers)["labels"])


def test_bundled_text_and_tokenizers():
    text = next(read_documents("bundled", None))
    assert text.startswith("PRIDE AND PREJUDICE")
    tokenizer = load_tokenizer("smollm2")
    ids = tokenizer.encode(text[:2000])
    assert tokenizer.n_ids == 49_152 and 300 < len(ids) < 700 and ids.max() < tokenizer.n_ids
    assert bytes(ByteTokenizer().encode("naïve ☃").astype(np.uint8)).decode() == "naïve ☃"
    stream, starts = token_stream(["ab", "c"], ByteTokenizer())
    assert stream.tolist() == [97, 98, 256, 99, 256] and starts.tolist() == [0, 3, 5]


def write(path, content: bytes):
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    "name, content, source, expected",
    [
        ("a.txt", b"", "text", "the file is empty"),
        ("b.txt", b"  \n\n", "text", "the file is empty"),
        ("c.txt", b"caf\xff", "text", "not valid UTF-8"),
        ("d.jsonl", b'{"text": "x"}\n{"text": \n', "jsonl", "d.jsonl:2: not one JSON object a line"),
        ("e.jsonl", b'{"text": "x"} {"text": "y"}\n', "jsonl", "e.jsonl:1: not one JSON object a line"),
        ("f.jsonl", b'{"text": null}\n', "jsonl", "f.jsonl:1: expected"),
        ("g.jsonl", b'\n\n{"txt": "x"}\n', "jsonl", "g.jsonl:3: expected"),
        ("h.jsonl", b'{"text": "\xff"}\n', "jsonl", "h.jsonl:1: not valid UTF-8"),
        ("i.txt.gz", b"not gzip", "text", "cannot be read"),
        ("j.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:10] + b"broken", "text", "cannot be read"),
        ("k.jsonl", b'{"text": "\\ud800"}\n', "jsonl", "k.jsonl:1: a lone surrogate"),
        ("l.jsonl", b"[" * 100_000, "jsonl", "l.jsonl:1: not one JSON object a line"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path, name, content, source, expected):
    with pytest.raises(UserError) as caught:
        list(read_documents(source, write(tmp_path / name, content)))
    assert expected in caught.value.message() and name in caught.value.message()


def test_jsonl_details(tmp_path):
    lines = ['{"text": "one"}', '{"text": "a\u2028b"}', "", '{"text": ""}', '{"text": "last, no newline"}']
    file = write(tmp_path / "x.jsonl", b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert list(read_documents("jsonl", file)) == ["one", "a\u2028b", "last, no newline"]
    packed = write(tmp_path / "x.jsonl.gz", gzip.compress(json.dumps({"text": "packed"}).encode()))
    assert list(read_documents("jsonl", packed)) == ["packed"]


def test_text_and_tokenizer_must_fit_the_model(tmp_path):
    short = Data(source="text", path=write(tmp_path / "s.txt", b"ten bytes!"), tokenizer="bytes")
    with pytest.raises(UserError, match="fewer than one row of training.seq_len"):
        load_rows(short, seq_len=32, vocab_size=300)
    with pytest.raises(
        UserError, match=r'data.tokenizer = "smollm2" has 49152 ids, but the model has vocab_size = 320'
    ):
        load_rows(Data(tokenizer="smollm2"), seq_len=32, vocab_size=320)
    with pytest.raises(UserError, match="no such file"):
        load_rows(Data(tokenizer=str(tmp_path / "none.json")), seq_len=32, vocab_size=320)
    (tmp_path / "t").mkdir()
    (tmp_path / "t/tokenizer.json").symlink_to(ASSETS / "smollm2/tokenizer.json")
    write(tmp_path / "t/tokenizer_config.json", b"[]")
    with pytest.raises(UserError, match="tokenizer_config.json is not a JSON object"):
        load_rows(Data(tokenizer=str(tmp_path / "t")), seq_len=32, vocab_size=50_000)
    with pytest.raises(UserError, match="not a tokenizer.json"):
        load_rows(Data(tokenizer=write(tmp_path / "bad.json", b"{}")), seq_len=32, vocab_size=320)
