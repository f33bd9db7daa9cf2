"""Finding where verify passes start (train.anchors: walk): documents that walk together against replaying every token.

    python -m bench.walk_starts CONFIG [--drafter FOLDER] [--documents 128] [--output outputs/bench/walk_starts.json]

CONFIG needs features and a trained drafter (a random one accepts nothing, so that its passes start at every token). Both ways
read the same training documents and take turns in this process, on one thread; processor time, the best of three. They must
find the same starts, but for near-ties that rounding flips: how many documents agree is printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from common.distributed import Ranks
from common.files import write_json
from configs.load import load_config
from configs.schema import Config, TrainSection
from data.features import FeatureSet, RowEntry, open_features
from drafter.model import Drafter
from evaluation.inputs import find_drafter
from evaluation.replay import ReplayOptions, replay_row
from target.head import TargetHead, load_target_head
from train.vocabulary import TrainingHead
from train.walks import find_walk_starts

_REPEATS = 3


@dataclass(frozen=True)
class Row:
    documents: int
    response_tokens: int
    passes: int
    agree: int
    """Documents in which both find as many passes."""
    replay_s: float
    walk_s: float

    @property
    def ratio(self) -> float:
        return self.replay_s / self.walk_s


def measure(config: Config, folder: Path | None, num_documents: int) -> Row:
    torch.set_num_threads(1)
    drafter = find_drafter(config, folder).load(torch.device("cpu"), torch.float32)
    features = open_features(config.run.folder / "features")
    head = load_target_head(features.checked_head(), "cpu", torch.float32)
    entries = features.of_split("train")[:num_documents]
    # replay is not cut at train.max_tokens: only documents that need no cut are compared
    entries = [entry for entry in entries if entry.num_tokens <= config.train.max_tokens]
    work = (config.train, drafter, head, features, entries)
    replayed, replay_s, walked, walk_s = {}, [], {}, []
    for _ in range(_REPEATS):
        replayed = _timed(replay_s, lambda: _replay(*work))
        walked = _timed(walk_s, lambda: _walk(*work))
    return Row(
        len(entries),
        sum(entry.num_response_tokens for entry in entries),
        sum(walked.values()),
        sum(replayed[sample_id] == count for sample_id, count in walked.items()),
        min(replay_s),
        min(walk_s),
    )


def _timed(seconds: list[float], work: Callable[[], dict[str, int]]) -> dict[str, int]:
    start = time.process_time()
    found = work()
    seconds.append(time.process_time() - start)
    return found


def _replay(
    train: TrainSection,
    drafter: Drafter,
    head: TargetHead,
    features: FeatureSet,
    entries: list[RowEntry],
) -> dict[str, int]:
    """Passes by sample id."""
    options = ReplayOptions((train.tree_budget,), names=("tree",))
    rows = (replay_row(drafter, head, features.read(entry), options) for entry in entries)
    return {row.prompt_id: len(row.passes[f"tree-{train.tree_budget}"]) for row in rows}


def _walk(
    train: TrainSection,
    drafter: Drafter,
    head: TargetHead,
    features: FeatureSet,
    entries: list[RowEntry],
) -> dict[str, int]:
    ranks = Ranks(0, 1, 0, torch.device("cpu"))
    whole = TrainingHead(head.head)
    found = find_walk_starts(drafter, head.embedding, whole, features, entries, train, ranks)
    assert found is not None  # nothing stops it
    return {sample_id: len(starts) for sample_id, starts in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument(
        "--drafter", type=Path, help="checkpoint or export; default: the run's best"
    )
    parser.add_argument("--documents", type=int, default=128, help="training documents (128)")
    parser.add_argument("--output", type=Path, default=Path("outputs/bench/walk_starts.json"))
    options = parser.parse_args()
    row = measure(load_config(options.config), options.drafter, options.documents)
    print(
        f"{row.documents} documents, {row.response_tokens:,} response tokens, {row.passes:,} passes; "
        f"{row.agree} agree\n"
        f"every token {row.replay_s:.1f} s, walking {row.walk_s:.1f} s of processor time: {row.ratio:.1f} times as fast"
    )
    write_json(options.output, asdict(row))


if __name__ == "__main__":
    main()
