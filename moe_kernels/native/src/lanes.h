// Sixteen FP32 lanes, and BF16 or FP32 memory read into and written from them.
// GCC's and Clang's vector extensions: the compiler makes AVX-512, AVX2 or NEON of them.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(64)));
typedef int32_t ilanes __attribute__((vector_size(64)));
typedef uint32_t ulanes __attribute__((vector_size(64)));
typedef uint16_t hlanes __attribute__((vector_size(32)));

// Half to even; NaN becomes 0x7fc0, as c10::BFloat16 does it.
INLINE hlanes bf16_bits_of(lanes f) {
    ulanes u = (ulanes)f;
    ulanes rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    ulanes nan = (ulanes)(f != f);
    return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), hlanes);
}

INLINE lanes rounded_bf16(lanes f) { return (lanes)(__builtin_convertvector(bf16_bits_of(f), ulanes) << 16); }

INLINE lanes load_f32(const float *p) {
    lanes v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store_f32(float *p, lanes v) { memcpy(p, &v, sizeof v); }

INLINE lanes load_bf16(const uint16_t *p) {
    hlanes h;
    memcpy(&h, p, sizeof h);
    return (lanes)(__builtin_convertvector(h, ulanes) << 16);
}

// Element `at` of an array whose type is known when the caller is compiled.
INLINE lanes load(const void *p, int64_t at, int bf16) {
    return bf16 ? load_bf16((const uint16_t *)p + at) : load_f32((const float *)p + at);
}

INLINE void store(void *p, int64_t at, lanes v, int bf16) {
    if (bf16) {
        hlanes h = bf16_bits_of(v);
        memcpy((uint16_t *)p + at, &h, sizeof h);
    } else {
        store_f32((float *)p + at, v);
    }
}

// What a tensor of that type would hold after this value was stored.
INLINE lanes kept(lanes v, int bf16) { return bf16 ? rounded_bf16(v) : v; }

INLINE lanes splat(float f) { return (lanes){} + f; }

// `yes` where the mask `take` is set, `no` elsewhere.
INLINE lanes pick(ilanes take, lanes yes, lanes no) { return (lanes)(((ilanes)yes & take) | ((ilanes)no & ~take)); }

INLINE lanes larger(lanes a, lanes b) { return pick(a > b, a, b); }

INLINE float lane_max(lanes v) {
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
}

INLINE float lane_sum(lanes v) {
    float s = 0;
    for (int i = 0; i < LANES; i++) s += v[i];
    return s;
}
