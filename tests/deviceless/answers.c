// What calls answer, a line each. Their first six arguments are a to f: CUDA's headers, which have
// the real signatures, are not included here. Success is 0.

#define _GNU_SOURCE
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int cudaGetDevice(int *number);
int fake_device_count(void);
int fake_malloc(void **start, size_t bytes);
int fake_pinned_malloc(void **start, size_t bytes);
const char *fake_device_name(void);
void fake_count(const char *format, ...);
void fake_copy(void *to, const void *from, size_t bytes);
void fake_free(void *start);
void fake_launch(const void *function);
void fake_pinned_free(void *start);

#define ANSWER(function, statement)                                              \
    long function(void *a, void *b, void *c, void *d, void *e, void *f) {        \
        statement;                                                               \
        return 0;                                                                \
    }
#define INT(argument) *(int *)argument
#define HANDLE(argument) *(void **)argument
#define TEXT(text) return (long)text

enum { NVML_UNSUPPORTED = 3, NOT_FOUND = 500, UNSUPPORTED = 801, CUDNN_UNSUPPORTED = 3000 };
static char context[8];

// Collectives are counted with the bytes of `count` elements: each rank's part of what is gathered
// or scattered, and all of what is reduced or sent. NCCL numbers its types.
static void count_collective(const char *name, size_t count, int type) {
    static const char bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    fake_count("nccl %s of %zu bytes", name, count * bytes[type]);
}

// Memory.
ANSWER(cudaMalloc, return fake_malloc(a, (size_t)b))
ANSWER(cudaMallocAsync, return fake_malloc(a, (size_t)b))
ANSWER(ncclMemAlloc, return fake_malloc(a, (size_t)b))
ANSWER(cudaGetSymbolAddress, return fake_malloc(a, 1 << 20))
ANSWER(cudaHostAlloc, return fake_pinned_malloc(a, (size_t)b))
ANSWER(cuMemUnmap, fake_count("wait for cuMemUnmap"))
ANSWER(cudaFree, fake_count("wait for cudaFree"); fake_free(a))
ANSWER(cudaFreeAsync, fake_free(a))
ANSWER(cudaFreeHost, fake_pinned_free(a))
ANSWER(cudaMemcpy, fake_count("wait for cudaMemcpy"); fake_copy(a, b, (size_t)c))
ANSWER(cudaMemcpyAsync, fake_copy(a, b, (size_t)c))
ANSWER(cudaMemcpyPeerAsync, fake_copy(a, c, (size_t)e))
ANSWER(cudaMemsetAsync, fake_count("set memory"))
ANSWER(cudaMemPoolGetAttribute, *(long *)c = 0)
ANSWER(cuMemGetAllocationGranularity, *(size_t *)a = 2 << 20)
ANSWER(cudaIpcGetMemHandle, return UNSUPPORTED)  // no process can open another's memory

// The device.
ANSWER(cudaGetDeviceCount, INT(a) = fake_device_count())
ANSWER(cuDeviceGetCount, INT(a) = fake_device_count())
ANSWER(cuDeviceGet, INT(a) = (int)(long)b)
ANSWER(cuDeviceGetName, snprintf(a, (int)(long)b, "%s", fake_device_name()))
ANSWER(cudaDeviceCanAccessPeer, INT(a) = 1)
ANSWER(cuDevicePrimaryCtxGetState, INT(b) = 0; INT(c) = 1)
ANSWER(cuDevicePrimaryCtxRetain, HANDLE(a) = context)
ANSWER(cuCtxGetCurrent, HANDLE(a) = context)
ANSWER(cuCtxGetDevice, return cudaGetDevice(a))
ANSWER(cuGetExportTable, return NOT_FOUND)  // what has a runtime of its own finds no device
ANSWER(cudaGetErrorName, TEXT("fake CUDA error"))
ANSWER(cudaGetErrorString, TEXT(((long)a == 2 ? "out of memory" : "fake CUDA error")))
ANSWER(cuGetErrorString, HANDLE(b) = "fake CUDA driver error")

// Streams and events.
ANSWER(cudaStreamCreate, HANDLE(a) = malloc(1))
ANSWER(cudaStreamCreateWithFlags, HANDLE(a) = malloc(1))
ANSWER(cudaStreamCreateWithPriority, HANDLE(a) = malloc(1))
ANSWER(cudaStreamDestroy, free(a))
ANSWER(cudaStreamGetPriority, INT(b) = 0)
ANSWER(cudaDeviceGetStreamPriorityRange, INT(a) = 0; INT(b) = -5)
ANSWER(cudaStreamIsCapturing, INT(b) = 0)
ANSWER(cudaStreamGetCaptureInfo, INT(b) = 0; if (c) *(long *)c = 0)
ANSWER(cudaEventCreate, HANDLE(a) = calloc(1, 16))
ANSWER(cudaEventCreateWithFlags, HANDLE(a) = calloc(1, 16))
ANSWER(cudaEventDestroy, free(a))
ANSWER(cudaEventRecord, clock_gettime(CLOCK_MONOTONIC, a))
ANSWER(cudaEventRecordWithFlags, clock_gettime(CLOCK_MONOTONIC, a))
ANSWER(cudaLaunchHostFunc, ((void (*)(void *))b)(c))
ANSWER(cudaStreamAddCallback, ((void (*)(void *, int, void *))b)(a, 0, c))
ANSWER(cudaStreamSynchronize, fake_count("wait for a stream"))
ANSWER(cudaDeviceSynchronize, fake_count("wait for the device"))
ANSWER(cudaEventSynchronize, fake_count("wait for an event"))

