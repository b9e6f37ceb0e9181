"""Random kitchen sinks on a GPU: three kernels in Triton.

    kappa_ij = sum_r w_r cos(u_ir - u_jr) cos(g_i - g_j)          u_ir = omega_r.x_i,  g_i = offset.x_i,  w_r = exp(a_r)
    [N_i, n_i] = sum_j f_ij kappa_ij [v_j, 1]        [T_i, t_i] = sum_j f_ij [v_j, 1]        f_ij = exp(b_j - m_i)
    out_i = (N_i + sigma_i T_i) / (n_i + sigma_i t_i)          sigma_i = max(s, FLOOR s - n_i / t_i)

over all keys, or over those up to i. b_j is the log-weight of a key, -inf for one that is not there, m_i the largest
that query i sees. s is the smoothing times R; the rule of the floor (`operands.py`) is in sigma. Without an offset g is
0. cos(x - y) = cos x cos y + sin x sin y makes features of both cosines: R with cos u cos g, R with sin u cos g, and
with an offset (PARTS = 2) as many with sin g. A state is what they add up to, and last, with smoothing (SMOOTH), the
constant 1; all of it relative to one scale, the largest b_j. Chunks, tiles and rows are those of `prf.py`.

Everything that is added up over tokens goes one way (`add_up`): keys with [v_j, 1] give a state, queries with their
gradients [d_N_i, d_n_i] that of a state, and what a state says of either gives the gradient of the frequencies.
"""

import triton
import triton.language as tl

from klformer.ops.triton.tiles import NO_KEY, load_biases, load_if, load_tile, sincos, store_tile

FLOOR = tl.constexpr(0.5)


@triton.jit
def load_features(VALUES, WEIGHTS, feature, r, e, R, E):
    """Sums of some features: values (BR, BE) and weights (BR,)."""
    weights = tl.load(WEIGHTS + feature + r, mask=r < R, other=0.0)
    return load_tile(VALUES + feature * E, r, R, E, e, E), weights


@triton.jit
def store_features(VALUES, WEIGHTS, feature, r, e, R, E, values, weights):
    tl.store(WEIGHTS + feature + r, weights, mask=r < R)
    store_tile(VALUES + feature * E, r, R, E, e, E, values)


@triton.jit
def angles(x, OFFSET, d, D, PARTS: tl.constexpr):
    """cos g and sin g of tokens, (C,); 1 and 0 without an offset."""
    cos, sin = tl.full((x.shape[0],), 1.0, tl.float32), tl.zeros((x.shape[0],), tl.float32)
    if PARTS == 2:
        cos, sin = sincos(tl.sum(x * tl.load(OFFSET + d, mask=d < D, other=0.0)[None, :], 1))
    return cos, sin


@triton.jit
def held(n, t, s, SMOOTH: tl.constexpr):
    """sigma_i."""
    sigma = tl.zeros_like(n)
    if SMOOTH:
        sigma = tl.maximum(s, s * FLOOR - n / tl.where(t == 0, 1.0, t))
    return sigma


@triton.jit
def load_gradients(
    D_OUT, OUT, D_LOG, N, T, TOTAL, s, i, L, e, E, g_s, t_s, HAS_LOG: tl.constexpr, SMOOTH: tl.constexpr
):
    """d_N_i and the factor of d_out_i in it, sigma_i, and the gradients of n_i, t_i and s."""
    n, t = tl.load(N + i, mask=i < L, other=0.0), tl.zeros((i.shape[0],), tl.float32)
    if SMOOTH:
        t = tl.load(T + i * t_s, mask=i < L, other=0.0)
    sigma = held(n, t, s, SMOOTH)
    divisor = n + sigma * t
    some = divisor != 0
    inverse = tl.where(some, 1.0 / tl.where(some, divisor, 1.0), 0.0)
    d_out = tl.where(some[:, None], load_tile(D_OUT, i, L, g_s, e, E), 0.0)
    d_log = tl.where(some, load_if(D_LOG, i, L, HAS_LOG), 0.0)
    d_values = d_out * inverse[:, None]
    d_n = (d_log - tl.sum(d_out * load_tile(OUT, i, L, E, e, E), 1)) * inverse
    d_t, d_s = sigma * d_n, tl.zeros_like(n)
    if SMOOTH:
        d_sigma = t * d_n + tl.sum(d_values * load_tile(TOTAL, i, L, t_s * E, e, E), 1)
        raised = sigma > s
        d_s = tl.where(raised, FLOOR, 1.0) * d_sigma
        slope = tl.where(raised, d_sigma / tl.where(t == 0, 1.0, t), 0.0)
        d_n -= slope
        d_t += slope * n / tl.where(t == 0, 1.0, t)
    return d_values, inverse, sigma, d_n, d_t, d_s


