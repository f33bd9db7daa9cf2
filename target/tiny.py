"""A tiny random target with a byte tokenizer: every stage on it in seconds, for tests and configs/debug.yaml."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from configs.schema import TargetSection, TinyTarget
from target.byte_tokenizer import EOS_ID, FIRST_MERGED_ID, PAD_ID, byte_tokenizer

_SLIDING_WINDOW = 8
_LOGIT_NATS = 3.0
_SHARPNESS = 3.0
_HYBRID_SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,  # two value heads share a key head, as in the released models
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
"""Gated-DeltaNet layers and, by HF's default, every fourth one full attention."""


def write_tiny_target(folder: Path, section: TargetSection, tiny: TinyTarget) -> None:
    """Weights, tokenizer and generation config into `folder`; equal settings give equal bytes."""
    if section.vocab_size < FIRST_MERGED_ID:
        raise ValueError(
            f"target.vocab_size={section.vocab_size}: a tiny target needs at least {FIRST_MERGED_ID} (256 bytes and the "
            "special tokens)"
        )
    if section.hidden_size % 32:
        raise ValueError(
            f"target.hidden_size={section.hidden_size}: a tiny target needs a multiple of 32"
        )
    tokenizer = byte_tokenizer()
    model = _random_model(section, tiny)
    model.generation_config = GenerationConfig(eos_token_id=[EOS_ID], pad_token_id=PAD_ID)
    disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _random_model(section: TargetSection, tiny: TinyTarget) -> PreTrainedModel:
    num_heads = section.hidden_size // 16
    sizes = {
        "vocab_size": section.vocab_size,
        "hidden_size": section.hidden_size,
        "num_hidden_layers": section.num_layers,
        "intermediate_size": 2 * section.hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    if tiny.family == "llama":  # tied, so that tests see both
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    elif tiny.family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    elif tiny.family == "qwen3_5":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **_HYBRID_SIZES))
    else:
        kinds = ["sliding_attention", "full_attention"]
        model = Qwen3ForCausalLM(
            Qwen3Config(
                **sizes,
                use_sliding_window=True,
                sliding_window=_SLIDING_WINDOW,
                max_window_layers=0,
                layer_types=[kinds[i % 2] for i in range(section.num_layers)],
            )
        )
    _randomise(model, tiny.seed)
    return model.bfloat16()


@torch.no_grad()
def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Activations of size 1, logits of some nats, sharp attention: a text that depends on its context and loops late."""
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # half-lives from one token to some hundred
            parameter.copy_(torch.linspace(-5.0, 0.0, parameter.numel()))
        elif name.endswith("dt_bias"):
            parameter.normal_(0.0, 1.0, generator=generator)
        elif name.endswith("conv1d.weight"):
            parameter.normal_(0.0, 0.6, generator=generator)
        elif parameter.ndim == 1:  # norms
            parameter.normal_(1.0, 0.2, generator=generator)
            spread = _SHARPNESS if name.endswith("q_norm.weight") else 1.0
            parameter *= spread
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            if name.endswith("q_proj.weight"):
                parameter *= _SHARPNESS
            elif name.startswith("lm_head") or (tied and "embed_tokens" in name):
                parameter *= _LOGIT_NATS
