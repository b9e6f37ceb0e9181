"""What kernels for GPUs have in common: tiles in and out of memory, always as float32, and sines without branches."""

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-1e30)
#: pi/2 in three parts, of which the first two have few bits, so that multiples of them are exact.
PI_1, PI_2, PI_3 = tl.constexpr(1.5703125), tl.constexpr(4.837512969970703e-4), tl.constexpr(7.549789948768648e-8)


@triton.jit
def load_tile(pointer, rows, num_rows, stride, columns, num_columns):
    """(rows, columns) in float32, 0 outside."""
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    return tl.load(pointer + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=inside, other=0.0).to(
        tl.float32
    )


@triton.jit
def load_row(pointer, row, columns, num_columns):
    """One row as (columns,) in float32, 0 outside."""
    return tl.load(pointer + row * num_columns + columns, mask=columns < num_columns, other=0.0).to(tl.float32)


@triton.jit
def store_tile(pointer, rows, num_rows, stride, columns, num_columns, x):
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    address = pointer + rows[:, None].to(tl.int64) * stride + columns[None, :]
    tl.store(address, x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_biases(bias, r, R, HAS_A: tl.constexpr):
    """a_r, (BR,)."""
    a = tl.zeros_like(r).to(tl.float32)
    if HAS_A:
        a = tl.load(bias + r, mask=r < R, other=0.0)
    return a


@triton.jit
def load_if(pointer, i, length, THERE: tl.constexpr):
    """A number for every token, (C,); 0 outside, and everywhere if there are none."""
    found = tl.zeros((i.shape[0],), tl.float32)
    if THERE:
        found = tl.load(pointer + i, mask=i < length, other=0.0)
    return found


@triton.jit
def sincos(x):
    """cos x and sin x to 1e-7, up to 1e4: x less a multiple of pi/2, then polynomials between -pi/4 and pi/4.

    The device's own are either not as exact or have a branch for large numbers that costs registers.
    """
    turns = tl.floor(x * 0.6366197723675814 + 0.5)
    x = ((x - turns * PI_1) - turns * PI_2) - turns * PI_3
    square = x * x
    sin = x + x * square * (-1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4))
    cos = 4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5)
    cos = 1.0 - 0.5 * square + square * square * cos
    quarter = turns.to(tl.int32) & 3
    swapped = (quarter & 1) == 1
    first, second = tl.where(swapped, sin, cos), tl.where(swapped, cos, sin)
    return tl.where((quarter == 1) | (quarter == 2), -first, first), tl.where(quarter > 1, -second, second)
