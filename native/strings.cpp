#include "strings.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace halfbyte {
namespace {

// FNV-1a: the hash of a string is one step from that of the string without its last byte.
constexpr uint64_t kEmpty = 0xcbf29ce484222325u, kPrime = 0x100000001b3u;

uint64_t next(uint64_t hash, uint8_t byte) { return (hash ^ byte) * kPrime; }

uint64_t hash_of(const uint8_t *bytes, int64_t size) {
  uint64_t hash = kEmpty;
  for (int64_t i = 0; i < size; ++i) hash = next(hash, bytes[i]);
  return hash;
}

size_t slot_of(uint64_t hash, int shift) {
  return (size_t)((hash ^ hash >> 29) * 0xbf58476d1ce4e5b9u >> shift);
}

}  // namespace

int64_t string_ends(const uint8_t *data, int64_t size, int64_t start, int64_t count, bool swapped,
                    int64_t *end_of) {
  int64_t at = start;
  for (int64_t i = 0; i < count; ++i) {
    if (size - at < 8) return -1;
    uint64_t length = 0;
    for (int b = 0; b < 8; ++b) length |= (uint64_t)data[at + b] << 8 * (swapped ? 7 - b : b);
    at += 8;
    if (length > (uint64_t)(size - at)) return -1;
    at += (int64_t)length;
    if (end_of) end_of[i] = at;
  }
  return at;
}

Strings::Strings(const uint8_t *data, int64_t start, std::vector<int64_t> ends)
    : data_(data), start_(start), ends_(std::move(ends)) {
  while ((int64_t)1 << (64 - shift_) < 2 * count()) --shift_;
  slots_.assign((size_t)1 << (64 - shift_), -1);
  const size_t mask = slots_.size() - 1;
  for (int64_t i = 0; i < count(); ++i) {
    const int64_t size = end(i) - begin(i);
    longest_ = std::max(longest_, size);
    const uint64_t hash = hash_of(data_ + begin(i), size);
    if (at(hash, data_ + begin(i), size) >= 0) {
      distinct_ = false;
      continue;
    }
    size_t slot = slot_of(hash, shift_);
    while (slots_[slot] >= 0) slot = (slot + 1) & mask;
    slots_[slot] = (int32_t)i;
  }
}

int64_t Strings::at(uint64_t hash, const uint8_t *bytes, int64_t size) const {
  const size_t mask = slots_.size() - 1;
  for (size_t slot = slot_of(hash, shift_); slots_[slot] >= 0; slot = (slot + 1) & mask) {
    const int64_t i = slots_[slot];
    if (end(i) - begin(i) == size && !std::memcmp(data_ + begin(i), bytes, (size_t)size)) return i;
  }
  return -1;
}

int64_t Strings::find(const uint8_t *bytes, int64_t size) const {
  return at(hash_of(bytes, size), bytes, size);
}

void Strings::pieces(const uint8_t *text, int64_t size, uint8_t *found) const {
  for (int64_t first = 0; first < size; ++first) {
    uint64_t hash = kEmpty;
    const int64_t last = std::min(size, first + longest_);
    for (int64_t i = first; i < last; ++i) {
      hash = next(hash, text[i]);
      const int64_t string = at(hash, text + first, i + 1 - first);
      if (string >= 0) found[string] = 1;
    }
  }
}

}  // namespace halfbyte
