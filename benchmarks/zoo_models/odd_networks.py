"""Networks of our own of the common kinds: recurrent, convolutional, with in-place operators and other number types."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .base import Example, Family, bfloat16_autocast, mean_square
from .odd_python import WIDTH, Stack, features

family = Family("odd networks")


class Recurrent(nn.Module):
    """A recurrent network between an embedding and a head."""

    def __init__(self, cell: nn.Module, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.cell = cell
        self.head = nn.Linear(width, 64)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.cell(self.table(ids))[0])


family.add(
    "lstm",
    lambda: Example(
        Recurrent(nn.LSTM(32, 32, 2, batch_first=True, dropout=0.2, bidirectional=True), 64),
        torch.randint(0, 64, (8, 32)),
        mean_square,
    ),
)
family.add(
    "gru",
    lambda: Example(Recurrent(nn.GRU(32, 32, 2, batch_first=True), 32), torch.randint(0, 64, (8, 32)), mean_square),
)
family.add(
    "rnn",
    lambda: Example(Recurrent(nn.RNN(32, 32, 2, batch_first=True), 32), torch.randint(0, 64, (8, 32)), mean_square),
)


@family.model("lstm-cells")
def lstm_cells() -> Example:
    """A loop over time in Python, each step writing into a list."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(16, 32)
            self.head = nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> Any:
            hidden = cell = x.new_zeros(x.shape[0], 32)
            outputs = []
            for time in range(x.shape[1]):
                hidden, cell = self.cell(x[:, time], (hidden, cell))
                outputs.append(self.head(hidden))
            return torch.stack(outputs, 1)

    return Example(Module(), torch.randn(16, 24, 16), mean_square)


@family.model("packed-lstm")
def packed_lstm() -> Example:
    """Sequences of different lengths, packed."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, 32)
            self.cell = nn.LSTM(32, 32, 2, batch_first=True)
            self.head = nn.Linear(32, 64)

        def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> Any:
            packed = pack_padded_sequence(self.table(ids), lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.cell(packed)[0], batch_first=True)
            return self.head(out)

    return Example(Module(), (torch.randint(0, 64, (8, 32)), torch.tensor([32, 5, 17, 9, 30, 2, 11, 24])), mean_square)


@family.model("transformer-decoder-mask")
def transformer_decoder() -> Example:
    """nn.TransformerDecoder looks whether its mask is causal."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerDecoderLayer(WIDTH, 4, 128, batch_first=True)
            self.decoder = nn.TransformerDecoder(layer, 2)

        def forward(self, target: torch.Tensor, memory: torch.Tensor) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
            return self.decoder(target, memory, tgt_mask=mask)

    return Example(Module(), (torch.randn(4, 24, WIDTH), torch.randn(4, 16, WIDTH)), mean_square)


@family.model("transformer-encoder-padding")
def transformer_encoder() -> Example:
    """A padding mask, which makes nested tensors possible in evaluation."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> Any:
            return self.encoder(x, src_key_padding_mask=padding)

    padding = torch.arange(24)[None] >= torch.tensor([24, 12, 18, 6])[:, None]
    return Example(Module(), (torch.randn(4, 24, WIDTH), padding), mean_square)


@family.model("nn-transformer")
def encoder_decoder() -> Example:
    module = nn.Transformer(WIDTH, 4, 2, 2, 128, batch_first=True)
    return Example(module, (torch.randn(4, 24, WIDTH), torch.randn(4, 16, WIDTH)), mean_square)


@family.model("attention-weights")
def attention_weights() -> Example:
    """nn.MultiheadAttention that returns its weights, which are part of the loss."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True) for _ in range(3)
            )

        def forward(self, x: torch.Tensor) -> Any:
            seen = []
            for layer in self.layers:
                out, weights = layer(x, x, x)
                x = x + out
                seen.append(weights)
            return x, seen

    return Example(
        Module(),
        torch.randn(4, 24, WIDTH),
        lambda output: mean_square(output[0]) + sum(weights.square().sum(-1).mean() for weights in output[1]),
    )


