"""Batched decoding of the frozen target, and the one sampling rule.

Shapes: B sequences, S sequence length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from target.cache import growing_cache
from target.load import Target


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""


def sampling_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution a token is drawn from, (..., V) float32.

    Temperature, then top-k, then top-p on what is left: a token stays if the probability before it, in descending order, is
    below top_p. At temperature 0 all mass is on the argmax.
    """
    if sampling.temperature == 0:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(
            -1, logits.argmax(-1, keepdim=True), 1.0
        )
    scores = logits.float()
    # the largest becomes 0: no temperature is so small that the quotient overflows
    scores = (scores - scores.amax(-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kept = scores.topk(sampling.top_k, dim=-1)
        scores = torch.full_like(scores, -torch.inf).scatter_(-1, kept.indices, kept.values)
    probs = scores.softmax(-1)
    if sampling.top_p < 1:
        ordered = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.values.cumsum(-1) - ordered.values
        kept_probs = ordered.values.masked_fill(before >= sampling.top_p, 0.0)
        probs = torch.zeros_like(probs).scatter_(-1, ordered.indices, kept_probs)
        probs /= probs.sum(-1, keepdim=True)
    return probs


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """One token for each row of logits (..., V) -> (...) int64: the argmax at temperature 0, else one draw."""
    if sampling.temperature == 0:
        return logits.max(-1).indices  # the argmax; a quarter of argmax's time in bf16 on a CPU
    probs = sampling_probs(logits, sampling)
    drawn = torch.multinomial(probs.flatten(0, -2), 1, generator=generator)
    return drawn.view(logits.shape[:-1])


@torch.inference_mode()
def generate_batch(
    target: Target,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """The response of each prompt: up to `max_new_tokens` tokens, ending with the EOS token if one was produced.

    Prompts are padded on the left and masked by length. Rows that have finished leave the batch.
    """
    batch = _Batch(target, prompts)
    responses: list[list[int]] = [[] for _ in prompts]
    tokens = batch.prefill(prompts)
    for step in range(max_new_tokens):
        chosen = choose(tokens, sampling, generator)
        ids = chosen.tolist()  # the only host sync of a step
        for row, token in zip(batch.rows, ids, strict=True):
            if row not in batch.finished:
                responses[row].append(token)
                if token in target.eos_token_ids:
                    batch.finished.add(row)
        if len(batch.finished) == len(prompts) or step + 1 == max_new_tokens:
            break
        chosen = batch.drop_finished(chosen)
        tokens = batch.decode(chosen)
    return responses


class _Batch:
    """The rows still decoded, with their KV cache and masks."""

    def __init__(self, target: Target, prompts: Sequence[list[int]]):
        assert all(prompts), "prompts must not be empty"
        self.target = target
        self.rows = list(range(len(prompts)))
        self.finished: set[int] = set()
        self.cache = growing_cache(target.model.config)
        self.lengths = torch.tensor([len(p) for p in prompts], device=target.device)
        longest = max(len(p) for p in prompts)
        self.mask = (
            torch.arange(longest, device=target.device) >= longest - self.lengths[:, None]
        )  # (B, S), true on real tokens

    def prefill(self, prompts: Sequence[list[int]]) -> Tensor:
        """Logits after the prompts, (B, V)."""
        longest = self.mask.shape[1]
        ids = torch.tensor(
            [[0] * (longest - len(p)) + p for p in prompts], device=self.target.device
        )
        positions = (self.mask.long().cumsum(-1) - 1).clamp_min(0)
        return self._forward(ids, positions)

    def decode(self, chosen: Tensor) -> Tensor:
        """Logits after one more token a row, chosen (B,) -> (B, V)."""
        self.mask = nn.functional.pad(self.mask, (0, 1), value=True)
        positions = self.lengths[:, None]
        self.lengths = self.lengths + 1
        return self._forward(chosen[:, None], positions)

    def drop_finished(self, chosen: Tensor) -> Tensor:
        """Take finished rows out of the batch once they are an eighth of it: dropping copies the whole cache."""
        keep = [i for i, row in enumerate(self.rows) if row not in self.finished]
        if 8 * (len(self.rows) - len(keep)) < len(self.rows):
            return chosen
        index = torch.tensor(keep, device=self.target.device)
        for layer in self.cache.layers:
            layer.reorder_cache(index)  # pyright: ignore[reportArgumentType] - HF says LongTensor
        self.rows = [self.rows[i] for i in keep]
        self.lengths, self.mask = self.lengths[index], self.mask[index]
        return chosen[index]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        output = self.target.text_model(
            input_ids=ids,
            attention_mask=self.mask.long(),
            position_ids=positions,
            cache=self.cache,
            use_cache=True,
        )
        last = output.last_hidden_state[:, -1].to(self.target.lm_head.device)  # (B, H)
        return nn.functional.linear(last, self.target.lm_head).to(self.target.device)
