"""The check at start: tree nodes and commits against plain forwards of their paths.

A transformers version that treats masks, positions, caches or module internals in another way fails here and not silently.
A tree of seven nodes has everything that can go wrong: siblings, a second child whose subtree is deeper than a convolution
of width 4, a commit of nodes that lie out of place, and a tree behind it. Two rows of different length when there are two.
It costs a few forwards of a dozen tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import transformers
from torch import Tensor

from ddtree.tree import DraftTree
from target.load import Target

_PROMPTS = ((1, 2, 3, 5), (4, 1))
_FIRST = ([6, 7, 8, 9, 10, 11, 12], [-1, 0, 0, 2, 3, 4, 1])
_ACCEPTED = [0, 2, 3]
_SECOND = ([13, 14, 15], [-1, 0, 0])


class _Output(Protocol):
    @property
    def logits(self) -> Tensor: ...


class Verifier(Protocol):
    """What is checked; `TreeVerifier` is one."""

    @property
    def lengths(self) -> list[int]: ...
    def prefill(self, input_ids: Tensor, row: int = 0) -> _Output: ...
    def verify(self, trees: Sequence[DraftTree | None]) -> _Output: ...
    def commit(self, paths: Sequence[Sequence[int]]) -> None: ...


@torch.inference_mode()
def check_against_plain_forward(verifier: Verifier, target: Target) -> None:
    """Raises ValueError if a node's logits are not those of its path. Leaves tokens in the rows it used."""
    num_rows = len(verifier.lengths)
    prompts = [torch.tensor(prompt) for prompt in _PROMPTS[:num_rows]]
    for row, prompt in enumerate(prompts):
        verifier.prefill(prompt, row)
    idle = [None] * (num_rows - len(prompts))
    first, second = _tree(*_FIRST), _tree(*_SECOND)
    found = verifier.verify([*(first for _ in prompts), *idle]).logits
    for row, prompt in enumerate(prompts):
        _check_nodes(target, prompt, first, found[row])
    verifier.commit([*(_ACCEPTED for _ in prompts), *([] for _ in idle)])
    found = verifier.verify([*(second for _ in prompts), *idle]).logits
    for row, prompt in enumerate(prompts):
        _check_nodes(target, torch.cat([prompt, first.tokens[_ACCEPTED]]), second, found[row])


def _tree(tokens: list[int], parents: list[int]) -> DraftTree:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return DraftTree(
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents),
        depths=torch.tensor(depths),
        child_ranks=torch.tensor([parents[:node].count(p) for node, p in enumerate(parents)]),
        log_probs=torch.zeros(len(tokens)),
    )


def _check_nodes(target: Target, before: Tensor, tree: DraftTree, logits: Tensor) -> None:
    """One plain forward a leaf: it gives the logits of all its ancestors."""
    parents = tree.parents.tolist()
    for leaf in set(range(len(tree))) - set(parents):
        path = tree.path(leaf)
        ids = torch.cat([before, tree.tokens[path]]).to(target.device)
        plain = target.model(input_ids=ids[None], use_cache=False).logits[0, -len(path) :]
        _require_close(target, logits[path], plain.to(logits))


def _require_close(target: Target, found: Tensor, plain: Tensor) -> None:
    error = float(((found - plain).norm(dim=-1) / plain.norm(dim=-1)).max())
    # rounding stays far below, a wrong mask, position or state far above
    allowed = max(1e-3, torch.finfo(target.dtype).eps ** 0.5)
    if not error <= allowed:
        raise ValueError(
            f"target {target.model.config.model_type} under transformers {transformers.__version__}: a tree node's "
            f"logits differ from a plain forward of its path by {error:.1e} (allowed {allowed:.1e}); install the "
            "transformers version of the constraints file, or choose another target"
        )
