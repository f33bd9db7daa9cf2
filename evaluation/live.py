"""One prompt decoded live by every acceptor, side by side: passes, speed, losslessness, parity with replay.

Plain decoding comes first: at temperature 0 its tokens are what every other acceptor must emit, and its features are what
replay is checked on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.fingerprint import fingerprint
from configs.schema import EvaluationSection
from data.features import FeatureRow, RowEntry
from ddtree.verify import TreeVerifier
from drafter.model import Drafter
from evaluation.child_ranks import live_child_ranks
from evaluation.decode import (
    CHAIN,
    PLAIN,
    Acceptor,
    Decoded,
    DecodeSettings,
    decode_plain,
    decode_with_tree,
    tree_acceptor,
)
from evaluation.drawing import DrawnTree, draw_passes
from evaluation.parity import Parity, compare_passes, record_row
from evaluation.replay import ReplayOptions
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

    @property
    def acceptors(self) -> list[Acceptor]:
        return [CHAIN, *(tree_acceptor(budget) for budget in sorted(self.section.live_budgets))]


def make_setup(
    target: Target, drafter: Drafter, section: EvaluationSection, seed: int
) -> LiveSetup:
    verifier = TreeVerifier(target, drafter.config.target_layer_ids)
    head = TargetHead(target.embed_tokens, target.lm_head.to(target.device))
    return LiveSetup(target, verifier, drafter.eval(), head, section, seed)


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


def decode_prompt(setup: LiveSetup, prompt: LivePrompt) -> LiveRecord:
    """Plain, chain and tree at every live budget and temperature; parity and losslessness for the greedy ones."""
    decodes: list[LiveDecode] = []
    parity, trees = Parity(0, 0, [], {}), []
    for temperature in sorted(set(setup.section.temperatures)):
        plain = decode_plain(
            setup.verifier, _ids(setup, prompt), settings_for(setup, prompt, PLAIN, temperature)
        )
        decodes.append(_summary(PLAIN, temperature, plain, None))
        drafted = decode_drafted(setup, prompt, temperature)
        for acceptor, decoded in drafted:
            difference = None
            if temperature == 0:
                difference = first_difference(setup, prompt, plain.tokens, decoded.tokens)
            decodes.append(_summary(acceptor, temperature, decoded, difference))
        if temperature == 0:
            parity = _parity(setup, prompt, plain, drafted)
        trees = trees or _draw(setup, prompt, drafted)
    return LiveRecord(prompt.prompt_id, prompt.task, decodes, parity, trees)


def decode_drafted(
    setup: LiveSetup, prompt: LivePrompt, temperature: float
) -> list[tuple[Acceptor, Decoded]]:
    """The chain, then the tree at every live budget."""
    return [
        (
            acceptor,
            decode_with_tree(
                setup.verifier,
                setup.drafter,
                setup.head,
                _ids(setup, prompt),
                acceptor,
                settings_for(setup, prompt, acceptor, temperature),
            ),
        )
        for acceptor in setup.acceptors
    ]


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
    budgets = tuple(sorted(setup.section.live_budgets)) or (1,)
    options = ReplayOptions(budgets, setup.section.drafter_temperature)
    return compare_passes(setup.drafter, setup.head, row, drafted, options)


def settings_for(
    setup: LiveSetup, prompt: LivePrompt, acceptor: Acceptor, temperature: float
) -> DecodeSettings:
    """The recipe's; the seed of the target's samples is this prompt's and acceptor's own, whatever rank decodes it."""
    section = setup.section
    seed = int(fingerprint([setup.seed, prompt.prompt_id, acceptor.key, temperature])[:15], 16)
    return DecodeSettings(
        section.max_new_tokens,
        setup.target.eos_token_ids,
        Sampling(temperature, section.top_p, section.top_k),
        section.drafter_temperature,
        seed,
    )


def _ids(setup: LiveSetup, prompt: LivePrompt) -> Tensor:
    return torch.tensor(prompt.tokens, device=setup.target.device)


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
