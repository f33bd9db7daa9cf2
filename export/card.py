"""README.md of an exported folder: what it is, from what, how good, how to serve it. The same input gives the same text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.schema import TREE_LOSSES, Config
from data.features import RowEntry
from drafter.config import DrafterConfig
from export.serve import ServeCommands
from export.verify import Verification

ALL_TASKS = "all"


@dataclass(frozen=True)
class CardFacts:
    config: Config
    drafter: DrafterConfig
    checkpoint: str
    """Name of the checkpoint's folder."""
    fingerprint: str
    """drafter.folder.drafter_fingerprint of the checkpoint."""
    entries: Sequence[RowEntry]
    report: Mapping[str, Any] | None
    """evaluation/report.json; None if it does not exist."""


def model_card(facts: CardFacts, verification: Verification, commands: ServeCommands) -> str:
    sections = [
        _front_matter(facts.config),
        _what(facts),
        "## Acceptance length\n\n" + _acceptance(facts),
        "## Serving\n\n" + _serving(commands, facts.drafter.block_size),
        "## Training\n\n" + _training(facts),
        "## Data\n\n" + _data(facts),
        "## Verification\n\n" + _verification(verification),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(config: Config) -> str:
    lines = [
        f"license: {config.export.license}",
        f"base_model: {config.target.model}",
        "library_name: transformers",
        "tags: [speculative-decoding, dflash, ddtree]",
    ]
    return "\n".join(["---", *lines, "---"])


def _what(facts: CardFacts) -> str:
    drafter, target = facts.drafter, facts.config.target
    revision = f" (revision {target.revision})" if target.revision else ""
    window = f", window {drafter.sliding_window}" if drafter.sliding_window else ""
    rows = {
        "target": f"{target.model}{revision}",
        "block size": f"{drafter.block_size}: the anchor and {drafter.block_size - 1} drafted tokens",
        "mask token": drafter.mask_token_id,
        "taps (`target_layer_ids`)": (
            f"{list(drafter.target_layer_ids)}, 0-based: the output of decoder layer i, transformers' `hidden_states[i+1]`; "
            f"vLLM's speculators format counts from 1: {[i + 1 for i in drafter.target_layer_ids]}"
        ),
        "layers": f"{drafter.num_layers} ({', '.join(drafter.layer_types)}{window})",
        "attention inside a block": "both directions in full layers, causal in sliding layers",
        "weights": "bfloat16; embedding and output head are the target's and not included",
    }
    return (
        f"# {facts.config.run.name}\n\nA DFlash drafter for speculative decoding with a chain or a draft tree (DDTree).\n\n"
        + _table(["", ""], [[key, str(value)] for key, value in rows.items()])
    )


def _acceptance(facts: CardFacts) -> str:
    if facts.report is None:
        return "Not evaluated before the export."
    if facts.report["drafter"] != facts.fingerprint:
        return "The run's evaluation is of another checkpoint than this one, so its numbers are not shown."
    rows = [
        [
            row["acceptor"],
            "" if row["budget"] is None else str(row["budget"]),
            row["mode"],
            "as recorded" if row["temperature"] is None else f"{row['temperature']:g}",
            str(row["num_prompts"]),
            f"{row['acceptance_macro']:.3f}",
            f"{row['ci95'][0]:.3f} to {row['ci95'][1]:.3f}",
            f"{row['acceptance_micro']:.3f}",
        ]
        for row in facts.report["rows"]
        if row["task"] == ALL_TASKS and row["acceptance_macro"] is not None
    ]
    head = [
        "acceptor",
        "budget",
        "mode",
        "temperature",
        "prompts",
        "tokens a pass",
        "95 %",
        "micro",
    ]
    return (
        "Tokens a verify pass emits (accepted draft tokens and the bonus token), mean over a prompt's passes, then over "
        "held-out prompts; `micro` is the mean over all passes.\n\n" + _table(head, rows)
    )


def _serving(commands: ServeCommands, block_size: int) -> str:
    return (
        f"vLLM counts drafted tokens ({block_size - 1}), SGLang the block ({block_size}). Both decode a chain.\n\n"
        f"```bash\n{commands.vllm}\n```\n\n```bash\n{commands.sglang}\n```"
    )


def _training(facts: CardFacts) -> str:
    train = facts.config.train
    return _table(
        ["", ""],
        [
            ["checkpoint", facts.checkpoint],
            ["loss", _loss(facts.config)],
            ["steps", str(train.steps)],
            ["documents a step", str(train.global_batch_samples)],
            ["blocks a document", f"up to {train.num_anchors}"],
            ["learning rate", f"{train.learning_rate:g}, {train.schedule}"],
            ["started from", train.init_from or "random weights"],
            ["seed", str(facts.config.run.seed)],
        ],
    )


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
    responses = facts.config.data.responses
    if responses.generate:
        how = f"generated by the target at temperature {responses.temperature:g}"
    else:
        how = "as the sources have them"
    rows = []
    for source in facts.config.data.sources:
        mine = [e for e in facts.entries if e.source == source.name and e.split == "train"]
        tokens = sum(e.num_response_tokens for e in mine)
        rows.append([source.name, source.license, str(len(mine)), str(tokens)])
    table = _table(["source", "license", "training samples", "response tokens"], rows)
    return f"Responses are {how}. Extracted rows, before training's own length limit:\n\n{table}"


def _verification(verification: Verification) -> str:
    return (
        f"Reloaded in a new process and compared on {verification.num_blocks} blocks of {verification.num_rows} recorded "
        f"samples, in float32: logits differ from the training code's by {verification.reload_difference:.1e} of the "
        f"largest logit. Rounding the weights to bfloat16 moved logits by up to {verification.rounding_difference:.1e} of "
        f"the largest and left {verification.rounding_same_argmax:.1%} of the drafted tokens as they were."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
