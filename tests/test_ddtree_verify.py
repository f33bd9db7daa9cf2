"""Tree verification on every tiny family: each node as if its path alone followed, and commits that leave no trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from conftest import FAMILIES, HYBRID
from ddtree_cases import decode_one, prompt_cache
from torch import Tensor

from configs.schema import Config
from ddtree.adapters import LAYER_ADAPTERS, FullAttention
from ddtree.nodes import NodeBatch, PathBatch
from ddtree.tree import DraftTree, chain_tree
from ddtree.verify import TreeVerifier
from ddtree.walk import walk_tree
from target.load import Target, load_target
from target.taps import forward_with_taps

TAPS = (1, 2, 4)
MakeTarget = Callable[..., Target]
families = pytest.mark.parametrize("family", [*FAMILIES, HYBRID])


def tree_from(tokens: list[int], parents: list[int]) -> DraftTree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    ranks = [parents[:node].count(parent) for node, parent in enumerate(parents)]
    return DraftTree(
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents),
        depths=torch.tensor(depths),
        child_ranks=torch.tensor(ranks),
        log_probs=torch.zeros(len(tokens)),
    )


def random_tree(generator: torch.Generator, root: int, size: int, true: list[int]) -> DraftTree:
    """Random shape and tokens, with `true`, the text to come, hidden among the nodes."""
    tokens, parents, edges, tip = [root], [-1], set(), 0
    while len(tokens) < size:
        parent = int(torch.randint(len(tokens), (), generator=generator))
        token = int(torch.randint(250, (), generator=generator))
        if true and torch.rand((), generator=generator) < 0.4:
            parent, token, true = tip, true[0], true[1:]
            tip = len(tokens)
        if (parent, token) not in edges:
            edges.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return tree_from(tokens, parents)


def random_ids(generator: torch.Generator, count: int) -> Tensor:
    return torch.randint(250, (count,), generator=generator)


def assert_near(found: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Every element within `tolerance` of the largest one."""
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error <= tolerance, error


@torch.inference_mode()
def plain_logits(target: Target, ids: Tensor) -> Tensor:
    """(V,) after the last of `ids` (S,), by the model's own forward without a cache."""
    return target.model(input_ids=ids[None], use_cache=False).logits[0, -1]


def assert_every_node_is_its_path(
    target: Target, verifier: TreeVerifier, committed: Tensor, tree: DraftTree, tolerance: float
) -> None:
    output = verifier.verify([tree])
    for node in range(len(tree)):
        ids = torch.cat([committed, tree.tokens[tree.path(node)]])
        expected = plain_logits(target, ids)
        error = (output.logits[0, node] - expected).norm() / expected.norm()
        assert error < tolerance, (node, float(error))
        features = forward_with_taps(target, ids[None], torch.tensor([len(ids)]), TAPS, False)
        expected = features.features[0, -1]
        assert (output.features[0, node] - expected).norm() < tolerance * expected.norm()


def committed_bytes(verifier: TreeVerifier, row: int = 0) -> list[Tensor]:
    return [part.clone() for layer in verifier._layers for part in layer.committed(row)]