// Kernels, first of the runtime, then Triton's by the driver, where a function is its name.
ANSWER(__cudaRegisterFatBinary, return (long)malloc(8))
ANSWER(__cudaGetKernel, HANDLE(a) = b)
ANSWER(__cudaLaunchKernel, fake_launch(a))
ANSWER(cudaLaunchKernel, fake_launch(a))
ANSWER(cudaLaunchKernelExC, fake_launch(b))
ANSWER(cudaLaunchCooperativeKernel, fake_launch(a))
ANSWER(cudaOccupancyMaxActiveBlocksPerMultiprocessor, INT(a) = 2)
ANSWER(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, INT(a) = 2)
ANSWER(cuOccupancyMaxActiveBlocksPerMultiprocessor, INT(a) = 2)
ANSWER(cuOccupancyMaxActiveClusters, INT(a) = 66)
ANSWER(cuModuleLoad, HANDLE(a) = malloc(1))
ANSWER(cuModuleLoadData, HANDLE(a) = malloc(1))
ANSWER(cuModuleGetFunction, HANDLE(a) = strdup((char *)c))
ANSWER(cuLaunchKernel, fake_count("kernel %s", a))
ANSWER(cuLaunchCooperativeKernel, fake_count("kernel %s", a))
ANSWER(cuLaunchKernelEx, fake_count("kernel %s", b))

// cuBLAS, cuBLASLt; cuDNN, which refuses every graph, as its engines ask the device: PyTorch takes
// other kernels.
ANSWER(cublasCreate_v2, HANDLE(a) = malloc(1))
ANSWER(cublasGetMathMode, INT(b) = 0)
ANSWER(cublasGetPointerMode_v2, INT(b) = 0)
ANSWER(cublasSgemm_v2, fake_count("matmul float32 x float32"))
ANSWER(cublasLtMatmulDescDestroy, free(a))
ANSWER(cublasLtMatrixLayoutDestroy, free(a))
ANSWER(cublasLtMatmulPreferenceCreate, HANDLE(a) = malloc(1))
ANSWER(cublasLtMatmulPreferenceDestroy, free(a))
ANSWER(cudnnCreate, HANDLE(a) = malloc(1))
ANSWER(cudnnBackendCreateDescriptor, return CUDNN_UNSUPPORTED)

// NCCL.
ANSWER(ncclGetUniqueId, memset(a, 1, 128))
ANSWER(ncclGetErrorString, TEXT("fake NCCL error"))
ANSWER(ncclGetLastError, TEXT(""))
ANSWER(ncclCommInitRankConfig, HANDLE(a) = malloc(1))
ANSWER(ncclCommSplit, HANDLE(d) = malloc(1))
ANSWER(ncclCommGetAsyncError, INT(b) = 0)
ANSWER(ncclAllReduce, count_collective("all-reduce", (size_t)c, (int)(long)d))
ANSWER(ncclAllGather, count_collective("all-gather", (size_t)c, (int)(long)d))
ANSWER(ncclReduceScatter, count_collective("reduce-scatter", (size_t)c, (int)(long)d))
ANSWER(ncclBroadcast, count_collective("broadcast", (size_t)c, (int)(long)d))
ANSWER(ncclSend, count_collective("send", (size_t)b, (int)(long)c))
ANSWER(ncclRecv, count_collective("receive", (size_t)b, (int)(long)c))

// NVML.
ANSWER(nvmlInit, return 0)
ANSWER(nvmlInit_v2, return 0)
ANSWER(nvmlShutdown, return 0)
ANSWER(nvmlErrorString, TEXT("fake NVML error"))
ANSWER(nvmlDeviceGetCount_v2, INT(a) = fake_device_count())
ANSWER(nvmlDeviceGetHandleByIndex_v2, HANDLE(b) = context)
ANSWER(nvmlDeviceGetHandleByPciBusId_v2, HANDLE(b) = context)
ANSWER(nvmlDeviceGetHandleByUUID, return NVML_UNSUPPORTED)
ANSWER(nvmlDeviceGetUUID, return NVML_UNSUPPORTED)
ANSWER(nvmlDeviceGetP2PStatus, INT(d) = 0)
ANSWER(nvmlDeviceGetGpuFabricInfoV, return 0)
ANSWER(nvmlDeviceGetNvLinkRemoteDeviceType, return NVML_UNSUPPORTED)
ANSWER(nvmlDeviceGetNvLinkRemotePciInfo_v2, return NVML_UNSUPPORTED)
ANSWER(nvmlDeviceGetComputeRunningProcesses, INT(b) = 0)
ANSWER(nvmlSystemGetCudaDriverVersion_v2, INT(a) = 13000)
