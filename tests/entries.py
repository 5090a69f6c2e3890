"""The C++ functions through which tests call the kernels of csrc: one text for each source, which is compiled once for
all tests of it.
"""

QUANTIZE = """
using namespace jax_fp8;

static QuantizeArguments arguments_of(Matrices x, int64_t x_type, const float* source, int64_t row, int64_t from_amax,
                                      int64_t margin, double amax_epsilon, int64_t power_2_scale, int64_t format,
                                      uint8_t* values, uint8_t* values_t, float* amax, float* scale, int64_t rows,
                                      int64_t cols) {
  const ScaleRule rule{static_cast<int32_t>(row), from_amax != 0, static_cast<int32_t>(margin),
                       static_cast<float>(amax_epsilon), power_2_scale != 0};
  return {.x = x, .x_type = static_cast<SourceType>(x_type), .source = {source, rule},
          .format = static_cast<Fp8Type>(format), .values = values, .values_t = values_t, .amax = amax, .scale = scale,
          .rows = rows, .cols = cols};
}

static Matrices alone(const void* x, int64_t cols) { return {{x}, {cols, cols,
                      cols}}; }  extern "C" int quantize(const void* x, int64_t x_type, const float* source,
                      int64_t row, int64_t from_amax, int64_t margin, double amax_epsilon, int64_t power_2_scale,
                      int64_t format, int64_t rows, int64_t cols, uint8_t* values, float* amax, float* scale) {
  return launch_quantize(arguments_of(alone(x, cols), x_type, source, row, from_amax, margin, amax_epsilon,
                                      power_2_scale, format, values, nullptr, amax, scale, rows, cols), nullptr);
}

extern "C" int quantize_transpose(const void* x, int64_t x_type, const float* source, int64_t row, int64_t from_amax,
                                  int64_t margin, double amax_epsilon, int64_t power_2_scale, int64_t format,
                                  int64_t rows, int64_t cols, uint8_t* values, uint8_t* values_t, float* amax,
                                  float* scale) {
  return launch_quantize_transpose(arguments_of(alone(x, cols), x_type, source, row, from_amax, margin, amax_epsilon,
                                                power_2_scale, format,
                                                values, values_t, amax, scale, rows, cols), nullptr);
}

extern "C" int quantize_transpose_sums(const void* x, int64_t x_type, const float* source, int64_t format, int64_t rows,
                                       int64_t cols, uint8_t* values, uint8_t* values_t, float* amax, float* scale,
                                       float* sums, float* partial) {
  QuantizeArguments arguments = arguments_of(alone(x, cols), x_type, source, 0, 0, 0, 0, 0, format, values, values_t,
                                             amax, scale, rows, cols);
  arguments.sums = {sums, partial};
  return launch_quantize_transpose(arguments, nullptr);
}

extern "C" int side_by_side(const void* first, const void* second, const void* third, int64_t x_type,
                            const float* source, int64_t format, int64_t rows, int64_t end, int64_t second_end,
                            int64_t cols, uint8_t* values, uint8_t* values_t, float* amax, float* scale, float* sums,
                            float* partial) {
  const Matrices x{{first, second, third}, {end, second_end, cols}};
  QuantizeArguments arguments = arguments_of(x, x_type, source, 0, 0, 0, 0, 0, format, values, values_t, amax, scale,
                                             rows, cols);
  arguments.sums = {sums, partial};
  return launch_quantize_transpose(arguments, nullptr);
}

extern "C" int by_tile(const void* first, const void* second, const void* third, int64_t x_type, int64_t rows,
                       int64_t end, int64_t second_end, int64_t cols, int64_t square, int64_t square_t, int64_t margin,
                       double amax_epsilon, int64_t power_2_scale, uint8_t* values, uint8_t* values_t, float* amax,
                       float* scales, float* scales_t, float* sums, float* partial) {
  const TileRule rule{square != 0, square_t != 0, static_cast<int32_t>(margin), static_cast<float>(amax_epsilon),
                      power_2_scale != 0};
  return launch_quantize_by_tile({{{first, second, third}, {end, second_end, cols}}, static_cast<SourceType>(x_type),
                                  {rule, values, values_t, amax, scales, scales_t}, {sums, partial}, rows, cols},
                                 nullptr);
}
"""