@families
@pytest.mark.parametrize("prompt_tokens", [1, 7, 20])  # the sliding window is 8
def test_every_node_equals_a_plain_forward_of_its_path(
    tiny_target: MakeTarget, family: str, prompt_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(prompt_tokens)
    target = tiny_target(family)
    verifier = TreeVerifier(target, TAPS)
    prompt = random_ids(generator, prompt_tokens)
    output = verifier.prefill(prompt)
    torch.testing.assert_close(output.logits, plain_logits(target, prompt), rtol=1e-4, atol=1e-4)
    tree = random_tree(generator, 3, 24, random_ids(generator, 12).tolist())
    assert tree.depths.max() > 5  # deep enough for the window to cut inside the tree
    assert_every_node_is_its_path(target, verifier, prompt, tree, 1e-4)


@pytest.mark.parametrize(
    ("attention", "dtype", "tolerance"),
    [
        ("sdpa", "float64", 1e-9),
        (
            "eager",
            "float64",
            1e-5,
        ),  # transformers' eager softmax is float32 whatever the model's dtype
        ("eager", "float32", 1e-4),
    ],
)
def test_attention_backends_and_float64(
    tiny_config: Callable[..., Config], attention: str, dtype: str, tolerance: float
) -> None:
    section = tiny_config("qwen3_sliding").target
    target = load_target(section, "cpu", dtype=dtype, attention=attention)
    generator = torch.Generator().manual_seed(5)
    verifier = TreeVerifier(target, TAPS)
    prompt = random_ids(generator, 11)
    verifier.prefill(prompt)
    tree = random_tree(generator, 3, 16, random_ids(generator, 10).tolist())
    assert_every_node_is_its_path(target, verifier, prompt, tree, tolerance)


@families
def test_equal_tokens_at_one_depth_stay_apart(tiny_target: MakeTarget, family: str) -> None:
    target = tiny_target(family)
    verifier = TreeVerifier(target, TAPS)
    prompt = torch.tensor([65, 66, 67])
    verifier.prefill(prompt)
    tree = tree_from([9, 5, 6, 5, 5, 7, 7], [-1, 0, 0, 1, 2, 3, 4])
    assert_every_node_is_its_path(target, verifier, prompt, tree, 1e-4)


@families
def test_verify_leaves_no_trace(tiny_target: MakeTarget, family: str) -> None:
    generator = torch.Generator().manual_seed(1)
    verifier = TreeVerifier(tiny_target(family), TAPS)
    verifier.prefill(random_ids(generator, 250))
    before = committed_bytes(verifier)
    tree = random_tree(generator, 3, 40, [])  # outgrows the first buffer of 256
    first = verifier.verify([tree])
    verifier.verify([random_tree(generator, 9, 10, [])])
    again = verifier.verify([tree])
    assert verifier.lengths == [250]
    assert all(map(torch.equal, before, committed_bytes(verifier)))
    assert torch.equal(first.logits, again.logits)
    assert torch.equal(first.features, again.features)


@families
def test_committed_cache_equals_one_built_token_by_token(
    tiny_target: MakeTarget, family: str
) -> None:
    generator = torch.Generator().manual_seed(2)
    target = tiny_target(family)
    verifier, plain = TreeVerifier(target, TAPS), TreeVerifier(target, TAPS)
    prompt = random_ids(generator, 12)
    verifier.prefill(prompt)
    plain.prefill(prompt)
    for _ in range(6):
        before = committed_bytes(verifier)
        tree = random_tree(generator, 3, 20, random_ids(generator, 8).tolist())
        features = verifier.verify([tree]).features[0]
        path = tree.path(int(torch.randint(len(tree), (), generator=generator)))
        verifier.commit([path])
        for node in path:
            output = plain.verify([chain_tree(tree.tokens[node : node + 1])])
            torch.testing.assert_close(features[node], output.features[0, 0], rtol=1e-4, atol=1e-4)
            plain.commit([[0]])
        after = committed_bytes(verifier)
        if family != HYBRID:  # keys and values are appended, never rewritten
            prefixes = [new[:, : old.shape[1]] for new, old in zip(after, before, strict=True)]
            assert all(map(torch.equal, prefixes, before))
    assert verifier.lengths == plain.lengths
    for found, expected in zip(committed_bytes(verifier), committed_bytes(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@families
def test_hundreds_of_tokens_by_trees_equal_plain_decoding(
    tiny_target: MakeTarget, family: str
) -> None:
    generator = torch.Generator().manual_seed(3)
    target = tiny_target(family)
    prompt = random_ids(generator, 90)
    cache, plain_text = prompt_cache(target, prompt[:-1]), [int(prompt[-1])]
    for _ in range(220):
        plain_text.append(int(decode_one(target, cache, plain_text[-1]).argmax()))
    plain_text = plain_text[1:]

    verifier = TreeVerifier(target, TAPS)
    text = [int(verifier.prefill(prompt).logits.argmax())]
    passes = 0
    while len(text) < 200:
        to_come = plain_text[len(text) : len(text) + 9]
        if passes % 3 == 0:  # wrong after a while
            to_come[2:] = [(token + 1) % 250 for token in to_come[2:]]
        tree = random_tree(generator, text[-1], 24, to_come)
        walked = walk_tree(tree, verifier.verify([tree]).logits[0].argmax(-1))
        verifier.commit([walked.nodes])
        text += [*tree.tokens[walked.nodes[1:]].tolist(), walked.bonus]
        passes += 1
    assert text[:200] == plain_text[:200]
    assert passes < 100  # the trees did carry more than their roots
    assert verifier.lengths == [len(prompt) + len(text) - 1]


@families
def test_prefill_in_pieces_and_anew(tiny_target: MakeTarget, family: str) -> None:
    generator = torch.Generator().manual_seed(4)
    target = tiny_target(family)
    prompt = random_ids(generator, 23)
    whole = TreeVerifier(target, TAPS).prefill(prompt)
    verifier = TreeVerifier(target, TAPS, prefill_tokens=5)
    verifier.prefill(random_ids(generator, 40))  # an earlier sequence must not show
    pieces = verifier.prefill(prompt)
    assert verifier.lengths == [23]
    torch.testing.assert_close(pieces.logits, whole.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(pieces.features, whole.features, rtol=1e-4, atol=1e-4)
    expected = forward_with_taps(target, prompt[None], torch.tensor([23]), TAPS, False).features[0]
    torch.testing.assert_close(whole.features, expected, rtol=1e-4, atol=1e-4)


@families
def test_rows_of_a_batch_equal_verifiers_of_their_own(tiny_target: MakeTarget, family: str) -> None:
    generator = torch.Generator().manual_seed(6)
    target = tiny_target(family)
    together = TreeVerifier(target, TAPS, num_sequences=3, prefill_tokens=9)
    alone = [TreeVerifier(target, TAPS) for _ in range(3)]
    for row, length in enumerate((1, 31, 12)):
        prompt = random_ids(generator, length)
        found, expected = together.prefill(prompt, row), alone[row].prefill(prompt)
        assert_near(found.logits, expected.logits)
        assert_near(found.features, expected.features)
    for turn in range(6):
        if turn == 4:  # a row starts anew while the others go on
            prompt = random_ids(generator, 5)
            together.prefill(prompt, 1)
            alone[1].prefill(prompt)
        trees = [random_tree(generator, 3, size, [1, 2, 3, 4]) for size in (5, 9, 14)]
        before = [committed_bytes(together, row) for row in range(3)]
        idle = turn % 4  # 3: none
        output = together.verify([None if row == idle else trees[row] for row in range(3)])
        for row in range(3):
            assert all(map(torch.equal, before[row], committed_bytes(together, row)))
        paths: list[list[int]] = [[], [], []]
        for row, (tree, own) in enumerate(zip(trees, alone, strict=True)):
            if row == idle:
                continue
            expected = own.verify([tree])
            paths[row] = tree.path(len(tree) - 1 - turn % 3)
            own.commit([paths[row]])
            for found, single in (
                (output.logits, expected.logits),
                (output.features, expected.features),
            ):
                assert_near(found[row, : len(tree)], single[0])
        together.commit(paths)
        if idle < 3:
            assert all(map(torch.equal, before[idle], committed_bytes(together, idle)))
        assert together.lengths == [own.lengths[0] for own in alone]
    for row, own in enumerate(alone):
        for found, single in zip(committed_bytes(together, row), committed_bytes(own), strict=True):
            assert_near(found, single)


@families
def test_a_long_prompt_between_verify_and_commit(tiny_target: MakeTarget, family: str) -> None:
    generator = torch.Generator().manual_seed(8)
    target = tiny_target(family)
    verifier = TreeVerifier(target, TAPS, num_sequences=2)
    prompt, tree = random_ids(generator, 9), random_tree(generator, 3, 12, [1, 2, 3, 4])
    verifier.prefill(prompt)
    verifier.verify([tree, None])
    verifier.prefill(random_ids(generator, 300), 1)  # longer than all before, and than a buffer
    verifier.commit([path := tree.path(11), []])
    found = verifier.verify([chain_tree(torch.tensor([5])), None]).logits[0, 0]
    expected = plain_logits(target, torch.cat([prompt, tree.tokens[path], torch.tensor([5])]))
    assert_near(found, expected)


def test_only_paths_of_the_last_tree_can_be_committed(tiny_target: MakeTarget) -> None:
    verifier = TreeVerifier(tiny_target(), TAPS)
    verifier.prefill(torch.tensor([1, 2]))
    verifier.verify([tree_from([1, 2, 3], [-1, 0, 0])])
    for wrong in ([1], [0, 1, 2]):
        with pytest.raises(AssertionError):
            verifier.commit([wrong])
    verifier.commit([[0, 2]])
    assert verifier.lengths == [4]
    with pytest.raises(IndexError):
        verifier.commit([[0]])


def test_moves_only_what_is_out_of_place() -> None:
    paths = PathBatch.of([[0, 1, 4, 7]], [9], 9, 0, torch.device("cpu"))
    assert paths.moved.tolist() == [[0, 0], [13, 16], [11, 12]]
    assert PathBatch.of([[0, 1, 2]], [9], 9, 0, torch.device("cpu")).moved.shape == (3, 0)
    # a shorter row's nodes lie behind the longest row, so all of them move
    paths = PathBatch.of([[0, 2], [], [0, 1]], [9, 4, 7], 9, 0, torch.device("cpu"))
    assert paths.moved.tolist() == [[0, 2, 2], [11, 9, 10], [10, 7, 8]]


def test_an_unknown_layer_type_is_refused_by_name(tiny_target: MakeTarget) -> None:
    target = tiny_target()
    kinds = ("chunked_attention", *target.layer_types[1:])
    with pytest.raises(ValueError, match="'chunked_attention', which trees cannot be verified on"):
        TreeVerifier(dataclasses.replace(target, layer_types=kinds), TAPS)


def test_an_attention_without_masks_is_refused(
    tiny_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target()
    monkeypatch.setattr(target.model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ValueError, match=r"target\.attention=flash_attention_2 takes no tree mask"):
        TreeVerifier(target, TAPS)


def test_an_empty_prompt_is_refused(tiny_target: MakeTarget) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        TreeVerifier(tiny_target(), TAPS).prefill(torch.zeros(0, dtype=torch.int64))


class _SiblingsSeeEachOther(FullAttention):
    def visible(self, nodes: NodeBatch) -> Tensor:
        mask = super().visible(nodes)
        mask[:, :, -nodes.num_nodes :] = torch.ones_like(nodes.ancestors).tril()
        return mask


class _RootForgetsOneToken(FullAttention):
    def visible(self, nodes: NodeBatch) -> Tensor:
        mask = super().visible(nodes)
        mask[:, :, 0] = False
        return mask


class _CommitsTheFirstNodes(FullAttention):
    def commit(self, paths: PathBatch) -> None:
        pass


@pytest.mark.parametrize(
    "broken", [_SiblingsSeeEachOther, _RootForgetsOneToken, _CommitsTheFirstNodes]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_self_check_sees_a_target_that_treats_trees_differently(
    tiny_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    broken: type[FullAttention],
    dtype: str,
) -> None:
    target = load_target(tiny_config("qwen3").target, "cpu", dtype=dtype)
    monkeypatch.setitem(LAYER_ADAPTERS, "full_attention", broken)
    with pytest.raises(ValueError, match=r"under transformers \d+.*differ from a plain forward"):
        TreeVerifier(target, TAPS)


@pytest.mark.gpu
@families
def test_cuda_verifies_like_a_plain_forward(
    tiny_config: Callable[..., Config], family: str
) -> None:
    target = load_target(tiny_config(family).target, "cuda")
    generator = torch.Generator().manual_seed(7)
    verifier = TreeVerifier(target, TAPS)
    prompt = random_ids(generator, 20)
    verifier.prefill(prompt)
    tree = random_tree(generator, 3, 24, random_ids(generator, 12).tolist())
    logits = verifier.verify([tree]).logits[0]
    verifier.commit([path := tree.path(len(tree) - 1)])
    after = verifier.verify([chain_tree(torch.tensor([9]))]).logits[0, 0]
    for node in range(len(tree)):
        ids = torch.cat([prompt, tree.tokens[tree.path(node)]]).cuda()
        torch.testing.assert_close(logits[node], plain_logits(target, ids), rtol=1e-3, atol=1e-3)
    ids = torch.cat([prompt, tree.tokens[path], torch.tensor([9])]).cuda()
    torch.testing.assert_close(after, plain_logits(target, ids), rtol=1e-3, atol=1e-3)
