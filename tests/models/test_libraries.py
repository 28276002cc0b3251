"""Models of other libraries (the extra ``wild``) in a Lightning run: bits, budget, prediction, one plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_remat.callbacks import RematCallback
from tests.helpers.training import assert_same, fit
from tests.models.wild import GraphTuple, Wild, graphs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


STEPS = 4


@pytest.fixture
def _small_draws_are_drawn_again() -> None:
    """Not here: these models are planned as they are."""


def volumes(batch: int, *sides: int) -> DataLoader[Any]:
    return DataLoader([torch.randn(batch, 1, *sides) for _ in range(STEPS)], None)


class SwinUnetr(Wild):
    """MONAI's: NumPy's arithmetic on sizes, windows that are shifted, dropout."""

    train_loader = staticmethod(lambda: volumes(1, 64, 32, 32))

    def __init__(self) -> None:
        nets = pytest.importorskip("monai.networks.nets", reason="pip install '.[wild]'")
        super().__init__()
        self.net, self.head = nets.SwinUNETR(in_channels=1, out_channels=2, feature_size=12, drop_rate=0.1), None

    def loss(self, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(self.net(batch), (batch[:, 0] > 0).long())


class Volumes(Wild):
    """A 3D U-Net of MONAI's with its loss of Dice and cross-entropy."""

    train_loader = staticmethod(lambda: volumes(2, 32, 32, 32))

    def __init__(self) -> None:
        losses, nets = pytest.importorskip("monai.losses"), pytest.importorskip("monai.networks.nets")
        super().__init__()
        self.net, self.head = nets.UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=1, dropout=0.1), None
        self.criterion = losses.DiceCELoss(to_onehot_y=True, softmax=True)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.criterion(self.net(batch), (batch > 0).long())


class Attended(Wild):
    """Two layers of PyTorch Geometric's graph attention, which replaces the graph's loops, on one graph."""

    train_loader = staticmethod(lambda: DataLoader([*graphs(GraphTuple, 4096)] * STEPS, batch_size=None))

    def __init__(self) -> None:
        layers = pytest.importorskip("torch_geometric.nn")
        super().__init__()
        self.net = nn.ModuleList([layers.GATConv(16, 8, heads=2, dropout=0.1) for _ in range(2)])

    def features(self, batch: Any) -> torch.Tensor:
        x = batch.x
        for layer in self.net:
            x = functional.elu(layer(x, batch.edges))
        return x

    def loss(self, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.features(batch)), batch.y)


class Denoiser(Wild):
    """A step of diffusion with diffusers' UNet2D: noise and times are drawn in it."""

    train_loader = staticmethod(lambda: DataLoader([torch.randn(4, 3, 32, 32) for _ in range(STEPS)], None))

    def __init__(self) -> None:
        diffusers = pytest.importorskip("diffusers")
        super().__init__()
        blocks = {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        }
        sizes = {"sample_size": 32, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
        self.net, self.head = diffusers.UNet2DModel(**sizes, **blocks, dropout=0.1), None
        self.noises = diffusers.DDPMScheduler(num_train_timesteps=100)

    def loss(self, batch: Any) -> torch.Tensor:
        noise, times = torch.randn_like(batch), torch.randint(0, 100, (len(batch),))
        noisy = self.noises.add_noise(batch, noise, times)
        return functional.mse_loss(self.net(noisy, times).sample, noise)


class Adapted(Wild):
    """PEFT's adapters on a Llama: low-rank ones, or weight-decomposed."""

    dora = False
    train_loader = staticmethod(lambda: DataLoader([torch.randint(0, 100, (8, 64)) for _ in range(STEPS)], None))

    def __init__(self) -> None:
        peft = pytest.importorskip("peft")
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 100}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        base = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False)).train()
        options = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "use_dora": self.dora}
        self.net, self.head = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_dropout=0.1, **options)), None

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(input_ids=batch, labels=batch).loss


class Dora(Adapted):
    dora = True


@pytest.mark.parametrize(
    ("make", "share", "plans"),
    [(SwinUnetr, 0.6, 1), (Volumes, 0.7, 1), (Attended, 0.7, 2), (Denoiser, 0.6, 1), (Adapted, 0.7, 1), (Dora, 0.7, 1)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_run_within_a_share(make: type[Wild], share: float, plans: int) -> None:
    remat = RematCallback(share, artifacts=False, solver="greedy")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, eager mode does not repeat the gradient of an index
    try:
        plain, run = (fit(make, *callbacks, train=make.train_loader) for callbacks in ([], [remat]))
    finally:
        torch.set_num_threads(threads)
    assert_same(plain.results, run.results)
    assert remat.failures == () and sum(remat.runs) == STEPS
    assert len(remat.plans) <= plans
    plan, measured = remat.plan, remat.measured_peak_bytes
    assert plan is not None and measured is not None and plan.rematerializes
    assert measured <= plan.budget_bytes
    assert abs(plan.predicted_peak_bytes / measured - 1) <= 0.02