ACTIVATION = """
using namespace jax_fp8;

static ActivationInputs inputs_of(const void* dy, const void* x, const float* row_weights, int64_t type,
                                  int64_t activation, int64_t gated, int64_t rows, int64_t width) {
  return {dy, x, row_weights, static_cast<SourceType>(type), static_cast<Activation>(activation), gated != 0, rows,
          width};
}

extern "C" int quantize(const void* dy, const void* x, const float* row_weights, int64_t type, int64_t activation,
                        int64_t gated, int64_t rows, int64_t width, const float* source, int64_t row, int64_t format,
                        uint8_t* values, uint8_t* values_t, float* amax, float* scale, float* partial, float* sums,
                        const float* activated_scale, int64_t activated_format, uint8_t* activated_t) {
  ActivationArguments arguments{.inputs = inputs_of(dy, x, row_weights, type, activation, gated, rows, width),
                                .source = {source, {static_cast<int32_t>(row), false, 0, 0.0f, false}},
                                .format = static_cast<Fp8Type>(format), .values = values, .values_t = values_t,
                                .amax = amax, .scale = scale, .sums = {sums, partial},
                                .activated_scale = activated_scale,
                                .activated_format = static_cast<Fp8Type>(activated_format), .activated_t = activated_t};
  return dy ? launch_activation_backward_quantize(arguments, nullptr) : launch_activation_quantize(arguments, nullptr);
}

extern "C" int amax(const void* dy, const void* x, const float* row_weights, int64_t type, int64_t activation,
                    int64_t gated, int64_t rows, int64_t width, float* amax) {
  const ActivationInputs inputs = inputs_of(dy, x, row_weights, type, activation, gated, rows, width);
  return dy ? launch_activation_backward_amax(inputs, amax, nullptr) : launch_activation_amax(inputs, amax, nullptr);
}

extern "C" int by_tile(const void* dy, const void* x, const float* row_weights, int64_t type, int64_t activation,
                       int64_t gated, int64_t rows, int64_t width, int64_t square, int64_t square_t, int64_t margin,
                       double amax_epsilon, int64_t power_2_scale, uint8_t* values, uint8_t* values_t, float* amax,
                       float* scales, float* scales_t, float* sums, float* partial, uint8_t* activated_t,
                       float* activated_scales_t) {
  const TileRule rule{square != 0, square_t != 0, static_cast<int32_t>(margin), static_cast<float>(amax_epsilon),
                      power_2_scale != 0};
  const ActivationByTileArguments arguments{inputs_of(dy, x, row_weights, type, activation, gated, rows, width),
                                            {rule, values, values_t, amax, scales, scales_t}, {sums, partial},
                                            activated_t, activated_scales_t};
  return dy ? launch_activation_backward_quantize_by_tile(arguments, nullptr)
            : launch_activation_quantize_by_tile(arguments, nullptr);
}

template <typename Producer>
__global__ void elements_kernel(Producer producer, int64_t width, float* elements) {
  for (int64_t col = threadIdx.x; col < width; col += 32) {
    float made[Producer::kMade];
    producer.element(blockIdx.x, col, width, made);
    for (int m = 0; m < Producer::kMade; ++m) elements[(blockIdx.x * Producer::kMade + m) * width + col] = made[m];
  }
}

template <typename Plain, typename Gated>
static int launch_elements(const ActivationInputs& inputs, float* elements) {
  by_dtype(inputs.type, [&](auto element) {
    with_producer<decltype(element), Plain, Gated>(inputs, [&](auto producer) {
      const auto kernel = elements_kernel<decltype(producer)>;
      kernel<<<inputs.rows, 32>>>(producer, inputs.width, elements);
    });
  });
  return cudaGetLastError();
}

extern "C" int elements(const void* dy, const void* x, const float* row_weights, int64_t type, int64_t activation,
                        int64_t gated, int64_t rows, int64_t width, float* elements) {
  const ActivationInputs inputs = inputs_of(dy, x, row_weights, type, activation, gated, rows, width);
  return dy ? launch_elements<Backward, GatedBackward>(inputs, elements)
            : launch_elements<Forward, GatedForward>(inputs, elements);
}
"""

