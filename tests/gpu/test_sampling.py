"""Noise and verification on a CUDA device against the CPU."""

import dataclasses

import pytest
import torch

from engine.sampling.noise import Stream, gumbel, uniform
from engine.sampling.verify import verify
from engine.speculation import Verification
from tests.sampling.cases import on_device, random_case

pytestmark = pytest.mark.gpu


def test_words_on_cuda_equal_those_on_the_cpu() -> None:
    seed, position = torch.tensor([-5, 2**62, 1]), torch.tensor([1, 2**35, 100_000])
    on_cpu = uniform(seed, position, 128_256, Stream.TARGET)
    assert torch.equal(uniform(seed.cuda(), position.cuda(), 128_256, Stream.TARGET).cpu(), on_cpu)
    noise_gap = gumbel(seed.cuda(), position.cuda(), 128_256, Stream.TARGET).cpu()
    torch.testing.assert_close(
        noise_gap, gumbel(seed, position, 128_256, Stream.TARGET), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("mode", ["greedy", "sampled drafts"])
def test_captured_verification_never_syncs_and_equals_the_cpu(mode: str) -> None:
    case = random_case(
        mode, temperature=0.8, top_k=3, top_p=0.9, repetition_penalty=1.2, stop_token_ids=(2,), stop_from=5
    )
    on_cuda = on_device(case, "cuda")
    verify(*on_cuda)
    # A host read of a device value is an error during capture.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = verify(*on_cuda)
    graph.replay()
    expected = verify(*case)
    for field in dataclasses.fields(Verification):
        assert torch.equal(getattr(answer, field.name).cpu(), getattr(expected, field.name)), field.name
