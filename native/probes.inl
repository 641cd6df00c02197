// Part of kernels.inl: peak rates of the instruction set, with which `halfbyte bench` compares
// products.

// Twelve independent sums hide the latency of a fused multiply-add (4 to 5 cycles, two a cycle) and
// fit sixteen registers.
constexpr int kChains = 12;

// Returns bytes read, or float32 or 8-bit operations done; a product and a sum are two. `data` has
// `count` bytes to read, or 512 from which operands come; `count` is then the number of rounds.
template <class V>
double probe(Probe kind, const uint8_t *data, int64_t count) {
  constexpr int bytes = (int)sizeof(typename V::B);
  if (kind == Probe::read) {
    constexpr int streams = 4;  // as a product of few tokens reads: four panels at a time
    typename V::B seen[streams];
    for (int s = 0; s < streams; ++s) seen[s] = V::bset(0);
    const int64_t part = count / streams / 256 * 256;
    for (int64_t at = 0; at < part; at += 256)
      for (int s = 0; s < streams; ++s) {
        const uint8_t *p = data + s * part + at;
        HB_UNROLL_FOR (int i = 0; i < 256; i += bytes) seen[s] = V::bor(seen[s], V::bload(p + i));
      }
    uint8_t sink[streams * bytes];
    for (int s = 0; s < streams; ++s) V::bstore(sink + s * bytes, seen[s]);
    volatile uint8_t keep = sink[0] | sink[streams * bytes - 1];
    (void)keep;
    return (double)(part * streams);
  }
  if (kind == Probe::fma) {
    typename V::F sums[kChains];
    const typename V::F w = V::fset(0.5f), x = V::fset((float)data[0]);
    HB_UNROLL_FOR (int c = 0; c < kChains; ++c) sums[c] = V::fset((float)c);
    for (int64_t i = 0; i < count; ++i) {
      HB_UNROLL_FOR (int c = 0; c < kChains; ++c) sums[c] = V::fma(sums[c], w, x);
    }
    float sink[kPanelRows];
    for (int c = 1; c < kChains; ++c) sums[0] = V::fadd(sums[0], sums[c]);
    V::fstore(sink, sums[0]);
    volatile float keep = sink[0];
    (void)keep;
    return 2.0 * V::W * kChains * (double)count;
  }
  // One operand is loaded in each round, or a compiler would hoist the products out of the loop.
  const auto x = V::broadcast4((const int8_t *)data + 256);
  volatile int32_t keep;
  if constexpr (V::sums_in_16_bits) {  // as in the tiles: widened to 32 bits once in many products
    typename V::P sums[kChains];
    HB_UNROLL_FOR (int c = 0; c < kChains; ++c) sums[c] = V::products(V::bset(c), x);
    for (int64_t i = 0; i < count; ++i) {
      const typename V::B w = V::bload(data + (i & 3) * 64);
      HB_UNROLL_FOR (int c = 0; c < kChains; ++c) sums[c] = V::more(sums[c], w, x);
    }
    typename V::I all = V::iset(0);
    for (int c = 0; c < kChains; ++c) all = V::add(all, V::widen(sums[c]));
    float sink[kPanelRows];
    V::fstore(sink, V::cvt(all));
    keep = (int32_t)sink[0];
  } else {
    typename V::I sums[kChains];
    HB_UNROLL_FOR (int c = 0; c < kChains; ++c) sums[c] = V::iset(c);
    for (int64_t i = 0; i < count; ++i) {
      const typename V::B w = V::bload(data + (i & 3) * 64);
      HB_UNROLL_FOR (int c = 0; c < kChains; ++c) sums[c] = V::dot(sums[c], w, x);
    }
    int32_t lanes = 0;
    for (int c = 0; c < kChains; ++c) {
      float sink[kPanelRows];
      V::fstore(sink, V::cvt(sums[c]));
      lanes |= (int32_t)sink[0];
    }
    keep = lanes;
  }
  (void)keep;
  return 2.0 * 4 * V::W * kChains * (double)count;
}
