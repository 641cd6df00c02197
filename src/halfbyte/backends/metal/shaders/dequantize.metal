// Dense values, rounded once: a thread decodes eight codes.
//
//   out[i, :] = w[rows[i], :]        rows given: an embedding        out = w        rows absent: the whole weight

namespace halfbyte {

template <typename W, typename T, int op, bool gather>
inline void dequantize(W w, const device int* rows, float factor, float divisor, device T* out, uint count, uint k, uint2 at) {
  const uint unit = at.x, i = at.y;
  if (unit >= w.units || i >= count) return;
  const uint n = gather ? uint(rows[i]) : i;
  const eight_codes codes = w.load(n, unit);
  const ulong entry = w.entry(n, unit);
  const typename W::stored scale = w.scales[entry];
  const typename W::added addend = W::addend == NO_ADDEND ? typename W::added(0.0f) : w.addends[entry];
  device T* target = out + ulong(i) * k + 8 * unit;
  float v[8];
  w.decode.eight(codes, v);
  for (int j = 0; j < 8; ++j)
    if (8 * unit + j < k) target[j] = rounded<T>(with_factor<op>(scaled_exactly<W>(v[j], scale, addend), factor, divisor));
}

}  // namespace halfbyte
