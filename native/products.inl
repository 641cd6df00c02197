// Part of kernels.inl: products of one block of inputs. From the inside out: tile_i8 and tile_f32
// multiply MT tokens by NV vectors of rows, tiles_i8 and tiles_f32 MT tokens by all rows, blocks_i8
// and blocks_f32 all tokens by all rows, and block_i8 and block_f32 choose the template arguments.

// The entries of a tile's segments, from the buffer that `decode_scales` wrote.
template <class V, int NV>
struct BufferedScales {
  using F = typename V::F;
  const float *scales, *zeros, *biases;
  int64_t at[NV], step = 0;
  HB_INLINE BufferedScales(const Block &b, int v0)
      : scales(b.scales), zeros(b.zeros), biases(b.biases) {
    constexpr int H = kPanelRows / V::W;
    HB_UNROLL_FOR (int j = 0; j < NV; ++j) at[j] = (v0 + j) / H * b.s_stride + (v0 + j) % H * V::W;
  }
  HB_INLINE void load() {}
  HB_INLINE F scale(int j) const { return V::fload(scales + at[j] + step); }
  HB_INLINE F zero(int j) const { return V::fload(zeros + at[j] + step); }
  HB_INLINE F bias(int j) const { return V::fload(biases + at[j] + step); }
  HB_INLINE void advance() { step += kPanelRows; }
};

// The sums of a tile outside the loop over inputs: MT tokens by NV vectors of rows. Addresses are
// copied out of the Block, which the compiler must otherwise read again after every store.
template <class V, int MT, int NV, bool SPANS = false>
struct Tile {
  using F = typename V::F;
  // The total stays in registers from segment to segment where they suffice for it beside the sums
  // of the segment (and of the span).
  static constexpr bool in_registers = (SPANS ? 3 : 2) * MT * NV + NV <= V::registers - 6;
  const float *x_sum;  // [segment][MT], from the block's first segment on
  float *total;
  int64_t stride;
  F sums[in_registers ? MT : 1][in_registers ? NV : 1];

  HB_INLINE Tile(const Block &b, int t0, int v0)
      : x_sum(b.x_sum ? b.x_sum + b.entry(t0, MT) : nullptr),
        total(b.total + t0 * b.total_stride + v0 * V::W),
        stride(b.total_stride) {
    if constexpr (in_registers)
      HB_UNROLL_FOR (int t = 0; t < MT; ++t)
        HB_UNROLL_FOR (int j = 0; j < NV; ++j) sums[t][j] = V::fload(total + t * stride + j * V::W);
  }

  // total += bias * x_sum + (sum - zero * x_sum) * scale, where `sum` is segment s's sum of
  // products. With a single non-zero activation of 1 the result is the weight's exact value rounded
  // once: the difference and the first term are exact, and the last step is one fused multiply-add.
  template <class Scales>
  HB_INLINE void apply_scales(F (&sum)[MT][NV], int s, const Scales &scales) {
    const float *of = x_sum + s * MT;
    if (scales.zeros)
      each([&](int t, int j) HB_INLINE_LAMBDA {
        sum[t][j] = V::fnma(scales.zero(j), V::fset(of[t]), sum[t][j]);
      });
    if (scales.biases)
      each([&](int t, int j) HB_INLINE_LAMBDA {
        put(t, j,
            V::fma(sum[t][j], scales.scale(j), V::fma(scales.bias(j), V::fset(of[t]), at(t, j))));
      });
    else
      each([&](int t, int j)
               HB_INLINE_LAMBDA { put(t, j, V::fma(sum[t][j], scales.scale(j), at(t, j))); });
  }

  // add_segment: part += (sum - zero * x_sum) * scale, in units of the activations' scale.
  // add_span, after the span's last segment: total += part * x_scale. With a single non-zero
  // activation everything before the product with x_scale is exact; only weights for which this is
  // true have spans of several segments.
  template <class Scales>
  HB_INLINE void add_segment(F (&part)[MT][NV], F (&sum)[MT][NV], int s, const Scales &scales) {
    const float *of = x_sum + s * MT;
    if (scales.zeros)
      each([&](int t, int j) HB_INLINE_LAMBDA {
        sum[t][j] = V::fnma(scales.zero(j), V::fset(of[t]), sum[t][j]);
      });
    each([&](int t, int j)
             HB_INLINE_LAMBDA { part[t][j] = V::fma(sum[t][j], scales.scale(j), part[t][j]); });
  }
  HB_INLINE void add_span(F (&part)[MT][NV], const float *x_scale) {
    each([&](int t, int j) HB_INLINE_LAMBDA {
      put(t, j, V::fma(part[t][j], V::fset(x_scale[t]), at(t, j))), part[t][j] = V::fzero();
    });
  }

