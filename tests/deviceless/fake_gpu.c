// A GPU that computes nothing, for PyTorch's CUDA build on a machine without a GPU. Here are its
// memory, its device, its kernels and its matmuls. answers.c has a line for each of the other calls
// that answer something, and fake_gpu.py generates those that only succeed.
//
// The library is preloaded, so that PyTorch's calls of CUDA end here; it is also found by the names
// of the driver and of NVML. Kernels, matmuls and collectives do not run: they are counted. Device
// memory is a range of addresses, so that allocators see the sizes of a real device. It holds
// zeros: copies from it bring them, and nothing is ever written there.

#define _GNU_SOURCE
#include <cublasLt.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <nccl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

// Settings: environment variables, read at each use, as a process may fork before they are set.

static double number_setting(const char *name, double otherwise) {
    const char *text = getenv(name);
    return text ? atof(text) : otherwise;
}

const char *fake_device_name(void) {
    const char *name = getenv("FAKE_GPU_NAME");
    return name ? name : "NVIDIA H100 80GB HBM3";
}

static size_t device_bytes(void) { return number_setting("FAKE_GPU_GIB", 79.1) * (1ul << 30); }

static int capability_major(void) { return number_setting("FAKE_GPU_MAJOR", 9); }

int fake_device_count(void) { return number_setting("FAKE_GPU_COUNT", 1); }

// Counters: a table in a file of the folder FAKE_GPU_COUNTS, one file a process. The file is
// mapped, so that the counts outlive the process however it ends.

enum { COUNTERS = 4096 };

typedef struct {
    uint64_t n;
    char name[248];
} Counter;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Counter *counters;
static pid_t counted_process;

static void open_counters(const char *folder) {
    const char *rank = getenv("RANK");
    char path[4096];
    snprintf(path, sizeof path, "%s/rank%s-%d", folder, rank ? rank : "", getpid());
    int file = open(path, O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, COUNTERS * sizeof(Counter))) {
        perror(path);
        abort();
    }
    counters = mmap(NULL, COUNTERS * sizeof(Counter), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    counted_process = getpid();
}

void fake_count(const char *format, ...) {
    const char *folder = getenv("FAKE_GPU_COUNTS");
    if (!folder) return;

    char name[sizeof counters->name];
    va_list words;
    va_start(words, format);
    vsnprintf(name, sizeof name, format, words);
    va_end(words);

    uint64_t hash = 5381;
    for (const char *c = name; *c; c++) hash = hash * 33 + (unsigned char)*c;

    pthread_mutex_lock(&lock);
    if (counted_process != getpid()) open_counters(folder);  // also after a fork
    for (int probes = 0; probes < COUNTERS; probes++) {
        Counter *counter = &counters[(hash + probes) % COUNTERS];
        if (!counter->n) strcpy(counter->name, name);
        if (strcmp(counter->name, name)) continue;
        counter->n++;
        break;
    }
    pthread_mutex_unlock(&lock);
}

// Memory. An arena hands out addresses in steps of 2 MiB, as the driver does, and none twice.

enum { GRANULE = 2 << 20 };
#define ARENA_BYTES (16ul << 40)

typedef struct {
    char *base;
    size_t used;
    size_t held;
    size_t sizes[ARENA_BYTES / GRANULE];
} Arena;

static Arena device, pinned;

static void *reserve(Arena *arena, size_t bytes) {
    pthread_mutex_lock(&lock);
    if (!arena->base) {
        int access = arena == &pinned ? PROT_READ | PROT_WRITE : PROT_NONE;
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        arena->base = mmap(NULL, ARENA_BYTES, access, flags, -1, 0);
    }
    size_t start = arena->used;
    arena->used += (bytes + GRANULE - 1) / GRANULE * GRANULE;
    if (arena->base == MAP_FAILED || arena->used > ARENA_BYTES) abort();
    arena->sizes[start / GRANULE] = bytes;
    pthread_mutex_unlock(&lock);
    return arena->base + start;
}

