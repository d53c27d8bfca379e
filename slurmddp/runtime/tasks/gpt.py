"""A small decoder-only transformer: pre-norm, causal attention, learned positions."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Attention and a two-layer perceptron, each on a normed input and added to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, time, width] to the same."""
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self._drop(self.out(mixed.transpose(1, 2).reshape(batch, time, width)))
        return x + self._drop(self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh")))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """Next-byte logits. `tied`: the output layer is the embedding's own matrix."""

    def __init__(
        self, *, context: int, layers: int, heads: int, width: int, dropout: float, tied: bool, vocabulary: int = 256
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = None if tied else nn.Linear(width, vocabulary, bias=False)
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
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(self.tokens(tokens) + self.positions(positions), self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return F.linear(x, self.tokens.weight) if self.head is None else self.head(x)
