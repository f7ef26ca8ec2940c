// E4M3 with a scale per group of columns, as moe_kernels.quant.fp8 defines it, to the bit.
//
// Compiled without contraction, like rows.c.
#include "lanes.h"

#define E4M3_MAX 448.0f

// FP32 within +-448 (or NaN) to E4M3, half to even; NaN keeps its sign.
INLINE ulanes e4m3_bits(lanes x) {
    const ulanes sign = (ulanes)x >> 24 & 0x80, size = (ulanes)x & 0x7fffffff;
    // Below 2^-6 the step is 2^-9: adding 2^14 leaves a multiple of it in the low bits of the sum.
    const ulanes small = (ulanes)((lanes)size + 16384.0f) - 0x46800000;
    const ulanes normal = (size + 0x7ffff + (size >> 20 & 1)) - (120u << 23);
    const ulanes is_small = (ulanes)(size < 0x3c800000), is_nan = (ulanes)(size > 0x7f800000);
    const ulanes bits = (small & is_small) | (normal >> 20 & ~is_small);
    return sign | (bits & ~is_nan) | (is_nan & 0x7f);
}

// E4M3 to FP32, exact.
INLINE lanes e4m3_value(ulanes q) {
    const ulanes sign = (q & 0x80) << 24, size = q & 0x7f;
    // As bits of a float with 120 less in its exponent, which multiplying by 2^120 mends, also for the small ones.
    const lanes value = (lanes)(size << 20) * 0x1p120f;
    const ulanes is_nan = (ulanes)(size == 0x7f);
    return (lanes)(((((ulanes)value & ~is_nan) | (is_nan & 0x7fc00000))) | sign);
}

// To +-448; NaN stays.
INLINE lanes clamped(lanes v) {
    v = pick(v > E4M3_MAX, splat(E4M3_MAX), v);
    return pick(v < -E4M3_MAX, splat(-E4M3_MAX), v);
}

typedef uint8_t blanes __attribute__((vector_size(16)));

INLINE void quantise_row(const void *x, int64_t at, uint8_t *q, float *scale, int64_t scale_step, int columns, int group,
                         float eps, int bf16) {
    for (int first = 0; first < columns; first += group) {
        lanes most = splat(0), nan = splat(0);
        for (int i = first; i < first + group; i += LANES) {
            lanes v = load(x, at + i, bf16);
            most = larger((lanes)((ulanes)v & 0x7fffffff), most);
            nan = (lanes)((ilanes)nan | (v != v));
        }
        float amax = lane_max(most), bad = 0;
        for (int l = 0; l < LANES; l++) bad = nan[l] != nan[l] ? nan[l] : bad;
        amax = amax > eps ? amax : eps;
        const float s = bad != bad ? NAN : amax / E4M3_MAX;
        scale[first / group * scale_step] = s;
        for (int i = first; i < first + group; i += LANES) {
            lanes v = load(x, at + i, bf16) / s;
            blanes b = __builtin_convertvector(e4m3_bits(clamped(v)), blanes);
            memcpy(q + i, &b, sizeof b);
        }
    }
}

// x [rows, columns] to q [rows, columns] and FP32 scales: scale (row, group) lies at row * row_step + group *
// group_step. The group is a multiple of 16 and divides the columns.
void quantise_fp8(const char *x, uint8_t *q, float *scale, int64_t row_step, int64_t group_step, int rows, int columns,
                  int group, float eps, int bf16, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && (int64_t)rows * columns > 4096) schedule(static)
    for (int row = 0; row < rows; row++) {
        const int64_t at = (int64_t)row * columns;
        if (bf16) quantise_row(x, at, q + at, scale + row * row_step, group_step, columns, group, eps, 1);
        else quantise_row(x, at, q + at, scale + row * row_step, group_step, columns, group, eps, 0);
    }
}

// The inverse, FP32 [rows, columns].
void dequantise_fp8(const uint8_t *q, const float *scale, float *out, int64_t row_step, int64_t group_step, int rows,
                    int columns, int group, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && (int64_t)rows * columns > 4096) schedule(static)
    for (int row = 0; row < rows; row++) {
        const int64_t at = (int64_t)row * columns;
        for (int i = 0; i < columns; i += LANES) {
            blanes b;
            memcpy(&b, q + at + i, sizeof b);
            store_f32(out + at + i, e4m3_value(__builtin_convertvector(b, ulanes)) *
                                        scale[row * row_step + i / group * group_step]);
        }
    }
}
