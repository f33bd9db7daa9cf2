"""Live decoding of one prompt: plain, with the drafter's chain, or with its tree.

    r_0 = prefill(prompt)                                   prefill's token, the first anchor
    repeat: draft a block from the anchor -> tree -> one verify pass -> walk -> commit the accepted path;
            emit the accepted tokens and the bonus token, which is the next anchor

The drafter's context holds exactly the committed tokens, so it always ends strictly before the anchor.
Shapes: S prompt tokens, K block size, D taps, H hidden, V vocabulary, T tree nodes with root, M children kept a slot.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddtree.build import build_tree
from ddtree.tree import DraftTree, chain_tree
from ddtree.verify import TreeVerifier
from ddtree.walk import Accepted, walk_tree
from drafter.cache import ContextCache, draft
from drafter.head import sparse_log_probs
from drafter.model import Drafter, block_embeddings
from target.generate import Sampling, choose
from target.head import TargetHead

STAGES = ("draft", "build", "verify", "commit", "rest")
"""Where decoding time goes, after prefill."""


@dataclass(frozen=True)
class Acceptor:
    """How drafts become a tree. `budget` counts nodes without the root; None for plain and chain."""

    name: str
    budget: int | None = None

    @property
    def key(self) -> str:
        """`plain`, `chain`, `tree-64`."""
        return self.name if self.budget is None else f"{self.name}-{self.budget}"


PLAIN = Acceptor("plain")
CHAIN = Acceptor("chain")


def tree_acceptor(budget: int) -> Acceptor:
    return Acceptor("tree", budget)


@dataclass(frozen=True)
class DecodeSettings:
    max_new_tokens: int
    """Of the whole response, prefill's token included."""
    eos_token_ids: tuple[int, ...]
    """The response ends with the first of these."""
    sampling: Sampling
    drafter_temperature: float = 1.0
    seed: int = 0
    """Of the target's samples; greedy decoding draws none."""


@dataclass(frozen=True)
class PassRecord:
    """One verify pass: the anchor's index in the response, the tree, and what the walk accepted before any cut."""

    anchor: int
    tree: DraftTree
    accepted: Accepted
    num_emitted: int


@dataclass(frozen=True)
class Decoded:
    """A response r_0..r_n and how it came about; `sum(passes) == len(tokens) - 1`."""

    tokens: list[int]
    passes: list[int]
    seconds: dict[str, float]
    """Per stage of STAGES; `prefill` (the drafter's share included) stands beside them and is in no speed."""
    records: list[PassRecord]

    @property
    def decode_seconds(self) -> float:
        return sum(self.seconds[stage] for stage in STAGES)


@torch.no_grad()
def decode_plain(verifier: TreeVerifier, prompt: Tensor, settings: DecodeSettings) -> Decoded:
    """The target alone, a token a pass: the reference of losslessness and of speed. prompt: (S,) int64, on its device."""
    return _decode(verifier, None, prompt, PLAIN, settings)


@torch.no_grad()
def decode_with_tree(
    verifier: TreeVerifier,
    drafter: Drafter,
    head: TargetHead,
    prompt: Tensor,
    acceptor: Acceptor,
    settings: DecodeSettings,
) -> Decoded:
    """Speculative decoding; its output has the distribution of `decode_plain`'s, and equals it when greedy.

    Source: DFlash blocks, verified as a DDTree (arXiv:2604.12989).
    """
    max_tokens = len(prompt) + settings.max_new_tokens + drafter.config.block_size
    proposer = _Proposer(drafter, head, settings.drafter_temperature, max_tokens)
    return _decode(verifier, proposer, prompt, acceptor, settings)


