"""Codecs: lossless ones give back every bit, fp8 keeps its error bound."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import codecs
from data.codecs import blob_columns, decode, decode_into, decoded_dtype, encode

CODECS = ("fp32", "bf16", "bf16-planes", "fp8")
BF16_MAX = torch.finfo(torch.bfloat16).max


def round_trip(features, codec):
    num_tokens, num_taps, hidden_size = features.shape
    before = features.clone()
    columns = encode(features, codec)
    assert torch.equal(features.view(torch.uint8), before.view(torch.uint8))  # left as they were
    for column in blob_columns(codec, num_taps, hidden_size):
        assert columns[column.name].shape == (num_tokens, column.bytes_per_token)
    decoded = decode(columns, num_tokens, num_taps, hidden_size, codec)
    out = torch.full(features.shape, math.nan, dtype=decoded_dtype(codec))
    decode_into(columns, out, codec)
    assert torch.equal(out.view(torch.uint8), decoded.view(torch.uint8))
    return decoded


@settings(max_examples=60, deadline=None)
@given(
    bits=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=6, max_size=6),
    num_tokens=st.integers(1, 4),
    codec=st.sampled_from(["bf16", "bf16-planes"]),
)
def test_every_bf16_pattern_comes_back_bit_for_bit(bits, num_tokens, codec):
    pattern = torch.tensor(bits, dtype=torch.int16).view(1, 2, 3).repeat(num_tokens, 1, 1)
    pattern = pattern + torch.arange(num_tokens, dtype=torch.int16).view(-1, 1, 1)
    decoded = round_trip(pattern.view(torch.bfloat16), codec)
    assert torch.equal(decoded.view(torch.int16), pattern)


def test_all_65536_bf16_patterns_survive_the_planes():
    pattern = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(-1, 2, 16)
    decoded = round_trip(pattern.view(torch.bfloat16), "bf16-planes")
    assert torch.equal(decoded.view(torch.int16), pattern)


def test_fp32_comes_back_bit_for_bit():
    features = torch.randn(5, 2, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_trip(features, "fp32"), features)


def test_bytes_are_little_endian_token_tap_hidden():
    features = torch.arange(8, dtype=torch.float32).view(2, 2, 2)
    assert encode(features, "fp32")["features"].flatten().numpy().tobytes() == (
        b"".join(value.to_bytes(4, "little") for value in [0, 0x3F800000, 0x40000000, 0x40400000])
        + b"".join(
            value.to_bytes(4, "little")
            for value in [0x40800000, 0x40A00000, 0x40C00000, 0x40E00000]
        )
    )
    planes = encode(features, "bf16-planes")
    assert planes["features_high"].flatten().tolist() == [0, 0x3F, 0x40, 0x40, *[0x40] * 4]
    assert planes["features_low"].flatten().tolist() == [0, 0x80, 0, 0x40, 0x80, 0xA0, 0xC0, 0xE0]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    magnitude=st.sampled_from([1e-30, 1e-6, 1.0, 3e4, 1e30]),
    outlier=st.sampled_from([1.0, 50.0]),
)
def test_fp8_error_is_bounded_by_its_grid(seed, magnitude, outlier):
    """3 mantissa bits: half a step is 2^-4 of the value; below 2^-6 of the scale, 2^-10 scales. bf16 adds 2^-9."""
    features = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(seed)) * magnitude
    features[:, :, 0] *= outlier
    decoded = round_trip(features, "fp8").float()
    scales = features.abs().amax(-1, keepdim=True) / 448
    bound = torch.maximum(features.abs() * 2**-4, scales * 2**-10) + features.abs() * 2**-8
    assert ((decoded - features).abs() <= bound).all()


def test_fp8_rms_error_is_what_the_design_says():
    features = torch.randn(64, 2, 512, generator=torch.Generator().manual_seed(1))
    error = (round_trip(features, "fp8").float() - features).square().mean().sqrt()
    assert 0.02 < error / features.square().mean().sqrt() < 0.03  # 2.6 %


def test_fp8_keeps_zero_rows_zero():
    features = torch.zeros(2, 1, 8)
    features[1] = 3.0
    assert torch.equal(round_trip(features, "fp8").float(), features)


@pytest.mark.parametrize("codec", CODECS)
def test_dtype_follows_the_codec(codec):
    decoded = round_trip(torch.ones(2, 1, 4, dtype=torch.bfloat16), codec)
    assert (
        decoded.dtype
        == decoded_dtype(codec)
        == (torch.float32 if codec == "fp32" else torch.bfloat16)
    )
    assert torch.equal(decoded.float(), torch.ones(2, 1, 4))


def test_a_column_of_another_size_is_refused():
    columns = encode(torch.ones(3, 2, 4), "bf16")
    with pytest.raises(
        ValueError, match=r"column features of codec bf16: \(3, 16\), not \(3, 24\)"
    ):
        decode(columns, 3, 3, 4, "bf16")
    with pytest.raises(ValueError, match="features_high"):
        decode(columns, 3, 2, 4, "bf16-planes")


def test_fp8_decodes_every_pattern_as_torch_does():
    patterns = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    finite = patterns[(patterns & 0x7F) != 0x7F].view(1, 2, 127)  # 0x7F and 0xFF are NaN
    scales = torch.tensor([[0.37, 3.1e-5]])
    columns = {"features": finite.view(1, -1), "scales": scales.view(torch.uint8)}
    wanted = finite.view(torch.float8_e4m3fn).float() * scales.unsqueeze(-1)
    assert torch.equal(decode(columns, 1, 2, 127, "fp8"), wanted.to(torch.bfloat16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_fp8_never_turns_bad_values_into_good_ones(bad):
    features = torch.ones(2, 1, 8)
    features[1, 0, 3] = bad
    decoded = round_trip(features, "fp8")
    assert not decoded[1].isfinite().all()
    assert torch.equal(decoded[0].float(), features[0])


def test_fp8_rows_longer_than_a_step_are_what_their_tokens_are_alone():
    features = torch.randn(150, 2, 16, generator=torch.Generator().manual_seed(2))
    whole = round_trip(features, "fp8")
    alone = torch.cat([round_trip(features[i : i + 1], "fp8") for i in range(150)])
    assert torch.equal(whole, alone)


def special_values():
    """(1, 1, H) float32: what IEEE has besides normal numbers, NaN payloads and both signs among them."""
    bits = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    bits += [value - 2**31 for value in bits]  # the same with the sign set
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32).view(1, 1, -1)


def test_fp32_keeps_nan_payloads_infinities_signed_zeros_and_denormals():
    values = special_values()
    assert torch.equal(
        round_trip(values, "fp32").view(torch.int32), values.clone().view(torch.int32)
    )


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (BF16_MAX, BF16_MAX),  # the scale takes the overflow: nothing saturates
        (1e-38, 1e-38),
        (
            1e-45,
            1e-45,
        ),  # a float32 denormal: below bf16's smallest step it may become zero, never larger
        (0.0, 0.0),
        (-0.0, 0.0),
    ],
)
def test_fp8_at_the_ends_of_its_range(value, wanted):
    features = torch.full((1, 1, 4), value)
    decoded = round_trip(features, "fp8").float()
    assert decoded.isfinite().all()
    assert torch.allclose(decoded, torch.full((1, 1, 4), wanted), rtol=2**-4, atol=1e-38)


def test_fp8_takes_a_scale_for_every_token_and_tap():
    """A loud token or tap costs its neighbours nothing."""
    features = torch.ones(3, 2, 8)
    features[1, 0] = 1e6
    features[2, 1] = 1e-6
    decoded = round_trip(features, "fp8").float()
    assert torch.allclose(decoded, features, rtol=2**-8)


@pytest.mark.parametrize("codec", CODECS)
def test_the_first_tokens_alone_are_decoded_into_the_middle_of_a_batch(codec):
    features = torch.randn(9, 2, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    columns = {name: column[:5] for name, column in encode(features, codec).items()}
    batch = torch.full((2, 12, 2, 16), 7.0, dtype=decoded_dtype(codec))
    decode_into(columns, batch[1, 4:9], codec)
    whole = decode(encode(features, codec), 9, 2, 16, codec)
    assert torch.equal(batch[1, 4:9], whole[:5])
    batch[1, 4:9] = 7.0
    assert (batch == 7.0).all()  # nothing else was touched


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("step", [1, 32, 100, 10**9])
def test_steps_change_no_bit(codec, step, monkeypatch):
    features = torch.randn(13, 2, 16, generator=torch.Generator().manual_seed(4)).bfloat16()
    whole = round_trip(features, codec)
    monkeypatch.setattr(codecs, "STEP_VALUES", step)
    assert torch.equal(round_trip(features, codec), whole)
