"""Roofline costs: counts by hand, views free, limits in the right place, and devices found by their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="install torch to test capturing")

from torch import nn  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.nn import functional  # noqa: E402

from rematch.capture.devices import Device, find_device, known_devices  # noqa: E402
from rematch.capture.roofline import estimate, flops, mapped, moved_bytes  # noqa: E402
from rematch.errors import DeviceError  # noqa: E402

H100 = find_device("h100")
SLOW_MEMORY = Device("slow", (), 1e30, 1e30, 1e30, 1e30, 1e30, 1e3, 2**30, 0.0, is_cuda=False)
SLOW_ARITHMETIC = Device("slow", (), 1e3, 1e3, 1e3, 1e3, 1e3, 1e30, 2**30, 0.0, is_cuda=False)


def calls(run: Callable[..., Any], *inputs: Any) -> list[torch.fx.Node]:
    """The calls of the ATen graph that `run` traces to, on fake tensors."""
    graph = make_fx(run, tracing_mode="fake")(*inputs).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def training_calls(module: nn.Module, x: torch.Tensor) -> list[torch.fx.Node]:
    """Those of a forward pass and of the gradients of the input and the parameters."""

    def step(parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        result = torch.func.functional_call(module, (parameters, buffers), x)
        result = result[0] if isinstance(result, tuple) else result
        return torch.autograd.grad(result.sum(), [x, *parameters.values()])

    return calls(step, dict(module.named_parameters()), dict(module.named_buffers()), x)


def named(name: str, nodes: list[torch.fx.Node]) -> torch.fx.Node:
    """The one call of the operator `name`."""
    (node,) = (node for node in nodes if str(node.target).split(".")[:2] == ["aten", name])
    return node


def only(name: str, run: Callable[..., Any], *inputs: torch.Tensor) -> torch.fx.Node:
    return named(name, calls(run, *inputs))


def test_matrix_product_by_hand() -> None:
    node = only("mm", torch.mm, torch.empty(3, 5), torch.empty(5, 7))
    assert flops(node) == 2 * 3 * 5 * 7
    assert moved_bytes(node) == 4 * (3 * 5 + 5 * 7 + 3 * 7)


def test_complex_products_are_four_real_ones() -> None:
    node = only("mm", torch.mm, torch.empty(3, 5, dtype=torch.complex64), torch.empty(5, 7, dtype=torch.complex64))
    assert flops(node) == 4 * 2 * 3 * 5 * 7


def test_views_cost_nothing() -> None:
    def views(x: torch.Tensor) -> Any:
        return x.view(6, 4).t().unsqueeze(0).expand(3, 4, 6), x[1:].detach(), x.split(2)

    nodes = calls(views, torch.empty(4, 6))
    assert len(nodes) >= 6
    for node in nodes:
        assert (estimate(node, H100).seconds, flops(node), moved_bytes(node)) == (0.0, 0.0, 0)


def test_memory_not_yet_written_costs_nothing() -> None:
    assert estimate(only("empty_like", torch.empty_like, torch.empty(1000)), H100).seconds == 0.0


def test_an_expanded_tensor_counts_once() -> None:
    node = only("add", lambda x, y: x + y.expand(100, 10), torch.empty(100, 10), torch.empty(10))
    assert moved_bytes(node) == 4 * (1000 + 10 + 1000)


def test_a_storage_counts_once_and_a_slice_as_much_as_it_covers() -> None:
    assert moved_bytes(only("mul", lambda x: x * x, torch.empty(1000))) == 4 * 2000
    assert moved_bytes(only("mul", lambda x: x * x.t(), torch.empty(10, 10))) == 4 * 200
    assert moved_bytes(only("neg", lambda x: -x[:10], torch.empty(1000))) == 4 * 20
    halves = only("mul", lambda x: x[:500] * x[500:], torch.empty(1000))
    assert moved_bytes(halves) == 4 * 1500


def test_changing_in_place_is_not_a_view() -> None:
    node = only("add_", lambda x: x.clone().add_(1), torch.empty(1000))
    assert moved_bytes(node) == 4 * 2000
    assert estimate(node, H100).seconds > 0


def test_what_only_gives_its_shape_is_not_read() -> None:
    assert moved_bytes(only("zeros_like", torch.zeros_like, torch.empty(1000))) == 4000


def test_a_gather_reads_what_comes_out() -> None:
    table, rows = torch.empty(50_000, 64), torch.zeros(10, dtype=torch.int64)
    node = only("embedding", lambda t, r: functional.embedding(r, t), table, rows)
    assert moved_bytes(node) == 8 * 10 + 2 * 4 * 10 * 64


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
def test_convolution_and_both_gradients_by_hand(layer: type[nn.Module], groups: int) -> None:
    nodes = training_calls(
        layer(8, 16, 3, stride=2, padding=1, groups=groups), torch.empty(2, 8, 10, 10, requires_grad=True)
    )
    positions = 5 * 5 if layer is nn.Conv2d else 10 * 10  # where a window lies on the smaller side
    forward = 2 * (2 * positions) * (8 * 16 * 9 // groups)
    assert flops(named("convolution", nodes)) == forward
    assert flops(named("convolution_backward", nodes)) == 2 * forward


def test_causal_attention_is_half() -> None:
    heads = torch.empty(2, 4, 64, 16)

    def attend(causal: bool) -> float:
        def run(x: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(x, x, x, is_causal=causal)

        return flops(only("_scaled_dot_product_flash_attention_for_cpu", run, heads))

    assert attend(causal=False) == 2 * 2 * (2 * 4 * 64 * 64 * 16)
    assert attend(causal=True) == attend(causal=False) / 2


def test_attention_backward_recomputes_the_scores() -> None:
    heads = torch.empty(2, 4, 64, 16, requires_grad=True)

    def step(x: torch.Tensor) -> Any:
        return torch.autograd.grad(functional.scaled_dot_product_attention(x, x, x).sum(), x)

    backward = only("_scaled_dot_product_flash_attention_for_cpu_backward", step, heads)
    assert flops(backward) == 5 * 2 * (2 * 4 * 64 * 64 * 16)
    assert estimate(backward, H100).workspace_bytes == 4 * heads.numel()
    assert estimate(backward, SLOW_MEMORY).workspace_bytes == 0


def test_fourier_transform_by_hand() -> None:
    signal = torch.empty(3, 8, 16)
    node = only("_fft_r2c", lambda x: torch.fft.rfftn(x, dim=(1, 2)), signal)
    assert flops(node) == 2.5 * signal.numel() * math.log2(8 * 16)
    assert moved_bytes(node) == 2 * (4 * signal.numel() + 8 * 3 * 8 * 9)
    complex_node = only("_fft_c2c", torch.fft.fft, torch.empty(3, 16, dtype=torch.complex64))
    assert flops(complex_node) == 5 * 48 * math.log2(16)


def test_recurrent_layers_by_hand() -> None:
    steps, batch, width = 5, 3, 8
    layer = torch.ops.aten.mkldnn_rnn_layer.default
    weights = [torch.empty(4 * width, width), torch.empty(4 * width, width)] + [torch.empty(4 * width)] * 2
    state = torch.empty(batch, width)

    def run(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        return layer(x, *rest, False, [], 2, width, 1, True, False, False, True)

    node = only("mkldnn_rnn_layer", run, torch.empty(steps, batch, width), *weights, state, state)
    assert flops(node) == 2 * steps * batch * 2 * (4 * width * width)
    assert mapped(node, H100) == "aten.mkldnn_rnn_layer as aten._cudnn_rnn"
    assert estimate(node, H100).seconds > steps * H100.launch_seconds


def test_seconds_are_the_slower_of_arithmetic_and_traffic() -> None:
    node = only("mm", torch.mm, torch.empty(30, 50), torch.empty(50, 70))
    assert estimate(node, SLOW_ARITHMETIC).seconds == pytest.approx(flops(node) / 1e3, rel=0.5)
    assert estimate(node, SLOW_ARITHMETIC).seconds > flops(node) / 1e3 * 0.8
    assert estimate(node, SLOW_MEMORY).seconds > moved_bytes(node) / 1e3 * 0.9
    assert estimate(node, SLOW_MEMORY).seconds < moved_bytes(node) / 1e3 * 3


def test_no_device_is_beaten() -> None:
    """Never faster than the vendor's rates."""
    product = only("mm", torch.mm, *(torch.empty(4096, 4096, dtype=torch.bfloat16) for _ in range(2)))
    copy = only("clone", torch.clone, torch.empty(4096, 4096))
    for name in known_devices():
        device = find_device(name)
        if device.is_cuda:
            assert estimate(product, device).seconds > flops(product) / device.bf16
            assert estimate(copy, device).seconds > moved_bytes(copy) / device.bytes_per_second


