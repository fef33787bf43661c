"""Documents, tokens, rows: from text to what a row holds."""

import gzip
import io
import json
import random

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard

from trainer.data.documents import BadLines, Part, documents_in, read_documents
from trainer.data.encode import tokenize
from trainer.data.rows import IGNORED, TokenRows, labels_of
from trainer.data.stream import MemoryTokens, TokenStream
from trainer.data.tokenizer import ASSETS, ByteTokenizer, load_tokenizer
from trainer.errors import UserError


def stream_of(tokens, starts=(0,)) -> TokenStream:
    return TokenStream([MemoryTokens(np.asarray(tokens), starts)])


def texts_of(path, bad: BadLines | None = None, **part) -> list[str]:
    """The whole documents of a file."""
    texts, text = [], ""
    for piece, ends in read_documents(Part(str(path), documents_in(str(path)), **part), bad or BadLines()):
        text += piece
        if ends:
            texts, text = [*texts, text], ""
    return texts


def write(path, content: bytes):
    path.write_bytes(content)
    return str(path)


def test_b69_labels_are_the_next_tokens():
    rows = TokenRows(stream_of(np.arange(101)), seq_len=10)
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


@pytest.mark.parametrize("draw", range(20))
def test_every_token_is_a_label_once_over_documents_and_pieces(draw):
    """Documents of random lengths in random pieces, some memory-only, read back as one stream."""
    rng = random.Random(draw)
    pieces, tokens, starts = [], [], []
    for _ in range(rng.randint(1, 5)):
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 9))]
        ids = np.array([rng.randrange(1 << 16) for _ in range(sum(lengths))], dtype=np.uint16)
        of_piece = np.cumsum([0, *lengths])[:-1]
        pieces.append(MemoryTokens(ids, of_piece))
        starts += (of_piece + len(tokens)).tolist()
        tokens += ids.tolist()
    stream, seq_len = TokenStream(pieces), rng.randint(1, 50)
    assert len(stream) == len(tokens) and stream.document_starts().tolist() == starts
    first, last = sorted((rng.randrange(len(tokens)), rng.randrange(len(tokens))))
    assert stream.starts_in(first, last).tolist() == [start for start in starts if first <= start < last]
    for token in (first, last, 0, len(tokens) - 1):
        assert stream.document_of(token) == sum(start <= token for start in starts) - 1
    if len(tokens) <= seq_len:
        with pytest.raises(UserError, match="fewer than one row"):
            TokenRows(stream, seq_len)
        return
    rows = TokenRows(stream, seq_len)
    labels = [label for row in range(len(rows)) for label in rows[row]["labels"].tolist()]
    assert labels == tokens[1 : 1 + len(labels)] and len(tokens) - 1 - len(labels) < seq_len
    for row in range(len(rows)):
        for place, document in rows.documents(row):
            assert stream.document_of(row * seq_len + place) == document
            assert place == 0 or row * seq_len + place in starts


def test_bundled_text_and_tokenizers():
    text = texts_of(ASSETS / "pride_and_prejudice.txt.gz")[0]
    assert text.startswith("PRIDE AND PREJUDICE")
    tokenizer = load_tokenizer("smollm2")
    ids = tokenizer.encode(text[:2000])
    assert tokenizer.n_ids == 49_152 and 300 < len(ids) < 700 and ids.max() < tokenizer.n_ids
    assert bytes(ByteTokenizer().encode("naïve ☃").astype(np.uint8)).decode() == "naïve ☃"


def test_every_document_ends_with_eos_and_none_has_to_fit_into_memory():
    documents = [("ab", True), ("c", False), ("d", True)]
    assert [(np.concatenate(ids).tolist(), is_last) for ids, is_last in tokenize(iter(documents), ByteTokenizer())] == [
        ([97, 98, 256], True),
        ([99], False),
        ([100, 256], True),
    ]


def bpe_folder(folder, bos: str | None, eos: str | None):
    """The bundled tokenizer with a template that puts ``bos`` before a text, and another or no name for the end."""
    import tokenizers

    folder.mkdir()
    tokenizer = tokenizers.Tokenizer.from_file(str(ASSETS / "smollm2/tokenizer.json"))
    if bos is not None:
        tokenizer.add_special_tokens([bos])
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos} if eos else {}))
    return str(folder)


