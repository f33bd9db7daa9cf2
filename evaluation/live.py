"""One prompt decoded live by every acceptor, side by side: passes, speed, losslessness, parity with replay.

Plain decoding comes first: at temperature 0 its tokens are what every other acceptor must emit, and its features are what
replay is checked on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from common.fingerprint import fingerprint
from configs.schema import EvaluationSection
from data.features import FeatureRow, RowEntry
from ddtree.verify import TreeVerifier
from drafter.model import Drafter
from evaluation.acceptors import CHAIN_REJECTION, PLAIN, Acceptor, list_acceptors
from evaluation.child_ranks import live_child_ranks
from evaluation.decode import decode_batch, make_proposer
from evaluation.decoded import Decoded, DecodeSettings
from evaluation.drawing import DrawnTree, draw_passes
from evaluation.parity import Parity, compare_passes, record_row
from evaluation.replay import ReplayOptions
from evaluation.tuning import Tuning
from target.generate import Sampling
from target.head import TargetHead
from target.load import Target


@dataclass(frozen=True)
class LivePrompt:
    prompt_id: str
    task: str
    tokens: list[int]


@dataclass(frozen=True)
class Difference:
    """A greedy decode that left the plain one."""

    index: int
    """Of the first differing token in the response."""
    target_gap: float
    """Difference of the target's two best logits there, in its own forward; tiny: a near-tie that kernels may flip."""


@dataclass(frozen=True)
class LiveDecode:
    acceptor: str
    budget: int | None
    temperature: float
    passes: list[int]
    child_ranks: list[list[int]]
    """A list a pass: places of the emitted draft tokens in their slots' lists (evaluation/child_ranks.py)."""
    seconds: dict[str, float]
    difference: Difference | None
    """Greedy decodes only: None means equal to plain decoding, token for token."""


@dataclass(frozen=True)
class LiveRecord:
    prompt_id: str
    task: str
    decodes: list[LiveDecode]
    parity: Parity
    trees: list[DrawnTree] = field(default_factory=list)


@dataclass(frozen=True)
class LiveSetup:
    """What live decoding needs besides the prompt. The head is the target's own, in the target's dtype."""

    target: Target
    verifier: TreeVerifier
    drafter: Drafter
    head: TargetHead
    section: EvaluationSection
    seed: int
    tuning: Tuning

    def acceptors(self, temperature: float) -> list[Acceptor]:
        """Decoded live at a temperature of the target's samples, besides plain."""
        section = self.section
        listed = list_acceptors(section.acceptors, section.live_budgets, self.tuning.cost)
        return [a for a in listed if temperature > 0 or a != CHAIN_REJECTION]


def make_setup(
    target: Target, drafter: Drafter, section: EvaluationSection, seed: int, tuning: Tuning
) -> LiveSetup:
    taps = drafter.config.target_layer_ids
    verifier = TreeVerifier(target, taps, num_sequences=section.live_batch_size)
    device = drafter.fc.weight.device  # its own, where the target fills others
    head = TargetHead(target.embed_tokens.to(device), target.lm_head.to(device))
    return LiveSetup(target, verifier, drafter.eval(), head, section, seed, tuning)


def choose_prompts(entries: Sequence[RowEntry], num_prompts: int, seed: int) -> list[RowEntry]:
    """The first `num_prompts` rows of a seeded order, taken from the tasks in turn so that none is left out."""
    shuffled = list(entries)
    random.Random(seed).shuffle(shuffled)
    by_task: dict[str, list[RowEntry]] = {}
    for entry in shuffled:
        by_task.setdefault(entry.task, []).append(entry)
    turns = [
        (turn, task, entry)
        for task, rows in sorted(by_task.items())
        for turn, entry in enumerate(rows)
    ]
    return [entry for _, _, entry in sorted(turns, key=lambda item: item[:2])][:num_prompts]


def prompt_of(row: FeatureRow) -> LivePrompt:
    """The row's tokens up to its first response."""
    first = int(row.loss_mask.int().argmax())
    return LivePrompt(row.sample_id, row.task, row.input_ids[:first].tolist())


def decode_prompts(setup: LiveSetup, prompts: Sequence[LivePrompt]) -> list[LiveRecord]:
    """Every prompt by every acceptor at every temperature, as many prompts at a time as `live_batch_size`.

    Parity and losslessness come from the greedy decodes.
    """
    decodes: list[list[LiveDecode]] = [[] for _ in prompts]
    parities = [Parity(0, 0, [], {}) for _ in prompts]
    trees: list[list[DrawnTree]] = [[] for _ in prompts]
    for temperature in sorted(set(setup.section.temperatures)):
        plain = decode_by(setup, prompts, PLAIN, temperature)
        drafted = [
            (acceptor, decode_by(setup, prompts, acceptor, temperature))
            for acceptor in setup.acceptors(temperature)
        ]
        for index, prompt in enumerate(prompts):
            own = [(acceptor, decoded[index]) for acceptor, decoded in drafted]
            decodes[index] += _summaries(setup, prompt, plain[index], own, temperature)
            if temperature == 0:
                parities[index] = _parity(setup, prompt, plain[index], own)
            trees[index] = trees[index] or _draw(setup, prompt, own)
    return [
        LiveRecord(prompt.prompt_id, prompt.task, decodes[i], parities[i], trees[i])
        for i, prompt in enumerate(prompts)
    ]


