"""What the target itself would have said in place of each response token: its likeliest tokens with their log-probs.

S tokens, P kept, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from configs.schema import ExtractSection
from data.corpus import CorpusRow
from data.soft_labels import SoftLabels
from target.load import Target

CHUNK_ROWS = 256  # rows of logits alive at once


@torch.inference_mode()
def soft_labels_of(
    target: Target, row: CorpusRow, last_hidden: Tensor, extract: ExtractSection
) -> SoftLabels:
    """Of one row, on the CPU. last_hidden: (S or more, H), after the target's own final norm: position t speaks of token t+1.

    Logits are divided by extract.soft_label_temperature; the softmax is float32. Raises ValueError if the target has fewer
    tokens than extract.soft_labels.
    """
    kept = extract.soft_labels
    if kept > target.vocab_size:
        raise ValueError(
            f"extract.soft_labels={kept} exceeds the target's vocabulary of {target.vocab_size}; lower it"
        )
    token_ids = torch.zeros(row.num_tokens, kept, dtype=torch.int64)
    log_probs = torch.zeros(row.num_tokens, kept)
    tokens = 1 + torch.tensor(row.loss_mask[1:]).nonzero().squeeze(-1)  # the target generated them
    for part in tokens.split(CHUNK_ROWS):
        hidden = last_hidden[(part - 1).to(last_hidden.device)].to(target.lm_head.device)
        logits = nn.functional.linear(hidden, target.lm_head).float()
        best = logits.div_(extract.soft_label_temperature).log_softmax(-1).topk(kept)
        token_ids[part], log_probs[part] = best.indices.cpu(), best.values.cpu()
    return SoftLabels(token_ids, log_probs)
