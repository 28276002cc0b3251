"""The networks that the benchmarks train: each with its loss inside, a batch, and its blocks.

`networks()` names them; `build(name, size)` makes one. The sizes are ``"cpu"`` (seconds a step on two cores), ``"gpu"`` (what
people train on one large GPU, in bfloat16) and ``"tiny"`` (for tests). Weights and batches are random, from a fixed seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

SIZES = ("cpu", "gpu", "tiny")


@dataclasses.dataclass(frozen=True)
class Workload:
    """One training step's worth of a network.

    Attributes:
        name: of the network.
        description: what it is, for the reader of a table.
        module: called with ``*batch`` it returns the scalar loss.
        batch: the inputs.
        blocks: names of the submodules that per-block checkpointing wraps.
    """

    name: str
    description: str
    module: nn.Module
    batch: tuple[torch.Tensor, ...]
    blocks: tuple[str, ...]


def networks() -> tuple[str, ...]:
    """The names that `build` takes."""
    return tuple(_FACTORIES)


def build(name: str, size: str = "cpu", device: torch.device | str = "cpu", seed: int = 0, **changes: Any) -> Workload:
    """Make a network in training mode, and a batch for it.

    Args:
        name: one of `networks()`.
        size: one of `SIZES`; ``"gpu"`` is in bfloat16, the others in float32.
        device: where to put both.
        seed: of weights and batch. The global random state is left as it was.
        **changes: of what the size says, such as ``length=64``.
    """
    if name not in _FACTORIES:
        raise ValueError(f"no network {name!r}: choose one of {', '.join(_FACTORIES)}")
    if size not in SIZES:
        raise ValueError(f"no size {size!r}: choose one of {', '.join(SIZES)}")
    factory, sizes = _FACTORIES[name]
    made_on = torch.device(device if size == "gpu" else "cpu")  # large ones where that takes seconds instead of minutes
    with torch.random.fork_rng(devices=[made_on] if made_on.type == "cuda" else []), made_on:
        torch.manual_seed(seed)
        description, module, batch, block_types = factory(**{**sizes[size], **changes})
    dtype = torch.bfloat16 if size == "gpu" else torch.float32
    module = module.to(device, dtype).train()
    return Workload(
        name=name,
        description=description + (", bfloat16" if dtype is torch.bfloat16 else ""),
        module=module,
        batch=tuple(one.to(device, dtype) if one.is_floating_point() else one.to(device) for one in batch),
        blocks=_outermost(path for path, part in module.named_modules() if type(part).__name__ in block_types),
    )


def _outermost(paths: Iterable[str]) -> tuple[str, ...]:
    """Module paths, in the order of `named_modules`, without those inside another of them."""
    kept: list[str] = []
    for path in paths:
        if not any(path.startswith(f"{outer}.") for outer in kept):
            kept.append(path)
    return tuple(kept)


# A description, the module, the batch, and the class names of the blocks.
_Made = tuple[str, nn.Module, tuple[torch.Tensor, ...], tuple[str, ...]]


class NextToken(nn.Module):
    """A language model, called with token indices of shape (batch, time); returns the cross entropy of the next token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens, use_cache=False).logits[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class MaskedTokens(nn.Module):
    """A masked language model, called with token indices and targets, both (batch, time); returns the cross entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class TokensToTokens(nn.Module):
    """An encoder and decoder, called with source and target tokens, both (batch, time); returns the cross entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=source, decoder_input_ids=target, use_cache=False).logits[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1).float(), target[:, 1:].flatten())


class Classification(nn.Module):
    """A classifier of images of shape (batch, channels, height, width), and labels (batch); returns the cross entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(images).logits.float(), labels)


class SequenceToSequence(nn.Module):
    """`nn.Transformer` with tensors of shape (batch, time, width); returns the mean square of output less target."""

    def __init__(self, model: nn.Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.model(source, target), target)


class MeanSquare(nn.Module):
    """A network of images of shape (batch, channels, height, width); returns the mean square of its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(images)
        return output.square().mean()


