"""Products by every algorithm of cuBLASLt equal the product in float64, and layers choose among them while
steps are recorded.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.cublaslt import WORKSPACE_BYTES, Product, ProductError
from engine.layers import tuned_linear
from engine.layers.tuned_linear import MAX_TOKENS, MIN_TOKENS, TunedLinear, WideLinear, choosing, tune_linears
from engine.runner.graph_recorder import GraphRecorder

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
ROUNDING = {
    torch.bfloat16: 2.0**-9,
    torch.float16: 2.0**-12,
    torch.float32: 1e-5,
}  # sums of thousands of terms
# (tokens, outputs, inputs): of real networks, and odd multiples of 8.
SIZES = [(17, 576, 576), (64, 6144, 4096), (96, 4096, 4096), (200, 1032, 328), (256, 4096, 14336)]


def draw(num_tokens, num_outputs, num_inputs, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(num_tokens)
    x, weight = (torch.randn(rows, num_inputs, generator=generator) for rows in (num_tokens, num_outputs))
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype)


def assert_product(y, x, weight, dtype):
    """Assert that rows are rounded once: by half a last place, uniform, and sums in float32."""
    exact = x.double() @ weight.double().t()
    error = ((y.double() - exact).norm(dim=1) / exact.norm(dim=1)).max()
    assert y.dtype is dtype
    assert error < 1.15 * ROUNDING[dtype] + 1e-6


@pytest.mark.parametrize(
    "dtypes", [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_algorithm_is_the_product_rounded_once(sizes, dtypes):
    dtype, out_dtype = (getattr(torch, name) for name in dtypes)
    x, weight = draw(*sizes, dtype)
    product = Product(*sizes, dtype, out_dtype)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
    algorithms = product.algorithms()
    assert len(algorithms) > 1
    for algorithm in algorithms:
        assert_product(product.multiply(x, weight, algorithm, workspace), x, weight, out_dtype)


def build_layers(num_layers, *shape):
    linears = [nn.Linear(*shape, bias=False, device=DEVICE, dtype=torch.bfloat16) for _ in range(num_layers)]
    return nn.Sequential(*linears).requires_grad_(False)


@torch.inference_mode()
def test_layers_choose_while_steps_are_recorded_and_not_before():
    network = build_layers(3, 1024, 1024)
    weights = [layer.weight for layer in network]
    tune_linears(network)
    tuner = network[0].tuner
    assert all(type(layer) is TunedLinear for layer in network)
    assert all(layer.weight is weight for layer, weight in zip(network, weights, strict=True))
    x, _ = draw(64, 8, 1024)
    eager = network(x)
    assert set(tuner._chosen) == set()
    recorded = GraphRecorder(DEVICE).record(lambda: network(x))
    assert set(tuner._chosen) == {64}
    x.copy_(2 * x)  # exact in bfloat16, so the answer is
    recorded.graph.replay()
    assert torch.equal(recorded.output, network(x))
    assert (recorded.output.float() / 2 - eager.float()).norm() < 2**-7 * eager.float().norm()
    for num_tokens in (MIN_TOKENS - 1, MAX_TOKENS + 1):
        GraphRecorder(DEVICE).record(lambda tokens=num_tokens: network(x.new_ones(tokens, 1024)))
    assert set(tuner._chosen) == {64}


@torch.inference_mode()
def test_the_fastest_is_chosen_where_it_is_sure_to_be(monkeypatch):
    network = build_layers(1, 1024, 2048)
    tune_linears(network)
    tuner = network[0].tuner
    x, _ = draw(32, 8, 1024)
    found = []
    for fastest, share in ((1, 0.97), (1, 0.99), (0, 0.5)):
        times = [2e-5] * 9
        times[fastest] *= share
        monkeypatch.setattr(
            tuned_linear, "_time", lambda candidates, *_, times=times: times[: len(candidates)]
        )
        tuner._chosen.clear()
        with choosing():
            assert_product(network(x), x, network[0].weight, torch.bfloat16)
        found.append(tuner._chosen[32] is F.linear)
    assert found == [False, True, True]


@torch.inference_mode()
def test_candidates_are_timed_in_turn():
    network = build_layers(2, 4096, 4096)
    tune_linears(network)
    weights = [layer.weight for layer in network]
    once = tuned_linear._time(
        [F.linear, lambda x, weight: F.linear(F.linear(x, weight), weight)], 64, weights
    )
    assert 5e-6 < once[0] < 1e-4
    assert 1.5 < once[1] / once[0] < 2.5


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(2, 32, 64), (32, 64)], ids=str)
def test_a_layer_leaves_to_torch_what_it_cannot_multiply(shape):
    network = build_layers(1, 64, 64)
    tune_linears(network)
    tuner = network[0].tuner
    x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    x = x if x.dim() == 3 else x.t().contiguous().t()  # rows that are not contiguous
    with choosing():
        assert torch.equal(network(x), F.linear(x, network[0].weight))
    assert not tuner._chosen
    with pytest.raises(RuntimeError, match="dtype"):
        network(x.float())


@torch.inference_mode()
def test_a_product_that_the_library_lacks_is_left_to_torch(monkeypatch, caplog):
    with pytest.raises(ProductError, match=r"cublasLt\w+ answered \d+ for sizes \(32, 64, 64\)"):
        Product(32, 64, 64, torch.bfloat16, torch.float16).algorithms()
    network = build_layers(1, 64, 64)
    tune_linears(network)
    tuner = network[0].tuner
    x, _ = draw(32, 8, 64)

    def refuse(_):
        raise ProductError("cublasLtMatmulAlgoGetHeuristic answered 15")

    monkeypatch.setattr(Product, "algorithms", refuse)
    with choosing():
        assert torch.equal(network(x), F.linear(x, network[0].weight))
    assert tuner._chosen == {32: F.linear}
    assert "products of (64, 64) are left to torch: cublasLt" in caplog.text


@torch.inference_mode()
def test_a_head_chooses_for_one_token_as_well(monkeypatch):
    x, weight = draw(1, 1024, 512)
    head = WideLinear(weight)
    monkeypatch.setattr(
        tuned_linear, "_time", lambda candidates, *_: [3.0, 1.0, *[2.0] * (len(candidates) - 2)]
    )
    with choosing():
        assert_product(head(x), x, weight, torch.float32)
    assert head.tuner._chosen[1] is not head.tuner._usual
    assert_product(head(x), x, weight, torch.float32)
    odd = WideLinear(weight[:1001])
    with choosing():
        assert_product(odd(x), x, weight[:1001], torch.float32)
    assert not odd.tuner._chosen


@torch.inference_mode()
def test_tokens_that_are_part_of_others_are_left_to_torch():
    network = build_layers(1, 64, 64)
    tune_linears(network)
    x = torch.randn(33, 64, device=DEVICE, dtype=torch.bfloat16)
    with choosing():
        network(x[:32])
    network[0].tuner._chosen[32] = None  # which nobody could call
    assert torch.equal(network(x[1:]), F.linear(x[1:], network[0].weight))


def test_layers_with_a_bias_or_in_float32_or_trained_stay_as_they_are():
    layers = [
        nn.Linear(64, 64, device=DEVICE, dtype=torch.bfloat16),
        nn.Linear(64, 64, bias=False, device=DEVICE),
        nn.Linear(64, 60, bias=False, device=DEVICE, dtype=torch.bfloat16),
    ]
    network = nn.Sequential(*layers).requires_grad_(False)
    trained = nn.Sequential(nn.Linear(64, 64, bias=False, device=DEVICE, dtype=torch.bfloat16))
    tune_linears(network)
    assert list(network) == layers
    tune_linears(trained)
    assert type(trained[0]) is nn.Linear
