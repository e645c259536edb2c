import pytest
import torch
import torch.nn.functional as F

from engine.errors import ConfigError
from engine.training import losses
from engine.training.losses import LossWeights, distill_logits, smooth_l1


def inputs():
    torch.manual_seed(0)
    hidden = torch.randn(11, 6, dtype=torch.float32, requires_grad=True)
    head_rows = torch.randn(9, 6)
    teacher = torch.randn(11, 9).softmax(-1)
    labels = torch.randint(-1, 9, (11,))
    return hidden, head_rows, teacher, torch.rand(11), labels


@pytest.mark.parametrize("chunk", [4, 16])
@pytest.mark.parametrize(("cross_entropy", "acceptance"), [(1.0, 0.0), (0.0, 1.0), (0.3, 2.0)])
def test_the_loss_and_its_gradient_equal_autograd_of_the_formula(
    cross_entropy, acceptance, chunk, monkeypatch
):
    monkeypatch.setattr(losses, "_CHUNK", chunk)
    hidden, head_rows, teacher, weights, labels = inputs()
    log_q = F.linear(hidden, head_rows).log_softmax(-1)
    rows = -cross_entropy * (teacher * log_q).sum(-1)
    rows = rows + acceptance * (1 - torch.minimum(teacher, log_q.exp()).sum(-1))
    expected = (rows * weights).sum()
    (expected_gradient,) = torch.autograd.grad(expected, hidden)
    mix = LossWeights(cross_entropy, acceptance=acceptance) if cross_entropy else LossWeights(0.0, 0.0, 1.0)
    loss, _ = distill_logits(hidden, head_rows, teacher, weights, labels, mix)
    (gradient,) = torch.autograd.grad(3 * loss, hidden)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, 3 * expected_gradient)


def test_rank_is_the_place_of_the_label_among_the_logits():
    hidden, head_rows, teacher, weights, labels = inputs()
    _, ranks = distill_logits(hidden, head_rows, teacher, weights, labels, LossWeights())
    order = F.linear(hidden, head_rows).argsort(dim=-1, descending=True)
    for row, label in enumerate(labels.tolist()):
        expected = 9 if label < 0 else order[row].tolist().index(label)
        assert ranks[row] == expected


def test_a_row_without_weight_gets_no_gradient():
    hidden, head_rows, teacher, weights, labels = inputs()
    weights[3] = 0.0
    loss, _ = distill_logits(hidden, head_rows, teacher, weights, labels, LossWeights())
    loss.backward()
    assert hidden.grad[3].abs().max() == 0.0
    assert hidden.grad[4].abs().max() > 0.0


def test_smooth_l1_is_quadratic_near_and_linear_far():
    hidden = torch.tensor([[0.5, 3.0], [0.0, 0.0]])
    distance = smooth_l1(hidden, torch.zeros(2, 2), torch.tensor([2.0, 7.0]))
    assert distance.item() == pytest.approx(2.0 * (0.5 * 0.25 + 2.5) / 2)


@pytest.mark.parametrize("weights", [(-0.1, 1.0), (0.0, 0.0), (1.0, 0.0, float("nan"))])
def test_loss_weights_must_ask_for_something(weights):
    with pytest.raises(ConfigError):
        LossWeights(*weights)
