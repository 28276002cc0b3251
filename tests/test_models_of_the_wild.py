"""Models of the wild: what people train, in small. Bit for bit the run without the callback, and how much was captured."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.data import DataLoader

from lightning_remat.callbacks import RematCallback
from lightning_remat.capture import _joint
from lightning_remat.planner import RematWarning
from tests.helpers.training import Classifier, Run, assert_same, callback, compare, fit, loader

# Dynamo's own doing, where it meets functions of the user's own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),  # torch 2.11
]

ROWS = 64
STEPS = 2


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _small_draws_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models are to meet what large ones meet: random numbers that are not kept, and drawn a second time."""
    monkeypatch.setattr(_joint, "WORTH_DRAWING_AGAIN", 0)


def vectors() -> DataLoader[Any]:
    """Batches of 64 vectors of 16 numbers, each of one of four classes."""
    return loader(STEPS * ROWS, ROWS)


class Wild(Classifier):
    """Two layers, from 16 numbers to 16 with 32 in between, and a head; subclasses change what they are about."""

    train_loader: Any = staticmethod(vectors)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 4)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).tanh()

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return functional.cross_entropy(self.head(self.features(x)), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=1)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def tokens() -> DataLoader[Any]:
    """Batches of four sentences of twelve tokens, as a tokenizer gives them."""
    numbers = torch.Generator().manual_seed(2)
    sentences = []
    for i in range(4 * STEPS):
        ids = torch.randint(3, 40, (12,), generator=numbers)
        mask = torch.ones(12, dtype=torch.long)
        mask[12 - i % 5 :] = 0
        sentences.append({"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)})
    return DataLoader(sentences, 4)


class LoraLinear(nn.Module):
    """A frozen layer, and beside it a product of two thin matrices."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(rank, inputs))
        self.up = nn.Parameter(0.1 * torch.randn(outputs, rank))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.dropout(x) @ self.down.t() @ self.up.t() * 2.0


class Lora(Wild):
    """GPT-2 with low-rank layers beside frozen ones. The step returns its ModelOutput: loss, logits and cache."""

    train_loader = staticmethod(tokens)

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 16}
        self.net = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).train().requires_grad_(False)
        self.head = None
        for block in self.net.transformer.h:
            block.attn.c_attn = LoraLinear(block.attn.c_attn, 16, 48)
            block.mlp.c_fc = LoraLinear(block.mlp.c_fc, 16, 64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.net(**batch)
        self.log("loss", output.loss)
        return output

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        cache = outputs.pop("cache" if "cache" in outputs else "past_key_values")  # by its name since transformers 5.24
        self.seen += [layer.keys.detach() for layer in cache.layers]


class Llama(Wild):
    """Grouped queries, no padding: in eager mode the library finds out that no mask is needed."""

    train_loader = staticmethod(tokens)

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 40}
        config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, use_cache=False)
        self.net, self.head = LlamaForCausalLM(config).train(), None

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(input_ids=batch["input_ids"], labels=batch["labels"]).loss


# -- batches ----------------------------------------------------------------------------------------------------------


def several_tasks() -> DataLoader[Any]:
    """Dicts with texts, numbers, nothing, and lists of tensors in them."""

    def collate(samples: list[Any]) -> dict[str, Any]:
        x = torch.stack([x for x, _ in samples])
        y = torch.stack([y for _, y in samples])
        task = "first" if float(x[0, 0]) > 0 else "second"
        return {"task": task, "views": [x, x.flip(1)], "y": y, "scale": 0.5, "mask": None, "ids": ["a"] * len(samples)}

    return DataLoader(list(vectors().dataset), ROWS, collate_fn=collate)


class SeveralTasks(Wild):
    """A head for each task, chosen by the text in the batch."""

    train_loader = staticmethod(several_tasks)

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"first": nn.Linear(16, 4), "second": nn.Linear(16, 4)})

    def loss(self, batch: Any) -> torch.Tensor:
        head = self.heads[batch["task"]]
        losses = [functional.cross_entropy(head(self.features(x)), batch["y"]) for x in batch["views"]]
        return batch["scale"] * sum(losses)


class GraphTuple(NamedTuple):
    x: torch.Tensor
    edges: torch.Tensor
    y: torch.Tensor


class Graph:
    """The same in a class of one's own, in the manner of graph libraries."""

    def __init__(self, x: torch.Tensor, edges: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.edges, self.y = x, edges, y

    def to(self, device: torch.device, **options: Any) -> Graph:
        return Graph(self.x.to(device), self.edges.to(device), self.y.to(device))


def graphs(kind: Any, *sizes: int) -> DataLoader[Any]:
    numbers = torch.Generator().manual_seed(3)
    made = []
    for size in sizes:
        x = torch.randn(size, 16, generator=numbers)
        edges = torch.randint(size, (2, 3 * size), generator=numbers)
        made.append(kind(x, edges, torch.randint(4, (size,), generator=numbers)))
    return DataLoader(made, batch_size=None)


class MessagePassing(Wild):
    train_loader = staticmethod(lambda: graphs(Graph, *[ROWS] * STEPS))

    def loss(self, batch: Any) -> torch.Tensor:
        source, target = batch.edges
        messages = self.features(batch.x[source])
        h = torch.zeros_like(batch.x).index_add(0, target, messages).tanh() + batch.x
        return functional.cross_entropy(self.head(h), batch.y)


def lists_of_pictures() -> DataLoader[Any]:
    """As detectors get them: a list of pictures of several sizes, and a list of dicts."""
    numbers = torch.Generator().manual_seed(5)

    def made(count: int) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
        images = [torch.randn(3, 8 + i, 9, generator=numbers) for i in range(2)]
        return images, [{"boxes": torch.rand(count + i, 4, generator=numbers)} for i in range(2)]

    return DataLoader([made(1), made(2)], batch_size=None)


class DetectorMatchedByNumpy(Wild):
    """Each picture has its own number of boxes; each box is matched with a prediction, in a loop."""

    train_loader = staticmethod(lists_of_pictures)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.head = nn.Linear(16, 20)

    def loss(self, batch: Any) -> torch.Tensor:
        total = torch.zeros(())
        for image, target in zip(*batch, strict=True):
            boxes = self.head(self.net(self.stem(image[None]).relu().mean((2, 3)))).view(5, 4).sigmoid()
            cost = torch.cdist(boxes.detach(), target["boxes"], p=1)
            chosen = torch.from_numpy(np.argsort(cost.numpy(), axis=0)[0].copy())
            total = total + functional.l1_loss(boxes[chosen], target["boxes"])
        return total / len(batch[0])


class ModifiesTheBatch(Wild):
    """Masked modelling: labels and inputs are written over in place."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        hidden = torch.bernoulli(torch.full(y.shape, 0.3)).bool()
        y[~hidden] = -100
        x[hidden] = 0.0
        return functional.cross_entropy(self.head(self.features(x)), y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [part.clone() for part in batch]


# -- weights ----------------------------------------------------------------------------------------------------------


class TiedEmbeddings(Wild):
    """An own language model: input and output share their weights."""

    train_loader = staticmethod(tokens)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16, padding_idx=0)
        self.net = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def loss(self, batch: Any) -> torch.Tensor:
        ids = batch["input_ids"]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        x = self.net(self.embed(ids) * math.sqrt(16), src_mask=mask, is_causal=True)
        return functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class TiedAutoencoder(Wild):
    """The decoder is the encoder transposed."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, _ = batch
        code = self.net(x)
        for layer in reversed([part for part in self.net if isinstance(part, nn.Linear)]):
            code = functional.linear(code.tanh(), layer.weight.t())
        return functional.mse_loss(code, x)


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).t()


class Parametrized(Wild):
    """Parametrizations of torch's own and of one's own; one weight is used twice and computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = parametrizations.weight_norm(self.net[0])
        self.net[2] = parametrizations.spectral_norm(self.net[2])
        self.middle = nn.Linear(16, 16)
        parametrize.register_parametrization(self.middle, "weight", Symmetric())

    def features(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return self.middle(self.middle(self.net(x)).tanh())


class NormedByHooks(Wild):
    """The older weight norm and spectral norm, and pruning: hooks that run before the layer."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # deprecated, and still much used
            self.net[0] = nn.utils.weight_norm(self.net[0])
            self.net[2] = nn.utils.spectral_norm(self.net[2])
        prune.l1_unstructured(self.head, "weight", 0.5)


class SparseEmbedding(Wild):
    """Gradients are sparse tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, sparse=True)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.embed((x.abs() * 10).long().clamp(max=49)).mean(1))

    def on_after_backward(self) -> None:
        self.seen.append(self.embed.weight.grad.to_dense().clone())

    def on_train_end(self) -> None:
        self.embed.weight.grad = None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Fourier(Wild):
    """FNet's mixing, FNO's products of low frequencies with complex weights, and a complex layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 5, dtype=torch.cfloat) / 8)
        self.middle = nn.Linear(16, 16, dtype=torch.cfloat)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(16, 4, 16)
        x = self.net(functional.layer_norm(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real, (16,)))
        spectrum = torch.fft.rfft(x)
        product = torch.zeros_like(spectrum)
        product[:, :, :5] = torch.einsum("bix,iox->box", spectrum[:, :, :5], self.weight)
        z = self.middle(torch.complex(torch.fft.irfft(product, n=16), x))
        return torch.polar(z.abs().tanh(), z.angle()).real.reshape(-1, 16)


