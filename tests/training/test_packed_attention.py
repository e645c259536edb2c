import pytest
import torch

from engine.training.packed_attention import Documents, _diagonal_gradients, _merge_diagonals, attend_dense

LENGTHS = [5, 1, 7]


def inputs(num_diagonals, dtype=torch.float64):
    torch.manual_seed(num_diagonals)
    total = sum(LENGTHS)
    q = torch.randn(total, 4, 8, dtype=dtype)
    rest = [torch.randn(total, 2, 8, dtype=dtype) for _ in range(2 + 2 * num_diagonals)]
    offsets = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    return q, rest, Documents(offsets, max(LENGTHS))


def pairs(flat):
    return list(zip(flat[::2], flat[1::2], strict=True))


@pytest.mark.parametrize("num_diagonals", [0, 1, 3])
def test_dense_attention_is_a_softmax_over_own_prefix_and_own_diagonals(num_diagonals):
    q, (k, v, *flat), documents = inputs(num_diagonals)
    attended = attend_dense(q, k, v, pairs(flat), documents)
    starts = [0] * 5 + [5] + [6] * 7
    for token, start in enumerate(starts):
        for head in range(4):
            keys = [*k[start : token + 1, head // 2], *(key[token, head // 2] for key in flat[::2])]
            values = [*v[start : token + 1, head // 2], *(value[token, head // 2] for value in flat[1::2])]
            weights = torch.softmax(torch.stack(keys) @ q[token, head] / 8**0.5, 0)
            torch.testing.assert_close(
                attended[token, head], weights @ torch.stack(values), rtol=1e-5, atol=1e-5
            )


def document_part(q, k, v, documents):
    """Return (out, lse [Hq, T]) over the document's keys alone, as FlashAttention gives them."""
    out = attend_dense(q, k, v, (), documents)
    starts = torch.tensor([0] * 5 + [5] + [6] * 7)
    place = torch.arange(len(q))
    is_seen = (place[None] <= place[:, None]) & (place[None] >= starts[:, None])
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(2, 1)) / 8**0.5
    return out, scores.masked_fill(~is_seen, -torch.inf).logsumexp(-1)


@pytest.mark.parametrize("num_diagonals", [1, 3])
def test_merged_diagonals_equal_one_softmax(num_diagonals):
    q, (k, v, *flat), documents = inputs(num_diagonals, torch.float32)
    out, lse = document_part(q, k, v, documents)
    merged, _ = _merge_diagonals(q, out, lse, 8**-0.5, *flat)
    torch.testing.assert_close(merged, attend_dense(q, k, v, pairs(flat), documents))


@pytest.mark.parametrize("num_diagonals", [1, 3])
def test_diagonal_gradients_equal_autograd(num_diagonals):
    q, (k, v, *flat), documents = inputs(num_diagonals, torch.float32)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, *flat)]
    joint = attend_dense(q, k, v, pairs(flat), documents)
    grad = torch.randn_like(joint)
    dq, dk, dv, *expected = torch.autograd.grad(joint, leaves, grad)
    with torch.no_grad():
        out, lse = document_part(q, k, v, documents)
        merged, total = _merge_diagonals(q, out, lse, 8**-0.5, *flat)
        # The document's share of dq is what FlashAttention's backward makes of the merged output and lse.
        scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(2, 1)) / 8**0.5
        starts = torch.tensor([0] * 5 + [5] + [6] * 7)
        place = torch.arange(len(q))
        is_seen = (place[None] <= place[:, None]) & (place[None] >= starts[:, None])
        weights = (scores - total[..., None]).exp() * is_seen
        dp = torch.einsum("thd,shd->hts", grad, v.repeat_interleave(2, 1))
        ds = weights * (dp - (grad * merged).sum(-1).t()[..., None])
        document_dq = torch.einsum("hts,shd->thd", ds, k.repeat_interleave(2, 1)) / 8**0.5
        found = _diagonal_gradients(q, merged, total, grad, document_dq, 8**-0.5, *flat)
    torch.testing.assert_close(found[0], dq, rtol=1e-4, atol=1e-5)
    for ours, reference in zip(found[1:], expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
    document_dk = torch.einsum("hts,thd->shd", ds, q.detach()).view(-1, 2, 2, 8).sum(2) / 8**0.5
    torch.testing.assert_close(document_dk, dk, rtol=1e-4, atol=1e-5)
    document_dv = torch.einsum("hts,thd->shd", weights, grad).view(-1, 2, 2, 8).sum(2)
    torch.testing.assert_close(document_dv, dv, rtol=1e-4, atol=1e-5)


def test_documents_start_where_positions_are_zero():
    documents = Documents.from_positions(torch.tensor([0, 1, 2, 0, 0, 1]), 3)
    assert documents.offsets.tolist() == [0, 3, 4, 6]
