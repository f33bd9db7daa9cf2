"""The tree's delta rule against the recurrence with a state a node, for easy and for hard gates, in both precisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from ddtree_cases import SHAPES, make_target, shaped_tree, tree_from
from torch import Tensor, nn

from ddtree import gdn
from ddtree.gdn import TreeInputs, commit_states, tree_convolution, tree_delta_rule
from ddtree.gdn_modules import known_module
from ddtree.nodes import NodeBatch, PathBatch
from ddtree.tree import DraftTree
from ddtree.verify import TreeVerifier

CPU = torch.device("cpu")
ROWS, KEY_HEADS, VALUE_HEADS, DK, DV = 2, 2, 6, 16, 24
GATES = ("typical", "lasting", "strong")


def batch_of(trees: list[DraftTree], padded: int | None = None) -> NodeBatch:
    return NodeBatch.of(
        trees, [5] * len(trees), [0] * len(trees), padded or max(map(len, trees)), CPU
    )


def random_inputs(
    gates: str, num_nodes: int, generator: torch.Generator
) -> tuple[TreeInputs, Tensor]:
    """float64. typical: slow and fast heads; lasting: no forgetting, correlated keys, full overwrite, the hardest system;
    strong: e^-40 a token, where exp of a difference overflows for nodes that are no ancestors."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys, heads = normal(ROWS, num_nodes, KEY_HEADS, DK), (ROWS, num_nodes, VALUE_HEADS)
    if gates == "typical":
        rates = torch.logspace(-3, 1, VALUE_HEADS, dtype=torch.float64)
        log_decay, beta = -rates * nn.functional.softplus(normal(*heads)), normal(*heads).sigmoid()
    elif gates == "lasting":
        keys = 0.2 * keys + normal(ROWS, 1, KEY_HEADS, DK)
        log_decay, beta = -1e-4 * normal(*heads).abs(), 1 - 1e-3 * normal(*heads).abs()
    else:
        log_decay, beta = -40 * normal(*heads).abs(), normal(*heads).sigmoid()
    inputs = TreeInputs(
        normal(ROWS, num_nodes, KEY_HEADS, DK), keys, normal(*heads, DV), log_decay, beta
    )
    return inputs, normal(ROWS, VALUE_HEADS, DK, DV)


def rounded(inputs: TreeInputs, dtype: torch.dtype) -> TreeInputs:
    return TreeInputs(*(value.to(dtype) for value in vars(inputs).values()))


