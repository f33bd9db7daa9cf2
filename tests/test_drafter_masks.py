"""The rule in words, checked element by element against every mask derived from it."""

import pytest
import torch
from drafter_cases import packed_layout

from drafter.masks import BlockLayout, dense_mask, flex_mask_mod, structured_masks

K = 4


def sees(
    layout: BlockLayout, row: int, block: int, slot: int, key: int, window: int | None
) -> bool:
    """The rule once more, in scalars. Keys are numbered over [context ; block 0 ; block 1 ...]."""
    length = layout.context_positions.shape[1]
    anchor = int(layout.anchor_positions[row, block])
    position = anchor + slot
    if key < length:
        document = int(layout.context_documents[row, key])
        key_position = int(layout.context_positions[row, key])
        if document == -1 or document != int(layout.anchor_documents[row, block]):
            return False
        return key_position < anchor and (window is None or key_position >= position - (window - 1))
    key_block, key_slot = divmod(key - length, K)
    if key_block != block:
        return False
    return window is None or slot - (window - 1) <= key_slot <= slot


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 100])
def test_dense_mask_is_the_rule_element_by_element(window):
    layout = packed_layout()
    mask = dense_mask(layout, K, window)
    rows, queries, keys = mask.shape
    for row in range(rows):
        for query in range(queries):
            for key in range(keys):
                wanted = sees(layout, row, *divmod(query, K), key, window)
                assert mask[row, query, key] == wanted, (row, query, key)


@pytest.mark.parametrize("window", [None, 1, 3, 5])
def test_structured_and_flex_masks_are_the_dense_mask(window):
    layout = packed_layout()
    dense = dense_mask(layout, K, window)
    length, blocks = layout.context_positions.shape[1], layout.anchor_positions.shape[1]
    context, own = structured_masks(layout, K, window)
    context = context.expand(-1, -1, K, -1).flatten(1, 2)
    own = own.expand(-1, -1, K, -1)
    assert torch.equal(context, dense[..., :length])
    for block in range(blocks):
        rows = slice(block * K, (block + 1) * K)
        columns = slice(length + block * K, length + (block + 1) * K)
        assert torch.equal(own[:, block], dense[:, rows, columns])
    mask_mod = flex_mask_mod(layout, K, window)
    batch, query, key = torch.meshgrid(*(torch.arange(n) for n in dense.shape), indexing="ij")
    assert torch.equal(mask_mod(batch, torch.zeros_like(batch), query, key), dense)


def test_window_edge_by_hand():
    """Anchor at 10, W = 4: slot 0 sees context 7..9 and itself; slot 2 context 9 and slots 0..2; slot 3 slots 0..3."""
    layout = BlockLayout(
        torch.arange(12)[None], torch.zeros(1, 12).long(), torch.tensor([[10]]), torch.tensor([[0]])
    )
    mask = dense_mask(layout, K, 4)[0]
    assert mask[0].nonzero().flatten().tolist() == [7, 8, 9, 12]
    assert mask[2].nonzero().flatten().tolist() == [9, 12, 13, 14]
    assert mask[3].nonzero().flatten().tolist() == [12, 13, 14, 15]
    full = dense_mask(layout, K, None)[0]
    assert all(row.nonzero().flatten().tolist() == [*range(10), *range(12, 16)] for row in full)
