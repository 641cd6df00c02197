// Tile shapes by instruction set and class of activations: all of them in one table.
//
// A tile multiplies some tokens by some vectors of rows and keeps one register of sums for each
// pair, beside the vectors of weights and one activation. "Fused" tiles decode the codes in
// registers; the others read a buffer of decoded codes.
#pragma once

namespace halfbyte {

struct Tiles {
  int tokens;          // tokens of the largest tile
  int vectors;         // vectors of rows in the largest tile and in all of more than four tokens
  int vectors_four;    // in smaller tiles: of four tokens,
  int vectors_two;     // of two,
  int vectors_one;     // of one,
  int vectors_minima;  // of one, for weights with super-scales and minima, which are read in more
                       // streams (int8 only; AVX2: for all with super-scales, `narrow_supers`)
  int panels;          // panels of a block that is decoded into a buffer
  int fused_tokens;    // up to this many tokens tiles are fused
  int alternative;     // tokens of a tile that some cores take in place of the largest
                       // (`Core::alternative_tile_from`); 0: none
};

//                               tokens vectors four two one minima panels fused alternative
constexpr Tiles kAvx512Int8 = {8, 2, 2, 4, 4, 2, 2, 16, 6};
constexpr Tiles kAvx512Float = {8, 2, 2, 4, 4, 4, 2, 16, 0};
constexpr Tiles kAvx2Int8 = {4, 2, 2, 4, 8, 4, 4, 4, 0};
constexpr Tiles kAvx2Float = {6, 2, 2, 4, 8, 8, 2, 8, 0};
constexpr Tiles kNeonInt8 = {4, 4, 4, 8, 8, 8, 4, 4, 0};
constexpr Tiles kNeonFloat = {4, 4, 4, 8, 8, 8, 2, 8, 0};
constexpr Tiles kScalarInt8 = {2, 1, 1, 1, 1, 1, 4, 4, 0};
constexpr Tiles kScalarFloat = {2, 1, 1, 1, 1, 1, 2, 8, 0};

}  // namespace halfbyte