// Whether so many bytes more, or less, are within the limit; if so the arena holds them.
static int hold(Arena *arena, int64_t bytes, size_t limit) {
    pthread_mutex_lock(&lock);
    int fits = arena->held + bytes <= limit;
    if (fits) arena->held += bytes;
    pthread_mutex_unlock(&lock);
    return fits;
}

static int allocate(Arena *arena, void **start, size_t bytes, size_t limit) {
    int fits = hold(arena, bytes, limit);
    *start = fits ? reserve(arena, bytes) : NULL;
    return fits ? cudaSuccess : cudaErrorMemoryAllocation;
}

static void release(Arena *arena, char *start) {
    if (!start) return;
    size_t bytes = arena->sizes[(start - arena->base) / GRANULE];
    madvise(start, bytes, MADV_DONTNEED);
    hold(arena, -(int64_t)bytes, ARENA_BYTES);
}

static int holds(const Arena *arena, const char *p) {
    return arena->base && p >= arena->base && p < arena->base + ARENA_BYTES;
}

int fake_malloc(void **start, size_t bytes) {
    return allocate(&device, start, bytes, device_bytes());
}

void fake_free(void *start) { release(&device, start); }

int fake_pinned_malloc(void **start, size_t bytes) {
    return allocate(&pinned, start, bytes, ARENA_BYTES);
}

void fake_pinned_free(void *start) { release(&pinned, start); }

cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
    *total = device_bytes();
    *left = *total - device.held;
    return cudaSuccess;
}

// Memory of the process that is pinned afterwards.

enum { REGIONS = 4096 };
static struct { char *start; size_t bytes; } regions[REGIONS];

cudaError_t cudaHostRegister(void *start, size_t bytes, unsigned flags) {
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < REGIONS - 1 && regions[i].start) i++;
    regions[i].start = start;
    regions[i].bytes = bytes;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *start) {
    for (int i = 0; i < REGIONS; i++)
        if (regions[i].start == start) regions[i].start = NULL;
    return cudaSuccess;
}

static int is_pinned(const char *p) {
    for (int i = 0; i < REGIONS; i++) {
        char *start = regions[i].start;
        if (start && p >= start && p < start + regions[i].bytes) return 1;
    }
    return holds(&pinned, p);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *p) {
    memset(found, 0, sizeof *found);
    cudaGetDevice(&found->device);
    if (holds(&device, p)) {
        found->type = cudaMemoryTypeDevice;
        found->devicePointer = (void *)p;
    } else {
        int known = is_pinned(p);
        found->type = known ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
        found->devicePointer = known ? (void *)p : NULL;
        found->hostPointer = (void *)p;
    }
    return cudaSuccess;
}

CUresult cuPointerGetAttribute(void *found, CUpointer_attribute attribute, CUdeviceptr p) {
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *(CUdeviceptr *)found = p;
    else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)found = holds(&device, (char *)p) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    else
        *(int *)found = 0;
    return CUDA_SUCCESS;
}

// Memory as PyTorch's expandable segments take it: addresses, and handles for what lies behind
// them. A handle is the number of its bytes.