NORM = """
using namespace jax_fp8;

static NormArguments norm_of(const void* x, int64_t x_type, const float* norm_scale, const float* norm_bias,
                             double epsilon, int64_t rows, int64_t cols) {
  return {.x = x, .x_type = static_cast<SourceType>(x_type), .norm_scale = norm_scale, .norm_bias = norm_bias,
          .epsilon = static_cast<float>(epsilon), .rows = rows, .cols = cols};
}

extern "C" int norm_quantize(const void* x, int64_t x_type, const float* norm_scale, const float* norm_bias,
                             double epsilon, int64_t rows, int64_t cols, const float* source, int64_t row,
                             int64_t from_amax, int64_t format, uint8_t* values, uint8_t* values_t, float* amax,
                             float* scale, float* mean, float* rstd) {
  return launch_norm_quantize(
      {.norm = norm_of(x, x_type, norm_scale, norm_bias, epsilon, rows, cols),
       .source = {source, {static_cast<int32_t>(row), from_amax != 0, 0, 0.0f, false}},
       .format = static_cast<Fp8Type>(format), .scale = scale,
       .results = {values, values_t, amax, mean, rstd}}, nullptr);
}

extern "C" int norm_amax(const void* x, int64_t x_type, const float* norm_scale, const float* norm_bias, double epsilon,
                         int64_t rows, int64_t cols, float* amax) {
  return launch_norm_amax(norm_of(x, x_type, norm_scale, norm_bias, epsilon, rows, cols), amax, nullptr);
}

extern "C" int norm_backward(const void* dy, const void* x, const void* residual, int64_t type, const float* norm_scale,
                             const float* mean, const float* rstd, int64_t partials, int64_t rows, int64_t cols,
                             void* dx, float* dscale, float* dbias, float* dscale_partials, float* dbias_partials) {
  return launch_norm_backward({dy, x, residual, static_cast<SourceType>(type), norm_scale, mean, rstd, dx, dscale,
                               dbias, dscale_partials, dbias_partials, partials, rows, cols}, nullptr);
}

extern "C" int by_tile(const void* x, int64_t x_type, const float* norm_scale, const float* norm_bias, double epsilon,
                       int64_t rows, int64_t cols, int64_t square, int64_t square_t, int64_t margin,
                       double amax_epsilon, int64_t power_2_scale, uint8_t* values, uint8_t* values_t, float* amax,
                       float* scales, float* scales_t, float* mean, float* rstd) {
  const TileRule rule{square != 0, square_t != 0, static_cast<int32_t>(margin), static_cast<float>(amax_epsilon),
                      power_2_scale != 0};
  return launch_norm_quantize_by_tile({{x, static_cast<SourceType>(x_type), norm_scale, norm_bias,
                                        static_cast<float>(epsilon), rows, cols},
                                       {rule, values, values_t, amax, scales, scales_t}, mean, rstd}, nullptr);
}

extern "C" int by_one(const void* x, int64_t x_type, const float* norm_scale, const float* norm_bias, double epsilon,
                      int64_t rows, int64_t cols, const float* source, float* amax, float* scale, float* mean,
                      float* rstd) {
  return launch_norm_quantize({{x, static_cast<SourceType>(x_type), norm_scale, norm_bias, static_cast<float>(epsilon),
                                rows, cols},
                               {source, {0, false, 0, 0.0f, false}}, Fp8Type::kE4M3, scale,
                               {nullptr, nullptr, amax, mean, rstd}}, nullptr);
}
"""