def _gpt2(*, layers: int, width: int, heads: int, vocabulary: int, length: int, batch: int, dropout: float) -> _Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=length,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(0, vocabulary, (batch, length))
    description = (
        f"GPT-2: {layers} layers, width {width}, {heads} heads, {batch} x {length} tokens of {vocabulary}, "
        f"dropout {dropout:g}"
    )
    return description, NextToken(GPT2LMHeadModel(config)), (tokens,), ("GPT2Block",)


def _llama(
    *, layers: int, width: int, heads: int, groups: int, feed_forward: int, vocabulary: int, length: int, batch: int
) -> _Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=feed_forward,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(0, vocabulary, (batch, length))
    layout = f"{layers} layers, width {width}, {heads} heads in {groups} groups"
    description = f"Llama: {layout}, {batch} x {length} tokens of {vocabulary}"
    return description, NextToken(LlamaForCausalLM(config)), (tokens,), ("LlamaDecoderLayer",)


def _transformer(*, layers: int, width: int, heads: int, feed_forward: int, length: int, batch: int) -> _Made:
    model = nn.Transformer(width, heads, layers, layers, feed_forward, dropout=0.1, batch_first=True)
    tensors = torch.randn(batch, length, width), torch.randn(batch, length, width)
    layout = f"{layers}+{layers} layers, width {width}, {heads} heads"
    description = f"nn.Transformer: {layout}, {batch} x {length} vectors, dropout 0.1"
    return description, SequenceToSequence(model), tensors, ("TransformerEncoderLayer", "TransformerDecoderLayer")


def _bert(*, layers: int, width: int, heads: int, vocabulary: int, length: int, batch: int) -> _Made:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    tokens, targets = torch.randint(0, vocabulary, (2, batch, length))
    description = (
        f"BERT: {layers} layers, width {width}, {heads} heads, {batch} x {length} tokens of {vocabulary}, dropout 0.1"
    )
    return description, MaskedTokens(BertForMaskedLM(config)), (tokens, targets), ("BertLayer",)


def _t5(*, layers: int, width: int, heads: int, vocabulary: int, length: int, batch: int) -> _Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=layers,
        d_model=width,
        num_heads=heads,
        d_kv=width // heads,
        d_ff=4 * width,
        vocab_size=vocabulary,
        dropout_rate=0.1,
        use_cache=False,
    )
    source, target = torch.randint(0, vocabulary, (2, batch, length))
    layout = f"{layers}+{layers} layers, width {width}, {heads} heads"
    description = f"T5: {layout}, {batch} x {length} tokens of {vocabulary}, dropout 0.1"
    return description, TokensToTokens(T5ForConditionalGeneration(config)), (source, target), ("T5Block",)


def _vit(*, layers: int, width: int, heads: int, patch: int, side: int, batch: int) -> _Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        patch_size=patch,
        image_size=side,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    config.num_labels = _LABELS
    description = f"ViT: {layers} layers, width {width}, {heads} heads, {batch} x {side}² images, dropout 0.1"
    return description, Classification(ViTForImageClassification(config)), _images(batch, side), ("ViTLayer",)


def _swin(*, depths: Sequence[int], width: int, heads: Sequence[int], window: int, side: int, batch: int) -> _Made:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        depths=list(depths),
        embed_dim=width,
        num_heads=list(heads),
        window_size=window,
        image_size=side,
        drop_path_rate=0.1,
    )
    config.num_labels = _LABELS
    layout = f"{'+'.join(map(str, depths))} layers, width {width}, windows of {window}²"
    description = f"Swin: {layout}, {batch} x {side}² images, stochastic depth 0.1"
    return description, Classification(SwinForImageClassification(config)), _images(batch, side), ("SwinLayer",)


