// Attention of packed query rows over the paged KV pool: a row's result depends on its own sequence alone.
//
// For each row and KV head: scores of all visible tokens, their maximum, exponentials and sum, then the weighted
// values; all in FP32, tokens in ascending order. Nothing in it depends on what other rows there are.
#include "lanes.h"

#define HEADS 4  // query heads that share one pass over the keys

// e^x for x <= 0 by Cephes' expf polynomial; 0 below -87.
INLINE lanes exp_lanes(lanes x) {
    ilanes low = x < -87.0f;
    lanes n = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the integer part falls into the low bits
    ilanes power = ((ilanes)n << 23) + (127 << 23);  // of 2^n, n >= -126
    n -= 12582912.0f;
    lanes r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    lanes p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    p *= (lanes)power;  // not an integer addition: NaN stays NaN
    return pick(low, splat(0), p);
}

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (ilanes){__VA_ARGS__})
#endif

// Lane i of the result is the sum of v[i]'s lanes.
INLINE lanes sums_of(const lanes *v) {
    lanes a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        a[i] = PICK(v[2 * i], v[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
               PICK(v[2 * i], v[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    for (int i = 0; i < 4; i++)
        b[i] = PICK(a[2 * i], a[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               PICK(a[2 * i], a[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    for (int i = 0; i < 2; i++)
        c[i] = PICK(b[2 * i], b[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               PICK(b[2 * i], b[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    return PICK(c[0], c[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           PICK(c[0], c[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// `count` <= HEADS query heads of one row. q, out: [count, dim]; k, v: the layer's pools at this KV head;
// scores: [count, length rounded up to LANES].
INLINE void attend(const void *q, const void *k, const void *v, void *out, const int32_t *blocks, int length,
                   int block, int64_t stride, float scaling, float *scores, int count, int dim, int bf16) {
    const int parts = dim / LANES, width = (length + LANES - 1) / LANES * LANES;
    const ilanes lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    lanes query[HEADS][parts], most[HEADS], total[HEADS];
    for (int h = 0; h < count; h++) {
        for (int i = 0; i < parts; i++) query[h][i] = load(q, h * dim + i * LANES, bf16) * scaling;
        most[h] = splat(-INFINITY);
        total[h] = splat(0);
    }
    for (int first = 0; first < width; first += LANES) {
        lanes products[HEADS][LANES];
        for (int j = 0; j < LANES; j++) {
            int t = first + j < length ? first + j : length - 1;
            int64_t at = (int64_t)(blocks[t / block] * block + t % block) * stride;
            for (int h = 0; h < count; h++) products[h][j] = splat(0);
            for (int i = 0; i < parts; i++) {
                lanes key = load(k, at + i * LANES, bf16);
                for (int h = 0; h < count; h++) products[h][j] += query[h][i] * key;
            }
        }
        ilanes visible = lane < length - first;
        for (int h = 0; h < count; h++) {
            lanes s = sums_of(products[h]);
            s = pick(visible, s, splat(-INFINITY));
            most[h] = larger(s, most[h]);
            store_f32(scores + h * width + first, s);
        }
    }
    for (int h = 0; h < count; h++) {
        lanes top = splat(lane_max(most[h]));
        for (int first = 0; first < width; first += LANES) {
            lanes e = exp_lanes(load_f32(scores + h * width + first) - top);
            total[h] += e;
            store_f32(scores + h * width + first, e);
        }
    }
    lanes sum[HEADS][parts];
    for (int h = 0; h < count; h++)
        for (int i = 0; i < parts; i++) sum[h][i] = splat(0);
    for (int t = 0; t < length; t++) {
        int64_t at = (int64_t)(blocks[t / block] * block + t % block) * stride;
        for (int i = 0; i < parts; i++) {
            lanes value = load(v, at + i * LANES, bf16);
            for (int h = 0; h < count; h++) sum[h][i] += scores[h * width + t] * value;
        }
    }
    for (int h = 0; h < count; h++) {
        lanes share = splat(1.0f / lane_sum(total[h]));
        for (int i = 0; i < parts; i++) store(out, h * dim + i * LANES, sum[h][i] * share, bf16);
    }
}

// One compiled copy for each head size that unrolls well, and one for the others.
#define COPY(name, count, dim, bf16)                                                                                  \
    static void name(const void *q, const void *k, const void *v, void *out, const int32_t *blocks, int length,       \
                     int block, int64_t stride, float scaling, float *scores, int heads, int size) {                  \
        attend(q, k, v, out, blocks, length, block, stride, scaling, scores, count, dim, bf16);                       \
    }
COPY(attend_4_64_bf16, 4, 64, 1)
COPY(attend_4_64_f32, 4, 64, 0)
COPY(attend_4_128_bf16, 4, 128, 1)
COPY(attend_4_128_f32, 4, 128, 0)
COPY(attend_any_bf16, heads, size, 1)
COPY(attend_any_f32, heads, size, 0)

// q, out [rows, kv_heads * per_kv * dim]; pools [slots, kv_heads * dim] of one layer; row r sees `lengths[r]` tokens
// in blocks[starts[r]...], none: its output is zero. `scores` FP32 [threads, HEADS * longest rounded up to 16].
// Rows of one thread are interleaved with the others', because neighbours are of like length.
void paged_attention(const char *q, const char *k, const char *v, char *out, const int32_t *blocks,
                     const int32_t *starts, const int32_t *lengths, float *scores, int64_t scores_stride, int rows,
                     int kv_heads, int per_kv, int dim, int block, float scaling, int bf16, int threads) {
    const int size = bf16 ? 2 : 4;
    const int64_t width = (int64_t)kv_heads * per_kv * dim;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int me = 0;
#ifdef _OPENMP
        extern int omp_get_thread_num(void);
        me = omp_get_thread_num();
#endif
        float *mine = scores + me * scores_stride;
#pragma omp for schedule(dynamic, 2)
        for (int task = 0; task < rows * kv_heads; task++) {
            const int row = task / kv_heads, kv = task % kv_heads;
            char *to = out + (row * width + (int64_t)kv * per_kv * dim) * size;
            if (!lengths[row]) {
                memset(to, 0, (size_t)per_kv * dim * size);
                continue;
            }
            const char *from = q + (row * width + (int64_t)kv * per_kv * dim) * size;
            const int64_t head = (int64_t)kv * dim * size;
            for (int h = 0; h < per_kv; h += HEADS) {
                const int count = per_kv - h < HEADS ? per_kv - h : HEADS;
                const int64_t at = (int64_t)h * dim * size;
                void (*run)(const void *, const void *, const void *, void *, const int32_t *, int, int, int64_t, float,
                            float *, int, int) = bf16 ? attend_any_bf16 : attend_any_f32;
                if (count == HEADS && dim == 64) run = bf16 ? attend_4_64_bf16 : attend_4_64_f32;
                if (count == HEADS && dim == 128) run = bf16 ? attend_4_128_bf16 : attend_4_128_f32;
                run(from + at, k + head, v + head, to + at, blocks + starts[row], lengths[row], block,
                    (int64_t)kv_heads * dim, scaling, mine, count, dim);
            }
        }
    }
}
