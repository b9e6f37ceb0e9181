"""Exact attention to neighbours on a GPU: three kernels in Triton, for what `ops/near.py` defines.

    s_ij = c q_i.k_j + b_j  for keys j at the places i + before - left to i + before + right
    out_i = (exp(F_i) far_i + sum_j exp(s_ij) v_j) / exp(z_i)          z_i = log(exp(F_i) + sum_j exp(s_ij))

far_i with its log-sum F_i is another result to be merged with, and may be missing. A program has a block of BM queries
or of BN keys of one head and goes through the blocks that they are near to.
"""

import triton
import triton.language as tl

from klformer.ops.triton.tiles import NO_KEY, load_if, load_tile, store_tile


@triton.jit
def load_keys(
    KEEP, BIAS, batch, head, j, S, m_b, m_h, m_s, b_b, b_h, b_s, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Which keys there are, and their log-weights."""
    keep = (j >= 0) & (j < S)
    if HAS_MASK:
        keep = keep & (tl.load(KEEP + batch * m_b + head * m_h + j * m_s, mask=keep, other=0) != 0)
    bias = tl.zeros((j.shape[0],), tl.float32)
    if HAS_BIAS:
        bias = tl.load(BIAS + batch * b_b + head * b_h + j * b_s, mask=keep, other=0.0).to(tl.float32)
    return keep, bias


@triton.jit
def load_factor(FACTOR, head, HAS_FACTOR: tl.constexpr):
    factor = tl.full((), 1.0, tl.float32)
    if HAS_FACTOR:
        factor = tl.load(FACTOR + head)
    return factor


@triton.jit
def attend_kernel(
    Q, K, V, KEEP, BIAS, FACTOR, FAR, FAR_LOG, OUT, LOG_SUM, L, S, H, D, E, left, right, before, q_b, q_h, q_s, k_b,
    k_h, k_s, v_b, v_h, v_s, m_b, m_h, m_s, b_b, b_h, b_s, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_FACTOR: tl.constexpr, HAS_FAR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """out_i and z_i of a block of queries. Grid (L / BM, B H)."""
    first, row = tl.program_id(0) * BM, tl.program_id(1).to(tl.int64)
    batch, head = row // H, row % H
    i, d, e = first + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BE)
    q = load_tile(Q + batch * q_b + head * q_h, i, L, q_s, d, D) * load_factor(FACTOR, head, HAS_FACTOR)
    top = tl.full((BM,), NO_KEY, tl.float32)
    mass = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BE), tl.float32)
    if HAS_FAR:
        top = tl.maximum(tl.load(FAR_LOG + row * L + i, mask=i < L, other=NO_KEY), NO_KEY)
        some = top > NO_KEY / 2
        mass = tl.where(some, 1.0, 0.0)
        acc = tl.where(some[:, None], load_tile(FAR + row * L * E, i, L, E, e, E), 0.0)
    place = i + before
    for start in range(tl.maximum(first + before - left, 0), tl.minimum(first + BM + before + right, S), BN):
        j = start + tl.arange(0, BN)
        keep, bias = load_keys(KEEP, BIAS, batch, head, j, S, m_b, m_h, m_s, b_b, b_h, b_s, HAS_MASK, HAS_BIAS)
        k = tl.where(keep[:, None], load_tile(K + batch * k_b + head * k_h, j, S, k_s, d, D), 0.0)
        v = tl.where(keep[:, None], load_tile(V + batch * v_b + head * v_h, j, S, v_s, e, E), 0.0)
        seen = keep[None, :] & (j[None, :] >= place[:, None] - left) & (j[None, :] <= place[:, None] + right)
        score = tl.dot(q, tl.trans(k), input_precision=PREC) + bias[None, :]
        score = tl.where(seen, score, float("-inf"))
        largest = tl.maximum(top, tl.max(score, 1))
        factor, weight = tl.exp(top - largest), tl.exp(score - largest[:, None])
        mass = mass * factor + tl.sum(weight, 1)
        acc = tl.dot(weight, v, acc * factor[:, None], input_precision=PREC)
        top = largest
    none = mass == 0
    mass = tl.where(none, 1.0, mass)
    store_tile(OUT + row * L * E, i, L, E, e, E, acc / mass[:, None])
    tl.store(LOG_SUM + row * L + i, tl.where(none, float("-inf"), top + tl.log(mass)), mask=i < L)


@triton.jit
def queries_kernel(
    Q, K, V, KEEP, BIAS, FACTOR, FAR, FAR_LOG, OUT, LOG_SUM, D_OUT, D_LOG, DQ, D_FACTOR, D_FAR, D_FAR_LOG, DELTA, L, S,
    H, D, E, left, right, before, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, m_b, m_h, m_s, b_b, b_h, b_s,
    HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_FAR: tl.constexpr,
    HAS_LOG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries and of what was merged in, and D_i. Grid (L / BM, B H).

    With P_ij = exp(s_ij - z_i) and D_i = d_out_i.out_i - d_z_i: d s_ij = P_ij (d_out_i.v_j - D_i).
    """
    first, row = tl.program_id(0) * BM, tl.program_id(1).to(tl.int64)
    batch, head = row // H, row % H
    i, d, e = first + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BE)
    c = load_factor(FACTOR, head, HAS_FACTOR)
    q = load_tile(Q + batch * q_b + head * q_h, i, L, q_s, d, D)
    z = tl.load(LOG_SUM + row * L + i, mask=i < L, other=float("-inf"))
    attends = z != float("-inf")
    z = tl.where(attends, z, 0.0)
    d_out = tl.where(attends[:, None], load_tile(D_OUT + row * L * E, i, L, E, e, E), 0.0)
    d_log = tl.where(attends, load_if(D_LOG + row * L, i, L, HAS_LOG), 0.0)
    delta = tl.sum(d_out * load_tile(OUT + row * L * E, i, L, E, e, E), 1) - d_log
    tl.store(DELTA + row * L + i, delta, mask=i < L)
    if HAS_FAR:
        far_log = tl.load(FAR_LOG + row * L + i, mask=i < L, other=float("-inf"))
        share = tl.exp(tl.where(attends, far_log, float("-inf")) - z)
        far = tl.where((share > 0)[:, None], load_tile(FAR + row * L * E, i, L, E, e, E), 0.0)
        store_tile(D_FAR + row * L * E, i, L, E, e, E, d_out * share[:, None])
        tl.store(D_FAR_LOG + row * L + i, share * (tl.sum(d_out * far, 1) - delta), mask=i < L)
    d_q = tl.zeros((BM, BD), tl.float32)
    place = i + before
    for start in range(tl.maximum(first + before - left, 0), tl.minimum(first + BM + before + right, S), BN):
        j = start + tl.arange(0, BN)
        keep, bias = load_keys(KEEP, BIAS, batch, head, j, S, m_b, m_h, m_s, b_b, b_h, b_s, HAS_MASK, HAS_BIAS)
        k = tl.where(keep[:, None], load_tile(K + batch * k_b + head * k_h, j, S, k_s, d, D), 0.0)
        v = tl.where(keep[:, None], load_tile(V + batch * v_b + head * v_h, j, S, v_s, e, E), 0.0)
        seen = keep[None, :] & (j[None, :] >= place[:, None] - left) & (j[None, :] <= place[:, None] + right)
        score = tl.dot(q * c, tl.trans(k), input_precision=PREC) + bias[None, :] - z[:, None]
        weight = tl.exp(tl.where(seen & attends[:, None], score, float("-inf")))
        d_score = weight * (tl.dot(d_out, tl.trans(v), input_precision=PREC) - delta[:, None])
        d_q = tl.dot(d_score, k, d_q, input_precision=PREC)
    store_tile(DQ + row * L * D, i, L, D, d, D, d_q * c)
    if HAS_FACTOR:
        tl.store(D_FACTOR + row * L + i, tl.sum(d_q * q, 1), mask=i < L)