  HB_INLINE F at(int t, int j) const {
    if constexpr (in_registers)
      return sums[t][j];
    else
      return V::fload(total + t * stride + j * V::W);
  }
  HB_INLINE void put(int t, int j, F now) {
    if constexpr (in_registers)
      sums[t][j] = now;
    else
      V::fstore(total + t * stride + j * V::W, now);
  }
  template <class Body>
  static HB_INLINE void each(Body &&body) {
    HB_UNROLL_FOR (int j = 0; j < NV; ++j)
      HB_UNROLL_FOR (int t = 0; t < MT; ++t) body(t, j);
  }

  HB_INLINE void finish() {
    if constexpr (in_registers)
      HB_UNROLL_FOR (int t = 0; t < MT; ++t)
        HB_UNROLL_FOR (int j = 0; j < NV; ++j) V::fstore(total + t * stride + j * V::W, sums[t][j]);
  }
};

// Source of a tile's rows: a buffer of decoded codes, or the planes of a width, with a table or
// without. UNROLL inputs are unrolled. A segment is a whole number of iterations, or a SINGLE one,
// compiled without a loop: between two loops compilers copy the sums between registers.
template <int UNROLL, int BITS, bool TABLE = false, bool SINGLE = false>
struct FromPlanes {
  static constexpr int unroll = UNROLL, bits = BITS;
  static constexpr bool table = TABLE, fused = true, single = SINGLE;
};
template <int UNROLL, bool SINGLE = false>
struct FromBuffer {
  static constexpr int unroll = UNROLL, bits = 0;
  static constexpr bool table = false, fused = false, single = SINGLE;
};

template <class V, class Source>
HB_INLINE auto decoder_of(const Weight &w) {
  if constexpr (Source::fused)
    return FloatDecoder<V, Source::bits, Source::table>(w);
  else
    return 0;
}

// Source of a tile's scales.
template <class V, int MT, int NV, class Source>
HB_INLINE auto scales_of(const Block &b, int v0) {
  if constexpr (Source::fused && MT <= kFewTokens)
    return PanelScales<V, NV>(*b.weight, b.panel, v0, b.unit, b.one_panel);
  else
    return BufferedScales<V, NV>(b, v0);
}

