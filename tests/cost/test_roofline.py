"""Costs estimated from shapes: the operations of an op, and the time they take on a device."""

from __future__ import annotations

import logging

import pytest
import torch

from lightning_remat.capture import OpCall
from lightning_remat.cost import DeviceSpec, device_spec, device_specs, flops, roofline
from lightning_remat.cost._device_spec import cuda_spec_name
from tests.helpers.op_calls import call, convolution, mm, spec

aten = torch.ops.aten


def convolution_backward(batch: int, channels: int, size: int, groups: int, mask: list[bool]) -> OpCall:
    x, w = spec(batch, channels, size, size), spec(channels, channels // groups, 3, 3)
    options = ([0], [1, 1], [1, 1], [1, 1], False, [0, 0], groups, mask)
    outputs = tuple(one for one, wanted in zip((x, w), mask, strict=False) if wanted)
    return call(aten.convolution_backward.default, x, x, w, *options, outputs=outputs)


def flop(one: OpCall) -> float:
    (cost,) = flops([one])
    assert cost.workspace_bytes == 0
    return cost.seconds


def test_flops_of_matrix_products_and_convolutions() -> None:
    assert flop(mm(3, 5, 7)) == 2 * 3 * 5 * 7
    assert flop(call(aten.addmm.default, spec(7), spec(3, 5), spec(5, 7), outputs=(spec(3, 7),))) == 2 * 3 * 5 * 7
    assert flop(call(aten.bmm.default, spec(2, 3, 5), spec(2, 5, 7), outputs=(spec(2, 3, 7),))) == 2 * 2 * 3 * 5 * 7
    assert flop(convolution(2, 8, 10)) == 2 * (2 * 10 * 10) * 8 * 8 * 9
    assert flop(convolution(2, 8, 10, groups=8)) == 2 * (2 * 10 * 10) * 8 * 9


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_each_gradient_of_a_convolution_costs_as_much_as_the_convolution(groups: int) -> None:
    forward = flop(convolution(2, 8, 10, groups))
    for mask in ([True, False, False], [False, True, False]):
        assert flop(convolution_backward(2, 8, 10, groups, mask)) == forward
    assert flop(convolution_backward(2, 8, 10, groups, [True, True, False])) == 2 * forward


def test_flops_of_attention_on_any_device() -> None:
    q = spec(2, 4, 16, 8)
    logsumexp = spec(2, 4, 16)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    one = flop(call(forward, q, q, q, 0.0, True, outputs=(q, logsumexp)))
    assert one == 2 * (2 * 2 * 4 * 16 * 16 * 8)
    assert flop(call(backward, q, q, q, q, q, logsumexp, 0.0, True, outputs=(q, q, q))) == 2.5 * one


def test_other_ops_count_their_largest_tensor() -> None:
    assert flop(call(aten.sum.default, spec(30, 20), outputs=(spec(),))) == 600
    assert flop(call(aten.add.Tensor, spec(30, 1), spec(1, 20), outputs=(spec(30, 20),))) == 600
    assert flop(call(len, spec(2, 3), outputs=())) == 6
    ids = spec(5, dtype=torch.int64)
    assert flop(call(aten.embedding.default, spec(50_000, 8), ids, outputs=(spec(5, 8),))) == 40, "only the rows read"
    assert flop(call(aten.arange.default, 4)) == 0


def test_a_formula_that_fails_is_told_of(warnings_logged: list[logging.LogRecord]) -> None:
    assert flop(call(aten.mm.default, spec(2, 3), spec(4, 5), outputs=(spec(2, 5),))) == 20
    assert "aten.mm.default" in warnings_logged[0].message


@pytest.mark.parametrize("device", device_specs())
def test_roofline_grows_with_size(device: str) -> None:
    for make in (
        lambda n: mm(n, n, n),
        lambda n: convolution(1, n, 32),
        lambda n: call(aten.relu.default, spec(n, n), outputs=(spec(n, n),)),
    ):
        seconds = [cost.seconds for cost in roofline([make(n) for n in (8, 64, 512, 4096)], device)]
        assert seconds == sorted(seconds)
        assert device_spec(device).launch_seconds < seconds[0] < seconds[-1]


def test_roofline_is_the_slower_of_computing_and_moving() -> None:
    device = DeviceSpec("mine", {torch.float32: 1e3, torch.float16: 4e3}, bytes_per_second=1e2, launch_seconds=1.0)
    relu = call(aten.relu.default, spec(25), outputs=(spec(25),))
    expanded = call(aten.add.Tensor, spec(25, stride=(0,)), spec(25), outputs=(spec(25),))
    product = mm(50, 50, 50)
    half = spec(50, 50, dtype=torch.float16)
    half_product = call(aten.mm.default, half, half, outputs=(half,))
    seconds = [cost.seconds for cost in roofline([relu, expanded, product, None], device)]
    assert seconds == pytest.approx([1 + 200 / 1e2, 1 + 204 / 1e2, 1 + 30_000 / 1e2, 0.0])
    fast_memory = DeviceSpec("mine", device.flops_per_second, bytes_per_second=1e9, launch_seconds=0.0)
    assert [cost.seconds for cost in roofline([product, half_product], fast_memory)] == pytest.approx([250, 62.5])


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("Tesla V100-SXM2-32GB", "V100"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
    ],
)
def test_devices_are_found_by_the_name_the_driver_gives(driver_name: str, name: str) -> None:
    assert cuda_spec_name(driver_name) == name
    assert device_spec(name.lower()).name == name


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 1)])
def test_cuda_devices_are_found_with_and_without_an_index(
    device: str | torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    assert device_spec(device).name == "L4"


def test_an_unknown_gpu_is_told_of(warnings_logged: list[logging.LogRecord]) -> None:
    assert cuda_spec_name("NVIDIA L40S") in device_specs()
    assert "NVIDIA L40S" in warnings_logged[0].message