class Thawed(Wild):
    """The body is frozen for an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net.requires_grad_(self.current_epoch > 0)


# -- recurrence -------------------------------------------------------------------------------------------------------


class Lstm(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 16, batch_first=True, bidirectional=True)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.recurrent(x.view(len(x), 4, 4))
        return self.net(hidden.sum(0))


class Gru(Lstm):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(2, 16, 2, batch_first=True, dropout=0.1)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        output, _ = self.recurrent(x.view(len(x), 8, 2))
        return self.net(output.mean(1))


class Packed(Lstm):
    """Sequences of several lengths, packed."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.arange(len(x)) % 4 + 1
        packed = nn.utils.rnn.pack_padded_sequence(
            x.view(len(x), 4, 4), lengths, batch_first=True, enforce_sorted=False
        )
        output, _ = self.recurrent(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True)
        return self.net(padded.sum(1)[:, :16])


class LstmCell(Wild):
    """The loop over time is the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 16)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(len(x), 16)
        outputs = []
        for part in x.view(len(x), 2, 8).unbind(1):
            h, c = self.cell(part, (h, c))
            outputs.append(h)
        return self.net(torch.stack(outputs, 1).mean(1))


class GruCell(Wild):
    """Truncated backpropagation through time: the state goes on from batch to batch, detached."""

    width = 32

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, self.width)
        self.net = nn.Linear(self.width, 16)
        self.hidden = torch.zeros(ROWS, self.width)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden
        for part in x.view(len(x), 2, 8).unbind(1):
            h = self.cell(part, h)
        self.hidden = h.detach()
        return self.net(h).tanh()

    def on_train_end(self) -> None:
        self.seen.append(self.hidden)


class GruCellOfOddWidth(GruCell):
    """Eager's kernel writes over a part of a wider tensor, and its rows do not fill the processor's vectors."""

    width = 9


# -- autograd ---------------------------------------------------------------------------------------------------------


class Round(torch.autograd.Function):
    """Rounds; the gradient goes straight through where the number is in range."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
        inside = x.abs() <= limit
        ctx.save_for_backward(inside)
        ctx.mark_non_differentiable(inside)
        ctx.limit = limit
        return (x * 4).round() / 4, inside

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, None]:
        (inside,) = ctx.saved_tensors
        return (gradient * inside if ctx.needs_input_grad[0] else None), None


