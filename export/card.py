"""README.md of an exported folder: what it is, how good, how to serve it, from what. The same input gives the same text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from configs.schema import TREE_LOSSES, Config, SourceSection
from data.features import RowEntry
from data.recipes import recipe_named
from drafter.config import SLIDING, DrafterConfig
from drafter.folder import Format
from export.card_results import acceptance, headline
from export.markdown import bullets, table
from export.serve import ServeCommands
from export.verify import Verification

DFLASH, DDTREE = "2602.06036", "2604.12989"


@dataclass(frozen=True)
class CardFacts:
    config: Config
    drafter: DrafterConfig
    format: Format
    self_contained: bool
    checkpoint: str
    """Name of the checkpoint's folder."""
    fingerprint: str
    """drafter.folder.drafter_fingerprint of the checkpoint."""
    entries: Sequence[RowEntry]
    report: Mapping[str, Any] | None
    """evaluation/report.json; None if it does not exist."""

    @property
    def target(self) -> str:
        return self.config.export.base_model or self.config.target.model


def model_card(facts: CardFacts, verification: Verification, commands: ServeCommands) -> str:
    sections = [
        _front_matter(facts),
        _what(facts),
        "## Acceptance length\n\n" + _acceptance(facts),
        "## Serving\n\n" + _serving(facts, commands),
        "## Training\n\n" + _training(facts),
        "## Data\n\n" + _data(facts),
        "## Limits\n\n" + bullets(_limits(facts)),
        "## Verification\n\n" + _verification(verification),
        "## Licence and sources\n\n" + _sources(facts),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(facts: CardFacts) -> str:
    """What the hub reads. Data sets are named only where they are the hub's."""
    sources = facts.config.data.sources
    sets = sorted({source.path or "" for source in sources if source.kind == "datasets"})
    named = {"license": facts.config.export.license, "base_model": facts.target}
    lines = [
        *(
            yaml.safe_dump({key: text}, allow_unicode=True, width=1000).strip()
            for key, text in named.items()
        ),
        f"library_name: {'transformers' if facts.format == 'zlab' else 'speculators'}",
        "pipeline_tag: text-generation",
        "tags: [speculative-decoding, draft-model, dflash, ddtree]",
    ]
    lines += [f"datasets: [{', '.join(sets)}]"] if any(sets) else []
    return "\n".join(["---", *lines, "---"])


def _what(facts: CardFacts) -> str:
    drafter, target = facts.drafter, facts.config.target
    revision = f" (revision {target.revision})" if target.revision else ""
    window = f"; window {drafter.sliding_window} tokens" if drafter.sliding_window else ""
    taps = list(drafter.target_layer_ids)
    rows = [
        ["target", f"{facts.target}{revision}"],
        [
            "block size",
            f"{drafter.block_size}: the anchor and {drafter.block_size - 1} drafted tokens",
        ],
        ["mask token", str(drafter.mask_token_id)],
        [
            "taps",
            f"{taps}, 0-based: the output of decoder layer i, transformers' `hidden_states[i+1]`; counted from 1, as vLLM and "
            f"speculators do: {[i + 1 for i in taps]}",
        ],
        ["layers", f"{drafter.num_layers}: {', '.join(drafter.layer_types)}{window}"],
        ["attention inside a block", _attention(drafter)],
        ["weights", f"bfloat16; {_own_head(facts)}"],
        ["tokenizer", "the target's, copied unchanged"],
    ]
    told = None if not _is_evaluated(facts) or facts.report is None else headline(facts.report)
    trained = ""
    if TREE_LOSSES & set(facts.config.train.losses):
        trained = " Its loss counts what a draft tree accepts, not the chain alone."
    intro = (
        f"A DFlash drafter for {facts.target}: it drafts {drafter.block_size - 1} tokens in one pass, which the target verifies "
        f"as a chain, or as a draft tree (DDTree), in one pass of its own.{trained} "
    )
    return (
        f"# {facts.config.run.name}: a DFlash drafter for {facts.target}\n\n{intro}{told or ''}".rstrip()
        + "\n\n"
        + table(["", ""], rows)
    )


def _attention(drafter: DrafterConfig) -> str:
    if SLIDING not in drafter.layer_types:
        return "both directions"
    return "both directions in full layers, causal in sliding layers"


def _own_head(facts: CardFacts) -> str:
    if facts.self_contained:
        return "the target's embedding and output head are included, bit for bit"
    return "embedding and output head are the target's and not included"


def _is_evaluated(facts: CardFacts) -> bool:
    return facts.report is not None and facts.report["drafter"] == facts.fingerprint


def _acceptance(facts: CardFacts) -> str:
    if facts.report is None:
        return "Not evaluated before the export."
    if not _is_evaluated(facts):
        return "The run's evaluation is of another checkpoint than this one, so its numbers are not shown."
    return acceptance(facts.report)


def _serving(facts: CardFacts, commands: ServeCommands) -> str:
    parts = [f"vLLM:\n\n```bash\n{commands.vllm}\n```"]
    if commands.sglang is not None:
        parts.append(f"SGLang:\n\n```bash\n{commands.sglang}\n```")
    parts.append("Known of these servers:\n\n" + bullets(commands.caveats))
    return "\n\n".join(parts)


def _training(facts: CardFacts) -> str:
    train, target = facts.config.train, facts.config.target
    rows = [
        ["checkpoint", facts.checkpoint],
        ["loss", _loss(facts.config)],
        ["steps", f"{train.steps} of {train.global_batch_samples} documents"],
        ["blocks a document", f"up to {train.num_anchors}"],
        ["learning rate", f"{train.learning_rate:g}, {train.schedule}"],
        ["precision", f"{train.dtype} with float32 master weights"],
        ["started from", _start(facts)],
        ["seed", str(facts.config.run.seed)],
        ["chat template arguments", str(target.chat_template_kwargs or "none")],
    ]
    return table(["", ""], rows)


def _start(facts: CardFacts) -> str:
    source = facts.config.train.init_from
    if source == "target_layers":
        return f"the target's last {facts.drafter.num_layers} layers"
    return f"the drafter {source}" if source else "random weights"


def _loss(config: Config) -> str:
    parts = [
        f"{name}, budget {config.train.tree_budget}" if name in TREE_LOSSES else name
        for name in config.train.losses
    ]
    if len(parts) == 1:
        return parts[0]
    weights = config.train.losses.values()
    return " + ".join(f"{weight:g} x {part}" for weight, part in zip(weights, parts, strict=True))


def _data(facts: CardFacts) -> str:
    sources = facts.config.data.sources
    trained = [source for source in sources if source.split != "test"]
    held_out = [source for source in sources if source.split == "test"]
    parts = [
        f"{_responses(facts.config)} Rows that were extracted, before training's own length limit:",
        _source_table(facts, trained, "train"),
    ]
    if held_out:
        parts += [
            "Held out for evaluation; training prompts that share an n-gram with them were dropped:",
            _source_table(facts, held_out, "test"),
        ]
    return "\n\n".join(parts)


def _responses(config: Config) -> str:
    responses = config.data.responses
    if not responses.generate:
        return "Responses are the sources' own, not the target's."
    return f"Every response was generated by the target at temperature {responses.temperature:g}."


def _source_table(facts: CardFacts, sources: Sequence[SourceSection], split: str) -> str:
    rows = []
    for source in sources:
        mine = [e for e in facts.entries if e.source == source.name and e.split == split]
        tokens = sum(entry.num_response_tokens for entry in mine)
        rows.append([source.name, _license(source), str(len(mine)), f"{tokens:,}"])
    return table(["source", "license", "samples", "response tokens"], rows)


def _license(source: SourceSection) -> str:
    """As the recipe states it, or, for what the package index carries, as data/recipes.py checked it."""
    if source.kind == "packages" and source.license == "unverified":
        return recipe_named(source.path).license
    return source.license


def _limits(facts: CardFacts) -> list[str]:
    responses = facts.config.data.responses
    lines = [
        "A drafter changes the speed of its target, never its output, as long as the server verifies losslessly; what the target "
        "may and may not do is on the target's own card.",
        f"It fits {facts.target} alone: another fine-tune or quantisation of it has other hidden states and accepts less.",
        "Acceptance falls away from the training data above: other languages, much longer contexts, another chat template or "
        "thinking mode.",
    ]
    if responses.generate and responses.temperature == 0:
        lines.append(
            "Labels are greedy: at higher sampling temperatures fewer tokens are accepted."
        )
    lines.append(
        "A tree accepts more tokens a pass and costs a larger pass; whether it is faster depends on the GPU and the batch: measure."
    )
    return lines


def _verification(verification: Verification) -> str:
    return (
        f"Reloaded in a new process and compared on {verification.num_blocks} blocks of {verification.num_rows} recorded "
        f"samples, in float32: logits differ from the training code's by {verification.reload_difference:.1e} of the "
        f"largest logit. Rounding the weights to bfloat16 moved logits by up to {verification.rounding_difference:.1e} of "
        f"the largest and left {verification.rounding_same_argmax:.1%} of the drafted tokens as they were. Embedding and head "
        "were found equal, bit for bit, to the target's files."
    )


def _sources(facts: CardFacts) -> str:
    return (
        f"Weights: {facts.config.export.license}. The target keeps its own licence, the data sources theirs (above). "
        f"DFlash: Chen, Liang and Liu, [arXiv:{DFLASH}](https://arxiv.org/abs/{DFLASH}); DDTree: "
        f"[arXiv:{DDTREE}](https://arxiv.org/abs/{DDTREE})."
    )