// MT tokens by NV vectors of rows, int8 activations. STEPS: vectors of 16-bit products that are
// added before the sum is widened to 32 bits; 0: V::dot, which adds in 32 bits. SPANS: one scale of
// the activations covers several segments. With STEPS the 32-bit sums of a single iteration begin
// where its first 16-bit sums end, so that the two need few registers at the same time.
template <class V, int MT, int NV, int STEPS, class Source, bool SPANS>
void tile_i8(const Block &b, int t0, int v0) {
  using B = typename V::B;
  constexpr int H = kPanelRows / V::W, bits = Source::bits;
  constexpr int inputs = Source::unroll;
  constexpr bool starts_late = STEPS != 0 && Source::single;
  static_assert(inputs % (4 * (STEPS ? STEPS : 1)) == 0 &&
                    (!Source::fused || inputs % unit_inputs(bits) == 0),
                "an iteration is whole units");
  const uint8_t *w[NV];
  Planes planes[NV];
  HB_UNROLL_FOR (int j = 0; j < NV; ++j) {
    const int panel = (v0 + j) / H;
    if constexpr (Source::fused)
      planes[j] = Planes::at(*b.weight, b.panel + panel, b.k0);
    else
      w[j] = (const uint8_t *)b.w + panel * b.w_stride + (v0 + j) % H * V::W * 4;
  }
  const auto table =
      byte_table<V>(*b.weight, Source::table ? buffer_offset(*b.weight, V::unsigned_bytes) : 0);
  const B sign = V::bset(bits == 8 && !V::unsigned_bytes ? 0x80 : 0);
  const int8_t *x = (const int8_t *)b.x + t0 * b.x_stride;
  const int32_t *x_start = b.x_start + b.entry(t0, MT);
  const float *x_scale = b.x_scale + b.entry(t0, MT);
  using Sums = Tile<V, MT, NV, SPANS>;
  Sums tile(b, t0, v0);
  auto scales = scales_of<V, MT, NV, Source>(b, v0);
  const int segments = b.segments, iterations = b.seg / inputs, span = b.span;
  const int prefetch_bytes = b.prefetch_bytes;
  typename V::F part[MT][NV];  // of a span's segments
  if constexpr (SPANS) Sums::each([&](int t, int j) HB_INLINE_LAMBDA { part[t][j] = V::fzero(); });
  int left = span;
  for (int s = 0; s < segments; ++s) {
    typename V::I acc[MT][NV];
    typename V::P pairs[MT][NV];
    if constexpr (!starts_late)
      HB_UNROLL_FOR (int t = 0; t < MT; ++t)
        HB_UNROLL_FOR (int j = 0; j < NV; ++j) acc[t][j] = V::iset(x_start[s * MT + t]);
    int iteration = 0;
    do {
      if constexpr (Source::fused)
        if (prefetch_bytes)
          for (int j = 0; j < NV; j += H) planes[j].template prefetch<bits, inputs>(prefetch_bytes);
      repeat<0, inputs / 4>([&](auto index) HB_INLINE_LAMBDA {
        constexpr int i = decltype(index)::value;
        B rows[NV];
        HB_UNROLL_FOR (int j = 0; j < NV; ++j) {
          if constexpr (Source::fused) {
            rows[j] = code_at<V, bits, i>(planes[j], (v0 + j) % H * V::W * 4);
            if constexpr (Source::table) rows[j] = V::lookup(table, rows[j]);
            if constexpr (bits == 8 && !V::unsigned_bytes) rows[j] = V::bxor(rows[j], sign);
          } else {
            rows[j] = V::bload(w[j] + i * kUnitBytes);
          }
        }
        HB_UNROLL_FOR (int t = 0; t < MT; ++t) {
          const auto four = V::broadcast4(x + (i * MT + t) * 4);
          HB_UNROLL_FOR (int j = 0; j < NV; ++j) {
            if constexpr (STEPS == 0)
              acc[t][j] = V::dot(acc[t][j], rows[j], four);
            else if constexpr (i % (STEPS ? STEPS : 1) == 0)
              pairs[t][j] = V::products(rows[j], four);
            else
              pairs[t][j] = V::more(pairs[t][j], rows[j], four);
          }
        }
        // Nested, since Clang looks V::fold up where a condition depends on i.
        if constexpr (STEPS != 0)
          if constexpr ((i + 1) % (STEPS ? STEPS : 1) == 0)
            HB_UNROLL_FOR (int t = 0; t < MT; ++t)
              HB_UNROLL_FOR (int j = 0; j < NV; ++j) {
                if constexpr (starts_late && i < STEPS)
                  acc[t][j] = V::widen(pairs[t][j]);
                else
                  acc[t][j] = V::add(acc[t][j], V::widen(pairs[t][j]));
              }
      });
      HB_UNROLL_FOR (int j = 0; j < NV; ++j) {
        if constexpr (Source::fused)
          planes[j].advance(inputs);
        else
          w[j] += inputs / 4 * kUnitBytes;
      }
      x += MT * inputs;
    } while (!Source::single && ++iteration < iterations);
    if constexpr (starts_late)
      HB_UNROLL_FOR (int t = 0; t < MT; ++t)
        HB_UNROLL_FOR (int j = 0; j < NV; ++j)
          acc[t][j] = V::add(acc[t][j], V::iset(x_start[s * MT + t]));
    typename V::F sum[MT][NV];
    scales.load();
    if constexpr (!SPANS) {
      HB_UNROLL_FOR (int t = 0; t < MT; ++t) {
        const typename V::F by = V::fset(x_scale[s * MT + t]);
        HB_UNROLL_FOR (int j = 0; j < NV; ++j) sum[t][j] = V::fmul(V::cvt(acc[t][j]), by);
      }
      tile.apply_scales(sum, s, scales);
    } else {
      Sums::each([&](int t, int j) HB_INLINE_LAMBDA { sum[t][j] = V::cvt(acc[t][j]); });
      tile.add_segment(part, sum, s, scales);
      if (--left == 0 || s + 1 == segments) tile.add_span(part, x_scale + s * MT), left = span;
    }
    scales.advance();
  }
  tile.finish();
}

