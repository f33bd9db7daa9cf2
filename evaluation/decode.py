"""Live decoding: plain, with the drafter's chain, or with its tree, one prompt or several together.

    r_0 = prefill(prompt)                                   prefill's token, the first anchor
    repeat: draft a block from the anchor -> tree -> one verify pass -> walk -> commit the accepted path;
            emit the accepted tokens and the bonus token, which is the next anchor

Rows are ragged and continuous: each has its own length, and a row that has finished takes the next prompt. A prompt's
tokens do not depend on its company: its samples come from a generator of its own.
S prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.verify import TreeVerifier
from drafter.model import Drafter
from evaluation.acceptors import CHAIN_REJECTION, PLAIN, Acceptor
from evaluation.decoded import Decoded, DecodeSettings
from evaluation.drafting import DrafterProposer, Proposer
from evaluation.rounds import Rounds
from target.head import TargetHead


def decode_plain(verifier: TreeVerifier, prompt: Tensor, settings: DecodeSettings) -> Decoded:
    """The target alone, a token a pass: the reference of losslessness and of speed. prompt: (S,) int64, on its device."""
    return decode_batch(verifier, None, [prompt], PLAIN, settings, [settings.seed])[0]


def decode_with_tree(
    verifier: TreeVerifier,
    drafter: Drafter,
    head: TargetHead,
    prompt: Tensor,
    acceptor: Acceptor,
    settings: DecodeSettings,
) -> Decoded:
    """One prompt by speculative decoding; see `decode_batch`."""
    proposer = make_proposer(verifier, drafter, head, [prompt], settings)
    return decode_batch(verifier, proposer, [prompt], acceptor, settings, [settings.seed])[0]


def make_proposer(
    verifier: TreeVerifier,
    drafter: Drafter,
    head: TargetHead,
    prompts: Sequence[Tensor],
    settings: DecodeSettings,
) -> DrafterProposer:
    """The drafter, with room for these prompts and their responses in as many rows as the verifier has."""
    longest = max(len(prompt) for prompt in prompts)
    max_tokens = longest + settings.max_new_tokens + drafter.config.block_size
    rows = len(verifier.lengths)
    return DrafterProposer(drafter, head, settings.drafter_temperature, max_tokens, rows)


@torch.no_grad()
def decode_batch(
    verifier: TreeVerifier,
    proposer: Proposer | None,
    prompts: Sequence[Tensor],
    acceptor: Acceptor,
    settings: DecodeSettings,
    seeds: Sequence[int],
) -> list[Decoded]:
    """Every prompt's response, as many at a time as the verifier has rows; greedy ones equal plain decoding's.

    prompts: (S,) int64 each, on the target's device; seeds: of each prompt's samples; proposer: None for plain.
    Raises ValueError for chain_rejection at temperature 0, where it has no meaning of its own.
    Source: DFlash blocks, verified as a DDTree (arXiv:2604.12989).
    """
    if acceptor == CHAIN_REJECTION and settings.sampling.temperature == 0:
        raise ValueError("chain_rejection samples; give a temperature above 0, or use chain")
    if not prompts:
        return []
    rounds = Rounds(verifier, proposer, acceptor, settings, prompts, seeds)
    while rounds.fill():
        rounds.run_round()
    return [rounds.done[index] for index in range(len(prompts))]
