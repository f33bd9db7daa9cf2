"""The drafter computes what its definition says, the same on every attention path, and no block sees what it must not."""

import math
from dataclasses import replace

import pytest
import torch
from drafter_cases import ALL_FULL, CONFIGS, TINY, packed_layout, random_inputs, tiny_drafter
from torch import Tensor

from drafter.config import FULL, default_target_layer_ids
from drafter.folder import expected_shapes
from drafter.masks import dense_mask
from drafter.model import BlockLayout, Drafter, block_embeddings


def assert_near(got: Tensor, wanted: Tensor, bound: float = 1e-5) -> None:
    torch.testing.assert_close(got, wanted, rtol=bound, atol=bound)


def test_default_taps_of_known_targets():
    assert default_target_layer_ids(64, 5) == (1, 16, 31, 46, 61)
    assert default_target_layer_ids(30, 5) == (1, 8, 14, 20, 27)
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(36, 1) == (18,)


def test_tensor_names_and_count_of_the_mission_drafter():
    config = replace(
        TINY,
        hidden_size=5120,
        num_layers=5,
        intermediate_size=17408,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        target_layer_ids=(1, 16, 31, 46, 61),
        num_target_layers=64,
        layer_types=(*("sliding_attention",) * 4, FULL),
    )
    shapes = expected_shapes(config)
    assert sum(math.prod(shape) for shape in shapes.values()) == pytest.approx(1.73e9, rel=2e-3)
    per_layer = {
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{x}" for x in ("gate_proj", "up_proj", "down_proj")),
    }
    wanted = {f"layers.{i}.{name}.weight" for i in range(5) for name in per_layer}
    assert set(shapes) == wanted | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert shapes["fc.weight"] == (5120, 5 * 5120)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rope(x: Tensor, position: int) -> Tensor:
    """Element i of the first half turns with element i of the second, by position * theta^(-2i/E)."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * 1e4 ** (-2 * i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def slow_forward(drafter: Drafter, features: Tensor, x: Tensor, layout: BlockLayout) -> Tensor:
    """One sequence with loops over layers, queries and heads, in float64. x: (N*K, H)."""
    config, state = drafter.config, {n: p.double() for n, p in drafter.state_dict().items()}
    context = rms(features.double().flatten(1) @ state["fc.weight"].T, state["hidden_norm.weight"])
    slots = range(config.block_size)
    anchors, places = layout.anchor_positions[0].tolist(), layout.context_positions[0].tolist()
    query_positions = [anchor + slot for anchor in anchors for slot in slots]
    x = x.double()
    for index in range(config.num_layers):
        w = {n.removeprefix(f"layers.{index}."): t for n, t in state.items()}
        mask = dense_mask(layout, config.block_size, config.window(index))[0]
        normed = rms(x, w["input_layernorm.weight"])
        both = torch.cat([context, normed])
        heads = []
        for head in range(config.num_attention_heads):
            shared = head // (config.num_attention_heads // config.num_key_value_heads)
            mine, theirs = ((h * 8, h * 8 + 8) for h in (head, shared))
            q = normed @ w["self_attn.q_proj.weight"][slice(*mine)].T
            k = both @ w["self_attn.k_proj.weight"][slice(*theirs)].T
            v = both @ w["self_attn.v_proj.weight"][slice(*theirs)].T
            q = [
                rope(rms(t, w["self_attn.q_norm.weight"]), p)
                for t, p in zip(q, query_positions, strict=True)
            ]
            k = [
                rope(rms(t, w["self_attn.k_norm.weight"]), p)
                for t, p in zip(k, places + query_positions, strict=True)
            ]
            scores = torch.stack(q) @ torch.stack(k).T / math.sqrt(8)
            heads.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ w["self_attn.o_proj.weight"].T
        normed = rms(x, w["post_attention_layernorm.weight"])
        gate = normed @ w["mlp.gate_proj.weight"].T
        up = normed @ w["mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T
    return rms(x, state["norm.weight"])


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_is_its_definition_in_loops(name):
    drafter = tiny_drafter(CONFIGS[name])
    layout = packed_layout()
    features, embeddings = random_inputs(TINY, layout)
    got = drafter(features, embeddings, layout, "structured")
    for row in range(2):
        part = BlockLayout(*(t[row : row + 1] for t in vars(layout).values()))
        wanted = slow_forward(drafter, features[row], embeddings[row].flatten(0, 1), part)
        assert_near(got[row].flatten(0, 1).double(), wanted)


@pytest.mark.parametrize("name", CONFIGS)
def test_all_paths_agree(name):
    drafter = tiny_drafter(CONFIGS[name]).requires_grad_(False)  # flex has no backward on CPU
    layout = packed_layout()
    inputs = random_inputs(TINY, layout)
    dense = drafter(*inputs, layout, "dense")
    for attention in ("structured", "chunked", "flex", "auto"):
        assert_near(drafter(*inputs, layout, attention), dense)


def test_gradients_agree_with_the_reference_and_with_checkpointing():
    drafter = tiny_drafter()
    layout = packed_layout()
    inputs = random_inputs(TINY, layout)
    weights = torch.randn(2, 4, 4, 32, generator=torch.Generator().manual_seed(5))

    def gradients(attention: str) -> list[Tensor]:
        loss = (drafter(*inputs, layout, attention) * weights).sum()
        return list(torch.autograd.grad(loss, list(drafter.parameters())))

    plain = gradients("structured")
    for attention in ("dense", "chunked"):
        for got, wanted in zip(gradients(attention), plain, strict=True):
            assert_near(got, wanted, 1e-4)
    drafter.activation_checkpointing = True
    assert all(torch.equal(a, b) for a, b in zip(gradients("structured"), plain, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunk_scores", [1, 130, 10_000])
def test_chunks_of_any_size_give_the_same_states_and_gradients(name, chunk_scores, monkeypatch):
    """One block a chunk, two, or all: of packed documents, with padding, anchors in any order."""
    monkeypatch.setattr("drafter.attention.CHUNK_SCORES", chunk_scores)
    drafter = tiny_drafter(CONFIGS[name])
    packed = packed_layout()
    order = torch.tensor([2, 0, 3, 1])
    shuffled = BlockLayout(
        packed.context_positions,
        packed.context_documents,
        packed.anchor_positions[:, order],
        packed.anchor_documents[:, order],
    )
    for layout in (packed, shuffled):
        features, embeddings = random_inputs(TINY, layout)
        features.requires_grad_()
        embeddings.requires_grad_()
        wanted = [features, embeddings, *drafter.parameters()]
        results = {}
        for attention in ("dense", "chunked"):
            hidden = drafter(features, embeddings, layout, attention)
            results[attention] = [hidden, *torch.autograd.grad(hidden.square().sum(), wanted)]
        for got, reference in zip(results["chunked"], results["dense"], strict=True):
            assert_near(got, reference, 1e-4)


def test_long_contexts_are_chunked_and_memory_is_linear_in_anchors():
    """What backward keeps: with twice the anchors twice of what blocks take, and nothing of anchors times context."""
    drafter, length = tiny_drafter(ALL_FULL), 3000
    kept = {}
    for num_anchors in (100, 200, 300):
        layout = BlockLayout(
            torch.arange(length)[None],
            torch.zeros(1, length).long(),
            torch.linspace(1, length - 1, num_anchors).long()[None],
            torch.zeros(1, num_anchors).long(),
        )
        inputs = random_inputs(TINY, layout)
        seen: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, seen=seen: (seen.update({t.data_ptr(): t.numel()}), t)[1], lambda t: t
        ):
            drafter(*inputs, layout)
        kept[num_anchors] = sum(seen.values())
        assert max(seen.values()) < num_anchors * 4 * length
    assert abs((kept[300] - kept[200]) - (kept[200] - kept[100])) < 0.01 * kept[100]


@pytest.mark.parametrize("attention", ["structured", "chunked", "dense", "flex"])
def test_a_block_depends_on_itself_and_on_what_comes_before_its_anchor_only(attention):
    drafter = tiny_drafter(CONFIGS["wide window"]).requires_grad_(False)
    layout = packed_layout()
    features, embeddings = random_inputs(TINY, layout)
    before = drafter(features, embeddings, layout, attention)

    moved = embeddings.clone()
    moved[0, 1] += 1
    after = drafter(features, moved, layout, attention)
    changed = (after != before).any(-1).any(-1)
    assert changed.tolist() == [[False, True, False, False], [False] * 4]

    for token in range(12):  # of row 0: document 0 is tokens 0..6, document 1 tokens 7..11
        moved = features.clone()
        moved[0, token] += 1
        after = drafter(moved, embeddings, layout, attention)
        changed = (after != before).any(-1).any(-1)[0].tolist()
        position = int(layout.context_positions[0, token])
        document = int(layout.context_documents[0, token])
        anchors = [(0, 2), (0, 6), (1, 0), (1, 4)]
        assert changed == [d == document and position < a for d, a in anchors], token


@pytest.mark.parametrize("attention", ["structured", "chunked", "dense"])
def test_padding_is_finite_and_without_gradient(attention):
    drafter = tiny_drafter()
    layout = packed_layout()
    features, embeddings = random_inputs(TINY, layout)
    features[1, 9:] = 0
    features.requires_grad_()
    embeddings.requires_grad_()
    hidden = drafter(features, embeddings, layout, attention)
    assert hidden.isfinite().all()
    hidden[:, :, 1:][layout.anchor_documents >= 0].square().sum().backward()
    assert features.grad is not None
    assert embeddings.grad is not None
    assert features.grad.isfinite().all()
    assert not features.grad[1, 9:].any()
    assert not embeddings.grad[1, 3].any()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters())


def test_a_document_gives_the_same_hidden_states_wherever_it_is_packed():
    drafter = tiny_drafter()
    layout = packed_layout()
    features, embeddings = random_inputs(TINY, layout)
    packed = drafter(features, embeddings, layout)
    alone = BlockLayout(
        torch.arange(5)[None],
        torch.zeros(1, 5).long(),
        torch.tensor([[0, 4]]),
        torch.zeros(1, 2).long(),
    )
    got = drafter(features[:1, 7:], embeddings[:1, 2:], alone)
    assert_near(got, packed[:1, 2:])


def test_bfloat16_paths_stay_near_float32():
    drafter = tiny_drafter(ALL_FULL).requires_grad_(False)
    layout = packed_layout()
    inputs = random_inputs(TINY, layout)
    exact = drafter(*inputs, layout)
    rounded = drafter.bfloat16()
    for attention in ("structured", "chunked", "dense"):
        got = rounded(*inputs, layout, attention)
        assert got.dtype == torch.bfloat16
        assert (got.float() - exact).norm() < 0.03 * exact.norm()


def test_block_embeddings_are_the_anchor_then_masks():
    embedding = torch.arange(50.0)[:, None].expand(50, 2)
    got = block_embeddings(embedding, torch.tensor([[7, 3]]), 3, 4)
    assert got[..., 0].tolist() == [[[7, 3, 3, 3], [3, 3, 3, 3]]]


def test_initialisation_is_seeded_and_as_qwen3_initialises():
    torch.manual_seed(1)
    first = Drafter(ALL_FULL).state_dict()
    torch.manual_seed(1)
    assert all(torch.equal(t, first[n]) for n, t in Drafter(ALL_FULL).state_dict().items())
    for name, tensor in first.items():
        if "norm" in name:
            assert (tensor == 1).all()
        else:
            assert tensor.std() == pytest.approx(0.02, rel=0.15), name


def test_unknown_attention_is_refused():
    layout = packed_layout()
    with pytest.raises(ValueError, match="attention='fast'; choose auto"):
        tiny_drafter()(*random_inputs(TINY, layout), layout, "fast")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_flex_trains_like_the_structured_path_on_cuda(name):
    """Two layouts of different lengths, so that the compiled kernel meets a new shape."""
    config = replace(CONFIGS[name], head_dim=16)
    drafter = tiny_drafter(config).cuda()
    for length, num_anchors in ((200, 40), (333, 17)):
        anchors = torch.randint(length, (2, num_anchors), device="cuda")
        places = torch.arange(length, device="cuda").expand(2, -1)
        layout = BlockLayout(places, torch.zeros_like(places), anchors, torch.zeros_like(anchors))
        features = torch.randn(2, length, 3, 32, device="cuda")
        embeddings = torch.randn(2, num_anchors, 4, 32, device="cuda")
        results = {}
        for attention in ("flex", "structured"):
            hidden = drafter(features, embeddings, layout, attention)
            gradients = torch.autograd.grad(hidden.square().mean(), list(drafter.parameters()))
            results[attention] = [hidden.detach(), *gradients]
        for got, wanted in zip(results["flex"], results["structured"], strict=True):
            assert (got - wanted).norm() <= 1e-4 * wanted.norm()
