"""`./launch.sh export CONFIG`: checkpoint -> a folder that vLLM and SGLang serve, verified by reloading it."""

from __future__ import annotations

import argparse

from common.command import run_command, stage_parser
from common.distributed import rank_from_environment
from configs.load import load_config


def main(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.overrides)
    if options.public and options.push is None:
        raise ValueError("--public goes with --push OWNER/NAME")
    if rank_from_environment() != 0:
        return
    # after the recipe is known to be good: these imports take seconds
    from export.push import push_folder
    from export.stage import export_drafter

    exported = export_drafter(config, options.format, options.self_contained, options.push)
    verified, commands = exported.verification, exported.commands
    print(f"exported {exported.checkpoint.name} to {exported.folder}")
    print(
        f"verified on {verified.num_blocks} blocks of {verified.num_rows} samples: reloaded logits differ by "
        f"{verified.reload_difference:.1e} of the largest, rounding to bf16 by {verified.rounding_difference:.1e}, "
        f"{verified.rounding_same_argmax:.1%} of drafted tokens unchanged by it; embedding and head are the target's"
    )
    print(f"\nvLLM (counts drafted tokens):\n  {commands.vllm}")
    if commands.sglang is not None:
        print(f"\nSGLang (counts the block):\n  {commands.sglang}")
    print("\n" + "\n".join(f"- {caveat}" for caveat in commands.caveats))
    if options.push is not None:
        print(f"\npushed to {push_folder(exported.folder, options.push, options.public)}")


if __name__ == "__main__":
    parser = stage_parser("export", "Export a checkpoint for serving, verified by reloading it.")
    parser.add_argument(
        "--format",
        choices=["zlab", "speculators"],
        default="zlab",
        help="zlab (default): vLLM, SGLang, z-lab's code; speculators: vLLM and the speculators library",
    )
    parser.add_argument(
        "--self-contained", action="store_true", help="add the target's embedding and head"
    )
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="upload the verified folder to the hub; needs a login; private unless --public",
    )
    parser.add_argument("--public", action="store_true", help="make a new repository public")
    run_command(parser, main)