// MT tokens by NV vectors of rows, float activations.
template <class V, int MT, int NV, class Source>
void tile_f32(const Block &b, int t0, int v0) {
  using F = typename V::F;
  constexpr int H = kPanelRows / V::W, bits = Source::bits;
  constexpr int inputs = Source::unroll;
  const float *w[NV];
  Planes planes[NV];
  HB_UNROLL_FOR (int j = 0; j < NV; ++j) {
    const int panel = (v0 + j) / H;
    if constexpr (Source::fused)
      planes[j] = Planes::at(*b.weight, b.panel + panel, b.k0);
    else
      w[j] = (const float *)((const char *)b.w + panel * b.w_stride) + (v0 + j) % H * V::W;
  }
  const auto decode = decoder_of<V, Source>(*b.weight);
  const float *x = (const float *)b.x + t0 * b.x_stride;
  Tile<V, MT, NV> tile(b, t0, v0);
  auto scales = scales_of<V, MT, NV, Source>(b, v0);
  const int segments = b.segments, iterations = b.seg / inputs, prefetch_bytes = b.prefetch_bytes;
  for (int s = 0; s < segments; ++s) {
    F acc[MT][NV];
    HB_UNROLL_FOR (int t = 0; t < MT; ++t)
      HB_UNROLL_FOR (int j = 0; j < NV; ++j) acc[t][j] = V::fzero();
    for (int iteration = 0; iteration < iterations; ++iteration) {
      if constexpr (Source::fused)
        if (prefetch_bytes)
          for (int j = 0; j < NV; j += H) planes[j].template prefetch<bits, inputs>(prefetch_bytes);
      repeat<0, inputs / 4>([&](auto index) HB_INLINE_LAMBDA {
        constexpr int i = decltype(index)::value;
        typename V::I lanes[NV];
        if constexpr (Source::fused)
          HB_UNROLL_FOR (int j = 0; j < NV; ++j)
            lanes[j] = decode.template four<i>(planes[j], (v0 + j) % H * V::W * 4);
        repeat<0, 4>([&](auto byte) HB_INLINE_LAMBDA {
          constexpr int q = decltype(byte)::value;
          F rows[NV];
          HB_UNROLL_FOR (int j = 0; j < NV; ++j) {
            if constexpr (Source::fused)
              rows[j] = decode.template element<i, q>(lanes[j]);
            else
              rows[j] = V::fload(w[j] + (i * 4 + q) * kPanelRows);
          }
          HB_UNROLL_FOR (int t = 0; t < MT; ++t) {
            const F one = V::fset(x[(i * 4 + q) * MT + t]);
            HB_UNROLL_FOR (int j = 0; j < NV; ++j) acc[t][j] = V::fma(rows[j], one, acc[t][j]);
          }
        });
      });
      HB_UNROLL_FOR (int j = 0; j < NV; ++j) {
        if constexpr (Source::fused)
          planes[j].advance(inputs);
        else
          w[j] += inputs * kPanelRows;
      }
      x += MT * inputs;
    }
    scales.load();
    tile.apply_scales(acc, s, scales);
    scales.advance();
  }
  tile.finish();
}

