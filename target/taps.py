"""Target features: the outputs of the tapped decoder layers, in one forward without logits or KV cache.

Tap i is the OUTPUT of 0-based decoder layer i, which HF calls hidden_states[i+1].
Shapes: B sequences, S sequence length, D taps, H hidden.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from target.load import Target


@dataclass(frozen=True)
class TapOutput:
    features: Tensor
    """(B, S, D, H) in the target's dtype, taps in the order asked for; zero from a row's length on."""
    last_hidden: Tensor | None
    """(B, S, H), the model's own last hidden state, after its own final norm; zero from a row's length on."""


class _AllTapped(Exception):
    """Leaves the forward after the last tap: the layers above it would only be thrown away."""


@torch.inference_mode()
def forward_with_taps(
    target: Target,
    input_ids: Tensor,
    lengths: Tensor,
    layer_ids: Sequence[int],
    need_last_hidden: bool,
) -> TapOutput:
    """Features of right-padded rows; any token id may stand in the padding.

    input_ids (B, S) int64, lengths (B,) int64. Causal layers never look right, so right padding needs no mask and the
    result does not depend on it. Layers above the last tap run only if the last hidden state is needed.
    """
    tapped: dict[int, Tensor] = {}
    last = None if need_last_hidden else max(layer_ids)
    with tap_outputs(target, layer_ids, lambda i, hidden: _keep(tapped, i, hidden, last)):
        try:
            output = target.text_model(input_ids=input_ids, use_cache=False)
            last_hidden = output.last_hidden_state.to(target.device) if need_last_hidden else None
        except _AllTapped:
            last_hidden = None
    features = torch.stack([tapped[i] for i in layer_ids], dim=2)  # (B, S, D, H)
    padding = (
        torch.arange(input_ids.shape[1], device=target.device) >= lengths.to(target.device)[:, None]
    )
    features.masked_fill_(padding[:, :, None, None], 0)
    if last_hidden is not None:
        last_hidden = last_hidden.masked_fill(padding[:, :, None], 0)
    return TapOutput(features, last_hidden)


@contextlib.contextmanager
def tap_outputs(
    target: Target, layer_ids: Sequence[int], keep: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """While open, every forward calls `keep(i, hidden (B, S, H))` with the output of each tapped layer i."""
    handles = []
    try:
        for i in layer_ids:
            handles.append(
                target.layers[i].register_forward_hook(
                    functools.partial(_on_output, target, keep, i)
                )
            )
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keep(tapped: dict[int, Tensor], i: int, hidden: Tensor, last: int | None) -> None:
    tapped[i] = hidden
    if i == last:
        raise _AllTapped


def _on_output(
    target: Target,
    keep: Callable[[int, Tensor], None],
    i: int,
    _module: nn.Module,
    _inputs: object,
    output: Tensor | tuple[Tensor, ...],
) -> None:
    hidden = output[0] if isinstance(output, tuple) else output  # some families return a tuple
    keep(i, hidden.to(target.device))