def test_bos_where_the_tokenizer_puts_one_and_eos_always(tmp_path):
    def document(name: str) -> list[int]:
        ((ids, _),) = tokenize(iter([("A text.", True)]), load_tokenizer(name))
        return np.concatenate(ids).tolist()

    plain, with_bos = bpe_folder(tmp_path / "plain", None, "<|endoftext|>"), bpe_folder(tmp_path / "bos", "<bos>", None)
    text = load_tokenizer("smollm2").encode("A text.").tolist()
    assert document("smollm2") == [*text, 2]  # its config names <|im_end|>
    assert document(plain) == document(with_bos)[1:] == [*text, 0]  # <|endoftext|>
    assert load_tokenizer(with_bos).bos_ids == [49_152] == document(with_bos)[:1]
    assert load_tokenizer(plain).bos_ids == []


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    import tokenizers

    folder = tmp_path / "t"
    folder.mkdir()
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="names no end-of-text token"):
        load_tokenizer(str(folder))


def test_what_looks_like_a_special_token_in_a_text_is_text():
    tokenizer = load_tokenizer("smollm2")
    text = "He wrote <|endoftext|> and <|im_start|> by hand."
    assert min(tokenizer.encode(text)) > 16  # 0 to 16 are the special ones
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
    assert 0 in tokenizer.encode_prompt(text)  # a prompt may have some
    assert min(tokenizer.encode(text)) > 16


@pytest.mark.parametrize("separator", ["\n", "\n\n", "\n  ", " \n", "\r\n"])
def test_a_long_text_is_tokenized_as_if_at_once(tmp_path, monkeypatch, separator):
    from trainer.data import documents

    words = random.Random(0)
    lines = [" ".join(words.choices(["one", "2", "…", "naïve", "鄭武公", "x.", "(y)"], k=9)) for _ in range(400)]
    text = "\n".join(lines[:200]) + "\n" + separator.join(lines[200:])
    (tmp_path / "a.txt").write_bytes(text.encode())
    monkeypatch.setattr(documents, "PIECE_BYTES", 1000)
    pieces = list(read_documents(Part(str(tmp_path / "a.txt"), "text"), BadLines()))
    assert len(pieces) > 5 and "".join(piece for piece, _ in pieces) == text
    assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
    tokenizer = load_tokenizer("smollm2")
    ids = [part for of_piece, _ in tokenize(iter(pieces), tokenizer) for part in of_piece]
    assert np.concatenate(ids)[:-1].tolist() == tokenizer.encode(text).tolist()


def test_a_text_without_a_place_to_cut_is_cut_all_the_same(tmp_path, monkeypatch):
    from trainer.data import documents

    monkeypatch.setattr(documents, "PIECE_BYTES", 1000)
    for number, text in enumerate(["公" * 20_000, "1 " * 20_000, "a\n\n" * 15_000]):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
        pieces = list(read_documents(Part(str(tmp_path / f"{number}.txt"), "text"), BadLines()))
        assert len(pieces) > 1 and "".join(piece for piece, _ in pieces) == text
        assert max(len(piece.encode()) for piece, _ in pieces) <= 17_000


