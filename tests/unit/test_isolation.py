"""B65: documents that share a row do not see each other."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from models.decoder import Decoder
from models.decoder_config import DecoderConfig
from models.documents import attend, document_mask
from models.hugging_face import hugging_face_name
from tests.hugging import VARIANTS, VOCAB, make_model
from tests.unit.test_hugging_face import our_model
from trainer.data.packing import positions_after

TINY = DecoderConfig(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=128, vocab_size=256)
LENGTHS = (1, 17, 2, 30, 14)  # of the documents of a row


def a_row(lengths=LENGTHS, seed=0):
    """Tokens and positions [1, S], and where each document lies."""
    ends = list(itertools.accumulate(lengths))
    tokens = torch.randint(0, 256, (1, ends[-1]), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return tokens, positions, [slice(end - length, end) for end, length in zip(ends, lengths)]


def tiny_decoder(n_positions: int = 64, **changes) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**(vars(TINY) | changes)), n_positions)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)  # a leak would be seen
    return model


@pytest.mark.parametrize("changes", [{}, dict(qk_norm=True, qkv_bias=True, n_kv_heads=4)], ids=["llama", "qwen"])
def test_b65_changing_a_document_leaves_the_others(changes):
    model, (tokens, positions, places) = tiny_decoder(**changes), a_row()
    with torch.no_grad():
        before = model(tokens, positions)
        for place in places:
            changed = tokens.clone()
            changed[:, place] = (changed[:, place] + 1) % 256
            after = model(changed, positions)
            elsewhere = torch.ones(tokens.shape[1], dtype=torch.bool)
            elsewhere[place] = False
            assert torch.equal(after[:, elsewhere], before[:, elsewhere])
            assert (after[:, place] != before[:, place]).any()
        leaked = model(torch.cat((tokens[:, :1] + 1, tokens[:, 1:]), 1) % 256) - model(tokens)
        assert (leaked[:, 40:].abs() > 1e-3).any()  # without isolation the first document is seen by the last


def test_b65_a_document_is_as_in_a_row_alone():
    """Rows with different borders in one batch."""
    model = tiny_decoder()
    rows = [a_row(), a_row(LENGTHS[::-1], seed=1), a_row((64,), seed=2)]
    tokens, positions = (torch.cat([row[which] for row in rows]) for which in (0, 1))
    with torch.no_grad():
        packed = model(tokens, positions)
        for logits, (row, _, places) in zip(packed, rows):
            for place in places:
                torch.testing.assert_close(logits[place], model(row[:, place])[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed[2:], model(rows[2][0]), rtol=1e-4, atol=1e-4)  # one document: plainly causal


@pytest.mark.parametrize("name", ["llama3_rope", "qwen2", "qwen3"])
def test_b65_loss_and_gradients_are_those_of_transformers_run_on_each_document(tmp_path, name):
    theirs = make_model(name)
    theirs.save_pretrained(tmp_path)
    ours = our_model(str(tmp_path))
    tokens, positions, places = a_row()
    tokens = tokens % VOCAB
    total, want = 0.0, 0.0
    logits = ours(tokens, positions)
    for place in places:
        document = tokens[:, place]
        their_logits = theirs(document).logits
        torch.testing.assert_close(logits[:, place], their_logits, rtol=0, atol=1e-4)
        if document.shape[1] > 1:
            total = total + F.cross_entropy(logits[0, place][:-1], document[0, 1:], reduction="sum")
            want = want + F.cross_entropy(their_logits[0, :-1], document[0, 1:], reduction="sum")
    total.backward()
    want.backward()
    assert total.item() == pytest.approx(want.item(), rel=1e-5)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert name in VARIANTS
    for key, parameter in ours.named_parameters():
        gradient = gradients[hugging_face_name(key)]
        assert (parameter.grad - gradient).abs().max() <= 1e-4 * gradient.abs().max(), key


def test_positions_restart_where_a_document_starts():
    starts = torch.tensor([0, 0, 1, 1, 0, 0, 1], dtype=torch.bool)
    assert positions_after(starts).tolist() == [0, 1, 0, 0, 1, 2, 0]
    mask = document_mask(positions_after(starts)[None], torch.float32)
    assert mask.shape == (1, 1, 7, 7)
    visible = [[0], [0, 1], [2], [3], [3, 4], [3, 4, 5], [6]]
    assert [(row == 0).nonzero().flatten().tolist() for row in mask[0, 0]] == visible


def test_the_mask_is_made_once_for_all_layers_and_plain_rows_need_none():
    model, (tokens, positions, _) = tiny_decoder(), a_row()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.__name__.split(".")[0])
            return function(*args, **(kwargs or {}))

    seen = []
    for inputs in ((tokens,), (tokens, positions)):
        names = []
        with torch.no_grad(), Count():
            model(*inputs)
        seen.append(names)
    plain, isolated = seen
    assert not {"masked_fill_", "cumsum", "eq"} & set(plain)
    for made_once in ("cumsum", "masked_fill_", "tril", "index"):
        assert isolated.count(made_once) == 1, made_once
    assert isolated.count("_scaled_dot_product_flash_attention_for_cpu") == TINY.n_layers  # and never a slower kernel


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_mask_of_a_gpu_lets_through_the_same(monkeypatch):
    """FlexAttention, forward only and not compiled: a CPU can do no more."""
    import models.documents

    monkeypatch.setattr(models.documents, "_compiled_flex", lambda: (create_block_mask, flex_attention))
    rows = [a_row(), a_row(LENGTHS[::-1])]
    positions = torch.cat([row[1] for row in rows])
    q, k, v = torch.randn(2, 4, 64, 16), torch.randn(2, 2, 64, 16), torch.randn(2, 2, 64, 16)
    block_mask = models.documents._block_mask((positions == 0).cumsum(1))
    want = attend(q, k, v, document_mask(positions, torch.float32))
    torch.testing.assert_close(attend(q, k, v, block_mask), want)
    assert (want - attend(q, k, v)).abs().max() > 0.1
