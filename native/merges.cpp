#include "merges.h"

#include <cstring>
#include <vector>

namespace halfbyte {
namespace {

// A word's hash is the sum of (c_i + 1) kBase^i modulo 2^64: a prefix's comes from the one before
// it, and so does a suffix's.
constexpr uint64_t kBase = 0x9e3779b97f4a7c15u;

class Words {
 public:
  Words(const uint32_t *characters, const int64_t *ends, int64_t count)
      : characters_(characters), ends_(ends) {
    int bits = 4;
    while ((int64_t)1 << bits < 2 * count) ++bits;
    shift_ = 64 - bits, mask_ = ((uint64_t)1 << bits) - 1;
    slots_.assign((size_t)1 << bits, Slot{0, -1});
    for (int64_t i = 0; i < count; ++i) {
      uint64_t hash = 0;
      for (int64_t j = end(i) - 1; j >= start(i); --j) hash = hash * kBase + characters_[j] + 1;
      uint64_t at = first(hash);
      while (slots_[at].word >= 0) at = (at + 1) & mask_;
      slots_[at] = {hash, (int32_t)i};
    }
  }
  int64_t start(int64_t i) const { return i ? ends_[i - 1] : 0; }
  int64_t end(int64_t i) const { return ends_[i]; }

  // Index of the word of these characters, -1 when there is none.
  int32_t find(uint64_t hash, int64_t from, int64_t to) const {
    for (uint64_t at = first(hash); slots_[at].word >= 0; at = (at + 1) & mask_) {
      const int32_t i = slots_[at].word;
      if (slots_[at].hash == hash && end(i) - start(i) == to - from &&
          !std::memcmp(characters_ + start(i), characters_ + from, (size_t)(to - from) * 4))
        return i;
    }
    return -1;
  }

 private:
  struct Slot {
    uint64_t hash;
    int32_t word;
  };
  uint64_t first(uint64_t hash) const {
    return (hash ^ hash >> 29) * 0xbf58476d1ce4e5b9u >> shift_;
  }

  const uint32_t *characters_;
  const int64_t *ends_;
  int shift_;
  uint64_t mask_;
  std::vector<Slot> slots_;
};

}  // namespace

int64_t merges(const uint32_t *characters, const int64_t *ends, int64_t count, int32_t *left,
               int32_t *right) {
  const Words words(characters, ends, count);
  std::vector<uint64_t> prefixes;
  int64_t pairs = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t start = words.start(i), end = words.end(i);
    prefixes.assign(1, 0);
    uint64_t power = 1, suffix = 0;
    for (int64_t j = start; j + 1 < end; ++j)
      prefixes.push_back(prefixes.back() + (characters[j] + 1) * power), power *= kBase;
    for (int64_t cut = end - 1; cut > start; --cut) {
      suffix = suffix * kBase + characters[cut] + 1;
      const int32_t before = words.find(prefixes[(size_t)(cut - start)], start, cut);
      if (before < 0) continue;
      const int32_t after = words.find(suffix, cut, end);
      if (after >= 0) left[pairs] = before, right[pairs] = after, ++pairs;
    }
  }
  return pairs;
}

}  // namespace halfbyte