// One token by one vector of rows, float activations, codes decoded in registers, MANY segments at
// a time: enough independent sums to hide latency, while memory is read in one stream. Each sum is
// computed in the same order as by tile_f32.
template <class V, int MANY, class Source>
void interleaved_f32(const Block &b, int v) {
  using F = typename V::F;
  constexpr int H = kPanelRows / V::W, bits = Source::bits, inputs = Source::unroll;
  const int lane = v % H * V::W * 4;
  Planes planes = Planes::at(*b.weight, b.panel + v / H, b.k0);
  const auto decode = decoder_of<V, Source>(*b.weight);
  const float *x = (const float *)b.x;
  Tile<V, 1, 1> tile(b, 0, v);
  PanelScales<V, 1> scales(*b.weight, b.panel, v, b.unit, false);
  const int segments = b.segments, seg = b.seg, iterations = seg / inputs,
            prefetch_bytes = b.prefetch_bytes;
  int s = 0;
  const auto next = [&](auto many) HB_INLINE_LAMBDA {
    constexpr int N = decltype(many)::value;
    F acc[N];
    Planes at[N];
    HB_UNROLL_FOR (int j = 0; j < N; ++j)
      acc[j] = V::fzero(), at[j] = planes, at[j].advance(j * seg);
    for (int iteration = 0; iteration < iterations; ++iteration) {
      if (prefetch_bytes)
        HB_UNROLL_FOR (int j = 0; j < N; ++j) at[j].template prefetch<bits, inputs>(prefetch_bytes);
      repeat<0, inputs / 4>([&](auto index) HB_INLINE_LAMBDA {
        constexpr int i = decltype(index)::value;
        typename V::I lanes[N];
        HB_UNROLL_FOR (int j = 0; j < N; ++j) lanes[j] = decode.template four<i>(at[j], lane);
        repeat<0, 4>([&](auto byte) HB_INLINE_LAMBDA {
          constexpr int q = decltype(byte)::value;
          HB_UNROLL_FOR (int j = 0; j < N; ++j)
            acc[j] = V::fma(decode.template element<i, q>(lanes[j]),
                            V::fset(x[j * seg + i * 4 + q]), acc[j]);
        });
      });
      HB_UNROLL_FOR (int j = 0; j < N; ++j) at[j].advance(inputs);
      x += inputs;
    }
    HB_UNROLL_FOR (int j = 0; j < N; ++j) {
      F sum[1][1] = {{acc[j]}};
      scales.load();
      tile.apply_scales(sum, s + j, scales);
      scales.advance();
    }
    planes.advance(N * seg), x += (N - 1) * seg, s += N;
  };
  while (s + MANY <= segments) next(Constant<MANY>());
  while (s < segments) next(Constant<1>());
  tile.finish();
}

template <class V, int MT, int NV, int STEPS, class Source, bool SPANS>
inline void tiles_with_spans(const Block &b, int t0) {
  constexpr int H = kPanelRows / V::W;
  int v = 0;
  for (; v + NV <= b.panels * H; v += NV) tile_i8<V, MT, NV, STEPS, Source, SPANS>(b, t0, v);
  if constexpr (NV > 1 && !Source::fused)  // a fused call has all of its panels
    for (; v < b.panels * H; ++v) tile_i8<V, MT, 1, STEPS, Source, SPANS>(b, t0, v);
}

template <class V, int MT, int NV, int STEPS, class Source>
inline void tiles_i8(const Block &b, int t0) {
  if constexpr (Source::bits <= 4)  // wider codes: one scale of the activations per segment
    if (b.span > 1) return tiles_with_spans<V, MT, NV, STEPS, Source, true>(b, t0);
  tiles_with_spans<V, MT, NV, STEPS, Source, false>(b, t0);
}

// Tokens from t on, fewer than the largest tile: in tiles of four, two and one, each with its
// number of vectors of rows.
template <class V, int FOUR, int TWO, int ONE, int STEPS, class Source>
void last_i8(const Block &b, int t) {
  if constexpr (Source::fused || V::i8.tokens > 4)
    for (; t + 4 <= b.tokens; t += 4) tiles_i8<V, 4, FOUR, STEPS, Source>(b, t);
  for (; t + 2 <= b.tokens; t += 2) tiles_i8<V, 2, TWO, STEPS, Source>(b, t);
  for (; t < b.tokens; ++t) tiles_i8<V, 1, ONE, STEPS, Source>(b, t);
}