class Reverse(torch.autograd.Function):
    """Gradient reversal, in the newer form with `setup_context`."""

    @staticmethod
    def forward(x: torch.Tensor, strength: float) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.strength = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.strength * gradient, None


class GradientReversal(Wild):
    """Domain-adversarial training."""

    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        h = self.features(x)
        domain = self.domain(Reverse.apply(h, 0.3)).squeeze(1)
        truth = (y % 2).float()
        return functional.cross_entropy(self.head(h), y) + functional.binary_cross_entropy_with_logits(domain, truth)


class InPlace(torch.autograd.Function):
    """Writes over its input, and keeps what it needs on the context itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        x.clamp_(-1, 1)
        ctx.inside = x.abs() < 1
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.inside


class OnTheContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.inside = x.abs() < 1
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.inside


class Noisy(torch.autograd.Function):
    """Gradients get noise."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + 1e-3 * torch.randn_like(gradient)


class UserFunctions(Wild):
    """Functions of the user's own: straight through, in place, with the context as a notebook, and with noisy gradients."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = Round.apply(self.net(x), 1.5)
        x = Noisy.apply(OnTheContext.apply(3 * InPlace.apply(2 * x)))
        return self.net(x).tanh()


class HookedActivations(Wild):
    """Gradients of activations are clipped, and get noise, on their way."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.net:
            x = layer(x)
            x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        x.register_hook(lambda gradient: gradient + 1e-3 * torch.randn_like(gradient))
        return self.net(x)


class KeepsAGradient(Wild):
    """Grad-CAM: the gradient of an activation is kept, and read after the backward."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.net(x)
        self.kept.retain_grad()
        return self.kept.tanh()

    def on_after_backward(self) -> None:
        self.seen.append(self.kept.grad.clone())

    def on_train_end(self) -> None:
        del self.kept


class OwnCheckpoint(torch.autograd.Function):
    """Somebody's own checkpoint: the backward runs the block again, and autograd in it."""

    @staticmethod
    def forward(ctx: Any, block: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output = ctx.block(x)
        return None, *torch.autograd.grad(output, [x, *weights], gradient)


class CheckpointedByHand(Wild):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(self.net(x).sin())
        return OwnCheckpoint.apply(self.net[0], x, *self.net[0].parameters()).tanh().mean(1, keepdim=True) * x


class GradientPenalty(Wild):
    """WGAN-GP in one automatic step: the critic's gradient at points between real and made ones."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, _ = batch
        made = torch.randn_like(x)
        mix = torch.rand(len(x), 1)
        between = (mix * x + (1 - mix) * made).requires_grad_()
        score = self.head(self.features(between)).sum(1)
        (gradient,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True, retain_graph=True)
        penalty = (gradient.norm(2, dim=1) - 1).square().mean()
        return self.head(self.features(made)).mean() - self.head(self.features(x)).mean() + 10 * penalty


class CriticByHand(Wild):
    """WGAN-GP in manual optimization: the penalty is differentiated in `manual_backward`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2, inplace=True), nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        with torch.no_grad():
            made = self.net(torch.randn_like(x))
        between = (0.5 * x + 0.5 * made).requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        loss = self.critic(made).mean() - self.critic(x).mean() + (gradient.norm(dim=1) - 1).square().mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        other = -self.critic(self.net(torch.randn_like(x))).mean()
        first.zero_grad()
        self.manual_backward(other)
        first.step()
        self.log_dict({"critic": loss, "generator": other})

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.net, self.critic)]


class TwoLosses(CriticByHand):
    """Two losses of one forward, each with a backward of its own: what is made is judged twice."""

    retained = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        made = self.net(batch[0])
        loss = self.critic(made.detach()).square().mean()
        second.zero_grad()
        self.manual_backward(loss, retain_graph=self.retained)
        second.step()
        other = -self.critic(made).mean()
        first.zero_grad()
        self.manual_backward(other)
        first.step()


class TwoLossesRetained(TwoLosses):
    """And what the first backward may give up is kept, although the critic has changed by then."""

    retained = True


