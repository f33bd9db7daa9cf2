"""Speculative sampling of a drafted chain: accept by p/q, repair by the residual. What servers do at temperature > 0.

The drafter draws x_k from q_k; x_k is accepted with probability min(1, p_k(x_k) / q_k(x_k)), and the first one refused is
replaced by a draw from max(p_k - q_k, 0), normalised; if none is refused, the bonus token is drawn from the target. The
output has the target's distribution for any q, and no chain of one draft a slot accepts more often.
Source: Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318.

L = K-1 drafted slots, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.walk import Accepted


def walk_by_rejection(
    target_probs: Tensor,
    drafter_probs: Tensor,
    drafted: Tensor,
    generator: torch.Generator | None = None,
) -> Accepted:
    """Accepted nodes of the chain (its node k is slot k) and the token after the last of them.

    target_probs: (L+1, V) float, what the target samples from after the anchor and after each drafted token;
    drafter_probs: (L, V) float, what `drafted` (L,) int64 was drawn from. Raises ValueError if the sizes do not match.
    """
    num_slots, device = len(drafted), target_probs.device
    if len(target_probs) != num_slots + 1 or drafter_probs.shape != target_probs[1:].shape:
        raise ValueError(
            f"{len(target_probs)} target and {len(drafter_probs)} drafter distributions for {num_slots} drafted tokens; "
            "give one of the drafter a token, and one of the target more"
        )
    p = target_probs[:-1].gather(1, drafted[:, None])[:, 0]
    q = drafter_probs.gather(1, drafted[:, None])[:, 0]
    # u q < p and not u < p / q: a token of probability 0 under both is refused, and nothing is divided
    uniform = torch.rand(num_slots, generator=generator, device=device, dtype=q.dtype)
    num_accepted = (uniform * q < p).long().cumprod(0).sum()
    residual = _residual(target_probs, drafter_probs, num_accepted)
    bonus = torch.multinomial(residual, 1, generator=generator)
    found = torch.cat([num_accepted[None], bonus]).tolist()  # the only transfer from the device
    return Accepted(list(range(found[0] + 1)), found[1])


def _residual(target_probs: Tensor, drafter_probs: Tensor, num_accepted: Tensor) -> Tensor:
    """(V,) what the token after `num_accepted` drafts is drawn from, up to a factor; after the last, the target's own."""
    drafter_probs = torch.cat([drafter_probs, torch.zeros_like(drafter_probs[:1])])
    p = target_probs.index_select(0, num_accepted[None])[0]
    q = drafter_probs.index_select(0, num_accepted[None])[0]
    residual = (p - q).clamp(min=0)
    # equal distributions refuse nothing but by rounding; then the target's own is right
    return torch.where(residual.sum() > 0, residual, p)