@pytest.fixture
def matmul_precision() -> Iterator[Any]:
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    yield setting
    setting.fp32_precision = before


def test_tf32_only_where_torch_is_allowed_to(matmul_precision: Any) -> None:
    node = only("mm", torch.mm, torch.empty(4096, 4096), torch.empty(4096, 4096))
    matmul_precision.fp32_precision = "ieee"
    full = estimate(node, H100).seconds
    matmul_precision.fp32_precision = "tf32"
    assert full / estimate(node, H100).seconds == pytest.approx(H100.tf32 / H100.fp32, rel=0.1)


def test_a_misaligned_vocabulary_is_slow_on_cuda_only() -> None:
    def product(vocabulary: int) -> torch.fx.Node:
        left, right = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((4096, 768), (768, vocabulary)))
        return only("mm", torch.mm, left, right)

    assert estimate(product(50257), H100).seconds > 4 * estimate(product(50304), H100).seconds
    on_cpu = [estimate(product(size), SLOW_ARITHMETIC).seconds for size in (50257, 50304)]
    assert on_cpu[0] < on_cpu[1]


def test_images_not_in_channels_last_are_copied_for_the_matrix_units() -> None:
    image, weight = torch.empty(2, 64, 56, 56, dtype=torch.float16), torch.empty(64, 64, 3, 3, dtype=torch.float16)

    def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(x, w, padding=1)

    plain = estimate(only("convolution", convolve, image, weight), H100)
    last = estimate(only("convolution", convolve, image.to(memory_format=torch.channels_last), weight), H100)
    pointwise = estimate(only("convolution", functional.conv2d, image, weight[:, :, :1, :1].contiguous()), H100)
    assert plain.workspace_bytes == 2 * 2 * image.numel()
    assert (last.workspace_bytes, pointwise.workspace_bytes) == (0, 0)
    assert plain.seconds > last.seconds


