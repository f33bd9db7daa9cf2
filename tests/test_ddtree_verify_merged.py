"""Attention over prefix and nodes apart, merged, equals attention under the mask; shapes repeat and nothing waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ddtree_cases import VOCABULARY, make_target, shaped_tree
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from ddtree import merged_attention as merged
from ddtree.verify import TreeVerifier

TAPS = (1,)
HOST_READS = {
    "aten.detach.default",
    "aten.resolve_conj.default",
    "aten.resolve_neg.default",
    "aten.to.dtype_layout",
}
"""How `numpy()` and `tolist()` read the tree, which lies on the host."""


def attended(dtype: torch.dtype, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Merged attention and masked attention of the same rows: 6 query heads on 2 key heads, 9 nodes."""
    generator = torch.Generator().manual_seed(len(lengths))
    rows, nodes, longest = len(lengths), 9, max(lengths)
    query = torch.randn(rows, 6, nodes, 16, generator=generator).to(dtype)
    key, value = (
        torch.randn(rows, 2, longest + nodes, 16, generator=generator).to(dtype) for _ in range(2)
    )
    seen = (
        torch.rand(rows, nodes, nodes, generator=generator).lt(0.4).tril() | torch.eye(nodes).bool()
    )
    found, _ = merged.merged_attention(
        nn.Identity(), query, key, value, seen[:, None], 0.3, committed_lengths=lengths
    )
    committed = torch.arange(longest) < torch.tensor(lengths)[:, None]
    mask = torch.cat([committed[:, None].expand(-1, nodes, -1), seen], dim=2)[:, None]
    keys, values = (x.double().repeat_interleave(3, dim=1) for x in (key, value))
    expected = scaled_dot_product_attention(query.double(), keys, values, mask, scale=0.3)
    return found, expected.transpose(1, 2)


@pytest.mark.parametrize(
    ("dtype", "allowed"),
    [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)],
)
@pytest.mark.parametrize("lengths", [(50,), (7, 50, 0, 50), (1, 1)])
def test_merged_equals_masked(dtype: torch.dtype, allowed: float, lengths: tuple[int, ...]) -> None:
    found, expected = attended(dtype, lengths)
    assert found.dtype == dtype
    assert float((found.double() - expected).abs().max()) < allowed


def test_without_a_fused_kernel_the_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged, "_PLAIN_KEYS", 11)
    monkeypatch.setattr(merged, "_kernel", lambda *_: merged._plain_in_pieces)
    found, expected = attended(torch.float64, (50, 23))
    assert float((found - expected).abs().max()) < 1e-12


def test_a_kernel_that_is_wrong_or_missing_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Any:
        outputs, log_sums = merged._flash_cpu(queries, keys, values, scaling)
        return outputs, log_sums + 1

    def missing(*_: object) -> Any:
        raise RuntimeError("no such kernel")

    choose = merged._kernel.__wrapped__
    device = torch.device("cpu")
    assert choose(device, torch.float32, 16) is merged._flash_cpu
    monkeypatch.setattr(merged, "_KERNELS", {"cpu": (wrong, missing)})
    assert choose(device, torch.float32, 16) is merged._plain_in_pieces


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 256), (torch.float32, 64)])
def test_a_fused_kernel_is_found_on_cuda(dtype: torch.dtype, width: int) -> None:
    kernel = merged._kernel(torch.device("cuda", 0), dtype, width)
    assert kernel is not merged._plain_in_pieces
    query, key, value = (
        torch.randn(1, 4, n, width, device="cuda", dtype=dtype) for n in (384, 3000, 3000)
    )
    found = kernel(query, key, value, 0.1)
    expected = merged._plain(query.float(), key.float(), value.float(), 0.1)
    for ours, plain in zip(found, expected, strict=True):
        assert float((ours.float() - plain).abs().max()) < 0.02


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_sliding"])
def test_a_verifier_that_merges_equals_one_that_masks(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    target = make_target(kind)
    prompts = [torch.randint(VOCABULARY, (n,), generator=generator) for n in (40, 3)]
    trees = [shaped_tree("random", n, generator) for n in (12, 20)]
    outputs = []
    for merge_from in (10_000, 1):
        monkeypatch.setattr("ddtree.verify.MERGE_FROM", merge_from)
        verifier = TreeVerifier(target, TAPS, num_sequences=2)
        for row, prompt in enumerate(prompts):
            verifier.prefill(prompt, row)
        first = verifier.verify(trees)
        verifier.commit([trees[0].path(11), trees[1].path(19)])
        outputs.append((first, verifier.verify(trees)))
    assert target.model.config._attn_implementation == "sdpa"
    for masked, apart in zip(*outputs, strict=True):
        for row, tree in enumerate(trees):
            error = (masked.logits[row, : len(tree)] - apart.logits[row, : len(tree)]).abs().max()
            assert float(error / masked.logits.abs().max()) < 1e-5


class _Recorder(TorchDispatchMode):
    """Every operator with the shapes it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, tuple | list) else [result]
        shapes = [tuple(t.shape) for t in tensors if isinstance(t, Tensor)]
        self.calls.append((str(func), shapes))
        return result


def record_round(verifier: TreeVerifier, size: int, seed: int) -> _Recorder:
    """A verify pass over a random tree and a commit of three nodes."""
    tree = shaped_tree("chain", size, torch.Generator().manual_seed(seed))
    if seed:  # another shape of the same depth
        parents = tree.parents.clone()
        parents[-1] = 0
        depths = tree.depths.clone()
        depths[-1] = 1
        tree = type(tree)(tree.tokens, parents, depths, tree.child_ranks, tree.log_probs)
    with _Recorder() as recorder:
        verifier.verify([tree])
        verifier.commit([[0, 1, 2]])
    return recorder


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_sliding"])
def test_a_round_reads_nothing_back_and_repeats_its_shapes(kind: str) -> None:
    target = make_target(kind)
    rounds = []
    for size, seed in ((7, 0), (8, 1)):
        verifier = TreeVerifier(target, TAPS, node_counts=(8,))
        verifier.prefill(torch.arange(20))
        calls = record_round(verifier, size, seed).calls
        rounds.append([call for call in calls if call[0] not in HOST_READS])
    assert len(rounds[0]) > 100
    assert rounds[0] == rounds[1]
    waits = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique")
    assert not [name for name, _ in rounds[0] if any(f"aten.{wait}." in name for wait in waits)]


def test_no_tensor_of_nodes_by_prefix_when_merging(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = {}
    for merge_from in (1, 10_000):
        monkeypatch.setattr("ddtree.verify.MERGE_FROM", merge_from)
        verifier = TreeVerifier(make_target("qwen3_5"), TAPS)
        verifier.prefill(torch.arange(300) % VOCABULARY)
        recorder = record_round(verifier, 16, 0)
        largest[merge_from] = [
            shape for _, shapes in recorder.calls for shape in shapes if shape[-2:] == (16, 316)
        ]
    assert not largest[1]
    assert largest[10_000]  # the recorder would have seen it


def test_other_masks_go_to_sdpa() -> None:
    module = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    states = torch.randn(1, 2, 4, 8)
    mask = torch.ones(4, 4).tril().bool()[None, None]
    found, _ = merged.merged_attention(
        module,  # pyright: ignore[reportArgumentType] - what SDPA reads of a module
        states,
        states,
        states,
        mask,
        1.0,
        committed_lengths=(0,),
    )
    expected = scaled_dot_product_attention(states, states, states, mask, scale=1.0)
    torch.testing.assert_close(found, expected.transpose(1, 2))
