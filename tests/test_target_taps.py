"""Taps: HF's hidden_states[i+1], whatever the padding, without the layers nobody asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import FAMILIES, HYBRID
from torch import Tensor, nn

from target.load import Target
from target.taps import forward_with_taps

MakeTarget = Callable[..., Target]
TAPS = (1, 2, 4)


def random_rows(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 320, (n,), generator=generator) for n in lengths]


def right_padded(rows: list[Tensor], fill: int) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.full((len(rows), int(lengths.max())), fill)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return ids, lengths


@pytest.mark.parametrize("family", [*FAMILIES, HYBRID])
@pytest.mark.parametrize("layer_ids", [TAPS, (4, 0), (3,)])
def test_taps_are_the_outputs_of_their_layers(
    tiny_target: MakeTarget, family: str, layer_ids: tuple[int, ...]
) -> None:
    target = tiny_target(family)
    ids, lengths = right_padded(random_rows([30, 30]), fill=0)
    hf = target.model(ids, output_hidden_states=True).hidden_states
    for need_last in (False, True):
        output = forward_with_taps(target, ids, lengths, layer_ids, need_last)
        for slot, i in enumerate(layer_ids):
            assert torch.equal(output.features[:, :, slot], hf[i + 1])
        if (
            need_last
        ):  # HF's last entry is after the final norm, so it is the model's last hidden state
            assert output.last_hidden is not None
            assert torch.equal(output.last_hidden, hf[-1])
        else:
            assert output.last_hidden is None


@pytest.mark.parametrize("family", [*FAMILIES, HYBRID])
def test_right_padding_changes_no_real_token_and_reads_as_zero(
    tiny_target: MakeTarget, family: str
) -> None:
    target = tiny_target(family)
    rows = random_rows([3, 40, 17])
    outputs = [
        forward_with_taps(target, *right_padded(rows, fill), TAPS, True) for fill in (0, 259)
    ]
    assert torch.equal(outputs[0].features, outputs[1].features)
    assert outputs[0].last_hidden is not None
    for i, row in enumerate(rows):
        alone = forward_with_taps(target, row[None], torch.tensor([len(row)]), TAPS, True)
        assert alone.last_hidden is not None
        for padded, single in (
            (outputs[0].features[i], alone.features[0]),
            (outputs[0].last_hidden[i], alone.last_hidden[0]),
        ):
            # the delta rule's triangular solve rounds otherwise on another number of rows
            atol = 1e-4 if family == HYBRID else 2e-5
            torch.testing.assert_close(padded[: len(row)], single, rtol=1e-5, atol=atol)
            assert not padded[len(row) :].any()


def test_head_of_the_last_hidden_is_the_models_own_logits(tiny_target: MakeTarget) -> None:
    target = tiny_target("qwen3")
    ids, lengths = right_padded(random_rows([25]), fill=0)
    last_hidden = forward_with_taps(target, ids, lengths, TAPS, True).last_hidden
    assert last_hidden is not None
    assert torch.equal(nn.functional.linear(last_hidden, target.lm_head), target.model(ids).logits)


def test_layers_above_the_last_tap_do_not_run_unless_needed(tiny_target: MakeTarget) -> None:
    target = tiny_target()
    ran: list[int] = []
    counters = [
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
        for i, layer in enumerate(target.layers)
    ]
    ids, lengths = right_padded(random_rows([5]), fill=0)
    forward_with_taps(target, ids, lengths, (1, 3), need_last_hidden=False)
    assert ran == [0, 1, 2, 3]
    ran.clear()
    forward_with_taps(target, ids, lengths, (1, 3), need_last_hidden=True)
    assert ran == [0, 1, 2, 3, 4, 5]
    for counter in counters:
        counter.remove()


def test_no_hook_stays_behind_even_after_an_error(tiny_target: MakeTarget) -> None:
    target = tiny_target()
    ids, lengths = right_padded(random_rows([5]), fill=0)
    before = [len(layer._forward_hooks) for layer in target.layers]  # HF leaves its own there
    forward_with_taps(target, ids, lengths, TAPS, False)
    with pytest.raises(IndexError):
        forward_with_taps(target, ids + 1000, lengths, TAPS, True)
    assert [len(layer._forward_hooks) for layer in target.layers] == before
