// CPU kernels of a decode step: what torch does in many passes over memory, done in one. Each has a plain torch twin in the
// Python module of its name, against which it is tested; `native.py` compiles and calls them.
//
// T is bf16 or float; arithmetic is fp32. Tensors are contiguous unless a row stride is passed. Work is shared among
// `threads` OpenMP threads, of the pool that torch uses too. Vectors are those of GCC's language extension,
// which compile to what the machine has (AVX-512, AVX2, NEON; GCC alone has all that is used).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int W = 16;  // values per vector
typedef float floats __attribute__((vector_size(4 * W)));
typedef int32_t ints __attribute__((vector_size(4 * W)));
typedef uint32_t words __attribute__((vector_size(4 * W)));
typedef uint16_t halves __attribute__((vector_size(2 * W)));

struct bf16 {
  uint16_t bits;
};

inline float get(const float* p) { return *p; }
inline float get(const bf16* p) {
  uint32_t bits = uint32_t(p->bits) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline floats load(const float* p) {
  floats v;
  memcpy(&v, p, sizeof v);
  return v;
}
inline floats load(const bf16* p) {
  halves h;
  memcpy(&h, p, sizeof h);
  return (floats)(__builtin_convertvector(h, words) << 16);
}

// To the nearest, ties to even; NaN stays NaN.
inline words round_bits(floats v) {
  words bits = (words)v;
  words rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  words is_nan = (words)(v != v);
  return (is_nan & 0x7FC0) | (~is_nan & rounded);
}
inline void store(float* p, floats v) { memcpy(p, &v, sizeof v); }
inline void store(bf16* p, floats v) {
  halves h = __builtin_convertvector(round_bits(v), halves);
  memcpy(p, &h, sizeof h);
}
// The value that is left after storing as T.
inline floats rounded(floats v, const float*) { return v; }
inline floats rounded(floats v, const bf16*) { return (floats)(round_bits(v) << 16); }

// By halves: one after the other, the additions would wait for each other.
inline float sum(floats v) {
  v += __builtin_shuffle(v, ints{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  v += __builtin_shuffle(v, ints{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  v += __builtin_shuffle(v, ints{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
  return v[0] + v[1];
}

// e^x by range reduction and a polynomial of degree 6 (error below 2 units in the last place); 0 for very small x.
inline floats exp_of(floats x) {
  ints is_tiny = x < -87.0f;
  floats n = x * 1.44269504f;
  ints whole = __builtin_convertvector(n + (floats)(((words)n & 0x80000000u) | 0x3F000000u), ints);  // to the nearest
  floats k = __builtin_convertvector(whole, floats);
  floats r = x - k * 0.693359375f + k * 2.12194440e-4f;
  floats y = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f) * r +
              1.6666665459e-1f) * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  floats result = y * (floats)((words)(whole + 127) << 23);
  return (floats)(~(words)is_tiny & (words)result);
}

// Dot products of MT rows of x with NT rows of w over k values; k is a multiple of W (of 2 W with bf16 instructions).
template <int MT, int NT>
inline void dot_tile(const bf16* x, const bf16* w, long k, float* out /* [MT][NT] */) {
#ifdef __AVX512BF16__
  __m512 acc[MT][NT];
  for (int m = 0; m < MT; m++)
    for (int n = 0; n < NT; n++) acc[m][n] = _mm512_setzero_ps();
  long i = 0;
  for (; i + 32 <= k; i += 32) {
    __m512bh b[NT];
    for (int n = 0; n < NT; n++) b[n] = (__m512bh)_mm512_loadu_si512(w + n * k + i);
    for (int m = 0; m < MT; m++) {
      __m512bh a = (__m512bh)_mm512_loadu_si512(x + m * k + i);
      for (int n = 0; n < NT; n++) acc[m][n] = _mm512_dpbf16_ps(acc[m][n], a, b[n]);
    }
  }
  for (int m = 0; m < MT; m++)
    for (int n = 0; n < NT; n++) {
      float total = _mm512_reduce_add_ps(acc[m][n]);
      if (i < k) total += sum(load(x + m * k + i) * load(w + n * k + i));
      out[m * NT + n] = total;
    }
#else
  floats acc[MT][NT] = {};
  for (long i = 0; i < k; i += W) {
    floats b[NT];
    for (int n = 0; n < NT; n++) b[n] = load(w + n * k + i);
    for (int m = 0; m < MT; m++) {
      floats a = load(x + m * k + i);
      for (int n = 0; n < NT; n++) acc[m][n] += a * b[n];
    }
  }
  for (int m = 0; m < MT; m++)
    for (int n = 0; n < NT; n++) out[m * NT + n] = sum(acc[m][n]);
#endif
}

template <int MT, int NT>
inline void linear_tile(const bf16* x, const bf16* w, const bf16* bias, bf16* y, long k, long n_all) {
  float out[MT * NT];
  dot_tile<MT, NT>(x, w, k, out);
  for (int m = 0; m < MT; m++)
    for (int n = 0; n < NT; n++) {
      float value = out[m * NT + n] + (bias ? get(bias + n) : 0.0f);
      floats wide = {value};
      y[m * n_all + n].bits = uint16_t(round_bits(wide)[0]);
    }
}

// y [m, n] = x [m, k] w^T [n, k] + bias: the rows of w are shared out, each is read once for up to four rows of x.
void linear(const bf16* x, const bf16* w, const bf16* bias, bf16* y, long m, long n, long k, int threads) {
  constexpr int NT = 4;
  long blocks = n / NT;
#pragma omp parallel for num_threads(threads) schedule(static) if (n * k > 1 << 16)
  for (long block = 0; block < blocks + (n % NT ? 1 : 0); block++) {
    long first = block * NT;
    if (block == blocks) {  // what NT does not divide
      for (long j = first; j < n; j++)
        for (long i = 0; i < m; i++) linear_tile<1, 1>(x + i * k, w + j * k, bias ? bias + j : nullptr, y + i * n + j, k, n);
      continue;
    }
    const bf16* rows = w + first * k;
    const bf16* b = bias ? bias + first : nullptr;
    long i = 0;
    for (; i + 4 <= m; i += 4) linear_tile<4, NT>(x + i * k, rows, b, y + i * n + first, k, n);
    if (m - i == 3) linear_tile<3, NT>(x + i * k, rows, b, y + i * n + first, k, n);
    if (m - i == 2) linear_tile<2, NT>(x + i * k, rows, b, y + i * n + first, k, n);
    if (m - i == 1) linear_tile<1, NT>(x + i * k, rows, b, y + i * n + first, k, n);
  }
}

#ifdef __AMX_BF16__
// The same with the matrix unit, as y^T = w x^T, so that w is read as it lies: each tile product takes 16 rows of w and 32
// values of k. x comes packed: for each 16 of its rows and 32 of k, 16 pairs of k, each with its value of all 16 rows.
constexpr int TILE = 16, TILE_K = 32;

bool may_use_tiles() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM: the kernel grants the large register state
  static const bool is_granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return is_granted;
}

struct TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

std::vector<uint32_t> pack_rows(const bf16* x, long m, long k) {
  const __m512i down = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
  long blocks = (m + TILE - 1) / TILE, pairs = k / 2;
  std::vector<uint32_t> packed(blocks * pairs * TILE);
  for (long row = 0; row < m; row++)
    for (long pair = 0; pair < pairs; pair += TILE)
      _mm512_i32scatter_epi32(&packed[(row / TILE * pairs + pair) * TILE + row % TILE], down,
                              _mm512_loadu_si512(x + row * k + 2 * pair), 4);
  return packed;
}

// 16 * NB rows of w with 16 * MB rows of x. Accumulators are tiles 0 to 3, w is in 4 and 5, x in 6 and 7.
template <int NB, int MB>
inline void multiply_tiles(const uint32_t* packed, const bf16* w, const bf16* bias, bf16* y, long m, long n, long k) {
  long x_block = k / 2 * TILE;
  _tile_zero(0);
  if (MB > 1) _tile_zero(1);
  if (NB > 1) _tile_zero(2);
  if (NB > 1 && MB > 1) _tile_zero(3);
  for (long i = 0; i < k; i += TILE_K) {
    const uint32_t* x = packed + i / 2 * TILE;
    // The rows after these are wanted next: while memory sends them, these are multiplied.
    const char* next = (const char*)(w + NB * TILE * k) + i * NB * TILE * 2;
    for (int line = 0; line < NB * TILE; line++) _mm_prefetch(next + line * 64, _MM_HINT_T1);
    _tile_loadd(4, w + i, 2 * k);
    _tile_loadd(6, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (MB > 1) {
      _tile_loadd(7, x + x_block, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (NB > 1) {
      _tile_loadd(5, w + TILE * k + i, 2 * k);
      _tile_dpbf16ps(2, 5, 6);
      if (MB > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float out[NB][MB][TILE][TILE];  // [row of w][row of x]
  const __m512i down = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
  _tile_stored(0, out[0][0], 64);
  if (MB > 1) _tile_stored(1, out[0][MB - 1], 64);
  if (NB > 1) _tile_stored(2, out[NB - 1][0], 64);
  if (NB > 1 && MB > 1) _tile_stored(3, out[NB - 1][MB - 1], 64);
  for (int a = 0; a < NB; a++)
    for (long row = 0; row < m; row++) {
      floats column = (floats)_mm512_i32gather_ps(down, &out[a][row / TILE][0][row % TILE], 4);
      if (bias) column += load(bias + a * TILE);
      store(y + row * n + a * TILE, column);
    }
}

template <int NB>
inline void multiply_rows(const uint32_t* packed, const bf16* w, const bf16* bias, bf16* y, long m, long n, long k) {
  for (long row = 0; row < m; row += 2 * TILE) {
    const uint32_t* x = packed + row * (k / 2);
    if (m - row > TILE)
      multiply_tiles<NB, 2>(x, w, bias, y + row * n, std::min<long>(m - row, 2 * TILE), n, k);
    else
      multiply_tiles<NB, 1>(x, w, bias, y + row * n, m - row, n, k);
  }
}

void linear_in_tiles(const bf16* x, const bf16* w, const bf16* bias, bf16* y, long m, long n, long k, int threads) {
  std::vector<uint32_t> packed = pack_rows(x, m, k);
  long blocks = (n + 2 * TILE - 1) / (2 * TILE);
#pragma omp parallel num_threads(threads)
  {
    TileShapes shapes;
    _tile_loadconfig(&shapes);
#pragma omp for schedule(static)
    for (long block = 0; block < blocks; block++) {
      long first = block * 2 * TILE;
      const bf16* b = bias ? bias + first : nullptr;
      if (n - first > TILE)
        multiply_rows<2>(packed.data(), w + first * k, b, y + first, m, n, k);
      else
        multiply_rows<1>(packed.data(), w + first * k, b, y + first, m, n, k);
    }
    _tile_release();
  }
}
#endif

// One row: out = round(x / rms(x)) * weight.
template <typename T>
inline void norm_row(const T* x, const T* weight, T* out, long size, float eps) {
  floats squares = {};
  for (long i = 0; i < size; i += W) {
    floats v = load(x + i);
    squares += v * v;
  }
  float scale = 1.0f / sqrtf(sum(squares) / size + eps);
  for (long i = 0; i < size; i += W) store(out + i, rounded(load(x + i) * scale, out) * load(weight + i));
}

template <typename T>
void norm(const T* x, const T* residual, const T* weight, T* total, T* out, long rows, long size, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > 1 << 15)
  for (long row = 0; row < rows; row++) {
    const T* source = x + row * size;
    if (residual) {
      T* sums = total + row * size;
      for (long i = 0; i < size; i += W) store(sums + i, load(source + i) + load(residual + row * size + i));
      source = sums;
    }
    norm_row(source, weight, out + row * size, size, eps);
  }
}

template <typename T>
void silu_mul(const T* gate_up, T* out, long rows, long size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > 1 << 14)
  for (long row = 0; row < rows; row++) {
    const T *gate = gate_up + row * 2 * size, *up = gate + size;
    for (long i = 0; i < size; i += W) {
      floats g = load(gate + i);
      floats e = exp_of(-(g < 0.0f ? -g : g));  // of -|g|, which cannot overflow
      floats silu = g * (g < 0.0f ? e : 1.0f + floats{}) / (1.0f + e);
      store(out + row * size + i, rounded(silu, out) * load(up + i));
    }
  }
}

// Rotate the pairs (i, i + dim / 2); `half` is a multiple of W.
template <typename T>
inline void rotate(const T* x, const float* cos_sin, T* out, long half) {
  for (long i = 0; i < half; i += W) {
    floats low = load(x + i), high = load(x + half + i), c = load(cos_sin + i), s = load(cos_sin + half + i);
    store(out + i, low * c - high * s);
    store(out + half + i, high * c + low * s);
  }
}

template <typename T>
void rope_append(const T* qkv, const T* q_weight, const T* k_weight, float eps, const float* table, const int64_t* positions,
                 T* k_cache, T* v_cache, const int64_t* locations, T* query, long tokens, long heads, long kv_heads, long dim,
                 int threads) {
  long row_size = (heads + 2 * kv_heads) * dim;
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens * row_size > 1 << 14)
  for (long token = 0; token < tokens; token++) {
    const T* row = qkv + token * row_size;
    const float* cos_sin = table + positions[token] * dim;
    T normed[1024];
    for (long head = 0; head < heads + kv_heads; head++) {
      const T* x = row + head * dim;
      const T* weight = head < heads ? q_weight : k_weight;
      if (weight) {
        norm_row(x, weight, normed, dim, eps);
        x = normed;
      }
      T* out = head < heads ? query + (token * heads + head) * dim
                            : k_cache + (locations[token] * kv_heads + head - heads) * dim;
      rotate(x, cos_sin, out, dim / 2);
    }
    memcpy(v_cache + locations[token] * kv_heads * dim, row + (heads + kv_heads) * dim, kv_heads * dim * sizeof(T));
  }
}

// What a thread of `attend` keeps: scores of some query heads, sums of one, and where each token's K lies.
struct Scratch {
  std::vector<float> scores, sums;
  std::vector<long> places;

  // Tokens start to end of a row: their place in the cache, in values.
  void find_tokens(const int32_t* pages, long start, long end, long page_size, long token_size) {
    if (long(places.size()) < end - start) places.resize(end - start);
    long* place = places.data();
    for (long page = start / page_size; page * page_size < end; page++) {
      long first = std::max(page * page_size, start), last = std::min((page + 1) * page_size, end);
      for (long t = first; t < last; t++) *place++ = (pages[page] * page_size + t - page * page_size) * token_size;
    }
  }
};

// VECTORS is dim / W where that is known when compiled, so that sums stay in registers; else 0.
template <int VECTORS, typename T>
inline float dot(const T* query, const T* k, long dim) {
  floats acc = {};
  for (long i = 0; i < (VECTORS ? VECTORS * W : dim); i += W) acc += load(k + i) * load(query + i);
  return sum(acc);
}
#ifdef __AVX512BF16__
template <int VECTORS>
inline float dot(const bf16* query, const bf16* k, long dim) {
  __m512 acc = _mm512_setzero_ps();
  long size = VECTORS ? VECTORS * W : dim, i = 0;
  for (; i + 2 * W <= size; i += 2 * W)
    acc = _mm512_dpbf16_ps(acc, (__m512bh)_mm512_loadu_si512(query + i), (__m512bh)_mm512_loadu_si512(k + i));
  if (i < size) acc += (__m512)(load(k + i) * load(query + i));
  return sum((floats)acc);
}
#endif

// For each of HEADS query heads, out [dim] = the sum over `count` tokens of its weight of the token * v. Weights of heads
// lie `stride` apart.
template <int VECTORS, int HEADS, typename T>
inline void weigh(const float* weights, long stride, const T* v_cache, const long* places, long count, float* sums, T* out,
                  long dim) {
  if (!VECTORS) {
    static_assert(VECTORS || HEADS == 1, "sums in memory are those of one head");
    std::fill(sums, sums + dim, 0.0f);
    for (long t = 0; t < count; t++)
      for (long i = 0; i < dim; i += W) store(sums + i, load(sums + i) + weights[t] * load(v_cache + places[t] + i));
    for (long i = 0; i < dim; i += W) store(out + i, load(sums + i));
    return;
  }
  constexpr int SIZE = VECTORS ? VECTORS : 1;
  floats acc[HEADS][SIZE] = {};
  for (long t = 0; t < count; t++)
    for (int i = 0; i < SIZE; i++) {
      floats v = load(v_cache + places[t] + i * W);
      for (int h = 0; h < HEADS; h++) acc[h][i] += weights[h * stride + t] * v;
    }
  for (int h = 0; h < HEADS; h++)
    for (int i = 0; i < SIZE; i++) store(out + h * dim + i * W, acc[h][i]);
}

// The heads of one group, as many at a time as registers hold.
template <int VECTORS, typename T>
inline void weigh_group(const float* weights, long stride, const T* v_cache, const long* places, long count, float* sums,
                        T* out, long group, long dim) {
  constexpr int MOST = VECTORS == 4 ? 4 : VECTORS == 8 ? 2 : 1;
  for (long h = 0; h < group;) {
    const float* w = weights + h * stride;
    T* o = out + h * dim;
    if (MOST >= 4 && group - h >= 4)
      weigh<VECTORS, MOST>(w, stride, v_cache, places, count, sums, o, dim), h += MOST;
    else if (MOST >= 4 && group - h == 3)
      weigh<VECTORS, MOST >= 4 ? 3 : 1>(w, stride, v_cache, places, count, sums, o, dim), h += 3;
    else if (MOST >= 2 && group - h >= 2)
      weigh<VECTORS, MOST >= 2 ? 2 : 1>(w, stride, v_cache, places, count, sums, o, dim), h += 2;
    else
      weigh<VECTORS, 1>(w, stride, v_cache, places, count, sums, o, dim), h += 1;
  }
}

// In place over `count` scores times `scale`; those up to `stride`, a multiple of W, become 0.
inline void softmax(float* scores, long count, long stride, float scale) {
  for (long t = count; t < stride; t++) scores[t] = -INFINITY;
  floats highest = load(scores);
  for (long t = W; t < stride; t += W) {
    floats v = load(scores + t);
    highest = v > highest ? v : highest;
  }
  float top = highest[0];
  for (int i = 1; i < W; i++) top = highest[i] > top ? highest[i] : top;
  floats total = {};
  for (long t = 0; t < stride; t += W) {
    floats e = exp_of((load(scores + t) - top) * scale);
    store(scores + t, e);
    total += e;
  }
  float inverse = 1.0f / sum(total);
  for (long t = 0; t < stride; t += W) store(scores + t, load(scores + t) * inverse);
}

constexpr long AHEAD = 12;  // tokens

template <typename T>
inline void fetch(const T* values, long count) {
  for (long i = 0; i < count; i += 64 / long(sizeof(T))) __builtin_prefetch(values + i);
}

template <int VECTORS, typename T>
void attend(const T* query, const T* k_cache, const T* v_cache, const int32_t* page_table, const int32_t* lengths,
            const int32_t* slots, T* out, long rows, long max_pages, long page_size, long heads, long kv_heads, long dim,
            float scale, long window, int threads) {
  // A task is a row, as the K of a token lie side by side for all heads; with few rows it is one KV head of a row.
  long group = heads / kv_heads, parts = rows >= 2 * threads ? 1 : kv_heads, width = kv_heads / parts;
#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
    scratch.sums.resize(dim);
#pragma omp for schedule(dynamic)
    for (long task = 0; task < rows * parts; task++) {
      long row = task / parts, first = task % parts * width, slot = slots ? slots[row] : row;
      long end = lengths[slot], start = window && end > window ? end - window : 0, count = end - start;
      scratch.find_tokens(page_table + slot * max_pages, start, end, page_size, kv_heads * dim);
      const long* places = scratch.places.data();
      long stride = (count + W - 1) / W * W;
      if (long(scratch.scores.size()) < width * group * stride) scratch.scores.resize(width * group * stride);
      float* scores = scratch.scores.data();
      const T* q = query + (row * heads + first * group) * dim;
      for (long t = 0; t < count; t++) {
        const T* k = k_cache + places[t] + first * dim;
        // Pages lie anywhere, so the processor cannot guess what comes: K some tokens ahead, V for when the scores are there.
        if (t + AHEAD < count) fetch(k_cache + places[t + AHEAD] + first * dim, width * dim);
        fetch(v_cache + places[t] + first * dim, width * dim);
        for (long h = 0; h < width * group; k += dim)
          for (long g = 0; g < group; g++, h++) scores[h * stride + t] = dot<VECTORS>(q + h * dim, k, dim);
      }
      for (long h = 0; h < width * group; h++) softmax(scores + h * stride, count, stride, scale);
      for (long h = 0; h < width * group; h += group)
        weigh_group<VECTORS>(scores + h * stride, stride, v_cache + (first + h / group) * dim, places, count,
                             scratch.sums.data(), out + (row * heads + first * group + h) * dim, group, dim);
    }
  }
}

}  // namespace

#define EXPORT(T, NAME)                                                                                                     \
  extern "C" void norm_##NAME(const T* x, const T* residual, const T* weight, T* total, T* out, long rows, long size,       \
                              float eps, int threads) {                                                                     \
    norm(x, residual, weight, total, out, rows, size, eps, threads);                                                        \
  }                                                                                                                         \
  extern "C" void silu_mul_##NAME(const T* gate_up, T* out, long rows, long size, int threads) {                            \
    silu_mul(gate_up, out, rows, size, threads);                                                                            \
  }                                                                                                                         \
  extern "C" void rope_append_##NAME(const T* qkv, const T* q_weight, const T* k_weight, float eps, const float* table,     \
                                     const int64_t* positions, T* k_cache, T* v_cache, const int64_t* locations, T* query,  \
                                     long tokens, long heads, long kv_heads, long dim, int threads) {                       \
    rope_append(qkv, q_weight, k_weight, eps, table, positions, k_cache, v_cache, locations, query, tokens, heads,          \
                kv_heads, dim, threads);                                                                                    \
  }                                                                                                                         \
  extern "C" void attend_##NAME(const T* query, const T* k_cache, const T* v_cache, const int32_t* page_table,              \
                                const int32_t* lengths, const int32_t* slots, T* out, long rows, long max_pages,            \
                                long page_size, long heads, long kv_heads, long dim, float scale, long window,              \
                                int threads) {                                                                              \
    auto serve = dim == 64 ? attend<4, T> : dim == 128 ? attend<8, T> : attend<0, T>;                                       \
    serve(query, k_cache, v_cache, page_table, lengths, slots, out, rows, max_pages, page_size, heads, kv_heads, dim,      \
           scale, window, threads);                                                                                         \
  }
EXPORT(bf16, bf16)
EXPORT(float, f32)

extern "C" void linear_bf16(const bf16* x, const bf16* w, const bf16* bias, bf16* y, long m, long n, long k, int threads) {
#ifdef __AMX_BF16__
  if (n % TILE == 0 && k % TILE_K == 0 && may_use_tiles())
    return linear_in_tiles(x, w, bias, y, m, n, k, threads);
#endif
  linear(x, w, bias, y, m, n, k, threads);
}

// Whether `linear_bf16` has a matrix unit to use.
extern "C" int has_tiles() {
#ifdef __AMX_BF16__
  return may_use_tiles();
#else
  return 0;
#endif
}
