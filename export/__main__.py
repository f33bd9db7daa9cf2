"""`./launch.sh export CONFIG`: checkpoint -> a folder that vLLM and SGLang serve, verified by reloading it."""

from __future__ import annotations

import argparse

from common.command import run_command, stage_parser
from common.distributed import rank_from_environment
from configs.load import load_config


def main(options: argparse.Namespace) -> None:
    config = load_config(options.config, options.overrides)
    if rank_from_environment() != 0:
        return
    # after the recipe is known to be good: these imports take seconds
    from export.zlab import export_drafter

    exported = export_drafter(config)
    verified = exported.verification
    print(f"exported {exported.checkpoint.name} to {exported.folder}")
    print(
        f"verified on {verified.num_blocks} blocks of {verified.num_rows} samples: reloaded logits differ by "
        f"{verified.reload_difference:.1e} of the largest, rounding to bf16 by {verified.rounding_difference:.1e}, "
        f"{verified.rounding_same_argmax:.1%} of drafted tokens unchanged by it"
    )
    print(f"\nvLLM (counts drafted tokens):\n  {exported.commands.vllm}")
    print(f"\nSGLang (counts the block):\n  {exported.commands.sglang}")


if __name__ == "__main__":
    run_command(
        stage_parser("export", "Export a checkpoint for serving, verified by reloading it."), main
    )
