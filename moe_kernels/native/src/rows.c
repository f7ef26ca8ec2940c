// What a decoder layer does with rows between its matrix products, with the bits of the torch operations it replaces.
//
// Compiled without contraction: a * b + c rounds twice, as torch's separate operations do. Exponentials are torch's own
// (its library's last bit cannot be had otherwise) and come in as arguments.
#include "lanes.h"

// ---- sums in the order of torch's sum over a contiguous last dimension (ATen/native/cpu/SumKernel.cpp) ------------
// Four interleaved sums of `width` lanes each; runs of 16 or more are added up in levels.

#define ILP 4
#define LEVELS 4

INLINE int ceil_log2(int x) { return x <= 2 ? 1 : 32 - __builtin_clz(x - 1); }

INLINE float sum_as_torch(const float *x, int n, int width) {
    float level[LEVELS][ILP][LANES];
    const int steps = n / width, size = steps / ILP, log = ceil_log2(size) / LEVELS;
    const int power = log > 4 ? log : 4, step = 1 << power;
    memset(level, 0, sizeof level);
    int i = 0;
    while (i + step <= size) {
        for (int j = 0; j < step; j++, i++)
            for (int k = 0; k < ILP; k++)
                for (int l = 0; l < width; l++) level[0][k][l] += x[(i * ILP + k) * width + l];
        for (int j = 1; j < LEVELS; j++) {
            for (int k = 0; k < ILP; k++)
                for (int l = 0; l < width; l++) {
                    level[j][k][l] += level[j - 1][k][l];
                    level[j - 1][k][l] = 0;
                }
            if (i & ((step - 1) << (j * power))) break;
        }
    }
    for (; i < size; i++)
        for (int k = 0; k < ILP; k++)
            for (int l = 0; l < width; l++) level[0][k][l] += x[(i * ILP + k) * width + l];
    for (int j = 1; j < LEVELS; j++)
        for (int k = 0; k < ILP; k++)
            for (int l = 0; l < width; l++) level[0][k][l] += level[j][k][l];
    for (i = size * ILP; i < steps; i++)
        for (int l = 0; l < width; l++) level[0][0][l] += x[i * width + l];
    for (int k = 1; k < ILP; k++)
        for (int l = 0; l < width; l++) level[0][0][l] += level[0][k][l];
    if (width == 1) return level[0][0][0];
    float total = 0;
    for (i = steps * width; i < n; i++) total += x[i];
    for (int l = 0; l < width; l++) total += level[0][0][l];
    return total;
}

// `width`: FP32 lanes of the vectors torch sums with on this machine, 8 or 4.
static float sum_row(const float *x, int n, int width) {
    if (n < width) return sum_as_torch(x, n, 1);
    return width == 8 ? sum_as_torch(x, n, 8) : sum_as_torch(x, n, 4);
}

// ---- norms --------------------------------------------------------------------------------------------------------

// One row of RMSNorm as transformers computes it: FP32 inside, rounded before the weight multiplies; `work` [2 n].
INLINE void norm_row(const void *x, int64_t at, const void *weight, int64_t weight_at, void *out, int64_t out_at, int n,
                     float eps, float *work, int width, int bf16) {
    float *squares = work + n;
    for (int i = 0; i < n; i += LANES) {
        lanes v = load(x, at + i, bf16);
        store_f32(work + i, v);
        store_f32(squares + i, v * v);
    }
    float scale = 1.0f / sqrtf(sum_row(squares, n, width) / (float)n + eps);
    for (int i = 0; i < n; i += LANES)
        store(out, out_at + i, load(weight, weight_at + i, bf16) * kept(load_f32(work + i) * scale, bf16), bf16);
}

