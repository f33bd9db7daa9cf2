"""How the servers start with an exported drafter, and what they are known to get wrong with one like it.

vLLM counts drafted tokens (K-1), SGLang the whole block (K). Read in the released packages: vLLM 0.33.0 (config/speculative.py,
models/qwen3_dflash.py, transformers_utils/configs/speculators/algos.py), SGLang 0.5.23 (arg_groups/speculative_hook.py,
speculative/dflash_utils.py, models/dflash.py); docs/serving.md lists the keys that each of them uses.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from drafter.config import FULL, SLIDING, DrafterConfig
from drafter.folder import Format

VLLM, SGLANG = "vLLM 0.33.0", "SGLang 0.5.23"


@dataclass(frozen=True)
class ServeCommands:
    vllm: str
    sglang: str | None
    """None for a format that SGLang does not read."""
    caveats: tuple[str, ...]
    """One sentence or two each, with the versions they hold for."""


def serve_commands(
    target: str, drafter: str, config: DrafterConfig, drafter_format: Format
) -> ServeCommands:
    """Shell commands, one line each; both run without remote code."""
    speculative = {
        "method": "dflash",
        "model": drafter,
        "num_speculative_tokens": config.block_size - 1,
    }
    vllm = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative)]
    vllm += ["--attention-backend", "FLASH_ATTN", "--max-num-batched-tokens", "32768"]
    sglang = ["python", "-m", "sglang.launch_server", "--model-path", target]
    sglang += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", drafter]
    sglang += ["--speculative-num-draft-tokens", str(config.block_size)]
    sglang += ["--attention-backend", "fa3", "--mem-fraction-static", "0.75"]
    return ServeCommands(
        shlex.join(vllm),
        shlex.join(sglang) if drafter_format == "zlab" else None,
        tuple(_caveats(config, drafter_format)),
    )


def _caveats(config: DrafterConfig, drafter_format: Format) -> list[str]:
    kinds = set(config.layer_types)
    caveats = [
        f"Both servers draft and verify a chain ({VLLM}, {SGLANG}): the acceptance of trees is this pipeline's and DDTree's.",
        f"vLLM counts drafted tokens ({config.block_size - 1}), SGLang the block ({config.block_size}); fewer is allowed and "
        "only drafts less.",
        f"{SGLANG} passes over tensors it does not know and takes 16 for a missing block_size; this folder has neither "
        "(both are written and were verified). It wants pp_size 1 and sets max_running_requests to 48 unless told.",
        "`fa3` is for Hopper; elsewhere leave --attention-backend out. At temperature > 0 vLLM takes the drafter's "
        'probabilities into account only with "draft_sample_method": "probabilistic" in the speculative config.',
    ]
    if kinds == {FULL, SLIDING}:
        caveats += [
            "Mixed sliding and full layers need vLLM's V2 model runner: 0.33.0 chooses it, 0.26.0 wants "
            "VLLM_USE_V2_MODEL_RUNNER=1 (vllm#47914, vllm#50707), older versions run sliding layers as full ones and collapse "
            "behind the window (vllm#40898).",
            "With a mixed drafter vLLM 0.27.1 served no prefix-cache hit on a hybrid target (vllm#51250, vllm#50457): measure "
            "time to first token with your prompts.",
        ]
    if SLIDING in kinds:
        caveats.append(
            "On CPU vLLM 0.26.0 recycled the key-value blocks of sliding drafter layers and accepted almost nothing "
            "(vllm#50169)."
        )
    if drafter_format == "speculators":
        caveats += _speculators_caveats(kinds)
    return caveats


def _speculators_caveats(kinds: set[str]) -> list[str]:
    caveats = [f"{SGLANG} does not read speculators' format; serve z-lab's format there."]
    if kinds == {FULL, SLIDING}:
        caveats.append(
            f"Do not serve this folder with {VLLM}: it makes every layer of a speculators drafter causal or none, and here "
            "sliding layers are and full layers are not (vllm#56692, open). Serve z-lab's format instead."
        )
    if kinds == {FULL}:
        caveats.append(
            "sliding_window_non_causal is true although no layer slides: the library ignores it, and "
            f"{VLLM} would make the full layers causal without it (vllm#56692)."
        )
    return caveats