class RetainedTwice(CriticByHand):
    """Two losses of one forward, whose gradients are added up."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        judged = self.critic(self.net(batch[0]))
        losses = judged.square().mean(), -judged.mean()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(losses[0], retain_graph=True)
        self.manual_backward(losses[1])
        first.step()
        second.step()


# -- checkpoints that are there already -------------------------------------------------------------------------------


class Checkpointed(Wild):
    """A checkpoint that is there already, with dropout in it."""

    reentrant, preserve, norm = False, True, False

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(32) if self.norm else nn.LayerNorm(32)
        self.net = nn.Sequential(
            nn.Linear(16, 32), norm, nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 16), nn.Dropout(0.2)
        )

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = (x * self.head.weight.mean()).tanh()
        options = {"use_reentrant": self.reentrant, "preserve_rng_state": self.preserve}
        return self.net(torch.utils.checkpoint.checkpoint(self.net, x, **options).sin())


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedBatchNorm(Checkpointed):
    """Eager evaluates the block twice, and moves the running statistics twice."""

    norm = True


class CheckpointedOtherNoise(Checkpointed):
    """The second evaluation draws other numbers, and eager's gradients are made of those."""

    preserve = False


class CheckpointedBesideSparse(SparseEmbedding):
    """What cannot be captured has a checkpoint with dropout in it, whose second evaluation draws the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.noisy = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.4), nn.Tanh())

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.noisy, super().features(x), use_reentrant=False)


class CheckpointedInSegments(Checkpointed):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint_sequential(self.net, 3, x, use_reentrant=False)


class CheckpointedSelectively(Checkpointed):
    """A policy says what to keep: all products of matrices."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        def contexts() -> Any:
            return torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

        return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False, context_fn=contexts).sin()


# -- operators --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("models_of_the_wild::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cube.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


cube.register_autograd(
    lambda ctx, gradient: gradient * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


class CustomOp(Wild):
    """An operator of torch.library, with a backward."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return cube(cube(self.net(x).tanh()).sin())


@torch.library.custom_op("models_of_the_wild::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x) + 0.5


@noise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class RandomCustomOp(Wild):
    """An operator that draws random numbers, and has no tag that says so."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.net:
            x = layer(x)
            x = x * noise(x.detach()) * noise(x.detach())
        return x


@torch.library.custom_op("models_of_the_wild::count_", mutates_args=("counter",))
def count_(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    counter += 1
    return x.clone()


@count_.register_fake
def _(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class MutatingCustomOp(Wild):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counter", torch.zeros(()))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        return x + count_(x.detach(), self.counter)


class Nested(Wild):
    """Sequences of several lengths as one nested tensor."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        nested = torch.nested.nested_tensor([x[:5], x[5:20], x[20:]], layout=torch.jagged)
        return torch.cat([one.tanh() for one in self.net(nested).unbind()])


class SparseProduct(Wild):
    """A constant sparse adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        index = torch.stack([torch.arange(ROWS), torch.arange(ROWS).flip(0)])
        adjacency = torch.sparse_coo_tensor(index, torch.ones(ROWS), (ROWS, ROWS), check_invariants=True)
        self.adjacency = [adjacency.coalesce()]

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(torch.sparse.mm(self.adjacency[0], x) + x)


class LinearAlgebra(Wild):
    """Whitening: a Cholesky factor, a solve, a determinant."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        h = self.features(x)
        covariance = h.t() @ h / len(h) + torch.eye(16)
        factor = torch.linalg.cholesky(covariance)
        white = torch.linalg.solve_triangular(factor, h.t(), upper=False).t()
        return functional.cross_entropy(self.head(white), y) - 0.01 * torch.logdet(covariance)


# -- control flow -----------------------------------------------------------------------------------------------------


class BranchesOnItsLoss(Wild):
    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        return loss * 2 if loss.item() > 1.35 else loss.square()


class Prints(Wild):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.features(batch[0])
        print("batch", batch_idx, list(h.shape))
        loss = functional.cross_entropy(self.head(h.sin()), batch[1])
        self.print("batch", batch_idx, "loss", loss.item())
        return loss


class LoopsAsTheBatchSays(Wild):
    """How often the body runs is a number of the batch."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x.abs().sum()) % 2 + 1):
            x = self.net(x).tanh()
        return x


class ReturnsViews(Wild):
    """More than the loss, of which some share memory; nothing of the second head is in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.head(self.features(x))
        other = self.other(x)
        views = {
            "flat": logits.view(-1),
            "first": logits[0],
            "halves": (other[:, :4], other[:, 4:]),
            "weight": self.head.weight.t(),
        }
        return {"loss": functional.cross_entropy(logits, y), "logits": logits, **views}


class ViewsOverABreak(Wild):
    """Tensors that share memory, and one that is handed on, go from one part to the next."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        h = self.features(x)
        left, right = h[:, :8], h[:, 8:]
        torch._dynamo.graph_break()
        logits = self.head(torch.cat((right, left), 1))
        first = h[0]
        torch._dynamo.graph_break()
        return functional.cross_entropy(logits, y) + first.square().mean() + h.mean()


class PicksRows(Wild):
    """Boolean indexing: which rows remain is found before the step, and their number is a size."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        h = self.features(x)
        keep = y != 0
        return functional.cross_entropy(self.head(h[keep].sin()), y[keep])


class MasksRows(Wild):
    """Boolean assignment, and hard examples: all shapes are known."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        h = self.features(x).clone()
        h[y == 0] = 0.5
        h[:, 0] += 1
        losses = functional.cross_entropy(self.head(h.masked_fill_(h > 2, 0.0)), y, reduction="none")
        mean = (losses * (y != 1)).sum() / (y != 1).sum()
        return mean + losses.topk(16).values.mean() + losses.sort().values[-8:].mean()


class Training(Wild):
    """`self.training`, and a part that is put in evaluation mode for a while by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.BatchNorm1d(16), nn.BatchNorm1d(16)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        self.norm.train(False)
        x = self.norm(x)
        self.norm.train(True)
        return self.other(x.sin())


class NormedInBothModes(Wild):
    """Running statistics are updated, and read by another layer after that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.net(x)).sin()
        self.norm.train(False)
        x = self.norm(x)
        self.norm.train(True)
        return x


class AsksWhetherItIsCompiled(Wild):
    """Libraries take other ways where they are compiled."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x)
        return h.sin() if torch.compiler.is_compiling() else h.tanh()


class TriesAndExcepts(Wild):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.net(x.view(len(x), 17))
        except RuntimeError:
            with torch.profiler.record_function("the other way"):
                return self.net(x)


class WeightsOnBothSides(Wild):
    """Used twice before a graph break, and once after it."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(self.net(x).tanh())
        torch._dynamo.graph_break()
        return self.net(x.tanh())


class ResidualAroundABreak(Wild):
    """An activation is used twice in one graph, and once more in a later one."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x).tanh()
        torch._dynamo.graph_break()
        mixed = self.query(h).tanh() * self.key(h).sin()
        torch._dynamo.graph_break()
        return mixed + h


class TransposedOverABreak(Wild):
    """What goes over the break lies transposed in memory; its gradient does not."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x).t()
        torch._dynamo.graph_break()
        return h.contiguous().sin().t()


# -- random numbers ---------------------------------------------------------------------------------------------------


class Seeded(Wild):
    """Python's and NumPy's generators are part of the result."""

    def on_train_start(self) -> None:
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002

    def on_train_end(self) -> None:
        self.seen += [random.random(), float(np.random.rand())]  # noqa: NPY002


class LayerDropByPython(Seeded):
    """Drawn in the middle, once a step."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x)
        if self.training and random.random() < 0.5:
            h = self.net(h.tanh())
        return h.sin()


class LayerDropInALoop(Seeded):
    """Drawn for each layer: a loop that cannot be left and entered again."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.net:
            if not isinstance(layer, nn.GELU) or random.random() < 0.5:
                x = layer(x)
        return x


class LayerDropByTorch(Wild):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x)
        if torch.rand(1).item() < 0.5:
            h = self.net(h.tanh())
        return h.sin()


class EveryNoise(Wild):
    """Noise of all kinds, and stochastic depth by a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.ModuleList([nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1), nn.RReLU()])
        self.channels = nn.Dropout1d(0.2)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.net(x) * (torch.rand(len(x), 1) < 0.8) / 0.8
        for noise in self.noise:
            x = noise(x.tanh())
        x = self.channels(x.view(16, 4, 16)).reshape(-1, 16)
        x = x + torch.normal(0.0, 1.0, x.shape) * 0.01 + torch.empty_like(x).uniform_(-0.01, 0.01)
        return self.net(functional.gumbel_softmax(x, tau=0.7, hard=True))


class OwnGenerator(Wild):
    """Numbers from a generator of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.Generator().manual_seed(11)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        noise = torch.randn(x.shape, generator=self.numbers).exp().sin()
        return (x * noise).tanh()

    def on_train_end(self) -> None:
        self.seen.append(self.numbers.get_state())


# -- state ------------------------------------------------------------------------------------------------------------


class OwnMeans(Wild):
    """Running means of its own making: a buffer written to, one bound anew, a tensor that is none, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("other", torch.zeros(16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.average = torch.zeros(())

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        with torch.no_grad():
            self.steps += 1
            self.mean.lerp_(x.mean(0), 0.1)
        self.other = 0.9 * self.other + 0.1 * x.detach().mean(0)
        return self.net((x - self.mean - self.other).tanh())

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return loss / (1 + self.average)


class CumulativeBatchNorm(Wild):
    """Batch norm without momentum: it divides by how many batches it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16, momentum=None)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.net(x)).tanh()


