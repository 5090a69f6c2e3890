// The kernels of a token, layer by layer, in one CUDA graph and without JAX: how fast they are as calls of their own
// and in a chain, and which plans are the fastest in a whole layer.
//
//     nvcc -std=c++20 -O3 -arch=sm_90a -I csrc -I "$(python -c 'import jax; print(jax.ffi.include_dir())')" \
//         benchmarks/decoding_layers.cu -o decoding_layers
//     ./decoding_layers                        # GPT-3 1.3B, Llama 3.2 1B and Llama 3 8B, one row
//     ./decoding_layers --rows 8 --model llama3-8b
//     ./decoding_layers --rows 64 --cache fp8 --step 127
//     ./decoding_layers --search               # plans of the four GEMMs, one after the other; a minute
//
// As in a chain of text generation, attention and the activation cast what the next GEMM reads. Every layer has weights
// of its own, so none of them are in L2. A token sees a prompt of --prompt slots, 512, and new tokens up to number
// --step, 32.
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "few_rows_gemm.cu"
#include "cached_attention.cu"

namespace decoding_layers {

using namespace jax_fp8;

void check(cudaError_t status, int line) {
  if (status == cudaSuccess) return;
  fprintf(stderr, "line %d: %s\n", line, cudaGetErrorString(status));
  exit(1);
}
#define CHECK(call) check(call, __LINE__)

enum class Content { kE4M3, kBFloat16, kOnes };

__global__ void fill(uint32_t* words, size_t count, Content content) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    uint32_t bits = static_cast<uint32_t>(i) * 2654435761u;
    bits = (bits ^ bits >> 16) * 0x85ebca6bu, bits = (bits ^ bits >> 13) * 0xc2b2ae35u, bits ^= bits >> 16;
    words[i] = content == Content::kE4M3       ? bits & 0xb7b7b7b7u                  // none is NaN
               : content == Content::kBFloat16 ? (bits & 0x80ff80ffu) | 0x3f003f00u  // magnitudes from 0.5 on
                                               : __float_as_uint(1.0f);
  }
}

template <typename T>
T* make(size_t count, Content content) {
  void* memory;
  CHECK(cudaMalloc(&memory, count * sizeof(T)));
  fill<<<512, 256>>>(static_cast<uint32_t*>(memory), count * sizeof(T) / 4, content);
  return static_cast<T*>(memory);
}