def norm_relu(channels: int) -> nn.Sequential:
    """Batch norm and a ReLU that writes into its input."""
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """A block of ResNet with in-place additions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            norm_relu(channels),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.body(x)
        out += x
        return self.relu(out)


@family.model("resnet-in-place")
def resnet() -> Example:
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        norm_relu(16),
        *(Residual(16) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    return Example(module, torch.randn(4, 3, 32, 32), mean_square)


class Inverted(nn.Module):
    """An inverted residual with squeeze and excitation; `activation` writes into its input."""

    def __init__(self, channels: int, activation: type[nn.Module]) -> None:
        super().__init__()
        wide = 4 * channels
        self.body = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            activation(inplace=True),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            activation(inplace=True),
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(wide, channels, 1),
            activation(inplace=True),
            nn.Conv2d(channels, wide, 1),
            nn.Hardsigmoid(inplace=True),
        )
        self.project = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> Any:
        out = self.body(x)
        out = out * self.squeeze(out)
        return self.project(out).add_(x)


def inverted_residuals(activation: type[nn.Module]) -> Example:
    """MobileNet or EfficientNet, by their activation."""
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        *(Inverted(8, activation) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2, inplace=True),
        nn.Linear(8, 10),
    )
    return Example(module, torch.randn(4, 3, 32, 32), mean_square)


family.add("mobilenet-in-place", inverted_residuals, nn.ReLU6)
family.add("mobilenetv3-in-place", inverted_residuals, nn.Hardswish)
family.add("efficientnet-in-place", inverted_residuals, nn.SiLU)


@family.model("densenet")
def densenet() -> Example:
    class Dense(nn.Module):
        def __init__(self, channels: int, growth: int, layers: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(
                    norm_relu(channels + index * growth), nn.Conv2d(channels + index * growth, growth, 3, padding=1)
                )
                for index in range(layers)
            )

        def forward(self, x: torch.Tensor) -> Any:
            found = [x]
            for layer in self.layers:
                found.append(layer(torch.cat(found, 1)))
            return torch.cat(found, 1)

    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        Dense(8, 8, 4),
        nn.Conv2d(40, 8, 1),
        nn.AvgPool2d(2),
        Dense(8, 8, 4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(40, 10),
    )
    return Example(module, torch.randn(4, 3, 24, 24), mean_square)


@family.model("unet")
def unet() -> Example:
    class UNet(nn.Module):
        def __init__(self, widths: tuple[int, ...] = (8, 16, 32)) -> None:
            super().__init__()
            pairs = list(zip((3, *widths), widths, strict=False))
            self.down = nn.ModuleList(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), norm_relu(b)) for a, b in pairs)
            self.raise_ = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs[1:]))
            self.up = nn.ModuleList(
                nn.Sequential(nn.Conv2d(2 * a, a, 3, padding=1), norm_relu(a)) for a, _ in reversed(pairs[1:])
            )
            self.head = nn.Conv2d(widths[0], 2, 1)

        def forward(self, x: torch.Tensor) -> Any:
            skips = []
            for level in self.down:
                x = level(x)
                skips.append(x)
                x = nn.functional.max_pool2d(x, 2)
            x = skips.pop()
            for rise, level in zip(self.raise_, self.up, strict=True):
                x = level(torch.cat([rise(x), skips.pop()], 1))
            return self.head(x)

    return Example(UNet(), torch.randn(4, 3, 32, 32), mean_square)


@family.model("shared-batch-norm")
def shared_batch_norm() -> Example:
    """One batch norm used three times, and two that share their running mean."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.norm, self.other = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
            self.other.running_mean = self.norm.running_mean

        def forward(self, x: torch.Tensor) -> Any:
            for index, layer in enumerate(self.layers):
                x = (self.other if index == 2 else self.norm)(layer(x)).relu()
            return x

    return Example(Module(), features(), mean_square)


@family.model("batch-norm-between-transposes")
def transposed_batch_norm() -> Example:
    """Results whose strides are not those of their inputs."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 32)
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: torch.Tensor) -> Any:
            return self.second(self.norm(self.first(x).transpose(1, 2)).transpose(1, 2).relu())

    return Example(Module(), torch.randn(8, 24, 32), mean_square)


@family.model("parameter-sharing-autocast")
def shared_under_autocast() -> Example:
    """One block used four times: autocast casts its weights once."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = Stack(1)

        def forward(self, x: torch.Tensor) -> Any:
            for _ in range(4):
                x = self.stack(x)
            return x

    return Example(Module(), features(), mean_square, context=bfloat16_autocast)


