#include "adam.h"

#include <algorithm>
#include <bit>

#include "ffi.h"
#include "launch.h"

namespace jax_fp8 {
namespace {

constexpr char kOperation[] = "jax_fp8_adam";
constexpr size_t kSharedOperands = 4;  // scalars, scales, seed, places

// Bits of a leaf's `layout`: which operands follow g, mu and nu, and whether weight decay applies.
enum Layout : int32_t {
  kHasParam = 1,
  kHasMaster = 2,
  kHasValues = 4,  // their scale and amax follow after values_t
  kHasValuesT = 8,
  kHasMuScale = 16,  // where mu is FP8
  kHasNuScale = 32,
  kHasAll = 63,
  kDecays = 64
};

constexpr int32_t kLayoutBits = kHasAll | kDecays;

// A leaf's operands: g, mu, nu and those of its layout. All but g are results too.
size_t operands_of(int32_t layout) {
  const size_t values_scalars = layout & kHasValues ? 2 : 0;
  return 3 + std::popcount(static_cast<uint32_t>(layout & kHasAll)) + values_scalars;
}
size_t results_of(int32_t layout) { return operands_of(layout) - 1; }

Storage storage_of(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::F32: return Storage::kFloat32;
    case ffi::BF16: return Storage::kBFloat16;
    case ffi::F16: return Storage::kFloat16;
    case ffi::F8E4M3FN: return Storage::kE4M3;
    case ffi::F8E5M2: return Storage::kE5M2;
    case ffi::U16: return Storage::kRemainder;
    default: return Storage::kNone;
  }
}

bool is_float(Storage storage) {
  return storage == Storage::kFloat32 || storage == Storage::kBFloat16 || storage == Storage::kFloat16;
}

bool is_fp8(Storage storage) { return storage == Storage::kE4M3 || storage == Storage::kE5M2; }

// An array of a leaf, updated in place. An absent array has no buffer, no data and the storage kNone.
struct Part {
  const char* name;
  std::optional<ffi::AnyBuffer> buffer = std::nullopt;
  void* data = nullptr;
  Storage storage = Storage::kNone;
};

struct Columns {
  int64_t first, count;
};

// Whether each of `all` columns lies in exactly one of these ranges.
bool are_all(std::vector<Columns> taken, int64_t all) {
  std::sort(taken.begin(), taken.end(), [](const Columns& a, const Columns& b) { return a.first < b.first; });
  int64_t next = 0;
  for (const Columns& columns : taken) {
    if (columns.first != next) return false;
    next += columns.count;
  }
  return next == all;
}

// A matrix of FP8 values that several leaves share: they lie side by side, and each writes its own columns. By tile
// even the cast of a single leaf is a shared cast. The arrays of a shared cast are operands once, in this order.
struct SharedCast {
  uint8_t* values;
  uint8_t* values_t;
  float* scale;  // a scalar; by tile [rows / 128, cols / 128], rounded up
  float* amax;
  float* scale_t;  // by tile only, [cols / 128, rows / 128]
  Storage storage;
  int64_t rows, cols;
  std::vector<Columns> taken;  // by the leaves read so far
};
constexpr int32_t kUnshared = -1;

size_t shared_cast_arrays(bool by_tile) { return by_tile ? 5 : 4; }
int64_t tiles_of(int64_t length) { return divide_up(length, kTile); }

// Where a leaf's values lie in a shared cast.
struct Place {
  int32_t shared_cast;  // its number, or kUnshared
  int32_t first_column;
};

// Walks the operands and results in order, and reports the first broken rule. A call makes thousands of checks, and
// composing a message costs more than a check: so only a broken rule composes its message.
class LeafReader {
 public:
  LeafReader(ffi::RemainingArgs operands, ffi::RemainingRets results, bool by_tile)
      : operands_(operands), results_(results), by_tile_(by_tile) {}

