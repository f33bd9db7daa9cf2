"""The target for live decoding: loaded once, and only if something has to be decoded or measured."""

from __future__ import annotations

import functools

import torch

from common.distributed import Ranks
from configs.schema import Config
from drafter.model import Drafter
from evaluation.costs import MeasuredCost, measure_costs, rounds_needed
from evaluation.decode import make_proposer
from evaluation.live import LivePrompt, LiveSetup, decode_settings, make_setup
from evaluation.tuning import Tuning
from target.load import Target, load_target


class LiveTarget:
    """The target and a drafter, in float32 or bfloat16, on this rank's device."""

    def __init__(self, config: Config, ranks: Ranks, drafter: Drafter, dtype: str):
        self._config, self._ranks = config, ranks
        self.drafter, self._dtype = drafter, dtype

    @functools.cached_property
    def target(self) -> Target:
        """With the attention that takes a tree mask."""
        return load_target(
            self._config.target, self._ranks.device, dtype=self._dtype, attention="sdpa"
        )

    def setup(self, tuning: Tuning) -> LiveSetup:
        config = self._config
        return make_setup(self.target, self.drafter, config.evaluation, config.run.seed, tuning)

    def measure(self, tuning: Tuning, prompt: LivePrompt) -> MeasuredCost:
        """Costs of rounds of up to the recipe's largest budget after `prompt`, `live_batch_size` rows at a time."""
        setup, max_budget = self.setup(tuning), max(self._config.evaluation.budgets)
        ids = torch.tensor(prompt.tokens, device=self.target.device)
        room = max(rounds_needed(max_budget), setup.section.max_new_tokens)
        settings = decode_settings(setup, 0.0, max_new_tokens=room)
        proposer = make_proposer(setup.verifier, self.drafter, setup.head, [ids], settings)
        return measure_costs(setup.verifier, proposer, ids, max_budget)