class Codebook(Wild):
    """VQ-VAE: a codebook that follows what it is near to; codes that nobody uses are drawn anew."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(16, 16)
        self.register_buffer("codes", torch.randn(8, 16))
        self.register_buffer("sizes", torch.ones(8))
        self.register_buffer("sums", self.codes.clone())

    def loss(self, batch: Any) -> torch.Tensor:
        x, _ = batch
        z = self.features(x)
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        chosen = functional.one_hot(nearest, 8).float()
        quantized = chosen @ self.codes
        with torch.no_grad():
            self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(chosen.t() @ z, alpha=0.1)
            codes = self.sums / self.sizes[:, None].clamp(min=1e-3)
            unused = (self.sizes < 0.5)[:, None]
            self.codes.copy_(torch.where(unused, z[torch.randint(len(z), (8,))], codes))
        straight = z + (quantized - z).detach()
        return functional.mse_loss(self.decoder(straight), x) + 0.25 * functional.mse_loss(z, quantized.detach())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.tanh().sin()


class CountsInAPart(Wild):
    """A submodule counts its calls in a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Counting()

    def on_train_end(self) -> None:
        self.seen.append(self.net.calls)


class LogsItsLearningRate(Wild):
    """Under a schedule it is another one in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Tanh()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Remembering(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.auxiliary = x.square().mean()
        self.output = x.tanh()
        return self.output.sin()


class RememberedActivation(Wild):
    """Layers leave activations on themselves: of an auxiliary loss, and for who looks later."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Remembering()

    def loss(self, batch: Any) -> torch.Tensor:
        loss = functional.cross_entropy(self.head(self.part(self.features(batch[0]))), batch[1])
        return loss + 0.1 * self.part.auxiliary

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [self.part.auxiliary.detach().clone(), self.part.output.detach().clone()]

    def on_train_end(self) -> None:
        self.part.auxiliary = self.part.output = None


