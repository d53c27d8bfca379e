"""A small decoder-only transformer: pre-norm, causal attention, learned positions."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on a normed input and added to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        # Query, key and value of one head, then of the next: so that some of its rows are whole heads.
        self.qkv_by_head = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] to the same. In a tensor group: a part of the sequence, and this rank's heads."""
        qkv = self.qkv_by_head(self.norm_attention(x))
        batch, time, _ = qkv.shape
        q, k, v = qkv.view(batch, time, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self._drop(self.out(mixed.transpose(1, 2).reshape(batch, time, -1)))
        return x + self._drop(self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh")))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Tied(nn.Module):
    """An output layer with another layer's matrix."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)


class GPT(nn.Module):
    """Next-byte logits. `tied`: the output layer is the embedding's own matrix."""

    #: Sequences are padded to a multiple of it inside of the model.
    multiple = 1

    def __init__(
        self, *, context: int, layers: int, heads: int, width: int, dropout: float, tied: bool, vocabulary: int = 256
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = Tied() if tied else nn.Linear(width, vocabulary, bias=False)
        self.dropout = dropout
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """GPT-2's: normal with 0.02; smaller in the 2 * layers layers that add to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * layers) ** 0.5 if residual else 1.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 [batch, time] to float [batch, time, vocabulary]; time is at most the context."""
        time = tokens.shape[1]
        if time % self.multiple:  # At the end, where attention does not look.
            tokens = F.pad(tokens, (0, -time % self.multiple))
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(self.tokens(tokens) + self.positions(positions), self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits: torch.Tensor = self.head(x, self.tokens.weight) if isinstance(self.head, Tied) else self.head(x)
        # Not always a slice: FSDP warns of modules that return a view.
        return logits if logits.shape[1] == time else logits[:, :time]
