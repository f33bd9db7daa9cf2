"""Who proposes: features of committed tokens in, the slot distributions of the next block out, for several rows at once.

Decoding sees a Proposer only, so the tests put one in its place that knows the answer.
Shapes: R rows, K block size, L = K-1 slots, D taps, H hidden, V vocabulary, M children kept a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from drafter.cache import ContextCache, draft
from drafter.head import sparse_log_probs
from drafter.model import Drafter, block_embeddings
from target.head import TargetHead


class Proposer(Protocol):
    def start(self, row: int, features: Tensor) -> None:
        """A new sequence in `row`; features: (S, D, H) of its prompt."""
        ...

    def append(self, row_features: Sequence[Tensor | None]) -> None:
        """Features (n, D, H) of the tokens just committed in each row, None for an idle one."""
        ...

    def top(self, anchors: Sequence[int], num_children: int) -> tuple[Tensor, Tensor]:
        """Log-probs float32 and ids int64 of the M = min(num_children, V) likeliest tokens of each slot, falling, (R, L, M)
        on the CPU. anchors: one token a row, anything for an idle one."""
        ...

    def probs(self, anchors: Sequence[int]) -> Tensor:
        """The slots' whole distributions, (R, L, V) float32 on the device."""
        ...


class DrafterProposer:
    """The drafter with its context cache, which holds exactly the committed tokens: it ends strictly before the anchor."""

    def __init__(
        self,
        drafter: Drafter,
        head: TargetHead,
        temperature: float | Sequence[float],
        max_tokens: int,
        num_sequences: int = 1,
    ):
        """temperature: of all slots, or one a slot; max_tokens: of the longest row, its last block included."""
        config, device = drafter.config, head.head.device
        self._drafter, self._head = drafter, head
        self._cache = ContextCache(drafter, max_tokens, num_sequences)
        slots = slot_temperatures(temperature, config.block_size - 1).to(device)
        self._temperature = slots.repeat(num_sequences)  # (R*L,)
        self._nothing = torch.empty(len(self._temperature), 0, dtype=torch.int64, device=device)

    def start(self, row: int, features: Tensor) -> None:
        self._cache.start(row)
        given: list[Tensor | None] = [None] * len(self._cache.lengths)
        given[row] = features
        self.append(given)

    def append(self, row_features: Sequence[Tensor | None]) -> None:
        weight = self._drafter.fc.weight
        self._cache.append([None if x is None else x.to(weight) for x in row_features])

    def top(self, anchors: Sequence[int], num_children: int) -> tuple[Tensor, Tensor]:
        found = sparse_log_probs(
            self._hidden(anchors),
            self._head.head,
            self._nothing,
            top_k=min(num_children, len(self._head.head)),
            temperature=self._temperature,
        )
        assert found.top_log_probs is not None
        assert found.top_ids is not None
        # both are exact in float64: one transfer for the two
        both = torch.stack([found.top_log_probs.double(), found.top_ids.double()]).cpu()
        log_probs, ids = both.unflatten(1, (len(anchors), -1))
        return log_probs.float(), ids.long()

    def probs(self, anchors: Sequence[int]) -> Tensor:
        logits = (self._hidden(anchors).to(self._head.head.dtype) @ self._head.head.T).float()
        return (logits / self._temperature[:, None]).softmax(-1).unflatten(0, (len(anchors), -1))

    def _hidden(self, anchors: Sequence[int]) -> Tensor:
        """(R*L, H) of slots 1..K-1."""
        config, embedding = self._drafter.config, self._head.embedding
        tokens = torch.tensor([anchors], device=embedding.device)  # (1, R)
        blocks = block_embeddings(embedding, tokens, config.mask_token_id, config.block_size)[0]
        blocks = blocks.to(self._drafter.fc.weight.dtype)
        return draft(self._drafter, self._cache, blocks)[:, 1:].flatten(0, 1)


def slot_temperatures(temperature: float | Sequence[float], num_slots: int) -> Tensor:
    """(L,) float32, one a slot. Raises ValueError if there are not `num_slots` or one is not positive."""
    given = [temperature] * num_slots if isinstance(temperature, float | int) else temperature
    if len(given) != num_slots or not all(value > 0 for value in given):
        raise ValueError(
            f"drafter temperatures {list(given)}: give one positive number, or one for each of {num_slots} slots"
        )
    return torch.tensor(given, dtype=torch.float32)