def _images(batch: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and their labels."""
    return torch.randn(batch, 3, side, side), torch.randint(0, _LABELS, (batch,))


_LABELS = 100


# pytorchcv's networks are imported from their own modules: its `model_provider` wants torchvision.


def _resnet18(*, batch: int, side: int) -> _Made:
    from pytorchcv.models.resnet import resnet18

    model = MeanSquare(resnet18(in_size=(side, side)))
    return (
        f"ResNet-18: {batch} x {side}² images",
        model,
        (torch.randn(batch, 3, side, side),),
        ("ResInitBlock", "ResUnit"),
    )


def _resnet50(*, batch: int, side: int) -> _Made:
    from pytorchcv.models.resnet import resnet50

    model = MeanSquare(resnet50(in_size=(side, side)))
    blocks = ("ResInitBlock", "ResUnit")
    return f"ResNet-50: {batch} x {side}² images", model, (torch.randn(batch, 3, side, side),), blocks


def _densenet121(*, batch: int, side: int) -> _Made:
    from pytorchcv.models.densenet import densenet121

    model = MeanSquare(densenet121(in_size=(side, side)))
    blocks = ("PreResInitBlock", "DenseUnit", "TransitionBlock")
    return f"DenseNet-121: {batch} x {side}² images", model, (torch.randn(batch, 3, side, side),), blocks


def _unet(*, batch: int, side: int) -> _Made:
    from pytorchcv.models.unet import unet_cityscapes

    model = MeanSquare(unet_cityscapes(in_size=(side, side)))
    blocks = ("UNetBlock", "InterpolationBlock")
    return f"U-Net: {batch} x {side}² images", model, (torch.randn(batch, 3, side, side),), blocks


def _mobilenet(*, batch: int, side: int) -> _Made:
    from pytorchcv.models.mobilenet import mobilenet_w1

    model = MeanSquare(mobilenet_w1(in_size=(side, side)))
    return (
        f"MobileNet: {batch} x {side}² images",
        model,
        (torch.randn(batch, 3, side, side),),
        ("ConvBlock", "DwsConvBlock"),
    )


def _mobilenet_v1(*, batch: int, side: int) -> _Made:
    from transformers import MobileNetV1Config, MobileNetV1ForImageClassification

    config = MobileNetV1Config(image_size=side)
    config.num_labels = _LABELS
    description = f"MobileNetV1 as published (ReLU6, not in place; TensorFlow's padding): {batch} x {side}² images"
    model = Classification(MobileNetV1ForImageClassification(config))
    return description, model, _images(batch, side), ("MobileNetV1ConvLayer",)


_GPT2_SIZES: Mapping[str, dict[str, Any]] = {
    "cpu": {"layers": 8, "width": 256, "heads": 8, "vocabulary": 4000, "length": 256, "batch": 4},
    "gpu": {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257, "length": 1024, "batch": 16},
    "tiny": {"layers": 2, "width": 32, "heads": 2, "vocabulary": 64, "length": 16, "batch": 4},
}

_LLAMA = {"heads": 8, "groups": 2, "batch": 4}

_FACTORIES: Mapping[str, tuple[Callable[..., _Made], Mapping[str, dict[str, Any]]]] = {
    "gpt2": (_gpt2, {size: {**options, "dropout": 0.1} for size, options in _GPT2_SIZES.items()}),
    "gpt2-nodropout": (_gpt2, {size: {**options, "dropout": 0.0} for size, options in _GPT2_SIZES.items()}),
    "llama": (
        _llama,
        {
            "cpu": {**_LLAMA, "layers": 6, "width": 256, "feed_forward": 704, "vocabulary": 4000, "length": 256},
            "gpu": {
                "layers": 16,
                "width": 2048,
                "heads": 32,
                "groups": 8,
                "feed_forward": 8192,
                "vocabulary": 128256,
                "length": 1024,
                "batch": 2,
            },
            "tiny": {**_LLAMA, "layers": 2, "width": 32, "feed_forward": 64, "vocabulary": 64, "length": 16},
        },
    ),
    "transformer": (
        _transformer,
        {
            "cpu": {"layers": 3, "width": 256, "heads": 8, "feed_forward": 1024, "length": 128, "batch": 8},
            "gpu": {"layers": 6, "width": 1024, "heads": 16, "feed_forward": 4096, "length": 512, "batch": 16},
            "tiny": {"layers": 1, "width": 16, "heads": 2, "feed_forward": 32, "length": 8, "batch": 4},
        },
    ),
    "transformer-6+6": (
        _transformer,
        {
            "cpu": {"layers": 6, "width": 256, "heads": 8, "feed_forward": 1024, "length": 128, "batch": 8},
            "gpu": {"layers": 6, "width": 1024, "heads": 16, "feed_forward": 4096, "length": 512, "batch": 16},
            "tiny": {"layers": 2, "width": 16, "heads": 2, "feed_forward": 32, "length": 8, "batch": 4},
        },
    ),
    "bert": (
        _bert,
        {
            "cpu": {"layers": 6, "width": 256, "heads": 8, "vocabulary": 4000, "length": 256, "batch": 4},
            "gpu": {"layers": 12, "width": 768, "heads": 12, "vocabulary": 30522, "length": 512, "batch": 32},
            "tiny": {"layers": 2, "width": 32, "heads": 2, "vocabulary": 64, "length": 16, "batch": 4},
        },
    ),
    "t5": (
        _t5,
        {
            "cpu": {"layers": 3, "width": 256, "heads": 8, "vocabulary": 4000, "length": 192, "batch": 4},
            "gpu": {"layers": 12, "width": 768, "heads": 12, "vocabulary": 32128, "length": 512, "batch": 16},
            "tiny": {"layers": 1, "width": 32, "heads": 2, "vocabulary": 64, "length": 16, "batch": 4},
        },
    ),
    "vit": (
        _vit,
        {
            "cpu": {"layers": 6, "width": 256, "heads": 8, "patch": 16, "side": 224, "batch": 6},
            "gpu": {"layers": 12, "width": 768, "heads": 12, "patch": 16, "side": 224, "batch": 128},
            "tiny": {"layers": 2, "width": 32, "heads": 2, "patch": 8, "side": 32, "batch": 2},
        },
    ),
    "swin": (
        _swin,
        {
            "cpu": {"depths": (2, 2, 6, 2), "width": 48, "heads": (2, 4, 8, 16), "window": 7, "side": 224, "batch": 4},
            "gpu": {
                "depths": (2, 2, 6, 2),
                "width": 96,
                "heads": (3, 6, 12, 24),
                "window": 7,
                "side": 224,
                "batch": 64,
            },
            "tiny": {"depths": (2, 2), "width": 16, "heads": (2, 4), "window": 4, "side": 64, "batch": 2},
        },
    ),
    "resnet50": (
        _resnet50,
        {"cpu": {"batch": 3, "side": 224}, "gpu": {"batch": 256, "side": 224}, "tiny": {"batch": 1, "side": 224}},
    ),
    "densenet121": (
        _densenet121,
        {"cpu": {"batch": 2, "side": 224}, "gpu": {"batch": 128, "side": 224}, "tiny": {"batch": 1, "side": 224}},
    ),
    "resnet18": (
        _resnet18,
        {"cpu": {"batch": 4, "side": 224}, "gpu": {"batch": 256, "side": 224}, "tiny": {"batch": 1, "side": 224}},
    ),
    "unet": (
        _unet,
        {"cpu": {"batch": 1, "side": 192}, "gpu": {"batch": 16, "side": 512}, "tiny": {"batch": 1, "side": 32}},
    ),
    "mobilenet": (
        _mobilenet,
        {"cpu": {"batch": 8, "side": 224}, "gpu": {"batch": 256, "side": 224}, "tiny": {"batch": 1, "side": 224}},
    ),
    "mobilenet-v1": (
        _mobilenet_v1,
        {"cpu": {"batch": 8, "side": 224}, "gpu": {"batch": 256, "side": 224}, "tiny": {"batch": 2, "side": 32}},
    ),
}
