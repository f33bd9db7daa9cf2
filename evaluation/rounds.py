"""The rounds of decoding: rows that each hold a prompt, draft together, are verified together, and take the next prompt.

R rows, S prompt tokens, L = K-1 slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddtree.tree import DraftTree, chain_tree
from ddtree.verify import TreeVerifier
from ddtree.walk import Accepted
from evaluation.acceptors import CHAIN_REJECTION, Acceptor, draft_tree
from evaluation.clock import STAGES, StageClock
from evaluation.decoded import Decoded, DecodeSettings, PassRecord
from evaluation.drafting import Proposer
from evaluation.walks import draw_chains, walk_rows, walk_rows_by_rejection
from target.generate import choose


def cut(tokens: Sequence[int], room: int, eos_token_ids: Sequence[int]) -> list[int]:
    """`tokens` up to the first EOS, which stays, and at most `room` of them."""
    kept = list(tokens[:room])
    ends = [index for index, token in enumerate(kept) if token in eos_token_ids]
    return kept[: ends[0] + 1] if ends else kept


@dataclass
class _Sequence:
    """One prompt being decoded in a row."""

    index: int
    tokens: list[int]
    generator: torch.Generator
    seconds: dict[str, float]
    records: list[PassRecord] = field(default_factory=list)

    def decoded(self) -> Decoded:
        passes = [record.num_emitted for record in self.records]
        seconds = dict.fromkeys(STAGES, 0.0) | self.seconds
        return Decoded(self.tokens, passes, seconds, self.records)


class Rounds:
    """The rows of the verifier, the prompts that wait, and the responses that are done."""

    def __init__(
        self,
        verifier: TreeVerifier,
        proposer: Proposer | None,
        acceptor: Acceptor,
        settings: DecodeSettings,
        prompts: Sequence[Tensor],
        seeds: Sequence[int],
    ):
        self.verifier, self.proposer = verifier, proposer
        self.acceptor, self.settings = acceptor, settings
        self.waiting = list(enumerate(zip(prompts, seeds, strict=True)))[::-1]
        self.rows: list[_Sequence | None] = [None] * len(verifier.lengths)
        self.done: dict[int, Decoded] = {}
        self.clock = StageClock(prompts[0].device)

    def fill(self) -> bool:
        """Give idle rows the next prompts; False when nothing is left to decode."""
        for row in range(len(self.rows)):
            while self.rows[row] is None and self.waiting:
                self.rows[row] = self._start(row)
                self._retire(row)
        return any(sequence is not None for sequence in self.rows)

    def run_round(self) -> None:
        """One block, one verify pass and one commit for every row that is being decoded."""
        self.clock.lap()
        trees, drafter_probs = self._propose()
        with self.clock("verify"):
            output = self.verifier.verify(trees)
        accepted = self._walk(trees, drafter_probs, output.logits)
        paths = [found.nodes if found else [] for found in accepted]
        with self.clock("commit"):
            self.verifier.commit(paths)
        if self.proposer is not None:
            with self.clock("draft"):
                features = output.features
                self.proposer.append([features[r, p] if p else None for r, p in enumerate(paths)])
        for sequence, tree, found in zip(self.rows, trees, accepted, strict=True):
            if sequence and tree and found:
                self._emit(sequence, tree, found)
        self._charge()
        for row in range(len(self.rows)):
            self._retire(row)

    def _start(self, row: int) -> _Sequence:
        index, (prompt, seed) = self.waiting.pop()
        generator = torch.Generator(prompt.device).manual_seed(seed)
        self.clock.lap()
        with self.clock("prefill"):
            output = self.verifier.prefill(prompt, row)
            if self.proposer is not None:
                self.proposer.start(row, output.features)
            first = int(choose(output.logits[None], self.settings.sampling, generator)[0])
        return _Sequence(index, [first], generator, {"prefill": self.clock.total("prefill")})

    def _propose(self) -> tuple[list[DraftTree | None], Tensor | None]:
        """A tree a row, and for chain_rejection the distributions (R, L, V) that its tokens were drawn from."""
        anchors = [sequence.tokens[-1] if sequence else 0 for sequence in self.rows]
        if self.proposer is None:
            return [
                chain_tree(torch.tensor([anchor])) if sequence else None
                for sequence, anchor in zip(self.rows, anchors, strict=True)
            ], None
        if self.acceptor == CHAIN_REJECTION:
            with self.clock("draft"):
                probs = self.proposer.probs(anchors)
            with self.clock("build"):
                return draw_chains(anchors, probs, self._generators()), probs
        with self.clock("draft"):
            log_probs, ids = self.proposer.top(anchors, self.acceptor.budget or 1)
        with self.clock("build"):
            return [
                draft_tree(
                    self.acceptor, anchors[row], log_probs[row], ids[row], self.settings.cost
                )
                if sequence
                else None
                for row, sequence in enumerate(self.rows)
            ], None

    def _walk(
        self, trees: Sequence[DraftTree | None], drafter_probs: Tensor | None, logits: Tensor
    ) -> list[Accepted | None]:
        sampling, generators = self.settings.sampling, self._generators()
        if drafter_probs is None:
            return walk_rows(trees, logits, sampling, generators)
        return walk_rows_by_rejection(trees, drafter_probs, logits, sampling, generators)

    def _emit(self, sequence: _Sequence, tree: DraftTree, accepted: Accepted) -> None:
        found = [*tree.tokens[accepted.nodes[1:]].tolist(), accepted.bonus]
        room = self.settings.max_new_tokens - len(sequence.tokens)
        emitted = cut(found, room, self.settings.eos_token_ids)
        anchor = len(sequence.tokens) - 1
        sequence.records.append(PassRecord(anchor, tree, accepted, len(emitted)))
        sequence.tokens += emitted

    def _charge(self) -> None:
        """Share the round's time among the rows that were in it."""
        active = [sequence for sequence in self.rows if sequence]
        for stage, spent in self.clock.lap().items():
            for sequence in active:
                sequence.seconds[stage] = sequence.seconds.get(stage, 0.0) + spent / len(active)

    def _retire(self, row: int) -> None:
        """Free the row if its response has ended."""
        sequence = self.rows[row]
        if sequence and (
            len(sequence.tokens) >= self.settings.max_new_tokens
            or sequence.tokens[-1] in self.settings.eos_token_ids
        ):
            self.done[sequence.index] = sequence.decoded()
            self.rows[row] = None

    def _generators(self) -> list[torch.Generator | None]:
        return [sequence.generator if sequence else None for sequence in self.rows]
