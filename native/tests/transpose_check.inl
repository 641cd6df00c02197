// Part of selfcheck.cpp: transposes against one element at a time, in memory that ends at an
// unreadable page.

void check_transpose() {
  const int64_t sides[] = {1, 2, 15, 16, 33, 64, 65, 129};
  const uint8_t order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  for (const int64_t rows : sides)
    for (const int64_t columns : sides) {
      const std::string where =
          "transpose " + std::to_string(rows) + " x " + std::to_string(columns);
      for (const int size : {1, 2, 4, 8}) {
        const size_t bytes = (size_t)(rows * columns * size);
        Guarded in(bytes), out(bytes);
        for (size_t i = 0; i < bytes; ++i) in.as<uint8_t>()[i] = (uint8_t)random_bits();
        transpose(in.as<uint8_t>(), rows, columns, size, out.as<uint8_t>());
        bool same = true;
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t c = 0; c < columns; ++c)
            same &= !std::memcmp(in.as<uint8_t>() + (r * columns + c) * size,
                                 out.as<uint8_t>() + (c * rows + r) * size, (size_t)size);
        check(same, where + " of " + std::to_string(size) + " bytes");
      }
      const int64_t in_bytes = (columns + 1) / 2, out_bytes = (rows + 1) / 2;
      const auto nibble = [](const uint8_t *base, int64_t stride, int64_t r, int64_t c) {
        return base[r * stride + c / 2] >> (c % 2 * 4) & 15;
      };
      Guarded in((size_t)(rows * in_bytes)), out((size_t)(columns * out_bytes));
      for (int64_t i = 0; i < rows * in_bytes; ++i) in.as<uint8_t>()[i] = (uint8_t)random_bits();
      for (const bool ordered : {false, true}) {
        const bool high = ordered && rows % 8 == 0, wide = ordered && columns % 8 == 0;
        transpose_nibbles(in.as<uint8_t>(), rows, columns, high ? order : nullptr,
                          wide ? order : nullptr, out.as<uint8_t>());
        bool same = true;
        for (int64_t c = 0; c < columns; ++c)
          for (int64_t r = 0; r < 2 * out_bytes; ++r) {
            const int64_t from = high ? r / 8 * 8 + order[r % 8] : r,
                          to = wide ? c / 8 * 8 + order[c % 8] : c;
            same &= nibble(out.as<uint8_t>(), out_bytes, to, r) ==
                    (r < rows ? nibble(in.as<uint8_t>(), in_bytes, from, c) : 0);
          }
        check(same, where + (ordered ? " nibbles in order" : " nibbles"));
      }
    }
}