# -- several networks, or one several times ---------------------------------------------------------------------------


class Siamese(Wild):
    """Two and three calls before one backward."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        one, other = self.features(x), self.features(x.flip(0))
        same = (y == y.flip(0)).float()
        distance = functional.pairwise_distance(one, other)
        pairs = same * distance.square() + (1 - same) * (1 - distance).clamp(min=0).square()
        return pairs.mean() + functional.triplet_margin_loss(one, self.features(x + 0.01 * torch.randn_like(x)), other)


class Byol(Wild):
    """A student follows a teacher that follows the student; both see noise of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.head = nn.Linear(16, 16)

    def loss(self, batch: Any) -> torch.Tensor:
        x, _ = batch
        one, two = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
        with torch.no_grad():
            targets = self.teacher(one), self.teacher(two)
        guesses = self.head(self.net(two)), self.head(self.net(one))
        return sum(2 - 2 * functional.cosine_similarity(g, t).mean() for g, t in zip(guesses, targets, strict=True))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)


class ByolThatFollowsInTheStep(Byol):
    """The teacher is moved inside the step, through its data, before it is asked."""

    def loss(self, batch: Any) -> torch.Tensor:
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        return super().loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class MovesItsData(Byol):
    """The teacher's data are exchanged for others inside the step."""

    def loss(self, batch: Any) -> torch.Tensor:
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        return super().loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class Dino(Byol):
    """Centred and sharpened targets; the centre is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 16))

    def loss(self, batch: Any) -> torch.Tensor:
        x, _ = batch
        views = [x + 0.1 * torch.randn_like(x) for _ in range(3)]
        with torch.no_grad():
            taught = torch.cat([self.teacher(view) for view in views[:2]])
            targets = ((taught - self.center) / 0.04).softmax(1).chunk(2)
            self.center = self.center * 0.9 + taught.mean(0, keepdim=True) * 0.1
        guesses = [(self.net(view) / 0.1).log_softmax(1) for view in views]
        return -sum((t * g).sum(1).mean() for i, t in enumerate(targets) for j, g in enumerate(guesses) if i != j)


class Moco(Byol):
    """A queue of keys; here it is rolled on, and the whole step is one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", functional.normalize(torch.randn(16, 2 * ROWS), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        self.queue.copy_(torch.cat([keys.t(), self.queue[:, : -len(keys)]], 1))

    def compared(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries = functional.normalize(self.net(x), dim=1)
        with torch.no_grad():
            shuffled = torch.randperm(len(x))
            keys = functional.normalize(self.teacher(x[shuffled]), dim=1)[shuffled.argsort()]
        positive = (queries * keys).sum(1, keepdim=True)
        negative = queries @ self.queue.clone().detach()
        return torch.cat([positive, negative], 1) / 0.07, keys

    def loss(self, batch: Any) -> torch.Tensor:
        logits, keys = self.compared(batch[0])
        self.enqueue(keys)
        return functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


class MocoWithAPointer(Moco):
    """As it was published: the pointer is read as a number, and the queue written to there."""

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        pointer = int(self.pointer)
        self.queue[:, pointer : pointer + len(keys)] = keys.t()
        self.pointer[0] = (pointer + len(keys)) % self.queue.shape[1]


class MocoThatEnqueuesLater(Moco):
    """The queue moves on between the step and its backward, past autograd, which cannot notice."""

    def loss(self, batch: Any) -> torch.Tensor:
        logits, self.keys = self.compared(batch[0])
        return functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.queue.data[:, : len(self.keys)] = self.keys.t()


class Taught(Wild):
    """A teacher that is no part of the state, and labels that the network itself has made in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.teachers = [copy.deepcopy(self.net).eval().requires_grad_(False)]

    def loss(self, batch: Any) -> torch.Tensor:
        x, _ = batch
        with torch.inference_mode():
            guess = self.head(self.features(x)).softmax(1)
        confidence, label = guess.clone().max(1)
        h = self.features(x + torch.randn_like(x))
        with torch.no_grad():
            taught = self.teachers[0](x)
        soft = functional.kl_div((h / 2).log_softmax(1), (taught / 2).softmax(1), reduction="batchmean")
        losses = functional.cross_entropy(self.head(h), label, reduction="none")
        return (losses * (confidence > 0.26)).mean() + soft


class Experts(Wild):
    """Top-2 of four experts; all rows go through all of them, with weights that are mostly zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(4))

    def routed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = (self.gate(x) + 0.01 * torch.randn(len(x), 4)).softmax(1)
        weights, chosen = scores.topk(2, dim=1)
        return scores, weights / weights.sum(1, keepdim=True), chosen

    def mixed(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        share = torch.zeros(len(x), 4).scatter(1, chosen, weights)
        return sum(share[:, i, None] * expert(x) for i, expert in enumerate(self.experts))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        x = self.net(x)
        scores, weights, chosen = self.routed(x)
        balance = 4 * (functional.one_hot(chosen[:, 0], 4).float().mean(0) * scores.mean(0)).sum()
        return functional.cross_entropy(self.head(x + self.mixed(x, weights, chosen)), y) + 0.01 * balance


class ExpertsOfSomeRows(Experts):
    """Each expert sees its rows only: how many, the data say."""

    def mixed(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        mixed = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == i)
            mixed.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        return mixed


class OwnAverage(Wild):
    """An exponential average of its own weights, moved after every batch and swapped in for validation."""

    def __init__(self) -> None:
        super().__init__()
        self.average = {name: p.detach().clone() for name, p in self.named_parameters()}

    def swap(self) -> None:
        for name, p in self.named_parameters():
            p.data, self.average[name] = self.average[name], p.data

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, p in self.named_parameters():
            self.average[name].mul_(0.9).add_(p.detach(), alpha=0.1)

    def on_validation_start(self) -> None:
        self.swap()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_validation_end(self) -> None:
        self.swap()

    def on_train_end(self) -> None:
        self.seen.append(self.average)


# -- hooks ------------------------------------------------------------------------------------------------------------


class Hooked(Wild):
    """Forward hooks that look, and that change what goes in and comes out; hooks on weights and their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.looked: dict[str, torch.Tensor] = {}
        self.net[2].register_forward_hook(self.look)
        self.net[0].register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 2,))
        self.net[1].register_forward_hook(lambda _module, _inputs, output: output + 1)
        self.net[0].weight.register_hook(lambda gradient: gradient * 2)
        self.net[2].weight.register_post_accumulate_grad_hook(clamp_gradient)

    def look(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.looked["last"] = output

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + self.looked["last"].square().mean()

    def on_train_end(self) -> None:
        self.looked.clear()


def clamp_gradient(p: nn.Parameter) -> None:
    p.grad.clamp_(-1e-3, 1e-3)


class HookedBackward(Wild):
    """Full backward hooks: one that looks, and one that changes the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1].register_full_backward_hook(self.look)
        self.net[2].register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] * 0.5,))

    def look(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.seen.append(outputs[0].detach().clone())


# -- the tests --------------------------------------------------------------------------------------------------------


def tight() -> RematCallback:
    """The smallest peak that is quickly found: much is evaluated again."""
    return callback("min", solver="greedy", time_limit=0.1)


def train(make: type[Wild], **options: Any) -> tuple[Run, RematCallback]:
    """Train without and with the callback, with the same results, everything captured and something rematerialized."""
    _, run, remat = compare(make, plans=None, remat=tight(), **{"train": make.train_loader, **options})
    return run, remat


def graphs_a_step(run: Run, remat: RematCallback) -> float:
    return sum(remat.runs) / len(run.recorder.outputs)


def share_of_weights(run: Run, remat: RematCallback) -> float:
    """How many parameters the graphs of a step have, of those that got gradients."""
    trained = sum(p.grad is not None for p in run.module.parameters())
    in_graphs = [sum(t.role.value == "parameter" for t in plan.graph.tensors) for plan in remat.plans]
    steps = len(run.recorder.outputs)
    return sum(runs * weights for runs, weights in zip(remat.runs, in_graphs, strict=True)) / steps / trained


FOLLOWS_ERRORS = torch.__version__ >= (2, 14)  # Dynamo goes on in the user's `except` where an op is refused its input
OLD = torch.__version__.startswith("2.11.")  # without inference mode, autograd in a backward, and Dynamo's reasons
WHOLE = [
    Lora,
    MessagePassing, ModifiesTheBatch,
    TiedEmbeddings, TiedAutoencoder, Parametrized, NormedByHooks, Fourier,
    Lstm, Gru, LstmCell, GruCell, GruCellOfOddWidth,
    GradientReversal, UserFunctions, HookedActivations,
    *([] if OLD else [CheckpointedByHand, Taught]),
    GradientPenalty,
    Checkpointed, CheckpointedReentrant,
    CustomOp, RandomCustomOp, MutatingCustomOp,
    LinearAlgebra,
    MasksRows, Training,
    EveryNoise,
    OwnMeans, Codebook, RememberedActivation,
    Siamese, ByolThatFollowsInTheStep, Dino, Moco, Experts,
    Hooked,
    AsksWhetherItIsCompiled,
    RetainedTwice,
    ReturnsViews,
    Llama,
    *([TriesAndExcepts] if FOLLOWS_ERRORS else []),
]  # fmt: skip


@pytest.mark.parametrize("make", WHOLE, ids=lambda make: make.__name__)
def test_whole(make: type[Wild]) -> None:
    run, remat = train(make)
    assert len(remat.plans) == graphs_a_step(run, remat) == 1
    assert share_of_weights(run, remat) >= 1


@pytest.mark.parametrize(
    ("make", "plans", "options"),
    [
        (SeveralTasks, 2, {}),  # one for each task
        (PicksRows, 2, {}),  # one for each number of rows
        (Thawed, 2, {"max_epochs": 2}),
        (OwnAverage, 1, {"val": True}),
        (MocoThatEnqueuesLater, 1, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_whole_in_several_ways(make: type[Wild], plans: int, options: dict[str, Any]) -> None:
    run, remat = train(make, **options)
    assert graphs_a_step(run, remat) == 1
    assert len(remat.plans) == plans


IN_PARTS = [
    Nested, KeepsAGradient, CriticByHand, ViewsOverABreak,
    BranchesOnItsLoss, LoopsAsTheBatchSays,
    LayerDropByPython, LayerDropByTorch, OwnGenerator,
    WeightsOnBothSides, ResidualAroundABreak,
    TransposedOverABreak,
    *([CheckpointedByHand] if OLD else []),
]  # fmt: skip


@pytest.mark.parametrize("make", IN_PARTS, ids=lambda make: make.__name__)
def test_in_parts(make: type[Wild]) -> None:
    run, remat = train(make)
    assert len(remat.plans) > 1 < graphs_a_step(run, remat)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (SparseEmbedding, "only strided tensors can be scheduled"),
        (DetectorMatchedByNumpy, "Tensor.numpy"),
        (CheckpointedSelectively, "TORCH_LOGS" if OLD else "context_fn"),
        *([] if FOLLOWS_ERRORS else [(TriesAndExcepts, "TORCH_LOGS" if OLD else "fake tensor call")]),
        *([(Taught, "torch.inference_mode cannot be captured")] if OLD else []),
        (MovesItsData, "set_ on a graph input"),
        (CheckpointedBatchNorm, "a batch norm inside of torch.utils.checkpoint"),
        (CheckpointedOtherNoise, "draws random numbers inside of torch.utils.checkpoint"),
        (CheckpointedBesideSparse, "only strided tensors can be scheduled"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_not_captured_and_the_reason_is_said(make: type[Wild], reason: str) -> None:
    plain, remat = fit(make, train=make.train_loader), tight()
    with pytest.warns(RematWarning, match=f"runs as before.*{reason}"):
        run = fit(make, remat, train=make.train_loader)
    assert_same(plain.results, run.results)
    assert len(remat.failures) == 1 and not remat.plans


def test_captured_until_it_is_given_up() -> None:
    """What the step reads is another Python number every time, and a whole one."""
    options = {"train": CountsInAPart.train_loader, "max_epochs": 3}
    plain, remat = fit(CountsInAPart, **options), tight()
    with pytest.warns(RematWarning, match="depends on a value that changes from call to call"):
        run = fit(CountsInAPart, remat, **options)
    assert_same(plain.results, run.results)
    assert len(remat.failures) == 1 and sum(remat.runs) == 5


def test_a_learning_rate_that_is_scheduled() -> None:
    options = {"train": LogsItsLearningRate.train_loader, "max_epochs": 3}
    plain, remat = fit(LogsItsLearningRate, **options), tight()
    run = fit(LogsItsLearningRate, remat, **options)
    assert_same(plain.results, run.results)
    assert not remat.failures and remat.runs == (6,)
    assert share_of_weights(run, remat) == 1  # which Dynamo takes from the optimizer


@pytest.mark.parametrize("make", [TwoLosses, TwoLossesRetained])
def test_two_backwards_through_one_graph(make: type[Wild]) -> None:
    """The first step ends as it would have; those after it run as before."""
    plain, remat = fit(make, train=make.train_loader), tight()
    with pytest.warns(RematWarning, match="two backwards come through one captured graph"):
        run = fit(make, remat, train=make.train_loader)
    assert_same(plain.results, run.results)
    assert len(remat.failures) == 1 and sum(remat.runs) == 2
    assert any(plan.rematerializes for plan in remat.plans)


def test_a_buffer_that_moves_where_its_pointer_says() -> None:
    """What Python reads of it decides which graphs there are; the queue is written after it was read."""
    plain, remat = fit(MocoWithAPointer, train=vectors), tight()
    run = fit(MocoWithAPointer, remat, train=vectors)
    assert_same(plain.results, run.results)
    assert not remat.failures
    assert any(plan.rematerializes and runs for plan, runs in zip(remat.plans, remat.runs, strict=True))


A_REST = [
    Packed, SparseProduct, CheckpointedInSegments, LayerDropInALoop, HookedBackward,
    CumulativeBatchNorm, ExpertsOfSomeRows,
]  # fmt: skip


@pytest.mark.parametrize("make", A_REST)
def test_only_a_rest_is_captured(make: type[Wild]) -> None:
    """Dynamo leaves the function alone that does it; the rest of the step is captured, and that is said."""
    plain, remat = fit(make, train=make.train_loader), tight()
    with pytest.warns(RematWarning, match="only a part of .*training_step could be captured: .*(weight|bias)"):
        run = fit(make, remat, train=make.train_loader)
    assert_same(plain.results, run.results)
    assert 0 < share_of_weights(run, remat) < 1


def test_prints_come_once_and_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    said, results = [], []
    for callbacks in ([], [tight()]):
        results.append(fit(Prints, *callbacks, train=vectors).results)
        said.append([line for line in capsys.readouterr().out.splitlines() if line.startswith("batch")])
    assert said[0] == said[1] and len(said[0]) == 2 * STEPS
    assert_same(*results)


@pytest.mark.parametrize("kind", [GraphTuple, Graph])
def test_a_small_batch_that_fits_says_nothing_of_a_large_one(kind: Any) -> None:
    sizes = {"train": lambda: graphs(kind, 32, 1024)}
    plain, remat = fit(MessagePassing, **sizes), callback(1_500_000, solver="greedy", time_limit=0.1)
    run = fit(MessagePassing, remat, **sizes)
    assert_same(plain.results, run.results)
    assert [plan.rematerializes for plan in remat.plans] == [False, True]


def test_running_statistics_may_be_read_after_they_were_updated() -> None:
    compare(NormedInBothModes, train=vectors, remat=callback(0.8, solver="chen_sqrt"), plans=1)
