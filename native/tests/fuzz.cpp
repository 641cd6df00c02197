// libFuzzer's program for the native core, built by Clang with AddressSanitizer and
// UndefinedBehaviorSanitizer (`make fuzz-native`).
//
// An input draws one case on one instruction set of this machine: a weight in panel order or in
// canonical order with the products, rows and codes of it; a transpose; the merges of a vocabulary;
// a decoding step. Every array ends at an unreadable page. A crash is also: codes that do not
// return, a one-hot product that is not the decoded row, a row that depends on its batch, a
// transpose or merges other than a plain loop gives. With scales and activations of any bits (NaN,
// infinite, subnormal) only memory is watched.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../dispatch.h"
#include "../linear.h"
#include "../merges.h"
#include "../pool.h"
#include "../step.h"
#include "../transpose.h"

using namespace halfbyte;

namespace {

uint64_t state = 1;
uint32_t random_bits() {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (uint32_t)(state >> 16);
}
double uniform() { return random_bits() / 4294967296.0; }
float normal() { return (float)(uniform() + uniform() + uniform() + uniform() - 2.0); }

#include "made_weight.inl"

// The bytes of an input decide the structure of a case; contents are random numbers that begin from
// all of its bytes.
class Input {
 public:
  Input(const uint8_t *data, size_t size) : data_(data), size_(size) {
    state = 88172645463325252ull;
    for (size_t i = 0; i < size; ++i) state = (state ^ data[i]) * 0x100000001b3ull | 1;
  }
  int64_t below(int64_t end) {
    uint32_t word = 0;
    for (int i = 0; i < (end > 256 ? 2 : 1); ++i) word = word << 8 | byte();
    return (int64_t)word % end;
  }
  bool flag() { return byte() & 1; }
  template <class T, size_t count>
  T any(const T (&from)[count]) {
    return from[below((int64_t)count)];
  }

 private:
  uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  const uint8_t *data_;
  size_t size_, at_ = 0;
};

void require(bool holds, const char *what) {
  if (holds) return;
  std::fprintf(stderr, "halfbyte_fuzz: %s\n", what);
  std::abort();
}

int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }
const Dtype kDtypes[] = {Dtype::f32, Dtype::f16, Dtype::bf16};
const Activations kClasses[] = {Activations::exact, Activations::int8, Activations::int8_token};

void fill_any(void *to, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) ((uint8_t *)to)[i] = (uint8_t)random_bits();
}

// Rows, embeddings and products of a weight. `plain`: its numbers are finite.
void use(Input &in, const Weight &w, bool plain) {
  Guarded dense((size_t)(w.n * w.k) * 4);
  dequantize(w, 0, w.n, Dtype::f32, dense.as());
  const Dtype dtype = in.any(kDtypes);
  if (w.n > 0) {
    const int64_t first = in.below(w.n), last = first + in.below(w.n - first + 1);
    Guarded rows((size_t)((last - first) * w.k * size_of(dtype)));
    dequantize(w, first, last, dtype, rows.as());
    std::vector<int64_t> ids((size_t)in.below(70));
    for (int64_t &id : ids) id = (int64_t)(random_bits() % (uint32_t)w.n);
    Guarded found((size_t)((int64_t)ids.size() * w.k * size_of(dtype)));
    embedding(w, ids.data(), (int64_t)ids.size(), dtype, found.as());
  }
  const Activations mode = in.any(kClasses);
  const int64_t m = in.below(40);
  const bool columns = in.flag(), any = in.flag(), biased = in.flag();
  Matrix x;
  x.dtype = in.any(kDtypes), x.rows = m;
  const int64_t gap = in.below(5);
  x.row_stride = columns ? 1 : w.k + gap, x.column_stride = columns ? m + gap : 1;
  const int64_t reach = m && w.k ? (m - 1) * x.row_stride + (w.k - 1) * x.column_stride + 1 : 0;
  Guarded xs((size_t)(reach * size_of(x.dtype))), bias((size_t)w.n * 4);
  fill_any(xs.as(), xs.bytes());
  for (int64_t i = 0; i < reach && !any; ++i) {
    const uint32_t bits = random_bits();  // 0.5 to 2 in float16, about 1 in bfloat16
    if (x.dtype == Dtype::f32)
      xs.as<float>()[i] = normal();
    else
      xs.as<uint16_t>()[i] =
          (uint16_t)(x.dtype == Dtype::f16 ? 0x3800 | (bits & 0x87ff) : 0x3f00 | (bits & 0x80ff));
  }
  for (int64_t i = 0; i < w.n; ++i) bias.as<float>()[i] = normal();
  x.data = xs.as();
  const Dtype to = in.any(kDtypes);
  const int64_t row = w.n * size_of(to);
  Guarded out((size_t)(m * row)), one((size_t)row);
  linear(w, x, biased ? bias.as<float>() : nullptr, mode, to, out.as());
  if (!plain || any || m == 0 || w.k == 0) return;
  const int64_t t = in.below(m);
  Matrix alone = x;
  alone.rows = 1, alone.data = xs.as() + t * x.row_stride * size_of(x.dtype);
  linear(w, alone, biased ? bias.as<float>() : nullptr, mode, to, one.as());
  require(!std::memcmp(one.as(), out.as() + t * row, (size_t)row), "a row depends on its batch");
  Guarded hot((size_t)w.k * 4), y((size_t)w.n * 4);
  const int64_t j = in.below(w.k);
  std::fill(hot.as<float>(), hot.as<float>() + w.k, 0.0f);
  hot.as<float>()[j] = 1.0f;
  Matrix single;
  single.data = hot.as(), single.rows = 1, single.row_stride = w.k;
  linear(w, single, nullptr, mode, Dtype::f32, y.as());
  for (int64_t r = 0; r < w.n; ++r)
    require(y.as<float>()[r] == dense.as<float>()[r * w.k + j],
            "a one-hot product is not the decoded row");
}