ZSTD = zstandard.compress("".join(f"line {number}\n" for number in range(90_000)).encode())


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("c.txt", b"caf\xff", "c.txt, byte 3: not valid UTF-8"),
        ("d.jsonl", b'{"text": "x"}\n{"text": \n', "d.jsonl:2, byte 14: not one JSON object a line"),
        ("e.jsonl", b'{"text": "x"} {"text": "y"}\n', "e.jsonl:1, byte 0: not one JSON object a line"),
        ("f.jsonl", b'{"text": null}\n', "f.jsonl:1, byte 0: expected"),
        ("g.jsonl", b'\n\n{"txt": "x"}\n', "g.jsonl:3, byte 2: expected"),
        ("h.jsonl", b'{"text": "\xff"}\n', "h.jsonl:1, byte 0: not valid UTF-8 (invalid start byte at byte 10"),
        ("i.txt.gz", b"not gzip", "cannot be read"),
        ("j.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:10] + b"broken", "cannot be read"),
        ("k.jsonl", b'{"text": "\\ud800"}\n', "k.jsonl:1, byte 0: a lone surrogate"),
        ("l.jsonl", b"[" * 100_000, "l.jsonl:1, byte 0: not one JSON object a line"),
        ("m.jsonl.zst", b"not zstandard", "cannot be read"),
        ("n.parquet", b"not parquet", "cannot be read"),
        (
            "o.txt.zst",
            ZSTD[: len(ZSTD) // 2],
            "the file ends within a frame",
        ),  # at a byte where whole lines have been read
        ("p.txt.zst", ZSTD + ZSTD[:-1], "the file ends within a frame"),
        ("q.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], "cannot be read"),
        ("r.txt", b"\xef\xbb\xbf" + b"text" * 9 + b"\xff", "r.txt, byte 39: not valid UTF-8"),
        ("s.txt", np.arange(1, 99, dtype=np.uint16).tobytes(), "s.txt, byte 1: a zero byte: this is no text"),
        ("t.txt", "utf-16".encode("utf-16"), "t.txt, byte 0: not valid UTF-8"),
    ],
)
def test_b67_bad_files_are_named_with_line_and_byte(tmp_path, name, content, expected):
    with pytest.raises(UserError) as caught:
        texts_of(write(tmp_path / name, content))
    assert expected in caught.value.message() and name in caught.value.message()


BAD_LINES = [
    b"{}",
    b'{"text": ""}',
    b'{"text": null}',
    b'{"text": "half',
    b'{"text": "two"}{"text": "objects"}',
    b'{"text": "\xff"}',
    b'{"text": "crlf"}\r',
    '{"text": "a\u2028b"}'.encode(),
    json.dumps({"text": "long " * 2_000_000}).encode(),
    b'{"text": "no newline at the end"}',
]
GOOD_TEXTS = ["crlf", "a\u2028b", "long " * 2_000_000, "no newline at the end"]


def test_b67_bad_lines_are_skipped_and_counted(tmp_path):
    path, bad = write(tmp_path / "b.jsonl", b"\xef\xbb\xbf" + b"\n".join(BAD_LINES)), BadLines(skip=True)
    assert texts_of(path, bad) == GOOD_TEXTS
    assert bad.n_skipped == 5  # an empty text is a document without tokens, not a bad line
    assert bad.examples[0].startswith(f"{path}:1, byte 0: expected") and len(bad.examples) == 3


class AllBadLines(BadLines):
    def found(self, problem: str) -> None:
        self.examples.append(problem)


def test_b67_parts_of_a_file_hold_each_line_once_and_name_the_same_places(tmp_path):
    content = b"\n".join(line for line in BAD_LINES if len(line) < 100) + b"\n"
    path, whole = write(tmp_path / "b.jsonl", content), AllBadLines()
    expected = texts_of(path, whole)
    assert len(whole.examples) == 5 and len(expected) == 3
    for n_parts in (2, 3, 7, len(content)):
        texts, bad = [], AllBadLines()
        for part in range(n_parts):
            texts += texts_of(
                path, bad, first=len(content) * part // n_parts, last=len(content) * (part + 1) // n_parts
            )
        assert texts == expected and bad.examples == whole.examples


def test_the_kinds_of_files_hold_the_same_documents(tmp_path):
    texts = ["one", "zwei\nZeilen", "三"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    packed = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(packed, closefd=False) as out:
        out.write(lines)
    table = pyarrow.table({"id": [1, 2, 3], "text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for name, content in {
        "a.jsonl": lines,
        "b.jsonl.gz": gzip.compress(lines[:20]) + gzip.compress(lines[20:]),  # two members, as cat makes them
        # of two frames, and one to be skipped between them, as pzstd makes them
        "c.json.zst": packed.getvalue() + b"\x50\x2a\x4d\x18\x03\0\0\0abc" + zstandard.compress(b'{"text": "last"}'),
    }.items():
        write(tmp_path / name, content)
        assert texts_of(tmp_path / name) == texts + ["last"] * (name == "c.json.zst"), name
    assert texts_of(tmp_path / "a.parquet") == texts
    with pytest.raises(UserError, match="no column 'body' .it has id, text"):
        list(read_documents(Part(str(tmp_path / "a.parquet"), "parquet"), BadLines(), "body"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "", "b"]}), tmp_path / "n.parquet")
    bad = BadLines(skip=True)
    assert (
        texts_of(tmp_path / "n.parquet", bad) == ["a", "b"] and 'n.parquet, row 2: expected {"text"' in bad.examples[0]
    )


def test_jsonl_details(tmp_path):
    lines = ['{"text": "one"}', '{"text": "a\u2028b"}', "", '{"text": ""}', '{"text": "last, no newline"}']
    file = write(tmp_path / "x.jsonl", b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert texts_of(file) == ["one", "a\u2028b", "last, no newline"]
