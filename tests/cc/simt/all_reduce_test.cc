// The kernels of all_reduce in the simulator: each algorithm, normalised rows by clusters; several
// calls one after the other on one workspace, late ranks.
#include "ops/all_reduce/all_reduce.h"

#include <memory>
#include <vector>

#include "all_reduce_call.h"
#include "simt/device_calls.h"
#include "testing.h"

namespace jflux {
namespace {

template <typename Base>
class DeviceCall : public Base {
 public:
  using Base::Base;
  bool Launch(const CudaDevice& device, const SymmetricView& view, std::string* error) {
    return LoadAllReduceKernels(error) && LaunchAllReduce(this->p_, this->ArraysOf(view.rank),
                                                          /*site=*/0, device, view, nullptr, error);
  }
};

template <typename Make>
int64_t Run(const AllReduceParams& p, const TestHooks& hooks, uint32_t seed, const Make& make) {
  simt::DeviceHeap heap = p.algorithm == AllReduceAlgorithm::kChunked
                              ? simt::DeviceHeap(p.world, p.Chunks().Workspace(), hooks)
                              : simt::DeviceHeap(p.world, p.Workspace(), hooks);
  return simt::WrongOnDevices(heap, p.world, seed, make);
}

int64_t RunSums(const AllReduceParams& p, const TestHooks& hooks, uint32_t seed) {
  return Run(p, hooks, seed,
             [&](uint32_t of) { return std::make_unique<DeviceCall<AllReduceCall>>(p, of); });
}

TEST(Sums) {
  simt::SetSmCount(2);
  uint32_t seed = 1;
  for (int algorithm = 0; algorithm < kAllReduceAlgorithms; ++algorithm) {
    for (int world : simt::kWorlds) {
      for (DType dtype : {DType::kBF16, DType::kF32}) {
        const auto a = static_cast<AllReduceAlgorithm>(algorithm);
        const int64_t count = a == AllReduceAlgorithm::kChunked ? 7001 : 1001;
        const AllReduceParams p{world, count, dtype, a, /*residual=*/world == 3};
        for (int schedule = 0; schedule < simt::Schedules(1); ++schedule, ++seed) {
          EXPECT_EQ(RunSums(p, {0, seed % 2 == 0 ? 50u : 0u}, seed), 0)
              << "world " << world << " algorithm " << algorithm << " seed " << seed;
        }
      }
    }
  }
}

TEST(QuantisedWire) {
  simt::SetSmCount(2);
  uint32_t seed = 1;
  for (int world : simt::kWorlds) {
    for (DType wire : {DType::kF8E4M3FN, DType::kS8}) {
      for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
        AllReduceParams p{world, world == 2 ? 5001 : 300, dtype, AllReduceAlgorithm::kChunked,
                          /*residual=*/seed % 2 == 0};
        p.has_wire = true;
        p.wire = wire;
        for (int schedule = 0; schedule < simt::Schedules(1); ++schedule, ++seed) {
          simt::DeviceHeap heap(world, p.WireChunks().Workspace(), {0, seed % 2 == 0 ? 50u : 0u});
          const int64_t wrong = simt::WrongOnDevices(heap, world, seed, [&](uint32_t of) {
            return std::make_unique<DeviceCall<WireCall>>(p, of, of % 2 == 0 ? 130 : -1);
          });
          EXPECT_EQ(wrong, 0) << "world " << world << " seed " << seed;
        }
      }
    }
  }
}

// Few rows: a cluster of eight CTAs for each; more rows: of two.
TEST(RowsAreNormalised) {
  uint32_t seed = 1;
  for (int64_t rows : {1, 9}) {
    for (int world : {2, 3, 8}) {
      for (auto a : {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kTwoShot}) {
        simt::SetSmCount(8);
        AllReduceParams p{world, rows * 120, seed % 2 == 0 ? DType::kBF16 : DType::kF32, a};
        p.residual = seed % 4 < 2;
        p.norm = seed % 2 == 0 ? Norm::kRms : Norm::kLayer;
        p.width = 120;
        p.epsilon = 0.01;
        for (int schedule = 0; schedule < simt::Schedules(1); ++schedule, ++seed) {
          const int64_t wrong = Run(p, {0, seed % 2 == 0 ? 50u : 0u}, seed, [&](uint32_t of) {
            return std::make_unique<DeviceCall<NormCall>>(p, /*wide_scale=*/of % 3 == 1,
                                                          /*bias=*/seed % 2 == 1, of);
          });
          EXPECT_EQ(wrong, 0) << "rows " << rows << " world " << world << " seed " << seed;
        }
      }
    }
  }
}

// By clusters of eight CTAs and of two, of which some have no unit of a row; rows end in a partial
// block.
TEST(RowsAreQuantised) {
  uint32_t seed = 1;
  for (int64_t rows : {1, 9}) {
    for (DType values : {DType::kF8E4M3FN, DType::kF8E5M2, DType::kS8}) {
      for (int32_t block : {-1, kQuantizedBlock}) {
        simt::SetSmCount(8);
        const int64_t width = 296;
        const auto a = seed % 2 == 0 ? AllReduceAlgorithm::kOneShot : AllReduceAlgorithm::kTwoShot;
        AllReduceParams p{2, rows * width, seed % 3 == 0 ? DType::kF16 : DType::kBF16, a};
        p.norm = seed % 4 < 2 ? Norm::kRms : Norm::kLayer;
        p.width = width;
        p.epsilon = 0.01;
        QuantizedRows quantized;
        quantized.values = values;
        quantized.block = block;
        quantized.power_of_two = seed % 4 == 0;
        for (int schedule = 0; schedule < simt::Schedules(1); ++schedule, ++seed) {
          const int64_t wrong = Run(p, {0, seed % 2 == 0 ? 50u : 0u}, seed, [&](uint32_t of) {
            return std::make_unique<DeviceCall<NormCall>>(p, /*wide_scale=*/true, /*bias=*/false,
                                                          of, &quantized);
          });
          EXPECT_EQ(wrong, 0) << "rows " << rows << " block " << block << " seed " << seed;
        }
      }
    }
  }
}

TEST(MissingWaitsAreFound) {
  simt::SetSmCount(2);
  for (auto a : {AllReduceAlgorithm::kOneShot, AllReduceAlgorithm::kChunked}) {
    const AllReduceParams p{3, 3001, DType::kF32, a};
    EXPECT(RunSums(p, {/*skip_waits=*/1, 50}, 1) > 0);
  }
}

}  // namespace
}  // namespace jflux

int main() { return jflux::RunAll(); }
