"""Is a row's feature what a drafter will see? Rows that fail are quarantined; a target that fails stops the stage.

Seen in public trainers: features that were all zero, constant, NaN or shifted by padding, and the wrong norm before the head
(docs of vllm#46301, SpecForge#471, speculators#1090). Legend: S tokens, D taps, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from data.corpus import CorpusRow
from extract.batches import length_batches
from target.load import Target
from target.taps import forward_with_taps

RMS_BAND = 4.0  # a row's tap may be this many times louder or quieter than the first rows'; three targets' rows: 1.2 at most
FIRST_ROWS = 16
HEAD_CHUNK_ROWS = 256  # rows of logits alive at once
MAX_SURPRISE_NATS = (
    0.1  # of a sampled corpus, beyond what its size explains; another text's is several
)
STANDARD_ERRORS = 5.0


@dataclass(frozen=True)
class FirstRows:
    """What the first rows of the corpus say about this target: the same on every rank, whatever it extracts."""

    tap_rms: Tensor
    """(D,) float32, the median over rows of `token_rms`."""
    num_tokens: int
    """Response tokens compared."""
    greedy_match: float
    """Share of them that are the argmax of the target's own head on its own last hidden state. Greedy corpora: 1 in float32;
    98.3 % was measured in bfloat16, where near-ties fall otherwise in generation than in prefill."""
    surprise_nats: float = 0.0
    """Mean of -log p(token) less the entropy of p, p the target's softmax at the corpus' temperature: 0 in expectation for
    tokens that were drawn from p, below for greedy ones and for a cut tail (top_p, top_k), several nats for another text."""
    surprise_error: float = 0.0
    """Its standard error, if tokens were independent."""

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "num_tokens": self.num_tokens,
            "greedy_match": self.greedy_match,
            "surprise_nats": self.surprise_nats,
            "tap_rms": self.tap_rms.tolist(),
        }


def padded_batch(rows: Sequence[CorpusRow], device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded ids (B, S) int64 and lengths (B,) int64. Padding is id 0: causal layers never look at it."""
    lengths = torch.tensor([row.num_tokens for row in rows])
    input_ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for index, row in enumerate(rows):
        input_ids[index, : row.num_tokens] = torch.tensor(row.input_ids, dtype=torch.int64)
    return input_ids.to(device), lengths.to(device)


def token_rms(features: Tensor) -> Tensor:
    """Median over tokens of a token's RMS, for each tap: (S, D, H) -> (D,) float32.

    The median, because the first token of a sequence is often hundreds of times louder than the rest (attention sink) and would
    make a mean depend on the row's length.
    """
    return features.float().square().mean(-1).sqrt().median(dim=0).values


def ids_problem(row: CorpusRow, vocab_size: int) -> str | None:
    """Why the target cannot read this row, or None."""
    if row.num_tokens == 0:
        return "no tokens"
    if len(row.loss_mask) != row.num_tokens:
        return f"loss_mask has {len(row.loss_mask)} entries for {row.num_tokens} tokens"
    if row.input_ids.min() < 0 or row.input_ids.max() >= vocab_size:
        worst = max(int(row.input_ids.max()), -int(row.input_ids.min()))
        return f"token id {worst} is outside the vocabulary of {vocab_size}"
    return None


def features_problem(
    row: CorpusRow, fed_ids: Tensor, features: Tensor, tap_rms: Tensor
) -> str | None:
    """Why these features (S, D, H) are not this row's, or None.

    fed_ids: the ids as they stood in the batch the target read. tap_rms (D,): from the first rows.
    """
    if len(features) != row.num_tokens:
        return f"{len(features)} feature vectors for {row.num_tokens} tokens"
    if fed_ids.tolist() != row.input_ids.tolist():
        return "the ids that the target read are not the row's"
    if not bool(features.isfinite().all()):
        return "features are not finite"
    rms = token_rms(features)
    for tap, (found, usual) in enumerate(zip(rms.tolist(), tap_rms.tolist(), strict=True)):
        if not usual / RMS_BAND < found < usual * RMS_BAND:
            return f"tap {tap} has RMS {found:.3g}, the corpus' first rows {usual:.3g}"
    repeats = bool((fed_ids == fed_ids[0]).all())  # one token over and over may have one state
    constant = (features == features[:1]).flatten(2).all(-1).all(0)  # (D,)
    if not repeats and bool(constant.any()):
        return f"tap {int(constant.nonzero()[0])} is the same at every token"
    return None


