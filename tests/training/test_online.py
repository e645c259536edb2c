import pytest
import torch
import torch.nn.functional as F

from engine.errors import ConfigError
from engine.training.losses import LossWeights
from engine.training.online import Objective, OnlineDistillation, add_noise
from engine.training.packed_attention import Documents, attend_documents
from engine.training.unroll import is_drafted
from tests.training.cases import conversations, flat_tokens, tiny_head, tiny_target
from tests.training.oracle import StepwiseDraft, target_outputs


@pytest.mark.parametrize(
    "losses", [LossWeights(), LossWeights(0.1, 1.0), LossWeights(0.5, 0.2, 0.7)], ids=["ce", "paper", "all"]
)
@torch.no_grad()
def test_the_loss_is_that_of_stepwise_drafting(losses):
    """Written from the formula, one root and one draft step at a time."""
    target = tiny_target()
    head = tiny_head(target)
    data = conversations([9, 12])
    objective = Objective(unroll_steps=3, step_decay=0.5, max_parent_rank=10**6, losses=losses)
    tokens = flat_tokens(data)
    num_roots = is_drafted(tokens, 0).sum()
    loss, survivors = OnlineDistillation(target, head, objective).loss(tokens, num_roots, [0])

    expected, counts = 0.0, [0, 0, 0, 0]
    for token_ids, is_answer in data:
        ids = token_ids.tolist()
        draft = StepwiseDraft(head, target_outputs(target, ids)[0])
        teacher = plain_teacher(target, head, ids)
        for root in range(len(ids) - 1):
            state = draft.commit(ids[root])
            hiddens = draft.draft(ids[root + 1 : root + 3], state)
            expected += plain_loss(head, hiddens, teacher, ids, is_answer, root, objective, counts)
    assert int(num_roots) == counts[0]
    assert survivors.tolist() == counts
    torch.testing.assert_close(loss, torch.tensor(expected / counts[0]), rtol=1e-4, atol=1e-5)


def plain_teacher(target, head, ids):
    """Return (hidden after the final norm, p over the draft vocabulary) at every position."""
    positions = torch.arange(len(ids))
    documents = Documents(torch.tensor([0, len(ids)]), len(ids))
    hidden = target(
        torch.tensor(ids), positions, attend_documents(documents, target.config.num_kv_heads)
    ).hidden
    logits = target.logits(hidden)[:, head.target_ids]
    return hidden, logits.softmax(-1)


def plain_loss(head, hiddens, teacher, ids, is_answer, root, objective, counts):
    """Return the loss of one root, and count how far its top-1 chain gets."""
    target_hidden, p = teacher
    vocab = head.target_ids.tolist()
    total, is_best = 0.0, True
    for step in range(objective.unroll_steps):
        place = root + step + 1
        if place >= len(ids) or not is_answer[place]:
            break
        counts[0] += step == 0
        if ids[place] not in vocab:
            break
        log_q = head.logits(hiddens[step]).log_softmax(-1)
        losses = objective.losses
        value = -losses.cross_entropy * float((p[place - 1] * log_q).sum())
        value += losses.acceptance * (1 - float(torch.minimum(p[place - 1], log_q.exp()).sum()))
        distance = F.smooth_l1_loss(hiddens[step], target_hidden[place - 1])
        value += losses.smooth_l1 * float(distance)
        total += objective.step_decay**step * value
        is_best = is_best and int(log_q.argmax()) == vocab.index(ids[place])
        counts[step + 1] += is_best
    return total


def test_noise_is_bounded_by_the_size_of_its_token_and_belongs_to_its_row():
    features = torch.randn(8, 50) * torch.arange(1, 9)[:, None]
    noisy = add_noise(features, 0.1, [3, 4])
    share = (noisy - features).abs() / features.square().mean(-1, keepdim=True).sqrt()
    assert 0.09 < share.max() <= 0.1 + 1e-6
    assert torch.equal(noisy[4:], add_noise(features[4:], 0.1, [4]))
    assert not torch.equal(noisy, add_noise(features, 0.1, [3, 5]))


@pytest.mark.parametrize(
    "change",
    [{"unroll_steps": 0}, {"max_parent_rank": 0}, {"step_decay": 0.0}, {"feature_noise": float("nan")}],
)
def test_impossible_objectives_are_refused(change):
    with pytest.raises(ConfigError):
        Objective(**change)


def test_a_head_of_other_taps_is_refused():
    target = tiny_target()
    head = tiny_head(target)
    target.taps = (0,)
    with pytest.raises(ConfigError, match="taps"):
        OnlineDistillation(target, head, Objective())