@family.model("autocast-inside")
def autocast_inside() -> Example:
    """Forward switches autocast on for some layers and off for others."""

    class Module(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.blocks[1](self.blocks[0](x))
                with torch.autocast("cpu", enabled=False):
                    x = self.blocks[2](x.float())
                return self.blocks[3](x)

    return Example(Module(), features(), mean_square)


@family.model("index-add")
def index_add() -> Example:
    """Messages along edges, gathered and added up in place."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> Any:
            for layer in self.layers:
                messages = layer(nodes)[edges[0]].relu()
                nodes = torch.zeros_like(nodes).index_add_(0, edges[1], messages) + nodes
            return nodes

    return Example(Module(), (torch.randn(200, 32), torch.randint(0, 200, (2, 800))), mean_square)


@family.model("scatter")
def scatter() -> Example:
    """Reductions by index: sums, means and maxima."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: torch.Tensor, groups: torch.Tensor) -> Any:
            for layer, kind in zip(self.layers, ("sum", "mean", "amax"), strict=True):
                index = groups[:, None].expand(-1, 32)
                pooled = torch.zeros(20, 32).scatter_reduce(0, index, layer(x), kind, include_self=False)
                x = torch.tanh(x + pooled[groups])
            return x

    return Example(Module(), (torch.randn(400, 32), torch.randint(0, 20, (400,))), mean_square)


@family.model("in-place-slices")
def in_place_slices() -> Example:
    """Results written into parts of one tensor."""

    class Module(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            out = x.new_zeros(4, *x.shape)
            for index, block in enumerate(self.blocks):
                x = block(x)
                out[index] = x
            out[1:3] *= 0.5
            return out

    return Example(Module(), features(), mean_square)


@family.model("views-and-strides")
def views_and_strides() -> Example:
    """as_strided, unfold, roll, flip and chunks."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.layers:
                windows = x.unfold(1, 8, 4).flatten(1)[:, :32]
                first, second = layer(windows.contiguous()).roll(3, 1).flip(0).chunk(2, -1)
                x = torch.cat([second.tanh(), first.sigmoid()], -1)
            return x

    return Example(Module(), torch.randn(256, 32), mean_square)


family.add(
    "float64", lambda: Example(Stack(dropout=0.1).double(), features().double(), lambda out: out.square().mean())
)
family.add("bf16-module", lambda: Example(Stack(dropout=0.1).bfloat16(), features().bfloat16(), mean_square))
family.add("float16-module", lambda: Example(Stack().half(), features().half(), mean_square))


@family.model("deep-supervision")
def deep_supervision() -> Example:
    """A loss on the output of every block."""

    class Module(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            outputs = []
            for block in self.blocks:
                x = block(x)
                outputs.append(x)
            return outputs

    return Example(Module(6), features(), lambda outputs: torch.stack([mean_square(out) for out in outputs]).sum())


@family.model("ctc")
def ctc() -> Example:
    """Convolutions and a GRU with the CTC loss inside."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv1d(8, 32, 3, padding=1)
            self.cell = nn.GRU(32, 32, batch_first=True, bidirectional=True)
            self.head = nn.Linear(64, 12)

        def forward(self, sound: torch.Tensor, letters: torch.Tensor, lengths: torch.Tensor) -> Any:
            hidden = self.cell(self.convolution(sound).relu().transpose(1, 2))[0]
            scores = self.head(hidden).log_softmax(-1).transpose(0, 1)
            whole = torch.full((sound.shape[0],), scores.shape[0])
            return nn.functional.ctc_loss(scores, letters, whole, lengths)

    sample = (torch.randn(8, 8, 48), torch.randint(1, 12, (8, 10)), torch.randint(3, 10, (8,)))
    return Example(Module(), sample, lambda output: output)


@family.model("cosine-and-quantiles")
def uncommon_operators() -> Example:
    """Sorting, cumulative sums, top-k, einsum, SVD and solving."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            x = self.layers[0](x).sort(-1).values.cumsum(-1) / 32
            top, index = self.layers[1](x).topk(8, -1)
            x = x.scatter(-1, index, top)
            gram = torch.einsum("bi,bj->ij", x, x) / len(x) + torch.eye(32)
            x = torch.linalg.solve(gram, self.layers[2](x).T).T
            return x * torch.linalg.svdvals(gram).sum() / 32

    return Example(Module(), torch.randn(256, 32), mean_square)


@family.model("grid-sample")
def grid_sample() -> Example:
    """A spatial transformer."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.where = nn.Sequential(
                nn.Conv2d(3, 8, 5, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 6)
            )
            self.what = nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1),
                nn.GroupNorm(2, 8),
                nn.SiLU(),
                nn.Upsample(scale_factor=2, mode="bilinear"),
                nn.Conv2d(8, 4, 3, padding=1),
                nn.PixelShuffle(2),
            )

        def forward(self, x: torch.Tensor) -> Any:
            grid = nn.functional.affine_grid(self.where(x).view(-1, 2, 3), list(x.shape), align_corners=False)
            return self.what(nn.functional.grid_sample(x, grid, align_corners=False))

    return Example(Module(), torch.randn(4, 3, 24, 24), mean_square)