@torch.inference_mode()
def measure_first_rows(
    target: Target,
    rows: Sequence[CorpusRow],
    layer_ids: Sequence[int],
    batch_tokens: int,
    temperature: float = 1.0,
) -> FirstRows:
    """One full forward over the corpus' first rows. Raises ValueError if the target's features are unusable.

    temperature: that the corpus was sampled at; any for a greedy one.
    """
    rows = [row for row in rows if ids_problem(row, target.vocab_size) is None]
    if not rows:
        raise ValueError("the first rows of the corpus hold no usable token ids; run data again")
    rms, equal = [], 0
    surprises: list[Tensor] = []
    for batch in length_batches([row.num_tokens for row in rows], batch_tokens):
        members = [rows[index] for index in batch]
        input_ids, lengths = padded_batch(members, target.device)
        output = forward_with_taps(target, input_ids, lengths, layer_ids, need_last_hidden=True)
        assert output.last_hidden is not None
        for index, row in enumerate(members):
            rms.append(token_rms(output.features[index, : row.num_tokens]))
            found, surprise = _judge_tokens(target, output.last_hidden[index], row, temperature)
            equal += found
            surprises.append(surprise)
    tap_rms = torch.stack(rms).median(dim=0).values
    for tap, value in enumerate(tap_rms.tolist()):
        if not 0 < value < float("inf"):
            raise ValueError(
                f"the target gives unusable features: tap {tap} (layer {layer_ids[tap]}) has RMS {value} on the corpus' "
                "first rows; check target.model, target.dtype and target.attention"
            )
    surprise = torch.cat(surprises).double()
    num_tokens = len(surprise)
    if num_tokens == 0:
        return FirstRows(tap_rms, 0, 1.0)
    error = float(surprise.std(correction=0)) / num_tokens**0.5
    return FirstRows(tap_rms, num_tokens, equal / num_tokens, float(surprise.mean()), error)


def require_parity(first: FirstRows, recipe: Mapping[str, Any], min_greedy_match: float) -> str:
    """What the first rows say of target and corpus, in a line. recipe: the corpus' settings, by dotted key.

    Raises ValueError if the target that answered cannot be this one, with its own norm and head. Answers that the target did not
    give say nothing about it.
    """
    if not recipe["data.responses.generate"]:
        return (
            f"the corpus' answers are not the target's own: {first.greedy_match:.1%} of {first.num_tokens} tokens are its argmax, and "
            f"they surprise it by {first.surprise_nats:.2f} nats more than its own would; nothing is required of them"
        )
    if recipe["data.responses.temperature"] == 0:
        require_greedy_match(first, min_greedy_match)
        return f"the target's argmax is {first.greedy_match:.1%} of {first.num_tokens} recorded greedy tokens"
    require_sampled_match(first)
    return (
        f"{first.num_tokens} recorded sampled tokens surprise the target by {first.surprise_nats:+.3f} nats more than its own draws "
        f"(standard error {first.surprise_error:.3f})"
    )


def require_sampled_match(first: FirstRows) -> None:
    """Raises ValueError if a sampled corpus is not what this target would draw at its temperature."""
    limit = MAX_SURPRISE_NATS + STANDARD_ERRORS * first.surprise_error
    if not first.surprise_nats <= limit:  # NaN too
        raise ValueError(
            f"{first.num_tokens} recorded sampled response tokens surprise this target by {first.surprise_nats:.2f} nats a token more "
            f"than its own draws would (at most {limit:.2f} is chance); the corpus was answered by another target, dtype, template or "
            "temperature, or its ids are shifted: run data again with this target"
        )


def require_greedy_match(first: FirstRows, min_greedy_match: float) -> None:
    """Raises ValueError if a greedily answered corpus is not what this target, with its own norm and head, would say."""
    if first.greedy_match < min_greedy_match:
        raise ValueError(
            f"only {first.greedy_match:.1%} of {first.num_tokens} recorded greedy response tokens are this target's argmax "
            f"(extract.min_greedy_match={min_greedy_match}); the corpus was answered by another target, dtype or template, or its "
            "ids are shifted: run data again with this target"
        )


def _judge_tokens(
    target: Target, last_hidden: Tensor, row: CorpusRow, temperature: float
) -> tuple[int, Tensor]:
    """Of the response tokens of `row`, by the head at the position before: how many are its argmax, and by how much each
    surprises it beyond the entropy, in nats (n,). last_hidden (S, H)."""
    positions = torch.tensor(row.loss_mask[1:]).nonzero().squeeze(-1)  # predicts position + 1
    wanted = torch.tensor(row.input_ids[1:], dtype=torch.int64)[positions]
    equal, surprises = 0, [torch.zeros(0)]
    for at, gold in zip(
        positions.split(HEAD_CHUNK_ROWS), wanted.split(HEAD_CHUNK_ROWS), strict=True
    ):
        hidden = last_hidden[at.to(last_hidden.device)].to(target.lm_head.device)
        logits = nn.functional.linear(hidden, target.lm_head)
        equal += int((logits.argmax(-1).cpu() == gold).sum())
        log_probs = (logits.float() / temperature).log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        own = log_probs.gather(1, gold.to(log_probs.device)[:, None]).squeeze(1)
        surprises.append((-own - entropy).cpu())
    return equal, torch.cat(surprises)
