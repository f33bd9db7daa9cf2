"""A small Gated-DeltaNet hybrid that has learnt to continue Python code: a target on which drafts are sometimes right.

Made from the text that Python itself brings (target/python_text.py), with a byte-pair vocabulary learnt from the same text.
Equal settings on one kind of machine, one Python and one torch give equal bytes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from common.files import write_json
from common.fingerprint import fingerprint
from configs.schema import HybridTarget, TargetSection
from target.byte_tokenizer import EOS_ID, FIRST_MERGED_ID, PAD_ID, byte_tokenizer, learn_merges
from target.language_model import Fitted, fit
from target.python_text import Passage

logger = logging.getLogger(__name__)

_HEAD_DIM = 32
_NUM_HELD_OUT_ROWS = 32


def write_hybrid_target(
    folder: Path,
    section: TargetSection,
    hybrid: HybridTarget,
    passages: Sequence[Passage],
    training_folder: Path,
) -> Path:
    """Weights, tokenizer, generation config, `training.json`, and passages as `prompts-<task>.jsonl` (held out) and
    `learnt-<task>.jsonl` (the others: many, and fine to train a drafter on).

    Training that was stopped continues from its last state in `training_folder`: the file that is returned, to be deleted
    when `folder` is in place. Raises ValueError for sizes that make no model or for too little text.
    """
    _require_sizes(section)
    learnt = [passage for passage in passages if not passage.is_held_out]
    held_out = [passage for passage in passages if passage.is_held_out]
    tokenizer = _tokenizer(section, learnt)
    rows = _rows(tokenizer, learnt, hybrid.row_tokens)
    held_out_rows = _rows(tokenizer, held_out, hybrid.row_tokens)[:_NUM_HELD_OUT_ROWS]
    set_verbosity_error()  # transformers names the GPU kernels that are not installed
    model = new_hybrid(section, hybrid.seed)
    state_file = training_folder / f"{_work_name(section, hybrid, rows)}.safetensors"
    fitted = fit(model, rows, held_out_rows, hybrid, state_file)
    _save(folder, model, tokenizer)
    write_prompts(folder, "prompts", held_out)
    write_prompts(folder, "learnt", learnt)
    write_json(folder / "training.json", _summary(hybrid, model, rows, fitted))
    logger.info("the hybrid's held-out loss is %.3f nats a token", fitted.held_out_nats)
    return state_file


def new_hybrid(section: TargetSection, seed: int) -> Qwen3_5ForCausalLM:
    """Untrained, float32: three Gated-DeltaNet layers to one of full attention, as in Qwen3.6."""
    num_heads = section.hidden_size // _HEAD_DIM
    config = Qwen3_5TextConfig(
        vocab_size=section.vocab_size,
        hidden_size=section.hidden_size,
        num_hidden_layers=section.num_layers,
        intermediate_size=3 * section.hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=_HEAD_DIM,
        linear_num_key_heads=num_heads // 2,
        linear_num_value_heads=num_heads,
        linear_key_head_dim=_HEAD_DIM,
        linear_value_head_dim=_HEAD_DIM,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3_5ForCausalLM(config)


def _require_sizes(section: TargetSection) -> None:
    if section.vocab_size <= FIRST_MERGED_ID:
        raise ValueError(
            f"target.vocab_size={section.vocab_size}: a trained hybrid needs more than {FIRST_MERGED_ID} (256 bytes, four "
            "special tokens, and merges)"
        )
    if section.hidden_size % (2 * _HEAD_DIM):
        raise ValueError(
            f"target.hidden_size={section.hidden_size}: a trained hybrid needs a multiple of {2 * _HEAD_DIM}"
        )


def _tokenizer(section: TargetSection, passages: Sequence[Passage]) -> PreTrainedTokenizerFast:
    texts = (f"{passage.prompt}\n{passage.response}" for passage in passages)
    tokenizer = byte_tokenizer(learn_merges(texts, section.vocab_size - FIRST_MERGED_ID))
    if len(tokenizer) != section.vocab_size:
        raise ValueError(
            f"target.vocab_size={section.vocab_size}: the text gives only {len(tokenizer)} tokens; lower it"
        )
    return tokenizer


def _rows(
    tokenizer: PreTrainedTokenizerFast, passages: Iterable[Passage], row_tokens: int
) -> Tensor:
    """(rows, row_tokens + 1) int64: whole chats one after another, each row beginning with a chat as decoding does."""
    rows: list[list[int]] = []
    row: list[int] = []
    for ids in _chats(tokenizer, passages):
        row += ids
        if len(row) > row_tokens:
            rows.append(row[: row_tokens + 1])
            row = []
    if not rows:
        raise ValueError(
            f"target.prepare.row_tokens={row_tokens}: the text does not fill a row; lower it"
        )
    return torch.tensor(rows)


def _chats(tokenizer: PreTrainedTokenizerFast, passages: Iterable[Passage]) -> Iterator[list[int]]:
    for passage in passages:
        messages = [
            {"role": "user", "content": passage.prompt},
            {"role": "assistant", "content": passage.response},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert isinstance(text, str)
        yield tokenizer(text, add_special_tokens=False)["input_ids"]


def _work_name(section: TargetSection, hybrid: HybridTarget, rows: Tensor) -> str:
    """Names what a saved training state belongs to."""
    sizes = [section.hidden_size, section.num_layers, section.vocab_size]
    return fingerprint([sizes, hybrid.model_dump(), rows.tolist()])[:16]


def _save(folder: Path, model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    model.generation_config = GenerationConfig(eos_token_id=[EOS_ID], pad_token_id=PAD_ID)
    disable_progress_bar()
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_prompts(folder: Path, name: str, passages: Sequence[Passage]) -> None:
    """`<name>-<task>.jsonl` of every task."""
    for task in sorted({passage.task for passage in passages}):
        lines = [
            json.dumps({"prompt": passage.prompt, "name": passage.name}, ensure_ascii=False) + "\n"
            for passage in passages
            if passage.task == task
        ]
        (folder / f"{name}-{task}.jsonl").write_text("".join(lines), encoding="utf-8")


def _summary(
    hybrid: HybridTarget, model: Qwen3_5ForCausalLM, rows: Tensor, fitted: Fitted
) -> dict[str, int | float]:
    return {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_rows": len(rows),
        "num_tokens_read": hybrid.steps * hybrid.batch_rows * hybrid.row_tokens,
        "train_nats": round(fitted.train_nats, 4),
        "held_out_nats": round(fitted.held_out_nats, 4),
    }