void panel_order(Input &in) {
  Structure s = in.any(kStructures);
  const bool floats = s.scale == Scale::f16 || s.scale == Scale::bf16 || s.scale == Scale::f32;
  const int64_t n = in.below(72);
  int64_t k = in.below(700);
  if (s.super) {
    k = s.super * in.below(4);
  } else {
    if (in.flag()) s.group = 1 + (int)in.below(128);
    if (s.element == Element::integer && !s.biases) s.zeros = in.flag();
    s.act_order = in.flag();
    s.global = s.scale != Scale::f32 && !s.biases && in.flag();  // as backends/cpu/pack.py allows
  }
  const auto made = make(s, n, k);
  const Weight &w = made->w;
  const bool any = in.flag();
  if (any && w.scales) {
    const int64_t bytes = s.scale == Scale::f32 ? 4 : floats ? 2 : 1;
    fill_any(const_cast<void *>(w.scales), (size_t)(w.panels() * w.groups * kPanelRows * bytes));
  }
  Guarded back((size_t)(n * w.row_bytes));
  unpack(w, back.as(), w.row_bytes);
  require(std::equal(made->codes.begin(), made->codes.end(), back.as()), "codes do not return");
  use(in, w, !any);
}

// A weight as a layout stores it; its fields are what packed_weight.cpp lets through.
void canonical_order(Input &in) {
  Made m;
  Weight &w = m.w;
  const Grouping groupings[] = {Grouping::row, Grouping::flat, Grouping::strided, Grouping::block};
  w.n = in.below(72), w.k = in.below(400), w.bits = 1 + (int)in.below(8);
  w.row_bytes = (w.k * w.bits + 7) / 8 + in.below(3);
  w.codes = m.room<uint8_t>(w.n * w.row_bytes);
  fill_any(const_cast<uint8_t *>(w.codes), (size_t)(w.n * w.row_bytes));
  double *values = m.room<double>((int64_t)1 << w.bits);
  for (int c = 0; c < 1 << w.bits; ++c) values[c] = c - w.bits;
  w.values = values;
  w.scale = (Scale)in.below(10);
  w.grouping = in.any(groupings);
  w.group_size = 1 + in.below(140),
  w.groups = (w.k + w.group_size - 1) / w.group_size + in.below(2);
  w.group_rows = 1 + in.below(20), w.first_row = in.below(9),
  w.total_rows = w.first_row + w.n + in.below(9);
  int64_t entries = w.n * w.groups;
  if (w.grouping == Grouping::flat)
    entries = ((w.first_row + w.n) * w.k + w.group_size - 1) / w.group_size;
  if (w.grouping == Grouping::strided) entries = w.total_rows * w.k / w.group_size;
  if (w.grouping == Grouping::block)
    entries = (w.first_row + w.n + w.group_rows - 1) / w.group_rows * w.groups;
  if (w.grouping == Grouping::strided && entries == 0 && w.n * w.k != 0) return;
  const auto part = [&](Scale kind, int64_t count) -> void * {
    const int64_t bytes = kind == Scale::f32                          ? 4
                          : kind == Scale::f16 || kind == Scale::bf16 ? 2
                                                                      : 1;
    uint8_t *p = m.room<uint8_t>(count * bytes);
    fill_any(p, (size_t)(count * bytes));
    return p;
  };
  const bool nested = w.scale == Scale::nested,
             floats = w.scale >= Scale::f16 && w.scale <= Scale::f32;
  if (w.scale != Scale::none) w.scales = part(nested ? Scale::u8 : w.scale, entries);
  if (nested) {
    w.nested_map = (const float *)part(Scale::f32, 256);
    w.nested_absmax = (const float *)part(Scale::f32, (entries + 255) / 256);
    w.nested_offset = 0.1;
  }
  if (in.flag() && w.groups > 0) {
    int32_t *index = m.room<int32_t>(w.k);
    for (int64_t j = 0; j < w.k; ++j) index[j] = (int32_t)(random_bits() % (uint32_t)w.groups);
    w.group_index = index;
  }
  switch (in.below(5)) {
    case 1:
      w.zeros = (const int16_t *)part(Scale::f16, entries);
      break;
    case 2:
      if (floats) w.float_zeros = part(w.scale, entries);
      break;
    case 3:
      if (floats) w.biases = part(w.scale, entries);
      break;
    case 4:
      if (w.groups > 0) {
        w.groups_per_super = 1 + in.below(w.groups);
        w.supers = (w.groups + w.groups_per_super - 1) / w.groups_per_super;
        w.super_scales = (const uint16_t *)part(Scale::f16, w.n * w.supers);
        if (in.flag()) {
          w.super_mins = (const uint16_t *)part(Scale::f16, w.n * w.supers);
          w.mins = (const uint8_t *)part(Scale::u8, entries);
        }
      }
  }
  w.inverse = in.flag();
  w.divisor = in.flag() ? 3.0 : 1.0;
  w.global_op = (Global)in.below(3), w.global = in.flag() ? 0.37f : 0.0f;
  use(in, w, false);
}

