"""`./launch.sh data CONFIG`: conversations -> corpus shards with labels of the target, under `<run>/corpus`."""

from __future__ import annotations

import argparse
from pathlib import Path

from common.command import run_command, stage_parser
from common.distributed import distributed
from configs.load import load_config
from data.build import build_corpus, format_counts, select_only

# Ranks finish their last units minutes apart, hours on a long run; the launcher ends them all if one dies.
_TIMEOUT_S = 7 * 86_400.0


def main(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.overrides)
    if options.select:
        num_prompts = select_only(config, options.select)
        print(f"wrote {num_prompts} prompts to {options.select}; no label was made")
        return
    with distributed(config.run.cpu_threads, _TIMEOUT_S) as ranks:
        built = build_corpus(config, ranks)
        if not ranks.is_main:
            return
        folder, manifest = config.run.folder / "corpus", built.manifest
        print(format_counts(manifest.counts))
        state = "was complete already, nothing to do" if built.was_complete else "complete"
        print(
            f"corpus {folder} {state}: {manifest.num_rows} samples, {manifest.num_tokens} tokens "
            f"({manifest.num_response_tokens} of responses) in {len(manifest.shards)} shards"
        )


if __name__ == "__main__":
    parser = stage_parser(
        "data", "Conversations to corpus shards, labelled by the target. Resumes where it stopped."
    )
    parser.add_argument(
        "--select",
        type=Path,
        metavar="FILE",
        help="only write the prompts that would be labelled, as JSON lines, and stop",
    )
    run_command(parser, main)
