"""How the two servers start with an exported drafter. vLLM counts drafted tokens (K-1), SGLang the whole block (K)."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass


@dataclass(frozen=True)
class ServeCommands:
    vllm: str
    sglang: str


def serve_commands(target: str, drafter: str, block_size: int) -> ServeCommands:
    """Shell commands, one line each. Source: z-lab's README; speculation is block_size - 1 tokens in both."""
    speculative = {"method": "dflash", "model": drafter, "num_speculative_tokens": block_size - 1}
    vllm = ["vllm", "serve", target, "--speculative-config", json.dumps(speculative)]
    vllm += ["--attention-backend", "flash_attn", "--max-num-batched-tokens", "32768"]
    sglang = ["python", "-m", "sglang.launch_server", "--model-path", target]
    sglang += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", drafter]
    sglang += ["--speculative-num-draft-tokens", str(block_size)]
    sglang += ["--attention-backend", "fa3", "--mem-fraction-static", "0.75"]
    return ServeCommands(shlex.join(vllm), shlex.join(sglang))