// x, delta, sum, out [rows, n]: sum = x + delta (skipped where delta is NULL), out = RMSNorm(sum) * weight [n].
INLINE void add_norm(const char *x, const char *delta, const char *weight, char *sum, char *out, int rows, int n,
                     float eps, int width, int threads, int bf16) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * n > 4096) schedule(static)
    for (int row = 0; row < rows; row++) {
        float work[2 * n];
        const int64_t at = (int64_t)row * n;
        const char *from = x;
        if (delta) {
            for (int i = 0; i < n; i += LANES)
                store(sum, at + i, load(x, at + i, bf16) + load(delta, at + i, bf16), bf16);
            from = sum;
        }
        norm_row(from, at, weight, 0, out, at, n, eps, work, width, bf16);
    }
}

void add_rms_norm(const char *x, const char *delta, const char *weight, char *sum, char *out, int rows, int n, float eps,
                  int width, int bf16, int threads) {
    if (bf16) add_norm(x, delta, weight, sum, out, rows, n, eps, width, threads, 1);
    else add_norm(x, delta, weight, sum, out, rows, n, eps, width, threads, 0);
}

// ---- queries, keys and values -------------------------------------------------------------------------------------

// Rotary embedding of a head's first `turning` elements, the halves of which pair; the rest is copied.
INLINE void rotate(const void *x, int64_t at, void *out, int64_t out_at, const void *cos, const void *sin,
                   int64_t angle, int turning, int dim, int bf16) {
    const int half = turning / 2;
    for (int i = 0; i < half; i += LANES) {
        lanes a = load(x, at + i, bf16), b = load(x, at + half + i, bf16);
        lanes cos_a = load(cos, angle + i, bf16), cos_b = load(cos, angle + half + i, bf16);
        lanes sin_a = load(sin, angle + i, bf16), sin_b = load(sin, angle + half + i, bf16);
        store(out, out_at + i, kept(a * cos_a, bf16) + kept(-b * sin_a, bf16), bf16);
        store(out, out_at + half + i, kept(b * cos_b, bf16) + kept(a * sin_b, bf16), bf16);
    }
    for (int i = turning; i < dim; i += LANES) store(out, out_at + i, load(x, at + i, bf16), bf16);
}

INLINE void prepare(const char *qkv, const char *weight, const char *cos, const char *sin, const int64_t *slots,
                    char *q, char *k_pool, char *v_pool, int rows, int stored, int heads, int kv_heads, int dim,
                    int turning, float eps, int width, int threads, int bf16) {
    const int all = heads + 2 * kv_heads, size = bf16 ? 2 : 4;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int row = 0; row < rows; row++) {
        float work[2 * dim], normed[dim];
        for (int head = 0; head < heads + kv_heads; head++) {
            if (head >= heads && row >= stored) break;
            const void *from = qkv;
            int64_t at = ((int64_t)row * all + head) * dim;
            if (weight) {
                norm_row(qkv, at, weight, (int64_t)head * dim, normed, 0, dim, eps, work, width, bf16);
                from = normed;
                at = 0;
            }
            void *to = head < heads ? q : k_pool;
            int64_t to_at = head < heads ? ((int64_t)row * heads + head) * dim
                                         : (slots[row] * kv_heads + head - heads) * dim;
            rotate(from, at, to, to_at, cos, sin, (int64_t)row * turning, turning, dim, bf16);
        }
        if (row < stored)
            memcpy(v_pool + slots[row] * kv_heads * dim * size,
                   qkv + ((int64_t)row * all + heads + kv_heads) * dim * size, (size_t)kv_heads * dim * size);
    }
}

// qkv [rows, heads + 2 kv_heads, dim]; weight [heads + kv_heads, dim] or NULL; cos, sin [rows, turning]; q [rows, heads,
// dim]; pools [slots, kv_heads, dim]. Head norms, rotary embedding; the first `stored` rows' keys and values go to
// their slots.
void qk_norm_rope_store(const char *qkv, const char *weight, const char *cos, const char *sin, const int64_t *slots,
                        char *q, char *k_pool, char *v_pool, int rows, int stored, int heads, int kv_heads, int dim,
                        int turning, float eps, int width, int bf16, int threads) {
    if (bf16)
        prepare(qkv, weight, cos, sin, slots, q, k_pool, v_pool, rows, stored, heads, kv_heads, dim, turning, eps, width,
                threads, 1);
    else
        prepare(qkv, weight, cos, sin, slots, q, k_pool, v_pool, rows, stored, heads, kv_heads, dim, turning, eps, width,
                threads, 0);
}