def decode_by(
    setup: LiveSetup, prompts: Sequence[LivePrompt], acceptor: Acceptor, temperature: float
) -> list[Decoded]:
    """Every prompt by one acceptor. Samples are seeded by prompt and acceptor, whatever rank or batch decodes them."""
    settings = decode_settings(setup, temperature)
    ids = [torch.tensor(prompt.tokens, device=setup.target.device) for prompt in prompts]
    seeds = [_seed(setup, prompt, acceptor, temperature) for prompt in prompts]
    proposer = None
    if acceptor != PLAIN:
        proposer = make_proposer(setup.verifier, setup.drafter, setup.head, ids, settings)
    return decode_batch(setup.verifier, proposer, ids, acceptor, settings, seeds)


def _summaries(
    setup: LiveSetup,
    prompt: LivePrompt,
    plain: Decoded,
    drafted: Sequence[tuple[Acceptor, Decoded]],
    temperature: float,
) -> list[LiveDecode]:
    found = [_summary(PLAIN, temperature, plain, None)]
    for acceptor, decoded in drafted:
        difference = None
        if temperature == 0:
            difference = first_difference(setup, prompt, plain.tokens, decoded.tokens)
        found.append(_summary(acceptor, temperature, decoded, difference))
    return found


def _draw(
    setup: LiveSetup, prompt: LivePrompt, drafted: Sequence[tuple[Acceptor, Decoded]]
) -> list[DrawnTree]:
    """Of the largest plain tree; nothing if no tree is decoded live."""
    trees = [(a, decoded) for a, decoded in drafted if a.name == "tree"]
    if not trees:
        return []
    acceptor, decoded = trees[-1]
    tokenizer = setup.target.tokenizer
    return draw_passes(tokenizer, prompt.prompt_id, prompt.tokens, acceptor.key, decoded)


def first_difference(
    setup: LiveSetup, prompt: LivePrompt, plain: Sequence[int], decoded: Sequence[int]
) -> Difference | None:
    """Where `decoded` leaves `plain`, None if nowhere; the gap comes from the target's forward of the common part."""
    if list(plain) == list(decoded):
        return None
    pairs = zip(plain, decoded, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(decoded)))
    common = torch.tensor([*prompt.tokens, *plain[:index]], device=setup.target.device)
    best = setup.verifier.prefill(common).logits.float().topk(2).values
    return Difference(index, float(best[0] - best[1]))


def _parity(
    setup: LiveSetup,
    prompt: LivePrompt,
    plain: Decoded,
    drafted: Sequence[tuple[Acceptor, Decoded]],
) -> Parity:
    taps = setup.drafter.config.target_layer_ids
    row = record_row(setup.target, taps, prompt.tokens, plain.tokens, prompt.prompt_id, prompt.task)
    section = setup.section
    options = ReplayOptions(
        tuple(sorted(section.live_budgets)),
        setup.tuning.drafter_temperature,
        names=section.acceptors,
        cost=setup.tuning.cost,
    )
    return compare_passes(setup.drafter, setup.head, row, drafted, options)


def decode_settings(
    setup: LiveSetup, temperature: float, max_new_tokens: int | None = None
) -> DecodeSettings:
    """The recipe's; `max_new_tokens` instead of the recipe's where given."""
    section = setup.section
    return DecodeSettings(
        max_new_tokens or section.max_new_tokens,
        setup.target.eos_token_ids,
        Sampling(temperature, section.top_p, section.top_k),
        setup.tuning.drafter_temperature,
        setup.tuning.cost,
    )


def _seed(setup: LiveSetup, prompt: LivePrompt, acceptor: Acceptor, temperature: float) -> int:
    return int(fingerprint([setup.seed, prompt.prompt_id, acceptor.key, temperature])[:15], 16)


def _summary(
    acceptor: Acceptor, temperature: float, decoded: Decoded, difference: Difference | None
) -> LiveDecode:
    return LiveDecode(
        acceptor.name,
        acceptor.budget,
        temperature,
        decoded.passes,
        live_child_ranks(decoded.records),
        decoded.seconds,
        difference,
    )
