import pytest
import torch

from engine.training.packed_attention import attend_documents
from engine.training.unroll import is_drafted, unroll
from tests.training.cases import conversations, flat_tokens, tiny_head, tiny_target
from tests.training.oracle import StepwiseDraft, target_outputs

NUM_STEPS = 4


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("lengths", [[9], [7, 1, 11, 6]])
@torch.no_grad()
def test_unroll_equals_stepwise_drafting(lengths, num_layers):
    target = tiny_target()
    head = tiny_head(target, num_layers)
    data = conversations(lengths)
    tokens = flat_tokens(data)
    attend = attend_documents(tokens.documents, target.config.num_kv_heads)
    features = target(tokens.token_ids, tokens.positions, attend).features
    unrolled = torch.stack(list(unroll(head, tokens, features, NUM_STEPS)))
    start = 0
    for token_ids, _ in data:
        ids = token_ids.tolist()
        stepwise_features, _ = target_outputs(target, ids)
        torch.testing.assert_close(
            features[start : start + len(ids)], stepwise_features, rtol=1e-4, atol=1e-4
        )
        draft = StepwiseDraft(head, stepwise_features)
        for root, token in enumerate(ids):
            hiddens = draft.draft(ids[root + 1 : root + NUM_STEPS], draft.commit(token))
            torch.testing.assert_close(unrolled[: len(hiddens), start + root], hiddens, rtol=1e-4, atol=1e-4)
        start += len(ids)


@torch.no_grad()
def test_a_document_does_not_see_its_neighbours():
    target = tiny_target()
    head = tiny_head(target)
    alone, packed = conversations([8]), conversations([8, 5])
    packed.token_ids[:8] = alone.token_ids
    outputs = []
    for data in (alone, packed):
        tokens = flat_tokens(data)
        attend = attend_documents(tokens.documents, target.config.num_kv_heads)
        features = target(tokens.token_ids, tokens.positions, attend).features
        outputs.append(torch.stack([hidden[:5] for hidden in unroll(head, tokens, features, 3)]))
    torch.testing.assert_close(outputs[0], outputs[1])


@pytest.mark.parametrize("step", [0, 1, 3])
def test_drafted_rows_predict_answer_tokens_of_their_own_document(step):
    data = conversations([6, 3, 9])
    tokens = flat_tokens(data)
    expected, start = [], 0
    for length in data.lengths.tolist():
        for row in range(length):
            last = row + step + 1
            expected.append(last < length and bool(data.is_answer[start + last]))
        start += length
    assert is_drafted(tokens, step).tolist() == expected
