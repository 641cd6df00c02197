// Every pair of words of a vocabulary that joins into one of its words.
#pragma once

#include <cstdint>

namespace halfbyte {

// Word i is characters[ends[i - 1]] .. characters[ends[i] - 1]; words are distinct. For each word in turn, for each cut from the last to the
// first, the places of its left and right part go to `left` and `right` when both are words. Returns how many pairs there are; there is
// room for one a character.
int64_t merges(const uint32_t *characters, const int64_t *ends, int64_t words, int32_t *left, int32_t *right);

}  // namespace halfbyte