def _decode(
    verifier: TreeVerifier,
    proposer: _Proposer | None,
    prompt: Tensor,
    acceptor: Acceptor,
    settings: DecodeSettings,
) -> Decoded:
    generator = torch.Generator(prompt.device).manual_seed(settings.seed)
    clock = _StageClock(prompt.device)
    with clock("prefill"):
        output = verifier.prefill(prompt)
        if proposer is not None:
            proposer.append(output.features)
        tokens = [int(choose(output.logits[None], settings.sampling, generator)[0])]
    records: list[PassRecord] = []
    start = time.perf_counter()
    while len(tokens) < settings.max_new_tokens and tokens[-1] not in settings.eos_token_ids:
        tree = _propose(proposer, acceptor, tokens[-1], clock)
        with clock("verify"):
            output = verifier.verify([tree])
            # one token a node from the target's distribution there; the walk uses those on its way
            choices = choose(output.logits[0], settings.sampling, generator).cpu()
        accepted = walk_tree(tree, choices)
        with clock("commit"):
            verifier.commit([accepted.nodes])
        if proposer is not None:
            with clock("draft"):
                proposer.append(output.features[0, accepted.nodes])
        found = [int(tree.tokens[node]) for node in accepted.nodes[1:]] + [accepted.bonus]
        emitted = cut(found, settings.max_new_tokens - len(tokens), settings.eos_token_ids)
        records.append(PassRecord(len(tokens) - 1, tree, accepted, len(emitted)))
        tokens += emitted
    seconds = clock.totals(time.perf_counter() - start)
    return Decoded(tokens, [record.num_emitted for record in records], seconds, records)


def cut(tokens: Sequence[int], room: int, eos_token_ids: Sequence[int]) -> list[int]:
    """`tokens` up to the first EOS, which stays, and at most `room` of them."""
    kept = list(tokens[:room])
    ends = [index for index, token in enumerate(kept) if token in eos_token_ids]
    return kept[: ends[0] + 1] if ends else kept


def _propose(
    proposer: _Proposer | None, acceptor: Acceptor, anchor: int, clock: _StageClock
) -> DraftTree:
    if proposer is None:
        return chain_tree(torch.tensor([anchor]))
    with clock("draft"):
        log_probs, ids = proposer.block(anchor, acceptor.budget or 1)
    with clock("build"):
        if acceptor.budget is None:
            return chain_tree(torch.cat([torch.tensor([anchor]), ids[:, 0]]))
        return build_tree(anchor, log_probs, ids, acceptor.budget)


class _Proposer:
    """The drafter with its context cache: features of committed tokens in, the next block's slot distributions out."""

    def __init__(self, drafter: Drafter, head: TargetHead, temperature: float, max_tokens: int):
        self.drafter, self.head, self.temperature = drafter, head, temperature
        self.dtype = drafter.fc.weight.dtype
        self.cache = ContextCache(drafter, max_tokens)

    def append(self, features: Tensor) -> None:
        """features: (n, D, H) of the n tokens just committed."""
        self.cache.append([features.to(self.dtype)])

    def block(self, anchor: int, num_children: int) -> tuple[Tensor, Tensor]:
        """Log-probs and ids of the M = min(num_children, V) likeliest tokens of slots 1..K-1, (K-1, M) each, on the CPU."""
        config = self.drafter.config
        tokens = torch.tensor([[anchor]], device=self.head.embedding.device)
        embeddings = block_embeddings(
            self.head.embedding, tokens, config.mask_token_id, config.block_size
        )[0]  # (1, K, H)
        hidden = draft(self.drafter, self.cache, embeddings.to(self.dtype))[0, 1:]  # (K-1, H)
        found = sparse_log_probs(
            hidden,
            self.head.head,
            torch.empty(len(hidden), 0, dtype=torch.int64, device=hidden.device),
            top_k=min(num_children, len(self.head.head)),
            temperature=self.temperature,
        )
        assert found.top_log_probs is not None
        assert found.top_ids is not None
        return found.top_log_probs.cpu(), found.top_ids.cpu()


@dataclass
class _StageClock:
    """Wall seconds a stage; the device is waited for on both sides, so that work is charged to whom it belongs."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def totals(self, decode_seconds: float) -> dict[str, float]:
        """All stages, `rest` being what decoding spent outside the named ones."""
        named = {stage: self.seconds.get(stage, 0.0) for stage in ("prefill", *STAGES[:-1])}
        spent = sum(named[stage] for stage in STAGES[:-1])
        return {**named, "rest": max(decode_seconds - spent, 0.0)}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
