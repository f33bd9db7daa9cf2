"""`./launch.sh convert IN OUT --to FORMAT`: a drafter folder in another format; without OUT, what IN is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from common.command import StageParser, run_command


def main(options: argparse.Namespace) -> None:
    if options.out is None:
        require_nothing_to_write(options)
    lines = show(options.source) if options.out is None else convert(options)
    sys.stdout.write("\n".join(lines) + "\n")


def require_nothing_to_write(options: argparse.Namespace) -> None:
    """Raises ValueError if an option that only OUT has a use for was given without it."""
    for name in ("to", "target", "dtype", "self_contained"):
        if vars(options)[name]:
            raise ValueError(
                f"--{name.replace('_', '-')} is about OUT, and none is given: convert IN OUT --to zlab|speculators"
            )


def show(source: Path) -> list[str]:
    """What the folder holds, with every note; its weights are checked too."""
    # imports take seconds; a wrong argument is told before
    from drafter.folder import check_drafter, find_drafter_folder

    found = find_drafter_folder(source)
    config = found.config
    target = found.verifier.name_or_path if found.verifier else "not named"
    window = f", window {config.sliding_window}" if config.sliding_window else ""
    lines = [
        f"{source}: a DFlash drafter in {found.format} format",
        f"  target: {target}, {config.num_target_layers or 'unknown'} layers, hidden size {config.hidden_size}, "
        f"vocabulary {config.vocab_size}",
        f"  taps: {list(config.target_layer_ids)} (0-based outputs)",
        f"  block: {config.block_size}, mask token {config.mask_token_id}",
        f"  layers: {', '.join(config.layer_types)}{window}",
    ]
    return lines + [f"  note: {note}" for note in check_drafter(source)]


def convert(options: argparse.Namespace) -> list[str]:
    from export.conversion import convert_folder, dtype_named, find_target
    from export.serve import serve_commands

    if options.to is None:
        raise ValueError("--to names the format of OUT: zlab or speculators")
    target = options.target and find_target(options.target, options.self_contained)
    done = convert_folder(
        options.source,
        options.out,
        options.to,
        target,
        dtype_named(options.dtype),
        options.self_contained,
    )
    name = options.target or "TARGET"
    commands = serve_commands(name, str(done.folder), done.config, options.to)
    lines = [f"converted {options.source} to {done.folder}, read back and found equal"]
    lines += [f"  note: {note}" for note in done.notes]
    lines += ["", f"vLLM:\n  {commands.vllm}"]
    lines += [f"\nSGLang:\n  {commands.sglang}"] if commands.sglang else []
    return [*lines, "", *(f"- {caveat}" for caveat in commands.caveats)]


def parser() -> argparse.ArgumentParser:
    result = StageParser(
        prog="./launch.sh convert", description="A drafter folder in another format."
    )
    result.add_argument("source", type=Path, metavar="IN", help="a drafter folder of either format")
    result.add_argument(
        "out",
        type=Path,
        metavar="OUT",
        nargs="?",
        help="folder to write, which must not exist; without it IN is only described and checked",
    )
    result.add_argument("--to", choices=["zlab", "speculators"], help="format of OUT")
    result.add_argument(
        "--target",
        help="the drafter's target, a folder or hub id: speculators' format names it, z-lab's states its depth",
    )
    result.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="of the tensors; default: as they are"
    )
    result.add_argument(
        "--self-contained", action="store_true", help="add the target's embedding and head"
    )
    result.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return result


if __name__ == "__main__":
    run_command(parser(), main)