  // Reads the next leaf from its operands.
  AdamEntry read(int32_t layout, Place place) {
    owner_ = "leaf", ++number_;
    const Part g = operand("g");
    check_alignment(g);
    dimensions_ = g.buffer ? g.buffer->dimensions() : ffi::AnyBuffer::Dimensions{};
    require(is_float(g.storage), g, "be float32, bfloat16 or float16");
    const Part mu = updated("mu"), nu = updated("nu");
    const Part param = layout & kHasParam ? updated("param") : Part{"param"};
    const Part master = layout & kHasMaster ? updated("master") : Part{"master"};
    const Part values = layout & kHasValues ? updated("values") : Part{"values"};
    const Part values_t = layout & kHasValuesT ? updated("values_t", Shape::kTransposed) : Part{"values_t"};
    float* const scale = layout & kHasValues ? scalar("scale") : nullptr;
    float* const amax = layout & kHasValues ? scalar("amax") : nullptr;
    float* const mu_scale = layout & kHasMuScale ? scalar("mu_scale") : nullptr;
    float* const nu_scale = layout & kHasNuScale ? scalar("nu_scale") : nullptr;
    check_moment(mu, mu_scale);
    check_moment(nu, nu_scale);
    require(param.buffer || master.buffer, g, "come with a param, a master or both");
    check_weight(param, master, values);
    check_values(values, values_t);
    if (!checks_.passed()) return {};

    const bool transposing = values_t.buffer.has_value();
    const AdamLeaf leaf{
        .g = g.data,
        .mu = mu.data,
        .nu = nu.data,
        .param = param.data,
        .master = master.data,
        .values = static_cast<uint8_t*>(values.data),
        .values_t = static_cast<uint8_t*>(values_t.data),
        .amax = amax,
        .cols = transposing ? dimensions_[1] : count_of(*g.buffer),
        .rows = transposing ? static_cast<int32_t>(dimensions_[0]) : 1,
        .values_stride = 0,
        .g_storage = g.storage,
        .mu_storage = mu.storage,
        .nu_storage = nu.storage,
        .param_storage = param.storage,
        .master_storage = master.storage,
        .values_storage = values.storage,
        .decays = (layout & kDecays) != 0,
    };
    elements_ = sum_of(elements_, count_of(*g.buffer));
    require(elements_ <= kMostElements, g, "have, with all leaves before it, at most 2**42 elements");
    AdamEntry entry{leaf, {.scale = scale, .mu_scale = mu_scale, .nu_scale = nu_scale}, {}};
    if (place.shared_cast != kUnshared) share(place, g, values, entry);
    return entry;
  }

  // Reads the next shared cast. The operands of all shared casts precede those of the leaves.
  void read_shared_cast() {
    owner_ = "shared cast", ++number_;
    const auto next = operands_.get<ffi::AnyBuffer>(next_operand_);
    if (next.has_value()) dimensions_ = next->dimensions();
    const Part values = updated("values"), values_t = updated("values_t", Shape::kTransposed);
    const Part scale = updated("scale", by_tile_ ? Shape::kTiles : Shape::kScalar);
    float* const amax = scalar("amax");
    const Part scale_t = by_tile_ ? updated("scale_t", Shape::kTransposedTiles) : Part{"scale_t"};
    check_values(values, values_t);
    require(!by_tile_ || values.storage == Storage::kE4M3, values, "be float8_e4m3fn by tile");
    if (!checks_.passed()) return;
    shared_casts_.push_back({
        .values = static_cast<uint8_t*>(values.data),
        .values_t = static_cast<uint8_t*>(values_t.data),
        .scale = static_cast<float*>(scale.data),
        .amax = amax,
        .scale_t = static_cast<float*>(scale_t.data),
        .storage = values.storage,
        .rows = dimensions_[0],
        .cols = dimensions_[1],
        .taken = {},
    });
  }
  void start_leaves() { number_ = -1; }

