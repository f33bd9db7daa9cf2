"""sparse_log_probs is log_softmax of full logits, with the same gradient, and never keeps a row of logits."""

import pytest
import torch
from torch import Tensor

from drafter.head import log_probs_at, ordered_top_k, sparse_log_probs

ROWS, HIDDEN, VOCAB, ASKED = 23, 12, 91, 5


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, dtype=dtype)
    head = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype)
    ids = torch.randint(VOCAB, (ROWS, ASKED), generator=generator)
    ids[3, 1] = ids[3, 0]  # the same token asked twice counts twice in the gradient
    return hidden, head, ids


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_rows", [1, 4, 1024])
def test_values_and_gradient_equal_full_logits(chunk_rows, temperature):
    hidden, head, ids = case()
    weights = torch.randn(ROWS, ASKED, generator=torch.Generator().manual_seed(1)).double()
    hidden.requires_grad_()

    full = (hidden @ head.T / temperature).log_softmax(-1).gather(1, ids)
    # a loss that is not linear in the log-probs, so that c_v depends on them
    (wanted,) = torch.autograd.grad((full.exp() * weights).sum() + full.square().mean(), hidden)
    got = sparse_log_probs(hidden, head, ids, chunk_rows=chunk_rows, temperature=temperature)
    loss = (got.log_probs.exp() * weights).sum() + got.log_probs.square().mean()
    (gradient,) = torch.autograd.grad(loss, hidden)

    assert got.top_ids is None
    torch.testing.assert_close(got.log_probs, full, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-10)


def test_gradcheck():
    hidden, head, ids = case()
    hidden = hidden[:4].requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: sparse_log_probs(x, head, ids[:4], 3, 2, 0.7).log_probs, hidden
    )


def test_top_k_equals_topk_of_full_logits_and_has_no_gradient():
    hidden, head, ids = case()
    full = (hidden @ head.T / 0.8).log_softmax(-1)
    for k in (1, 7, VOCAB):
        got = sparse_log_probs(hidden.requires_grad_(), head, ids, k, 6, 0.8)
        assert got.top_ids is not None
        assert got.top_log_probs is not None
        wanted = full.topk(k)
        assert torch.equal(got.top_ids, wanted.indices)
        torch.testing.assert_close(got.top_log_probs, wanted.values, rtol=0, atol=1e-12)
        assert got.log_probs.requires_grad
        assert not got.top_log_probs.requires_grad


def test_chunk_size_changes_nothing():
    hidden, head, ids = case(torch.float32)
    results = [sparse_log_probs(hidden, head, ids, 8, rows) for rows in (2, 5, 23, 100)]
    for other in results[1:]:
        torch.testing.assert_close(other.log_probs, results[0].log_probs, rtol=1e-6, atol=1e-6)
        assert other.top_ids is not None
        assert results[0].top_ids is not None
        assert torch.equal(other.top_ids, results[0].top_ids)


def test_ties_go_to_the_lower_id_inside_and_at_the_edge():
    values = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 3.0], [5.0] * 7, [0.0, 1, 2, 3, 4, 5, 6]])
    for k in range(1, 8):
        got, ids = ordered_top_k(values, k)
        order = values.sort(dim=-1, descending=True, stable=True)  # stable: ties by index
        assert torch.equal(ids, order.indices[:, :k]), k
        assert torch.equal(got, order.values[:, :k]), k


def test_ties_at_random():
    generator = torch.Generator().manual_seed(2)
    values = torch.randint(0, 6, (200, 40), generator=generator).float()
    for k in (1, 3, 17, 39, 40):
        assert torch.equal(
            ordered_top_k(values, k)[1], values.sort(stable=True, dim=-1, descending=True)[1][:, :k]
        )


def test_bfloat16_head_gives_float32_log_probs_and_a_gradient_near_the_exact_one():
    hidden, head, ids = case(torch.float32)
    exact_hidden = hidden.clone().requires_grad_()
    exact = sparse_log_probs(exact_hidden, head, ids).log_probs
    exact.sum().backward()
    rounded_hidden = hidden.bfloat16().requires_grad_()
    got = sparse_log_probs(rounded_hidden, head.bfloat16(), ids).log_probs
    got.sum().backward()
    assert got.dtype == torch.float32
    assert rounded_hidden.grad is not None
    assert exact_hidden.grad is not None
    assert rounded_hidden.grad.dtype == torch.bfloat16
    assert (got - exact).abs().max() < 0.1
    error = (rounded_hidden.grad.float() - exact_hidden.grad).norm()
    assert error < 0.02 * exact_hidden.grad.norm()


def test_nothing_kept_for_backward_has_a_row_of_logits():
    hidden, head, ids = case(torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        sparse_log_probs(hidden.requires_grad_(), head, ids, 4, 5)
    assert kept
    for tensor in kept:
        assert tensor.data_ptr() == head.data_ptr() or VOCAB not in tensor.shape, tensor.shape
    assert sum(t.numel() for t in kept if t.data_ptr() != head.data_ptr()) < ROWS * VOCAB


@pytest.mark.parametrize("top_k", [0, 4])
def test_peak_memory_follows_the_chunk_not_the_rows(top_k):
    """No allocation of the pass is larger than one chunk of logits (int32 or float32), however many rows there are."""
    rows, vocab, chunk = 512, 2048, 16
    hidden = torch.randn(rows, 8, requires_grad=True)
    head, ids = torch.randn(vocab, 8), torch.randint(vocab, (rows, 3))
    with torch.profiler.profile(profile_memory=True) as profile:
        sparse_log_probs(hidden, head, ids, top_k, chunk).log_probs.sum().backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events() or [])
    assert 0 < largest <= chunk * vocab * 4 + 64


def test_no_gradient_needed_no_second_matmul():
    hidden, head, ids = case(torch.float32)
    with torch.profiler.profile() as profile:
        sparse_log_probs(hidden, head, ids)
    assert sum(event.name == "aten::mm" for event in profile.events() or []) == 1


def test_several_temperatures_of_one_product_are_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, head = (torch.randn(n, 16, generator=generator) for n in (300, 70))
    asked = torch.randint(70, (300, 2), generator=generator)
    temperatures = [0.7, torch.rand(300, generator=generator) + 0.5, 1.0]
    found = log_probs_at(hidden, head, asked, 9, temperatures, chunk_rows=128)
    for scored, temperature in zip(found, temperatures, strict=True):
        alone = sparse_log_probs(hidden, head, asked, 9, 128, temperature)
        for name, value in vars(alone).items():
            assert torch.equal(getattr(scored, name), value), name
