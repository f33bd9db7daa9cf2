"""Drafting with the released packages of others: z-lab's dflash 0.1.0 and speculators 0.9.0, on the CPU, for comparison with ours.

Both are installed without their pins (`./launch.sh setup`). n anchors, S tokens, K block size, D taps, H hidden, V vocabulary.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from target.load import Target

# by name, so that types are checked where the packages are not installed
zlab: Any = importlib.import_module("dflash.model")
speculators: Any = importlib.import_module("speculators")


def load_zlab(folder: Path) -> Any:
    """z-lab's class, in float32."""
    return zlab.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()


def load_speculators(folder: Path) -> Any:
    """Their class by their registry. Eager attention: their default compiles a kernel, which takes minutes on a CPU."""
    config: Any = speculators.SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model: Any = speculators.SpeculatorModel.from_pretrained(folder, config=config)
    return model.float().eval()


@torch.no_grad()
def zlab_logits(
    model: Any, target: Target, ids: Tensor, features: Tensor, anchors: list[int]
) -> Tensor:
    """(n, K-1, V), a draft at a time; ids (S,), features (S, D, H)."""
    found = []
    for anchor in anchors:
        tokens = torch.full((1, model.block_size), model.mask_token_id)
        tokens[0, 0] = ids[anchor]
        hidden = model(
            position_ids=torch.arange(anchor + model.block_size)[None],
            noise_embedding=target.embed_tokens[tokens],
            target_hidden=features[None, :anchor].float().flatten(-2),
        )
        found.append(model.compute_logits(hidden, target.model.get_output_embeddings())[0, 1:])
    return torch.stack(found)


@torch.no_grad()
def speculators_logits(model: Any, ids: Tensor, features: Tensor, anchors: list[int]) -> Tensor:
    """(n, K-1, V) by their training forward; ids (S,), features (S, D, H).

    It draws its anchors from the loss mask and wants a block's room behind them: the mask marks ours, and tokens of another
    document follow.
    """
    room, length = model.block_size, len(ids)
    mask = torch.zeros(1, length + room, dtype=torch.int64)
    mask[0, anchors] = 1
    documents = torch.tensor([[0] * length + [1] * room])
    ids = torch.cat([ids, ids.new_zeros(room)])
    features = torch.cat([features.float(), torch.zeros(room, *features.shape[1:])])
    logits = model._backbone_forward(
        features.flatten(-2)[None],
        ids[None],
        mask,
        torch.zeros(1, length + room, features.shape[-1]),
        documents,
        max_anchors=len(anchors),
    )[1]
    return logits[0].unflatten(0, (len(anchors), room))[:, 1:]


def zlab_decode(
    model: Any, target: Target, prompt: Tensor, length: int
) -> tuple[list[int], list[int]]:
    """A greedy response and the tokens that each pass emitted, by z-lab's own chain decoding; prompt: (S,)."""
    timer = zlab._cuda_time
    zlab._cuda_time = time.perf_counter  # its statistics want a GPU
    try:
        done: Any = zlab.dflash_generate(
            model, target.model, prompt[None], length, list(target.eos_token_ids), return_stats=True
        )
    finally:
        zlab._cuda_time = timer
    return done.output_ids[0, len(prompt) :].tolist(), list(done.acceptance_lengths)


def speculators_decode(
    model: Any, target: Target, prompt: Tensor, length: int
) -> tuple[list[int], list[int]]:
    """The same: speculators has no decoding, so its chain is verified by whole forwards of the target."""
    ends, taps = target.eos_token_ids, model.target_layer_ids
    tokens, passes = torch.cat([prompt, _choices(target, prompt, taps)[0][-1:]]), []
    while len(tokens) < len(prompt) + length and int(tokens[-1]) not in ends:
        anchor = len(tokens) - 1
        states = _choices(target, tokens[:-1], taps)[1]
        states = torch.cat(
            [states, torch.zeros_like(states[:1])]
        )  # the anchor's, which nobody sees
        drafted = speculators_logits(model, tokens, states, [anchor])[0].argmax(-1)
        chosen = _choices(target, torch.cat([tokens, drafted]), taps)[0][anchor:]
        accepted = int((drafted == chosen[:-1]).int().cumprod(0).sum())
        emitted = chosen[: accepted + 1][: len(prompt) + length - len(tokens)].tolist()
        stops = [index for index, token in enumerate(emitted) if token in ends]
        emitted = emitted[: stops[0] + 1] if stops else emitted
        passes.append(len(emitted))
        tokens = torch.cat([tokens, torch.tensor(emitted)])
    return tokens[len(prompt) :].tolist(), passes


@torch.no_grad()
def _choices(target: Target, tokens: Tensor, taps: list[int]) -> tuple[Tensor, Tensor]:
    """The target's token after each one, and its states (S, D, H) as speculators counts taps: transformers' hidden_states[i]."""
    out = target.model(tokens[None], output_hidden_states=True, use_cache=False)
    return out.logits[0].argmax(-1), torch.stack([out.hidden_states[i][0] for i in taps], 1)