def test_few_channels_leave_the_device_idle() -> None:
    """The same arithmetic, and the same bytes, with fewer channels of more pixels."""

    def seconds(operator: str, layer: nn.Module, channels: int, side: int) -> float:
        nodes = training_calls(layer, torch.empty(8, channels, side, side, requires_grad=True))
        return estimate(named(operator, nodes), H100).seconds

    few, many = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(256, 256, 3, padding=1)
    assert seconds("convolution", few, 32, 256) > 1.5 * seconds("convolution", many, 256, 32)
    few, many = nn.BatchNorm2d(16), nn.BatchNorm2d(1024)
    assert seconds("native_batch_norm", few, 16, 256) > 4 * seconds("native_batch_norm", many, 1024, 32)


def test_reading_in_another_order_or_width_is_slower() -> None:
    square = torch.empty(4096, 4096)
    straight = estimate(only("add", lambda x, y: x + y, square, square.clone()), H100).seconds
    crossed = estimate(only("add", lambda x, y: x + y.t(), square, square.clone()), H100).seconds
    assert crossed > 1.5 * straight
    narrower = estimate(only("add", lambda x, y: x + y, square, square.bfloat16()), H100).seconds
    assert narrower > straight  # although it moves fewer bytes


def test_cpu_attention_is_mapped_to_the_kernel_cuda_would_take() -> None:
    def name_on(device: Device, dtype: torch.dtype, masked: bool = False) -> str | None:
        heads, mask = torch.empty(1, 2, 8, 16, dtype=dtype), torch.zeros(8, 8, dtype=dtype)

        def run(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            return functional.scaled_dot_product_attention(x, x, x, attn_mask=m if masked else None)

        return mapped(only("_scaled_dot_product_flash_attention_for_cpu", run, heads, mask), device)

    prefix = "aten._scaled_dot_product_flash_attention_for_cpu as aten._scaled_dot_product"
    assert name_on(H100, torch.bfloat16) == f"{prefix}_flash_attention"
    assert name_on(H100, torch.bfloat16, masked=True) == f"{prefix}_efficient_attention"
    assert name_on(H100, torch.float32) == f"{prefix}_efficient_attention"
    assert name_on(SLOW_MEMORY, torch.float32) is None
    assert mapped(only("mm", torch.mm, torch.empty(2, 2), torch.empty(2, 2)), H100) is None


MODULES = {
    "mlp": (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.5), nn.Softmax(-1)), (4, 8)),
    "image": (nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2)), (2, 4, 9, 9)),
    "signal": (nn.Sequential(nn.Conv1d(4, 4, 3, groups=4), nn.Upsample(scale_factor=2), nn.AvgPool1d(2)), (2, 4, 12)),
    "groups": (nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.GroupNorm(2, 8), nn.SiLU()), (2, 4, 9, 9)),
    "lstm": (nn.LSTM(4, 4), (3, 2, 4)),
    "gru": (nn.GRU(4, 4), (3, 2, 4)),
    "transformer": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 4, 8)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("device", [H100, SLOW_MEMORY], ids=["cuda", "cpu"])