def fork_states(
    inputs: TreeInputs, states: Tensor, trees: list[DraftTree]
) -> tuple[Tensor, Tensor]:
    """Outputs (R, T, Hv, dv) and the state after every node (R, T, Hv, dk, dv): the recurrence, one state a node."""
    repeats = VALUE_HEADS // KEY_HEADS
    queries, keys = (
        (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(repeats, dim=2)
        for x in (inputs.queries, inputs.keys)
    )
    queries = queries * DK**-0.5
    outputs = torch.zeros_like(inputs.values)
    after = states.new_zeros(*inputs.values.shape[:2], *states.shape[1:])
    for row, tree in enumerate(trees):
        for node, parent in enumerate(tree.parents.tolist()):
            state = states[row] if parent < 0 else after[row, parent]
            state = state * inputs.log_decay[row, node].exp()[:, None, None]
            key, query = keys[row, node], queries[row, node]  # (Hv, dk)
            read = torch.einsum("hkv,hk->hv", state, key)
            update = inputs.beta[row, node][:, None] * (inputs.values[row, node] - read)
            after[row, node] = state + key[:, :, None] * update[:, None]
            outputs[row, node] = torch.einsum("hkv,hk->hv", after[row, node], query)
    return outputs, after


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("by_substitution", [False, True])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_states_are_those_of_a_state_a_node(
    shape: str, gates: str, by_substitution: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    trees = [shaped_tree(shape, size, generator) for size in (40, 17)]
    batch = batch_of(trees)
    inputs, states = random_inputs(gates, 40, generator)
    outputs, after = fork_states(inputs, states, trees)
    for dtype, allowed in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        given = rounded(inputs, dtype)
        found, writes = tree_delta_rule(given, states.to(dtype), batch, by_substitution)
        assert found.isfinite().all()  # padding nodes too: 0 * NaN would reach their neighbours
        for row, tree in enumerate(trees):
            assert error(found[row, : len(tree)], outputs[row, : len(tree)]) < allowed
        paths = [tree.path(int(tree.depths.argmax())) for tree in trees]
        layers = torch.stack([states, 2 * states]).to(dtype)
        _, doubled = tree_delta_rule(given, layers[1], batch, by_substitution)
        commit_states(layers, [writes, doubled], PathBatch.of(paths, [5, 5], 5, 3, CPU))
        _, after_doubled = fork_states(inputs, 2 * states, trees)
        for row, path in enumerate(paths):
            assert error(layers[0, row], after[row, path[-1]]) < allowed
            assert error(layers[1, row], after_doubled[row, path[-1]]) < allowed


def test_an_idle_row_keeps_its_state() -> None:
    generator = torch.Generator().manual_seed(2)
    trees = [shaped_tree("random", 9, generator)] * 2
    inputs, states = random_inputs("strong", 9, generator)
    _, writes = tree_delta_rule(inputs, states, batch_of(trees))
    layers = states[None].clone()
    commit_states(layers, [writes], PathBatch.of([[], trees[1].path(8)], [5, 5], 5, 3, CPU))
    assert torch.equal(layers[0, 0], states[0])
    assert not torch.equal(layers[0, 1], states[1])


@pytest.mark.parametrize("by_substitution", [False, True])
def test_a_node_does_not_depend_on_any_but_its_ancestors(by_substitution: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    tree = shaped_tree("random", 40, generator)
    batch = batch_of([tree] * ROWS)
    inputs, states = random_inputs("typical", 40, generator)
    leaf = int(tree.depths.argmax())
    others = torch.tensor([node for node in range(40) if node not in tree.path(leaf)])
    before, _ = tree_delta_rule(
        rounded(inputs, torch.float32), states.float(), batch, by_substitution
    )
    for changed in vars(inputs).values():
        changed[:, others] *= 0.3
    after, _ = tree_delta_rule(
        rounded(inputs, torch.float32), states.float(), batch, by_substitution
    )
    assert torch.equal(before[:, leaf], after[:, leaf])
    assert not torch.equal(before[:, others], after[:, others])


@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_the_convolution_reads_down_each_path(width: int) -> None:
    generator = torch.Generator().manual_seed(4)
    trees = [shaped_tree("drafted", 30, generator), shaped_tree("chain", 7, generator)]
    inputs = torch.randn(2, 30, 11, generator=generator, dtype=torch.float64)
    cached = torch.randn(2, width - 1, 11, generator=generator, dtype=torch.float64)
    weight = torch.randn(11, width, generator=generator, dtype=torch.float64)
    bias = torch.randn(11, generator=generator, dtype=torch.float64)
    columns = batch_of(trees).convolution_columns(width)
    found = tree_convolution(cached, inputs, weight, bias, columns)
    for row, tree in enumerate(trees):
        for node in range(len(tree)):
            longer = torch.cat(
                [cached[row], inputs[row, tree.path(node)]]
            )  # (W - 1 + depth + 1, C)
            expected = (longer[-width:].T * weight).sum(1) + bias
            torch.testing.assert_close(found[row, node], expected)


def test_committed_columns_are_the_last_of_cache_and_path() -> None:
    paths = PathBatch.of([[0, 3], [], [0, 1, 4, 6]], [5, 5, 5], 5, 3, CPU)
    assert paths.columns.tolist() == [[2, 3, 6], [0, 1, 2], [4, 7, 9]]


def test_ancestry_by_hand() -> None:
    batch = batch_of([tree_from([1, 2, 3, 4], [-1, 0, 0, 2])], padded=5)
    ancestors = [
        [0],
        [0, 1],
        [0, 2],
        [0, 2, 3],
        [0, 4],
    ]  # the fifth is padding, a child of the root
    for node, expected in enumerate(ancestors):
        assert batch.ancestors[0, node].nonzero().flatten().tolist() == expected
    assert batch.convolution_columns(3)[0].tolist() == [
        [0, 1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [2, 4, 5],
        [1, 2, 6],
    ]


def _as_a_chain(batch: NodeBatch) -> NodeBatch:
    size = batch.num_nodes
    steps = np.arange(size)[:, None] - np.arange(size + 8)
    table = torch.from_numpy(np.where(steps < 0, size, steps))[None].expand(ROWS, -1, -1)
    return dataclasses.replace(batch, ancestry=table)


def _one_sibling_seen(batch: NodeBatch) -> NodeBatch:
    ancestry = batch.ancestry.clone()
    node = int((batch.depths[0] >= 3).nonzero()[-1])
    seen = set(ancestry[0, node].tolist())
    ancestry[:, node, -1] = next(other for other in range(node - 1, 0, -1) if other not in seen)
    return dataclasses.replace(batch, ancestry=ancestry)


def _root_unseen_once(batch: NodeBatch) -> NodeBatch:
    ancestry = batch.ancestry.clone()
    node = int((batch.depths[0] >= 3).nonzero()[-1])
    ancestry[:, node][ancestry[:, node] == 0] = batch.num_nodes
    return dataclasses.replace(batch, ancestry=ancestry)


@pytest.mark.parametrize("wrong", [_as_a_chain, _one_sibling_seen, _root_unseen_once])
def test_the_comparison_above_has_the_power_to_see_one_wrong_entry(
    wrong: Callable[[NodeBatch], NodeBatch],
) -> None:
    generator = torch.Generator().manual_seed(5)
    tree = shaped_tree("random", 40, generator)
    inputs, states = random_inputs("lasting", 40, generator)
    expected, _ = fork_states(inputs, states, [tree] * ROWS)
    right = batch_of([tree] * ROWS)
    assert error(tree_delta_rule(inputs, states, right)[0], expected) < 1e-11
    assert error(tree_delta_rule(inputs, states, wrong(right))[0], expected) > 1e-3


def test_the_core_is_true_float32_whatever_the_process_allows() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with gdn.true_float32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


class _Unknown(nn.Module):
    pass


def test_unknown_modules_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="a _Unknown, which trees cannot be verified on; known"):
        known_module(_Unknown())
    target = make_target("qwen3_5")
    module = target.layers[1].get_submodule("linear_attn")
    module.add_module("in_proj_c", nn.Identity())
    with pytest.raises(ValueError, match=r"Qwen3_5GatedDeltaNet consists of .*in_proj_c"):
        TreeVerifier(target, (0,))
    with torch.device("meta"):
        offloaded = make_target("qwen3_5").layers[0].get_submodule("linear_attn").to("meta")
    with pytest.raises(ValueError, match=r"target\.device_map leaves a Qwen3_5GatedDeltaNet"):
        known_module(offloaded)
