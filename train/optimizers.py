"""The optimizer of a recipe: AdamW, or Muon for matrices and AdamW for the rest, in the groups that DeepSpeed is given.

Muon orthogonalises the momentum of a whole matrix (Jordan et al., https://kellerjordan.github.io/posts/muon/). Its update is
scaled by 0.2 sqrt(max(rows, columns)), the RMS that AdamW's updates have (Moonlight, arXiv:2502.16982), so learning_rate and
weight_decay mean the same for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from configs.schema import TrainSection

ADAM_MOMENTS, MUON_MOMENTS = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
UPDATE_RMS = 0.2


def moment_names(parameter_shape: tuple[int, ...], train: TrainSection) -> tuple[str, ...]:
    """What the optimizer keeps for a parameter of this shape, beside its weight."""
    return MUON_MOMENTS if _is_muons(len(parameter_shape), train) else ADAM_MOMENTS


def make_optimizer(drafter: nn.Module, train: TrainSection) -> Optimizer:
    """Over the parameters that require a gradient; every group has `rate`, its share of the learning rate."""
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    adam: dict[str, Any] = {
        "lr": 0.0,
        "betas": (train.beta1, train.beta2),
        "eps": train.adam_eps,
    }
    if train.optimizer == "adamw":
        return AdamW(list(_adam_groups(parameters, train)), **adam, fused=True)
    # imported here: it sets up compiled kernels
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    matrices = [p for p in parameters if _is_muons(p.dim(), train)]
    others = [p for p in parameters if not _is_muons(p.dim(), train)]
    groups = list(_muon_groups(matrices, train))
    if others:
        groups += [{**group, **adam, "use_muon": False} for group in _adam_groups(others, train)]
    return MuonWithAuxAdam(groups, AdamW, {"fused": True})


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["rate"]


def _is_muons(num_dimensions: int, train: TrainSection) -> bool:
    return train.optimizer == "muon" and num_dimensions == 2


def _adam_groups(parameters: list[nn.Parameter], train: TrainSection) -> Iterator[dict[str, Any]]:
    """Norm weights do not decay. Without decay there is one group: the flat buffers of runs from before it stay as they were."""
    decayed = [p for p in parameters if p.dim() > 1 or train.weight_decay == 0]
    kept = [p for p in parameters if p.dim() <= 1 and train.weight_decay > 0]
    for members, weight_decay in ((decayed, train.weight_decay), (kept, 0.0)):
        if members:
            yield {"params": members, "weight_decay": weight_decay, "rate": 1.0}


def _muon_groups(matrices: list[nn.Parameter], train: TrainSection) -> Iterator[dict[str, Any]]:
    """One a width: DeepSpeed's Muon scales an update by sqrt(max(1, rows / columns)), so 0.2 sqrt(columns) is what is missing."""
    for columns in sorted({matrix.shape[1] for matrix in matrices}):
        rate = UPDATE_RMS * columns**0.5
        yield {
            "params": [matrix for matrix in matrices if matrix.shape[1] == columns],
            "use_muon": True,
            "lr": 0.0,
            "momentum": train.muon_momentum,
            # it decays by its own rate times this
            "weight_decay": train.weight_decay / rate,
            "rate": rate,
        }


def names_by_group(drafter: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Parameter names in the optimizer's order, before DeepSpeed puts its own tensors in their place."""
    names = {id(parameter): name for name, parameter in drafter.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def set_adam_step(optimizer: Optimizer, step: int) -> None:
    """Optimizer steps that Adam's bias correction counts."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(step)
