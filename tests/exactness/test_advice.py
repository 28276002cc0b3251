"""What is advised where eager mode does not repeat, and where the plan differs."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_remat.exactness import Cause, FirstDifference
from lightning_remat.exactness import _advice as advice

CUDA = advice.Settings(
    cuda=True,
    deterministic=False,
    warn_only=False,
    workspace=False,
    cudnn_attention=True,
    benchmark=False,
    tf32=False,
)
DETERMINISTIC = dataclasses.replace(CUDA, deterministic=True, workspace=True, cudnn_attention=False)


def differs(op: str, cause: Cause = Cause.KERNEL) -> FirstDifference:
    return FirstDifference(op, "net.3", True, cause)


@pytest.mark.parametrize(
    ("op", "settings", "expected"),
    [
        ("aten.index_put_.default", CUDA, [advice.DETERMINISTIC]),
        (
            "aten._scaled_dot_product_flash_attention_backward.default",
            dataclasses.replace(DETERMINISTIC, warn_only=True),
            [advice.WITHOUT_WARN_ONLY],
        ),
        (
            "aten._scaled_dot_product_cudnn_attention_backward.default",
            dataclasses.replace(DETERMINISTIC, cudnn_attention=True),
            [advice.CUDNN_ATTENTION],
        ),
        ("aten.mm.default", dataclasses.replace(DETERMINISTIC, workspace=False), [advice.WORKSPACE]),
        (
            "aten.convolution_backward.default",
            dataclasses.replace(DETERMINISTIC, benchmark=True, tf32=True),
            [advice.BENCHMARK, advice.TF32],
        ),
        ("aten.mm.default", DETERMINISTIC, []),
        ("my_kernels.attend.default", CUDA, [advice.NOT_OF_TORCH.format(op="my_kernels.attend.default")]),
    ],
)
def test_advice_where_eager_mode_does_not_repeat(op: str, settings: advice.Settings, expected: list[str]) -> None:
    assert list(advice.advice(differs(op), repeats=False, settings=settings)) == expected


def test_advice_where_the_plan_differs() -> None:
    left_out = advice.LEAVE_OUT.format(module="net.3")
    assert advice.advice(differs("aten.mm.default", Cause.FORM), True, CUDA) == (left_out,)
    assert advice.advice(differs("aten.mm.default"), True, CUDA) == (advice.DETERMINISTIC, left_out)
    assert advice.advice(None, True, CUDA) == (advice.DETERMINISTIC, advice.CUDNN_ATTENTION)