def test_every_call_of_a_training_step_has_a_cost(name: str, device: Device) -> None:
    module, shape = MODULES[name]
    nodes = training_calls(module, torch.empty(shape, requires_grad=True))
    for node in nodes:
        cost = estimate(node, device)
        assert math.isfinite(cost.seconds)
        assert cost.seconds >= 0
        assert cost.workspace_bytes >= 0
        assert cost.flops is not None
        assert cost.flops >= 0
    assert sum(estimate(node, device).seconds for node in nodes) > 0


def test_twice_the_batch_costs_at_most_twice_as_much() -> None:
    def seconds(batch: int) -> float:
        module = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        nodes = training_calls(module, torch.empty(batch, 256, requires_grad=True))
        return sum(estimate(node, H100).seconds for node in nodes)

    assert seconds(4096) < seconds(8192) <= 2 * seconds(4096)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h100", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("A100", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("v100 32gb", "V100-32GB"),
        ("P100", "P100"),
        ("NVIDIA H200", "H200"),
    ],
)
def test_devices_by_the_names_people_and_drivers_use(name: str, found: str) -> None:
    assert find_device(name).name == found


def test_an_unknown_device_is_refused_with_the_nearest() -> None:
    with pytest.raises(DeviceError, match="unknown device 'h20'; did you mean 'h200'"):
        find_device("h20")


def test_this_machine_is_measured_once_and_leaves_no_trace() -> None:
    before = torch.get_rng_state()
    with torch._subclasses.FakeTensorMode():
        cpu = find_device("cpu")
    assert find_device("CPU") is cpu
    assert torch.equal(torch.get_rng_state(), before)
    assert not cpu.is_cuda
    assert 1e8 < cpu.fp32 < 1e15
    assert 1e8 < cpu.bytes_per_second < 1e13
    assert 0 < cpu.launch_seconds < 1e-2
