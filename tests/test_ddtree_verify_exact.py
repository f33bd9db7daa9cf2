"""Every node of every tree against the target's own one-token decoding with a forked cache: the independent check."""

from __future__ import annotations

import accelerate
import pytest
import torch
from ddtree_cases import (
    IMAGE_TOKEN,
    KINDS,
    SHAPES,
    VOCABULARY,
    decode_one,
    float64_throughout,
    fork_down_every_path,
    make_target,
    make_vision_target,
    prompt_cache,
    shaped_tree,
    tree_from,
)
from torch import Tensor
from transformers import DynamicCache

from ddtree import gdn, gdn_layers, nodes
from ddtree.tree import DraftTree, chain_tree
from ddtree.verify import TreeVerifier
from ddtree.walk import walk_tree
from target.load import Target

TAPS = (0, 2)
__all__ = ["float64_throughout"]  # a fixture, found by its name
in_float64 = pytest.mark.usefixtures("float64_throughout")


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest logit."""
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


def random_prompt(generator: torch.Generator, count: int) -> Tensor:
    return torch.randint(VOCABULARY, (count,), generator=generator)


def assert_agrees(
    target: Target, prompt_tokens: int, tree: DraftTree, tolerance: float, **options: object
) -> None:
    """All nodes; then, behind a commit of the deepest and of a middle node, plain decoding."""
    generator = torch.Generator().manual_seed(prompt_tokens + len(tree))
    prompt = random_prompt(generator, prompt_tokens)
    forked = fork_down_every_path(target, prompt_cache(target, prompt), tree)
    verifier = TreeVerifier(target, TAPS, **options)  # pyright: ignore[reportArgumentType]
    for node in (int(tree.depths.argmax()), len(tree) // 2):
        verifier.prefill(prompt)
        logits = verifier.verify([tree]).logits[0, : len(tree)]
        assert relative(logits, forked.logits) < tolerance
        assert torch.equal(logits.argmax(-1), forked.logits.argmax(-1))
        verifier.commit([tree.path(node)])
        assert_goes_on(target, verifier, forked.caches[node], int(logits[node].argmax()), tolerance)


def assert_goes_on(
    target: Target, verifier: TreeVerifier, cache: DynamicCache, token: int, tolerance: float
) -> None:
    """One token after the other, each committed before the next, against plain decoding."""
    for _ in range(6):
        plain = decode_one(target, cache, token)
        found = verifier.verify([chain_tree(torch.tensor([token]))]).logits[0, 0]
        verifier.commit([[0]])
        assert relative(found, plain) < tolerance
        token = int(plain.argmax())


@pytest.mark.parametrize("kind", KINDS)
@in_float64
def test_every_node_is_what_decoding_its_path_gives(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    target = make_target(kind, torch.float64)
    assert_agrees(target, 23, shaped_tree("drafted", 24, generator), 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_and_in_float32_to_a_thousandth_of_the_largest_logit(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    assert_agrees(make_target(kind), 23, shaped_tree("drafted", 24, generator), 1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("prompt_tokens", [1, 2])  # the convolution reaches before the prompt
@in_float64
def test_every_shape_behind_the_shortest_prompts(shape: str, prompt_tokens: int) -> None:
    generator = torch.Generator().manual_seed(2)
    tree = shaped_tree(shape, 13, generator)
    assert_agrees(make_target("qwen3_5", torch.float64), prompt_tokens, tree, 1e-9)


@pytest.mark.parametrize("window", [4, 32])  # cuts inside the tree; reaches over all of it
@in_float64
def test_sliding_windows_count_depth(window: int) -> None:
    generator = torch.Generator().manual_seed(3)
    target = make_target("qwen3_sliding", torch.float64, window)
    assert_agrees(target, 9, shaped_tree("random", 24, generator), 1e-9)


@in_float64
def test_substitution_padding_and_eager_attention_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(4)
    tree = shaped_tree("drafted", 24, generator)
    monkeypatch.setattr(gdn, "_substitution_pays", lambda nodes: True)
    target = make_target("qwen3_5", torch.float64, attention="eager")
    assert_agrees(target, 7, tree, 1e-9, node_counts=(9, 30), prefill_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@in_float64
def test_large_trees_of_every_shape_on_every_family(kind: str, shape: str) -> None:
    generator = torch.Generator().manual_seed(5)
    target = make_target(kind, torch.float64)
    assert_agrees(target, 40, shaped_tree(shape, 160, generator), 1e-9)


@in_float64
def test_a_ragged_batch_of_a_hybrid() -> None:
    generator = torch.Generator().manual_seed(6)
    target = make_target("qwen3_5", torch.float64)
    prompts = [random_prompt(generator, count) for count in (2, 30, 11)]
    trees = [shaped_tree("random", size, generator) for size in (14, 6, 9)]
    verifier = TreeVerifier(target, TAPS, num_sequences=4, node_counts=(16,))
    forks = []
    for row, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        verifier.prefill(prompt, row)
        forks.append(fork_down_every_path(target, prompt_cache(target, prompt), tree))
    logits = verifier.verify([*trees, None]).logits
    assert logits.isfinite().all()  # padding and the idle row too: they are sampled from
    paths = [tree.path(len(tree) - 1) for tree in trees]
    verifier.commit([*paths, []])
    again = verifier.verify([chain_tree(torch.tensor([7]))] * 4).logits
    for row, (fork, path) in enumerate(zip(forks, paths, strict=True)):
        assert relative(logits[row, : len(trees[row])], fork.logits) < 1e-9
        assert relative(again[row, 0], decode_one(target, fork.caches[path[-1]], 7)) < 1e-9
    assert verifier.lengths == [2 + len(paths[0]), 30 + len(paths[1]), 11 + len(paths[2]), 0]


@in_float64
def test_images_in_the_prompt_shift_the_positions_of_all_that_follows() -> None:
    generator = torch.Generator().manual_seed(7)
    target = make_vision_target(torch.float64)
    prompt = torch.tensor([5, 6, *[IMAGE_TOKEN] * 6, 7, 8])
    cache = DynamicCache(config=target.model.config)
    given: dict[str, Tensor] = {}
    hook = target.text_model.register_forward_pre_hook(
        lambda module, args, kwargs: given.update(kwargs), with_kwargs=True
    )
    with torch.inference_mode():
        expected = target.model(
            input_ids=prompt[None],
            pixel_values=torch.randn(24, 96, generator=generator),
            image_grid_thw=torch.tensor([[1, 6, 4]]),
            mm_token_type_ids=(prompt == IMAGE_TOKEN).int()[None],
            cache=cache,
        ).logits[0, -1]
    hook.remove()
    tree = shaped_tree("random", 14, generator)
    forked = fork_down_every_path(target, cache, tree)  # with the wrapper's own positions
    verifier = TreeVerifier(target, TAPS, num_sequences=2, prefill_tokens=4)
    output = verifier.prefill_embedded(given["inputs_embeds"][0], given["position_ids"][:, 0], 1)
    assert relative(output.logits, expected) < 1e-9
    logits = verifier.verify([None, tree]).logits[1]
    assert relative(logits, forked.logits) < 1e-9
    verifier.commit([[], path := tree.path(len(tree) - 1)])
    again = verifier.verify([None, chain_tree(torch.tensor([9]))]).logits[1, 0]
    assert relative(again, decode_one(target, forked.caches[path[-1]], 9)) < 1e-9
    # the shift is not a rounding error, and text in the same row starts from zero again
    assert relative(logits[0], verifier_without_shift(target, prompt, tree)) > 1e-3
    text = prompt[:2]
    assert relative(verifier.prefill(text, 1).logits, plain_logits(target, text)) < 1e-9
    after = verifier.verify([None, chain_tree(torch.tensor([9]))]).logits[1, 0]
    assert relative(after, plain_logits(target, torch.cat([text, torch.tensor([9])]))) < 1e-9


def plain_logits(target: Target, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return target.model(input_ids=ids[None], use_cache=False).logits[0, -1]


def verifier_without_shift(target: Target, prompt: Tensor, tree: DraftTree) -> Tensor:
    verifier = TreeVerifier(target, TAPS)
    verifier.prefill(prompt)
    return verifier.verify([tree]).logits[0, 0]


@in_float64
def test_a_target_spread_by_accelerate() -> None:
    """Hooks on every layer, as a device map leaves them; both devices are the CPU here."""
    generator = torch.Generator().manual_seed(8)
    target = make_target("qwen3_5", torch.float64)
    places: dict[str, str | int | torch.device] = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
    }
    places |= {f"model.layers.{i}": "cpu" for i in range(4)} | {"lm_head": "cpu"}
    accelerate.dispatch_model(target.model, places, force_hooks=True)
    hooked = [layer.linear_attn.forward for layer in target.layers[:3]]  # pyright: ignore[reportAttributeAccessIssue]
    assert_agrees(target, 8, shaped_tree("random", 12, generator), 1e-9)
    now = [layer.linear_attn.forward for layer in target.layers[:3]]  # pyright: ignore[reportAttributeAccessIssue]
    assert all(a is b for a, b in zip(hooked, now, strict=True))


def test_the_models_own_forward_is_back_whatever_happens() -> None:
    target = make_target("qwen3_5")
    verifier = TreeVerifier(target, TAPS)
    verifier.prefill(torch.tensor([1, 2, 3]))
    plain = plain_logits(target, torch.tensor([1, 2, 3]))
    hook = target.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        verifier.verify([chain_tree(torch.tensor([4]))])
    hook.remove()
    assert torch.equal(plain_logits(target, torch.tensor([1, 2, 3])), plain)
    assert not any("forward" in vars(module) for module in target.model.modules())


def _state_of_the_root(states: Tensor, writes: object, paths: nodes.PathBatch) -> None:
    """A commit that forgets."""


def _without_ancestors(self: nodes.NodeBatch, width: int) -> Tensor:
    """Each node's own column and the cached ones: what a convolution that knows no tree would see."""
    columns = torch.arange(width).expand(*self.tokens.shape, width).clone()
    columns[..., -1] = width - 1 + torch.arange(self.num_nodes)
    return columns


