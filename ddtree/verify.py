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

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ddtree.adapters import LayerAdapter, Rows
from ddtree.layers import make_layers, verify_cache
from ddtree.merged_attention import MERGE_FROM, merging
from ddtree.nodes import NODE_COUNTS, NodeBatch, PathBatch
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
        node_counts: Sequence[int] | None = None,
    ):
        """`prefill_tokens`: prompt tokens a forward. `node_counts`: sizes that trees are padded to, so that shapes repeat;
        None pads on a GPU only. Raises ValueError for a target that cannot be verified by a tree.
        """
        assert num_sequences > 0
        _require_mask(target)
        self._target, self._layer_ids = target, tuple(layer_ids)
        self._prefill_tokens = prefill_tokens
        on_gpu = target.device.type == "cuda"
        self._node_counts = tuple(node_counts or (NODE_COUNTS if on_gpu else ()))
        self._rows = Rows([0] * num_sequences)
        self._rope_deltas = [0] * num_sequences  # position of a row's next token, less its length
        self._layers, self._delta_nets = make_layers(target, self._rows)
        self._num_columns = max((group.num_columns for group in self._delta_nets), default=0)
        self._cache = verify_cache(self._layers)
        self._cache_argument = _cache_argument(target.text_model)
        self._parents: list[list[int]] = [[] for _ in self.lengths]  # of the nodes verified last
        self._nodes_from = 0  # their first place in the caches
        can_merge = _attention(target) == "sdpa" and "full_attention" in target.layer_types
        for merge_from in (MERGE_FROM, 1) if can_merge else (sys.maxsize,):
            self._merge_from = merge_from
            check_against_plain_forward(self, target)
        self._merge_from = MERGE_FROM if can_merge else sys.maxsize
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
        return self._prefill(row, "input_ids", input_ids, torch.arange(len(input_ids)))

    @torch.inference_mode()
    def prefill_embedded(self, embeddings: Tensor, positions: Tensor, row: int = 0) -> VerifyOutput:
        """The same for a prompt with images: embeddings (S, H) and M-RoPE positions (3, S), as the target's own code makes
        them. Text goes on after the largest position, whatever the number of tokens.
        """
        assert embeddings.ndim == 2
        assert positions.shape == (3, len(embeddings))
        delta = int(positions.max()) + 1 - len(embeddings)
        return self._prefill(row, "inputs_embeds", embeddings, positions, delta)

    @torch.inference_mode()
    def verify(self, trees: Sequence[DraftTree | None]) -> VerifyOutput:
        """Logits and features of every node, as if its path alone followed its row's committed tokens. Commits nothing.

        One tree a row, None for a row to leave alone, whose results mean nothing.
        """
        assert len(trees) == len(self.lengths), "give one tree a row, None for an idle one"
        largest = max((len(tree) for tree in trees if tree is not None), default=1)
        num_nodes = min((n for n in self._node_counts if n >= largest), default=largest)
        nodes = NodeBatch.of(trees, self.lengths, self._rope_deltas, num_nodes, self._target.device)
        inputs: dict[str, Any] = {"input_ids": nodes.tokens}
        with contextlib.ExitStack() as stack:
            for group in self._delta_nets:
                stack.enter_context(group.under_tree(nodes))
            # one query is packed by transformers itself
            merges = num_nodes > 1 and self._rows.longest >= self._merge_from
            if merges:
                stack.enter_context(merging(self._target.text_model.config))
                inputs["committed_lengths"] = nodes.lengths
            masks = self._masks(
                lambda layer: (
                    nodes.ancestors if merges and layer.sees_all_committed else layer.visible(nodes)
                )
            )
            hidden, features = self._forward(inputs, nodes.rope_positions, masks, self._cache)
        self._parents = [[] if tree is None else tree.parents.tolist() for tree in trees]
        self._nodes_from = self._rows.longest  # a prompt may come in between
        return VerifyOutput(self._head(hidden), features)

    @torch.inference_mode()
    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Append one path of the last verified tree a row, root first, to its committed tokens; [] leaves a row alone."""
        assert len(paths) == len(self.lengths), "give one path a row, [] for an idle one"
        for path, parents in zip(paths, self._parents, strict=True):
            assert [parents[node] for node in path] == [-1, *path[:-1]][: len(path)], (
                "not a path from the root of the tree verified last"
            )
        batch = PathBatch.of(
            paths, self.lengths, self._nodes_from, self._num_columns, self._target.device
        )
        for layer in self._layers:
            layer.commit(batch)
        for group in self._delta_nets:
            group.commit(batch)
        for row, path in enumerate(paths):
            self._rows.lengths[row] += len(path)
        self._parents = [[] for _ in paths]

    def _prefill(
        self, row: int, name: str, inputs: Tensor, positions: Tensor, rope_delta: int = 0
    ) -> VerifyOutput:
        """inputs (S, ...) under the model's argument `name`, positions (S,) or (3, S)."""
        device = self._target.device
        inputs, positions = inputs.to(device), positions.to(device)
        self._rows.lengths[row], self._rope_deltas[row], self._parents[row] = 0, rope_delta, []
        views = [layer.row_view(row) for layer in self._layers]
        cache, hidden, features = Cache(layers=list(views)), inputs, []
        for start in range(0, len(inputs), self._prefill_tokens):
            part = slice(start, start + self._prefill_tokens)
            count = len(inputs[part])
            masks = self._masks(
                lambda layer, s=start, n=count: layer.visible_in_prompt(s, n, device)
            )
            hidden, tapped = self._forward(
                {name: inputs[None, part]}, positions[..., None, part], masks, cache
            )
            features.append(tapped[0])
        for layer, view in zip(self._layers, views, strict=True):
            layer.end_prompt(row, view)
        self._rows.lengths[row] = len(inputs)
        return VerifyOutput(self._head(hidden[0, -1]), torch.cat(features))

    def _masks(self, of_layer: Callable[[LayerAdapter], Tensor | None]) -> dict[str, Tensor | None]:
        """One a layer type, (R, 1, T, keys), where a batch of one may lack its dimension."""
        one_of_each = dict(zip(self._target.layer_types, self._layers, strict=True))
        masks = {}
        for kind, layer in one_of_each.items():
            mask = of_layer(layer)
            masks[kind] = None if mask is None else mask.view(-1, 1, *mask.shape[-2:])
        return masks

    def _forward(
        self,
        inputs: dict[str, Any],
        positions: Tensor,
        masks: dict[str, Tensor | None],
        cache: Cache,
    ) -> tuple[Tensor, Tensor]:
        """Last hidden states (R, T, H) after the final norm, and features (R, T, D, H)."""
        tapped: dict[int, Tensor] = {}
        with tap_outputs(self._target, self._layer_ids, tapped.__setitem__):
            output = self._target.text_model(
                **inputs,
                position_ids=positions,
                attention_mask=self._as_argument(masks),
                use_cache=True,
                **{self._cache_argument: cache},
            )
        features = torch.stack([tapped[i] for i in self._layer_ids], dim=2)
        return output.last_hidden_state, features

    def _as_argument(
        self, masks: dict[str, Tensor | None]
    ) -> Tensor | dict[str, Tensor | None] | None:
        """Models with one type of layer take the tensor, models with several a dict; eager attention adds its mask."""
        if _attention(self._target) == "eager":
            masks = {kind: _additive(mask, self._target.dtype) for kind, mask in masks.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _head(self, hidden: Tensor) -> Tensor:
        head = self._target.model.get_output_embeddings()
        assert head is not None
        return head(hidden).to(self._target.device)


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    lowest = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)


def _require_mask(target: Target) -> None:
    attention = _attention(target)
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"target.attention={attention} takes no tree mask; load the target with attention sdpa or eager"
        )


def _attention(target: Target) -> str | None:
    return target.text_model.config._attn_implementation


def _cache_argument(text_model: nn.Module) -> str:
    """Renamed in transformers 5.2x; older ones know `past_key_values` only."""
    parameters = inspect.signature(text_model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
