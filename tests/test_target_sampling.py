"""The one rule of sampling at its edges, against a definition token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from target.generate import Sampling, choose, sampling_probs

LOGITS = torch.tensor([[2.0, 1.0, 1.5, -3.0], [0.0, 5.0, 5.0 - 1e-4, 4.0]])


def by_definition(logits: list[float], sampling: Sampling) -> list[float]:
    """Temperature, the k largest, then the least set of likeliest tokens whose mass reaches top_p; float64."""
    scores = torch.tensor(logits, dtype=torch.float64) / sampling.temperature
    order = sorted(range(len(logits)), key=lambda i: (-float(scores[i]), i))
    kept = order[: sampling.top_k or len(order)]
    mass = torch.softmax(scores[kept], 0).tolist()
    total, nucleus = 0.0, {}
    for token, share in zip(kept, mass, strict=True):
        if total >= sampling.top_p:
            break
        nucleus[token] = share
        total += share
    return [nucleus.get(token, 0.0) / total for token in range(len(logits))]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=9, unique=True),
    st.floats(0.1, 3),
    st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.integers(0, 10),
)
def test_probs_are_the_definition(
    values: list[int], temperature: float, top_p: float, top_k: int
) -> None:
    logits = [value / 4 for value in values]
    sampling = Sampling(temperature, top_p, top_k)
    found = sampling_probs(torch.tensor([logits]), sampling)[0]
    wanted = torch.tensor(by_definition(logits, sampling))
    assert found.sum() == pytest.approx(1, abs=1e-5)
    if not torch.allclose(found, wanted, atol=2e-5):  # the nucleus may end within rounding of top_p
        gap = (found > 0) != (wanted > 0)
        assert top_p < 1
        assert gap.sum() == 1


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1e-4), Sampling(1e-30), Sampling(1e-45), Sampling(1.0, 1e-12), Sampling(1.0, 1.0, 1)],
    ids=["cold", "colder", "denormal", "tiny top-p", "top-k 1"],
)
def test_limits_are_greedy(sampling: Sampling) -> None:
    """No overflow to NaN, and the argmax alone is left."""
    probs = sampling_probs(1000 * LOGITS, sampling)
    assert probs.isfinite().all()
    assert probs.argmax(-1).tolist() == LOGITS.argmax(-1).tolist()
    torch.testing.assert_close(probs.amax(-1), torch.ones(2))
    generator = torch.Generator().manual_seed(0)
    assert choose(1000 * LOGITS, sampling, generator).tolist() == [0, 1]


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    probs = sampling_probs(LOGITS.bfloat16(), Sampling(0.7))
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs, (LOGITS.bfloat16().float() / 0.7).softmax(-1))