def _decay_in_order(self: nodes.NodeBatch) -> Tensor:
    return (
        torch.ones(self.num_nodes, self.num_nodes).triu().double().expand(len(self.tokens), -1, -1)
    )


def _siblings_seen(self: nodes.NodeBatch) -> Tensor:
    return torch.ones(self.num_nodes, self.num_nodes).tril().bool().expand(len(self.tokens), -1, -1)


_FAULTS = {
    "commit forgets": (gdn_layers, "commit_states", _state_of_the_root),
    "convolution along the list": (nodes.NodeBatch, "convolution_columns", _without_ancestors),
    "decay summed in order": (nodes.NodeBatch, "ancestor_weights", property(_decay_in_order)),
    "siblings seen": (nodes.NodeBatch, "ancestors", property(_siblings_seen)),
    "positions in order": (
        nodes.NodeBatch,
        "rope_positions",
        property(lambda self: self.committed[:, None] + torch.arange(self.num_nodes)),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", _FAULTS)
def test_the_check_at_start_sees_each_of_these_faults(
    monkeypatch: pytest.MonkeyPatch, fault: str, dtype: torch.dtype
) -> None:
    target = make_target("qwen3_5", dtype)
    TreeVerifier(target, TAPS)  # without a fault it is silent
    monkeypatch.setattr(*_FAULTS[fault])
    with pytest.raises(ValueError, match="differ from a plain forward"):
        TreeVerifier(target, TAPS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_sliding"])
@in_float64
def test_thousands_of_tokens_by_trees_equal_plain_decoding(kind: str) -> None:
    """Past the length from which prefix and nodes are attended apart; a third of the trees lead astray."""
    generator = torch.Generator().manual_seed(9)
    target = make_target(kind, torch.float64)
    prompt = random_prompt(generator, 30)
    cache = prompt_cache(target, prompt[:-1])
    plain = [int(prompt[-1])]
    while len(plain) < 2500:
        plain.append(int(decode_one(target, cache, plain[-1]).argmax()))
    verifier = TreeVerifier(target, TAPS)
    verifier.prefill(prompt[:-1])
    text, num_passes = plain[:1], 0
    while len(text) < 2400:
        to_come = plain[len(text) : len(text) + 12]
        if num_passes % 3 == 0:
            to_come[3:] = [(token + 1) % VOCABULARY for token in to_come[3:]]
        tree = tree_around(text[-1], to_come, generator)
        walked = walk_tree(tree, verifier.verify([tree]).logits[0].argmax(-1))
        verifier.commit([walked.nodes])
        text += [*tree.tokens[walked.nodes[1:]].tolist(), walked.bonus]
        num_passes += 1
    assert text[:2400] == plain[:2400]
    assert num_passes < 400


def tree_around(root: int, spine: list[int], generator: torch.Generator) -> DraftTree:
    """The tokens of `spine` under each other, with two wrong siblings before each."""
    tokens, parents, tip = [root], [-1], 0
    for token in spine:
        wrong = [int(t) for t in random_prompt(generator, 2) if int(t) != token]
        parents += [tip] * (len(wrong) + 1)
        tokens += [*wrong, token]
        tip = len(tokens) - 1
    return tree_from(tokens, parents)
