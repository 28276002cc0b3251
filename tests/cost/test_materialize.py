"""Made-up arguments of ops: tensors with the layout asked for, and indices that are valid and spread."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_remat.cost import profile
from lightning_remat.cost._indices import index_bounds
from lightning_remat.cost._materialize import materialize, tensor
from tests.helpers.op_calls import call, spec

aten = torch.ops.aten
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((4, 3), (3, 1)),
        ((4, 3), (1, 4)),
        ((4, 3), (1, 0)),
        ((5, 4), (0, 0)),
        ((2, 3), (10, 2)),
        ((), ()),
        ((2, 0), (1, 1)),
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.uint8]
)
def test_made_tensors_have_the_layout_asked_for(shape: Any, stride: Any, dtype: torch.dtype) -> None:
    asked = spec(*shape, stride=stride, dtype=dtype)
    made = tensor(asked)
    assert (tuple(made.shape), tuple(made.stride()), made.dtype) == (
        shape,
        stride if made.numel() else made.stride(),
        dtype,
    )
    assert made.untyped_storage().nbytes() == asked.nbytes
    if dtype.is_floating_point:
        assert torch.all((made >= 0.0625) & (made <= 1))
    elif dtype is torch.bool:
        assert torch.all(made)
    elif not dtype.is_complex:
        assert torch.all(made == 0)


def test_large_made_tensors_are_filled_to_the_end() -> None:
    made = tensor(spec((1 << 18) + 3))
    assert torch.all((made >= 0.1) & (made < 1))
    assert made[: 1 << 16].unique().numel() > 1000


def test_expanded_inputs_take_no_more_than_their_storage() -> None:
    seen: set[tuple[tuple[int, ...], int]] = set()

    def spy(x: torch.Tensor) -> torch.Tensor:
        seen.add((tuple(x.shape), x.untyped_storage().nbytes()))
        return x[0, 0] + 1

    huge = (1 << 30, 1 << 20)
    profile([call(spy, spec(*huge, stride=(0, 0)), outputs=(spec(),))], CPU)
    assert seen == {(huge, 4)}


def test_indices_are_valid_and_spread() -> None:
    indices = spec(1000, dtype=torch.int64)
    table, rows = spec(50, 8), spec(1000, 8)
    embedding = call(aten.embedding.default, table, indices, outputs=(rows,))
    backward = call(aten.embedding_dense_backward.default, rows, indices, 50, -1, False, outputs=(table,))
    for made in (materialize(embedding)[0][1], materialize(backward)[0][1]):
        assert made.min() >= 0
        assert made.max() < 50
        assert made.unique().numel() > 10
    along = spec(7, 9, dtype=torch.int64)
    gather = call(aten.gather.default, spec(7, 9), 1, along, outputs=(spec(7, 9),))
    put = call(
        aten.index_put.default,
        spec(6, 9, 4),
        [None, spec(5, dtype=torch.int64)],
        spec(6, 5, 4),
        True,
        outputs=(spec(6, 9, 4),),
    )
    masked = call(aten.index.Tensor, spec(6, 9), [spec(6, 9, dtype=torch.bool)], outputs=(spec(54),))
    other = call(aten.add.Tensor, along, along, outputs=(along,))
    assert [dict(index_bounds(c)) for c in (gather, put, masked, other)] == [{1: 9}, {1: 9}, {}, {}]
    costs = profile([embedding, backward, gather, put, masked, other], CPU)
    assert all(cost.seconds > 0 for cost in costs)
