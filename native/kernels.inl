// The kernels, written once over a vector type V. Included by one translation unit an instruction
// set, inside an unnamed namespace, so that no function compiled for one set can be linked into
// another. Nothing of the standard library is instantiated here for that reason.
//
// V has W lanes of 32 bits (W divides 16), H = 16 / W vectors cover a panel. Types: F floats, I
// int32, B the same register as bytes.

// Loops over the sums of a tile must be unrolled completely, or the sums are kept in memory;
// compilers do not unroll that far by themselves. HALFBYTE_SMALL: instrumented builds, in which the
// unrolled code takes minutes to compile.
#if defined(HALFBYTE_SMALL)
#define HB_UNROLL_FOR for
#define HB_INLINE inline
#define HB_INLINE_LAMBDA
#elif defined(_MSC_VER) && !defined(__clang__)
#define HB_UNROLL_FOR for
#define HB_INLINE __forceinline
#define HB_INLINE_LAMBDA
#else
#define HB_UNROLL_FOR _Pragma("GCC unroll 16") for
#define HB_INLINE inline __attribute__((always_inline))
#define HB_INLINE_LAMBDA __attribute__((always_inline))
#endif

template <int N>
struct Constant {
  static constexpr int value = N;
};

template <int I, int COUNT, class Body>
HB_INLINE void repeat(Body &&body) {
  if constexpr (I < COUNT) {
    body(Constant<I>());
    repeat<I + 1, COUNT>(body);
  }
}

#include "byte_decode.inl"
#include "float_decode.inl"
#include "scales.inl"
#include "products.inl"
#include "activations.inl"
#include "attention.inl"
#include "probes.inl"

template <class V>
constexpr Kernels table_of(const char *name) {
  return {name,
          V::unsigned_bytes,
          V::integer_tables,
          V::one_panel_tiles,
          V::i8,
          V::f32,
          decode_u8<V>,
          decode_f32<V>,
          decode_scales<V>,
          block_i8<V>,
          block_f32<V>,
          fuses_i8<V>,
          fuses_f32<V>,
          quantize<V>,
          sum_of<V>,
          sum_of_i8<V>,
          from_f16<V>,
          from_bf16<V>,
          to_f16<V>,
          to_bf16<V>,
          apply_gate<V>,
          dots<V>,
          weigh<V>,
          mix<V>,
          probe<V>,
          {}};
}
