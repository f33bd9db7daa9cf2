"""Whatever the drafter drafts, the output is the target's: every family, every acceptor, greedy and sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from conftest import HYBRID
from ddtree_cases import make_target
from evaluation_cases import Case, continuations, make_case
from oracle_cases import ACCEPTORS, COST, Oracle

from configs.schema import Config
from ddtree.verify import TreeVerifier
from evaluation.acceptors import CHAIN, CHAIN_REJECTION, PLAIN, Acceptor, tree_acceptor
from evaluation.decode import decode_batch, make_proposer
from evaluation.decoded import Decoded, DecodeSettings
from evaluation.drafting import Proposer
from evaluation.lossless import NEARLY_GREEDY
from target.generate import Sampling, generate_batch
from target.load import Target

MakeConfig = Callable[..., Config]
MakeTarget = Callable[..., Target]
GREEDY = Sampling()
TAPS = (0, 2)
FAMILIES = ("llama", "qwen3", "qwen3_sliding", "qwen3_5", "qwen3_5_moe", "qwen3_next")
PROMPT_LENGTHS = (1, 7, 3, 12)


def target_of(family: str, tiny_target: MakeTarget) -> Target:
    return tiny_target(family) if family in ("llama", "qwen3") else make_target(family)


def prompts_of(lengths: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (length,), generator=generator) for length in lengths]


def records_of(target: Target, prompts: Sequence[torch.Tensor], tokens: int) -> list[list[int]]:
    """The target's own greedy answers, one prompt at a time, from transformers' cache."""
    return [generate_batch(target, [prompt.tolist()], tokens, GREEDY)[0] for prompt in prompts]


def settings_of(target: Target, tokens: int, sampling: Sampling = GREEDY) -> DecodeSettings:
    return DecodeSettings(tokens, target.eos_token_ids, sampling, cost=COST)


def decode(
    verifier: TreeVerifier,
    proposer: Proposer | None,
    prompts: Sequence[torch.Tensor],
    acceptor: Acceptor,
    settings: DecodeSettings,
    seed: int = 0,
) -> list[Decoded]:
    seeds = range(seed, seed + len(prompts))
    return decode_batch(verifier, proposer, prompts, acceptor, settings, list(seeds))


def greedy_for(acceptor: Acceptor) -> Sampling:
    return Sampling(NEARLY_GREEDY) if acceptor == CHAIN_REJECTION else GREEDY


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_targets_in_ragged_continuous_batches(
    family: str, tiny_target: MakeTarget
) -> None:
    """Four prompts in three rows, one of a single token; drafts that are mostly and rarely right."""
    target = target_of(family, tiny_target)
    prompts = prompts_of(PROMPT_LENGTHS)
    records = records_of(target, prompts, 18)
    verifier = TreeVerifier(target, TAPS, num_sequences=3)
    known = {len(prompt): record for prompt, record in zip(prompts, records, strict=True)}
    settings = settings_of(target, 18)
    plain = decode(verifier, None, prompts, PLAIN, settings)
    assert [decoded.tokens for decoded in plain] == records
    num_passes: dict[float, int] = {}
    for accuracy in (0.9, 0.3):
        for acceptor in ACCEPTORS:
            oracle = Oracle(known, accuracy, 320, num_rows=3)
            settings = settings_of(target, 18, greedy_for(acceptor))
            found = decode(verifier, oracle, prompts, acceptor, settings)
            assert [decoded.tokens for decoded in found] == records, (acceptor.key, accuracy)
            num_passes[accuracy] = sum(len(decoded.passes) for decoded in found)
    assert num_passes[0.9] < num_passes[0.3] < sum(len(record) - 1 for record in records)


def test_greedy_tokens_are_the_targets_for_a_random_drafter(
    tiny_config: MakeConfig, tiny_target: MakeTarget
) -> None:
    case = make_case(tiny_config(HYBRID), tiny_target(HYBRID), num_prompts=2, steps=0)
    prompts = [case.ids(i) for i in range(2)]
    verifier = TreeVerifier(case.target, case.drafter.config.target_layer_ids, num_sequences=2)
    for acceptor in ACCEPTORS:
        settings = case.settings(cost=COST, sampling=greedy_for(acceptor))
        proposer = make_proposer(verifier, case.drafter, case.head, prompts, settings)
        found = decode(verifier, proposer, prompts, acceptor, settings)
        assert [decoded.tokens for decoded in found] == case.records


@pytest.fixture(scope="module")
def trained(tiny_config: MakeConfig, tiny_target: MakeTarget) -> Case:
    config = tiny_config("llama", ["drafter.block_size=6"])
    return make_case(config, tiny_target("llama"), steps=90)


def test_a_prompt_does_not_notice_its_company(trained: Case) -> None:
    """Alone or among others, greedy or sampled: the same tokens, passes and trees."""
    prompts = [trained.ids(i) for i in (4, 0, 2)]
    taps = trained.drafter.config.target_layer_ids
    together = TreeVerifier(trained.target, taps, num_sequences=2)
    for sampling in (GREEDY, Sampling(1.1, 0.9, 20)):
        settings = trained.settings(sampling=sampling, cost=COST, max_new_tokens=12)
        for acceptor in ACCEPTORS if sampling.temperature else (tree_acceptor(12),):
            proposer = make_proposer(together, trained.drafter, trained.head, prompts, settings)
            found = decode(together, proposer, prompts, acceptor, settings)
            for index, prompt in enumerate(prompts):
                alone = make_proposer(
                    trained.verifier, trained.drafter, trained.head, [prompt], settings
                )
                [wanted] = decode(trained.verifier, alone, [prompt], acceptor, settings, seed=index)
                assert found[index].tokens == wanted.tokens
                assert found[index].passes == wanted.passes
                for a, b in zip(found[index].records, wanted.records, strict=True):
                    assert torch.equal(a.tree.tokens, b.tree.tokens)


def test_a_batchs_seconds_are_shared_and_none_is_lost(trained: Case) -> None:
    prompts = [trained.ids(i) for i in range(4)]
    taps = trained.drafter.config.target_layer_ids
    verifier = TreeVerifier(trained.target, taps, num_sequences=2)
    found = decode(verifier, None, prompts, PLAIN, trained.settings())
    assert all(decoded.seconds["verify"] > 0 < decoded.seconds["prefill"] for decoded in found)
    assert all(decoded.seconds["draft"] == decoded.seconds["build"] == 0 for decoded in found)


def test_chain_rejection_at_temperature_zero_is_refused(trained: Case) -> None:
    with pytest.raises(ValueError, match="chain_rejection samples; give a temperature above 0"):
        decode(trained.verifier, None, [trained.ids(0)], CHAIN_REJECTION, trained.settings())


def test_a_real_token_equal_to_the_mask_token_is_a_token_like_any_other(
    tiny_config: MakeConfig, tiny_target: MakeTarget
) -> None:
    """The drafter's mask token is one that the target says, and that stands in a prompt."""
    target = tiny_target("llama")
    prompts = prompts_of((5, 9))
    record = records_of(target, prompts[:1], 20)[0]
    token = next(t for t in record if record.count(t) > 1)
    prompts[1][4] = token
    records = [record, *records_of(target, prompts[1:], 20)]
    config = tiny_config("llama", [f"drafter.mask_token_id={token}"])
    case = make_case(config, target, num_prompts=3, steps=30)
    settings = settings_of(target, 20)
    for acceptor in (CHAIN, *ACCEPTORS[2:]):
        for proposer in (
            make_proposer(case.verifier, case.drafter, case.head, prompts, settings),
            Oracle({5: records[0], 9: records[1]}, 0.8, 320),
        ):
            found = decode(case.verifier, proposer, prompts, acceptor, settings)
            assert [decoded.tokens for decoded in found] == records


