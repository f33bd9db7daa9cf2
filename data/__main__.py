"""`./launch.sh data CONFIG`: conversations -> corpus shards with labels of the target, under `<run>/corpus`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from common.command import run_command, stage_parser
from common.distributed import distributed, rank_from_environment
from common.fingerprint import require_equal
from configs.load import load_config
from configs.schema import Config
from data.build import build_corpus, format_counts, select_only
from data.corpus import read_corpus_manifest
from data.mix import unverified
from data.page import Wanted, page_path, write_page
from data.pin import hub_commit, included_files, pin_file
from data.show import show_rows, wants_colour
from data.template import ChatTemplate
from data.verify import verify_corpus
from target.identity import target_identity
from target.load import load_tokenizer

# Ranks finish their last units minutes apart, hours on a long run; the launcher ends them all if one dies.
_TIMEOUT_S = 7 * 86_400.0


def main(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.overrides)
    is_look = options.select or options.pin or options.verify or options.show is not None
    if is_look and rank_from_environment() > 0:
        return  # one rank is enough for what makes no label
    if options.select:
        num_prompts = select_only(config, options.select)
        print(f"wrote {num_prompts} prompts to {options.select}; no label was made")
        return
    if options.pin:
        _pin(Path(options.config))
        return
    if options.verify:
        _verify(config)
        return
    if options.show is not None:
        _show(config, options.show)
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
        _write_page(config, folder)


def _write_page(config: Config, folder: Path) -> None:
    """Unless it is there, or the corpus was made before there were such pages."""
    path = page_path(folder)
    if not path.is_file() and (folder / "findings.json").is_file():
        unchecked = unverified(config.data)
        sources = config.data.sources
        wanted = {s.name: Wanted(s.take, s.license, s.name in unchecked) for s in sources}
        write_page(folder, config.run.name, wanted)
    if path.is_file():
        print(f"page: {path}")


def _pin(file: Path) -> None:
    for each in included_files(file):
        for pinned in pin_file(each, hub_commit):
            print(f"{each}: {pinned.path} {pinned.before or 'unpinned'} -> {pinned.commit}")


def _verify(config: Config) -> None:
    found = verify_corpus(config)
    print(
        f"corpus of {config.run.folder} is whole: {found.num_rows} rows with {found.num_tokens} tokens of "
        f"{found.num_conversations} conversations, {found.num_rejected} rejected rows listed"
    )


def _show(config: Config, num_rows: int) -> None:
    """Print rows of the finished corpus; quiet when the reader (`| head`) has seen enough."""
    if num_rows < 1:
        raise ValueError(f"--show {num_rows}: give the number of rows, at least 1")
    folder = config.run.folder / "corpus"
    manifest = read_corpus_manifest(folder)
    wanted = {"tokenizer": target_identity(config.target)["tokenizer"]}
    require_equal(f"the corpus in {folder}", manifest.settings, wanted, "use its own recipe")
    tokenizer = load_tokenizer(config.target)
    template = ChatTemplate(tokenizer, config.target.chat_template_kwargs)
    colour = wants_colour(sys.stdout.isatty(), os.environ)
    try:
        for line in show_rows(folder, manifest, tokenizer, template, num_rows, colour):
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    parser = stage_parser(
        "data", "Conversations to corpus shards, labelled by the target. Resumes where it stopped."
    )
    looks = parser.add_mutually_exclusive_group()
    looks.add_argument(
        "--select",
        type=Path,
        metavar="FILE",
        help="only write the prompts that would be labelled, as JSON lines, and stop",
    )
    looks.add_argument(
        "--show",
        type=int,
        metavar="N",
        help="only print N rows of the finished corpus in colour: context, generated, masked",
    )
    looks.add_argument(
        "--verify", action="store_true", help="read a finished corpus again, whole, and check it"
    )
    looks.add_argument(
        "--pin", action="store_true", help="write every hub set's newest commit into the recipe"
    )
    run_command(parser, main)
