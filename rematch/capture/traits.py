"""What operators' shapes do not tell about their cost: how well their kernels run and how often they go over memory.

`traits_of("native_layer_norm").family is Family.NORM`

The shares say how much of a device's best rate (see `devices`) a kernel reaches. They were fitted on an H200 with torch
2.11 to the distinct calls of GPT-2 small, ResNet-50, a U-Net, a ViT, a Fourier neural operator and some single layers.
Whole steps of these and of models left out of the fit came out between 0.6 and 1.3 of what was measured there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto


class Family(Enum):
    """Kernels that fall short of a device's best by about the same share."""

    MATMUL = auto()
    CONVOLUTION = auto()
    ATTENTION = auto()
    RECURRENT = auto()
    FFT = auto()
    NORM = auto()
    IRREGULAR = auto()  # reads or writes where indices or windows say: pooling, resampling, sorting, scattering
    VECTOR = auto()


ARITHMETIC_SHARE = {
    Family.MATMUL: 0.9,
    Family.CONVOLUTION: 0.9,
    Family.ATTENTION: 0.5,
    Family.RECURRENT: 0.3,
    Family.FFT: 0.3,
    Family.NORM: 0.5,
    Family.IRREGULAR: 0.5,
    Family.VECTOR: 0.5,
}
BANDWIDTH_SHARE = {
    Family.MATMUL: 0.6,
    Family.CONVOLUTION: 0.8,
    Family.ATTENTION: 0.8,
    Family.RECURRENT: 0.8,
    Family.FFT: 0.75,
    Family.NORM: 0.55,
    Family.IRREGULAR: 0.2,
    Family.VECTOR: 1.0,
}
# On CUDA, what is left of a share...
CONVOLUTION_BACKWARD_SHARE = 0.7
DROPOUT_SHARE = 0.4  # when fused attention draws random numbers
MISALIGNED_SHARE = 0.18  # when rows of a matrix do not start at multiples of 16 bytes
WIDENING_SHARE = 0.55  # when elements are read narrower than they are written
TRANSPOSING_SHARE = 0.45  # when elements are read in another order than they are written
# ... and of the rate outside the matrix units, for convolutions whose groups are too small for those.
GROUPED_SHARE = 0.15
DEPTHWISE_SHARE = 0.04
HALF_FULL_CHANNELS = 60  # with so many channels a convolution fills half of the matrix units
FULL_NORM_CHANNELS = 350  # with so many channels batch norm fills the memory bus
KERNELS_PER_STEP = 3  # of a recurrent layer: products with both matrices, and the gates


@dataclass(frozen=True)
class Traits:
    """What an operator's shapes do not tell."""

    family: Family = Family.VECTOR
    flops_per_element: float = 1.0  # of the largest tensor touched, for operators without a formula
    times_read: Mapping[str, int] = field(default_factory=dict)  # by argument; 0 when only its shape matters
    gathered: str = ""  # the argument that is read only where indices say, so at most as much as comes out
    times_written: int = 1  # 0 for memory left as it is, 2 when filled first and then changed in places


_ATTENTION = Traits(Family.ATTENTION)
_COPY = Traits(flops_per_element=0.0)
_SHAPE_ONLY = Traits(times_read={"self": 0})
_EMPTY = Traits(flops_per_element=0.0, times_read={"self": 0}, times_written=0)
_TRANSCENDENTAL = Traits(flops_per_element=10.0)
_LONG_ROWS = Traits(flops_per_element=10.0, times_read={"self": 2, "grad_output": 2})
_LAYER_NORM = Traits(Family.NORM, flops_per_element=8.0)
_BATCH_NORM = Traits(Family.NORM, flops_per_element=8.0, times_read={"input": 2})
_TWICE = {"grad_out": 2, "grad_output": 2, "output": 2, "input": 2}
_NORM_BACKWARD = Traits(Family.NORM, flops_per_element=16.0, times_read=_TWICE)
_IRREGULAR = Traits(Family.IRREGULAR)
_POOLING_BACKWARD = Traits(Family.IRREGULAR, times_read={"self": 0})

