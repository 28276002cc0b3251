"""Tensors as bits: comparing two of them, and hashing one to a number."""

from __future__ import annotations

import functools
import hashlib

import torch

CHUNK = 1 << 20
"""Words that are hashed at once: that takes 16 MiB beside the tensor, and 8 MiB (the factors) that stay allocated."""

_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous, dense tensor of the same values, without autograd and with lazy conjugation and negation done."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().contiguous()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits: NaNs are equal where their bits are, zeros if their signs are."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def differing(one: torch.Tensor, other: torch.Tensor) -> tuple[int, float | None]:
    """How many elements of two tensors of one type and shape have other bits, and the largest difference of their values.

    The difference is ``None`` where elements differ of which one is a NaN or an infinity.
    """
    count = int((_bytes(one) != _bytes(other)).view(one.numel(), -1).any(1).sum()) if one.numel() else 0
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = plain(one).to(wide).reshape(-1), plain(other).to(wide).reshape(-1)
    strange = ~torch.isfinite(a) | ~torch.isfinite(b)
    largest = float((a - b)[~strange].abs().max()) if not strange.all() else 0.0
    return count, None if bool((_bytes(a) != _bytes(b)).view(a.numel(), -1).any(1)[strange].any()) else largest


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return _flat(tensor).view(torch.uint8)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The values in one dimension, with a stride of 1: a single value may have a stride of 0, and no view as bytes."""
    flat = plain(tensor).reshape(-1)
    return flat.as_strided(flat.shape, (1,))


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash of the tensor's bits in their logical order, whatever its shape and strides.

    It is a tensor itself, on the tensor's device, so that nothing waits for the device. Other hashes mean other bits;
    other bits almost never have the same hash.
    """
    data = _flat(tensor)
    if data.device.type != "cpu":
        return sum_of_words(data)
    found = hashlib.blake2b(data.view(torch.uint8).numpy().data, digest_size=8).digest()
    return torch.tensor(int.from_bytes(found, "little", signed=True), device="cpu")


def sum_of_words(data: torch.Tensor) -> torch.Tensor:
    """The digest of contiguous data of one dimension, computed where it lies: a multilinear hash.

    Words of at most 32 bits are multiplied by odd random factors of 64 bits, and added up: of pairs that differ, about
    one in four billion has the same sum.
    """
    nbytes = data.numel() * data.element_size()
    size = next(size for size in _WORDS if nbytes % size == 0)
    if data.storage_offset() * data.element_size() % size:
        data = data.clone()
    words = data.view(_WORDS[size])
    total = torch.full((), nbytes, dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), CHUNK):
        chunk = words[start : start + CHUNK].to(torch.int64)
        total = total * _STEP + chunk.mul_(_factors(data.device)[: chunk.numel()]).sum()
    return total


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Random odd numbers, from the generator SplitMix64."""
    x = torch.arange(1, CHUNK + 1, dtype=torch.int64, device=device) * _GOLDEN
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        x = (x ^ (x >> shift & (1 << (64 - shift)) - 1)) * factor
    return x | 1


_GOLDEN = -0x61C8864680B583EB
_STEP = 0x5851F42D4C957F2D