@triton.jit
def keys_kernel(
    Q, K, V, KEEP, BIAS, FACTOR, LOG_SUM, D_OUT, DELTA, DK, DV, DBIAS, L, S, H, D, E, left, right, before, q_b, q_h,
    q_s, k_b, k_h, k_s, v_b, v_h, v_s, m_b, m_h, m_s, b_b, b_h, b_s, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_FACTOR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values, from the queries that they are near to. Grid (S / BN, B H)."""
    first, row = tl.program_id(0) * BN, tl.program_id(1).to(tl.int64)
    batch, head = row // H, row % H
    j, d, e = first + tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BE)
    c = load_factor(FACTOR, head, HAS_FACTOR)
    keep, bias = load_keys(KEEP, BIAS, batch, head, j, S, m_b, m_h, m_s, b_b, b_h, b_s, HAS_MASK, HAS_BIAS)
    k = tl.where(keep[:, None], load_tile(K + batch * k_b + head * k_h, j, S, k_s, d, D), 0.0)
    v = tl.where(keep[:, None], load_tile(V + batch * v_b + head * v_h, j, S, v_s, e, E), 0.0)
    d_k = tl.zeros((BN, BD), tl.float32)
    d_v = tl.zeros((BN, BE), tl.float32)
    d_bias = tl.zeros((BN,), tl.float32)
    for start in range(tl.maximum(first - right - before, 0), tl.minimum(first + BN + left - before, L), BM):
        i = start + tl.arange(0, BM)
        z = tl.load(LOG_SUM + row * L + i, mask=i < L, other=float("-inf"))
        attends = z != float("-inf")
        z = tl.where(attends, z, 0.0)
        q = load_tile(Q + batch * q_b + head * q_h, i, L, q_s, d, D) * c
        d_out = tl.where(attends[:, None], load_tile(D_OUT + row * L * E, i, L, E, e, E), 0.0)
        delta = tl.load(DELTA + row * L + i, mask=i < L, other=0.0)
        place = i[None, :] + before
        seen = (keep[:, None] & attends[None, :]) & (j[:, None] >= place - left) & (j[:, None] <= place + right)
        score = tl.dot(k, tl.trans(q), input_precision=PREC) + bias[:, None] - z[None, :]
        weight = tl.exp(tl.where(seen, score, float("-inf")))
        d_v = tl.dot(weight, d_out, d_v, input_precision=PREC)
        d_score = weight * (tl.dot(v, tl.trans(d_out), input_precision=PREC) - delta[None, :])
        d_k = tl.dot(d_score, q, d_k, input_precision=PREC)
        d_bias += tl.sum(d_score, 1)
    store_tile(DK + row * S * D, j, S, D, d, D, d_k)
    store_tile(DV + row * S * E, j, S, E, e, E, d_v)
    tl.store(DBIAS + row * S + j, d_bias, mask=j < S)
