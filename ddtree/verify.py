"""One target forward over a whole draft tree a row, read-only, and the commit of the accepted paths.

    verifier = TreeVerifier(target, layer_ids)
    output = verifier.prefill(prompt)             # logits after the prompt; its argmax is the first anchor
    output = verifier.verify([tree])              # logits after every node; nothing is committed
    verifier.commit([walk_tree(tree, output.logits[0].argmax(-1)).nodes])

Plain decoding is a tree of one node: verify([chain_tree(token)]), commit([[0]]). Several sequences are rows of one batch,
each with a length of its own; a row's results are those of a verifier of its own.

R rows (sequences), S prompt tokens, T tree nodes with root, D taps, H hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import Cache

from ddtree.adapters import LAYER_ADAPTERS, Rows
from ddtree.nodes import NodeBatch, PathBatch
from ddtree.self_check import check_against_plain_forward
from ddtree.tree import DraftTree
from target.load import Target
from target.taps import tap_outputs


@dataclass(frozen=True, eq=False)
class VerifyOutput:
    logits: Tensor
    """(R, T, V) after each node, rows padded at the end; (V,) after a prompt. Target dtype."""
    features: Tensor
    """(R, T, D, H) of the nodes, or (S, D, H) of the prompt, taps in the order asked for."""


class TreeVerifier:
    """The target with the caches of `num_sequences` rows, `lengths` tokens of them committed."""

    def __init__(
        self,
        target: Target,
        layer_ids: Sequence[int],
        *,
        num_sequences: int = 1,
        prefill_tokens: int = 1024,
    ):
        """`prefill_tokens`: prompt tokens a forward. Raises ValueError for a target that cannot be verified by a tree."""
        assert num_sequences > 0
        _require_adapters(target)
        _require_mask(target)
        self._target, self._layer_ids = target, tuple(layer_ids)
        self._prefill_tokens = prefill_tokens
        self._rows = Rows([0] * num_sequences)
        config = target.model.config.get_text_config()
        self._layers = [LAYER_ADAPTERS[kind](config, self._rows) for kind in target.layer_types]
        self._cache = Cache(layers=list(self._layers))
        self._cache_argument = _cache_argument(target.text_model)
        self._parents: list[list[int]] = [[] for _ in self.lengths]  # of the nodes verified last
        check_against_plain_forward(self, target)
        self._rows.lengths[:] = [0] * num_sequences

    @property
    def lengths(self) -> list[int]:
        """Committed tokens a row."""
        return list(self._rows.lengths)

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, row: int = 0) -> VerifyOutput:
        """Start a new sequence in `row` with the prompt (S,) int64 committed; other rows are untouched.

        Logits (V,) of its last position, features of all. Raises ValueError for a prompt that is empty or no vector.
        """
        if input_ids.ndim != 1 or input_ids.shape[0] == 0:
            raise ValueError(
                f"input_ids has shape {tuple(input_ids.shape)}; give one prompt of at least one token"
            )
        self._rows.lengths[row], self._parents[row] = 0, []
        views = [layer.row_view(row) for layer in self._layers]
        cache, chunks = Cache(layers=list(views)), []
        for tokens in input_ids.to(self._target.device).split(self._prefill_tokens):
            chunks.append(self._append(tokens, row, cache))
        for layer, view in zip(self._layers, views, strict=True):
            layer.end_prompt(row, view)
        last_hidden = chunks[-1][0][-1]
        return VerifyOutput(
            self._head(last_hidden), torch.cat([features for _, features in chunks])
        )

    @torch.inference_mode()
    def verify(self, trees: Sequence[DraftTree | None]) -> VerifyOutput:
        """Logits and features of every node, as if its path alone followed its row's committed tokens. Commits nothing.

        One tree a row, None for a row to leave alone, whose results mean nothing.
        """
        assert len(trees) == len(self.lengths), "give one tree a row, None for an idle one"
        num_nodes = max((len(tree) for tree in trees if tree is not None), default=1)
        nodes = NodeBatch.of(trees, self.lengths, num_nodes, self._target.device)
        masks = {
            kind: layer.visible(nodes)[:, None]
            for kind, layer in zip(self._target.layer_types, self._layers, strict=True)
        }
        hidden, features = self._forward(nodes.tokens, nodes.positions, masks, self._cache)
        self._parents = [[] if tree is None else tree.parents.tolist() for tree in trees]
        return VerifyOutput(self._head(hidden), features)

    @torch.inference_mode()
    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Append one path of the last verified tree a row, root first, to its committed tokens; [] leaves a row alone."""
        assert len(paths) == len(self.lengths), "give one path a row, [] for an idle one"
        for path, parents in zip(paths, self._parents, strict=True):
            assert [parents[node] for node in path] == [-1, *path[:-1]][: len(path)], (
                "not a path from the root of the tree verified last"
            )
        batch = PathBatch.of(paths, self.lengths, 0, self._target.device)
        for layer in self._layers:
            layer.commit(batch)
        for row, count in enumerate(batch.counts):
            self._rows.lengths[row] += count
        self._parents = [[] for _ in paths]

    def _append(self, tokens: Tensor, row: int, cache: Cache) -> tuple[Tensor, Tensor]:
        """Last hidden states (n, H) and features (n, D, H) of prompt tokens (n,), which are committed."""
        start, count, device = self._rows.lengths[row], len(tokens), self._target.device
        masks = {
            kind: layer.visible_in_prompt(start, count, device)[None, None]
            for kind, layer in zip(self._target.layer_types, self._layers, strict=True)
        }
        positions = torch.arange(start, start + count, device=device)
        hidden, features = self._forward(tokens[None], positions[None], masks, cache)
        self._rows.lengths[row] += count
        return hidden[0], features[0]

    def _forward(
        self, tokens: Tensor, positions: Tensor, masks: dict[str, Tensor], cache: Cache
    ) -> tuple[Tensor, Tensor]:
        """Last hidden states (R, T, H) after the final norm, and features (R, T, D, H)."""
        tapped: dict[int, Tensor] = {}
        with tap_outputs(self._target, self._layer_ids, tapped.__setitem__):
            output = self._target.text_model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=self._as_argument(masks),
                use_cache=True,
                **{self._cache_argument: cache},
            )
        features = torch.stack([tapped[i] for i in self._layer_ids], dim=2)
        return output.last_hidden_state, features

    def _as_argument(self, masks: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Models with one type of layer take the tensor, models with several a dict; eager attention adds its mask."""
        if self._target.model.config._attn_implementation == "eager":
            masks = {kind: _additive(mask, self._target.dtype) for kind, mask in masks.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _head(self, hidden: Tensor) -> Tensor:
        head = self._target.model.get_output_embeddings()
        assert head is not None
        return head(hidden).to(self._target.device)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    lowest = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)


def _require_adapters(target: Target) -> None:
    for kind in target.layer_types:
        if kind not in LAYER_ADAPTERS:
            raise ValueError(
                f"target {target.model.config.model_type} has layers of type {kind!r}, which trees cannot be verified on; "
                f"known types: {', '.join(LAYER_ADAPTERS)}"
            )


def _require_mask(target: Target) -> None:
    attention = target.model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"target.attention={attention} takes no tree mask; load the target with attention sdpa or eager"
        )


def _cache_argument(text_model: nn.Module) -> str:
    """Renamed in transformers 5.2x; older ones know `past_key_values` only."""
    parameters = inspect.signature(text_model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
