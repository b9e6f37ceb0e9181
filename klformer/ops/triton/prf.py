"""Positive features on a GPU: four kernels in Triton.

    s_jr = omega_r.k_j + b_j        u_ir = omega_r.q_i + a_r        l_ij = log sum_r exp(u_ir + s_jr)
    out_i = sum_j exp(l_ij - z_i) v_j        z_i = log sum_j exp(l_ij)            over all keys, or over those up to i

b_j is the log-weight of a key with its envelope, -inf for one that is not there; a_r that of a frequency. Tokens are
worked on in chunks of C, frequencies in tiles of BR; every program has one sequence of one head. A state is what keys
add up to, values_r = sum_j exp(s_jr - scale_r) v_j and weights_r without v_j. All sums are float32.

Within a chunk, exp(s_jr) refers to the largest of the chunk, which may be a key that an earlier query does not see.
Where that leaves a query next to nothing, the program sees it and takes the pairs of its chunk one by one: exact, slow,
rare, and nobody waits for anybody.

`stay` is 0, which the compiler does not know: a tile at an address that seems to move is loaded again in every turn of
a loop. Otherwise tiles are kept in registers over the loop, and those run out.
"""

import triton
import triton.language as tl

from klformer.ops.triton.tiles import NO_KEY, load_biases, load_if, load_row, load_tile, store_tile

#: Below this a sum, whose largest term would be 1 were it not for later keys, may have lost terms.
TINY = tl.constexpr(1e-19)


