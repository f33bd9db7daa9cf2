"""The tokenizer of made targets: 256 bytes, four special tokens, then merges learnt from a text, if any; and its template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
"""Ids 256..259, after the 256 bytes."""
PAD_ID, EOS_ID, MASK_ID, FIRST_MERGED_ID = 256, 258, 259, 260

CHAT_TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""

Merge = tuple[str, str]


def learn_merges(texts: Iterable[str], num_merges: int) -> list[Merge]:
    """Byte-pair merges of `texts`, the most frequent first; fewer if the texts are too short."""
    backend = _backend([], use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=256 + num_merges,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return [(left, right) for left, right in json.loads(backend.to_str())["model"]["merges"]]


def byte_tokenizer(merges: Sequence[Merge] = ()) -> PreTrainedTokenizerFast:
    """Every text has ids and comes back from them. Merged tokens have ids from FIRST_MERGED_ID on."""
    backend = _backend(merges, use_regex=bool(merges))
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
    tokenizer.chat_template = CHAT_TEMPLATE
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(256, 260))
    return tokenizer


def _backend(merges: Sequence[Merge], use_regex: bool) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(SPECIAL_TOKENS if merges else ()), *("".join(pair) for pair in merges)]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    return backend
