/* C interface of the int4 library. No torch, no OpenMP at build time.
 *
 * Types: 0 = fp32, 1 = bf16. Strides count elements. Weights are in the layout of variant.h. */
#ifndef APPLIANCE_INT4_H
#define APPLIANCE_INT4_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#define INT4_API __attribute__((visibility("default")))

#define INT4_ABI 1
INT4_API int32_t int4_abi(void);

/* Name of variant `index`, the preferred one first, or null past the end; whether this machine can run it. */
INT4_API const char *int4_variant_name(int32_t index);
INT4_API int32_t int4_variant_runs(int32_t index);

/* The variant in use, and a switch to another one (0: this machine cannot run it, or no such name). */
INT4_API const char *int4_variant(void);
INT4_API int32_t int4_use(const char *name);

/* y[m, n] = x[m, k] * w^T (+ bias[n] bf16, may be null). */
INT4_API void int4_linear(const uint8_t *w, int64_t n, int64_t k, int32_t group, int32_t bits, const void *x,
                          int32_t x_type, int64_t x_stride, int64_t m, void *y, int32_t y_type, int64_t y_stride,
                          const uint16_t *bias);

/* Rows of the weight: out[count, k]. An id outside 0..n gives zeros. */
INT4_API void int4_rows(const uint8_t *w, int64_t n, int64_t k, int32_t group, int32_t bits, const int64_t *ids,
                        int64_t count, void *out, int32_t out_type);

/* Define the operators cpu_int4::* in the torch of this process. Null, or why not. */
INT4_API const char *int4_register_torch(void);

#ifdef __cplusplus
}
#endif
#endif
