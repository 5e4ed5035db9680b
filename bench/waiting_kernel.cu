// Which calls of the host wait for a kernel that waits for a peer (docs/experiments/0035).
//
//   nvcc -std=c++17 -O3 -arch=sm_90a bench/waiting_kernel.cu -lcublas -o waiting_kernel
//   ./waiting_kernel
//
// A kernel on all SMs of a GPU waits for a flag, for two seconds at most, while the host makes one
// call after the other, on the same GPU and on another one of the same process. A line of the table
// says how long a call took. A call that took two seconds waited for the kernel: if the flag were a
// peer's, and the peer's launch came after the call, the program would hang.
#if __has_include(<cublas_v2.h>)
#include <cublas_v2.h>
#define WITH_CUBLAS 1
#endif
#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#define CHECK(call)                                                       \
  do {                                                                    \
    const cudaError_t status = (call);                                    \
    if (status != cudaSuccess) {                                          \
      std::printf("line %d: %s\n", __LINE__, cudaGetErrorString(status)); \
      std::exit(1);                                                       \
    }                                                                     \
  } while (false)

namespace {

constexpr uint64_t kTimeoutNs = 2'000'000'000;

__global__ void Wait(volatile uint32_t* flag) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (*flag == 0 && now - start < kTimeoutNs);
}

// Each instance is loaded when it is launched for the first time.
template <int kNumber>
__global__ void Small(int* out) {
  if (out != nullptr) *out = kNumber;
}

double Seconds(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Call {
  const char* name;
  std::function<void()> make;
};

template <int kNumber>
std::vector<Call> Calls(cudaStream_t stream, char* memory, char* pinned) {
  static void* allocated = nullptr;
  static cudaGraph_t graph;
  static cudaGraphExec_t executable;
#ifdef WITH_CUBLAS
  static cublasHandle_t blas;
#endif
  return {
      {"cudaMalloc of 64 MiB", [] { CHECK(cudaMalloc(&allocated, 64 << 20)); }},
      {"cudaIpcGetMemHandle",
       [] {
         cudaIpcMemHandle_t handle;
         CHECK(cudaIpcGetMemHandle(&handle, allocated));
       }},
      {"cudaMemcpyAsync from pinned memory, and its stream's synchronisation",
       [=] {
         CHECK(cudaMemcpyAsync(memory, pinned, 1 << 20, cudaMemcpyHostToDevice, stream));
         CHECK(cudaStreamSynchronize(stream));
       }},
      {"cudaHostAlloc",
       [] {
         void* host;
         CHECK(cudaHostAlloc(&host, 1 << 20, cudaHostAllocMapped));
       }},
      {"first launch of a kernel (its module is loaded)",
       [=] {
         Small<kNumber><<<1, 1, 0, stream>>>(nullptr);
         CHECK(cudaGetLastError());
       }},
      {"capture of a graph",
       [=] {
         CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
         Small<kNumber + 1><<<1, 1, 0, stream>>>(nullptr);
         CHECK(cudaStreamEndCapture(stream, &graph));
       }},
      {"cudaGraphInstantiate", [] { CHECK(cudaGraphInstantiate(&executable, graph, 0)); }},
      {"cudaGraphLaunch", [=] { CHECK(cudaGraphLaunch(executable, stream)); }},
#ifdef WITH_CUBLAS
      {"cublasCreate, and the first cublasSgemm",
       [=] {
         cublasCreate(&blas);
         cublasSetStream(blas, stream);
         const float one = 1, zero = 0;
         auto* x = reinterpret_cast<float*>(memory);
         if (cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, 256, 256, 256, &one, x, 256, x, 256, &zero,
                         x + (1 << 18), 256) != CUBLAS_STATUS_SUCCESS) {
           std::printf("cublasSgemm failed\n");
         }
       }},
#endif
      {"cudaStreamCreate",
       [] {
         cudaStream_t other;
         CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
       }},
      {"cudaFree", [] { CHECK(cudaFree(allocated)); }},
  };
}

// The table of calls on `on` while a kernel waits on GPU `waits`.
template <int kNumber>
void Try(int waits, int on) {
  std::printf("\nThe kernel waits on GPU %d, the calls are for GPU %d\n", waits, on);
  uint32_t* flag = nullptr;
  CHECK(cudaHostAlloc(reinterpret_cast<void**>(&flag), sizeof(*flag),
                      cudaHostAllocMapped | cudaHostAllocPortable));
  char* pinned = nullptr;
  CHECK(cudaHostAlloc(reinterpret_cast<void**>(&pinned), 1 << 20, cudaHostAllocPortable));
  CHECK(cudaSetDevice(on));
  cudaStream_t stream;
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  char* memory = nullptr;
  CHECK(cudaMalloc(&memory, 4 << 20));
  CHECK(cudaSetDevice(waits));
  cudaStream_t waiting;
  CHECK(cudaStreamCreateWithFlags(&waiting, cudaStreamNonBlocking));
  cudaFuncAttributes attributes;
  CHECK(cudaFuncGetAttributes(&attributes, Wait));
  int sms = 0;
  CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, waits));
  for (const Call& call : Calls<kNumber>(stream, memory, pinned)) {
    *flag = 0;
    CHECK(cudaSetDevice(waits));
    Wait<<<2 * sms, 1024, 0, waiting>>>(flag);
    CHECK(cudaGetLastError());
    CHECK(cudaSetDevice(on));
    const double took = Seconds(call.make);
    *reinterpret_cast<volatile uint32_t*>(flag) = 1;
    CHECK(cudaSetDevice(waits));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaSetDevice(on));
    CHECK(cudaDeviceSynchronize());
    std::printf("  %8.3f ms  %s%s\n", took * 1e3, call.name, took > 1.9 ? "   WAITED" : "");
    std::fflush(stdout);
  }
}

}  // namespace

int main() {
  int count = 0;
  CHECK(cudaGetDeviceCount(&count));
  for (int device = 0; device < count; ++device) {
    CHECK(cudaSetDevice(device));
    CHECK(cudaFree(nullptr));
  }
  for (int device = 0; count > 1 && device < 2; ++device) {
    CHECK(cudaSetDevice(device));
    CHECK(cudaDeviceEnablePeerAccess(1 - device, 0));
  }
  Try<0>(0, 0);
  if (count > 1) Try<10>(0, 1);
  return 0;
}
