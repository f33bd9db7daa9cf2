"""A tiny random target with a byte tokenizer: every stage on it in seconds, for tests and configs/debug.yaml."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from configs.schema import TargetSection, TinyTarget

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
"""Ids 256..259, after the 256 bytes."""
_PAD, _EOS = 256, 258
_SLIDING_WINDOW = 8
_LOGIT_NATS = 3.0
_SHARPNESS = 3.0
_CHAT_TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""


def write_tiny_target(folder: Path, section: TargetSection, tiny: TinyTarget) -> None:
    """Weights, tokenizer and generation config into `folder`; equal settings give equal bytes."""
    smallest = 256 + len(SPECIAL_TOKENS)
    if section.vocab_size < smallest:
        raise ValueError(
            f"target.vocab_size={section.vocab_size}: a tiny target needs at least {smallest} (256 bytes and "
            f"{len(SPECIAL_TOKENS)} special tokens)"
        )
    if section.hidden_size % 32:
        raise ValueError(
            f"target.hidden_size={section.hidden_size}: a tiny target needs a multiple of 32"
        )
    tokenizer = _byte_tokenizer()
    model = _random_model(section, tiny)
    model.generation_config = GenerationConfig(eos_token_id=[_EOS], pad_token_id=_PAD)
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
        "eos_token_id": _EOS,
        "pad_token_id": _PAD,
    }
    if tiny.family == "llama":  # tied, so that tests see both
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    elif tiny.family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
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
        if parameter.ndim == 1:  # norms
            parameter.normal_(1.0, 0.2, generator=generator)
            spread = _SHARPNESS if name.endswith("q_norm.weight") else 1.0
            parameter *= spread
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            if name.endswith("q_proj.weight"):
                parameter *= _SHARPNESS
            elif name.startswith("lm_head") or (tied and "embed_tokens" in name):
                parameter *= _LOGIT_NATS


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    end_of_text, im_start, im_end, mask = SPECIAL_TOKENS
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=end_of_text,
        additional_special_tokens=[im_start],
        eos_token=im_end,
        mask_token=mask,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(256, 260))
    return tokenizer