CUresult cuMemAddressReserve(CUdeviceptr *start, size_t bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
    *start = (CUdeviceptr)reserve(&device, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes,
                     const CUmemAllocationProp *kind, unsigned long long flags) {
    *handle = bytes;
    return hold(&device, bytes, device_bytes()) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    hold(&device, -(int64_t)handle, ARENA_BYTES);
    return CUDA_SUCCESS;
}

static const char *place(const void *p) {
    return holds(&device, p) ? "device" : is_pinned(p) ? "pinned" : "pageable";
}

void fake_copy(void *to, const void *from, size_t bytes) {
    fake_count("copy from %s to %s", place(from), place(to));
    if (holds(&device, to)) return;
    if (holds(&device, from))
        memset(to, 0, bytes);
    else
        memmove(to, from, bytes);
}

// The device: what an H100 SXM says of itself, but for the settings. It lacks what is not listed.

enum { MAX_SHARED_BYTES = 232448 };

static const int attributes[CU_DEVICE_ATTRIBUTE_MAX] = {
    [CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT] = 132,
    [CU_DEVICE_ATTRIBUTE_WARP_SIZE] = 32,
    [CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024,
    [CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR] = 2048,
    [CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK] = 65536,
    [CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR] = 65536,
    [CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK] = 49152,
    [CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN] = MAX_SHARED_BYTES,
    [CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR] = MAX_SHARED_BYTES + 1024,
    [CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X] = INT32_MAX,
    [CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y] = 65535,
    [CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z] = 65535,
    [CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE] = 52428800,
    [CU_DEVICE_ATTRIBUTE_CLOCK_RATE] = 1980000,
    [CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE] = 2619000,
    [CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH] = 5120,
    [CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING] = 1,
    [CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH] = 1,
    [CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED] = 1,
};

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice number) {
    int major = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR;
    *value = major ? capability_major() : attributes[attribute];
    return CUDA_SUCCESS;
}

// The runtime's attributes have the driver's numbers.
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int number) {
    return (cudaError_t)cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, number);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int number) {
    memset(found, 0, sizeof *found);
    snprintf(found->name, sizeof found->name, "%s", fake_device_name());
    found->totalGlobalMem = device_bytes();
    found->major = capability_major();
    found->pciBusID = number + 1;
    found->unifiedAddressing = found->cooperativeLaunch = found->concurrentKernels = 1;

    const struct { int *field, attribute; } fields[] = {
        {&found->multiProcessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT},
        {&found->warpSize, CU_DEVICE_ATTRIBUTE_WARP_SIZE},
        {&found->maxThreadsPerBlock, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK},
        {&found->maxThreadsPerMultiProcessor, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR},
        {&found->regsPerBlock, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK},
        {&found->regsPerMultiprocessor, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR},
        {&found->l2CacheSize, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE},
        {&found->memoryBusWidth, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH},
        {&found->maxGridSize[0], CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X},
        {&found->maxGridSize[1], CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y},
        {&found->maxGridSize[2], CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z},
        {&found->maxThreadsDim[0], CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK},
        {&found->maxThreadsDim[1], CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        *fields[i].field = attributes[fields[i].attribute];
    found->maxThreadsDim[2] = 64;

    found->sharedMemPerBlock = attributes[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK];
    found->sharedMemPerBlockOptin = MAX_SHARED_BYTES;
    found->sharedMemPerMultiprocessor = MAX_SHARED_BYTES + 1024;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int number) {
    snprintf(id, length, "0000:%02x:00.0", number + 1);
    return cudaSuccess;
}

static __thread int current_device;

cudaError_t cudaGetDevice(int *number) {
    *number = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int number) {
    if (number >= fake_device_count()) return cudaErrorInvalidDevice;
    current_device = number;
    return cudaSuccess;
}

static int set(int *version, int value) {
    *version = value;
    return 0;
}

cudaError_t cudaDriverGetVersion(int *version) { return set(version, CUDA_VERSION); }

CUresult cuDriverGetVersion(int *version) { return set(version, CUDA_VERSION); }

cudaError_t cudaRuntimeGetVersion(int *version) { return set(version, CUDART_VERSION); }

ncclResult_t ncclGetVersion(int *version) { return set(version, NCCL_VERSION_CODE); }

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found) {
    *function = dlsym(RTLD_DEFAULT, name);
    *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return *function ? cudaSuccess : cudaErrorSymbolNotFound;
}

// An event is the host's time when it was recorded: work is done when the call returns.
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t began, cudaEvent_t ended) {
    const struct timespec *a = (struct timespec *)began, *b = (struct timespec *)ended;
    *milliseconds = 1e3 * (b->tv_sec - a->tv_sec) + 1e-6 * (b->tv_nsec - a->tv_nsec);
    return cudaSuccess;
}

// Kernels: a library registers each of its own, when it is loaded, by the address of a function.

enum { KERNELS = 1 << 19 };
static struct { const void *function; const char *name; } kernels[KERNELS];