template <typename T>
T* on_device(const std::vector<T>& values) {
  T* const copy = make<T>(values.size(), Content::kOnes);
  CHECK(cudaMemcpy(copy, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return copy;
}

struct Model {
  const char* name;
  int layers, hidden, ffn, heads, kv_heads, head_dim;
  bool is_llama;  // RMSNorm, SwiGLU and rotary positions, and no bias
};
constexpr Model kModels[] = {{"gpt3-1.3b", 24, 2048, 8192, 16, 16, 128, false},
                             {"llama3.2-1b", 16, 2048, 8192, 32, 8, 64, true},
                             {"llama3-8b", 32, 4096, 14336, 32, 8, 128, true}};
constexpr int kNewSlots = 256;

// What a token sees: slots of a prompt, and new ones up to number `step`, its own.
struct Cache {
  bool fp8 = false;
  int prompt = 512, step = 32;

  int slots() const { return prompt + kNewSlots; }
};

// The kernels of a layer, as bits of a set.
enum : int { kQkv = 1, kOut = 2, kUp = 4, kDown = 8, kAttention = 16, kAll = 31 };
constexpr struct {
  int bit;
  const char* name;
} kKernels[] = {{kAll, "all"}, {kQkv, "qkv"}, {kAttention, "attention"}, {kOut, "out"}, {kUp, "up"}, {kDown, "down"}};

struct Layer {
  uint8_t *qkv, *out, *up, *down;
  uint16_t *keys, *values;  // or as many bytes of E4M3
};

class Token {
 public:
  Token(const Model& model, int rows, const Cache& cache) : model_(model), rows_(rows), cache_(cache) {
    const auto weights = [](int64_t n, int64_t k) { return make<uint8_t>(n * k, Content::kE4M3); };
    const auto floats = [](int64_t count) { return make<uint16_t>(count, Content::kBFloat16); };
    for (int i = 0; i < model.layers; ++i) {
      const int64_t slots = int64_t{rows} * kv() * cache.slots();
      layers_.push_back({weights(queries() + 2 * kv(), model.hidden), weights(model.hidden, queries()),
                         weights(ups(), model.hidden), weights(model.hidden, model.ffn), floats(slots), floats(slots)});
    }
    x_ = floats(rows * model.hidden), y_ = floats(rows * model.hidden), attended_ = weights(rows, queries());
    qkv_ = floats(rows * (queries() + 2 * kv())), middle_ = weights(rows, model.ffn), bias_ = floats(ups());
    cast_ = weights(rows, model.hidden);
    ones_ = make<float>(std::max(model.hidden, rows * std::max(model.head_dim, kv() * cache.slots())), Content::kOnes);
    lengths_ = on_device(std::vector<int>(rows, cache.prompt)), step_ = on_device(std::vector<int>{cache.step});
    CHECK(cudaStreamCreate(&stream_));
  }

  int configs[4] = {};  // of qkv, out, up and down: digits as csrc/few_rows_gemm.cu reads them

  // The median time of a layer with these of its kernels, in us; infinite if a plan does not exist.
  double time(int kernels, bool chain, int runs) {
    cudaGraph_t graph;
    cudaGraphExec_t program;
    CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    const bool exists = launch(kernels, chain);
    CHECK(cudaStreamEndCapture(stream_, &graph));
    if (!exists) return 1e9;
    CHECK(cudaGraphInstantiate(&program, graph, 0));
    cudaEvent_t start, end;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    std::vector<double> times;
    for (int i = 0; i < runs; ++i) {
      float ms;
      CHECK(cudaEventRecord(start, stream_));
      CHECK(cudaGraphLaunch(program, stream_));
      CHECK(cudaEventRecord(end, stream_));
      CHECK(cudaEventSynchronize(end));
      CHECK(cudaEventElapsedTime(&ms, start, end));
      times.push_back(1e3 * ms / model_.layers);
    }
    CHECK(cudaGraphExecDestroy(program));
    CHECK(cudaGraphDestroy(graph));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

 private:
  int queries() const { return model_.heads * model_.head_dim; }
  int kv() const { return model_.kv_heads * model_.head_dim; }
  int ups() const { return model_.is_llama ? 2 * model_.ffn : model_.ffn; }

  bool launch(int kernels, bool chain) {
    bool is_first = true, exists = true;
    const auto add = [&](int kernel, auto function) {
      if (!(kernels & kernel)) return;
      const Following following(chain && !is_first);
      exists = function() && exists, is_first = false;
    };
    const int q = queries(), hidden = model_.hidden;
    for (const Layer& layer : layers_) {
      add(kQkv, [&] { return multiply(0, q + 2 * kv(), hidden, x_, layer.qkv, nullptr, qkv_); });
      add(kAttention, [&] { return attend(layer); });
      add(kOut, [&] { return multiply(1, hidden, q, attended_, layer.out, x_, y_); });
      add(kUp, [&] { return multiply(2, ups(), hidden, y_, layer.up, nullptr, middle_); });
      add(kDown, [&] { return multiply(3, hidden, model_.ffn, middle_, layer.down, y_, x_); });
    }
    return exists;
  }

  bool multiply(int gemm, int n, int k, const void* a, const void* b, const void* c, void* d) const {
    const bool normalizes = gemm % 2 == 0, activates = gemm == 2;
    few_rows_gemm::Problem problem{rows_, n, k, false, few_rows_gemm::Scaling::kOne, SourceType::kBFloat16, 1e-3f,
                                   configs[gemm]};
    if (normalizes) problem.preparation = {.normalizes = true, .casts = true, .epsilon = 1e-5f};
    problem.casts_d = problem.activates = activates, problem.gated = activates && model_.is_llama;
    problem.activation = model_.is_llama ? Activation::kSilu : Activation::kGelu;
    if (gemm == 0) problem.part_starts[0] = queries(), problem.part_starts[1] = queries() + kv();
    few_rows_gemm::Operands operands{a, b, ones_, ones_, model_.is_llama ? nullptr : bias_, c, d};
    operands.rows = cast_;
    if (activates) operands.d_scale = ones_;
    if (normalizes) operands.norm_scale = ones_, operands.norm_bias = model_.is_llama ? nullptr : ones_;
    return few_rows_gemm::enqueue(problem, operands, stream_).empty();
  }

  bool attend(const Layer& layer) const {
    const CachedAttentionArguments arguments{
        .query = qkv_,
        .key = qkv_ + rows_ * queries(),
        .value = qkv_ + rows_ * (queries() + kv()),
        .type = SourceType::kBFloat16,
        .is_fp8 = cache_.fp8,
        .keys = layer.keys,
        .values = layer.values,
        .key_scales = ones_,
        .value_scales = ones_,
        .lengths = lengths_,
        .step = step_,
        .cos = ones_,
        .sin = ones_,
        .attended = attended_,
        .attended_scale = ones_,
        .sizes = {rows_, model_.kv_heads, model_.heads / model_.kv_heads, model_.head_dim, cache_.slots(),
                  cache_.prompt,
                  model_.is_llama ? model_.head_dim / 2 : 0},
        .window = 0,
        .scale = 0.01f,
        .logit_cap = 0,
    };
    return launch_cached_attention(arguments, stream_) == cudaSuccess;
  }

  const Model& model_;
  const int rows_;
  const Cache cache_;
  std::vector<Layer> layers_;
  uint8_t *cast_, *attended_, *middle_;
  uint16_t *x_, *y_, *qkv_, *bias_;
  float* ones_;
  int *lengths_, *step_;
  cudaStream_t stream_;
};

void print_times(Token& token, const Model& model, int rows) {
  for (const auto& [kernels, name] : kKernels) {
    const double calls = token.time(kernels, false, 25), chain = token.time(kernels, true, 25);
    printf("%-12s %d rows  %-10s calls %7.2f  chain %7.2f us a layer\n", model.name, rows, name, calls, chain);
  }
}

// Tries all plans of one GEMM in a chain of whole layers, keeps the fastest, and goes on with the next GEMM.
void search(Token& token, const Model& model, int rows) {
  // Along the rows of b, and along k.
  const int of_warps[][2] = {{1, 8}, {1, 16}, {2, 4}, {2, 8}, {4, 2}, {4, 4}};
  const int of_warpgroups[][2] = {{4, 1}, {4, 2}, {4, 4}, {8, 1}, {8, 2}, {9, 1}};  // 9 stands for 16
  std::vector<std::array<int, 3>> warps;  // with tiles
  if (rows <= few_rows_gemm::kMostPreparedRows) {
    for (const auto& [n, k] : of_warps) warps.push_back({2, n, k});
  }
  for (const auto& [n, k] : of_warpgroups) warps.push_back({1, n, k});
  for (const int gemm : {2, 3, 0, 1}) {
    struct Tried {
      double us;
      int config;
    };
    std::vector<Tried> all = {{0, 0}};
    for (const int cluster : {1, 2, 4, 8}) {
      for (const auto& [tiles, row_warps, depth_warps] : warps) {
        for (const int chunks : {1, 2, 4}) {
          for (const int stages : {1, 2, 3, 4}) {
            const int ring = stages * 100'000'000 + chunks * 10'000'000;
            all.push_back({0, ring + cluster * 10'000 + tiles * 1000 + row_warps * 100 + depth_warps});
          }
        }
      }
    }
    const auto measure = [&](Tried& tried, int runs) {
      token.configs[gemm] = tried.config;
      tried.us = token.time(kAll, true, runs);
    };
    const auto is_faster = [](const Tried& one, const Tried& other) { return one.us < other.us; };
    for (Tried& tried : all) measure(tried, 5);
    const double chosen = all[0].us;
    std::sort(all.begin(), all.end(), is_faster);
    for (int i = 0; i < 10; ++i) measure(all[i], 21);
    std::sort(all.begin(), all.begin() + 10, is_faster);
    token.configs[gemm] = all[0].config;
    const char* const name = kKernels[gemm == 0 ? 1 : gemm + 2].name;
    printf("%-12s %d rows  %-5s as chosen %7.2f |", model.name, rows, name, chosen);
    for (int i = 0; i < 10; ++i) printf("  %d %.2f", all[i].config, all[i].us);
    printf("  us a layer\n");
  }
}

}  // namespace decoding_layers

int main(int count, char** arguments) {
  using namespace decoding_layers;
  int rows = 1;
  bool searches = false;
  Cache cache;
  std::string wanted;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    const bool has_value = i + 1 < count;
    if (argument == "--search") {
      searches = true;
    } else if (argument == "--rows" && has_value) {
      rows = atoi(arguments[++i]);
    } else if (argument == "--cache" && has_value) {
      cache.fp8 = std::string(arguments[++i]) == "fp8";
    } else if (argument == "--prompt" && has_value) {
      cache.prompt = atoi(arguments[++i]);
    } else if (argument == "--step" && has_value) {
      cache.step = atoi(arguments[++i]);
    } else if (argument == "--model" && has_value) {
      wanted = arguments[++i];
    } else {
      fprintf(stderr,
              "the arguments are --rows N, --model NAME, --cache fp8, --prompt N, --step N and --search, got %s\n",
              argument.c_str());
      return 2;
    }
  }
  if (rows < 1 || rows > few_rows_gemm::kMostRows) {
    fprintf(stderr, "--rows must be from 1 to %d, got %d\n", few_rows_gemm::kMostRows, rows);
    return 2;
  }
  if (cache.prompt < 1 || cache.step < 0 || cache.step >= kNewSlots) {
    fprintf(stderr, "--prompt must be at least 1 and --step from 0 to %d, got %d and %d\n", kNewSlots - 1, cache.prompt,
            cache.step);
    return 2;
  }
  for (const Model& model : kModels) {
    if (!wanted.empty() && wanted != model.name) continue;
    Token token(model, rows, cache);
    searches ? search(token, model, rows) : print_times(token, model, rows);
    CHECK(cudaDeviceSynchronize());
  }
}
