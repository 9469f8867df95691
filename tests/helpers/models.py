"""Small models of the kinds people compile: an attention decoder, a vision transformer, a conv net, an LSTM cell."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

WIDTH = 16
HEADS = 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        batch, length, _ = x.shape
        return [t.view(batch, length, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]

    def merged(self, x: Tensor) -> Tensor:
        return self.out(x.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merged(scaled_dot_product_attention(q, k, v))


class CachedAttention(Attention):
    """Writes keys and values of the token at ``position`` into its cache, and attends to those up to it."""

    def __init__(self, batch: int, length: int) -> None:
        super().__init__()
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, HEADS, length, WIDTH // HEADS))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.heads(x)
        self.keys.index_copy_(2, position, k.detach())
        self.values.index_copy_(2, position, v.detach())
        seen = torch.arange(self.keys.shape[2], device=x.device) <= position
        return self.merged(scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen[None, None, None]))


class Decoder(nn.Module):
    """One token a call; keys and values of earlier ones lie in buffers that are written in place."""

    def __init__(self, batch: int = 2, length: int = 24, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.attentions = nn.ModuleList(CachedAttention(batch, length) for _ in range(layers))
        self.mlps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        x = self.embedding(tokens)[:, None]
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = x + attention(self.norm(x), position)
            x = x + gelu(mlp(self.norm(x)))
        return x[:, 0] @ self.embedding.weight.t()


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.position = nn.Parameter(torch.randn(1, 5, WIDTH) * 0.1)
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        x = x + self.attention(self.norm(x))
        x = x + self.mlp(self.norm(x))
        return self.head(x[:, 0])


class UNet(nn.Module):
    """Down, up, and skip connections; batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, images: Tensor) -> Tensor:
        first = silu(self.first(images))
        down = silu(self.norm(self.down(first)))
        up = self.up(silu(self.middle(down)) + down)
        return self.last(torch.cat([first, up], 1))


class LstmCell(nn.Module):
    """One step of an LSTM, from its equations."""

    def __init__(self) -> None:
        super().__init__()
        self.from_input, self.from_hidden = nn.Linear(6, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        gates = (self.from_input(x) + self.from_hidden(hidden)).chunk(4, -1)
        cell = gates[0].sigmoid() * cell + gates[1].sigmoid() * gates[2].tanh()
        return gates[3].sigmoid() * cell.tanh(), cell
