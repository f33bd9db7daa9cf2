"""Tiny random targets of every family, trees of every shape, and the reference that forks the target's state at every node.

The reference decodes one token at a time with transformers' own cache, copied at each node: slow, simple, and independent
of everything under test.
"""

from __future__ import annotations

import copy
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from ddtree.build import build_tree
from ddtree.tree import DraftTree
from target.byte_tokenizer import byte_tokenizer
from target.load import Target, layer_types

VOCABULARY = 320
IMAGE_TOKEN = 300
KINDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_sliding")
SHAPES = ("chain", "star", "binary", "random", "drafted")
ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "experts_implementation": "eager",  # the grouped product has no float64
}


def make_target(
    kind: str, dtype: torch.dtype = torch.float32, window: int = 8, attention: str = "sdpa"
) -> Target:
    """4 layers of 64; the hybrids have 3 Gated-DeltaNet layers and one of full attention."""
    sizes = {**_SIZES, "attn_implementation": attention}
    if kind == "qwen3_5":
        config = Qwen3_5TextConfig(**sizes, **_DELTA_NET, rope_parameters=ROPE)
        model: PreTrainedModel = Qwen3_5ForCausalLM(config)
    elif kind == "qwen3_5_moe":
        config = Qwen3_5MoeTextConfig(**sizes, **_DELTA_NET, **_EXPERTS, rope_parameters=ROPE)
        model = Qwen3_5MoeForCausalLM(config)
    elif kind == "qwen3_next":
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **_DELTA_NET, **_EXPERTS))
    else:
        sliding = {"use_sliding_window": True, "sliding_window": window}
        types_ = ["sliding_attention", "full_attention"] * 2
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **sliding, layer_types=types_))
    return as_target(model, dtype)


def make_vision_target(dtype: torch.dtype) -> Target:
    """The tiny qwen3_5 under `model.language_model` of a model with a vision tower."""
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
    }
    text = {**_SIZES, **_DELTA_NET, "rope_parameters": ROPE}
    config = Qwen3_5Config(text_config=text, vision_config=vision, image_token_id=IMAGE_TOKEN)
    return as_target(Qwen3_5ForConditionalGeneration(config), dtype)


def as_target(model: PreTrainedModel, dtype: torch.dtype) -> Target:
    """With weights that make logits of some nats, sharp attention and memories from one token to hundreds."""
    randomise(model)
    model = model.to(dtype).eval().requires_grad_(False)  # pyright: ignore[reportArgumentType] - torch's own `to`
    config = model.config.get_text_config()
    return Target(
        model=model,
        tokenizer=byte_tokenizer(),
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        layer_types=layer_types(config),
        dtype=dtype,
        device=torch.device("cpu"),
        eos_token_ids=(0,),
    )


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # decay rates over four decades
            parameter.copy_(torch.linspace(-6.0, 2.0, parameter.numel()))
        elif name.endswith("conv1d.weight"):
            parameter.normal_(0.0, 0.6, generator=generator)
        elif name.endswith("dt_bias"):
            parameter.normal_(0.0, 1.0, generator=generator)
        elif parameter.ndim == 1:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        else:
            spread = 3.0 if name.startswith("lm_head") else 1.0
            width = 1 if "embed" in name else parameter.shape[-1]
            parameter.normal_(0.0, spread * width**-0.5, generator=generator)


class _Float64Torch(types.ModuleType):
    """torch, as seen by a modelling file that names float32."""

    def __getattr__(self, name: str) -> object:
        return vars(torch)["float64" if name in ("float32", "float") else name]


@pytest.fixture
def float64_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes norms, rotary angles, softmax and the delta rule in float32; here in float64."""
    for module in (modeling_qwen3, modeling_qwen3_5, modeling_qwen3_5_moe, modeling_qwen3_next):
        monkeypatch.setattr(module, "torch", _Float64Torch("torch"))
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def tree_from(tokens: list[int], parents: list[int]) -> DraftTree:
    """Depths and child ranks follow from the parents."""
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


def shaped_tree(shape: str, size: int, generator: torch.Generator) -> DraftTree:
    """`size` nodes; `drafted` is what a drafter of 7 slots gives at that budget."""
    tokens = torch.randint(VOCABULARY, (size,), generator=generator)
    if shape == "drafted":
        logits = 4 * torch.randn(7, VOCABULARY, generator=generator)
        log_probs, ids = logits.log_softmax(-1).topk(size)
        return build_tree(int(tokens[0]), log_probs, ids, size - 1)
    parents = {
        "chain": lambda node: node - 1,
        "star": lambda node: 0,
        "binary": lambda node: (node - 1) // 2,
        "random": lambda node: int(torch.randint(max(0, node - 6), node, (), generator=generator)),
    }[shape]
    return tree_from(tokens.tolist(), [-1, *(parents(node) for node in range(1, size))])


@dataclass(frozen=True)
class Forked:
    """The target's logits after every node, and a cache of its own behind each."""

    logits: Tensor  # (T, V)
    caches: list[DynamicCache]


@torch.inference_mode()
def decode_one(target: Target, cache: DynamicCache, token: int) -> Tensor:
    """Logits (V,) after one more token."""
    return target.model(input_ids=torch.tensor([[token]]), cache=cache).logits[0, -1]


@torch.inference_mode()
def prompt_cache(target: Target, prompt: Tensor) -> DynamicCache:
    cache = DynamicCache(config=target.model.config)
    target.model(input_ids=prompt[None], cache=cache, use_cache=True)
    return cache


def fork_down_every_path(target: Target, cache: DynamicCache, tree: DraftTree) -> Forked:
    logits, caches = [], []
    for node, parent in enumerate(tree.parents.tolist()):
        forked = copy.deepcopy(cache if parent < 0 else caches[parent])
        logits.append(decode_one(target, forked, int(tree.tokens[node])))
        caches.append(forked)
    return Forked(torch.stack(logits), caches)
