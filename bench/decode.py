"""Whole decodes side by side: plain, chain, and every kind of tree, in tokens/s with the share of each stage.

    python -m bench.decode [CONFIG] [--drafter FOLDER] [--device cpu] [--output outputs/bench/decode.json]

By default the demo's target and drafter on its own test prompts if `./launch.sh demo` has run here, otherwise (and with
--dry, at toy sizes) a tiny random hybrid with a random drafter, whose drafts are never right but cost what drafts cost.
Acceptors take turns on every prompt in this process. `over plain` is the median over prompts of each prompt's ratio.
`own` is everything but draft and verify: building the tree, the target's choices, the walk, commit, bookkeeping.
`from logits` times choosing a block's tokens and building its tree from its logits (soft-max, top-k, transfer, heap), as
a share of the acceptor's round; the draft stage holds the first part of it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from bench.tree_build import from_logits, machine
from common.distributed import Ranks
from common.files import write_json
from configs.load import load_config
from configs.schema import Config
from evaluation.acceptors import CHAIN, PLAIN, Acceptor, spine_acceptor, tree_acceptor
from evaluation.clock import STAGES
from evaluation.decode import decode_batch, make_proposer
from evaluation.decoded import Decoded
from evaluation.inputs import find_drafter, open_test_features, random_drafter
from evaluation.live import LivePrompt, LiveSetup, choose_prompts, decode_settings, prompt_of
from evaluation.loading import LiveTarget
from evaluation.tuning import Tuning
from target.prepare import prepare_target

_DEMO, _TINY = Path("configs/demo.yaml"), Path("configs/debug.yaml")
_LOGITS_REPEATS = 9


@dataclass(frozen=True)
class Row:
    acceptor: str
    budget: int | None
    tokens_per_s: float
    over_plain: float
    """Above 1: faster than the target alone."""
    acceptance: float
    """Emitted tokens over passes, all prompts together."""
    round_ms: float
    stage_share: dict[str, float]
    own_share: float
    """Of a round: neither draft nor verify."""
    from_logits_ms: float | None
    from_logits_share: float | None


def setup_for(options: argparse.Namespace) -> tuple[LiveSetup, list[LivePrompt], str]:
    """What is decoded, the prompts, and its name in the result."""
    torch.set_num_threads(1)
    ranks = Ranks(0, 1, 0, torch.device(options.device))
    path = options.config or (_DEMO if _demo_is_there() and not options.dry else None)
    overrides = [f"evaluation.live_batch_size={options.batch}", "evaluation.dtype=float32"]
    if path is None:
        return _tiny_setup(ranks, overrides, options)
    config = load_config(path, overrides)
    source, features = find_drafter(config, options.drafter), open_test_features(config)
    live = LiveTarget(config, ranks, source.load(ranks.device, torch.float32), "float32")
    entries = choose_prompts(features.of_split("test"), options.prompts, config.run.seed)
    prompts = [prompt_of(features.read(entry)) for entry in entries]
    return live.setup(Tuning()), prompts, f"{config.target.model} and {source.name}"


def _demo_is_there() -> bool:
    return (load_config(_DEMO).run.folder / "checkpoints" / "index.json").is_file()


def _tiny_setup(
    ranks: Ranks, overrides: Sequence[str], options: argparse.Namespace
) -> tuple[LiveSetup, list[LivePrompt], str]:
    with tempfile.TemporaryDirectory() as folder:
        config: Config = load_config(
            _TINY,
            [*overrides, f"target.model={folder}/hybrid", "target.prepare.family=qwen3_5"],
        )
        prepare_target(config)
        drafter = random_drafter(config).load(ranks.device, torch.float32)
        setup = LiveTarget(config, ranks, drafter, "float32").setup(Tuning())
    generator = torch.Generator().manual_seed(0)
    prompts = [
        LivePrompt(f"random-{i}", "random", torch.randint(256, (64,), generator=generator).tolist())
        for i in range(options.prompts)
    ]
    return setup, prompts, "a tiny random hybrid and a random drafter"


def acceptors_for(budgets: Sequence[int]) -> list[Acceptor]:
    trees = [make(budget) for make in (tree_acceptor, spine_acceptor) for budget in budgets]
    return [PLAIN, CHAIN, *trees]


def decode_all(
    setup: LiveSetup, prompts: Sequence[LivePrompt], acceptors: Sequence[Acceptor], tokens: int
) -> dict[Acceptor, list[Decoded]]:
    """A group of as many prompts as the verifier has rows at a time, every acceptor in turn on it."""
    found: dict[Acceptor, list[Decoded]] = {acceptor: [] for acceptor in acceptors}
    size = len(setup.verifier.lengths)
    for start in range(0, len(prompts), size):
        for acceptor in acceptors:
            found[acceptor] += _decode(setup, prompts[start : start + size], acceptor, tokens)
    return found


def _decode(
    setup: LiveSetup, prompts: Sequence[LivePrompt], acceptor: Acceptor, tokens: int
) -> list[Decoded]:
    """To exactly `tokens` tokens: no end of a response cuts a measurement short."""
    settings = replace(decode_settings(setup, 0.0, max_new_tokens=tokens), eos_token_ids=())
    ids = [torch.tensor(prompt.tokens, device=setup.target.device) for prompt in prompts]
    proposer = None
    if acceptor != PLAIN:
        proposer = make_proposer(setup.verifier, setup.drafter, setup.head, ids, settings)
    seeds = [0] * len(prompts)
    return decode_batch(setup.verifier, proposer, ids, acceptor, settings, seeds)


def summarise(
    setup: LiveSetup, acceptor: Acceptor, decoded: list[Decoded], plain: list[Decoded]
) -> Row:
    seconds = {stage: sum(d.seconds[stage] for d in decoded) for stage in STAGES}
    total, emitted = sum(seconds.values()), sum(sum(d.passes) for d in decoded)
    num_rounds = sum(len(d.passes) for d in decoded)
    ratios = [p.decode_seconds / d.decode_seconds for p, d in zip(plain, decoded, strict=True)]
    round_s = total / num_rounds
    logits_s = None if acceptor.budget is None else _from_logits_s(setup, acceptor.budget)
    return Row(
        acceptor.name,
        acceptor.budget,
        round(emitted / total, 2),
        round(statistics.median(ratios), 3),
        round(emitted / num_rounds, 2),
        round(1e3 * round_s, 2),
        {stage: round(spent / total, 4) for stage, spent in seconds.items()},
        round(1 - (seconds["draft"] + seconds["verify"]) / total, 4),
        None if logits_s is None else round(1e3 * logits_s, 3),
        None if logits_s is None else round(logits_s / round_s, 4),
    )


def _from_logits_s(setup: LiveSetup, budget: int) -> float:
    """Median seconds from a block's logits to its tree. What the logits are matters little: those of random states."""
    generator = torch.Generator().manual_seed(0)
    num_slots, head = setup.drafter.config.block_size - 1, setup.head.head
    hidden = torch.randn(num_slots, head.shape[1], generator=generator).to(head)
    logits = hidden @ head.T
    times = []
    for _ in range(_LOGITS_REPEATS + 1):  # the first one warms up
        start = time.perf_counter()
        from_logits(logits, budget)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def table(rows: Sequence[Row]) -> list[str]:
    head = f"{'acceptor':<16}{'tokens/s':>9}{'over plain':>11}{'accepted':>9}{'round ms':>9}"
    head += "".join(f"{stage:>8}" for stage in STAGES) + f"{'own':>7}{'from logits':>12}"
    lines = [head]
    for row in rows:
        name = Acceptor(row.acceptor, row.budget).key
        line = f"{name:<16}{row.tokens_per_s:>9}{row.over_plain:>10}x{row.acceptance:>9}{row.round_ms:>9}"
        line += "".join(f"{100 * row.stage_share[stage]:>7.1f}%" for stage in STAGES)
        line += f"{100 * row.own_share:>6.1f}%"
        share = "" if row.from_logits_share is None else f"{100 * row.from_logits_share:.1f}%"
        lines.append(line + f"{share:>12}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", type=Path, help="a recipe whose run has a drafter")
    parser.add_argument(
        "--drafter", type=Path, help="a drafter folder; default: the best checkpoint"
    )
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16, help="a response, prefill's included")
    parser.add_argument("--batch", type=int, default=1, help="prompts decoded together")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dry", action="store_true", help="the tiny hybrid, to try the script")
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/decode.json"))
    options = parser.parse_args()
    setup, prompts, what = setup_for(options)
    acceptors = acceptors_for(options.budgets)
    decode_all(setup, prompts[:1], acceptors, 3)  # warms up
    found = decode_all(setup, prompts, acceptors, options.tokens)
    rows = [summarise(setup, acceptor, found[acceptor], found[PLAIN]) for acceptor in acceptors]
    result = {
        "name": "decode",
        "machine": machine(options.device),
        "decoded": what,
        "prompts": len(prompts),
        "tokens": options.tokens,
        "batch": options.batch,
        "rows": [asdict(row) for row in rows],
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.output, result)
    print(f"decode on {result['machine']}: {what}")
    print("\n".join(table(rows)))
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