static size_t kernel_slot(const void *function) {
    size_t slot = ((uintptr_t)function >> 4) % KERNELS;
    while (kernels[slot].function && kernels[slot].function != function)
        slot = (slot + 1) % KERNELS;
    return slot;
}

void __cudaRegisterFunction(void **binary, const char *function, char *device_function,
                            const char *name) {
    size_t slot = kernel_slot(function);
    kernels[slot].function = function;
    kernels[slot].name = name;
}

void fake_launch(const void *function) {
    const char *name = kernels[kernel_slot(function)].name;
    fake_count("kernel %s", name ? name : "unknown");
}

// `kernel<<<...>>>(...)` pushes the shape of the launch, and pops it where the arguments are known.
static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *stream = pushed.stream;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = attributes[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK];
    found->maxDynamicSharedSizeBytes = MAX_SHARED_BYTES;
    found->numRegs = 64;
    found->ptxVersion = found->binaryVersion = 10 * capability_major();
    return cudaSuccess;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    int threads = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
    *value = threads ? attributes[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK] : 0;
    return CUDA_SUCCESS;
}

// Matmuls are counted with their types, those in float8 with how many elements share a scale.

static const char *type_name(cudaDataType type) {
    switch (type) {
    case CUDA_R_32F: return "float32";
    case CUDA_R_16BF: return "bfloat16";
    case CUDA_R_8F_E4M3: return "e4m3";
    case CUDA_R_8F_E5M2: return "e5m2";
    default: return "other";
    }
}

static const char *scale_name(int mode) {
    switch (mode) {
    case CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F: return "tensor";
    case CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F: return "row";
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0: return "32";
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F: return "128";
    case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F: return "128x128";
    default: return "other";
    }
}

static cublasStatus_t count_matmul(cudaDataType a, cudaDataType b) {
    fake_count("matmul %s x %s", type_name(a), type_name(b));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t a_op, cublasOperation_t b_op,
                            int m, int n, int k, const void *alpha, const void *a,
                            cudaDataType a_type, int a_stride, const void *b, cudaDataType b_type,
                            int b_stride, const void *beta, void *c, cudaDataType c_type,
                            int c_stride, cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
    return count_matmul(a_type, b_type);
}

typedef struct { int a_scale, b_scale; } Matmul;

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *matmul, cublasComputeType_t compute,
                                        cudaDataType scale) {
    *matmul = calloc(1, sizeof(Matmul));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t matmul,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes) {
    Matmul *kept = (Matmul *)matmul;
    if (attribute == CUBLASLT_MATMUL_DESC_A_SCALE_MODE) kept->a_scale = *(int *)value;
    if (attribute == CUBLASLT_MATMUL_DESC_B_SCALE_MODE) kept->b_scale = *(int *)value;
    return CUBLAS_STATUS_SUCCESS;
}

// Of a matrix's layout the type is kept.
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t stride) {
    cudaDataType *kept = malloc(sizeof type);
    *kept = type;
    *layout = (cublasLtMatrixLayout_t)kept;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t matmul, cublasLtMatrixLayout_t a,
    cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
    cublasLtMatmulPreference_t preference, int wanted, cublasLtMatmulHeuristicResult_t *found,
    int *n) {
    memset(found, 0, sizeof *found);
    *n = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(
    cublasLtHandle_t handle, cublasLtMatmulDesc_t matmul, const void *alpha, const void *a,
    cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout,
    const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *d,
    cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algorithm, void *workspace,
    size_t workspace_bytes, cudaStream_t stream) {
    cudaDataType a_type = *(cudaDataType *)a_layout, b_type = *(cudaDataType *)b_layout;
    if (a_type != CUDA_R_8F_E4M3 && a_type != CUDA_R_8F_E5M2) return count_matmul(a_type, b_type);
    const Matmul *kept = (Matmul *)matmul;
    fake_count("matmul %s x %s, scales: %s, %s", type_name(a_type), type_name(b_type),
               scale_name(kept->a_scale), scale_name(kept->b_scale));
    return CUBLAS_STATUS_SUCCESS;
}
