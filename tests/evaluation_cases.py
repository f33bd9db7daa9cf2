"""Tiny drafters that are right now and then: trained for a second on the target's own greedy answers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from configs.schema import Config
from data.features import FeatureRow
from ddtree.verify import TreeVerifier
from drafter.config import drafter_config
from drafter.model import BlockLayout, Drafter, block_embeddings
from evaluation.decoded import DecodeSettings
from evaluation.parity import record_row
from target.generate import Sampling, generate_batch, sampling_probs
from target.head import TargetHead
from target.load import Target

GREEDY = Sampling()
MAX_NEW_TOKENS = 24


@dataclass(frozen=True)
class Case:
    """A target, a drafter that drafts some of its tokens right, and greedy records with float32 features."""

    target: Target
    verifier: TreeVerifier
    drafter: Drafter
    head: TargetHead
    prompts: list[list[int]]
    records: list[list[int]]
    rows: list[FeatureRow]

    def settings(self, **changes: object) -> DecodeSettings:
        values = {"max_new_tokens": MAX_NEW_TOKENS, "eos_token_ids": self.target.eos_token_ids}
        return DecodeSettings(**{**values, "sampling": GREEDY, **changes})  # pyright: ignore[reportArgumentType]

    def ids(self, index: int) -> torch.Tensor:
        return torch.tensor(self.prompts[index])


def make_case(config: Config, target: Target, num_prompts: int = 6, steps: int = 60) -> Case:
    """Prompts of 1 to 11 tokens; `steps` of plain cross-entropy on their records (0: a random drafter)."""
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(0, 256, (1 + 2 * index,), generator=generator).tolist()
        for index in range(num_prompts)
    ]
    records = generate_batch(target, prompts, MAX_NEW_TOKENS, GREEDY)
    taps = config.drafter.target_layer_ids
    rows = [
        record_row(target, taps, prompt, record, f"prompt-{index}", f"task-{index % 2}")
        for index, (prompt, record) in enumerate(zip(prompts, records, strict=True))
    ]
    torch.manual_seed(0)
    drafter = Drafter(drafter_config(config))
    head = TargetHead(target.embed_tokens, target.lm_head)
    if steps:
        _train(drafter, head, rows, steps)
    verifier = TreeVerifier(target, taps)
    return Case(target, verifier, drafter.eval(), head, prompts, records, rows)


def _train(drafter: Drafter, head: TargetHead, rows: list[FeatureRow], steps: int) -> None:
    rows = [row for row in rows if int(row.loss_mask.sum()) > 2 * drafter.config.block_size]
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for step in range(steps):
        row = rows[step % len(rows)]
        loss = _cross_entropy(drafter, head, row)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _cross_entropy(drafter: Drafter, head: TargetHead, row: FeatureRow) -> torch.Tensor:
    size, length = drafter.config.block_size, len(row.input_ids)
    first = int(row.loss_mask.int().argmax())
    positions = torch.arange(first, length - size)
    labels = row.input_ids[positions[:, None] + torch.arange(1, size)]
    layout = BlockLayout(
        torch.arange(length)[None],
        torch.zeros(1, length, dtype=torch.int64),
        positions[None],
        torch.zeros_like(positions)[None],
    )
    blocks = block_embeddings(
        head.embedding, row.input_ids[positions][None], drafter.config.mask_token_id, size
    )
    hidden = drafter(row.features.clone()[None], blocks, layout)[0, :, 1:]
    return cross_entropy((hidden @ head.head.T).flatten(0, 1), labels.flatten())


def continuations(
    target: Target, prompt: list[int], sampling: Sampling, length: int
) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `length` tokens, from plain forwards."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown = {}
        for tokens, mass in found.items():
            with torch.no_grad():
                ids = torch.tensor([[*prompt, *tokens]])
                probs = sampling_probs(target.model(input_ids=ids).logits[0, -1], sampling)
            for token in probs.nonzero().flatten().tolist():
                grown[(*tokens, token)] = mass * float(probs[token])
        found = grown
    return found