template <class V, int STEPS, class Source>
void blocks_i8(const Block &b) {
  int t = 0;
  const auto tiles_of = [&](auto tile) HB_INLINE_LAMBDA {
    constexpr int MT = decltype(tile)::value;
    for (; t + MT <= b.tokens; t += MT) {
      if constexpr (!Source::fused) prefetch_next(b, t, t + MT);
      tiles_i8<V, MT, V::i8.vectors, STEPS, Source>(b, t);
    }
  };
  if constexpr (!Source::fused || V::i8.fused_tokens >= V::i8.tokens) {
    if (V::i8.tokens <= b.largest) tiles_of(Constant<V::i8.tokens>());
    if constexpr (V::i8.alternative != 0)
      if (V::i8.alternative == b.largest) tiles_of(Constant<V::i8.alternative>());
  }
  if constexpr (V::i8.tokens > 8)
    for (; b.largest > 8 && t + 8 <= b.tokens; t += 8)
      tiles_i8<V, 8, V::i8.vectors, STEPS, Source>(b, t);
  if constexpr (Source::fused && V::one_panel_tiles)
    if (b.one_panel) return last_i8<V, 1, 1, 1, STEPS, Source>(b, t);
  // Super-scales and minima are two more streams for each panel: with more panels the hardware
  // prefetcher does not follow all streams.
  if constexpr (Source::fused && V::i8.vectors_minima < V::i8.vectors_one)
    if (b.weight->super_mins || (V::narrow_supers && b.weight->super_scales))
      return last_i8<V, V::i8.vectors_four, V::i8.vectors_two, V::i8.vectors_minima, STEPS, Source>(
          b, t);
  last_i8<V, V::i8.vectors_four, V::i8.vectors_two, V::i8.vectors_one, STEPS, Source>(b, t);
}

// The widths that fused tiles decode in registers; the others are decoded into the buffer.
template <class V>
bool fuses_i8(const Weight &w) {
  if (!V::fuses) return false;
  if (w.element == Element::table) return w.bits == 4 && w.integral && w.seg % 16 == 0;
  const bool has = w.bits != 1 && w.bits != 7, halves = w.bits == 2 || w.bits == 6;
  return w.element == Element::integer && has && w.seg % (halves ? 16 : 32) == 0;
}

template <class V, int STEPS>
void buffered_i8(const Block &b) {
  if (b.seg == 64) return blocks_i8<V, STEPS, FromBuffer<64, true>>(b);
  if (b.seg == 32) return blocks_i8<V, STEPS, FromBuffer<32, true>>(b);
  if constexpr (STEPS <= 4)
    if (b.seg == 16) return blocks_i8<V, STEPS, FromBuffer<16, true>>(b);
  if (b.seg % 64 == 0) return blocks_i8<V, STEPS, FromBuffer<64>>(b);
  if (b.seg % 32 == 0) return blocks_i8<V, STEPS, FromBuffer<32>>(b);
  if constexpr (STEPS <= 4)
    if (b.seg % 16 == 0) return blocks_i8<V, STEPS, FromBuffer<16>>(b);
  if constexpr (STEPS <= 2) blocks_i8<V, STEPS, FromBuffer<8>>(b);
}

// STEPS of an instruction set: `most` where it adds in 16 bits, else 0. A step adds two products of
// a byte w and an activation, at most 2 * w * 127; the sum of all steps must stay below 2^15.
template <class V>
constexpr int steps(int most) {
  return V::sums_in_16_bits ? most : 0;
}

template <class V>
void planes_i8(const Block &b) {
  constexpr int two = steps<V>(2), four = steps<V>(4), eight = steps<V>(8);
  if (b.weight->element == Element::table) {
    if (V::sums_in_16_bits && b.widest > 32) return blocks_i8<V, 0, FromPlanes<16, 4, true>>(b);
    if (b.seg == 32) return blocks_i8<V, four, FromPlanes<32, 4, true, true>>(b);
    if (b.seg == 16) return blocks_i8<V, four, FromPlanes<16, 4, true, true>>(b);
    if (b.seg % 32 == 0) return blocks_i8<V, four, FromPlanes<32, 4, true>>(b);
    return blocks_i8<V, four, FromPlanes<16, 4, true>>(b);
  }
  switch (b.weight->bits) {
    case 2:
      return blocks_i8<V, four, FromPlanes<16, 2>>(b);
    case 3:
      return blocks_i8<V, eight, FromPlanes<32, 3>>(b);
    case 4:
      return b.seg == 32 ? blocks_i8<V, eight, FromPlanes<32, 4, false, true>>(b)
                         : blocks_i8<V, eight, FromPlanes<32, 4>>(b);
    case 5:
      return blocks_i8<V, four, FromPlanes<32, 5>>(b);
    case 6:
      return blocks_i8<V, two, FromPlanes<16, 6>>(b);
    default:
      return blocks_i8<V, 0, FromPlanes<32, 8>>(b);
  }
}