  // Called after all leaves: a column that no leaf writes would keep the values of an earlier step.
  ffi::Error check_columns() const {
    for (size_t i = 0; i < shared_casts_.size(); ++i) {
      if (are_all(shared_casts_[i].taken, shared_casts_[i].cols)) continue;
      return ffi::Error::InvalidArgument(std::string(kOperation) + ": the leaves of shared cast " + std::to_string(i) +
                                         " must have all of its " + std::to_string(shared_casts_[i].cols) +
                                         " columns, and each column one leaf");
    }
    return ffi::Error::Success();
  }

  bool passed() const { return checks_.passed(); }
  ffi::Error error() const { return checks_.error(); }

 private:
  enum class Shape { kSame, kTransposed, kScalar, kTiles, kTransposedTiles };

  // Checked before the handler computes with the dims or reads from the address.
  void check_sound(const Part& part) {
    if (!part.buffer) return;
    require(extent_of(*part.buffer) <= kMostElements, part, "have no negative dim, and at most 2**42 elements");
    require(part.data != nullptr || is_empty(*part.buffer), part, "have an address");
    const size_t bytes = ffi::ByteWidth(part.buffer->element_type());
    require(is_aligned(part.data, std::max<size_t>(bytes, 1)), part, "start at a multiple of its dtype's size");
  }

  void require(bool holds, const Part& part, const char* rule) {
    if (holds || !part.buffer || !checks_.passed()) return;
    const std::string argument = std::string(part.name) + " of " + owner_ + " " + std::to_string(number_);
    checks_.require(false, argument.c_str(), *part.buffer, rule);
  }

  Part operand(const char* name) {
    const auto found = operands_.get<ffi::AnyBuffer>(next_operand_++);
    if (!found.has_value()) return {name};  // the number of operands was checked
    const Part part{name, *found, found->untyped_data(), storage_of(found->element_type())};
    check_sound(part);
    return part;
  }

  // An operand that is also a result.
  Part updated(const char* name, Shape shape = Shape::kSame) {
    const Part part = operand(name);
    if (shape == Shape::kSame || shape == Shape::kTransposed) check_alignment(part);
    auto result = results_.get<ffi::AnyBuffer>(next_result_++);
    if (!part.buffer || !result.has_value()) return part;
    const auto arrived = part.buffer->dimensions();
    if (shape == Shape::kSame) {
      require(std::equal(arrived.begin(), arrived.end(), dimensions_.begin(), dimensions_.end()), part,
              "have the shape of g");
    } else if (shape == Shape::kScalar) {
      require(arrived.size() == 0 && part.storage == Storage::kFloat32, part, "be a float32 scalar");
    } else if (shape != Shape::kTransposed) {
      const bool swap = shape == Shape::kTransposedTiles;
      require(part.storage == Storage::kFloat32 && arrived.size() == 2 && dimensions_.size() == 2 &&
                  arrived[swap] == tiles_of(dimensions_[0]) && arrived[!swap] == tiles_of(dimensions_[1]),
              part, swap ? "be float32, one for each square of values_t" : "be float32, one for each square of values");
    } else {
      require(arrived.size() == 2 && dimensions_.size() == 2 && arrived[0] == dimensions_[1] &&
                  arrived[1] == dimensions_[0],
              part, "have rank 2 and the transposed shape of g");
    }
    const ffi::AnyBuffer kept = **result;
    const auto left = kept.dimensions();
    require(kept.element_type() == part.buffer->element_type() && kept.untyped_data() == part.data &&
                std::equal(left.begin(), left.end(), arrived.begin(), arrived.end()),
            part, "be updated in place; alias its result with it");
    return part;
  }

  float* scalar(const char* name) { return static_cast<float*>(updated(name, Shape::kScalar).data); }

  void check_alignment(const Part& part) {
    require(is_aligned(part.data, 16), part, "start at an address divisible by 16");
  }