// ---- experts ------------------------------------------------------------------------------------------------------

// Row r of a [rows, n] result comes from row place[r] of a larger matrix, or from row r where `place` is NULL.
INLINE int64_t row_of(const int64_t *place, int row) { return place ? place[row] : row; }

// gate_up [.., 2 inter]: -gate in FP32 [rows, inter], for torch to take the exponential of.
void negated_gate(const char *gate_up, const int64_t *place, float *out, int rows, int inter, int bf16, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * inter > 8192) schedule(static)
    for (int row = 0; row < rows; row++) {
        const int64_t at = row_of(place, row) * 2 * inter;
        for (int i = 0; i < inter; i += LANES) store_f32(out + (int64_t)row * inter + i, -load(gate_up, at + i, bf16));
    }
}

// silu(gate) * up with e = exp(-gate) [rows, inter]; row r is written to row place[r] of out, as it was read.
void swiglu(const char *gate_up, const int64_t *place, const float *e, char *out, int rows, int inter, int bf16,
            int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * inter > 8192) schedule(static)
    for (int row = 0; row < rows; row++) {
        const int64_t to = row_of(place, row) * inter, at = 2 * to;
        for (int i = 0; i < inter; i += LANES) {
            lanes gate = load(gate_up, at + i, bf16) / (load_f32(e + (int64_t)row * inter + i) + 1.0f);
            store(out, to + i, kept(gate, bf16) * load(gate_up, at + inter + i, bf16), bf16);
        }
    }
}

// rows [.., n], place and weights [tokens, slots]: out [tokens, n] = sum over slots, in order, of weight * row.
void combine(const char *from, const int64_t *place, const float *weights, char *out, int tokens, int slots, int n,
             int bf16, int out_bf16, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int token = 0; token < tokens; token++) {
        const int64_t *places = place + (int64_t)token * slots;
        const float *shares = weights + (int64_t)token * slots;
        for (int i = 0; i < n; i += LANES) {
            lanes total = load(from, places[0] * n + i, bf16) * shares[0];
            for (int slot = 1; slot < slots; slot++)
                total = total + load(from, places[slot] * n + i, bf16) * shares[slot];
            store(out, (int64_t)token * n + i, total, out_bf16);
        }
    }
}

// ---- routing ------------------------------------------------------------------------------------------------------

// scores FP32 [tokens, experts]: ids and weights [tokens, slots] of the largest score + bias, falling, equal ones by
// id; a NaN key counts as the largest, as in torch's sort.
void choose(const float *scores, const float *bias, int64_t *ids, float *weights, int tokens, int experts, int slots,
            int normalise, float eps, float factor, int width, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens * experts > 4096) schedule(static)
    for (int token = 0; token < tokens; token++) {
        const float *score = scores + (int64_t)token * experts;
        int64_t *chosen = ids + (int64_t)token * slots;
        float *weight = weights + (int64_t)token * slots;
        float keys[experts];
        uint8_t taken[experts];
        memset(taken, 0, experts);
        for (int e = 0; e < experts; e++) keys[e] = bias ? score[e] + bias[e] : score[e];
        for (int s = 0; s < slots; s++) {
            int best = -1;
            for (int e = 0; e < experts; e++)
                if (!taken[e] && (best < 0 || keys[e] > keys[best] || (keys[e] != keys[e] && keys[best] == keys[best])))
                    best = e;
            taken[best] = 1;
            chosen[s] = best;
            weight[s] = score[best];
        }
        if (normalise) {
            float total = sum_row(weight, slots, width) + eps;
            for (int s = 0; s < slots; s++) weight[s] /= total;
        }
        if (factor != 1.0f)
            for (int s = 0; s < slots; s++) weight[s] *= factor;
    }
}