def test_budget_one_and_a_spine_of_the_whole_block_are_the_chains_beginnings(trained: Case) -> None:
    """tree-1 and tree_spine-1 accept the chain's first draft or nothing; tree_spine-L is the chain itself."""
    prompt, settings = trained.ids(3), trained.settings()
    passes = {}
    for name, budget in (("chain", None), ("tree", 1), ("tree_spine", 1), ("tree_spine", 5)):
        proposer = make_proposer(
            trained.verifier, trained.drafter, trained.head, [prompt], settings
        )
        acceptor = Acceptor(name, budget)
        [found] = decode(trained.verifier, proposer, [prompt], acceptor, settings)
        passes[acceptor.key] = found.passes
    assert passes["tree_spine-5"] == passes["chain"]
    assert passes["tree-1"] == passes["tree_spine-1"]
    assert max(passes["chain"]) > 2 >= max(passes["tree-1"])


@pytest.mark.parametrize("family", ["qwen3_sliding", "qwen3_5"])
@pytest.mark.parametrize(
    "num_tokens", [150, pytest.param(2000, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_decoding_goes_on_exactly(family: str, num_tokens: int) -> None:
    """Hundreds of commits (slow: a thousand) leave no trace that plain decoding would not."""
    target = make_target(family)
    prompts = prompts_of((6,))
    records = records_of(target, prompts, num_tokens)
    verifier = TreeVerifier(target, TAPS)
    oracle = Oracle({6: records[0]}, 0.6, 320)
    settings = settings_of(target, num_tokens)
    [found] = decode(verifier, oracle, prompts, tree_acceptor(12), settings)
    assert found.tokens == records[0]
    assert 1.5 < sum(found.passes) / len(found.passes) < 5


@pytest.fixture(scope="module")
def sampled() -> tuple[Target, TreeVerifier]:
    target = make_target("qwen3_5")
    return target, TreeVerifier(target, TAPS, num_sequences=50)


@pytest.mark.parametrize("sampling", [Sampling(1.3, 1.0, 2), Sampling(1.0, 0.5, 0)], ids=["k", "p"])
@pytest.mark.parametrize("acceptor", ACCEPTORS, ids=lambda acceptor: acceptor.key)
def test_sampled_tokens_have_the_targets_distribution(
    acceptor: Acceptor, sampling: Sampling, sampled: tuple[Target, TreeVerifier]
) -> None:
    """Chi-square of prefill's token and the two after it over whole walks, the outcomes enumerated by plain forwards."""
    (target, verifier), num_runs = sampled, 300
    [prompt] = prompts_of((5,))
    expected = continuations(target, prompt.tolist(), sampling, 3)
    # a drafter that bets on the likeliest answer: often accepted, often wrong
    likeliest = max(expected, key=expected.__getitem__)
    oracle = Oracle({5: likeliest}, 0.8, 320, num_rows=50, num_slots=3)
    settings = settings_of(target, 3, sampling)
    found = decode(verifier, oracle, [prompt] * num_runs, acceptor, settings, seed=5)
    accepted = sum(len(record.accepted.nodes) - 1 for d in found for record in d.records)
    assert accepted > num_runs / 8, "the test needs accepted drafts"
    counts = Counter(tuple(decoded.tokens) for decoded in found)
    assert set(counts) <= set(expected)
    cells = pool(counts, expected, num_runs)
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    degrees = len(cells) - 1
    assert degrees >= 5
    # mean d, variance 2 d; beyond 4 standard deviations about once in 3,000 times
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5


def pool(
    counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], total: int
) -> list[tuple[int, float]]:
    """Seen and expected counts, outcomes that are expected fewer than five times in one cell."""
    common = [key for key, mass in expected.items() if mass * total >= 5]
    cells = [(counts[key], expected[key] * total) for key in common]
    rest = total - sum(wanted for _, wanted in cells)
    if rest > 1:
        cells.append((total - sum(seen for seen, _ in cells), rest))
    return cells