  void check_moment(const Part& moment, const float* scale) {
    require((is_float(moment.storage) && moment.storage != Storage::kFloat16) || is_fp8(moment.storage), moment,
            "be float32, bfloat16, float8_e4m3fn or float8_e5m2");
    require(is_fp8(moment.storage) == (scale != nullptr), moment, "come with a scale if it is FP8, and only then");
  }

  // A float32 param is its own master. A bfloat16 or float16 param has a master too. An FP8 param has a master and FP8
  // values, and no param array.
  void check_weight(const Part& param, const Part& master, const Part& values) {
    require(is_float(param.storage), param, "be float32, bfloat16 or float16");
    require(param.storage == Storage::kFloat32 || master.buffer, param, "be float32 when it has no master");
    require(param.storage != Storage::kFloat32 || !master.buffer, param, "be bfloat16 or float16 when it has a master");
    require(master.storage == Storage::kFloat32 || master.storage == Storage::kFloat16 ||
                master.storage == Storage::kRemainder,
            master, "be float32, float16 or, as a remainder, uint16");
    require(master.storage != Storage::kRemainder || param.storage == Storage::kBFloat16, master,
            "be float32 or float16 when there is no bfloat16 param");
    require(param.buffer || values.buffer, master, "come with FP8 values when there is no param");
  }

  void check_values(const Part& values, const Part& values_t) {
    require(is_fp8(values.storage), values, "be float8_e4m3fn or float8_e5m2");
    require(values.buffer.has_value(), values_t, "come with values");
    require(values_t.storage == values.storage, values_t, "have the dtype of values");
    if (!values_t.buffer || dimensions_.size() != 2) return;
    require(dimensions_[0] % 16 == 0 && dimensions_[1] % 16 == 0, values_t,
            "have rows and columns divisible by 16; transpose other shapes after the step");
    require(dimensions_[0] <= kMostIndexed && dimensions_[1] <= kMostIndexed, values_t,
            "have at most 2147479552 rows and columns");
  }

  // Points a leaf at its columns of a shared cast.
  void share(Place place, const Part& g, const Part& values, AdamEntry& entry) {
    const bool known = place.shared_cast >= 0 && place.shared_cast < static_cast<int32_t>(shared_casts_.size());
    if (!known) return require(false, g, "have a place in a shared cast of the call");
    SharedCast& cast = shared_casts_[place.shared_cast];
    require(!values.buffer, values, "be absent where the leaf has a place in a shared cast");
    require(dimensions_.size() == 2 && dimensions_[0] == cast.rows && dimensions_[1] % 16 == 0, g,
            "be a matrix with the rows of its shared cast and columns divisible by 16");
    if (!checks_.passed()) return;
    const int64_t first = place.first_column;
    require(first % 16 == 0 && lies_within(first, dimensions_[1], cast.cols), g,
            "lie within its shared cast and begin at a column divisible by 16");
    cast.taken.push_back({first, dimensions_[1]});
    AdamLeaf& leaf = entry.leaf;
    leaf.values = cast.values + first;
    leaf.values_t = cast.values_t + first * cast.rows;
    leaf.amax = cast.amax;
    leaf.cols = dimensions_[1];
    leaf.rows = static_cast<int32_t>(cast.rows);
    leaf.values_stride = static_cast<int32_t>(cast.cols);
    leaf.values_storage = cast.storage;
    if (!by_tile_) {
      if (first == 0) entry.renewed.scale = cast.scale;  // the leaf that writes the scale clears the amax too
      return;
    }
    require(first % kTile == 0 && (dimensions_[1] % kTile == 0 || first + dimensions_[1] == cast.cols), g,
            "begin at a column divisible by 128 of its shared cast by tile, and end at one or at the last");
    require(leaf.param != nullptr, g, "have a param, in a shared cast by tile");
    const int64_t square_rows = tiles_of(cast.rows), first_square = first / kTile;
    entry.squares = {
        .scales = cast.scale + first_square,
        .scales_t = cast.scale_t + first_square * square_rows,
        .scales_stride = static_cast<int32_t>(tiles_of(cast.cols)),
        .scales_t_stride = static_cast<int32_t>(square_rows),
    };
  }