void transposes(Input &in) {
  const int64_t rows = in.below(300), columns = in.below(300), size = (int64_t)1 << in.below(4);
  Guarded from((size_t)(rows * columns * size)), to(from.bytes());
  fill_any(from.as(), from.bytes());
  transpose(from.as(), rows, columns, (int)size, to.as());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c)
      require(!std::memcmp(from.as() + (r * columns + c) * size, to.as() + (c * rows + r) * size,
                           (size_t)size),
              "a transpose differs");
  uint8_t orders[2][8];
  for (auto &order : orders) {
    for (int i = 0; i < 8; ++i) order[i] = (uint8_t)i;
    for (int i = 7; i > 0; --i) std::swap(order[i], order[random_bits() % (uint32_t)(i + 1)]);
  }
  const uint8_t *first = in.flag() && rows % 8 == 0 ? orders[0] : nullptr,
                *second = in.flag() && columns % 8 == 0 ? orders[1] : nullptr;
  const int64_t in_bytes = (columns + 1) / 2, out_bytes = (rows + 1) / 2;
  Guarded nibbles((size_t)(rows * in_bytes)), turned((size_t)(columns * out_bytes));
  fill_any(nibbles.as(), nibbles.bytes());
  transpose_nibbles(nibbles.as(), rows, columns, first, second, turned.as());
  const auto nibble = [](const uint8_t *base, int64_t stride, int64_t r, int64_t c) {
    return base[r * stride + c / 2] >> (c % 2 * 4) & 15;
  };
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c)
      require(nibble(nibbles.as(), in_bytes, first ? r / 8 * 8 + first[r % 8] : r, c) ==
                  nibble(turned.as(), out_bytes, second ? c / 8 * 8 + second[c % 8] : c, r),
              "a transpose of nibbles differs");
}

void vocabulary(Input &in) {
  using Word = std::vector<uint32_t>;
  std::map<Word, int32_t> words;
  std::vector<Word> list;
  const int64_t count = in.below(60), letters = 1 + in.below(4);
  for (int64_t i = 0; i < count; ++i) {
    Word word((size_t)in.below(7));
    for (uint32_t &c : word) c = (uint32_t)(random_bits() % (uint32_t)letters) * 0x7fffffffu;
    if (words.emplace(word, (int32_t)list.size()).second) list.push_back(word);
  }
  std::vector<uint32_t> text;
  Guarded ends(list.size() * 8);
  for (size_t i = 0; i < list.size(); ++i) {
    text.insert(text.end(), list[i].begin(), list[i].end());
    ends.as<int64_t>()[i] = (int64_t)text.size();
  }
  Guarded characters(text.size() * 4), left(text.size() * 4), right(text.size() * 4);
  if (!text.empty()) std::memcpy(characters.as(), text.data(), text.size() * 4);
  const int64_t pairs = merges(characters.as<uint32_t>(), ends.as<int64_t>(), (int64_t)list.size(),
                               left.as<int32_t>(), right.as<int32_t>());
  int64_t at = 0;
  for (const Word &word : list)
    for (size_t cut = word.size(); cut-- > 1;) {
      const auto a = words.find(Word(word.begin(), word.begin() + (long)cut)),
                 b = words.find(Word(word.begin() + (long)cut, word.end()));
      if (a == words.end() || b == words.end()) continue;
      require(
          at < pairs && left.as<int32_t>()[at] == a->second && right.as<int32_t>()[at] == b->second,
          "merges differ");
      ++at;
    }
  require(at == pairs, "merges that are none");
}

