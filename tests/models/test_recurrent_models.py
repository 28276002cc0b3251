"""Recurrent networks: torch's own layers, packed sequences, and cells in a loop over time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.models.wild import ROWS, Wild, assert_whole, model_name


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


WHOLE = [Lstm, Gru, Packed, LstmCell, GruCell, GruCellOfOddWidth]


@pytest.mark.parametrize("make", WHOLE, ids=model_name)
def test_whole(make: type[Wild]) -> None:
    assert_whole(make)
