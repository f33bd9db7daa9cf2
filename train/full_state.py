"""Whole float32 weights and moments of what is trained, by parameter name, out of and into an engine of any ZeRO stage.

Through DeepSpeed's public accessors for stages 1 to 3; for stage 0 they return None, so its tensors are taken from the torch
optimizer. Everything here is collective: every rank reads and writes every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import deepspeed
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import (
    lazy_init_hp_params_optimizer_state,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

from drafter.model import BlockLayout, Drafter
from train.engine import Engine
from train.optimizers import set_adam_step


@dataclass(frozen=True)
class FullParameter:
    """One parameter as it is optimized, float32, in its own shape."""

    name: str
    weight: Tensor
    moments: dict[str, Tensor]
    """By name, as train/optimizers.py has them."""


def read_full_state(engine: Engine) -> Iterator[FullParameter]:
    """Parameter by parameter, so that a rank never holds more than one beside its own share. Needs a first step taken."""
    _link_moments(engine)
    masters = _stage_0_masters(engine)
    for name, parameter in engine.trained():
        keys, shape = engine.moments[name], engine.shapes[name]
        if name in masters:
            state = engine.optimizer.state[masters[name]]
            weight, moments = masters[name].data, {key: state[key] for key in keys}
        else:
            weight = _present(safe_get_full_fp32_param(parameter))
            moments = {key: _present(safe_get_full_optimizer_state(parameter, key)) for key in keys}
        yield FullParameter(
            name, weight.view(shape), {key: value.view(shape) for key, value in moments.items()}
        )


def write_full_state(engine: Engine, read: Callable[[str], FullParameter], adam_step: int) -> None:
    """Make the engine continue from these parameters; `read` is asked for each by name, once."""
    _take_throwaway_step(engine)
    _link_moments(engine)
    masters = _stage_0_masters(engine)
    for name, parameter in engine.trained():
        full = read(name)
        weight = full.weight.to(engine.ranks.device)
        own = {key: full.moments[key].to(engine.ranks.device) for key in engine.moments[name]}
        if name in masters:
            masters[name].data.copy_(weight)
            for key, value in own.items():
                engine.optimizer.state[masters[name]][key].copy_(value)
        else:
            safe_set_full_fp32_param(parameter, weight)
            for key, value in own.items():
                safe_set_full_optimizer_state(parameter, value, key)
        _set_compute_weight(parameter, weight, engine.zero_stage)
    set_adam_step(engine.optimizer, adam_step)


def plain_drafter(engine: Engine) -> Drafter:
    """The drafter for forwards outside training: the engine's own, or under ZeRO 3 a whole copy in compute dtype."""
    if engine.zero_stage < 3:
        return engine.drafter
    copy = Drafter(engine.drafter.config).to(engine.ranks.device, engine.dtype)
    sources = dict(engine.drafter.named_parameters())
    for name, parameter in copy.named_parameters():
        with deepspeed.zero.GatheredParameters([sources[name]]), torch.no_grad():
            parameter.copy_(sources[name])
    return copy


def _take_throwaway_step(engine: Engine) -> None:
    """ZeRO makes its optimizer state in the first step: take one on a toy block; everything it writes is then overwritten."""
    config = engine.drafter.config
    device = engine.ranks.device
    features = torch.ones(
        1, 1, len(config.target_layer_ids), config.hidden_size, dtype=engine.dtype, device=device
    )
    embeddings = torch.ones(
        1, 1, config.block_size, config.hidden_size, dtype=engine.dtype, device=device
    )
    place = torch.zeros(1, 1, dtype=torch.int64, device=device)
    hidden = engine.forward(features, embeddings, BlockLayout(place, place, place + 1, place))
    engine.backward(hidden.float().square().mean(), last=True)
    engine.step(learning_rate=0.0)
    engine.take_not_finite()


def _set_compute_weight(parameter: nn.Parameter, weight: Tensor, zero_stage: int) -> None:
    """The copy that forwards use, rounded to the compute dtype, as an optimizer step would leave it."""
    if zero_stage < 3:
        parameter.data.copy_(weight)
        return
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.data.copy_(weight)


def _stage_0_masters(engine: Engine) -> dict[str, Tensor]:
    """Float32 masters by name under ZeRO 0: the parameters themselves, or in bf16 the copies DeepSpeed optimizes."""
    if engine.zero_stage > 0:
        return {}
    return {
        name: master
        for names, group in zip(engine.names_by_group, engine.optimizer.param_groups, strict=True)
        for name, master in zip(names, group["params"], strict=True)
    }


def _link_moments(engine: Engine) -> None:
    """DeepSpeed's ZeRO 1 and 2 link moments to parameters after their first group's step, when no other group has any."""
    zero = engine.deepspeed.optimizer
    if isinstance(zero, DeepSpeedZeroOptimizer):
        for group, flat in zip(
            zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True
        ):
            lazy_init_hp_params_optimizer_state(group, flat, zero.optimizer.state)


def _present(value: Tensor | None) -> Tensor:
    assert value is not None, "DeepSpeed has no such state: no step taken, or ZeRO 0"
    return value
