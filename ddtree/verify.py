"""One target forward over a whole draft tree, read-only, and the commit of the accepted path.

    verifier = TreeVerifier(target, layer_ids)
    output = verifier.prefill(prompt)             # logits after the prompt; its argmax is the first anchor
    output = verifier.verify(tree)                # logits after every node; nothing is committed
    verifier.commit(walk_tree(tree, output.logits.argmax(-1)).nodes)

Plain decoding is a tree of one node: verify(chain_tree(token)), commit([0]).

S prompt tokens, T tree nodes with root, D taps, H hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from transformers import Cache

from ddtree.adapters import LAYER_ADAPTERS, AcceptedPath, VerifyNodes
from ddtree.tree import DraftTree, chain_tree
from target.load import Target
from target.taps import tap_outputs


@dataclass(frozen=True, eq=False)
class VerifyOutput:
    logits: Tensor
    """(T, V) after each node; (V,) after the prompt. Target dtype."""
    features: Tensor
    """(T, D, H) of the nodes, or (S, D, H) of the prompt, taps in the order asked for."""


class TreeVerifier:
    """The target with one sequence's cache, `length` tokens of it committed."""

    def __init__(self, target: Target, layer_ids: Sequence[int], prefill_tokens: int = 1024):
        """`prefill_tokens`: prompt tokens a forward. Raises ValueError for a target that cannot be verified by a tree."""
        config = target.model.config.get_text_config()
        _require_adapters(target)
        _require_mask(target)
        self._target, self._layer_ids, self._prefill_tokens = (
            target,
            tuple(layer_ids),
            prefill_tokens,
        )
        self._layers = [LAYER_ADAPTERS[kind](config) for kind in target.layer_types]
        self._cache = Cache(layers=list(self._layers))
        self._cache_argument = _cache_argument(target.text_model)
        self._parents: list[int] = []  # of the nodes that lie behind the committed tokens
        self._check_against_plain_forward()

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self._layers[0].length

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor) -> VerifyOutput:
        """Start a new sequence with the prompt (S,) int64 committed: logits of its last position, features of all."""
        if input_ids.ndim != 1 or input_ids.shape[0] == 0:
            raise ValueError(
                f"input_ids has shape {tuple(input_ids.shape)}; give one prompt of at least one token"
            )
        for layer in self._layers:
            layer.start_sequence()
        chunks = [self._append(tokens) for tokens in input_ids.split(self._prefill_tokens)]
        last_hidden = chunks[-1][0][-1]
        return VerifyOutput(
            self._head(last_hidden), torch.cat([features for _, features in chunks])
        )

    @torch.inference_mode()
    def verify(self, tree: DraftTree) -> VerifyOutput:
        """Logits and features of every node, as if its path alone followed the committed tokens. Commits nothing."""
        hidden, features = self._forward(tree)
        return VerifyOutput(self._head(hidden), features)

    @torch.inference_mode()
    def commit(self, nodes: list[int]) -> None:
        """Append a path of the last verified tree, root first, to the committed tokens."""
        assert nodes, "an accepted path holds at least the root"
        assert [self._parents[node] for node in nodes] == [-1, *nodes[:-1]], (
            "not a path from the root"
        )
        path = AcceptedPath.of(nodes, self._target.device)
        for layer in self._layers:
            layer.commit(path)
        self._parents = []

    def _append(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Forward and commit tokens as a chain."""
        outputs = self._forward(chain_tree(tokens))
        self.commit(list(range(len(tokens))))
        return outputs

    def _forward(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """Last hidden states (T, H) after the final norm, and features (T, D, H)."""
        device = self._target.device
        nodes = VerifyNodes(self.length, tree.depths.to(device), tree.ancestors().to(device))
        tapped: dict[int, Tensor] = {}
        with tap_outputs(self._target, self._layer_ids, tapped.__setitem__):
            output = self._target.text_model(
                input_ids=tree.tokens.to(device)[None],
                position_ids=(nodes.past + nodes.depths)[None],
                attention_mask=self._masks(nodes),
                use_cache=True,
                **{self._cache_argument: self._cache},
            )
        self._parents = tree.parents.tolist()
        features = torch.stack([tapped[i][0] for i in self._layer_ids], dim=1)
        return output.last_hidden_state[0], features

    def _masks(self, nodes: VerifyNodes) -> Tensor | dict[str, Tensor]:
        """(1, 1, T, keys) a layer type. Models with one type take the tensor, models with several a dict."""
        of_type = dict(zip(self._target.layer_types, self._layers, strict=True))
        masks = {kind: self._mask(layer.visible(nodes)) for kind, layer in of_type.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, visible: Tensor) -> Tensor:
        if self._target.model.config._attn_implementation == "sdpa":
            return visible[None, None]
        lowest = torch.finfo(self._target.dtype).min
        mask = torch.zeros(visible.shape, dtype=self._target.dtype, device=visible.device)
        return mask.masked_fill_(~visible, lowest)[None, None]

    def _head(self, hidden: Tensor) -> Tensor:
        head = self._target.model.get_output_embeddings()
        assert head is not None
        return head(hidden).to(self._target.device)

    @torch.inference_mode()
    def _check_against_plain_forward(self) -> None:
        """Two children of one root, the second committed, one token more: each must see exactly its own path.

        A transformers version that treats masks, positions or the cache in another way fails here and not silently.
        """
        prompt, tree = torch.tensor([1, 2, 3, 5]), _three_nodes()
        self.prefill(prompt)
        found = list(self.verify(tree).logits)
        self.commit([0, 2])
        found += list(self.verify(chain_tree(torch.tensor([9]))).logits)
        tails = [[6], [6, 7], [6, 8], [6, 8, 9]]
        for logits, tail in zip(found, tails, strict=True):
            self._require_close(logits, torch.cat([prompt, torch.tensor(tail)]))
        for layer in self._layers:
            layer.start_sequence()

    def _require_close(self, logits: Tensor, path: Tensor) -> None:
        ids = path.to(self._target.device)[None]
        plain = self._target.model(input_ids=ids, use_cache=False).logits[0, -1].to(logits)
        error = float((logits - plain).norm() / plain.norm())
        # rounding stays far below, a wrong mask or position far above
        allowed = max(1e-3, torch.finfo(self._target.dtype).eps ** 0.5)
        if not error <= allowed:
            raise ValueError(
                f"target {self._target.model.config.model_type} under transformers {transformers.__version__}: a tree node's "
                f"logits differ from a plain forward of its path by {error:.1e} (allowed {allowed:.1e}); install the "
                "transformers version of the constraints file, or choose another target"
            )


def _three_nodes() -> DraftTree:
    return DraftTree(
        tokens=torch.tensor([6, 7, 8]),
        parents=torch.tensor([-1, 0, 0]),
        depths=torch.tensor([0, 1, 1]),
        child_ranks=torch.tensor([0, 0, 1]),
        log_probs=torch.zeros(3),
    )


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