template <class V>
void block_i8(const Block &b) {
  if constexpr (V::fuses)
    if (!b.w) return planes_i8<V>(b);
  if (b.widest <= 16 && b.seg % 32 == 0) return buffered_i8<V, steps<V>(8)>(b);
  if (b.widest <= 32 && b.seg % 16 == 0) return buffered_i8<V, steps<V>(4)>(b);
  if (b.widest <= 64) return buffered_i8<V, steps<V>(2)>(b);
  if (b.widest <= 127) return buffered_i8<V, steps<V>(1)>(b);
  buffered_i8<V, 0>(b);
}

template <class V, int MT, int NV, class Source>
inline void tiles_f32(const Block &b, int t0) {
  constexpr int H = kPanelRows / V::W;
  int v = 0;
  for (; v + NV <= b.panels * H; v += NV) tile_f32<V, MT, NV, Source>(b, t0, v);
  if constexpr (NV > 1 && !Source::fused)
    for (; v < b.panels * H; ++v) tile_f32<V, MT, 1, Source>(b, t0, v);
}

template <class V, class Source>
void blocks_f32(const Block &b) {
  int t = 0;
  if constexpr (!Source::fused || V::f32.fused_tokens >= V::f32.tokens)
    for (; V::f32.tokens <= b.largest && t + V::f32.tokens <= b.tokens; t += V::f32.tokens) {
      if constexpr (!Source::fused) prefetch_next(b, t, t + V::f32.tokens);
      tiles_f32<V, V::f32.tokens, V::f32.vectors, Source>(b, t);
    }
  if constexpr (V::f32.tokens > 8)
    for (; b.largest > 8 && t + 8 <= b.tokens; t += 8)
      tiles_f32<V, 8, V::f32.vectors, Source>(b, t);
  if constexpr (Source::fused && V::one_panel_tiles)
    if (b.one_panel && b.tokens == 1) {
      // With 8-bit codes one segment uses the memory bandwidth, and the streams of four are more
      // than the prefetcher follows.
      for (int v = 0; v < b.panels * (kPanelRows / V::W); ++v)
        interleaved_f32<V, Source::bits == 8 ? 1 : 4, Source>(b, v);
      return;
    }
  if constexpr (Source::fused || V::f32.tokens > 4)
    for (; t + 4 <= b.tokens; t += 4) tiles_f32<V, 4, V::f32.vectors_four, Source>(b, t);
  for (; t + 2 <= b.tokens; t += 2) tiles_f32<V, 2, V::f32.vectors_two, Source>(b, t);
  for (; t < b.tokens; ++t) tiles_f32<V, 1, V::f32.vectors_one, Source>(b, t);
}

template <class V>
bool fuses_f32(const Weight &w) {
  if (!V::fuses) return false;
  if (w.element == Element::table)
    return w.bits == 4 && (w.integral || !V::integer_tables) && w.seg % 16 == 0;
  const bool has = w.bits != 1 && w.bits != 7, odd = w.bits & 1;
  return w.element == Element::integer && has && w.seg % (odd ? 32 : 16) == 0;
}

template <class V>
void planes_f32(const Block &b) {
  if (b.weight->element == Element::table) return blocks_f32<V, FromPlanes<16, 4, true>>(b);
  switch (b.weight->bits) {
    case 2:
      return blocks_f32<V, FromPlanes<16, 2>>(b);
    case 3:
      return blocks_f32<V, FromPlanes<32, 3>>(b);
    case 4:
      return blocks_f32<V, FromPlanes<16, 4>>(b);
    case 5:
      return blocks_f32<V, FromPlanes<32, 5>>(b);
    case 6:
      return blocks_f32<V, FromPlanes<16, 6>>(b);
    default:
      if (b.weight->offset == 128 || V::blends) return blocks_f32<V, FromPlanes<16, 8>>(b);
      // TABLE at 8 bits is no table: FloatDecoder then adds 128 - offset.
      return blocks_f32<V, FromPlanes<16, 8, true>>(b);
  }
}

template <class V>
void block_f32(const Block &b) {
  if constexpr (V::fuses)
    if (!b.w) return planes_f32<V>(b);
  blocks_f32<V, FromBuffer<4>>(b);
}
