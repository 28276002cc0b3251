"""Fine-tune a language model with low-rank adapters (LoRA), within a memory budget.

    python examples/lora/train.py --budget 0.4

The model is a Llama of transformers, of random weights that stay as they are; what is trained is a pair of narrow matrices
beside each of its linear layers. Gradients and AdamW's state are of these alone, so activations are nearly all that is held
beside the weights. The text is made here: sequences that count on from a random number.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L  # noqa: N812 - as Lightning's own documentation writes it
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.append(str(Path(__file__).parents[1]))
from comparison import Made, command_line, compare


class LoRA(nn.Module):
    """A linear layer that stays as it is, and beside it a product of two narrow matrices, which is nothing at first.

    Args:
        linear: the layer.
        rank: how narrow.
        dropout: of what the narrow matrices are handed.
    """

    def __init__(self, linear: nn.Linear, rank: int = 8, dropout: float = 0.05) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(requires_grad=False)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) + 2 * self.up(self.down(self.dropout(x)))
        return out


class FineTuning(L.LightningModule):
    """The language model with an adapter beside each linear layer of its blocks."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.network = LlamaForCausalLM(config).requires_grad_(requires_grad=False)
        for block in self.network.model.layers:
            for part in (block.self_attn, block.mlp):
                for name, linear in list(part.named_children()):
                    if isinstance(linear, nn.Linear):
                        setattr(part, name, LoRA(linear))

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.network(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((one for one in self.parameters() if one.requires_grad), lr=1e-2)


def counting(count: int, length: int, vocabulary: int) -> torch.Tensor:
    """Sequences that count on from a random number, among the first of a vocabulary; (count, length)."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(64, (count, 1), generator=generator) + torch.arange(length)) % min(64, vocabulary)


def main() -> int:
    """Train without and with the callback, and compare."""
    options = command_line(__doc__, "lora", steps=16).parse_args()
    length, batch = (1024, 8) if options.large else (128, 8)
    width, layers, vocabulary = (2048, 16, 32000) if options.large else (128, 4, 512)
    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32 if width < 512 else width // 64,
        intermediate_size=11 * width // 4,
        vocab_size=vocabulary,
        max_position_embeddings=length,
    )

    def make() -> Made:
        return FineTuning(config), DataLoader(counting(options.steps * batch, length, vocabulary), batch)

    return compare(make, options)


if __name__ == "__main__":
    sys.exit(main())
