// The pairs of words of a vocabulary whose concatenation is one of its words: the merges of a
// byte-pair encoding.
#pragma once

#include <cstdint>

namespace halfbyte {

// Word i is characters[ends[i - 1]] .. characters[ends[i] - 1]; words are distinct. For each word
// in order, for each position to split it from the last to the first, the indices of its two parts
// go to `left` and `right` when both are words. Returns the number of pairs, at most one a
// character.
int64_t merges(const uint32_t *characters, const int64_t *ends, int64_t words, int32_t *left,
               int32_t *right);

}  // namespace halfbyte
