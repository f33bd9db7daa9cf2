"""A script for two ranks: a run killed after step 4, poisoned on one rank, then continued in health."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from train_runs import killed_after_saving

import train.loop
from common.command import StoppedElsewhere
from common.distributed import distributed
from configs.load import load_config
from target.head import TargetHead, load_target_head
from train.loop import train_drafter


def poisoned(*arguments: Any) -> TargetHead:
    head = load_target_head(*arguments)
    head.embedding[:, 0] = math.nan
    return head


def main(recipe: str, folder: Path) -> None:
    config = load_config(recipe, [])
    with distributed(1) as ranks:
        with killed_after_saving(4):
            train_drafter(config, ranks)
        if ranks.rank == 1:
            train.loop.load_target_head = poisoned
        said = "nothing"
        try:
            train_drafter(config, ranks)
        except (ValueError, StoppedElsewhere) as error:
            said = str(error)
        (folder / f"said-{ranks.rank}.json").write_text(json.dumps(said))
        index = (config.run.folder / "checkpoints" / "index.json").read_text()
        (folder / f"index-{ranks.rank}.json").write_text(index)
        train.loop.load_target_head = load_target_head
        train_drafter(config, ranks)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