_TRAITS = {
    name: traits
    for names, traits in (
        ("mm addmm bmm baddbmm _scaled_mm mkldnn_linear", Traits(Family.MATMUL)),
        ("convolution _convolution cudnn_convolution mkldnn_convolution", Traits(Family.CONVOLUTION)),
        ("convolution_backward", Traits(Family.CONVOLUTION, times_read={"grad_output": 2})),
        ("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention", _ATTENTION),
        ("_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention", _ATTENTION),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", _ATTENTION),
        ("_scaled_dot_product_flash_attention_backward", _ATTENTION),
        ("_scaled_dot_product_efficient_attention_backward", _ATTENTION),
        ("_scaled_dot_product_cudnn_attention_backward", _ATTENTION),
        ("mkldnn_rnn_layer mkldnn_rnn_layer_backward _cudnn_rnn _cudnn_rnn_backward", Traits(Family.RECURRENT)),
        ("_fft_c2c _fft_r2c _fft_c2r", Traits(Family.FFT)),
        ("clone _to_copy cat stack full zeros ones arange constant_pad_nd", _COPY),
        ("copy copy_", Traits(flops_per_element=0.0, times_read={"self": 0})),
        ("zeros_like ones_like full_like new_zeros new_ones new_full rand_like randn_like", _SHAPE_ONLY),
        ("nll_loss_backward nll_loss2d_backward bernoulli", _SHAPE_ONLY),
        ("empty empty_like empty_strided new_empty new_empty_strided", _EMPTY),
        ("embedding", Traits(flops_per_element=0.0, gathered="weight")),
        ("index index_select gather take nll_loss_forward nll_loss2d_forward", Traits(gathered="self")),
        ("slice_backward select_backward slice_scatter select_scatter", Traits(times_written=2)),
        ("scatter scatter_add index_add", Traits(times_written=2)),
        ("embedding_dense_backward index_put", Traits(Family.IRREGULAR, times_written=2)),
        ("max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d sort topk cumsum", _IRREGULAR),
        ("upsample_nearest2d upsample_nearest2d_backward upsample_nearest3d upsample_nearest3d_backward", _IRREGULAR),
        ("upsample_bilinear2d upsample_bilinear2d_backward grid_sampler_2d grid_sampler_2d_backward", _IRREGULAR),
        ("max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward", _POOLING_BACKWARD),
        ("max_pool3d_with_indices_backward avg_pool3d_backward _adaptive_avg_pool3d_backward", _POOLING_BACKWARD),
        ("gelu gelu_backward silu silu_backward tanh sigmoid exp log pow native_dropout _softmax", _TRANSCENDENTAL),
        ("_thnn_fused_lstm_cell _thnn_fused_gru_cell _fused_rms_norm", _TRANSCENDENTAL),
        ("_log_softmax _log_softmax_backward_data", _LONG_ROWS),
        ("_softmax_backward_data", Traits(flops_per_element=10.0, times_read=_TWICE, times_written=2)),
        ("_fused_rms_norm_backward", Traits(flops_per_element=16.0, times_read=_TWICE)),
        ("native_layer_norm", _LAYER_NORM),
        ("native_group_norm native_batch_norm cudnn_batch_norm _native_batch_norm_legit", _BATCH_NORM),
        ("_native_batch_norm_legit_functional _batch_norm_with_update", _BATCH_NORM),
        ("_batch_norm_with_update_functional", _BATCH_NORM),
        ("native_layer_norm_backward native_group_norm_backward native_batch_norm_backward", _NORM_BACKWARD),
        ("cudnn_batch_norm_backward batch_norm_backward", _NORM_BACKWARD),
    )
    for name in names.split()
}
_PLAIN = Traits()


def traits_of(name: str) -> Traits:
    """Of an ATen operator by its name without overload; most are read once, written once, one flop an element."""
    return _TRAITS.get(name, _PLAIN)
