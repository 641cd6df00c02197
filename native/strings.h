// The strings of a GGUF array: each a length of 64 bits and as many bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace halfbyte {

// Where the last of `count` strings that begin at `start` ends; -1 where they run past `size`.
// `end_of`, where it is given, gets the end of each.
int64_t string_ends(const uint8_t *data, int64_t size, int64_t start, int64_t count, bool swapped,
                    int64_t *end_of = nullptr);

// Finds strings by their bytes. `data` and `ends` stay in place; `ends` as `string_ends` fills it.
class Strings {
 public:
  Strings(const uint8_t *data, int64_t start, std::vector<int64_t> ends);

  int64_t count() const { return (int64_t)ends_.size(); }
  int64_t begin(int64_t i) const { return (i ? ends_[(size_t)i - 1] : start_) + 8; }
  int64_t end(int64_t i) const { return ends_[(size_t)i]; }
  int64_t longest() const { return longest_; }
  bool distinct() const { return distinct_; }

  // Index of the string of these bytes, the first where several are equal; -1 where there is none.
  int64_t find(const uint8_t *bytes, int64_t size) const;
  // found[i] = 1 for every string i, but an empty one, that is a piece of the text.
  void pieces(const uint8_t *text, int64_t size, uint8_t *found) const;

 private:
  int64_t at(uint64_t hash, const uint8_t *bytes, int64_t size) const;

  const uint8_t *data_;
  int64_t start_, longest_ = 0;
  std::vector<int64_t> ends_;
  bool distinct_ = true;
  int shift_ = 60;
  std::vector<int32_t> slots_;  // open addressing; -1 where free
};

}  // namespace halfbyte