@triton.jit
def add_up(
    tile, row, X, Y, BIAS, OUT, D_LOG, N, T, TOTAL, s, OMEGA, A, OFFSET, VALUES_0, WEIGHTS_0, SCALE_0, VALUES, WEIGHTS,
    SCALE, VALUES_N, WEIGHTS_N, SCALE_N, D_OMEGA, D_OFFSET, length, R, D, E, chunks, x_s, y_s, t_s, m_s,
    GRADIENT: tl.constexpr, SUMS: tl.constexpr, PARAMS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_A: tl.constexpr,
    HAS_LOG: tl.constexpr, HAS_0: tl.constexpr, STORE: tl.constexpr, SMOOTH: tl.constexpr, PARTS: tl.constexpr,
    C: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Go through the tokens of a row, from the last with GRADIENT, for one tile of features.

    SUMS: the state of keys, or the gradient of that which queries read, before each chunk (STORE) and after all. It
    starts from VALUES_0 (HAS_0), whose scale for gradients is that of the final state.
    PARAMS: the gradients of the frequencies, where VALUES_0 is what queries read, or the gradient of the state of keys.
    """
    tiles = (R + BR - 1) // BR
    part, tile = tile // tiles, tile % tiles
    r, d, e = tile * BR + tl.arange(0, BR), tl.arange(0, BD), tl.arange(0, BE)
    features = 2 * PARTS * R + SMOOTH
    place, cosines, last = row * features, part * 2 * R, features - 1
    omega = load_tile(OMEGA, r, R, D, d, D)
    w = tl.exp(load_biases(A, r, R, HAS_A))
    top = tl.full((), NO_KEY, tl.float32)
    n_cos, n_sin = tl.zeros((BR,), tl.float32), tl.zeros((BR,), tl.float32)
    v_cos, v_sin = tl.zeros((BR, BE), tl.float32), tl.zeros((BR, BE), tl.float32)
    total, t = tl.zeros((BE,), tl.float32), tl.full((), 0.0, tl.float32)
    d_omega, d_offset = tl.zeros((BR, BD), tl.float32), tl.zeros((BD,), tl.float32)
    if HAS_0 or PARAMS:
        o_cos, on_cos = load_features(VALUES_0, WEIGHTS_0, place + cosines, r, e, R, E)
        o_sin, on_sin = load_features(VALUES_0, WEIGHTS_0, place + cosines + R, r, e, R, E)
    if HAS_0:
        v_cos, n_cos, v_sin, n_sin = o_cos, on_cos, o_sin, on_sin
        if SMOOTH:
            total = tl.load(VALUES_0 + (place + last) * E + e, mask=e < E, other=0.0)
            t = tl.load(WEIGHTS_0 + place + last)
    if HAS_0 or (PARAMS and not GRADIENT):
        top = tl.load(SCALE_0 + row)
        if GRADIENT:
            top = tl.where(top > NO_KEY / 2, -top, NO_KEY)
    for step in range(chunks):
        chunk = step
        if GRADIENT:
            chunk = chunks - 1 - step
        if STORE:
            before = (row * chunks + chunk) * features
            store_features(VALUES, WEIGHTS, before + cosines, r, e, R, E, v_cos, n_cos)
            store_features(VALUES, WEIGHTS, before + cosines + R, r, e, R, E, v_sin, n_sin)
            if part + tile == 0:
                tl.store(SCALE + row * chunks + chunk, top)
                if SMOOTH:
                    tl.store(VALUES + (before + last) * E + e, total, mask=e < E)
                    tl.store(WEIGHTS + before + last, t)
        j = chunk * C + tl.arange(0, C)
        bias = tl.where(j < length, 0.0, float("-inf"))
        if GRADIENT:
            y, _, sigma, d_n, d_t, _ = load_gradients(
                Y, OUT, D_LOG, N, T, TOTAL, s, j, length, e, E, y_s, t_s, HAS_LOG, SMOOTH,
            )  # fmt: skip
            m = tl.load(BIAS + j * m_s, mask=j < length, other=NO_KEY)
            bias = tl.where(m > NO_KEY / 2, -m, float("-inf"))
        else:
            if HAS_BIAS:
                bias = tl.load(BIAS + j, mask=j < length, other=float("-inf"))
            y = load_tile(Y, j, length, y_s, e, E)
            d_n = tl.full((C,), 1.0, tl.float32)
            sigma, d_t = d_n, d_n
        keep = bias != float("-inf")
        x = tl.where(keep[:, None], load_tile(X, j, length, x_s, d, D), 0.0)
        y = tl.where(keep[:, None], y, 0.0)
        largest = tl.maximum(top, tl.max(bias, 0))
        factor, f = tl.exp(top - largest), tl.exp(bias - largest)
        top = largest
        g_cos, g_sin = angles(x, OFFSET, d, D, PARTS)
        here = f * tl.where(part == 0, g_cos, g_sin)
        cos, sin = sincos(tl.dot(omega, tl.trans(x), input_precision=PREC))  # (BR, C)
        if GRADIENT:
            cos, sin = cos * w[:, None], sin * w[:, None]
        if PARAMS:
            d_cos = tl.dot(o_cos, tl.trans(y), input_precision=PREC) + on_cos[:, None] * d_n[None, :]
            d_sin = tl.dot(o_sin, tl.trans(y), input_precision=PREC) + on_sin[:, None] * d_n[None, :]
            d_omega = tl.dot((d_sin * cos - d_cos * sin) * here[None, :], x, d_omega, input_precision=PREC)
            if PARTS == 2:
                turned = f * tl.where(part == 0, -g_sin, g_cos) * tl.sum(d_cos * cos + d_sin * sin, 0)
                d_offset += tl.sum(turned[:, None] * x, 0)
        if SUMS:
            cos, sin = cos * here[None, :], sin * here[None, :]
            n_cos = n_cos * factor + tl.sum(cos * d_n[None, :], 1)
            n_sin = n_sin * factor + tl.sum(sin * d_n[None, :], 1)
            v_cos = tl.dot(cos, y, v_cos * factor, input_precision=PREC)
            v_sin = tl.dot(sin, y, v_sin * factor, input_precision=PREC)
            if SMOOTH:
                total = total * factor + tl.sum((f * sigma)[:, None] * y, 0)
                t = t * factor + tl.sum(f * d_t, 0)
    if SUMS:
        store_features(VALUES_N, WEIGHTS_N, place + cosines, r, e, R, E, v_cos, n_cos)
        store_features(VALUES_N, WEIGHTS_N, place + cosines + R, r, e, R, E, v_sin, n_sin)
        if part + tile == 0:
            tl.store(SCALE_N + row, top)
            if SMOOTH:
                tl.store(VALUES_N + (place + last) * E + e, total, mask=e < E)
                tl.store(WEIGHTS_N + place + last, t)
    if PARAMS:
        d_a = n_cos * on_cos + n_sin * on_sin + tl.sum(v_cos * o_cos + v_sin * o_sin, 1)
        D_OMEGA += (row * PARTS + part) * R * (D + 1)
        store_tile(D_OMEGA, r, R, D + 1, d, D, d_omega)
        tl.store(D_OMEGA + r * (D + 1) + D, d_a, mask=r < R)
        if PARTS == 2:
            tl.store(D_OFFSET + (row * 2 * tiles + part * tiles + tile) * D + d, d_offset, mask=d < D)


@triton.jit
def sums_kernel(
    X, Y, BIAS, OUT, D_LOG, N, T, TOTAL, SMOOTHING, OMEGA, A, OFFSET, VALUES_0, WEIGHTS_0, SCALE_0, VALUES, WEIGHTS,
    SCALE, VALUES_N, WEIGHTS_N, SCALE_N, length, H, R, D, E, chunks, omega_heads, a_heads, offset_heads, s_heads, x_b,
    x_h, x_s, y_b, y_h, y_s, GRADIENT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_A: tl.constexpr, HAS_LOG: tl.constexpr,
    HAS_0: tl.constexpr, STORE: tl.constexpr, SMOOTH: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """A state of keys, or with GRADIENT that of a causal product's states. Grid (PARTS tiles of R, B H)."""
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // H, row % H
    s = tl.full((), 0.0, tl.float32)
    if SMOOTH:
        s = tl.load(SMOOTHING + head % s_heads) * R
    add_up(
        tl.program_id(0), row, X + batch * x_b + head * x_h, Y + batch * y_b + head * y_h, BIAS + row * length,
        OUT + row * length * E, D_LOG + row * length, N + row * length, T + row * length, TOTAL + row * length * E, s,
        OMEGA + (head % omega_heads) * R * D, A + (head % a_heads) * R, OFFSET + (head % offset_heads) * D, VALUES_0,
        WEIGHTS_0, SCALE_0, VALUES, WEIGHTS, SCALE, VALUES_N, WEIGHTS_N, SCALE_N, OMEGA, OMEGA, length, R, D, E, chunks,
        x_s, y_s, 1, 1, GRADIENT, True, False, HAS_BIAS, HAS_A, HAS_LOG, HAS_0, STORE, SMOOTH, PARTS, C, BR, BD, BE,
        PREC,
    )  # fmt: skip


@triton.jit
def attend_kernel(
    Q, K, V, BIAS, SMOOTHING, OMEGA, A, OFFSET, VALUES, WEIGHTS, SCALE, OUT, EXACT, LOG_SUM, N, T, M, TOTAL, log_r, L,
    H, R, D, E, chunks, omega_heads, a_heads, offset_heads, s_heads, stay, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s,
    CAUSAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_A: tl.constexpr, HAS_EXACT: tl.constexpr, SMOOTH: tl.constexpr,
    PARTS: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Results and log-sums of a chunk, from a state, and with CAUSAL the chunk's own keys beside it. Grid (chunks, B H)

    n_i is kept for backward; with CAUSAL also m_i, and with SMOOTH t_i and T_i.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // H, row % H
    i, d, e = chunk * C + tl.arange(0, C), tl.arange(0, BD), tl.arange(0, BE)
    OMEGA += (head % omega_heads) * R * D
    OFFSET += (head % offset_heads) * D
    A += (head % a_heads) * R
    state = row
    if CAUSAL:
        state = row * chunks + chunk
    features = 2 * PARTS * R + SMOOTH
    place, last = state * features, features - 1
    before = tl.load(SCALE + state)
    Q += batch * q_b + head * q_h
    K += batch * k_b + head * k_h
    q = load_tile(Q, i, L, q_s, d, D)
    q_cos, q_sin = angles(q, OFFSET, d, D, PARTS)
    m = tl.full((C,), 0.0, tl.float32) + before
    if CAUSAL:
        bias = tl.where(i < L, 0.0, float("-inf"))
        if HAS_BIAS:
            bias = tl.load(BIAS + row * L + i, mask=i < L, other=float("-inf"))
        keep = bias != float("-inf")
        k = tl.where(keep[:, None], load_tile(K, i, L, k_s, d, D), 0.0)
        k_cos, k_sin = angles(k, OFFSET, d, D, PARTS)
        seen = (i[:, None] >= i[None, :]) & keep[None, :]
        m = tl.maximum(m, tl.max(tl.where(seen, bias[None, :], NO_KEY), 1))
        f = tl.exp(tl.where(seen, bias[None, :] - m[:, None], float("-inf")))
    earlier = tl.exp(before - m)
    n = tl.zeros((C,), tl.float32)
    acc = tl.zeros((C, BE), tl.float32)
    pairs = tl.zeros((C, C), tl.float32)
    for start in range(0, R, BR):
        r = start + tl.arange(0, BR)
        omega = load_tile(OMEGA, r, R, D, d, D)
        w = tl.where(r < R, tl.exp(load_biases(A, r, R, HAS_A)), 0.0)
        q = load_tile(Q + start * stay, i, L, q_s, d, D)
        cos, sin = sincos(tl.dot(q, tl.trans(omega), input_precision=PREC))
        cos, sin = cos * w[None, :], sin * w[None, :]
        if CAUSAL:
            k = tl.where(keep[:, None], load_tile(K + start * stay, i, L, k_s, d, D), 0.0)
            cos_k, sin_k = sincos(tl.dot(k, tl.trans(omega), input_precision=PREC))
            pairs = tl.dot(cos, tl.trans(cos_k), pairs, input_precision=PREC)
            pairs = tl.dot(sin, tl.trans(sin_k), pairs, input_precision=PREC)
        for part in tl.static_range(PARTS):
            here = earlier * (q_cos if part == 0 else q_sin)
            cos_here, sin_here = cos * here[:, None], sin * here[:, None]
            v_cos, n_cos = load_features(VALUES, WEIGHTS, place + 2 * part * R, r, e, R, E)
            v_sin, n_sin = load_features(VALUES, WEIGHTS, place + 2 * part * R + R, r, e, R, E)
            n += tl.sum(cos_here * n_cos[None, :] + sin_here * n_sin[None, :], 1)
            acc = tl.dot(cos_here, v_cos, acc, input_precision=PREC)
            acc = tl.dot(sin_here, v_sin, acc, input_precision=PREC)
    t = tl.zeros((C,), tl.float32)
    total = tl.zeros((C, BE), tl.float32)
    if SMOOTH:
        t = earlier * tl.load(WEIGHTS + place + last)
        of_state = tl.load(VALUES + (place + last) * E + e, mask=e < E, other=0.0)
        total = earlier[:, None] * of_state[None, :]
    if CAUSAL:
        v = tl.where(keep[:, None], load_tile(V + batch * v_b + head * v_h, i, L, v_s, e, E), 0.0)
        if PARTS == 2:
            pairs *= q_cos[:, None] * k_cos[None, :] + q_sin[:, None] * k_sin[None, :]
        pairs *= f
        n += tl.sum(pairs, 1)
        acc = tl.dot(pairs, v, acc, input_precision=PREC)
        tl.store(M + row * L + i, m, mask=i < L)
        if SMOOTH:
            t += tl.sum(f, 1)
            total = tl.dot(f, v, total, input_precision=PREC)
            tl.store(T + row * L + i, t, mask=i < L)
            store_tile(TOTAL + row * L * E, i, L, E, e, E, total)
    tl.store(N + row * L + i, n, mask=i < L)
    s = tl.full((), 0.0, tl.float32)
    if SMOOTH:
        s = tl.load(SMOOTHING + head % s_heads) * R
    sigma = held(n, t, s, SMOOTH)
    divisor = n + sigma * t
    none = divisor == 0
    log_sum = tl.log(tl.where(divisor > 0, divisor, 1.0)) + m - log_r
    log_sum = tl.where(none, float("-inf"), tl.where(divisor > 0, log_sum, float("nan")))
    tl.store(LOG_SUM + row * L + i, log_sum, mask=i < L)
    out = (acc + sigma[:, None] * total) / tl.where(none, 1.0, divisor)[:, None]
    store_tile(OUT + row * L * E, i, L, E, e, E, out)
    if HAS_EXACT:  # before it was rounded
        store_tile(EXACT + row * L * E, i, L, E, e, E, out)


@triton.jit
def gradients_kernel(
    Q, K, V, BIAS, OUT, D_OUT, D_LOG, N, T, M, TOTAL, SMOOTHING, OMEGA, A, OFFSET, VALUES, WEIGHTS, SCALE, DQ, DK, DV,
    DBIAS, DS, VALUES_N, WEIGHTS_N, SCALE_N, D_OMEGA, D_OFFSET, L, H, R, D, E, chunks, omega_heads, a_heads,
    offset_heads, s_heads, stay, m_row, m_s, t_row, t_s, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, g_b, g_h, g_s,
    KEYS: tl.constexpr, PAIRS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_A: tl.constexpr, HAS_LOG: tl.constexpr,
    SMOOTH: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of a chunk, or of its KEYS and values; with PAIRS those of a causal product.

    With y_i = d_N_i, the gradient of N_i, and likewise d_n, d_t of its weights, T_ij = y_i.v_j + d_n_i and P = kappa:

        d v_j = sum_i f_ij (P_ij + sigma_i) y_i        d b_j = sum_i f_ij (P_ij T_ij + sigma_i y_i.v_j + d_t_i)
        d phi(q_i) = w sum_j f_ij T_ij phi(k_j)        d phi(k_j) = sum_i f_ij T_ij w phi(q_i)

    For queries, keys of earlier chunks are in a state; for keys, queries of later chunks are in the gradient of one.
    Grid (chunks, B H). Where it is not causal, PARTS tiles of R come before the chunks, for what is added up.
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // H, row % H
    Q += batch * q_b + head * q_h
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    D_OUT += batch * g_b + head * g_h
    BIAS += row * L
    OUT += row * L * E
    D_LOG += row * L
    N += row * L
    T += row * t_row
    TOTAL += row * t_row * E
    M += row * m_row
    OMEGA += (head % omega_heads) * R * D
    OFFSET += (head % offset_heads) * D
    A += (head % a_heads) * R
    s = tl.full((), 0.0, tl.float32)
    if SMOOTH:
        s = tl.load(SMOOTHING + head % s_heads) * R
    if not PAIRS:
        chunk -= PARTS * ((R + BR - 1) // BR)
    if chunk >= 0:
        of_chunk(
            chunk, row, Q, K, V, BIAS, OUT, D_OUT, D_LOG, N, T, M, TOTAL, s, OMEGA, A, OFFSET, VALUES, WEIGHTS, SCALE,
            DQ, DK, DV, DBIAS, DS, D_OMEGA, D_OFFSET, L, R, D, E, chunks, stay, m_s, t_s, q_s, k_s, v_s, g_s, KEYS,
            PAIRS, HAS_BIAS, HAS_A, HAS_LOG, SMOOTH, PARTS, C, BR, BD, BE, PREC,
        )  # fmt: skip
    elif not KEYS:
        add_up(
            tl.program_id(0), row, Q, D_OUT, M, OUT, D_LOG, N, T, TOTAL, s, OMEGA, A, OFFSET, VALUES, WEIGHTS, SCALE,
            VALUES, WEIGHTS, SCALE, VALUES_N, WEIGHTS_N, SCALE_N, D_OMEGA, D_OFFSET, L, R, D, E, chunks, q_s, g_s, t_s,
            m_s, True, True, True, False, HAS_A, HAS_LOG, False, False, SMOOTH, PARTS, C, BR, BD, BE, PREC,
        )  # fmt: skip
    else:
        add_up(
            tl.program_id(0), row, K, V, BIAS, OUT, D_LOG, N, T, TOTAL, s, OMEGA, A, OFFSET, VALUES, WEIGHTS, SCALE,
            VALUES, WEIGHTS, SCALE, VALUES_N, WEIGHTS_N, SCALE_N, D_OMEGA, D_OFFSET, L, R, D, E, chunks, k_s, v_s, 0, 0,
            False, False, True, HAS_BIAS, False, False, False, False, SMOOTH, PARTS, C, BR, BD, BE, PREC,
        )  # fmt: skip


@triton.jit
def of_chunk(
    chunk, row, Q, K, V, BIAS, OUT, D_OUT, D_LOG, N, T, M, TOTAL, s, OMEGA, A, OFFSET, VALUES, WEIGHTS, SCALE, DQ, DK,
    DV, DBIAS, DS, D_OMEGA, D_OFFSET, L, R, D, E, chunks, stay, m_s, t_s, q_s, k_s, v_s, g_s, KEYS: tl.constexpr,
    PAIRS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_A: tl.constexpr, HAS_LOG: tl.constexpr, SMOOTH: tl.constexpr,
    PARTS: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    i, d, e = chunk * C + tl.arange(0, C), tl.arange(0, BD), tl.arange(0, BE)
    features = 2 * PARTS * R + SMOOTH
    state = row
    if PAIRS:
        state = row * chunks + chunk
    place, last = state * features, features - 1
    scale = tl.load(SCALE + state)
    if PAIRS or not KEYS:
        y, inverse, sigma, d_n, d_t, d_s = load_gradients(
            D_OUT, OUT, D_LOG, N, T, TOTAL, s, i, L, e, E, g_s, t_s, HAS_LOG, SMOOTH
        )
        m = tl.load(M + i * m_s, mask=i < L, other=0.0)
    if PAIRS or KEYS:
        bias = tl.where(i < L, 0.0, float("-inf"))
        if HAS_BIAS:
            bias = tl.load(BIAS + i, mask=i < L, other=float("-inf"))
        keep = bias != float("-inf")
    # x are the tokens of this program, with rows that states and pairs are multiplied by; z are those they pair with.
    if KEYS:
        X, x_s, Z, z_s, ROWS, rows_s = K, k_s, Q, q_s, V, v_s
        x_on, z_on, factor, weight = keep, i < L, keep.to(tl.float32), tl.full((C,), 1.0, tl.float32)
        # Of a causal product the scale is that of gradients, which is the least m_i with its sign turned.
        share = tl.exp(bias + (scale if PAIRS else -scale))
    else:
        X, x_s, Z, z_s, ROWS, rows_s = Q, q_s, K, k_s, D_OUT, g_s
        x_on, factor, weight = i < L, inverse, d_n
        share = tl.exp(tl.minimum(scale - m, 0.0))
        if PAIRS:
            z_on = keep
        if SMOOTH:
            tl.store(DS + row * L + i, d_s * R, mask=i < L)
    x = tl.where(x_on[:, None], load_tile(X, i, L, x_s, d, D), 0.0)
    x_cos, x_sin = angles(x, OFFSET, d, D, PARTS)
    d_x = tl.zeros((C, BD), tl.float32)
    d_v = tl.zeros((C, BE), tl.float32)
    d_bias, d_angle = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
    if PAIRS:
        v = tl.where(keep[:, None], load_tile(V, i, L, v_s, e, E), 0.0)
        z = tl.where(z_on[:, None], load_tile(Z, i, L, z_s, d, D), 0.0)
        z_cos, z_sin = angles(z, OFFSET, d, D, PARTS)
        if KEYS:
            seen = (i[None, :] >= i[:, None]) & keep[:, None]
            f = tl.exp(tl.where(seen, bias[:, None] - m[None, :], float("-inf")))
            slopes = tl.dot(v, tl.trans(y), input_precision=PREC) + d_n[None, :]
        else:
            seen = (i[:, None] >= i[None, :]) & keep[None, :]
            f = tl.exp(tl.where(seen, bias[None, :] - m[:, None], float("-inf")))
            slopes = tl.dot(y, tl.trans(v), input_precision=PREC) + d_n[:, None]
        turn = x_cos[:, None] * z_cos[None, :] + x_sin[:, None] * z_sin[None, :]
        d_pairs = f * turn * slopes
        pairs = tl.zeros((C, C), tl.float32)
    for start in range(0, R, BR):
        r = start + tl.arange(0, BR)
        omega = load_tile(OMEGA, r, R, D, d, D)
        w = tl.where(r < R, tl.exp(load_biases(A, r, R, HAS_A)), 0.0)[None, :]
        x = tl.where(x_on[:, None], load_tile(X + start * stay, i, L, x_s, d, D), 0.0)
        cos, sin = sincos(tl.dot(x, tl.trans(omega), input_precision=PREC))
        d_cos, d_sin = tl.zeros((C, BR), tl.float32), tl.zeros((C, BR), tl.float32)
        rows = tl.where((factor != 0)[:, None], load_tile(ROWS + start * stay, i, L, rows_s, e, E), 0.0)
        rows *= factor[:, None]
        turns = PARTS
        if KEYS and PAIRS:
            turns = PARTS + stay  # a loop also for one, which takes fewer registers
        for part in range(turns):
            v_cos, n_cos = load_features(VALUES, WEIGHTS, place + 2 * part * R, r, e, R, E)
            v_sin, n_sin = load_features(VALUES, WEIGHTS, place + 2 * part * R + R, r, e, R, E)
            by_cos = tl.dot(rows, tl.trans(v_cos), input_precision=PREC) + weight[:, None] * n_cos[None, :]
            by_sin = tl.dot(rows, tl.trans(v_sin), input_precision=PREC) + weight[:, None] * n_sin[None, :]
            here = share * tl.where(part == 0, x_cos, x_sin)
            d_cos += by_cos * here[:, None]
            d_sin += by_sin * here[:, None]
            if KEYS:
                d_v = tl.dot(cos * here[:, None], v_cos, d_v, input_precision=PREC)
                d_v = tl.dot(sin * here[:, None], v_sin, d_v, input_precision=PREC)
            if KEYS or PARTS == 2:
                by_token = by_cos * cos + by_sin * sin
                if not KEYS:
                    by_token *= w
                by_token = tl.sum(by_token, 1)
                d_bias += here * by_token
                d_angle += share * tl.where(part == 0, -x_sin, x_cos) * by_token
        if PAIRS:
            z = tl.where(z_on[:, None], load_tile(Z + start * stay, i, L, z_s, d, D), 0.0)
            cos_z, sin_z = sincos(tl.dot(z, tl.trans(omega), input_precision=PREC))
            if KEYS:  # others are queries, whose features have the weights
                cos_z, sin_z = cos_z * w, sin_z * w
            d_cos = tl.dot(d_pairs, cos_z, d_cos, input_precision=PREC)
            d_sin = tl.dot(d_pairs, sin_z, d_sin, input_precision=PREC)
        if not KEYS:
            cos, sin = cos * w, sin * w
        if PAIRS:
            if KEYS or PARTS == 2:
                pairs = tl.dot(cos, tl.trans(cos_z), pairs, input_precision=PREC)
                pairs = tl.dot(sin, tl.trans(sin_z), pairs, input_precision=PREC)
        d_score = d_sin * cos - d_cos * sin
        d_x = tl.dot(d_score, omega, d_x, input_precision=PREC)
        if PAIRS:
            address = D_OMEGA + state * R * (D + 1)
            store_tile(address, r, R, D + 1, d, D, tl.dot(tl.trans(d_score), x, input_precision=PREC))
            d_a = tl.zeros((BR,), tl.float32)
            if not KEYS:
                d_a = tl.sum(d_cos * cos + d_sin * sin, 0)
            tl.store(address + r * (D + 1) + D, d_a, mask=r < R)
    if PAIRS:
        pairs *= f
        if PARTS == 2:
            sines = x_sin[:, None] * z_cos[None, :] - x_cos[:, None] * z_sin[None, :]
            d_angle -= tl.sum(pairs * slopes * sines, 1)
            pairs *= turn
        if KEYS:
            d_bias += tl.sum(pairs * slopes, 1)
            if SMOOTH:
                d_bias += tl.sum(f * (sigma[None, :] * (slopes - d_n[None, :]) + d_t[None, :]), 1)
                pairs += f * sigma[None, :]
            y = tl.where((inverse != 0)[:, None], load_tile(D_OUT, i, L, g_s, e, E), 0.0) * inverse[:, None]
            d_v = tl.dot(pairs, y, d_v, input_precision=PREC)
    if PARTS == 2:
        d_x += d_angle[:, None] * tl.load(OFFSET + d, mask=d < D, other=0.0)[None, :]
        if PAIRS:
            x = tl.where(x_on[:, None], load_tile(X, i, L, x_s, d, D), 0.0)
            tl.store(D_OFFSET + state * D + d, tl.sum(d_angle[:, None] * x, 0), mask=d < D)
    if KEYS:
        if SMOOTH:
            total = tl.load(VALUES + (place + last) * E + e, mask=e < E, other=0.0)
            v = tl.where(keep[:, None], load_tile(V, i, L, v_s, e, E), 0.0)
            d_v += share[:, None] * total[None, :]
            d_bias += share * (tl.sum(v * total[None, :], 1) + tl.load(WEIGHTS + place + last))
        store_tile(DK + row * L * D, i, L, D, d, D, d_x)
        store_tile(DV + row * L * E, i, L, E, e, E, tl.where(keep[:, None], d_v, 0.0))
        tl.store(DBIAS + row * L + i, tl.where(keep, d_bias, 0.0), mask=i < L)
    else:
        store_tile(DQ + row * L * D, i, L, D, d, D, d_x)
