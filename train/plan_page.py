"""`./launch.sh plan CONFIG`: what a run costs and whether it can end, before anything runs. The verdict first, then the facts.

Loads no model and no torch. `stop`: what cannot end; `mind`: what a person should decide knowingly; `go`: nothing of either.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.command import run_command, stage_parser
from configs.load import load_config
from configs.schema import Config
from data.lengths import Lengths
from data.mix import plan_data, unpinned
from extract.plan import (
    UNKNOWN_SIZE,
    ExtractPlan,
    format_bytes,
    free_bytes,
    plan_extract,
    raw_bytes_per_token,
)
from train.plan import TrainPlan, plan_train

NUM_GPUS, LARGE_GPU_GB = 8, 141
MANY_TOKENS = 20_000_000  # fewer are an hour's work at most, whatever the target
WIDTH = 116
WINDOW = 4  # blocks shuffled together, for advice


@dataclass(frozen=True)
class Finding:
    kind: Literal["stop", "mind"]
    what: str
    remedies: tuple[str, ...] = ()
    """Each alone is enough."""


@dataclass(frozen=True)
class Page:
    config: Config
    extract: ExtractPlan
    train: TrainPlan
    recipe: str
    """As the user named it."""

    def lines(self) -> list[str]:
        sections = {
            "data": plan_data(self.config.data),
            "extract": self.extract.lines(),
            "train": self.train.lines(),
        }
        facts = [line for name, lines in sections.items() for line in (name, *_indented(lines))]
        lines = [*self.verdict(), "", *facts, "", *self.next_commands()]
        return [part for line in lines for part in _wrapped(line)]

    def findings(self) -> list[Finding]:
        found = [*self._disk(), *self._extract_memory(), *self._train_memory(), *self._use()]
        return sorted(found, key=lambda finding: finding.kind == "mind")

    def verdict(self) -> list[str]:
        """The page's first lines: may it start, and if not, what to change."""
        findings = self.findings()
        stops = [finding for finding in findings if finding.kind == "stop"]
        name = self.config.run.name
        if stops:
            title = f"{name}: DO NOT START: {len(stops)} thing{'s' * (len(stops) > 1)} cannot end"
        elif self.extract.lengths is None:
            title = f"{name}: UNKNOWN SIZE: {UNKNOWN_SIZE}"
        else:
            title = f"{name}: GO: {self._cost()}"
        lines = [title]
        for finding in findings:
            lines.append(f"  {finding.kind}: {finding.what}")
            lines += [f"    {'or ' * (n > 0)}{remedy}" for n, remedy in enumerate(finding.remedies)]
        return lines

    def _cost(self) -> str:
        features = f"{format_bytes(self.extract.planned_bytes or 0)} of features"
        hours = {"extract": self.extract.hours(NUM_GPUS), "train": self.train.hours(NUM_GPUS)}
        known = [f"{stage} {_hours(taken)}" for stage, taken in hours.items() if taken is not None]
        return features + (f"; on {NUM_GPUS} GPUs: {', '.join(known)}" if known else "")

    def _disk(self) -> Iterator[Finding]:
        plan, checkpoints = self.extract, self.train.checkpoints_bytes
        planned = plan.planned_bytes
        if planned is not None and plan.free_bytes is not None and not plan.fits:
            what = f"features need {format_bytes(planned)}, {plan.location} has {format_bytes(plan.free_bytes)} free"
            yield Finding("stop", what, (*plan.would_fit(), *self._streaming(), ELSEWHERE))
            return
        free = free_bytes(str(self.config.run.folder))
        together = (
            planned
            if planned and self._is_one_disk() and not self.config.extract.free_disk_bytes
            else 0
        )
        if free is not None and checkpoints + together > free:
            what = f"checkpoints need {format_bytes(checkpoints)}" + (
                f" beside {format_bytes(together)} of features" if together else ""
            )
            remedies = ("a smaller train.keep_checkpoints", "run.output_dir on another disk")
            yield Finding("stop", f"{what}, {self.config.run.folder} has {format_bytes(free)} free", remedies)  # fmt: skip

    def _streaming(self) -> Iterator[str]:
        """A ring of features in place of all: half the free disk, if that holds enough blocks to shuffle and to overlap."""
        plan, budget = self.extract, (self.extract.free_bytes or 0) // 2
        block = (
            plan.shard_bytes * plan.stored_bytes_per_token(plan.codec) / raw_bytes_per_token(plan)
        )
        if plan.held_out_share is not None or budget < 4 * WINDOW * block:
            return
        hours, epochs = plan.hours(NUM_GPUS), self.train.epochs
        cost = "" if hours is None or epochs is None else (
            f": {epochs:.1f} epochs are extracted anew, {_hours(hours * epochs)} on {NUM_GPUS} GPUs beside the trainer's"
        )  # fmt: skip
        size = 10 ** (len(str(budget)) - 1) * int(str(budget)[0])  # one digit of it
        yield f"train.source=stream train.shuffle_window={WINDOW} train.stream_bytes={size:_}{cost}"

    def _is_one_disk(self) -> bool:
        """Whether features and checkpoints share a disk."""
        if self.extract.free_bytes is None:
            return False
        return _device(Path(self.extract.location)) == _device(self.config.run.folder)

    def _extract_memory(self) -> Iterator[Finding]:
        found, target = self.extract.footprint, self.config.target
        if found is not None and found.gpu_gb is None and target.device_map is None:
            what = (
                f"a rank of extract needs about {format_bytes(found.device)}, more than any one GPU"
            )
            yield Finding("stop", what, ("target.device_map=auto with NPROC=1", "a smaller extract.batch_tokens"))  # fmt: skip
        if self.extract.tokens_per_s is None and (self.extract.num_tokens or 0) > MANY_TOKENS:
            how = "a first extract logs tokens/s; then give extract.tokens_per_s"
            guess = "a guess" if self.extract.speed else "unknown"
            yield Finding("mind", f"extraction's hours are {guess}: {how}")

    def _train_memory(self) -> Iterator[Finding]:
        stage = self.config.train.zero_stage
        needed = {count: self.train.gpu_bytes(stage, count) for count in (1, NUM_GPUS)}
        if needed[NUM_GPUS] <= LARGE_GPU_GB * 1e9:
            if needed[1] > LARGE_GPU_GB * 1e9:
                yield Finding("mind", f"training takes about {format_bytes(needed[NUM_GPUS])} a GPU on 8 and does not fit one GPU")  # fmt: skip
            return
        what = f"training takes about {format_bytes(needed[NUM_GPUS])} a GPU on 8 GPUs at train.zero_stage={stage}"
        yield Finding("stop", what, tuple(self._lighter()))

    def _lighter(self) -> Iterator[str]:
        train = self.config.train
        if not train.activation_checkpointing:
            yield "train.activation_checkpointing=true"
        for stage in range(train.zero_stage + 1, 4):
            if self.train.gpu_bytes(stage, NUM_GPUS) <= LARGE_GPU_GB * 1e9:
                yield f"train.zero_stage={stage}"
                break
        yield f"fewer blocks or tokens a forward (train.num_anchors={train.num_anchors}, train.max_tokens={train.max_tokens})"

    def _use(self) -> Iterator[Finding]:
        """What is paid for and not used."""
        lengths, train = self.extract.lengths, self.config.train
        if lengths is not None and lengths.num_tokens and train.max_tokens < lengths.longest:
            yield from self._beyond(lengths)
        epochs = self.train.epochs
        if epochs is not None and epochs < 0.99:
            what = f"train.steps={train.steps:,} see {epochs:.0%} of the training samples once, features of the rest are made for nothing"  # fmt: skip
            yield Finding("mind", what)
        names = unpinned(self.config.data)
        if names:
            what = f"{len(names)} hub sources name no commit: ./launch.sh data CONFIG --pin"
            yield Finding("mind", what)

    def _beyond(self, lengths: Lengths) -> Iterator[Finding]:
        limit = self.config.train.max_tokens
        _, tokens = lengths.share_above(limit)
        if tokens > 0.01:
            yield Finding(
                "mind",
                f"{tokens:.0%} of the tokens lie beyond train.max_tokens={limit} and are stored, never trained on: "
                f"raise it, or data.max_tokens={limit}",
            )

    def next_commands(self) -> list[str]:
        stages = ("data", "extract", "train", "evaluate", "export")
        return ["then", *_indented(f"./launch.sh {stage} {self.recipe}" for stage in stages)]


ELSEWHERE = "extract.folder on a larger disk, or s3://bucket/prefix"


def _hours(hours: float) -> str:
    return f"{hours:,.1f} h" if hours < 48 else f"{hours / 24:,.1f} days"


def _device(folder: Path) -> int:
    """Of the disk that `folder` is or will be on."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return there.stat().st_dev


def _wrapped(line: str) -> list[str]:
    """Tables are narrower than a page and stay as they are."""
    if len(line) <= WIDTH:
        return [line]
    margin = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line.strip(),
        WIDTH,
        initial_indent=margin,
        subsequent_indent=margin + "    ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def plan_page(config: Config, recipe: str) -> Page:
    return Page(config, plan_extract(config), plan_train(config), recipe)


def main(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.overrides)
    sys.stdout.write("\n".join(plan_page(config, options.config).lines()) + "\n")


if __name__ == "__main__":
    run_command(
        stage_parser("plan", "What a run costs and whether it can end, before anything runs."), main
    )