  ffi::RemainingArgs operands_;
  ffi::RemainingRets results_;
  ffi::AnyBuffer::Dimensions dimensions_;  // of the leaf's g, or the shared cast's values
  std::vector<SharedCast> shared_casts_;
  bool by_tile_;
  Checks checks_{kOperation};
  const char* owner_ = "";
  int number_ = -1;
  size_t next_operand_ = 0, next_result_ = 0;
  int64_t elements_ = 0;  // of the leaves so far
};

ffi::Error wrong_attribute(const std::string& rule) {
  return ffi::Error::InvalidArgument(std::string(kOperation) + ": " + rule);
}

// Checks the attributes that count something, before the handler counts with them.
ffi::Error check_numbers(ffi::Span<const int32_t> layout, int32_t shared_casts, int32_t first_leaf) {
  if (shared_casts < 0) return wrong_attribute("shared_casts must be 0 or more, got " + std::to_string(shared_casts));
  if (first_leaf < 0 || !lies_within(first_leaf, static_cast<int64_t>(layout.size()), kMostInt32)) {
    return wrong_attribute("first_leaf must be 0 or more and leave room for " + std::to_string(layout.size()) +
                           " leaves below 2**31, got " + std::to_string(first_leaf));
  }
  for (int32_t leaf : layout) {
    if ((leaf & ~kLayoutBits) != 0) {
      return wrong_attribute("layout must be made of the bits 1 to " + std::to_string(kDecays) + ", got " +
                             std::to_string(leaf));
    }
  }
  return ffi::Error::Success();
}

// A leaf has a cast of its own (or none), or columns of one of the shared casts.
ffi::Error check_places(size_t leaves, int32_t shared_casts, ffi::Span<const int32_t> shared_cast,
                        ffi::Span<const int32_t> first_column) {
  if (shared_cast.size() != leaves || first_column.size() != leaves) {
    return wrong_attribute("shared_cast and first_column must have a number per leaf, " + std::to_string(leaves) +
                           ", got " + std::to_string(shared_cast.size()) + " and " +
                           std::to_string(first_column.size()));
  }
  for (size_t i = 0; i < leaves; ++i) {
    if (shared_cast[i] < kUnshared || shared_cast[i] >= shared_casts) {
      return wrong_attribute("shared_cast must be -1 or the number of one of the call's " +
                             std::to_string(shared_casts) + " shared casts, got " + std::to_string(shared_cast[i]));
    }
    if (shared_cast[i] == kUnshared && first_column[i] != 0) {
      return wrong_attribute("first_column must be 0 for a leaf without a shared cast, got " +
                             std::to_string(first_column[i]));
    }
  }
  return ffi::Error::Success();
}

// Operands and results must be as many as `layout` and the number of shared casts say. Only then does a position in
// these lists say which array it is.
ffi::Error check_lengths(ffi::Span<const int32_t> layout, size_t shared_arrays, ffi::RemainingArgs operands,
                         ffi::RemainingRets results) {
  size_t operand_count = shared_arrays, result_count = operand_count;
  for (int32_t leaf : layout) operand_count += operands_of(leaf), result_count += results_of(leaf);
  if (operands.size() == operand_count && results.size() == result_count) return ffi::Error::Success();
  const auto text = [](size_t operands, size_t results) {
    return std::to_string(kSharedOperands + operands) + " operands and " + std::to_string(results) + " results";
  };
  return ffi::Error::InvalidArgument(std::string(kOperation) + ": the call must have the arrays of its layout, " +
                                     text(operand_count, result_count) + ", got " +
                                     text(operands.size(), results.size()));
}

ffi::Error adam(cudaStream_t stream, ffi::AnyBuffer scalars, ffi::AnyBuffer scales, ffi::AnyBuffer seed,
                ffi::AnyBuffer places, ffi::RemainingArgs operands, ffi::RemainingRets results,
                ffi::Span<const int32_t> layout, int32_t shared_casts, ffi::Span<const int32_t> shared_cast,
                ffi::Span<const int32_t> first_column, int32_t first_leaf, bool adam_w_mode, bool by_tile,
                int32_t margin, float amax_epsilon, bool power_2_scale) {
  if (ffi::Error wrong = check_numbers(layout, shared_casts, first_leaf); wrong.failure()) return wrong;
  const size_t shared_arrays = shared_cast_arrays(by_tile) * static_cast<size_t>(shared_casts);
  if (ffi::Error wrong = check_lengths(layout, shared_arrays, operands, results); wrong.failure()) return wrong;
  if (ffi::Error wrong = check_places(layout.size(), shared_casts, shared_cast, first_column); wrong.failure()) {
    return wrong;
  }
  const auto leaf_count = static_cast<int64_t>(layout.size());
  Checks checks(kOperation);
  checks.margin(margin).not_negative("amax_epsilon", amax_epsilon).dtype("scalars", scalars, {ffi::F32})
      .shape("scalars", scalars, {kAdamScalars})
      .dtype("scales", scales, {ffi::F32})
      .shape("scales", scales, {leaf_count, kAdamScales})
      .dtype("seed", seed, {ffi::U32})
      .shape("seed", seed, {})
      .dtype("places", places, {ffi::U32})
      .shape("places", places, {leaf_count, kPlaceWords});
  if (!checks.passed()) return checks.error();

  LeafReader reader(operands, results, by_tile);
  std::vector<AdamEntry> entries;
  entries.reserve(layout.size());
  for (int32_t i = 0; i < shared_casts; ++i) reader.read_shared_cast();
  if (!reader.passed()) return reader.error();
  reader.start_leaves();
  for (size_t i = 0; i < layout.size(); ++i) {
    entries.push_back(reader.read(layout[i], {shared_cast[i], first_column[i]}));
  }
  if (!reader.passed()) return reader.error();
  if (ffi::Error wrong = reader.check_columns(); wrong.failure()) return wrong;
  const AdamArguments arguments{
      .scalars = scalars.typed_data<float>(),
      .scales = scales.typed_data<float>(),
      .seed = seed.typed_data<uint32_t>(),
      .places = places.typed_data<uint32_t>(),
      .entries = entries.data(),
      .leaf_count = static_cast<int>(leaf_count),
      .first_leaf = first_leaf,
      .adam_w_mode = adam_w_mode,
      .tile_rule =
          {
              .square = true,
              .square_t = true,
              .margin = margin,
              .amax_epsilon = amax_epsilon,
              .power_2_scale = power_2_scale,
          },
  };
  return launch_result(kOperation, launch_adam(arguments, stream));
}

XLA_FFI_DEFINE_HANDLER(handler, adam,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // scalars
                           .Arg<ffi::AnyBuffer>()  // scales
                           .Arg<ffi::AnyBuffer>()  // seed
                           .Arg<ffi::AnyBuffer>()  // places
                           .RemainingArgs()  // of each shared cast; of each leaf: g, mu, nu and those of its layout
                           .RemainingRets()  // of each shared cast; of each leaf: the same without g
                           .Attr<ffi::Span<const int32_t>>("layout")
                           .Attr<int32_t>("shared_casts")                   // how many
                           .Attr<ffi::Span<const int32_t>>("shared_cast")   // of each leaf; -1: none
                           .Attr<ffi::Span<const int32_t>>("first_column")  // of each leaf in its shared cast
                           .Attr<int32_t>("first_leaf")                     // its number in the tree
                           .Attr<bool>("adam_w_mode")
                           .Attr<bool>("by_tile")  // whether shared casts have a scale for each square, by this rule:
                           .Attr<int32_t>("margin")
                           .Attr<float>("amax_epsilon")
                           .Attr<bool>("power_2_scale"),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

XLA_FFI_Handler* const adam_handler = handler;

}  // namespace jax_fp8