void steps(Input &in) {
  const int64_t kv_heads = 1 + in.below(4), heads = kv_heads * (1 + in.below(4)),
                d = 2 * (1 + in.below(70)), tokens = 1 + in.below(150), positions = 1 + in.below(9);
  const int64_t sizes[] = {heads * d,     kv_heads * d,          kv_heads * d,
                           heads * d,     kv_heads * tokens * d, kv_heads * tokens * d,
                           positions * d, positions * d,         d};
  std::vector<std::unique_ptr<Guarded>> memory;
  std::vector<float *> at;
  const bool any = in.flag();
  for (const int64_t size : sizes) {
    memory.push_back(std::make_unique<Guarded>((size_t)size * 4));
    at.push_back(memory.back()->as<float>());
    fill_any(at.back(), (size_t)size * 4);
    if (!any)
      for (int64_t i = 0; i < size; ++i) at.back()[i] = normal();
  }
  float *q = at[0], *k = at[1], *v = at[2], *y = at[3];
  Step step;
  step.norm(q, at[8], heads, d, 1e-6f, in.flag() ? q : y);
  step.rotate(q, heads, d, 0);
  step.rotate(k, kv_heads, d, 0);
  step.attend(0, q, k, v, heads, kv_heads, d, 0.1f, y);
  step.gate(in.flag() ? Gate::silu : Gate::gelu_tanh, q, y, heads * d, y);
  step.add(q, heads * d, y);
  LayerCache cache;
  cache.keys = at[4], cache.values = at[5], cache.stride = tokens * d;
  cache.first = in.below(tokens), cache.count = 1 + in.below(tokens - cache.first);
  cache.begin = in.below(300);
  Angles angles;
  angles.cosines = at[6], angles.sines = at[7], angles.d = d;
  step.run(&cache, &angles, in.below(positions));
  const int64_t prompt = 1 + in.below(cache.count), size = heads * prompt * d;
  Guarded queries((size_t)size * 4), out((size_t)size * 4);
  for (int64_t i = 0; i < size; ++i)
    queries.as<float>()[i] = any ? at[4][i % (kv_heads * tokens * d)] : normal();
  attend_prompt(queries.as<float>(), prompt, {heads, kv_heads, d}, 0.1f, cache, 1 + in.below(200),
                out.as<float>());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static const std::vector<std::string> sets = supported_sets();
  Input in(data, size);
  set_threads(2);
  use_set(sets[(size_t)in.below((int64_t)sets.size())]);
  switch (in.below(8)) {
    case 0:
      transposes(in);
      break;
    case 1:
      vocabulary(in);
      break;
    case 2:
      steps(in);
      break;
    case 3:
    case 4:
      canonical_order(in);
      break;
    default:
      panel_order(in);
  }
  return 0;
}

#if defined(HALFBYTE_FUZZ_ALONE)
std::vector<uint8_t> last_input;

// What a sanitizer calls before it ends the process.
extern "C" void __asan_on_error() {
  std::fprintf(stderr, "halfbyte_fuzz: input");
  for (uint8_t byte : last_input) std::fprintf(stderr, " %02x", byte);
  std::fprintf(stderr, "\n");
}

// Without libFuzzer: random inputs for some seconds, or the inputs of files.
//
//     halfbyte_fuzz SECONDS SEED
//     halfbyte_fuzz FILE ...
int main(int argc, char **argv) {
  char *end = nullptr;
  const double seconds = argc == 3 ? std::strtod(argv[1], &end) : 0;
  if (!end || *end) {
    for (int i = 1; i < argc; ++i) {
      std::FILE *file = std::fopen(argv[i], "rb");
      if (!file) return std::perror(argv[i]), 1;
      uint8_t data[4096];
      LLVMFuzzerTestOneInput(data, std::fread(data, 1, sizeof data, file));
      std::fclose(file);
    }
    return 0;
  }
  uint64_t seed = std::strtoull(argv[2], nullptr, 10);
  const auto begun = std::chrono::steady_clock::now();
  std::chrono::duration<double> passed{0};
  int64_t cases = 0;
  for (; passed.count() < seconds; passed = std::chrono::steady_clock::now() - begun, ++cases) {
    uint8_t data[48];
    for (uint8_t &byte : data) {
      seed = seed * 6364136223846793005ull + 1442695040888963407ull;
      byte = (uint8_t)(seed >> 56);
    }
    last_input.assign(data, data + sizeof data);
    LLVMFuzzerTestOneInput(data, sizeof data);
  }
  std::printf("%lld cases in %.0f s on", (long long)cases, passed.count());
  for (const std::string &set : supported_sets()) std::printf(" %s", set.c_str());
  std::printf(": no fault\n");
  return 0;
}
#endif
