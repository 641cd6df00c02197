// Part of selfcheck.cpp: a decoding step's operations, every array against an unreadable page.

void check_attention(const std::string &set, int64_t group, int64_t kv_heads, int64_t d,
                     int64_t count) {
  const int64_t heads = group * kv_heads;
  Guarded q((size_t)(heads * d) * 4), k((size_t)(kv_heads * d) * 4), v((size_t)(kv_heads * d) * 4),
      y((size_t)(heads * d) * 4);
  Guarded keys((size_t)(kv_heads * count * d) * 4), values((size_t)(kv_heads * count * d) * 4);
  for (Guarded *each : {&q, &k, &v, &keys, &values})
    for (size_t i = 0; i < each->bytes() / 4; ++i) each->as<float>()[i] = normal();
  const float scale = 1.0f / std::sqrt((float)d);
  LayerCache cache;
  cache.keys = keys.as<float>(), cache.values = values.as<float>(), cache.stride = count * d,
  cache.count = count;
  Step step;
  step.attend(0, q.as<float>(), k.as<float>(), v.as<float>(), heads, kv_heads, d, scale,
              y.as<float>());
  step.run(&cache, nullptr, 0);
  add_to_hash(std::vector<float>(y.as<float>(), y.as<float>() + heads * d));
  double worst = 0;
  for (int64_t h = 0; h < heads; ++h) {
    const float *mine = keys.as<float>() + h / group * count * d,
                *all_values = values.as<float>() + h / group * count * d;
    std::vector<double> weights((size_t)count), wanted((size_t)d, 0.0);
    double sum = 0;
    for (int64_t t = 0; t < count; ++t) {
      double score = 0;
      for (int64_t j = 0; j < d; ++j) score += (double)q.as<float>()[h * d + j] * mine[t * d + j];
      sum += weights[(size_t)t] = std::exp(score * scale);
    }
    for (int64_t t = 0; t < count; ++t)
      for (int64_t j = 0; j < d; ++j)
        wanted[(size_t)j] += weights[(size_t)t] / sum * all_values[t * d + j];
    for (int64_t j = 0; j < d; ++j)
      worst = std::fmax(worst, std::fabs(wanted[(size_t)j] - y.as<float>()[h * d + j]));
  }
  const std::string what = set + " attention " + std::to_string(heads) + "/" +
                           std::to_string(kv_heads) + " d=" + std::to_string(d);
  check(worst <= 1e-5,
        what + " count=" + std::to_string(count) + ": error " + std::to_string(worst));
}

// A prompt of `tokens` behind `before` others, against each of its tokens alone.
void check_prompt(const std::string &set, int64_t group, int64_t kv_heads, int64_t d,
                  int64_t before, int64_t tokens, int64_t begin, int64_t window) {
  const int64_t heads = group * kv_heads, count = before + tokens;
  Guarded q((size_t)(heads * tokens * d) * 4), y((size_t)(heads * tokens * d) * 4),
      one((size_t)(heads * d) * 4), alone((size_t)(heads * d) * 4);
  Guarded keys((size_t)(kv_heads * count * d) * 4), values((size_t)(kv_heads * count * d) * 4);
  for (Guarded *each : {&q, &keys, &values})
    for (size_t i = 0; i < each->bytes() / 4; ++i) each->as<float>()[i] = normal();
  LayerCache cache;
  cache.keys = keys.as<float>(), cache.values = values.as<float>(), cache.stride = count * d,
  cache.count = count, cache.begin = begin;
  const Heads shape{heads, kv_heads, d};
  attend_prompt(q.as<float>(), tokens, shape, 0.125f, cache, window, y.as<float>());
  add_to_hash(std::vector<float>(y.as<float>(), y.as<float>() + heads * tokens * d));
  std::vector<float> scratch;
  bool equal = true;
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t end = before + t + 1, seen = end < window ? end : window;
    LayerCache own = cache;
    own.first = end - seen, own.count = seen, own.begin = begin + own.first;
    for (int64_t h = 0; h < heads; ++h)
      std::memcpy(one.as<float>() + h * d, q.as<float>() + (h * tokens + t) * d, (size_t)d * 4);
    attend_token(one.as<float>(), shape, 0.125f, own, scratch, alone.as<float>());
    equal &=
        !std::memcmp(alone.as<float>(), y.as<float>() + t * heads * d, (size_t)(heads * d) * 4);
  }
  check(equal, set + " prompt of " + std::to_string(tokens) + " behind " + std::to_string(before) +
                   ", window " + std::to_string(window) + ", d=" + std::to_string(d));
}

void check_norm(const std::string &set, int64_t d) {
  Guarded x((size_t)d * 8), scale((size_t)d * 4), y((size_t)d * 8);
  for (int64_t i = 0; i < 2 * d; ++i) x.as<float>()[i] = normal();
  for (int64_t i = 0; i < d; ++i) scale.as<float>()[i] = normal();
  Step step;
  step.norm(x.as<float>(), scale.as<float>(), 2, d, 1e-6f, y.as<float>());
  step.run(nullptr, nullptr, 0);
  add_to_hash(std::vector<float>(y.as<float>(), y.as<float>() + 2 * d));
  double worst = 0;
  for (int64_t r = 0; r < 2; ++r) {
    double squares = 0;
    for (int64_t i = 0; i < d; ++i)
      squares += (double)x.as<float>()[r * d + i] * x.as<float>()[r * d + i];
    for (int64_t i = 0; i < d; ++i) {
      const double wanted =
          x.as<float>()[r * d + i] / std::sqrt(squares / (double)d + 1e-6) * scale.as<float>()[i];
      worst = std::fmax(worst, std::fabs(wanted - y.as<float>()[r * d + i]));
    }
  }
  check(worst <= 1e-5, set + " norm d=" + std::to_string(d) + ": error " + std::to_string(worst));
}

void check_step(const std::string &set) {
  for (const int64_t d : {(int64_t)2, (int64_t)20, (int64_t)64, (int64_t)256}) {
    check_norm(set, d);
    for (const int64_t count : {(int64_t)1, (int64_t)63, (int64_t)130})
      check_attention(set, 4, 1, d, count), check_attention(set, 3, 2, d, count);
    for (const int64_t window : {(int64_t)1, (int64_t)70, (int64_t)1 << 40})
      check_prompt(set, 4, 1, d, 0, 33, 0, window), check_prompt(set, 3, 2, d, 50, 30, 77, window);
  }
}