@triton.jit
def envelope_kernel(
    K, MASK, KEY_BIAS, OMEGA, BIAS, LOG_SUM, coefficient, log_r, S, H, R, D, omega_heads, k_b, k_h, k_s, m_b, m_h, m_s,
    b_b, b_h, b_s, HAS_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, SIMPLEX: tl.constexpr, C: tl.constexpr,
    BR: tl.constexpr, BD: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """b_j = key_bias_j - c |k_j|^2 - log 1/R sum_r exp(omega_r.k_j); -inf where the mask drops. Grid (chunks, B H)."""
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // H, row % H
    j, d = tl.program_id(0) * C + tl.arange(0, C), tl.arange(0, BD)
    keep = j < S
    if HAS_MASK:
        keep = keep & (tl.load(MASK + batch * m_b + head * m_h + j * m_s, mask=keep, other=0) != 0)
    k = tl.where(keep[:, None], load_tile(K + batch * k_b + head * k_h, j, S, k_s, d, D), 0.0)
    bias = -coefficient * tl.sum(k * k, 1)
    if HAS_BIAS:
        bias += tl.load(KEY_BIAS + batch * b_b + head * b_h + j * b_s, mask=keep, other=0.0).to(tl.float32)
    if SIMPLEX:
        top = tl.full((C,), NO_KEY, tl.float32)
        mass = tl.zeros((C,), tl.float32)
        for start in range(0, R, BR):
            r = start + tl.arange(0, BR)
            omega = load_tile(OMEGA + (head % omega_heads) * R * D, r, R, D, d, D)
            score = tl.where((r < R)[None, :], tl.dot(k, tl.trans(omega), input_precision=PREC), NO_KEY)
            largest = tl.maximum(top, tl.max(score, 1))
            mass = mass * tl.exp(top - largest) + tl.sum(tl.exp(score - largest[:, None]), 1)
            top = largest
        log_sum = top + tl.log(mass)
        tl.store(LOG_SUM + row * S + j, log_sum, mask=j < S)
        bias += log_r - log_sum
    tl.store(BIAS + row * S + j, tl.where(keep, bias, float("-inf")), mask=j < S)


@triton.jit
def states_kernel(
    X, Y, BIAS, OUT, D_LOG, OMEGA, A, VALUES_0, WEIGHTS_0, SCALE_0, VALUES, WEIGHTS, SCALE, VALUES_N, WEIGHTS_N,
    SCALE_N, log_r, length, H, R, D, E, chunks, omega_heads, a_heads, x_b, x_h, x_s, y_b, y_h, y_s,
    GRADIENT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_A: tl.constexpr, HAS_LOG: tl.constexpr, HAS_0: tl.constexpr,
    STORE: tl.constexpr, REVERSE: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """States of keys and values, before each chunk (STORE) and after all. Grid (R / BR, B H).

    With GRADIENT what they are of is queries and gradients of results, exp(u_ir - z_i) d_out_i, from the last chunk to
    the first (REVERSE), and -D_i stands for the weight: D_i = d_out_i.out_i - d_z_i.
    """
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // H, row % H
    r, d, e = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BD), tl.arange(0, BE)
    omega = load_tile(OMEGA + (head % omega_heads) * R * D, r, R, D, d, D)
    a = load_biases(A + (head % a_heads) * R, r, R, HAS_A)
    top = tl.full((BR,), NO_KEY, tl.float32)
    weights = tl.zeros((BR,), tl.float32)
    values = tl.zeros((BR, BE), tl.float32)
    if HAS_0:
        top = tl.load(SCALE_0 + row * R + r, mask=r < R, other=NO_KEY)
        weights = tl.load(WEIGHTS_0 + row * R + r, mask=r < R, other=0.0)
        values = load_tile(VALUES_0 + row * R * E, r, R, E, e, E)
        if GRADIENT:  # of sums that are relative to the scale of the last state: exp(s - scale)
            top = tl.where(top > NO_KEY / 2, -top, NO_KEY)
    for step in range(chunks):
        chunk = step
        if REVERSE:
            chunk = chunks - 1 - step
        if STORE:
            place = (row * chunks + chunk) * R
            tl.store(SCALE + place + r, top, mask=r < R)
            tl.store(WEIGHTS + place + r, weights, mask=r < R)
            store_tile(VALUES + place * E, r, R, E, e, E, values)
        j = chunk * C + tl.arange(0, C)
        x = load_tile(X + batch * x_b + head * x_h, j, length, x_s, d, D)
        y = load_tile(Y + batch * y_b + head * y_h, j, length, y_s, e, E)
        bias = tl.where(j < length, 0.0, float("-inf"))
        weight = tl.full((C,), 1.0, tl.float32)
        if GRADIENT:
            z = tl.load(BIAS + row * length + j, mask=j < length, other=float("-inf"))
            bias = tl.where(z == float("-inf"), z, -z - log_r)
            out = load_tile(OUT + row * length * E, j, length, E, e, E)
            weight = load_if(D_LOG + row * length, j, length, HAS_LOG) - tl.sum(y * out, 1)
        elif HAS_BIAS:
            bias = tl.load(BIAS + row * length + j, mask=j < length, other=float("-inf"))
        keep = bias != float("-inf")
        x = tl.where(keep[:, None], x, 0.0)
        y = tl.where(keep[:, None], y, 0.0)
        weight = tl.where(keep, weight, 0.0)
        score = tl.dot(omega, tl.trans(x), input_precision=PREC) + a[:, None] + bias[None, :]  # (BR, C)
        largest = tl.maximum(top, tl.max(score, 1))
        factor = tl.exp(top - largest)
        phi = tl.exp(score - largest[:, None])
        weights = weights * factor + tl.sum(phi * weight[None, :], 1)
        values = tl.dot(phi, y, values * factor[:, None], input_precision=PREC)
        top = largest
    tl.store(SCALE_N + row * R + r, top, mask=r < R)
    tl.store(WEIGHTS_N + row * R + r, weights, mask=r < R)
    store_tile(VALUES_N + row * R * E, r, R, E, e, E, values)


@triton.jit
def load_state(VALUES, WEIGHTS, SCALE, place, r, e, R, E):
    """The mean value of a frequency (BR, BE) and the logarithm of its weight (BR,), NO_KEY for none."""
    weights = tl.load(WEIGHTS + place + r, mask=r < R, other=0.0)
    some = weights != 0
    weights = tl.where(some, weights, 1.0)
    scale = tl.load(SCALE + place + r, mask=r < R, other=NO_KEY)
    mean = load_tile(VALUES + place * E, r, R, E, e, E) / weights[:, None]
    return tl.where(some[:, None], mean, 0.0), tl.where(some, scale + tl.log(weights), NO_KEY)


@triton.jit
def pair_logs(q, k, bias, OMEGA, A, R, D, d, HAS_A: tl.constexpr, C: tl.constexpr):
    """l_ij of all pairs of a chunk, (C, C), frequency by frequency."""
    top = tl.full((C, C), NO_KEY, tl.float32)
    mass = tl.zeros((C, C), tl.float32)
    for r in range(R):
        omega = load_row(OMEGA, r, d, D)
        u = tl.sum(q * omega[None, :], 1)
        if HAS_A:
            u += tl.load(A + r)
        pair = u[:, None] + (tl.sum(k * omega[None, :], 1) + bias)[None, :]
        largest = tl.maximum(top, pair)
        mass = mass * tl.exp(top - largest) + tl.exp(pair - largest)
        top = largest
    return top + tl.log(tl.where(mass == 0, 1.0, mass))


@triton.jit
def attend_kernel(
    Q, K, V, BIAS, OMEGA, A, VALUES, WEIGHTS, SCALE, OUT, EXACT, LOG_SUM, LOST, log_r, L, H, R, D, E, chunks,
    omega_heads, a_heads, stay, q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, CAUSAL: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_A: tl.constexpr, HAS_EXACT: tl.constexpr, C: tl.constexpr, BR: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """out_i and z_i of a chunk: a softmax over the frequencies of a state, and with CAUSAL the chunk's own keys beside
    them, from the state before the chunk. Grid (chunks, B H)."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // H, row % H
    i, d, e = chunk * C + tl.arange(0, C), tl.arange(0, BD), tl.arange(0, BE)
    Q += batch * q_b + head * q_h
    K += batch * k_b + head * k_h
    OMEGA += (head % omega_heads) * R * D
    A += (head % a_heads) * R
    place = row * R
    bias = tl.where(i < L, 0.0, float("-inf"))
    if CAUSAL:
        place = (row * chunks + chunk) * R
        if HAS_BIAS:
            bias = tl.load(BIAS + row * L + i, mask=i < L, other=float("-inf"))
    keep = bias != float("-inf")
    top = tl.full((C,), NO_KEY, tl.float32)
    mass = tl.zeros((C,), tl.float32)
    acc = tl.zeros((C, BE), tl.float32)
    pairs = tl.zeros((C, C), tl.float32)
    latest = tl.full((BR,), NO_KEY, tl.float32)
    for start in range(0, R, BR):
        r = start + tl.arange(0, BR)
        omega = load_tile(OMEGA, r, R, D, d, D)
        mean, before = load_state(VALUES, WEIGHTS, SCALE, place, r, e, R, E)
        latest = tl.maximum(latest, before)
        shift, phi_k = before, tl.zeros((C, BR), tl.float32)
        if CAUSAL:
            k = tl.where(keep[:, None], load_tile(K + start * stay, i, L, k_s, d, D), 0.0)
            score = tl.dot(k, tl.trans(omega), input_precision=PREC) + bias[:, None]
            shift = tl.maximum(before, tl.max(score, 0))
            phi_k = tl.exp(score - shift[None, :])
        u = tl.dot(load_tile(Q + start * stay, i, L, q_s, d, D), tl.trans(omega), input_precision=PREC)
        u += (load_biases(A, r, R, HAS_A) + shift)[None, :]
        u = tl.where((r < R)[None, :], u, float("-inf"))
        largest = tl.maximum(top, tl.max(u, 1))
        factor = tl.exp(top - largest)
        phi_q = tl.exp(u - largest[:, None])
        if CAUSAL:
            pairs = tl.dot(phi_q, tl.trans(phi_k), pairs * factor[:, None], input_precision=PREC)
        phi_q *= tl.where(before > NO_KEY / 2, tl.exp(before - shift), 0.0)[None, :]
        mass = mass * factor + tl.sum(phi_q, 1)
        acc = tl.dot(phi_q, mean, acc * factor[:, None], input_precision=PREC)
        top = largest
    if CAUSAL:
        seen = (i[:, None] >= i[None, :]) & keep[None, :]
        pairs = tl.where(seen, pairs, 0.0)
        mass += tl.sum(pairs, 1)
        V += batch * v_b + head * v_h
        v = tl.where(keep[:, None], load_tile(V, i, L, v_s, e, E), 0.0)
        acc = tl.dot(pairs, v, acc, input_precision=PREC)
        some_key = tl.sum(seen.to(tl.int32), 1) + (tl.max(latest, 0) > NO_KEY / 2).to(tl.int32) > 0
        lost = tl.max((some_key & (mass < TINY) & (i < L)).to(tl.int32), 0)
        tl.store(LOST + row * chunks + chunk, lost)
        if lost > 0:
            q = load_tile(Q, i, L, q_s, d, D)
            k = tl.where(keep[:, None], load_tile(K, i, L, k_s, d, D), 0.0)
            logs = tl.where(seen, pair_logs(q, k, bias, OMEGA, A, R, D, d, HAS_A, C), float("-inf"))
            top = tl.maximum(tl.max(logs, 1), NO_KEY)
            pairs = tl.exp(logs - top[:, None])
            mass = tl.sum(pairs, 1)
            acc = tl.dot(pairs, tl.where(keep[:, None], load_tile(V, i, L, v_s, e, E), 0.0), input_precision=PREC)
            for r in range(R):  # the keys before the chunk, one frequency after the other
                weight = tl.load(WEIGHTS + place + r)
                before = tl.load(SCALE + place + r)
                if weight != 0:
                    u = tl.sum(q * load_row(OMEGA, r, d, D)[None, :], 1) + before + tl.log(weight)
                    if HAS_A:
                        u += tl.load(A + r)
                    largest = tl.maximum(top, u)
                    phi = tl.exp(u - largest)
                    factor = tl.exp(top - largest)
                    mass = mass * factor + phi
                    acc = acc * factor[:, None] + (phi / weight)[:, None] * load_row(VALUES, place + r, e, E)[None, :]
                    top = largest
    none = mass == 0
    mass = tl.where(none, 1.0, mass)
    out = acc / mass[:, None]
    store_tile(OUT + row * L * E, i, L, E, e, E, out)
    if HAS_EXACT:  # before it was rounded, for D_i
        store_tile(EXACT + row * L * E, i, L, E, e, E, out)
    tl.store(LOG_SUM + row * L + i, tl.where(none, float("-inf"), top + tl.log(mass) - log_r), mask=i < L)


@triton.jit
def load_z(LOG_SUM, i, L, log_r):
    """z_i, inf for a query without any key: all its weights are 0."""
    z = tl.load(LOG_SUM + i, mask=i < L, other=float("-inf")) + log_r
    return tl.where(z == float("-inf"), float("inf"), z)


@triton.jit
def load_delta(d_out, OUT, D_LOG, i, L, e, E, HAS_LOG: tl.constexpr):
    """D_i = d_out_i.out_i - d_z_i."""
    return tl.sum(d_out * load_tile(OUT, i, L, E, e, E), 1) - load_if(D_LOG, i, L, HAS_LOG)


@triton.jit
def gradients_kernel(
    Q, K, V, BIAS, SIMPLEX_LOG, OUT, LOG_SUM, D_OUT, D_LOG, OMEGA, A, VALUES, WEIGHTS, SCALE, LOST, DQ, DK, DV, DBIAS,
    D_OMEGA, coefficient, log_r, L, H, R, D, E, chunks, omega_heads, a_heads, stay, q_b, q_h, q_s, k_b, k_h, k_s, v_b,
    v_h, v_s, g_b, g_h, g_s, KEYS: tl.constexpr, PAIRS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_A: tl.constexpr,
    HAS_LOG: tl.constexpr, SIMPLEX: tl.constexpr, C: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries of a chunk, or of its KEYS and values, and their part of those of omega and a.

    With T_ij = d_out_i.v_j - D_i, where D_i = d_out_i.out_i - d_z_i, the gradient of l_ij is P_ij T_ij, and

        d u_ir = sum_j exp(u_ir + s_jr - z_i) T_ij        d s_jr = sum_i of the same        d v_j = sum_i P_ij d_out_i

    For queries, keys of earlier chunks are in a state; for keys, queries of later chunks are in sums of gradients. The
    pairs of the chunk itself come to that where the product is causal (PAIRS). Grid (chunks, B H).
    """
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // H, row % H
    i, d, e = chunk * C + tl.arange(0, C), tl.arange(0, BD), tl.arange(0, BE)
    Q += batch * q_b + head * q_h
    K += batch * k_b + head * k_h
    V += batch * v_b + head * v_h
    D_OUT += batch * g_b + head * g_h
    OUT += row * L * E
    LOG_SUM += row * L
    D_LOG += row * L
    OMEGA += (head % omega_heads) * R * D
    A += (head % a_heads) * R
    D_OMEGA += (row * chunks + chunk) * R * (D + 1)
    place = row * R
    lost = 0
    bias = tl.where(i < L, 0.0, float("-inf"))
    if HAS_BIAS:
        bias = tl.load(BIAS + row * L + i, mask=i < L, other=float("-inf"))
    keep = bias != float("-inf")
    z = tl.zeros((C,), tl.float32)
    if PAIRS or not KEYS:
        z = load_z(LOG_SUM, i, L, log_r)
    attends = z != float("inf")
    delta = tl.zeros((C,), tl.float32)
    t = tl.zeros((C, C), tl.float32)
    seen = (i[:, None] >= i[None, :]) & keep[None, :] & attends[:, None]
    if PAIRS or not KEYS:
        d_out = tl.where(attends[:, None], load_tile(D_OUT, i, L, g_s, e, E), 0.0)
        delta = tl.where(attends, load_delta(d_out, OUT, D_LOG, i, L, e, E, HAS_LOG), 0.0)
        if PAIRS:
            place = (row * chunks + chunk) * R
            lost = tl.load(LOST + row * chunks + chunk)
            v = tl.where(keep[:, None], load_tile(V, i, L, v_s, e, E), 0.0)
            t = tl.where(seen, tl.dot(d_out, tl.trans(v), input_precision=PREC) - delta[:, None], 0.0)
    pairs = tl.zeros((C, C), tl.float32)
    d_x = tl.zeros((C, BD), tl.float32)
    d_v = tl.zeros((C, BE), tl.float32)
    d_bias = tl.zeros((C,), tl.float32)
    for start in range(0, R, BR):
        r = start + tl.arange(0, BR)
        omega = load_tile(OMEGA, r, R, D, d, D)
        inside = (r < R)[None, :]
        if PAIRS or not KEYS:
            q = tl.where(attends[:, None], load_tile(Q + start * stay, i, L, q_s, d, D), 0.0)
            u = tl.dot(q, tl.trans(omega), input_precision=PREC) + load_biases(A, r, R, HAS_A)[None, :] - z[:, None]
        if PAIRS or KEYS:
            k = tl.where(keep[:, None], load_tile(K + start * stay, i, L, k_s, d, D), 0.0)
            score = tl.dot(k, tl.trans(omega), input_precision=PREC) + bias[:, None]
        if KEYS:
            scale = tl.load(SCALE + place + r, mask=r < R, other=NO_KEY)
            sign = 1.0 if PAIRS else -1.0  # gradients of sums are relative to their scale
            scale = tl.where(scale > NO_KEY / 2, sign * scale, float("-inf"))
            d_values = load_tile(VALUES + place * E, r, R, E, e, E)
            d_weights = tl.load(WEIGHTS + place + r, mask=r < R, other=0.0)
            v = tl.where(keep[:, None], load_tile(V + start * stay, i, L, v_s, e, E), 0.0)
            weight = tl.exp(score + scale[None, :])
            d_score = weight * (tl.dot(v, tl.trans(d_values), input_precision=PREC) + d_weights[None, :])
            d_v = tl.dot(weight, d_values, d_v, input_precision=PREC)
        else:
            mean, before = load_state(VALUES, WEIGHTS, SCALE, place, r, e, R, E)
            d_out = tl.where(attends[:, None], load_tile(D_OUT + start * stay, i, L, g_s, e, E), 0.0)
            weight = tl.where((before > NO_KEY / 2)[None, :], tl.exp(u + before[None, :]), 0.0)
            d_score = weight * (tl.dot(d_out, tl.trans(mean), input_precision=PREC) - delta[:, None])
        if PAIRS:
            if lost == 0:
                shift = tl.maximum(tl.max(score, 0), NO_KEY)
                phi_k = tl.where(inside, tl.exp(score - shift[None, :]), 0.0)
                phi_q = tl.where(inside, tl.exp(u + shift[None, :]), 0.0)
                if KEYS:
                    pairs = tl.dot(phi_q, tl.trans(phi_k), pairs, input_precision=PREC)
                    d_score += phi_k * tl.dot(tl.trans(t), phi_q, input_precision=PREC)
                else:
                    d_score += phi_q * tl.dot(t, phi_k, input_precision=PREC)
        d_x = tl.dot(d_score, omega, d_x, input_precision=PREC)
        if KEYS:
            d_bias += tl.sum(d_score, 1)
            d_omega = tl.dot(tl.trans(d_score), k, input_precision=PREC)
            d_a = tl.zeros((BR,), tl.float32)
        else:
            d_omega = tl.dot(tl.trans(d_score), q, input_precision=PREC)
            d_a = tl.sum(d_score, 0)
        store_tile(D_OMEGA, r, R, D + 1, d, D, d_omega)
        tl.store(D_OMEGA + r * (D + 1) + D, d_a, mask=r < R)
    if PAIRS:
        if lost > 0:
            tl.debug_barrier()
            q = tl.where(attends[:, None], load_tile(Q, i, L, q_s, d, D), 0.0)
            k = tl.where(keep[:, None], load_tile(K, i, L, k_s, d, D), 0.0)
            logs = pair_logs(q, k, bias, OMEGA, A, R, D, d, HAS_A, C)
            pairs = tl.exp(tl.where(seen, logs - z[:, None], float("-inf")))
            for r in range(R):
                omega = load_row(OMEGA, r, d, D)
                u = tl.sum(q * omega[None, :], 1)
                if HAS_A:
                    u += tl.load(A + r)
                score = tl.sum(k * omega[None, :], 1) + bias
                share = tl.exp(tl.where(seen, u[:, None] + score[None, :] - logs, float("-inf")))
                d_pair = pairs * t * share
                if KEYS:
                    d_scores = tl.sum(d_pair, 0)
                    d_bias += d_scores
                    more = tl.sum(d_scores[:, None] * k, 0)
                else:
                    d_scores = tl.sum(d_pair, 1)
                    more = tl.sum(d_scores[:, None] * q, 0)
                    d_a = D_OMEGA + r * (D + 1) + D
                    tl.store(d_a, tl.load(d_a) + tl.sum(d_scores, 0))
                d_x += d_scores[:, None] * omega[None, :]
                address = D_OMEGA + r * (D + 1) + d
                tl.store(address, tl.load(address, mask=d < D) + more, mask=d < D)
        if KEYS:
            pairs = tl.where(seen, pairs, 0.0)
            d_out = tl.where(attends[:, None], load_tile(D_OUT, i, L, g_s, e, E), 0.0)
            d_v = tl.dot(tl.trans(pairs), d_out, d_v, input_precision=PREC)
    if KEYS:
        if SIMPLEX:
            tl.debug_barrier()
            simplex_log = tl.load(SIMPLEX_LOG + row * L + i, mask=i < L, other=0.0)
            for start in range(0, R, BR):
                r = start + tl.arange(0, BR)
                omega = load_tile(OMEGA, r, R, D, d, D)
                k = tl.where(keep[:, None], load_tile(K + start * stay, i, L, k_s, d, D), 0.0)
                share = tl.exp(tl.dot(k, tl.trans(omega), input_precision=PREC) - simplex_log[:, None])
                d_score = tl.where((r < R)[None, :] & keep[:, None], -share * d_bias[:, None], 0.0)
                d_x = tl.dot(d_score, omega, d_x, input_precision=PREC)
                d_omega = load_tile(D_OMEGA, r, R, D + 1, d, D)
                d_omega = tl.dot(tl.trans(d_score), k, d_omega, input_precision=PREC)
                store_tile(D_OMEGA, r, R, D + 1, d, D, d_omega)
        k = tl.where(keep[:, None], load_tile(K, i, L, k_s, d, D), 0.0)
        store_tile(DK + row * L * D, i, L, D, d, D, d_x - 2 * coefficient * k * d_bias[:, None])
        store_tile(DV + row * L * E, i, L, E, e, E, d_v)
        tl.store(DBIAS + row * L + i, d_bias, mask=i < L)
    else:
        store_tile(DQ + row * L * D, i, L, D, d, D, d_x)
